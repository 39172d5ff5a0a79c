"""NVLink groups: who belongs together, under which name, and what is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from rte.graph.build import Graph, build
from rte.graph.groups import Group, GroupsError, Remembered, Shape, groups
from rte.model import Fabric, FabricState, Machine
from tests.graphs import meshed


def numbers(graph: Graph, group: Group) -> tuple[int, ...]:
    number = {gpu.pci: gpu.number for gpu in graph.machine.gpus}
    return tuple(number[pci] for pci in group.gpus)


def named(graph: Graph, **options: Any) -> dict[str, tuple[int, ...]]:
    return {group.name: numbers(graph, group) for group in groups(graph, **options)}


def chain(*members: int) -> dict[tuple[int, int], int]:
    return dict.fromkeys(pairwise(members), 2)


@pytest.mark.parametrize(
    ("count", "lanes", "shape"),
    [
        pytest.param(2, {(0, 1): 4}, Shape.MESH, id="a pair is a mesh"),
        pytest.param(3, {**chain(0, 1, 2), (0, 2): 1}, Shape.MESH, id="three in a circle"),
        pytest.param(4, {**chain(0, 1, 2, 3), (0, 3): 2}, Shape.RING, id="four in a circle"),
        pytest.param(4, {(0, 1): 2, (0, 2): 2, (0, 3): 2}, Shape.STAR, id="one in the middle"),
        pytest.param(3, chain(0, 1, 2), Shape.STAR, id="three in a row"),
        pytest.param(4, chain(0, 1, 2, 3), Shape.PARTIAL, id="four in a row"),
        pytest.param(
            6,
            {**chain(0, 1, 2), (0, 2): 2, **chain(3, 4, 5), (3, 5): 2, (2, 3): 1},
            Shape.PARTIAL,
            id="two triangles and a bridge",
        ),
    ],
)
def test_shape(count: int, lanes: dict[tuple[int, int], int], shape: Shape) -> None:
    (group,) = groups(build(meshed(count, lanes)))
    assert (len(group.gpus), group.shape) == (count, shape)


def test_two_circles_are_two_rings() -> None:
    lanes = {**chain(0, 1, 2, 3), (0, 3): 1, **chain(4, 5, 6, 7), (4, 7): 1}
    assert [g.shape for g in groups(build(meshed(8, lanes)))] == [Shape.RING, Shape.RING]


def test_a_gpu_without_links_is_no_group() -> None:
    assert named(build(meshed(5, {(1, 4): 2}))) == {"group-0": (1, 4)}
    assert named(build(meshed(3))) == {}


def test_groups_are_counted_by_their_smallest_address() -> None:
    graph = build(meshed(6, {(0, 5): 2, (1, 3): 2, (2, 4): 2}))
    assert named(graph) == {"group-0": (0, 5), "group-1": (1, 3), "group-2": (2, 4)}


def cube_mesh() -> Machine:
    """DGX-1: two fully linked quads, each GPU linked to its like in the other."""
    quads = [*combinations(range(4), 2), *combinations(range(4, 8), 2)]
    return meshed(8, dict.fromkeys(quads, 1) | {(i, i + 4): 2 for i in range(4)})


def test_cliques_part_what_components_join() -> None:
    graph = build(cube_mesh())
    assert named(graph, by="component") == {"group-0": tuple(range(8))}
    assert named(graph, by="clique") == {"group-0": (0, 1, 2, 3), "group-1": (4, 5, 6, 7)}


def test_a_link_that_one_end_denies_joins_nothing() -> None:
    machine = meshed(2, {(0, 1): 4})
    denied = replace(machine.gpus[1], links=())
    assert named(build(replace(machine, gpus=(machine.gpus[0], denied)))) == {}


# Names


def addresses(machine: Machine, *members: int) -> list[str]:
    return [machine.gpus[i].pci for i in members]


def test_configured_groups_hold_their_gpus_whatever_the_links() -> None:
    machine = meshed(6, {(0, 1): 2, (2, 3): 2, (4, 5): 2})
    names = {"ring-0": addresses(machine, 3, 0), "ring-1": addresses(machine, 1, 2)}
    assert named(build(machine), names=names) == {
        "ring-0": (0, 3),
        "ring-1": (1, 2),
        "group-0": (4, 5),
    }


def test_a_lost_member_degrades_a_configured_group_and_renames_nothing() -> None:
    machine = meshed(4, {(0, 1): 2, (2, 3): 2})
    lost = replace(machine.gpus[0], uuid=None, lost="GPU is lost", links=())
    graph = build(replace(machine, gpus=(lost, *machine.gpus[1:])))
    names = {"a": addresses(machine, 0, 1), "b": addresses(machine, 2, 3)}
    a, b = groups(graph, names=names)
    assert (a.name, numbers(graph, a), a.degraded) == ("a", (0, 1), (machine.gpus[0].pci,))
    assert (b.name, numbers(graph, b), b.degraded) == ("b", (2, 3), ())


def test_addresses_are_understood_in_nvml_s_spelling_and_unknown_ones_left_out() -> None:
    graph = build(meshed(2))
    assert named(graph, names={"pair": ["00000000:01:00.0", "0001:01:00.0", "0009:01:00.0"]}) == {
        "pair": (0, 1)
    }


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"a": ["0000:01:00.0"], "b": ["0000:01:00.0"]}, "groups.names.b: 0000:01:00.0 is in a"),
        ({"a": ["GPU-0"]}, "groups.names.a: not a PCI address: 'GPU-0'"),
    ],
)
def test_contradictions_are_refused_by_name(names: dict[str, list[str]], words: str) -> None:
    with pytest.raises(GroupsError, match=words):
        groups(build(meshed(2)), names=names)


def remembered(graph: Graph) -> Remembered:
    return Remembered().after(graph, groups(graph), configured=())


def test_a_name_stays_with_its_gpus_while_the_node_is_up() -> None:
    machine = meshed(6, {(0, 1): 2, (2, 3): 2, (4, 5): 2})
    before = remembered(build(machine))
    broken = build(
        replace(machine, gpus=(replace(machine.gpus[0], lost="gone", uuid=None), *machine.gpus[1:]))
    )
    assert named(broken) == {"group-0": (2, 3), "group-1": (4, 5)}
    assert named(broken, before=before) == {"group-1": (2, 3), "group-2": (4, 5)}


def test_a_group_that_parts_gives_its_name_to_the_first_part() -> None:
    lanes = {**chain(0, 1, 2, 3)}
    before = remembered(build(meshed(4, lanes)))
    del lanes[1, 2]
    assert named(build(meshed(4, lanes)), before=before) == {"group-0": (0, 1), "group-1": (2, 3)}


def test_a_given_name_is_not_given_to_new_groups() -> None:
    before = remembered(build(meshed(4, {(0, 1): 2})))
    assert named(build(meshed(4, {(2, 3): 2})), before=before) == {"group-1": (2, 3)}
    names = {"group-0": addresses(meshed(4), 0, 1)}
    assert named(build(meshed(4, {(2, 3): 2})), names=names) == {
        "group-0": (0, 1),
        "group-1": (2, 3),
    }


# Fabric and lanes

CLUSTER = "9a1f2b36-7c5d-4e0a-8b1c-52d3e4f50617"


@pytest.mark.parametrize(
    ("fabric", "domain"),
    [
        ({"state": FabricState.COMPLETED, "cluster": CLUSTER, "clique": 3}, f"{CLUSTER}.3"),
        ({"state": FabricState.COMPLETED, "cluster": None, "clique": 0}, None),
        ({"state": FabricState.IN_PROGRESS, "cluster": CLUSTER, "clique": 3}, None),
        ({"state": FabricState.COMPLETED, "cluster": CLUSTER, "clique": 3, "status": 999}, None),
    ],
)
def test_domain_is_named_only_when_the_fabric_is_complete(
    fabric: dict[str, Any], domain: str | None
) -> None:
    machine = meshed(2, {(0, 1): 2})
    gpus = tuple(replace(gpu, fabric=Fabric(**fabric)) for gpu in machine.gpus)
    (group,) = groups(build(replace(machine, gpus=gpus)))
    assert group.domain == domain


def test_one_member_outside_of_the_fabric_leaves_no_domain() -> None:
    machine = meshed(2, {(0, 1): 2})
    inside = Fabric(state=FabricState.COMPLETED, cluster=CLUSTER, clique=0)
    gpus = (replace(machine.gpus[0], fabric=inside), machine.gpus[1])
    (group,) = groups(build(replace(machine, gpus=gpus)))
    assert group.domain is None


def test_fewer_lanes_than_most_of_the_product_or_than_before_are_degraded() -> None:
    machine = meshed(6, {**chain(0, 1, 2, 3, 4, 5), (0, 5): 2})
    assert [g.degraded for g in groups(build(machine))] == [()]
    weak = machine.gpus[2]
    fewer = tuple(replace(end, lanes=1) for end in weak.links)
    gpus = tuple(replace(g, links=fewer) if g is weak else g for g in machine.gpus)
    assert [g.degraded for g in groups(build(replace(machine, gpus=gpus)))] == [(weak.pci,)]
    before = Remembered(most_lanes={machine.gpus[4].pci: 6})
    assert [g.degraded for g in groups(build(machine), before=before)] == [(machine.gpus[4].pci,)]


def test_bridges_that_only_half_of_the_gpus_have_are_no_fault_of_the_others() -> None:
    assert [g.degraded for g in groups(build(meshed(4, {(0, 1): 4})))] == [()]
