"""hwloc's XML (`lstopo machine.xml`), versions 1 to 3 → Machine.

hwloc keeps the NUMA nodes, the PCI tree below the part of the machine that it is near to, the
devices of the operating system, and since version 2 the bandwidth of NVLinks as a matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rte.model import (
    NVIDIA_VENDOR,
    CpuId,
    DeviceId,
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
    pci_address,
    pci_order,
)
from rte.sources.nvlink import lane_speed
from rte.sources.problem import SourceError
from rte.sources.xml import Element

MAX_NUMBERS = 1 << 20
MAX_CPUS = 1 << 16
MAX_GPUS = 128
AMD_VENDOR, INTEL_VENDOR = 0x1002, 0x8086
MAKERS = {AMD_VENDOR: "AMD", INTEL_VENDOR: "Intel"}
# GB/s of a link one way, as hwloc writes them, by generation; the widest that fits is meant.
LANE_GBPS = ((2.5, 0.25), (5.0, 0.5), (8.0, 8 / 8.125), (16.0, 16 / 8.125), (32.0, 32 / 8.125))
NETWORK, OPENFABRICS = "network", "openfabrics"
KINDS = {"2": NETWORK, "3": OPENFABRICS}
KINDS_SINCE_3 = {16: NETWORK, 32: OPENFABRICS}  # bits of one number


@dataclass(slots=True)
class Place:
    """An object with what it inherits."""

    element: Element
    nodes: frozenset[NumaId]  # NUMA nodes of the nearest object above that has some
    root: str = ""
    parent: PciAddress | None = None


@dataclass(slots=True)
class Found:
    name: str
    version: int
    devices: dict[PciAddress, PciDevice] = field(default_factory=dict)
    software: dict[PciAddress, list[Element]] = field(default_factory=dict)  # OS devices
    loose: list[Element] = field(default_factory=list)  # OS devices without a PCI function
    nodes: list[Element] = field(default_factory=list)
    cpus: Mapping[NumaId, tuple[CpuId, ...]] = field(default_factory=dict)
    by_index: dict[str, Element] = field(default_factory=dict)  # by gp_index
    owner: dict[str, PciAddress] = field(default_factory=dict)  # gp_index → PCI function
    repairs: list[str] = field(default_factory=list)


def hwloc_machine(root: Element, name: str) -> Machine:
    """The machine of a `<topology>`. Raises SourceError."""
    found = Found(name, version_of(root))
    machines = [e for e in root.walk() if e.tag == "object" and e.get("type") == "Machine"]
    if len(machines) != 1:
        raise SourceError(
            f"{name}: line {root.line}: {len(machines)} objects of type Machine; "
            "expected one machine, as `lstopo machine.xml` writes it"
        )
    found.nodes = numa_elements(machines[0])
    found.cpus = cpus_by_node(machines[0], found)
    collect(machines[0], found, frozenset(id for id, cpus in found.cpus.items() if cpus))
    return assembled(root, machines[0], found)


def version_of(root: Element) -> int:
    major = root.get("version", "1").partition(".")[0]
    return int(major) if re.fullmatch("[0-9]{1,2}", major) else 1


def numa_elements(machine: Element) -> list[Element]:
    """NUMA nodes; a machine of version 1 without any is its own only one."""
    nodes = [e for e in machine.walk() if e.tag == "object" and e.get("type") == "NUMANode"]
    return nodes or [machine]


def cpus_by_node(machine: Element, found: Found) -> dict[NumaId, tuple[CpuId, ...]]:
    """The CPUs of each node, every CPU in one.

    hwloc gives a node of memory alone the CPUs that it is nearest to: those of another node, which
    names no more of them or has the smaller number.
    """
    sets = {}
    for element in found.nodes:
        id = NumaId(number(element, "os_index", found) if element is not machine else 0)
        if id in sets:
            raise refused(found, element, f"a second NUMA node {id}")
        sets[id] = 0 if gpu_memory(element) else bits(element.get("cpuset"), element, found)
    taken = 0
    own = {}
    for id in sorted(sets, key=lambda id: (sets[id].bit_count(), id)):
        own[id] = tuple(map(CpuId, members(sets[id] & ~taken)))
        taken |= sets[id]
    return own


def collect(machine: Element, found: Found, bearing: frozenset[NumaId]) -> None:
    """Devices with their places, in one pass over all objects."""
    open_ = [Place(machine, bearing)]
    while open_:
        place = open_.pop()
        element, kind = place.element, place.element.get("type")
        if index := element.get("gp_index"):
            found.by_index[index] = element
        near = node_set(element, found) & bearing
        nodes = near or place.nodes
        parent, root = place.parent, place.root
        if kind == "Bridge" and element.get("bridge_type") == "0-1":
            root = f"pci{root_bus(element, found)}"
            parent = None
        elif kind in ("Bridge", "PCIDev"):
            parent = add(element, found, place, root)
            if index:
                found.owner[index] = parent
        elif kind == "OSDev":
            if parent is None:
                found.loose.append(element)
            else:
                found.software.setdefault(parent, []).append(element)
                if index:
                    found.owner[index] = parent
        open_.extend(
            Place(child, nodes, root, parent)
            for child in reversed(element.children)
            if child.tag == "object"
        )


def root_bus(bridge: Element, found: Found) -> str:
    match = re.fullmatch(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]", bridge.get("bridge_pci"))
    if match is None:
        raise refused(found, bridge, f"bridge_pci {bridge.get('bridge_pci')[:40]!r}")
    return f"{match[1]}:{match[2]}"


def add(element: Element, found: Found, place: Place, root: str) -> PciAddress:
    try:
        address = pci_address(element.get("pci_busid"))
    except ValueError as error:
        raise refused(found, element, f"pci_busid {element.get('pci_busid')[:40]!r}") from error
    match = re.match(
        r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", element.get("pci_type"), re.IGNORECASE
    )
    if match is None:
        raise refused(found, element, f"pci_type {element.get('pci_type')[:40]!r}")
    class_code, vendor, device = (int(text, 16) for text in match.groups())
    if element.get("subtype") == "NVSwitch":  # NVML knows it, also where the kernel's copy is zero
        class_code, vendor = 0x0680, NVIDIA_VENDOR
    if address in found.devices:
        if class_code in (0x0300, 0x0302):
            raise refused(found, element, f"a second GPU {address}")
        found.repairs.append(f"two functions are called {address}; the second one is left out")
        return address
    numa = next(iter(place.nodes)) if len(place.nodes) == 1 else None
    ours = vendor == NVIDIA_VENDOR and class_code in (0x0300, 0x0302)
    found.devices[address] = PciDevice(
        address=address,
        root=root or f"pci{address.rpartition(':')[0]}",
        parent=place.parent,
        vendor=vendor,
        device=device,
        class_code=class_code << 8,
        numa=numa,
        numa_from=None if numa is None else NumaSource.SOURCE,
        link=link(element),
        driver="nvidia" if ours else None,
    )
    return address


def refused(found: Found, element: Element, what: str) -> SourceError:
    kind = element.get("type") or element.tag
    return SourceError(
        f"{found.name}: line {element.line}: {kind}: {what} is nothing that hwloc writes"
    )


# Values


def number(element: Element, name: str, found: Found, default: int = 0) -> int:
    text = element.get(name)
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,18}", text):
        raise refused(found, element, f"{name} {text[:40]!r}")
    return int(text)


def bits(text: str, element: Element, found: Found) -> int:
    """A set in words of 32 bits, the most significant first; an empty word is 0."""
    words = text.split(",") if text else []
    if any(not re.fullmatch("(0x)?[0-9a-fA-F]{0,8}|0xf\\.\\.\\.f", word) for word in words):
        raise refused(found, element, f"the set {text[:40]!r}")
    if len(words) > MAX_CPUS // 32:
        raise refused(found, element, f"a set of {len(words)} words")
    if words and words[0] == "0xf...f":
        words = words[1:]  # "and all others": whatever the machine may have
    digits = "".join(word.removeprefix("0x").rjust(8, "0") for word in words)
    return int(digits or "0", 16)


def members(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def node_set(element: Element, found: Found) -> frozenset[NumaId]:
    return frozenset(map(NumaId, members(bits(element.get("nodeset"), element, found))))


def infos(element: Element) -> Mapping[str, str]:
    return {e.get("name"): e.get("value") for e in element.all("info")}


def link(element: Element) -> PciLink | None:
    """hwloc knows the bandwidth only: the widest link of up to 16 lanes that has it."""
    try:
        speed = float(element.get("pci_link_speed") or 0)
    except ValueError:
        return None
    for width in (16, 8, 4, 2, 1):
        for transfers, lane in LANE_GBPS:
            if abs(speed - lane * width) < 0.02 * lane * width:
                return PciLink(gigatransfers=transfers, width=width)
    return None


# Machine


def assembled(root: Element, machine: Element, found: Found) -> Machine:
    gpu_addresses = tuple(
        address for address in sorted(found.devices, key=pci_order) if found.devices[address].is_gpu
    )
    if len(gpu_addresses) > MAX_GPUS:
        raise SourceError(f"{found.name}: {len(gpu_addresses)} GPUs; expected at most {MAX_GPUS}")
    matrix = nvlink_matrix(root, found)
    gpus = tuple(
        gpu(i, address, matrix, gpu_addresses, found) for i, address in enumerate(gpu_addresses)
    )
    nodes = numa_nodes(root, machine, found)
    owned = {node.gpu: node.id for node in nodes if node.gpu}
    return Machine(
        numa_nodes=nodes,
        pci=tuple(found.devices[a] for a in sorted(found.devices, key=pci_order)),
        gpus=tuple(replace(one, memory_node=owned.get(one.pci)) for one in gpus),
        nics=nics(found),
        unknown=tuple(unknown(found, gpus, matrix is not None)),
    )


def numa_nodes(root: Element, machine: Element, found: Found) -> tuple[NumaNode, ...]:
    distance = distances(root, machine, found)
    nodes = {}
    for element in found.nodes:
        id = NumaId(number(element, "os_index", found) if element is not machine else 0)
        pages = {
            number(page, "size", found): number(page, "count", found)
            for page in element.all("page_type")
        }
        base = min(pages, default=0)
        owner = infos(element).get("PCIBusID", "")
        nodes[id] = NumaNode(
            id=id,
            cpus=found.cpus[id],
            memory_bytes=number(element, "local_memory", found) or None,
            huge_pages={size: count for size, count in pages.items() if size > base},
            distance=distance.get(id, {}),
            gpu=known_address(owner) if gpu_memory(element) else None,
        )
    return tuple(nodes[id] for id in sorted(nodes))


def gpu_memory(element: Element) -> bool:
    return element.get("subtype") == "GPUMemory"


def known_address(text: str) -> PciAddress | None:
    try:
        return pci_address(text)
    except ValueError:
        return None


def distances(
    root: Element, machine: Element, found: Found
) -> Mapping[NumaId, Mapping[NumaId, int]]:
    """ACPI's distances: a matrix of its own since version 2, relative to the least one before."""
    for element in root.all("distances2"):
        if element.get("type") == "NUMANode" and element.get("name") in ("NUMALatency", ""):
            return square(
                [NumaId(int(n)) for n in numbers(element, "indexes", found)],
                [int(n) for n in numbers(element, "u64values", found)],
                element,
                found,
            )
    for element in machine.walk():
        if element.tag == "distances" and number(element, "nbobjs", found) == len(found.nodes):
            try:
                base = float(element.get("latency_base") or 0)
                said = [float(e.get("value") or 0) * base for e in element.all("latency")]
            except ValueError as error:
                raise refused(found, element, "a latency") from error
            if not all(0 <= value < 1e6 for value in said):
                raise refused(found, element, "a latency")
            ids = [NumaId(number(e, "os_index", found)) for e in found.nodes]
            return square(ids, [round(value) for value in said], element, found)
    return {}


