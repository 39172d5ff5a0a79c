"""The hardware as looked at: recorded machines below a root, NVML through the fake library."""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rte.discovery.fault_file import read_fault_file
from rte.discovery.faults import FaultMemory, FaultRules
from rte.discovery.hardware import DOUBT_S, Hardware, Snapshot
from rte.discovery.nvml_worker import NvmlWorker
from rte.discovery.reading import NvmlReading
from rte.discovery.udev import UdevError, UdevWatch
from rte.model import DeviceId, PciAddress
from rte.sources.recorded import read_recorded, unpack
from tests.fake_nvml import XID, Driver
from tests.stopwatch import Stopwatch
from tests.waiting import until

MACHINES = Path(__file__).parent / "machines"
PAIRS = MACHINES / "pcie-a100-pairs"
PATIENCE_S = 20.0
HANG_S = 1.0


def no_events(wake: Callable[[], None]) -> UdevWatch:
    raise UdevError("kernel events: none in this test")


class Site:
    """A machine whose hardware is being looked at, and what was heard of it."""

    def __init__(self, folder: Path, machine: Path, **options: Any) -> None:
        self.root = folder / "root"
        unpack(machine / "sys.txt", self.root)
        recorded = (machine / "nvml.json").exists()
        nothing = NvmlReading(driver="none")
        self.driver = Driver(folder / "driver", machine if recorded else nothing)
        self.worker = NvmlWorker(
            env=self.driver.env,
            answer_s=options.pop("answer_s", PATIENCE_S),
            retry_s=(0.01, 0.1),
            event_wait_ms=50,
        )
        options = {"interval_s": 600.0, "watch": no_events, **options}
        self.hardware = Hardware(
            sys=self.root / "sys", proc=self.root / "proc", worker=self.worker, **options
        )
        self.heard: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        self.hardware.subscribe(self.heard.put)

    def next(self) -> Snapshot:
        """The next snapshot that differs."""
        return self.heard.get(timeout=PATIENCE_S)

    def look(self) -> None:
        """Waits for a whole look that began after this: it has ended when one more begins."""
        self.wake_after(self.hardware.looks)
        self.wake_after(self.hardware.looks)

    def wake_after(self, looks: int) -> None:
        self.hardware.wake()
        until(lambda: self.hardware.looks > looks)

    @property
    def gpu_addresses(self) -> list[PciAddress]:
        return [gpu.pci for gpu in read_recorded(PAIRS).gpus]

    def unbind(self, address: PciAddress) -> Path:
        link = self.root / "sys/bus/pci/devices" / address / "driver"
        link.unlink()
        return link


Make = Callable[..., Site]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    sites = []

    def make(machine: Path = PAIRS, **options: Any) -> Site:
        site = Site(tmp_path, machine, **options)
        sites.append(site)
        return site

    yield make
    for site in sites:
        site.hardware.stop()


@pytest.mark.parametrize(
    "name", ["pcie-a100-pairs", "mig-half", "one-lost", "vm-all-minus-one", "gb200-tray"]
)
def test_the_first_snapshot_is_the_recorded_machine(make: Make, name: str) -> None:
    site = make(MACHINES / name)
    site.hardware.start()
    snapshot = site.next()
    assert snapshot.machine == read_recorded(MACHINES / name)
    assert site.hardware.latest == snapshot
    lost = {gpu.pci for gpu in snapshot.machine.gpus if gpu.lost}
    assert lost == {
        address
        for address, rows in snapshot.faults.items()
        if "lost" in {fault.reason for fault in rows}
    }


def test_looking_again_at_the_same_tells_nobody(make: Make) -> None:
    site = make()
    site.hardware.start()
    first = site.next()
    site.look()
    latest = site.hardware.latest
    assert latest is not None
    assert latest.taken_monotonic > first.taken_monotonic
    assert site.heard.empty()
    looks = site.hardware.looks
    time.sleep(0.6)
    assert site.hardware.looks <= looks + 1  # and it does not look for nothing
    before = site.hardware.latest
    late: list[Snapshot] = []
    site.hardware.subscribe(late.append)
    assert late in ([before], [site.hardware.latest])  # the last look may have ended just now


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("call nvmlInitWithFlags hang", "nvmlInit has not come back"),
        ("call nvmlInitWithFlags abort", "the NVML worker was killed by SIGABRT in nvmlInit"),
        ("call nvmlInitWithFlags fail 12", "nvmlInit: NVML Shared Library Not Found (12)"),
        ("call nvmlInitWithFlags fail 18", "nvmlInit: RM has detected an NVML/RM version mismatch"),
    ],
    ids=["hangs", "crashes", "is absent", "does not match the driver"],
)
def test_nothing_is_told_while_nvml_fails_from_the_start_and_all_when_it_works(
    make: Make, caplog: pytest.LogCaptureFixture, fault: str, said: str
) -> None:
    caplog.set_level(logging.INFO, logger="rte.discovery.hardware")
    site = make(answer_s=HANG_S) if "hang" in fault else make()
    site.driver.control(fault)
    site.hardware.start()
    until(lambda: site.hardware.looks >= 3 and site.hardware.problems != ())
    assert site.hardware.latest is None
    assert [problem for problem in site.hardware.problems if said in problem]
    assert len([line for line in caplog.messages if said in line]) == 1
    site.driver.control()
    site.worker.answer_s = PATIENCE_S
    assert site.next().machine == read_recorded(PAIRS)
    until(lambda: site.hardware.problems == ())
    assert len([line for line in caplog.messages if said in line]) == 2
    assert [line for line in caplog.messages if line.startswith(f"no longer: {said}")]


