"""NCCL's topology XML → Machine: what NCCL_TOPO_DUMP_FILE wrote, or what a cloud hands out.

Dumps hold the whole tree; files made by hand for virtual machines hold groups of bus ids and
little else. NCCL fills in what a file leaves out when it runs on the machine; here it stays
unknown. One <pci> of a bridge's class is one PCIe switch, which the kernel shows as an upstream
port and downstream ports; root ports are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from rte.model import (
    NVIDIA_VENDOR,
    CpuId,
    Gpu,
    LinkPeer,
    Machine,
    Nic,
    NumaId,
    NumaNode,
    NumaSource,
    NvLinkEnd,
    PciAddress,
    PciDevice,
    PciLink,
    nic_order,
    pci_address,
    pci_order,
)
from rte.sources.problem import SourceError
from rte.sources.tree import BRIDGE, GPU, Tree
from rte.sources.xml import Element

MAX_FUNCTIONS = 2048
MAX_GPUS = 128
MAX_LANES = 36  # NVML's NVML_NVLINK_MAX_LINKS
NETDEV = re.compile(r"(eth|en|ib|bond|veth|docker|vlan|br|lo|wl|usb)[a-z0-9.\-]*")
NPU = 0x068001  # a CPU's NVLink unit, of POWER


@dataclass(slots=True)
class Found:
    """What was read so far."""

    name: str
    tree: Tree = field(default_factory=Tree)
    gpus: dict[PciAddress, Element] = field(default_factory=dict)  # their <gpu>, if they have one
    bare: list[PciAddress] = field(default_factory=list)  # GPUs without a <gpu>
    nics: list[Nic] = field(default_factory=list)
    nodes: dict[NumaId, NumaNode] = field(default_factory=dict)
    classless: list[PciAddress] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def nccl_machine(root: Element, name: str) -> Machine:
    """The machine of a `<system>`. Raises SourceError."""
    check_is_topology(root, name)
    found = Found(name)
    hosts = {cpu.get("host_hash") for cpu in root.all("cpu")}
    if len(hosts) > 1:
        raise SourceError(
            f"{name}: CPUs of {len(hosts)} hosts; NCCL fused the topologies of an NVLink domain. "
            "Dump one host's with a job on that host alone"
        )
    for cpu in root.all("cpu"):
        read_cpu(cpu, found)
    if not found.tree.devices and not found.nodes:
        raise SourceError(f"{name}: line {root.line}: a <system> without <cpu> and <pci>")
    return assembled(found)


def check_is_topology(root: Element, name: str) -> None:
    if root.tag == "graphs":
        raise SourceError(
            f"{name}: a graph file: the rings and trees that NCCL chose, not the machine; "
            "give what NCCL_TOPO_DUMP_FILE wrote"
        )
    if any(child.tag == "group" for child in root.children):
        raise SourceError(
            f"{name}: line {root.children[0].line}: <group> holds patterns for several machines; "
            "that is not NCCL's format, whose <system> has <cpu> elements"
        )
    for element in root.walk():
        if element.tag == "xgmi" or (element.tag == "gpu" and element.get("gcn")):
            raise SourceError(
                f"{name}: line {element.line}: a topology of AMD GPUs, for RCCL; "
                "only NVIDIA's are supported"
            )


def read_cpu(cpu: Element, found: Found) -> None:
    number = integer(cpu, "numaid", found, default=-1)
    node = NumaId(number) if number >= 0 else None
    if node is not None:
        if node in found.nodes:
            raise refused(found, cpu, f"two <cpu> with numaid {node}")
        cpus = affinity(cpu, found)
        found.nodes[node] = NumaNode(id=node, cpus=cpus or (), cpus_known=bool(cpus))
    for child in cpu.children:
        if child.tag == "pci":
            read_pci(child, found, node, None, "")
        elif child.tag == "nic":
            read_nets(child, found)
        elif child.tag == "pcilink":
            found.unknown.append("links between PCIe switches (pcilink) are left out")


def read_pci(
    element: Element,
    found: Found,
    node: NumaId | None,
    parent: PciAddress | None,
    root: str,
) -> None:
    """A <pci> and all below it; `parent` is the switch above, if there is one."""
    address = bus_id(element, found)
    root = root or f"pci{address}"
    class_code = hexadecimal(element, "class", found)
    below = [child for child in element.children if child.tag == "pci"]
    if class_code is None:
        class_code = BRIDGE if below else 0
    if parent is not None:
        parent = found.tree.add_port(root, parent, numa=node)
    vendor = hexadecimal(element, "vendor", found)
    has_gpu = any(child.tag == "gpu" for child in element.children)
    display = class_code >> 8 in (0x0300, 0x0302)
    if vendor is None and (has_gpu or display):
        vendor = NVIDIA_VENDOR
    if has_gpu and not display:
        class_code = GPU
    add(
        found,
        element,
        PciDevice(
            address=address,
            root=root,
            parent=parent,
            vendor=vendor or 0,
            device=hexadecimal(element, "device", found) or 0,
            class_code=class_code,
            numa=node,
            numa_from=None if node is None else NumaSource.SOURCE,
            link=link(element, found),
            driver="nvidia" if has_gpu or (display and vendor == NVIDIA_VENDOR) else None,
        ),
    )
    note_kind(element, found, address)
    for child in element.children:
        if child.tag == "pci":
            read_pci(child, found, node, address, root)
        elif child.tag == "pcilink":
            found.unknown.append("links between PCIe switches (pcilink) are left out")


def note_kind(element: Element, found: Found, address: PciAddress) -> None:
    """What the function is beside a function."""
    device = found.tree.devices[address]
    gpu = next(element.all("gpu"), None)
    if gpu is not None:
        if device.vendor != NVIDIA_VENDOR:
            raise refused(
                found, element, f"a GPU of vendor {device.vendor:#06x}; only NVIDIA's are supported"
            )
        found.gpus[address] = gpu
        if len(list(element.all("gpu"))) > 1:
            found.unknown.append(
                "parts of GPUs (mlopart) that CUDA shows apart: counted as one GPU"
            )
    elif device.is_gpu:
        found.bare.append(address)
    elif device.class_code >> 16 == 0x02 or any(element.all("nic")):
        nets = [net for nic in element.all("nic") for net in nic.all("net")]
        found.nics.append(
            Nic(
                pci=address,
                rdma=tuple(n for net in nets if (n := net.get("name")) and not NETDEV.fullmatch(n)),
                netdevs=tuple(n for net in nets if (n := net.get("name")) and NETDEV.fullmatch(n)),
                rate_megabits_per_s=fastest(nets, found),
            )
        )
    elif not device.class_code:
        found.classless.append(address)


def read_nets(nic: Element, found: Found) -> None:
    """A <nic> directly below a <cpu> is no PCI function; NCCL puts it below one or all."""
    for net in nic.all("net"):
        name = net.get("name")
        if name and not any(one.pci is None and one.netdevs == (name,) for one in found.nics):
            found.nics.append(
                Nic(
                    pci=None,
                    kind="virtual",
                    netdevs=(name,),
                    rate_megabits_per_s=fastest([net], found),
                )
            )


def fastest(nets: list[Element], found: Found) -> int | None:
    return max((integer(net, "speed", found, default=0) for net in nets), default=0) or None


def add(found: Found, element: Element, device: PciDevice) -> None:
    if device.address in found.tree.devices:
        raise refused(found, element, f"{device.address} is there twice")
    if len(found.tree.devices) >= 2 * MAX_FUNCTIONS:
        raise refused(found, element, f"more than {MAX_FUNCTIONS} functions")
    found.tree.devices[device.address] = device


# Attributes


def refused(found: Found, element: Element, what: str) -> SourceError:
    return SourceError(f"{found.name}: line {element.line}: <{element.tag}>: {what}")


def bus_id(element: Element, found: Found) -> PciAddress:
    text = element.get("busid")
    try:
        return pci_address(text)
    except ValueError as error:
        raise refused(
            found, element, f"busid {text[:40]!r}: expected an address such as 0000:3b:00.0"
        ) from error


def integer(element: Element, name: str, found: Found, *, default: int) -> int:
    text = element.get(name).strip()
    if not text:
        return default
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise refused(found, element, f"{name} {text[:40]!r}: expected a number")
    return int(text)


def hexadecimal(element: Element, name: str, found: Found) -> int | None:
    text = element.get(name).strip()
    if not text:
        return None
    if not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text):
        raise refused(found, element, f"{name} {text[:40]!r}: expected a number such as 0x10de")
    return int(text, 16)


def affinity(cpu: Element, found: Found) -> tuple[CpuId, ...]:
    """A mask in words of 32 bits, the most significant first, as in sysfs's local_cpus."""
    text = cpu.get("affinity").strip()
    if not text:
        return ()
    words = text.split(",")
    if len(words) == 1:
        words[0] = words[0].removeprefix("0x")
    if len(words) > 1024 or not all(re.fullmatch("[0-9a-fA-F]{1,8}", word) for word in words):
        raise refused(
            found, cpu, f"affinity {text[:40]!r}: expected hexadecimal words such as 0000ffff"
        )
    mask = int("".join(word.rjust(8, "0") for word in words), 16)
    return tuple(CpuId(n) for n in range(mask.bit_length()) if mask >> n & 1)


