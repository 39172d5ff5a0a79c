"""GPUs in the order of a walk over their links."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rte.graph.build import Closeness, Graph
from rte.model import DeviceId


def nvlink_order(graph: Graph, ids: Sequence[DeviceId]) -> tuple[DeviceId, ...]:
    """The ids so that neighbours are close: from each GPU on to the closest that is left.

    Of the walks from each start the one with the best worst step wins, then the best sum, then
    the first. Ids that the graph lacks come last, in their order. Costs the cube of their number.
    """
    known = [id for id in ids if id in graph.position]
    walks = [_walk(graph, known, start) for start in known]
    best = max(walks, key=lambda walk: _steps(graph, walk), default=[])
    return (*best, *(id for id in ids if id not in graph.position))


def _walk(graph: Graph, ids: Sequence[DeviceId], start: DeviceId) -> list[DeviceId]:
    walk = [start]
    left = [id for id in ids if id != start]
    while left:
        closest = max(left, key=lambda id: _closeness(graph, walk[-1], id))
        walk.append(closest)
        left.remove(closest)
    return walk


def _steps(graph: Graph, walk: Sequence[DeviceId]) -> tuple[Closeness, Closeness]:
    steps = [_closeness(graph, a, b) for a, b in itertools.pairwise(walk)]
    none = Closeness(0, 0, 0)
    total = Closeness(*map(sum, zip(*steps, strict=True))) if steps else none
    return min(steps, default=none), total


def _closeness(graph: Graph, a: DeviceId, b: DeviceId) -> Closeness:
    return graph.closeness[graph.position[a]][graph.position[b]]
