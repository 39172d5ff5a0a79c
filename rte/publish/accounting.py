"""How much of each resource every NUMA zone has, may hand out, and has left.

Devices and CPUs are counted as sets of ids, memory as the kubelet's Memory Manager counts it.
Zones are the NUMA nodes with CPUs, numbered from 0 without gaps, whatever the kernel calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from rte.model import (
    CpuId,
    DeviceId,
    DeviceUse,
    Machine,
    NumaId,
    NumaNode,
    Observation,
    PodName,
    TopologyManagerPolicy,
    Usage,
    huge_pages_name,
)

MAX_ZONES = 64
"""NodeResourceTopologyMatch indexes an array of this length by zone id."""


class Unbound(StrEnum):
    """What a zone offers of a resource that the kubelet binds to no NUMA node."""

    TOTAL = "total"
    """The node's total where the scheduler insists on one (single-numa-node), else nothing."""
    ZONE = "zone"
    """The zone's physical share."""


class Figures(NamedTuple):
    """Base units: cores, bytes, devices. capacity ≥ allocatable ≥ available ≥ 0."""

    capacity: int
    allocatable: int
    available: int


Entry = tuple[int, str, Figures]
"""What one zone, by number, lists of one resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """The devices of one resource that the kubelet knows a NUMA node of, as ids by zone.

    A device of several NUMA nodes is in every zone it touches.
    """

    capacity: tuple[frozenset[DeviceId], ...]
    allocatable: tuple[frozenset[DeviceId], ...]
    available: tuple[frozenset[DeviceId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    resources: tuple[Mapping[str, Figures], ...]  # by zone; names sorted
    pools: Mapping[str, DevicePool]  # device resources by name, sorted
    unbound: tuple[str, ...]  # sorted
    memory_groups: Mapping[NumaId, tuple[NumaId, ...]]  # nodes in multi-node groups


def zone_nodes(machine: Machine) -> tuple[NumaNode, ...]:
    """The NUMA node of each zone, in the order of the zones' numbers."""
    return tuple(node for node in machine.numa_nodes if node.cpus)[:MAX_ZONES]


def accounts(
    observation: Observation,
    *,
    ours: Iterable[DeviceUse] = (),
    claimed: Collection[DeviceId] = (),
    unbound: Unbound = Unbound.TOTAL,
    exclude: Collection[str] = (),
    ignored: Collection[PodName] = (),
) -> Accounts:
    """`ours` are the devices that this node's plugin advertises, healthy or not, with the NUMA
    nodes it sends; `claimed` are GPUs and MIG slices that DRA claims hold, `ignored` pods whose
    resources count as available."""
    observation = without_pods(observation, ignored)
    nodes = zone_nodes(observation.machine)
    zones = {node.id: number for number, node in enumerate(nodes)}
    groups = memory_groups(observation.usage)
    pools = device_pools(observation, zones=zones, ours=ours, claimed=claimed)
    pools = {name: pool for name, pool in pools.items() if name not in exclude}
    resources: list[dict[str, Figures]] = [{} for _ in nodes]
    for zone, name, figures in chain(
        cpu_entries(observation, nodes),
        memory_entries(observation, nodes, groups=groups),
        unbound_entries(observation, nodes, unbound=unbound),
        device_entries(pools),
    ):
        resources[zone][name] = figures
    return Accounts(
        resources=tuple(
            {name: zone[name] for name in sorted(zone) if name not in exclude} for zone in resources
        ),
        pools=pools,
        unbound=tuple(sorted(unbound_resources(observation))),
        memory_groups=groups,
    )


def without_pods(observation: Observation, ignored: Collection[PodName]) -> Observation:
    """The observation as if these pods held nothing."""
    if not ignored:
        return observation
    counted = tuple(pod for pod in observation.usage.pods if pod.pod not in ignored)
    # The Memory Manager's own word has them in it.
    usage = replace(observation.usage, pods=counted, memory_free={}, memory_groups=None)
    return replace(observation, usage=usage)


# What a zone lists


def cpu_entries(observation: Observation, nodes: Sequence[NumaNode]) -> Iterator[Entry]:
    if is_cpu_bound(observation):
        most = most_whole_cpus(observation)
        for zone, node in enumerate(nodes):
            yield zone, "cpu", cpu_figures(observation, node, most=most)


def memory_entries(
    observation: Observation,
    nodes: Sequence[NumaNode],
    *,
    groups: Mapping[NumaId, tuple[NumaId, ...]],
) -> Iterator[Entry]:
    """Also of zones that have none: the scheduler gives a pod that binds no memory a device only
    in a zone that lists each kind of memory it asks for."""
    if not is_memory_bound(observation):
        return
    for name, figures in memory_figures(observation, groups=groups).items():
        if any(of_node.capacity for of_node in figures.values()):
            for zone, node in enumerate(nodes):
                yield zone, name, figures[node.id]


