"""NVML → NvmlReading, in a process of its own: the only caller of NVML, started by nvml_worker.

Requests come on standard input and answers leave on standard output, a line of JSON each
(reading.WorkerRequest, reading.WorkerLine). The session opens with the first request to read and
stays open for events. After a failure of NVML as a whole the process says so and ends: only a new
one can load the library of a driver that was upgraded meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import pynvml

from rte.discovery.reading import (
    EVENT_WAIT_MS,
    FabricReading,
    GpuReading,
    LinkReading,
    MigReading,
    NvmlEvent,
    NvmlFailure,
    NvmlReading,
    WorkerLine,
    WorkerRequest,
)

T = TypeVar("T")

# Without a session, a driver or a matching library no further call can succeed.
SESSION_LOST = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}
GPU_SILENT = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}
# How NVML says that this GPU, driver or link has no such thing. Other codes are worth a note.
ABSENT = {
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
}

P2P_READ = 0  # pynvml's own constant is the tuple (0,): a stray comma
# Link numbers can have holes. No product has eight missing in a row below its last link; the
# bound only ends a library that answers for every number. NVML_NVLINK_MAX_LINKS grew 6, 12, 18,
# 36 with the header, so it says nothing of the driver.
LINK_HOLE = 8
LINK_BOUND = 128
NODE_WORDS = 16  # Linux has at most 1 024 NUMA nodes
CPU_WORDS = 128  # and 8 192 CPUs
LINK_ERRORS = (
    pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
    pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
)
LINK_ERROR_FIELDS = (
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
)

# Only these are worth waking for; P-state and clock changes come by the thousand.
WANTED_EVENTS = (
    pynvml.nvmlEventTypeXidCriticalError
    | pynvml.nvmlEventTypeDoubleBitEccError
    | pynvml.nvmlEventMigConfigChange
    | 0x400  # DRAM retirement
    | 0x800  # DRAM retirement failure
    | 0x2000  # fatal poison
    | 0x4000  # GPU unavailable
    | 0x8000  # GPU recovery action
)
NO_INSTANCE = 0xFFFFFFFF
FAILED_PAUSE_S = 0.5  # after a wait that failed: what other GPUs report is late by as much


class NvmlFault(Exception):
    """NVML as a whole does not work: which call said so, and nvmlReturn_t."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {error_text(code)} ({code})")
        self.call = call
        self.code = code


class GpuSilent(Exception):
    """One GPU does not answer: nvmlReturn_t."""

    def __init__(self, code: int) -> None:
        super().__init__(error_text(code))
        self.code = code


def error_text(code: int) -> str:
    """NVML's words, without asking the library, which may be the one that fails."""
    return str(pynvml.NVMLError._errcode_to_string.get(code, "NVML error")).rstrip(".")


# What failed unexpectedly in one reading, each once, in order.
Notes = dict[str, None]


def open_nvml() -> None:
    """Opens one session. Raises NvmlFault."""
    try:
        pynvml.nvmlInitWithFlags(0)
    except pynvml.NVMLError as error:
        raise NvmlFault("nvmlInit", error.value) from error


def read_nvml(notes: Notes) -> NvmlReading:
    """All that NVML says now, by the open session. Raises NvmlFault when that is nothing.

    A GPU that does not answer is a GpuReading with `error`; the others are read all the same.
    Calls that failed for no good reason are added to `notes`.
    """
    driver = whole(pynvml.nvmlSystemGetDriverVersion)
    count = whole(pynvml.nvmlDeviceGetCount)
    # By index, not by the addresses of sysfs: that is how CUDA and nvidia-smi count.
    opened = [open_gpu(index) for index in range(count)]
    gpus, answering = [], []
    for index, handle in enumerate(opened):
        gpu = GpuReading(index=index, error=handle) if isinstance(handle, int) else None
        gpu = gpu or read_gpu(index, handle, notes)
        gpus.append(gpu)
        if gpu.error is None:
            answering.append((index, handle))
    return NvmlReading(
        driver=driver,
        nvml=system(pynvml.nvmlSystemGetNVMLVersion),
        cuda=system(pynvml.nvmlSystemGetCudaDriverVersion),
        gpus=tuple(gpus),
        levels=read_levels(answering, notes),
        p2p=read_p2p(answering, notes),
    )


