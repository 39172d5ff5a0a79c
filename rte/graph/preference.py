"""What makes one set of GPUs better than another.

The order of the fields is the policy: the first that differs decides, so that a reason can be
named. No field is a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from rte.graph.build import Closeness, Graph, Positions


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


class PairFields(NamedTuple):
    """The fields that depend on the machine alone, after `alike` and `linked`."""

    bottleneck: Closeness
    total: Closeness
    numa_spread: tuple[int, int]
    sound: int


NO_PAIR = Closeness(0, 0, 0)


def preference(question: Question, members: Positions) -> Preference:
    """Every field for one set."""
    graph = question.graph
    pairs = pair_fields(graph, members)
    return Preference(
        alike=is_alike(graph, members),
        linked=linked(graph, members),
        bottleneck=pairs.bottleneck,
        total=pairs.total,
        numa_spread=pairs.numa_spread,
        sound=pairs.sound,
        nics=near_nics(question, members),
        leftover=leftover(question, members),
        order=tuple(-i for i in bits(members)),
    )


def pair_fields(graph: Graph, members: Positions) -> PairFields:
    pairs = list(combinations(bits(members), 2))
    closeness = [graph.closeness[i][j] for i, j in pairs]
    return PairFields(
        bottleneck=min(closeness, default=NO_PAIR),
        total=Closeness(*map(sum, zip(*closeness, strict=True))) if closeness else NO_PAIR,
        numa_spread=(
            -sum(1 for block in graph.numa_blocks if block & members),
            -sum(graph.distance[i][j] for i, j in pairs),
        ),
        sound=-(members & graph.suspects).bit_count() if pairs else 0,
    )


def linked(graph: Graph, members: Positions) -> bool:
    return reached(graph, members & -members, members) == members


def reached(graph: Graph, start: Positions, within: Positions) -> Positions:
    """The GPUs that `start` reaches over NVLink by way of GPUs that are `within`, with itself."""
    seen = edge = start
    while edge:
        low = edge & -edge
        new = graph.adjacent[low.bit_length() - 1] & within & ~seen
        seen |= new
        edge = edge ^ low | new
    return seen


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
        sum([sum([row[j] for j in left]) for row in (graph.nvlink[i] for i in left)]) // 2,
        tuple(sorted(((rest & b).bit_count() for b in graph.numa_blocks), reverse=True)),
        tuple(sorted(((rest & s.gpus).bit_count() for s in graph.switches), reverse=True)),
    )


def fields(question: Question) -> tuple[str, ...]:
    """The names of the fields in the order in which they are compared."""
    names = Preference._fields
    if not question.nics_lead:
        return names
    return ("alike", "nics", *(name for name in names if name not in {"alike", "nics"}))


def sort_key(question: Question, full: Preference) -> tuple[object, ...]:
    """A preference in the order in which the question's fields are compared."""
    return (full.alike, full.nics, *full[1:]) if question.nics_lead else full


def bits(members: Positions) -> Iterator[int]:
    while members:
        low = members & -members
        yield low.bit_length() - 1
        members ^= low


def is_alike(graph: Graph, members: Positions) -> bool:
    return not members & ~graph.alike[(members & -members).bit_length() - 1]
