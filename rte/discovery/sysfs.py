"""What the kernel says of this machine: NUMA nodes, PCI functions and NICs, from a sysfs tree.

The tree's root is a parameter, so that a recorded machine is read by the same code. Devices come
and go while we look: every attribute may be missing at any moment. What is there and cannot be
understood is said in `problems`, and the rest is read on.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from rte.model import (
    CpuId,
    Nic,
    NumaId,
    NumaNode,
    NumaSource,
    PciAddress,
    PciDevice,
    PciLink,
    parse_ranges,
    pci_address,
    pci_order,
)

FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")

# How a device or an attribute says that it is just going away, or that there is nothing to say:
# `speed` of a network device that is down answers EINVAL, a GPU being removed ENODEV, the port
# name of a virtio NIC EOPNOTSUPP.
GONE = frozenset(
    {
        errno.ENOENT,
        errno.ENODEV,
        errno.ENXIO,
        errno.EINVAL,
        errno.ENOTDIR,
        errno.EIO,
        errno.EOPNOTSUPP,
        errno.ENODATA,
    }
)

# Ethernet and InfiniBand controllers. Anything else is a NIC only if it has a device of that name.
NIC_CLASSES = frozenset({0x0200, 0x0207})

# The widths that PCIe has. A function whose configuration space reads as all ones (a GPU that fell
# off the bus) says 63, an endpoint inside the root complex 255, a port of QEMU's switch 0.
LINK_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})


class SysfsError(Exception):
    """A tree that is no sysfs: nothing on it can be believed."""

    def __init__(self, message: str, *, root: Path) -> None:
        super().__init__(message)
        self.root = root


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the kernel says, before NVML is asked."""

    numa_nodes: tuple[NumaNode, ...]  # by id, online ones
    pci: tuple[PciDevice, ...] = ()  # in PCI order
    nics: tuple[Nic, ...] = ()  # in PCI order, those without PCI last, by name
    boot_id: str | None = None  # changes with every boot
    driver_load: str | None = None  # changes with every loading of NVIDIA's module; None: not there
    problems: tuple[str, ...] = ()  # what was there and could not be understood, sorted


def read_host(sys: Path, *, proc: Path | None = None) -> Host:
    """The machine below a sysfs root (`/sys`, `/host/sys`) and, if given, a procfs root.

    Takes about 30 ms for 300 PCI functions. Raises SysfsError when there is neither a NUMA node
    nor a CPU in the tree; all smaller trouble is in `problems`.
    """
    tree = Tree(str(sys))
    procfs = Tree(str(proc), problems=tree.problems) if proc else None
    nodes = read_numa_nodes(tree)
    if not nodes:
        message = f"{sys}/devices/system: expected NUMA nodes or CPUs, found none; is it a sysfs?"
        raise SysfsError(message, root=sys)
    pci = read_pci(tree, nodes)
    return Host(
        numa_nodes=with_gpu_memory(nodes, read_gpu_memory_nodes(procfs) if procfs else {}),
        pci=pci,
        nics=read_nics(tree, pci),
        boot_id=procfs.read("sys/kernel/random/boot_id") if procfs else None,
        driver_load=read_driver_load(sys),
        problems=tuple(sorted(set(tree.problems))),
    )


