"""Why these GPUs, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rte.graph.build import Closeness, Graph
from rte.graph.choose import Preference, RunnerUp
from rte.model import DeviceId, Level
from rte.view.reason import WORDS, names, said
from rte.view.words import CELLS, counted, speed

BETTER = {
    "alike": "all of one kind",
    "total": "the pairs together are the fastest",
    "numa_spread": "nearest to each other",
    "sound": "the fewest suspect links",
    "nics": "best served with NICs",
    "leftover": "most is left to the next pod",
}


def why(
    graph: Graph,
    preference: Preference,
    *,
    runner_up: RunnerUp | None,
    decided_by: str | None,
) -> str:
    """What the set is like, and what set it apart from the next best."""
    like = likeness(preference)
    if runner_up is None or decided_by is None:
        return f"{like}there was no other set"
    other = said(runner_up.chosen, names(graph))
    if decided_by == "order":
        return f"{like}{other} would do as well, the smaller PCI addresses decide"
    if decided_by == "linked":
        return f"{like}the next best, {other}, is not joined by NVLink"
    if decided_by == "bottleneck":
        one, two = preference.bottleneck, runner_up.preference.bottleneck
        return f"{like}the next best, {other}, has {falls_behind(one, two)}"
    one_value, two_value = (
        WORDS[decided_by](getattr(of, decided_by), graph)
        for of in (preference, runner_up.preference)
    )
    return f"{like}{BETTER[decided_by]}: {one_value}; the next best, {other}: {two_value}"


def likeness(preference: Preference) -> str:
    """How the members reach each other; nothing of a single GPU."""
    if len(preference.order) == 1:
        return ""
    return f"{pairs(preference)}; "


def pairs(preference: Preference) -> str:
    """The slowest pair, which a job waits for."""
    slowest = preference.bottleneck
    nvlink, level = slowest.nvlink_megabytes_per_s, CELLS[Level(slowest.level)]
    which = "" if len(preference.order) == 2 else "slowest pair: "
    if nvlink:
        return f"{which}NVLink at {speed(nvlink)}"
    link = f" at {speed(slowest.link_megabytes_per_s)}" if slowest.link_megabytes_per_s else ""
    if preference.linked:
        return f"NVLink over others, {which}PCIe {level}{link}"
    return f"{which}no NVLink, PCIe {level}{link}"


def falls_behind(better: Closeness, worse: Closeness) -> str:
    """In what a pair is worse than a better one."""
    if better.nvlink_megabytes_per_s != worse.nvlink_megabytes_per_s:
        nvlink = worse.nvlink_megabytes_per_s
        return f"NVLink at {speed(nvlink)} only" if nvlink else "no NVLink"
    if better.level != worse.level:
        one, two = (CELLS[Level(of.level)] for of in (better, worse))
        return f"PCIe {two}, not {one}"
    return f"PCIe at {speed(worse.link_megabytes_per_s)} only"


def beside(graph: Graph, chosen: Preference, others: Sequence[DeviceId], other: Preference) -> str:
    """What a set would have been instead of the chosen one, in which field it falls behind."""
    name = said(tuple(others), names(graph))
    field = next(
        (f for f in chosen._fields if getattr(chosen, f) != getattr(other, f)), chosen._fields[-1]
    )
    if len(chosen.order) > 1 and field in {"linked", "bottleneck", "total"}:
        return f"{name}: {pairs(other)}"
    return f"{name}: {WORDS[field](getattr(other, field), graph)} ({field})"


def devices(graph: Graph, ids: Sequence[DeviceId], *, most: int = 8) -> str:
    """Devices by their names; more than `most` as a number."""
    return said(tuple(ids), names(graph)) if len(ids) <= most else counted(len(ids), "device")
