"""Which GPU is sick, and why: readings and events as values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rte.discovery.faults import (
    APPLICATION_XIDS,
    FaultMemory,
    FaultRules,
    faults,
    parse_fault_rules,
    with_event,
    with_reading,
)
from rte.discovery.reading import GpuReading, NvmlEvent, NvmlReading
from rte.model import (
    Fabric,
    FabricState,
    FaultClass,
    Gpu,
    LinkPeer,
    Machine,
    NvLinkEnd,
    PciAddress,
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
def test_nvidias_variables_say_which_xids_count(
    disable: str, enable: str, counting: set[int], ignored: set[int]
) -> None:
    rules = parse_fault_rules(disable, enable)
    assert {xid for xid in counting if rules.counts(xid)} == counting
    assert {xid for xid in ignored if rules.counts(xid)} == set()


@pytest.mark.parametrize("text", ["79;94", "xid79", "-1", "7٩"])
def test_a_word_that_is_no_xid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected Xid numbers, 'all' or 'xids'"):
        parse_fault_rules(text, "")
