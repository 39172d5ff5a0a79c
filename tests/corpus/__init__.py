"""Matrices and topology files of real machines, from public repositories and issues.

`matrices.txt` holds every matrix as it was found, damage included, behind a line `==== NAME`.
`xml.tar.xz` holds NCCL's and hwloc's files. `README.md` says where they are from and what was
taken out; `expected.tsv` says for each what must be read in it.
"""

from __future__ import annotations

import functools
import tarfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
MARK = "==== "


@functools.cache
def matrices() -> Mapping[str, str]:
    """By name, such as damaged/L20_g8n0_vllm-4263.txt: <product>_g<GPUs>n<NICs>_<source>."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (FOLDER / "matrices.txt").read_text(encoding="utf-8").split("\n"):
        if line.startswith(MARK):
            lines = found.setdefault(line.removeprefix(MARK), [])
        else:
            lines.append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


@functools.cache
def xml_files() -> Mapping[str, bytes]:
    """By name, such as nccl/azure-ncv4-topo.xml or hwloc/nvidiaDGX2.xml."""
    with tarfile.open(FOLDER / "xml.tar.xz") as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read() for name, file in files.items() if file is not None}
