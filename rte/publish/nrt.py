"""The NodeResourceTopology object of a node, as plain JSON values.

Zones of type Node carry the figures that schedulers read; all others describe the hardware.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from rte.graph.build import Graph
from rte.graph.groups import Group
from rte.model import (
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    NumaId,
    NumaNode,
    Observation,
    PodName,
    TopologyManagerPolicy,
    ranges,
)
from rte.publish.accounting import (
    Accounts,
    DevicePool,
    Figures,
    Unbound,
    accounts,
    is_single_numa_node,
    zone_nodes,
)
from rte.publish.fingerprint import (
    METHOD_WITH_EXCLUSIVE_RESOURCES,
    InformerMode,
    container_holds_exclusively,
    counts,
    exclusive_containers,
    fingerprint,
    is_memory,
    pods_by_any_request,
    pods_by_requests,
    pods_by_usage,
)
from rte.publish.forecast import largest_aligned, largest_linked
from rte.publish.forms import (
    attributes,
    binary_quantity,
    decimal_quantity,
    metadata,
    zone_body,
)
from rte.publish.hardware import (
    Hardware,
    full_gpu_zones,
    gpu_zones,
    group_zones,
    memory_zones,
    nic_zones,
    switch_zones,
)
from rte.publish.placement import METADATA, VECTOR, ContainerName, Placement, placement

API_VERSION = "topology.node.k8s.io/v1alpha2"
KIND = "NodeResourceTopology"
DEFAULT_MAX_NUMA_NODES = 8  # of the kubelet, and of the scheduler that reads the attribute


class Detail(StrEnum):
    """How much of the hardware the object describes; its size is what a write costs."""

    NODE = "node"
    """NUMA zones only, each naming its GPUs and groups."""
    GPU = "gpu"
    """Also a zone for each GPU and NVLink group, without costs."""
    FULL = "full"
    """Also NICs, PCIe switches and memory without CPUs, with links and costs."""


class FingerprintMethod(StrEnum):
    ALL = "all"
    WITH_EXCLUSIVE_RESOURCES = METHOD_WITH_EXCLUSIVE_RESOURCES


def nrt(
    observation: Observation,
    graph: Graph | None = None,
    *,
    node_name: str,
    node_uid: str | None,
    version: str,
    groups: Sequence[Group] = (),
    ours: Iterable[DeviceUse] = (),
    claimed: Collection[DeviceId] = (),
    detail: Detail = Detail.GPU,
    unbound: Unbound = Unbound.TOTAL,
    method: FingerprintMethod = FingerprintMethod.WITH_EXCLUSIVE_RESOURCES,
    informer_mode: InformerMode = InformerMode.DEDICATED,
    exclude: Collection[str] = (),
    ignored: Collection[PodName] = (),
) -> dict[str, Any]:
    """The whole object, equal for equal observations: everything in it is sorted.

    `graph` and `groups` are those of the observation's machine; without them nothing is said of
    NVLink. `ours` are all devices that this node's plugin advertises, healthy or not, with the
    NUMA nodes it sends: without them a device that is neither healthy nor in use is not counted.
    `claimed` are the GPUs and slices that DRA claims hold. `node_uid` None leaves the object
    without an owner. `exclude` are resources that no zone shall list, `ignored` pods whose
    resources count as available.
    """
    counted = accounts(
        observation,
        ours=ours,
        claimed=claimed,
        unbound=unbound,
        exclude=exclude,
        ignored=ignored,
    )
    nodes = zone_nodes(observation.machine)
    listed = frozenset(name for zone in counted.resources for name in zone)
    placed = container_zones(observation, nodes, resources=listed, mode=informer_mode)
    vectors = placement(placed, zone_count=len(nodes)) if placed and nodes else None
    hardware = Hardware(
        observation.machine, graph, groups, nodes, observation.faults, withheld=observation.withheld
    )
    values = {
        **policy_attributes(observation),
        **fingerprint_attributes(observation, resources=listed, mode=informer_mode, method=method),
        **forecast_attributes(observation, counted, hardware),
        "rteVersion": version,
    }
    if counted.unbound:
        values["unboundResources"] = ",".join(counted.unbound)
    if vectors is not None:
        values[METADATA] = vectors.metadata
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata(node_name, node_uid),
        "attributes": attributes(values),
        "zones": [
            *node_zones(nodes, counted, hardware=hardware, vectors=vectors, detail=detail),
            *hardware_zones(hardware, detail),
        ],
    }


# The object's own attributes


def policy_attributes(observation: Observation) -> dict[str, str]:
    """Empty when the kubelet's configuration could not be read; schedulers then filter nothing."""
    policy = observation.policy
    if policy is None:
        return {}
    values = {
        "topologyManagerPolicy": policy.topology_manager.value,
        "topologyManagerScope": policy.scope.value,
        "topologyManagerMaxNUMANodes": str(policy.max_numa_nodes or DEFAULT_MAX_NUMA_NODES),
        "cpuManagerPolicy": policy.cpu_manager,
        "memoryManagerPolicy": policy.memory_manager,
    }
    if policy.reserved_cpus:
        values["reservedCPUs"] = ranges(policy.reserved_cpus)
    return values


