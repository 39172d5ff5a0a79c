"""Readings and events → which GPU is sick, how badly, and why: values and pure functions.

docs/health.md has the table of faults, what ends each, and what an operator does about it.

What a reading shows (lost, fabric, recovery action, remapped rows) is a fault as long as readings
show it. What only an event told (an Xid) has no state that could be read, so it stays until there
is a sign that the GPU was reset:

* NVML called it lost or in need of a reset, or it had left the machine, and it answers again;
* NVML asked for a reset, and no longer does;
* a row remapping waited for a reset, and no longer does;
* the driver was loaded anew;
* an operator says so.

A GPU that merely goes on answering is no sign: after most Xids it does. Either way the GPU must
stay well for a cool-down before it gets work again, which doubles when faults follow one another.
What happens while no worker listens (it is being replaced, or NVML is released) is not heard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rte.discovery import parse_address
from rte.discovery.reading import GpuReading, NvmlEvent, NvmlReading
from rte.model import (
    DeviceId,
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

# What people search for beside the number; from NVIDIA's catalogue, in short.
XID_NAMES = {
    48: "uncorrectable ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "memory row remapping recorded",
    64: "memory row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP firmware does not answer",
    120: "GSP firmware error",
    140: "unrecovered ECC error",
    143: "GPU initialization failed",
    154: "the recovery action changed",
}
# They concern the whole GPU even when the driver names the GPU instance that ran.
WHOLE_GPU_XIDS = frozenset({48, 61, 62, 64, 74, 79, 95, 119, 120, 140, 143, 154})
# These announce a state that a reading shows. Where the driver has the reading, it counts instead.
REMAP_XIDS, RECOVERY_XIDS = frozenset({63, 64}), frozenset({154})

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

# nvmlReturn_t that only a reset ends: the GPU is lost, a reset is required. Others come and go.
RESET_ENDS = frozenset({15, 16})

# Bits of NVML's clock event reasons: the driver's and the hardware's slowdown by heat.
THERMAL_SLOWDOWN = 0x20 | 0x40

# Faults that follow the end of another within this time double the cool-down, six times at most.
RELAPSE_S = 3600.0
DOUBLINGS = 6
EVENTS_A_GPU = 16  # the oldest is forgotten first: one is enough to withhold the GPU


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
    """How long a GPU must have been well again before it gets work."""

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


# What is remembered between readings


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFault:
    """A fault that only an event told."""

    fault: Fault
    xid: int | None = None
    reset_asked: bool = False  # NVML asked for a reset since, or already when it came
    remap_pending: bool = False  # a row remapping waited for a reset, likewise
    sign: str | None = None  # that the GPU was reset since, in words
    ended_s: float | None = None  # since when the GPU has been well with a sign


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFault:
    """A withholding fault that readings show, or showed until lately."""

    fault: Fault
    ended_s: float | None = None  # since when readings no longer show it


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """What is remembered of one GPU."""

    uuid: DeviceId | None = None
    lanes: int = 0  # the most active NVLink lanes of this boot
    events: tuple[EventFault, ...] = ()
    states: tuple[StateFault, ...] = ()
    ends: int = 0  # of withholding faults that followed one another
    ended_s: float | None = None  # when the last of them ended

    @property
    def known(self) -> tuple[EventFault | StateFault, ...]:
        return (*self.events, *self.states)

    def relapses(self, now_s: float) -> int:
        recent = self.ended_s is not None and now_s - self.ended_s < RELAPSE_S
        return self.ends if recent else 0


NOTHING = GpuMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMemory:
    """What must be remembered between readings; times are monotonic. The first one is empty."""

    load: str | None = None  # the driver's version, and what tells one loading from another
    gpus: Mapping[PciAddress, GpuMemory] = field(default_factory=dict)


def with_event(memory: FaultMemory, event: NvmlEvent, rules: FaultRules) -> FaultMemory:
    """The memory after an event. Repetitions of a fault are one fault."""
    address = parse_address(event.bus_id)
    fault = event_fault(event, rules)
    if address is None or fault is None:
        return memory
    xid = event.data if event.type == XID_EVENT else None
    was = memory.gpus.get(address, NOTHING)
    others = tuple(known for known in was.events if known.fault != fault)[1 - EVENTS_A_GPU :]
    now = replace(was, events=(*others, EventFault(fault=fault, xid=xid)))
    return replace(memory, gpus={**memory.gpus, address: now})


def event_fault(event: NvmlEvent, rules: FaultRules) -> Fault | None:
    if event.type != XID_EVENT:
        return withhold(*EVENT_REASONS[event.type]) if event.type in EVENT_REASONS else None
    if not rules.counts(event.data):
        return None
    name = XID_NAMES.get(event.data)
    detail = f"the driver reported Xid {event.data}" + (f", {name}" if name else "")
    fault = withhold(f"xid-{event.data}", detail)
    if event.gpu_instance is None or event.data in WHOLE_GPU_XIDS:
        return fault
    return replace(fault, gpu_instance=event.gpu_instance, compute_instance=event.compute_instance)


def with_reset(memory: FaultMemory, address: PciAddress) -> FaultMemory:
    """The memory after an operator said that a GPU was reset."""
    was = memory.gpus.get(address, NOTHING)
    told = tuple(replace(known, sign="an operator says so") for known in was.events)
    return replace(memory, gpus={**memory.gpus, address: replace(was, events=told)})


def with_reading(
    memory: FaultMemory,
    machine: Machine,
    reading: NvmlReading,
    rules: FaultRules,
    *,
    now_s: float,
    load: str | None = None,
) -> FaultMemory:
    """The memory after a reading and the machine that it is part of.

    `load` tells one loading of the driver from another of the same version.
    """
    load = " ".join(filter(None, (reading.driver, load)))
    answers = by_address(reading)
    gpus = {gpu.pci: gpu for gpu in machine.gpus}
    known = at_home(memory.gpus, answers)
    now = {
        address: look_again(
            known.get(address, NOTHING),
            Seen(
                gpu=gpus.get(address),
                answer=answers.get(address),
                codes=error_codes(reading, address),
                reloaded=memory.load not in (None, load),
            ),
            rules,
            now_s=now_s,
        )
        for address in {**known, **gpus}
    }
    return FaultMemory(load=load, gpus={a: row for a, row in now.items() if row != NOTHING})


def at_home(
    gpus: Mapping[PciAddress, GpuMemory], answers: Mapping[PciAddress, GpuReading]
) -> Mapping[PciAddress, GpuMemory]:
    """What is remembered goes with the GPU; of one that was exchanged nothing is."""
    places = {answer.uuid: address for address, answer in answers.items() if answer.uuid}
    found = {}
    for address, row in gpus.items():
        there = answers[address].uuid if address in answers else None
        if row.uuid in places:
            found[places[row.uuid]] = row
        elif row.uuid is None or there is None:
            found[address] = row
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one reading says of one GPU."""

    gpu: Gpu | None  # None: not in the machine
    answer: GpuReading | None  # None: it does not answer
    codes: frozenset[int]  # nvmlReturn_t of entries that are, or may be, this GPU's
    reloaded: bool  # the driver was, since the last reading


