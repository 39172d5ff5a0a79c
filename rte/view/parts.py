"""The machine as a nest of NUMA nodes, PCIe switches, GPUs and NICs: what pictures are drawn from.

What only one device uses is left out, as in the text: a switch is drawn where two or more share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from rte.graph.build import Graph
from rte.graph.groups import Group
from rte.model import Gpu, LinkPeer, Nic, NumaId, NumaNode, PciAddress, is_made_up


@dataclass(frozen=True, slots=True)
class Leaf:
    """A GPU or a NIC."""

    place: tuple[PciAddress, ...]  # the bridges above, from the root complex down
    root: str
    gpu: Gpu | None = None
    nic: Nic | None = None
    ports: int = 1  # functions of one card that stand for one NIC


@dataclass(frozen=True, slots=True)
class Switch:
    """A PCIe switch with what hangs from it."""

    address: PciAddress
    children: tuple[Switch | Leaf, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A NUMA node with its devices; `node` is None for devices without a known node."""

    id: NumaId | None
    node: NumaNode | None
    children: tuple[Switch | Leaf, ...]


class Pair(NamedTuple):
    """Two GPUs that NVLink joins directly, by their positions in the graph."""

    a: int
    b: int
    lanes: int  # the smaller word of the two
    agreed: bool  # both ends say the same


def places(graph: Graph) -> tuple[Place, ...]:
    """NUMA nodes that have CPUs or devices, by id, then the devices of no known node."""
    leaves = [*gpu_leaves(graph), *nic_leaves(graph)]
    here: dict[NumaId | None, list[Leaf]] = {}
    for leaf in leaves:
        here.setdefault(numa(graph, leaf), []).append(leaf)
    nodes = {node.id: node for node in graph.machine.numa_nodes}
    ids = {id for id in here if id is not None}
    ids |= {node.id for node in nodes.values() if node.cpus or not node.cpus_known}
    found = [Place(id, nodes.get(id), nested(graph, here.get(id, ()), 0)) for id in sorted(ids)]
    if None in here:
        found.append(Place(None, None, nested(graph, here[None], 0)))
    return tuple(found)


def memory_only(graph: Graph) -> tuple[NumaNode, ...]:
    """NUMA nodes without CPUs that hold memory, such as a Grace GPU's."""
    return tuple(
        node
        for node in graph.machine.numa_nodes
        if not node.cpus and node.cpus_known and (node.gpu or node.memory_bytes)
    )


def gpu_leaves(graph: Graph) -> Iterable[Leaf]:
    for gpu in graph.machine.gpus:
        yield Leaf(*where(graph, gpu.pci), gpu=gpu)


def nic_leaves(graph: Graph) -> Iterable[Leaf]:
    """NICs; functions of one slot are one card, virtual functions are their physical one's."""
    present = {nic.pci for nic in graph.machine.nics}
    cards: dict[str, list[Nic]] = {}
    for nic in graph.machine.nics:
        if nic.physical_function not in present or nic.physical_function is None:
            made_up = nic.pci is None or is_made_up(nic.pci)
            key = nic.name if made_up else str(nic.pci).rpartition(".")[0]
            cards.setdefault(key, []).append(nic)
    for functions in cards.values():
        first = functions[0]
        yield Leaf(*where(graph, first.pci), nic=first, ports=len(functions))


def where(graph: Graph, address: PciAddress | None) -> tuple[tuple[PciAddress, ...], str]:
    device = graph.tree.devices.get(address) if address else None
    if device is None:
        return (), ""
    return tuple(reversed(graph.tree.bridges[device.address])), device.root


def numa(graph: Graph, leaf: Leaf) -> NumaId | None:
    address = leaf.gpu.pci if leaf.gpu else leaf.nic.pci if leaf.nic else None
    device = graph.tree.devices.get(address) if address else None
    if device is None:
        return leaf.nic.numa if leaf.nic else None
    return device.numa


def nested(graph: Graph, leaves: Sequence[Leaf], depth: int) -> tuple[Switch | Leaf, ...]:
    """Leaves by the bridge at a depth of their places, where two or more share one."""
    found: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        key = leaf.place[depth] if len(leaf.place) > depth else f"\0{len(found)}"
        found.setdefault(key, []).append(leaf)
    children: list[Switch | Leaf] = []
    for address, below in found.items():
        if len(below) == 1:
            children.append(below[0])
            continue
        inner = nested(graph, below, depth + 1)
        # A root port above one switch says nothing that the switch does not.
        alone = len(inner) == 1 and isinstance(inner[0], Switch)
        children += inner if alone else [Switch(PciAddress(address), inner)]
    return tuple(children)


def pairs(graph: Graph) -> tuple[Pair, ...]:
    """NVLinks from GPU to GPU, without those by way of switches."""
    at = {gpu.pci: i for i, gpu in enumerate(graph.gpus)}
    said: dict[tuple[int, int], int] = {}
    for i, gpu in enumerate(graph.gpus):
        for end in gpu.links:
            j = at.get(end.remote) if end.peer is LinkPeer.GPU and end.remote else None
            if j is not None and j != i:
                said[i, j] = said.get((i, j), 0) + end.lanes
    return tuple(
        Pair(
            i,
            j,
            min(said.get((i, j), 0), said.get((j, i), 0)),
            said.get((i, j)) == said.get((j, i)),
        )
        for i, j in combinations(range(len(graph.gpus)), 2)
        if (i, j) in said or (j, i) in said
    )


def switch_lanes(gpu: Gpu) -> int:
    return sum(end.lanes for end in gpu.links if end.peer is LinkPeer.SWITCH)


def cpu_megabytes_per_s(gpu: Gpu) -> int:
    return sum(
        end.lanes * end.lane_megabytes_per_s for end in gpu.links if end.peer is LinkPeer.CPU
    )


def group_of(groups: Sequence[Group]) -> Mapping[PciAddress, int]:
    """The position of each GPU's group."""
    return {pci: number for number, group in enumerate(groups) for pci in group.gpus}
