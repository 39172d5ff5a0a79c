"""How long a choice takes: every size of 2, 4, 8 and 16 GPUs of five shapes.

Goals: median at most 0.1 ms at 8 GPUs and 2 ms at 16 in every row; tables for 16 GPUs in 300 ms.
Half of the questions offer all GPUs, half a random part; all are free. The plugin asks for the
explanation as well. `python -m tests.bench choose [--flat] [--calls N]`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from statistics import median

from rte.graph.build import Graph, build
from rte.graph.choose import choose
from rte.model import Machine
from rte.view.words import columns
from tests.graphs import meshed, with_nics

COUNTS = (2, 4, 8, 16)
GOAL_US = {8: 100, 16: 2000}
MANY, MANY_SIZES = (20, 32, 64), (1, 2, 3, 4, 8, 16, 24, 32, 48, 62)  # beyond one list of all sets

Lanes = Mapping[tuple[int, int], int]


def all_to_all(count: int) -> Lanes:
    return dict.fromkeys(combinations(range(count), 2), 18)


def cube_mesh(count: int) -> Lanes:
    """Fully linked quads, each GPU linked to its like in the next quad: DGX-1 has two quads."""
    quads = {(a, b): 1 for a, b in combinations(range(count), 2) if a // 4 == b // 4}
    return quads | {(i, i + 4): 2 for i in range(count - 4)}


def pairs(count: int) -> Lanes:
    """Bridges that join no neighbours."""
    half = count // 2
    return {(i, i + half): 12 for i in range(half)}


def no_nvlink(count: int) -> Lanes:
    return {}


def at_random(count: int) -> Lanes:
    dice = Random(count)
    return {pair: dice.choice([0, 0, 1, 2, 4]) for pair in combinations(range(count), 2)}


SHAPES: Mapping[str, Callable[[int], Lanes]] = {
    "all to all": all_to_all,
    "cube mesh": cube_mesh,
    "pairs": pairs,
    "no NVLink": no_nvlink,
    "random": at_random,
}


def machine(count: int, shape: str, *, flat: bool) -> Machine:
    """Two sockets with a NIC each; `flat` as a virtual machine that says no NUMA node."""
    found = with_nics(meshed(count, SHAPES[shape](count), sockets=2), [0, 1])
    if not flat:
        return found
    return replace(found, pci=tuple(replace(d, numa=None, numa_from=None) for d in found.pci))


def times_us(graph: Graph, size: int, *, calls: int, explain: bool) -> list[float]:
    dice = Random(size)
    found = []
    for call in range(calls):
        count = len(graph.ids) if call % 2 else dice.randint(size, len(graph.ids))
        available = dice.sample(graph.ids, count)
        start = time.perf_counter()
        choose(graph, available=available, size=size, free=graph.ids, explain=explain)
        found.append((time.perf_counter() - start) * 1e6)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench choose", description=__doc__)
    parser.add_argument("--flat", action="store_true", help="no NUMA node is known, as in a VM")
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args(arguments)
    header = ["GPUs", "size", *SHAPES]
    building = [["GPUs", *SHAPES]]
    tables: dict[bool, list[list[str]]] = {False: [header], True: [header]}
    worst: dict[int, float] = {}
    for count in COUNTS:
        graphs = {}
        row = [str(count)]
        for shape in SHAPES:
            made = machine(count, shape, flat=args.flat)
            start = time.perf_counter()
            graphs[shape] = build(made)
            row.append(f"{(time.perf_counter() - start) * 1e3:.1f}")
        building.append(row)
        for size in range(1, count + 1):
            for explain, table in tables.items():
                medians = [
                    median(times_us(graph, size, calls=args.calls, explain=explain))
                    for graph in graphs.values()
                ]
                table.append([str(count), str(size), *(f"{m:.0f}" for m in medians)])
                if not explain:
                    worst[count] = max(worst.get(count, 0), *medians)
    printed("Tables of the machine, ms", building)
    printed("choose, median µs", tables[False])
    printed("choose with explanation, median µs", tables[True])
    printed("Beyond 16 GPUs: choose with explanation, median ms (* after a bounded search)", many())
    for count, goal_us in GOAL_US.items():
        verdict = "within" if worst[count] <= goal_us else "ABOVE"
        print(f"{count} GPUs: worst median {worst[count]:.0f} µs, {verdict} the goal of {goal_us}")
    return 0


def many() -> list[list[str]]:
    table = [["GPUs", "size", *SHAPES]]
    for count in MANY:
        graphs = [build(machine(count, shape, flat=False)) for shape in SHAPES]
        for size in (size for size in MANY_SIZES if size < count):
            row = [str(count), str(size)]
            for graph in graphs:
                exact = choose(graph, available=graph.ids, size=size).exact
                took = median(times_us(graph, size, calls=6, explain=True)) / 1000
                row.append(f"{took:.1f}{'' if exact else '*'}")
            table.append(row)
    return table


def printed(title: str, rows: Sequence[Sequence[str]]) -> None:
    print(title, *(f"  {line}" for line in columns(rows)), "", sep="\n")
