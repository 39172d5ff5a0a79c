"""A node to admit pods on: the model of the kubelet and our plugin, without sockets.

The plugin's objects are those that answer a kubelet; only nobody connects to them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from plugin.allocation import CannotAllocate, Handing
from plugin.api import deviceplugin_pb2 as plugin_api
from plugin.decisions import Decision
from plugin.life import DevicePlugin, Options
from rte.commands import parts
from rte.config import Config, ConfigError
from rte.graph.build import Graph
from rte.graph.parts import Sharing
from rte.kubelet.admission import Admitted, PluginError, Rejected, admit
from rte.kubelet.cpus import take
from rte.kubelet.node import KubeletState, MemoryState, allocatable, kubelet_state, usage
from rte.kubelet.policy import parse_policy
from rte.kubelet.spec import ContainerSpec, PodSpec
from rte.model import (
    CpuId,
    DeviceId,
    Faults,
    Machine,
    Policy,
    TopologyManagerPolicy,
    base_units,
    thousandths,
)
from rte.standin.kubelet import likely_cores, node_allocatable

MOST_SETS_OF = 16
"""Each manager looks at every set of its NUMA nodes: with more, not even a kubelet comes to an end
in the time that a pod waits."""
DEFAULT_MOST_NUMA_NODES = 8  # the kubelet's
MOST_NUMA_NODES_OPTION = "topologyManagerPolicyOptions.max-allowable-numa-nodes"


class WouldNotStart(Exception):
    """A kubelet with this configuration does not start on this machine, and why."""


class Undecided(NamedTuple):
    """Something that a kubelet decides, and that nothing here is known of."""

    of: str  # cpu, memory, hugepages or alignment
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one pod."""

    spec: PodSpec
    answer: Admitted | Rejected
    decisions: tuple[Decision, ...]  # of the plugin
    undecided: tuple[str, ...]  # resources that the pod asks for and that were left out
    unregistered: tuple[str, ...]  # extended resources that no plugin here has
    before: KubeletState
    free: frozenset[DeviceId]  # GPUs that nobody held before


class AdmitNode:
    """The kubelet's state changes with each pod that is admitted; `policy` is as it is
    configured, also where `undecided` says that a manager could not be followed."""

    def __init__(
        self,
        graph: Graph,
        faults: Faults,
        config: Config,
        configuration: Mapping[str, Any],
        *,
        where: str,
    ) -> None:
        """`configuration` are fields of a KubeletConfiguration, read from `where`.

        Raises PolicyError, WouldNotStart and ConfigError.
        """
        self.graph = graph
        self.where = where
        machine = named(graph.machine)
        self.plugin = DevicePlugin(plugin_options(config))
        self.plugin.update(machine, faults, graph=graph)
        wanted = parse_policy(configuration, where=where)
        check_start(machine, wanted)
        listed = {name: resource.tables.devices for name, resource in self.plugin.resources.items()}
        self.undecided = tuple(undecided(machine, wanted))
        state = kubelet_state(
            machine.numa_nodes,
            decided(wanted, self.undecided),
            cores=likely_cores(machine.numa_nodes),
            devices={
                name: {device.id: device.numa for device in devices.values()}
                for name, devices in listed.items()
            },
            unhealthy=frozenset(
                (name, device.id)
                for name, devices in listed.items()
                for device in devices.values()
                if not device.healthy
            ),
        )
        if state.policy.cpu_manager == "static":
            reserved = reserved_cpus(state, configuration)
            state = replace(state, policy=replace(state.policy, reserved_cpus=reserved))
        self.policy = replace(wanted, reserved_cpus=state.policy.reserved_cpus)
        self.state = replace(state, allocatable=checked(state, configuration, self.undecided))

    def admit(self, spec: PodSpec) -> Answer:
        """Decides about the pod and keeps it if it is admitted."""
        before = self.state
        self._tell_plugin()
        last = max((decision.number for decision in self.plugin.decisions), default=0)
        left_out = {found.of for found in self.undecided}
        answer = admit(
            before, without_unknown(spec, left_out), prefer=self._prefer, allocate=self._allocate
        )
        if answer.state is not None:
            self.state = answer.state
        held = {id for ids in usage(before).device_ids().values() for id in ids}
        asks = {name for c in spec.containers for name in (*c.requests, *c.limits)}
        return Answer(
            spec=spec,
            answer=answer,
            decisions=self.plugin.decisions.since(last),
            undecided=tuple(sorted(name for name in asks if kind(name) in left_out)),
            unregistered=tuple(
                sorted(name for name in asks if "/" in name and name not in before.devices)
            ),
            before=before,
            free=frozenset(self.graph.ids) - held,
        )

    def _tell_plugin(self) -> None:
        """What the plugin learns from PodResources."""
        self.plugin.held.offered(allocatable(self.state).devices)
        self.plugin.observe(usage(self.state), asked=time.monotonic())

    def _prefer(
        self, resource: str, offered: Sequence[DeviceId], must: Sequence[DeviceId], size: int
    ) -> tuple[DeviceId, ...]:
        found = self.plugin.resources[resource].prefer(
            plugin_api.ContainerPreferredAllocationRequest(
                available_deviceIDs=offered, must_include_deviceIDs=must, allocation_size=size
            )
        )
        return tuple(map(DeviceId, found))

    def _allocate(self, resource: str, ids: Sequence[DeviceId]) -> None:
        try:
            self.plugin.resources[resource].allocate(ids)
        except CannotAllocate as error:
            # As the kubelet's client prints what the plugin's server answers.
            raise PluginError(f"rpc error: code = InvalidArgument desc = {error}") from error


