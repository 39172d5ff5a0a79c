"""Numbers and lists as people write them."""

from __future__ import annotations

from collections.abc import Sequence

from rte.model import Level

CELLS = {
    Level.UNKNOWN: "N/A",
    Level.SYS: "SYS",
    Level.NODE: "NODE",
    Level.PHB: "PHB",
    Level.PXB: "PXB",
    Level.PIX: "PIX",
}
"""NVML's and nvidia-smi's words."""


def size(count_bytes: int) -> str:
    """In the largest binary unit that leaves at least 1."""
    value, units = float(count_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{three_digits(value)} {units[0]}"


def speed(megabytes_per_s: int) -> str:
    return f"{three_digits(megabytes_per_s / 1000)} GB/s"


def three_digits(value: float) -> str:
    """At least; of large numbers all before the point."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def columns(rows: Sequence[Sequence[str]], *, gap: str = "  ") -> list[str]:
    """Rows with their cells left-aligned under each other, without empty columns or ends."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width
        ).rstrip()
        for row in rows
    ]