def test_a_node_without_gpus_is_published_without_nvml(make: Make) -> None:
    site = make(MACHINES / "qemu-4-nodes")
    site.driver.control("call nvmlInitWithFlags fail 12")
    site.hardware.start()
    snapshot = site.next()
    assert snapshot.machine == read_recorded(MACHINES / "qemu-4-nodes")
    assert snapshot.nvml_age_s is None
    assert site.hardware.problems == ()
    site.look()
    assert site.worker.starts == 1  # asked once; no worker is kept for nothing


def test_a_node_whose_driver_is_not_loaded_is_published_and_its_gpus_later(make: Make) -> None:
    site = make()
    site.driver.control("call nvmlInitWithFlags fail 9")
    links = [site.unbind(address) for address in site.gpu_addresses]
    site.hardware.start()
    assert site.next().machine.gpus == ()
    site.driver.control()
    for link in links:
        link.symlink_to("../../../bus/pci/drivers/nvidia")
    site.hardware.wake()
    assert site.next().machine == read_recorded(PAIRS)


@pytest.mark.parametrize(
    "fault",
    ["call nvmlDeviceGetCount_v2 hang", "call nvmlDeviceGetUUID abort", "call * fail 999"],
    ids=["hangs", "crashes", "fails"],
)
def test_the_last_good_reading_stays_in_force_while_nvml_fails(make: Make, fault: str) -> None:
    site = make()
    site.hardware.start()
    site.next()
    site.worker.answer_s = HANG_S if "hang" in fault else PATIENCE_S
    site.driver.control(fault)
    site.look()
    until(lambda: site.hardware.problems != ())
    assert site.heard.empty()
    latest = site.hardware.latest
    assert latest is not None
    assert latest.machine == read_recorded(PAIRS)
    assert latest.nvml_age_s is not None
    assert latest.nvml_age_s > 0
    site.driver.control()
    site.worker.answer_s = PATIENCE_S
    until(lambda: site.hardware.problems == ())
    assert site.heard.empty()


def test_an_xid_is_told_at_once_also_while_a_reading_hangs(make: Make) -> None:
    site = make()
    site.hardware.start()
    first = site.next()
    site.driver.control("call nvmlDeviceGetUUID hang")
    site.hardware.wake()
    child = site.worker.child
    assert child is not None
    until(lambda: child.doing == "the reading")
    site.driver.event(1, XID, 31)  # an application's
    site.driver.event(1, XID, 79)
    snapshot = site.next()
    assert snapshot.machine == first.machine
    assert {
        address: [fault.reason for fault in rows] for address, rows in snapshot.faults.items()
    } == {site.gpu_addresses[1]: ["xid-79"]}


def test_a_lost_gpu_keeps_its_number_and_id_and_comes_back(make: Make) -> None:
    site = make(rules=FaultRules(cool_down_s=0.3))
    site.hardware.start()
    first = site.next()
    gpu = first.machine.gpus[1]
    site.driver.control("lost 1")
    site.hardware.wake()
    snapshot = site.next()
    lost = snapshot.machine.gpus[1]
    assert (lost.number, lost.pci, lost.uuid, lost.product, lost.memory_bytes) == (
        gpu.number,
        gpu.pci,
        gpu.uuid,
        gpu.product,
        gpu.memory_bytes,
    )
    assert lost.lost is not None
    assert [fault.reason for fault in snapshot.faults[lost.pci]] == ["lost"]
    site.driver.control()
    site.hardware.wake()
    back = site.next()
    assert back.machine == first.machine
    assert [fault.reason for fault in back.faults[lost.pci]] == ["lost"]  # for the cool-down
    assert site.next().faults == {}  # without an event, long before the next interval


def test_an_event_wakes_and_mig_devices_are_seen(make: Make) -> None:
    site = make(MACHINES / "mig-half")
    site.hardware.start()
    first = site.next()
    recorded = msgspec.json.decode(site.driver.json.read_bytes(), type=NvmlReading)
    index = next(gpu.index for gpu in recorded.gpus if gpu.mig)
    gone = recorded.gpus[index].mig[0]
    site.driver.control(f"mig-gone {index} {gone.index}")
    site.driver.event(index, 0x100)
    snapshot = site.next()
    before = {slice.id for gpu in first.machine.gpus for slice in gpu.slices}
    after = {slice.id for gpu in snapshot.machine.gpus for slice in gpu.slices}
    assert before - after == {DeviceId(gone.uuid)}


