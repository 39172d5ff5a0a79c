"""Reads `machine.toml`, the small description that a machine is made from.

The PCI tree is text, one function a line, two spaces a level, as NCCL's topology files have it:
a PCIe switch is one line. The downstream ports below it and the root ports above it, which sysfs
has as functions of their own, are added here.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.machines.products import GPUS, NICS

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One PCI function of the made machine."""

    address: str
    path: str  # below sys/devices
    bridges: tuple[str, ...]  # the bridges above it, nearest first
    root: str
    kind: str  # port, switch, gpu, nvswitch, nic, other
    vendor: int
    device: int
    class_code: int
    numa: int  # as the numa_node file says: -1 too
    local_cpus: str | None
    link: tuple[str, int] | None  # GT/s as sysfs writes it, lanes
    driver: str | None
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numa:
    """One NUMA node directory."""

    id: int
    cpus: str = ""
    memory_kb: int = 0
    online: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A whole machine.toml, with its base's below it."""

    name: str
    host: Mapping[str, Any]
    numa: tuple[Numa, ...]
    functions: tuple[Function, ...]  # in the order of the tree text
    nvlink: tuple[Mapping[str, Any], ...]
    gpu: Mapping[int, Mapping[str, Any]]  # by GPU number: what differs from the product
    virtual: tuple[Mapping[str, Any], ...]  # network devices without a PCI function

    def gpus(self) -> tuple[Function, ...]:
        """In PCI order, which numbers them."""
        found = [f for f in self.functions if f.kind == "gpu"]
        return tuple(sorted(found, key=lambda f: order(f.address)))

    def cpus(self) -> set[int]:
        return {cpu for node in self.numa if node.online for cpu in ids(node.cpus)}


def describe(name: str) -> Description:
    """The description of `tests/machines/<name>`; raises ValueError naming the line it stops at."""
    merged = _merged(name)
    numa = tuple(Numa(**row) for row in merged.get("numa", []))
    functions = tuple(_functions(merged["tree"], numa))
    twice = [address for address, n in Counter(f.address for f in functions).items() if n > 1]
    if twice:
        raise ValueError(f"{name}: two functions at {', '.join(twice)}")
    return Description(
        name=name,
        host=merged.get("host", {}),
        numa=numa,
        functions=functions,
        nvlink=tuple(merged.get("nvlink", [])),
        gpu={int(number): row for number, row in merged.get("gpu", {}).items()},
        virtual=tuple(merged.get("virtual", [])),
    )


def _merged(name: str) -> dict[str, Any]:
    """A machine's own tables over those of its `base`: whole tables, `host` key by key."""
    own = tomllib.loads((FOLDER / name / "machine.toml").read_text())
    base = own.pop("base", None)
    if base is None:
        return own
    below = _merged(base)
    tree = below["tree"] + own.pop("tree_more", "")
    for old, new in own.pop("tree_changes", {}).items():
        if old not in tree:
            raise ValueError(f"{name}: tree_changes: {old!r} is not in the tree of {base}")
        tree = tree.replace(old, new)
    return {**below, "tree": tree, **own, "host": {**below["host"], **own.get("host", {})}}


class _Level:
    """One open line of the tree while its children are read."""

    def __init__(self, function: Function | None, *, root: str, path: str, words: dict[str, str]):
        self.function, self.root, self.path, self.words = function, root, path, words
        self.ports: dict[str, Function] = {}


def _functions(tree: str, numa: tuple[Numa, ...]) -> Iterable[Function]:
    open_levels: list[_Level] = []
    for number, text in enumerate(tree.splitlines(), 1):
        line = text.split("#")[0].rstrip()
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        first, *rest = line.split()
        try:
            if depth == 0:
                words = dict(word.split("=", 1) for word in rest)
                under = words.get("under", "")
                path = f"{under}/{first}" if under else first
                open_levels = [_Level(None, root=first, path=path, words=words)]
                continue
            del open_levels[depth:]
            above = open_levels[-1]
            words = dict(word.split("=", 1) for word in rest[1:])
            address = _address(first, above.root)
            port = _port(address, above, words, numa)
            if port is not None and port.address not in above.ports:
                above.ports[port.address] = port
                yield port
            made = _function(address, rest[0], words, above=above, port=port, numa=numa)
            open_levels.append(_Level(made, root=above.root, path=made.path, words=above.words))
            yield made
        except (KeyError, ValueError, IndexError) as error:
            raise ValueError(f"tree line {number}: {text!r}: {error}") from error


