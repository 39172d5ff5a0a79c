"""Nodes, pods and verdicts around a real scheduler: what tests/test_scheduler.py is written in."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from plugin.devices import Advertising, devices
from plugin.life import DevicePlugin
from plugin.life import Options as PluginOptions
from rte.agent import Agent, Kubelet, Reason, Sources
from rte.follower import Follower, Tell, Wake
from rte.graph.build import build
from rte.graph.groups import groups
from rte.kubelet import admission, usage
from rte.kubelet import node as kubelet_node
from rte.kubelet.following import NodePods
from rte.kubelet.policy import parse_policy, read_policy
from rte.kubelet.spec import PodSpec
from rte.kubelet.spec import parse_pod as parse_spec
from rte.model import (
    CpuId,
    DeviceId,
    DeviceUse,
    Machine,
    NumaId,
    Observation,
    OwnNode,
    PodName,
    Usage,
    base_units,
    huge_pages_name,
)
from rte.pacer import Pace
from rte.publish.access import Access
from rte.publish.apply import ApiServer
from rte.publish.nrt import nrt
from rte.publish.pods import PodWatch
from rte.publish.pods import parse_pod as parse_facts
from rte.publish.publisher import ApiSink
from tests.real_apiserver import MERGE
from tests.real_apiserver import ApiServer as RealApiServer
from tests.real_kubelet import Admission as RealAdmission
from tests.real_kubelet import Json
from tests.real_kubelet import Kubelet as RealKubelet
from tests.real_scheduler import Scheduler
from tests.topology_match import Seen, first, seen
from tests.waiting import until

GPU = "nvidia.com/gpu"
NIC = "example.com/nic"
CRD = Path(__file__).parents[1] / "crds" / "noderesourcetopology" / "crd.yaml"
NRTS = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/"
RESERVED_MEMORY = 100 << 20  # bytes


class Cluster:
    """Pods of one namespace in a real API server."""

    def __init__(self, real: RealApiServer, prefix: str) -> None:
        self.real = real
        self.namespace = real.create_namespace(prefix)
        self.pods = f"/api/v1/namespaces/{self.namespace}/pods/"
        self.nodes: list[str] = []

    def close(self) -> None:
        """Leaves nothing that another test's scheduler would look at."""
        for name in self.nodes:
            for path in (NRTS + name, f"/api/v1/nodes/{name}"):
                self.real.request("DELETE", path)
        self.real.request("DELETE", f"{self.pods.removesuffix('/')}?gracePeriodSeconds=0")

    def add_node(self, name: str, allocatable: Mapping[str, int]) -> None:
        """A Node as its kubelet would keep it."""
        self.nodes.append(name)
        labels = {"kubernetes.io/hostname": name}
        self.real.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        self.set_allocatable(name, allocatable)

    def set_allocatable(self, name: str, allocatable: Mapping[str, int]) -> None:
        figures = {key: str(value) for key, value in {"pods": 110, **allocatable}.items()}
        status = {"status": {"capacity": figures, "allocatable": figures}}
        self.real.ask("PATCH", f"/api/v1/nodes/{name}/status", status, content_type=MERGE)

    def create(self, pod: Mapping[str, Any], scheduler: str, *, node: str | None = None) -> None:
        """A pod for a scheduler, which may place it on this node only."""
        spec = {**pod["spec"], "schedulerName": scheduler, "terminationGracePeriodSeconds": 0}
        if node is not None:
            spec["nodeSelector"] = {"kubernetes.io/hostname": node}
        self.real.create(self.pods, {"metadata": {"name": pod["metadata"]["name"]}, "spec": spec})

    def bind(self, pod: Mapping[str, Any], node: str) -> None:
        """A pod that no scheduler was asked about."""
        spec = {**pod["spec"], "nodeName": node}
        self.real.create(self.pods, {"metadata": {"name": pod["metadata"]["name"]}, "spec": spec})

    def touch(self, node: str) -> None:
        """A change of one of the node's pods by which nothing else changes."""
        on_node = f"{self.pods.removesuffix('/')}?fieldSelector=spec.nodeName%3D{node}"
        path = self.pods + self.real.get(on_node)["items"][0]["metadata"]["name"]
        touched = {"metadata": {"annotations": {"example.com/touched": str(time.time())}}}
        self.real.ask("PATCH", path, touched, content_type=MERGE)

    def set_phase(self, name: str, phase: str) -> None:
        status = {"status": {"phase": phase}}
        self.real.ask("PATCH", f"{self.pods}{name}/status", status, content_type=MERGE)

    def delete(self, name: str) -> None:
        self.real.ask("DELETE", f"{self.pods}{name}?gracePeriodSeconds=0")

    def verdicts(
        self, scheduler: Scheduler, names: Collection[str], *, within_s: float = 30
    ) -> dict[str, str | None]:
        """The node of each pod, None for a pod that the scheduler has refused."""

        def look() -> dict[str, str | None] | None:
            found: dict[str, str | None] = {}
            for pod in self.real.get(self.pods)["items"]:
                name = pod["metadata"]["name"]
                if name not in names:
                    continue
                if pod["spec"].get("nodeName"):
                    found[name] = pod["spec"]["nodeName"]
                elif any(
                    condition["type"] == "PodScheduled" and condition["status"] == "False"
                    for condition in pod["status"].get("conditions", ())
                ):
                    found[name] = None
            return found if len(found) == len(names) else None

        return scheduler.wait(look, f"no verdict on {names}", within_s)

    def wait_placed(
        self, scheduler: Scheduler, names: Collection[str], *, within_s: float
    ) -> dict[str, float]:
        """When each pod was first seen to have a node, in monotonic time."""
        seen: dict[str, float] = {}

        def look() -> dict[str, float] | None:
            for pod in self.real.get(self.pods)["items"]:
                name = pod["metadata"]["name"]
                if name in names and name not in seen and pod["spec"].get("nodeName"):
                    seen[name] = time.monotonic()
            return seen if len(seen) == len(names) else None

        return scheduler.wait(look, f"not all of {names} placed", within_s)

    def refusal(self, name: str) -> str:
        """Why the scheduler has refused a pod, in its words."""
        conditions = self.real.get(self.pods + name)["status"].get("conditions", ())
        return "; ".join(str(c.get("message")) for c in conditions if c["status"] == "False")


