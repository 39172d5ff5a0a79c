"""All sets of GPUs in the order of what depends on the machine alone.

The first six fields of a preference (alike … sound) do not depend on what is free. So every set
is ranked when the machine changes, and a choice only walks down a list until a set fits. Of sets
that differ by interchangeable GPUs one stands for all: the first members of each class.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Protocol

LIMIT = 1 << 16
"""Kinds of sets that are listed at most: all sets of 16 GPUs. Some 12 bytes and 4 µs each."""

# Bits of the fields of a key: sums over the at most 2 016 pairs of 64 GPUs, of levels up to 5,
# PCIe links up to 250 000 MB/s, SLIT distances up to 255, and counts of GPUs. NVLink is on top.
LINK, LEVEL, DISTANCE, COUNT = 30, 14, 20, 7
COST = COUNT + DISTANCE + COUNT
TOTAL = 36 + LEVEL + LINK + COST
NODE = 1 << DISTANCE + COUNT  # what a NUMA node costs a key; a suspect costs 1
NO_PAIR = 1 << TOTAL  # closer than any pair


class Pair(Protocol):
    @property
    def nvlink_megabytes_per_s(self) -> int: ...
    @property
    def level(self) -> int: ...
    @property
    def link_megabytes_per_s(self) -> int: ...


class Weights(NamedTuple):
    """Each pair of GPUs as numbers; a GPU with itself adds nothing and bounds nothing."""

    closeness: tuple[tuple[int, ...], ...]  # compares and sums like the fields of a closeness
    joined: tuple[tuple[int, ...], ...]  # the same, less the distance: what the pair adds to a key
    ascending: tuple[tuple[int, int], ...]  # (closeness, the pair as a set), the worst first


class Ranks(NamedTuple):
    """For each size the sets of that size from best to worst, and their ranks."""

    sets: tuple[array[int], ...]
    rank: tuple[array[int], ...]  # beside sets, ascending; as good is as high

    def run_end(self, size: int, start: int) -> int:
        """The index after the last set that is as good as the one at `start`."""
        rank = self.rank[size]
        return bisect_right(rank, rank[start], start)


def ranks(
    *,
    twins: Sequence[Sequence[int]],
    weights: Weights,
    adjacent: Sequence[int],
    alike: Sequence[int],
    numa: Sequence[int | None],
    suspects: int,
) -> Ranks | None:
    """All kinds of sets, ranked; None when there are more than LIMIT."""
    if prod(len(members) + 1 for members in twins) > LIMIT:
        return None
    steps = steps_of(weights)
    # Known NUMA nodes are counted at the end; an unknown one is one more each time.
    costs = [(suspects >> i & 1) + (NODE if numa[i] is None else 0) for i in range(len(numa))]
    listed = Listed([0], [0], [steps.no_pair])
    for c, members in enumerate(twins):
        listed = with_class(listed, twins[:c], members, weights, steps, cost=costs[members[0]])

    first = [members[0] for members in twins]
    known = sorted({node for node in numa if node is not None})
    nodes = unions(
        twins, [sum(1 << n for n, id in enumerate(known) if id == numa[i]) for i in first]
    )
    products = sorted(set(alike))
    mixed = (1 << len(products)) - 1  # no product is all members' one
    foreign = unions(
        twins, [sum(1 << p for p, of in enumerate(products) if not of >> i & 1) for i in first]
    )
    classes = unions(twins, [1 << c for c in range(len(twins))])
    joins = reachable(twins, adjacent)
    keys = [
        0  # fields about pairs are equal for a single GPU
        if members & members - 1 == 0
        else (
            (2 * (not_of != mixed) + (least >= steps.meshed or joins[among])) * steps.no_pair
            + least
            << TOTAL
        )
        + total
        - at.bit_count() * NODE
        for members, total, least, not_of, among, at in zip(
            listed.sets, listed.sums, listed.least, foreign, classes, nodes, strict=True
        )
    ]
    return ranked(listed.sets, keys, len(numa))


class Steps(NamedTuple):
    """The closeness of each pair as its place among all that occur, the worst being 0."""

    of: tuple[tuple[int, ...], ...]
    meshed: int  # the first that has NVLink
    no_pair: int  # closer than any pair


def steps_of(weights: Weights) -> Steps:
    occurring = sorted({w for row in weights.closeness for w in row} - {NO_PAIR})
    step = {w: number for number, w in enumerate([*occurring, NO_PAIR])}
    return Steps(
        of=tuple(tuple(step[w] for w in row) for row in weights.closeness),
        meshed=next((step[w] for w in occurring if has_nvlink(w)), len(occurring)),
        no_pair=len(occurring),
    )


class Listed(NamedTuple):
    """Columns over sets of GPUs, all in one order."""

    sets: list[int]
    sums: list[int]  # total closeness less the costs but for known NUMA nodes, as one number
    least: list[int]  # the least step of a pair


def with_class(
    listed: Listed,
    before: Sequence[Sequence[int]],
    members: Sequence[int],
    weights: Weights,
    steps: Steps,
    *,
    cost: int,
) -> Listed:
    """The sets of the classes `before`, and those that have members of one more class too.

    It adds a block for each of its members, and a block follows from the one before by what the
    new member adds to it: `cost`, and its pairs with what is in each set.
    """
    i = members[0]
    gains, nearest = [0], [steps.no_pair]
    for others in before:
        gain, step = weights.joined[i][others[0]], steps.of[i][others[0]]
        gains = [g + n * gain for n in range(len(others) + 1) for g in gains]
        nearest += [s if s < step else step for s in nearest] * len(others)
    block, found = listed, Listed(list(listed.sets), list(listed.sums), list(listed.least))
    for n, member in enumerate(members):
        if n:  # a pair within the class
            inner = weights.joined[i][members[1]]
            gains = [g + inner for g in gains]
        if n == 1:
            step = steps.of[i][member]
            nearest = [s if s < step else step for s in nearest]
        bit = 1 << member
        block = Listed(
            [s | bit for s in block.sets],
            [s + g - cost for s, g in zip(block.sums, gains, strict=True)],
            [a if a < b else b for a, b in zip(block.least, nearest, strict=True)],
        )
        found.sets.extend(block.sets)
        found.sums.extend(block.sums)
        found.least.extend(block.least)
    return found


def unions(twins: Sequence[Sequence[int]], marks: Sequence[int]) -> list[int]:
    """For each set, in the order of `Listed`, the union of the marks of its classes."""
    found = [0]
    for members, mark in zip(twins, marks, strict=True):
        found += [union | mark for union in found] * len(members)
    return found


def weights(closeness: Sequence[Sequence[Pair]], distance: Sequence[Sequence[int]]) -> Weights:
    everyone = range(len(closeness))
    one = [[packed(pair) for pair in row] for row in closeness]
    return Weights(
        tuple(tuple(NO_PAIR if i == j else one[i][j] for j in everyone) for i in everyone),
        tuple(
            tuple(0 if i == j else joined(one[i][j], distance[i][j]) for j in everyone)
            for i in everyone
        ),
        tuple(sorted((one[i][j], 1 << i | 1 << j) for i in everyone for j in everyone[:i])),
    )


def packed(pair: Pair) -> int:
    """A closeness as one number that compares and sums like its fields."""
    return (
        pair.nvlink_megabytes_per_s << LEVEL + LINK | pair.level << LINK | pair.link_megabytes_per_s
    )


def has_nvlink(closeness: int) -> bool:
    return closeness >> LEVEL + LINK > 0


def joined(weight: int, distance: int) -> int:
    """What a pair adds to the sums: closeness above, less its distance below."""
    return (weight << COST) - (distance << COUNT)


def reachable(twins: Sequence[Sequence[int]], adjacent: Sequence[int]) -> list[bool]:
    """For each set of classes: whether they are two or more and NVLink joins members of all.

    Interchangeable GPUs have the same neighbours, so that they reach each other by those.
    """
    direct = [
        sum(1 << d for d, others in enumerate(twins) if adjacent[members[0]] >> others[0] & 1)
        for members in twins
    ]
    near = [0]
    for neighbours in direct:
        near += [n | neighbours for n in near]
    found = []
    for classes in range(len(near)):
        seen = first = classes & -classes
        while (grown := near[seen] & classes | first) != seen:
            seen = grown
        found.append(seen == classes and classes & classes - 1 != 0)
    return found


def ranked(sets: Sequence[int], keys: Sequence[int], count: int) -> Ranks:
    code = "I" if count <= 32 else "Q"
    by_size = tuple(array(code) for _ in range(count + 1))
    rank = tuple(array("I") for _ in range(count + 1))
    last: list[int | None] = [None] * (count + 1)
    for at in sorted(range(len(sets)), key=keys.__getitem__, reverse=True):
        size = sets[at].bit_count()
        place = rank[size]
        if keys[at] == last[size]:
            place.append(place[-1])
        else:
            place.append(len(place))
            last[size] = keys[at]
        by_size[size].append(sets[at])
    return Ranks(by_size, rank)
