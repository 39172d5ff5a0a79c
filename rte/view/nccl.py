"""The machine as a topology file that NCCL can be given (NCCL_TOPO_FILE).

What is not known is left out, and NCCL looks it up on the machine itself. A PCIe switch is one
<pci>, as NCCL walks two of the kernel's steps at a time; root ports are left out. Files were read
by NCCL 2.30's own parser and graph; its limits are kept here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import quoteattr

from rte.graph.build import Graph
from rte.graph.tree import PciTree
from rte.model import (
    CpuId,
    Gpu,
    LinkPeer,
    Nic,
    NumaId,
    PciAddress,
    PciDevice,
    is_made_up,
    pci_order,
)

HIDDEN = "fffffff:ffff:ff"  # how NCCL spells a switch that the driver hides
MOST_ELEMENTS = 256  # NCCL_TOPO_XML_MAX_NODES; what NCCL adds itself counts too
LONGEST_VALUE = 255  # MAX_STR_LEN
FASTEST_NVLINK_OF_POWER = 25_000  # MB/s a lane; what is faster to a CPU is Grace's C2C
TCLASS = {LinkPeer.GPU: "0x030200", LinkPeer.SWITCH: "0x068000", LinkPeer.CPU: "0x068001"}
GENERATIONS = (  # NCCL's bandwidth of a lane goes by compute capability
    (r"P100", 60),
    (r"V100", 70),
    (r"A(?:30|100|800)", 80),
    (r"A(?:2|10|10G|16|40|4000|4500|5000|6000)|RTX 30[0-9]0", 86),
    (r"L(?:4|20|40|40S)|RTX 40[0-9]0|Ada", 89),
    (r"G?H(?:20|100|200|800)", 90),
    (r"G?B(?:100|200)", 100),
    (r"G?B300", 103),
)


class NotForNccl(ValueError):
    """A machine that NCCL cannot be told of: without PCI addresses, or too large for its reader."""


def nccl(graph: Graph) -> str:
    """The topology file. Raises NotForNccl."""
    if any(is_made_up(gpu.pci) for gpu in graph.machine.gpus):
        raise NotForNccl(
            "NCCL finds everything by PCI address, and this source has none; use NCCL's own dump, "
            "hwloc's XML or a recorded machine"
        )
    # All switches are one to NCCL: where room is scarce each GPU has its lanes to one.
    for merged in (False, True):
        found = list(lines(graph, merged=merged))
        count = sum(not line.lstrip().startswith("</") for line in found)
        if count <= MOST_ELEMENTS * 3 // 4 or (merged and count <= MOST_ELEMENTS):
            return "".join(f"{line}\n" for line in found)
    raise NotForNccl(f"{count} elements; NCCL reads at most {MOST_ELEMENTS} of a topology file")


def lines(graph: Graph, *, merged: bool) -> Iterator[str]:
    yield '<system version="1">'
    shown = [gpu.pci for gpu in graph.gpus]
    shown += [nic.pci for nic in graph.machine.nics if nic.pci and nic.physical_function is None]
    below, tops = nested(graph.tree, [pci for pci in shown if pci in graph.tree.devices])
    nodes = {node.id: node for node in graph.machine.numa_nodes}
    here: dict[NumaId | None, list[PciAddress]] = {}
    for top in tops:
        here.setdefault(graph.tree.devices[top].numa, []).append(top)
    for id in sorted(
        {*here, *(n.id for n in nodes.values() if n.cpus or not n.cpus_known)}, key=by_id
    ):
        node = nodes.get(id) if id is not None else None
        words = {"numaid": str(-1 if id is None else id)}
        if node and node.cpus and len(said := mask(node.cpus, most=max_cpu(graph))) < LONGEST_VALUE:
            words["affinity"] = said
        if not here.get(id):
            yield element("cpu", words, "  ", empty=True)
            continue
        yield element("cpu", words, "  ")
        for top in here[id]:
            yield from pci(graph, top, below, "    ", merged=merged)
        yield "  </cpu>"
    yield "</system>"


def by_id(id: NumaId | None) -> tuple[bool, int]:
    return id is None, id or 0


def max_cpu(graph: Graph) -> int:
    return max((node.cpus[-1] for node in graph.machine.numa_nodes if node.cpus), default=0)


def mask(cpus: Sequence[CpuId], *, most: int) -> str:
    """Words of 32 bits, the most significant first, as in sysfs's local_cpus."""
    words = most // 32 + 1
    bits = sum(1 << cpu for cpu in cpus)
    return ",".join(f"{bits >> 32 * n & 0xFFFFFFFF:08x}" for n in reversed(range(words)))


def nested(
    tree: PciTree, functions: Sequence[PciAddress]
) -> tuple[Mapping[PciAddress, list[PciAddress]], list[PciAddress]]:
    """What hangs below each switch, and what hangs below none, in PCI order.

    A switch is the second bridge above; a bridge that is alone is a root port. A source that names
    no addresses of a switch still has its upstream port, which stands for it.
    """
    below: dict[PciAddress, list[PciAddress]] = {}
    tops: list[PciAddress] = []
    known = set(functions)
    left = list(functions)
    while left:
        address = left.pop()
        above = tree.bridges[address]
        switch = above[1] if len(above) > 1 else None
        (tops if switch is None else below.setdefault(switch, [])).append(address)
        if switch is not None and switch not in known:
            known.add(switch)
            left.append(switch)
    for members in below.values():
        members.sort(key=pci_order)
    return below, sorted(tops, key=pci_order)


