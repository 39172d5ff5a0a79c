"""Why these GPUs, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rte.graph.build import Graph
from rte.graph.choose import Preference, RunnerUp
from rte.model import DeviceId, Level
from rte.view.reason import WORDS, names, said
from rte.view.words import CELLS, counted, speed

BETTER = {
    "alike": "all of one kind",
    "linked": "all reach each other over NVLink",
    "bottleneck": "the slowest pair is faster",
    "total": "the pairs are faster together",
    "numa_spread": "nearer to each other's memory",
    "sound": "fewer suspect links",
    "nics": "better served with NICs",
    "leftover": "leaves more to the next pod",
    "order": "the smaller PCI addresses",
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
    return f"{like}{apart(graph, preference, runner_up.preference, decided_by)} ({other})"


def likeness(preference: Preference) -> str:
    """How the members reach each other; nothing of a single GPU."""
    if len(preference.order) == 1:
        return ""
    return f"{pairs(preference)}; "


def pairs(preference: Preference) -> str:
    """The slowest pair, which a job waits for."""
    slowest = preference.bottleneck
    nvlink, level = slowest.nvlink_megabytes_per_s, CELLS[Level(slowest.level)]
    which = "" if len(preference.order) == 2 else "slowest pair "
    if nvlink:
        return f"{which}NVLink at {speed(nvlink)}"
    link = f" at {speed(slowest.link_megabytes_per_s)}" if slowest.link_megabytes_per_s else ""
    if preference.linked:
        return f"linked by NVLink over others, {which}PCIe {level}{link}"
    return f"{which}no NVLink, PCIe {level}{link}"


def apart(graph: Graph, better: Preference, worse: Preference, field: str) -> str:
    """The deciding field, with its value in either set."""
    if field == "linked":
        return f"{BETTER[field]}, not so the next best"
    one, other = (WORDS[field](getattr(of, field), graph) for of in (better, worse))
    return f"{BETTER[field]}: {one}; next best: {other}"


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
