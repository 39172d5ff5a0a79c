"""This node → Machine: what the kernel says and what NVML says, joined by PCI address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from rte.discovery.overrides import Overrides, node_word, overridden
from rte.discovery.reading import FabricReading, GpuReading, LinkReading, MigReading, NvmlReading
from rte.discovery.sysfs import Host
from rte.model import (
    NVIDIA_VENDOR,
    DeviceId,
    Fabric,
    FabricState,
    Gpu,
    Level,
    LinkPeer,
    Machine,
    MigSlice,
    Nic,
    NumaId,
    NumaNode,
    NumaSource,
    NvLinkEnd,
    PciAddress,
    PciDevice,
    pci_address,
    pci_order,
)

__all__ = ["Overrides", "assemble", "overridden"]

# One way, in MB/s, where the driver does not say the speed itself: P100 20 GB/s, V100 to H100 25,
# Blackwell 50. Versions that come later are no slower than the last one we know.
LANE_SPEEDS = {1: 20_000, 2: 25_000, 3: 25_000, 4: 25_000, 5: 25_000, 6: 25_000}
LANE_SPEED_SINCE_VERSION_7 = 50_000
LANE_SPEED_UNKNOWN = 25_000

LEVELS = {
    0: Level.PIX,  # one board
    10: Level.PIX,
    20: Level.PXB,
    30: Level.PHB,
    40: Level.NODE,
    50: Level.SYS,
}

FABRIC_STATES = {
    0: FabricState.NOT_SUPPORTED,
    1: FabricState.NOT_STARTED,
    2: FabricState.IN_PROGRESS,
    3: FabricState.COMPLETED,
}
NO_CLUSTER = "00000000-0000-0000-0000-000000000000"

ERRORS = {
    9: "driver not loaded",
    15: "GPU is lost",
    16: "reset required",
    17: "operating system refused",
    18: "driver and library versions differ",
    999: "unknown error",
}

Found = TypeVar("Found")

# The driver of GPUs that are handed to virtual machines.
PASSED_THROUGH = "vfio-pci"


def assemble(
    host: Host, nvml: NvmlReading | None, *, overrides: Overrides | None = None
) -> Machine:
    """The machine that the kernel and NVML describe together.

    Without an NVML reading the GPUs that NVIDIA's driver has bound are there, and nothing is known
    of them but their places.
    """
    answers = answers_by_address(nvml)
    nodes = with_gpu_memory(host.numa_nodes, answers)
    devices = with_numa({**unseen(answers), **by_address(host.pci)}, answers, nodes, overrides)
    numbers = number_gpus(devices, answers)
    ours = tuple(address for address in numbers if is_ours(devices[address], answers.get(address)))
    ends = Ends(gpus=frozenset(ours), devices=devices)
    memory_nodes = {node.gpu: node.id for node in reversed(nodes) if node.gpu}
    healthy = {a: answers[a] for a in ours if a in answers and not answers[a].error}
    places = {answer.index: address for address, answer in healthy.items()}
    found = Machine(
        numa_nodes=nodes,
        pci=tuple(devices.values()),
        gpus=tuple(
            gpu(healthy[address], number=numbers[address], ends=ends, memory_nodes=memory_nodes)
            if address in healthy
            else Gpu(number=numbers[address], pci=address, lost=loss(address, answers, nvml))
            for address in ours
        ),
        nics=with_members_numa(host.nics, devices),
        levels=dict(levels(nvml, places)) if nvml else {},
        peer_reads=dict(peer_reads(nvml, places)) if nvml else {},
        driver=nvml.driver if nvml else None,
        unknown=(
            *unasked(nvml),
            *unseen_gpus(answers, host),
            *foreign_gpus(devices, numbers, ours),
            *placeless(nvml, answers, devices, numbers),
            *foreign_lanes(answers, ends),
        ),
        overridden=tuple(restated(host, overrides)),
    )
    return overridden(found, overrides)


def answers_by_address(nvml: NvmlReading | None) -> Mapping[PciAddress, GpuReading]:
    """NVML's entries that say where they are, in PCI order, those with an error among them."""
    found: dict[PciAddress, GpuReading] = {}
    for answer in nvml.gpus if nvml else ():
        address = parse_address(answer.bus_id)
        if address is not None:
            found.setdefault(address, answer)
    return in_pci_order(found)


def parse_address(text: str | None) -> PciAddress | None:
    try:
        return pci_address(text) if text else None
    except ValueError:
        return None  # hidden switches are also spelled "fffffff:ffff:ff"


