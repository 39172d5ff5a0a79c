"""Every recorded machine: what is shown and chosen is what people have read and agreed to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from rte.commands.show import json_text
from rte.graph.build import Graph, build
from rte.graph.choose import choose
from rte.graph.groups import groups
from rte.sources.recorded import read_recorded
from rte.view.document import document
from rte.view.smi import smi
from rte.view.text import WIDTH, text
from tests.brute import Brute
from tests.machines.about import counts, names
from tests.machines.description import FOLDER
from tests.matrices import CORRESPONDING, parse_matrix, read_matrix
from tests.test_choose import asked_at_random, compare

Golden = Callable[[Path, str], None]


@cache
def graph(name: str) -> Graph:
    return build(read_recorded(FOLDER / name))


def with_gpus(least: int = 1) -> list[str]:
    return [name for name in names() if counts(name)["GPUs"] >= least]


@pytest.mark.parametrize("name", names())
def test_show_is_as_agreed(name: str, golden: Golden) -> None:
    found = graph(name)
    golden(FOLDER / name / "expected" / "show.json", json_text(document(found, groups(found))))
    golden(FOLDER / name / "expected" / "show.smi", smi(found))


@pytest.mark.parametrize("name", names())
def test_text_fits_a_terminal(name: str) -> None:
    found = graph(name)
    shown = text(found, groups(found))
    assert [line for line in shown.splitlines() if len(line) > WIDTH] == []
    for gpu in found.machine.gpus:
        assert f" {gpu.name} " in shown


@pytest.mark.parametrize("name", with_gpus())
def test_preferred_sets_are_as_agreed(name: str, golden: Golden) -> None:
    found = graph(name)
    lines = []
    for size in range(1, len(found.gpus) + 1):
        choice = choose(found, available=found.ids, size=size)
        chosen = (found.gpus[found.position[id]].name for id in choice.chosen)
        lines.append(f"{size}: {' '.join(chosen)}\n")
    golden(FOLDER / name / "expected" / "preferred.txt", "".join(lines))


@pytest.mark.parametrize("name", with_gpus())
def test_choice_equals_brute_force(name: str) -> None:
    """Every size of the whole, then questions at random; 16 GPUs are sampled, they are slow."""
    found = graph(name)
    brute = Brute(found.machine)
    dice = Random(name)
    few = len(found.gpus) <= 8
    if few:
        for size in range(1, len(found.gpus) + 1):
            compare(found, brute, {"available": list(found.ids), "size": size})
    for _ in range(15 if few else 8):
        question = asked_at_random(dice, found, found.machine)
        if not few:
            question["available"] = dice.sample(list(found.ids), 10)
            question["required"] = question["available"][: dice.choice([0, 1])]
            question["size"] = dice.choice([1, 2, 3, 8, 9])
        compare(found, brute, question)


@pytest.mark.parametrize(("name", "matrix", "devices"), CORRESPONDING)
def test_smi_output_reproduces_the_matrix_of_the_real_machine(
    name: str, matrix: str, devices: Mapping[str, str]
) -> None:
    """Every relation between GPUs and NICs that the published matrix has, both ways."""
    real = read_matrix(matrix)
    ours = parse_matrix(smi(graph(name)), name)
    column_of = {device: column for column, device in ours.devices.items()}
    ours_of = {
        column: column if column.startswith("GPU") else column_of[devices[column]]
        for column in real.names
        if column.startswith("GPU") or column in devices
    }
    compared = {
        (row, column): relation
        for (row, column), relation in real.cells.items()
        if row in ours_of and column in ours_of
    }
    gpus = [column for column in ours.names if column.startswith("GPU")]
    assert [column for column in ours_of if column.startswith("GPU")] == gpus
    rows = {row for row, _ in real.cells} & ours_of.keys()
    assert len(compared) == len(rows) * len(ours_of)  # of DGX-2 four rows were published
    assert {pair: ours.cells[ours_of[pair[0]], ours_of[pair[1]]] for pair in compared} == compared


@pytest.mark.parametrize("name", with_gpus(2))
def test_document_contradicts_itself_nowhere(name: str) -> None:
    """The parts of the JSON contract are worked out apart, and must tell one story."""
    found = document(graph(name), groups(graph(name)))
    answering = [gpu for gpu in found["gpus"] if gpu["lost"] is None]
    linked = {(n["a"], n["b"]) for n in found["nvlinks"] if n["megabytes_per_s"]}
    for a, b in combinations(answering, 2):
        peers = b["id"] in a["nvlink_peers"], a["id"] in b["nvlink_peers"]
        assert peers == ((a["id"], b["id"]) in linked,) * 2
    names, matrix = found["relations"]["names"], found["relations"]["matrix"]
    at = {gpu["id"]: names.index(gpu["id"].replace("gpu-", "GPU")) for gpu in answering}
    for link in found["nvlinks"]:
        there = matrix[at[link["a"]]][at[link["b"]]], matrix[at[link["b"]]][at[link["a"]]]
        said = [f"NV{lanes}" for lanes in (link["lanes_from_a"], link["lanes_from_b"])]
        assert [c if c.startswith("NV") else "NV0" for c in there] == said
    for i in range(len(names)):
        assert matrix[i][i] == "X"
    in_groups = {member: group["name"] for group in found["groups"] for member in group["gpus"]}
    assert {g["id"]: g["group"] for g in found["gpus"] if g["group"]} == in_groups
    for gpu in answering:
        assert bool(gpu["nvlink_peers"]) == (gpu["group"] is not None)
