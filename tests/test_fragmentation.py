"""What the bench of pods that come and go rests on."""

from itertools import combinations
from random import Random

import pytest

from rte.graph.build import build
from rte.sources.recorded import read_recorded
from tests.bench.fragmentation import RULES, any_free, nvidia, ours, partitions, run
from tests.graphs import meshed
from tests.machines.description import FOLDER


@pytest.mark.parametrize(("count", "size", "ways"), [(8, 2, 105), (8, 4, 35), (6, 3, 10)])
def test_partitions_are_all_of_them_once(count: int, size: int, ways: int) -> None:
    found = partitions(tuple(range(count)), size, 0)
    assert len({frozenset(map(frozenset, groups)) for groups in found}) == len(found) == ways


def test_groups_with_gaps_make_up_what_does_not_divide() -> None:
    found = partitions(tuple(range(5)), 3, 1)
    assert all(sorted(i for group in groups for i in group) == [*range(5)] for groups in found)
    assert {len(groups) for groups in found} == {2}
    assert len(found) == 10  # each pair that can be left


def test_the_public_rule_counts_lanes_between_gpus_and_takes_the_first_for_one() -> None:
    graph = build(meshed(6, {(0, 3): 4, (1, 4): 4, (2, 5): 2}))
    everyone = 0b111111
    assert nvidia(graph, everyone, 2, Random(1)) in (0b001001, 0b010010)
    singles = {nvidia(graph, everyone, 1, Random(seed)) for seed in range(40)}
    assert len(singles) == 6  # the offer comes in random order


def test_ours_keeps_more_linked_sets_than_the_public_rule() -> None:
    graph = build(read_recorded(FOLDER / "pcie-a100-pairs"))
    shares = [run(graph, rule, pods=600, seed=2)[2] for rule in (ours, nvidia, any_free)]
    assert len({share.asked for share in shares}) == 1  # the same pods under every rule
    assert shares[0].percent > shares[1].percent + 2
    assert shares[1].percent > 3 * shares[2].percent


def test_where_all_is_linked_nothing_can_be_lost() -> None:
    graph = build(meshed(8, dict.fromkeys(combinations(range(8), 2), 18), sockets=2))
    for rule in RULES.values():
        assert {share.percent for share in run(graph, rule, pods=60, seed=1).values()} == {100}