def link(element: Element, found: Found) -> PciLink | None:
    """None where the file leaves it empty, as for the GPUs of a virtual machine."""
    width = integer(element, "link_width", found, default=0)
    speed = re.match(r"([0-9]{1,3}(?:\.[0-9]+)?) *GT/s", element.get("link_speed").strip())
    if not 0 < width <= 32 or speed is None or not float(speed[1]):
        return None
    return PciLink(gigatransfers=float(speed[1]), width=width)


# Machine


def assembled(found: Found) -> Machine:
    addresses = sorted([*found.gpus, *found.bare], key=pci_order)
    if len(addresses) > MAX_GPUS:
        raise SourceError(f"{found.name}: {len(addresses)} GPUs; expected at most {MAX_GPUS}")
    gpus = tuple(
        gpu(number, address, found, frozenset(addresses))
        for number, address in enumerate(addresses)
    )
    return Machine(
        numa_nodes=tuple(found.nodes[id] for id in sorted(found.nodes)),
        pci=found.tree.in_order(),
        gpus=gpus,
        nics=tuple(sorted(found.nics, key=nic_order)),
        unknown=tuple(dict.fromkeys([*found.unknown, *unknown(found, gpus)])),
    )


def gpu(number: int, address: PciAddress, found: Found, ours: frozenset[PciAddress]) -> Gpu:
    element = found.gpus.get(address)
    device = found.tree.devices[address]
    index = integer(element, "dev", found, default=-1) if element else -1
    return Gpu(
        number=number,
        pci=address,
        product=product(device, element),
        index=index if index >= 0 else None,
        links=links(element, address, found, ours) if element else (),
    )


