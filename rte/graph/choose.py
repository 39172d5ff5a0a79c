"""Which GPUs to hand out together, and why: the greatest preference among all sets.

Pure, and the same answer for the same question. The order of the fields is the policy: the first
that differs decides, so that a reason can be named. No field is a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import NamedTuple

from rte.graph.build import Closeness, Graph, NicBlock, Positions
from rte.model import DeviceId, PciAddress

TRIES = 1024
"""Sets that are looked at where the machine's sets are too many to be listed (graph.ranks)."""


class Preference(NamedTuple):
    """How good a set is; greater is better, the first field that differs decides.

    Fields about pairs are equal for all single GPUs.
    """

    alike: bool
    """All members have one product and memory size."""
    linked: bool
    """All members reach each other over NVLink inside the set."""
    bottleneck: Closeness
    """The smallest closeness of a pair."""
    total: Closeness
    """Closeness of all pairs, summed field by field."""
    numa_spread: tuple[int, int]
    """(NUMA nodes, sum of SLIT distances over all pairs), both negative."""
    sound: int
    """Members with a suspect link, negative."""
    nics: tuple[int, int]
    """Members that can each have a free compute NIC of their own (below the same PCIe switch, in
    the same NUMA node); negative for a single GPU, which leaves such NICs to others."""
    leftover: tuple[int, tuple[int, ...], tuple[int, ...]]
    """What stays free: (NVLink MB/s of all pairs, GPUs a NUMA node, GPUs a PCIe switch), the
    counts descending."""
    order: tuple[int, ...]
    """Positions of the members in PCI order, negative: smaller addresses win."""


class RunnerUp(NamedTuple):
    chosen: tuple[DeviceId, ...]
    preference: Preference


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The answer to one question."""

    chosen: tuple[DeviceId, ...]  # in PCI order
    exact: bool  # no other set has a greater preference; False after a bounded search
    preference: Preference | None  # None when nothing is chosen
    considered: int  # sets among which this is the best
    nics_lead: bool = False  # whether `nics` was compared right after `alike`
    runner_up: RunnerUp | None = None  # None without another set, or when it was not asked for
    decided_by: str | None = None  # the first field in which the runner-up is worse


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, as sets of positions, and what of it every candidate shares."""

    graph: Graph
    available: Positions
    required: Positions
    size: int
    free: Positions
    free_nics: int  # bit <index in graph.nics>
    nics_lead: bool


Stage = Callable[["Question", list[Positions]], list[int]]
"""Works out one field for equally ranked sets, as numbers of which greater is better."""


def choose(
    graph: Graph,
    *,
    available: Iterable[str],
    required: Iterable[str] = (),
    size: int,
    free: Iterable[str] | None = None,
    free_nics: Iterable[PciAddress] | None = None,
    own_nics: Iterable[PciAddress] = (),
    explain: bool = False,
) -> Choice:
    """The best `size` GPUs of `available` that contain `required`, by Preference.

    Ids are those of whole GPUs; unknown ones and duplicates are ignored, and order means nothing.
    Too few give all there are; more required than asked, the best of the required.
    `free` are the GPUs free on the whole node (default: those offered, which always count).
    `free_nics` are the compute NICs that nobody holds (default: all of them); `own_nics` those
    that this container is known to hold: then only they count, and before everything but `alike`.
    `explain` also finds the runner-up and the deciding field, at about twice the cost.
    """
    question = asked(
        graph,
        available=available,
        required=required,
        size=size,
        free=free,
        free_nics=free_nics,
        own_nics=own_nics,
    )
    if not question.size:
        return Choice(chosen=(), exact=True, preference=None, considered=0)
    found, exact, considered = best(question, 2 if explain else 1)
    return answer(question, found, exact=exact, considered=considered)


def asked(
    graph: Graph,
    *,
    available: Iterable[str],
    required: Iterable[str],
    size: int,
    free: Iterable[str] | None,
    free_nics: Iterable[PciAddress] | None,
    own_nics: Iterable[PciAddress],
) -> Question:
    must = graph.positions(required)
    offered = graph.positions(available) | must
    if must.bit_count() > size:
        offered, must = must, 0
    own = set(own_nics)
    counted = own or (None if free_nics is None else set(free_nics))
    nics = 0
    for i, nic in enumerate(graph.nics):
        if counted is None or nic.pci in counted:
            nics |= 1 << i
    return Question(
        graph,
        offered,
        must,
        max(0, min(size, offered.bit_count())),
        offered if free is None else offered | graph.positions(free),
        nics,
        bool(own) and bool(nics),
    )


