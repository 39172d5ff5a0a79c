"""MIG slices and replicas: which GPUs by the graph, then which parts of them by the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """From as few GPUs as can be, and first from one that has just enough."""


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
    GPUs, the graph chooses those that go best with each other and those already chosen; the
    answer's preference is that of all GPUs together.
    """
    offered, must = frozenset(available), frozenset(required)
    taken = [id for id in parts if id in must][: max(size, 0)]
    rest: dict[DeviceId, list[DeviceId]] = {}
    used: dict[DeviceId, int] = {}
    for id, gpu in parts.items():
        used.setdefault(gpu, 0)
        if id in offered and id not in must:
            rest.setdefault(gpu, []).append(id)
        else:
            used[gpu] += 1
    take = spread if sharing is Sharing.DISTRIBUTED else packed
    while len(taken) < size and rest:
        members = tuple(dict.fromkeys(parts[id] for id in taken))
        missing = size - len(taken)
        for gpu, count in take(graph, members, rest=rest, used=used, missing=missing, free=free):
            taken += rest[gpu][:count]
            used[gpu] += count
            del rest[gpu][:count]
            if not rest[gpu]:
                del rest[gpu]
    gpus = tuple(dict.fromkeys(parts[id] for id in taken))
    whole = choose(graph, available=gpus, size=len(gpus), free=free)
    # The policy comes before the preference, so that there is no proof for several GPUs.
    return replace(whole, chosen=tuple(taken), exact=len(gpus) <= 1)


Take = Iterable[tuple[DeviceId, int]]


def spread(
    graph: Graph,
    members: Sequence[DeviceId],
    *,
    rest: Mapping[DeviceId, list[DeviceId]],
    used: Mapping[DeviceId, int],
    missing: int,
    free: Iterable[str] | None,
) -> Take:
    """One part of each of the least used GPUs, of new ones before those already chosen."""
    least = min(used[gpu] for gpu in rest)
    tier = [gpu for gpu in rest if used[gpu] == least]
    fresh = [gpu for gpu in tier if gpu not in members]
    if fresh:
        tier = together(graph, members, fresh, min(missing, len(fresh)), free)
    return [(gpu, 1) for gpu in tier[:missing]]


def packed(
    graph: Graph,
    members: Sequence[DeviceId],
    *,
    rest: Mapping[DeviceId, list[DeviceId]],
    used: Mapping[DeviceId, int],
    missing: int,
    free: Iterable[str] | None,
) -> Take:
    """All that is needed of a GPU already chosen, else of the fewest new ones."""
    begun = [gpu for gpu in members if gpu in rest]
    if begun:
        return [(begun[0], min(missing, len(rest[begun[0]])))]
    sizes = sorted((len(ids) for ids in rest.values()), reverse=True)
    enough = [size for size in sizes if size >= missing]
    if enough:
        level, count = enough[-1], 1
    else:
        # As many of the fullest as it takes; those that are equally full are chosen together.
        needed = next((n for n in range(len(sizes)) if sum(sizes[:n]) >= missing), len(sizes))
        level = sizes[0]
        count = min(needed, sizes.count(level))
    tier = [gpu for gpu, ids in rest.items() if len(ids) == level]
    chosen = together(graph, members, tier, count, free)
    takes = []
    for gpu in chosen:
        takes.append((gpu, min(missing, level)))
        missing -= takes[-1][1]
    return takes


def together(
    graph: Graph,
    members: Sequence[DeviceId],
    candidates: Sequence[DeviceId],
    count: int,
    free: Iterable[str] | None,
) -> list[DeviceId]:
    """The `count` candidates that go best with each other and with the GPUs chosen already.

    GPUs that the graph lacks (lost since they were offered) come only when no others are left.
    """
    size = sum(gpu in graph.position for gpu in members) + count
    best = choose(graph, available=[*members, *candidates], required=members, size=size, free=free)
    chosen = [gpu for gpu in best.chosen if gpu not in members]
    return chosen + [gpu for gpu in candidates if gpu not in chosen][: count - len(chosen)]
