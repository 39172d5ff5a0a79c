"""Readings and events → which GPU is sick, how badly, and why: values and pure functions.

What a reading shows (lost, fabric, recovery action, remapped rows, links) is a fault as long as
readings show it. What only an event told (an Xid) has no state that could be read, so it stays
until there is evidence that the GPU was reset, and then for a cool-down:

* the GPU was lost, or absent, in some reading after the event, and answers again;
* NVML asked for a recovery after the event, and no longer does;
* another driver version is loaded.

A GPU that merely goes on answering is no evidence: after most Xids it does. What happens while no
worker listens (it is being replaced, or NVML is released) is not heard, and a new daemon starts
without memory of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rte.discovery import parse_address
from rte.discovery.reading import GpuReading, NvmlEvent, NvmlReading
from rte.model import (
    Fabric,
    FabricState,
    Fault,
    FaultClass,
    Faults,
    Gpu,
    Machine,
    PciAddress,
)

# Xids that an application causes; the GPU is well afterwards. NVIDIA's device plugin ignores them:
# graphics engine exception, memory page fault, stopped processing, preemptive cleanup, video
# processor exception, context switch time-out.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})

XID_EVENT = 0x8
# Events that condemn a GPU by themselves, as an Xid does.
EVENT_REASONS = {
    0x800: ("dram-retirement-failure", "a bad DRAM row could not be retired"),
    0x2000: ("fatal-poison", "poisoned memory was consumed"),
    0x4000: ("gpu-unavailable", "NVML reports the GPU as unavailable"),
}

RECOVERY_ACTIONS = {
    1: (FaultClass.WITHHOLD, "gpu-reset", "must be reset"),
    2: (FaultClass.WITHHOLD, "node-reboot", "needs the node to be rebooted"),
    3: (FaultClass.DEGRADED, "drain-p2p", "must be drained of peer-to-peer work"),
    4: (FaultClass.WITHHOLD, "drain-and-reset", "must be drained and reset"),
    5: (FaultClass.DEGRADED, "recover-imex-domain", "needs its IMEX domain to be recovered"),
    6: (FaultClass.WITHHOLD, "bus-reset", "needs a reset of its bus"),
    7: (FaultClass.WITHHOLD, "system-reboot", "needs the whole system to be rebooted"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRules:
    """What counts as a fault, as configured."""

    ignored_xids: frozenset[int] = APPLICATION_XIDS
    all_xids_ignored: bool = False
    """Only `enabled_xids` count."""
    enabled_xids: frozenset[int] = frozenset()
    """They count whatever else is said."""
    all_xids_enabled: bool = False
    cool_down_s: float = 30.0
    """How long an event's fault stays once there is evidence that it ended."""

    def counts(self, xid: int) -> bool:
        """Whether an Xid makes a GPU Unhealthy."""
        if self.all_xids_enabled or xid in self.enabled_xids:
            return True
        return not self.all_xids_ignored and xid not in self.ignored_xids


def parse_fault_rules(disable: str, enable: str, *, cool_down_s: float = 30.0) -> FaultRules:
    """Rules from DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS, as NVIDIA's plugin has them.

    Each is a list of Xids with commas, or `all` or `xids`. The application Xids are always among
    the disabled ones; what is enabled wins over what is disabled. Raises ValueError for a word
    that is neither, where NVIDIA's plugin goes on without it.
    """
    all_ignored, ignored = parse_xids(disable)
    all_enabled, enabled = parse_xids(enable)
    return FaultRules(
        ignored_xids=APPLICATION_XIDS | ignored,
        all_xids_ignored=all_ignored,
        enabled_xids=enabled,
        all_xids_enabled=all_enabled,
        cool_down_s=cool_down_s,
    )


