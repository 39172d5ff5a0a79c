"""Recorded machines: a folder of text that a person can read, edit, and turn back into a Machine.

`sys.txt` holds one file of /sys or /proc a line, sorted:

    sys/devices/system/node/node0/cpulist = 0-55,112-167
    sys/bus/pci/devices/0000:3b:00.0 -> ../../../devices/pci0000:37/0000:37:01.0/0000:3b:00.0
    sys/devices/pci0000:37/0000:37:01.0/0000:3b:00.0/net/

A line is a file without its final newline (other newlines are `\\n`, backslashes `\\\\`), a
symbolic link, or an empty directory. Lines that start with # are comments.
"""

from __future__ import annotations

import os
import posixpath
import tempfile
from collections.abc import Callable, Iterable, Iterator
from glob import iglob
from pathlib import Path
from typing import NamedTuple

import msgspec

from rte.discovery import assemble
from rte.discovery.reading import NvmlReading
from rte.discovery.sysfs import GONE, read_host
from rte.model import Machine

SYS = "sys.txt"
NVML = "nvml.json"

# A recording comes from a stranger's bug report. The largest real one has 6 000 lines.
MAX_BYTES = 32 << 20


class RecordedError(Exception):
    """A folder that is no recorded machine."""

    def __init__(self, message: str, *, path: Path) -> None:
        super().__init__(message)
        self.path = path


def read_recorded(folder: Path) -> Machine:
    """The machine that a folder holds. Raises RecordedError, and SysfsError for a useless tree."""
    with tempfile.TemporaryDirectory(prefix="rte-recorded-", dir=memory_folder()) as root:
        unpack(folder / SYS, Path(root))
        host = read_host(Path(root, "sys"), proc=Path(root, "proc"))
    return assemble(host, read_nvml(folder / NVML))


def memory_folder() -> str | None:
    """Where a thousand small files are made in 30 ms and not in 800; None for the usual place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


def read_nvml(path: Path) -> NvmlReading | None:
    """NVML's answers; None when the recording has none. Raises RecordedError."""
    try:
        return msgspec.json.decode(read_bounded(path), type=NvmlReading)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise RecordedError(f"{path}: expected an NVML reading: {error}", path=path) from error


def unpack(sys_txt: Path, root: Path) -> None:
    """Makes the recorded files, links and directories below root.

    Raises RecordedError for a line that is none of the three, or that leads out of root.
    """
    try:
        text = read_bounded(sys_txt)
    except OSError as error:
        message = f"{sys_txt}: expected a recorded tree: {error.strerror}"
        raise RecordedError(message, path=sys_txt) from error
    try:
        entries = list(parse(text.decode()))
        make(entries, root)
    except (ValueError, OSError) as error:
        raise RecordedError(f"{sys_txt}: {error}", path=sys_txt) from error


def read_bounded(path: Path) -> bytes:
    """What a file holds. Raises OSError, and RecordedError for more than MAX_BYTES."""
    with path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise RecordedError(f"{path}: more than {MAX_BYTES} bytes", path=path)
    return text


class Entry(NamedTuple):
    """One line: a file's content, or a link's target, or neither for an empty directory."""

    path: str
    content: str | None = None
    target: str | None = None

    @property
    def is_directory(self) -> bool:
        return self.content is None and self.target is None


def parse(text: str) -> Iterator[Entry]:
    """The entries of a `sys.txt`. Raises ValueError with the line's number."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or line.startswith("#"):
            continue
        try:
            yield parse_line(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error


def parse_line(line: str) -> Entry:
    path, is_link, target = line.partition(" -> ")
    if is_link and " =" not in path:
        return Entry(path, target=leading_inside(path, target.rstrip("/")))
    path, is_file, content = line.partition(" =")
    if is_file:
        return Entry(inside(path), content=unescape(content.removeprefix(" ")))
    if line.endswith("/"):
        return Entry(inside(line.rstrip("/")))
    raise ValueError(f"expected 'path = content', 'path -> target' or 'path/', read {line[:80]!r}")


def inside(path: str) -> str:
    """The path, if it is plainly below sys or proc."""
    parts = path.split("/")
    if parts[0] not in ("sys", "proc") or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"{path[:80]!r} is not below sys/ or proc/")
    return path


def leading_inside(path: str, target: str) -> str:
    """The target, if it first climbs and then descends, as sysfs's do, and stays inside."""
    folders, steps = inside(path).split("/")[:-1], target.split("/")
    climbed = next((n for n, step in enumerate(steps) if step != ".."), len(steps))
    if climbed >= len(folders):
        raise ValueError(f"{target[:80]!r} leads out of sys/ or proc/")
    inside("/".join((*folders[: len(folders) - climbed], *steps[climbed:])))
    return target


def make(entries: Iterable[Entry], root: Path) -> None:
    """Directories, files, links, in this order: nothing is ever made through a link."""
    entries = tuple(entries)
    folders = {e.path if e.is_directory else posixpath.dirname(e.path) for e in entries}
    for folder in sorted(folders):
        os.makedirs(f"{root}/{folder}", exist_ok=True)
    for entry in entries:
        if entry.content is not None:
            with open(f"{root}/{entry.path}", "x", encoding="utf-8", newline="") as file:
                file.write(entry.content + "\n")
    for entry in entries:
        if entry.target is not None:
            os.symlink(entry.target, f"{root}/{entry.path}")


def escape(content: str) -> str:
    return content.replace("\\", "\\\\").replace("\n", "\\n")