def named(machine: Machine) -> Machine:
    """The machine with an id for each GPU: those of a source without UUIDs go by their names."""
    gpus = (
        gpu if gpu.uuid or gpu.lost else replace(gpu, uuid=DeviceId(gpu.name))
        for gpu in machine.gpus
    )
    return replace(machine, gpus=tuple(gpus))


def plugin_options(config: Config) -> Options:
    """What decides which devices there are and which are chosen, of the plugin's options."""
    try:
        return Options(
            advertising=parts.advertising(config),
            handing=Handing(one_replica=config.sharing.time_slicing.fail_requests_greater_than_one),
            sharing=Sharing(config.devices.shared_allocation),
            compute_nics=config.nics.compute,
        )
    except ValueError as error:
        raise ConfigError("devices", "configuration", str(error)) from error


# The kubelet's configuration on this machine


def check_start(machine: Machine, policy: Policy) -> None:
    """Raises WouldNotStart."""
    count, most = len(machine.numa_nodes), policy.max_numa_nodes or DEFAULT_MOST_NUMA_NODES
    if policy.topology_manager is not TopologyManagerPolicy.NONE and count > most:
        raise WouldNotStart(
            f"the machine has {count} NUMA nodes, and with Topology Manager policy "
            f"{policy.topology_manager.value} a kubelet starts with at most {most}: "
            f"{MOST_NUMA_NODES_OPTION} says how many"
        )
    cpus = {cpu for node in machine.numa_nodes for cpu in node.cpus}
    strange = sorted(set(policy.reserved_cpus) - cpus)
    if strange and cpus_known(machine):
        raise WouldNotStart(f"CPU {strange[0]} is to be reserved, and the machine has none such")


