"""Something else than this node → Machine: a folder, or a text that others wrote."""

from __future__ import annotations

import re
from pathlib import Path

from rte.model import Machine
from rte.sources.problem import SourceError

__all__ = ["MAX_BYTES", "UNDERSTOOD", "SourceError", "parse_source", "read_source"]

# The largest real text is hwloc's of a machine with 384 CPUs: 350 KB.
MAX_BYTES = 16 << 20

UNDERSTOOD = (
    "a folder that `rte record` wrote, the output of `nvidia-smi topo -m`, NCCL's topology XML, "
    "hwloc's XML (`lstopo machine.xml`), or a GPUFabric or NodeResourceTopology as YAML or JSON"
)


def read_source(path: Path) -> Machine:
    """The machine in a folder or file; what a file is, its content says. Raises SourceError."""
    try:
        if path.is_dir():
            return read_folder(path)
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SourceError(f"{path}: cannot be read: {reason}; expected {UNDERSTOOD}") from error
    return parse_source(text, str(path))


def parse_source(text: bytes, name: str) -> Machine:
    """The machine that a text describes; `name` is what errors call it. Raises SourceError."""
    if len(text) > MAX_BYTES:
        raise SourceError(f"{name}: more than {MAX_BYTES >> 20} MiB; expected {UNDERSTOOD}")
    start = text[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith((b"<", b"\xff\xfe<", b"\xfe\xff\0<")):
        return parse_xml_source(text, name)
    plain = text.decode(errors="replace")
    if start.startswith(b"{") or re.search(
        r"^kind:\s*[\"']?(?:NodeResourceTopology|GPUFabric|List)", plain, re.MULTILINE
    ):
        return parse_object_source(plain, name)
    if re.search(r"GPU[0-9]", plain):
        from rte.sources.smi import parse_smi  # noqa: PLC0415 - one of several

        return parse_smi(plain, name)
    raise SourceError(f"{name}: nothing that is understood; expected {UNDERSTOOD}")


def parse_object_source(text: str, name: str) -> Machine:
    from rte.sources.objects import FABRIC, parse_object  # noqa: PLC0415 - one of several

    value = parse_object(text, name)
    if value["kind"] == FABRIC:
        from rte.sources.fabric import fabric_machine  # noqa: PLC0415 - one of several

        return fabric_machine(value, name)
    from rte.sources.nrt import nrt_machine  # noqa: PLC0415 - one of several

    return nrt_machine(value, name)


def parse_xml_source(text: bytes, name: str) -> Machine:
    from rte.sources.xml import parse_xml  # noqa: PLC0415 - one of several

    root = parse_xml(text, name)
    if root.tag == "topology":
        from rte.sources.hwloc import hwloc_machine  # noqa: PLC0415 - one of several

        return hwloc_machine(root, name)
    if root.tag in ("system", "graphs"):
        from rte.sources.nccl import nccl_machine  # noqa: PLC0415 - one of several

        return nccl_machine(root, name)
    raise SourceError(
        f"{name}: line {root.line}: XML of a <{root.tag[:60]}>; expected NCCL's <system> or "
        "hwloc's <topology>"
    )


def read_folder(path: Path) -> Machine:
    from rte.discovery.sysfs import SysfsError  # noqa: PLC0415 - one of several
    from rte.sources.recorded import RecordedError, read_recorded  # noqa: PLC0415 - one of several

    try:
        return read_recorded(path)
    except (RecordedError, SysfsError) as error:
        raise SourceError(str(error)) from error
