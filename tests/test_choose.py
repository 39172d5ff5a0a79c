"""The choice: the optimum against brute force, and what must hold on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rte.graph.build import Graph, build
from rte.graph.choose import Choice, Preference, choose
from rte.model import Machine
from tests.brute import FIELDS, Brute
from tests.graphs import random_machine

quick = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def asked_at_random(dice: Random, graph: Graph, machine: Machine) -> dict[str, Any]:
    ids = [str(id) for id in graph.ids]
    available = dice.sample(ids, dice.randint(min(1, len(ids)), len(ids)))
    if dice.random() < 0.3:
        available = list(ids)
    nics = [nic.pci for nic in machine.nics if nic.pci]
    question: dict[str, Any] = {
        "available": available,
        "required": dice.sample(available, dice.choice([0, 0, 0, min(1, len(available))])),
        "size": dice.randint(1, len(ids) + 1),
    }
    if dice.random() < 0.7:
        question["free"] = [id for id in ids if dice.random() < 0.6]
    if dice.random() < 0.4:
        question["free_nics"] = [nic for nic in nics if dice.random() < 0.6]
    if dice.random() < 0.3 and nics:
        question["own_nics"] = dice.sample(nics, dice.randint(1, len(nics)))
    return question


def values(choice: Choice, preference: Preference) -> tuple[Any, ...]:
    """The preference in the order in which its fields were compared."""
    names = list(FIELDS)
    if choice.nics_lead:
        names.remove("nics")
        names.insert(1, "nics")
    return tuple(getattr(preference, name) for name in names)


def compare(graph: Graph, brute: Brute, question: dict[str, Any]) -> None:
    """Winner, runner-up, all their fields and the deciding one, as brute force has them."""
    expected = brute.ranking(**question)
    plain = choose(graph, **question)
    explained = choose(graph, **question, explain=True)
    if not expected:
        assert plain.chosen == ()
        return
    assert (explained.chosen, explained.preference) == (plain.chosen, plain.preference)
    assert plain.exact
    assert plain.considered == len(expected)
    assert plain.preference is not None
    assert plain.chosen == expected[0][1], question
    assert values(plain, plain.preference) == expected[0][0]
    if len(expected) == 1:
        assert explained.runner_up is None
        return
    assert explained.runner_up is not None
    assert explained.runner_up.chosen == expected[1][1], question
    assert values(explained, explained.runner_up.preference) == expected[1][0]
    differs = next(i for i, (a, b) in enumerate(zip(*(e[0] for e in expected[:2]))) if a != b)
    names = ["alike", "nics", *[f for f in FIELDS if f not in ("alike", "nics")]]
    assert explained.decided_by == (names if explained.nics_lead else FIELDS)[differs]


@pytest.mark.parametrize("seed", range(40))
def test_equals_brute_force_on_random_machines(seed: int) -> None:
    dice = Random(seed)
    for _ in range(10):
        machine = random_machine(dice)
        suspects = [gpu.pci for gpu in machine.gpus if dice.random() < 0.1]
        graph = build(machine, suspects=suspects)
        brute = Brute(machine, suspects)
        for _ in range(6):
            compare(graph, brute, asked_at_random(dice, graph, machine))