def in_pci_order(found: Mapping[PciAddress, Found]) -> dict[PciAddress, Found]:
    return {address: found[address] for address in sorted(found, key=pci_order)}


# Places


def by_address(pci: Iterable[PciDevice]) -> Mapping[PciAddress, PciDevice]:
    return {device.address: device for device in pci}


def unseen(answers: Mapping[PciAddress, GpuReading]) -> Mapping[PciAddress, PciDevice]:
    """A function for each GPU, without a place: for those that only NVML shows (WSL, odd VMs)."""
    return {
        address: PciDevice(
            address=address,
            root=f"pci{address.rpartition(':')[0]}",
            vendor=NVIDIA_VENDOR,
            device=0,
            class_code=0x030200,
        )
        for address in answers
    }


def with_gpu_memory(
    nodes: tuple[NumaNode, ...], answers: Mapping[PciAddress, GpuReading]
) -> tuple[NumaNode, ...]:
    """Nodes that are GPU memory, also where only NVML names them. A node with CPUs never is."""
    named = {answer.numa_node: address for address, answer in answers.items()}
    return tuple(
        replace(node, gpu=named[node.id])
        if node.gpu is None and not node.cpus and node.id in named
        else node
        for node in nodes
    )


def with_numa(
    devices: Mapping[PciAddress, PciDevice],
    answers: Mapping[PciAddress, GpuReading],
    nodes: tuple[NumaNode, ...],
    overrides: Overrides | None,
) -> dict[PciAddress, PciDevice]:
    """The functions in PCI order, with the NUMA nodes that the operator or NVML knows better."""
    stated = overrides.numa if overrides else {}
    bearing_cpus = frozenset(node.id for node in nodes if node.cpus)
    found = {}
    for address, device in in_pci_order(devices).items():
        if address in stated:
            found[address] = replace(device, numa=stated[address], numa_from=NumaSource.OVERRIDE)
        elif device.numa_from is not NumaSource.SYSFS and (
            above := [stated[up] for up in above_of(device, devices) if up in stated]
        ):
            found[address] = replace(device, numa=above[0], numa_from=NumaSource.PARENT)
        elif device.numa is None and address in answers:
            node = memory_affinity(answers[address], bearing_cpus)
            source = None if node is None else NumaSource.NVML
            found[address] = replace(device, numa=node, numa_from=source)
        else:
            found[address] = device
    return found


def restated(host: Host, overrides: Overrides | None) -> Iterator[str]:
    """Which NUMA nodes the operator stated, and what the kernel had said."""
    stated = overrides.numa if overrides else {}
    for address, device in in_pci_order(by_address(host.pci)).items():
        if address in stated:
            yield node_word(device, stated[address])


def above_of(device: PciDevice, devices: Mapping[PciAddress, PciDevice]) -> Iterator[PciAddress]:
    """The functions above, nearest first."""
    while (up := device.parent) is not None and up in devices:
        yield up
        device = devices[up]


def memory_affinity(answer: GpuReading, bearing_cpus: frozenset[NumaId]) -> NumaId | None:
    """The node that NVML calls near, if it is one: a virtual machine is told of all."""
    words = answer.memory_affinity or ()
    near = {
        NumaId(64 * word + bit)
        for word, bits in enumerate(words)
        for bit in range(64)
        if bits >> bit & 1
    } & bearing_cpus
    return near.pop() if len(near) == 1 else None


def with_members_numa(
    nics: tuple[Nic, ...], devices: Mapping[PciAddress, PciDevice]
) -> tuple[Nic, ...]:
    """A bond is on a NUMA node if all of its members are on that one."""
    numa_of = {netdev: devices[nic.pci].numa for nic in nics if nic.pci for netdev in nic.netdevs}

    def located(nic: Nic) -> Nic:
        nodes = {numa_of.get(member) for member in nic.members}
        return replace(nic, numa=nodes.pop()) if len(nodes) == 1 else nic

    return tuple(nic if nic.pci else located(nic) for nic in nics)


# GPUs


def number_gpus(
    devices: Mapping[PciAddress, PciDevice], answers: Mapping[PciAddress, GpuReading]
) -> Mapping[PciAddress, int]:
    """Numbers in PCI order. Lost and passed-through GPUs keep theirs, so that no other changes.

    Virtual functions come and go with the driver's settings and are counted only if NVML has them.
    """
    gpus = (
        address
        for address, device in devices.items()
        if address in answers or (device.is_gpu and device.physical_function is None)
    )
    return {address: number for number, address in enumerate(gpus)}


