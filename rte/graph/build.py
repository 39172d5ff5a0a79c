"""The graph of a machine's GPUs: how close each pair is, and what else a choice looks at.

Built once when the machine changes; whoever chooses only reads. GPUs are counted by position:
those that answer, in PCI order. A set of GPUs is an integer with bit <position> set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from typing import NamedTuple

from rte.graph.ranks import Ranks, Weights, ranks, weights
from rte.graph.tree import PciTree
from rte.model import (
    DeviceId,
    FabricState,
    Gpu,
    Level,
    LinkPeer,
    Machine,
    Nic,
    NumaId,
    PciAddress,
)

Positions = int
"""A set of GPUs: bit <position> for each."""


class Closeness(NamedTuple):
    """How close two GPUs are; greater is closer, the first field that differs decides."""

    nvlink_megabytes_per_s: int  # one way
    level: int
    link_megabytes_per_s: int  # of the slowest PCIe link between them


class Switch(NamedTuple):
    """A PCIe switch that at least two GPUs share."""

    address: PciAddress  # the upstream port
    gpus: Positions


class NicBlock(NamedTuple):
    """GPUs and compute NICs that are equally near to each other."""

    gpus: Positions
    nics: int  # bit <index in Graph.nics> for each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """Tables over the GPUs that answer. Immutable, so threads may share it."""

    machine: Machine
    tree: PciTree
    gpus: tuple[Gpu, ...]
    ids: tuple[DeviceId, ...]  # of whole GPUs, by position
    position: Mapping[str, int]  # by id of a GPU or MIG slice
    closeness: tuple[tuple[Closeness, ...], ...]  # symmetric; the diagonal means nothing
    nvlink: tuple[tuple[int, ...], ...]  # MB/s of closeness; zero on the diagonal
    lanes: tuple[tuple[int, ...], ...]  # NVLink lanes as the first GPU sees them, switches included
    levels: tuple[tuple[Level, ...], ...]  # as the source says them, a direction each
    adjacent: tuple[Positions, ...]  # the GPUs that each reaches over NVLink directly
    alike: tuple[Positions, ...]  # by position: the GPUs of its product and memory size
    numa: tuple[NumaId | None, ...]
    numa_blocks: tuple[Positions, ...]  # GPUs of each NUMA node; an unknown node is one of its own
    distance: tuple[tuple[int, ...], ...]  # SLIT between the nodes of two GPUs, the worse way
    suspects: Positions
    switches: tuple[Switch, ...]  # nested ones too, each set of GPUs once
    nics: tuple[Nic, ...]  # the compute NICs
    switch_nics: tuple[NicBlock, ...]  # joined by a PCIe switch
    numa_nics: tuple[NicBlock, ...]  # of one NUMA node
    twins: tuple[tuple[int, ...], ...]
    """All positions in classes of interchangeable GPUs: exchanging two changes no table but this
    that each may have a PCIe switch, with its NICs, for itself."""
    weights: Weights
    ranks: Ranks | None
    """All sets by rank, one of each kind; None when there are too many kinds to list."""

    def relation(self, a: PciAddress, b: PciAddress) -> Level:
        """How far apart two PCI functions are, from the first to the second.

        For two GPUs that answer it is what the source says, else what the PCI tree says.
        """
        stated = self.machine.levels.get((a, b))
        return self.tree.level(a, b) if stated is None else stated

    def positions(self, ids: Iterable[str]) -> Positions:
        """The set of the GPUs with these ids; unknown ids are left out."""
        found = 0
        for id in ids:
            position = self.position.get(id)
            if position is not None:
                found |= 1 << position
        return found


def build(
    machine: Machine,
    *,
    suspects: Iterable[PciAddress] = (),
    compute_nics: Sequence[str] = (),
) -> Graph:
    """The graph of a machine.

    `suspects` are GPUs whose NVLink error counters rise; those whose two ends disagree are found
    here. `compute_nics` are patterns of names or addresses (`nics.compute`), empty for the default.
    Costs milliseconds, and up to a quarter of a second for 16 GPUs that all differ.
    """
    tree = PciTree(machine)
    gpus = answering(machine)
    links = Links(direct_links(gpus), switch_links(gpus))
    levels = tuple(tuple(stated_level(machine, tree, a.pci, b.pci) for b in gpus) for a in gpus)
    near = closeness(machine, tree, gpus, links, levels)
    alike = tuple(mask(i for i, b in enumerate(gpus) if product(b) == product(a)) for a in gpus)
    adjacent = tuple(
        mask(j for j, pair in enumerate(row) if j != i and pair.nvlink_megabytes_per_s)
        for i, row in enumerate(near)
    )
    numa = tuple(machine_numa(tree, gpu) for gpu in gpus)
    distance = distances(machine, numa)
    rising = frozenset(suspects)
    suspect = mask(i for i, gpu in enumerate(gpus) if gpu.pci in rising or links.disagree(i))
    switches = shared_switches(tree, gpus)
    nics = computing(machine, compute_nics)
    twins = interchangeable(
        closeness=near, distance=distance, traits=traits(alike, numa, distance, suspect, switches)
    )
    ids = tuple(gpu.uuid or DeviceId(gpu.name) for gpu in gpus)
    pairs = weights(near, distance)
    return Graph(
        machine=machine,
        tree=tree,
        gpus=gpus,
        ids=ids,
        position={
            **{id: i for i, id in enumerate(ids)},
            **{slice.id: i for i, gpu in enumerate(gpus) for slice in gpu.slices},
        },
        closeness=near,
        nvlink=tuple(tuple(pair.nvlink_megabytes_per_s for pair in row) for row in near),
        lanes=links.lanes(),
        levels=levels,
        adjacent=adjacent,
        alike=alike,
        numa=numa,
        numa_blocks=numa_blocks(numa),
        distance=distance,
        suspects=suspect,
        switches=switches,
        nics=nics,
        switch_nics=nic_blocks(tree, gpus, nics),
        numa_nics=numa_nic_blocks(tree, numa, nics),
        twins=twins,
        weights=pairs,
        ranks=ranks(
            twins=twins,
            weights=pairs,
            adjacent=adjacent,
            alike=alike,
            numa=numa,
            suspects=suspect,
        ),
    )


def mask(positions: Iterable[int]) -> Positions:
    found = 0
    for position in positions:
        found |= 1 << position
    return found


def answering(machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs that can be handed out: not lost, and known to NVML where the source has NVML."""
    named = any(gpu.uuid for gpu in machine.gpus)
    return tuple(gpu for gpu in machine.gpus if gpu.lost is None and (gpu.uuid or not named))


