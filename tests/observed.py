"""A real kubelet's node as our program observes it: all readings are ours, and real."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from rte.kubelet.ended import with_ended
from rte.kubelet.policy import read_policy
from rte.kubelet.state import read_handed_out
from rte.kubelet.usage import read_allocatable, read_usage
from rte.model import (
    CpuId,
    Machine,
    NumaId,
    NumaNode,
    Observation,
    PodFacts,
    base_units,
)
from tests.real_kubelet import Kubelet

PATIENCE_S = 30.0


def machine_of(nodes: Iterable[Mapping[str, Any]]) -> Machine:
    """The machine of a machine.json, as our discovery would read it from sysfs."""
    return Machine(numa_nodes=tuple(map(numa_node, nodes)))


def numa_node(node: Mapping[str, Any]) -> NumaNode:
    return NumaNode(
        id=NumaId(node["id"]),
        cpus=tuple(sorted(CpuId(cpu) for core in node["cores"] for cpu in core)),
        cores=tuple(tuple(map(CpuId, core)) for core in node["cores"] if len(core) > 1),
        memory_bytes=base_units(str(node["memory"])),
        huge_pages={base_units(size): count for size, count in node["hugepages"].items()},
        distance={NumaId(i): value for i, value in enumerate(node["distances"])},
    )


def observe(
    kubelet: Kubelet, channel: grpc.Channel, pods: tuple[PodFacts, ...] | None
) -> Observation:
    """One look, without any doubt about it."""
    allocatable = read_allocatable(channel, PATIENCE_S)
    handed_out = read_handed_out(kubelet.root, kubelet.plugin_dir)
    return Observation(
        machine=machine_of(kubelet.machine),
        usage=with_ended(read_usage(channel, PATIENCE_S), handed_out, pods=pods),
        allocatable=allocatable,
        policy=read_policy(kubelet.root / "config.yaml"),
        node_allocatable={
            name: base_units(text) for name, text in kubelet.state().allocatable.items()
        },
        pods=pods,
    )
