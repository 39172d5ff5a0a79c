"""The largest request that the kubelet would still admit aligned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import combinations
from operator import or_

from rte.model import DeviceId
from rte.publish.accounting import DevicePool

MAX_MASK_ZONES = 8
"""More zones than the Topology Manager's default limit are looked at one by one and together."""


def largest_aligned(pool: DevicePool, *, several: bool) -> int:
    """Devices of the largest request that one NUMA node can still satisfy.

    With `several` (policy restricted, best-effort) also of the largest that is aligned across
    nodes: a request may only spread over as many nodes as an empty node would need for it.
    """
    bits = bit_by_id(pool)
    return largest(pool, bits=bits, several=several, size=int.bit_count)


def largest_linked(
    pool: DevicePool, *, several: bool, linked: Mapping[DeviceId, Iterable[DeviceId]]
) -> int:
    """The same of devices that all reach each other over NVLink among themselves."""
    bits = bit_by_id(pool)
    peers = [mask(linked.get(device, ()), bits) for device in bits]
    return largest(pool, bits=bits, several=several, size=lambda free: largest_part(free, peers))


def bit_by_id(pool: DevicePool) -> dict[DeviceId, int]:
    return {device: bit for bit, device in enumerate(sorted(frozenset().union(*pool.capacity)))}


def largest(
    pool: DevicePool,
    *,
    bits: Mapping[DeviceId, int],
    several: bool,
    size: Callable[[int], int],
) -> int:
    capacity = [mask(ids, bits) for ids in pool.capacity]
    available = [mask(ids, bits) for ids in pool.available]
    if not several:
        return max(map(size, available), default=0)
    best = fits_narrower = 0
    for width in widths(len(capacity)):
        most_available = max(map(size, unions(available, width)))
        # A request that empty zones of a smaller number could hold is not aligned at this width.
        if most_available > fits_narrower:
            best = max(best, most_available)
        fits_narrower = max(map(int.bit_count, unions(capacity, width)))
    return best


def widths(zones: int) -> Iterable[int]:
    return range(1, zones + 1) if zones <= MAX_MASK_ZONES else (1, zones)


def unions(masks: Sequence[int], width: int) -> Iterable[int]:
    return (reduce(or_, chosen) for chosen in combinations(masks, width))


def mask(ids: Iterable[DeviceId], bits: Mapping[DeviceId, int]) -> int:
    return sum(1 << bits[device] for device in set(ids) if device in bits)


def largest_part(free: int, peers: Sequence[int]) -> int:
    """Devices in the largest connected part of the free ones; one alone reaches itself."""
    best = 0
    while free:
        part = frontier = free & -free
        while frontier:
            device = frontier.bit_length() - 1
            reached = peers[device] & free & ~part
            part |= reached
            frontier = (frontier & ~(1 << device)) | reached
        best = max(best, part.bit_count())
        free &= ~part
    return best
