"""A GPUFabric object → Machine: the whole graph of a node, read from the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from rte.model import (
    NVIDIA_VENDOR,
    CpuId,
    DeviceId,
    Fabric,
    FabricState,
    Gpu,
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
    base_units,
    nic_order,
    parse_ranges,
    pci_address,
)
from rte.sources.nvlink import lane_speed
from rte.sources.objects import gpu_number, lost, pcie_link
from rte.sources.problem import SourceError
from rte.sources.tree import BRIDGE, GPU, NETWORK, Tree

MAX_SWITCHES = 64  # above each other

Few = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Name = Annotated[str, msgspec.Meta(max_length=253)]


class Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of the object; what a later version adds is left out."""


class Distance(Part, frozen=True, kw_only=True):
    id: Few
    distance: Few


class Node(Part, frozen=True, kw_only=True):
    id: Few
    cpus: str = ""
    memory: Name | None = None
    gpu: Name | None = None
    distances: list[Distance] = []


class Placed(Part, frozen=True, kw_only=True):
    """What has a place in the PCI tree."""

    name: Name
    pci: Name | None = None
    switch: Name | None = None
    root: Name | None = None
    numa_node: Few | None = None
    numa_from: NumaSource | None = None
    pcie_link: Name = ""


class Slice(Part, frozen=True, kw_only=True):
    id: Name
    profile: Name
    gpu_instance: Few


class GpuPart(Placed, frozen=True, kw_only=True):
    uuid: Name | None = None
    product: Name | None = None
    memory: Name | None = None
    module: Few | None = None
    switch_lanes: Few = 0
    cpu_lanes: Few = 0
    lanes_down: Few = 0
    slices: list[Slice] = []
    health_reason: str = ""


class NicPart(Placed, frozen=True, kw_only=True):
    kind: Name = "pci"
    netdevs: list[Name] = []
    rdma: list[Name] = []
    members: list[Name] = []


class Link(Part, frozen=True, kw_only=True):
    a: Name
    b: Name
    lanes: Few
    one_sided: Few = 0


class Fabrics(Part, frozen=True, kw_only=True):
    state: FabricState
    gpus: list[Name]
    cluster: Name | None = None
    clique: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] | None = None


class Status(Part, frozen=True, kw_only=True):
    driver: Name | None = None
    numa_nodes: Annotated[list[Node], msgspec.Meta(max_length=1024)] = []
    gpus: Annotated[list[GpuPart], msgspec.Meta(max_length=128)] = []
    switches: Annotated[list[Placed], msgspec.Meta(max_length=1024)] = []
    nics: Annotated[list[NicPart], msgspec.Meta(max_length=4096)] = []
    nvlinks: Annotated[list[Link], msgspec.Meta(max_length=16384)] = []
    fabrics: Annotated[list[Fabrics], msgspec.Meta(max_length=128)] = []


def fabric_machine(value: Mapping[str, Any], name: str) -> Machine:
    """The machine that an object describes. Raises SourceError, which names the field."""
    try:
        status = msgspec.convert(value.get("status"), Status)
        return machine(status)
    except msgspec.ValidationError as error:
        where = str(error).replace("$", "status", 1)
        raise SourceError(f"{name}: {where[:300]}") from error
    except ValueError as error:
        raise SourceError(f"{name}: status: {str(error)[:300]}") from error


def machine(status: Status) -> Machine:
    numbers = {part.name: gpu_number(part.name) for part in status.gpus}
    address = {part.name: address_of(part) for part in status.gpus}
    if len(set(numbers.values())) != len(status.gpus):
        raise ValueError("two GPUs have one number")
    lanes = {part.name: list(ends(part, status, address)) for part in status.gpus}
    nodes = tuple(numa_node(node, address) for node in status.numa_nodes)
    owner = {node.gpu: node.id for node in nodes if node.gpu}
    return Machine(
        numa_nodes=tuple(sorted(nodes, key=lambda node: node.id)),
        pci=tree(status).in_order(),
        gpus=tuple(
            gpu(part, numbers[part.name], status, lanes[part.name], owner)
            for part in sorted(status.gpus, key=lambda part: numbers[part.name])
        ),
        nics=nics(status),
        driver=status.driver,
        unknown=tuple(unknown(status)),
    )


def address_of(part: Placed) -> PciAddress:
    return pci_address(part.pci or "")


def numa_node(node: Node, address: Mapping[str, PciAddress]) -> NumaNode:
    return NumaNode(
        id=NumaId(node.id),
        cpus=tuple(map(CpuId, parse_ranges(node.cpus))),
        memory_bytes=None if node.memory is None else base_units(node.memory),
        distance={NumaId(d.id): d.distance for d in node.distances},
        gpu=address.get(node.gpu) if node.gpu else None,
    )


def unknown(status: Status) -> Iterator[str]:
    yield "link rates and states of NICs, huge pages, virtual functions: the object has no room"
    if any(part.switch_lanes for part in status.gpus) or status.nvlinks:
        yield "speed of NVLink lanes: taken from the product's name"
    if any(one.one_sided for one in status.nvlinks):
        yield "which end of a one-sided NVLink says more: taken for the one with the smaller number"
    if any(part.slices for part in status.gpus):
        yield "memory of MIG slices"


