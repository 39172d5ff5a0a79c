"""What kube-scheduler with NodeResourceTopologyMatch v0.34.7 decides about a pod and a node, as a
model, and what it would have to know to decide as the kubelet does.

tests/test_scheduler.py holds the model to the real one pod by pod. Quantities are thousandths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from rte.kubelet.admission import Admitted, admit, needed
from rte.kubelet.node import Held, KubeletState, MemoryState
from rte.kubelet.spec import ContainerSpec, PodSpec
from rte.model import DeviceId, DeviceUse, NumaId, Scope, TopologyManagerPolicy, thousandths
from rte.publish.fingerprint import is_memory, is_native

Amounts = Mapping[str, int]
WHOLE_CORES = "full-pcpus-only"
SINGLE = TopologyManagerPolicy.SINGLE_NUMA_NODE


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the scheduler goes by: an object, the Node, and the pods that it has placed there."""

    zones: tuple[Amounts, ...]  # what is available, by zone
    policy: str
    scope: str
    allocatable: Amounts
    running: tuple[PodSpec, ...]


def seen(
    body: Mapping[str, Any], allocatable: Mapping[str, int], running: Iterable[PodSpec]
) -> Seen:
    """`allocatable` is the Node's, in base units."""
    attributes = {each["name"]: each["value"] for each in body["attributes"]}
    return Seen(
        zones=tuple(
            {each["name"]: thousandths(each["available"]) for each in zone.get("resources", ())}
            for zone in body["zones"]
            if zone["type"] == "Node"
        ),
        policy=attributes.get("topologyManagerPolicy", "none"),
        scope=attributes.get("topologyManagerScope", "container"),
        allocatable={name: 1000 * amount for name, amount in allocatable.items()},
        running=tuple(running),
    )


def places(seen: Seen, spec: PodSpec, *, told: PodSpec | None = None) -> bool:
    """`told` is the pod as the plugin reads it, where that is not the pod itself."""
    return fits_node(seen, spec) and fits_zones(seen, told or spec, qos=spec.qos)


def fits_node(seen: Seen, spec: PodSpec) -> bool:
    """NodeResourcesFit."""
    names = {name for each in spec.containers for name in each.requests}
    names |= {*spec.requests, *spec.overhead}
    return all(
        needed(spec, name) + sum(needed(each, name) for each in seen.running)
        <= seen.allocatable.get(name, 0)
        for name in names
        if needed(spec, name)
    )


def fits_zones(seen: Seen, spec: PodSpec, *, qos: str) -> bool:
    """The plugin's filter."""
    native_only = all(is_native(name) for each in spec.containers for name in each.requests)
    if seen.policy != SINGLE or (qos == "BestEffort" and native_only):
        return True
    if seen.scope == Scope.POD:
        return zone_for(seen.zones, effective(spec), qos=qos) is not None
    zones = [dict(zone) for zone in seen.zones]
    for container in sorted(spec.containers, key=lambda each: not each.init):
        zone = zone_for(zones, container.requests, qos=qos)
        if zone is None:
            return False
        if not container.init and zone < len(zones):
            for name, amount in container.requests.items():
                if name in zones[zone] and counts(name, qos):
                    zones[zone][name] -= amount
    return True


def zone_for(zones: Iterable[Amounts], wanted: Amounts, *, qos: str) -> int | None:
    """The lowest zone that has room for all of it."""
    listed = list(zones)
    fit = set(range(max(len(listed), 1)))
    for name, amount in wanted.items():
        having = {number for number, zone in enumerate(listed) if name in zone}
        if not amount or (not having and is_of_host(name)):
            continue
        fit &= {n for n in having if listed[n][name] >= amount or not counts(name, qos)}
    return min(fit, default=None)


def counts(name: str, qos: str) -> bool:
    return qos == "Guaranteed" or not (name == "cpu" or is_memory(name))


def is_of_host(name: str) -> bool:
    return not is_native(name) or name == "ephemeral-storage"


def effective(spec: PodSpec) -> dict[str, int]:
    """A pod's request as the plugin sums it up: a sidecar is an init container as any other."""
    found: dict[str, int] = {}
    for container in spec.containers:
        if not container.init:
            for name, amount in container.requests.items():
                found[name] = found.get(name, 0) + amount
    for container in spec.containers:
        if container.init:
            for name, amount in container.requests.items():
                found[name] = max(found.get(name, 0), amount)
    for name, amount in spec.overhead.items():
        found[name] = found.get(name, 0) + amount
    return found