def with_runtime_class(real: RealApiServer, name: str, overhead: Mapping[str, str]) -> None:
    """Pods of this runtime class take so much more than their containers."""
    real.apply(
        {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": name},
            "handler": name,
            "overhead": {"podFixed": dict(overhead)},
        }
    )


def client(real: RealApiServer) -> ApiServer:
    return ApiServer(Access(server=real.url, ca_file=real.ca, token=real.token))


@dataclass(kw_only=True)
class NodeModel:
    """A node whose kubelet is rte.kubelet.admission, and the object that we publish of it.

    The model decides as the real kubelet does: tests/test_admission.py compares thousands of cases.
    """

    name: str
    machine: Machine
    state: kubelet_node.KubeletState
    options: Mapping[str, Any] = field(default_factory=dict)  # nrt's
    namespace: str = "default"

    def observation(self) -> Observation:
        return Observation(
            machine=self.machine,
            usage=self.usage(),
            allocatable=kubelet_node.allocatable(self.state),
            policy=self.state.policy,
            node_allocatable=self.state.allocatable,
        )

    def usage(self) -> Usage:
        """What PodResources lists, with what the kubelet's files add to it (rte.kubelet.ended)."""
        pods = []
        for pod in kubelet_node.usage(self.state).pods:
            listed = {container.name for container in pod.containers}
            held = self.state.pods[pod.pod].containers
            pods.append(replace(pod, ended=tuple(c for c in held if c.name not in listed)))
        free: dict[str, dict[NumaId, int]] = {}
        if self.state.memory is not None:
            for (node, kind), size in self.state.memory.free.items():
                free.setdefault(kind, {})[node] = size
        return Usage(pods=tuple(pods), memory_free=free)

    def body(self) -> Json:
        graph = build(self.machine)
        return nrt(
            self.observation(),
            graph,
            node_name=self.name,
            node_uid=None,  # the sink's
            version="test",
            groups=groups(graph),
            ours=[
                DeviceUse(resource=resource, id=id, numa=numa)
                for resource, ids in self.state.devices.items()
                for id, numa in ids.items()
            ],
            **self.options,
        )

    def seen(self, body: Mapping[str, Any] | None = None) -> Seen:
        """What a scheduler that has placed the pods goes by."""
        return seen(
            body or self.body(),
            node_allocatable(self.state),
            [held.spec for held in self.state.pods.values()],
        )

    def spec(self, pod: Mapping[str, Any]) -> PodSpec:
        metadata = {**pod["metadata"], "namespace": self.namespace}
        return parse_spec({**pod, "metadata": metadata})

    def would_admit(self, pod: Mapping[str, Any]) -> bool:
        return isinstance(self.decide(pod), admission.Admitted)

    def decide(self, pod: Mapping[str, Any]) -> admission.Admitted | admission.Rejected:
        """What the kubelet says to the pod, which changes nothing yet."""
        return admission.admit(self.state, self.spec(pod), prefer=first)

    def admit(self, pod: Mapping[str, Any]) -> admission.Admitted | admission.Rejected:
        answer = self.decide(pod)
        if answer.state is not None:
            self.state = answer.state
        return answer

    def remove(self, name: str) -> None:
        self.state = kubelet_node.without(self.state, PodName(namespace=self.namespace, name=name))


