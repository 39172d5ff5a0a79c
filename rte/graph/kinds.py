"""The sets that a question allows, best first as far as the machine alone can tell.

Of sets that differ by interchangeable GPUs one stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rte.graph.build import Positions
from rte.graph.keys import PairKeys
from rte.graph.preference import (
    Question,
    bits,
    is_alike,
    linked,
    near_nics,
    reached,
)
from rte.graph.ranks import Ranks, has_nvlink

STEPS = 8192
"""Steps of a search by bottleneck, at most: some 6 ms. Above 32 GPUs all else takes longer, and
half of them must do."""


class TooMany(Exception):
    """A search by bottleneck has used up its steps."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """How the listed sets, one of each kind, stand for sets that the question allows.

    A listed set has the first members of each class of interchangeable GPUs; the set that it
    stands for has as many of the class, by what distinguishes them in this question: required
    ones first, then those with (or, for a single GPU, without) a free NIC of their own, then the
    smallest addresses.
    """

    missing: Positions  # a listed set with one of these needs more of a class than there is
    needed: Positions  # a listed set without one of these leaves out a required GPU
    single: Positions  # GPUs that only stand for themselves
    orders: tuple[tuple[Positions, tuple[int, ...], int], ...]
    """(class, its available members as bits in the order of use, how many are required)."""
    heads: tuple[tuple[Positions, tuple[Positions, ...]], ...]
    """(class, the set of its first 0, 1, 2 … members in that order)."""

    @staticmethod
    def of(question: Question) -> Kinds:
        graph = question.graph
        missing = needed = single = 0
        orders = []
        heads = []
        for members in graph.twins:
            if len(members) == 1:
                single |= 1 << members[0]
                continue
            offered = [i for i in members if question.available >> i & 1]
            required = sum(question.required >> i & 1 for i in members)
            for i in members[len(offered) :]:
                missing |= 1 << i
            for i in members[:required]:
                needed |= 1 << i
            order = tuple(
                1 << i
                for i in sorted(
                    offered,
                    key=lambda i: (not question.required >> i & 1, *avoided(question, i), i),
                )
            )
            everyone = sum(1 << i for i in members)
            orders.append((everyone, order, required))
            firsts = [0]
            for bit in order:
                firsts.append(firsts[-1] | bit)
            heads.append((everyone, tuple(firsts)))
        return Kinds(
            missing | single & ~question.available,
            needed | single & question.required,
            single,
            tuple(orders),
            tuple(heads),
        )

    def stand_for(self, listed: Sequence[Positions]) -> list[Positions]:
        """The sets that the question allows, for those listed sets that fit it."""
        missing, needed = self.missing, self.needed
        fitting = [s for s in listed if not s & missing and s & needed == needed]
        if not self.heads:
            return fitting
        single, heads = self.single, self.heads
        found = []
        for listed_set in fitting:
            members = listed_set & single
            for everyone, firsts in heads:
                members |= firsts[(listed_set & everyone).bit_count()]
            found.append(members)
        return found

    def variants(self, members: Positions) -> list[Positions]:
        """The next best sets of the same kind: one for each class that leaves a choice."""
        found = []
        for everyone, order, required in self.orders:
            count = (members & everyone).bit_count()
            if required < count < len(order):
                found.append(members ^ order[count - 1] ^ order[count])
        return found


def avoided(question: Question, i: int) -> tuple[int, int]:
    """The sort key among interchangeable GPUs: NICs that only this one is near to."""
    return tuple(-n for n in near_nics(question, 1 << i))  # type: ignore[return-value]


def runs(question: Question, kinds: Kinds) -> Iterator[list[Positions]]:
    """The sets that the question allows, best first; those of one run are equally good so far.

    Raises TooMany where the machine's sets are not listed and the next run is too far to find.
    """
    ranks = question.graph.ranks
    return by_bottleneck(question, kinds) if ranks is None else listed(question, kinds, ranks)


def listed(question: Question, kinds: Kinds, ranks: Ranks) -> Iterator[list[Positions]]:
    sets = ranks.sets[question.size]
    missing, needed = kinds.missing, kinds.needed
    start = 0
    while start < len(sets):
        for at in range(start, len(sets)):
            members = sets[at]
            if not members & missing and members & needed == needed:
                break
        else:
            return
        end = ranks.run_end(question.size, at)
        yield kinds.stand_for(sets[at:end])
        start = end


# Machines with too many kinds of sets to list


def by_bottleneck(question: Question, kinds: Kinds) -> Iterator[list[Positions]]:
    """The same as `listed`, found anew: all sets with the best bottleneck, then the next.

    What the first fields demand leaves few sets on most machines: all pairs within a set must be
    as close as the bottleneck.
    """
    graph = question.graph
    if question.size == 1:
        yield [1 << i for i in bits(question.required or question.available)]
        return
    search = Search(question, kinds)
    keys = PairKeys(graph, question.available)
    for alike in (True, False):
        for joined in (True, False):
            if joined and not reaches(question, alike=alike):
                continue
            for least, found in search.meshes(alike=alike):
                # A set whose pairs all have NVLink is linked.
                if joined or not has_nvlink(least):
                    yield from ranked(
                        keys,
                        [
                            members
                            for members in found()
                            if is_alike(graph, members) == alike
                            and linked(graph, members) == joined
                        ],
                        least,
                    )


def ranked(keys: PairKeys, sets: Sequence[Positions], bottleneck: int) -> Iterator[list[Positions]]:
    """Those with just this bottleneck, in runs by the fields from `total` to `sound`."""
    with_keys = [(keys(members), members) for members in sets]
    exact = sorted((k for k in with_keys if k[0][0] == bottleneck), reverse=True)
    for _, run in groupby(exact, key=lambda found: found[0]):
        yield [members for _, members in run]


def reaches(question: Question, *, alike: bool) -> bool:
    """Whether NVLink joins enough of the available GPUs, with all that are required."""
    graph = question.graph
    left = question.available
    while left:
        first = (left & -left).bit_length() - 1
        within = question.available & (graph.alike[first] if alike else -1)
        seen = reached(graph, 1 << first, within)
        if seen.bit_count() >= question.size and not question.required & ~seen:
            return True
        left &= ~seen
    return False


class Search:
    """Looks for sets in which all pairs are close enough; counts its steps over all calls."""

    def __init__(self, question: Question, kinds: Kinds) -> None:
        self.question = question
        self.steps = STEPS if len(question.graph.gpus) <= 32 else STEPS // 2
        # Each class: its members in the order of use, and how many of them are required.
        alone = [
            ((1 << i,), question.required >> i & 1) for i in bits(question.available & kinds.single)
        ]
        classes = [*alone, *((order, needed) for _, order, needed in kinds.orders if order)]
        self.classes = sorted(classes, key=lambda found: (-found[1], found[0]))
        self.required_after = [
            sum(needed for _, needed in self.classes[at:]) for at in range(len(classes) + 1)
        ]

    def meshes(self, *, alike: bool) -> Iterator[tuple[int, Callable[[], list[Positions]]]]:
        """Each closeness of a pair from the best, with how to find the sets without a worse one.

        The sets have the size, and there is one of each kind. Finding them may raise TooMany.
        """
        graph, available = self.question.graph, self.question.available
        self.near = [1 << i for i in range(len(graph.gpus))]
        for least, pairs in groupby(reversed(graph.weights.ascending), key=itemgetter(0)):
            for _, pair in pairs:
                first, second = (pair & -pair).bit_length() - 1, pair.bit_length() - 1
                if not pair & ~available and (not alike or graph.alike[first] >> second & 1):
                    self.near[first] |= pair
                    self.near[second] |= pair
            yield least, self.find

    def find(self) -> list[Positions]:
        self.found: list[Positions] = []
        self.grow(0, 0, self.question.available)
        return self.found

    def grow(self, at: int, members: Positions, allowed: Positions) -> None:
        """Takes 0, 1, 2 … of the class `at` in turn; `allowed` are near to all members."""
        self.steps -= 1
        if self.steps < 0:
            raise TooMany
        size = self.question.size
        missing = size - members.bit_count()
        if not missing:
            if not self.required_after[at]:
                self.found.append(members)
                self.steps -= 8  # what it costs to rank it
            return
        if at == len(self.classes) or missing < self.required_after[at]:
            return
        order, needed = self.classes[at]
        here = sum(order)
        without = allowed & ~here | members
        if not needed and without.bit_count() >= size:
            self.grow(at + 1, members, without)
        for count, bit in enumerate(order[:missing], 1):
            if not allowed & bit:
                break
            members |= bit
            allowed &= self.near[bit.bit_length() - 1]
            if allowed.bit_count() < size:
                break
            if count >= needed:
                self.grow(at + 1, members, allowed & ~here | members)