# Places


def tree(status: Status) -> Tree:
    """The PCI tree. Raises ValueError for parts that cannot all be where they say."""
    found = Tree()
    switches = {part.name: part for part in status.switches}
    for switch in status.switches:
        add_switch(switch, switches, found)
    for gpu_part in status.gpus:
        add(gpu_part, switches, found, vendor=NVIDIA_VENDOR, class_code=GPU)
    for nic_part in status.nics:
        if nic_part.pci is not None:
            add(nic_part, switches, found, vendor=0, class_code=NETWORK)
    return found


def add_switch(
    part: Placed, switches: Mapping[str, Placed], found: Tree, *, depth: int = 0
) -> PciAddress:
    """The upstream port of a switch; it hangs from a port of the switch above, or a root port."""
    address = address_of(part)
    known = found.devices.get(address)
    if known is not None and known.is_bridge:
        return address
    if depth > MAX_SWITCHES:
        raise ValueError(f"{part.name}: below itself, or too deep")
    above = switches.get(part.switch or "")
    upstream = None if above is None else add_switch(above, switches, found, depth=depth + 1)
    place(part, found.add_port(root(part), upstream), found, vendor=0, class_code=BRIDGE)
    return address


def add(
    part: Placed, switches: Mapping[str, Placed], found: Tree, *, vendor: int, class_code: int
) -> None:
    """A function below a port of its switch, or of the root complex itself."""
    above = switches.get(part.switch or "")
    parent = None
    if above is not None:
        parent = found.add_port(root(part), add_switch(above, switches, found))
    place(part, parent, found, vendor=vendor, class_code=class_code)


def root(part: Placed) -> str:
    return part.root or f"pci{address_of(part).rpartition(':')[0]}"


def place(
    part: Placed, parent: PciAddress | None, found: Tree, *, vendor: int, class_code: int
) -> None:
    address = address_of(part)
    if address in found.devices:
        raise ValueError(f"{part.name}: {address} is there twice")
    numa = None if part.numa_node is None else NumaId(part.numa_node)
    found.devices[address] = PciDevice(
        address=address,
        root=root(part),
        parent=parent,
        vendor=vendor,
        device=0,
        class_code=class_code,
        numa=numa,
        numa_from=None if numa is None else part.numa_from or NumaSource.SOURCE,
        link=pcie_link(part.pcie_link),
        driver="nvidia" if vendor == NVIDIA_VENDOR else None,
    )


# GPUs


def gpu(
    part: GpuPart,
    number: int,
    status: Status,
    links: list[NvLinkEnd],
    owner: Mapping[PciAddress, NumaId],
) -> Gpu:
    return Gpu(
        number=number,
        pci=address_of(part),
        uuid=DeviceId(part.uuid) if part.uuid else None,
        lost=lost(part.health_reason),
        product=part.product,
        memory_bytes=None if part.memory is None else base_units(part.memory),
        module=part.module,
        links=tuple(sorted(links, key=lambda end: (end.peer, end.remote or ""))),
        links_down=part.lanes_down,
        fabric=fabric(part.name, status),
        mig_enabled=bool(part.slices),
        slices=tuple(
            MigSlice(
                id=DeviceId(one.id),
                profile=one.profile,
                memory_bytes=0,
                gpu_instance=one.gpu_instance,
                compute_instance=0,
            )
            for one in part.slices
        ),
        memory_node=owner.get(address_of(part)),
    )


def ends(part: GpuPart, status: Status, address: Mapping[str, PciAddress]) -> Iterator[NvLinkEnd]:
    """The lanes of one GPU. Which end of a one-sided link says more is not kept: the first."""
    speed = lane_speed(part.product)
    for one in status.nvlinks:
        if part.name not in (one.a, one.b) or one.a == one.b:
            continue
        other = one.b if part.name == one.a else one.a
        count = one.lanes + (one.one_sided if part.name == one.a else 0)
        if other not in address:
            raise ValueError(f"nvlinks: {other[:60]!r} is no GPU of the object")
        if count:
            yield NvLinkEnd(
                peer=LinkPeer.GPU,
                remote=address[other],
                lanes=count,
                lane_megabytes_per_s=speed,
            )
    for peer, count in ((LinkPeer.SWITCH, part.switch_lanes), (LinkPeer.CPU, part.cpu_lanes)):
        if count:
            yield NvLinkEnd(peer=peer, lanes=count, lane_megabytes_per_s=speed)


def fabric(name: str, status: Status) -> Fabric | None:
    for one in status.fabrics:
        if name in one.gpus:
            return Fabric(state=one.state, cluster=one.cluster, clique=one.clique)
    return None


# NICs


def nics(status: Status) -> tuple[Nic, ...]:
    found = [
        Nic(
            pci=None if part.pci is None else address_of(part),
            kind=part.kind,
            netdevs=tuple(part.netdevs),
            rdma=tuple(part.rdma),
            members=tuple(part.members),
            numa=NumaId(part.numa_node)
            if part.pci is None and part.numa_node is not None
            else None,
        )
        for part in status.nics
    ]
    return tuple(sorted(found, key=nic_order))
