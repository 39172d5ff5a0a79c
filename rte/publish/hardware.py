"""The hardware of a node as objects describe it: the health of its GPUs, and zones for people.

No zone here carries resources: a scheduler with reservations subtracts from every zone that lists
a resource.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from rte.graph.build import Graph
from rte.graph.groups import Group
from rte.graph.preference import bits
from rte.graph.tree import bridges_above
from rte.model import (
    DeviceId,
    FaultClass,
    Faults,
    Gpu,
    Level,
    Machine,
    Nic,
    NumaId,
    NumaNode,
    NumaSource,
    PciAddress,
    PciDevice,
    pci_order,
)
from rte.publish.forms import binary_quantity, zone_body

# NVML's nvmlGpuTopologyLevel_t, nearer is smaller. Pairs of unknown level have no cost: readers
# take a cost that is missing for the worst.
COST = {Level.PIX: 10, Level.PXB: 20, Level.PHB: 30, Level.NODE: 40, Level.SYS: 50}
NVLINK_COST = 1


class Hardware:
    """The machine and its graph with the few indexes that the zones are written from."""

    def __init__(
        self,
        machine: Machine,
        graph: Graph | None,
        groups: Sequence[Group],
        nodes: Sequence[NumaNode],
        faults: Faults,
        *,
        withheld: Mapping[str, str] | None = None,
    ) -> None:
        self.machine = machine
        self.graph = graph
        self.groups = groups
        self.faults = faults
        self.withheld = withheld or {}
        self.zone_of_node = {node.id: number for number, node in enumerate(nodes)}
        self.functions = {function.address: function for function in machine.pci}
        self.uuids = frozenset(gpu.uuid for gpu in machine.gpus if gpu.uuid is not None)
        self.group_of = {pci: group.name for group in groups for pci in group.gpus}
        self.name_of = {gpu.pci: gpu.name for gpu in machine.gpus}
        answering = graph.gpus if graph is not None else ()
        self.position = {gpu.pci: position for position, gpu in enumerate(answering)}
        self.linked = linked_ids(graph) if graph is not None else {}

    def names(self, addresses: Iterable[PciAddress]) -> list[str]:
        """GPUs' names; the address of one that the machine does not list."""
        return [self.name_of.get(address, address) for address in addresses]

    def zone_of(self, address: PciAddress | None, numa: NumaId | None = None) -> int | None:
        """The zone of a function whose firmware or operator states its node; never an inferred
        one. `numa` is asked where there is no function."""
        function = self.functions.get(address) if address is not None else None
        if function is not None:
            stated = function.numa_from in (NumaSource.SYSFS, NumaSource.OVERRIDE)
            numa = function.numa if stated else None
        return self.zone_of_node.get(numa) if numa is not None else None

    def zone_name(self, address: PciAddress | None, numa: NumaId | None = None) -> str | None:
        number = self.zone_of(address, numa)
        return None if number is None else f"node-{number}"

    @cached_property
    def switches(self) -> dict[PciAddress, str]:
        """The upstream ports of the PCIe switches above GPUs and NICs, with their zones' names.

        Counted down from the root port, every other bridge is an upstream port.
        """
        ends = [gpu.pci for gpu in self.machine.gpus]
        ends += [nic.pci for nic in listed_nics(self.machine) if nic.pci is not None]
        ports = {port for end in ends for port in self.switches_above(end)}
        return {
            port: f"switch-{number}" for number, port in enumerate(sorted(ports, key=pci_order))
        }

    def switches_above(self, address: PciAddress) -> tuple[PciAddress, ...]:
        """Upstream ports from the root complex down to the function."""
        return bridges_above(self.functions, address)[::-1][1::2]

    def parent(self, address: PciAddress) -> str | None:
        """The zone of the nearest switch above, else the NUMA zone."""
        above = self.switches_above(address)
        return self.switches[above[-1]] if above else self.zone_name(address)


def linked_ids(graph: Graph) -> dict[DeviceId, list[DeviceId]]:
    """The GPUs that each GPU reaches over NVLink directly, without those that reach none."""
    return {
        graph.ids[position]: [graph.ids[other] for other in bits(neighbours)]
        for position, neighbours in enumerate(graph.adjacent)
        if neighbours
    }


# Zones


def gpu_zones(hardware: Hardware) -> list[dict[str, Any]]:
    """Where each GPU is and how it is, in few attributes."""
    return [
        zone_body(
            gpu.name, "GPU", parent=hardware.zone_name(gpu.pci), values=gpu_values(gpu, hardware)
        )
        for gpu in hardware.machine.gpus
    ]


def full_gpu_zones(hardware: Hardware) -> list[dict[str, Any]]:
    """Also links and costs, and the switch that each GPU hangs from."""
    zones = []
    for gpu in hardware.machine.gpus:
        values = gpu_values(gpu, hardware) | link_speed(hardware.functions.get(gpu.pci))
        values |= {f"nvlinks.{name}": str(lanes) for name, lanes in links(gpu, hardware).items()}
        if gpu.product is not None:
            values["product"] = gpu.product
        zone = zone_body(gpu.name, "GPU", parent=hardware.parent(gpu.pci), values=values)
        if costs := gpu_costs(gpu, hardware):
            zone["costs"] = costs
        zones.append(zone)
    return zones