def answer(
    question: Question, found: Sequence[Positions], *, exact: bool, considered: int
) -> Choice:
    first = preference(question, found[0])
    runner_up = None
    decided_by = None
    if len(found) > 1:
        second = preference(question, found[1])
        runner_up = RunnerUp(ids(question.graph, found[1]), second)
        decided_by = next(
            name for name in fields(question) if getattr(first, name) != getattr(second, name)
        )
    return Choice(
        chosen=ids(question.graph, found[0]),
        exact=exact,
        preference=first,
        considered=considered,
        nics_lead=question.nics_lead,
        runner_up=runner_up,
        decided_by=decided_by,
    )


def ids(graph: Graph, members: Positions) -> tuple[DeviceId, ...]:
    return tuple(graph.ids[i] for i in bits(members))


def fields(question: Question) -> tuple[str, ...]:
    """The names of the fields in the order in which they are compared."""
    names = Preference._fields
    if not question.nics_lead:
        return names
    return ("alike", "nics", *(name for name in names if name not in {"alike", "nics"}))


def compared(question: Question, members: Positions) -> tuple[object, ...]:
    """The preference of a set as a sort key."""
    full = preference(question, members)
    if not question.nics_lead:
        return full
    return (full.alike, full.nics, *full[1:])


def preference(question: Question, members: Positions) -> Preference:
    """Every field for one set."""
    graph = question.graph
    chosen = tuple(bits(members))
    pairs = list(combinations(chosen, 2))
    closeness = [graph.closeness[i][j] for i, j in pairs]
    return Preference(
        alike=is_alike(graph, members),
        linked=linked(graph, members),
        bottleneck=min(closeness, default=Closeness(0, 0, 0)),
        total=Closeness(*map(sum, zip(*closeness, strict=True)))
        if closeness
        else Closeness(0, 0, 0),
        numa_spread=(
            -sum(1 for block in graph.numa_blocks if block & members),
            -sum(graph.distance[i][j] for i, j in pairs),
        ),
        sound=-(members & graph.suspects).bit_count() if pairs else 0,
        nics=near_nics(question, members),
        leftover=leftover(question, members),
        order=tuple(-i for i in chosen),
    )


def bits(members: Positions) -> Iterator[int]:
    while members:
        low = members & -members
        yield low.bit_length() - 1
        members ^= low


def linked(graph: Graph, members: Positions) -> bool:
    seen = edge = members & -members
    while edge:
        low = edge & -edge
        new = graph.adjacent[low.bit_length() - 1] & members & ~seen
        seen |= new
        edge = edge ^ low | new
    return seen == members


def near_nics(question: Question, members: Positions) -> tuple[int, int]:
    graph = question.graph
    near = (
        sum(
            min((members & block.gpus).bit_count(), (block.nics & question.free_nics).bit_count())
            for block in graph.switch_nics
        ),
        sum(
            min((members & block.gpus).bit_count(), (block.nics & question.free_nics).bit_count())
            for block in graph.numa_nics
        ),
    )
    # A single GPU without a NIC of its own leaves the GPUs near NICs to those who need both.
    return (-near[0], -near[1]) if question.size == 1 and not question.nics_lead else near