def is_ours(device: PciDevice, answer: GpuReading | None) -> bool:
    """Whether NVIDIA's driver owns the GPU, be it lost: a virtual machine's GPU is not missing."""
    if device.driver == PASSED_THROUGH:
        return False
    return device.driver == "nvidia" or answer is not None


def loss(
    address: PciAddress, answers: Mapping[PciAddress, GpuReading], nvml: NvmlReading | None
) -> str | None:
    """Why NVML does not answer for a GPU; None when it was not asked."""
    if nvml is None:
        return None
    if address in answers:
        return error_text(answers[address].error)
    errors = {answer.error for answer in nvml.gpus if parse_address(answer.bus_id) is None}
    return error_text(errors.pop()) if len(errors) == 1 else "NVML does not list it"


def error_text(code: int | None) -> str:
    return f"{ERRORS.get(code or 0, 'NVML error')} (NVML {code})"


def gpu(
    answer: GpuReading, *, number: int, ends: Ends, memory_nodes: Mapping[PciAddress, NumaId]
) -> Gpu:
    """A GPU that answers."""
    address = pci_address(answer.bus_id or "")
    return Gpu(
        number=number,
        pci=address,
        uuid=DeviceId(answer.uuid) if answer.uuid else None,
        product=answer.name,
        memory_bytes=answer.memory_bytes,
        minor=answer.minor,
        module=answer.module,
        index=answer.index,
        links=links(address, answer, ends),
        links_down=sum(not link.active for link in answer.links),
        fabric=fabric(answer.fabric) if answer.fabric else None,
        mig_enabled=answer.mig_mode is not None and answer.mig_mode[0] == 1,
        slices=tuple(
            mig_slice(mig, answer)
            for mig in sorted(answer.mig, key=lambda m: (m.gpu_instance, m.compute_instance))
        ),
        memory_node=memory_nodes.get(address),
    )


def mig_slice(mig: MigReading, answer: GpuReading) -> MigSlice:
    return MigSlice(
        id=DeviceId(mig.uuid),
        profile=mig.name or mig_profile(mig, answer.memory_bytes),
        memory_bytes=mig.memory_mib << 20,
        gpu_instance=mig.gpu_instance,
        compute_instance=mig.compute_instance,
    )


