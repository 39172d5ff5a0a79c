"""What a node is and what of it is in use: frozen values, no I/O, no decisions.

Every other module speaks in these words. A value that exists is complete and sorted, so that
"did anything change" is `!=`. `None` means that the machine does not say; -1 and "" do not occur.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import NewType

PciAddress = NewType("PciAddress", str)
"""The kernel's spelling: lower case, a domain of four or more digits (`0000:3b:00.0`)."""
NumaId = NewType("NumaId", int)
"""The kernel's NUMA node id, as in /sys/devices/system/node/node<id>; ids may be sparse."""
CpuId = NewType("CpuId", int)
"""The kernel's logical CPU number."""
DeviceId = NewType("DeviceId", str)
"""What the kubelet calls a device: a GPU's or MIG slice's UUID, or `<uuid>::<n>` for a replica."""

_PCI = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")

NVIDIA_VENDOR = 0x10DE


def pci_address(text: str) -> PciAddress:
    """The kernel's spelling of a PCI address, from sysfs's or NVML's (`00000000:3B:00.0`).

    Raises ValueError for anything else. Domains keep all digits that are not leading zeros:
    Hyper-V and VMD have domains of more than 16 bits.
    """
    match = _PCI.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a PCI address: {text!r} (expected DDDD:BB:DD.F)")
    domain, bus, device, function = match.groups()
    return PciAddress(f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower())


def pci_order(address: PciAddress) -> tuple[int, int, int, int]:
    """The sort key that puts addresses in numerical order; as text `10000:…` precedes `ffff:…`."""
    domain, bus, rest = address.split(":")
    device, function = rest.split(".")
    return int(domain, 16), int(bus, 16), int(device, 16), int(function)


MAX_NUMBER = 1 << 16
"""Above any kernel's NR_CPUS: a list from outside must not make us count to infinity."""


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in the kernel's list format, ascending: `0-3,8`."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def parse_ranges(text: str) -> tuple[int, ...]:
    """The numbers of a list in the kernel's format, ascending. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isascii() and end.isdecimal() and len(end) <= 6 for end in ends):
            raise ValueError(f"not a list such as 0-3,8: {text!r:.80}")
        low, high = map(int, ends)
        if low > high or high >= MAX_NUMBER:
            raise ValueError(f"not a list such as 0-3,8: {text!r:.80}: {part!r} is no range")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


MADE_UP_DOMAIN = "fffffffe"
"""The domain of functions that a source knows without their addresses, and of ports of switches
that it leaves out. No firmware numbers domains there, and NVML's hidden switches are in the next.
"""


def made_up_address(number: int) -> PciAddress:
    """The address that stands for the function with this number, in PCI order; up to 2^16."""
    bus, slot, function = number >> 8, number >> 3 & 0x1F, number & 7
    return PciAddress(f"{MADE_UP_DOMAIN}:{bus:02x}:{slot:02x}.{function}")


def is_made_up(address: PciAddress) -> bool:
    return address.startswith(MADE_UP_DOMAIN)


class NumaSource(StrEnum):
    """Where a device's NUMA node was learnt."""

    SYSFS = "sysfs"
    OVERRIDE = "override"
    PARENT = "parent"
    """A bridge above the device has a node of its own."""
    LOCAL_CPUS = "local_cpulist"
    """All CPUs that the kernel calls local lie in one node, and they are not all CPUs."""
    NVML = "nvml"
    """NVML's memory affinity names one node with CPUs."""
    SOURCE = "source"
    """A file states it: nvidia-smi's column, NCCL's cpu element, hwloc's place in the tree."""
    RELATION = "relation"
    """A device that is no further than a host bridge of the same node has it."""

    @property
    def is_stated(self) -> bool:
        """Whether it is a fact; what is inferred is not advertised unless one asks for it."""
        return self in (NumaSource.SYSFS, NumaSource.OVERRIDE, NumaSource.SOURCE)


