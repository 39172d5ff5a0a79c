"""A node as its kubelet knows it: what it has, and what admitted pods hold of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rte.kubelet.cpus import CpuTopology
from rte.kubelet.hints import Hint, Mask, bits, masks
from rte.kubelet.spec import PodSpec
from rte.model import (
    Allocatable,
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    MemoryBlock,
    NumaId,
    NumaNode,
    PodName,
    PodUse,
    Policy,
    Usage,
    huge_pages_name,
)

MOST_PODS = 110  # the kubelet's maxPods


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one admitted pod has, container by container in the order of its spec.

    Its init containers have ended: they keep their devices and CPUs, as the kubelet does until
    the pod ends, also those that another container has taken over, and no memory.
    """

    spec: PodSpec
    containers: tuple[ContainerUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletState:
    """A node as its kubelet knows it, with the pods that it has admitted."""

    policy: Policy
    numa_nodes: tuple[NumaNode, ...]
    topology: CpuTopology
    devices: Mapping[str, Mapping[DeviceId, tuple[NumaId, ...]]] = field(default_factory=dict)
    """Resource → id → NUMA nodes, () for a device without topology; unhealthy ones too."""
    unhealthy: frozenset[tuple[str, DeviceId]] = frozenset()
    allocatable: Mapping[str, int] = field(default_factory=dict)
    """The Node's status.allocatable in base units; a resource that is absent is not checked."""
    most_pods: int = MOST_PODS
    pods: Mapping[PodName, Held] = field(default_factory=dict)
    memory: MemoryTables | None = None
    """The Memory Manager's own account; None as long as no pod has been given any.

    It is no function of the pods: what is freed in a group is freed on its lowest node first, and
    a node that was given out alone meanwhile forgets its group.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTables:
    free: Mapping[tuple[NumaId, str], int]  # bytes by node and type
    assignments: Mapping[NumaId, int]  # blocks that touch the node
    group: Mapping[NumaId, tuple[NumaId, ...]]  # the nodes that it was last given out with


def kubelet_state(
    numa_nodes: Sequence[NumaNode],
    policy: Policy,
    *,
    cores: Sequence[Sequence[CpuId]] = (),
    sockets: Mapping[NumaId, int] | None = None,
    **fields: object,
) -> KubeletState:
    """A kubelet without pods.

    `cores` are the hardware threads of each core: without them each CPU is a core of its own.
    `sockets` are by NUMA node: without them each node is a socket. `fields` are KubeletState's.
    """
    node = {cpu: n.id for n in numa_nodes for cpu in n.cpus}
    core = {cpu: int(min(threads)) for threads in cores for cpu in threads}
    topology = CpuTopology(
        node=node,
        core={cpu: core.get(cpu, int(cpu)) for cpu in node},
        socket={cpu: int(n if sockets is None else sockets[n]) for cpu, n in node.items()},
    )
    return KubeletState(
        policy=policy,
        numa_nodes=tuple(numa_nodes),
        topology=topology,
        **fields,  # type: ignore[arg-type]
    )


def without(state: KubeletState, pod: PodName) -> KubeletState:
    """The state after a pod has ended or gone."""
    memory = MemoryState(state)
    for container in state.pods[pod].containers if pod in state.pods else ():
        memory.release(container.memory)
    rest = {name: held for name, held in state.pods.items() if name != pod}
    return replace(state, pods=rest, memory=memory.tables())


def usage(state: KubeletState) -> Usage:
    """What PodResources would list: init containers that end are not listed."""
    pods = []
    for name in sorted(state.pods):
        held = state.pods[name]
        specs = {container.name: container for container in held.spec.containers}
        pods.append(
            PodUse(
                pod=name,
                containers=tuple(
                    use for use in held.containers if not specs[use.name].ends_before_the_others
                ),
            )
        )
    return Usage(pods=tuple(pods))


def allocatable(state: KubeletState) -> Allocatable:
    """What PodResources would call allocatable."""
    reserved = set(state.policy.reserved_cpus)
    is_static = state.policy.cpu_manager == "static"
    is_bound = state.policy.memory_manager == "Static"
    memory = node_memory(state) if is_bound else {}
    return Allocatable(
        devices=tuple(
            DeviceUse(resource=resource, id=id, numa=ids[id])
            for resource, ids in sorted(state.devices.items())
            for id in sorted(ids)
            if (resource, id) not in state.unhealthy
        ),
        cpus=tuple(cpu for cpu in sorted(state.topology.node) if is_static and cpu not in reserved),
        memory=tuple(
            MemoryBlock(type=type_, size_bytes=size, numa=(node,))
            for (node, type_), size in sorted(memory.items(), key=lambda item: item[0][::-1])
            if size
        ),
    )


# Memory that is left to pods


def node_memory(state: KubeletState) -> dict[tuple[NumaId, str], int]:
    """Bytes that the Memory Manager has for pods, by node and type."""
    found: dict[tuple[NumaId, str], int] = {}
    for node in state.numa_nodes:
        reserved = state.policy.reserved_memory.get(node.id, {})
        rest = (node.memory_bytes or 0) - reserved.get("memory", 0)
        for page_bytes, count in node.huge_pages.items():
            name = huge_pages_name(page_bytes)
            found[node.id, name] = page_bytes * count - reserved.get(name, 0)
            rest -= page_bytes * count
        found[node.id, "memory"] = max(rest, 0)
    return found


class MemoryState:
    """The Memory Manager's account, as one admission changes it."""

    def __init__(self, state: KubeletState) -> None:
        self.nodes = [node.id for node in state.numa_nodes]
        self.allocatable = node_memory(state)
        known = state.memory or MemoryTables(
            free=self.allocatable,
            assignments=dict.fromkeys(self.nodes, 0),
            group={node: (node,) for node in self.nodes},
        )
        self.free = dict(known.free)
        self.assignments = dict(known.assignments)
        self.group = dict(known.group)

    def tables(self) -> MemoryTables:
        return MemoryTables(
            free=dict(self.free), assignments=dict(self.assignments), group=dict(self.group)
        )

    def assign(self, nodes: Sequence[NumaId], type_: str, size_bytes: int) -> None:
        for node in nodes:
            self.assignments[node] += 1
            self.group[node] = tuple(nodes)
            taken = min(size_bytes, self.free.get((node, type_), 0))
            if taken:
                self.free[node, type_] -= taken
                size_bytes -= taken

    def release(self, blocks: Sequence[MemoryBlock]) -> None:
        """Frees the lowest nodes first, whoever's memory is there."""
        for block in blocks:
            rest = block.size_bytes
            for node in block.numa:
                self.assignments[node] -= 1
                if self.assignments[node] == 0:
                    self.group[node] = (node,)
                key = (node, block.type)
                freed = min(rest, self.allocatable.get(key, 0) - self.free.get(key, 0))
                if freed:
                    self.free[key] += freed
                    rest -= freed

    def sum(self, table: Mapping[tuple[NumaId, str], int], nodes: Mask, type_: str) -> int:
        return sum(table.get((NumaId(node), type_), 0) for node in bits(nodes))

    def fits(self, nodes: Mask, wanted: Mapping[str, int]) -> bool:
        return all(self.sum(self.free, nodes, name) >= size for name, size in wanted.items())

    def breaks_groups(self, nodes: Mask) -> bool:
        """Several nodes, of which one is in use alone or with others."""
        members = tuple(NumaId(node) for node in bits(nodes))
        return len(members) > 1 and any(
            self.assignments[node] and self.group[node] != members for node in members
        )

    def hints(
        self, wanted: Mapping[str, int], reusable: Mapping[tuple[Mask, str], int]
    ) -> list[Hint]:
        """The same hints for every type of memory."""
        narrowest, found = len(self.nodes), []
        for nodes in masks(self.nodes):
            if any(self.sum(self.allocatable, nodes, n) < size for n, size in wanted.items()):
                continue
            narrowest = min(narrowest, nodes.bit_count())
            single = bits(nodes)[0] if nodes.bit_count() == 1 else None
            if single is not None and len(self.group[NumaId(single)]) > 1:
                continue
            if self.breaks_groups(nodes):
                continue
            if all(
                self.sum(self.free, nodes, name) + reusable.get((nodes, name), 0) >= size
                for name, size in wanted.items()
            ):
                found.append(nodes)
        return [Hint(nodes, nodes.bit_count() == narrowest) for nodes in found]
