"""The choice as the design's text says it, slowly and without a thought for speed.

Shares no code with rte.graph: it reads the Machine itself and looks at every set.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rte.model import FabricState, Gpu, LinkPeer, Machine, Nic, PciAddress, PciDevice

FIELDS = [
    "alike",
    "linked",
    "bottleneck",
    "total",
    "numa_spread",
    "sound",
    "nics",
    "leftover",
    "order",
]


class Brute:
    """One machine, with the answers to any question about it."""

    def __init__(self, machine: Machine, suspects: Iterable[PciAddress] = ()) -> None:
        self.machine = machine
        self.suspects = set(suspects)
        self.gpus = [g for g in machine.gpus if g.lost is None and g.uuid is not None]
        self.by_id = {str(g.uuid): g for g in self.gpus}
        self.pci = {d.address: d for d in machine.pci}
        # Each pair is worked out once: everything below asks for it in every set.
        self.pairs = {
            (a.pci, b.pci): (self.nvlink_of(a, b), self.level(a, b), self.slowest(a, b))
            for a, b in itertools.permutations(self.gpus, 2)
        }

    # PCI

    def way_up(self, address: PciAddress) -> list[PciDevice]:
        """The function itself, then each bridge above it."""
        way = [self.pci[address]]
        while way[-1].parent is not None:
            way.append(self.pci[way[-1].parent])
        return way

    def pci_level(self, a: PciAddress, b: PciAddress) -> int:
        up_a = [d.address for d in self.way_up(a)][1:]
        up_b = [d.address for d in self.way_up(b)][1:]
        shared = [x for x in up_a if x in up_b]
        if shared:
            # The way down from the shared bridge: at most its own downstream port on either side.
            if up_a.index(shared[0]) <= 1 and up_b.index(shared[0]) <= 1:
                return 5
            return 4
        if self.pci[a].root == self.pci[b].root:
            return 3
        if self.pci[a].numa is None or self.pci[b].numa is None:
            return 0
        return 2 if self.pci[a].numa == self.pci[b].numa else 1

    def level(self, a: Gpu, b: Gpu) -> int:
        said = [
            int(self.machine.levels[pair])
            for pair in [(a.pci, b.pci), (b.pci, a.pci)]
            if pair in self.machine.levels
        ]
        for pair in [(a.pci, b.pci), (b.pci, a.pci)]:
            if self.machine.peer_reads.get(pair) is False:
                return 0
        return min(said) if said else self.pci_level(a.pci, b.pci)

    def slowest(self, a: Gpu, b: Gpu) -> int:
        way_a, way_b = self.way_up(a.pci), self.way_up(b.pci)
        both = {d.address for d in way_a} & {d.address for d in way_b}
        speeds = [
            d.link.megabytes_per_s
            for d in way_a + way_b
            if d.address not in both and d.link is not None
        ]
        return min(speeds) if speeds else 0

    # NVLink

    def nvlink(self, a: Gpu, b: Gpu) -> int:
        return self.pairs[a.pci, b.pci][0]

    def nvlink_of(self, a: Gpu, b: Gpu) -> int:
        def says(one: Gpu, other: Gpu) -> int:
            return sum(
                e.lanes * e.lane_megabytes_per_s
                for e in one.links
                if e.peer == LinkPeer.GPU and e.remote == other.pci
            )

        def to_switches(gpu: Gpu) -> int:
            return sum(
                e.lanes * e.lane_megabytes_per_s for e in gpu.links if e.peer == LinkPeer.SWITCH
            )

        speed = min(says(a, b), says(b, a))
        if self.one_fabric(a, b):
            speed += min(to_switches(a), to_switches(b))
        return speed

    def one_fabric(self, a: Gpu, b: Gpu) -> bool:
        def none(gpu: Gpu) -> bool:
            f = gpu.fabric
            if f is None or f.state == FabricState.NOT_SUPPORTED:
                return True
            return f.state == FabricState.COMPLETED and f.status == 0 and f.cluster is None

        def complete(gpu: Gpu) -> bool:
            f = gpu.fabric
            return (
                f is not None
                and f.state == FabricState.COMPLETED
                and f.status == 0
                and f.cluster is not None
            )

        if none(a) and none(b):
            return True
        if complete(a) and complete(b):
            assert a.fabric is not None
            assert b.fabric is not None
            return (a.fabric.cluster, a.fabric.clique) == (b.fabric.cluster, b.fabric.clique)
        return False

    def closeness(self, a: Gpu, b: Gpu) -> tuple[int, int, int]:
        return self.pairs[a.pci, b.pci]

    # Fields

    def alike(self, members: list[Gpu]) -> bool:
        return len({(g.product, g.memory_bytes) for g in members}) == 1

    def linked(self, members: list[Gpu]) -> bool:
        reached = {members[0].pci}
        for _ in members:
            for a, b in itertools.permutations(members, 2):
                if a.pci in reached and self.nvlink(a, b) > 0:
                    reached.add(b.pci)
        return len(reached) == len(members)

    def node(self, gpu: Gpu) -> Any:
        numa = self.pci[gpu.pci].numa
        return f"unknown, of {gpu.pci}" if numa is None else numa

    def slit(self, a: Gpu, b: Gpu) -> int:
        every = [d for n in self.machine.numa_nodes for d in n.distance.values()]
        worst = max([*every, 20]) if every else 20
        one, other = self.pci[a.pci].numa, self.pci[b.pci].numa
        if one is None or other is None:
            return worst
        found = []
        for x, y in [(one, other), (other, one)]:
            row = next((n.distance for n in self.machine.numa_nodes if n.id == x), {})
            found.append(row.get(y, 10 if x == y else 20))
        return max(found)

    def suspect(self, gpu: Gpu) -> bool:
        def lanes(one: Gpu, other: Gpu) -> int:
            return sum(
                e.lanes for e in one.links if e.peer == LinkPeer.GPU and e.remote == other.pci
            )

        return gpu.pci in self.suspects or any(
            lanes(gpu, other) != lanes(other, gpu) for other in self.gpus if other is not gpu
        )

    def compute_nics(self) -> list[Nic]:
        parents = {n.physical_function for n in self.machine.nics}
        rdma = [n for n in self.machine.nics if n.rdma and n.pci and n.pci not in parents]
        rates = Counter(n.rate_megabits_per_s for n in rdma if n.rate_megabits_per_s)
        if not rates:
            return rdma
        most = max(rates.values())
        rate = max(r for r, times in rates.items() if times == most)
        return [n for n in rdma if n.rate_megabits_per_s == rate]

    def matched(self, members: list[Gpu], nics: list[Nic], near: Any) -> int:
        """Members that can each have a NIC of their own: augmenting paths."""
        owner: dict[PciAddress, Gpu] = {}

        def place(gpu: Gpu, tried: set[PciAddress]) -> bool:
            for nic in nics:
                assert nic.pci is not None
                if nic.pci not in tried and near(gpu, nic):
                    tried.add(nic.pci)
                    if nic.pci not in owner or place(owner[nic.pci], tried):
                        owner[nic.pci] = gpu
                        return True
            return False

        return sum(place(gpu, set()) for gpu in members)

    def nics(self, members: list[Gpu], nics: list[Nic], *, leave: bool) -> tuple[int, int]:
        def same_switch(gpu: Gpu, nic: Nic) -> bool:
            assert nic.pci is not None
            return self.pci_level(gpu.pci, nic.pci) >= 4

        def same_node(gpu: Gpu, nic: Nic) -> bool:
            assert nic.pci is not None
            node = self.pci[gpu.pci].numa
            return node is not None and node == self.pci[nic.pci].numa

        found = self.matched(members, nics, same_switch), self.matched(members, nics, same_node)
        return (-found[0], -found[1]) if leave else found

    def leftover(self, rest: list[Gpu]) -> tuple[Any, ...]:
        # A switch is told by its GPUs, so that a bridge above with the same ones is no other.
        below: dict[PciAddress, set[PciAddress]] = {}
        for gpu in self.gpus:
            for bridge in self.way_up(gpu.pci)[1:]:
                below.setdefault(bridge.address, set()).add(gpu.pci)
        switches = {frozenset(s) for s in below.values() if len(s) > 1}
        nodes = {self.node(g) for g in self.gpus}
        here = {g.pci for g in rest}
        return (
            sum(self.nvlink(a, b) for a, b in itertools.combinations(rest, 2)),
            tuple(sorted((sum(self.node(g) == n for g in rest) for n in nodes), reverse=True)),
            tuple(sorted((len(s & here) for s in switches), reverse=True)),
        )

    # The choice

    def ranking(
        self,
        *,
        available: Iterable[str],
        required: Iterable[str] = (),
        size: int,
        free: Iterable[str] | None = None,
        free_nics: Iterable[PciAddress] | None = None,
        own_nics: Iterable[PciAddress] = (),
        limit: int = 100_000,
    ) -> list[tuple[tuple[Any, ...], tuple[str, ...]]]:
        """(values of FIELDS in the order in which they count, ids), best first."""
        must = [g for g in self.gpus if g.uuid in set(required)]
        offered = [g for g in self.gpus if g.uuid in set(available) or g in must]
        if len(must) > size:
            offered, must = must, []
        size = min(size, len(offered))
        if size <= 0:
            return []
        unused = (
            offered
            if free is None
            else [g for g in self.gpus if g.uuid in set(free) or g in offered]
        )
        nics = self.compute_nics()
        own = [n for n in nics if n.pci in set(own_nics)]
        if set(own_nics):
            nics = own
        elif free_nics is not None:
            nics = [n for n in nics if n.pci in set(free_nics)]
        optional = [g for g in offered if g not in must]
        found = []
        for extra in itertools.combinations(optional, size - len(must)):
            members = sorted([*must, *extra], key=lambda g: g.number)
            pairs = [self.closeness(a, b) for a, b in itertools.combinations(members, 2)]
            distances = [self.slit(a, b) for a, b in itertools.combinations(members, 2)]
            values = {
                "alike": self.alike(members),
                "linked": self.linked(members),
                "bottleneck": min(pairs) if pairs else (0, 0, 0),
                "total": tuple(sum(p[i] for p in pairs) for i in range(3)),
                "numa_spread": (-len({self.node(g) for g in members}), -sum(distances)),
                "sound": -sum(map(self.suspect, members)) if pairs else 0,
                "nics": self.nics(members, nics, leave=size == 1 and not own),
                "leftover": self.leftover([g for g in unused if g not in members]),
                "order": tuple(-self.gpus.index(g) for g in members),
            }
            names = list(FIELDS)
            if own:
                names.remove("nics")
                names.insert(1, "nics")
            found.append((tuple(values[n] for n in names), tuple(str(g.uuid) for g in members)))
            if len(found) > limit:
                raise AssertionError("too many sets for brute force")
        return sorted(found, reverse=True)
