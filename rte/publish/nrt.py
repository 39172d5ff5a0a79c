"""The NodeResourceTopology object of a node, as plain JSON values.

Zones of type Node carry the figures that schedulers read. All others describe the hardware for
people and tools and carry no resources: a scheduler with reservations subtracts from every zone
that lists a resource.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

from rte.graph.build import Graph
from rte.graph.groups import Group
from rte.model import (
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    FaultClass,
    Faults,
    Gpu,
    Level,
    Machine,
    Nic,
    NumaId,
    NumaNode,
    NumaSource,
    Observation,
    PciAddress,
    PciDevice,
    PodName,
    TopologyManagerPolicy,
    pci_order,
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
from rte.publish.placement import METADATA, VECTOR, ContainerName, Placement, placement

API_VERSION = "topology.node.k8s.io/v1alpha2"
KIND = "NodeResourceTopology"
MANAGED_BY = {"app.kubernetes.io/managed-by": "rte"}
DEFAULT_MAX_NUMA_NODES = 8  # of the kubelet, and of the scheduler that reads the attribute

# NVML's nvmlGpuTopologyLevel_t, nearer is smaller. Pairs of unknown level have no cost: readers
# take a cost that is missing for the worst.
COST = {Level.PIX: 10, Level.PXB: 20, Level.PHB: 30, Level.NODE: 40, Level.SYS: 50}
NVLINK_COST = 1


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
    parts = Hardware(
        observation.machine, graph, groups, nodes, observation.faults, withheld=observation.withheld
    )
    zones = [
        node_zone(number, nodes, counted, parts=parts, vectors=vectors, detail=detail)
        for number in range(len(nodes))
    ]
    if detail is not Detail.NODE:
        zones += gpu_zones(parts, detail)
        zones += group_zones(parts)
    if detail is Detail.FULL:
        zones += nic_zones(parts) + switch_zones(parts) + memory_zones(parts)
    values = {
        **policy_attributes(observation),
        **fingerprint_attributes(observation, resources=listed, mode=informer_mode, method=method),
        **forecast_attributes(observation, counted, parts),
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
        "zones": zones,
    }


def metadata(node_name: str, node_uid: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {"name": node_name, "labels": dict(MANAGED_BY)}
    if node_uid is not None:
        owner = {"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": node_uid}
        body["ownerReferences"] = [owner]
    return body


def attributes(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": values[name]} for name in sorted(values)]


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
        values["reservedCPUs"] = cpu_list(policy.reserved_cpus)
    return values


def cpu_list(cpus: Iterable[CpuId]) -> str:
    """The kernel's list format, ascending: `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


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
    observation: Observation, counted: Accounts, parts: Hardware
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
        if parts.linked and is_whole_gpus(pool, parts):
            linked = largest_linked(pool, several=several, linked=parts.linked)
            values[f"largestNvlinkAligned.{resource}"] = str(linked)
    return values


def is_whole_gpus(pool: DevicePool, parts: Hardware) -> bool:
    return all(ids <= parts.uuids for ids in pool.capacity)


# Zones with figures


def node_zone(
    number: int,
    nodes: Sequence[NumaNode],
    counted: Accounts,
    *,
    parts: Hardware,
    vectors: Placement | None,
    detail: Detail,
) -> dict[str, Any]:
    node = nodes[number]
    values = {}
    if node.id != number:
        values["numaNode"] = str(node.id)
    if node.id in counted.memory_groups:
        values["memoryGroup"] = ",".join(map(str, counted.memory_groups[node.id]))
    if vectors is not None and number in vectors.vectors:
        values[VECTOR] = vectors.vectors[number]
    if detail is Detail.NODE:
        gpus = [gpu for gpu in parts.machine.gpus if parts.zone_of(gpu.pci) == number]
        names = dict.fromkeys(parts.group_of[gpu.pci] for gpu in gpus if gpu.pci in parts.group_of)
        if gpus:
            values["gpus"] = ",".join(gpu.name for gpu in gpus)
        if names:
            values["nvlinkGroups"] = ",".join(names)
    zone = zone_body(f"node-{number}", "Node", values=values)
    zone["costs"] = slit_costs(node, nodes)
    zone["resources"] = [
        {"name": name, **quantities(name, figures)}
        for name, figures in counted.resources[number].items()
    ]
    return zone


def zone_body(
    name: str, type_: str, *, parent: str | None = None, values: Mapping[str, str]
) -> dict[str, Any]:
    body: dict[str, Any] = {"name": name, "type": type_}
    if parent is not None:
        body["parent"] = parent
    if values:
        body["attributes"] = attributes(values)
    return body


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


def binary_quantity(size_bytes: int) -> str:
    """The canonical form that apimachinery gives a BinarySI quantity: 256Gi, 263906744Ki, 1023."""
    power = 0
    while size_bytes and size_bytes % 1024 == 0 and power < 6:
        size_bytes //= 1024
        power += 1
    return f"{size_bytes}{('', 'Ki', 'Mi', 'Gi', 'Ti', 'Pi', 'Ei')[power]}"


