"""How often a request still finds linked GPUs, as pods of 1, 2 and 4 come and go at random.

The same pods arrive and leave in the same order under three rules: ours, the rule of NVIDIA's
device plugin (the partition of what is offered into groups of the request's size with the
greatest sum; the first of the list for one GPU), and any free GPUs. The kubelet offers what is
free on the whole node (policy none). A request of 2 or 4 counts as linked when all its GPUs reach
each other over NVLink inside the set. `python -m tests.bench fragmentation [--pods N] [MACHINE…]`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from random import Random
from typing import NamedTuple

from rte.graph.build import Graph, Positions, build
from rte.graph.choose import choose
from rte.graph.preference import bits, linked
from rte.model import LinkPeer, PciAddress
from rte.sources.recorded import read_recorded
from rte.view.words import columns
from tests.machines.description import FOLDER

MACHINES = (
    "pcie-a100-pairs",
    "dgx1-v100",
    "ac922-power9",
    "asymmetric-link",
    "azure-domains",
    "hgx-h100-oci",
)
SIZES, WEIGHTS = (1, 2, 4), (5, 3, 2)

Rule = Callable[[Graph, Positions, int, Random], Positions]


def ours(graph: Graph, free: Positions, size: int, dice: Random) -> Positions:
    """As where no resource names NICs by address."""
    available = [graph.ids[i] for i in bits(free)]
    return graph.positions(choose(graph, available=available, size=size, free_nics=[]).chosen)


def ours_beside_nics(graph: Graph, free: Positions, size: int, dice: Random) -> Positions:
    """As where pods can ask for NICs, to which single GPUs leave the GPUs near them."""
    available = [graph.ids[i] for i in bits(free)]
    return graph.positions(choose(graph, available=available, size=size).chosen)


def any_free(graph: Graph, free: Positions, size: int, dice: Random) -> Positions:
    return mask(dice.sample(list(bits(free)), size))


def nvidia(graph: Graph, free: Positions, size: int, dice: Random) -> Positions:
    """What the public rule picks, with the kubelet's offer in its random order."""
    offered = list(bits(free))
    dice.shuffle(offered)
    if size == 1:
        return 1 << offered[0]
    scores = pair_scores(graph)
    best = (-1, -1, 0)
    for groups in partitions(tuple(sorted(offered)), size, -len(offered) % size):
        sums = [score(scores, group) for group in groups]
        whole = [(s, mask(g)) for s, g in zip(sums, groups, strict=True) if len(g) == size]
        if whole:  # a group with gaps is a known fault of theirs, which is not held against them
            best = max(best, (sum(sums), *max(whole)))
    return best[2]


@cache
def pair_scores(graph: Graph) -> Mapping[tuple[int, int], int]:
    """10 a level of nearness, and 100 a lane whose other end is that very GPU."""
    steps = {0: 0, 1: 10, 2: 20, 3: 30, 4: 40, 5: 50}
    lanes: dict[tuple[PciAddress, PciAddress], int] = {}
    for gpu in graph.gpus:
        for end in gpu.links:
            if end.peer is LinkPeer.GPU and end.remote is not None:
                key = gpu.pci, end.remote
                lanes[key] = lanes.get(key, 0) + end.lanes
    return {
        (i, j): steps[int(graph.levels[i][j])]
        + 100 * lanes.get((graph.gpus[i].pci, graph.gpus[j].pci), 0)
        for i, j in combinations(range(len(graph.gpus)), 2)
    }


def score(scores: Mapping[tuple[int, int], int], group: Sequence[int]) -> int:
    return sum(scores[pair] for pair in combinations(sorted(group), 2))


@cache
def partitions(
    items: tuple[int, ...], size: int, short: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """All ways to part the items into groups of the size, of which gaps may shorten some."""
    if not items:
        return ((),)
    first, rest = items[0], items[1:]
    found = []
    for missing in range(min(short, size - 1) + 1):
        for others in combinations(rest, size - 1 - missing):
            left = tuple(i for i in rest if i not in others)
            found += [
                ((first, *others), *groups) for groups in partitions(left, size, short - missing)
            ]
    return tuple(found)


def mask(positions: Sequence[int]) -> Positions:
    return sum(1 << i for i in positions)


RULES: Mapping[str, Rule] = {
    "ours": ours,
    "ours beside NICs": ours_beside_nics,
    "NVIDIA's": nvidia,
    "random": any_free,
}


def has_linked(graph: Graph, size: int) -> bool:
    """Whether the whole machine has a linked set of the size."""
    return size <= len(graph.gpus) and linked(
        graph, graph.positions(choose(graph, available=graph.ids, size=size).chosen)
    )


class Share(NamedTuple):
    """Of the requests that enough GPUs were free for."""

    asked: int
    linked: int

    @property
    def percent(self) -> float:
        return 100 * self.linked / self.asked if self.asked else 100.0


def run(graph: Graph, rule: Rule, *, pods: int, seed: int) -> Mapping[int, Share]:
    """Shares by size. What comes and goes depends on the seed, what is taken on the rule."""
    coming, dice = Random(seed), Random(seed + 1)
    held: list[Positions] = []
    counts = {size: [0, 0] for size in SIZES if size > 1}
    everyone = (1 << len(graph.gpus)) - 1
    for _ in range(pods):
        size = coming.choices(SIZES, WEIGHTS)[0]
        leaving = coming.random()
        while held and (room(everyone, held) < size or leaving > 1 - len(held) / 16):
            held.pop(int(leaving * len(held)))
            leaving = 0.5 * leaving
        free = everyone & ~sum(held)
        if free.bit_count() < size:
            continue
        members = rule(graph, free, size, dice)
        assert members.bit_count() == size
        assert not members & ~free
        held.append(members)
        if size > 1:
            counts[size][0] += 1
            counts[size][1] += linked(graph, members)
    return {size: Share(*count) for size, count in counts.items()}


def room(everyone: Positions, held: Sequence[Positions]) -> int:
    return (everyone & ~sum(held)).bit_count()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench fragmentation")
    parser.add_argument("machines", nargs="*", metavar="MACHINE", default=MACHINES)
    parser.add_argument("--pods", type=int, default=4000)
    args = parser.parse_args(arguments)
    rows = [["machine", "GPUs", *RULES]]
    for name in args.machines:
        graph = build(read_recorded(FOLDER / name))
        found = {rule: run(graph, RULES[rule], pods=args.pods, seed=1) for rule in RULES}
        rows += [
            [name, str(size), *(f"{found[rule][size].percent:.1f} %" for rule in RULES)]
            for size in SIZES
            if size > 1 and has_linked(graph, size)
        ]
    print("Requests whose GPUs are all linked, of those that enough GPUs were free for")
    print(*(f"  {line}" for line in columns(rows)), sep="\n")
    return 0