@dataclass(kw_only=True)
class ModelNode(NodeModel):
    """Such a node in a cluster, published by the real publisher."""

    cluster: Cluster
    sink: ApiSink

    def observation(self) -> Observation:
        """As of now: the publisher's list may be late, which its watch makes good."""
        on_node = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.name}"
        bodies = map(msgspec.json.encode, self.cluster.real.get(on_node)["items"])
        pods = tuple(sorted(map(parse_facts, bodies), key=lambda facts: facts.pod))
        return replace(super().observation(), pods=pods)

    def publish(self) -> None:
        self.sink.publish(self.body(), time.monotonic())

    def live(self) -> Json:
        return self.cluster.real.get(NRTS + self.name)


def node_allocatable(state: kubelet_node.KubeletState) -> dict[str, int]:
    """What the kubelet's Node says, in base units; of devices it has the healthy ones."""
    healthy = {
        resource: sum((resource, id) not in state.unhealthy for id in ids)
        for resource, ids in state.devices.items()
    }
    return {**state.allocatable, **healthy}


def model_node(
    cluster: Cluster,
    name: str,
    machine: Machine,
    config: Mapping[str, Any],
    *,
    state: kubelet_node.KubeletState | None = None,
    **options: Any,
) -> ModelNode:
    """A node with this machine and kubelet configuration, and nothing on it."""
    state = state or kubelet(machine, config)
    cluster.add_node(name, node_allocatable(state))
    return ModelNode(
        name=name,
        namespace=cluster.namespace,
        cluster=cluster,
        machine=machine,
        state=state,
        sink=ApiSink(client(cluster.real), node=name, takeover_after_s=180),
        options=options,
    )


