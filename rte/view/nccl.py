"""The machine as a topology file that NCCL can be given (NCCL_TOPO_FILE).

What is not known is left out, and NCCL looks it up on the machine itself. A PCIe switch is one
<pci>, as NCCL walks two of the kernel's steps at a time; root ports are left out.
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


class NoAddresses(ValueError):
    """A machine whose source has no PCI addresses, by which NCCL finds everything."""


def nccl(graph: Graph) -> str:
    """The topology file. Raises NoAddresses for a machine without them."""
    if any(is_made_up(gpu.pci) for gpu in graph.machine.gpus):
        raise NoAddresses(
            "NCCL finds everything by PCI address, and this source has none; use NCCL's own dump, "
            "hwloc's XML or a recorded machine"
        )
    return "".join(f"{line}\n" for line in lines(graph))


def lines(graph: Graph) -> Iterator[str]:
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
        if node and node.cpus:
            words["affinity"] = mask(node.cpus, most=max_cpu(graph))
        if not here.get(id):
            yield element("cpu", words, "  ", empty=True)
            continue
        yield element("cpu", words, "  ")
        for top in here[id]:
            yield from pci(graph, top, below, "    ")
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
    graph: Graph, address: PciAddress, below: Mapping[PciAddress, list[PciAddress]], indent: str
) -> Iterator[str]:
    device = graph.tree.devices[address]
    gpu = next((g for g in graph.gpus if g.pci == address), None)
    cards = [n for n in graph.machine.nics if n.pci == address and (n.rdma or n.netdevs)]
    inner = [
        *(gpu_lines(gpu, graph, f"{indent}  ") if gpu else ()),
        *(line for nic in cards for line in nic_lines(nic, graph, f"{indent}  ")),
        *(
            line
            for member in below.get(address, ())
            for line in pci(graph, member, below, indent + "  ")
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


def gpu_lines(gpu: Gpu, graph: Graph, indent: str) -> Iterator[str]:
    words = {} if gpu.index is None else {"dev": str(gpu.index)}
    if (generation := compute_capability(gpu)) is not None:
        words["sm"] = str(generation)
    yield element("gpu", words, indent, empty=not gpu.links)
    for end in gpu.links:
        if end.peer is LinkPeer.CPU and end.lane_megabytes_per_s > FASTEST_NVLINK_OF_POWER:
            chip = {"bw": str(end.lane_megabytes_per_s), "count": str(end.lanes)}
            yield element("c2c", chip, f"{indent}  ", empty=True)
            continue
        link = {
            "target": end.remote or HIDDEN,
            "count": str(end.lanes),
            "tclass": TCLASS[end.peer],
        }
        yield element("nvlink", link, f"{indent}  ", empty=True)
    if gpu.links:
        yield f"{indent}</gpu>"


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
        words = {"name": name, "port": str(port)}
        if nic.rate_megabits_per_s:
            words["speed"] = str(nic.rate_megabits_per_s)
        yield element("net", words, f"{indent}  ", empty=True)
    yield f"{indent}</nic>"


def element(tag: str, words: Mapping[str, str], indent: str, *, empty: bool = False) -> str:
    said = "".join(f" {name}={quoteattr(value)}" for name, value in words.items())
    return f"{indent}<{tag}{said}{'/>' if empty else '>'}"