# Why scheduler and kubelet differ


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pod and a node, as the two sides take them."""

    seen: Seen
    state: KubeletState
    spec: PodSpec
    told: PodSpec  # the pod as the plugin reads it
    parts: tuple[PodSpec, ...]  # what the kubelet is asked about, each by itself

    def differs(self) -> bool:
        admitted = all(isinstance(admit(self.state, p, prefer=first), Admitted) for p in self.parts)
        return places(self.seen, self.spec, told=self.told) != admitted


Fact = Callable[[Case], Case | None]
"""A case in which the two sides no longer differ about one thing; None where it is not there."""


def first(
    resource: str, offered: Iterable[DeviceId], must: Iterable[DeviceId], size: int
) -> list[DeviceId]:
    """The preference of a plugin that takes what comes first."""
    return [*must, *sorted(set(offered) - set(must))][:size]


def why(seen: Seen, state: KubeletState, spec: PodSpec) -> frozenset[str] | None:
    """The fewest facts without which the two agree: names of `FACTS`. None if no four do it."""
    case = Case(seen=seen, state=state, spec=spec, told=spec, parts=(spec,))
    for number in range(1, 5):
        for names in combinations(FACTS, number):
            changed: Case | None = case
            for name in names:
                changed = changed and FACTS[name](changed)
            if changed is not None and not changed.differs():
                return frozenset(names)
    return None


def restricted(case: Case) -> Case | None:
    """The same node under best-effort."""
    if case.state.policy.topology_manager is not TopologyManagerPolicy.RESTRICTED:
        return None
    return with_policy(case, topology_manager=TopologyManagerPolicy.BEST_EFFORT)


def memory_group(case: Case) -> Case | None:
    """The same node, whose memory nobody binds."""
    policy = case.state.policy
    if policy.topology_manager is SINGLE or policy.memory_manager != "Static":
        return None
    return with_policy(case, memory_manager="None")


def odd_cpus(case: Case) -> Case | None:
    """The same node, which gives out single threads."""
    return with_single_threads(case) if asks_for_odd_cpus(case) else None


def half_cores(case: Case) -> Case | None:
    """The same where a thread of a core is reserved and not all of them, and the object cannot
    tell: of pods of several containers, and under policies that do not go by it."""
    state = case.state
    reserved = set(state.policy.reserved_cpus)
    if state.topology.siblings(reserved) <= reserved or asks_for_odd_cpus(case):
        return None
    if state.policy.topology_manager is SINGLE and len(case.spec.containers) == 1:
        return None
    return with_single_threads(case)


def asks_for_odd_cpus(case: Case) -> bool:
    threads = case.state.topology.threads
    return any(count % threads for count in exclusive_counts(case.spec))


def exclusive_counts(spec: PodSpec) -> list[int]:
    """The CPUs that containers are to have to themselves."""
    if not binds(spec):
        return []
    asked = [cpus(each) for each in spec.containers]
    return [millis // 1000 for millis in asked if millis and not millis % 1000]


def with_single_threads(case: Case) -> Case | None:
    policy = case.state.policy
    options = dict(policy.cpu_manager_options)
    if policy.cpu_manager != "static" or options.pop(WHOLE_CORES, None) != "true":
        return None
    if not exclusive_counts(case.spec):
        return None
    return with_policy(case, cpu_manager_options=options)


def binds(spec: PodSpec) -> bool:
    """Whether the kubelet's managers give such a pod's containers CPUs and memory of their own."""
    return spec.qos == "Guaranteed" and not spec.has_pod_level_resources


def with_policy(case: Case, **changed: Any) -> Case:
    return replace(case, state=replace(case.state, policy=replace(case.state.policy, **changed)))


def shared_cpus(case: Case) -> Case | None:
    """The plugin passes over the CPUs of containers that get none of their own, where some NUMA
    node has fewer left than the pod wants."""
    if case.state.policy.cpu_manager != "static" or case.spec.qos != "Guaranteed":
        return None
    if not any(cpus(each) % 1000 for each in case.told.containers):
        return None
    if 1000 * fewest_cpus(case.state) >= sum(map(cpus, case.told.containers)):
        return None
    return telling(case, lambda each: {"cpu"} if cpus(each) % 1000 else set())


def fewest_cpus(state: KubeletState) -> int:
    """The CPUs that one container can get to itself on the NUMA node that has the fewest."""
    held = {cpu for pod in state.pods.values() for each in pod.containers for cpu in each.cpus}
    free = set(state.topology.node) - held - set(state.policy.reserved_cpus)
    fewest = min(len(free.intersection(node.cpus)) for node in state.numa_nodes if node.cpus)
    if state.policy.cpu_manager_options.get(WHOLE_CORES) != "true":
        return fewest
    return min(fewest, len(free - state.topology.siblings(state.policy.reserved_cpus)))


def pod_level(case: Case) -> Case | None:
    """The plugin passes over what the kubelet binds for no container of such a pod."""
    if not case.spec.has_pod_level_resources:
        return None
    return telling(case, lambda each: {n for n in each.requests if n == "cpu" or is_memory(n)})


def cpus(container: ContainerSpec) -> int:
    return container.requests.get("cpu", 0)


def telling(case: Case, left_out: Callable[[ContainerSpec], set[str]]) -> Case | None:
    """None where a zone does not list it at all, for which the plugin refuses anything."""
    names = {name for each in case.told.containers for name in left_out(each)}
    if not all(names <= set(zone) for zone in case.seen.zones):
        return None
    containers = tuple(
        replace(each, requests={n: a for n, a in each.requests.items() if n not in left_out(each)})
        for each in case.told.containers
    )
    return replace(case, told=replace(case.told, containers=containers))


def overhead(case: Case) -> Case | None:
    """The plugin passes over what the pod's runtime takes."""
    if not case.told.overhead or case.state.policy.scope is not Scope.POD:
        return None
    if not all(set(case.told.overhead) <= set(zone) for zone in case.seen.zones):
        return None
    return replace(case, told=replace(case.told, overhead={}))