def gpu_values(gpu: Gpu, hardware: Hardware) -> dict[str, str]:
    values = {"pci": str(gpu.pci), **health(gpu, hardware.faults, hardware.withheld)}
    if gpu.uuid is not None:
        values["uuid"] = gpu.uuid
    if gpu.pci in hardware.group_of:
        values["nvlinkGroup"] = hardware.group_of[gpu.pci]
    return values


def health(gpu: Gpu, faults: Faults, withheld: Mapping[str, str] | None = None) -> dict[str, str]:
    """`healthy`, `degraded` or `unhealthy`, with the reasons where it is not healthy.

    A fault or cordon of some slices leaves the others: the GPU is degraded.
    """
    found = faults.get(gpu.pci, ())
    cordoned = withheld or {}
    whole = gpu.pci in cordoned or (gpu.uuid or "") in cordoned
    reasons = {fault.reason for fault in found if fault.severity is not FaultClass.INFO}
    unhealthy = whole or any(
        fault.severity is FaultClass.WITHHOLD and (fault.gpu_instance is None or not gpu.slices)
        for fault in found
    )
    if whole or any(part.id in cordoned for part in gpu.slices):
        reasons |= {"withheld"}
    if gpu.lost is not None:
        unhealthy, reasons = True, reasons | {"lost"}
    if not reasons:
        return {"health": "healthy"}
    return {
        "health": "unhealthy" if unhealthy else "degraded",
        "healthReason": ",".join(sorted(reasons)),
    }


def links(gpu: Gpu, hardware: Hardware) -> dict[str, int]:
    """NVLink lanes to each other GPU, those through switches included."""
    position = hardware.position.get(gpu.pci)
    if hardware.graph is None or position is None:
        return {}
    return {
        other.name: lanes
        for other, lanes in zip(hardware.graph.gpus, hardware.graph.lanes[position], strict=True)
        if lanes and other.pci != gpu.pci
    }


def gpu_costs(gpu: Gpu, hardware: Hardware) -> list[dict[str, Any]]:
    position = hardware.position.get(gpu.pci)
    if hardware.graph is None or position is None:
        return []
    costs = []
    for other, peer in enumerate(hardware.graph.gpus):
        if other == position:
            continue
        linked = hardware.graph.adjacent[position] >> other & 1
        cost = NVLINK_COST if linked else COST.get(hardware.graph.levels[position][other])
        if cost is not None:
            costs.append({"name": peer.name, "value": cost})
    return costs


def group_zones(hardware: Hardware) -> list[dict[str, Any]]:
    return [
        zone_body(group.name, "NVLinkGroup", values=group_values(group, hardware))
        for group in hardware.groups
    ]


def group_values(group: Group, hardware: Hardware) -> dict[str, str]:
    values = {"shape": group.shape.value, "gpus": ",".join(hardware.names(group.gpus))}
    if group.domain is not None:
        values["domain"] = group.domain
    if group.degraded:
        values["degraded"] = ",".join(hardware.names(group.degraded))
    return values


def listed_nics(machine: Machine) -> list[Nic]:
    """Virtual functions are left out: they can be hundreds, and are where their card is."""
    return [nic for nic in machine.nics if nic.physical_function is None]


def nic_zones(hardware: Hardware) -> list[dict[str, Any]]:
    zones = []
    for number, nic in enumerate(listed_nics(hardware.machine)):
        function = hardware.functions.get(nic.pci) if nic.pci is not None else None
        values = {"kind": nic.kind, **link_speed(function)}
        if nic.pci is not None:
            values["pci"] = str(nic.pci)
        if nic.netdevs:
            values["netdev"] = ",".join(nic.netdevs)
        if nic.rdma:
            values["rdma"] = ",".join(nic.rdma)
        if nic.rate_megabits_per_s is not None:
            values["linkSpeedGbps"] = f"{nic.rate_megabits_per_s / 1000:g}"
        if nic.up is not None:
            values["up"] = "true" if nic.up else "false"
        parent = hardware.zone_name(None, nic.numa) if nic.pci is None else hardware.parent(nic.pci)
        zones.append(zone_body(f"nic-{number}", "NIC", parent=parent, values=values))
    return zones


def link_speed(function: PciDevice | None) -> dict[str, str]:
    if function is None or function.link is None:
        return {}
    link = function.link
    return {"pcieLink": f"{link.gigatransfers:g} GT/s x{link.width}"}


def switch_zones(hardware: Hardware) -> list[dict[str, Any]]:
    zones = []
    for port, name in hardware.switches.items():
        values = {"pci": str(port)}
        zones.append(zone_body(name, "PCIeSwitch", parent=hardware.parent(port), values=values))
    return zones


def memory_zones(hardware: Hardware) -> list[dict[str, Any]]:
    zones = []
    for node in hardware.machine.numa_nodes:
        if node.cpus:
            continue
        values = {"numaNode": str(node.id)}
        if node.memory_bytes is not None:
            values["memory"] = binary_quantity(node.memory_bytes)
        if node.gpu is not None:
            values["gpu"] = hardware.name_of.get(node.gpu, node.gpu)
        zone = zone_body(f"memory-{node.id}", "Memory", values=values)
        costs = [
            {"name": f"node-{number}", "value": node.distance[other]}
            for other, number in hardware.zone_of_node.items()
            if other in node.distance
        ]
        if costs:
            zone["costs"] = costs
        zones.append(zone)
    return zones