def leftover(
    question: Question, members: Positions
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    graph = question.graph
    rest = question.free & ~members
    left = tuple(bits(rest))
    return (
        sum(graph.closeness[i][j].nvlink_megabytes_per_s for i, j in combinations(left, 2)),
        tuple(sorted(((rest & b).bit_count() for b in graph.numa_blocks), reverse=True)),
        tuple(sorted(((rest & s.gpus).bit_count() for s in graph.switches), reverse=True)),
    )


# The search


def best(question: Question, wanted: int) -> tuple[list[Positions], bool, int]:
    """The best one or two sets, whether they are proven to be, and the number of sets there are.

    Of a bounded search the number is of those that it looked at.
    """
    if question.size == question.available.bit_count():
        return [question.available], True, 1
    kinds = Kinds.of(question)
    exact = True
    if question.graph.ranks is None:
        found, exact, considered = searched(question)
    else:
        considered = number_of_sets(question)
        find = led_by_nics if question.nics_lead else first_run
        found = find(question, kinds, wanted)
    if wanted > 1:
        rivals = [*found[1:], *kinds.variants(found[0])]
        found[1:] = (
            [max(rivals, key=lambda members: compared(question, members))]
            if len(rivals) > 1
            else rivals
        )
    return found[:wanted], exact, considered


def number_of_sets(question: Question) -> int:
    fixed = question.required.bit_count()
    return comb(question.available.bit_count() - fixed, question.size - fixed)


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
    """The sets that the question allows, best first; those of one run are equally good so far."""
    ranks = question.graph.ranks
    assert ranks is not None
    sets = ranks.sets[question.size]
    missing, needed = kinds.missing, kinds.needed
    start = 0
    while start < len(sets):
        for at in range(start, len(sets)):
            listed = sets[at]
            if not listed & missing and listed & needed == needed:
                break
        else:
            return
        end = ranks.run_end(question.size, at)
        yield kinds.stand_for(sets[at:end])
        start = end


def first_run(question: Question, kinds: Kinds, wanted: int) -> list[Positions]:
    """The best sets that stand for their kind: of the best run, and what is missing of the next."""
    found: list[Positions] = []
    for run in runs(question, kinds):
        found += narrowed(question, run, wanted - len(found))
        if len(found) >= wanted:
            break
    return found


def led_by_nics(question: Question, kinds: Kinds, wanted: int) -> list[Positions]:
    """The same where `nics` comes right after `alike`, before the other fields of the rank."""
    bound = nics_bound(question)
    found: list[Positions] = []
    while len(found) < wanted:
        most: tuple[int, int] | None = None
        alike = False
        candidates: list[Positions] = []
        for run in runs(question, kinds):
            others = [members for members in run if members not in found]
            if not others:
                continue
            if most is not None and is_alike(question.graph, others[0]) != alike:
                break
            alike = is_alike(question.graph, others[0])
            near = [near_nics(question, members) for members in others]
            if most is None or max(near) > most:
                most = max(near)
                candidates = [m for m, n in zip(others, near, strict=True) if n == most]
            if most == bound:
                break
        if not candidates:
            break
        found += narrowed(question, candidates, 1)
    return found


def nics_bound(question: Question) -> tuple[int, int]:
    """No set of the size has more members near NICs: each further member adds at most one."""
    spare = question.size - question.required.bit_count()
    whole = near_nics(question, question.available)
    fixed = near_nics(question, question.required)
    return min(whole[0], fixed[0] + spare), min(whole[1], fixed[1] + spare)


# Equally ranked sets, told apart by what is free


def narrowed(question: Question, candidates: list[Positions], wanted: int) -> list[Positions]:
    """The best one or two of equally ranked sets, field by field.

    Each field is worked out only for the sets that are still equal, and for all of them at once.
    """
    if len(candidates) <= 1:
        return candidates
    remaining = stages(question)
    for at, stage in enumerate(remaining):
        values = stage(question, candidates)
        most = max(values)
        top = [m for m, value in zip(candidates, values, strict=True) if value == most]
        if len(top) == 1:
            if wanted == 1:
                return top
            others = [members for members in candidates if members != top[0]]
            return top + second(question, others, remaining[at:])
        candidates = top
    return in_order(candidates, wanted)


def second(
    question: Question, candidates: list[Positions], remaining: Sequence[Stage]
) -> list[Positions]:
    """The best of sets that are equal up to the first of the remaining stages."""
    for stage in remaining:
        if len(candidates) == 1:
            break
        values = stage(question, candidates)
        most = max(values)
        candidates = [m for m, value in zip(candidates, values, strict=True) if value == most]
    return in_order(candidates, 1)


def in_order(candidates: list[Positions], wanted: int) -> list[Positions]:
    """The sets with the smallest positions: the first position in which sets differ decides."""
    found: list[Positions] = []
    while candidates and len(found) < wanted:
        left = candidates
        bit = 1
        while len(left) > 1:
            left = [members for members in left if members & bit] or left
            bit <<= 1
        found += left
        candidates = [members for members in candidates if members != left[0]]
    return found


def stages(question: Question) -> list[Stage]:
    """The fields after `sound`, each as numbers that compare like the field."""
    graph = question.graph
    found: list[Stage] = []
    if question.free_nics and not question.nics_lead:
        found += [switch_nics, numa_nics]
    if any(graph.adjacent):
        found.append(nvlink_left)
    if len(graph.numa_blocks) > 1:
        found.append(numa_left)
    if graph.switches:
        found.append(switches_left)
    return found


def switch_nics(question: Question, candidates: list[Positions]) -> list[int]:
    return served(question, candidates, question.graph.switch_nics)


def numa_nics(question: Question, candidates: list[Positions]) -> list[int]:
    return served(question, candidates, question.graph.numa_nics)


def served(
    question: Question, candidates: list[Positions], blocks: Sequence[NicBlock]
) -> list[int]:
    """Members that get a NIC of their own; negative for a single GPU."""
    sign = -1 if question.size == 1 else 1
    found = [0] * len(candidates)
    plenty = 0
    for gpus, nics in blocks:
        count, here = (nics & question.free_nics).bit_count(), gpus & question.available
        if count >= min(here.bit_count(), question.size):
            plenty |= here
        elif count:
            worth = [sign * min(n, count) for n in range(question.size + 1)]
            found = [
                v + worth[(m & here).bit_count()] for v, m in zip(found, candidates, strict=True)
            ]
    if plenty and plenty != question.available:
        found = [
            v + sign * (m & plenty).bit_count() for v, m in zip(found, candidates, strict=True)
        ]
    return found


def nvlink_left(question: Question, candidates: list[Positions]) -> list[int]:
    """What each set takes of the free GPUs' NVLink bandwidth, negative.

    Equally ranked sets have the same total inside, so the links from the members to all that is
    free tell them apart.
    """
    free = tuple(bits(question.free))
    alike: dict[int, Positions] = {}
    for i in bits(question.available):
        row = question.graph.closeness[i]
        lost = -sum([row[j].nvlink_megabytes_per_s for j in free if j != i])
        alike[lost] = alike.get(lost, 0) | 1 << i
    most = max(alike)
    found = [0] * len(candidates)
    for lost, gpus in alike.items():
        if lost != most:
            less = lost - most
            found = [
                v + less * (m & gpus).bit_count() for v, m in zip(found, candidates, strict=True)
            ]
    return found


def numa_left(question: Question, candidates: list[Positions]) -> list[int]:
    return counts_left(question, candidates, question.graph.numa_blocks)


def switches_left(question: Question, candidates: list[Positions]) -> list[int]:
    return counts_left(question, candidates, [switch.gpus for switch in question.graph.switches])


def counts_left(
    question: Question, candidates: list[Positions], groups: Sequence[Positions]
) -> list[int]:
    """Numbers that compare like the descending counts of GPUs that each set leaves in the groups.

    With more powers between two counts than there are groups, one higher count outweighs any
    number of lower ones.
    """
    worth = [(len(groups) + 1) ** n for n in range(len(question.graph.gpus) + 1)]
    found = [0] * len(candidates)
    for group in groups:
        rest = question.free & group
        if rest & question.available:
            found = [
                v + worth[(rest & ~m).bit_count()] for v, m in zip(found, candidates, strict=True)
            ]
    return found


def is_alike(graph: Graph, members: Positions) -> bool:
    return not members & ~graph.alike[(members & -members).bit_length() - 1]


# Machines with too many kinds of sets to list


def searched(question: Question) -> tuple[list[Positions], bool, int]:
    """The best two of all sets where they are few, else of those that a bounded search meets.

    The search grows a set from each GPU by the closest next one and then exchanges members while
    that improves the preference.
    """
    seen: dict[Positions, tuple[object, ...]] = {}

    def value(members: Positions) -> tuple[object, ...]:
        if members not in seen:
            seen[members] = compared(question, members)
        return seen[members]

    if number_of_sets(question) <= TRIES:
        optional = list(bits(question.available & ~question.required))
        spare = question.size - question.required.bit_count()
        for extra in combinations(optional, spare):
            value(question.required | sum(1 << i for i in extra))
    else:
        for start in bits(question.available & ~question.required):
            value(grown(question, question.required | 1 << start))
        improve(question, max(seen, key=value), value, seen)
    found = sorted(seen, key=value, reverse=True)[:2]
    return found, number_of_sets(question) <= TRIES, len(seen)


def grown(question: Question, members: Positions) -> Positions:
    """A set of the size, from a smaller one: the closest next GPU each time."""
    graph = question.graph
    while members.bit_count() < question.size:
        inside = tuple(bits(members))
        members |= 1 << max(
            bits(question.available & ~members),
            key=lambda i: (
                is_alike(graph, members | 1 << i),
                min(graph.closeness[i][j] for j in inside),
                sum(graph.closeness[i][j].nvlink_megabytes_per_s for j in inside),
                sum(graph.closeness[i][j].level for j in inside),
                -sum(graph.distance[i][j] for j in inside),
                -i,
            ),
        )
    return members


def improve(
    question: Question,
    members: Positions,
    value: Callable[[Positions], tuple[object, ...]],
    seen: Mapping[Positions, object],
) -> None:
    """Looks at exchanges of one member, and goes on from a better set until there is none."""
    improved = True
    while improved and len(seen) < TRIES:
        improved = False
        for out in bits(members & ~question.required):
            for into in bits(question.available & ~members):
                other = members ^ 1 << out ^ 1 << into
                if value(other) > value(members):
                    members, improved = other, True
                    break
            if improved:
                break
