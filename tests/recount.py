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
    allocatable_cpus: Collection[int] | None = None,
) -> Zones:
    """The same for any devices: resource → id → NUMA nodes.

    Of resources in `ours` each device counts, of others those that are healthy or held. `gone` are
    resources whose plugin has gone, which the checkpoint does not say. `totals` are what each zone
    is to offer of what no manager binds. `allocatable_cpus` are those that the CPU Manager says it
    can hand out; without them, all but the configuration's `reservedSystemCPUs`.
    """
    config = yaml.safe_load((root / "config.yaml").read_text())
    nodes = [node for node in machine if node["cores"]]
    zones: Zones = {f"node-{number}": {} for number, _ in enumerate(nodes)}
    bound: dict[int, dict[str, Counted]] = {node["id"]: {} for node in nodes}
    if config.get("cpuManagerPolicy") == "static":
        offered = allocatable_cpus
        if offered is None:
            offered = every_cpu(machine) - cpus(config["reservedSystemCPUs"])
        free = shared_cpus(root, alive)
        most = len(free)
        if (config.get("cpuManagerPolicyOptions") or {}).get("full-pcpus-only") == "true":
            cores = [core for node in nodes for core in node["cores"]]
            most = sum(len(free.intersection(core)) for core in cores if {*core} <= {*offered})
        for node in nodes:
            own = {cpu for core in node["cores"] for cpu in core}
            here = own.intersection(offered)
            left = min(len(here & free), most)
            bound[node["id"]]["cpu"] = Counted(len(own), len(here), left)
    if config.get("memoryManagerPolicy") == "Static":
        alone = config.get("topologyManagerPolicy") == "single-numa-node"
        for id, counted in count_memory(root, alive, alone=alone).items():
            if id in bound:
                bound[id].update(counted)
    for zone, node in zip(zones.values(), nodes, strict=True):
        zone.update({name: Counted(total, total, total) for name, total in (totals or {}).items()})
        zone.update(bound[node["id"]])
        for name, of_nodes in devices.items():
            figures = count_devices(
                root,
                name,
                node["id"],
                of_nodes,
                alive,
                all_=name in ours,
                offered=name not in gone,
            )
            if figures.capacity:
                zone[name] = figures
    return zones


def saved(path: Path) -> dict[str, Any]:
    """A manager's state; what newer kubelets add stands in a text of its own."""
    state = json.loads(path.read_text())
    return {**state, **json.loads(state.get("data") or "{}")}


def every_cpu(machine: Sequence[Mapping[str, Any]]) -> set[int]:
    return {cpu for node in machine for core in node["cores"] for cpu in core}


def shared_cpus(root: Path, alive: Collection[str]) -> set[int]:
    """The CPU Manager's pool, with what pods hold that have ended and it has not yet missed."""
    state = saved(root / "cpu_manager_state")
    free = cpus(state["defaultCpuSet"])
    wholes = state.get("podEntries") or {}
    for uid, containers in (state.get("entries") or {}).items():
        if uid not in alive:  # nor is a whole without containers ever taken back
            free = free.union(*map(cpus, containers.values()))
            free |= cpus(wholes[uid]["cpuSet"]) if uid in wholes else set()
    return free


def cpus(text: str) -> set[int]:
    found = set()
    for part in text.split(","):
        ends = [int(end) for end in part.split("-") if end]
        if ends:
            found |= set(range(ends[0], ends[-1] + 1))
    return found


def count_memory(
    root: Path, alive: Collection[str], *, alone: bool
) -> dict[int, dict[str, Counted]]:
    """By NUMA node and resource: the Memory Manager's own tables, after it has taken back what
    pods hold that have ended and it has not yet missed. A kind that one node has is in all.

    `alone`: only what one node gives by itself counts, which a node of a group does not.
    """
    nodes = memory_nodes(root, alive)
    kinds = {
        kind
        for here in nodes.values()
        for kind, table in here["memoryMap"].items()
        if table["total"]
    }
    return {
        id: {
            kind: Counted(
                table["total"],
                table["allocatable"],
                0 if alone and len(here["cells"]) > 1 else table["free"],
            )
            for kind, table in here["memoryMap"].items()
            if kind in kinds
        }
        for id, here in nodes.items()
    }


def memory_nodes(root: Path, alive: Collection[str]) -> dict[int, dict[str, Any]]:
    """The Memory Manager's table of each NUMA node, after that."""
    state = saved(root / "memory_manager_state")
    nodes = {int(id): here for id, here in state["machineState"].items()}
    wholes = state.get("podEntries") or {}
    for uid, containers in (state.get("entries") or {}).items():
        if uid not in alive:
            of_containers = [block for blocks in containers.values() for block in blocks]
            take_back(nodes, wholes[uid]["memoryBlocks"] if uid in wholes else of_containers)
    return nodes


def take_back(nodes: Mapping[int, Mapping[str, Any]], blocks: Sequence[Mapping[str, Any]]) -> None:
    """As the Memory Manager does: of each node of a block what is taken there, in their order,
    whoever has it; a node that nobody uses any more is in no group."""
    for block in blocks:
        rest = block["size"]
        for id in block["numaAffinity"]:
            here: Any = nodes[id]
            here["numberOfAssignments"] -= 1
            if here["numberOfAssignments"] == 0:
                here["cells"] = [id]
            table = here["memoryMap"][block["type"]]
            back = min(rest, table["reserved"])
            table["reserved"] -= back
            table["free"] += back
            rest -= back


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
    offered_here = {name for name, nodes in devices.items() if node in nodes}
    registered = (data.get("RegisteredDevices") or {}).get(resource) or ()
    healthy = offered_here & set(registered if offered else ())
    held = {
        name
        for entry in data.get("PodDeviceEntries") or ()
        if entry["PodUID"] in alive and entry["ResourceName"] == resource
        for name in entry["DeviceIDs"].get(str(node), ())
    }
    known = (offered_here if all_ else healthy) | held
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
