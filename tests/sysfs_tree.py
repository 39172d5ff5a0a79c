"""Small sysfs trees, written as the lines of a `sys.txt`."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Iterable
from pathlib import Path
from textwrap import dedent

from rte.discovery.sysfs import Host, read_host
from rte.sources.recorded import memory_folder, unpack

TWO_NODES = """
sys/devices/system/node/online = 0-1
sys/devices/system/node/node0/cpulist = 0-3
sys/devices/system/node/node0/distance = 10 21
sys/devices/system/node/node1/cpulist = 4-7
sys/devices/system/node/node1/distance = 21 10
"""


def tree(root: Path, *parts: str | Iterable[str]) -> Path:
    """Makes the tree that the lines describe; gives its sys."""
    lines = [
        line
        for part in parts
        for line in (dedent(part).splitlines() if isinstance(part, str) else part)
    ]
    root.mkdir(parents=True, exist_ok=True)
    text = root / "sys.txt"
    text.write_text("\n".join(lines) + "\n")
    unpack(text, root)
    return root / "sys"


def host(*parts: str | Iterable[str]) -> Host:
    """What is read from the tree that the lines describe."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        sys = tree(Path(folder), *parts)
        return read_host(sys, proc=Path(folder, "proc"))


def function(
    path: str,
    *,
    kind: str = "0x030200",
    vendor: str = "0x10de",
    device: str = "0x2330",
    driver: str | None = None,
    **files: str,
) -> list[str]:
    """The lines of a PCI function at a path below /sys/devices; further attributes by name."""
    folder, address = f"sys/devices/{path}", posixpath.basename(path)
    attributes = {"class": kind, "vendor": vendor, "device": device, **files}
    lines = [f"{folder}/{name} = {value}" for name, value in attributes.items()]
    lines.append(f"sys/bus/pci/devices/{address} -> ../../../devices/{path}")
    if driver:
        lines.append(link(f"{folder}/driver", f"sys/bus/pci/drivers/{driver}"))
    return lines


def bridge(path: str, **files: str) -> list[str]:
    return function(path, kind="0x060400", vendor="0x1000", device="0xc030", **files)


def nic(path: str, **files: str) -> list[str]:
    return function(path, **{"kind": "0x020000", "vendor": "0x15b3", "device": "0x1021", **files})


def netdev(path: str, **files: str) -> list[str]:
    """The lines of a network device at a path below /sys/devices that ends in net/NAME."""
    return entry("net", path, {"operstate": "up", **files})


def rdma(path: str, **ports: str) -> list[str]:
    """The lines of an RDMA device at a path that ends in infiniband/NAME; `state|rate` a port."""
    files = {}
    for port, text in ports.items():
        state, rate = text.split("|")
        files[f"ports/{port.removeprefix('port')}/state"] = state
        files[f"ports/{port.removeprefix('port')}/rate"] = rate
    return entry("infiniband", path, files)


def entry(kind: str, path: str, files: dict[str, str]) -> list[str]:
    name = posixpath.basename(path)
    return [
        *(f"sys/devices/{path}/{file} = {text}" for file, text in files.items()),
        f"sys/class/{kind}/{name} -> ../../devices/{path}",
    ]


def link(path: str, target: str) -> str:
    """A link as sysfs has them, relative to the folder it lies in."""
    return f"{path} -> {posixpath.relpath(target, posixpath.dirname(path))}"