def square(
    ids: Sequence[NumaId], values: Sequence[int], element: Element, found: Found
) -> Mapping[NumaId, Mapping[NumaId, int]]:
    if len(values) != len(ids) ** 2:
        raise refused(found, element, f"{len(values)} values for {len(ids)} objects")
    rows = iter(values)
    return {a: {b: next(rows) for b in ids} for a in ids}


def numbers(element: Element, tag: str, found: Found) -> list[str]:
    """The words of all parts of a list, with whatever stands before a colon."""
    words = [word for part in element.all(tag) for word in part.text.split()]
    if len(words) > MAX_NUMBERS or not all(
        re.fullmatch("(?:[A-Za-z0-9]+:)?[0-9]{1,18}", word) for word in words
    ):
        raise refused(found, element, tag)
    return words


# GPUs


Bandwidth = Mapping[tuple[str, str], int]


def gpu(
    position: int,
    address: PciAddress,
    matrix: Bandwidth | None,
    ours: Sequence[PciAddress],
    found: Found,
) -> Gpu:
    facts: dict[str, str] = {}
    index = None
    for device in found.software.get(address, ()):
        known = infos(device)
        facts |= {key: value for key, value in known.items() if value}
        if match := re.fullmatch("nvml([0-9]{1,3})", device.get("name")):
            index = int(match[1])
    uuid = facts.get("NVIDIAUUID", "")
    memory = re.fullmatch("([0-9]{1,15})(KiB)?", facts.get("CUDAGlobalMemorySize", ""))
    model = facts.get("GPUModel") or infos_of(address, found).get("PCIDevice")
    return Gpu(
        number=position,
        pci=address,
        uuid=DeviceId(uuid) if re.fullmatch(r"GPU-[0-9a-zA-Z\-]{1,40}", uuid) else None,
        product=model,
        memory_bytes=int(memory[1]) * 1024 if memory else None,
        index=index,
        links=links(address, model, matrix, ours, found) if matrix else (),
    )