@dataclass(frozen=True, slots=True)
class Tree:
    """One look at a tree of small files; paths are relative to its root."""

    root: str
    problems: list[str] = field(default_factory=list)

    def read(self, path: str) -> str | None:
        """The file's text without surrounding white space; None when it is not there or empty."""
        try:
            file = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.missing(path, error)
            return None
        try:
            text = b""
            while chunk := os.read(file, 65536):
                text += chunk
                # The kernel fills a page before it makes a reader come back for more.
                if len(chunk) < 4096:
                    break
        except OSError as error:
            self.missing(path, error)
            return None
        finally:
            os.close(file)
        # Linux 2.6.32 ends node/online with a zero byte.
        return text.decode(errors="replace").strip(" \t\r\n\0") or None

    def number(self, path: str) -> int | None:
        """The integer in a file, decimal or with 0x; None when it is missing or no integer."""
        text = self.read(path)
        if text is None:
            return None
        try:
            return int(text, 0)
        except ValueError:
            self.surprise(path, "an integer", text)
            return None

    def ids(self, path: str) -> tuple[int, ...] | None:
        """The numbers of a list such as `0-3,8`, ascending; None when there is no such file.

        A file that is there and empty is an empty list: a NUMA node that has only memory.
        """
        text = self.read(path)
        if text is None:
            return () if self.exists(path) else None
        try:
            return parse_ranges(text)
        except ValueError:
            self.surprise(path, "a list of numbers", text)
            return None

    def link(self, path: str) -> str | None:
        """Where a symbolic link points, as it is written; None when there is none."""
        try:
            return os.readlink(f"{self.root}/{path}").rstrip("/")
        except OSError as error:
            self.missing(path, error)
            return None

    def names(self, path: str) -> list[str]:
        """The sorted names in a directory; none when it is not there."""
        try:
            return sorted(os.listdir(f"{self.root}/{path}"))
        except OSError as error:
            self.missing(path, error)
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(f"{self.root}/{path}")

    def missing(self, path: str, error: OSError) -> None:
        if error.errno not in GONE:
            self.problems.append(f"{self.root}/{path}: {error.strerror}")

    def surprise(self, path: str, expected: str, text: str) -> None:
        self.problems.append(f"{self.root}/{path}: expected {expected}, read {text[:80]!r}")


# NUMA nodes

NODES = "devices/system/node"


def read_driver_load(sys: Path) -> str | None:
    """What tells one loading of the kernel module `nvidia` from another, None while there is none.

    The kernel numbers the nodes of sysfs in the order of their making (kernfs_new_node counts on
    until 32 bits are used up), so a module that was loaded anew has another inode number; times of
    sysfs folders are of no use, they are of the first look.
    """
    try:
        return str((sys / "module/nvidia").stat().st_ino)
    except OSError:
        return None


def read_numa_nodes(tree: Tree) -> tuple[NumaNode, ...]:
    """The online NUMA nodes by id; one node 0 with all CPUs on a kernel built without NUMA."""
    ids = tree.ids(f"{NODES}/online")
    if ids is None:  # absent before Linux 2.6.24, or garbage, which is said already
        ids = numbered(tree.names(NODES), "node")
    nodes = tuple(
        read_numa_node(tree, NumaId(id), online=ids)
        for id in ids
        if tree.exists(f"{NODES}/node{id}")
    )
    if nodes:
        return nodes
    cpus = tree.ids("devices/system/cpu/online")
    if not cpus:
        return ()
    return (
        NumaNode(
            id=NumaId(0),
            cpus=tuple(map(CpuId, cpus)),
            cores=read_cores(tree, cpus),
            huge_pages=read_huge_pages(tree, "kernel/mm/hugepages"),
            distance={NumaId(0): 10},
        ),
    )


def read_numa_node(tree: Tree, id: NumaId, *, online: tuple[int, ...]) -> NumaNode:
    folder = f"{NODES}/node{id}"
    cpus = tree.ids(f"{folder}/cpulist") or ()
    return NumaNode(
        id=id,
        cpus=tuple(map(CpuId, cpus)),
        cores=read_cores(tree, cpus),
        memory_bytes=read_memory(tree, f"{folder}/meminfo"),
        huge_pages=read_huge_pages(tree, f"{folder}/hugepages"),
        distance=read_distance(tree, f"{folder}/distance", online=online),
    )


