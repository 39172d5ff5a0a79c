"""The kubelet's state files, in the formats of Kubernetes 1.37, from what the stand-in knows.

Checksums are 0: the kubelet makes them of Go's own printing of its structures, and no kubelet is
ever to take these files over.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rte.kubelet.node import KubeletState, MemoryState
from rte.model import ContainerUse, DeviceUse, PodName, ranges


class DeviceEntry(NamedTuple):
    """What one container holds of one resource, and what the plugin's Allocate answered."""

    uid: str
    container: str
    resource: str
    devices: tuple[DeviceUse, ...]
    answer: bytes  # a serialized ContainerAllocateResponse


def device_checkpoint(
    entries: Iterable[DeviceEntry], registered: Mapping[str, Iterable[str]]
) -> dict[str, Any]:
    """`kubelet_internal_checkpoint`; `registered` are the healthy devices by resource."""
    return {
        "Data": {
            "PodDeviceEntries": [
                {
                    "PodUID": entry.uid,
                    "ContainerName": entry.container,
                    "ResourceName": entry.resource,
                    "DeviceIDs": by_node(entry.devices),
                    "AllocResp": base64.b64encode(entry.answer).decode(),
                }
                for entry in entries
            ],
            "RegisteredDevices": {name: sorted(ids) for name, ids in sorted(registered.items())},
        },
        "Checksum": 0,
    }


def by_node(devices: Iterable[DeviceUse]) -> dict[str, list[str]]:
    """Ids by NUMA node; "-1" is where the kubelet keeps those without one."""
    found: dict[str, list[str]] = {}
    for device in devices:
        for node in device.numa or (-1,):
            found.setdefault(str(node), []).append(device.id)
    return found


def cpu_state(state: KubeletState, uids: Mapping[PodName, str]) -> dict[str, Any]:
    """`cpu_manager_state`."""
    entries = containers(state, uids)
    if state.policy.cpu_manager != "static":
        return twice({"policyName": "none", "defaultCpuSet": ""})
    held = {
        uid: {use.name: ranges(use.cpus) for use in uses if use.cpus}
        for uid, uses in entries.items()
    }
    taken = {cpu for uses in entries.values() for use in uses for cpu in use.cpus}
    shared = ranges(cpu for cpu in state.topology.node if cpu not in taken)
    return twice({"policyName": "static", "defaultCpuSet": shared, **filled("entries", held)})


def memory_state(state: KubeletState, uids: Mapping[PodName, str]) -> dict[str, Any]:
    """`memory_manager_state`."""
    if state.policy.memory_manager != "Static":
        return twice({"policyName": "None", "machineState": {}})
    held = {
        uid: {
            use.name: [
                {"numaAffinity": list(b.numa), "type": b.type, "size": b.size_bytes}
                for b in use.memory
            ]
            for use in uses
            if use.memory
        }
        for uid, uses in containers(state, uids).items()
    }
    accounts = MemoryState(state)
    machine = {
        str(node.id): {
            "numberOfAssignments": accounts.assignments[node.id],
            "memoryMap": {
                type_: {
                    "total": allocatable + reserved,
                    "systemReserved": reserved,
                    "allocatable": allocatable,
                    "reserved": allocatable - accounts.free[at, type_],
                    "free": accounts.free[at, type_],
                }
                for (at, type_), allocatable in sorted(accounts.allocatable.items())
                if at == node.id
                for reserved in [state.policy.reserved_memory.get(node.id, {}).get(type_, 0)]
            },
            "cells": list(accounts.group[node.id]),
        }
        for node in state.numa_nodes
    }
    return twice({"policyName": "Static", "machineState": machine, **filled("entries", held)})


def containers(
    state: KubeletState, uids: Mapping[PodName, str]
) -> dict[str, tuple[ContainerUse, ...]]:
    return {uids[name]: held.containers for name, held in state.pods.items()}


def filled(name: str, held: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The kubelet leaves out what is empty."""
    found = {uid: entries for uid, entries in held.items() if entries}
    return {name: found} if found else {}


def twice(content: dict[str, Any]) -> dict[str, Any]:
    """From 1.37 on the content is also there as a text with a checksum of its own."""
    text = json.dumps(content, separators=(",", ":"))
    return {**content, "checksum": 0, "data": text, "dataChecksum": 0}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces the file whole, as the kubelet does."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content, separators=(",", ":")))
    os.replace(temporary, path)