def reserved_cpus(state: KubeletState, configuration: Mapping[str, Any]) -> tuple[CpuId, ...]:
    """The CPUs that the static policy keeps: those that are named, else as many as are reserved in
    all. Raises WouldNotStart where there are none."""
    if state.policy.reserved_cpus:
        return state.policy.reserved_cpus
    count = -(-reserved(configuration, "cpu") // 1000)
    if not count:
        raise WouldNotStart(
            "CPU Manager policy static needs reserved CPUs, and none are: reservedSystemCPUs "
            "(--reserved-cpus) names them, or kubeReserved and systemReserved say how many"
        )
    found = take(state.topology, state.topology.node.keys(), count)
    if found is None:
        have = len(state.topology.node)
        raise WouldNotStart(f"{count} CPUs are to be reserved, and the machine has {have}")
    return tuple(sorted(found))


def reserved(configuration: Mapping[str, Any], name: str) -> int:
    """What kubeReserved and systemReserved say of a resource: cpu in thousandths, else base units.

    Raises WouldNotStart for what is no quantity.
    """
    total = 0
    for key in ("kubeReserved", "systemReserved"):
        values = configuration.get(key) or {}
        amount = values.get(name) if isinstance(values, dict) else None
        try:
            if amount is not None:
                total += thousandths(str(amount)) if name == "cpu" else base_units(str(amount))
        except ValueError as error:
            raise WouldNotStart(f"{key}.{name}: {error}") from error
    return total


def checked(
    state: KubeletState, configuration: Mapping[str, Any], left_out: Sequence[Undecided]
) -> Mapping[str, int]:
    """The Node's allocatable of all that is known."""
    found = node_allocatable(state)
    if not state.policy.reserved_cpus:
        found["cpu"] -= -(-reserved(configuration, "cpu") // 1000)
    if not state.policy.reserved_memory and "memory" in found:
        found["memory"] -= reserved(configuration, "memory")
    unknown = {one.of for one in left_out}
    return {name: amount for name, amount in found.items() if kind(name) not in unknown}


# What a source does not say


def cpus_known(machine: Machine) -> bool:
    nodes = machine.numa_nodes
    return all(node.cpus_known for node in nodes) and any(node.cpus for node in nodes)


def undecided(machine: Machine, policy: Policy) -> Iterator[Undecided]:
    """What this machine does not let one decide as this kubelet would."""
    nodes = machine.numa_nodes
    bearing = [node for node in nodes if node.cpus or not node.cpus_known]
    if policy.topology_manager is not TopologyManagerPolicy.NONE:
        if not nodes:
            yield Undecided("alignment", "the source names no NUMA node")
        elif len(bearing) > MOST_SETS_OF:
            yield Undecided("alignment", too_many(len(bearing)))
    if not cpus_known(machine):
        yield Undecided("cpu", "the source does not say which CPUs the NUMA nodes have")
    elif policy.cpu_manager == "static" and len(bearing) > MOST_SETS_OF:
        yield Undecided("cpu", too_many(len(bearing)))
    if not bearing or any(node.memory_bytes is None for node in bearing):
        yield Undecided("memory", "the source does not say how much memory the NUMA nodes have")
    elif policy.memory_manager == "Static" and len(nodes) > MOST_SETS_OF:
        yield Undecided("memory", too_many(len(nodes)))
    if not any(node.huge_pages for node in nodes):
        yield Undecided("hugepages", "the source does not say how many huge pages there are")


def too_many(nodes: int) -> str:
    return f"a kubelet looks at every set of {nodes} NUMA nodes, and never ends"


def decided(policy: Policy, left_out: Sequence[Undecided]) -> Policy:
    """The policy without the managers that there are no facts for."""
    unknown = {one.of for one in left_out}
    if "alignment" in unknown:
        policy = replace(policy, topology_manager=TopologyManagerPolicy.NONE)
    if "cpu" in unknown:
        policy = replace(policy, cpu_manager="none", reserved_cpus=())
    if "memory" in unknown:
        policy = replace(policy, memory_manager="None", reserved_memory={})
    return policy


def kind(resource: str) -> str:
    return "hugepages" if resource.startswith("hugepages-") else resource


def without_unknown(spec: PodSpec, left_out: set[str]) -> PodSpec:
    """The pod without huge pages where nothing is known of them: none are there in the model."""
    if "hugepages" not in left_out:
        return spec

    def kept(amounts: Mapping[str, int]) -> Mapping[str, int]:
        return {name: amount for name, amount in amounts.items() if kind(name) != "hugepages"}

    def known(container: ContainerSpec) -> ContainerSpec:
        return replace(container, requests=kept(container.requests), limits=kept(container.limits))

    return replace(
        spec,
        containers=tuple(map(known, spec.containers)),
        requests=kept(spec.requests),
        limits=kept(spec.limits),
    )


# What is free


def free_by_node(state: KubeletState) -> Mapping[str, Mapping[str, int]]:
    """NUMA node → resource → what a pod can still get there, in base units; what is bound only."""
    policy = state.policy
    used = {
        (d.resource, d.id) for h in state.pods.values() for c in h.containers for d in c.devices
    }
    taken = {cpu for held in state.pods.values() for c in held.containers for cpu in c.cpus}
    taken |= set(policy.reserved_cpus)
    memory = MemoryState(state).free
    found: dict[str, Mapping[str, int]] = {}
    for node in state.numa_nodes:
        here = {
            resource: sum(
                node.id in numa
                and (resource, id) not in used
                and (resource, id) not in state.unhealthy
                for id, numa in ids.items()
            )
            for resource, ids in state.devices.items()
            if any(ids.values())
        }
        if policy.cpu_manager == "static":
            here["cpu"] = sum(cpu not in taken for cpu in node.cpus)
        if policy.memory_manager == "Static":
            here |= {type_: size for (of, type_), size in memory.items() if of == node.id}
        if any(here.values()):
            found[f"node-{node.id}"] = here
    return found