def decimal_quantity(count: int) -> str:
    """The canonical form that apimachinery gives a DecimalSI quantity: 8, 1k."""
    power = 0
    while count and count % 1000 == 0 and power < 6:
        count //= 1000
        power += 1
    return f"{count}{('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}"


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


# Zones that describe the hardware


class Hardware:
    """The machine and its graph with the few indexes that the zones are written from."""

    def __init__(
        self,
        machine: Machine,
        graph: Graph | None,
        groups: Sequence[Group],
        nodes: Sequence[NumaNode],
        faults: Faults,
        *,
        withheld: Mapping[str, str] | None = None,
    ) -> None:
        self.machine = machine
        self.graph = graph
        self.groups = groups
        self.faults = faults
        self.withheld = withheld or {}
        self.zone_of_node = {node.id: number for number, node in enumerate(nodes)}
        self.functions = {function.address: function for function in machine.pci}
        self.uuids = frozenset(gpu.uuid for gpu in machine.gpus if gpu.uuid is not None)
        self.group_of = {pci: group.name for group in groups for pci in group.gpus}
        self.name_of = {gpu.pci: gpu.name for gpu in machine.gpus}
        answering = graph.gpus if graph is not None else ()
        self.position = {gpu.pci: position for position, gpu in enumerate(answering)}
        self.linked = linked_ids(graph) if graph is not None else {}

    def zone_of(self, address: PciAddress | None, numa: NumaId | None = None) -> int | None:
        """The zone of a function whose firmware or operator states its node; never an inferred
        one. `numa` is asked where there is no function."""
        function = self.functions.get(address) if address is not None else None
        if function is not None:
            stated = function.numa_from in (NumaSource.SYSFS, NumaSource.OVERRIDE)
            numa = function.numa if stated else None
        return self.zone_of_node.get(numa) if numa is not None else None

    def zone_name(self, address: PciAddress | None, numa: NumaId | None = None) -> str | None:
        number = self.zone_of(address, numa)
        return None if number is None else f"node-{number}"

    @cached_property
    def switches(self) -> dict[PciAddress, str]:
        """The upstream ports of the PCIe switches above GPUs and NICs, with their zones' names.

        Counted down from the root port, every other bridge is an upstream port.
        """
        ends = [gpu.pci for gpu in self.machine.gpus]
        ends += [nic.pci for nic in listed_nics(self.machine) if nic.pci is not None]
        ports = {port for end in ends for port in self.switches_above(end)}
        return {
            port: f"switch-{number}" for number, port in enumerate(sorted(ports, key=pci_order))
        }

    def switches_above(self, address: PciAddress) -> list[PciAddress]:
        """Upstream ports from the root complex down to the function."""
        bridges: list[PciAddress] = []
        function = self.functions.get(address)
        while function is not None and function.parent is not None:
            if function.parent in bridges:
                break
            bridges.append(function.parent)
            function = self.functions.get(function.parent)
        return bridges[::-1][1::2]

    def parent(self, address: PciAddress | None, detail: Detail) -> str | None:
        """The nearest switch where switches are listed, else the NUMA zone."""
        above = self.switches_above(address) if address and detail is Detail.FULL else []
        return self.switches[above[-1]] if above else self.zone_name(address)


def linked_ids(graph: Graph) -> dict[DeviceId, list[DeviceId]]:
    """The GPUs that each GPU reaches over NVLink directly, without those that reach none."""
    return {
        graph.ids[position]: [other for bit, other in enumerate(graph.ids) if neighbours >> bit & 1]
        for position, neighbours in enumerate(graph.adjacent)
        if neighbours
    }


def gpu_zones(parts: Hardware, detail: Detail) -> list[dict[str, Any]]:
    return [gpu_zone(gpu, parts, detail) for gpu in parts.machine.gpus]


def gpu_zone(gpu: Gpu, parts: Hardware, detail: Detail) -> dict[str, Any]:
    values = {"pci": str(gpu.pci), **health(gpu, parts.faults, parts.withheld)}
    if gpu.uuid is not None:
        values["uuid"] = gpu.uuid
    if gpu.pci in parts.group_of:
        values["nvlinkGroup"] = parts.group_of[gpu.pci]
    if detail is Detail.FULL:
        if gpu.product is not None:
            values["product"] = gpu.product
        values |= {f"nvlinks.{name}": str(lanes) for name, lanes in links(gpu, parts).items()}
        values |= link_speed(parts.functions.get(gpu.pci))
    zone = zone_body(gpu.name, "GPU", parent=parts.parent(gpu.pci, detail), values=values)
    costs = gpu_costs(gpu, parts) if detail is Detail.FULL else []
    if costs:
        zone["costs"] = costs
    return zone


