"""What each NUMA node has left, counted from the kubelet's own files alone.

It shares no code with what it checks: it reads the checkpoint, the state files and the recorded
machine itself, and takes the kubelet's word for nothing else than which pods are alive.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

GPU = "nvidia.com/gpu"


class Counted(NamedTuple):
    capacity: int
    allocatable: int
    available: int


Zones = dict[str, dict[str, Counted]]


def gpu_nodes(recorded: Path) -> dict[str, int]:
    """UUID → NUMA node, from a recorded machine's text."""
    lines = (recorded / "sys.txt").read_text().splitlines()
    nodes = {}
    for line in lines:
        path, _, content = line.partition(" = ")
        if path.endswith("/numa_node"):
            nodes[path.split("/")[-2]] = int(content)
    answers = json.loads((recorded / "nvml.json").read_text())["gpus"]
    return {a["uuid"]: nodes[a["bus_id"].lower().removeprefix("0000")] for a in answers}


def recount(
    root: Path,
    machine: Sequence[Mapping[str, Any]],
    gpus: Mapping[str, int],
    alive: Collection[str],
) -> Zones:
    """By zone and resource; `root` is the kubelet's, `machine` its machine.json, `alive` UIDs."""
    zones: Zones = {f"node-{node['id']}": {} for node in machine}
    for node in machine:
        zone = zones[f"node-{node['id']}"]
        zone["cpu"] = count_cpus(root, node, alive)
        zone.update(count_memory(root, node, alive))
        zone[GPU] = count_gpus(root, node["id"], gpus, alive)
    return zones


def count_cpus(root: Path, node: Mapping[str, Any], alive: Collection[str]) -> Counted:
    config = yaml.safe_load((root / "config.yaml").read_text())
    state = json.loads((root / "cpu_manager_state").read_text())
    own = {cpu for core in node["cores"] for cpu in core}
    offered = own - cpus(config["reservedSystemCPUs"])
    held = set()
    for uid, containers in state.get("entries", {}).items():
        if uid in alive:
            for text in containers.values():
                held |= cpus(text)
    return Counted(len(own), len(offered), len(offered - held))


def cpus(text: str) -> set[int]:
    found = set()
    for part in text.split(","):
        ends = [int(end) for end in part.split("-") if end]
        if ends:
            found |= set(range(ends[0], ends[-1] + 1))
    return found


def count_memory(root: Path, node: Mapping[str, Any], alive: Collection[str]) -> dict[str, Counted]:
    state = json.loads((root / "memory_manager_state").read_text())
    counted = {}
    for kind, table in state["machineState"][str(node["id"])]["memoryMap"].items():
        held = sum(
            block["size"]
            for uid, containers in state.get("entries", {}).items()
            if uid in alive
            for blocks in containers.values()
            for block in blocks
            if block["type"] == kind and block["numaAffinity"] == [node["id"]]
        )
        if table["total"]:
            counted[kind] = Counted(
                table["total"], table["allocatable"], table["allocatable"] - held
            )
    return counted


def count_gpus(root: Path, node: int, gpus: Mapping[str, int], alive: Collection[str]) -> Counted:
    path = root / "device-plugins" / "kubelet_internal_checkpoint"
    data = json.loads(path.read_text())["Data"]
    here = {uuid for uuid, at in gpus.items() if at == node}
    healthy = here & set(data["RegisteredDevices"][GPU])
    held = {
        uuid
        for entry in data["PodDeviceEntries"] or ()
        if entry["PodUID"] in alive and entry["ResourceName"] == GPU
        for ids in entry["DeviceIDs"].values()
        for uuid in ids
    }
    return Counted(len(here), len(healthy), len(healthy - held))


def published(body: Mapping[str, Any]) -> Zones:
    """The figures of a NodeResourceTopology's zones that schedulers read."""
    return {
        zone["name"]: {
            resource["name"]: Counted(
                *(quantity(resource[word]) for word in ("capacity", "allocatable", "available"))
            )
            for resource in zone.get("resources", ())
        }
        for zone in body["zones"]
        if zone["type"] == "Node"
    }


def quantity(text: str) -> int:
    for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti"), start=1):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) << (10 * power)
    return int(text)