def _address(text: str, root: str) -> str:
    domain = root.removeprefix("pci").split(":")[0]
    return text if text.count(":") == 2 else f"{domain}:{text}"


def _port(
    address: str, above: _Level, words: dict[str, str], numa: tuple[Numa, ...]
) -> Function | None:
    """The downstream or root port that leads to a bus; None for what sits on the root itself."""
    domain, bus, _ = address.split(":")
    if above.function is None:
        bus_above, ids_above = above.root.split(":")[1], above.words.get("ports", "8086:352a")
        first_device = 1
    else:
        _, own, _ = above.function.address.split(":")
        bus_above = f"{int(own, 16) + 1:02x}"
        ids_above, first_device = f"{above.function.vendor:04x}:{above.function.device:04x}", 0
    if above.function is None and bus == bus_above:
        return None
    by_bus = {port.words["bus"]: port for port in above.ports.values()}
    if bus in by_bus:
        return by_bus[bus]
    via = words.get("via", f"{bus_above}:{len(above.ports) + first_device:02x}.0")
    link = words.get("port") or words.get("link") or _product_link(words)
    if above.function is not None and above.function.link and "port" not in words:
        speed, width = above.function.link
        link = f"{speed}x{link.split('x')[1] if link else width}"
    port_words = {"id": ids_above, "link": link, "bus": bus, "driver": "pcieport"}
    return _function(f"{domain}:{via}", "port", port_words, above=above, port=None, numa=numa)


def _product_link(words: dict[str, str]) -> str:
    product = words.get("product", "")
    if product in GPUS:
        return GPUS[product].link
    return NICS[product].link if product in NICS else ""


DEFAULTS = {
    # kind: class, driver
    "port": (0x060400, "pcieport"),
    "switch": (0x060400, "pcieport"),
    "nvswitch": (0x068000, "nvidia-nvswitch"),
    "nvme": (0x010802, "nvme"),
    "vga": (0x030000, None),
    "other": (0x088000, None),
}


def _function(
    address: str,
    kind: str,
    words: dict[str, str],
    *,
    above: _Level,
    port: Function | None,
    numa: tuple[Numa, ...],
) -> Function:
    vendor, device, class_code, driver, link = _identity(kind, words)
    parent = port or above.function
    node = int(words.get("numa", above.words.get("numa", "-1")))
    cpus = words.get("cpus", above.words.get("cpus"))
    if cpus is None:
        cpus = next((n.cpus for n in numa if n.id == node), None)
    if cpus is None:  # numa_node -1: the kernel then calls every CPU local
        cpus = id_list(cpu for n in numa if n.online for cpu in ids(n.cpus))
    return Function(
        address=address,
        path=f"{parent.path if parent else above.path}/{address}",
        bridges=(parent.address, *parent.bridges) if parent else (),
        root=above.root,
        kind=kind,
        vendor=vendor,
        device=device,
        class_code=class_code,
        numa=node,
        local_cpus=cpus,
        link=_link(words.get("link", link)),
        driver=words.get("driver", driver) or None,
        words=words,
    )


def _identity(kind: str, words: dict[str, str]) -> tuple[int, int, int, str | None, str]:
    if kind == "gpu":
        gpu = GPUS[words["product"]]
        return 0x10DE, gpu.device, gpu.class_code, "nvidia", gpu.link
    if kind == "nic":
        nic = NICS[words["product"]]
        return nic.vendor, nic.device, nic.class_code, nic.driver, nic.link
    class_code, driver = DEFAULTS[kind]
    vendor, device = (int(part, 16) for part in words["id"].split(":"))
    return vendor, device, int(words.get("class", f"{class_code:x}"), 16), driver, ""


def _link(text: str) -> tuple[str, int] | None:
    if not text:
        return None
    speed, width = text.split("x")
    return speed, int(width)


def order(address: str) -> tuple[int, int, int, int]:
    """The sort key that puts addresses in numerical order."""
    domain, bus, rest = address.split(":")
    device, function = rest.split(".")
    return int(domain, 16), int(bus, 16), int(device, 16), int(function)


def ids(text: str) -> list[int]:
    """The numbers of a kernel list such as 0-3,8."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def id_list(numbers: Iterable[int]) -> str:
    """The kernel's spelling of a set of numbers."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
