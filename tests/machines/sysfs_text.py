"""A description as `sys.txt`: the files and links that a recording of the real node would hold."""

from __future__ import annotations

import posixpath
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from tests.machines.description import Description, Function, Numa, id_list

NAMES = uuid.UUID("6f0f6c8e-3a39-5c53-9a54-0e2d6c1f0b01")  # what all made-up identities grow from


def sys_text(machine: Description) -> str:
    """The whole file: sorted lines, the first a comment."""
    lines = {
        *_numa(machine),
        *_cpu(machine),
        *_proc(machine),
        *(line for f in machine.functions for line in _function(f, machine)),
        *(line for device in machine.virtual for line in _virtual(device)),
    }
    head = "# Made by tests/machines/make.py from machine.toml: change that file, not this one."
    return "\n".join([head, *sorted(lines)]) + "\n"


def _file(path: str, content: object) -> str:
    text = str(content).replace("\\", "\\\\").replace("\n", "\\n")
    return f"{path} = {text}"


def _symlink(path: str, target: str) -> str:
    """A link as the kernel writes it: up to where the target lies, and always down again."""
    above, name = posixpath.split(target)
    return f"{path} -> {posixpath.relpath(above, posixpath.dirname(path))}/{name}"


def _numa(machine: Description) -> Iterator[str]:
    base = "sys/devices/system/node"
    online = [node for node in machine.numa if node.online]
    yield _file(f"{base}/online", id_list(n.id for n in online))
    yield _file(f"{base}/possible", machine.host.get("possible", id_list(n.id for n in online)))
    yield _file(f"{base}/has_cpu", id_list(n.id for n in online if n.cpus))
    yield _file(f"{base}/has_memory", id_list(n.id for n in online if n.memory_kb))
    yield _file(f"{base}/has_normal_memory", id_list(n.id for n in online if n.memory_kb))
    for node in online:
        folder = f"{base}/node{node.id}"
        yield _file(f"{folder}/cpulist", node.cpus)
        yield _file(f"{folder}/distance", _distances(node, online, machine.host))
        yield _file(f"{folder}/meminfo", _meminfo(node))
        if node.memory_kb:
            yield from _huge_pages(folder, node, machine.host)


def _distances(node: Numa, online: list[Numa], host: Mapping[str, Any]) -> str:
    """One value for each online node, in order; `slit` lists rows, else one value for all."""
    if "slit" in host:
        row: str = host["slit"][[n.id for n in online].index(node.id)]
        return row
    return " ".join("10" if other.id == node.id else "21" for other in online)


def _meminfo(node: Numa) -> str:
    free = node.memory_kb * 15 // 16
    rows = [("MemTotal", node.memory_kb), ("MemFree", free), ("MemUsed", node.memory_kb - free)]
    text = [f"Node {node.id} {name + ':':<15} {kb:>9} kB" for name, kb in rows]
    return "\n".join([*text, f"Node {node.id} {'HugePages_Total:':<15} {0:>5}"])


def _huge_pages(folder: str, node: Numa, host: Mapping[str, Any]) -> Iterator[str]:
    sizes: Mapping[str, int] = host.get("huge_pages", {"2048": 0, "1048576": 0})
    for page_kb, count in sizes.items():
        pages = f"{folder}/hugepages/hugepages-{page_kb}kB"
        number = count if node.cpus else 0
        yield _file(f"{pages}/free_hugepages", number)
        yield _file(f"{pages}/nr_hugepages", number)
        yield _file(f"{pages}/surplus_hugepages", 0)


def _cpu(machine: Description) -> Iterator[str]:
    cpus = id_list(machine.cpus())
    yield _file("sys/devices/system/cpu/online", cpus)
    yield _file("sys/devices/system/cpu/possible", machine.host.get("possible_cpus", cpus))


def _proc(machine: Description) -> Iterator[str]:
    yield _file("proc/sys/kernel/random/boot_id", uuid.uuid5(NAMES, machine.name + "/boot"))
    for number, gpu in enumerate(machine.gpus()):
        status = machine.gpu.get(number, {}).get("numa_status")
        if status:
            yield _file(f"proc/driver/nvidia/gpus/{gpu.address}/numa_status", status)


IDLE = "2.5"  # GT/s: where an idle GPU's link falls
BRIDGES = ("port", "switch")  # deep trees have many: they say only what is asked of a bridge


def _function(f: Function, machine: Description) -> Iterator[str]:
    folder = f"sys/devices/{f.path}"
    yield _file(f"{folder}/class", f"0x{f.class_code:06x}")
    yield _file(f"{folder}/vendor", f"0x{f.vendor:04x}")
    yield _file(f"{folder}/device", f"0x{f.device:04x}")
    yield _file(f"{folder}/numa_node", f.numa)
    if f.kind not in BRIDGES or f.numa < 0:
        yield _file(f"{folder}/local_cpulist", f.local_cpus)
    if f.link:
        speed, width = f.link
        yield _file(f"{folder}/max_link_speed", _speed(speed))
        yield _file(f"{folder}/max_link_width", width)
        if f.kind == "gpu":
            yield _file(f"{folder}/current_link_speed", _speed(IDLE))
            yield _file(f"{folder}/current_link_width", width)
    yield _symlink(f"sys/bus/pci/devices/{f.address}", folder)
    if f.driver:
        yield _symlink(f"{folder}/driver", f"sys/bus/pci/drivers/{f.driver}")
    if f.kind == "nic":
        yield from _nic(f, folder)
    yield from _virtualization(f, folder, machine)