class Level(IntEnum):
    """How far apart two PCI functions are, nearer is greater. Names are NVML's and nvidia-smi's."""

    UNKNOWN = 0
    """Not readable, or peer-to-peer reads between the two are not possible."""
    SYS = 1
    """Across NUMA nodes."""
    NODE = 2
    """Different host bridges of one NUMA node."""
    PHB = 3
    """One host bridge."""
    PXB = 4
    """Several PCIe switches, no host bridge."""
    PIX = 5
    """One PCIe switch (or one board)."""


_QUANTITY = re.compile(
    r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,3})|([KMGTPE]i|[numkMGTPE]))?"
)
_SCALE: Mapping[str | None, tuple[int, int]] = {  # suffix → times, divided by
    None: (1, 1),
    "n": (1, 10**9),
    "u": (1, 10**6),
    "m": (1, 10**3),
    "k": (10**3, 1),
    "M": (10**6, 1),
    "G": (10**9, 1),
    "T": (10**12, 1),
    "P": (10**15, 1),
    "E": (10**18, 1),
    "Ki": (2**10, 1),
    "Mi": (2**20, 1),
    "Gi": (2**30, 1),
    "Ti": (2**40, 1),
    "Pi": (2**50, 1),
    "Ei": (2**60, 1),
}


def thousandths(quantity: str) -> int:
    """A Kubernetes quantity (`1500m`, `64Gi`, `2e3`) in thousandths, rounded away from zero.

    Rounding is apimachinery's (MilliValue). Raises ValueError for what is no quantity.
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(
            f"not a quantity: {quantity!r} (expected a number such as 2, 500m or 64Gi)"
        )
    sign, number, exponent, suffix = match.groups()
    whole, _, fraction = number.partition(".")
    times, divided = _SCALE[suffix]
    power = int(exponent or 0) - len(fraction)
    value = int(whole + fraction) * times * 1000 * 10 ** max(power, 0)
    milli: int = -(-value // (divided * 10 ** max(-power, 0)))
    return -milli if sign == "-" else milli


def base_units(quantity: str) -> int:
    """A Kubernetes quantity in whole units (cores, bytes, devices), rounded away from zero."""
    milli = thousandths(quantity)
    return -(-milli // 1000) if milli >= 0 else milli // 1000


def rfc3339(epoch_s: float) -> str:
    """A moment, in seconds since the epoch, as Kubernetes writes it: 2026-01-31T12:00:00Z."""
    return f"{datetime.fromtimestamp(epoch_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


def huge_pages_name(page_bytes: int) -> str:
    """Kubernetes' name of the resource: hugepages-2Mi, hugepages-1Gi, hugepages-64Ki."""
    for shift, suffix in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if page_bytes % (1 << shift) == 0:
            return f"hugepages-{page_bytes >> shift}{suffix}"
    return f"hugepages-{page_bytes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One online NUMA node, from /sys/devices/system/node/node<id>."""

    id: NumaId
    cpus: tuple[CpuId, ...]  # ascending; empty for a node that has only memory
    cpus_known: bool = True  # False: the source names no CPUs, and `cpus` is empty for that
    cores: tuple[tuple[CpuId, ...], ...] = ()
    """The hardware threads of each core that has several; empty where the source says nothing."""
    memory_bytes: int | None = None  # MemTotal of meminfo
    huge_pages: Mapping[int, int] = field(default_factory=dict)
    """Page size in bytes → number of pages, for each size the kernel has, zero counts included."""
    distance: Mapping[NumaId, int] = field(default_factory=dict)
    """ACPI SLIT distance to each online node; 10 is local."""
    gpu: PciAddress | None = None
    """The GPU whose memory this node is (Grace, POWER9 with NVLink), or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLink:
    """A PCIe link as the slower of its two ends can run it (max_link_*, which idling leaves)."""

    gigatransfers: float  # GT/s per lane: 2.5, 5, 8, 16, 32, 64
    width: int  # lanes

    @property
    def megabytes_per_s(self) -> int:
        """Payload bandwidth one way, in MB/s after line encoding (8b/10b, from Gen3 128b/130b)."""
        encoding = 0.8 if self.gigatransfers <= 5 else 128 / 130
        return int(self.gigatransfers * 1000 * self.width * encoding / 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """One PCI function, from /sys/bus/pci/devices/<address>."""

    address: PciAddress
    root: str  # the root complex it hangs from, as in /sys/devices: pci0000:00
    parent: PciAddress | None = None  # the bridge above; None below the root complex itself
    vendor: int
    device: int
    class_code: int  # 24 bits: class, subclass, programming interface (0x060400 is a bridge)
    numa: NumaId | None = None
    numa_from: NumaSource | None = None  # None exactly where numa is
    link: PciLink | None = None  # towards the root; None where the function has no PCIe link
    driver: str | None = None  # the bound kernel driver
    physical_function: PciAddress | None = None  # of an SR-IOV virtual function

    @property
    def is_bridge(self) -> bool:
        return self.class_code >> 8 == 0x0604

    @property
    def is_gpu(self) -> bool:
        """Whether this is an NVIDIA display or 3D controller."""
        return self.vendor == NVIDIA_VENDOR and self.class_code >> 8 in (0x0300, 0x0302)

    @property
    def is_nvswitch(self) -> bool:
        return self.vendor == NVIDIA_VENDOR and self.class_code >> 8 == 0x0680


class LinkPeer(StrEnum):
    """What is at the other end of an NVLink."""

    GPU = "gpu"
    SWITCH = "switch"
    CPU = "cpu"
    """POWER's NPU, or Grace by C2C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLinkEnd:
    """The active lanes that one GPU reports towards one other end."""

    peer: LinkPeer
    remote: PciAddress | None = None
    """The GPU (always known) or the NVSwitch (None where it is hidden: VMs, NVLink 5)."""
    lanes: int
    lane_megabytes_per_s: int  # one way


