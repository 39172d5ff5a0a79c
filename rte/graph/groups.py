"""NVLink groups: which GPUs a job may count on to reach each other without PCIe."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations, count

from rte.graph.build import Graph, Positions, mask, product
from rte.graph.preference import bits, reached
from rte.model import FabricState, Gpu, PciAddress, pci_address, pci_order


class Shape(StrEnum):
    MESH = "mesh"
    """Each pair is linked, over switches or directly."""
    RING = "ring"
    """Each member is linked to two others, and that closes one circle of all."""
    STAR = "star"
    """One member is linked to all others, which are linked to nobody else."""
    PARTIAL = "partial"


class By(StrEnum):
    COMPONENT = "component"
    """All GPUs that reach each other, by way of others too."""
    CLIQUE = "clique"
    """Only GPUs that are all linked directly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """GPUs joined by NVLink, or named as a group by the operator."""

    name: str
    gpus: tuple[PciAddress, ...]  # in PCI order; of a configured group lost ones too
    shape: Shape  # of those that answer
    domain: str | None = None
    """`<cluster UUID>.<clique>` of the fabric that all members completed; None outside of one."""
    degraded: tuple[PciAddress, ...] = ()
    """Members that are lost or have fewer active lanes than they had or than their like have."""


class GroupsError(ValueError):
    """Configured groups that contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What was seen of the GPUs in this boot, which the machine as it is does not say any more."""

    names: Mapping[PciAddress, str] = field(default_factory=dict)
    """The observed group that each was in; no group of the operator's."""
    most_lanes: Mapping[PciAddress, int] = field(default_factory=dict)

    def after(
        self, graph: Graph, found: Iterable[Group], *, configured: Collection[str]
    ) -> Remembered:
        """With what this graph and its groups show; `configured` are the operator's names."""
        lanes = {gpu.pci: max(lanes_of(gpu), self.most_lanes.get(gpu.pci, 0)) for gpu in graph.gpus}
        names = {pci: group.name for group in found for pci in group.gpus}
        return Remembered(
            names={**self.names, **{p: n for p, n in names.items() if n not in configured}},
            most_lanes={**self.most_lanes, **lanes},
        )


def groups(
    graph: Graph,
    *,
    by: By | str = By.COMPONENT,
    names: Mapping[str, Sequence[str]] | None = None,
    before: Remembered | None = None,
) -> tuple[Group, ...]:
    """The groups of a machine, by smallest address.

    `names` are the operator's groups (name → PCI addresses): they hold whatever of these GPUs the
    machine has and do not follow the links. All other linked GPUs form groups `group-<n>`, counted
    by smallest address. A name that `before` remembers stays with its GPUs and is never given to
    others; a GPU with fewer lanes than it remembers is degraded.
    Raises GroupsError for an address in two groups, or one that is no PCI address.
    """
    before = before or Remembered()
    given = configured(graph, names or {})
    taken = {pci for members in given.values() for pci in members}
    rest = mask(i for i, gpu in enumerate(graph.gpus) if gpu.pci not in taken)
    observed = components(graph, rest) if By(by) is By.COMPONENT else cliques(graph, rest)
    weak = degraded(graph, before.most_lanes)
    found = [described(graph, name, members, weak) for name, members in given.items() if members]
    seen = before.names
    fresh = (name for n in count() if (name := f"group-{n}") not in {*seen.values(), *given})
    used: set[str] = set()
    for members in observed:
        addresses = [graph.gpus[i].pci for i in bits(members)]
        kept = next((seen[a] for a in addresses if a in seen and seen[a] not in used), None)
        name = kept if kept is not None and kept not in given else next(fresh)
        used.add(name)
        found.append(described(graph, name, addresses, weak))
    return tuple(sorted(found, key=lambda group: pci_order(group.gpus[0])))


def configured(graph: Graph, names: Mapping[str, Sequence[str]]) -> dict[str, list[PciAddress]]:
    """The operator's groups with the GPUs that the machine has, lost ones included."""
    present = {gpu.pci for gpu in graph.machine.gpus}
    owner: dict[PciAddress, str] = {}
    found: dict[str, list[PciAddress]] = {}
    for name, addresses in names.items():
        found[name] = []
        for text in addresses:
            try:
                address = pci_address(text)
            except ValueError as error:
                raise GroupsError(f"groups.names.{name}: {error}") from error
            if owner.setdefault(address, name) != name:
                raise GroupsError(
                    f"groups.names.{name}: {address} is in {owner[address]} too; "
                    "a GPU belongs to one group"
                )
            if address in present and address not in found[name]:
                found[name].append(address)
        found[name].sort(key=pci_order)
    return found


