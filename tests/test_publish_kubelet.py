"""A real kubelet's managers, our plugin, our publisher, a real API server: the whole line."""

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import yaml

from plugin.life import DevicePlugin, Options
from plugin.service import TOOK_BUCKETS_S
from rte.agent import Agent, Kubelet, Reason, Sources
from rte.graph.build import build
from rte.graph.groups import groups
from rte.kubelet import usage
from rte.kubelet.policy import read_policy
from rte.metrics import Measured, renderer
from rte.model import CpuId, DeviceUse, NumaId, NumaNode, Observation, PodFacts, PodName
from rte.pacer import Pace
from rte.publish.access import Access
from rte.publish.apply import ApiServer
from rte.publish.nrt import nrt
from rte.publish.publisher import ApiSink
from rte.sources.recorded import read_recorded
from tests.accounted import differences
from tests.machines.description import FOLDER
from tests.real_apiserver import ApiServer as RealApiServer
from tests.real_kubelet import Kubelet as RealKubelet
from tests.real_kubelet import numa_nodes, pod
from tests.recount import GPU, Zones, gpu_nodes, published, recount
from tests.scheduling import fingerprint_of
from tests.simple_plugin import SimplePlugin
from tests.waiting import until

CRD = Path(__file__).parents[1] / "crds" / "noderesourcetopology" / "crd.yaml"
PATH = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/"
RECORDED = FOLDER / "pcie-a100-pairs"
STATIC = {
    "topologyManagerPolicy": "single-numa-node",
    "cpuManagerPolicy": "static",
    "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
    "memoryManagerPolicy": "Static",
}
NIC = "example.com/nic"
# As in use, but without waiting for bursts: 200 steps are one burst.
BRISK = Pace(poll_s=60, settle_s=0.005, apart_s=0.01, quiet_s=0.01, burst_s=0.02, echo_s=0)
NUMBERS = itertools.count()

StartKubelet = Callable[..., RealKubelet]


class Node:
    """One node, end to end."""

    def __init__(self, kubelet: RealKubelet, real: RealApiServer, pace: Pace) -> None:
        self.name = f"published-{next(NUMBERS)}"
        self.kubelet = kubelet
        self.real = real
        self.alive: dict[str, str] = {}  # name → UID of the pods that run
        real.create_node(self.name)
        self.machine = replace(
            read_recorded(RECORDED), numa_nodes=tuple(map(numa_node, kubelet.machine))
        )
        self.graph = build(self.machine)
        self.gpus = gpu_nodes(RECORDED)
        self.api = ApiServer(Access(server=real.url, ca_file=real.ca, token=real.token))
        self.channel = usage.channel(kubelet.pod_resources)
        self.agent = Agent(
            kubelet=Kubelet(
                channel=self.channel,
                root=kubelet.root,
                plugin_dir=kubelet.plugin_dir,
                registry_dir=kubelet.registry_dir,
                pod_resources_socket=kubelet.pod_resources,
            ),
            hardware=SimpleNamespace(latest=SimpleNamespace(machine=self.machine, faults={})),
            sources=Sources(
                policy=lambda: read_policy(kubelet.root / "config.yaml"), pods=self.facts
            ),
            compose=self.compose,
            sink=ApiSink(self.api, node=self.name, takeover_after_s=180),
            pace=pace,
        )
        self.plugin = DevicePlugin(
            Options(plugin_dir=kubelet.plugin_dir, pod_resources=kubelet.pod_resources),
            on_allocate=lambda: self.agent.wake(Reason.ALLOCATE),
        )

    def start(self) -> None:
        self.plugin.start()
        self.plugin.update(self.machine, {})
        self.kubelet.wait_devices(GPU, len(self.gpus))
        self.agent.start()
        self.until_right()

    def stop(self) -> None:
        self.agent.stop()
        self.plugin.stop()
        self.channel.close()
        self.api.close()

    def compose(self, observation: Observation) -> list[dict[str, Any]]:
        advertised = self.plugin.resources[GPU].tables.devices.values()
        return [
            nrt(
                observation,
                self.graph,
                node_name=self.name,
                node_uid=None,  # the sink's
                version="test",
                groups=groups(self.graph),
                ours=[DeviceUse(resource=GPU, id=d.id, numa=d.numa) for d in advertised],
            )
        ]

    def admit(self, name: str, *containers: dict[str, Any], **more: Any) -> bool:
        """Whether the pod runs; the watch of this node's pods says so."""
        admission = self.kubelet.admit(pod(name, *containers, **more))
        if admission.admitted:
            self.alive[name] = admission.uid
            self.agent.wake(Reason.PODS)
        return admission.admitted

    def facts(self) -> tuple[PodFacts, ...]:
        """What the watch of this node's pods would say."""
        return tuple(
            PodFacts(pod=PodName(namespace="default", name=name), phase="Running", qos="Guaranteed")
            for name in sorted(self.alive)
        )

    def remove(self, name: str) -> None:
        """The pod is gone; the watch of this node's pods says so."""
        self.kubelet.remove(name)
        self.alive.pop(name, None)
        self.agent.wake(Reason.PODS)

    def expected(self) -> Zones:
        return recount(self.kubelet.root, self.kubelet.machine, self.gpus, set(self.alive.values()))

    def body(self) -> dict[str, Any]:
        answer = self.real.request("GET", PATH + self.name)
        return answer.body if answer.status == 200 else {"zones": []}

    def until_right(self) -> None:
        """Returns when the object in the API server is what the recount says."""
        until(
            lambda: published(self.body()) == self.expected(),
            lambda: (differences(published(self.body()), self.expected()), self.problems()),
        )

    def until_settled(self) -> None:
        """Returns when it says all that is so, its pods too, and its writes are counted."""

        def is_settled() -> bool:
            seen, body = self.agent.observation, self.body()
            if seen is None or seen.pods != self.facts():
                return False
            wanted = self.compose(seen)[0]
            if body["zones"] != wanted["zones"] or fingerprint_of(body) != fingerprint_of(wanted):
                return False
            return (self.agent.published_at or 0) >= (self.agent.observed_at or 0)

        self.until_right()
        until(is_settled, self.problems)

    def problems(self) -> object:
        return self.agent.problems.current()

    def writes(self) -> int:
        outcomes = self.agent.counts.outcomes
        return sum(n for (_, wrote), n in outcomes.items() if wrote not in ("unchanged", "held"))