def look_again(row: GpuMemory, seen: Seen, rules: FaultRules, *, now_s: float) -> GpuMemory:
    """What is remembered of a GPU after a reading."""
    lanes = active_lanes(seen.gpu) if seen.gpu else None
    uuid = seen.answer.uuid if seen.answer else None
    events = [again for known in row.events if (again := event_again(known, seen, rules, now_s))]
    states = list(states_again(row.states, seen, now_s))
    events_over = [known for known in events if over(known, row, rules, now_s=now_s)]
    states_over = [known for known in states if over(known, row, rules, now_s=now_s)]
    ended = bool(events_over or states_over)
    return GpuMemory(
        uuid=DeviceId(uuid) if uuid else row.uuid,
        lanes=max(row.lanes, lanes or 0),
        events=tuple(known for known in events if known not in events_over),
        states=tuple(known for known in states if known not in states_over),
        ends=row.relapses(now_s) + 1 if ended else row.ends,
        ended_s=now_s if ended else row.ended_s,
    )


def event_again(
    known: EventFault, seen: Seen, rules: FaultRules, now_s: float
) -> EventFault | None:
    """What a reading says of the end of a fault; None where it shows the state itself."""
    sign = "the driver was loaded anew" if seen.reloaded else known.sign
    if seen.gpu is None or (seen.answer is None and seen.codes & RESET_ENDS):
        sign = sign or "it was lost, and answers again"
    if seen.answer is None:
        return replace(known, sign=sign, ended_s=None)
    enabled = rules.all_xids_enabled or known.xid in rules.enabled_xids
    if not enabled and is_read(known.xid, seen.answer):
        return None
    _, _, pending, failed = seen.answer.remap or (0, 0, False, False)
    if asks_reset(seen.answer):
        return replace(known, sign=sign, reset_asked=True, ended_s=None)
    if known.reset_asked:
        sign = sign or "NVML asked for a reset, and no longer does"
    if known.remap_pending and not pending and not failed:
        sign = sign or "a row remapping waited for a reset, and no longer does"
    ended_s = now_s if sign and known.ended_s is None else known.ended_s
    return replace(known, sign=sign, remap_pending=pending, ended_s=ended_s)