def product(gpu: Gpu) -> tuple[str | None, int | None]:
    return gpu.product, gpu.memory_bytes


def machine_numa(tree: PciTree, gpu: Gpu) -> NumaId | None:
    device = tree.devices.get(gpu.pci)
    return device.numa if device else None


def closeness(
    machine: Machine,
    tree: PciTree,
    gpus: Sequence[Gpu],
    links: Links,
    levels: Sequence[Sequence[Level]],
) -> tuple[tuple[Closeness, ...], ...]:
    """Symmetric; a GPU with itself has no level and no PCIe link."""
    everyone = range(len(gpus))
    return tuple(
        tuple(
            Closeness(
                links.megabytes_per_s(i, j),
                peer_level(machine, levels, gpus, i, j),
                0 if i == j else tree.slowest_link(gpus[i].pci, gpus[j].pci),
            )
            for j in everyone
        )
        for i in everyone
    )


# NVLink


class Lanes(NamedTuple):
    lanes: int
    megabytes_per_s: int


class Links(NamedTuple):
    """NVLink between any two GPUs, by position."""

    direct: Sequence[Sequence[Lanes]]  # as the first of the two says
    switched: Sequence[Sequence[Lanes]]

    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """As each GPU sees them, through switches too."""
        return tuple(
            tuple(direct.lanes + switched.lanes for direct, switched in zip(*rows, strict=True))
            for rows in zip(self.direct, self.switched, strict=True)
        )

    def megabytes_per_s(self, i: int, j: int) -> int:
        """One way, as the end says that says less."""
        direct = min(self.direct[i][j].megabytes_per_s, self.direct[j][i].megabytes_per_s)
        return direct + self.switched[i][j].megabytes_per_s

    def disagree(self, i: int) -> bool:
        """Whether a GPU and another say different numbers of direct lanes between them."""
        return any(to.lanes != self.direct[j][i].lanes for j, to in enumerate(self.direct[i]))


