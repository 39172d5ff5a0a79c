"""The hardware of this node as last looked at, for both roles of one process.

A thread looks at sysfs and NVML: at the start, after kernel events and NVML events, and at every
interval. Whoever subscribed hears of each snapshot whose machine or faults differ from the last.

When there is a first snapshot:

* with the first good reading of NVML; or
* as soon as sysfs shows that no NVIDIA driver has a GPU to say anything about: there is no NVIDIA
  GPU, or none that the driver is bound to. (NVML is asked once all the same, as some virtual
  machines hide the PCI functions, and again when the PCI tree has changed.)

Where the driver is bound to GPUs and NVML gives nothing there is no snapshot, only `problems`:
what would be published or registered would be wrong. Later the last good reading stays in force,
without the GPUs whose PCI functions went away meanwhile. A reading in which no GPU answers any more
is NVML's trouble at first (a driver that is half up says so), and believed when it stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rte.discovery import Overrides, assemble, parse_address
from rte.discovery.fault_file import (
    NAME,
    FaultFileError,
    fault_text,
    read_fault_file,
    write_fault_file,
)
from rte.discovery.faults import (
    RESET_ENDS,
    FaultMemory,
    FaultRules,
    faults,
    next_end_s,
    with_event,
    with_reading,
    with_reset,
)
from rte.discovery.injection import Injection
from rte.discovery.nvml_worker import NvmlUnavailable, NvmlWorker
from rte.discovery.reading import NvmlEvent, NvmlReading
from rte.discovery.sysfs import Host, SysfsError, read_host
from rte.discovery.udev import UdevError, UdevWatch, watch_udev
from rte.model import Fault, FaultClass, Faults, Gpu, Machine, PciAddress

log = logging.getLogger(__name__)

Drivers = Mapping[PciAddress, str | None]
"""The kernel driver that each NVIDIA GPU function is bound to."""

# A storm of events is a look now and then, not a look each: one takes some 50 ms.
REST_S = 0.25
# How long a reading must stay the same that says of all GPUs at once that they do not answer.
DOUBT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One look at the hardware."""

    machine: Machine
    faults: Faults
    taken_monotonic: float  # seconds, by the clock given
    nvml_age_s: float | None = None  # of the NVML reading in it, at that time; None without one
    problems: tuple[str, ...] = ()  # what could not be read or understood, in words