def kubelet(
    machine: Machine,
    config: Mapping[str, Any],
    *,
    devices: Mapping[str, Mapping[DeviceId, tuple[NumaId, ...]]] | None = None,
) -> kubelet_node.KubeletState:
    """The kubelet of a machine, with a core of its first NUMA node reserved where the
    configuration reserves none, and with the devices of our plugin where none are given."""
    nodes = [node for node in machine.numa_nodes if node.cpus]
    cores = [core for node in nodes for core in threads(node.cpus)]
    full: dict[str, Any] = {"reservedSystemCPUs": ",".join(map(str, cores[0])), **config}
    if config.get("memoryManagerPolicy") == "Static":
        limits = {"memory": str(RESERVED_MEMORY)}
        bearer = next(node for node in nodes if node.memory_bytes)
        full["reservedMemory"] = [{"numaNode": int(bearer.id), "limits": limits}]
    policy = parse_policy(full)
    pages: dict[str, int] = {}
    for node in machine.numa_nodes:
        for page_bytes, count in node.huge_pages.items():
            resource = huge_pages_name(page_bytes)
            pages[resource] = pages.get(resource, 0) + page_bytes * count
    memory = sum(node.memory_bytes or 0 for node in machine.numa_nodes)
    return kubelet_node.kubelet_state(
        machine.numa_nodes,
        policy,
        cores=cores,
        devices=advertised(machine) if devices is None else devices,
        allocatable={
            "cpu": sum(len(node.cpus) for node in nodes) - len(policy.reserved_cpus),
            "memory": memory - sum(pages.values()) - RESERVED_MEMORY,
            **{resource: size for resource, size in pages.items() if size},
        },
    )


def threads(cpus: tuple[CpuId, ...]) -> list[tuple[CpuId, ...]]:
    """Cores of two threads, numbered as Linux does: the first threads of all cores come first."""
    half = len(cpus) // 2
    return [(cpus[i], cpus[half + i]) for i in range(half)]


def advertised(machine: Machine) -> dict[str, dict[DeviceId, tuple[NumaId, ...]]]:
    """Our plugin's GPUs, and a second plugin's NICs."""
    listed = devices(machine, {}, options=Advertising(resource=GPU)).resources
    found = {name: {d.id: d.numa for d in each} for name, each in listed.items()}
    functions = {function.address: function for function in machine.pci}
    nics: dict[DeviceId, tuple[NumaId, ...]] = {}
    for nic in machine.nics:
        numa = functions[nic.pci].numa if nic.pci in functions else None
        if nic.physical_function is None and nic.pci is not None and numa is not None:
            nics[DeviceId(str(nic.pci))] = (numa,)
    return {**found, **({NIC: nics} if nics else {})}


def fingerprint_of(body: Mapping[str, Any]) -> str:
    (value,) = (
        a["value"] for a in body["attributes"] if a["name"] == "nodeTopologyPodsFingerprint"
    )
    return str(value)


