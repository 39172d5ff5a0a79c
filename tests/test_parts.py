"""MIG slices and replicas by GPU, and GPUs in the order of their links."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from rte.graph.build import Graph, build
from rte.graph.order import nvlink_order
from rte.graph.parts import Sharing, choose_parts
from rte.model import DeviceId
from tests.small_machine import machine, uuid

# Four GPUs, two NUMA nodes; NVLink joins 0 with 2 and 1 with 3.
GRAPH = build(machine((0, 0, 1, 1), pairs=[(0, 2), (1, 3)]))
PACKED, DISTRIBUTED = Sharing.PACKED, Sharing.DISTRIBUTED


def part(text: str) -> DeviceId:
    """`2b` is the second part of GPU 2."""
    return DeviceId(f"{uuid(int(text[0]))}::{'abc'.index(text[1])}")


NAMES = {part(f"{gpu}{letter}"): f"{gpu}{letter}" for gpu in range(4) for letter in "abc"}
PARTS = {id: uuid(int(name[0])) for id, name in NAMES.items()}
ALL = " ".join(NAMES.values())


@pytest.mark.parametrize(
    ("sharing", "size", "available", "required", "expected"),
    [
        pytest.param(DISTRIBUTED, 2, ALL, "", "0a 2a", id="two GPUs that are linked"),
        pytest.param(DISTRIBUTED, 4, ALL, "", "0a 1a 2a 3a", id="one of each"),
        pytest.param(DISTRIBUTED, 5, ALL, "", "0a 0b 1a 2a 3a", id="and round again"),
        pytest.param(DISTRIBUTED, 1, "0b 0c 1a 1b 1c", "", "1a", id="the least used GPU"),
        pytest.param(DISTRIBUTED, 2, ALL, "3b", "1a 3b", id="linked with what is required"),
        pytest.param(PACKED, 2, ALL, "", "0a 0b", id="one GPU"),
        pytest.param(PACKED, 2, "0a 0b 0c 1b 1c", "", "1b 1c", id="the GPU that has just enough"),
        pytest.param(PACKED, 4, ALL, "", "0a 0b 0c 2a", id="the next is a linked one"),
        pytest.param(PACKED, 2, ALL, "3b", "3a 3b", id="the GPU of what is required"),
        pytest.param(PACKED, 3, "0a 1a 1b 2c", "", "0a 1a 1b", id="the fullest first"),
        pytest.param(DISTRIBUTED, 3, "0a 0b", "", "0a 0b", id="too few gives what there is"),
        pytest.param(PACKED, 2, "0a 0b 0c", "0a 0b 0c", "0a 0b", id="more required than asked"),
        pytest.param(DISTRIBUTED, 0, ALL, "", "", id="nothing asked"),
    ],
)
def test_parts(sharing: Sharing, size: int, available: str, required: str, expected: str) -> None:
    choice = choose_parts(
        GRAPH,
        parts=PARTS,
        available=[*map(part, available.split()), "unknown"],
        required=[*map(part, required.split()), "foreign"],
        size=size,
        sharing=sharing,
    )
    assert " ".join(sorted(NAMES[id] for id in choice.chosen)) == expected


def test_the_preference_is_that_of_the_gpus_together() -> None:
    choice = choose_parts(GRAPH, parts=PARTS, available=PARTS, size=2)
    assert choice.preference is not None
    assert choice.preference.linked
    assert choice.preference.bottleneck.nvlink_megabytes_per_s == 12 * 25_000


def test_parts_of_a_gpu_that_the_graph_lacks_are_chosen_too() -> None:
    parts = {DeviceId("lost::0"): DeviceId("lost")}
    choice = choose_parts(GRAPH, parts=parts, available=parts, size=1)
    assert choice.chosen == ("lost::0",)
    assert choice.preference is None


def numbers(graph: Graph, *gpus: int) -> list[int]:
    order = nvlink_order(graph, [uuid(gpu) for gpu in gpus])
    return [next(n for n in range(16) if uuid(n) == id) for id in order]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        pytest.param([(0, 2), (2, 1), (1, 3)], [0, 2, 1, 3], id="along a chain"),
        pytest.param([(0, 3), (3, 1), (1, 2), (2, 0)], [0, 2, 1, 3], id="around a ring"),
        pytest.param([(3, 0), (0, 1), (1, 2)], [2, 1, 0, 3], id="from an end, not from 0"),
        pytest.param([], [0, 1, 2, 3], id="nothing linked: as they were"),
    ],
)
def test_the_order_follows_the_links(pairs: list[tuple[int, int]], expected: list[int]) -> None:
    assert numbers(build(machine((0, 0, 0, 0), pairs=pairs)), 0, 1, 2, 3) == expected


def test_what_the_graph_lacks_comes_last() -> None:
    order = nvlink_order(GRAPH, [DeviceId("lost"), uuid(0), uuid(1), uuid(2)])
    assert order == (uuid(1), uuid(0), uuid(2), "lost")
    assert nvlink_order(GRAPH, []) == ()


def test_gpus_are_chosen_together_and_not_one_after_the_other() -> None:
    """GPU 1 alone would leave 0 and 2 linked; two that are linked are better."""
    parts = {id: gpu for id, gpu in PARTS.items() if NAMES[id] in ("0a", "1a", "2a")}
    for sharing in Sharing:
        choice = choose_parts(GRAPH, parts=parts, available=parts, size=2, sharing=sharing)
        assert [NAMES[id] for id in choice.chosen] == ["0a", "2a"]


def test_parts_equal_an_obvious_count_for_any_question() -> None:
    """The policy by itself: how many parts of how many GPUs, whatever the graph prefers."""
    dice = Random(1)
    for _ in range(300):
        available = [id for id in PARTS if dice.random() < 0.6]
        required = dice.sample(available, min(len(available), dice.choice([0, 0, 1, 2])))
        size = dice.randint(0, 8)
        questions: dict[str, Any] = {
            "parts": PARTS,
            "available": available,
            "required": required,
            "size": size,
        }
        for sharing in Sharing:
            chosen = choose_parts(GRAPH, **questions, sharing=sharing).chosen
            assert len(set(chosen)) == len(chosen) == min(size, len(available))
            assert set(chosen) <= set(available)
            assert set(required) <= set(chosen) or len(required) > size
            if len(required) <= size:
                (is_spread if sharing is DISTRIBUTED else is_packed)(available, required, chosen)


def is_spread(available: list[DeviceId], required: list[DeviceId], chosen: Sequence[str]) -> None:
    """No part comes from a GPU that is fuller than one that still has parts."""
    used = Counter(gpu for id, gpu in PARTS.items() if id not in available or id in chosen)
    added = {PARTS[DeviceId(id)] for id in chosen if id not in required}
    open_ = [used[PARTS[id]] for id in available if id not in chosen]
    assert not open_ or not added or max(used[gpu] for gpu in added) <= min(open_) + 1


def is_packed(available: list[DeviceId], required: list[DeviceId], chosen: Sequence[str]) -> None:
    """No fewer GPUs could give as many parts beside those of the required."""
    begun = {PARTS[id] for id in required}
    room = Counter(PARTS[id] for id in available if PARTS[id] not in begun)
    missing = len(chosen) - sum(PARTS[id] in begun for id in available)
    fewest = next(n for n in range(5) if sum(sorted(room.values())[::-1][:n]) >= missing)
    assert len({PARTS[DeviceId(id)] for id in chosen} - begun) == fewest
