"""The graph as plain JSON values: the contract of `rte show -o json|yaml` and of /topology.

Keys may be added, never changed. null means that the machine does not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from rte.graph.build import Graph
from rte.graph.groups import Group
from rte.model import Gpu, LinkPeer, Nic, NumaNode, PciAddress, PciLink, is_made_up, ranges
from rte.view.relations import relations

Json = dict[str, Any]


def document(graph: Graph, groups: Sequence[Group]) -> Json:
    """All that is known of a machine. GPUs are called gpu-<number>, and so are ends of NVLinks."""
    machine = graph.machine
    group_of = {pci: group.name for group in groups for pci in group.gpus}
    name_of = {one.pci: one.name for one in machine.gpus}
    found = relations(graph)
    return {
        "driver": machine.driver,
        "numa_nodes": [numa_node(node, name_of) for node in machine.numa_nodes],
        "gpus": [gpu(graph, one, group_of) for one in machine.gpus],
        "nvlinks": nvlinks(graph),
        "groups": [
            {
                "name": group.name,
                "shape": str(group.shape),
                "gpus": [name_of[pci] for pci in group.gpus],
                "domain": group.domain,
                "degraded": [name_of[pci] for pci in group.degraded],
            }
            for group in groups
        ],
        "switches": [
            {
                "pci": address(switch.address),
                "gpus": [g.name for i, g in enumerate(graph.gpus) if switch.gpus >> i & 1],
            }
            for switch in graph.switches
        ],
        "nics": [nic(graph, one) for one in machine.nics],
        "relations": {
            "names": list(found.names),
            "nics": dict(found.nics),
            "matrix": [list(row) for row in found.matrix],
        },
        "overridden": list(machine.overridden),
        "unknown": list(machine.unknown),
    }


def address(of: PciAddress | None) -> str | None:
    return None if of is None or is_made_up(of) else of


def numa_node(node: NumaNode, name_of: dict[PciAddress, str]) -> Json:
    return {
        "id": node.id,
        "cpus": ranges(node.cpus) if node.cpus_known else None,
        "memory_bytes": node.memory_bytes,
        "huge_pages": {str(page): count for page, count in sorted(node.huge_pages.items())},
        "distance": {str(id): distance for id, distance in sorted(node.distance.items())},
        "gpu": name_of.get(node.gpu, node.gpu) if node.gpu else None,
    }


def gpu(graph: Graph, one: Gpu, group_of: dict[PciAddress, str]) -> Json:
    device = graph.tree.devices.get(one.pci)
    at = {other.pci: i for i, other in enumerate(graph.gpus)}.get(one.pci)
    near = graph.adjacent[at] if at is not None else 0
    return {
        "id": one.name,
        "uuid": one.uuid,
        "pci": address(one.pci),
        "lost": one.lost,
        "product": one.product,
        "memory_bytes": one.memory_bytes,
        "minor": one.minor,
        "index": one.index,
        "numa_node": device.numa if device else None,
        "numa_from": str(device.numa_from) if device and device.numa_from else None,
        "memory_numa_node": one.memory_node,
        "pcie": link(device.link if device else None),
        "group": group_of.get(one.pci),
        "nvlink_peers": [g.name for i, g in enumerate(graph.gpus) if near >> i & 1],
        "nvlink_lanes": sum(end.lanes for end in one.links),
        "nvlink_lanes_down": one.links_down,
        "switch_lanes": sum(end.lanes for end in one.links if end.peer is LinkPeer.SWITCH),
        "cpu_lanes": sum(end.lanes for end in one.links if end.peer is LinkPeer.CPU),
        "suspect": at is not None and bool(graph.suspects >> at & 1),
        "fabric": fabric(one),
        "mig_enabled": one.mig_enabled,
        "mig": [
            {"id": s.id, "profile": s.profile, "memory_bytes": s.memory_bytes} for s in one.slices
        ],
    }


def fabric(one: Gpu) -> Json | None:
    said = one.fabric
    if said is None:
        return None
    return {
        "state": str(said.state),
        "cluster": said.cluster,
        "clique": said.clique,
        "healthy": said.healthy,
        "status": said.status,
    }


def link(of: PciLink | None) -> Json | None:
    if of is None:
        return None
    return {
        "gigatransfers": of.gigatransfers,
        "width": of.width,
        "megabytes_per_s": of.megabytes_per_s,
    }


def nvlinks(graph: Graph) -> list[Json]:
    """Each pair that either end calls linked, by position; `lanes` is the smaller word of both."""
    return [
        {
            "a": graph.gpus[i].name,
            "b": graph.gpus[j].name,
            "lanes": min(graph.lanes[i][j], graph.lanes[j][i]),
            "lanes_from_a": graph.lanes[i][j],
            "lanes_from_b": graph.lanes[j][i],
            "megabytes_per_s": graph.closeness[i][j].nvlink_megabytes_per_s,
        }
        for i, j in combinations(range(len(graph.gpus)), 2)
        if graph.lanes[i][j] or graph.lanes[j][i]
    ]


def nic(graph: Graph, one: Nic) -> Json:
    device = graph.tree.devices.get(one.pci) if one.pci else None
    return {
        "name": one.name,
        "kind": one.kind,
        "pci": address(one.pci),
        "netdevs": list(one.netdevs),
        "rdma": list(one.rdma),
        "numa_node": device.numa if device else one.numa,
        "numa_from": str(device.numa_from) if device and device.numa_from else None,
        "rate_megabits_per_s": one.rate_megabits_per_s,
        "up": one.up,
        "pcie": link(device.link if device else None),
        "compute": one in graph.nics,
        "physical_function": one.physical_function,
        "virtual_functions": one.virtual_functions,
        "members": list(one.members),
    }