def unbound_entries(
    observation: Observation, nodes: Sequence[NumaNode], *, unbound: Unbound
) -> Iterator[Entry]:
    for name, physical in unbound_resources(observation).items():
        offer = unbound_offer(observation, name, physical, unbound=unbound)
        for zone, node in enumerate(nodes):
            figures = offer(node)
            if figures is not None and figures.capacity:
                yield zone, name, figures


def device_entries(pools: Mapping[str, DevicePool]) -> Iterator[Entry]:
    for name, pool in pools.items():
        sets = zip(pool.capacity, pool.allocatable, pool.available, strict=True)
        for zone, (capacity, allocatable, available) in enumerate(sets):
            if capacity:
                yield zone, name, Figures(len(capacity), len(allocatable), len(available))


# Which manager binds what. Where the policy cannot be read, what PodResources lists is the answer.


def is_cpu_bound(observation: Observation) -> bool:
    if observation.policy is None:
        return bool(observation.allocatable.cpus)
    return observation.policy.cpu_manager == "static"


def is_memory_bound(observation: Observation) -> bool:
    if observation.policy is None:
        return bool(observation.allocatable.memory)
    return observation.policy.memory_manager == "Static"


def is_single_numa_node(observation: Observation) -> bool:
    policy = observation.policy
    return policy is not None and policy.topology_manager is TopologyManagerPolicy.SINGLE_NUMA_NODE


# CPUs


def cpu_figures(observation: Observation, node: NumaNode, *, most: int | None) -> Figures:
    """Allocatable CPUs are those that no configuration reserves; shared ones count as available,
    up to `most`.

    The kubelet takes the next exclusive CPU from its shared pool, so the pool is what is left.
    """
    allocatable = set(observation.allocatable.cpus).intersection(node.cpus)
    left = len(unheld(observation, allocatable))
    return Figures(len(node.cpus), len(allocatable), left if most is None else min(left, most))


def unheld(observation: Observation, cpus: Iterable[CpuId]) -> set[CpuId]:
    """Those that the kubelet's shared pool has, or may have again."""
    left = set(cpus).difference(exclusive_cpus(observation.usage))
    return left & observation.usage.cpus_managed if observation.usage.cpus_managed else left


def most_whole_cpus(observation: Observation) -> int | None:
    """What the kubelet gives one container at most, on the whole machine, of whole cores: a core
    of which a thread is reserved is none. None where it gives single threads too."""
    policy = observation.policy
    if policy is None or policy.cpu_manager_options.get("full-pcpus-only") != "true":
        return None
    nodes = observation.machine.numa_nodes
    reserved = {cpu for node in nodes for cpu in node.cpus}.difference(observation.allocatable.cpus)
    broken = {
        cpu
        for node in nodes
        for core in node.cores
        if not reserved.isdisjoint(core)
        for cpu in core
    }
    return len(unheld(observation, set(observation.allocatable.cpus) - broken))


def exclusive_cpus(usage: Usage) -> set[CpuId]:
    held: set[CpuId] = set()
    for pod in usage.pods:
        held.update(pod.cpus)
        for container in (*pod.containers, *pod.ended):
            held.update(container.cpus)
    return held


# Memory


def memory_groups(usage: Usage) -> dict[NumaId, tuple[NumaId, ...]]:
    """The NUMA nodes that the Memory Manager has joined, by node.

    None of them can be used alone until the last pod of the group has gone.
    """
    if usage.memory_groups is not None:
        return dict(usage.memory_groups)
    groups: dict[NumaId, tuple[NumaId, ...]] = {}
    for pod in usage.pods:
        for block in pod.memory_blocks():
            if len(block.numa) > 1:
                # Groups never overlap in a kubelet; a list taken between two changes may say so.
                joined = set(block.numa).union(*(groups.get(node, ()) for node in block.numa))
                groups.update(dict.fromkeys(joined, tuple(sorted(joined))))
    return groups


def memory_figures(
    observation: Observation, *, groups: Mapping[NumaId, tuple[NumaId, ...]]
) -> dict[str, dict[NumaId, Figures]]:
    allocatable: dict[str, dict[NumaId, int]] = {}
    for block in observation.allocatable.memory:
        for node in block.numa:
            by_node = allocatable.setdefault(block.type, {})
            by_node[node] = by_node.get(node, 0) + block.size_bytes
    physical = {node.id: physical_memory(node) for node in observation.machine.numa_nodes}
    free = memory_left(observation.usage, allocatable)
    closed = groups if is_single_numa_node(observation) else {}
    names = {*allocatable, *(name for figures in physical.values() for name in figures)}
    return {
        name: {
            node: Figures(
                capacity=max(of_node.get(name, 0), allocatable.get(name, {}).get(node, 0)),
                allocatable=allocatable.get(name, {}).get(node, 0),
                available=0 if node in closed else free.get(name, {}).get(node, 0),
            )
            for node, of_node in physical.items()
        }
        for name in names
    }