class RealNode:
    """A node whose kubelet, plugin, publisher and watch of its pods are the real ones.

    What no test runs is the kubelet's own watch of the API server: `start_pod` and `end_pod` say
    to both sides what becomes of a pod.
    """

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        start_kubelet: Callable[..., RealKubelet],
        machine: Machine,
        config: Mapping[str, Any],
        pace: Pace,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.cluster = cluster
        self.machine = machine
        self.kubelet = start_kubelet(config, machine=kubelet_machine(machine))
        self.api = client(cluster.real)
        self.channel = usage.channel(self.kubelet.pod_resources)
        self.pods = self.follow_pods(lambda: self.agent.wake(Reason.PODS), lambda problem: None)
        self.graph = build(machine)
        self.options = options or {}
        self.allocatable: dict[str, int] = {}
        self.agent = Agent(
            kubelet=Kubelet(
                channel=self.channel,
                root=self.kubelet.root,
                plugin_dir=self.kubelet.plugin_dir,
                registry_dir=self.kubelet.registry_dir,
                pod_resources_socket=self.kubelet.pod_resources,
            ),
            hardware=SimpleNamespace(latest=SimpleNamespace(machine=machine, faults={})),
            sources=Sources(
                policy=lambda: read_policy(self.kubelet.root / "config.yaml"),
                pods=self.pods.read,
                own_node=lambda: OwnNode(allocatable=self.allocatable),
            ),
            compose=self.compose,
            sink=ApiSink(self.api, node=name, takeover_after_s=180),
            pace=pace,
        )
        self.plugin = DevicePlugin(
            PluginOptions(
                plugin_dir=self.kubelet.plugin_dir, pod_resources=self.kubelet.pod_resources
            ),
            on_allocate=lambda: self.agent.wake(Reason.ALLOCATE),
        )

    def follow_pods(self, wake: Wake, tell: Tell) -> Follower | NodePods:
        return PodWatch(client(self.cluster.real), self.name, wake, tell)

    def start(self) -> None:
        """Returns when the object is published."""
        self.plugin.start()
        self.plugin.update(self.machine, {})
        count = len(advertised(self.machine)[GPU])
        self.kubelet.wait_devices(GPU, count)
        said = self.kubelet.state().allocatable
        self.allocatable = {key: base_units(value) for key, value in said.items() if key != "pods"}
        self.cluster.add_node(self.name, self.allocatable)
        self.pods.start()
        self.agent.start()
        self.until_published(())

    def stop(self) -> None:
        self.agent.stop()
        self.pods.stop()
        self.plugin.stop()
        self.channel.close()
        self.api.close()

    def compose(self, observation: Observation) -> list[dict[str, Any]]:
        tables = self.plugin.resources[GPU].tables.devices.values()
        return [
            nrt(
                observation,
                self.graph,
                node_name=self.name,
                node_uid=None,
                version="test",
                groups=groups(self.graph),
                ours=[DeviceUse(resource=GPU, id=d.id, numa=d.numa) for d in tables],
                **self.options,
            )
        ]

    def start_pod(self, pod: Mapping[str, Any]) -> RealAdmission:
        """What the kubelet decides about a pod that was bound to it; one it admits runs."""
        name = pod["metadata"]["name"]
        metadata = {**pod["metadata"], "namespace": self.cluster.namespace}
        admission = self.kubelet.admit({**pod, "metadata": metadata})
        if admission.admitted:
            self.cluster.set_phase(name, "Running")
        else:
            self.kubelet.remove(name, self.cluster.namespace)
        return admission

    def try_pod(self, pod: Mapping[str, Any]) -> RealAdmission:
        """What the kubelet would decide about a pod that was not bound to it."""
        metadata = {**pod["metadata"], "namespace": self.cluster.namespace}
        admission = self.kubelet.admit({**pod, "metadata": metadata})
        self.kubelet.remove(pod["metadata"]["name"], self.cluster.namespace)
        return admission

    def end_pod(self, name: str) -> None:
        self.kubelet.remove(name, self.cluster.namespace)
        self.cluster.delete(name)

    def body(self) -> Json:
        answer = self.cluster.real.request("GET", NRTS + self.name)
        return answer.body if answer.status == 200 else {"zones": [], "attributes": []}

    def until_published(self, running: Collection[str]) -> None:
        """Return when the object tells of exactly these pods, as the kubelet lists them."""
        self.until(lambda: self.is_published(running))

    def is_published(self, running: Collection[str]) -> bool:
        told, seen = self.pods.read(), self.agent.observation
        if told is None or seen is None:
            return False
        if {facts.pod.name for facts in told if facts.phase == "Running"} != set(running):
            return False
        listed = usage.read_usage(self.channel, 5)
        held = [[(pod.pod, pod.containers) for pod in use.pods] for use in (seen.usage, listed)]
        if seen.pods != told or held[0] != held[1]:
            return False
        wanted, live = self.compose(seen)[0], self.body()
        return bool(
            live["zones"] == wanted["zones"] and fingerprint_of(live) == fingerprint_of(wanted)
        )

    def until(self, holds: Callable[[], bool]) -> None:
        until(holds, lambda: (self.agent.problems.current(), self.body()))


def kubelet_machine(machine: Machine) -> list[Json]:
    """A machine as tests/kubelet reads it."""
    return [
        {
            "id": int(node.id),
            "socket": index,
            "cores": [list(map(int, core)) for core in threads(node.cpus)],
            "memory": str(node.memory_bytes or 0),
            "hugepages": {
                f"{size >> 20}Mi": count for size, count in {2 << 20: 0, **node.huge_pages}.items()
            },
            "distances": [node.distance.get(other.id, 10) for other in machine.numa_nodes],
        }
        for index, node in enumerate(machine.numa_nodes)
    ]