def numa_node(node: Mapping[str, Any]) -> NumaNode:
    """A NUMA node of the kubelet's machine, as our discovery would read it."""
    return NumaNode(
        id=NumaId(node["id"]),
        cpus=tuple(sorted(CpuId(cpu) for core in node["cores"] for cpu in core)),
        memory_bytes=int(node["memory"].removesuffix("Gi")) << 30,
        huge_pages={2 << 20: node["hugepages"]["2Mi"]},
        distance={NumaId(i): value for i, value in enumerate(node["distances"])},
    )


@pytest.fixture
def start(kubelet: StartKubelet, apiserver: RealApiServer) -> Iterator[Callable[[Pace], Node]]:
    apiserver.apply_files(CRD)
    nodes: list[Node] = []

    def start(pace: Pace) -> Node:
        machine = numa_nodes(cpus=32, memory="64Gi", hugepages={"2Mi": 1024})
        node = Node(kubelet(STATIC, machine=machine), apiserver, pace)
        nodes.append(node)
        node.start()
        return node

    yield start
    for node in nodes:
        node.stop()


def test_an_admission_is_in_the_api_server_though_nothing_is_polled(
    start: Callable[[Pace], Node],
) -> None:
    node = start(Pace(echo_s=0.5, poll_s=3600))
    node.until_settled()
    time.sleep(0.3)  # a quiet time
    before = node.writes()
    assert node.admit("a", {GPU: 2, "cpu": 4, "memory": "8Gi"})
    node.until_settled()
    # Where the kubelet is slow: devices, CPUs, memory and the pod, each by itself.
    assert 1 <= node.writes() - before <= 4
    free = [zone[GPU].available for zone in published(node.body()).values()]
    assert sorted(free) == [2, 4]

    time.sleep(0.3)
    before = node.writes()
    node.remove("a")
    node.until_right()
    until(lambda: node.body()["attributes"][-1] == {"name": "rteEcho", "value": "1"})
    time.sleep(0.8)
    assert node.agent.counts.outcomes["NodeResourceTopology", "echo"] == 1
    assert 2 <= node.writes() - before <= 5
    assert node.agent.counts.looks["poll"] == 0
    scraped = renderer(
        Measured(
            version="test",
            publisher=node.agent,
            plugin=node.plugin,
            plugin_buckets_s=TOOK_BUCKETS_S,
        )
    )().decode()
    for line in (
        'rte_writes_total{kind="NodeResourceTopology",verb="create"} 1.0',
        'rte_writes_total{kind="NodeResourceTopology",verb="echo"} 1.0',
        f'rte_devices_used{{resource="{GPU}"}} 0.0',
        f'rte_largest_aligned_devices{{resource="{GPU}"}} 4.0',
        f'rte_plugin_registered{{resource="{GPU}"}} 1.0',
        f'rte_plugin_devices{{health="healthy",resource="{GPU}"}} 8.0',
        f'rte_preferred_allocation_duration_seconds_count{{resource="{GPU}"}} 1.0',
        f'rte_allocations_total{{resource="{GPU}"}} 1.0',
    ):
        assert line in scraped.splitlines()
    owner = node.body()["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"]) == ("Node", node.name)