def test_a_gpu_pulled_out_while_nvml_fails_is_gone(make: Make) -> None:
    site = make()
    site.hardware.start()
    first = site.next()
    site.driver.control("call * fail 999")
    address = site.gpu_addresses[0]
    link = site.root / "sys/bus/pci/devices" / address
    function = link.resolve()
    link.unlink()  # first, as the kernel does: a look may come in between
    shutil.rmtree(function)
    site.hardware.wake()
    gpus = site.next().machine.gpus
    assert [gpu.uuid for gpu in gpus] == [gpu.uuid for gpu in first.machine.gpus[1:]]


@pytest.mark.parametrize("released", [False, True], ids=["by surprise", "after a release"])
def test_gpus_whose_driver_is_unloaded_go_unless_it_was_announced(
    make: Make, released: bool
) -> None:
    site = make()
    site.hardware.start()
    first = site.next()
    if released:
        site.worker.release(hold_s=600)
        assert site.driver.sessions() == 0
    else:
        site.driver.control("call * fail 9")
    for address in site.gpu_addresses:
        site.unbind(address)
    site.look()
    latest = site.hardware.latest
    assert latest is not None
    assert latest.machine.gpus == (first.machine.gpus if released else ())


def test_a_sysfs_that_is_missing_is_said_and_read_when_it_is_there(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = make(interval_s=0.3)
    (site.root / "sys").rename(tmp_path / "elsewhere")
    site.hardware.start()
    until(lambda: site.hardware.looks >= 3)
    assert site.hardware.latest is None
    assert len([line for line in caplog.messages if "expected NUMA nodes or CPUs" in line]) == 1
    (tmp_path / "elsewhere").rename(site.root / "sys")
    assert site.next().machine == read_recorded(PAIRS)
    assert site.hardware.problems == ()


def test_without_kernel_events_a_change_is_seen_at_the_interval(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    site = make(interval_s=0.3)
    site.hardware.start()
    site.next()
    site.driver.control("lost 0")
    assert site.next().machine.gpus[0].lost
    said = "kernel events: none in this test; looking every 0.3 s instead"
    assert [line for line in caplog.messages if "kernel events" in line] == [said]


def test_a_kernel_event_wakes_and_stopping_ends_the_watch(make: Make) -> None:
    wakes: list[Callable[[], None]] = []
    closed = threading.Event()

    class Watch:
        def close(self) -> None:
            closed.set()

    def watch(wake: Callable[[], None]) -> Any:
        wakes.append(wake)
        return Watch()

    site = make(watch=watch)
    site.hardware.start()
    site.next()
    site.driver.control("lost 0")
    wakes[0]()
    assert site.next().machine.gpus[0].lost
    site.hardware.stop()
    assert closed.is_set()


def test_stopping_waits_for_no_reading_that_hangs_and_takes_its_end_for_no_trouble(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    site = make()
    site.driver.control("call nvmlInitWithFlags hang")
    site.hardware.start()
    until(lambda: site.worker.child is not None and site.worker.child.doing == "nvmlInit")
    stopwatch = Stopwatch()
    site.hardware.stop()
    assert stopwatch.took_s < 3
    assert site.driver.sessions() == 0
    assert "NVML" not in caplog.text
    assert site.heard.empty()


def test_gpus_that_nvml_calls_lost_are_lost_at_once_and_a_silence_is_doubted_first(
    make: Make,
) -> None:
    site = make()
    site.hardware.start()
    site.next()
    site.driver.control("lost * 999")
    began = time.monotonic()
    site.hardware.wake()
    assert all(gpu.lost for gpu in site.next().machine.gpus)
    assert time.monotonic() - began >= DOUBT_S
    site.driver.control()
    site.hardware.wake()
    site.next()
    site.driver.control("lost *")
    stopwatch = Stopwatch()
    site.hardware.wake()
    assert all(gpu.lost for gpu in site.next().machine.gpus)
    assert stopwatch.took_s < DOUBT_S


def test_an_event_before_the_first_reading_is_not_taken_for_one_of_another_driver(
    make: Make, tmp_path: Path
) -> None:
    site = make(state=tmp_path)
    site.driver.control("call nvmlSystemGetDriverVersion hang")
    site.hardware.start()

    def xids() -> list[int | None]:
        rows = site.hardware.memory.gpus.values()
        return [known.xid for row in rows for known in row.events]

    def heard() -> bool:  # by a worker that listens already, and has not read yet
        site.driver.event(1, XID, 48)
        return xids() == [48]

    def kept() -> FaultMemory | None:
        boot = str(site.hardware.boot)
        return read_fault_file(tmp_path / "faults.json", boot=boot, rules=FaultRules())

    until(heard)
    assert site.hardware.latest is None
    site.driver.control()
    child = site.worker.child
    assert child is not None
    child.process.kill()
    site.next()
    site.driver.event(1, XID, 79)
    until(lambda: xids() == [48, 79])
    until(lambda: kept() == site.hardware.memory)
    rows = site.hardware.memory.gpus.values()
    assert all(known.sign is None for row in rows for known in row.events)
