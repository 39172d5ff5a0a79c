"""The GPUFabric object of a node: the whole graph, and what changed when.

It says nothing of use, load or link state of networks, so it changes only when the hardware does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rte.graph.build import Graph
from rte.graph.groups import Group
from rte.model import FabricState, Faults, Gpu, LinkPeer, Machine, Nic, NumaNode, PciAddress, ranges
from rte.publish.accounting import zone_nodes
from rte.publish.forms import binary_quantity, metadata
from rte.publish.hardware import Hardware, health, link_speed, listed_nics

API_VERSION = "rte.dev/v1alpha1"
KIND = "GPUFabric"
MOST_HISTORY = 20  # entries; the oldest go
MOST_CHANGES = 16  # lines of an entry
LINE_CHARACTERS = 200

Status = Mapping[str, Any]


def fabric(
    machine: Machine,
    graph: Graph,
    groups: Sequence[Group],
    faults: Faults,
    *,
    node_name: str,
    node_uid: str | None,
    now: str,
    previous: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole object. `now` is RFC 3339 in seconds, `previous` the object as it last was.

    Where nothing but time has passed since `previous`, its conditions and history come back
    unchanged, so that equal hardware gives an equal object.
    """
    hardware = Hardware(machine, graph, groups, zone_nodes(machine), faults)
    found = graph_of(hardware)
    before: Status = (previous or {}).get("status") or {}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata(node_name, node_uid),
        "status": {
            **found,
            "conditions": conditions(hardware, before.get("conditions") or (), now),
            "history": history(before, found, now),
        },
    }


# The graph


def graph_of(hardware: Hardware) -> dict[str, Any]:
    machine = hardware.machine
    body: dict[str, Any] = {
        "gpuCount": len(machine.gpus),
        "groupCount": len(hardware.groups),
        "driver": machine.driver,
        "domain": next((group.domain for group in hardware.groups if group.domain), None),
        "numaNodes": [numa_node(node, hardware) for node in machine.numa_nodes],
        "gpus": [gpu(one, hardware) for one in machine.gpus],
        "switches": [switch(port, name, hardware) for port, name in hardware.switches.items()],
        "nics": [nic(one, number, hardware) for number, one in enumerate(listed_nics(machine))],
        "nvlinks": nvlinks(hardware),
        "groups": [group(one, hardware) for one in hardware.groups],
        "fabrics": fabrics(machine.gpus),
    }
    return present(body)


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the machine does not say."""
    return {key: value for key, value in values.items() if value is not None}


def numa_node(node: NumaNode, hardware: Hardware) -> dict[str, Any]:
    return present(
        {
            "id": node.id,
            "cpus": ranges(node.cpus),
            "memory": None if node.memory_bytes is None else binary_quantity(node.memory_bytes),
            "gpu": None if node.gpu is None else hardware.name_of.get(node.gpu, str(node.gpu)),
            "distances": [
                {"id": other, "distance": far} for other, far in sorted(node.distance.items())
            ],
        }
    )


def place(address: PciAddress, hardware: Hardware) -> dict[str, Any]:
    """Where a PCI function is: inferred NUMA nodes are named with their source."""
    function = hardware.functions.get(address)
    above = hardware.switches_above(address)
    found: dict[str, Any] = {"pci": str(address)}
    if above:
        found["switch"] = hardware.switches[above[-1]]
    if function is not None:
        found["root"] = function.root
        if function.numa is not None and function.numa_from is not None:
            found |= {"numaNode": function.numa, "numaFrom": function.numa_from.value}
    return found | link_speed(function)


def gpu(one: Gpu, hardware: Hardware) -> dict[str, Any]:
    switch_lanes = sum(end.lanes for end in one.links if end.peer is LinkPeer.SWITCH)
    cpu_lanes = sum(end.lanes for end in one.links if end.peer is LinkPeer.CPU)
    return present(
        {
            "name": one.name,
            **place(one.pci, hardware),
            "uuid": one.uuid,
            "product": one.product,
            "memory": None if one.memory_bytes is None else binary_quantity(one.memory_bytes),
            "module": one.module,
            "group": hardware.group_of.get(one.pci),
            "switchLanes": switch_lanes or None,
            "cpuLanes": cpu_lanes or None,
            "lanesDown": one.links_down or None,
            "slices": [
                {"id": part.id, "profile": part.profile, "gpuInstance": part.gpu_instance}
                for part in one.slices
            ]
            or None,
            **health(one, hardware.faults),
        }
    )


def switch(port: PciAddress, name: str, hardware: Hardware) -> dict[str, Any]:
    return {"name": name, **place(port, hardware)}


def nic(one: Nic, number: int, hardware: Hardware) -> dict[str, Any]:
    where = place(one.pci, hardware) if one.pci is not None else present({"numaNode": one.numa})
    return present(
        {
            "name": f"nic-{number}",
            "kind": one.kind,
            **where,
            "netdevs": list(one.netdevs) or None,
            "rdma": list(one.rdma) or None,
            "members": list(one.members) or None,
        }
    )


def nvlinks(hardware: Hardware) -> list[dict[str, Any]]:
    """Direct links of two GPUs with the fewer lanes of their two ends; those that disagree say so.
    What goes through switches is each GPU's `switchLanes`."""
    ends: dict[tuple[PciAddress, PciAddress], int] = {}
    for one in hardware.machine.gpus:
        for end in one.links:
            if (
                end.peer is LinkPeer.GPU
                and end.remote in hardware.name_of
                and end.remote != one.pci
            ):
                key = (one.pci, end.remote)
                ends[key] = ends.get(key, 0) + end.lanes
    numbers = {one.pci: one.number for one in hardware.machine.gpus}
    pairs = sorted(
        {(min(p, key=numbers.__getitem__), max(p, key=numbers.__getitem__)) for p in ends},
        key=lambda pair: (numbers[pair[0]], numbers[pair[1]]),
    )
    found = []
    for a, b in pairs:
        there, back = ends.get((a, b), 0), ends.get((b, a), 0)
        link: dict[str, Any] = {
            "a": hardware.name_of[a],
            "b": hardware.name_of[b],
            "lanes": min(there, back),
        }
        if there != back:
            link["oneSided"] = max(there, back) - min(there, back)
        found.append(link)
    return found