def crash(kubelet: RealKubelet) -> None:
    kubelet.kill()
    time.sleep(0.5)  # away for a while
    kubelet.start()


@pytest.mark.parametrize("restart", [RealKubelet.restart, crash], ids=["restart", "crash"])
def test_a_kubelet_restart_writes_nothing_and_loses_nothing(
    start: Callable[[Pace], Node], restart: Callable[[RealKubelet], object]
) -> None:
    node = start(BRISK)
    assert node.admit("a", {GPU: 2, "cpu": 4, "memory": "8Gi"})
    assert node.admit("b", {GPU: 4})
    node.until_settled()
    before = node.writes(), node.body()
    restart(node.kubelet)
    node.kubelet.wait_devices(GPU, len(node.gpus))
    until(lambda: node.agent.counts.looks["kubelet-restart"] > 0)
    until(lambda: not node.agent.problems.current())
    node.until_right()
    time.sleep(0.5)
    assert (node.writes(), node.body()) == before


@pytest.mark.parametrize(
    "disturbance",
    [{"before_s": 30}, {"after_s": 30}, {"error": "UNAVAILABLE"}, {"error": "RESOURCE_EXHAUSTED"}],
    ids=["it hangs", "it hangs with an old answer", "it refuses", "its limit is reached"],
)
def test_a_pod_resources_that_fails_leaves_the_object_as_it_is_and_not_ready(
    start: Callable[[Pace], Node], disturbance: dict[str, Any]
) -> None:
    node = start(replace(BRISK, retry_first_s=0.05, retry_longest_s=0.1))
    node.agent.kubelet = node.agent.kubelet._replace(timeout_s=0.3)
    assert node.admit("a", {GPU: 2, "cpu": 4, "memory": "8Gi"})
    node.until_settled()
    before = node.body()
    node.kubelet.disturb_pod_resources(**disturbance)
    assert node.admit("b", {GPU: 4})
    until(lambda: "kubelet" in node.agent.not_ready())
    until(lambda: node.agent.counts.failures.total() >= 3)
    assert node.body() == before
    node.kubelet.disturb_pod_resources()
    node.until_right()
    until(lambda: not node.agent.not_ready())


def test_devices_that_all_vanish_for_a_moment_stay_published(
    start: Callable[[Pace], Node],
) -> None:
    """Our plugin is replaced, as in a rolling update."""
    node = start(replace(BRISK, doubts_s=(0.05,) * 1200))  # whatever else the machine does
    assert node.admit("a", {GPU: 2})
    node.until_settled()
    before = node.body()
    node.plugin.stop()
    node.kubelet.wait_devices(GPU, 0)
    doubted = node.agent.counts.doubted
    node.agent.wake(Reason.POLL)
    until(lambda: node.agent.counts.doubted > doubted)
    fresh = DevicePlugin(
        Options(plugin_dir=node.kubelet.plugin_dir, pod_resources=node.kubelet.pod_resources)
    )
    fresh.start()
    fresh.update(node.machine, {})
    node.plugin = fresh
    node.kubelet.wait_devices(GPU, len(node.gpus))
    node.until_right()
    time.sleep(0.5)
    assert node.body() == before


def serve_nics(plugin_dir: Path) -> None:
    """Another's device plugin, for a process of its own."""
    SimplePlugin(NIC, {"nic-0": (0,), "nic-1": (1,)}).serve(plugin_dir)
    threading.Event().wait()


