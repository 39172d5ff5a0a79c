"""How the Topology Manager makes one hint of many.

A mask is a set of NUMA nodes: bit <id> for each. Merging every combination of hints, as the
kubelet does, grows with the product of their numbers; here equal intermediate results are kept
once, which gives the same best hint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from rte.model import TopologyManagerPolicy

Mask = int


class Hint(NamedTuple):
    nodes: Mask | None  # None: any
    preferred: bool


ProviderHints = Mapping[str, Sequence[Hint] | None]
"""By resource. Empty map or None: no preference. No hint at all: impossible."""


def mask(nodes: Iterable[int]) -> Mask:
    found = 0
    for node in nodes:
        found |= 1 << node
    return found


def bits(nodes: Mask) -> list[int]:
    return [bit for bit in range(nodes.bit_length()) if nodes >> bit & 1]


def masks(nodes: Iterable[int]) -> Iterator[Mask]:
    """All non-empty sets, narrow ones first."""
    ordered = sorted(nodes)
    for width in range(1, len(ordered) + 1):
        for chosen in combinations(ordered, width):
            yield mask(chosen)


def hints(
    nodes: Sequence[int],
    *,
    could: Callable[[Mask], bool],
    can: Callable[[Mask], bool],
) -> list[Hint]:
    """A hint for each set of nodes that `can` hold the request now; those as narrow as the
    narrowest that `could` hold it, were nothing in use, are preferred."""
    narrowest = len(nodes)
    found = []
    for candidate in masks(nodes):
        if candidate.bit_count() < narrowest and could(candidate):
            narrowest = candidate.bit_count()
        if can(candidate):
            found.append(candidate)
    return [Hint(candidate, candidate.bit_count() == narrowest) for candidate in found]


def best_hint(
    policy: TopologyManagerPolicy, providers: Iterable[ProviderHints], *, every_node: Mask
) -> tuple[Hint, bool]:
    """The merged hint and whether the policy admits it. Policy none merges nothing."""
    lists = [wishes for provider in providers for wishes in listed(provider)]
    if policy is TopologyManagerPolicy.SINGLE_NUMA_NODE:
        lists = [
            [
                hint
                for hint in wishes
                if hint.preferred and (hint.nodes is None or hint.nodes.bit_count() == 1)
            ]
            for wishes in lists
        ]
    best = merged(lists, every_node=every_node)
    if policy is TopologyManagerPolicy.SINGLE_NUMA_NODE and best.nodes == every_node:
        best = Hint(None, best.preferred)
    return best, best.preferred or policy is TopologyManagerPolicy.BEST_EFFORT


def listed(provider: ProviderHints) -> list[Sequence[Hint]]:
    if not provider:
        return [[Hint(None, True)]]
    return [
        [Hint(None, True)] if wishes is None else wishes or [Hint(None, False)]
        for wishes in provider.values()
    ]


class Merged(NamedTuple):
    nodes: Mask
    first: Mask | None  # the nodes that all hints so far agree on; None while there is none
    agreed: bool  # and all are preferred


def merged(lists: Sequence[Sequence[Hint]], *, every_node: Mask) -> Hint:
    states = {Merged(every_node, None, True)}
    for wishes in lists:
        states = {joined(state, hint) for state in states for hint in wishes}
    aim = best_width(lists)
    found = [Hint(state.nodes, state.agreed) for state in states if state.nodes]
    return max(found, key=lambda hint: order(hint, aim=aim), default=Hint(every_node, False))


def joined(state: Merged, hint: Hint) -> Merged:
    if hint.nodes is None:
        return state._replace(agreed=state.agreed and hint.preferred)
    equal = state.first is None or state.first == hint.nodes
    agreed = state.agreed and hint.preferred and equal
    # What was first matters no more once the hints disagree; forgetting it keeps the states few.
    first = (hint.nodes if state.first is None else state.first) if agreed else -1
    return Merged(state.nodes & hint.nodes, first, agreed)


def best_width(lists: Sequence[Sequence[Hint]]) -> int:
    """The width that the provider needs which needs most, each at its narrowest."""
    narrowest = [
        min((hint.nodes.bit_count() for hint in wishes if hint.nodes is not None), default=0)
        for wishes in lists
    ]
    return max(narrowest, default=0)


def order(hint: Hint, *, aim: int) -> tuple[int, ...]:
    """Greater is better: preferred, then as wide as `aim`, else below it and wide, else above it
    and narrow. Of equally wide ones the lower node ids."""
    nodes = hint.nodes or 0
    width = nodes.bit_count()
    if hint.preferred:
        return (1, 0, -width, -nodes)
    if width <= aim:
        return (0, 1, width, -nodes)
    return (0, 0, -width, -nodes)
