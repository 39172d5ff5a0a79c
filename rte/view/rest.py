"""What a choice costs the rest of the node: which linked GPUs stay together, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rte.graph.build import Graph, Positions
from rte.graph.groups import components
from rte.graph.preference import bits
from rte.model import NumaId
from rte.view.words import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The free GPUs before and after a set is taken. Groups are what NVLink joins, by size."""

    taken: Mapping[int, int]  # groups that were whole and are all of the set
    broken: Mapping[int, int]  # groups that were whole and of which the set takes some
    whole: Mapping[int, int]  # groups that stay whole
    largest_linked: int  # free GPUs that still reach each other over NVLink, the most there are
    numa: Mapping[NumaId | None, int]  # free GPUs of each node; None: of those with no known node


def rest(graph: Graph, chosen: Iterable[str], free: Iterable[str]) -> Rest:
    """`free` are the GPUs free before; the chosen ones, slices and replicas too, count as free."""
    members = graph.positions(id.partition("::")[0] for id in chosen)
    before = graph.positions(free) | members
    after = before & ~members
    everyone = (1 << len(graph.gpus)) - 1
    whole = [group for group in components(graph, everyone) if not group & ~before]
    linked = [group.bit_count() for group in components(graph, after)]
    numa: Counter[NumaId | None] = Counter(dict.fromkeys(graph.numa, 0))
    numa.update(graph.numa[i] for i in bits(after))
    return Rest(
        taken=by_size(group for group in whole if not group & ~members),
        broken=by_size(group for group in whole if group & members and group & ~members),
        whole=by_size(group for group in whole if not group & members),
        largest_linked=max(linked, default=0),
        numa=dict(sorted(numa.items(), key=lambda item: (item[0] is None, item[0] or 0))),
    )


def by_size(groups: Iterable[Positions]) -> Mapping[int, int]:
    return dict(sorted(Counter(group.bit_count() for group in groups).items()))


def rest_said(found: Rest) -> str:
    """The same in a sentence."""
    words = [links_said(found), numa_said(found.numa)]
    return "; ".join(word for word in words if word)


def links_said(found: Rest) -> str:
    if not (found.taken or found.broken or found.whole):
        if found.largest_linked:
            return f"breaks nothing that was whole, {found.largest_linked} linked GPUs stay free"
        return "no NVLink to lose"
    words = [f"uses up {named(found.taken)}"] if found.taken else []
    pairs = {size: count for size, count in found.broken.items() if size == 2}
    larger = {size: count for size, count in found.broken.items() if size > 2}
    if pairs:
        words.append(f"breaks {named(pairs)}")
    if larger:
        words.append(f"takes from {named(larger)}")
    if not found.broken:
        words.append(f"breaks no {noun(found)}")
    if found.whole:
        one = sum(found.whole.values()) == 1
        words.append(f"{named(found.whole)} {'stays' if one else 'stay'} whole")
    elif found.largest_linked:
        words.append(f"{found.largest_linked} linked GPUs stay free")
    else:
        words.append("no linked GPUs stay free")
    return ", ".join(words)


def noun(found: Rest) -> str:
    sizes = {*found.taken, *found.whole}
    return "pair" if sizes == {2} else "NVLink group"


def named(groups: Mapping[int, int]) -> str:
    return " and ".join(
        counted(count, "pair")
        if size == 2
        else counted(count, f"group of {size}", f"groups of {size}")
        for size, count in groups.items()
    )


def numa_said(numa: Mapping[NumaId | None, int]) -> str:
    known = {node: count for node, count in numa.items() if node is not None}
    words = [f"{count} in NUMA node {node}" for node, count in known.items()]
    if None in numa:
        words.append(f"{numa[None]} of no known NUMA node")
    return f"GPUs that stay free: {', '.join(words)}" if len(words) > 1 else ""


def rest_document(found: Rest) -> dict[str, object]:
    """As `rte choose -o json` has it."""

    def sizes(groups: Mapping[int, int]) -> list[dict[str, int]]:
        return [{"gpus": size, "groups": count} for size, count in groups.items()]

    return {
        "groups_used_up": sizes(found.taken),
        "groups_broken": sizes(found.broken),
        "groups_whole": sizes(found.whole),
        "largest_linked": found.largest_linked,
        "free_by_numa_node": [
            {"numa_node": node, "gpus": count} for node, count in found.numa.items()
        ],
        "said": rest_said(found),
    }
