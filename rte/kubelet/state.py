"""The kubelet's own files about what it has handed out: device checkpoint and manager states.

They name pods by UID, which PodResources does not, and know nothing of names, so they serve to
doubt a PodResources list, never to replace it. They keep what a finished pod held until the
kubelet next looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NewType, TypeVar

import msgspec

from rte.kubelet.policy import parse_cpus
from rte.model import CpuId, DeviceId, MemoryBlock, NumaId

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
    cpus: Mapping[Holder, frozenset[CpuId]] = field(default_factory=dict)
    memory: Mapping[Holder, tuple[MemoryBlock, ...]] = field(default_factory=dict)
    memory_free: Mapping[str, Mapping[NumaId, int]] = field(default_factory=dict)
    """Resource → node → bytes that the Memory Manager has left."""
    registered: Mapping[str, frozenset[DeviceId]] = field(default_factory=dict)
    """Healthy devices by resource, as of the checkpoint's last writing."""


def read_handed_out(root: Path, plugin_dir: Path) -> HandedOut:
    """What the three files hold together, from the kubelet's root and device plugin directories.

    Each file may be missing: managers that are off write none. Raises StateFileError for one that
    is no JSON of a known format. The kubelet replaces the files by rename, so that each is whole,
    but not all at once: the three may differ by one allocation.
    """
    devices, registered = read_devices(plugin_dir / DEVICE_CHECKPOINT)
    memory, memory_free = read_memory(root / MEMORY_STATE)
    return HandedOut(
        devices=devices,
        registered=registered,
        cpus=read_cpus(root / CPU_STATE),
        memory=memory,
        memory_free=memory_free,
    )


# The device manager's checkpoint


class _DeviceEntry(msgspec.Struct):
    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: dict[str, list[str]] | None = None  # by NUMA node, "-1" where there is none


class _DeviceData(msgspec.Struct):
    PodDeviceEntries: list[_DeviceEntry] | None = None
    RegisteredDevices: dict[str, list[str] | None] | None = None


class _DeviceCheckpoint(msgspec.Struct):
    Data: _DeviceData


def read_devices(
    path: Path,
) -> tuple[dict[Holder, frozenset[tuple[str, DeviceId]]], dict[str, frozenset[DeviceId]]]:
    """Devices by holder, and the registered healthy ones by resource."""
    text = _content(path)
    if text is None:
        return {}, {}
    data = _decoded(path, text, _DeviceCheckpoint).Data
    held: dict[Holder, set[tuple[str, DeviceId]]] = {}
    for entry in data.PodDeviceEntries or ():
        of = held.setdefault((PodUid(entry.PodUID), entry.ContainerName), set())
        for ids in (entry.DeviceIDs or {}).values():
            of.update((entry.ResourceName, DeviceId(id_)) for id_ in ids)
    return (
        {holder: frozenset(ids) for holder, ids in held.items()},
        {
            resource: frozenset(map(DeviceId, ids or ()))
            for resource, ids in (data.RegisteredDevices or {}).items()
        },
    )


# The CPU manager's state


class _PodCpus(msgspec.Struct):
    cpuSet: str = ""


class _CpuState(msgspec.Struct):
    """Until 1.36 the whole file; from 1.37 also the text in `data`, which then counts."""

    entries: dict[str, dict[str, str]] | None = None
    podEntries: dict[str, _PodCpus] | None = None
    data: str = ""


def read_cpus(path: Path) -> dict[Holder, frozenset[CpuId]]:
    """Exclusive CPUs by holder; a holder of none is left out."""
    text = _content(path)
    if text is None:
        return {}
    state = _decoded(path, text, _CpuState)
    if state.data:
        state = _decoded(path, state.data.encode(), _CpuState)
    held: dict[Holder, frozenset[CpuId]] = {}
    try:
        for pod, containers in (state.entries or {}).items():
            for container, cpus in containers.items():
                held[PodUid(pod), container] = frozenset(parse_cpus(cpus))
        for pod, whole in (state.podEntries or {}).items():
            held[PodUid(pod), ""] = frozenset(parse_cpus(whole.cpuSet))
    except ValueError as error:
        raise StateFileError(path, str(error)) from error
    return {holder: cpus for holder, cpus in held.items() if cpus}


# The Memory Manager's state


class _Block(msgspec.Struct):
    numaAffinity: list[int]
    type: str
    size: int


class _PodBlocks(msgspec.Struct):
    memoryBlocks: list[_Block] | None = None


class _Table(msgspec.Struct):
    free: int = 0


class _Node(msgspec.Struct):
    memoryMap: dict[str, _Table] | None = None


class _MemoryState(msgspec.Struct):
    machineState: dict[str, _Node] | None = None
    entries: dict[str, dict[str, list[_Block]]] | None = None
    podEntries: dict[str, _PodBlocks] | None = None
    data: str = ""


def read_memory(
    path: Path,
) -> tuple[dict[Holder, tuple[MemoryBlock, ...]], dict[str, dict[NumaId, int]]]:
    """Bound memory by holder, and what is free by resource and node.

    What an init container handed on has size 0 and is left out.
    """
    text = _content(path)
    if text is None:
        return {}, {}
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
    for node, here in (state.machineState or {}).items():
        if not (node.isascii() and node.isdecimal()):
            raise StateFileError(path, f"machineState: expected a node's number, read {node!r}")
        for name, table in (here.memoryMap or {}).items():
            free.setdefault(name, {})[NumaId(int(node))] = table.free
    return {holder: blocks for holder, blocks in held.items() if blocks}, free


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
