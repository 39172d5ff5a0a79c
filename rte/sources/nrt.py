"""A NodeResourceTopology object → Machine, as far as it can be known.

Ours says more with each detail: `node` only how many GPUs each NUMA node has, `gpu` their names
and NVLink groups, `full` also links, switches and NICs. Those of other writers have no GPUs at
all, only numbers of a resource.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from rte.model import (
    NVIDIA_VENDOR,
    DeviceId,
    Fabric,
    FabricState,
    Gpu,
    Level,
    Machine,
    Nic,
    NumaId,
    NumaNode,
    NumaSource,
    NvLinkEnd,
    PciAddress,
    PciDevice,
    base_units,
    made_up_address,
    nic_order,
    pci_address,
)
from rte.sources.nvlink import lane_speed, link_ends
from rte.sources.objects import gpu_number, lost, pcie_link
from rte.sources.problem import SourceError
from rte.sources.tree import BRIDGE, GPU, NETWORK, Tree

MAX_ZONES = 4096
MAX_GPUS = 128
MAX_DEPTH = 32
GPU_RESOURCE = "nvidia.com/gpu"
LEVELS = {10: Level.PIX, 20: Level.PXB, 30: Level.PHB, 40: Level.NODE, 50: Level.SYS}


@dataclass(slots=True)
class Zone:
    name: str
    type: str
    parent: str
    values: Mapping[str, str]
    costs: Mapping[str, int]
    resources: Mapping[str, str]  # name → capacity


@dataclass(slots=True)
class Found:
    name: str
    zones: Mapping[str, Zone]
    addresses: dict[str, PciAddress] = field(default_factory=dict)  # by zone's or GPU's name
    tree: Tree = field(default_factory=Tree)
    unknown: list[str] = field(default_factory=list)

    def of(self, type_: str) -> list[Zone]:
        return [zone for zone in self.zones.values() if zone.type == type_]


def nrt_machine(value: Mapping[str, Any], name: str) -> Machine:
    """The machine that an object describes. Raises SourceError for what is no such object."""
    found = Found(name, {zone.name: zone for zone in parsed_zones(value, name)})
    nodes = numa_nodes(found)
    for zone in found.of("PCIeSwitch"):
        switch(zone, found, nodes, above=())
    gpus = (described_gpus if found.of("GPU") else counted_gpus)(found, nodes)
    nics = tuple(nic(zone, found, nodes) for zone in found.of("NIC"))
    memory = memory_nodes(found)
    owner = {node.gpu: node.id for node in memory if node.gpu}
    return Machine(
        numa_nodes=tuple(sorted((*nodes.values(), *memory), key=lambda node: node.id)),
        pci=found.tree.in_order(),
        gpus=tuple(replace(gpu, memory_node=owner.get(gpu.pci)) for gpu in gpus),
        nics=tuple(sorted(nics, key=nic_order)),
        levels=dict(levels(found)),
        unknown=tuple(dict.fromkeys([*found.unknown, *unknown(found, gpus)])),
    )


def parsed_zones(value: Mapping[str, Any], name: str) -> Iterator[Zone]:
    zones = value.get("zones")
    if not isinstance(zones, list) or not zones or len(zones) > MAX_ZONES:
        raise SourceError(f"{name}: zones: expected a list of 1 to {MAX_ZONES}")
    names = set()
    for number, zone in enumerate(zones):
        where = f"{name}: zones[{number}]"
        if not isinstance(zone, dict) or not isinstance(zone.get("name"), str):
            raise SourceError(f"{where}: expected an object with a name")
        if zone["name"] in names:
            raise SourceError(f"{where}: a second zone {zone['name'][:60]!r}")
        names.add(zone["name"])
        yield Zone(
            name=zone["name"],
            type=str(zone.get("type", "")),
            parent=str(zone.get("parent") or ""),
            values={n: str(v) for n, v in pairs(zone, "attributes", "value", where)},
            costs={n: int(v) for n, v in pairs(zone, "costs", "value", where) if is_count(v)},
            resources={n: str(v) for n, v in pairs(zone, "resources", "capacity", where)},
        )


def is_count(value: object) -> bool:
    return re.fullmatch("[0-9]{1,6}", str(value)) is not None


def pairs(zone: Mapping[str, Any], key: str, of: str, where: str) -> Iterator[tuple[str, Any]]:
    entries = zone.get(key) or []
    if not isinstance(entries, list):
        raise SourceError(f"{where}.{key}: expected a list")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise SourceError(f"{where}.{key}: expected objects with a name")
        if entry.get(of) is not None:
            yield entry["name"], entry[of]


# NUMA nodes


def numa_nodes(found: Found) -> dict[str, NumaNode]:
    """By zone. Their CPUs are counted and not named."""
    ids = {}
    for zone in found.of("Node"):
        match = re.fullmatch("node-([0-9]{1,4})", zone.name)
        said = zone.values.get("numaNode", match[1] if match else "")
        if is_count(said):
            ids[zone.name] = NumaId(int(said))
    if len(set(ids.values())) != len(ids):
        raise SourceError(f"{found.name}: two zones are one NUMA node")
    return {
        name: NumaNode(
            id=id,
            cpus=(),
            cpus_known=False,
            distance={
                ids[other]: cost for other, cost in found.zones[name].costs.items() if other in ids
            },
        )
        for name, id in ids.items()
    }


def memory_nodes(found: Found) -> list[NumaNode]:
    nodes = []
    for zone in found.of("Memory"):
        if is_count(zone.values.get("numaNode")):
            nodes.append(
                NumaNode(
                    id=NumaId(int(zone.values["numaNode"])),
                    cpus=(),
                    memory_bytes=quantity(zone.values.get("memory")),
                    gpu=found.addresses.get(zone.values.get("gpu", "")),
                )
            )
    return nodes


def quantity(text: str | None) -> int | None:
    try:
        return base_units(text) if text and len(text) < 40 else None
    except ValueError:
        return None


# PCI


def switch(
    zone: Zone, found: Found, nodes: Mapping[str, NumaNode], *, above: tuple[str, ...]
) -> PciAddress | None:
    """The upstream port of a switch zone, with those above it; None where the zone has none."""
    if zone.name in found.addresses:
        return found.addresses[zone.name]
    if zone.name in above or len(above) > MAX_DEPTH:
        raise SourceError(f"{found.name}: zone {zone.name[:60]!r} is below itself, or too deep")
    address = address_of(zone, found)
    if address is None:
        return None
    hang(zone, address, found, nodes, vendor=0, class_code=BRIDGE, above=(*above, zone.name))
    return address


def hang(
    zone: Zone,
    address: PciAddress,
    found: Found,
    nodes: Mapping[str, NumaNode],
    *,
    vendor: int,
    class_code: int,
    above: tuple[str, ...] = (),
) -> None:
    """A function below a downstream port of its parent's switch, or in its parent's NUMA node."""
    parent = found.zones.get(zone.parent)
    port = None
    root = f"pci{address}"
    node = nodes.get(zone.parent)
    numa = node.id if node else None
    if parent is not None and parent.type == "PCIeSwitch":
        upstream = switch(parent, found, nodes, above=above)
        if upstream is not None:
            above_it = found.tree.devices[upstream]
            root, numa = above_it.root, above_it.numa
            port = found.tree.add_port(root, upstream, numa=numa)
    if address in found.tree.devices:
        raise SourceError(f"{found.name}: zone {zone.name[:60]!r}: {address} is there twice")
    found.addresses[zone.name] = address
    found.tree.devices[address] = PciDevice(
        address=address,
        root=root,
        parent=port,
        vendor=vendor,
        device=0,
        class_code=class_code,
        numa=numa,
        numa_from=None if numa is None else NumaSource.SOURCE,
        link=pcie_link(zone.values.get("pcieLink", "")),
        driver="nvidia" if vendor == NVIDIA_VENDOR else None,
    )


def address_of(zone: Zone, found: Found) -> PciAddress | None:
    text = zone.values.get("pci")
    if text is None:
        return None
    try:
        return pci_address(text)
    except ValueError as error:
        raise SourceError(f"{found.name}: zone {zone.name[:60]!r}: {error}") from error


# GPUs


def described_gpus(found: Found, nodes: Mapping[str, NumaNode]) -> tuple[Gpu, ...]:
    numbered: dict[int, Zone] = {}
    for zone in found.of("GPU"):
        number = number_of(zone.name, zone, found)
        numbered[number] = zone
        address = address_of(zone, found) or made_up_address(number)
        hang(zone, address, found, nodes, vendor=NVIDIA_VENDOR, class_code=GPU)
    if len(numbered) > MAX_GPUS:
        raise SourceError(f"{found.name}: {len(numbered)} GPUs; expected at most {MAX_GPUS}")
    links = nvlinks(found)
    fabrics = fabric_of(found)
    return tuple(
        Gpu(
            number=number,
            pci=found.addresses[zone.name],
            uuid=DeviceId(uuid) if (uuid := zone.values.get("uuid")) else None,
            lost=lost(zone.values.get("healthReason", "")),
            product=zone.values.get("product"),
            links=links.get(found.addresses[zone.name], ()),
            fabric=fabrics.get(zone.name),
        )
        for number, zone in sorted(numbered.items())
    )


def number_of(gpu: str, zone: Zone, found: Found) -> int:
    try:
        return gpu_number(gpu)
    except ValueError as error:
        raise SourceError(f"{found.name}: zone {zone.name[:60]!r}: {error}") from error


def counted_gpus(found: Found, nodes: Mapping[str, NumaNode]) -> tuple[Gpu, ...]:
    """GPUs by name or number of each NUMA zone: with places, and without anything else."""
    zone_of: dict[int, str] = {}
    for zone in found.of("Node"):
        for name in filter(None, zone.values.get("gpus", "").split(",")):
            zone_of[number_of(name, zone, found)] = zone.name
    if not zone_of:
        for zone in found.of("Node"):
            count = quantity(zone.resources.get(GPU_RESOURCE)) or 0
            if len(zone_of) + count > MAX_GPUS:
                raise SourceError(f"{found.name}: more than {MAX_GPUS} {GPU_RESOURCE}")
            zone_of |= {len(zone_of) + i: zone.name for i in range(count)}
        if zone_of:
            found.unknown.append(
                f"which GPUs there are: they are counted from {GPU_RESOURCE}, where a slice or "
                "replica counts like a GPU"
            )
    gpus = []
    for number, zone_name in sorted(zone_of.items()):
        address = made_up_address(number)
        zone = Zone(f"gpu-{number}", "GPU", zone_name, {}, {}, {})
        hang(zone, address, found, nodes, vendor=NVIDIA_VENDOR, class_code=GPU)
        gpus.append(Gpu(number=number, pci=address))
    return tuple(gpus)


def nvlinks(found: Found) -> Mapping[PciAddress, tuple[NvLinkEnd, ...]]:
    """From lanes where the object has them, else one lane for each pair of a mesh."""
    zones = {zone.name: zone for zone in found.of("GPU")}
    lanes: dict[PciAddress, dict[PciAddress, int]] = {}
    said = any(key.startswith("nvlinks.") for zone in zones.values() for key in zone.values)
    for zone in zones.values():
        row = lanes.setdefault(found.addresses[zone.name], {})
        for other in zones.values():
            count = zone.values.get(f"nvlinks.{other.name}", "0")
            if other is not zone:
                row[found.addresses[other.name]] = int(count) if is_count(count) else 0
    if not said:
        for group in found.of("NVLinkGroup"):
            members = [n for n in group.values.get("gpus", "").split(",") if n in zones]
            if group.values.get("shape") == "mesh":
                found.unknown.append("NVLink lanes: one stands for each pair of a mesh")
                for a, b in permutations(members, 2):
                    lanes[found.addresses[a]][found.addresses[b]] = 1
            else:
                found.unknown.append(
                    f"NVLinks of {group.name}: its shape does not say which GPUs are linked"
                )
    speed = {
        found.addresses[name]: lane_speed(zone.values.get("product"))
        for name, zone in zones.items()
    }
    return link_ends(lanes, speed)


def fabric_of(found: Found) -> dict[str, Fabric]:
    fabrics = {}
    for group in found.of("NVLinkGroup"):
        cluster, _, clique = group.values.get("domain", "").rpartition(".")
        if cluster and is_count(clique):
            for name in group.values.get("gpus", "").split(","):
                fabrics[name] = Fabric(
                    state=FabricState.COMPLETED, cluster=cluster, clique=int(clique)
                )
    return fabrics


def levels(found: Found) -> Iterator[tuple[tuple[PciAddress, PciAddress], Level]]:
    for zone in found.of("GPU"):
        for other, cost in zone.costs.items():
            if cost in LEVELS and other in found.addresses:
                yield (found.addresses[zone.name], found.addresses[other]), LEVELS[cost]


# NICs


def nic(zone: Zone, found: Found, nodes: Mapping[str, NumaNode]) -> Nic:
    address = address_of(zone, found)
    if address is not None:
        hang(zone, address, found, nodes, vendor=0, class_code=NETWORK)
    rate = zone.values.get("linkSpeedGbps", "")
    node = nodes.get(zone.parent)
    return Nic(
        pci=address,
        netdevs=tuple(filter(None, zone.values.get("netdev", "").split(","))),
        rdma=tuple(filter(None, zone.values.get("rdma", "").split(","))),
        rate_megabits_per_s=int(float(rate) * 1000)
        if re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,6})?", rate)
        else None,
        up={"true": True, "false": False}.get(zone.values.get("up", "")),
        kind=zone.values.get("kind", "pci"),
        numa=node.id if node and address is None else None,
    )


def unknown(found: Found, gpus: tuple[Gpu, ...]) -> Iterator[str]:
    yield "CPUs and memory of NUMA nodes: the object counts them by resource"
    if found.of("GPU"):
        if not found.of("PCIeSwitch") and not any(z.costs for z in found.of("GPU")):
            yield "PCIe switches, NICs and link speeds: nrt.detail full has them, and GPUFabric"
        if any(found.tree.devices[gpu.pci].numa is None for gpu in gpus):
            yield "NUMA nodes of some GPUs: the object keeps those only that firmware states"
    elif gpus:
        if any("nvlinkGroups" in zone.values for zone in found.of("Node")):
            yield "who is in the NVLink groups that the zones name"
        yield "UUIDs, NVLinks, PCIe and NICs: nrt.detail gpu and full say more, and GPUFabric all"
    else:
        yield "GPUs: no zone names or counts any"
    yield "MIG slices"
