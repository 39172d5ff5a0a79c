"""What the kubelet would decide about a pod: a model of its managers, without its servers.

It follows the Topology Manager's policies and scopes, the device manager, the CPU Manager's static
and the Memory Manager's Static policy of Kubernetes 1.37, as tests/kubelet runs them. Where the
kubelet picks from a Go map the model picks the smallest id. Options that it does not follow are
named by `not_followed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rte.kubelet.cpus import take
from rte.kubelet.hints import Hint, Mask, ProviderHints, best_hint, bits, hints, mask
from rte.kubelet.node import Held, KubeletState, MemoryState
from rte.kubelet.spec import ContainerSpec, PodSpec, pod_total
from rte.model import (
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    MemoryBlock,
    NumaId,
    Policy,
    Scope,
    TopologyManagerPolicy,
)

UNEXPECTED = "UnexpectedAdmissionError"


class PluginError(Exception):
    """A device plugin's call failed, as gRPC reports it to the kubelet."""


Prefer = Callable[[str, Sequence[DeviceId], Sequence[DeviceId], int], Collection[DeviceId]]
"""GetPreferredAllocation: resource, offered, must include, size → ids. May raise PluginError."""
Allocate = Callable[[str, Sequence[DeviceId]], None]
"""Allocate: resource, ids. May raise PluginError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    state: KubeletState  # with the pod
    containers: tuple[ContainerUse, ...]  # what each got, in the order of the spec
    affinity: Mapping[str, tuple[NumaId, ...] | None]
    """Container → the NUMA nodes of the merged hint; None is any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The pod is Failed; nothing of what it was given on the way stays given."""

    reason: str  # the kubelet's word
    message: str
    state: KubeletState | None = field(default=None, compare=False, repr=False)
    """The state before, but for the Memory Manager's account of what was given and freed again."""


class Refusal(Exception):
    """A manager's error in the middle of an admission, with the kubelet's reason."""

    def __init__(self, message: str, reason: str = UNEXPECTED) -> None:
        if reason == UNEXPECTED:
            message = f"Allocate failed due to {message}, which is unexpected"
        super().__init__(message)
        self.reason = reason


def not_followed(policy: Policy) -> tuple[str, ...]:
    """CPU Manager options that change the kubelet's decision and not the model's."""
    known = {"full-pcpus-only", "distribute-cpus-across-cores", "strict-cpu-reservation"}
    return tuple(
        f"cpuManagerPolicyOptions.{name}"
        for name, value in sorted(policy.cpu_manager_options.items())
        if value == "true" and name not in known
    )


def admit(
    state: KubeletState,
    spec: PodSpec,
    *,
    prefer: Prefer | None = None,
    allocate: Allocate | None = None,
) -> Admitted | Rejected:
    """The decision about one pod.

    `prefer` and `allocate` are called as the kubelet calls the plugin's two methods, container by
    container: without `prefer` the plugin is one that has no GetPreferredAllocation.
    """
    attempt = Attempt(state, spec, prefer=prefer, allocate=allocate)
    try:
        attempt.run()
        check_node(state, spec)
    except Refusal as refusal:
        for container in attempt.containers():
            attempt.memory.release(container.memory)
        after = replace(state, memory=attempt.memory.tables())
        return Rejected(reason=refusal.reason, message=str(refusal), state=after)
    containers = attempt.containers()
    running = []
    for asked, use in zip(spec.containers, containers, strict=True):
        if asked.ends_before_the_others:
            attempt.memory.release(use.memory)
            running.append(replace(use, memory=()))
        else:
            running.append(use)
    held = Held(spec=spec, containers=tuple(running))
    return Admitted(
        state=replace(state, pods={**state.pods, spec.pod: held}, memory=attempt.memory.tables()),
        containers=containers,
        affinity={
            name: None if hint.nodes is None else tuple(NumaId(bit) for bit in bits(hint.nodes))
            for name, hint in attempt.affinity.items()
        },
    )


# The Node's own limits, which the kubelet checks after its managers