def mig_profile(mig: MigReading, gpu_memory_bytes: int | None) -> str:
    """NVIDIA's name of a slice: 1g.10gb, 1c.3g.40gb. Its memory is counted in eighths of a GPU."""
    gigabytes = (mig.memory_mib + 512) // 1024
    if gpu_memory_bytes:
        eighths = -(-(mig.memory_mib << 23) // gpu_memory_bytes)  # both are rounded up
        gigabytes = (eighths * -(-gpu_memory_bytes // 2**30) + 4) // 8
    part = "" if mig.compute_slices == mig.gpu_slices else f"{mig.compute_slices}c."
    return f"{part}{mig.gpu_slices}g.{gigabytes}gb"


def fabric(answer: FabricReading) -> Fabric | None:
    """What the GPU says of its fabric; None for a state that a later driver invented."""
    state = FABRIC_STATES.get(answer.state)
    if state is None:
        return None
    completed = state is FabricState.COMPLETED
    cluster = answer.cluster.lower()
    return Fabric(
        state=state,
        # All zero: an NVSwitch fabric that ends with this machine (HGX H100).
        cluster=cluster if completed and cluster != NO_CLUSTER else None,
        clique=answer.clique if completed else None,
        healthy=fabric_health(answer),
        status=answer.status,
    )


def fabric_health(answer: FabricReading) -> bool | None:
    """The summary, else what the mask of older drivers says; None when both are silent."""
    if answer.health_summary in (1, 2, 3):  # healthy, unhealthy, limited
        return answer.health_summary == 1
    if answer.health_mask is None:
        return None
    # Four fields of two bits, 1 bad and 2 good; then four bits, 1 good and more bad; 0 not said.
    fields = {answer.health_mask >> shift & 3 for shift in (0, 2, 4, 6)}
    configuration = answer.health_mask >> 8 & 0xF
    if 1 in fields or configuration > 1:
        return False
    return True if 2 in fields or configuration == 1 else None


# Links


class Ends(NamedTuple):
    """What the far end of a link can be."""

    gpus: frozenset[PciAddress]
    devices: Mapping[PciAddress, PciDevice]


def links(near: PciAddress, answer: GpuReading, ends: Ends) -> tuple[NvLinkEnd, ...]:
    """The active lanes by far end."""
    lanes: dict[tuple[LinkPeer, PciAddress | None], list[int]] = {}
    for link in answer.links:
        end = far_end(near, link, ends) if link.active else None
        if end is not None:
            lanes.setdefault(end, []).append(lane_speed(link))
    return tuple(
        NvLinkEnd(
            peer=peer,
            remote=remote,
            lanes=len(lanes[peer, remote]),
            lane_megabytes_per_s=min(lanes[peer, remote]),
        )
        for peer, remote in sorted(lanes, key=lambda end: (end[0], end[1] or ""))
    )


def far_end(
    near: PciAddress, link: LinkReading, ends: Ends
) -> tuple[LinkPeer, PciAddress | None] | None:
    """Who is at the other end; None for a GPU that is not ours to reach.

    Switches are hidden in virtual machines, in containers and since NVLink 5: an end that is
    neither a known GPU nor a visible device is a switch.
    """
    remote = parse_address(link.remote_bus_id)
    device = ends.devices.get(remote) if remote else None
    if remote is not None and remote != near and remote in ends.gpus:
        return LinkPeer.GPU, remote
    if is_foreign(near, link, remote, device):
        return None
    if link.remote_type == 1 or (device and device.vendor != NVIDIA_VENDOR):
        return LinkPeer.CPU, device.address if device else None
    return LinkPeer.SWITCH, device.address if device else None


def is_foreign(
    near: PciAddress, link: LinkReading, remote: PciAddress | None, device: PciDevice | None
) -> bool:
    """A GPU of another virtual machine, or the GPU itself: lanes that lead nowhere from here."""
    if remote is None:
        return False
    names_a_gpu = link.remote_type == 0 and not remote.startswith("ffffffff:")
    return remote == near or names_a_gpu or (device is not None and device.is_gpu)


def lane_speed(link: LinkReading) -> int:
    """MB/s one way."""
    if link.speed_mbps:
        return link.speed_mbps
    if link.version is None:
        return LANE_SPEED_UNKNOWN
    return LANE_SPEEDS.get(link.version, LANE_SPEED_SINCE_VERSION_7)


def levels(
    nvml: NvmlReading, places: Mapping[int, PciAddress]
) -> Iterator[tuple[tuple[PciAddress, PciAddress], Level]]:
    for first, second, level in nvml.levels:
        if first in places and second in places and level in LEVELS:
            yield (places[first], places[second]), LEVELS[level]
            yield (places[second], places[first]), LEVELS[level]


def peer_reads(
    nvml: NvmlReading, places: Mapping[int, PciAddress]
) -> Iterator[tuple[tuple[PciAddress, PciAddress], bool]]:
    for first, second, read_status, _ in nvml.p2p:
        if first in places and second in places:
            yield (places[first], places[second]), read_status == 0


# What cannot be said


def unasked(nvml: NvmlReading | None) -> Iterator[str]:
    if nvml is None:
        yield "NVML was not read: UUIDs, NVLinks, fabric and MIG slices are not known"


def unseen_gpus(answers: Mapping[PciAddress, GpuReading], host: Host) -> Iterator[str]:
    for address in sorted(answers.keys() - by_address(host.pci).keys(), key=pci_order):
        yield f"{address}: a GPU that only NVML shows; its place in the PCI tree is not known"


def foreign_gpus(
    devices: Mapping[PciAddress, PciDevice],
    numbers: Mapping[PciAddress, int],
    ours: tuple[PciAddress, ...],
) -> Iterator[str]:
    for address in numbers:
        driver = devices[address].driver
        if address not in ours:
            what = f"bound to {driver}" if driver else "without a driver"
            yield f"{address}: an NVIDIA GPU {what}; it is left alone"


def placeless(
    nvml: NvmlReading | None,
    answers: Mapping[PciAddress, GpuReading],
    devices: Mapping[PciAddress, PciDevice],
    numbers: Mapping[PciAddress, int],
) -> Iterator[str]:
    """Entries of NVML that name no place, when the PCI tree has no GPU left for them."""
    nameless = [a for a in nvml.gpus if parse_address(a.bus_id) is None] if nvml else []
    left = [a for a in numbers if a not in answers and devices[a].driver == "nvidia"]
    for answer in nameless[len(left) :]:
        yield f"NVML index {answer.index}: {error_text(answer.error)}, and no PCI function for it"


def foreign_lanes(answers: Mapping[PciAddress, GpuReading], ends: Ends) -> Iterator[str]:
    for address, answer in answers.items():
        active = [link for link in answer.links if link.active]
        count = sum(far_end(address, link, ends) is None for link in active)
        if count:
            yield f"{address}: {count} NVLinks lead to GPUs that are not this machine's"