def infos_of(address: PciAddress, found: Found) -> Mapping[str, str]:
    element = next(
        (
            e
            for e in found.by_index.values()
            if e.get("type") == "PCIDev" and known_address(e.get("pci_busid")) == address
        ),
        None,
    )
    return infos(element) if element else {}


def nvlink_matrix(root: Element, found: Found) -> Bandwidth | None:
    """MB/s one way between objects, by gp_index; None when hwloc looked for no NVLinks."""
    for element in root.children:
        if element.tag.startswith("distances2") and element.get("name") == "NVLinkBandwidth":
            names = [word.rpartition(":")[2] for word in numbers(element, "indexes", found)]
            values = [int(word) for word in numbers(element, "u64values", found)]
            if len(values) != len(names) ** 2:
                raise refused(found, element, f"{len(values)} values for {len(names)} objects")
            rows = iter(values)
            return {(a, b): value for a in names for b in names if (value := next(rows))}
    return None


def links(
    near: PciAddress,
    model: str | None,
    matrix: Bandwidth,
    ours: Sequence[PciAddress],
    found: Found,
) -> tuple[NvLinkEnd, ...]:
    speed = lane_speed(model)
    ends: dict[tuple[LinkPeer, PciAddress | None], int] = {}
    for (a, b), bandwidth in matrix.items():
        if a == b or found.owner.get(a) != near:
            continue
        far = found.owner.get(b)
        if far in ours and far is not None:
            end: tuple[LinkPeer, PciAddress | None] = (LinkPeer.GPU, far)
        elif far is not None and found.devices[far].vendor == NVIDIA_VENDOR:
            end = (LinkPeer.SWITCH, far)
        else:
            end = (LinkPeer.CPU, None)  # a package of POWER, or its NPU
        ends[end] = ends.get(end, 0) + max(1, round(bandwidth / speed))
    return tuple(
        NvLinkEnd(peer=peer, remote=remote, lanes=ends[peer, remote], lane_megabytes_per_s=speed)
        for peer, remote in sorted(ends, key=lambda end: (end[0], end[1] or ""))
    )


