"""The configuration of a kubelet that aligns all it can, for a machine whose own is not known."""

from __future__ import annotations

from typing import Any

from rte.model import Machine
from rte.standin.kubelet import likely_cores

MOST_NUMA_NODES = 8
"""The kubelet's default limit; the Memory Manager looks at every set of NUMA nodes."""


def kubelet_configuration(machine: Machine, *, policy: str, scope: str) -> dict[str, Any]:
    """A KubeletConfiguration that aligns all it can, with the least that must be reserved."""
    bearing = [node for node in machine.numa_nodes if node.cpus]
    first = bearing[0] if bearing else None
    cores = likely_cores(machine.numa_nodes)
    found: dict[str, Any] = {
        "topologyManagerPolicy": policy,
        "topologyManagerScope": scope,
        "cpuManagerPolicy": "static",
        "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
        "reservedSystemCPUs": ",".join(map(str, cores[0] if cores else first.cpus[:1]))
        if first
        else "",
    }
    if len(machine.numa_nodes) > MOST_NUMA_NODES:
        limit = {"max-allowable-numa-nodes": str(min(len(machine.numa_nodes), 64))}
        return {**found, "topologyManagerPolicyOptions": limit}
    # The kubelet keeps 100 MiB for itself by default, and wants to be told of which node.
    reserved = [{"numaNode": int(first.id), "limits": {"memory": "100Mi"}}] if first else []
    return {**found, "memoryManagerPolicy": "Static", "reservedMemory": reserved}
