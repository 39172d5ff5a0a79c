"""The worker's reading, over the real nvidia-ml-py and the fake library."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from rte.discovery.reading import (
    FabricReading,
    GpuReading,
    LinkReading,
    MigReading,
    NvmlEvent,
    NvmlReading,
    WorkerLine,
    WorkerRequest,
)
from tests.fake_nvml import MIG_CONFIG_CHANGE, XID, Driver, compiler_command, fake_nvml

ROOT = Path(__file__).parent.parent
RECORDED = sorted((ROOT / "tests/machines").glob("*/nvml.json"))


class Worker:
    """A worker process, spoken to by its lines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def line(self) -> WorkerLine:
        assert self.process.stdout is not None
        raw = self.process.stdout.readline()
        assert raw, f"the worker ended: {self.process.wait()}"
        return msgspec.json.decode(raw, type=WorkerLine)

    def ask(self, number: int = 1) -> WorkerLine:
        """The answer to one request, events and steps before it left out."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(WorkerRequest(read=number)) + b"\n")
        self.process.stdin.flush()
        while (line := self.line()).id is None:
            continue
        assert line.id == number
        return line

    def read(self) -> NvmlReading:
        answer = self.ask()
        assert answer.reading is not None, answer.failure
        return answer.reading

    def event(self) -> NvmlEvent:
        event = self.line().event
        assert event is not None
        return event


@contextmanager
def worker(driver: Driver) -> Iterator[Worker]:
    with subprocess.Popen(
        [sys.executable, "-m", "rte.discovery.nvml", "50"],
        cwd=ROOT,
        env={**os.environ, **driver.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def differences(read: NvmlReading, recorded: NvmlReading) -> list[str]:
    """Where two readings differ, a line each: their whole text is too long for a message."""
    rows: list[tuple[str, NvmlReading | GpuReading, NvmlReading | GpuReading]]
    rows = [("", read, recorded)]
    if len(read.gpus) == len(recorded.gpus):
        rows = [
            (f"GPU {new.index} ", new, old)
            for new, old in zip(read.gpus, recorded.gpus, strict=True)
            if new != old
        ] + [
            ("", msgspec.structs.replace(read, gpus=()), msgspec.structs.replace(recorded, gpus=()))
        ]
    return [
        f"{where}{name}: read {getattr(new, name)}, recorded {getattr(old, name)}"
        for where, new, old in rows
        for name in new.__struct_fields__
        if getattr(new, name) != getattr(old, name)
    ]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_reading_a_recorded_machine_gives_its_nvml_json(path: Path, tmp_path: Path) -> None:
    recorded = msgspec.json.decode(path.read_bytes(), type=NvmlReading)
    with worker(Driver(tmp_path, recorded)) as asked:
        assert differences(asked.read(), recorded) == []


PCI = ("00000000:17:00.0", "00000000:65:00.0", "0000000F:01:00.0", "00010000:E3:00.0")
SWITCH = "00000000:08:00.0"


def link(number: int, **rest: object) -> LinkReading:
    full = {
        "active": True,
        "version": 6,
        "remote_type": 2,
        "remote_bus_id": SWITCH,
        "speed_mbps": 26562,
        "errors": number,
    }
    return LinkReading(link=number, **{**full, **rest})  # type: ignore[arg-type]


def mig(index: int, uuid: str, instance: int) -> MigReading:
    return MigReading(
        index=index,
        uuid=uuid,
        name="1g.10gb+me",
        gpu_instance=instance,
        compute_instance=0,
        gpu_slices=1,
        compute_slices=1,
        memory_mib=9728,
    )


FABRIC = FabricReading(
    state=3,
    status=0,
    cluster="0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9",
    clique=4026,
    health_mask=0x12345,
    health_summary=1,
)


def full_gpu(index: int) -> GpuReading:
    """A GPU that answers everything."""
    return GpuReading(
        index=index,
        bus_id=PCI[index],
        uuid=f"GPU-{index}",
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=85520809984,
        minor=7 - index,
        serial="165402300000" + str(index),
        module=index + 1,
        links=tuple(link(number) for number in range(18)),
        fabric=FABRIC,
        mig_mode=(1, 1),
        mig_max=7,
        mig=(mig(0, f"MIG-{index}-a", 7), mig(3, f"MIG-{index}-b", 9)),  # 1 and 2 are holes
        numa_node=10,
        memory_affinity=(0, 1 << 63),
        cpu_affinity=((1 << 64) - 1, 0, 5),
        ecc_uncorrected=2,
        remap=(1, 2, True, False),
        recovery_action=0,
        temperature_c=41,
    )


def full_machine() -> NvmlReading:
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    return NvmlReading(
        driver="580.95.05",
        nvml="13.580.95.05",
        cuda=13000,
        gpus=tuple(full_gpu(index) for index in range(4)),
        levels=tuple((a, b, 10 * (a + b)) for a, b in pairs if a < b),
        p2p=tuple((a, b, a % 2, b) for a, b in pairs),  # a direction each
    )


FULL = full_machine()


def changed(index: int, **fields: object) -> NvmlReading:
    """The full machine with one GPU changed."""
    gpus = list(FULL.gpus)
    gpus[index] = msgspec.structs.replace(gpus[index], **fields)
    return msgspec.structs.replace(FULL, gpus=tuple(gpus))


def without_gpus(machine: NvmlReading, *gone: int) -> NvmlReading:
    """What the pairs of a machine are when some GPUs do not answer."""
    return msgspec.structs.replace(
        machine,
        levels=tuple(row for row in machine.levels if not {*row[:2]} & {*gone}),
        p2p=tuple(row for row in machine.p2p if not {*row[:2]} & {*gone}),
    )


def silent(index: int, error: int, *, bus_id: str | None) -> NvmlReading:
    gpus = list(FULL.gpus)
    gpus[index] = GpuReading(index=index, error=error, bus_id=bus_id)
    return without_gpus(msgspec.structs.replace(FULL, gpus=tuple(gpus)), index)


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        pytest.param([], FULL, id="a GPU that answers everything is read whole"),
        pytest.param(
            ["lost 1"], silent(1, 15, bus_id=None), id="a lost GPU leaves the others as they are"
        ),
        pytest.param(
            ["broken 1"],
            silent(1, 999, bus_id=PCI[1]),
            id="a GPU that only says where it is keeps its bus id",
        ),
        pytest.param(
            ["call nvmlDeviceGetNvLinkState@2 fail 15"],
            silent(2, 15, bus_id=PCI[2]),
            id="a GPU lost in the middle of its reading is lost as a whole",
        ),
        pytest.param(
            ["call nvmlDeviceGetMemoryInfo@2 fail 16"],
            silent(2, 16, bus_id=PCI[2]),
            id="a GPU that must be reset does not answer",
        ),
        pytest.param(
            ["call nvmlDeviceGetP2PStatus@3 fail 15"],
            msgspec.structs.replace(FULL, p2p=tuple(row for row in FULL.p2p if 3 not in row[:2])),
            id="a GPU lost after its reading has no rows from there on",
        ),
        pytest.param(
            ["link 0 3 down", "link 2 * down"],
            msgspec.structs.replace(
                FULL,
                gpus=(
                    msgspec.structs.replace(
                        FULL.gpus[0],
                        links=tuple(link(n, active=n != 3) for n in range(18)),
                    ),
                    FULL.gpus[1],
                    msgspec.structs.replace(
                        FULL.gpus[2], links=tuple(link(n, active=False) for n in range(18))
                    ),
                    FULL.gpus[3],
                ),
            ),
            id="links that are down are there and not active, each end for itself",
        ),
        pytest.param(
            ["fabric 1 2 0"],
            changed(1, fabric=msgspec.structs.replace(FABRIC, state=2)),
            id="a fabric in progress",
        ),
        pytest.param(
            ["remap 1 3 4 0 1", "recovery 1 4", "ecc 1 77"],
            changed(1, remap=(3, 4, False, True), recovery_action=4, ecc_uncorrected=77),
            id="health figures",
        ),
        pytest.param(
            ["mig-gone 1 3"],
            changed(1, mig=FULL.gpus[1].mig[:1]),
            id="a destroyed MIG device is gone",
        ),
        pytest.param(
            ["mig 1 0 1"],
            changed(1, mig_mode=(0, 1), mig=()),
            id="MIG mode that waits for a reset has no devices yet",
        ),
        pytest.param(
            [
                "call nvmlDeviceGetNvLinkState fail 3",
                "call nvmlDeviceGetNvLinkVersion fail 3",
                "call nvmlDeviceGetNvLinkErrorCounter fail 3",
            ],
            FULL,
            id="what the calls about links do not say comes from field values",
        ),
        pytest.param(
            ["driver 590.1"], msgspec.structs.replace(FULL, driver="590.1"), id="another driver"
        ),
        pytest.param(
            ["call nvmlDeviceGetSerial fail 999", "call nvmlDeviceGetTotalEccErrors fail 4"],
            msgspec.structs.replace(
                FULL,
                gpus=tuple(
                    msgspec.structs.replace(gpu, serial=None, ecc_uncorrected=None)
                    for gpu in FULL.gpus
                ),
            ),
            id="a call that fails oddly costs no more than its own answer",
        ),
    ],
)
def test_faults_show_in_the_reading(
    control: list[str], expected: NvmlReading, tmp_path: Path
) -> None:
    driver = Driver(tmp_path, FULL)
    with worker(driver) as asked:
        assert differences(asked.read(), FULL) == []
        driver.control(*control)
        assert differences(asked.read(), expected) == []
        driver.control()
        assert differences(asked.read(), FULL) == []


def test_odd_failures_are_noted_once_a_gpu_and_ordinary_ones_are_not(tmp_path: Path) -> None:
    driver = Driver(tmp_path, FULL)
    driver.control("call nvmlDeviceGetNvLinkVersion@1 fail 999", "call nvmlDeviceGetSerial fail 3")
    with worker(driver) as asked:
        assert asked.ask().notes == ("GPU 1: nvmlDeviceGetNvLinkVersion: Unknown Error (999)",)


def test_a_removed_gpu_shifts_the_indices_of_those_behind_it(tmp_path: Path) -> None:
    driver = Driver(tmp_path, FULL)
    driver.control("removed 1")
    with worker(driver) as asked:
        reading = asked.read()
    assert [(gpu.index, gpu.uuid) for gpu in reading.gpus] == [
        (0, "GPU-0"),
        (1, "GPU-2"),
        (2, "GPU-3"),
    ]
    assert reading.levels == ((0, 1, 20), (0, 2, 30), (1, 2, 50))


def test_a_gpu_plugged_in_is_seen_in_the_same_session(tmp_path: Path) -> None:
    driver = Driver(tmp_path, without_gpus(msgspec.structs.replace(FULL, gpus=FULL.gpus[:3]), 3))
    with worker(driver) as asked:
        assert len(asked.read().gpus) == 3
        driver.write(FULL)
        assert differences(asked.read(), FULL) == []
    assert len([line for line in driver.journal() if line.startswith("init")]) == 1


@pytest.mark.parametrize(
    "without", [(), ("nvmlDeviceGetFieldValues",)], ids=["count known", "count not known"]
)
def test_links_are_found_behind_holes_and_beyond_the_headers_maximum(
    without: tuple[str, ...], tmp_path: Path
) -> None:
    numbers = [2, 3, 9, *range(14, 50)]
    machine = changed(0, links=tuple(link(number) for number in numbers))
    with worker(Driver(tmp_path, machine, without=without)) as asked:
        assert [found.link for found in asked.read().gpus[0].links] == numbers


def test_what_an_old_gpu_and_driver_do_not_say_is_none(tmp_path: Path) -> None:
    bare = GpuReading(
        index=0,
        bus_id=PCI[0],
        uuid="GPU-0",
        links=(LinkReading(link=0, active=False), link(1, speed_mbps=None, errors=None)),
    )
    machine = NvmlReading(driver="390.30", gpus=(bare,))
    with worker(Driver(tmp_path, machine)) as asked:
        answer = asked.ask()
    assert (answer.reading, answer.notes) == (machine, ())


def test_symbols_that_an_old_driver_lacks_cost_no_more_than_their_answers(tmp_path: Path) -> None:
    lacking: dict[str, dict[str, object]] = {
        "nvmlDeviceGetFieldValues": {"recovery_action": None},
        "nvmlDeviceGetNumaNodeId": {"numa_node": None},
        "nvmlDeviceGetMemoryAffinity": {"memory_affinity": None},
        "nvmlDeviceGetRemappedRows": {"remap": None},
        "nvmlDeviceGetModuleId": {"module": None},
        "nvmlDeviceGetMigMode": {"mig_mode": None, "mig_max": None, "mig": ()},
        "nvmlDeviceGetGpuFabricInfoV": {
            "fabric": msgspec.structs.replace(FABRIC, health_mask=None, health_summary=None),
        },
        "nvmlDeviceGetTemperature": {},  # its successor answers
        "nvmlEventSetCreate": {},
    }
    fields = {name: value for answers in lacking.values() for name, value in answers.items()}
    expected = msgspec.structs.replace(
        FULL,
        gpus=tuple(
            msgspec.structs.replace(
                gpu, links=tuple(link(number, speed_mbps=None) for number in range(18)), **fields
            )
            for gpu in FULL.gpus
        ),
    )
    with worker(Driver(tmp_path, FULL, without=lacking)) as asked:
        answer = asked.ask()
    assert answer.reading is not None
    assert differences(answer.reading, expected) == []
    assert answer.notes == ()


@pytest.mark.parametrize(
    "fabric",
    [
        pytest.param(FabricReading(state=3, health_mask=1, health_summary=0), id="version 3"),
        pytest.param(FabricReading(state=2, health_mask=0), id="version 2"),
        pytest.param(FabricReading(state=1, status=999, clique=1), id="without version"),
        pytest.param(None, id="not supported"),
    ],
)
def test_fabric_comes_from_the_newest_structure_that_the_driver_fills(
    fabric: FabricReading | None, tmp_path: Path
) -> None:
    with worker(Driver(tmp_path, changed(0, fabric=fabric))) as asked:
        assert asked.read().gpus[0].fabric == fabric


@pytest.mark.parametrize(
    ("given", "read"),
    [
        pytest.param({"numa_node": -1}, {"numa_node": None}, id="-1 is no NUMA node"),
        pytest.param(
            {"memory_affinity": (1, 0, 0)}, {"memory_affinity": (1,)}, id="zeros at the end"
        ),
        pytest.param({"cpu_affinity": (0, 0)}, {"cpu_affinity": (0,)}, id="a cpuset without any"),
        pytest.param(
            {"mig_mode": (0, 0), "mig_max": 0, "mig": ()}, {"mig_max": 0}, id="MIG that is off"
        ),
    ],
)
def test_one_spelling_for_one_thing(
    given: dict[str, object], read: dict[str, object], tmp_path: Path
) -> None:
    with worker(Driver(tmp_path, changed(0, **given))) as asked:
        gpu = asked.read().gpus[0]
    assert {name: getattr(gpu, name) for name in read} == read


def test_text_that_is_no_utf_8_costs_no_more_than_itself(tmp_path: Path) -> None:
    driver = Driver(tmp_path, changed(0, serial="16540\N{SNOWMAN}"))
    raw = driver.json.read_bytes()
    driver.json.write_bytes(raw.replace("\N{SNOWMAN}".encode(), b"\xff"))
    with worker(driver) as asked:
        answer = asked.ask()
    assert answer.reading is not None
    assert differences(answer.reading, changed(0, serial=None)) == []
    assert answer.notes == ("GPU 0: nvmlDeviceGetSerial: text that is no UTF-8",)


def test_a_failure_is_the_last_line_of_a_worker(tmp_path: Path) -> None:
    driver = Driver(tmp_path, FULL)
    driver.control("call nvmlInitWithFlags fail 9")
    with worker(driver) as asked:
        failure = asked.ask().failure
        assert failure is not None
        assert (failure.call, failure.code, failure.text) == ("nvmlInit", 9, "Driver Not Loaded")
        assert asked.process.wait(timeout=20) == 0


def test_sixteen_gpus_with_mig_devices_are_read_in_one_line(tmp_path: Path) -> None:
    gpus = tuple(
        msgspec.structs.replace(
            full_gpu(0),
            index=n,
            bus_id=f"00000000:{n + 16:02X}:00.0",
            uuid=f"GPU-{n}",
            mig=tuple(mig(i, f"MIG-{n}-{i}", i + 7) for i in range(7)),
        )
        for n in range(16)
    )
    machine = NvmlReading(
        driver="580.95.05",
        gpus=gpus,
        levels=tuple((a, b, 50) for a in range(16) for b in range(a + 1, 16)),
        p2p=tuple((a, b, 0, 0) for a in range(16) for b in range(16) if a != b),
    )
    with worker(Driver(tmp_path, machine)) as asked:
        assert differences(asked.read(), machine) == []


def test_events_carry_their_gpu_and_instances_and_come_once(tmp_path: Path) -> None:
    driver = Driver(tmp_path, FULL)
    driver.event(0, XID, 13)  # before anyone listened: not heard, as on a real machine
    with worker(driver) as asked:
        asked.read()
        driver.event(2, XID, 79)
        driver.event(1, 0x4, 1)  # a P-state change, which nobody registered for
        driver.event(1, MIG_CONFIG_CHANGE, 0, "3 0")
        assert asked.event() == NvmlEvent(type=XID, data=79, bus_id=PCI[2])
        assert asked.event() == NvmlEvent(
            type=MIG_CONFIG_CHANGE, bus_id=PCI[1], gpu_instance=3, compute_instance=0
        )


def test_a_gpu_without_events_leaves_those_of_the_others(tmp_path: Path) -> None:
    driver = Driver(tmp_path, FULL)
    driver.control("events 0 0", "events 1 0x8")
    with worker(driver) as asked:
        asked.read()
        driver.event(0, XID, 79)
        driver.event(1, MIG_CONFIG_CHANGE)
        driver.event(1, XID, 48)
        assert asked.event() == NvmlEvent(type=XID, data=48, bus_id=PCI[1])


def test_the_fake_library_has_the_bindings_structures() -> None:
    import pynvml

    ours = ctypes.CDLL(str(fake_nvml().library_dir / "libnvidia-ml.so.1"))
    theirs = [
        pynvml.nvmlPciInfo_t,
        pynvml.c_nvmlMemory_t,
        pynvml.c_nvmlMemory_v2_t,
        pynvml.c_nvmlFieldValue_t,
        pynvml.c_nvmlGpuFabricInfo_t,
        pynvml.c_nvmlGpuFabricInfo_v2_t,
        pynvml.c_nvmlGpuFabricInfo_v3_t,
        pynvml.c_nvmlDeviceAttributes,
        pynvml.c_nvmlTemperature_v1_t,
        pynvml.c_nvmlEventData_t,
    ]
    sizes = (ctypes.c_uint * len(theirs)).in_dll(ours, "fake_nvml_sizes")
    assert list(sizes) == [ctypes.sizeof(structure) for structure in theirs]


def test_a_symbol_can_be_absent_as_on_an_old_driver() -> None:
    old = ctypes.CDLL(
        str(fake_nvml(without=["nvmlDeviceGetNumaNodeId"]).library_dir / "libnvidia-ml.so.1")
    )
    assert hasattr(old, "nvmlDeviceGetUUID")
    assert not hasattr(old, "nvmlDeviceGetNumaNodeId")


def test_no_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")  # a Python without ziglang
    with pytest.raises(RuntimeError, match="needs a C compiler: no cc, gcc or clang on PATH"):
        compiler_command()
