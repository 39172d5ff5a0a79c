"""Whether a reading of the kubelet can be believed, or should be looked at again first. Pure.

For a moment after an admission or a restart PodResources lists less than the kubelet has handed
out: a pod that is just being given devices is listed without them, a kubelet that has just started
lists no pods, and a resource whose plugin has not registered again has no devices. Publishing that
moment would offer a scheduler what is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rte.kubelet.memory import held_memory
from rte.kubelet.state import HandedOut, Holder
from rte.model import Allocatable, MemoryBlock, PodName, PodUse, Usage

Thing = tuple[object, ...]
"""One device, CPU or block of memory, as both PodResources and the state files name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One reading of all that the kubelet says of itself."""

    usage: Usage
    allocatable: Allocatable
    handed_out: HandedOut


class Patience(StrEnum):
    """How long a doubt lasts."""

    SHORT = "short"
    """As likely a fact as a passing moment: the last pod may have ended."""
    USUAL = "usual"
    LONG = "long"
    """The kubelet has just started: it is still to hear of its pods and its plugins."""


class Doubt(NamedTuple):
    why: str
    patience: Patience = Patience.USUAL


def doubt(
    look: Look,
    *,
    before: Look | None,
    restarted: bool,
    running: frozenset[PodName] | None = None,
    ended: frozenset[str] = frozenset(),
) -> Doubt | None:
    """Why a look should be repeated before it is believed, or None.

    `before` is the last look that was believed, `restarted` whether the kubelet has started anew
    since, `running` the pods of this node that have not ended, or None where nobody tells of them,
    `ended` the UIDs of those that have. What the files keep of pods that have ended is no reason:
    it was in the files before, and of a rejected pod it is soon told that it has failed. After a
    restart it is one, for all pods that ran before come back one by one.
    """
    had_pods = before is not None and before.usage.pods
    could_have = had_pods or (before is None and _things(look.handed_out))
    if not look.usage.pods and could_have and running != frozenset():
        why = "PodResources lists no pods, though pods ran"
        return Doubt(why, Patience.LONG if restarted else Patience.SHORT)
    if before is None:
        return None
    if gone := _resources(before.allocatable) - _resources(look.allocatable):
        why = f"PodResources offers no {', '.join(sorted(gone))} any more"
        return Doubt(why, Patience.LONG if restarted else Patience.USUAL)
    if unread := look.handed_out.unread.keys() - before.handed_out.unread.keys():
        return Doubt(f"{', '.join(sorted(map(str, unread)))} cannot be read any more")
    if not restarted and before.allocatable.cpus and not look.allocatable.cpus:
        return Doubt("PodResources offers no CPUs any more")
    if not restarted and look.handed_out == before.handed_out:
        return None  # nothing has come
    listed = frozenset(_listed(look.usage.pods))
    held = _things(look.handed_out, but=ended)
    missing = {(holder, thing) for holder, thing in held if thing not in listed}
    known = _things(before.handed_out, but=ended)
    if restarted:
        come_back = (p for p in before.usage.pods if running is None or p.pod in running)
        listed_before = frozenset(_listed(come_back))
        if late := {pair for pair in missing & known if pair[1] in listed_before}:
            return Doubt(_unlisted(late), Patience.LONG)
    fresh = {pair for pair in missing - known if not is_memory(pair[1])}
    fresh |= _fresh_memory(look, before, ended)
    return Doubt(_unlisted(fresh)) if fresh else None


def _fresh_memory(look: Look, before: Look, ended: frozenset[str]) -> set[tuple[Holder, Thing]]:
    """Blocks that have come into the file and that the list does not have yet.

    Blocks have no ids: of like ones the list has first those that were in the file before, but for
    as many as it did not list then either, which are of pods that have ended.
    """
    listed, listed_before = _blocks(look.usage), _blocks(before.usage)
    old_holders = set(_memory(before.handed_out, but=ended))
    old: Counter[MemoryBlock] = Counter()
    new: dict[MemoryBlock, list[Holder]] = {}
    for holder, block in _memory(look.handed_out, but=ended):
        if (holder, block) in old_holders:
            old[block] += 1
        else:
            new.setdefault(block, []).append(holder)
    fresh: set[tuple[Holder, Thing]] = set()
    for block, holders in new.items():
        listed_of_old = min(old[block], listed_before[block])
        lacking = len(holders) - max(0, listed[block] - listed_of_old)
        fresh.update((holder, ("memory", block)) for holder in holders[: max(0, lacking)])
    return fresh


def _unlisted(pairs: set[tuple[Holder, Thing]]) -> str:
    pods = {holder[0] for holder, _ in pairs}
    return (
        f"PodResources does not list {len(pairs)} allocations of {len(pods)} pods that are in "
        "the kubelet's state files"
    )


def _resources(allocatable: Allocatable) -> set[str]:
    return {device.resource for device in allocatable.devices}


def is_memory(thing: Thing) -> bool:
    return thing[0] == "memory"


def _things(
    handed_out: HandedOut, *, but: frozenset[str] = frozenset()
) -> set[tuple[Holder, Thing]]:
    """What the files say is held, each with its holder; `but` are UIDs that do not count."""
    held: set[tuple[Holder, Thing]] = set()
    for holder, devices in handed_out.devices.items():
        held.update((holder, ("device", *device)) for device in devices)
    for holder, cpus in handed_out.cpus.items():
        held.update((holder, ("cpu", cpu)) for cpu in cpus)
    every = list(_memory(handed_out, but=but))
    numbers = _numbered(block for _, block in every)
    held.update((holder, thing) for (holder, _), thing in zip(every, numbers, strict=True))
    return {(holder, thing) for holder, thing in held if holder[0] not in but}


def _memory(handed_out: HandedOut, *, but: frozenset[str]) -> Iterator[tuple[Holder, MemoryBlock]]:
    for holder, block in held_memory(handed_out):
        if holder[0] not in but:
            yield holder, block


def _blocks(usage: Usage) -> Counter[MemoryBlock]:
    return Counter(block for pod in usage.pods for block in pod.memory_blocks())


def _listed(pods: Iterable[PodUse]) -> Iterator[Thing]:
    blocks: list[MemoryBlock] = []
    for pod in pods:
        blocks += pod.memory_blocks()
        yield from (("cpu", cpu) for cpu in pod.cpus)
        for container in (*pod.containers, *pod.ended):
            yield from (("cpu", cpu) for cpu in container.cpus)
            yield from (("device", use.resource, use.id) for use in container.devices)
    yield from _numbered(blocks)


def _numbered(blocks: Iterable[MemoryBlock]) -> Iterator[Thing]:
    """Memory has no ids: the second block of one kind and size is another thing than the first."""
    seen: Counter[MemoryBlock] = Counter()
    for block in blocks:
        seen[block] += 1
        yield "memory", block, seen[block]
