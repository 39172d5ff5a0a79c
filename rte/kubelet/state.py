"""The kubelet's own files about what it has handed out: device checkpoint and manager states.

They name pods by UID, which PodResources does not, and know nothing of names, so they serve to
doubt a PodResources list, never to replace it. They keep what a finished pod held until the
kubelet next looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NewType, TypeVar

import msgspec

from rte.model import CpuId, DeviceId, MemoryBlock, NumaId, parse_ranges

T = TypeVar("T")

PodUid = NewType("PodUid", str)

DEVICE_CHECKPOINT = "kubelet_internal_checkpoint"  # in the device plugin directory
CPU_STATE = "cpu_manager_state"  # in the kubelet's root directory
MEMORY_STATE = "memory_manager_state"

MOST_BYTES = 64 << 20  # an allocation response of every container is in the device checkpoint

Holder = tuple[PodUid, str]
"""Pod and container; the container is "" for what a pod holds as a whole."""


class StateFileError(Exception):
    """A state file that exists and cannot be understood. `path` is the file."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    """What the kubelet's files say is held, by pod and container; absent files hold nothing."""

    devices: Mapping[Holder, frozenset[tuple[str, DeviceId]]] = field(default_factory=dict)
    """Resource name and device id."""
    device_nodes: Mapping[tuple[str, DeviceId], tuple[NumaId, ...]] = field(default_factory=dict)
    """The NUMA nodes of each device that is held, as they were when it was handed out."""
    cpus: Mapping[Holder, frozenset[CpuId]] = field(default_factory=dict)
    shared_cpus: frozenset[CpuId] = frozenset()
    """The pool that exclusive CPUs are taken from; reserved ones are in it unless they are so
    strictly."""
    memory: Mapping[Holder, tuple[MemoryBlock, ...]] = field(default_factory=dict)
    memory_free: Mapping[str, Mapping[NumaId, int]] = field(default_factory=dict)
    """Resource → node → bytes that the Memory Manager has left."""
    memory_taken: Mapping[str, Mapping[NumaId, int]] = field(default_factory=dict)
    """Likewise what it has given away."""
    memory_cells: Mapping[NumaId, tuple[NumaId, ...]] = field(default_factory=dict)
    """The nodes that the Memory Manager has joined with each, itself among them."""
    registered: Mapping[str, frozenset[DeviceId]] = field(default_factory=dict)
    """Healthy devices by resource, as of the checkpoint's last writing."""
    unread: Mapping[Path, str] = field(default_factory=dict)
    """The files that could not be understood, of which nothing is here, and why."""


def read_handed_out(root: Path, plugin_dir: Path) -> HandedOut:
    """What the three files hold together, from the kubelet's root and device plugin directories.

    Each file may be missing: managers that are off write none. One that is no JSON of a known
    format takes nothing away from the others. The kubelet replaces the files by rename, so that
    each is whole, but not all at once: the three may differ by one allocation.
    """
    unread: dict[Path, str] = {}

    def tried(read: Callable[[Path], T], path: Path, *, absent: T) -> T:
        try:
            return read(path)
        except StateFileError as error:
            unread[path] = str(error)
            return absent

    devices = tried(read_devices, plugin_dir / DEVICE_CHECKPOINT, absent=NO_DEVICES)
    cpus = tried(read_cpus, root / CPU_STATE, absent=NO_CPUS)
    memory = tried(read_memory, root / MEMORY_STATE, absent=NO_MEMORY)
    return HandedOut(
        unread=unread,
        devices=devices.held,
        device_nodes=devices.nodes,
        registered=devices.registered,
        cpus=cpus.held,
        shared_cpus=cpus.shared,
        memory=memory.held,
        memory_free=memory.free,
        memory_taken=memory.taken,
        memory_cells=memory.cells,
    )


# The device manager's checkpoint


NO_NODE = "-1"


class _DeviceEntry(msgspec.Struct):
    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: dict[str, list[str]] | None = None  # by NUMA node, or NO_NODE


class _DeviceData(msgspec.Struct):
    PodDeviceEntries: list[_DeviceEntry] | None = None
    RegisteredDevices: dict[str, list[str] | None] | None = None


class _DeviceCheckpoint(msgspec.Struct):
    Data: _DeviceData


class Devices(NamedTuple):
    held: dict[Holder, frozenset[tuple[str, DeviceId]]]
    nodes: dict[tuple[str, DeviceId], tuple[NumaId, ...]]
    registered: dict[str, frozenset[DeviceId]]


NO_DEVICES = Devices({}, {}, {})


def read_devices(path: Path) -> Devices:
    """Devices by holder, their NUMA nodes, and the registered healthy ones by resource."""
    text = _content(path)
    if text is None:
        return NO_DEVICES
    data = _decoded(path, text, _DeviceCheckpoint).Data
    held: dict[Holder, set[tuple[str, DeviceId]]] = {}
    nodes: dict[tuple[str, DeviceId], set[NumaId]] = {}
    for entry in data.PodDeviceEntries or ():
        of = held.setdefault((PodUid(entry.PodUID), entry.ContainerName), set())
        for node, ids in (entry.DeviceIDs or {}).items():
            devices = {(entry.ResourceName, DeviceId(id_)) for id_ in ids}
            of |= devices
            for device in devices:
                touched = nodes.setdefault(device, set())
                if node != NO_NODE:
                    touched.add(_node(path, node))
    return Devices(
        held={holder: frozenset(ids) for holder, ids in held.items()},
        nodes={device: tuple(sorted(touched)) for device, touched in nodes.items()},
        registered={
            resource: frozenset(map(DeviceId, ids or ()))
            for resource, ids in (data.RegisteredDevices or {}).items()
        },
    )


