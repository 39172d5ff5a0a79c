"""numaplacement against the literals of the reference implementation (v0.1.0, 05c4e97)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_hexdigest

from rte.publish.placement import (
    LEB89,
    ContainerName,
    Placement,
    container_hash,
    leb89,
    placement,
    vector,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "!"), (63, "e"), (64, "f!"), (1663, "~e"), (1664, "gf!"), (40063, "~~e")],
)
def test_published_numbers(number: int, text: str) -> None:
    assert leb89(number) == text


@pytest.mark.parametrize(
    ("number", "symbols"),
    [(1, 1), (32, 1), (800, 2), (2047, 3), (40064, 4), (100000, 4)],
)
def test_published_lengths(number: int, symbols: int) -> None:
    assert len(leb89(number)) == symbols


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([], ""),
        ([1], "#"),
        ([1, 3, 7, 42], "#$'H"),
        ([0, 4, 8, 10], "!''$"),
        ([100, 108, 116], "fI++"),
        ([2000, 2008], "gk3+"),
    ],
)
def test_published_vectors(offsets: list[int], text: str) -> None:
    assert vector(offsets) == text


@pytest.mark.parametrize(
    ("container", "value"),
    [
        (ContainerName("", "", ""), 11145182160106660097),
        (ContainerName("ns", "pod", "cnt"), 9468815510407277218),
    ],
)
def test_published_hashes(container: ContainerName, value: int) -> None:
    assert container_hash(container) == value


def read_numbers(text: str) -> list[int]:
    """What a reader makes of a string of numbers, written from the format's description."""
    numbers, rest, continued = [], 0, False
    for symbol in text:
        index = LEB89.index(symbol)
        if index >= 64:
            rest, continued = rest * 25 + index - 64, True
            continue
        numbers.append(64 + rest * 64 + index if continued else index)
        rest, continued = 0, False
    return numbers


def zones_by_reader(containers: list[ContainerName], answer: Placement) -> dict[ContainerName, int]:
    fields = dict(part.split("=") for part in answer.metadata.split("::")[1:])
    assert int(fields["cc"]) == len(containers)
    ordered = sorted(containers, key=container_hash)
    zones = dict.fromkeys(ordered, int(fields["bn"]))
    for zone, text in answer.vectors.items():
        offset = 0
        for difference in read_numbers(text):
            offset += difference
            zones[ordered[offset]] = zone
    return zones


@pytest.mark.parametrize(
    ("count", "zone_count", "vectors"),
    [
        (5, 2, "1:$"),
        (40, 4, "1:!)$%**$)#### 2:-$(%$' 3:$##(*($(."),
        (300, 8, "4657830aa16f97c1"),
        (3000, 3, "470a4cf245764292"),
        (50000, 2, "7eb51450906956f5"),
    ],
)
def test_what_the_reference_made_of_the_same_containers(
    count: int, zone_count: int, vectors: str
) -> None:
    """Zones and their vectors in one text, or the xxHash64 of a long one."""
    zones = {
        ContainerName(f"ns{i % 3}", f"pod-{i}", f"c{i % 2}"): i * i // 7 % zone_count
        for i in range(count)
    }
    made = placement(zones, zone_count=zone_count)
    assert made.metadata == f"npv0v001::ve=leb89::cc={count}::nn={zone_count}::bn=0"
    text = " ".join(f"{zone}:{made.vectors[zone]}" for zone in sorted(made.vectors))
    assert vectors in (text, xxh64_hexdigest(text.encode()))


NAMES = st.builds(
    ContainerName, st.sampled_from("ab"), st.text("xyz-", min_size=1, max_size=6), st.just("main")
)


@given(st.dictionaries(NAMES, st.integers(0, 7), max_size=120))
def test_a_reader_finds_every_container_in_its_zone(zones: dict[ContainerName, int]) -> None:
    answer = placement(zones, zone_count=8)
    assert zones_by_reader(list(zones), answer) == zones
    assert len(answer.vectors) < 8


def test_the_busiest_zone_is_left_out_the_lowest_where_two_are() -> None:
    one, two = ContainerName("a", "b", "c"), ContainerName("d", "e", "f")
    assert placement({one: 2, two: 1}, zone_count=3).metadata.endswith("::cc=2::nn=3::bn=1")
    assert list(placement({one: 2, two: 1}, zone_count=3).vectors) == [2]
    empty = placement({}, zone_count=2)
    assert (empty.metadata, dict(empty.vectors)) == ("npv0v001::ve=leb89::cc=0::nn=2::bn=0", {})


def test_a_zone_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the 2 zones"):
        placement({ContainerName("a", "b", "c"): 2}, zone_count=2)