class FabricState(StrEnum):
    """NVML's nvmlGpuFabricState_t."""

    NOT_SUPPORTED = "not supported"
    NOT_STARTED = "not started"
    IN_PROGRESS = "in progress"
    COMPLETED = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What a GPU says of the NVLink fabric it is part of."""

    state: FabricState
    cluster: str | None = None  # UUID, lower case with dashes; None when all zero or absent
    clique: int | None = None
    healthy: bool | None = None  # NVML's health summary; None where the driver has none
    status: int = 0  # NVML return code of the probe; it counts only when completed


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSlice:
    """One MIG device: a compute instance of a GPU instance."""

    id: DeviceId
    profile: str  # NVIDIA's name: 1g.10gb, 1c.3g.40gb, 1g.10gb+me
    memory_bytes: int
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU of the PCI tree. It has no NUMA node of its own: its PCI function has."""

    number: int
    """Position among the NVIDIA GPU functions in PCI order, lost ones counted: `gpu-<number>`."""
    pci: PciAddress
    uuid: DeviceId | None = None  # None when NVML cannot say (lost, driver does not own it)
    lost: str | None = None  # why NVML cannot talk to it; None for a GPU that answers
    product: str | None = None
    memory_bytes: int | None = None
    minor: int | None = None  # of /dev/nvidia<minor>
    module: int | None = None  # NVML's module id: the position on an HGX board
    index: int | None = None  # NVML's index in this boot, which CUDA and nvidia-smi use
    links: tuple[NvLinkEnd, ...] = ()  # sorted by peer and remote
    links_down: int = 0  # lanes that exist and are not active
    fabric: Fabric | None = None
    mig_enabled: bool = False
    slices: tuple[MigSlice, ...] = ()  # sorted by GPU instance, compute instance
    memory_node: NumaId | None = None  # the NUMA node that is this GPU's memory, not its locality

    @property
    def name(self) -> str:
        return f"gpu-{self.number}"

    @property
    def names(self) -> tuple[str, ...]:
        """All that people call it: gpu-3, its PCI address, its UUID."""
        return tuple(filter(None, (self.name, self.pci, self.uuid)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network or InfiniBand function, found by PCI class or as a device without PCI."""

    pci: PciAddress | None = None  # None: virtual (bond, netvsc, software RDMA)
    netdevs: tuple[str, ...] = ()  # empty when moved to another network namespace
    rdma: tuple[str, ...] = ()  # names below /sys/class/infiniband
    rate_megabits_per_s: int | None = None  # of the fastest port
    up: bool | None = None  # any port active or carrier present
    physical_function: PciAddress | None = None  # of an SR-IOV virtual function
    virtual_functions: int = 0  # enabled ones of a physical function
    members: tuple[str, ...] = ()  # of a bond: netdevs
    kind: str = "pci"  # pci, bond, netvsc, rdma (software) or virtual
    numa: NumaId | None = None  # for a NIC without PCI whose members agree

    @property
    def name(self) -> str:
        """The name people know: RDMA device, else network device, else PCI address."""
        return (self.rdma or self.netdevs or (self.pci or "nic",))[0]


def nic_order(nic: Nic) -> tuple[bool, tuple[int, ...], str]:
    """The sort key that puts NICs in PCI order, those without PCI last, by name."""
    return nic.pci is None, pci_order(nic.pci) if nic.pci else (), nic.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware of one node. Equal when nothing changed."""

    numa_nodes: tuple[NumaNode, ...]  # by id
    pci: tuple[PciDevice, ...] = ()  # in PCI order
    gpus: tuple[Gpu, ...] = ()  # by number
    nics: tuple[Nic, ...] = ()  # by nic_order
    levels: Mapping[tuple[PciAddress, PciAddress], Level] = field(default_factory=dict)
    """What the source itself says of two GPUs (NVML's common ancestor) or of a GPU and a NIC, a
    direction each. Absent pairs are computed from the PCI tree."""
    peer_reads: Mapping[tuple[PciAddress, PciAddress], bool] = field(default_factory=dict)
    """NVML's P2P read status, a direction each; absent pairs were not asked."""
    driver: str | None = None  # NVIDIA driver version
    unknown: tuple[str, ...] = ()  # what this source cannot say, in words, for people
    overridden: tuple[str, ...] = ()  # what the operator stated instead of the source, in words

    def device(self, address: PciAddress) -> PciDevice | None:
        """The PCI function at an address; builds no index, for tables use a dict."""
        return next((d for d in self.pci if d.address == address), None)

    def numa_of(self, address: PciAddress) -> NumaId | None:
        found = self.device(address)
        return found.numa if found else None


# What of it is in use


class TopologyManagerPolicy(StrEnum):
    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"


class Scope(StrEnum):
    CONTAINER = "container"
    POD = "pod"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The part of the kubelet's configuration that decides placement."""

    topology_manager: TopologyManagerPolicy = TopologyManagerPolicy.NONE
    scope: Scope = Scope.CONTAINER
    max_numa_nodes: int | None = None  # the max-allowable-numa-nodes option; None: the default, 8
    cpu_manager: str = "none"  # none or static
    cpu_manager_options: Mapping[str, str] = field(default_factory=dict)
    memory_manager: str = "None"  # None or Static
    reserved_cpus: tuple[CpuId, ...] = ()  # reservedSystemCPUs
    reserved_memory: Mapping[NumaId, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PodName:
    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """One device that PodResources lists, with all of its NUMA nodes."""

    resource: str
    id: DeviceId
    numa: tuple[NumaId, ...] = ()  # ascending; empty when the kubelet knows none


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBlock:
    """Memory that the Memory Manager binds; a block of several nodes belongs to their group."""

    type: str  # memory or hugepages-<size>
    size_bytes: int
    numa: tuple[NumaId, ...]  # ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerUse:
    """What the kubelet has handed out to one container."""

    name: str
    devices: tuple[DeviceUse, ...] = ()  # by resource, id
    cpus: tuple[CpuId, ...] = ()  # exclusive ones, ascending
    memory: tuple[MemoryBlock, ...] = ()
    claims: tuple[str, ...] = ()  # DRA: driver/pool/device of each claimed device, and CDI names


@dataclass(frozen=True, slots=True, kw_only=True)
class PodUse:
    """What the kubelet has handed out to one pod; a pod that holds nothing is listed too."""

    pod: PodName
    containers: tuple[ContainerUse, ...] = ()  # in the kubelet's order
    ended: tuple[ContainerUse, ...] = ()
    """Init containers that have ended and what they hold, which is the pod's until it ends.
    PodResources does not list them; the kubelet's files do."""
    cpus: tuple[CpuId, ...] = ()  # pod-level, from PodResources' newer fields
    memory: tuple[MemoryBlock, ...] = ()

    def memory_blocks(self) -> tuple[MemoryBlock, ...]:
        """The pod's own blocks are its whole budget; its containers' are parts of that, and count
        where there is none."""
        of_containers = (c.memory for c in (*self.containers, *self.ended))
        return self.memory or tuple(block for blocks in of_containers for block in blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """PodResources List: all pods the kubelet runs, by name."""

    pods: tuple[PodUse, ...] = ()
    memory_free: Mapping[str, Mapping[NumaId, int]] = field(default_factory=dict)
    """Resource → node → bytes, as the Memory Manager itself has it: what a block of several nodes
    takes of each depends on what was there before it. Empty where its file is older than this
    list, or is not read."""
    memory_groups: Mapping[NumaId, tuple[NumaId, ...]] | None = None
    """Likewise the nodes that it has joined, by node; None where it does not say."""
    cpus_managed: frozenset[CpuId] = frozenset()
    """CPUs that the CPU Manager has in its pool or has handed out: others it has lost. Empty where
    its file is not read."""

    def device_ids(self) -> Mapping[str, frozenset[DeviceId]]:
        """The ids in use, by resource name."""
        held: dict[str, set[DeviceId]] = {}
        for pod in self.pods:
            for container in (*pod.containers, *pod.ended):
                for device in container.devices:
                    held.setdefault(device.resource, set()).add(device.id)
        return {resource: frozenset(ids) for resource, ids in held.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocatable:
    """PodResources GetAllocatableResources: what the kubelet could hand out, used or not."""

    devices: tuple[DeviceUse, ...] = ()  # healthy ones, by resource, id
    cpus: tuple[CpuId, ...] = ()
    memory: tuple[MemoryBlock, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNode:
    """What the API server has of this node's Node object."""

    allocatable: Mapping[str, int]  # status.allocatable in base units (cores, bytes)
    uid: str | None = None
    told: float | None = None
    """When the kubelet last told it anything, in whole seconds since the epoch by the clock of this
    node. None where it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """What PodResources does not say about a pod of this node, from the pods API or a watch."""

    pod: PodName
    phase: str
    qos: str  # Guaranteed, Burstable, BestEffort
    requests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Container name (restartable init containers included) → resource → quantity."""
    init_requests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The same of init containers that end."""
    uid: str = ""
    """What the kubelet calls the pod in its files, also where it is a static one."""


class FaultClass(StrEnum):
    WITHHOLD = "withhold"
    """Advertised as Unhealthy: work given to it would fail."""
    DEGRADED = "degraded"
    """Advertised; ranked last where it matters."""
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a device is not as it should be."""

    severity: FaultClass
    reason: str  # one word or phrase for metrics and attributes: lost, xid-79, fabric-in-progress
    detail: str = ""  # a sentence for people
    gpu_instance: int | None = None  # the only MIG GPU instance that it concerns; None: the GPU
    compute_instance: int | None = None  # of that GPU instance; None: all of them


Faults = Mapping[PciAddress, tuple[Fault, ...]]
"""By GPU. Absent is healthy; a fault that ends is an entry that disappears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One look at the node: all that a publication depends on."""

    machine: Machine
    usage: Usage
    allocatable: Allocatable
    policy: Policy | None  # None: the kubelet's configuration could not be read
    node_allocatable: Mapping[str, int] = field(default_factory=dict)
    """status.allocatable of the own Node in base units (cores, bytes); empty when not read."""
    node_uid: str | None = None  # of the own Node; None when not read
    pods: tuple[PodFacts, ...] | None = None  # None: nobody told, the PodResources rule is used
    faults: Faults = field(default_factory=dict)
    withheld: Mapping[str, str] = field(default_factory=dict)
    """Cordoned devices: id or PCI address → the operator's reason."""
    advertised: tuple[DeviceUse, ...] | None = None
    """What the device plugin of this process lists to the kubelet, healthy or not. None: there is
    none here, and what one lists follows from the rest."""
