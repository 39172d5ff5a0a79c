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
    weight = weights.closeness
    steps = {
        w: step for step, w in enumerate(sorted({w for row in weight for w in row} - {NO_PAIR}))
    }
    no_pair = len(steps)
    products = sorted(set(alike))
    node_bits = {node: 1 << i for i, node in enumerate(sorted({n for n in numa if n is not None}))}

    # Each list says one thing of all sets, in one order. A class adds a block for each of its
    # members, and a block follows from the one before by what the new member adds to it.
    sets = [0]
    sums = [0]  # total closeness less the costs (NUMA nodes, distance, suspects), as one number
    least = [no_pair]  # the least closeness of a pair
    kinds = [(1 << len(products)) - 1]  # the products that may be all members' one
    nodes = [0]
    classes = [0]  # which classes are present
    for c, members in enumerate(twins):
        i = members[0]
        node = node_bits[known] if (known := numa[i]) is not None else 0
        # Known NUMA nodes are counted at the end; an unknown one is one more each time.
        own = -(suspects >> i & 1) - (0 if node else NODE)
        gains = [0]
        nearest = [no_pair]
        for others in twins[:c]:
            gain = weights.joined[i][others[0]]
            step = steps[weight[i][others[0]]]
            gains = [g + n * gain for n in range(len(others) + 1) for g in gains]
            nearest += [s if s < step else step for s in nearest] * len(others)
        kind = sum(1 << p for p, product in enumerate(products) if product >> i & 1)
        block_sets, block_sums, block_least = sets, sums, least
        grown_sets, grown_sums, grown_least = list(sets), list(sums), list(least)
        for n, member in enumerate(members):
            if n == 1:
                inner = weights.joined[i][member]
                inner_step = steps[weight[i][member]]
                gains = [g + inner for g in gains]
                nearest = [min(s, inner_step) for s in nearest]
            elif n > 1:
                gains = [g + inner for g in gains]
            bit = 1 << member
            block_sets = [s | bit for s in block_sets]
            block_sums = [s + g + own for s, g in zip(block_sums, gains, strict=True)]
            block_least = [a if a < b else b for a, b in zip(block_least, nearest, strict=True)]
            grown_sets += block_sets
            grown_sums += block_sums
            grown_least += block_least
        sets, sums, least = grown_sets, grown_sums, grown_least
        kinds += [k & kind for k in kinds] * len(members)
        nodes += [n | node for n in nodes] * len(members)
        classes += [p | 1 << c for p in classes] * len(members)

    meshed = min((s for w, s in steps.items() if has_nvlink(w)), default=no_pair)
    joins = reachable(twins, adjacent)
    keys = [
        0
        if s & s - 1 == 0  # fields about pairs are equal for a single GPU
        else (
            ((2 if k else 0) + (low >= meshed or (p & p - 1 != 0 and joins[p]))) * no_pair + low
            << TOTAL
        )
        + a
        - n.bit_count() * NODE
        for s, k, low, p, a, n in zip(sets, kinds, least, classes, sums, nodes, strict=True)
    ]
    return ranked(sets, keys, len(weight))


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
    """For each set of two or more classes: whether NVLink joins members of all of them.

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
        found.append(seen == classes)
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
