"""MIG slices and replicas: which GPUs by the graph, then which parts of them by the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum

from rte.graph.build import Graph
from rte.graph.choose import Choice, choose
from rte.model import DeviceId


class Sharing(StrEnum):
    """NVIDIA's words for how parts are taken from GPUs."""

    DISTRIBUTED = "distributed"
    """From the GPU of which the least is in use."""
    PACKED = "packed"
    """From one GPU as long as it has some; first from one that has just enough."""


def choose_parts(
    graph: Graph,
    *,
    parts: Mapping[DeviceId, DeviceId],
    available: Iterable[str],
    required: Iterable[str] = (),
    size: int,
    free: Iterable[str] | None = None,
    sharing: Sharing = Sharing.DISTRIBUTED,
) -> Choice:
    """The best `size` parts of `available` that contain `required`.

    `parts` maps every part of the resource, used or not, to its GPU's id, in the order in which
    the parts of one GPU are taken; ids that it lacks are ignored. Where the policy leaves several
    GPUs, the graph chooses the one that goes best with those already chosen; the answer's
    preference is that of all GPUs together.
    """
    must = [id for id in parts if id in set(required)]
    offered = {id for id in parts if id in set(available)}.union(must)
    if len(must) >= size:
        return _with(graph, parts, must[: max(size, 0)], free)
    rest: dict[DeviceId, list[DeviceId]] = {}
    used: dict[DeviceId, int] = {}
    for id, gpu in parts.items():
        used[gpu] = used.get(gpu, 0) + (id not in offered or id in must)
        if id in offered and id not in must:
            rest.setdefault(gpu, []).append(id)
    taken = list(must)
    while len(taken) < size and rest:
        members = tuple(dict.fromkeys(parts[id] for id in taken))
        candidates = _candidates(rest, used, members, size - len(taken), sharing)
        gpu = _next_gpu(graph, members, candidates, free)
        taken.append(rest[gpu].pop(0))
        used[gpu] += 1
        if not rest[gpu]:
            del rest[gpu]
    return _with(graph, parts, taken, free)


def _candidates(
    rest: Mapping[DeviceId, list[DeviceId]],
    used: Mapping[DeviceId, int],
    members: tuple[DeviceId, ...],
    missing: int,
    sharing: Sharing,
) -> list[DeviceId]:
    """The GPUs that the policy allows the next part to come from."""
    if sharing is Sharing.DISTRIBUTED:
        least = min(used[gpu] for gpu in rest)
        return [gpu for gpu in rest if used[gpu] == least]
    begun = [gpu for gpu in members if gpu in rest]
    if begun:
        return begun[:1]
    enough = [len(ids) for ids in rest.values() if len(ids) >= missing]
    wanted = min(enough) if enough else max(len(ids) for ids in rest.values())
    return [gpu for gpu, ids in rest.items() if len(ids) == wanted]


def _next_gpu(
    graph: Graph,
    members: tuple[DeviceId, ...],
    candidates: list[DeviceId],
    free: Iterable[str] | None,
) -> DeviceId:
    """The candidate that goes best with the GPUs chosen already, and is none of them if it can."""
    fresh = [gpu for gpu in candidates if gpu not in members]
    if not fresh:
        return candidates[0]
    best = choose(
        graph,
        available=[*members, *fresh],
        required=members,
        size=len(members) + 1,
        free=free,
    )
    return next((gpu for gpu in best.chosen if gpu not in members), fresh[0])


def _with(
    graph: Graph,
    parts: Mapping[DeviceId, DeviceId],
    taken: list[DeviceId],
    free: Iterable[str] | None,
) -> Choice:
    """The choice of these parts, with the preference of their GPUs."""
    gpus = list(dict.fromkeys(parts[id] for id in taken))
    whole = choose(graph, available=gpus, size=len(gpus), free=free)
    return replace(whole, chosen=tuple(taken), exact=len(gpus) <= 1)