def direct_links(gpus: Sequence[Gpu]) -> list[list[Lanes]]:
    """What each GPU says of its own lanes to each other GPU; links to CPUs join no GPUs."""
    at = {gpu.pci: i for i, gpu in enumerate(gpus)}
    found = [[Lanes(0, 0)] * len(gpus) for _ in gpus]
    for i, gpu in enumerate(gpus):
        for end in gpu.links:
            j = at.get(end.remote) if end.peer is LinkPeer.GPU and end.remote else None
            if j is not None and j != i:
                known = found[i][j]
                found[i][j] = Lanes(
                    known.lanes + end.lanes,
                    known.megabytes_per_s + end.lanes * end.lane_megabytes_per_s,
                )
    return found


def switch_links(gpus: Sequence[Gpu]) -> list[list[Lanes]]:
    """What two GPUs share through NVSwitches: the smaller of what each has towards them."""
    own = [
        Lanes(
            sum(end.lanes for end in gpu.links if end.peer is LinkPeer.SWITCH),
            sum(
                end.lanes * end.lane_megabytes_per_s
                for end in gpu.links
                if end.peer is LinkPeer.SWITCH
            ),
        )
        for gpu in gpus
    ]
    fabrics = [fabric(gpu) for gpu in gpus]
    return [
        [
            Lanes(*map(min, own[i], own[j]))
            if i != j and fabrics[i] is not None and fabrics[i] == fabrics[j]
            else Lanes(0, 0)
            for j in range(len(gpus))
        ]
        for i in range(len(gpus))
    ]


def fabric(gpu: Gpu) -> tuple[str, int | None] | None:
    """What GPUs on one fabric have in common; None for a GPU that cannot use its switches (yet).

    Machines without a fabric manager's state, and H100 with its all-zero cluster, have none:
    their switches are those of the one board.
    """
    said = gpu.fabric
    if said is None or said.state is FabricState.NOT_SUPPORTED:
        return ("", None)
    if said.state is not FabricState.COMPLETED or said.status:
        return None
    return ("", None) if said.cluster is None else (said.cluster, said.clique)


# PCIe


def stated_level(machine: Machine, tree: PciTree, a: PciAddress, b: PciAddress) -> Level:
    """The source's own word for this direction, else for the other, else the PCI tree's."""
    stated = machine.levels.get((a, b), machine.levels.get((b, a)))
    return tree.level(a, b) if stated is None else stated


def peer_level(
    machine: Machine,
    levels: Sequence[Sequence[Level]],
    gpus: Sequence[Gpu],
    i: int,
    j: int,
) -> int:
    """The smaller level of the two directions; 0 where a peer-to-peer read does not work."""
    a, b = gpus[i].pci, gpus[j].pci
    if i == j or not machine.peer_reads.get((a, b), True):
        return 0
    return int(min(levels[i][j], levels[j][i])) if machine.peer_reads.get((b, a), True) else 0


def shared_switches(tree: PciTree, gpus: Sequence[Gpu]) -> tuple[Switch, ...]:
    """Each set of GPUs that a bridge has below it, two or more, with the nearest such bridge."""
    below: dict[PciAddress, Positions] = {}
    for i, gpu in enumerate(gpus):
        for bridge in tree.bridges.get(gpu.pci, ()):
            below[bridge] = below.get(bridge, 0) | 1 << i
    nearest: dict[Positions, PciAddress] = {}
    for bridge, members in below.items():
        known = nearest.get(members)
        if members & members - 1 and (
            known is None or len(tree.bridges[bridge]) > len(tree.bridges[known])
        ):
            nearest[members] = bridge
    return tuple(Switch(bridge, members) for members, bridge in sorted(nearest.items()))


# NUMA nodes

LOCAL, REMOTE = 10, 20  # the kernel's own distances where the firmware has no SLIT


def numa_blocks(numa: Sequence[NumaId | None]) -> tuple[Positions, ...]:
    known = sorted({node for node in numa if node is not None})
    return (
        *(mask(i for i, node in enumerate(numa) if node == id) for id in known),
        *(1 << i for i, node in enumerate(numa) if node is None),
    )


