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
    """By zone and resource; `root` is the kubelet's, `machine` its machine.json, `alive` UIDs of
    the pods that the kubelet has admitted and that have not ended."""
    ours = {GPU: {uuid: (node,) for uuid, node in gpus.items()}}
    return recount_all(root, machine, ours, alive, ours=frozenset(ours))


def recount_all(
    root: Path,
    machine: Sequence[Mapping[str, Any]],
    devices: Mapping[str, Mapping[str, tuple[int, ...]]],
    alive: Collection[str],
    *,
    ours: Collection[str] = (),
    gone: Collection[str] = (),
    totals: Mapping[str, int] | None = None,
) -> Zones:
    """The same for any devices: resource → id → NUMA nodes.

    Of resources in `ours` each device counts, of others those that are healthy or held. `gone` are
    resources whose plugin has gone, which the checkpoint does not say. `totals` are what each zone
    is to offer of what no manager binds.
    """
    config = yaml.safe_load((root / "config.yaml").read_text())
    zones: Zones = {}
    for node in machine:
        if not node["cores"]:
            continue
        zone = zones[f"node-{len(zones)}"] = {}
        for name, total in (totals or {}).items():
            zone[name] = Counted(total, total, total)
        if config.get("cpuManagerPolicy") == "static":
            zone["cpu"] = count_cpus(root, node, alive)
        if config.get("memoryManagerPolicy") == "Static":
            alone = config.get("topologyManagerPolicy") == "single-numa-node"
            zone.update(count_memory(root, node, alive, alone=alone))
        for name, nodes in devices.items():
            counted = count_devices(
                root,
                name,
                node["id"],
                nodes,
                alive,
                all_=name in ours,
                offered=name not in gone,
            )
            if counted.capacity:
                zone[name] = counted
    return zones


def saved(path: Path) -> dict[str, Any]:
    """A manager's state; what newer kubelets add stands in a text of its own."""
    state = json.loads(path.read_text())
    return {**state, **json.loads(state.get("data") or "{}")}


def count_cpus(root: Path, node: Mapping[str, Any], alive: Collection[str]) -> Counted:
    config = yaml.safe_load((root / "config.yaml").read_text())
    state = saved(root / "cpu_manager_state")
    own = {cpu for core in node["cores"] for cpu in core}
    offered = own - cpus(config["reservedSystemCPUs"])
    held = set()
    for uid, containers in state.get("entries", {}).items():
        if uid in alive:
            for text in containers.values():
                held |= cpus(text)
    for uid, whole in state.get("podEntries", {}).items():
        if uid in alive:
            held |= cpus(whole["cpuSet"])
    return Counted(len(own), len(offered), len(offered - held))


def cpus(text: str) -> set[int]:
    found = set()
    for part in text.split(","):
        ends = [int(end) for end in part.split("-") if end]
        if ends:
            found |= set(range(ends[0], ends[-1] + 1))
    return found


def count_memory(
    root: Path, node: Mapping[str, Any], alive: Collection[str], *, alone: bool
) -> dict[str, Counted]:
    """The Memory Manager's own sum, with what pods hold that have ended and it has not yet missed.

    `alone`: only what one node gives by itself counts, which a node of a group does not.
    """
    state = saved(root / "memory_manager_state")
    here = state["machineState"][str(node["id"])]
    in_group = len(here["cells"]) > 1
    counted = {}
    for kind, table in here["memoryMap"].items():
        stale = 0
        whole = state.get("podEntries", {})
        for uid, containers in state.get("entries", {}).items():
            of_containers = [block for blocks in containers.values() for block in blocks]
            blocks = whole[uid]["memoryBlocks"] if uid in whole else of_containers
            if uid not in alive:
                stale += sum(
                    block["size"]
                    for block in blocks
                    if block["type"] == kind and block["numaAffinity"] == [node["id"]]
                )
        if table["total"]:
            free = 0 if alone and in_group else table["free"] + stale
            counted[kind] = Counted(table["total"], table["allocatable"], free)
    return counted


def count_devices(
    root: Path,
    resource: str,
    node: int,
    devices: Mapping[str, tuple[int, ...]],
    alive: Collection[str],
    *,
    all_: bool,
    offered: bool,
) -> Counted:
    path = root / "device-plugins" / "kubelet_internal_checkpoint"
    data = json.loads(path.read_text())["Data"] if path.exists() else {}
    here = {name for name, nodes in devices.items() if node in nodes}
    registered = (data.get("RegisteredDevices") or {}).get(resource) or ()
    healthy = here & set(registered if offered else ())
    held = {
        name
        for entry in data.get("PodDeviceEntries") or ()
        if entry["PodUID"] in alive and entry["ResourceName"] == resource
        for ids in entry["DeviceIDs"].values()
        for name in ids
    }
    known = here if all_ else healthy | here & held
    return Counted(len(known), len(healthy), len(healthy - held))


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
