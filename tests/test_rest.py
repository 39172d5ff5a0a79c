"""What a choice costs the rest of the node."""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from rte.__main__ import main
from rte.graph.build import Graph, build
from rte.view.rest import rest, rest_said
from tests.graphs import meshed
from tests.machines.description import FOLDER

PAIRS = build(meshed(8, {(0, 5): 4, (1, 4): 4, (2, 7): 4, (3, 6): 4}, sockets=2))
QUADS = build(
    meshed(
        8,
        dict.fromkeys([*combinations(range(4), 2), *combinations(range(4, 8), 2)], 4),
        sockets=2,
    )
)
ONE_BOARD = build(meshed(8, dict.fromkeys(combinations(range(8), 2), 18)))
NONE = build(meshed(4))


def gpus(*numbers: int) -> list[str]:
    return [f"GPU-{number}" for number in numbers]


@pytest.mark.parametrize(
    ("graph", "chosen", "free", "words"),
    [
        pytest.param(
            PAIRS, [0], range(8), "breaks 1 pair, 3 pairs stay whole; ", id="a single breaks a pair"
        ),
        pytest.param(
            PAIRS,
            [5],
            range(1, 8),
            "breaks no pair, 3 pairs stay whole; ",
            id="the partner of a taken one breaks none",
        ),
        pytest.param(
            PAIRS,
            [2, 7],
            [1, 4, 2, 7],
            "uses up 1 pair, breaks no pair, 1 pair stays whole; ",
            id="a whole pair",
        ),
        pytest.param(
            PAIRS, [0, 1], [0, 1, 4, 5], "breaks 2 pairs, no linked GPUs stay free; ", id="two"
        ),
        pytest.param(
            PAIRS, [0], [0, 1, 2], "no NVLink to lose; ", id="no two that are free are linked"
        ),
        pytest.param(
            QUADS,
            [0, 1],
            range(8),
            "takes from 1 group of 4, 1 group of 4 stays whole; ",
            id="two of a quad",
        ),
        pytest.param(
            QUADS,
            [4, 5],
            [0, 1, 4, 5, 6, 7],
            "takes from 1 group of 4, 2 linked GPUs stay free; ",
            id="two of the last whole quad",
        ),
        pytest.param(
            QUADS,
            [4],
            [0, 1, 4, 5],
            "breaks nothing that was whole, 2 linked GPUs stay free; ",
            id="nothing was whole",
        ),
        pytest.param(
            ONE_BOARD,
            [0, 1],
            range(8),
            "takes from 1 group of 8, 6 linked GPUs stay free",
            id="mesh",
        ),
        pytest.param(NONE, [0], range(4), "no NVLink to lose", id="no NVLink"),
    ],
)
def test_said(graph: Graph, chosen: Sequence[int], free: Sequence[int], words: str) -> None:
    said = rest_said(rest(graph, gpus(*chosen), gpus(*free)))
    assert said.startswith(words)
    assert said == words or words.endswith("; ")


def test_where_gpus_stay_free() -> None:
    found = rest(PAIRS, gpus(0, 5), gpus(0, 1, 5, 6))
    assert found.numa == {0: 1, 1: 1}
    assert rest_said(found).endswith("; GPUs that stay free: 1 in NUMA node 0, 1 in NUMA node 1")


def test_a_chosen_replica_is_its_gpu_and_counts_as_free_before() -> None:
    assert rest(PAIRS, ["GPU-0::3"], gpus(5)) == rest(PAIRS, gpus(0), gpus(0, 5))


def test_choose_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    machine: Path = FOLDER / "pcie-a100-pairs"
    assert main(["choose", str(machine), "--size", "1", "--available", "1-7"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "For the rest of the node: breaks no pair, 3 pairs stay whole; "
        "GPUs that stay free: 2 in NUMA node 0, 4 in NUMA node 1."
    )
    arguments = ["choose", str(machine), "--size", "2", "--available", "1,3", "--free", "0-3"]
    assert main([*arguments, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["rest"]
    assert found["groups_used_up"] == found["groups_whole"] == [{"gpus": 2, "groups": 1}]
    assert found["groups_broken"] == []
    assert found["free_by_numa_node"][0] == {"numa_node": 0, "gpus": 2}