def fingerprint_attributes(
    observation: Observation,
    *,
    resources: Collection[str],
    mode: InformerMode,
    method: FingerprintMethod,
) -> dict[str, str]:
    method = common_method(observation, resources=resources, mode=mode, wanted=method)
    pods = fingerprinted_pods(observation, resources=resources, mode=mode, method=method)
    return {
        "nodeTopologyPodsFingerprint": fingerprint(pods),
        "nodeTopologyPodsFingerprintMethod": method.value,
    }


def common_method(
    observation: Observation,
    *,
    resources: Collection[str],
    mode: InformerMode,
    wanted: FingerprintMethod,
) -> FingerprintMethod:
    """The wanted method, or `all` while releases of the scheduler would count different pods.

    What is exclusive has changed after v0.34 of scheduler-plugins; what all pods are has not, and
    a scheduler reads the method from the object.
    """
    if wanted is FingerprintMethod.ALL or observation.pods is None:
        return wanted
    newer = pods_by_requests(observation.pods, resources=resources, mode=mode)
    older = pods_by_any_request(observation.pods, mode=mode)
    return wanted if newer == older else FingerprintMethod.ALL


def fingerprinted_pods(
    observation: Observation,
    *,
    resources: Collection[str],
    mode: InformerMode,
    method: FingerprintMethod,
) -> tuple[PodName, ...]:
    """The pods that a scheduler counts which reads an object with these resources in its zones."""
    if method is FingerprintMethod.WITH_EXCLUSIVE_RESOURCES:
        if observation.pods is None:
            return pods_by_usage(observation.usage)
        return pods_by_requests(observation.pods, resources=resources, mode=mode)
    if observation.pods is None:
        return tuple(pod.pod for pod in observation.usage.pods)
    return tuple(pod.pod for pod in observation.pods if counts(pod.phase, mode))


def forecast_attributes(
    observation: Observation, counted: Accounts, hardware: Hardware
) -> dict[str, str]:
    policy = observation.policy
    several = policy is not None and policy.topology_manager in (
        TopologyManagerPolicy.RESTRICTED,
        TopologyManagerPolicy.BEST_EFFORT,
    )
    values = {}
    for resource, pool in counted.pools.items():
        aligned = largest_aligned(pool, several=several)
        values[f"largestAligned.{resource}"] = str(aligned)
        if hardware.linked and is_whole_gpus(pool, hardware):
            linked = largest_linked(pool, several=several, linked=hardware.linked)
            values[f"largestNvlinkAligned.{resource}"] = str(linked)
    return values


def is_whole_gpus(pool: DevicePool, hardware: Hardware) -> bool:
    return all(ids <= hardware.uuids for ids in pool.capacity)


# Zones