def _node(path: Path, text: str) -> NumaId:
    if not (text.isascii() and text.isdecimal()):
        raise StateFileError(path, f"expected a NUMA node's number, read {text!r}")
    return NumaId(int(text))


# The CPU manager's state


class _PodCpus(msgspec.Struct):
    cpuSet: str = ""


class _CpuState(msgspec.Struct):
    """Until 1.36 the whole file; from 1.37 also the text in `data`, which then counts."""

    defaultCpuSet: str = ""
    entries: dict[str, dict[str, str]] | None = None
    podEntries: dict[str, _PodCpus] | None = None
    data: str = ""


class Cpus(NamedTuple):
    held: dict[Holder, frozenset[CpuId]]
    shared: frozenset[CpuId]


NO_CPUS = Cpus({}, frozenset())


def read_cpus(path: Path) -> Cpus:
    """Exclusive CPUs by holder, one of none being left out, and those of the shared pool."""
    text = _content(path)
    if text is None:
        return NO_CPUS
    state = _decoded(path, text, _CpuState)
    if state.data:
        state = _decoded(path, state.data.encode(), _CpuState)
    held: dict[Holder, frozenset[CpuId]] = {}
    try:
        shared = frozenset(map(CpuId, parse_ranges(state.defaultCpuSet)))
        for pod, containers in (state.entries or {}).items():
            for container, cpus in containers.items():
                held[PodUid(pod), container] = frozenset(map(CpuId, parse_ranges(cpus)))
        for pod, whole in (state.podEntries or {}).items():
            # Without containers it is what an allocation that failed has left: 1.37 never takes
            # it back.
            if (state.entries or {}).get(pod):
                held[PodUid(pod), ""] = frozenset(map(CpuId, parse_ranges(whole.cpuSet)))
    except ValueError as error:
        raise StateFileError(path, str(error)) from error
    return Cpus({holder: cpus for holder, cpus in held.items() if cpus}, shared)


# The Memory Manager's state


class _Block(msgspec.Struct):
    numaAffinity: list[int]
    type: str
    size: int


class _PodBlocks(msgspec.Struct):
    memoryBlocks: list[_Block] | None = None


class _Table(msgspec.Struct):
    free: int = 0
    reserved: int = 0


class _Node(msgspec.Struct):
    memoryMap: dict[str, _Table] | None = None
    cells: list[int] | None = None


class _MemoryState(msgspec.Struct):
    machineState: dict[str, _Node] | None = None
    entries: dict[str, dict[str, list[_Block]]] | None = None
    podEntries: dict[str, _PodBlocks] | None = None
    data: str = ""


class Memory(NamedTuple):
    held: dict[Holder, tuple[MemoryBlock, ...]]
    free: dict[str, dict[NumaId, int]]
    taken: dict[str, dict[NumaId, int]]
    cells: dict[NumaId, tuple[NumaId, ...]]


NO_MEMORY = Memory({}, {}, {}, {})


def read_memory(path: Path) -> Memory:
    """Bound memory by holder, what is free and what taken by resource and node, and the nodes that
    are joined.

    What an init container handed on has size 0 and is left out.
    """
    text = _content(path)
    if text is None:
        return NO_MEMORY
    state = _decoded(path, text, _MemoryState)
    if state.data:
        state = _decoded(path, state.data.encode(), _MemoryState)
    held = {
        (PodUid(pod), container): _blocks(blocks)
        for pod, containers in (state.entries or {}).items()
        for container, blocks in containers.items()
    }
    for pod, whole in (state.podEntries or {}).items():
        held[PodUid(pod), ""] = _blocks(whole.memoryBlocks or ())
    free: dict[str, dict[NumaId, int]] = {}
    taken: dict[str, dict[NumaId, int]] = {}
    cells: dict[NumaId, tuple[NumaId, ...]] = {}
    for text_of_node, here in (state.machineState or {}).items():
        node = _node(path, text_of_node)
        cells[node] = tuple(sorted(map(NumaId, here.cells or [node])))
        for name, table in (here.memoryMap or {}).items():
            free.setdefault(name, {})[node] = table.free
            taken.setdefault(name, {})[node] = table.reserved
    held = {holder: blocks for holder, blocks in held.items() if blocks}
    return Memory(held, free, taken, cells)


def _blocks(blocks: list[_Block] | tuple[()]) -> tuple[MemoryBlock, ...]:
    return tuple(
        MemoryBlock(
            type=block.type,
            size_bytes=block.size,
            numa=tuple(sorted(map(NumaId, block.numaAffinity))),
        )
        for block in blocks
        if block.size
    )


def _content(path: Path) -> bytes | None:
    """The file's bytes, or None where there is none."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateFileError(path, error.strerror or str(error)) from error
    if len(text) > MOST_BYTES:
        raise StateFileError(path, f"longer than {MOST_BYTES} bytes")
    return text


def _decoded(path: Path, text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise StateFileError(path, f"not the kubelet's format: {error}") from error