class Hardware:
    """Looks, remembers, tells. `start` and `stop` are called once; the rest by any thread."""

    def __init__(
        self,
        *,
        sys: Path,
        worker: NvmlWorker,
        proc: Path | None = None,
        overrides: Overrides | None = None,
        rules: FaultRules | None = None,
        interval_s: float = 30.0,
        state: Path | None = None,
        injection: Injection | None = None,
        on_outgrown: Callable[[str], None] = lambda why: None,
        watch: Callable[[Callable[[], None]], UdevWatch] = watch_udev,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`state` is the folder where faults known from events are kept; without one they end with
        this process. `injection` is given where the driver was put into this container when it
        started; `on_outgrown` is called, once, with the reason why only a new one can go on.
        """
        self.sys = sys
        self.proc = proc
        self.worker = worker
        self.overrides = overrides
        self.rules = rules or FaultRules()
        self.interval_s = interval_s
        self.state = state / NAME if state else None
        self.injection = injection
        self.on_outgrown = on_outgrown
        self.watch = watch
        self.clock = clock
        self.latest: Snapshot | None = None
        self.problems: tuple[str, ...] = ()  # also before there is a snapshot
        self.looks = 0
        self.subscribers: list[Callable[[Snapshot], None]] = []
        self.telling = threading.RLock()  # held while a snapshot is made and told
        self.memory = FaultMemory()
        self.boot: str | None = None
        self.kept: bytes | None = None  # what the file of faults holds
        self.kept_problem: str | None = None
        self.doubted_since: float | None = None
        self.read: Read | None = None
        self.identities: Mapping[PciAddress, Gpu] = {}  # as each GPU last answered
        self.unasked: Drivers | None = None
        self.waking = threading.Event()
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self.run, name="hardware", daemon=True)

    def start(self) -> None:
        """Begins to look, and to hear the worker's events."""
        self.worker.on_event = self.told
        self.thread.start()

    def stop(self) -> None:
        """Ends the looking, and the worker, so that it need not wait for a reading."""
        self.ending.set()
        self.waking.set()
        self.worker.stop()
        if self.thread.ident is not None:
            self.thread.join()

    def wake(self) -> None:
        """Asks for a look, soon."""
        self.waking.set()

    def subscribe(self, callback: Callable[[Snapshot], None]) -> None:
        """Calls back with the latest snapshot, if there is one, and each that differs from it.

        Calls are one at a time and in order, from several threads; they should not take long.
        """
        with self.telling:
            self.subscribers.append(callback)
            if self.latest:
                callback(self.latest)

    def told(self, event: NvmlEvent) -> None:
        """An event of NVML: a fault in it counts at once, also while a reading hangs."""
        with self.telling:
            memory = with_event(self.memory, event, self.rules)
            if memory != self.memory:
                self.memory = memory
                self.keep()
                if self.latest:
                    self.tell(self.latest.machine)
        self.waking.set()

    def was_reset(self, address: PciAddress) -> None:
        """Takes an operator's word that a GPU was reset: its faults end when it stays well."""
        with self.telling:
            self.memory = with_reset(self.memory, address)
            self.keep()
        self.waking.set()

    def run(self) -> None:
        watch = self.listen()
        while not self.ending.is_set():
            self.waking.clear()  # before the look: what happens during it is worth another
            try:
                self.look()
            except Exception:
                # The thread must not end: without it no GPU would ever be seen again.
                log.exception("looking at the hardware failed; it is tried again")
            self.ending.wait(REST_S)
            self.waking.wait(timeout=max(0.0, self.wait_s() - REST_S))
        if watch:
            watch.close()

    def listen(self) -> UdevWatch | None:
        try:
            return self.watch(self.wake)
        except UdevError as error:
            log.warning("%s; looking every %g s instead", error, self.interval_s)
            return None

    def wait_s(self) -> float:
        """Seconds until the next look if nothing wakes it."""
        waits = [
            self.interval_s,
            self.worker.retry_in_s() if self.unasked is None else None,
            # Without a reading nothing ends, and looking again at once would be for nothing.
            next_end_s(self.memory, self.rules, now_s=self.clock()) if self.is_fresh else None,
            1.0 if self.doubted_since is not None else None,
            self.injection.wait_s if self.injection else None,
        ]
        return max(0.0, min(wait for wait in waits if wait is not None))

    def look(self) -> None:
        """Looks once, and tells what differs."""
        self.looks += 1
        try:
            host = read_host(self.sys, proc=self.proc)
        except SysfsError as error:
            self.say((str(error),))
            return
        self.recall(host.boot_id)
        before = self.read
        reading = self.ask(host)
        if self.ending.is_set():
            return  # the worker was ended: that says nothing of the machine
        doubt = self.doubt(before)
        trouble = self.worker.problem if self.unasked is None else None
        notes = self.worker.notes if reading else ()
        machine = None
        if (reading or self.unasked is not None) and not doubt:
            machine = assemble(host, reading, overrides=self.overrides)
        seen = machine or (self.latest.machine if self.latest else None)
        nowhere = without_numa(seen) if seen else None
        self.say((*host.problems, *filter(None, (trouble, doubt, nowhere)), *notes))
        if self.injection:
            why = self.injection.outgrown(
                host, machine if self.is_fresh else None, self.worker, now_s=self.clock()
            )
            if why:
                self.injection = None  # once is enough
                self.on_outgrown(why)
        if machine is None:
            return
        with self.telling:
            if reading and self.is_fresh:
                self.memory = with_reading(
                    self.memory,
                    machine,
                    reading,
                    self.rules,
                    now_s=self.clock(),
                    load=host.driver_load,
                )
                self.keep()
            machine = self.with_identities(machine)
            self.tell(machine)

    @property
    def is_fresh(self) -> bool:
        """Whether the reading in force was made by the last look."""
        return self.read is not None and self.read.fresh

    def doubt(self, before: Read | None) -> str | None:
        """Why the new reading is not believed yet, in words; the one before stays in force then."""
        if before is None or self.read is None or not self.is_fresh:
            self.doubted_since = None
            return None
        had = answering(before) & answering(replace(before, drivers=self.read.drivers))
        certain = any(gpu.error in RESET_ENDS for gpu in self.read.reading.gpus)
        if answering(self.read) or certain or not had:
            self.doubted_since = None
            return None
        now_s = self.clock()
        self.doubted_since = now_s if self.doubted_since is None else self.doubted_since
        if now_s - self.doubted_since >= DOUBT_S:
            self.doubted_since = None
            return None
        self.read = replace(before, fresh=False)
        return f"NVML works, and none of the {len(had)} GPUs that the driver has answers"

    def recall(self, boot: str | None) -> None:
        """Takes up, at the first look, what was remembered before a restart of ours."""
        if self.state is None or self.boot is not None or boot is None:
            return
        self.boot = boot
        try:
            memory = read_fault_file(self.state, boot=boot, rules=self.rules)
        except FaultFileError as error:
            log.warning("%s; it is ignored, and written anew", error)
            return
        if memory is None:
            return
        self.memory = memory
        for address, row in memory.gpus.items():
            for known in row.events:
                log.info("%s: remembered: %s", address, known.fault.detail)

    def keep(self) -> None:
        """Writes down what events told, where it differs. `telling` is held."""
        if self.state is None or self.boot is None:
            return
        text = fault_text(self.memory, boot=self.boot)
        if text == self.kept:
            return
        try:
            write_fault_file(self.state, text)
        except FaultFileError as error:
            if str(error) != self.kept_problem:
                log.warning("%s; a restart would forget what events told", error)
            self.kept_problem = str(error)
        else:
            self.kept, self.kept_problem = text, None

    def ask(self, host: Host) -> NvmlReading | None:
        """NVML's reading: a new one, else the last without what is gone, else None.

        Sets `unasked` where no driver has a GPU, so that there is nothing to wait for.
        """
        drivers = {device.address: device.driver for device in host.pci if device.is_gpu}
        if drivers == self.unasked and "nvidia" not in drivers.values():
            return None
        try:
            reading = self.worker.reading()
        except NvmlUnavailable:
            if self.read is None:
                self.unasked = None if "nvidia" in drivers.values() else drivers
                return None
            self.unasked = None
            self.read = replace(self.read, fresh=False)
            return still_there(self.read, drivers, released=self.worker.released)
        self.unasked = None
        self.read = Read(reading=reading, drivers=drivers, fresh=True)
        return reading

    def with_identities(self, machine: Machine) -> Machine:
        """The machine with what lost GPUs were: the kubelet knows them by it."""
        answering = {gpu.pci: gpu for gpu in machine.gpus if not gpu.lost and gpu.uuid}
        self.identities = {**self.identities, **answering}
        return replace(
            machine,
            gpus=tuple(
                remembered(gpu, self.identities[gpu.pci])
                if gpu.lost and gpu.pci in self.identities
                else gpu
                for gpu in machine.gpus
            ),
        )

    def tell(self, machine: Machine) -> None:
        """Makes the snapshot of now, and calls back when it differs. `telling` is held."""
        last = self.latest
        reading = self.read.reading if self.read else None
        self.latest = Snapshot(
            machine=machine,
            faults=faults(self.memory, machine, reading),
            taken_monotonic=self.clock(),
            nvml_age_s=self.worker.age_s if reading else None,
            problems=self.problems,
        )
        if last and (last.machine, last.faults) == (self.latest.machine, self.latest.faults):
            return
        for line, level in differences(last.faults if last else {}, self.latest):
            log.log(level, "%s", line)
        for callback in self.subscribers:
            callback(self.latest)

    def say(self, problems: tuple[str, ...]) -> None:
        """Logs each problem when it begins and when it ends."""
        for problem in problems:
            if problem not in self.problems:
                log.warning("%s", problem)
        for problem in self.problems:
            if problem not in problems:
                log.info("no longer: %s", problem)
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The last good reading, and which drivers had the GPUs then."""

    reading: NvmlReading
    drivers: Drivers
    fresh: bool  # made by the last look


def answering(read: Read) -> frozenset[PciAddress]:
    """The GPUs of the driver that answered."""
    found = (parse_address(gpu.bus_id) for gpu in read.reading.gpus if gpu.error is None)
    return frozenset(a for a in found if a is not None and read.drivers.get(a) == "nvidia")


def without_numa(machine: Machine) -> str | None:
    """Of which GPUs nobody states the NUMA node, where there are several, in words."""
    if sum(bool(node.cpus) for node in machine.numa_nodes) < 2:
        return None
    found = ((gpu, machine.device(gpu.pci)) for gpu in machine.gpus)
    names = ", ".join(
        f"{gpu.name} ({gpu.pci})"
        for gpu, device in found
        if device is None or device.numa_from is None or not device.numa_from.is_stated
    )
    return f"the kernel states no NUMA node of {names}; numa.overrides can" if names else None


def differences(before: Faults, seen: Snapshot) -> Iterator[tuple[str, int]]:
    """A line for each fault that began or ended, and its level. Information is for metrics."""
    for gpu in seen.machine.gpus:
        was = {fault.reason: fault for fault in before.get(gpu.pci, ())}
        now = {fault.reason: fault for fault in seen.faults.get(gpu.pci, ())}
        for reason in sorted(now.keys() - was.keys()):
            fault = now[reason]
            if fault.severity is not FaultClass.INFO:
                yield f"{gpu.name} ({gpu.pci}) {in_words(fault)}", logging.WARNING
        for reason in sorted(was.keys() - now.keys()):
            if was[reason].severity is not FaultClass.INFO:
                yield f"{gpu.name} ({gpu.pci}) no longer {reason}", logging.INFO


def in_words(fault: Fault) -> str:
    """`withheld: xid-79: the driver reported Xid 79, …`"""
    place = "" if fault.gpu_instance is None else f" (GPU instance {fault.gpu_instance})"
    verb = "withheld" if fault.severity is FaultClass.WITHHOLD else "degraded"
    return f"{verb}: {fault.reason}{place}: {fault.detail}"


def still_there(read: Read, drivers: Drivers, *, released: bool) -> NvmlReading:
    """An old reading without the GPUs that left the PCI tree since, or that NVIDIA's driver left.

    Who had NVML released does so to unload the driver, and the list is to stay meanwhile.
    """
    gone = {address for address in read.drivers if address not in drivers}
    unbound = {
        address
        for address, driver in read.drivers.items()
        if driver == "nvidia" and drivers.get(address) != "nvidia"
    }
    without = gone if released else gone | unbound
    return msgspec.structs.replace(
        read.reading,
        gpus=tuple(gpu for gpu in read.reading.gpus if parse_address(gpu.bus_id) not in without),
    )


def remembered(lost: Gpu, was: Gpu) -> Gpu:
    """A lost GPU with the name and size it had. Its links and slices are gone with it."""
    return replace(
        lost,
        uuid=was.uuid,
        product=was.product,
        memory_bytes=was.memory_bytes,
        minor=was.minor,
        module=was.module,
    )
