"""Which GPUs to hand out together, and why: the greatest preference among all sets.

Pure, and the same answer for the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import comb
from typing import NamedTuple

from rte.graph.build import Graph, NicBlock, Positions
from rte.graph.kinds import Kinds, TooMany, runs
from rte.graph.preference import (
    Preference,
    Question,
    bits,
    fields,
    is_alike,
    near_nics,
    preference,
    sort_key,
)
from rte.graph.search import searched
from rte.model import DeviceId, PciAddress

__all__ = ["Choice", "Preference", "RunnerUp", "choose"]


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


Stage = Callable[[Question, list[Positions]], list[int]]
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
    return answer(question, best(question, 2 if explain else 1))


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


def answer(question: Question, found: Found) -> Choice:
    chosen, *others = found.sets
    first = preference(question, chosen)
    runner_up = None
    decided_by = None
    if others:
        second = found.known.get(others[0]) or preference(question, others[0])
        runner_up = RunnerUp(ids(question.graph, others[0]), second)
        decided_by = next(
            name for name in fields(question) if getattr(first, name) != getattr(second, name)
        )
    return Choice(
        chosen=ids(question.graph, chosen),
        exact=found.exact,
        preference=first,
        considered=found.considered,
        nics_lead=question.nics_lead,
        runner_up=runner_up,
        decided_by=decided_by,
    )


def ids(graph: Graph, members: Positions) -> tuple[DeviceId, ...]:
    return tuple(graph.ids[i] for i in bits(members))


# The search


class Found(NamedTuple):
    """What a search came to."""

    sets: list[Positions]  # the best one or two
    exact: bool  # whether the first is proven to be the best
    considered: int  # the sets there are; of a bounded search those that it looked at
    known: Mapping[Positions, Preference]  # what has been worked out on the way


def best(question: Question, wanted: int) -> Found:
    """The best one or two sets."""
    if question.size == question.available.bit_count():
        return Found([question.available], True, 1, {})
    kinds = Kinds.of(question)
    first = led_by_nics if question.nics_lead else first_runs
    found = first(question, partial(runs, question, kinds), wanted)
    considered = number_of_sets(question)
    exact = bool(found)
    if not found:
        met, considered = searched(question)
        found = first(question, lambda: iter(met), wanted)
    known: dict[Positions, Preference] = {}
    if wanted > 1:
        rivals = [*found[1:], *kinds.variants(found[0])]
        if len(rivals) > 1:
            known = {members: preference(question, members) for members in rivals}
            rivals = [max(rivals, key=lambda members: sort_key(question, known[members]))]
        found[1:] = rivals
    return Found(found[:wanted], exact, considered, known)


def number_of_sets(question: Question) -> int:
    fixed = question.required.bit_count()
    return comb(question.available.bit_count() - fixed, question.size - fixed)


Runs = Callable[[], Iterator[list[Positions]]]
"""Begins anew with sets in runs of equal rank, best first; may raise TooMany for the next run."""


def first_runs(question: Question, runs: Runs, wanted: int) -> list[Positions]:
    """The best sets that stand for their kind: of the best run, and what is missing of the next.

    Fewer, or none, where the next run takes too long to find.
    """
    found: list[Positions] = []
    with suppress(TooMany):
        for run in runs():
            found += narrowed(question, run, wanted - len(found))
            if len(found) >= wanted:
                break
    return found


def led_by_nics(question: Question, runs: Runs, wanted: int) -> list[Positions]:
    """The same where `nics` comes right after `alike`, before the other fields of the rank."""
    bound = nics_bound(question)
    found: list[Positions] = []
    with suppress(TooMany):
        while len(found) < wanted:
            candidates = best_with_nics(question, runs(), bound, found)
            if not candidates:
                break
            found += narrowed(question, candidates, 1)
    return found


def best_with_nics(
    question: Question,
    runs: Iterator[list[Positions]],
    bound: tuple[int, int],
    known: Sequence[Positions],
) -> list[Positions]:
    """The first run's sets that have the most NICs of all that are alike or not, as the best is."""
    most: tuple[int, int] | None = None
    alike = False
    candidates: list[Positions] = []
    for run in runs:
        others = [members for members in run if members not in known]
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
    return candidates


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
        row = question.graph.nvlink[i]
        lost = -sum([row[j] for j in free])
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