def health(gpu: Gpu, faults: Faults, withheld: Mapping[str, str] | None = None) -> dict[str, str]:
    """`healthy`, `degraded` or `unhealthy`, with the reasons where it is not healthy.

    A fault or cordon of some slices leaves the others: the GPU is degraded.
    """
    found = faults.get(gpu.pci, ())
    cordoned = withheld or {}
    whole = gpu.pci in cordoned or (gpu.uuid or "") in cordoned
    reasons = {fault.reason for fault in found if fault.severity is not FaultClass.INFO}
    unhealthy = whole or any(
        fault.severity is FaultClass.WITHHOLD and (fault.gpu_instance is None or not gpu.slices)
        for fault in found
    )
    if whole or any(part.id in cordoned for part in gpu.slices):
        reasons |= {"withheld"}
    if gpu.lost is not None:
        unhealthy, reasons = True, reasons | {"lost"}
    if not reasons:
        return {"health": "healthy"}
    return {
        "health": "unhealthy" if unhealthy else "degraded",
        "healthReason": ",".join(sorted(reasons)),
    }


def links(gpu: Gpu, parts: Hardware) -> dict[str, int]:
    """NVLink lanes to each other GPU, those through switches included."""
    position = parts.position.get(gpu.pci)
    if parts.graph is None or position is None:
        return {}
    return {
        other.name: lanes
        for other, lanes in zip(parts.graph.gpus, parts.graph.lanes[position], strict=True)
        if lanes and other.pci != gpu.pci
    }


def gpu_costs(gpu: Gpu, parts: Hardware) -> list[dict[str, Any]]:
    position = parts.position.get(gpu.pci)
    if parts.graph is None or position is None:
        return []
    costs = []
    for other, peer in enumerate(parts.graph.gpus):
        if other == position:
            continue
        linked = parts.graph.adjacent[position] >> other & 1
        cost = NVLINK_COST if linked else COST.get(parts.graph.levels[position][other])
        if cost is not None:
            costs.append({"name": peer.name, "value": cost})
    return costs


def group_zones(parts: Hardware) -> list[dict[str, Any]]:
    return [
        zone_body(group.name, "NVLinkGroup", values=group_values(group, parts))
        for group in parts.groups
    ]


def group_values(group: Group, parts: Hardware) -> dict[str, str]:
    def names(addresses: Iterable[PciAddress]) -> str:
        return ",".join(parts.name_of.get(address, address) for address in addresses)

    values = {"shape": group.shape.value, "gpus": names(group.gpus)}
    if group.domain is not None:
        values["domain"] = group.domain
    if group.degraded:
        values["degraded"] = names(group.degraded)
    return values


def listed_nics(machine: Machine) -> list[Nic]:
    """Virtual functions are left out: they can be hundreds, and are where their card is."""
    return [nic for nic in machine.nics if nic.physical_function is None]


def nic_zones(parts: Hardware) -> list[dict[str, Any]]:
    zones = []
    for number, nic in enumerate(listed_nics(parts.machine)):
        function = parts.functions.get(nic.pci) if nic.pci is not None else None
        values = {"kind": nic.kind, **link_speed(function)}
        if nic.pci is not None:
            values["pci"] = str(nic.pci)
        if nic.netdevs:
            values["netdev"] = ",".join(nic.netdevs)
        if nic.rdma:
            values["rdma"] = ",".join(nic.rdma)
        if nic.rate_megabits_per_s is not None:
            values["linkSpeedGbps"] = f"{nic.rate_megabits_per_s / 1000:g}"
        if nic.up is not None:
            values["up"] = "true" if nic.up else "false"
        if nic.pci is None:
            parent = parts.zone_name(None, nic.numa)
        else:
            parent = parts.parent(nic.pci, Detail.FULL)
        zones.append(zone_body(f"nic-{number}", "NIC", parent=parent, values=values))
    return zones


def link_speed(function: PciDevice | None) -> dict[str, str]:
    if function is None or function.link is None:
        return {}
    link = function.link
    return {"pcieLink": f"{link.gigatransfers:g} GT/s x{link.width}"}


def switch_zones(parts: Hardware) -> list[dict[str, Any]]:
    zones = []
    for port, name in parts.switches.items():
        above = parts.switches_above(port)
        parent = parts.switches[above[-1]] if above else parts.zone_name(port)
        zones.append(zone_body(name, "PCIeSwitch", parent=parent, values={"pci": str(port)}))
    return zones


def memory_zones(parts: Hardware) -> list[dict[str, Any]]:
    zones = []
    for node in parts.machine.numa_nodes:
        if node.cpus:
            continue
        values = {"numaNode": str(node.id)}
        if node.memory_bytes is not None:
            values["memory"] = binary_quantity(node.memory_bytes)
        if node.gpu is not None:
            values["gpu"] = parts.name_of.get(node.gpu, node.gpu)
        zone = zone_body(f"memory-{node.id}", "Memory", values=values)
        costs = [
            {"name": f"node-{number}", "value": node.distance[other]}
            for other, number in parts.zone_of_node.items()
            if other in node.distance
        ]
        if costs:
            zone["costs"] = costs
        zones.append(zone)
    return zones
