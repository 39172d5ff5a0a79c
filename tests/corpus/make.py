"""Puts collected files into the two archives: python -m tests.corpus.make FOLDER.

FOLDER has `nvidia-smi-topo/` (with `damaged/` and `partial/`), `nccl-topo/` and `hwloc-xml/`.
What names a person's machine is taken out on the way: hardware addresses, serials, UUIDs, GUIDs.
Files of copyleft repositories are reduced to the facts that a topology consists of.
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

from tests.corpus import FOLDER, MARK

COMMENTS_LEFT_OUT = ("# via:", "# gpus reported", "# lscpu")
IDENTIFYING = re.compile(
    r"(?i)address|gid\d|guid|serial|asset|hostname|uuid|lid$|lmc$|cgroup|pcislot|userdata"
)
COPYLEFT = ("fluxcore-", "fluxsched-")
FACTS = {
    "topology": ("version",),
    "object": (
        *("type", "subtype", "os_index", "cpuset", "nodeset", "gp_index", "name", "osdev_type"),
        *("bridge_type", "bridge_pci", "pci_busid", "pci_type", "pci_link_speed", "local_memory"),
    ),
    "info": ("name", "value"),
    "page_type": ("size", "count"),
    "distances": ("nbobjs", "relative_depth", "latency_base"),
    "latency": ("value",),
    "distances2": ("type", "nbobjs", "kind", "name", "indexing"),
    "distances2hetero": ("nbobjs", "kind", "name"),
    "indexes": (),
    "u64values": (),
}
DROPPED = {"Core", "PU", "L1Cache", "L2Cache", "L1iCache", "Cache", "Misc"}
KEPT_INFO = re.compile("GPUModel|GPUVendor|NVIDIAUUID|CUDAGlobalMemorySize|PCIBusID|Port[0-9]State")


def main(folder: Path) -> None:
    with (FOLDER / "matrices.txt").open("w", encoding="utf-8", newline="") as file:
        for name, text in matrices(folder / "nvidia-smi-topo"):
            file.write(f"{MARK}{name}\n{text}")
    with tarfile.open(FOLDER / "xml.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted((folder / "nccl-topo").glob("*.xml")):
            text = path.read_text()
            for number, guid in enumerate(sorted(set(re.findall('guid="([^"]+)"', text)))):
                text = text.replace(f'guid="{guid}"', f'guid="0x{number:x}"')
            add(archive, f"nccl/{path.name}", text)
        for path in sorted((folder / "hwloc-xml").glob("*.xml")):
            text = path.read_text(encoding="utf-8", errors="replace")
            reduced = reduce(text) if path.name.startswith(COPYLEFT) else stripped(text)
            add(archive, f"hwloc/{path.name}", reduced)


def matrices(folder: Path) -> Iterator[tuple[str, str]]:
    for part in ("", "damaged", "partial"):
        for path in sorted((folder / part).glob("*.txt")):
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            kept = [line for line in lines if not line.startswith(COMMENTS_LEFT_OUT)]
            text = "\n".join(kept)
            yield f"{part}/{path.name}".lstrip("/"), text if text.endswith("\n") else f"{text}\n"


def add(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    archive.addfile(member, io.BytesIO(content))


def stripped(text: str) -> str:
    """The text with each identifying <info> and name emptied; GPUs keep a UUID that is made up."""
    uuids = count(1)

    def info(match: re.Match[str]) -> str:
        name = match[2]
        if name == "NVIDIAUUID":
            value = f"GPU-00000000-0000-0000-0000-{next(uuids):012x}"
        elif IDENTIFYING.search(name):
            value = ""
        else:
            return match[0]
        return f"{match[1]}{name}{match[3]}{value}{match[5]}"

    return re.sub(r'(<info name=")([^"]*)(" value=")([^"]*)(")', info, text)


def reduce(text: str) -> str:
    """Only elements and attributes that say where things are, in hwloc's words."""
    root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", stripped(text)))
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + "\n".join(facts(root)) + "\n"


def facts(element: ElementTree.Element) -> Iterator[str]:
    if element.tag not in FACTS:
        return
    if element.tag == "object" and element.get("type") in DROPPED:
        for child in element:
            yield from facts(child) if child.tag == "object" else ()
        return
    if element.tag == "info" and not KEPT_INFO.fullmatch(element.get("name", "")):
        return
    words = "".join(
        f" {name}={quoteattr(element.attrib[name])}"
        for name in FACTS[element.tag]
        if name in element.attrib
    )
    inner = [line for child in element for line in facts(child)]
    said = (element.text or "").strip()
    if inner:
        yield f"<{element.tag}{words}>"
        yield from inner
        yield f"</{element.tag}>"
    else:
        yield (
            f"<{element.tag}{words}>{said}</{element.tag}>" if said else f"<{element.tag}{words}/>"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
