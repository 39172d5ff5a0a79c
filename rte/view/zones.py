"""What NodeResourceTopology objects say of each NUMA node, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rte.model import base_units
from rte.view.words import size

Body = Mapping[str, Any]

LARGEST = {
    "largestAligned.": "largest",
    "largestNvlinkAligned.": "linked",
}


def available(body: Body) -> dict[str, dict[str, int]]:
    """Zone → resource → what is free, in base units; NUMA nodes only."""
    return {
        zone["name"]: {r["name"]: base_units(r["available"]) for r in zone.get("resources", ())}
        for zone in body.get("zones", ())
        if zone["type"] == "Node"
    }


def zone_table(moments: Sequence[tuple[str, Body]]) -> list[list[str]]:
    """A row for each NUMA node and resource: capacity, allocatable, and what is free at each of
    the named moments. The first row names the columns."""
    latest = moments[-1][1]
    rows = [["", "", "capacity", "allocatable", *(name for name, _ in moments)]]
    free = [available(body) for _, body in moments]
    for zone in latest.get("zones", ()):
        name = zone["name"]
        for number, resource in enumerate(r for r in zone.get("resources", ())):
            of = resource["name"]
            rows.append(
                [
                    name if not number else "",
                    of,
                    amount(of, base_units(resource["capacity"])),
                    amount(of, base_units(resource["allocatable"])),
                    *(amount(of, at.get(name, {}).get(of)) for at in free),
                ]
            )
    return rows


def forecast_table(moments: Sequence[tuple[str, Body]]) -> list[list[str]]:
    """A row for each forecast: the largest request that would still be admitted."""
    said = [{a["name"]: a["value"] for a in body.get("attributes", ())} for _, body in moments]
    rows = []
    for prefix, words in LARGEST.items():
        for name in sorted(n for n in said[-1] if n.startswith(prefix)):
            resource = name.removeprefix(prefix)
            rows.append([words, resource, "", "", *(at.get(name, "-") for at in said)])
    return rows


def amount(resource: str, units: int | None) -> str:
    """An amount as people write it."""
    if units is None:
        return "-"
    if resource == "memory" or resource.startswith("hugepages-"):
        return size(units)
    return str(units)


def right_aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[list[str]]:
    """The cells padded to their columns: the first `left` columns to the left, numbers right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