def unescape(content: str) -> str:
    if "\\" not in content:
        return content
    return "\\".join(part.replace("\\n", "\n") for part in content.split("\\\\"))


# Writing. Whole globs, also of what nobody reads today: a recording cannot be made again.

MACHINE = (
    "devices/system/cpu/cpu*/topology/thread_siblings_list",
    "devices/system/cpu/isolated",
    "devices/system/cpu/nohz_full",
    "devices/system/cpu/offline",
    "devices/system/cpu/online",
    "devices/system/cpu/possible",
    "devices/system/cpu/present",
    "devices/system/cpu/smt/active",
    "devices/system/node/has_*",
    "devices/system/node/online",
    "devices/system/node/possible",
    "devices/system/node/node*/cpulist",
    "devices/system/node/node*/distance",
    "devices/system/node/node*/meminfo",
    "devices/system/node/node*/access*/initiators/*",
    "devices/system/node/node*/hugepages/*/*_hugepages",
    "devices/virtual/dmi/id/bios_version",
    "devices/virtual/dmi/id/board_name",
    "devices/virtual/dmi/id/product_name",
    "devices/virtual/dmi/id/sys_vendor",
    "devices/virtual/memory_tiering/*/nodelist",
    "kernel/mm/hugepages/*/nr_hugepages",
)
FUNCTION = (
    "acpi_index",
    "ari_enabled",
    "class",
    "current_link_*",
    "device",
    "driver",
    "enable",
    "infiniband",
    "iommu_group",
    "label",
    "local_cpulist",
    "max_link_*",
    "net",
    "numa_node",
    "physfn",
    "power_state",
    "revision",
    "sriov_*",
    "subsystem_device",
    "subsystem_vendor",
    "vendor",
    "virtfn*",
    "virtio*/net",
)
NETDEV = (
    "addr_assign_type",
    "address",
    "bonding/active_slave",
    "bonding/mode",
    "bonding/slaves",
    "carrier",
    "dev_id",
    "dev_port",
    "device",
    "device/driver",
    "device/numa_node",
    "duplex",
    "flags",
    "ifindex",
    "iflink",
    "lower_*",
    "master",
    "mtu",
    "operstate",
    "phys_port_id",
    "phys_port_name",
    "phys_switch_id",
    "speed",
    "type",
    "upper_*",
)
RDMA = (
    "board_id",
    "device",
    "fw_ver",
    "hca_type",
    "node_guid",
    "node_type",
    "parent",
    "ports/*/gid_attrs/ndevs/0",
    "ports/*/gid_attrs/types/0",
    "ports/*/link_layer",
    "ports/*/phys_state",
    "ports/*/rate",
    "ports/*/state",
    "sys_image_guid",
)
PROC = (
    "driver/nvidia/gpus/*/information",
    "driver/nvidia/gpus/*/numa_status",
    "driver/nvidia/params",
    "driver/nvidia/version",
    "sys/kernel/osrelease",
    "sys/kernel/random/boot_id",
)


def pack(sys: Path, proc: Path | None = None) -> str:
    """The `sys.txt` of a tree: its lines sorted; comments say which files could not be read."""
    lines = set(lines_of(sys, "sys", "", MACHINE))
    lines |= set(class_lines(sys, "bus/pci/devices", FUNCTION))
    lines |= set(class_lines(sys, "class/net", NETDEV, keep=is_worth_keeping))
    lines |= set(class_lines(sys, "class/infiniband", RDMA))
    if proc:
        lines |= set(lines_of(proc, "proc", "", PROC))
    return "".join(f"{line}\n" for line in sorted(lines))


def class_lines(
    root: Path,
    folder: str,
    patterns: Iterable[str],
    *,
    keep: Callable[[str], bool] = lambda device: True,
) -> Iterator[str]:
    """The links of a class, and the files of the devices behind them at their real places."""
    for entry in sorted(iglob("*", root_dir=root / folder)):
        device = os.path.realpath(root / folder / entry)
        place = os.path.relpath(device, os.path.realpath(root))
        if not os.path.isdir(device) or place.startswith("..") or not keep(device):
            continue
        yield from lines_of(root, "sys", folder, (entry,))
        yield from lines_of(root, "sys", place, patterns)


def is_worth_keeping(netdev: str) -> bool:
    """Whether a network device is more than a pod's end of a cable: a function's, or a bond."""
    return "/devices/virtual/" not in netdev or os.path.isdir(f"{netdev}/bonding")


def lines_of(root: Path, top: str, folder: str, patterns: Iterable[str]) -> Iterator[str]:
    """A line for each file, link and empty directory that the patterns find."""
    for pattern in patterns:
        for name in iglob(pattern, root_dir=root / folder):
            path = root / folder / name
            # A file found through a link is written where it really is.
            real = os.path.relpath(os.path.realpath(path.parent), os.path.realpath(root))
            place = posixpath.normpath(posixpath.join(top, real, path.name))
            try:
                yield from line_of(path, place)
            except OSError as error:
                if error.errno not in GONE:
                    yield f"# {place}: {error.strerror}"


def line_of(path: Path, place: str) -> Iterator[str]:
    if path.is_symlink():
        yield f"{place} -> {os.readlink(path).rstrip('/')}"
    elif not path.is_dir():
        content = path.read_bytes().decode(errors="replace").removesuffix("\n")
        yield f"{place} = {escape(content)}".rstrip(" ")
    elif not any(path.iterdir()):
        yield f"{place}/"