def whole(call: Callable[[], T]) -> T:
    """An answer without which there is no reading."""
    try:
        return call()
    except pynvml.NVMLError as error:
        raise NvmlFault(call.__name__, error.value) from error


def system(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except pynvml.NVMLError as error:
        if error.value in SESSION_LOST:
            raise NvmlFault(call.__name__, error.value) from error
        return None


def open_gpu(index: int) -> Any:
    """The handle of an index, or the nvmlReturn_t that refused it."""
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        if error.value in SESSION_LOST:
            raise NvmlFault("nvmlDeviceGetHandleByIndex", error.value) from error
        return int(error.value)


class Asking:
    """Asks about one GPU: None is "has no such thing", GpuSilent ends the GPU's reading."""

    def __init__(self, handle: Any, index: int, notes: Notes) -> None:
        self.handle = handle
        self.index = index
        self.notes = notes

    def must(self, call: Callable[..., T], *args: Any) -> T:
        """An answer without which the GPU is of no use. Raises GpuSilent."""
        try:
            return call(self.handle, *args)
        except pynvml.NVMLError as error:
            if error.value in SESSION_LOST:
                raise NvmlFault(call.__name__, error.value) from error
            raise GpuSilent(error.value) from error

    def __call__(self, call: Callable[..., T], *args: Any) -> T | None:
        return self.of(self.handle, call, *args)

    def of(self, handle: Any, call: Callable[..., T], *args: Any) -> T | None:
        try:
            return call(handle, *args)
        except pynvml.NVMLError as error:
            if error.value in SESSION_LOST:
                raise NvmlFault(call.__name__, error.value) from error
            if error.value in GPU_SILENT:
                raise GpuSilent(error.value) from error
            if error.value not in ABSENT:
                self.note(call, f"{error_text(error.value)} ({error.value})")
        except UnicodeDecodeError:
            # nvidia-ml-py decodes every character array as UTF-8, also one with rubbish in it.
            self.note(call, "text that is no UTF-8")
        return None

    def note(self, call: Callable[..., Any], what: str) -> None:
        self.notes[f"GPU {self.index}: {call.__name__}: {what}"] = None


def read_gpu(index: int, handle: Any, notes: Notes) -> GpuReading:
    ask = Asking(handle, index, notes)
    bus_id = None
    try:
        bus_id = str(ask.must(pynvml.nvmlDeviceGetPciInfo).busId)
        uuid = ask.must(pynvml.nvmlDeviceGetUUID)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
        mode = ask(pynvml.nvmlDeviceGetMigMode)
        most = ask(pynvml.nvmlDeviceGetMaxMigDeviceCount) if mode else None
        fields = read_fields(ask, [(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0)])
        return GpuReading(
            index=index,
            bus_id=bus_id,
            uuid=uuid,
            name=ask(pynvml.nvmlDeviceGetName),
            memory_bytes=int(memory.total) if memory else None,
            minor=ask(pynvml.nvmlDeviceGetMinorNumber),
            serial=ask(pynvml.nvmlDeviceGetSerial),
            # The default argument is one c_uint that all threads share.
            module=ask(pynvml.nvmlDeviceGetModuleId, ctypes.c_uint()),
            links=read_links(ask),
            fabric=read_fabric(ask),
            mig_mode=(int(mode[0]), int(mode[1])) if mode else None,
            mig_max=most,
            mig=read_mig(ask, most or 0) if mode and mode[0] else (),
            numa_node=known_node(ask(pynvml.nvmlDeviceGetNumaNodeId)),
            memory_affinity=words(
                ask(
                    pynvml.nvmlDeviceGetMemoryAffinity,
                    NODE_WORDS,
                    pynvml.NVML_AFFINITY_SCOPE_NODE,
                )
            ),
            cpu_affinity=words(ask(pynvml.nvmlDeviceGetCpuAffinity, CPU_WORDS)),
            ecc_uncorrected=ask(
                pynvml.nvmlDeviceGetTotalEccErrors,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pynvml.NVML_VOLATILE_ECC,
            ),
            remap=remap(ask(pynvml.nvmlDeviceGetRemappedRows)),
            recovery_action=fields[0],
            temperature_c=read_temperature(ask),
            # The name from before R535, which newer drivers have as well.
            clock_events=ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        )
    except GpuSilent as silent:
        return GpuReading(index=index, error=silent.code, bus_id=bus_id)


def known_node(node: int | None) -> int | None:
    """Only a GPU that is a NUMA node has one; -1 is how some drivers spell that it is none."""
    return node if node is not None and node >= 0 else None


def words(affinity: Sequence[int] | None) -> tuple[int, ...] | None:
    """Affinity words without the zeros at the end, which say how many were asked for."""
    if affinity is None:
        return None
    given = list(affinity)
    while len(given) > 1 and not given[-1]:
        given.pop()
    return tuple(given)


def remap(rows: Sequence[int] | None) -> tuple[int, int, bool, bool] | None:
    return (rows[0], rows[1], bool(rows[2]), bool(rows[3])) if rows else None


def read_temperature(ask: Asking) -> int | None:
    """Degrees of the GPU sensor; the older call is still the one that all drivers have."""
    celsius = ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
    if celsius is None:
        celsius = ask(pynvml.nvmlDeviceGetTemperatureV, pynvml.NVML_TEMPERATURE_GPU)
    return celsius


# Which member of the union an nvmlValueType_t means.
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def read_fields(ask: Asking, wanted: Sequence[tuple[int, int]]) -> list[int | None]:
    """Field values for (field id, scope) pairs in one call; None for what the driver lacks."""
    values = ask(pynvml.nvmlDeviceGetFieldValues, list(wanted)) if wanted else ()
    if values is None:
        return [None] * len(wanted)
    return [
        int(getattr(v.value, VALUE_MEMBERS[v.valueType]))
        if v.nvmlReturn == pynvml.NVML_SUCCESS and v.valueType < len(VALUE_MEMBERS)
        else None
        for v in values
    ]


def read_links(ask: Asking) -> tuple[LinkReading, ...]:
    """The links that exist. State decides: capability is TRUE for absent links on B200.

    What the calls about a link do not say is asked as field values, which drivers have from
    Hopper on; those before R450 know none of them. One call is for all links of a GPU.
    """
    states = read_link_states(ask)
    speeds = link_fields(ask, pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, states)
    found = [
        LinkReading(
            link=link,
            active=active,
            version=ask(pynvml.nvmlDeviceGetNvLinkVersion, link),
            remote_type=ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, link),
            remote_bus_id=read_remote(ask, link),
            speed_mbps=speeds[link],
            errors=total(ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, link, n) for n in LINK_ERRORS),
        )
        for link, active in states.items()
    ]
    unversioned = [link.link for link in found if link.version is None]
    versions = link_fields(ask, pynvml.NVML_FI_DEV_NVLINK_GET_VERSION, unversioned)
    uncounted = [link.link for link in found if link.errors is None]
    counters = [link_fields(ask, field, uncounted) for field in LINK_ERROR_FIELDS]
    errors = {link: total(counter[link] for counter in counters) for link in uncounted}
    return tuple(
        msgspec.structs.replace(
            link,
            version=versions.get(link.link, link.version),
            errors=errors.get(link.link, link.errors),
        )
        for link in found
    )