# NICs


def nics(found: Found) -> tuple[Nic, ...]:
    ours = [
        nic(address, found)
        for address in sorted(found.devices, key=pci_order)
        if found.devices[address].class_code >> 16 == 0x02 or has_network(address, found)
    ]
    loose = [
        Nic(
            kind="rdma" if kind_of(device, found) == OPENFABRICS else "virtual",
            netdevs=(device.get("name"),) if kind_of(device, found) == NETWORK else (),
            rdma=(device.get("name"),) if kind_of(device, found) == OPENFABRICS else (),
        )
        for device in found.loose
        if kind_of(device, found) and device.get("name")
    ]
    return (*ours, *sorted(loose, key=lambda one: one.name))


def has_network(address: PciAddress, found: Found) -> bool:
    """Fabrics of other kinds (Omni-Path, Slingshot's older names) are no network controllers."""
    return any(kind_of(device, found) for device in found.software.get(address, ()))


def nic(address: PciAddress, found: Found) -> Nic:
    devices = found.software.get(address, ())
    netdevs = [d.get("name") for d in devices if kind_of(d, found) == NETWORK]
    rdma = [d for d in devices if kind_of(d, found) == OPENFABRICS]
    states = [
        value
        for device in rdma
        for key, value in infos(device).items()
        if re.fullmatch("Port[0-9]+State", key)
    ]
    return Nic(
        pci=address,
        netdevs=tuple(sorted(filter(None, netdevs))),
        rdma=tuple(sorted(filter(None, (d.get("name") for d in rdma)))),
        up="4" in states if states else None,  # of InfiniBand's states, active
    )


