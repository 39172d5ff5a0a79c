"""What NVML answered, before it is joined with the PCI tree.

One `NvmlReading` is one line of JSON from the worker process, the `nvml.json` of a recorded
machine and the input of the tests' fake `libnvidia-ml.so.1`: one format, three uses. Numbers are
NVML's own (enumerations, bus ids with eight upper-case domain digits, affinity words); `assemble`
turns them into the model's words. A field that NVML refused is None.
"""

from __future__ import annotations

import msgspec

EVENT_WAIT_MS = 5000
"""How long one wait for events lasts at the most. An event ends it; a change of the GPUs only lets
the former wait end beside the next. Ten times as short costs 0.8 s of CPU an hour."""


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all parts: frozen, and silent about what the library did not say."""


class LinkReading(Reading, frozen=True, kw_only=True):
    """One NVLink of one GPU; links that do not exist are left out."""

    link: int
    active: bool  # the link state, not the capability
    version: int | None = None  # NVML's NvLink version number: 1 P100, 2-3 V100, 4-5 A100, 6 H100
    remote_type: int | None = None  # 0 GPU, 1 NPU, 2 switch, 255 unknown
    remote_bus_id: str | None = None  # as NVML spells it; hidden switches give FFFFFFFF:FF:FF.0
    speed_mbps: int | None = None  # field 164, MB/s one way, where the driver has it
    errors: int | None = None  # sum of the replay, recovery and CRC error counters


class FabricReading(Reading, frozen=True, kw_only=True):
    """nvmlDeviceGetGpuFabricInfoV, the newest structure that the driver knows."""

    state: int  # 0 not supported, 1 not started, 2 in progress, 3 completed
    status: int = 0  # nvmlReturn_t
    cluster: str = "00000000-0000-0000-0000-000000000000"
    clique: int = 0
    health_mask: int | None = None
    health_summary: int | None = None  # 0 not supported, 1 healthy, 2 unhealthy, 3 limited


class MigReading(Reading, frozen=True, kw_only=True):
    """One MIG device."""

    index: int  # of nvmlDeviceGetMigDeviceHandleByIndex: there may be holes
    uuid: str
    name: str | None = None  # the profile at the end of NVML's name: 1g.10gb
    gpu_instance: int
    compute_instance: int
    gpu_slices: int
    compute_slices: int
    memory_mib: int


class GpuReading(Reading, frozen=True, kw_only=True):
    """One NVML index. A GPU that NVML cannot open has only index, error and, if known, bus_id."""

    index: int
    error: int | None = None  # nvmlReturn_t of the call that failed: 15 lost, 16 reset, 999 unknown
    bus_id: str | None = None
    uuid: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    minor: int | None = None
    serial: str | None = None
    module: int | None = None
    links: tuple[LinkReading, ...] = ()
    fabric: FabricReading | None = None
    mig_mode: tuple[int, int] | None = None  # current, pending; None where MIG does not exist
    mig_max: int | None = None
    mig: tuple[MigReading, ...] = ()
    numa_node: int | None = None  # nvmlDeviceGetNumaNodeId: the GPU's own memory node (Grace)
    memory_affinity: tuple[int, ...] | None = None  # as cpu_affinity, scope NODE
    cpu_affinity: tuple[int, ...] | None = None  # 64-bit words, none of value 0 at the end
    ecc_uncorrected: int | None = None  # volatile, whole GPU
    remap: tuple[int, int, bool, bool] | None = None  # correctable, uncorrectable, pending, failed
    recovery_action: int | None = None  # 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset
    temperature_c: int | None = None
    clock_events: int | None = None  # why the clocks are held down: 0x20, 0x40 heat, 0x4 power …


class NvmlReading(Reading, frozen=True, kw_only=True):
    """All that one look through NVML found."""

    driver: str
    nvml: str | None = None
    cuda: int | None = None  # 12040 is 12.4
    gpus: tuple[GpuReading, ...] = ()
    levels: tuple[tuple[int, int, int], ...] = ()
    """(index, index, NVML topology level: 0 board, 10 one switch … 50 system), first < second."""
    p2p: tuple[tuple[int, int, int, int], ...] = ()
    """(index, index, read status, NVLink status) for each ordered pair; 0 is OK."""


class NvmlEvent(Reading, frozen=True, kw_only=True):
    """Something that NVML reported between two readings."""

    type: int  # nvmlEventType…: 8 Xid, 0x100 MIG configuration, 0x8000 recovery action …
    data: int = 0  # the Xid; 999 is unknown
    bus_id: str | None = None  # None when the event's GPU cannot be told
    gpu_instance: int | None = None
    compute_instance: int | None = None


class NvmlFailure(Reading, frozen=True, kw_only=True):
    """Why there is no reading at all."""

    call: str  # the NVML function
    code: int  # nvmlReturn_t: 9 driver not loaded, 12 no library, 18 versions differ
    text: str  # NVML's words


class WorkerRequest(Reading, frozen=True, kw_only=True):
    """A line to the worker. At the end of its input it ends at once, whatever it is doing."""

    read: int  # send a reading with this id


class WorkerLine(Reading, frozen=True, kw_only=True):
    """A line from the worker: one of doing, reading, failure, event."""

    id: int | None = None  # of the request that a reading or failure answers
    doing: str | None = None  # the step that begins now; the parent names it when it never ends
    reading: NvmlReading | None = None
    notes: tuple[str, ...] = ()  # with a reading: calls that failed where they should not
    failure: NvmlFailure | None = None  # the worker ends after it
    event: NvmlEvent | None = None