def pci(
    graph: Graph,
    address: PciAddress,
    below: Mapping[PciAddress, list[PciAddress]],
    indent: str,
    *,
    merged: bool,
) -> Iterator[str]:
    device = graph.tree.devices[address]
    gpu = next((g for g in graph.gpus if g.pci == address), None)
    cards = [n for n in graph.machine.nics if n.pci == address and (n.rdma or n.netdevs)]
    inner = [
        *(gpu_lines(gpu, graph, f"{indent}  ", merged=merged) if gpu else ()),
        *(line for nic in cards for line in nic_lines(nic, graph, f"{indent}  ")),
        *(
            line
            for member in below.get(address, ())
            for line in pci(graph, member, below, indent + "  ", merged=merged)
        ),
    ]
    yield element("pci", pci_words(device), indent, empty=not inner)
    if inner:
        yield from inner
        yield f"{indent}</pci>"


def pci_words(device: PciDevice) -> dict[str, str]:
    words = {"busid": device.address, "class": f"0x{device.class_code:06x}"}
    if device.vendor:
        words["vendor"] = f"0x{device.vendor:04x}"
    if device.device:
        words["device"] = f"0x{device.device:04x}"
    if device.link:
        words["link_speed"] = f"{device.link.gigatransfers:.1f} GT/s PCIe"
        words["link_width"] = str(device.link.width)
    return words


def gpu_lines(gpu: Gpu, graph: Graph, indent: str, *, merged: bool) -> Iterator[str]:
    words = {} if gpu.index is None else {"dev": str(gpu.index)}
    if (generation := compute_capability(gpu)) is not None:
        words["sm"] = str(generation)
    links = list(link_lines(gpu, graph, f"{indent}  ", merged=merged))
    yield element("gpu", words, indent, empty=not links)
    yield from links
    if links:
        yield f"{indent}</gpu>"


def link_lines(gpu: Gpu, graph: Graph, indent: str, *, merged: bool) -> Iterator[str]:
    """NCCL gives up on a link that only one end has: the smaller word of the two is written."""
    lanes: dict[tuple[LinkPeer, str], int] = {}
    for end in gpu.links:
        if end.peer is LinkPeer.CPU and end.lane_megabytes_per_s > FASTEST_NVLINK_OF_POWER:
            chip = {"bw": str(end.lane_megabytes_per_s), "count": str(end.lanes)}
            yield element("c2c", chip, indent, empty=True)
            continue
        alone = merged and end.peer is LinkPeer.SWITCH
        target = HIDDEN if alone or end.remote is None else end.remote
        lanes[end.peer, target] = lanes.get((end.peer, target), 0) + end.lanes
    for (peer, target), count in lanes.items():
        both = min(count, lanes_back(graph, target, gpu)) if peer is LinkPeer.GPU else count
        if both:
            link = {"target": target, "count": str(both), "tclass": TCLASS[peer]}
            yield element("nvlink", link, indent, empty=True)


def lanes_back(graph: Graph, from_: str, gpu: Gpu) -> int:
    other = next((g for g in graph.gpus if g.pci == from_), None)
    return sum(e.lanes for e in other.links if e.remote == gpu.pci) if other else 0


def compute_capability(gpu: Gpu) -> int | None:
    """By the product's name, else by the speed of its lanes; None where neither tells."""
    for pattern, generation in GENERATIONS:
        if gpu.product and re.search(rf"\b(?:{pattern})\b", gpu.product):
            return generation
    if match := re.search(r"\bsm ([0-9]{2,3})\b", gpu.product or ""):
        return int(match[1])
    speeds = {end.lane_megabytes_per_s for end in gpu.links if end.peer is not LinkPeer.CPU}
    return {20_000: 60, 50_000: 100}.get(speeds.pop()) if len(speeds) == 1 else None


def nic_lines(nic: Nic, graph: Graph, indent: str) -> Iterator[str]:
    yield f"{indent}<nic>"
    for port, name in enumerate(nic.rdma or nic.netdevs, start=1):
        if not re.fullmatch(r"[\w.:\-]{1,64}", name):
            continue  # NCCL's reader knows no escapes
        words = {"name": name, "port": str(port)}
        if nic.rate_megabits_per_s:
            words["speed"] = str(nic.rate_megabits_per_s)
        yield element("net", words, f"{indent}  ", empty=True)
    yield f"{indent}</nic>"


def element(tag: str, words: Mapping[str, str], indent: str, *, empty: bool = False) -> str:
    said = "".join(f" {name}={quoteattr(value)}" for name, value in words.items())
    return f"{indent}<{tag}{said}{'/>' if empty else '>'}"
