"""A GPUFabric read back is the machine that it was written of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rte.graph.build import Graph, build
from rte.graph.choose import choose
from rte.graph.groups import groups
from rte.publish.fabric import fabric
from rte.sources import SourceError, parse_source, read_source
from rte.view.relations import relations

MACHINES = Path(__file__).parent / "machines"
RECORDED = sorted(path.parent.name for path in MACHINES.glob("*/sys.txt"))


def body(graph: Graph) -> dict[str, Any]:
    return fabric(
        graph.machine,
        graph,
        groups(graph),
        {},
        node_name="n",
        node_uid="u",
        now="2026-01-01T00:00:00Z",
    )


def gpu_relations(graph: Graph) -> dict[tuple[str, str], str]:
    """From each GPU to each GPU and RDMA device."""
    found = relations(graph)
    device = dict(found.nics)
    names = [device.get(name, name) for name in found.names]
    return {
        (names[i], names[j]): found.matrix[i][j]
        for i in range(len(graph.gpus))
        for j in range(len(names))
    }


@pytest.mark.parametrize("name", RECORDED)
def test_the_object_keeps_the_graph(name: str) -> None:
    first = build(read_source(MACHINES / name))
    again = build(parse_source(yaml.safe_dump(body(first)).encode(), "fabric.yaml"))
    assert again.ids == first.ids
    assert again.numa == first.numa
    assert [(g.gpus, g.shape, g.domain) for g in groups(again)] == [
        (g.gpus, g.shape, g.domain) for g in groups(first)
    ]
    assert [g.lost is None for g in again.machine.gpus] == [
        g.lost is None for g in first.machine.gpus
    ]
    assert [n.cpus for n in again.machine.numa_nodes] == [n.cpus for n in first.machine.numa_nodes]
    known = gpu_relations(again)
    expected = {pair: cell for pair, cell in gpu_relations(first).items() if pair in known}
    if name == "asymmetric-link":  # which end is silent has no place in the object
        assert {(a, b): min(known[a, b], known[b, a]) for a, b in known if (b, a) in known} == {
            (a, b): min(expected[a, b], expected[b, a]) for a, b in known if (b, a) in known
        }
        assert any("one-sided" in said for said in again.machine.unknown)
        return
    assert known == expected
    if [nic.rdma for nic in again.nics] != [nic.rdma for nic in first.nics]:
        return  # compute NICs are told by their rates, which the object does not keep
    for size in (1, 2, 4):
        if len(first.gpus) >= size:
            one, other = (choose(g, available=g.ids, size=size).chosen for g in (first, again))
            assert one == other


REFUSED = {
    "a GPU's name": ({"gpus": [{"name": "seven", "pci": "0000:01:00.0"}]}, "a GPU called 'seven'"),
    "no address": ({"gpus": [{"name": "gpu-0"}]}, "not a PCI address"),
    "an address twice": (
        {"gpus": [{"name": f"gpu-{n}", "pci": "0000:01:00.0"} for n in range(2)]},
        "gpu-1: 0000:01:00.0 is there twice",
    ),
    "CPUs": ({"numaNodes": [{"id": 0, "cpus": "all"}]}, "not a list such as 0-3,8: 'all'"),
    "a type": ({"gpus": [{"name": "gpu-0", "pci": 7}]}, "status.gpus[0].pci"),
    "a number": ({"numaNodes": [{"id": -1}]}, "status.numaNodes[0].id"),
    "a switch below itself": (
        {
            "switches": [
                {"name": f"switch-{n}", "pci": f"0000:0{n}:00.0", "switch": f"switch-{1 - n}"}
                for n in range(2)
            ]
        },
        "below itself, or too deep",
    ),
    "a link to nobody": (
        {
            "gpus": [{"name": "gpu-0", "pci": "0000:01:00.0"}],
            "nvlinks": [{"a": "gpu-0", "b": "gpu-1", "lanes": 2}],
        },
        "nvlinks: 'gpu-1' is no GPU of the object",
    ),
    "no status": (None, "Expected `object`, got `null`"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_we_never_write_is_refused_by_its_path(what: str) -> None:
    status, words = REFUSED[what]
    text = yaml.safe_dump({"kind": "GPUFabric", "status": status})
    with pytest.raises(SourceError) as refused:
        parse_source(text.encode(), "fabric.yaml")
    assert words in str(refused.value)
    assert str(refused.value).startswith("fabric.yaml: ")