def read_cores(tree: Tree, cpus: tuple[int, ...]) -> tuple[tuple[CpuId, ...], ...]:
    """The CPUs that share a core, by their lowest; a core with one thread is left out."""
    cores, seen = [], set[int]()
    for cpu in cpus:
        if cpu in seen:
            continue
        siblings = tree.ids(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or ()
        seen.update(siblings)
        if len(siblings) > 1:
            cores.append(tuple(map(CpuId, siblings)))
    return tuple(cores)


def read_memory(tree: Tree, path: str) -> int | None:
    """Bytes of the MemTotal line."""
    text = tree.read(path)
    if text is None:
        return None
    match = re.search(r"MemTotal:\s*(\d{1,15}) kB", text)
    if match is None:
        tree.surprise(path, "a line with MemTotal", text)
        return None
    return int(match[1]) * 1024


def read_huge_pages(tree: Tree, folder: str) -> Mapping[int, int]:
    """Page size in bytes → pages, for every size that the kernel has."""
    pages = {}
    for kib in numbered(tree.names(folder), "hugepages-", "kB"):
        count = tree.number(f"{folder}/hugepages-{kib}kB/nr_hugepages")
        if count is not None:
            pages[kib * 1024] = count
    return pages


def read_distance(tree: Tree, path: str, *, online: tuple[int, ...]) -> Mapping[NumaId, int]:
    """The SLIT row by node id: the file has a column for each online node, not for each id."""
    text = tree.read(path)
    if text is None:
        return {}
    columns = text.split()
    # A node that went offline may leave its column behind.
    named = (ids for ids in (online, tree.ids(f"{NODES}/possible")) if ids)
    ids = next((ids for ids in named if len(ids) == len(columns)), None)
    if ids is None or not all(re.fullmatch(r"\d{1,5}", column) for column in columns):
        tree.surprise(path, f"{len(online)} distances, one for each online node", text)
        return {}
    row = zip(ids, columns, strict=True)
    return {NumaId(id): int(column) for id, column in row if id in online}


def read_gpu_memory_nodes(procfs: Tree) -> Mapping[NumaId, PciAddress]:
    """NUMA nodes that are the memory of a GPU, as NVIDIA's driver says (Grace, POWER9)."""
    found = {}
    for name in procfs.names("driver/nvidia/gpus"):
        path = f"driver/nvidia/gpus/{name}/numa_status"
        text = procfs.read(path)
        if text is None:
            continue
        match = re.search(r"^Node:\s*(-?\d{1,5})$", text, re.MULTILINE)
        if match is None:
            procfs.surprise(path, "a line with Node", text)
        elif int(match[1]) >= 0 and not re.search(r"^Status:\s*offline", text, re.MULTILINE):
            try:
                found[NumaId(int(match[1]))] = pci_address(name)
            except ValueError:
                procfs.surprise(path, "a folder named by a PCI address", name)
    return found


def with_gpu_memory(
    nodes: Iterable[NumaNode], gpus: Mapping[NumaId, PciAddress]
) -> tuple[NumaNode, ...]:
    return tuple(replace(node, gpu=gpus[node.id]) if node.id in gpus else node for node in nodes)


def numbered(names: Iterable[str], prefix: str, suffix: str = "") -> tuple[int, ...]:
    """The numbers between prefix and suffix of those names that have them, ascending."""
    middles = (
        name[len(prefix) : len(name) - len(suffix)]
        for name in names
        if name.startswith(prefix) and name.endswith(suffix)
    )
    return tuple(sorted(int(middle) for middle in middles if middle.isdecimal()))


# PCI functions

PCI = "bus/pci/devices"


class Raw(NamedTuple):
    """One PCI function as its files say it, before the functions above it are looked at."""

    address: PciAddress
    root: str
    above: tuple[PciAddress, ...]  # every function on its path, nearest first
    parent: PciAddress | None
    class_code: int
    vendor: int
    device: int
    numa: NumaId | None
    max_link: PciLink | None
    driver: str | None
    physical_function: PciAddress | None

    @property
    def is_bridge(self) -> bool:
        return self.class_code >> 8 == 0x0604


def read_pci(tree: Tree, nodes: tuple[NumaNode, ...]) -> tuple[PciDevice, ...]:
    """All PCI functions in PCI order."""
    online = frozenset(node.id for node in nodes)
    found = {}
    for name in tree.names(PCI):
        if raw := read_function(tree, name, online=online):
            found[raw.address] = raw
    local = LocalCpus(nodes)
    return tuple(
        located(tree, found[address], found, local=local)
        for address in sorted(found, key=pci_order)
    )


def read_function(tree: Tree, name: str, *, online: frozenset[NumaId]) -> Raw | None:
    """One function; None when it is gone, or when it does not say what it is."""
    folder = f"{PCI}/{name}"
    target = tree.link(folder)
    if target is None or not FUNCTION.fullmatch(name):
        return None
    class_code = tree.number(f"{folder}/class")
    vendor = tree.number(f"{folder}/vendor")
    device = tree.number(f"{folder}/device")
    if class_code is None or vendor is None or device is None:
        return None
    path = target.split("/")
    above = [part for part in path[:-1] if FUNCTION.fullmatch(part)]
    return Raw(
        address=PciAddress(name),
        # The outermost: below a VMD controller there is a second one, on the same silicon.
        root=next((part for part in path if ROOT.fullmatch(part)), f"pci{name[:-5]}"),
        above=tuple(map(PciAddress, reversed(above))),
        parent=PciAddress(path[-2]) if above and above[-1] == path[-2] else None,
        class_code=class_code,
        vendor=vendor,
        device=device,
        numa=read_numa(tree, f"{folder}/numa_node", online=online),
        max_link=read_link(tree, folder),
        driver=base_name(tree.link(f"{folder}/driver")),
        physical_function=function(tree.link(f"{folder}/physfn")),
    )


def read_numa(tree: Tree, path: str, *, online: frozenset[NumaId]) -> NumaId | None:
    number = tree.number(path)
    if number is None or number < 0:
        return None
    if number not in online:  # the kubelet can admit nothing there
        tree.surprise(path, "an online NUMA node", str(number))
        return None
    return NumaId(number)


def read_link(tree: Tree, folder: str) -> PciLink | None:
    """What the port can run at most; idling changes only current_link_*."""
    path = f"{folder}/max_link_speed"
    speed = tree.read(path)
    if speed is None or speed.startswith("Unknown"):
        return None  # no PCIe port, or Linux before 4.13
    match = re.match(r"(\d{1,4}(?:\.\d{1,4})?) GT/s", speed)
    if match is None:
        tree.surprise(path, "a speed in GT/s", speed)
        return None
    width = tree.number(f"{folder}/max_link_width")
    if width not in LINK_WIDTHS:
        return None
    return PciLink(gigatransfers=float(match[1]), width=width)


def located(tree: Tree, raw: Raw, all: Mapping[PciAddress, Raw], *, local: LocalCpus) -> PciDevice:
    """The function with what follows from the functions above it."""
    numa, numa_from = raw.numa, NumaSource.SYSFS
    if numa is None:
        numa_from = NumaSource.PARENT
        above = (all[address].numa for address in raw.above if address in all)
        numa = next((node for node in above if node is not None), None)
    if numa is None:
        numa_from = NumaSource.LOCAL_CPUS
        numa = local.node(tree.ids(f"{PCI}/{raw.address}/local_cpulist") or ())
    return PciDevice(
        address=raw.address,
        root=raw.root,
        parent=raw.parent,
        vendor=raw.vendor,
        device=raw.device,
        class_code=raw.class_code,
        numa=numa,
        numa_from=None if numa is None else numa_from,
        link=upward_link(raw, all),
        driver=raw.driver,
        physical_function=raw.physical_function,
    )


class LocalCpus:
    """Finds the one NUMA node that a list of local CPUs lies in."""

    def __init__(self, nodes: tuple[NumaNode, ...]) -> None:
        self.node_of = {cpu: node.id for node in nodes for cpu in node.cpus}

    def node(self, cpus: Iterable[int]) -> NumaId | None:
        """None for no CPU, for several nodes, and for all CPUs: the kernel's "I do not know"."""
        local = {CpuId(cpu) for cpu in cpus} & self.node_of.keys()
        nodes = {self.node_of[cpu] for cpu in local}
        if len(nodes) != 1 or len(local) == len(self.node_of):
            return None
        return nodes.pop()


def upward_link(raw: Raw, all: Mapping[PciAddress, Raw]) -> PciLink | None:
    """The link towards the root: the slower of the function and the port above it.

    Root ports and a switch's downstream ports describe the link below them, and have none above:
    what joins the ports of one switch is not a link. Counted from the root, such ports alternate
    with the upstream ports of switches.
    """
    bridges = sum(all[address].is_bridge for address in raw.above if address in all)
    if raw.max_link is None or (raw.is_bridge and bridges % 2 == 0):
        return None
    port = all[raw.parent].max_link if raw.parent and raw.parent in all else None
    if port is None:
        return raw.max_link
    return PciLink(
        gigatransfers=min(raw.max_link.gigatransfers, port.gigatransfers),
        width=min(raw.max_link.width, port.width),
    )


def base_name(target: str | None) -> str | None:
    return target.rpartition("/")[2] if target else None


def function(path: str | None) -> PciAddress | None:
    """The last PCI function on a path: a virtio NIC is `…/0000:25:00.0/virtio3/net/eth3`."""
    parts = reversed(path.split("/")) if path else ()
    return next((PciAddress(part) for part in parts if FUNCTION.fullmatch(part)), None)


# NICs

NET = "class/net"
RDMA = "class/infiniband"


def read_nics(tree: Tree, pci: tuple[PciDevice, ...]) -> tuple[Nic, ...]:
    """NICs by PCI class first, by name second: one that a pod holds has no name here."""
    places = {name: place(tree, f"{NET}/{name}") for name in tree.names(NET)}
    rdma_places = {name: place(tree, f"{RDMA}/{name}") for name in tree.names(RDMA)}
    netdevs = by_function(places)
    rdma = by_function(rdma_places)
    functions = tuple(
        read_pci_nic(tree, device, netdevs.get(device.address, ()), rdma.get(device.address, ()))
        for device in pci
        if device.class_code >> 8 in NIC_CLASSES
        or device.address in netdevs
        or device.address in rdma
    )
    others = (
        *(nic for name, path in places.items() if path and (nic := read_other(tree, name, path))),
        *(
            read_software_rdma(tree, name)
            for name, path in rdma_places.items()
            if path and function(path) is None
        ),
    )
    return functions + tuple(sorted(others, key=lambda nic: nic.name))


def place(tree: Tree, entry: str) -> str | None:
    """Where a device of a class lives in the device tree; None when it went away."""
    # Linux before 2.6.25, or CONFIG_SYSFS_DEPRECATED: a directory with a link to the device.
    return tree.link(entry) or tree.link(f"{entry}/device")


def by_function(places: Mapping[str, str | None]) -> Mapping[PciAddress, tuple[str, ...]]:
    found: dict[PciAddress, tuple[str, ...]] = {}
    for name, path in sorted(places.items()):
        address = function(path)
        # A USB adapter, such as the one to the BMC, is not the USB controller's function.
        if address and path and "/usb" not in path:
            found[address] = (*found.get(address, ()), name)
    return found


def read_pci_nic(
    tree: Tree, device: PciDevice, netdevs: tuple[str, ...], rdma: tuple[str, ...]
) -> Nic:
    rate, up = read_rdma_ports(tree, rdma) if rdma else read_netdevs(tree, netdevs)
    return Nic(
        pci=device.address,
        netdevs=netdevs,
        rdma=rdma,
        rate_megabits_per_s=rate,
        up=up,
        physical_function=device.physical_function,
        virtual_functions=tree.number(f"{PCI}/{device.address}/sriov_numvfs") or 0,
    )


def read_other(tree: Tree, name: str, path: str) -> Nic | None:
    """A bond, or a NIC of a hypervisor's own bus; None for VLANs, bridges, lo and pods' ends."""
    members: tuple[str, ...]
    if "/virtual/" in path:
        slaves = tree.read(f"{NET}/{name}/bonding/slaves")
        if slaves is None:  # loading the driver makes a bond0 that bonds nothing
            return None
        kind, members = "bond", tuple(sorted(slaves.split()))
    elif "/usb" in path or function(path) is not None:
        return None
    else:
        # Hyper-V's synthetic NIC lies below its VMBus, with the virtual function as its lower one.
        driver = base_name(tree.link(f"{NET}/{name}/device/driver"))
        kind = "netvsc" if driver == "hv_netvsc" else "virtual"
        lower = (entry for entry in tree.names(f"{NET}/{name}") if entry.startswith("lower_"))
        members = tuple(sorted(entry.removeprefix("lower_") for entry in lower))
    rate, up = read_netdevs(tree, (name,))
    return Nic(netdevs=(name,), kind=kind, members=members, rate_megabits_per_s=rate, up=up)


def read_software_rdma(tree: Tree, name: str) -> Nic:
    """RDMA over any network device (rxe, siw): it has no PCI function."""
    rate, up = read_rdma_ports(tree, (name,))
    below = tree.read(f"{RDMA}/{name}/parent")  # rxe says its network device, siw nothing
    return Nic(
        rdma=(name,),
        kind="rdma",
        members=(below,) if below else (),
        rate_megabits_per_s=rate,
        up=up,
    )


def read_netdevs(tree: Tree, names: tuple[str, ...]) -> tuple[int | None, bool | None]:
    """Speed of the fastest network device, and whether one has a carrier."""
    speeds = [tree.number(f"{NET}/{name}/speed") for name in names]
    # -1 is "unknown", which older kernels print unsigned: virtio, a cable that is out.
    rates = [speed for speed in speeds if speed is not None and 0 < speed < 0xFFFFFFFF]
    return max(rates, default=None), any_of(read_carrier(tree, name) for name in names)


def read_carrier(tree: Tree, name: str) -> bool | None:
    carrier = tree.number(f"{NET}/{name}/carrier")
    if carrier is not None:
        return carrier == 1
    # A device that is administratively down refuses to say whether it has a carrier.
    return False if tree.read(f"{NET}/{name}/operstate") == "down" else None


def read_rdma_ports(tree: Tree, devices: tuple[str, ...]) -> tuple[int | None, bool | None]:
    """Rate of the fastest port that is not down, and whether one is active.

    The rate of a port that is down is a default of its firmware.
    """
    rates, states = [], []
    for folder in rdma_ports(tree, devices):
        state = tree.read(f"{folder}/state")  # "4: ACTIVE"
        active = state.endswith("ACTIVE") if state else None
        states.append(active)
        rate = tree.read(f"{folder}/rate")  # "25 Gb/sec (1X EDR)"
        if rate is None or active is False:
            continue
        match = re.match(r"(\d{1,6}(?:\.\d{1,4})?) Gb/sec", rate)
        if match is None:
            tree.surprise(f"{folder}/rate", "a rate in Gb/sec", rate)
        else:
            rates.append(int(float(match[1]) * 1000))
    return max(rates, default=None), any_of(states)


def rdma_ports(tree: Tree, devices: tuple[str, ...]) -> Iterator[str]:
    for device in devices:
        for port in tree.names(f"{RDMA}/{device}/ports"):
            yield f"{RDMA}/{device}/ports/{port}"


def any_of(answers: Iterable[bool | None]) -> bool | None:
    """True if one says so, None if nobody says anything."""
    said = [answer for answer in answers if answer is not None]
    return any(said) if said else None
