"""Device ids → what the container gets, in NVIDIA's words where the meaning is the same."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

from plugin.devices import Device
from rte.model import DeviceId, Gpu, MigSlice

# Where the NVIDIA container runtime looks for devices that come as mounts.
MOUNTED_LIST = "/var/run/nvidia-container-devices"
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
IMEX_NODES = "nvidia-caps-imex-channels"
# Where containers find NCCL's topology file; its folder is mounted, so that they see newer ones.
NCCL_FOLDER, NCCL_FILE = "/run/rte-nccl", "topology.xml"
READ_WRITE = "rw"


class Strategy(StrEnum):
    """NVIDIA's words for how the runtime learns of the devices."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"

    @property
    def is_cdi(self) -> bool:
        return self in (Strategy.CDI_ANNOTATIONS, Strategy.CDI_CRI)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handing:
    """How devices are handed over."""

    strategies: frozenset[Strategy] = frozenset({Strategy.ENVVAR})
    ids: Literal["uuid", "index"] = "uuid"  # a slice always goes by its UUID
    device_specs: bool = False  # list the device nodes too, where a strategy other than CDI is on
    dev_root: str = "/"  # the host's directory that has the driver's /dev
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    imex_channels: tuple[int, ...] = ()
    gdrcopy: bool = False
    gds: bool = False
    mofed: bool = False
    cuda_order: bool = False  # CUDA_VISIBLE_DEVICES in the order that is given
    one_replica: bool = False  # refuse a container more than one replica
    nccl_topology_dir: str | None = None  # the host's folder with NCCL_FILE

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ValueError("at least one device list strategy is needed")

    @property
    def has_cdi(self) -> bool:
        return any(strategy.is_cdi for strategy in self.strategies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The device nodes that exist, as this process sees them."""

    control: tuple[str, ...] = ()  # of CONTROL_NODES, in that order
    nccl_topology: bool = False  # whether NCCL_FILE is in its folder
    mig_minors: Mapping[str, int] = field(default_factory=dict)
    """Minor of nvidia-caps by the driver's name: gpu0/gi1/access, gpu0/gi1/ci0/access."""
    imex_channels: frozenset[int] = frozenset()


class Owner(NamedTuple):
    """What an id stands for."""

    gpu: Gpu
    slice: MigSlice | None  # None: the whole GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    container: str
    host: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A device node that the container's cgroup must allow."""

    container: str
    host: str
    permissions: str = READ_WRITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What one container gets."""

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[Node, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi: tuple[str, ...] = ()


class CannotAllocate(ValueError):
    """A request that names what was never advertised. `ids` are the ids it is about."""

    def __init__(self, problem: str, ids: Iterable[str]) -> None:
        self.ids = tuple(ids)
        super().__init__(f"{problem}: {', '.join(self.ids)}")


def read_nodes(*, dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> Nodes:
    """The device nodes below `dev`, and the driver's list of MIG capabilities below `proc`.

    What is absent is left out: a driver without MIG has no list, and the tools' nodes appear with
    their modules.
    """
    try:
        text = (proc / "driver/nvidia-caps/mig-minors").read_text(errors="replace")
    except OSError:
        text = ""
    return replace(read_common_nodes(dev), mig_minors=parse_mig_minors(text))


def read_common_nodes(dev: Path) -> Nodes:
    """Those that belong to no single GPU: they come and go without the machine being another."""
    channels = (path.name for path in (dev / IMEX_NODES).glob("channel*"))
    return Nodes(
        control=tuple(name for name in CONTROL_NODES if (dev / name).exists()),
        imex_channels=frozenset(
            int(name.removeprefix("channel"))
            for name in channels
            if name.removeprefix("channel").isdecimal()
        ),
    )


def parse_mig_minors(text: str) -> Mapping[str, int]:
    """Minors by name, of lines such as `gpu0/gi1/access 12`; other lines are not for us."""
    found = re.findall(r"^(gpu\d+/gi\d+/(?:ci\d+/)?access) (\d+)$", text, re.MULTILINE)
    return {name: int(minor) for name, minor in found}


def allocation(
    devices: Sequence[Device],
    *,
    owners: Mapping[DeviceId, Owner],
    handing: Handing,
    nodes: Nodes,
    cdi_names: Mapping[DeviceId, str] | None = None,
    cdi_extra: Sequence[str] = (),
) -> Allocation:
    """What a container gets that these devices are given to, in their order.

    `owners` (see `owners`) says which GPU an id is, `cdi_names` has a qualified CDI name for
    each id, `cdi_extra` those of channels and switches.
    Raises CannotAllocate for several replicas where that is not allowed, and for a
    device without a CDI name where CDI is the way.
    """
    held = tuple(dict.fromkeys(device.holds for device in devices))
    if handing.one_replica and len(devices) > 1 and any(d.id != d.holds for d in devices):
        raise CannotAllocate(
            "more than one replica gives a container no more of a device, and is refused "
            "(sharing.timeSlicing.failRequestsGreaterThanOne)",
            (device.id for device in devices),
        )
    names = tuple(device_name(id, owners, handing) for id in held)
    cdi = _cdi(held, cdi_names or {}, cdi_extra) if handing.has_cdi else ()
    annotated = Strategy.CDI_ANNOTATIONS in handing.strategies
    plain = not all(strategy.is_cdi for strategy in handing.strategies)
    return Allocation(
        envs=_envs(names, held, handing, nodes, plain=plain),
        mounts=_mounts(names, handing, nodes),
        nodes=_nodes(held, owners, handing, nodes) if plain and handing.device_specs else (),
        annotations=_annotation(cdi, handing) if annotated and cdi else {},
        cdi=cdi if Strategy.CDI_CRI in handing.strategies else (),
    )


def owners(gpus: Iterable[Gpu]) -> Mapping[DeviceId, Owner]:
    """By id, the GPU that it is or that has it as a slice."""
    found: dict[DeviceId, Owner] = {}
    for gpu in gpus:
        if gpu.uuid is not None:
            found[gpu.uuid] = Owner(gpu, None)
        found |= {part.id: Owner(gpu, part) for part in gpu.slices}
    return found


def device_name(id: DeviceId, owners: Mapping[DeviceId, Owner], handing: Handing) -> str:
    """What the runtime is told: the id, or NVML's index where that is wanted.

    A slice goes by its UUID: its index is not kept, and the runtime takes either.
    """
    found = owners.get(id) if handing.ids == "index" else None
    if found is None or found.slice is not None or found.gpu.index is None:
        return id
    return str(found.gpu.index)


def paths(id: DeviceId, owners: Mapping[DeviceId, Owner], nodes: Nodes) -> tuple[str, ...]:
    """Names below /dev of the nodes that only this device needs."""
    found = owners.get(id)
    if found is None or found.gpu.minor is None:
        return ()
    gpu, part = found
    if part is None:
        return (f"nvidia{gpu.minor}",)
    instance = f"gpu{gpu.minor}/gi{part.gpu_instance}"
    rights = (f"{instance}/access", f"{instance}/ci{part.compute_instance}/access")
    caps = (nodes.mig_minors.get(right) for right in rights)
    return (
        f"nvidia{gpu.minor}",
        *(f"nvidia-caps/nvidia-cap{minor}" for minor in caps if minor is not None),
    )


def missing_channels(handing: Handing, nodes: Nodes) -> tuple[str, ...]:
    """Paths of the IMEX channels that are asked for and do not exist."""
    absent = (c for c in handing.imex_channels if c not in nodes.imex_channels)
    return tuple(f"/dev/{IMEX_NODES}/channel{channel}" for channel in absent)


def _channels(handing: Handing, nodes: Nodes) -> tuple[int, ...]:
    return tuple(c for c in handing.imex_channels if c in nodes.imex_channels)


def _envs(
    names: tuple[str, ...],
    held: tuple[DeviceId, ...],
    handing: Handing,
    nodes: Nodes,
    *,
    plain: bool,
) -> dict[str, str]:
    envs: dict[str, str] = {}
    if Strategy.ENVVAR in handing.strategies:
        envs["NVIDIA_VISIBLE_DEVICES"] = ",".join(names)
        if channels := _channels(handing, nodes):
            envs["NVIDIA_IMEX_CHANNELS"] = ",".join(map(str, channels))
    if Strategy.VOLUME_MOUNTS in handing.strategies:
        envs["NVIDIA_VISIBLE_DEVICES"] = MOUNTED_LIST
    if plain:
        switches = {
            "NVIDIA_GDRCOPY": handing.gdrcopy,
            "NVIDIA_GDS": handing.gds,
            "NVIDIA_MOFED": handing.mofed,
        }
        envs |= {name: "enabled" for name, on in switches.items() if on}
    if handing.cuda_order and len(held) > 1:
        # UUIDs, whatever the runtime was told: CUDA numbers the devices of a container anew.
        envs["CUDA_VISIBLE_DEVICES"] = ",".join(held)
    if handing.nccl_topology_dir is not None and nodes.nccl_topology:
        envs["NCCL_TOPO_FILE"] = f"{NCCL_FOLDER}/{NCCL_FILE}"
    return envs


def _mounts(names: tuple[str, ...], handing: Handing, nodes: Nodes) -> tuple[Mount, ...]:
    mounts: tuple[Mount, ...] = ()
    if Strategy.VOLUME_MOUNTS in handing.strategies:
        listed = (*names, *(f"imex/{channel}" for channel in _channels(handing, nodes)))
        mounts = tuple(Mount(container=f"{MOUNTED_LIST}/{n}", host="/dev/null") for n in listed)
    if handing.nccl_topology_dir is not None and nodes.nccl_topology:
        mounts += (Mount(container=NCCL_FOLDER, host=handing.nccl_topology_dir, read_only=True),)
    return mounts


def _nodes(
    held: tuple[DeviceId, ...], owners: Mapping[DeviceId, Owner], handing: Handing, nodes: Nodes
) -> tuple[Node, ...]:
    own = (path for id in held for path in paths(id, owners, nodes))
    imex = (f"{IMEX_NODES}/channel{channel}" for channel in _channels(handing, nodes))
    below_dev = dict.fromkeys([*nodes.control, *own, *imex])
    return tuple(
        Node(container=f"/dev/{path}", host=posixpath.join(handing.dev_root, "dev", path))
        for path in below_dev
    )


def _cdi(
    held: tuple[DeviceId, ...], names: Mapping[DeviceId, str], extra: Sequence[str]
) -> tuple[str, ...]:
    missing = [id for id in held if id not in names]
    if missing:
        raise CannotAllocate("no CDI specification lists", missing)
    return (*(names[id] for id in held), *extra)


def _annotation(cdi: tuple[str, ...], handing: Handing) -> dict[str, str]:
    import uuid  # noqa: PLC0415 - only this strategy pays for it

    key = f"{handing.cdi_annotation_prefix}nvidia-device-plugin_{uuid.uuid4()}"
    return {key: ",".join(cdi)}
