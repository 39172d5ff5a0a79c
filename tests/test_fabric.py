"""The GPUFabric object: the graph, its schema, and a history that only hardware makes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rte.graph.build import build
from rte.graph.groups import groups
from rte.model import Fault, FaultClass, Faults, Machine
from rte.publish.fabric import MOST_CHANGES, MOST_HISTORY, fabric
from rte.publish.patch import changes
from rte.sources.recorded import read_recorded
from tests.real_apiserver import ApiServer
from tests.structural import check, schema

MACHINES = Path(__file__).parent / "machines"
CRD = Path(__file__).parents[1] / "crds" / "gpufabric"
SCHEMA = schema(CRD / "crd.yaml", "v1alpha1")


def time(minute: int) -> str:
    return f"2026-11-29T17:{minute % 60:02}:00Z"


def body(
    machine: Machine,
    *,
    faults: Faults | None = None,
    minute: int = 0,
    previous: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    graph = build(machine)
    return fabric(
        machine,
        graph,
        groups(graph),
        faults or {},
        node_name="n1",
        node_uid="uid-1",
        now=time(minute),
        previous=previous,
    )


def fault(machine: Machine, number: int, reason: str) -> Faults:
    found = Fault(severity=FaultClass.WITHHOLD, reason=reason)
    return {machine.gpus[number].pci: (found,)}


def test_every_recorded_machine_keeps_the_schema() -> None:
    for folder in sorted(path.parent for path in MACHINES.glob("*/sys.txt")):
        machine = read_recorded(folder)
        found = body(machine)
        check(found, SCHEMA, folder.name)
        status = found["status"]
        assert status["gpuCount"] == len(status["gpus"]) == len(machine.gpus)
        names = {entry["name"] for kind in ("gpus", "switches", "nics") for entry in status[kind]}
        for kind in ("gpus", "switches", "nics"):
            assert {entry["switch"] for entry in status[kind] if "switch" in entry} <= names
        for link in status["nvlinks"]:
            assert {link["a"], link["b"]} <= names


def test_recorded_machine(golden: Callable[[Path, str], None]) -> None:
    for name in ("dgx1-v100", "gb200-tray", "hgx-h100-oci"):
        found = body(read_recorded(MACHINES / name))
        text = yaml.safe_dump(
            found, sort_keys=False, default_flow_style=None, width=98, allow_unicode=True
        )
        golden(MACHINES / name / "expected" / "gpufabric.yaml", text)


def test_equal_hardware_gives_an_equal_object_at_any_time() -> None:
    machine = read_recorded(MACHINES / "pcie-a100-pairs")
    first = body(machine)
    assert first["status"]["history"] == [{"time": time(0), "changes": ["first seen"]}]
    stored = json.loads(json.dumps(first))
    assert body(machine, minute=7, previous=stored) == first
    assert changes(stored, body(machine, minute=7, previous=stored)) == []


def test_a_change_is_told_with_its_time_and_ends_as_another() -> None:
    machine = read_recorded(MACHINES / "pcie-a100-pairs")
    first = body(machine)
    ill = body(machine, faults=fault(machine, 3, "xid-79"), minute=1, previous=first)
    assert ill["status"]["history"][1:] == [
        {
            "time": time(1),
            "changes": [
                "gpu-3: health healthy → unhealthy, healthReason nothing → xid-79",
            ],
        }
    ]
    said = {c["type"]: c for c in ill["status"]["conditions"]}
    assert said["Healthy"] == {
        "type": "Healthy",
        "status": "False",
        "reason": "Faults",
        "message": "gpu-3: xid-79",
        "lastTransitionTime": time(1),
    }
    assert said["FabricComplete"]["lastTransitionTime"] == time(0)
    other = body(machine, faults=fault(machine, 3, "xid-94"), minute=2, previous=ill)
    assert {c["type"]: c["lastTransitionTime"] for c in other["status"]["conditions"]} == {
        "FabricComplete": time(0),
        "Healthy": time(1),
    }
    well = body(machine, minute=3, previous=other)
    assert len(well["status"]["history"]) == 4
    assert well["status"]["conditions"][1]["status"] == "True"
    check(well, SCHEMA)


def test_links_gpus_and_drivers_that_change_are_told() -> None:
    machine = read_recorded(MACHINES / "pcie-a100-pairs")
    first = body(machine)
    linked = next(gpu for gpu in machine.gpus if gpu.links)
    weaker = replace(linked, links=tuple(replace(end, lanes=end.lanes - 4) for end in linked.links))
    gpus = tuple(weaker if gpu is linked else gpu for gpu in machine.gpus[:-1])
    changed = replace(machine, gpus=gpus, driver="999.1")
    lines = body(changed, minute=1, previous=first)["status"]["history"][-1]["changes"]
    assert f"{machine.gpus[-1].name} is gone" in lines
    assert "gpuCount 8 → 7" in lines
    assert any(line.startswith("driver ") and line.endswith(" → 999.1") for line in lines)
    assert any(line.startswith("link gpu-") and "oneSided nothing → 4" in line for line in lines)


def test_history_and_its_entries_are_bounded() -> None:
    machine = read_recorded(MACHINES / "dgx2-v100")
    found = body(machine)
    for minute in range(1, 30):
        faults = fault(machine, 0, f"xid-{minute}")
        found = body(machine, faults=faults, minute=minute, previous=found)
    entries = found["status"]["history"]
    assert len(entries) == MOST_HISTORY
    assert entries[-1]["time"] == time(29)
    gone = body(replace(machine, gpus=()), minute=31, previous=found)
    last = gone["status"]["history"][-1]["changes"]
    assert len(last) == MOST_CHANGES
    assert last[-1].startswith("and ")
    check(gone, SCHEMA)


def test_a_change_is_another_object_for_the_publisher() -> None:
    machine = read_recorded(MACHINES / "pcie-a100-pairs")
    first = body(machine)
    ill = body(machine, faults=fault(machine, 3, "xid-79"), minute=1, previous=first)
    assert changes(first, ill) is None
    assert changes(first, first) == []


def test_the_example_and_a_large_machine_are_taken_by_the_api_server(
    apiserver: ApiServer,
) -> None:
    example = yaml.safe_load((CRD / "example.yaml").read_text())
    check(example, SCHEMA)
    apiserver.apply_files(CRD / "crd.yaml", CRD / "example.yaml")
    wanted = body(read_recorded(MACHINES / "dgx2-v100"))
    del wanted["metadata"]["ownerReferences"]
    stored = apiserver.apply(wanted)
    assert changes(stored, wanted) == []
    assert stored["status"] == wanted["status"]