def _speed(gigatransfers: str) -> str:
    """As kernels since 5.8 write it; what is no number is written as it stands."""
    try:
        return f"{float(gigatransfers):.1f} GT/s PCIe"
    except ValueError:
        return gigatransfers


def _virtualization(f: Function, folder: str, machine: Description) -> Iterator[str]:
    if "vfs" in f.words:
        enabled, total = f.words["vfs"].split("/")
        yield _file(f"{folder}/sriov_totalvfs", total)
        yield _file(f"{folder}/sriov_numvfs", enabled)
        children = [v for v in machine.functions if v.words.get("physfn") == f.address]
        for number, child in enumerate(children):
            yield _symlink(f"{folder}/virtfn{number}", f"sys/devices/{child.path}")
    if "physfn" in f.words:
        parent = next(p for p in machine.functions if p.address == f.words["physfn"])
        yield _symlink(f"{folder}/physfn", f"sys/devices/{parent.path}")


def _nic(f: Function, folder: str) -> Iterator[str]:
    up = f.words.get("state", "up") == "up"
    gbps = int(f.words.get("gbps", "0"))
    infiniband = f.class_code == 0x020700
    holder = folder
    if f.words.get("product") == "virtio":  # the netdev hangs from the virtio device below
        holder = f"{folder}/virtio{f.words['virtio']}"
    net = f.words.get("net")
    if net == "moved":  # into another network namespace: the folder stays, empty
        yield f"{folder}/net/"
    elif net:
        yield from _netdev(net, f"{holder}/net/{net}", holder, gbps=gbps, up=up, ib=infiniband)
    rdma = f.words.get("rdma")
    if rdma:
        yield from _rdma(rdma, folder, gbps=gbps, up=up, ib=infiniband)


def _netdev(
    name: str, folder: str, device: str | None, *, gbps: int, up: bool, ib: bool = False
) -> Iterator[str]:
    yield _symlink(f"sys/class/net/{name}", folder)
    if device:
        yield _symlink(f"{folder}/device", device)
    yield _file(f"{folder}/address", _mac(folder))
    yield _file(f"{folder}/carrier", int(up))
    yield _file(f"{folder}/operstate", "up" if up else "down")
    yield _file(f"{folder}/speed", gbps * 1000 if up and gbps else -1)
    yield _file(f"{folder}/type", 32 if ib else 1)


def _mac(seed: str) -> str:
    tail = uuid.uuid5(NAMES, seed).bytes[:5]
    return ":".join(f"{byte:02x}" for byte in (0x02, *tail))


LANES = {400: "4X NDR", 200: "4X HDR", 100: "4X EDR", 50: "2X HDR", 25: "1X EDR"}


def _rdma(name: str, function: str, *, gbps: int, up: bool, ib: bool) -> Iterator[str]:
    folder = f"{function}/infiniband/{name}"
    yield _symlink(f"sys/class/infiniband/{name}", folder)
    yield _symlink(f"{folder}/device", function)
    port = f"{folder}/ports/1"
    yield _file(f"{port}/link_layer", "InfiniBand" if ib else "Ethernet")
    yield _file(f"{port}/rate", f"{gbps} Gb/sec ({LANES.get(gbps, '4X')})")
    yield _file(f"{port}/state", "4: ACTIVE" if up else "1: DOWN")


def _virtual(device: Mapping[str, Any]) -> Iterator[str]:
    """A bond, a bridge, or a netvsc device on the VMBus."""
    name, gbps = device["name"], int(device.get("gbps", 0))
    if "vmbus" in device:
        holder = f"sys/devices/{device['vmbus']}"
        yield from _netdev(name, f"{holder}/net/{name}", holder, gbps=gbps, up=True)
        yield _symlink(f"{holder}/driver", "sys/bus/vmbus/drivers/hv_netvsc")
        yield _symlink(f"{holder}/subsystem", "sys/bus/vmbus")
        for lower, place in device.get("lower", {}).items():
            yield _symlink(f"{holder}/net/{name}/lower_{lower}", f"sys/devices/{place}/net/{lower}")
        return
    folder = f"sys/devices/virtual/net/{name}"
    yield from _netdev(name, folder, None, gbps=gbps, up=True)
    if "members" in device:
        yield _file(f"{folder}/bonding/slaves", " ".join(device["members"]))
        yield _file(f"{folder}/bonding/mode", "802.3ad 4")