def components(graph: Graph, within: Positions) -> Iterator[Positions]:
    """Sets of two or more GPUs that reach each other, by smallest position."""
    while within:
        members = reached(graph, within & -within, within)
        within &= ~members
        if members & members - 1:
            yield members


def cliques(graph: Graph, within: Positions) -> Iterator[Positions]:
    """Sets of two or more GPUs that are all linked, the largest first taken out of the rest."""
    found = []
    while (best := largest_clique(graph, within)) & best - 1:
        found.append(best)
        within &= ~best
    return iter(sorted(found, key=lambda members: members & -members))


def largest_clique(graph: Graph, within: Positions) -> Positions:
    """The largest, with the most bandwidth among those, with the smallest positions among those."""

    def bandwidth(members: Positions) -> int:
        return sum(graph.nvlink[i][j] for i, j in combinations(bits(members), 2))

    return max(
        maximal_cliques(graph, 0, within, 0),
        key=lambda m: (m.bit_count(), bandwidth(m), [-i for i in bits(m)]),
        default=0,
    )


def maximal_cliques(
    graph: Graph, inside: Positions, candidates: Positions, done: Positions
) -> Iterator[Positions]:
    """Bron and Kerbosch's search with a pivot: an all-to-all machine is one step a GPU."""
    if not candidates | done:
        yield inside
        return
    pivot = max(bits(candidates | done), key=lambda i: (graph.adjacent[i] & candidates).bit_count())
    for i in bits(candidates & ~graph.adjacent[pivot]):
        near = graph.adjacent[i]
        yield from maximal_cliques(graph, inside | 1 << i, candidates & near, done & near)
        candidates ^= 1 << i
        done |= 1 << i


def described(
    graph: Graph, name: str, addresses: Sequence[PciAddress], weak: Iterable[PciAddress]
) -> Group:
    members = mask(i for i, gpu in enumerate(graph.gpus) if gpu.pci in addresses)
    return Group(
        name=name,
        gpus=tuple(addresses),
        shape=shape(graph, members),
        domain=domain([graph.gpus[i] for i in bits(members)]),
        degraded=tuple(address for address in addresses if address in weak),
    )


def shape(graph: Graph, members: Positions) -> Shape:
    size = members.bit_count()
    degrees = [(graph.adjacent[i] & members).bit_count() for i in bits(members)]
    if all(degree == size - 1 for degree in degrees):
        return Shape.MESH
    whole = next(components(graph, members), 0) == members
    if whole and all(degree == 2 for degree in degrees):
        return Shape.RING
    if sorted(degrees) == [*[1] * (size - 1), size - 1]:
        return Shape.STAR
    return Shape.PARTIAL


def domain(gpus: Sequence[Gpu]) -> str | None:
    """What names the fabric in the whole cluster; None when a member is not (yet) part of it."""
    said = {
        (gpu.fabric.cluster, gpu.fabric.clique)
        if gpu.fabric
        and gpu.fabric.state is FabricState.COMPLETED
        and not gpu.fabric.status
        and gpu.fabric.cluster is not None
        else None
        for gpu in gpus
    }
    only = said.pop() if len(said) == 1 else None
    return f"{only[0]}.{only[1]}" if only else None


def degraded(graph: Graph, most_lanes: Mapping[PciAddress, int]) -> frozenset[PciAddress]:
    """GPUs that are lost, or have fewer lanes than they had or than most of their product have.

    A link that never was up is no fault: a board may have fewer bridges than the GPU has links.
    """
    lanes = {gpu.pci: lanes_of(gpu) for gpu in graph.gpus}
    usual: dict[PciAddress, int] = {}
    for gpu in graph.gpus:
        like = sorted(lanes[other.pci] for other in graph.gpus if product(other) == product(gpu))
        # More than half have at least this many.
        usual[gpu.pci] = like[(len(like) - 1) // 2]
    return frozenset(
        [gpu.pci for gpu in graph.machine.gpus if gpu.lost is not None]
        + [pci for pci, n in lanes.items() if n < max(usual[pci], most_lanes.get(pci, 0))]
    )


def lanes_of(gpu: Gpu) -> int:
    """Its active NVLink lanes, to whatever they lead."""
    return sum(end.lanes for end in gpu.links)