def read_link_states(ask: Asking) -> dict[int, bool]:
    """Whether each link that exists is active."""
    (count,) = read_fields(ask, [(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0)])
    states: dict[int, bool] = {}
    link = missing = 0
    while link < LINK_BOUND and (missing < LINK_HOLE or link < (count or 0)):
        state = ask(pynvml.nvmlDeviceGetNvLinkState, link)
        missing = missing + 1 if state is None else 0
        if state is not None:
            states[link] = bool(state)
        link += 1
    if states or not count:
        return states
    fields = link_fields(ask, pynvml.NVML_FI_DEV_NVLINK_GET_STATE, range(min(count, LINK_BOUND)))
    return {link: bool(state) for link, state in fields.items() if state is not None}


def link_fields(ask: Asking, field: int, links: Iterable[int]) -> dict[int, int | None]:
    """One field of several links."""
    wanted = list(links)
    values = read_fields(ask, [(field, link) for link in wanted])
    return dict(zip(wanted, values, strict=True))


def read_remote(ask: Asking, link: int) -> str | None:
    remote = ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, link)
    return (str(remote.busId) or None) if remote else None


def total(counts: Iterable[int | None]) -> int | None:
    """The sum of those that are known; None when none is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


FABRIC_STRUCTURES = (
    (pynvml.nvmlDeviceGetGpuFabricInfoV, pynvml.c_nvmlGpuFabricInfo_v3_t),
    (pynvml.nvmlDeviceGetGpuFabricInfoV, pynvml.c_nvmlGpuFabricInfo_v2_t),
    (pynvml.nvmlDeviceGetGpuFabricInfo, pynvml.c_nvmlGpuFabricInfo_t),
)


def read_fabric(ask: Asking) -> FabricReading | None:
    """The newest structure that the driver fills; older drivers refuse its version number."""
    for call, structure in FABRIC_STRUCTURES:
        info = structure()
        if ask(call, ctypes.byref(info)) is None:
            continue
        digits = bytes(info.clusterUuid).hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        return FabricReading(
            # NVML writes one byte here where nvidia-ml-py reads four.
            state=info.state & 0xFF,
            status=info.status,
            cluster="-".join(parts),
            clique=info.cliqueId,
            health_mask=getattr(info, "healthMask", None),
            health_summary=getattr(info, "healthSummary", None),
        )
    return None


def read_mig(ask: Asking, most: int) -> tuple[MigReading, ...]:
    """The MIG devices; their numbers have holes, so each possible one is asked for."""
    found = []
    for index in range(most):
        handle = ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, index)
        if handle is None:
            continue
        uuid = ask.of(handle, pynvml.nvmlDeviceGetUUID)
        name = ask.of(handle, pynvml.nvmlDeviceGetName)
        gpu_instance = ask.of(handle, pynvml.nvmlDeviceGetGpuInstanceId)
        compute_instance = ask.of(handle, pynvml.nvmlDeviceGetComputeInstanceId)
        attributes = ask.of(handle, pynvml.nvmlDeviceGetAttributes_v2)
        if uuid is None or gpu_instance is None or compute_instance is None or attributes is None:
            continue  # destroyed while we asked
        found.append(
            MigReading(
                index=index,
                uuid=uuid,
                name=name.rpartition("MIG ")[2] if name and "MIG " in name else None,
                gpu_instance=gpu_instance,
                compute_instance=compute_instance,
                gpu_slices=attributes.gpuInstanceSliceCount,
                compute_slices=attributes.computeInstanceSliceCount,
                memory_mib=attributes.memorySizeMB,
            )
        )
    return tuple(found)


Opened = Sequence[tuple[int, Any]]


def read_levels(opened: Opened, notes: Notes) -> tuple[tuple[int, int, int], ...]:
    call = pynvml.nvmlDeviceGetTopologyCommonAncestor
    found = []
    for position, (first, handle) in enumerate(opened):
        for second, other in opened[position + 1 :]:
            level = ask_pair(Asking(handle, first, notes), call, other)
            if level is not None:
                found.append((first, second, level))
    return tuple(found)


def read_p2p(opened: Opened, notes: Notes) -> tuple[tuple[int, int, int, int], ...]:
    call = pynvml.nvmlDeviceGetP2PStatus
    found = []
    for first, handle in opened:
        ask = Asking(handle, first, notes)
        for second, other in opened:
            read = ask_pair(ask, call, other, P2P_READ) if first != second else None
            if read is None:
                continue
            nvlink = ask_pair(ask, call, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            unknown = pynvml.NVML_P2P_STATUS_UNKNOWN
            found.append((first, second, read, unknown if nvlink is None else nvlink))
    return tuple(found)


def ask_pair(ask: Asking, call: Callable[..., int], *args: Any) -> int | None:
    """An answer about two GPUs; one that was lost since it was read has none."""
    try:
        return ask(call, *args)
    except GpuSilent:
        return None


def reachable_gpus() -> tuple[str, ...]:
    """Bus ids of the GPUs that can be opened now. Raises NvmlFault."""
    found = []
    for index in range(whole(pynvml.nvmlDeviceGetCount)):
        handle = open_gpu(index)
        with contextlib.suppress(pynvml.NVMLError):
            if not isinstance(handle, int):
                found.append(str(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    return tuple(found)


class EventSet:
    """What some GPUs report from the moment it is made; nothing where there are no events."""

    def __init__(self, gpus: Iterable[str]) -> None:
        self.handle = system(pynvml.nvmlEventSetCreate)
        self.bus_ids: dict[int | None, str] = {}  # by the handle that an event carries
        for bus_id in gpus if self.handle else ():
            try:
                device = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
                types = pynvml.nvmlDeviceGetSupportedEventTypes(device) & WANTED_EVENTS
                if types:
                    pynvml.nvmlDeviceRegisterEvents(device, types, self.handle)
                    self.bus_ids[address(device)] = bus_id
            except pynvml.NVMLError:
                continue  # a GPU without events is still read at every interval

    def wait(self, wait_ms: int) -> NvmlEvent | None:
        """The next event, or None when there is none in time. Raises NVMLError."""
        try:
            data = pynvml.nvmlEventSetWait_v2(self.handle, wait_ms)
        except pynvml.NVMLError_Timeout:
            return None
        return NvmlEvent(
            type=data.eventType,
            data=data.eventData,
            bus_id=self.bus_ids.get(address(data.device)),
            gpu_instance=instance(data.gpuInstanceId),
            compute_instance=instance(data.computeInstanceId),
        )

    def close(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlEventSetFree(self.handle)


def address(device: Any) -> int | None:
    return ctypes.cast(device, ctypes.c_void_p).value


def instance(number: int) -> int | None:
    return None if number == NO_INSTANCE else number


class Worker:
    """Answers requests until they end; lines leave by `write`, whole, from any thread."""

    def __init__(self, write: Callable[[WorkerLine], None], *, wait_ms: int) -> None:
        self.write = write
        self.wait_ms = wait_ms
        self.listening: tuple[str, ...] = ()  # bus ids

    def run(self, requests: Iterable[WorkerRequest]) -> None:
        """Ends after the first failure of NVML as a whole."""
        opened = False
        for request in requests:
            notes: Notes = {}
            try:
                if not opened:
                    self.write(WorkerLine(doing="nvmlInit"))
                    open_nvml()
                    opened = True
                self.write(WorkerLine(doing="the reading"))
                # Before the reading, so that nothing happens between the two unheard.
                self.listen(reachable_gpus())
                reading = read_nvml(notes)
                self.write(WorkerLine(id=request.read, reading=reading, notes=tuple(notes)))
            except NvmlFault as fault:
                failure = NvmlFailure(call=fault.call, code=fault.code, text=error_text(fault.code))
                self.write(WorkerLine(id=request.read, failure=failure))
                return

    def listen(self, gpus: tuple[str, ...]) -> None:
        """Follows these GPUs; the thread that followed others ends by itself."""
        if gpus == self.listening:
            return
        events = EventSet(gpus)
        self.listening = gpus  # the former thread ends, not before this one would hear
        if events.bus_ids:
            threading.Thread(target=self.pass_on, args=(events, gpus), daemon=True).start()

    def pass_on(self, events: EventSet, gpus: tuple[str, ...]) -> None:
        failed = 0
        while True:
            try:
                event = events.wait(self.wait_ms)
                failed = 0
            except pynvml.NVMLError as error:
                # A lost GPU can make the wait itself fail: said once, as a reason to look.
                event = NvmlEvent(type=0, data=error.value) if error.value != failed else None
                failed = error.value
                time.sleep(min(self.wait_ms / 1000, FAILED_PAUSE_S))
            if event:
                self.write(WorkerLine(event=event))
            elif gpus != self.listening:
                return events.close()


def lines_in() -> Iterator[WorkerRequest]:
    """Requests from standard input. Its end ends the process, even when NVML hangs meanwhile:
    the kernel then closes what NVML held, and no worker outlives the daemon."""
    pending: queue.SimpleQueue[WorkerRequest] = queue.SimpleQueue()

    def follow() -> None:
        for line in sys.stdin.buffer:
            pending.put(msgspec.json.decode(line, type=WorkerRequest))
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    while True:
        yield pending.get()


def lines_out() -> Callable[[WorkerLine], None]:
    """A writer to what was standard output; what the library prints goes to standard error."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lock = threading.Lock()
    encoder = msgspec.json.Encoder()

    def write(line: WorkerLine) -> None:
        rest = memoryview(encoder.encode(line) + b"\n")
        with lock:
            while rest:
                rest = rest[out.write(rest) :]

    return write


def main(arguments: Sequence[str]) -> None:
    """`python -m rte.discovery.nvml [EVENT_WAIT_MS]`"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal is for the daemon
    write = lines_out()
    Worker(write, wait_ms=int(arguments[0]) if arguments else EVENT_WAIT_MS).run(lines_in())
    # Not by return: the interpreter would wait for the thread that reads standard input.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
