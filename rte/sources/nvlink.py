"""NVLinks behind the numbers of lanes that a source says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rte.model import LinkPeer, NvLinkEnd, PciAddress

MOST_LANES = 18  # of one GPU until NVLink 5; whoever has more "to each" has them to switches


def link_ends(
    row: Mapping[PciAddress, Mapping[PciAddress, int]], speed: Mapping[PciAddress, int]
) -> Mapping[PciAddress, tuple[NvLinkEnd, ...]]:
    """The ends of NVLinks behind what each GPU says of its lanes to each other.

    Lanes to switches where a GPU would else have more than there are, else to each GPU.
    """
    own = {a: max(row[a].values(), default=0) for a in row}
    switched = {a for a in row if sum(row[a].values()) > MOST_LANES}
    # All or none, and only if switches explain every cell: what is said is never smoothed.
    reached = {b for a in switched for b, n in row[a].items() if n} | switched
    explained = all(
        row[a][b] == (min(own[a], own[b]) if b in reached else 0) for a in reached for b in row[a]
    )

    def ends(gpu: PciAddress) -> Iterator[NvLinkEnd]:
        if explained and gpu in reached:
            yield NvLinkEnd(peer=LinkPeer.SWITCH, lanes=own[gpu], lane_megabytes_per_s=speed[gpu])
            return
        for other, count in row[gpu].items():
            if count:
                yield NvLinkEnd(
                    peer=LinkPeer.GPU,
                    remote=other,
                    lanes=count,
                    lane_megabytes_per_s=speed[gpu],
                )

    return {gpu: tuple(ends(gpu)) for gpu in row}


def lane_speed(product: str | None) -> int:
    """MB/s one way of an NVLink lane; 25 GB/s unless the product is known for another."""
    if product and re.search(r"\bP100\b", product):
        return 20_000
    if product and re.search(r"\bG?B[123]00\b", product):
        return 50_000
    return 25_000