def parse_xids(text: str) -> tuple[bool, frozenset[int]]:
    """Whether all are meant, and the numbers that are named."""
    words = {word.strip().lower() for word in text.split(",")} - {""}
    numbers = words - {"all", "xids"}
    for word in numbers:
        if not (word.isascii() and word.isdigit()):
            raise ValueError(f"{text!r}: expected Xid numbers, 'all' or 'xids', got {word!r}")
    return numbers != words, frozenset(int(word) for word in numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFault:
    """A fault that only an event told."""

    fault: Fault
    was_silent: bool = False  # lost or absent since
    recovery_asked: bool = False  # since, or already when it came
    ended_s: float | None = None  # monotonic; when the evidence of its end was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMemory:
    """What must be remembered between readings. The first one is empty."""

    driver: str | None = None
    events: Mapping[PciAddress, tuple[EventFault, ...]] = field(default_factory=dict)
    lanes: Mapping[PciAddress, int] = field(default_factory=dict)
    """The most active NVLink lanes each GPU has had."""


def with_event(memory: FaultMemory, event: NvmlEvent, rules: FaultRules) -> FaultMemory:
    """The memory after an event. Repetitions of a fault are one fault."""
    address = parse_address(event.bus_id)
    if address is None:
        return memory
    if event.type == XID_EVENT and rules.counts(event.data):
        fault = withhold(f"xid-{event.data}", f"the driver reported Xid {event.data}")
    elif event.type in EVENT_REASONS:
        fault = withhold(*EVENT_REASONS[event.type])
    else:
        return memory
    others = tuple(known for known in memory.events.get(address, ()) if known.fault != fault)
    return replace(memory, events={**memory.events, address: (*others, EventFault(fault=fault))})


def with_reading(
    memory: FaultMemory, machine: Machine, reading: NvmlReading, rules: FaultRules, *, now_s: float
) -> FaultMemory:
    """The memory after a reading and the machine that it is part of."""
    if memory.driver not in (None, reading.driver):
        memory = FaultMemory()
    answers = by_address(reading)
    gpus = {gpu.pci: gpu for gpu in machine.gpus}
    looked = {
        address: tuple(
            look_again(known, gpus.get(address), answers.get(address), now_s=now_s)
            for known in faults
        )
        for address, faults in memory.events.items()
    }
    staying = {
        address: tuple(known for known in faults if not over(known, rules, now_s=now_s))
        for address, faults in looked.items()
    }
    lanes = {
        gpu.pci: max(gpu_lanes, memory.lanes.get(gpu.pci, 0))
        for gpu in machine.gpus
        if (gpu_lanes := active_lanes(gpu)) is not None
    }
    return FaultMemory(
        driver=reading.driver,
        events={address: faults for address, faults in staying.items() if faults},
        lanes={**memory.lanes, **lanes},
    )


def look_again(
    known: EventFault, gpu: Gpu | None, answer: GpuReading | None, *, now_s: float
) -> EventFault:
    """What a reading says of the end of a fault."""
    if gpu is None or gpu.lost or answer is None:
        return replace(known, was_silent=True, ended_s=None)
    if answer.recovery_action:
        return replace(known, recovery_asked=True, ended_s=None)
    if (known.was_silent or known.recovery_asked) and known.ended_s is None:
        return replace(known, ended_s=now_s)
    return known


def over(known: EventFault, rules: FaultRules, *, now_s: float) -> bool:
    return known.ended_s is not None and now_s - known.ended_s >= rules.cool_down_s


def faults(memory: FaultMemory, machine: Machine, reading: NvmlReading | None) -> Faults:
    """All faults of now, those that withhold a GPU first, then by reason."""
    answers = by_address(reading) if reading else {}
    usual = usual_lanes(machine.gpus)
    found = {
        gpu.pci: sorted(
            {
                *gpu_faults(gpu, memory, usual),
                *(reading_faults(answers[gpu.pci]) if gpu.pci in answers else ()),
                *(known.fault for known in memory.events.get(gpu.pci, ())),
            },
            key=lambda fault: (ORDER.index(fault.severity), fault.reason),
        )
        for gpu in machine.gpus
    }
    return {address: tuple(rows) for address, rows in found.items() if rows}


ORDER = (FaultClass.WITHHOLD, FaultClass.DEGRADED, FaultClass.INFO)


def gpu_faults(gpu: Gpu, memory: FaultMemory, usual: Mapping[str | None, int]) -> Iterable[Fault]:
    if gpu.lost:
        yield withhold("lost", gpu.lost)
        return
    if gpu.fabric:
        yield from fabric_faults(gpu.fabric)
    lanes, most = active_lanes(gpu), memory.lanes.get(gpu.pci, 0)
    if lanes is None:
        return
    if lanes < most:
        yield degraded("nvlink-lost", f"{lanes} of {most} NVLink lanes are active")
    elif lanes < usual.get(gpu.product, 0):
        others = usual[gpu.product]
        yield degraded(
            "nvlink-missing", f"{lanes} NVLink lanes are active, {others} of most such GPUs here"
        )


def fabric_faults(fabric: Fabric) -> Iterable[Fault]:
    """CUDA does not start on a GPU whose fabric is not complete."""
    if fabric.state is FabricState.NOT_STARTED:
        yield withhold("fabric-not-started", "the fabric manager has not started on this GPU")
    elif fabric.state is FabricState.IN_PROGRESS:
        yield withhold(
            "fabric-in-progress", "the fabric manager (from NVLink 5 also NVLSM) is not done"
        )
    elif fabric.state is FabricState.COMPLETED and fabric.status:
        # The status means something only in this state.
        yield withhold("fabric-failed", f"the fabric probe ended with NVML status {fabric.status}")
    elif fabric.state is FabricState.COMPLETED and fabric.healthy is False:
        yield degraded("fabric-unhealthy", "NVML's fabric health summary is not healthy")


def reading_faults(answer: GpuReading) -> Iterable[Fault]:
    """What the machine has no words for: counters and wishes of a GPU that answers."""
    if answer.recovery_action in RECOVERY_ACTIONS:
        severity, reason, need = RECOVERY_ACTIONS[answer.recovery_action]
        yield Fault(severity=severity, reason=f"recovery-{reason}", detail=f"the GPU {need}")
    elif answer.recovery_action:
        # A later driver's number: whatever it is, NVML does not call the GPU usable as it is.
        number = answer.recovery_action
        yield withhold(f"recovery-{number}", f"NVML asks for recovery action {number}")
    if answer.remap:
        _, _, pending, failed = answer.remap
        if failed:
            yield withhold("remap-failed", "a bad memory row could not be remapped")
        elif pending:
            yield degraded("remap-pending", "a bad memory row is remapped at the next reset")
    if answer.ecc_uncorrected:
        yield Fault(
            severity=FaultClass.INFO,
            reason="ecc-uncorrected",
            detail=f"{answer.ecc_uncorrected} uncorrected memory errors since the driver loaded",
        )


def active_lanes(gpu: Gpu) -> int | None:
    """Active NVLink lanes; None where their absence means nothing: no answer, or MIG is on."""
    return None if gpu.lost or gpu.mig_enabled else sum(end.lanes for end in gpu.links)


def usual_lanes(gpus: Iterable[Gpu]) -> Mapping[str | None, int]:
    """For each product the lane count that more than half of its GPUs here have."""
    counts: dict[str | None, Counter[int]] = {}
    for gpu in gpus:
        if (lanes := active_lanes(gpu)) is not None:
            counts.setdefault(gpu.product, Counter())[lanes] += 1
    usual = {product: seen.most_common(1)[0] for product, seen in counts.items()}
    return {
        product: most
        for product, (most, number) in usual.items()
        if 2 * number > counts[product].total()
    }


def by_address(reading: NvmlReading) -> Mapping[PciAddress, GpuReading]:
    """The GPUs that answer."""
    return {
        address: gpu
        for gpu in reading.gpus
        if gpu.error is None and (address := parse_address(gpu.bus_id))
    }


def withhold(reason: str, detail: str) -> Fault:
    return Fault(severity=FaultClass.WITHHOLD, reason=reason, detail=detail)


def degraded(reason: str, detail: str) -> Fault:
    return Fault(severity=FaultClass.DEGRADED, reason=reason, detail=detail)