def node_zones(
    nodes: Sequence[NumaNode],
    counted: Accounts,
    *,
    hardware: Hardware,
    vectors: Placement | None,
    detail: Detail,
) -> list[dict[str, Any]]:
    zones = []
    for number, (node, resources) in enumerate(zip(nodes, counted.resources, strict=True)):
        values = contents(number, hardware) if detail is Detail.NODE else {}
        if node.id != number:
            values["numaNode"] = str(node.id)
        if node.id in counted.memory_groups:
            values["memoryGroup"] = ",".join(map(str, counted.memory_groups[node.id]))
        if vectors is not None and number in vectors.vectors:
            values[VECTOR] = vectors.vectors[number]
        zone = zone_body(f"node-{number}", "Node", values=values)
        zone["costs"] = slit_costs(node, nodes)
        zone["resources"] = [
            {"name": name, **quantities(name, figures)} for name, figures in resources.items()
        ]
        zones.append(zone)
    return zones


def contents(number: int, hardware: Hardware) -> dict[str, str]:
    """The names of a zone's GPUs and of their groups, where neither has a zone of its own."""
    gpus = [gpu for gpu in hardware.machine.gpus if hardware.zone_of(gpu.pci) == number]
    names = dict.fromkeys(
        hardware.group_of[gpu.pci] for gpu in gpus if gpu.pci in hardware.group_of
    )
    values = {"gpus": ",".join(gpu.name for gpu in gpus), "nvlinkGroups": ",".join(names)}
    return {name: value for name, value in values.items() if value}


def slit_costs(node: NumaNode, nodes: Sequence[NumaNode]) -> list[dict[str, Any]]:
    """ACPI distances to the zones; firmware that says none of itself still is 10 from itself."""
    distances = {**node.distance, node.id: 10}
    return [
        {"name": f"node-{number}", "value": distances[other.id]}
        for number, other in enumerate(nodes)
        if other.id in distances
    ]


def quantities(resource: str, figures: Figures) -> dict[str, str]:
    write = binary_quantity if is_memory(resource) else decimal_quantity
    return {
        "capacity": write(figures.capacity),
        "allocatable": write(figures.allocatable),
        "available": write(figures.available),
    }


def container_zones(
    observation: Observation,
    nodes: Sequence[NumaNode],
    *,
    resources: Collection[str],
    mode: InformerMode,
) -> dict[ContainerName, int] | None:
    """The zone of each container that counts, for preemption; None when not all of them have one.

    Only under single-numa-node is a container in one zone for certain. A reader that counts
    differently throws all of it away, so an incomplete list is not worth its bytes.
    """
    if not is_single_numa_node(observation):
        return None
    zone_of_node = {node.id: number for number, node in enumerate(nodes)}
    zone_of_cpu = {cpu: number for number, node in enumerate(nodes) for cpu in node.cpus}
    held = {
        ContainerName(pod.pod.namespace, pod.pod.name, container.name): container
        for pod in observation.usage.pods
        for container in pod.containers
    }
    if observation.pods is None:
        names = [name for name, use in held.items() if container_holds_exclusively(use)]
    else:
        names = [
            ContainerName(pod.pod.namespace, pod.pod.name, container)
            for pod in observation.pods
            if counts(pod.phase, mode)
            for container in exclusive_containers(pod, resources=resources)
        ]
    found = {}
    for name in names:
        use = held.get(name)
        zones = zones_of(use, zone_of_node, zone_of_cpu) if use is not None else set()
        if len(zones) != 1:
            return None
        found[name] = zones.pop()
    return found


def zones_of(
    use: ContainerUse, zone_of_node: Mapping[NumaId, int], zone_of_cpu: Mapping[CpuId, int]
) -> set[int]:
    """Devices of several nodes say nothing more than the CPUs and memory beside them do."""
    sure = {zone_of_cpu[cpu] for cpu in use.cpus if cpu in zone_of_cpu}
    sure |= {
        zone_of_node[node] for block in use.memory for node in block.numa if node in zone_of_node
    }
    for device in use.devices:
        if len(device.numa) == 1 and device.numa[0] in zone_of_node:
            sure.add(zone_of_node[device.numa[0]])
    return sure


def hardware_zones(hardware: Hardware, detail: Detail) -> list[dict[str, Any]]:
    """Those without figures, for people and tools."""
    if detail is Detail.NODE:
        return []
    if detail is Detail.GPU:
        return [*gpu_zones(hardware), *group_zones(hardware)]
    return [
        *full_gpu_zones(hardware),
        *group_zones(hardware),
        *nic_zones(hardware),
        *switch_zones(hardware),
        *memory_zones(hardware),
    ]