def init_container(case: Case) -> Case | None:
    """The kubelet is asked about each init container that ends as a pod of its own."""
    if case.state.policy.scope is Scope.POD:
        return summed(case, lambda each: each.init)
    return apart(case, lambda each: each.ends_before_the_others)


def sidecar(case: Case) -> Case | None:
    """The same of init containers that stay."""
    if case.state.policy.scope is Scope.POD:
        return summed(case, lambda each: each.restartable)
    return apart(case, lambda each: each.restartable)


def summed(case: Case, is_meant: Callable[[ContainerSpec], bool]) -> Case | None:
    """The kubelet is asked about one container that wants what the plugin takes for the sum."""
    if not any(map(is_meant, case.spec.containers)):
        return None
    wanted = effective(replace(case.told, overhead={}))
    if case.spec.qos == "Guaranteed" and "cpu" not in wanted:
        wanted["cpu"] = 1  # thousandth, which binds nothing
    one = ContainerSpec(name="sum", requests=wanted, limits=wanted)
    return replace(case, parts=(of_same_class(case.spec, (one,)),))


def memory_of_a_pod(case: Case) -> Case | None:
    """The same where no NUMA node has the memory that all containers want together."""
    policy, spec = case.state.policy, case.spec
    if policy.scope is not Scope.POD or policy.topology_manager is not SINGLE:
        return None
    if policy.memory_manager != "Static" or spec.qos != "Guaranteed":
        return None
    if spec.has_pod_level_resources or len(spec.containers) == 1:
        return None
    memory = MemoryState(case.state)
    wanted = {
        name: amount // 1000
        for name, amount in effective(replace(spec, overhead={})).items()
        if is_memory(name)
    }
    if any(memory.fits(1 << node.id, wanted) for node in case.state.numa_nodes):
        return None
    return summed(case, lambda _: True)


def ended_init_container(case: Case) -> Case | None:
    """What init containers have left to their pods is free, where no zone tells that it is not."""
    is_told = case.seen.policy == SINGLE

    def without(held: Held) -> Held:
        ended = {each.name for each in held.spec.containers if each.ends_before_the_others}
        containers = tuple(
            replace(
                use,
                cpus=use.cpus if is_told else (),
                devices=tuple(d for d in use.devices if is_told and d.numa),
            )
            if use.name in ended
            else use
            for use in held.containers
        )
        return replace(held, containers=containers)

    pods = {name: without(held) for name, held in case.state.pods.items()}
    if pods == case.state.pods:
        return None
    return replace(case, state=replace(case.state, pods=pods))


def request_for_none(case: Case) -> Case | None:
    """The kubelet is not told of requests for 0 devices."""

    def without_zeros(amounts: Amounts) -> Amounts:
        return {n: a for n, a in amounts.items() if a or n not in case.state.devices}

    parts = tuple(
        replace(
            part,
            containers=tuple(
                replace(each, limits=without_zeros(each.limits)) for each in part.containers
            ),
        )
        for part in case.parts
    )
    return replace(case, parts=parts) if parts != case.parts else None


def apart(case: Case, is_apart: Callable[[ContainerSpec], bool]) -> Case | None:
    if not any(map(is_apart, case.spec.containers)):
        return None
    parts: list[PodSpec] = []
    for part in case.parts:
        kept = tuple(each for each in part.containers if not is_apart(each))
        alone = [
            replace(each, init=False, restartable=False)
            for each in part.containers
            if is_apart(each)
        ]
        for containers in (kept, *((each,) for each in alone)):
            parts.append(of_same_class(case.spec, containers))
    return replace(case, parts=tuple(parts))


