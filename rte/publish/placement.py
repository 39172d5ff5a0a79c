"""Which container is on which NUMA node, in the few characters of numaplacement v0.1.

Schedulers that preempt read it to know what a victim would free. Containers are named by their
place in the sorted list of hashes, so both sides must count the same containers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from xxhash import xxh64_intdigest

METADATA = "topology.node.k8s.io/numaplacement-metadata"
"""Name of the object's attribute."""
VECTOR = "topology.node.k8s.io/numaplacement-vector"
"""Name of the zones' attribute."""

# Printable ASCII that JSON does not escape: 64 symbols end a number, 25 continue it.
LEB89 = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"&<>\\')
TERMINAL, CONTINUATION = LEB89[:64], LEB89[64:]


class ContainerName(NamedTuple):
    namespace: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    metadata: str
    vectors: Mapping[int, str]
    """By zone id; the busiest zone and empty ones have none."""


def placement(zones: Mapping[ContainerName, int], *, zone_count: int) -> Placement:
    """Containers with the zone each is in. Raises ValueError for a zone outside 0…zone_count-1."""
    if any(not 0 <= zone < zone_count for zone in zones.values()):
        raise ValueError(f"a container is in none of the {zone_count} zones: {dict(zones)!r}")
    places = {container_hash(container): zone for container, zone in zones.items()}
    offsets: dict[int, list[int]] = {}
    for offset, value in enumerate(sorted(places)):
        offsets.setdefault(places[value], []).append(offset)
    busiest = min(offsets, key=lambda zone: (-len(offsets[zone]), zone), default=0)
    return Placement(
        metadata=f"npv0v001::ve=leb89::cc={len(places)}::nn={zone_count}::bn={busiest}",
        vectors={zone: vector(offsets[zone]) for zone in sorted(offsets) if zone != busiest},
    )


def container_hash(container: ContainerName) -> int:
    return xxh64_intdigest("\0".join(container).encode())


def vector(offsets: Iterable[int]) -> str:
    """Ascending offsets: the first as it is, then differences."""
    return "".join(leb89(after - before) for before, after in pairwise((0, *offsets)))


def leb89(number: int) -> str:
    """A number from 0: one symbol below 64, two below 1664, three below 40064."""
    if number < len(TERMINAL):
        return TERMINAL[number]
    rest, last = divmod(number - len(TERMINAL), len(TERMINAL))
    digits = [rest % len(CONTINUATION)]
    while rest := rest // len(CONTINUATION):
        digits.append(rest % len(CONTINUATION))
    return "".join(CONTINUATION[digit] for digit in reversed(digits)) + TERMINAL[last]
