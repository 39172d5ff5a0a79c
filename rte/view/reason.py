"""Why these GPUs: a choice in words, beside the set that came closest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rte.graph.build import Closeness, Graph
from rte.graph.choose import Choice, Preference, RunnerUp
from rte.model import DeviceId, Level
from rte.view.words import CELLS, columns, counted, speed

MEANING = {
    "alike": "all members have one product and memory size",
    "linked": "all members reach each other over NVLink inside the set",
    "bottleneck": "the smallest closeness of a pair",
    "total": "the closeness of all pairs together",
    "numa_spread": "fewer NUMA nodes, then smaller distances",
    "sound": "fewer members with a suspect link",
    "nics": "members that can have a near, free compute NIC of their own",
    "leftover": "what the next pod can still get from the GPUs that stay free",
    "order": "the smaller PCI addresses",
}


def reason(graph: Graph, choice: Choice) -> str:
    """The set, each field of its preference, and where the runner-up falls behind."""
    if choice.preference is None:
        return "nothing to choose\n"
    name_of = names(graph)
    found = "exactly, of" if choice.exact else "by a bounded search, which looked at"
    lines = [
        f"{said(choice.chosen, name_of)}   ({found} {counted(choice.considered, 'set')})",
        *(f"  {id}" for id in choice.chosen if name_of.get(id) != id),
        "",
    ]
    header = ["", "chosen"]
    rows = [[field, words] for field, words in described(choice.preference, graph)]
    if choice.runner_up is not None:
        header.append(f"runner-up: {said(choice.runner_up.chosen, name_of)}")
        other = described(choice.runner_up.preference, graph)
        for row, (field, words) in zip(rows, other, strict=True):
            row.append(words)
            row[0] = f"> {field}" if field == choice.decided_by else f"  {field}"
    lines += columns([header, *rows])
    lines.append("")
    if choice.decided_by is None:
        lines.append("There is no other set.")
    else:
        lines.append(f"Decided by {choice.decided_by}: {MEANING[choice.decided_by]}.")
    return "".join(f"{line}\n" for line in lines)


def names(graph: Graph) -> dict[str, str]:
    """gpu-<number> by the id of a GPU, and <that>/<profile> by the id of a MIG slice."""
    found: dict[str, str] = {}
    for id, gpu in zip(graph.ids, graph.gpus, strict=True):
        found[id] = gpu.name
        found.update({slice.id: f"{gpu.name}/{slice.profile}" for slice in gpu.slices})
    return found


def said(ids: tuple[DeviceId, ...], name_of: dict[str, str]) -> str:
    return " ".join(part_name(id, name_of) for id in ids)


def part_name(id: str, name_of: dict[str, str]) -> str:
    whole, mark, number = id.partition("::")
    return name_of.get(whole, whole) + mark + number


def described(preference: Preference, graph: Graph) -> Iterator[tuple[str, str]]:
    """Each field with its value in words."""
    single = len(preference.order) == 1
    for field in preference._fields:
        if single and field in {"alike", "linked", "bottleneck", "total", "numa_spread", "sound"}:
            yield field, "-"
        else:
            yield field, WORDS[field](getattr(preference, field), graph)


def closeness(pair: Closeness, graph: Graph) -> str:
    nvlink = f"NVLink {speed(pair.nvlink_megabytes_per_s)}" if pair[0] else "no NVLink"
    link = speed(pair.link_megabytes_per_s) if pair.link_megabytes_per_s else "unknown"
    return f"{nvlink}, {CELLS[Level(pair.level)]}, PCIe {link}"


def total(pair: Closeness, graph: Graph) -> str:
    nvlink = f"NVLink {speed(pair.nvlink_megabytes_per_s)}" if pair[0] else "no NVLink"
    return f"{nvlink}, levels {pair.level}, PCIe {speed(pair.link_megabytes_per_s)}"


def spread(value: tuple[int, int], graph: Graph) -> str:
    return f"{counted(-value[0], 'NUMA node')}, distances {-value[1]}"


def nics(value: tuple[int, int], graph: Graph) -> str:
    if min(value) < 0:
        return f"takes one of {'its switch' if value[0] else 'its NUMA node'} from others"
    return f"{value[0]} on their switch, {value[1]} in their NUMA node"


def leftover(value: tuple[int, tuple[int, ...], tuple[int, ...]], graph: Graph) -> str:
    nvlink, nodes, switches = value
    words = [f"NVLink {speed(nvlink)}" if nvlink else "no NVLink"]
    words.append("NUMA " + (",".join(map(str, nodes)) or "-"))
    if switches:
        words.append("switches " + ",".join(map(str, switches)))
    return ", ".join(words)


WORDS: dict[str, Any] = {
    "alike": lambda value, graph: "one product" if value else "mixed products",
    "linked": lambda value, graph: "yes" if value else "no",
    "bottleneck": closeness,
    "total": total,
    "numa_spread": spread,
    "sound": lambda value, graph: counted(-value, "suspect member") if value else "all",
    "nics": nics,
    "leftover": leftover,
    "order": lambda value, graph: " ".join(graph.gpus[-i].name for i in value),
}


def choice_document(choice: Choice) -> dict[str, Any]:
    """The choice as plain JSON values: the contract of `rte choose -o json`."""
    return {
        "chosen": list(choice.chosen),
        "exact": choice.exact,
        "considered": choice.considered,
        "decided_by": choice.decided_by,
        "preference": preference_document(choice.preference),
        "runner_up": runner_up_document(choice.runner_up),
    }


def runner_up_document(runner_up: RunnerUp | None) -> dict[str, Any] | None:
    if runner_up is None:
        return None
    return {
        "chosen": list(runner_up.chosen),
        "preference": preference_document(runner_up.preference),
    }


def preference_document(preference: Preference | None) -> dict[str, Any] | None:
    if preference is None:
        return None
    nvlink, nodes, switches = preference.leftover
    return {
        "alike": preference.alike,
        "linked": preference.linked,
        "bottleneck": preference.bottleneck._asdict(),
        "total": preference.total._asdict(),
        "numa_spread": {
            "nodes": -preference.numa_spread[0],
            "distance": -preference.numa_spread[1],
        },
        "sound": {"suspects": -preference.sound},
        "nics": {"switch": preference.nics[0], "numa": preference.nics[1]},
        "leftover": {
            "nvlink_megabytes_per_s": nvlink,
            "gpus_by_numa_node": list(nodes),
            "gpus_by_switch": list(switches),
        },
        "order": [-i for i in preference.order],
    }