def of_same_class(spec: PodSpec, containers: tuple[ContainerSpec, ...]) -> PodSpec:
    """Some of a pod's containers, bound as they are in it."""
    rest = replace(spec, containers=containers)
    if spec.qos != "Guaranteed" and rest.qos == "Guaranteed":
        return replace(rest, containers=(*containers, ContainerSpec(name="nothing")))
    return rest


def device_of_several_nodes(case: Case) -> Case | None:
    """A device for each NUMA node of every device."""
    devices = case.state.devices
    if all(len(numa) < 2 for ids in devices.values() for numa in ids.values()):
        return None

    def each_alone(id: DeviceId, numa: tuple[NumaId, ...]) -> dict[DeviceId, tuple[NumaId, ...]]:
        return {DeviceId(f"{id}@{n}"): (n,) for n in numa} if len(numa) > 1 else {id: numa}

    pods = {
        name: replace(
            held,
            containers=tuple(
                replace(
                    use,
                    devices=tuple(
                        DeviceUse(resource=d.resource, id=id, numa=numa)
                        for d in use.devices
                        for id, numa in each_alone(d.id, d.numa).items()
                    ),
                )
                for use in held.containers
            ),
        )
        for name, held in case.state.pods.items()
    }
    split = {
        resource: {k: v for id, numa in ids.items() for k, v in each_alone(id, numa).items()}
        for resource, ids in devices.items()
    }
    unhealthy = frozenset(
        (resource, alone)
        for resource, id in case.state.unhealthy
        for alone in each_alone(id, devices[resource][id])
    )
    return replace(case, state=replace(case.state, devices=split, pods=pods, unhealthy=unhealthy))


def device_without_node(case: Case) -> Case | None:
    """Of a resource of which devices with a NUMA node are known, the others are gone."""
    if len(case.state.numa_nodes) > 1:
        return None
    devices = {
        resource: {id: numa for id, numa in ids.items() if numa or not any(ids.values())}
        for resource, ids in case.state.devices.items()
    }
    if devices == case.state.devices:
        return None
    return replace(case, state=replace(case.state, devices=devices))


def node_without_cpus(case: Case) -> Case | None:
    """The NUMA nodes without CPUs have no memory left, and devices are not said to be on them."""
    bare = {node.id for node in case.state.numa_nodes if not node.cpus}
    if not bare:
        return None
    state = case.state
    nodes = tuple(
        replace(node, memory_bytes=0, huge_pages={}) if node.id in bare else node
        for node in state.numa_nodes
    )
    memory = state.memory and replace(
        state.memory,
        free={key: 0 if key[0] in bare else size for key, size in state.memory.free.items()},
    )
    devices = {
        resource: {id: tuple(n for n in numa if n not in bare) for id, numa in ids.items()}
        for resource, ids in state.devices.items()
    }
    return replace(case, state=replace(state, numa_nodes=nodes, memory=memory, devices=devices))


def sick_device_in_use(case: Case) -> Case | None:
    """The Node's allocatable has the devices too that pods hold and that are no longer healthy."""
    state = case.state
    held = {
        (device.resource, device.id)
        for pod in state.pods.values()
        for container in pod.containers
        for device in container.devices
    }
    known = {(resource, id) for resource, ids in state.devices.items() for id in ids}
    sick = Counter(resource for resource, id in held & state.unhealthy | held - known)
    asked = {name for each in case.spec.containers for name in each.requests}
    if not asked & set(sick):
        return None
    allocatable = {n: a + 1000 * sick[n] for n, a in case.seen.allocatable.items()}
    return replace(case, seen=replace(case.seen, allocatable=allocatable))


def sick_device_unseen(case: Case) -> Case | None:
    """Of resources that no zone lists the sick devices are gone."""
    state = case.state
    listed = {name for zone in case.seen.zones for name in zone}
    devices = {
        resource: {
            id: numa
            for id, numa in ids.items()
            if resource in listed or (resource, id) not in state.unhealthy
        }
        for resource, ids in state.devices.items()
    }
    if devices == state.devices:
        return None
    return replace(case, state=replace(state, devices=devices))


FACTS: Mapping[str, Fact] = {
    "restricted": restricted,
    "memory group": memory_group,
    "odd CPUs": odd_cpus,
    "half cores": half_cores,
    "shared CPUs": shared_cpus,
    "node without CPUs": node_without_cpus,
    "pod-level resources": pod_level,
    "overhead": overhead,
    "init container": init_container,
    "ended init container": ended_init_container,
    "sidecar": sidecar,
    "memory of a whole pod": memory_of_a_pod,
    "request for none": request_for_none,
    "device without a node": device_without_node,
    "device of several nodes": device_of_several_nodes,
    "sick device in use": sick_device_in_use,
    "sick device unseen": sick_device_unseen,
}