def is_read(xid: int | None, answer: GpuReading) -> bool:
    """Whether what the Xid announces is part of the reading, and so counts by itself."""
    if xid in REMAP_XIDS:
        return answer.remap is not None
    return xid in RECOVERY_XIDS and answer.recovery_action is not None


def asks_reset(answer: GpuReading) -> bool:
    """Whether NVML wants this GPU to be reset, in whatever way."""
    if not answer.recovery_action:
        return False
    severity, _, _ = RECOVERY_ACTIONS.get(answer.recovery_action, (FaultClass.WITHHOLD, "", ""))
    return severity is FaultClass.WITHHOLD


def states_again(known: Iterable[StateFault], seen: Seen, now_s: float) -> Iterator[StateFault]:
    """The withholding faults that a reading shows, and those that it no longer shows."""
    if seen.gpu is None:
        return  # it is not there to be withheld
    shown = [
        fault
        for fault in (*gpu_faults(seen.gpu), *(reading_faults(seen.answer) if seen.answer else ()))
        if fault.severity is FaultClass.WITHHOLD
    ]
    yield from (StateFault(fault=fault) for fault in shown)
    reasons = {fault.reason for fault in shown}
    for before in known:
        if before.fault.reason not in reasons:
            yield before if before.ended_s is not None else replace(before, ended_s=now_s)


def over(
    known: EventFault | StateFault, row: GpuMemory, rules: FaultRules, *, now_s: float
) -> bool:
    return known.ended_s is not None and now_s >= end_s(known, row, rules, now_s=now_s)


def end_s(
    known: EventFault | StateFault, row: GpuMemory, rules: FaultRules, *, now_s: float
) -> float:
    """When a fault is over whose end has been seen."""
    relapses = row.relapses(now_s)
    # Each boot has a time before its fabric is complete, and CUDA works from that moment on.
    starting = not relapses and known.fault.reason.startswith("fabric-")
    cool_down_s = 0.0 if starting else rules.cool_down_s * 2 ** min(relapses, DOUBLINGS)
    return (now_s if known.ended_s is None else known.ended_s) + cool_down_s


def next_end_s(memory: FaultMemory, rules: FaultRules, *, now_s: float) -> float | None:
    """Seconds until a cool-down is over, if nothing happens meanwhile; None: none is under way."""
    ends = [
        end_s(known, row, rules, now_s=now_s)
        for row in memory.gpus.values()
        for known in row.known
        if known.ended_s is not None
    ]
    return max(0.0, min(ends) - now_s) if ends else None


# What it comes to