def distances(machine: Machine, numa: Sequence[NumaId | None]) -> tuple[tuple[int, ...], ...]:
    """SLIT between the nodes of any two GPUs; to an unknown node it is the machine's worst."""
    table = {node.id: node.distance for node in machine.numa_nodes}
    worst = max((d for row in table.values() for d in row.values()), default=REMOTE)

    def one_way(a: NumaId, b: NumaId) -> int:
        return table.get(a, {}).get(b, LOCAL if a == b else REMOTE)

    return tuple(
        tuple(
            max(worst, REMOTE) if a is None or b is None else max(one_way(a, b), one_way(b, a))
            for b in numa
        )
        for a in numa
    )


# NICs


def computing(machine: Machine, patterns: Sequence[str]) -> tuple[Nic, ...]:
    """The compute NICs: those that match, or the RDMA devices of the most common link rate.

    Of an SR-IOV card either the virtual functions count or, when it has none, the physical one:
    both are the same port.
    """
    divided = {nic.physical_function for nic in machine.nics if nic.physical_function}
    real = [nic for nic in machine.nics if nic.pci is not None and nic.pci not in divided]
    if patterns:
        return tuple(
            nic
            for nic in real
            if any(
                fnmatchcase(name, pattern)
                for pattern in patterns
                for name in (nic.pci or "", *nic.netdevs, *nic.rdma)
            )
        )
    remote_memory = [nic for nic in real if nic.rdma]
    rates = Counter(nic.rate_megabits_per_s for nic in remote_memory if nic.rate_megabits_per_s)
    if not rates:
        return tuple(remote_memory)
    common = max(rates, key=lambda rate: (rates[rate], rate))
    return tuple(nic for nic in remote_memory if nic.rate_megabits_per_s == common)


def nic_blocks(tree: PciTree, gpus: Sequence[Gpu], nics: Sequence[Nic]) -> tuple[NicBlock, ...]:
    """GPUs and compute NICs below one root port: some PCIe switch joins any two of them."""

    def top(address: PciAddress | None) -> PciAddress | None:
        above = tree.bridges.get(address, ()) if address else ()
        return above[-1] if above else None

    ports = sorted({port for gpu in gpus if (port := top(gpu.pci))})
    blocks = [
        NicBlock(
            mask(i for i, gpu in enumerate(gpus) if top(gpu.pci) == port),
            mask(i for i, nic in enumerate(nics) if top(nic.pci) == port),
        )
        for port in ports
    ]
    return tuple(block for block in blocks if block.nics)


def numa_nic_blocks(
    tree: PciTree, numa: Sequence[NumaId | None], nics: Sequence[Nic]
) -> tuple[NicBlock, ...]:
    def node(nic: Nic) -> NumaId | None:
        device = tree.devices.get(nic.pci) if nic.pci else None
        return nic.numa if device is None else device.numa

    blocks = [
        NicBlock(
            mask(i for i, other in enumerate(numa) if other == id),
            mask(i for i, nic in enumerate(nics) if node(nic) == id),
        )
        for id in sorted({id for id in numa if id is not None})
    ]
    return tuple(block for block in blocks if block.nics)


# Symmetry


def traits(
    alike: Sequence[Positions],
    numa: Sequence[NumaId | None],
    distance: Sequence[Sequence[int]],
    suspects: Positions,
    switches: Sequence[Switch],
) -> list[object]:
    """What each GPU is apart from its pairs.

    A switch of its own, with its NICs, makes no GPU differ: choose() looks at those.
    """
    return [
        (
            alike[i],
            numa[i],
            distance[i][i],
            suspects >> i & 1,
            [switch.gpus for switch in switches if switch.gpus >> i & 1],
        )
        for i in range(len(numa))
    ]


def interchangeable(
    *,
    closeness: Sequence[Sequence[Closeness]],
    traits: Sequence[object],
    distance: Sequence[Sequence[int]],
) -> tuple[tuple[int, ...], ...]:
    """Classes of GPUs that equal each other in their traits and towards every third GPU."""
    everyone = range(len(traits))

    def twin(i: int, j: int) -> bool:
        return traits[i] == traits[j] and all(
            closeness[i][k] == closeness[j][k] and distance[i][k] == distance[j][k]
            for k in everyone
            if k not in (i, j)
        )

    first: dict[int, int] = {}
    for i, j in combinations(everyone, 2):
        if i not in first and j not in first and twin(i, j):
            first[j] = i
    return tuple(
        tuple(j for j in everyone if first.get(j, j) == i) for i in everyone if i not in first
    )
