"""The graph in Graphviz's language."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from rte.graph.build import Graph
from rte.graph.groups import Group
from rte.model import Gpu, Nic, PciAddress, is_made_up, ranges
from rte.view.colours import GREY, group_colour
from rte.view.parts import Leaf, Switch, group_of, pairs, places, switch_lanes
from rte.view.words import speed


def dot(graph: Graph, groups: Sequence[Group]) -> str:
    """NUMA nodes are clusters; PCIe is thin and grey, NVLink as wide as it is fast."""
    return "".join(f"{line}\n" for line in lines(graph, groups))


def lines(graph: Graph, groups: Sequence[Group]) -> Iterator[str]:
    member = group_of(groups)
    yield "graph machine {"
    yield '  graph [compound=true, fontname="sans-serif", layout=dot, rankdir=TB, ranksep=0.6];'
    yield '  node [fontname="sans-serif", fontsize=11, shape=box, style="rounded,filled"];'
    yield '  edge [fontname="sans-serif", fontsize=9, color="#94a3b8"];'
    numbers = count()
    for place in places(graph):
        name = "numa_unknown" if place.id is None else f"numa_{place.id}"
        title = "NUMA node unknown" if place.id is None else f"NUMA node {place.id}"
        if place.node and place.node.cpus:
            title += f"\nCPUs {ranges(place.node.cpus)}"
        yield f"  subgraph cluster_{name} {{"
        yield f'    label={quoted(title)}; style="rounded"; color="#94a3b8";'
        yield f'    {name} [label="", shape=point, style=invis];'
        for child in place.children:
            yield from below(child, name, graph, member, numbers)
        yield "  }"
    yield from links(graph, groups, member)
    yield "}"


def below(
    child: Switch | Leaf,
    parent: str,
    graph: Graph,
    member: Mapping[PciAddress, int],
    numbers: Iterator[int],
) -> Iterator[str]:
    edge = " [style=invis]" if parent.startswith("numa_") else ""
    if isinstance(child, Switch):
        name = f"switch_{next(numbers)}"
        label = "PCIe switch" if is_made_up(child.address) else f"PCIe switch\n{child.address}"
        yield f'    {name} [label={quoted(label)}, fillcolor="#e2e8f0"];'
        yield f"    {parent} -- {name}{edge};"
        for inner in child.children:
            yield from below(inner, name, graph, member, numbers)
        return
    if child.gpu is not None:
        name = gpu_name(child.gpu)
        yield f"    {name} [{gpu_words(child.gpu, member)}];"
    else:
        assert child.nic is not None
        name = f"nic_{next(numbers)}"
        yield f'    {name} [label={quoted(nic_label(child.nic))}, fillcolor="#f8fafc"];'
    yield f"    {parent} -- {name}{edge};"


def gpu_name(gpu: Gpu) -> str:
    return f"gpu_{gpu.number}"


def gpu_words(gpu: Gpu, member: Mapping[PciAddress, int]) -> str:
    lines = [gpu.name, *([] if is_made_up(gpu.pci) else [gpu.pci])]
    if gpu.lost is not None:
        lines.append(f"lost: {gpu.lost}")
        return f'label={quoted(chr(10).join(lines))}, style="rounded,dashed"'
    colour = group_colour(member[gpu.pci]) if gpu.pci in member else GREY
    return f'label={quoted(chr(10).join(lines))}, fillcolor="{colour.light}", color="{colour.dark}"'


def nic_label(nic: Nic) -> str:
    rate = f"\n{nic.rate_megabits_per_s / 1000:g} Gb/s" if nic.rate_megabits_per_s else ""
    return nic.name + rate


def links(graph: Graph, groups: Sequence[Group], member: Mapping[PciAddress, int]) -> Iterator[str]:
    for pair in pairs(graph):
        a, b = graph.gpus[pair.a], graph.gpus[pair.b]
        tint = group_colour(member[a.pci]).dark if a.pci in member else GREY.dark
        style = "solid" if pair.agreed else "dashed"
        yield (
            f'  {gpu_name(a)} -- {gpu_name(b)} [color="{tint}", penwidth={width(pair.lanes):g}, '
            f'label="NV{pair.lanes}", style={style}, constraint=false];'
        )
    for number, group in enumerate(groups):
        inside = [g for g in graph.gpus if g.pci in group.gpus and switch_lanes(g)]
        if len(inside) < 2:
            continue
        colour = group_colour(number)
        hub = f"nvswitch_{number}"
        yield (
            f"  {hub} [label={quoted(f'NVSwitch{chr(10)}{group.name}')}, shape=ellipse, "
            f'style=filled, fillcolor="{colour.light}", color="{colour.dark}"];'
        )
        for gpu in inside:
            lanes = switch_lanes(gpu)
            each = max(end.lane_megabytes_per_s for end in gpu.links)
            yield (
                f'  {gpu_name(gpu)} -- {hub} [color="{colour.dark}", penwidth={width(lanes):g}, '
                f"tooltip={quoted(f'{lanes} lanes, {speed(lanes * each)}')}];"
            )


def width(lanes: int) -> float:
    return round(1 + lanes / 4, 2)


def quoted(text: str) -> str:
    """A string of Graphviz's, whatever is in it."""
    plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