def group(one: Group, hardware: Hardware) -> dict[str, Any]:
    return present(
        {
            "name": one.name,
            "shape": one.shape.value,
            "gpus": hardware.names(one.gpus),
            "domain": one.domain,
            "degraded": hardware.names(one.degraded) or None,
        }
    )


def fabrics(gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    """What the GPUs say of the fabrics that they are part of, one entry for those who agree."""
    members: dict[tuple[str, str, int], list[str]] = {}
    for one in gpus:
        if one.fabric is not None and one.fabric.state is not FabricState.NOT_SUPPORTED:
            clique = one.fabric.clique if one.fabric.clique is not None else -1
            key = (one.fabric.cluster or "", one.fabric.state.value, clique)
            members.setdefault(key, []).append(one.name)
    return [
        present(
            {
                "cluster": cluster or None,
                "clique": None if clique < 0 else clique,
                "state": state,
                "gpus": names,
            }
        )
        for (cluster, state, clique), names in sorted(members.items())
    ]


# What changed when


def conditions(
    hardware: Hardware, before: Iterable[Mapping[str, Any]], now: str
) -> list[dict[str, Any]]:
    """`Healthy` and `FabricComplete`; a condition's time is that of its last change of status."""
    known = {item.get("type"): item for item in before}
    states = {one.name: health(one, hardware.faults) for one in hardware.machine.gpus}
    sick = [
        f"{name}: {said['healthReason']}" for name, said in states.items() if "healthReason" in said
    ]
    waiting = [
        f"{one.name}: {one.fabric.state.value}"
        for one in hardware.machine.gpus
        if one.fabric is not None
        and one.fabric.state in (FabricState.NOT_STARTED, FabricState.IN_PROGRESS)
    ]
    found = [
        condition("FabricComplete", waiting, ok="Complete", bad="NotReady"),
        condition("Healthy", sick, ok="AllHealthy", bad="Faults"),
    ]
    for item in found:
        old = known.get(item["type"], {})
        unchanged = old.get("status") == item["status"]
        item["lastTransitionTime"] = old.get("lastTransitionTime", now) if unchanged else now
    return found


def condition(type_: str, problems: Sequence[str], *, ok: str, bad: str) -> dict[str, Any]:
    return {
        "type": type_,
        "status": "False" if problems else "True",
        "reason": bad if problems else ok,
        "message": "; ".join(problems)[:1024],
    }


def history(before: Status, found: Status, now: str) -> list[dict[str, Any]]:
    """The last entries, oldest first; one more when something differs from before."""
    entries = list(before.get("history") or ())
    old = {key: value for key, value in before.items() if key not in ("conditions", "history")}
    if not entries:
        lines = ["first seen"]
    elif old == found:
        return entries
    else:
        lines = differences(old, found) or ["changed"]
    if len(lines) > MOST_CHANGES:
        rest = len(lines) - MOST_CHANGES + 1
        lines = [*lines[: MOST_CHANGES - 1], f"and {rest} more"]
    entry = {"time": now, "changes": [line[:LINE_CHARACTERS] for line in lines]}
    return [*entries[-(MOST_HISTORY - 1) :], entry]


def differences(old: Status, new: Status) -> list[str]:
    """A line a change, for people: `gpu-3: health healthy → unhealthy`."""
    lines = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, list) or isinstance(after, list):
            lines += list_differences(key, before or [], after or [])
        else:
            lines.append(f"{key} {shown(before)} → {shown(after)}")
    return lines


def list_differences(key: str, old: Sequence[Any], new: Sequence[Any]) -> list[str]:
    before = {label(key, item): item for item in old}
    after = {label(key, item): item for item in new}
    lines = [f"{name} is gone" for name in before if name not in after]
    lines += [f"{name} is new" for name in after if name not in before]
    for name, item in after.items():
        known = before.get(name, item)
        changed = [
            f"{what} {shown(known.get(what))} → {shown(item.get(what))}"
            for what in sorted({*known, *item})
            if known.get(what) != item.get(what)
        ]
        if changed:
            lines.append(f"{name}: {', '.join(changed)}")
    return lines


def label(key: str, item: Mapping[str, Any]) -> str:
    """What an entry of a list is called."""
    if "name" in item:
        return str(item["name"])
    if "a" in item:
        return f"link {item['a']} - {item['b']}"
    if key == "fabrics":
        return f"fabric {item.get('cluster', 'of this node')} {item.get('clique', '')}".strip()
    return f"node-{item['id']}" if key == "numaNodes" else str(item.get("id", item))


def shown(value: object) -> str:
    if value is None:
        return "nothing"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