def product(device: PciDevice, element: Element | None) -> str | None:
    """The name is not said; device id and compute capability tell kinds apart."""
    generation = element.get("sm") if element else ""
    words = [f"NVIDIA device {device.device:04x}" if device.device else "NVIDIA GPU"]
    if re.fullmatch("[0-9]{2,3}", generation):
        words.append(f"sm {generation}")
    return " ".join(words) if device.device or len(words) > 1 else None


def links(
    element: Element, near: PciAddress, found: Found, ours: frozenset[PciAddress]
) -> tuple[NvLinkEnd, ...]:
    generation = integer(element, "sm", found, default=0)
    speed = lane_speed(generation)
    lanes: dict[tuple[LinkPeer, PciAddress | None], int] = {}
    ends: list[NvLinkEnd] = []
    for child in element.all("nvlink"):
        end = far_end(child, near, found, ours)
        count = integer(child, "count", found, default=1)
        if not 0 < count <= MAX_LANES:
            raise refused(found, child, f"count {count}: expected 1 to {MAX_LANES} lanes")
        if end is None:
            whom = child.get("target")[:20]
            where = "itself" if whom == near else f"{whom!r}, no GPU of this file"
            found.unknown.append(f"{near}: {count} NVLinks lead to {where}")
            continue
        lanes[end] = lanes.get(end, 0) + count
    for child in element.all("c2c"):
        count = integer(child, "count", found, default=1)
        bandwidth = integer(child, "bw", found, default=0)
        if count > 0 and bandwidth > 0:
            ends.append(NvLinkEnd(peer=LinkPeer.CPU, lanes=count, lane_megabytes_per_s=bandwidth))
    ends += [
        NvLinkEnd(peer=peer, remote=remote, lanes=count, lane_megabytes_per_s=speed)
        for (peer, remote), count in lanes.items()
    ]
    return tuple(sorted(ends, key=lambda end: (end.peer, end.remote or "")))


def far_end(
    child: Element, near: PciAddress, found: Found, ours: frozenset[PciAddress]
) -> tuple[LinkPeer, PciAddress | None] | None:
    """Who is at the other end; None for the GPU itself and for GPUs that the file does not have.

    Switches that the driver hides are spelled fffffff:ffff:ff or left empty.
    """
    text, kind = child.get("target").strip(), hexadecimal(child, "tclass", found)
    try:
        remote: PciAddress | None = pci_address(text)
    except ValueError:
        remote = None
    if remote in ours:
        return None if remote == near else (LinkPeer.GPU, remote)
    if kind == NPU:
        return LinkPeer.CPU, remote
    if kind is not None and kind >> 16 == 0x03:
        return None
    hidden = remote is None or (set(text) <= set("fF:.0") and "f" in text.casefold())
    return LinkPeer.SWITCH, None if hidden else remote


def lane_speed(generation: int) -> int:
    """MB/s one way by compute capability: Pascal 20 GB/s, Blackwell and later 50, else 25."""
    if generation and generation < 70:
        return 20_000
    return 50_000 if generation >= 100 else 25_000


def unknown(found: Found, gpus: tuple[Gpu, ...]) -> Iterator[str]:
    yield "UUIDs, memory and names of GPUs; distances and memory of NUMA nodes: NCCL keeps none"
    if found.classless:
        yield (
            f"what {len(found.classless)} functions are ({found.classless[0]} …): the file gives "
            "bus ids only, and NCCL looks the rest up on the machine"
        )
    if any(found.tree.devices[a].device == 0 for a in found.bare):
        yield "makers of some GPUs: taken for NVIDIA's, as the file is for NCCL"
    if gpus and not any(gpu.links for gpu in gpus):
        yield "NVLinks: the file states none that lead to its GPUs; NCCL asks the driver"
    if not all(node.cpus_known for node in found.nodes.values()):
        yield "CPUs of some NUMA nodes"
    if any(device.numa is None for device in found.tree.devices.values()):
        yield "NUMA nodes of some functions: numaid is -1"
    if any(not (nic.rdma or nic.netdevs) for nic in found.nics):
        yield "names and kinds of some NICs: the file gives their bus ids only"
    yield "host bridges: NODE may be PHB, as NCCL does not tell them apart"