def faults(memory: FaultMemory, machine: Machine, reading: NvmlReading | None) -> Faults:
    """All faults of now, those that withhold a GPU first, then by reason."""
    answers = by_address(reading) if reading else {}
    usual = usual_lanes(machine.gpus)
    found = {
        gpu.pci: tuple(
            sorted(
                all_faults(gpu, memory.gpus.get(gpu.pci, NOTHING), answers.get(gpu.pci), usual),
                key=lambda fault: (ORDER.index(fault.severity), fault.reason, fault.detail),
            )
        )
        for gpu in machine.gpus
    }
    return {address: rows for address, rows in found.items() if rows}


ORDER = (FaultClass.WITHHOLD, FaultClass.DEGRADED, FaultClass.INFO)


def all_faults(
    gpu: Gpu, row: GpuMemory, answer: GpuReading | None, usual: Mapping[str | None, int]
) -> set[Fault]:
    shown = {*gpu_faults(gpu), *(reading_faults(answer) if answer else ())}
    reasons = {fault.reason for fault in shown}
    return {
        *shown,
        *lane_faults(gpu, row.lanes, usual),
        *(known.fault for known in row.events),
        *(watched(known.fault) for known in row.states if known.fault.reason not in reasons),
    }


def watched(fault: Fault) -> Fault:
    """A fault that is no longer there, until the cool-down is over."""
    return replace(fault, detail=f"{fault.detail}; that has ended, and is watched for a while")


def gpu_faults(gpu: Gpu) -> Iterator[Fault]:
    if gpu.lost:
        yield withhold("lost", gpu.lost)
    elif gpu.fabric:
        yield from fabric_faults(gpu.fabric)


def lane_faults(gpu: Gpu, most: int, usual: Mapping[str | None, int]) -> Iterator[Fault]:
    """Fewer lanes than this boot has seen, or than most GPUs of the product here have."""
    lanes = active_lanes(gpu)
    if lanes is None:
        return
    if lanes < most:
        yield degraded("nvlink-lost", f"{lanes} of {most} NVLink lanes are active")
    elif lanes < usual.get(gpu.product, 0):
        others = usual[gpu.product]
        yield degraded(
            "nvlink-missing", f"{lanes} NVLink lanes are active, {others} of most such GPUs here"
        )


def fabric_faults(fabric: Fabric) -> Iterator[Fault]:
    """CUDA does not start (error 802) on a GPU whose fabric is not complete."""
    if fabric.state is FabricState.NOT_STARTED:
        yield withhold("fabric-not-started", "the fabric manager has not started on this GPU")
    elif fabric.state is FabricState.IN_PROGRESS:
        yield withhold(
            "fabric-in-progress", "the fabric manager (from NVLink 5 also NVLSM) is not done"
        )
    elif fabric.state is FabricState.COMPLETED and fabric.status:
        # The status means something only in this state. The graph gives such a GPU no links.
        yield degraded(
            "fabric-failed",
            f"the fabric probe ended with NVML status {fabric.status}: the GPU works alone, "
            "without NVLink to others",
        )
    elif fabric.state is FabricState.COMPLETED and fabric.healthy is False:
        yield degraded("fabric-unhealthy", "NVML's fabric health summary is not healthy")


def reading_faults(answer: GpuReading) -> Iterator[Fault]:
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
        yield info(
            "ecc-uncorrected",
            f"{answer.ecc_uncorrected} uncorrected memory errors since the driver loaded",
        )
    if (answer.clock_events or 0) & THERMAL_SLOWDOWN:
        yield info("thermal-slowdown", "the clocks are held down because of heat")


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


def error_codes(reading: NvmlReading, address: PciAddress) -> frozenset[int]:
    """How NVML refused the GPU at an address; a lost GPU's entry may have no address at all."""
    return frozenset(
        gpu.error
        for gpu in reading.gpus
        if gpu.error is not None and parse_address(gpu.bus_id) in (None, address)
    )


def withhold(reason: str, detail: str) -> Fault:
    return Fault(severity=FaultClass.WITHHOLD, reason=reason, detail=detail)


def degraded(reason: str, detail: str) -> Fault:
    return Fault(severity=FaultClass.DEGRADED, reason=reason, detail=detail)


def info(reason: str, detail: str) -> Fault:
    return Fault(severity=FaultClass.INFO, reason=reason, detail=detail)
