"""The graph for people on a terminal: where everything hangs, the NVLink groups, the matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from rte.graph.build import Graph
from rte.graph.groups import Group
from rte.model import Gpu, Machine, Nic, NumaId, NumaSource, PciAddress, is_made_up, ranges
from rte.view.relations import relations
from rte.view.words import columns, counted, size, speed

WIDTH = 100


class Item(NamedTuple):
    """A GPU or NIC with its place and its line."""

    place: tuple[str, ...]  # root complex, then bridges down to it
    cells: tuple[str, ...]


class Branch(NamedTuple):
    """What hangs together: a host bridge or a PCIe switch, with items and further branches."""

    name: str
    children: tuple[Branch | Item, ...]


def text(graph: Graph, groups: Sequence[Group]) -> str:
    """At most WIDTH columns, but for what cannot be broken (a product's name, many GPUs)."""
    parts = [
        summary(graph.machine),
        *numa_parts(graph, groups),
        group_part(graph, groups),
        *matrix_parts(graph),
        notes("Overridden", graph.machine.overridden),
        notes("Not known", graph.machine.unknown),
    ]
    return "\n".join("".join(f"{line}\n" for line in part) for part in parts if part)


def summary(machine: Machine) -> list[str]:
    products = Counter(what(gpu) for gpu in machine.gpus if gpu.lost is None)
    words = [f"{count}x {name}" for name, count in sorted(products.items())] or ["no GPUs"]
    lost = sum(gpu.lost is not None for gpu in machine.gpus)
    if lost:
        words.append(f"{lost} lost")
    bearing = sum(bool(node.cpus) for node in machine.numa_nodes)
    untold = sum(not node.cpus_known for node in machine.numa_nodes)
    if untold:
        words.append(counted(bearing + untold, "NUMA node"))
    else:
        words.append(counted(bearing, "NUMA node with CPUs", "NUMA nodes with CPUs"))
    if machine.nics:
        words.append(counted(len(machine.nics), "NIC"))
    if machine.driver:
        words.append(f"driver {machine.driver}")
    return wrapped(", ".join(words), WIDTH)


def what(gpu: Gpu) -> str:
    memory = f" ({size(gpu.memory_bytes)})" if gpu.memory_bytes else ""
    return (gpu.product or "GPU") + memory


# The tree


def numa_parts(graph: Graph, groups: Sequence[Group]) -> Iterator[list[str]]:
    machine = graph.machine
    items = [*gpu_items(graph, groups), *nic_items(graph)]
    reserved: list[NumaId] = []
    memory: list[tuple[str, ...]] = []
    for node in machine.numa_nodes:
        here = [item for at, item in items if at == node.id]
        if not (here or node.cpus or node.memory_bytes or node.gpu):
            reserved.append(node.id)
            continue
        amount = size(node.memory_bytes) if node.memory_bytes else ""
        if not (here or node.cpus):
            owner = next((gpu.name for gpu in machine.gpus if gpu.pci == node.gpu), node.gpu)
            what = f"memory of {owner}" if owner else "memory without CPUs"
            memory.append((f"NUMA node {node.id}", amount, what))
            continue
        cpus = f"CPUs {ranges(node.cpus)}" if node.cpus else "no CPUs"
        if not node.cpus_known:
            cpus = ""
        yield ["  ".join(filter(None, (f"NUMA node {node.id}", cpus, amount))), *tree(here)]
    if reserved:
        memory.append((f"NUMA nodes {ranges(reserved)}", "", "empty"))
    if memory:
        yield columns(memory)
    rest = [
        item for at, item in items if at is None or at not in {n.id for n in machine.numa_nodes}
    ]
    if rest:
        yield ["NUMA node unknown", *tree(rest)]


def gpu_items(graph: Graph, groups: Sequence[Group]) -> Iterator[tuple[NumaId | None, Item]]:
    group_of = {pci: group.name for group in groups for pci in group.gpus}
    mixed = len({what(gpu) for gpu in graph.gpus}) > 1
    for gpu in graph.machine.gpus:
        device = graph.tree.devices.get(gpu.pci)
        numa = device.numa if device else None
        words = [f"LOST: {gpu.lost}"] if gpu.lost else gpu_words(gpu)
        if mixed and not gpu.lost:
            words.insert(0, what(gpu))
        if device and device.link and not gpu.lost:
            words.append(f"PCIe {speed(device.link.megabytes_per_s)}")
        words += inferred(device.numa_from if device else None)
        cells = (gpu.name, known(gpu.pci), group_of.get(gpu.pci, ""), ", ".join(words))
        yield numa, Item(place(graph, gpu.pci), cells)


def gpu_words(gpu: Gpu) -> list[str]:
    words = []
    if gpu.links_down:
        words.append(f"{counted(gpu.links_down, 'NVLink')} down")
    if gpu.mig_enabled:
        slices = Counter(slice.profile for slice in gpu.slices)
        words.append(
            "MIG " + (", ".join(f"{n}x {p}" for p, n in slices.items()) or "without slices")
        )
    return words


def nic_items(graph: Graph) -> Iterator[tuple[NumaId | None, Item]]:
    """NICs in PCI order; virtual functions are a number on the line of their card."""
    present = {nic.pci for nic in graph.machine.nics}
    for nic in graph.machine.nics:
        if nic.physical_function is not None and nic.physical_function in present:
            continue
        device = graph.tree.devices.get(nic.pci) if nic.pci else None
        words = nic_words(nic)
        words += inferred(device.numa_from if device else None)
        cells = (nic.name, known(nic.pci) if nic.pci else nic.kind, "", ", ".join(words))
        yield (
            device.numa if device else nic.numa,
            Item(place(graph, nic.pci) if nic.pci else (), cells),
        )


def nic_words(nic: Nic) -> list[str]:
    words = [name for name in (*nic.rdma, *nic.netdevs) if name != nic.name]
    if nic.members:
        words.append("of " + " ".join(nic.members))
    if nic.rate_megabits_per_s:
        words.append(f"{nic.rate_megabits_per_s / 1000:g} Gb/s")
    if nic.up is False:
        words.append("down")
    if nic.virtual_functions:
        words.append(counted(nic.virtual_functions, "virtual function"))
    return words


def inferred(source: NumaSource | None) -> list[str]:
    """A NUMA node that the device itself does not state is marked."""
    if source is None or source in (NumaSource.SYSFS, NumaSource.SOURCE):
        return []
    if source is NumaSource.OVERRIDE:
        return ["NUMA node by override"]
    if source is NumaSource.RELATION:
        return ["NUMA node as its neighbours"]
    return [f"NUMA node inferred from {source}"]


def known(address: PciAddress) -> str:
    return "" if is_made_up(address) else address


def place(graph: Graph, address: PciAddress) -> tuple[str, ...]:
    device = graph.tree.devices.get(address)
    if device is None:
        return ()
    return (device.root, *reversed(graph.tree.bridges[address]))


def tree(items: Sequence[Item]) -> list[str]:
    """The items under the host bridges and switches that two or more of them share.

    Items start in one column, however deep they hang; what is too long goes on below itself.
    """
    lines = [*drawn(branches(items, 0), "")]
    if not lines:
        return []
    deepest = max(len(lead) for lead, _ in lines)
    heads = iter(columns([[*cells[:-1], ""] for _, cells in lines if len(cells) > 1] or [[""]]))
    room = max(len(line) for line in columns([[*c[:-1], "."] for _, c in lines if len(c) > 1]))
    found = []
    for lead, cells in lines:
        if len(cells) == 1:
            found.append(lead + cells[0])
            continue
        head = next(heads).ljust(room - 1)
        start = lead.rstrip().ljust(deepest - 1, "─") + " "
        below = lead.replace("├─", "│ ").replace("└─", "  ").ljust(deepest)
        for row in wrapped(cells[-1], WIDTH - deepest - len(head)):
            found.append((start + head + row).rstrip())
            start, head = below, " " * len(head)
    return found


def wrapped(words: str, width: int) -> list[str]:
    rows = [""]
    for word in words.split(", "):
        longer = f"{rows[-1]}, {word}" if rows[-1] else word
        if rows[-1] and len(longer) > width:
            rows[-1] += ","
            rows.append(word)
        else:
            rows[-1] = longer
    return rows


def branches(items: Sequence[Item], depth: int) -> tuple[Branch | Item, ...]:
    """Items by what they share at a depth of their places; what only one has is left out."""
    found: dict[str, list[Item]] = {}
    for item in items:
        # An item that hangs from this very point is alone under a name of its own.
        key = item.place[depth] if len(item.place) > depth else f"\0{len(found)}"
        found.setdefault(key, []).append(item)
    children: list[Branch | Item] = []
    for name, below in found.items():
        if len(below) == 1:
            children.append(below[0])
            continue
        if card := card_of(below):
            children.append(Branch(card, tuple(below)))
            continue
        inner = branches(below, depth + 1)
        # What holds nothing but one switch is passed over: the switch says it all.
        passed = len(inner) == 1 and isinstance(inner[0], Branch)
        children += inner if passed else [Branch(kind(name), inner)]
    return tuple(children)


def card_of(items: Sequence[Item]) -> str | None:
    """What to call the functions of one card, such as a NIC's two ports."""
    slots = {item.cells[1].rpartition(".")[0] for item in items}
    return f"card {slots.pop()}" if len(slots) == 1 and "" not in slots else None


def kind(name: str) -> str:
    if ":" not in name:
        return "host bridge"
    if is_made_up(PciAddress(name)):
        return "switch"
    return f"host bridge {name}" if name.startswith("pci") else f"switch {name}"


def drawn(children: Sequence[Branch | Item], indent: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for at, child in enumerate(children):
        last = at == len(children) - 1
        lead = indent + ("└─ " if last else "├─ ")
        if isinstance(child, Item):
            yield lead, child.cells
            continue
        yield lead, (child.name,)
        yield from drawn(child.children, indent + ("   " if last else "│  "))


# Groups and matrix


def group_part(graph: Graph, groups: Sequence[Group]) -> list[str]:
    if not groups:
        return []
    at = {gpu.pci: i for i, gpu in enumerate(graph.gpus)}
    number = {gpu.pci: gpu.number for gpu in graph.machine.gpus}
    rows = []
    for group in groups:
        members = [at[pci] for pci in group.gpus if pci in at]
        pairs = [(i, j) for i, j in combinations(members, 2) if graph.adjacent[i] >> j & 1]
        lanes = sorted({min(graph.lanes[i][j], graph.lanes[j][i]) for i, j in pairs})
        speeds = sorted({graph.closeness[i][j].nvlink_megabytes_per_s for i, j in pairs})
        words = []
        if lanes:
            words.append(f"{ranges_of(lanes)} lanes a linked pair")
            words.append(
                speed(speeds[0])
                if len(speeds) == 1
                else f"{speed(speeds[0])} to {speed(speeds[-1])}"
            )
        rows.append(
            (
                f"  {group.name}",
                f"{group.shape} of {len(group.gpus)}",
                f"gpu {ranges(sorted(number[pci] for pci in group.gpus))}",
                ", ".join(words),
            )
        )
    fabrics: dict[str, list[str]] = {}
    for group in groups:
        if group.domain:
            fabrics.setdefault(group.domain, []).append(group.name)
    return [
        "NVLink groups",
        *columns(rows),
        *(
            f"  {group.name} is degraded by gpu {ranges(sorted(number[p] for p in group.degraded))}"
            for group in groups
            if group.degraded
        ),
        *(f"  fabric {domain} joins {' '.join(names)}" for domain, names in fabrics.items()),
    ]


def ranges_of(lanes: Sequence[int]) -> str:
    return str(lanes[0]) if len(lanes) == 1 else f"{lanes[0]} to {lanes[-1]}"


def matrix_parts(graph: Graph) -> Iterator[list[str]]:
    """GPUs against GPUs and then against RDMA devices, in blocks that fit the width."""
    found = relations(graph)
    gpus = len(graph.gpus)
    if not gpus:
        return
    labels = [*found.names[:gpus], *(device for _, device in found.nics)]
    if gpus > 1:
        yield from block(found.matrix, labels, range(gpus), gpus)
    yield from block(found.matrix, labels, range(gpus, len(labels)), gpus)


def block(
    matrix: Sequence[Sequence[str]], labels: Sequence[str], across: range, gpus: int
) -> Iterator[list[str]]:
    start, label = across.start, max(map(len, labels[:gpus]))
    while start < across.stop:
        room, end = WIDTH - label, start
        while end < across.stop and room >= (width := max(len(labels[end]), 4) + 2):
            room, end = room - width, end + 1
        shown = range(start, max(end, start + 1))
        rows = [("", *(labels[j] for j in shown))]
        rows += [(labels[i], *(matrix[i][j] for j in shown)) for i in range(gpus)]
        yield columns(rows)
        start = shown.stop


def notes(title: str, said: Sequence[str]) -> list[str]:
    return [title, *(f"  {line}" for line in said)] if said else []
