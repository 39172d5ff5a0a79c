"""A NodeResourceTopology read back: as much as its detail kept, and the rest is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rte.graph.build import Graph, build
from rte.graph.groups import groups
from rte.model import Allocatable, Machine, Observation, Policy, Usage
from rte.publish.nrt import Detail, nrt
from rte.sources import SourceError, parse_source, read_source
from rte.view.relations import relations

MACHINES = Path(__file__).parent / "machines"
RECORDED = sorted(path.parent.name for path in MACHINES.glob("*/nvml.json"))


def published(name: str, detail: Detail) -> tuple[Graph, Machine]:
    """A recorded machine, and what is read from the object that is published of it."""
    graph = build(read_source(MACHINES / name))
    look = Observation(
        machine=graph.machine, usage=Usage(), allocatable=Allocatable(), policy=Policy()
    )
    body = nrt(
        look, graph, groups=groups(graph), detail=detail, node_name="n", node_uid="u", version="0"
    )
    found = parse_source(yaml.safe_dump(body).encode(), "nrt.yaml")
    assert found == parse_source(json.dumps(body, indent=1).encode(), "nrt.yaml")
    listed = {"apiVersion": "v1", "kind": "List", "items": [body]}
    assert found == parse_source(yaml.safe_dump(listed).encode(), "nrt.yaml")
    return graph, found


def summary(graph: Graph) -> list[tuple[str, int, str | None]]:
    return [(str(g.shape), len(g.gpus), g.domain) for g in groups(graph)]


@pytest.mark.parametrize("name", RECORDED)
def test_full_detail_keeps_what_gpus_are_to_each_other(name: str) -> None:
    first, machine = published(name, Detail.FULL)
    again = build(machine)
    count = len(first.gpus)
    assert [(g.number, g.pci, g.uuid, g.lost is None) for g in machine.gpus] == [
        (g.number, g.pci, g.uuid, g.lost is None) for g in first.machine.gpus
    ]
    assert [r[:count] for r in relations(again).matrix[:count]] == [
        r[:count] for r in relations(first).matrix[:count]
    ]
    assert summary(again) == summary(first)
    assert again.numa == first.numa
    lanes = {(i, j) for i in range(count) for j in range(count)}
    assert all(again.lanes[i][j] == first.lanes[i][j] for i, j in lanes)
    assert {n.rdma for n in machine.nics} == {
        n.rdma for n in first.machine.nics if n.physical_function is None
    }


def test_full_detail_keeps_switches_and_where_nics_hang() -> None:
    first, machine = published("hgx-h100-oci", Detail.FULL)
    again = build(machine)
    assert relations(again).matrix == relations(first).matrix
    assert [s.gpus for s in again.switches] == [s.gpus for s in first.switches]
    assert [(b.gpus, b.nics) for b in again.switch_nics] == [
        (b.gpus, b.nics) for b in first.switch_nics
    ]


@pytest.mark.parametrize("name", RECORDED)
def test_detail_gpu_keeps_gpus_and_meshes(name: str) -> None:
    first, machine = published(name, Detail.GPU)
    again = build(machine)
    assert [g.uuid for g in machine.gpus] == [g.uuid for g in first.machine.gpus]
    assert again.numa == first.numa
    meshes = [g for g in summary(first) if g[0] == "mesh"]
    assert summary(again) == meshes
    if len(meshes) != len(groups(first)):
        assert any("does not say which GPUs are linked" in said for said in machine.unknown)
    if meshes:
        assert any("one stands for each pair" in said for said in machine.unknown)


@pytest.mark.parametrize("name", RECORDED)
def test_detail_node_keeps_which_gpus_each_numa_node_has(name: str) -> None:
    first, machine = published(name, Detail.NODE)
    places = {d.address: d.numa for d in first.machine.pci}
    known = {g.number: places[g.pci] for g in first.machine.gpus if places[g.pci] is not None}
    found = {d.address: d.numa for d in machine.pci}
    assert {g.number: found[g.pci] for g in machine.gpus} == known
    assert machine.unknown


def zones(*zones: dict[str, Any]) -> Machine:
    body = {"kind": "NodeResourceTopology", "zones": list(zones)}
    return parse_source(json.dumps(body).encode(), "nrt.json")


def node(number: int, gpus: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": f"node-{number}",
        "type": "Node",
        "costs": [{"name": f"node-{n}", "value": 10 if n == number else 21} for n in range(2)],
        "resources": [
            {"name": "cpu", "capacity": "64", "allocatable": "62", "available": "1"},
            {"name": "nvidia.com/gpu", "capacity": gpus, "allocatable": "3", "available": "0"},
        ],
        **fields,
    }


def test_other_writers_count_gpus_and_do_not_name_them() -> None:
    machine = zones(node(0, "4"), node(1, "4"))
    graph = build(machine)
    assert graph.ids == tuple(f"gpu-{n}" for n in range(8))
    assert graph.numa == (0,) * 4 + (1,) * 4
    assert machine.numa_nodes[0].distance == {0: 10, 1: 21}
    assert not machine.numa_nodes[0].cpus_known
    assert any("counted from nvidia.com/gpu" in said for said in machine.unknown)


def test_a_kernels_own_node_ids_are_in_an_attribute() -> None:
    attribute = [{"name": "numaNode", "value": "8"}]
    machine = zones(node(0, "1"), node(1, "1", attributes=attribute))
    assert [n.id for n in machine.numa_nodes] == [0, 8]
    assert build(machine).numa == (0, 8)


def test_an_object_without_gpus_says_so() -> None:
    bare = {**node(0, "1"), "resources": []}
    machine = zones(bare)
    assert machine.gpus == ()
    assert any("no zone names or counts any" in said for said in machine.unknown)


REFUSED = {
    "no zones": ([], "zones: expected a list of 1"),
    "a zone twice": ([node(0, "1"), node(0, "1")], "zones[1]: a second zone 'node-0'"),
    "one node in two zones": (
        [node(0, "1"), node(1, "1", attributes=[{"name": "numaNode", "value": "0"}])],
        "two zones are one NUMA node",
    ),
    "a GPU's name": ([{"name": "gpu-x", "type": "GPU"}], "zone 'gpu-x': a GPU called 'gpu-x'"),
    "an address": (
        [{"name": "gpu-0", "type": "GPU", "attributes": [{"name": "pci", "value": "here"}]}],
        "zone 'gpu-0': not a PCI address: 'here'",
    ),
    "one address for two": (
        [
            {"name": n, "type": "GPU", "attributes": [{"name": "pci", "value": "0000:01:00.0"}]}
            for n in ("gpu-0", "gpu-1")
        ],
        "zone 'gpu-1': 0000:01:00.0 is there twice",
    ),
    "too many GPUs": ([node(0, "1k")], "more than 128 nvidia.com/gpu"),
    "attributes that are a text": (
        [{"name": "x", "attributes": "pci", "type": "Node"}],
        "zones[0].attributes: expected a list",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_api_server_would_not_keep_is_refused_by_its_path(what: str) -> None:
    bodies, words = REFUSED[what]
    with pytest.raises(SourceError) as refused:
        zones(*bodies)
    assert words in str(refused.value)


def test_gpus_keep_nothing_of_links_that_were_not_published() -> None:
    """NVLinks come from the object alone: a product's name makes none."""
    _, machine = published("l40s-8", Detail.FULL)
    assert all(replace(gpu, links=()) == gpu for gpu in machine.gpus)
