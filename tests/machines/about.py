"""Reads what `about.md` of a machine promises: counts, and choices written by hand before any run.

Lists of numbers are the kernel's (`0-3,8`), `-` is none. GPU numbers count in PCI order, as in the
product: `gpu-0` is the first NVIDIA function, lost ones counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.machines.description import FOLDER, ids

COUNTS = ("what", "count")
CHOICES = ("free", "offered", "size", "chosen", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One question to the choice, and the answer that follows from the design by hand."""

    free: tuple[int, ...]  # what is free on the node when the kubelet asks
    offered: tuple[int, ...]  # what the kubelet offers: often one NUMA node's part of it
    size: int
    chosen: tuple[int, ...]
    why: str


def names() -> tuple[str, ...]:
    """All recorded machines."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/about.md")))


def expectations(name: str) -> tuple[Expectation, ...]:
    """The rows of the table `| free | offered | size | chosen | why |`."""
    return tuple(
        Expectation(
            free=_numbers(free),
            offered=_numbers(offered),
            size=int(size),
            chosen=_numbers(chosen),
            why=why,
        )
        for free, offered, size, chosen, why in _rows(FOLDER / name / "about.md", CHOICES)
    )


def counts(name: str) -> dict[str, int]:
    """The rows of the table `| what | count |`."""
    return {what: int(count) for what, count in _rows(FOLDER / name / "about.md", COUNTS)}


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "-" else tuple(ids(text))


def _rows(path: Path, header: tuple[str, ...]) -> Iterator[list[str]]:
    """The cells of each row of the tables with this header."""
    inside = False
    for line in path.read_text().splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if tuple(cells) == header:
            inside = True
        elif inside and not set(line) <= set("|-: "):
            if len(cells) != len(header):
                raise ValueError(f"{path}: expected {len(header)} cells, read {line!r}")
            yield cells