def test_a_plugin_that_is_killed_is_missed_though_its_socket_stays(
    start: Callable[[Pace], Node],
) -> None:
    """The kubelet marks its devices when the stream ends, and says so in no file."""
    node = start(replace(BRISK, glance_s=0.2))
    folder = node.kubelet.plugin_dir
    plugin = get_context("spawn").Process(target=serve_nics, args=(folder,))
    plugin.start()

    def allocatable() -> list[str]:
        zones = node.body()["zones"]
        resources = [r for zone in zones for r in zone.get("resources", ())]
        return [r["allocatable"] for r in resources if r["name"] == NIC]

    def registered() -> int:
        data = json.loads((folder / "kubelet_internal_checkpoint").read_text())["Data"]
        return len(data["RegisteredDevices"].get(NIC) or ())

    try:
        until(lambda: allocatable() == ["1", "1"])
        until(lambda: registered() == 2)  # the kubelet writes it a moment later
        checkpoint = (folder / "kubelet_internal_checkpoint").stat()
        plugin.kill()
        until(lambda: "1" not in allocatable())
        assert (folder / "example.com_nic.sock").is_socket()
        after = (folder / "kubelet_internal_checkpoint").stat()
        assert after.st_ino == checkpoint.st_ino
        assert node.agent.counts.looks["allocatable"] >= 1
    finally:
        plugin.kill()
        plugin.join()


def test_an_idle_kubelet_is_glanced_at_and_not_looked_at(
    start: Callable[[Pace], Node],
) -> None:
    """Its answers are in no order, and yet of one length."""
    node = start(replace(BRISK, glance_s=0.02))
    calls = Calls()
    channel = grpc.intercept_channel(node.channel, calls)
    node.agent.kubelet = node.agent.kubelet._replace(channel=channel)
    # A look asks for both.
    until(lambda: calls.made["GetAllocatableResources"] - calls.made["List"] > 20)
    assert node.agent.counts.looks["allocatable"] == 0


class Calls(grpc.UnaryUnaryClientInterceptor):
    """Counts the calls that pass, by method."""

    def __init__(self) -> None:
        self.made = Counter[str]()

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        self.made[details.method.rpartition("/")[2]] += 1
        return continuation(details, request)


def test_a_changed_policy_is_published_when_the_kubelet_has_restarted(
    start: Callable[[Pace], Node],
) -> None:
    node = start(BRISK)
    config = yaml.safe_load((node.kubelet.root / "config.yaml").read_text())
    node.kubelet.configure({**config, "topologyManagerPolicy": "restricted"})
    node.agent.wake(Reason.KUBELET_CONFIGURATION)
    until(lambda: node.agent.counts.looks["kubelet-configuration"] > 0)
    assert attribute(node, "topologyManagerPolicy") == "single-numa-node"
    node.kubelet.restart()
    until(lambda: attribute(node, "topologyManagerPolicy") == "restricted")


def attribute(node: Node, name: str) -> str:
    (value,) = (a["value"] for a in node.body()["attributes"] if a["name"] == name)
    return str(value)


def test_the_object_equals_a_recount_after_each_of_200_steps(
    start: Callable[[Pace], Node],
) -> None:
    node = start(BRISK)
    chance = random.Random(20261129)
    admitted = rejected = removed = 0
    for step in range(200):
        if step == 100:
            # A new process: in one process the CPU manager of before would live on, and write its
            # state over the new one's after its reconcile period.
            node.kubelet.kill()
            node.kubelet.start()
            node.kubelet.wait_devices(GPU, len(node.gpus))
            running = {p.name for p in node.kubelet.state().pods if p.phase == "Running"}
            assert running == set(node.alive)
            node.until_right()
        if node.alive and chance.random() < len(node.alive) / 12:
            node.remove(chance.choice(sorted(node.alive)))
            removed += 1
        elif node.admit(f"p{step}", *containers(chance)):
            admitted += 1
        else:
            rejected += 1
            node.remove(f"p{step}")
        node.until_right()
    assert admitted > 60, (admitted, rejected, removed)
    assert rejected > 10, (admitted, rejected, removed)
    assert removed > 60, (admitted, rejected, removed)
    until(lambda: node.agent.problems.current() == {}, node.problems)


def containers(chance: random.Random) -> list[dict[str, Any]]:
    """One or two containers of a pod, with or without GPUs, exclusive CPUs and bound memory."""

    def container() -> dict[str, Any]:
        wanted: dict[str, Any] = {}
        if chance.random() < 0.7:
            wanted[GPU] = chance.choice([1, 1, 2, 2, 3, 4, 5])
        if chance.random() < 0.7:
            wanted["cpu"] = chance.choice([2, 2, 4, 8, "500m"])
            wanted["memory"] = chance.choice(["1Gi", "3Gi", "10Gi"])
            if chance.random() < 0.3:
                wanted["hugepages-2Mi"] = chance.choice(["64Mi", "512Mi"])
        return wanted

    return [container() for _ in range(chance.choice([1, 1, 1, 2]))]