def memory_left(
    usage: Usage, allocatable: Mapping[str, Mapping[NumaId, int]]
) -> dict[str, dict[NumaId, int]]:
    """What the Memory Manager itself says is left; where it says nothing a block of several nodes
    is taken to fill them in ascending order."""
    free = {name: dict(by_node) for name, by_node in allocatable.items()}
    if usage.memory_free:
        for name, by_node in free.items():
            for node, most in by_node.items():
                by_node[node] = min(most, usage.memory_free.get(name, {}).get(node, most))
        return free
    blocks = [block for pod in usage.pods for block in pod.memory_blocks()]
    for block in sorted(blocks, key=lambda block: (len(block.numa), block.numa)):
        by_node = free.get(block.type, {})
        rest = block.size_bytes
        for node in block.numa:
            taken = min(rest, by_node.get(node, 0))
            if taken:
                by_node[node] -= taken
                rest -= taken
    return free


def physical_memory(node: NumaNode) -> dict[str, int]:
    """Bytes by resource name; page sizes of which the node has none are left out."""
    sizes = {
        huge_pages_name(page_bytes): page_bytes * count
        for page_bytes, count in node.huge_pages.items()
        if count
    }
    return sizes | ({"memory": node.memory_bytes} if node.memory_bytes else {})


# What no manager binds


def unbound_resources(observation: Observation) -> dict[str, int]:
    """Resource → the machine's total, of cpu, memory and huge pages that nothing binds."""
    physical: dict[str, int] = {}
    if not is_cpu_bound(observation):
        physical["cpu"] = sum(len(node.cpus) for node in observation.machine.numa_nodes)
    if not is_memory_bound(observation):
        for node in observation.machine.numa_nodes:
            for name, size_bytes in physical_memory(node).items():
                physical[name] = physical.get(name, 0) + size_bytes
    return physical


def unbound_offer(
    observation: Observation, name: str, physical: int, *, unbound: Unbound
) -> Callable[[NumaNode], Figures | None]:
    """What a zone says of a resource that may be used on any NUMA node.

    Totals are never decremented: NodeResourcesFit counts them, per node, as they are used.
    """
    # An own Node that was not read, or does not have the resource yet, leaves the physical total.
    total = observation.node_allocatable.get(name, physical)

    def share(node: NumaNode) -> Figures:
        own = len(node.cpus) if name == "cpu" else physical_memory(node).get(name, 0)
        offered = min(own, total * own // physical if physical else 0)
        return Figures(own, offered, offered)

    if unbound is Unbound.ZONE:
        return share
    if is_single_numa_node(observation):
        return lambda _: Figures(total, total, total)
    return lambda _: None


# Devices


def device_pools(
    observation: Observation,
    *,
    zones: Mapping[NumaId, int],
    ours: Iterable[DeviceUse],
    claimed: Collection[DeviceId],
) -> dict[str, DevicePool]:
    """Pools by resource name, sorted; devices of no zone are in none, without devices there is no
    pool."""
    healthy = {(device.resource, device.id): device for device in observation.allocatable.devices}
    known = {(device.resource, device.id): device for device in ours}
    used = set()
    for pod in observation.usage.pods:
        for container in (*pod.containers, *pod.ended):
            for device in container.devices:
                used.add((device.resource, device.id))
                known[device.resource, device.id] = device
    known |= healthy  # the kubelet's present word on a device's NUMA nodes is the last one
    pools: dict[str, tuple[list[set[DeviceId]], list[set[DeviceId]], list[set[DeviceId]]]] = {}
    for key, device in known.items():
        touched = {zones[node] for node in device.numa if node in zones}
        if not touched:
            continue
        if key[0] not in pools:
            pools[key[0]] = ([set() for _ in zones], [set() for _ in zones], [set() for _ in zones])
        capacity, allocatable, available = pools[key[0]]
        is_free = key not in used and base_id(device.id) not in claimed
        for zone in touched:
            capacity[zone].add(device.id)
            if key in healthy:
                allocatable[zone].add(device.id)
                if is_free:
                    available[zone].add(device.id)
    return {
        name: DevicePool(
            capacity=tuple(map(frozenset, capacity)),
            allocatable=tuple(map(frozenset, allocatable)),
            available=tuple(map(frozenset, available)),
        )
        for name, (capacity, allocatable, available) in sorted(pools.items())
    }


def base_id(device: DeviceId) -> DeviceId:
    """The GPU or MIG slice that a replica is one of (`<id>::<n>`)."""
    return DeviceId(device.split("::", 1)[0])