def kind_of(device: Element, found: Found) -> str | None:
    said = device.get("osdev_type")
    if found.version < 3:
        return KINDS.get(said)
    kinds = int(said) if re.fullmatch("[0-9]{1,4}", said) else 0
    return next(
        (kind for bit, kind in sorted(KINDS_SINCE_3.items(), reverse=True) if kinds & bit), None
    )


def unknown(found: Found, gpus: Sequence[Gpu], has_matrix: bool) -> Iterator[str]:
    yield from (f"repaired: {repair}" for repair in found.repairs)
    if not found.devices:
        yield "PCI devices: none were written; `lstopo --whole-io` writes them"
    for vendor, maker in MAKERS.items():
        others = [
            d
            for d in found.devices.values()
            if d.vendor == vendor and d.class_code >> 8 in (0x0300, 0x0302, 0x0380, 0x1200)
        ]
        if others:
            yield f"{len(others)} GPUs or accelerators of {maker}: not NVIDIA's, left out"
    if not gpus:
        return
    if not has_matrix:
        yield "NVLinks: hwloc wrote none; it needs NVML when it looks, and version 2 or later"
    if any(gpu.uuid is None for gpu in gpus):
        yield "UUIDs of some GPUs: hwloc had no NVML for them"
    if any(found.devices[gpu.pci].link for gpu in gpus):
        yield "PCIe generations: hwloc keeps the bandwidth of the moment, which idling lowers"
    if any(found.devices[gpu.pci].numa is None for gpu in gpus):
        yield "NUMA nodes of some GPUs: hwloc puts them below more than one"
    yield "link rates of NICs"
