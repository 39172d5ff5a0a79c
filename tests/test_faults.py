"""Which GPU is sick, and why: readings and events as values."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from rte.discovery.fault_file import (
    FaultFileError,
    fault_text,
    read_fault_file,
    write_fault_file,
)
from rte.discovery.faults import (
    APPLICATION_XIDS,
    FaultMemory,
    FaultRules,
    faults,
    next_end_s,
    parse_fault_rules,
    with_event,
    with_reading,
    with_reset,
)
from rte.discovery.injection import Injection
from rte.discovery.reading import GpuReading, NvmlEvent, NvmlReading
from rte.discovery.sysfs import Host
from rte.model import (
    Fabric,
    FabricState,
    FaultClass,
    Gpu,
    LinkPeer,
    Machine,
    NvLinkEnd,
    PciAddress,
    PciDevice,
)

A, B, C = (PciAddress(f"0000:{bus}:00.0") for bus in ("17", "65", "ca"))
WITHHOLD, DEGRADED, INFO = FaultClass.WITHHOLD, FaultClass.DEGRADED, FaultClass.INFO
RULES = FaultRules()


def gpu(address: PciAddress, *, lanes: int = 18, **rest: Any) -> Gpu:
    ends = (NvLinkEnd(peer=LinkPeer.SWITCH, lanes=lanes, lane_megabytes_per_s=25_000),)
    return Gpu(
        number=(A, B, C).index(address),
        pci=address,
        product="NVIDIA H100 80GB HBM3",
        links=ends if lanes else (),
        **rest,
    )


WELL = Machine(numa_nodes=(), gpus=(gpu(A), gpu(B), gpu(C)))


def machine(**first: Any) -> Machine:
    """The well machine, its first GPU changed."""
    return replace(WELL, gpus=(gpu(A, **first), *WELL.gpus[1:]))


def reading(*, driver: str = "580.95.05", **first: Any) -> NvmlReading:
    return NvmlReading(
        driver=driver,
        gpus=tuple(
            GpuReading(index=n, bus_id=f"0000{address.upper()}", **(first if n == 0 else {}))
            for n, address in enumerate((A, B, C))
        ),
    )


def shown(memory: FaultMemory, machine: Machine, reading: NvmlReading | None) -> Any:
    """Class and reason of each fault, by GPU."""
    found = faults(memory, machine, reading)
    return {
        address: [(fault.severity, fault.reason) for fault in rows]
        for address, rows in found.items()
    }


def test_a_well_machine_has_no_faults() -> None:
    memory = with_reading(FaultMemory(), WELL, reading(), RULES, now_s=0)
    assert faults(memory, WELL, reading()) == {}


@pytest.mark.parametrize(
    ("machine", "reading", "expected"),
    [
        pytest.param(
            machine(lost="GPU is lost (NVML 15)", lanes=0),
            reading(error=15),
            [(WITHHOLD, "lost")],
            id="a lost GPU is withheld, and its links are no further fault",
        ),
        pytest.param(
            machine(fabric=Fabric(state=FabricState.NOT_STARTED)),
            reading(),
            [(WITHHOLD, "fabric-not-started")],
            id="fabric not started",
        ),
        pytest.param(
            machine(fabric=Fabric(state=FabricState.IN_PROGRESS, status=999)),
            reading(),
            [(WITHHOLD, "fabric-in-progress")],
            id="fabric in progress, whose status means nothing yet",
        ),
        pytest.param(
            machine(fabric=Fabric(state=FabricState.COMPLETED, status=999)),
            reading(),
            [(DEGRADED, "fabric-failed")],
            id="a complete fabric whose probe failed: the GPU is good for work alone",
        ),
        pytest.param(
            machine(fabric=Fabric(state=FabricState.COMPLETED, healthy=False)),
            reading(),
            [(DEGRADED, "fabric-unhealthy")],
            id="a complete fabric that is not healthy",
        ),
        pytest.param(
            machine(fabric=Fabric(state=FabricState.COMPLETED, healthy=None)),
            reading(),
            [],
            id="a complete fabric of a driver without health summary",
        ),
        pytest.param(
            machine(fabric=Fabric(state=FabricState.NOT_SUPPORTED)),
            reading(),
            [],
            id="no fabric: GH200, H100 PCIe, one-GPU virtual machines",
        ),
        pytest.param(
            machine(), reading(recovery_action=0), [], id="no recovery action is asked for"
        ),
        pytest.param(
            machine(),
            reading(recovery_action=1),
            [(WITHHOLD, "recovery-gpu-reset")],
            id="recovery action reset",
        ),
        pytest.param(
            machine(),
            reading(recovery_action=2),
            [(WITHHOLD, "recovery-node-reboot")],
            id="recovery action reboot",
        ),
        pytest.param(
            machine(),
            reading(recovery_action=3),
            [(DEGRADED, "recovery-drain-p2p")],
            id="recovery action drain P2P: the GPU itself still computes",
        ),
        pytest.param(
            machine(),
            reading(recovery_action=4),
            [(WITHHOLD, "recovery-drain-and-reset")],
            id="recovery action drain and reset",
        ),
        pytest.param(
            machine(),
            reading(recovery_action=42),
            [(WITHHOLD, "recovery-42")],
            id="a recovery action that a later driver invented",
        ),
        pytest.param(
            machine(),
            reading(remap=(1, 2, True, True)),
            [(WITHHOLD, "remap-failed")],
            id="row remapping failed",
        ),
        pytest.param(
            machine(),
            reading(remap=(0, 1, True, False)),
            [(DEGRADED, "remap-pending")],
            id="row remapping waits for a reset",
        ),
        pytest.param(
            machine(),
            reading(remap=(3, 1, False, False)),
            [],
            id="rows that were remapped are no fault",
        ),
        pytest.param(
            machine(),
            reading(ecc_uncorrected=2, recovery_action=1),
            [(WITHHOLD, "recovery-gpu-reset"), (INFO, "ecc-uncorrected")],
            id="the worst comes first",
        ),
        pytest.param(
            machine(lanes=17),
            reading(),
            [(DEGRADED, "nvlink-missing")],
            id="fewer lanes than most GPUs of the product here",
        ),
        pytest.param(
            machine(lanes=0, mig_enabled=True), reading(), [], id="MIG takes a GPU's lanes away"
        ),
        pytest.param(
            machine(links_down=18), reading(), [], id="a link that was never up is no fault"
        ),
        pytest.param(machine(), None, [], id="NVML has not been read yet"),
    ],
)
def test_what_a_reading_shows(
    machine: Machine, reading: NvmlReading | None, expected: list[tuple[FaultClass, str]]
) -> None:
    assert shown(FaultMemory(), machine, reading) == ({A: expected} if expected else {})


def test_a_lane_lost_since_the_start_is_degraded_until_it_is_back() -> None:
    pair = Machine(numa_nodes=(), gpus=(gpu(A, lanes=4), gpu(B, lanes=6)))
    memory = with_reading(FaultMemory(), pair, reading(), RULES, now_s=0)
    assert faults(memory, pair, reading()) == {}  # no majority to compare with
    less = replace(pair, gpus=(gpu(A, lanes=3), pair.gpus[1]))
    memory = with_reading(memory, less, reading(), RULES, now_s=1)
    assert faults(memory, less, reading())[A][0].reason == "nvlink-lost"
    assert faults(memory, less, reading())[A][0].detail == "3 of 4 NVLink lanes are active"
    memory = with_reading(memory, pair, reading(), RULES, now_s=2)
    assert faults(memory, pair, reading()) == {}


def xid(number: int, address: PciAddress | None = A) -> NvmlEvent:
    return NvmlEvent(type=8, data=number, bus_id=f"0000{address.upper()}" if address else None)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        pytest.param(xid(79), "xid-79", id="a critical Xid"),
        pytest.param(xid(31), None, id="an Xid that an application causes"),
        pytest.param(xid(79, None), None, id="an Xid of no GPU that can be told"),
        pytest.param(
            NvmlEvent(type=0x800, bus_id="00000000:17:00.0"),
            "dram-retirement-failure",
            id="a DRAM row that could not be retired",
        ),
        pytest.param(
            NvmlEvent(type=0x100, bus_id="00000000:17:00.0"), None, id="a MIG change is no fault"
        ),
        pytest.param(
            NvmlEvent(type=8, data=79, bus_id="rubbish"), None, id="a bus id that is none"
        ),
    ],
)
def test_what_an_event_tells(event: NvmlEvent, expected: str | None) -> None:
    memory = with_event(FaultMemory(), event, RULES)
    assert shown(memory, WELL, reading()) == ({A: [(WITHHOLD, expected)]} if expected else {})


def test_the_same_xid_again_is_one_fault() -> None:
    memory = FaultMemory()
    for number in (79, 48, 79):
        memory = with_event(memory, xid(number), RULES)
    assert shown(memory, WELL, reading()) == {A: [(WITHHOLD, "xid-48"), (WITHHOLD, "xid-79")]}


LOST = machine(lost="GPU is lost (NVML 15)", lanes=0)
GONE = replace(WELL, gpus=WELL.gpus[1:])


@pytest.mark.parametrize(
    ("looks", "stays"),
    [
        pytest.param([(WELL, {})], True, id="a GPU that goes on answering may still be sick"),
        pytest.param([(LOST, {"error": 15}), (WELL, {})], False, id="lost and back: it was reset"),
        pytest.param([(GONE, {"error": 15}), (WELL, {})], False, id="removed and added again"),
        pytest.param(
            [(WELL, {"recovery_action": 1}), (WELL, {"recovery_action": 0})],
            False,
            id="a recovery was asked for and no longer is",
        ),
        pytest.param(
            [(WELL, {"recovery_action": 1}), (WELL, {"recovery_action": 1})],
            True,
            id="a recovery is still asked for",
        ),
        pytest.param(
            [(LOST, {"error": 15}), (WELL, {}), (LOST, {"error": 15}), (LOST, {"error": 15})],
            True,
            id="back for a moment only",
        ),
        pytest.param([(WELL, {"driver": "590.1"})], False, id="another driver was loaded"),
    ],
)
def test_an_events_fault_stays_until_there_is_evidence_of_a_reset(
    looks: list[tuple[Machine, dict[str, Any]]], stays: bool
) -> None:
    memory = with_reading(FaultMemory(), WELL, reading(), RULES, now_s=0)
    memory = with_event(memory, xid(79), RULES)
    for second, (seen, answer) in enumerate([*looks, looks[-1]]):
        memory = with_reading(memory, seen, reading(**answer), RULES, now_s=100 * second)
    assert bool(memory.gpus[A].events if A in memory.gpus else ()) is stays


def test_evidence_counts_only_after_a_cool_down() -> None:
    memory = with_event(FaultMemory(), xid(79), RULES)
    memory = with_reading(memory, LOST, reading(error=15), RULES, now_s=0)
    for now_s, withheld in ((100, True), (129.9, True), (130, False)):
        memory = with_reading(memory, WELL, reading(), RULES, now_s=now_s)
        assert (A in faults(memory, WELL, reading())) is withheld


def test_an_xid_after_the_evidence_starts_anew() -> None:
    memory = with_event(FaultMemory(), xid(79), RULES)
    memory = with_reading(memory, LOST, reading(error=15), RULES, now_s=0)
    memory = with_reading(memory, WELL, reading(), RULES, now_s=10)
    memory = with_event(memory, xid(79), RULES)
    memory = with_reading(memory, WELL, reading(), RULES, now_s=1000)
    assert shown(memory, WELL, reading()) == {A: [(WITHHOLD, "xid-79")]}


@pytest.mark.parametrize(
    ("disable", "enable", "counting", "ignored"),
    [
        pytest.param("", "", {48, 79, 94}, APPLICATION_XIDS, id="the default list"),
        pytest.param("79, 94", "", {48}, {13, 79, 94}, id="more are disabled"),
        pytest.param("all", "", set(), {13, 48, 79}, id="all are disabled"),
        pytest.param("XIDs,79", "", set(), {13, 48, 79}, id="xids is all, in any spelling"),
        pytest.param("all", "79", {79}, {13, 48}, id="one is enabled where all are disabled"),
        pytest.param("79", "13,79", {13, 48, 79}, {31}, id="enabled wins over both lists"),
        pytest.param("all", "all", {13, 48, 79}, set(), id="all are enabled"),
    ],
)
def test_plugin_1335_and_1340_nvidias_variables_say_which_xids_count(
    disable: str, enable: str, counting: set[int], ignored: set[int]
) -> None:
    rules = parse_fault_rules(disable, enable)
    assert {xid for xid in counting if rules.counts(xid)} == counting
    assert {xid for xid in ignored if rules.counts(xid)} == set()


@pytest.mark.parametrize("text", ["79;94", "xid79", "-1", "7٩"])
def test_a_word_that_is_no_xid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected Xid numbers, 'all' or 'xids'"):
        parse_fault_rules(text, "")


# Hysteresis


def lost_at(memory: FaultMemory, now_s: float, cool: FaultRules = RULES) -> FaultMemory:
    return with_reading(memory, LOST, reading(error=15), cool, now_s=now_s)


def well_at(memory: FaultMemory, now_s: float, cool: FaultRules = RULES) -> FaultMemory:
    return with_reading(memory, WELL, reading(), cool, now_s=now_s)


def test_a_gpu_that_was_lost_is_withheld_for_the_cool_down_after_it_answers() -> None:
    memory = well_at(lost_at(FaultMemory(), 0), 10)
    assert shown(memory, WELL, reading()) == {A: [(WITHHOLD, "lost")]}
    assert next_end_s(memory, RULES, now_s=15) == 25
    assert shown(well_at(memory, 39.9), WELL, reading()) == {A: [(WITHHOLD, "lost")]}
    over = well_at(memory, 40)
    assert faults(over, WELL, reading()) == {}
    assert next_end_s(over, RULES, now_s=40) is None


def test_a_gpu_that_flaps_gets_less_and_less_work() -> None:
    memory, now_s, waits = FaultMemory(), 0.0, []
    for _ in range(9):
        memory = well_at(lost_at(memory, now_s), now_s + 1)
        wait_s = next_end_s(memory, RULES, now_s=now_s + 1)
        assert wait_s is not None
        waits.append(wait_s)
        now_s += 1 + wait_s
        memory = well_at(memory, now_s)
        assert faults(memory, WELL, reading()) == {}
    assert waits == [30, 60, 120, 240, 480, 960, 1920, 1920, 1920]


def test_a_fault_an_hour_after_the_last_is_the_first_again() -> None:
    memory = well_at(well_at(lost_at(FaultMemory(), 0), 1), 31)
    memory = well_at(lost_at(memory, 31 + 3600), 31 + 3601)
    assert next_end_s(memory, RULES, now_s=31 + 3601) == 30


def test_the_fabric_of_a_node_that_starts_needs_no_cool_down_and_one_that_flaps_does() -> None:
    waiting = machine(fabric=Fabric(state=FabricState.IN_PROGRESS))
    memory = with_reading(FaultMemory(), waiting, reading(), RULES, now_s=0)
    memory = well_at(memory, 1)
    assert faults(memory, WELL, reading()) == {}
    memory = with_reading(memory, waiting, reading(), RULES, now_s=100)
    memory = well_at(memory, 101)
    assert shown(memory, WELL, reading()) == {A: [(WITHHOLD, "fabric-in-progress")]}
    assert faults(well_at(memory, 161), WELL, reading()) == {}


def test_a_gpu_that_left_the_machine_is_not_there_to_be_withheld() -> None:
    memory = lost_at(FaultMemory(), 0)
    memory = with_reading(memory, GONE, reading(error=15), RULES, now_s=1)
    assert faults(memory, GONE, reading()) == {}
    assert faults(well_at(memory, 2), WELL, reading()) == {}


# Signs of a reset


@pytest.mark.parametrize(
    ("looks", "sign"),
    [
        pytest.param([{"error": 999}, {}], None, id="an unknown error comes and goes"),
        pytest.param([{"error": 16}, {}], "it was lost", id="a required reset was done"),
        pytest.param([{"recovery_action": 3}, {}], None, id="draining P2P is no reset"),
        pytest.param([{"recovery_action": 4}, {}], "NVML asked", id="drain and reset is one"),
        pytest.param([{"recovery_action": 99}, {}], "NVML asked", id="so is one not known yet"),
        pytest.param(
            [{"remap": (0, 1, True, False)}, {"remap": (0, 1, False, False)}],
            "a row remapping waited",
            id="a pending remapping was carried out",
        ),
        pytest.param(
            [{"remap": (0, 1, True, False)}, {"remap": (0, 1, False, True)}],
            None,
            id="and one that failed is no good sign",
        ),
        pytest.param([{"remap": (0, 1, False, False)}] * 2, None, id="nothing was pending"),
    ],
)
def test_signs_of_a_reset(looks: list[dict[str, Any]], sign: str | None) -> None:
    memory = with_event(well_at(FaultMemory(), 0), xid(48), RULES)
    for second, answer in enumerate(looks):
        seen = LOST if "error" in answer else WELL
        memory = with_reading(memory, seen, reading(**answer), RULES, now_s=second)
    (known,) = memory.gpus[A].events
    assert (known.sign or "").startswith(sign or "")
    assert (known.ended_s is not None) is (sign is not None)


def test_the_same_driver_loaded_anew_is_a_sign_and_the_same_load_is_none() -> None:
    memory = with_reading(FaultMemory(), WELL, reading(), RULES, now_s=0, load="7")
    memory = with_event(memory, xid(48), RULES)
    memory = with_reading(memory, WELL, reading(), RULES, now_s=1, load="7")
    assert next_end_s(memory, RULES, now_s=1) is None
    memory = with_reading(memory, WELL, reading(), RULES, now_s=2, load="9")
    assert next_end_s(memory, RULES, now_s=2) == 30


def test_a_driver_loaded_anew_under_a_gpu_that_still_asks_for_a_reset_does_not_heal_it() -> None:
    memory = with_reading(FaultMemory(), WELL, reading(), RULES, now_s=0, load="7")
    memory = with_event(memory, xid(48), RULES)
    memory = with_reading(memory, WELL, reading(recovery_action=1), RULES, now_s=1, load="9")
    memory = with_reading(memory, WELL, reading(recovery_action=1), RULES, now_s=99, load="9")
    assert (WITHHOLD, "xid-48") in shown(memory, WELL, reading())[A]


def test_an_operators_word_is_a_sign_for_his_gpu_only() -> None:
    memory = with_event(with_event(well_at(FaultMemory(), 0), xid(48), RULES), xid(95, B), RULES)
    memory = well_at(well_at(with_reset(memory, A), 1), 31)
    assert shown(memory, WELL, reading()) == {B: [(WITHHOLD, "xid-95")]}


def test_a_gpu_in_the_place_of_another_inherits_nothing_and_the_other_takes_its_faults_along() -> (
    None
):
    def placed(*uuids: str) -> NvmlReading:
        gpus = reading().gpus
        named = [replace_struct(g, uuid=u) for g, u in zip(gpus, uuids, strict=False)]
        return NvmlReading(driver="580.95.05", gpus=(*named, *gpus[len(uuids) :]))

    memory = with_reading(FaultMemory(), WELL, placed("one", "two"), RULES, now_s=0)
    memory = with_event(memory, xid(48), RULES)
    moved = with_reading(memory, WELL, placed("two", "one"), RULES, now_s=1)
    assert shown(moved, WELL, reading()) == {B: [(WITHHOLD, "xid-48")]}
    exchanged = with_reading(memory, WELL, placed("three", "two"), RULES, now_s=1)
    assert shown(exchanged, WELL, reading()) == {}


@pytest.mark.parametrize(
    ("number", "answer", "counts"),
    [
        pytest.param(63, {"remap": (0, 1, True, False)}, False, id="63 where remapping is read"),
        pytest.param(63, {}, True, id="63 where it is not"),
        pytest.param(64, {"remap": (0, 1, False, True)}, False, id="64 where remapping is read"),
        pytest.param(154, {"recovery_action": 0}, False, id="154 where the action is read"),
        pytest.param(154, {}, True, id="154 where it is not"),
    ],
)
def test_plugin_1974_an_xid_that_announces_a_state_counts_only_where_the_state_is_not_read(
    number: int, answer: dict[str, Any], counts: bool
) -> None:
    memory = with_event(well_at(FaultMemory(), 0), xid(number), RULES)
    memory = with_reading(memory, WELL, reading(**answer), RULES, now_s=1)
    assert bool(memory.gpus[A].events) is counts
    enabled = parse_fault_rules("", str(number))
    memory = with_event(well_at(FaultMemory(), 0), xid(number), enabled)
    memory = with_reading(memory, WELL, reading(**answer), enabled, now_s=1)
    assert memory.gpus[A].events, "what is enabled counts whatever else is said"


def test_a_storm_of_different_xids_is_bounded() -> None:
    memory = FaultMemory()
    for number in range(200, 300):
        memory = with_event(memory, xid(number), RULES)
    assert [known.xid for known in memory.gpus[A].events] == [*range(284, 300)]


@pytest.mark.parametrize(("bits", "hot"), [(0x20, True), (0x40, True), (0x44, True), (0x4, False)])
def test_heat_is_information(bits: int, hot: bool) -> None:
    expected = {A: [(INFO, "thermal-slowdown")]} if hot else {}
    assert shown(FaultMemory(), WELL, reading(clock_events=bits)) == expected


@pytest.mark.parametrize(
    ("number", "instance"),
    [pytest.param(94, 3, id="contained"), pytest.param(79, None, id="the whole GPU")],
)
def test_an_xid_of_a_gpu_instance(number: int, instance: int | None) -> None:
    event = NvmlEvent(
        type=8, data=number, bus_id="00000000:17:00.0", gpu_instance=3, compute_instance=0
    )
    memory = with_event(FaultMemory(), event, RULES)
    (known,) = memory.gpus[A].events
    assert known.fault.gpu_instance == instance


# Over a restart of ours


def kept_of(memory: FaultMemory, folder: Path, rules: FaultRules = RULES) -> FaultMemory | None:
    file = folder / "faults.json"
    write_fault_file(file, fault_text(memory, boot="b"))
    return read_fault_file(file, boot="b", rules=rules)


def test_what_events_told_is_read_back_as_it_was(tmp_path: Path) -> None:
    named = NvmlReading(
        driver="580.95.05",
        gpus=tuple(replace_struct(g, uuid=f"GPU-{g.index}") for g in reading().gpus),
    )
    memory = with_reading(FaultMemory(), WELL, named, RULES, now_s=0, load="7")
    memory = with_event(memory, xid(48), RULES)
    memory = with_event(memory, xid(94), RULES)
    memory = with_event(
        memory, NvmlEvent(type=0x2000, bus_id="00000000:65:00.0", gpu_instance=1), RULES
    )
    memory = with_reset(memory, A)
    memory = with_reading(memory, WELL, named, RULES, now_s=12.5, load="7")
    assert kept_of(memory, tmp_path) == memory
    fewer = kept_of(memory, tmp_path, parse_fault_rules("94", ""))
    assert fewer is not None
    assert [known.xid for known in fewer.gpus[A].events] == [48]
    assert read_fault_file(tmp_path / "faults.json", boot="another", rules=RULES) is None
    assert read_fault_file(tmp_path / "nothing", boot="b", rules=RULES) is None
    assert [path.name for path in tmp_path.iterdir()] == ["faults.json"]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text[:-20], id="cut short"),
        pytest.param(lambda text: b"\xff\xfe" + text, id="not text"),
        pytest.param(lambda text: text.replace(b'"events"', b'"evens"'), id="a foreign field"),
        pytest.param(lambda text: text.replace(b"0000:17", b"seventeen"), id="no PCI address"),
        pytest.param(lambda text: text.replace(b'"version":1', b'"version":2'), id="of later"),
        pytest.param(lambda text: text + b" " * (1 << 20), id="larger than any"),
        pytest.param(lambda text: b"", id="empty"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    named = replace_struct(reading(), gpus=(replace_struct(reading().gpus[0], uuid="GPU-0"),))
    memory = with_reading(FaultMemory(), WELL, named, RULES, now_s=0)
    text = fault_text(with_event(memory, xid(48), RULES), boot="b")
    file = tmp_path / "faults.json"
    file.write_bytes(text)
    assert read_fault_file(file, boot="b", rules=RULES) is not None
    assert damage(text) != text
    file.write_bytes(damage(text))
    with pytest.raises(FaultFileError, match=re.escape(str(file))):
        read_fault_file(file, boot="b", rules=RULES)


@given(text=st.binary(max_size=400) | st.text(max_size=400).map(str.encode))
def test_no_file_makes_anything_but_a_memory_or_its_own_error(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    file = tmp_path_factory.mktemp("kept") / "faults.json"
    file.write_bytes(text)
    with contextlib.suppress(FaultFileError):
        assert read_fault_file(file, boot="b", rules=RULES) is None


def test_a_folder_that_is_full_or_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(FaultFileError, match="cannot be written: No such file or directory"):
        write_fault_file(tmp_path / "gone/faults.json", b"{}")
    (tmp_path / "faults.json").mkdir()
    with pytest.raises(FaultFileError, match="cannot be read"):
        read_fault_file(tmp_path / "faults.json", boot="b", rules=RULES)


# The container that was given a driver


class Asked(NamedTuple):
    failures: int = 0
    failure_code: int | None = None


def host(*addresses: PciAddress, load: str | None = "7") -> Host:
    functions = tuple(
        PciDevice(
            address=a, root="pci", vendor=0x10DE, device=1, class_code=0x030200, driver="nvidia"
        )
        for a in addresses
    )
    return Host(numa_nodes=(), pci=functions, driver_load=load)


def test_a_container_is_outgrown_by_what_it_cannot_reach() -> None:
    well = Asked()
    injection = Injection(patience_s=3)
    assert injection.outgrown(host(A, B), WELL, well, now_s=0) is None
    assert injection.outgrown(host(A, B), None, Asked(1, 9), now_s=1) is None
    assert injection.outgrown(host(A, B), None, Asked(1, 18), now_s=2) is None  # may be passing
    assert "replaced" in str(injection.outgrown(host(A, B), None, Asked(2, 18), now_s=3))
    assert "loaded anew" in str(injection.outgrown(host(A, B, load="8"), WELL, well, now_s=4))
    assert injection.outgrown(host(A, B, load=None), None, Asked(3, 9), now_s=5) is None
    without_c = replace(WELL, gpus=(*WELL.gpus[:2], gpu(C, lost="NVML does not list it", lanes=0)))
    assert injection.outgrown(host(A, B, C), WELL, well, now_s=6) is None  # it answers
    assert injection.outgrown(host(A, B, C), without_c, well, now_s=7) is None
    assert injection.wait_s == 3
    assert injection.outgrown(host(A, B, C), None, Asked(1, 9), now_s=9) is None  # says nothing
    assert injection.outgrown(host(A, B, C), without_c, well, now_s=10) is None
    assert str(C) in str(injection.outgrown(host(A, B, C), without_c, well, now_s=13))


def test_a_driver_that_came_after_the_container_needs_another_one_unless_it_works() -> None:
    injection = Injection()
    assert injection.outgrown(host(A, load=None), None, Asked(1, 9), now_s=0) is None
    assert injection.outgrown(host(A), WELL, Asked(), now_s=1) is None
    assert "after this container" in str(injection.outgrown(host(A), None, Asked(1, 9), now_s=2))