def check_node(state: KubeletState, spec: PodSpec) -> None:
    """Raises Refusal for the first resource that the Node has too little of."""
    if len(state.pods) + 1 > state.most_pods:
        raise out_of("pods", requested=1, used=len(state.pods), capacity=state.most_pods)
    for name in sorted(state.allocatable, key=lambda name: (name not in ("cpu", "memory"), name)):
        if name in state.devices:  # counted by the device manager
            continue
        scale = 1 if name == "cpu" else 1000  # the kubelet counts cpu in thousandths
        requested = -(-needed(spec, name) // scale)
        used = sum(-(-needed(held.spec, name) // scale) for held in state.pods.values())
        capacity = state.allocatable[name] * 1000 // scale
        if requested and requested > capacity - used:
            raise out_of(name, requested=requested, used=used, capacity=capacity)


def needed(spec: PodSpec, name: str) -> int:
    """Thousandths that the scheduler counts for the pod."""
    amounts = {c.name: c.requests.get(name, 0) for c in spec.containers}
    own = spec.requests.get(name)
    return (pod_total(spec, amounts) if own is None else own) + spec.overhead.get(name, 0)


def out_of(name: str, *, requested: int, used: int, capacity: int) -> Refusal:
    return Refusal(
        f"Node didn't have enough resource: {name}, "
        f"requested: {requested}, used: {used}, capacity: {capacity}",
        f"OutOf{name}",
    )


def narrowest_hint(found: Sequence[Hint]) -> Hint | None:
    """The Memory Manager's own choice: preferred first, then narrow, then low."""
    return min(
        found,
        key=lambda hint: (not hint.preferred, (hint.nodes or 0).bit_count(), hint.nodes or 0),
        default=None,
    )


# One admission


class Attempt:
    """A pod on its way through the managers; what it is given counts from then on."""

    def __init__(
        self,
        state: KubeletState,
        spec: PodSpec,
        *,
        prefer: Prefer | None,
        allocate: Allocate | None,
    ) -> None:
        self.state = state
        self.spec = spec
        self.prefer = prefer
        self.allocate = allocate
        self.policy = state.policy
        self.guaranteed = spec.qos == "Guaranteed"
        # The managers leave pods with resources of their own alone.
        self.binds = self.guaranteed and not spec.has_pod_level_resources
        self.affinity: dict[str, Hint] = {}
        self.every_node = mask(node.id for node in state.numa_nodes)
        others = [use for held in state.pods.values() for use in held.containers]
        self.used = {(d.resource, d.id) for use in others for d in use.devices}
        self.given: dict[str, dict[str, set[DeviceId]]] = {}  # container → resource → ids
        self.devices_to_reuse: dict[str, set[DeviceId]] = {}
        self.exclusive = {cpu for use in others for cpu in use.cpus}
        self.cpus: dict[str, frozenset[CpuId]] = {}
        self.cpus_to_reuse: set[CpuId] = set()
        self.memory = MemoryState(state)
        self.blocks: dict[str, list[MemoryBlock]] = {}
        self.memory_to_reuse: dict[tuple[Mask, str], int] = {}

    def run(self) -> None:
        """Raises Refusal."""
        manager = self.policy.topology_manager
        per_pod = None
        if manager is not TopologyManagerPolicy.NONE and self.policy.scope is Scope.POD:
            per_pod = self.best(self.pod_hints())
        for container in self.spec.containers:
            if manager is not TopologyManagerPolicy.NONE:
                hint = per_pod or self.best(self.container_hints(container))
                self.affinity[container.name] = hint
            self.allocate_devices(container)
            self.allocate_cpus(container)
            self.allocate_memory(container)

    def best(self, providers: Sequence[ProviderHints]) -> Hint:
        hint, admits = best_hint(
            self.policy.topology_manager, providers, every_node=self.every_node
        )
        if not admits:
            message = "Resources cannot be allocated with Topology locality"
            raise Refusal(message, "TopologyAffinityError")
        return hint

    def hint(self, container: ContainerSpec) -> Hint:
        return self.affinity.get(container.name, Hint(None, False))

    def containers(self) -> tuple[ContainerUse, ...]:
        return tuple(
            ContainerUse(
                name=container.name,
                devices=tuple(
                    DeviceUse(resource=resource, id=id, numa=self.state.devices[resource][id])
                    for resource, ids in sorted(self.given.get(container.name, {}).items())
                    for id in sorted(ids)
                ),
                cpus=tuple(sorted(self.cpus.get(container.name, ()))),
                memory=tuple(
                    sorted(self.blocks.get(container.name, ()), key=lambda b: (b.type, b.numa))
                ),
            )
            for container in self.spec.containers
        )

    def container_hints(self, container: ContainerSpec) -> list[ProviderHints]:
        devices = {
            resource: self.device_hints(
                resource, count, reusable=self.devices_to_reuse.get(resource, set())
            )
            for resource, count in self.device_requests(container).items()
        }
        cpus, memory = self.cpu_request(container), self.memory_request(container)
        return [
            devices,
            {"cpu": self.cpu_hints(cpus)} if cpus else {},
            self.memory_hints(memory),
        ]

    def pod_hints(self) -> list[ProviderHints]:
        each = {c.name: self.device_requests(c) for c in self.spec.containers}
        resources = sorted({resource for requests in each.values() for resource in requests})
        devices = {
            resource: self.device_hints(
                resource,
                pod_total(self.spec, {name: r.get(resource, 0) for name, r in each.items()}),
                reusable=set(),
            )
            for resource in resources
        }
        cpus = pod_total(self.spec, {c.name: self.cpu_request(c) for c in self.spec.containers})
        wanted = {c.name: self.memory_request(c) for c in self.spec.containers}
        # Types that only init containers ask for are not counted: the kubelet's own gap.
        types = {type_ for c in self.spec.containers if not c.init for type_ in wanted[c.name]}
        memory = {
            type_: pod_total(self.spec, {name: w.get(type_, 0) for name, w in wanted.items()})
            for type_ in sorted(types)
        }
        return [devices, {"cpu": self.cpu_hints(cpus)} if cpus else {}, self.memory_hints(memory)]

    # Devices

    def device_requests(self, container: ContainerSpec) -> dict[str, int]:
        """Resources that no plugin has registered are not the device manager's."""
        return {
            resource: -(-container.limits[resource] // 1000)
            for resource in sorted(container.limits)
            if resource in self.state.devices
        }

    def healthy(self, resource: str) -> set[DeviceId]:
        unhealthy = self.state.unhealthy
        return {id for id in self.state.devices[resource] if (resource, id) not in unhealthy}

    def free(self, resource: str) -> set[DeviceId]:
        return {id for id in self.healthy(resource) if (resource, id) not in self.used}

    def device_hints(
        self, resource: str, count: int, *, reusable: set[DeviceId]
    ) -> list[Hint] | None:
        numa = {id: mask(nodes) for id, nodes in self.state.devices[resource].items()}
        if not any(numa.values()):
            return None
        free = self.free(resource)
        if len(free | reusable) < count:
            return []
        nodes = bits(mask(bit for nodes in numa.values() for bit in bits(nodes)) & self.every_node)

        def could(candidate: Mask) -> bool:
            return sum(1 for of in numa.values() if of & candidate) >= count

        def can(candidate: Mask) -> bool:
            known = [numa[id] for id in reusable if numa[id]]
            if not all(of & candidate for of in known):
                return False
            return len(known) + sum(1 for id in free if numa[id] & candidate) >= count

        return hints(nodes or bits(self.every_node), could=could, can=can)

    def allocate_devices(self, container: ContainerSpec) -> None:
        for resource, count in self.device_requests(container).items():
            reusable = self.devices_to_reuse.get(resource, set())
            ids = self.choose_devices(container, resource, count, reusable=reusable)
            if not ids:
                continue
            if self.allocate is not None:
                try:
                    self.allocate(resource, sorted(ids))
                except PluginError as error:
                    raise Refusal(str(error)) from error
            self.given.setdefault(container.name, {})[resource] = ids
            self.used |= {(resource, id) for id in ids}
        for resource, ids in self.given.get(container.name, {}).items():
            kept = self.devices_to_reuse.setdefault(resource, set())
            if container.ends_before_the_others:
                kept |= ids
            else:
                kept -= ids

    def choose_devices(
        self, container: ContainerSpec, resource: str, required: int, *, reusable: set[DeviceId]
    ) -> set[DeviceId]:
        """devicesToAllocate: what can be re-used, then what is aligned, the plugin's word first
        where there is a choice, then the rest."""
        if not self.healthy(resource):
            raise Refusal(
                f"no healthy devices present; cannot allocate unhealthy devices {resource}"
            )
        chosen: set[DeviceId] = set()

        def fill(ids: Collection[DeviceId]) -> bool:
            chosen.update(sorted(set(ids) - chosen)[: required - len(chosen)])
            return len(chosen) == required

        if required == 0 or fill(reusable):
            return chosen
        available = self.free(resource) - chosen
        missing = required - len(chosen)
        if len(available) < missing:
            raise Refusal(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {missing}, Available: {len(available)}"
            )
        aligned, unaligned, without_node = self.by_affinity(container, resource, available)
        if missing < len(aligned):
            wish = self.preferred(resource, aligned | chosen, chosen, required)
            if not fill(wish & aligned):
                fill(aligned)
            return chosen
        if fill(aligned):
            return chosen
        wish = self.preferred(resource, available | chosen, chosen, required)
        if not fill(wish & available) and not fill(unaligned):
            fill(without_node)
        return chosen

    def by_affinity(
        self, container: ContainerSpec, resource: str, available: set[DeviceId]
    ) -> tuple[set[DeviceId], set[DeviceId], set[DeviceId]]:
        numa = self.state.devices[resource]
        nodes = self.hint(container).nodes
        if nodes is None or not any(numa.values()):
            return set(), set(), available
        aligned = {id for id in available if mask(numa[id]) & nodes}
        without_node = {id for id in available if not numa[id]}
        return aligned, available - aligned - without_node, without_node

    def preferred(
        self, resource: str, offered: set[DeviceId], must: set[DeviceId], size: int
    ) -> set[DeviceId]:
        if self.prefer is None:
            return set()
        try:
            return set(self.prefer(resource, sorted(offered), sorted(must), size))
        except PluginError as error:
            message = f"device plugin GetPreferredAllocation rpc failed with err: {error}"
            raise Refusal(message) from error

    # CPUs

    def cpu_request(self, container: ContainerSpec) -> int:
        """Whole CPUs of a Guaranteed pod's container under the static policy, else 0."""
        if self.policy.cpu_manager != "static" or not self.binds:
            return 0
        milli = container.requests.get("cpu", 0)
        return 0 if milli % 1000 else milli // 1000

    def shared_pool(self) -> set[CpuId]:
        return set(self.state.topology.node) - self.exclusive

    def cpu_hints(self, count: int) -> list[Hint]:
        node = self.state.topology.node
        available = self.shared_pool() - set(self.policy.reserved_cpus)

        def could(candidate: Mask) -> bool:
            return sum(1 for of in node.values() if candidate >> of & 1) >= count

        def can(candidate: Mask) -> bool:
            if not all(candidate >> node[cpu] & 1 for cpu in self.cpus_to_reuse):
                return False
            free = sum(1 for cpu in available if candidate >> node[cpu] & 1)
            return len(self.cpus_to_reuse) + free >= count

        return hints(sorted(set(node.values())), could=could, can=can)

    def allocate_cpus(self, container: ContainerSpec) -> None:
        count = self.cpu_request(container)
        if not count:
            return
        if self.policy.cpu_manager_options.get("full-pcpus-only") == "true":
            self.check_whole_cores(count)
        topology = self.state.topology
        packed = self.policy.cpu_manager_options.get("distribute-cpus-across-cores") != "true"
        available = self.shared_pool() - set(self.policy.reserved_cpus) | self.cpus_to_reuse
        nodes = self.hint(container).nodes
        taken: frozenset[CpuId] = frozenset()
        if nodes is not None:
            aligned = {cpu for cpu in available if nodes >> topology.node[cpu] & 1}
            few = min(count, len(aligned))
            taken = take(topology, aligned, few, packed=packed) or taken
        rest = take(topology, available - taken, count - len(taken), packed=packed)
        if rest is None:
            raise Refusal(
                "not enough cpus available to satisfy request: "
                f"requested={count - len(taken)}, available={len(available - taken)}"
            )
        self.cpus[container.name] = taken | rest
        self.exclusive |= taken | rest
        if container.ends_before_the_others:
            self.cpus_to_reuse |= taken | rest
        else:
            self.cpus_to_reuse -= taken | rest

    def check_whole_cores(self, count: int) -> None:
        topology = self.state.topology
        threads = topology.threads
        if count % threads:
            raise Refusal(
                f"SMT Alignment Error: requested {count} cpus not multiple "
                f"cpus per core = {threads}",
                "SMTAlignmentError",
            )
        whole = len(self.shared_pool() - topology.siblings(self.policy.reserved_cpus))
        if count > whole:
            raise Refusal(
                "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = "
                f"{whole}, requested CPUs = {count}, CPUs per core = {threads}",
                "SMTAlignmentError",
            )

    # Memory

    def memory_request(self, container: ContainerSpec) -> dict[str, int]:
        """Bytes by type of a Guaranteed pod's container under the Static policy."""
        if self.policy.memory_manager != "Static" or not self.binds:
            return {}
        return {
            name: container.requests[name] // 1000
            for name in sorted(container.requests)
            if name == "memory" or name.startswith("hugepages-")
        }

    def memory_hints(self, wanted: Mapping[str, int]) -> dict[str, list[Hint]]:
        """No type at all when nothing fits, which the Topology Manager takes for no preference."""
        found = self.memory.hints(wanted, self.memory_to_reuse) if wanted else []
        return dict.fromkeys(wanted, found) if found else {}

    def allocate_memory(self, container: ContainerSpec) -> None:
        wanted = self.memory_request(container)
        if not wanted:
            return
        nodes = self.memory_nodes(self.hint(container), wanted)
        members = tuple(NumaId(node) for node in bits(nodes))
        blocks = [
            MemoryBlock(type=type_, size_bytes=size, numa=members) for type_, size in wanted.items()
        ]
        for block in blocks:
            reusable = self.memory_to_reuse.get((nodes, block.type), 0)
            self.memory.assign(members, block.type, max(0, block.size_bytes - reusable))
        for block in blocks:
            key = (nodes, block.type)
            kept = self.memory_to_reuse.get(key, 0)
            if container.ends_before_the_others:
                self.memory_to_reuse[key] = max(kept, block.size_bytes)
            elif kept:
                self.memory_to_reuse[key] = max(0, kept - block.size_bytes)
        self.blocks[container.name] = blocks
        self.shrink_init_blocks(container, blocks)

    def memory_nodes(self, hint: Hint, wanted: Mapping[str, int]) -> Mask:
        """The hint's nodes, or the Memory Manager's own where it has none or it is too small."""
        nodes, preferred = hint
        if nodes is None:
            own = narrowest_hint(self.memory.hints(wanted, self.memory_to_reuse))
            if own is None:
                raise Refusal(
                    "[memorymanager] failed to get the default NUMA affinity, "
                    "no NUMA nodes with enough memory is available"
                )
            if preferred and not own.preferred:
                raise Refusal("[memorymanager] failed to find the default preferred hint")
            nodes = own.nodes or 0
        if not self.memory.fits(nodes, wanted):
            wider = narrowest_hint(
                [
                    hint
                    for hint in self.memory.hints(wanted, self.memory_to_reuse)
                    if (hint.nodes or 0) & nodes == nodes
                ]
            )
            if wider is None:
                raise Refusal(
                    "[memorymanager] failed to find NUMA nodes to extend the current topology hint"
                )
            if preferred and not wider.preferred:
                raise Refusal("[memorymanager] failed to find the extended preferred hint")
            nodes = wider.nodes or 0
        if self.memory.breaks_groups(nodes):
            raise Refusal("[memorymanager] preferred hint violates NUMA node allocation")
        return nodes

    def shrink_init_blocks(self, container: ContainerSpec, blocks: Sequence[MemoryBlock]) -> None:
        """What is re-used is counted with whoever uses it last."""
        for block in blocks:
            rest = block.size_bytes
            for other in self.spec.containers:
                if other.name == container.name or not other.init:
                    break
                if other.restartable:
                    continue
                kept = self.blocks.get(other.name, [])
                for index, old in enumerate(kept):
                    if (old.type, old.numa) == (block.type, block.numa):
                        taken = min(rest, old.size_bytes)
                        rest -= taken
                        kept[index] = replace(old, size_bytes=old.size_bytes - taken)
