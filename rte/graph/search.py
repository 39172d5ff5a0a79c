"""Good sets where proof would take too long: grown, shrunk and exchanged, in bounded time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import groupby

from rte.graph.build import Positions
from rte.graph.keys import PairKeys
from rte.graph.preference import Question, bits, is_alike, linked, near_nics, reached

STARTS, GROWN = 16, 96
"""Sets that are grown, at most, and members that are added to them in all: some 2 ms of 64 GPUs."""
EXCHANGES, TRIED = 2048, 8
"""Exchanges whose pairs are looked at, in all, and those of a round that are looked at fully."""

Rank = tuple[object, ...]
"""A preference up to `sound` as a sort key, in the order in which the question compares."""


def searched(question: Question) -> tuple[list[list[Positions]], int]:
    """The sets that a bounded search meets, in runs of equal rank from the best, and their number.

    The best of several begun sets is improved by exchanging one member at a time.
    """
    seen: dict[Positions, Rank] = {}
    keys = PairKeys(question.graph, question.available)
    for members in begun(question):
        seen[members] = rank(question, keys, members)
    best = max(seen, key=seen.__getitem__)
    left = EXCHANGES
    while left > 0:
        outside = question.size * (question.available.bit_count() - question.size)
        left -= outside
        for members in exchanges(question, best):
            if members not in seen:
                seen[members] = rank(question, keys, members)
        better = max(seen, key=seen.__getitem__)
        if seen[better] == seen[best]:
            break
        best = better
    in_order = sorted(seen, key=seen.__getitem__, reverse=True)
    return [list(run) for _, run in groupby(in_order, key=seen.__getitem__)], len(seen)


def rank(question: Question, keys: PairKeys, members: Positions) -> Rank:
    alike, joined = is_alike(question.graph, members), linked(question.graph, members)
    if question.nics_lead:
        return (alike, near_nics(question, members), joined, *keys(members))
    return (alike, joined, *keys(members))


# Beginnings


def begun(question: Question) -> Iterator[Positions]:
    """Sets of the size: grown from one GPU each, and what is left of all that go together."""
    spare = question.size - question.required.bit_count()
    starts = tuple(bits(question.available & ~question.required))
    count = max(1, min(STARTS, GROWN // spare, len(starts)))
    for n in range(count):
        start = starts[n * len(starts) // count]
        yield grown(question, question.required | 1 << start)
    for whole in wholes(question):
        yield shrunk(question, whole)


def wholes(question: Question) -> list[Positions]:
    """What is available of each product and of each NVLink component, where it is enough."""
    graph = question.graph
    found = [question.available]
    for product in dict.fromkeys(graph.alike):
        left = question.available & product
        found.append(left)
        while left:
            members = reached(graph, left & -left, left)
            found.append(members)
            left &= ~members
    return [
        members
        for members in dict.fromkeys(found)
        if members.bit_count() >= question.size and not question.required & ~members
    ][-4:]


def grown(question: Question, members: Positions) -> Positions:
    """A set of the size, from a smaller one: the closest next GPU each time."""
    graph = question.graph
    closeness, joined, _ = graph.weights
    left = list(bits(question.available & ~members))
    inside = tuple(bits(members))
    least = [min([closeness[i][j] for j in inside]) for i in left]
    total = [sum([joined[i][j] for j in inside]) for i in left]
    product = graph.alike[inside[0]]
    near = 0
    for j in inside:
        near |= graph.adjacent[j]
    while members.bit_count() < question.size:
        fitting = [(product >> i & 1) * 2 + (near >> i & 1) for i in left]
        keys = list(zip(fitting, least, total, strict=True))
        at = keys.index(max(keys))
        new = left.pop(at)
        del least[at], total[at]
        members |= 1 << new
        near |= graph.adjacent[new]
        row = closeness[new]
        least = [a if a < row[i] else row[i] for a, i in zip(least, left, strict=True)]
        row = joined[new]
        total = [a + row[i] for a, i in zip(total, left, strict=True)]
    return members


def shrunk(question: Question, members: Positions) -> Positions:
    """A set of the size, from a larger one: without the GPU that is furthest from the rest."""
    closeness, joined, _ = question.graph.weights
    inside = list(bits(members))
    total = [sum([joined[i][j] for j in inside]) for i in inside]
    rows = [[closeness[i][j] for j in inside] for i in inside]
    least = [min(row) for row in rows]
    times = [row.count(low) for row, low in zip(rows, least, strict=True)]
    required = [question.required >> i & 1 for i in inside]
    while len(inside) > question.size:
        keys = list(zip(required, least, total, strict=True))
        at = keys.index(min(keys))
        gone = inside.pop(at)
        for values in (total, least, times, required):
            del values[at]
        members ^= 1 << gone
        row = joined[gone]
        total = [a - row[i] for a, i in zip(total, inside, strict=True)]
        row = closeness[gone]
        for n, i in enumerate(inside):
            if row[i] == least[n]:
                times[n] -= 1
                if not times[n]:
                    others = [closeness[i][j] for j in inside]
                    least[n] = min(others)
                    times[n] = others.count(least[n])
    return members


# Exchanges


def exchanges(question: Question, members: Positions) -> list[Positions]:
    """The sets with one member exchanged that are the closest, by their pairs alone."""
    closeness, joined, _ = question.graph.weights
    inside = tuple(bits(members))
    bound = [two_least([closeness[i][j] for j in inside]) for i in inside]
    share = [sum([joined[i][j] for j in inside]) for i in inside]
    leaving = [
        (
            out,
            min([second if at == n else first for first, at, second in without(bound, n)]),
            share[n],
        )
        for n, out in enumerate(inside)
        if not question.required >> out & 1
    ]
    position = {i: n for n, i in enumerate(inside)}
    pairs: list[tuple[int, int, Positions]] = []
    for into in bits(question.available & ~members):
        first, at, second = two_least([closeness[into][j] for j in inside])
        gain = sum([joined[into][j] for j in inside])
        row = joined[into]
        for out, rest, loss in leaving:
            low = second if at == position[out] else first
            pairs.append(
                (
                    low if low < rest else rest,
                    gain - loss - row[out],
                    members ^ 1 << out ^ 1 << into,
                )
            )
    return [pair[2] for pair in nlargest(TRIED, pairs)]


def two_least(values: Sequence[int]) -> tuple[int, int, int]:
    """The least value, where it is, and the least of the others (the same where there are none)."""
    least = min(values)
    at = values.index(least)
    others = [*values[:at], *values[at + 1 :]]
    return least, at, min(others) if others else least


def without(bound: Sequence[tuple[int, int, int]], n: int) -> Sequence[tuple[int, int, int]]:
    return [*bound[:n], *bound[n + 1 :]] or bound
