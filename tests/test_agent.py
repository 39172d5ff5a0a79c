"""The publisher's life: when it looks, what it believes, and that nothing ends it."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from rte.agent import Agent, Kubelet, Reason, Sources, refused
from rte.asked import AskedNode
from rte.commands import parts
from rte.kubelet import usage
from rte.kubelet.plausible import Look, Patience, doubt
from rte.kubelet.policy import PolicyError
from rte.kubelet.state import HandedOut, PodUid
from rte.model import (
    Allocatable,
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    MemoryBlock,
    NumaId,
    Observation,
    PodFacts,
    PodName,
    PodUse,
    Policy,
    TopologyManagerPolicy,
    Usage,
)
from rte.pacer import Pace
from rte.publish.access import Access, ApiError
from rte.publish.apply import ApiServer
from rte.publish.publisher import ApiSink, FolderSink, Sink
from tests.conftest import GoProgram
from tests.http_faults import Fault, FaultyProxy
from tests.pod_resources import GPU, PodResources
from tests.ports import free_port
from tests.real_apiserver import ApiServer as RealApiServer
from tests.small_machine import machine
from tests.stopwatch import Stopwatch

CRD = Path(__file__).parents[1] / "crds" / "noderesourcetopology" / "crd.yaml"

# What to believe

A, B = (PodUid("a"), "c"), (PodUid("b"), "c")


def gpus(*numbers: int) -> tuple[DeviceUse, ...]:
    return tuple(DeviceUse(resource=GPU, id=DeviceId(f"GPU-{n}")) for n in numbers)


def look(
    pods: Mapping[str, tuple[int, ...]],
    held: Mapping[tuple[PodUid, str], tuple[int, ...]] | None = None,
    *,
    offered: tuple[int, ...] = (0, 1, 2, 3),
    cpus: tuple[int, ...] = (),
) -> Look:
    """GPUs by pod in the list, and by holder in the files (as the list says, if left out)."""
    if held is None:
        held = {(PodUid(name), "c"): numbers for name, numbers in pods.items()}
    return Look(
        usage=Usage(
            pods=tuple(
                PodUse(
                    pod=PodName(namespace="default", name=name),
                    containers=(ContainerUse(name="c", devices=gpus(*numbers)),),
                )
                for name, numbers in sorted(pods.items())
            )
        ),
        allocatable=Allocatable(devices=gpus(*offered), cpus=tuple(map(CpuId, cpus))),
        handed_out=HandedOut(
            devices={
                holder: frozenset((use.resource, use.id) for use in gpus(*numbers))
                for holder, numbers in held.items()
            }
        ),
    )


def test_after_a_restart_only_pods_that_the_api_server_has_are_waited_for() -> None:
    before = look({"a": (0,), "b": (1,)})
    now = look({"a": (0,)}, {A: (0,), B: (1,)})
    found = doubt(now, before=before, restarted=True)
    assert found is not None
    assert found.patience is Patience.LONG
    running = frozenset({PodName(namespace="default", name="a")})
    assert doubt(now, before=before, restarted=True, running=running) is None
    assert doubt(look({}, {A: (0,)}), before=before, restarted=True, running=running)
    assert doubt(look({}, {A: (0,)}), before=before, restarted=True, running=frozenset()) is None


def test_what_a_rejected_pod_leaves_in_the_files_is_no_reason() -> None:
    before = look({"a": (0,)})
    now = look({"a": (0,)}, {A: (0,), B: (1,)})
    assert doubt(now, before=before, restarted=False) is not None
    assert doubt(now, before=before, restarted=False, ended=frozenset({"b"})) is None


UNREAD = HandedOut(unread={Path("/k/cpu_manager_state"): "not the kubelet's format"})

BELIEF: dict[str, tuple[Look | None, Look, bool, str | None]] = {
    "all is as it was": (look({"a": (0,)}), look({"a": (0,)}), False, None),
    "a pod came": (look({}), look({"a": (0,)}), False, None),
    "the first look": (None, look({"a": (0,)}), False, None),
    "the first look, with what an ended pod left": (
        None,
        look({"a": (0,)}, {A: (0,), B: (1,)}),
        False,
        None,
    ),
    "a pod went, and the files keep it": (
        look({"a": (0,), "b": (1,)}),
        look({"a": (0,)}, {A: (0,), B: (1,)}),
        False,
        None,
    ),
    "no pods though pods ran": (look({"a": (0,)}), look({}, {A: (0,)}), False, "no pods"),
    "no pods at the first look though the files know some": (
        None,
        look({}, {A: (0,)}),
        False,
        "no pods",
    ),
    "a pod is listed without what it is being given": (
        look({"a": (0,)}),
        look({"a": (0,), "b": ()}, {A: (0,), B: (1, 2)}),
        False,
        "2 allocations of 1 pods",
    ),
    "the GPU of an ended pod is being given to another": (
        look({"a": ()}, {A: (0,)}),
        look({"a": (), "b": ()}, {B: (0,)}),
        False,
        "1 allocations",
    ),
    "a resource is offered no more": (
        look({"a": ()}),
        look({"a": ()}, offered=()),
        False,
        "offers no nvidia.com/gpu",
    ),
    "one device is offered no more": (
        look({"a": ()}),
        look({"a": ()}, offered=(0, 1)),
        False,
        None,
    ),
    "no CPUs are offered any more": (
        look({"a": ()}, cpus=(0, 1)),
        look({"a": ()}),
        False,
        "offers no CPUs",
    ),
    "after a restart with another policy no CPUs are offered": (
        look({"a": ()}, cpus=(0, 1)),
        look({"a": ()}),
        True,
        None,
    ),
    "after a restart pods come back one by one": (
        look({"a": (0,), "b": (1,)}),
        look({"a": (0,)}, {A: (0,), B: (1,)}),
        True,
        "1 allocations",
    ),
    "after a restart a pod that was never listed is no matter of the restart": (
        look({"a": (0,)}),
        look({"a": (0,)}, {A: (0,), B: (1,)}),
        True,
        "1 allocations",
    ),
    "after a restart what was missing before is no news": (
        look({"a": (0,)}, {A: (0,), B: (1,)}),
        look({"a": (0,)}, {A: (0,), B: (1,)}),
        True,
        None,
    ),
    "files that cannot be read any more": (
        look({"a": (0,)}),
        replace(look({"a": (0,), "b": ()}), handed_out=UNREAD),
        False,
        "cpu_manager_state cannot be read",
    ),
    "files that could not be read before either": (
        replace(look({"a": (0,)}), handed_out=UNREAD),
        replace(look({"a": (0,), "b": ()}), handed_out=UNREAD),
        False,
        None,
    ),
}


@pytest.mark.parametrize(("before", "now", "restarted", "why"), BELIEF.values(), ids=BELIEF.keys())
def test_what_is_doubted(before: Look | None, now: Look, restarted: bool, why: str | None) -> None:
    found = doubt(now, before=before, restarted=restarted)
    assert found is None if why is None else found is not None and why in found.why


@pytest.mark.parametrize(
    "handed_out",
    [
        HandedOut(cpus={B: frozenset({CpuId(4)})}),
        HandedOut(
            memory={
                holder: (MemoryBlock(type="memory", size_bytes=1 << 30, numa=(NumaId(0),)),)
                for holder in (A, B)
            }
        ),
    ],
    ids=["CPUs", "memory of the same size as another's"],
)
def test_cpus_and_memory_that_are_being_given_are_missed_too(handed_out: HandedOut) -> None:
    block = MemoryBlock(type="memory", size_bytes=1 << 30, numa=(NumaId(0),))
    holds = ContainerUse(name="c", memory=(block,))
    before = Look(
        usage=Usage(pods=(PodUse(pod=PodName(namespace="n", name="a"), containers=(holds,)),)),
        allocatable=Allocatable(),
        handed_out=HandedOut(memory={A: (block,)}),
    )
    assert doubt(before, before=before, restarted=False) is None
    now = replace(before, handed_out=handed_out)
    assert doubt(now, before=before, restarted=False) is not None


# The loop

FOUR = {"GPU-0": 0, "GPU-1": 0, "GPU-2": 1, "GPU-3": 1}


def compose(observation: Observation) -> list[dict[str, Any]]:
    """The least object that shows what was observed."""
    used = sorted(observation.usage.device_ids().get(GPU, ()))
    offered = {use.id for use in observation.allocatable.devices}
    figures = {
        "capacity": str(len(observation.machine.gpus)),
        "allocatable": str(len(offered)),
        "available": str(len(offered - set(used))),
    }
    policy = observation.policy.topology_manager.value if observation.policy else "unknown"
    return [
        {
            "apiVersion": "topology.node.k8s.io/v1alpha2",
            "kind": "NodeResourceTopology",
            "metadata": {"name": "n"},
            "attributes": [
                {"name": "used", "value": ",".join(used)},
                {"name": "topologyManagerPolicy", "value": policy},
            ],
            "zones": [
                {"name": "node-0", "type": "Node", "resources": [{"name": GPU, **figures}]},
            ],
        }
    ]


class NotedAgent(Agent):
    """One that notes when it is woken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.woken: list[float] = []

    def wake(self, reason: Reason) -> None:
        self.woken.append(time.monotonic())
        super().wake(reason)


class Node:
    """An agent with all that it looks at, and the folder that it writes to."""

    def __init__(self, folder: Path, pace: Pace, sink: Sink | None = None) -> None:
        self.root = folder / "kubelet"
        self.plugin_dir = self.root / "device-plugins"
        self.plugin_dir.mkdir(parents=True)
        self.socket = self.root / "pod-resources" / "kubelet.sock"
        self.pods = PodResources(self.socket, FOUR)
        self.out = folder / "out"
        self.now = 100.0
        self.hardware = SimpleNamespace(latest=SimpleNamespace(machine=machine(), faults={}))
        self.policies: list[Policy | PolicyError | None] = [Policy()]
        self.published_policy: Policy | None = None
        self.changed: float | None = None  # the kubelet's configuration file
        self.facts: tuple[PodFacts, ...] | None = None
        self.before_facts: Callable[[], None] = lambda: None
        self.composed = compose
        self.channel = usage.channel(self.socket)
        self.agent = NotedAgent(
            kubelet=Kubelet(
                channel=self.channel,
                root=self.root,
                plugin_dir=self.plugin_dir,
                registry_dir=self.root / "plugins_registry",
                pod_resources_socket=self.socket,
                timeout_s=20,
            ),
            hardware=self.hardware,
            sources=Sources(
                policy=self.policy,
                policy_changed=lambda: self.changed,
                published_policy=lambda: self.published_policy,
                pods=self.tell_of_pods,
            ),
            compose=self.compose,
            sink=sink or FolderSink(self.out),
            pace=pace,
        )

    def compose(self, observation: Observation) -> list[dict[str, Any]]:
        return self.composed(observation)

    def tell_of_pods(self) -> tuple[PodFacts, ...] | None:
        self.before_facts()
        return self.facts

    def policy(self) -> Policy | None:
        policy = self.policies[0] if len(self.policies) == 1 else self.policies.pop(0)
        if isinstance(policy, PolicyError):
            raise policy
        return policy

    def hold(self, **pods: tuple[str, ...]) -> None:
        """The kubelet hands GPUs out: its list and its checkpoint say so."""
        self.pods.pods = pods
        self.write_checkpoint(pods)

    def write_checkpoint(self, pods: Mapping[str, tuple[str, ...]]) -> None:
        entries = [
            {
                "PodUID": f"uid-{name}",
                "ContainerName": "c",
                "ResourceName": GPU,
                "DeviceIDs": {"0": list(ids)},
                "AllocResp": "",
            }
            for name, ids in pods.items()
        ]
        data = {"PodDeviceEntries": entries, "RegisteredDevices": {GPU: list(FOUR)}}
        path = self.plugin_dir / ".checkpoint"
        path.write_text(json.dumps({"Data": data, "Checksum": 1}))
        path.rename(self.plugin_dir / "kubelet_internal_checkpoint")

    def published(self) -> str | None:
        """The GPUs that the published object says are used."""
        try:
            body = json.loads((self.out / "noderesourcetopology-n.json").read_text())
        except FileNotFoundError:
            return None
        used: str = body["attributes"][0]["value"]
        return used

    def attributes(self) -> dict[str, str]:
        body = json.loads((self.out / "noderesourcetopology-n.json").read_text())
        return {item["name"]: item["value"] for item in body["attributes"]}

    def policy_published(self) -> str:
        body = json.loads((self.out / "noderesourcetopology-n.json").read_text())
        value: str = body["attributes"][1]["value"]
        return value

    def writes(self) -> int:
        outcomes = self.agent.counts.outcomes
        return sum(n for (_, wrote), n in outcomes.items() if wrote not in ("unchanged", "held"))

    def story(self) -> str:
        """What a failure needs to be understood."""
        counts = vars(self.agent.counts)
        return f"{self.agent.problems.current()}\n{counts}\nthe kubelet: {vars(self.pods)}"

    def end(self) -> None:
        self.agent.stop()
        self.channel.close()
        self.pods.__exit__()

    def until(self, holds: Callable[[], bool]) -> None:
        stopwatch = Stopwatch()
        while not holds():
            assert not stopwatch.past(30), self.story()
            time.sleep(0.001)


QUICK = Pace(poll_s=30, retry_first_s=0.05, retry_longest_s=0.1)


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(tmp_path: Path, stack: ExitStack) -> MakeNode:
    """Makes a node, whose agent ends with the test however that ends."""

    def made(pace: Pace = QUICK, sink: Sink | None = None) -> Node:
        node = Node(tmp_path, pace, sink)
        stack.callback(node.end)
        return node

    return made


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    node = make_node()
    node.pods.start()
    return node


def test_an_allocation_is_published_when_the_checkpoint_changes(node: Node) -> None:
    node.hold()
    node.agent.start()
    node.until(lambda: node.published() == "")
    time.sleep(0.3)  # a quiet time
    node.hold(a=("GPU-0", "GPU-1"))
    node.until(lambda: node.published() == "GPU-0,GPU-1")  # the poll would be after 30 s
    node.until(lambda: node.writes() == 2)
    assert node.agent.counts.looks["state-file"] == 1


def test_a_burst_is_few_writes_and_its_last_change_is_right(node: Node) -> None:
    node.hold()
    node.agent.start()
    node.until(lambda: node.writes() == 1)
    time.sleep(0.3)
    start = time.monotonic()
    for number in range(20):
        time.sleep(max(0.0, start + number / 20 - time.monotonic()))
        node.hold(a=(f"GPU-{number % 4}",), b=("GPU-0",) if number % 2 else ())
    node.until(lambda: node.published() == "GPU-0,GPU-3")
    node.until(lambda: node.agent._busy_since is None)
    # A busy machine wakes it so late now and then that this is another burst.
    wide = [b - a for a, b in pairwise(node.agent.woken) if b - a > QUICK.quiet_s]
    assert node.writes() - 1 <= 6 + len(wide)


def test_nothing_is_written_while_nothing_changes(node: Node) -> None:
    node.hold(a=("GPU-0",))
    node.agent.start()
    node.until(lambda: node.published() == "GPU-0")
    looked = node.pods.lists
    for more in range(1, 4):
        node.agent.wake(Reason.STATE_FILE)
        node.until(lambda n=looked + more: node.pods.lists >= n)  # type: ignore[misc]
        time.sleep(0.1)
    assert node.writes() == 1
    assert node.agent.counts.outcomes.total() == 1


@pytest.mark.parametrize(
    "moment",
    [{}, {"a": ("GPU-0",), "b": ()}, {"a": ("GPU-0",)}],
    ids=["no pods", "a pod without its devices", "a pod is missing"],
)
def test_a_passing_moment_is_not_published(
    make_node: MakeNode, moment: dict[str, tuple[str, ...]]
) -> None:
    # A doubt ends by its time, and a busy machine may need seconds for what is looked at here.
    node = make_node(replace(QUICK, doubts_s=(0.02, 0.03, *[0.05] * 4, *[5.0] * 8)))
    node.pods.start()
    seen = []

    def composed(observation: Observation) -> list[dict[str, Any]]:
        seen.append(observation)
        return compose(observation)

    node.composed = composed
    node.hold(a=("GPU-0",))
    node.agent.start()
    node.until(lambda: node.published() == "GPU-0")
    node.pods.next_lists = [moment] * 4  # for about 0.2 s
    node.hold(a=("GPU-0",), b=("GPU-1",))
    node.until(lambda: node.published() == "GPU-0,GPU-1")
    node.until(lambda: node.writes() == 2)  # counted when the API server has answered
    assert len(seen) == 2
    assert node.agent.counts.doubted >= 3


def test_a_pod_that_is_counted_is_one_whose_devices_are_known(node: Node) -> None:
    """It starts after the list was asked for and before the pods' facts are: an object that counts
    it and offers its devices would have them placed twice."""
    node.hold(a=("GPU-0",))
    node.facts = (running("a"),)
    node.agent.start()
    node.until(lambda: node.published() == "GPU-0")
    seen: list[Observation] = []

    def composed(observation: Observation) -> list[dict[str, Any]]:
        seen.append(observation)
        return compose(observation)

    def start_another() -> None:
        node.before_facts = lambda: None
        node.hold(a=("GPU-0",), b=("GPU-1",))
        node.facts = (running("a"), running("b"))

    node.composed = composed
    node.before_facts = start_another
    node.agent.wake(Reason.POLL)
    node.until(lambda: node.published() == "GPU-0,GPU-1")
    for observation in seen:
        held = {pod.pod for pod in observation.usage.pods}
        assert {fact.pod for fact in observation.pods or ()} <= held


def running(name: str) -> PodFacts:
    pod = PodName(namespace="default", name=name)
    return PodFacts(pod=pod, phase="Running", qos="BestEffort", uid=f"uid-{name}")


def test_the_end_of_the_last_pod_is_soon_believed(node: Node) -> None:
    node.hold(a=("GPU-0",))
    node.agent.start()
    node.until(lambda: node.published() == "GPU-0")
    start = time.monotonic()
    node.hold()
    node.until(lambda: node.published() == "")
    assert time.monotonic() - start > sum(QUICK.doubts_s[: QUICK.doubts_if_short])
    assert QUICK.doubts_least <= node.agent.counts.doubted <= QUICK.doubts_if_short


def test_the_end_of_the_last_pod_is_believed_at_once_when_the_api_server_says_so(
    node: Node,
) -> None:
    node.hold(a=("GPU-0",))
    node.agent.start()
    node.until(lambda: node.published() == "GPU-0")
    node.facts = (
        PodFacts(pod=PodName(namespace="n", name="a"), phase="Succeeded", qos="BestEffort"),
    )
    node.hold()
    node.until(lambda: node.published() == "")
    assert node.agent.counts.doubted == 0


def test_what_lasts_is_published_in_the_end(node: Node) -> None:
    node.hold(a=("GPU-0",))
    node.agent.start()
    node.until(lambda: node.published() == "GPU-0")
    start = time.monotonic()
    node.pods.pods = {"a": ("GPU-0",), "b": ()}
    node.write_checkpoint({"a": ("GPU-0",), "b": ("GPU-1",)})
    node.until(lambda: node.agent.counts.outcomes["NodeResourceTopology", "unchanged"] >= 1)
    assert time.monotonic() - start > sum(QUICK.doubts_s)
    assert QUICK.doubts_least <= node.agent.counts.doubted <= len(QUICK.doubts_s)


def test_after_a_restart_the_kubelet_is_given_time(node: Node) -> None:
    node.hold(a=("GPU-0",), b=("GPU-1",))
    node.agent.start()
    node.until(lambda: node.published() == "GPU-0,GPU-1")
    node.pods.stop()
    node.pods.next_lists = [{}, {}, {"a": ("GPU-0",)}, {"b": ("GPU-1",)}]
    node.until(lambda: "kubelet" in node.agent.problems.current() or not node.socket.exists())
    node.pods.start()
    node.until(lambda: not node.pods.next_lists)
    node.until(lambda: not node.agent.problems.current())
    assert node.published() == "GPU-0,GPU-1"
    assert node.writes() == 1


def test_a_kubelet_that_is_not_there_is_said_once_and_awaited(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node = make_node()
    node.agent.start()
    node.until(lambda: node.agent.counts.failures.total() >= 3)
    assert "PodResources" in node.agent.problems.current()["kubelet"].words
    assert node.published() is None
    node.pods.start()
    node.until(lambda: node.published() == "")
    node.until(lambda: not node.agent.problems.current())
    node.agent.stop()
    said = [r.message for r in caplog.records if r.message.startswith("kubelet:")]
    assert len([line for line in said if "now" not in line]) == 2, said
    assert said[-1].startswith("kubelet: in order again")


def test_a_sink_that_refuses_is_said_and_tried_again_with_the_newest(node: Node) -> None:
    node.out.write_text("in the way")
    node.hold(a=("GPU-0",))
    node.agent.start()
    node.until(lambda: node.agent.counts.failures.total() >= 2)
    assert str(node.out) in node.agent.problems.current()["API server"].words
    node.hold(a=("GPU-1",))
    node.out.unlink()
    node.until(lambda: node.published() == "GPU-1")
    node.until(lambda: not node.agent.problems.current())


def with_fabric(observation: Observation) -> list[dict[str, Any]]:
    return [*compose(observation), {"kind": "GPUFabric", "metadata": {"name": "n"}}]


def test_what_schedulers_read_waits_for_no_other_object(make_node: MakeNode) -> None:
    node = make_node(Pace(poll_s=30, retry_first_s=300, retry_longest_s=300))
    node.composed = with_fabric
    (node.out / "gpufabric-n.json").mkdir(parents=True)  # in the way
    node.pods.start()
    node.agent.start()
    node.until(lambda: "gpufabric" in node.agent.not_ready().get("API server", ""))
    for gpu in ("GPU-0", "GPU-1"):
        node.hold(a=(gpu,))
        node.until(lambda: node.published() == gpu)  # noqa: B023 - called in this turn
    assert node.agent.counts.failures.total() == 1
    assert "gpufabric" in node.agent.not_ready()["API server"]


def test_another_object_is_tried_again_by_itself(make_node: MakeNode) -> None:
    node = make_node()
    node.composed = with_fabric
    file = node.out / "gpufabric-n.json"
    file.mkdir(parents=True)
    node.pods.start()
    node.agent.start()
    node.until(lambda: node.agent.counts.failures.total() >= 3)
    file.rmdir()
    node.until(lambda: file.is_file() and not node.agent.not_ready())


NRT = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/n"


@pytest.fixture
def cluster(apiserver: RealApiServer) -> Iterator[RealApiServer]:
    """An API server that knows the kind, and no object of the node."""
    apiserver.apply_files(CRD)
    apiserver.request("DELETE", NRT)
    yield apiserver
    apiserver.request("DELETE", NRT)


def test_an_api_server_that_asks_for_patience_gets_it(
    make_node: MakeNode, cluster: RealApiServer
) -> None:
    with FaultyProxy(cluster) as proxy:
        proxy.faults = [Fault(429, (("Retry-After", "1"),))]
        api = ApiServer(Access(server=proxy.url, token=cluster.token))
        node = make_node(sink=ApiSink(api, node="n", takeover_after_s=180, owner=False))
        node.pods.start()

        def asked_again() -> bool:
            node.agent.wake(Reason.STATE_FILE)
            return len(proxy.seen) > 1

        start = time.monotonic()
        node.agent.start()
        node.until(asked_again)
        assert time.monotonic() - start >= 1
        node.agent.stop()
        api.close()


def test_an_api_server_that_is_gone_and_back_gets_the_newest(
    make_node: MakeNode, cluster: RealApiServer
) -> None:
    port = free_port()
    api = ApiServer(Access(server=f"http://127.0.0.1:{port}", token=cluster.token))
    node = make_node(sink=ApiSink(api, node="n", takeover_after_s=180, owner=False))

    def used() -> str:
        answer = cluster.request("GET", NRT)
        return str(answer.body["attributes"][0]["value"]) if answer.status == 200 else "nothing"

    node.pods.start()
    node.hold(a=("GPU-0",))
    node.agent.start()
    node.until(lambda: node.agent.counts.failures.total() >= 2)
    with FaultyProxy(cluster, port=port):
        node.until(lambda: used() == "GPU-0")
    node.hold(a=("GPU-1",))
    node.until(lambda: "API server" in node.agent.not_ready())
    node.hold(a=("GPU-2",))
    with FaultyProxy(cluster, port=port):
        node.until(lambda: used() == "GPU-2")
        node.until(lambda: not node.agent.not_ready())
        node.agent.stop()
    api.close()


def test_a_kubelet_that_restarts_while_the_api_server_is_away(
    make_node: MakeNode, cluster: RealApiServer
) -> None:
    """What it works by since then and what it has handed out is published when that is back."""

    def said() -> dict[str, str]:
        answer = cluster.request("GET", NRT)
        attributes = answer.body.get("attributes", ()) if answer.status == 200 else ()
        return {item["name"]: item["value"] for item in attributes}

    port = free_port()
    with FaultyProxy(cluster, port=port) as proxy:
        api = ApiServer(Access(server=proxy.url, token=cluster.token))
        node = make_node(sink=ApiSink(api, node="n", takeover_after_s=180, owner=False))
        node.policies = [policy_of("none")]
        node.pods.start()
        node.hold(a=("GPU-0",))
        node.agent.start()
        node.until(lambda: said() == {"used": "GPU-0", "topologyManagerPolicy": "none"})
    node.policies = [policy_of("restricted")]
    node.pods.stop()
    node.hold(a=("GPU-0",), b=("GPU-1",))
    node.pods.start()
    node.until(lambda: "API server" in node.agent.not_ready())
    with FaultyProxy(cluster, port=port):
        expected = {"used": "GPU-0,GPU-1", "topologyManagerPolicy": "restricted"}
        node.until(lambda: said() == expected)
        node.until(lambda: not node.agent.not_ready())
        node.agent.stop()
    api.close()


def test_a_missing_definition_is_said_once_and_awaited(
    make_node: MakeNode, go_program: GoProgram, caplog: pytest.LogCaptureFixture
) -> None:
    with RealApiServer(go_program("apiserver")) as fresh:
        api = ApiServer(Access(server=fresh.url, ca_file=fresh.ca, token=fresh.token))
        node = make_node(sink=ApiSink(api, node="n", takeover_after_s=180, owner=False))
        node.pods.start()
        node.agent.start()
        node.until(lambda: node.agent.counts.failures.total() >= 3)
        problem = node.agent.not_ready()["API server"]
        assert "custom resource definition" in problem
        fresh.apply_files(CRD)
        node.until(lambda: not node.agent.not_ready())
        node.agent.stop()
        api.close()
        said = [r for r in caplog.records if "custom resource definition" in r.message]
        assert [record.levelname for record in said] == ["WARNING"]
        path = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/n"
        assert fresh.get(path)["zones"][0]["name"] == "node-0"


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (503, "ServiceUnavailable", {"503 ServiceUnavailable: why"}),
        (429, "TooManyRequests", {"429 TooManyRequests: why"}),
        (None, "Unreachable", {"Unreachable: why"}),
        (403, "Forbidden", {"GET /a: 403 Forbidden: why", "PATCH /b: 403 Forbidden: why"}),
    ],
)
def test_what_any_request_would_meet_is_one_trouble(
    status: int | None, reason: str, words: set[str]
) -> None:
    asked = ("GET /a", "PATCH /b")
    assert {refused(ApiError(each, reason, "why", status=status)) for each in asked} == words


@pytest.mark.survives_bugs
def test_a_bug_does_not_end_the_loop(node: Node) -> None:
    faults = iter(range(2))

    def broken(observation: Observation) -> list[dict[str, Any]]:
        if next(faults, None) is not None:
            raise ZeroDivisionError
        return compose(observation)

    node.composed = broken
    node.agent.start()
    node.until(lambda: node.published() == "")
    assert node.agent.counts.failures["agent", "ZeroDivisionError"] == 2
    node.until(lambda: not node.agent.problems.current())


class Flaky:
    """Hardware whose first looks are a bug."""

    def __init__(self, latest: object, bugs: int) -> None:
        self.bugs = bugs
        self._latest = latest

    @property
    def latest(self) -> object:
        if self.bugs:
            self.bugs -= 1
            raise ZeroDivisionError
        return self._latest


@pytest.mark.survives_bugs
def test_a_bug_that_does_not_come_again_is_no_problem_any_more(node: Node) -> None:
    """Also when there is nothing to publish afterwards."""
    node.agent.start()
    node.until(lambda: node.published() == "")
    flaky = Flaky(node.hardware.latest, bugs=1)
    node.agent._hardware = flaky  # type: ignore[assignment]
    node.agent.wake(Reason.HARDWARE)
    node.until(lambda: node.agent.counts.failures["agent", "ZeroDivisionError"] == 1)
    node.until(lambda: not node.agent.not_ready())
    assert node.writes() == 1


@pytest.mark.survives_bugs
def test_a_bug_that_stays_makes_the_object_say_since_when(make_node: MakeNode) -> None:
    node = make_node(replace(QUICK, stale_s=0.3))
    node.pods.start()
    node.agent.start()
    node.until(lambda: node.published() == "")
    flaky = Flaky(node.hardware.latest, bugs=1_000_000)
    node.agent._hardware = flaky  # type: ignore[assignment]
    node.agent.wake(Reason.HARDWARE)
    node.until(lambda: "staleSince" in node.attributes())
    assert "agent" in node.agent.not_ready()
    flaky.bugs = 0
    node.until(lambda: "staleSince" not in node.attributes())
    node.until(lambda: not node.agent.not_ready())


def test_a_reason_that_comes_during_a_look_is_answered_by_another(node: Node) -> None:
    """Such as the restart of a kubelet, which makes doubtful what that look has read."""

    def composed(observation: Observation) -> list[dict[str, Any]]:
        if not node.agent.counts.looks["kubelet-restart"]:
            node.agent.wake(Reason.KUBELET_RESTART)
        return compose(observation)

    node.composed = composed
    node.policies = [policy_of("none"), policy_of("restricted")]
    node.agent.start()
    node.until(lambda: node.agent.counts.looks["kubelet-restart"] == 1)
    # Read again: the kubelet's socket is the same, so what its file says counts later.
    node.until(lambda: "kubelet configuration" in node.agent.problems.current())


def test_what_only_a_restart_told_of_is_published(node: Node) -> None:
    node.agent.start()
    node.until(lambda: node.published() == "")
    node.pods.pods = {"a": ("GPU-0",)}
    node.agent.wake(Reason.KUBELET_RESTART)
    node.until(lambda: node.published() == "GPU-0")
    node.until(lambda: node.writes() == 2)
    assert not node.agent.counts.failures


# What no file tells


def offers(node: Node) -> set[str]:
    observation = node.agent.observation
    return {use.id for use in observation.allocatable.devices} if observation else set()


def test_the_end_of_a_plugin_that_no_file_tells_is_seen_at_a_glance(make_node: MakeNode) -> None:
    node = make_node(replace(QUICK, glance_s=0.05, doubts_s=(0.01,)))
    node.pods.start()
    node.agent.start()
    node.until(lambda: node.published() == "")
    looked = node.pods.lists
    time.sleep(0.3)
    assert node.pods.lists == looked  # glances are no looks
    node.pods.offered = ["GPU-1", "GPU-2"]
    node.until(lambda: offers(node) == {"GPU-1", "GPU-2"})
    node.pods.offered = ()
    node.until(lambda: offers(node) == set())
    assert node.agent.counts.looks["allocatable"] >= 2


@pytest.mark.parametrize("folder", ["device-plugins", "plugins_registry"])
def test_a_plugins_socket_that_comes_or_goes_is_worth_glances(
    make_node: MakeNode, folder: str
) -> None:
    glances_s = (*QUICK.glances_s, 5.0, 10.0, 20.0)  # a busy machine may be late with what follows
    node = make_node(replace(QUICK, glance_s=300, glances_s=glances_s, doubts_s=(0.01,)))
    path = node.root / folder / "nic.sock"
    path.parent.mkdir(exist_ok=True)
    node.pods.start()
    node.agent.start()
    node.until(lambda: node.published() == "")
    for socket_is, offered in ((True, ["GPU-1"]), (False, ["GPU-1", "GPU-2"])):
        if socket_is:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        else:
            path.unlink()
        time.sleep(0.1)  # the kubelet notices later
        node.pods.offered = offered
        node.until(lambda offered=offered: offers(node) == set(offered))  # type: ignore[misc]


def test_a_glance_that_fails_is_the_kubelets_problem(make_node: MakeNode) -> None:
    node = make_node(replace(QUICK, glance_s=0.05))
    node.pods.start()
    node.agent.start()
    node.until(lambda: node.published() == "")
    node.pods.server.stop(0).wait()  # type: ignore[union-attr]
    node.until(lambda: "kubelet" in node.agent.not_ready())


def test_nothing_is_published_before_the_hardware_is_known(node: Node) -> None:
    known, node.hardware.latest = node.hardware.latest, None
    node.agent.start()
    node.until(lambda: "hardware" in node.agent.problems.current())
    assert node.published() is None
    node.hardware.latest = known
    node.agent.wake(Reason.HARDWARE)
    node.until(lambda: node.published() == "")


def test_gpus_that_are_all_gone_for_a_moment_stay_published(make_node: MakeNode) -> None:
    node = make_node(replace(QUICK, doubts_s=(0.02, 0.03, *[0.05] * 200)))
    node.pods.start()
    node.hold(a=("GPU-0",))
    node.agent.start()
    node.until(lambda: node.published() == "GPU-0")
    known = node.hardware.latest
    node.hardware.latest = SimpleNamespace(machine=replace(machine(), gpus=()), faults={})
    node.agent.wake(Reason.HARDWARE)
    node.until(lambda: node.agent.counts.doubted >= 2)
    node.hardware.latest = known
    before = node.agent.observed_at
    node.agent.wake(Reason.HARDWARE)
    node.until(lambda: node.agent.observed_at != before)
    assert node.writes() == 1


def test_an_unknown_policy_is_not_ready_and_asked_again(node: Node) -> None:
    node.policies = [PolicyError("config.yaml", "no such file"), Policy(cpu_manager="static")]
    node.agent.start()
    node.until(lambda: node.published() == "")
    assert node.policy_published() == "unknown"
    assert "no such file" in node.agent.problems.current()["policy"].words
    node.agent.wake(Reason.POLL)
    node.until(lambda: node.policy_published() == "none")
    assert node.agent.problems.current() == {}


def test_a_changed_policy_counts_once_the_kubelet_has_restarted(node: Node) -> None:
    node.policies = [Policy()]
    node.agent.start()
    node.until(lambda: node.published() == "")
    assert node.policy_published() == "none"
    changed = replace(Policy(), topology_manager=type(Policy().topology_manager)("restricted"))
    node.policies = [changed]
    node.agent.wake(Reason.KUBELET_CONFIGURATION)
    node.until(lambda: node.agent.counts.looks["kubelet-configuration"] == 1)
    time.sleep(0.1)
    assert node.policy_published() == "none"
    node.pods.stop()
    node.pods.start()
    node.until(lambda: node.policy_published() == "restricted")


@pytest.mark.parametrize(
    ("published", "file", "expected"),
    [
        pytest.param("restricted", "restricted", "restricted", id="it says what is published"),
        pytest.param("restricted", "best-effort", "restricted", id="what is published stays"),
        pytest.param(None, "best-effort", "unknown", id="nothing is published: it is not known"),
    ],
)
def test_a_file_that_changed_after_the_kubelets_start_is_not_what_it_works_by(
    node: Node, published: str | None, file: str, expected: str
) -> None:
    """Also over a restart of ours: the kubelet reads its file when it starts."""
    node.changed = time.time() + 60
    node.policies = [policy_of(file)]
    node.published_policy = policy_of(published) if published else None
    node.agent.start()
    node.until(lambda: node.published() == "")
    assert node.policy_published() == expected
    problems = node.agent.problems.current()
    assert ("policy" in problems) == (expected == "unknown")
    assert ("kubelet configuration" in problems) == (expected == "restricted" != file)
    assert ("policy" in node.agent.not_ready()) == (expected == "unknown")
    node.changed = time.time() - 60
    node.pods.stop()
    node.pods.start()
    node.until(lambda: node.policy_published() == file)
    node.until(lambda: not node.agent.problems.current())


def policy_of(word: str) -> Policy:
    return Policy(topology_manager=TopologyManagerPolicy(word), max_numa_nodes=None)


@pytest.mark.parametrize("fault", ["gone", "hangs"])
def test_a_kubelet_that_does_not_answer_makes_the_object_say_since_when(
    make_node: MakeNode, fault: str
) -> None:
    node = make_node(replace(QUICK, stale_s=0.5))
    node.agent.kubelet = node.agent.kubelet._replace(timeout_s=0.2)
    node.pods.start()
    node.hold(a=("GPU-0",))
    node.agent.start()
    node.until(lambda: node.published() == "GPU-0")
    if fault == "gone":
        node.pods.stop()
    else:
        node.pods.hang()
    node.agent.wake(Reason.POLL)
    node.until(lambda: "staleSince" in node.attributes())
    assert node.attributes()["used"] == "GPU-0"  # what was last known, and no less
    assert "kubelet" in node.agent.not_ready()
    node.until(lambda: node.writes() == 2)
    if fault == "gone":
        node.pods.start()
    else:
        node.pods.hang_ends.set()
    node.until(lambda: "staleSince" not in node.attributes())
    node.until(lambda: not node.agent.not_ready())
    assert node.attributes()["used"] == "GPU-0"


def test_a_broken_state_file_is_said_and_hinders_nothing(node: Node) -> None:
    (node.root / "cpu_manager_state").write_text("{")
    node.agent.start()
    node.until(lambda: node.published() == "")
    assert "cpu_manager_state" in node.agent.problems.current()["state files"].words
    (node.root / "cpu_manager_state").write_text('{"policyName":"none","defaultCpuSet":""}')
    node.until(lambda: node.agent.problems.current() == {})


def test_each_re_reading_is_one_request(make_node: MakeNode, cluster: RealApiServer) -> None:
    """So an idle hour is six, with `nrt.reread` at ten minutes."""
    cluster.create_node("idle")
    with FaultyProxy(cluster) as proxy:
        api = ApiServer(Access(server=proxy.url, token=cluster.token))
        sink = ApiSink(api, node="idle", takeover_after_s=180)
        node = make_node(replace(QUICK, reread_s=0.02), sink)

        problems = node.agent.problems
        own_node = AskedNode(parts.own_node(api, "idle"), socket=node.socket, problems=problems)
        node.agent._own_node = own_node
        node.pods.start()
        node.agent.start()
        node.until(lambda: node.writes() == 1)
        version = cluster.get(NRT)["metadata"]["resourceVersion"]

        def is_cached() -> bool:
            answer = cluster.request("GET", f"{NRT}?resourceVersion=0")
            return answer.status == 200 and answer.body["metadata"]["resourceVersion"] == version

        node.until(is_cached)  # what is cached is late, and would be asked for once more
        rereads = node.agent._rereads
        node.until(lambda: node.agent._rereads > rereads)
        rereads, requests = node.agent._rereads, len(proxy.seen)
        node.until(lambda: node.agent._rereads >= rereads + 30)
        node.agent.stop()
        # One is under way when the counting begins, and one of the Node may wait for its look.
        assert len(proxy.seen) - requests <= node.agent._rereads - rereads + 2
        assert {method for method, _, _ in proxy.seen[requests:]} == {"GET"}
        api.close()


def test_an_api_server_that_is_away_at_a_re_reading_is_a_problem_until_it_is_back(
    make_node: MakeNode, cluster: RealApiServer
) -> None:
    """Though nothing is to be written, and looks find that nothing has changed."""
    with FaultyProxy(cluster) as proxy:
        api = ApiServer(Access(server=proxy.url, token=cluster.token))
        sink = ApiSink(api, node="n", takeover_after_s=180, owner=False)
        node = make_node(replace(QUICK, reread_s=0.2), sink)
        node.pods.start()
        node.agent.start()
        node.until(lambda: node.agent._rereads > 0)
        proxy.then["GET"] = [Fault(503)] * 1000
        node.until(lambda: "API server" in node.agent.not_ready())
        for looks in (1, 2, 3):  # the third begins when the second is over
            node.agent.wake(Reason.STATE_FILE)
            node.until(
                lambda n=looks: node.agent.counts.looks["state-file"] == n  # type: ignore[misc]
            )
        assert "API server" in node.agent.not_ready()
        proxy.then["GET"] = []
        node.until(lambda: not node.agent.not_ready())
        node.agent.stop()
        api.close()


def test_reasons_from_many_threads_are_not_lost(node: Node) -> None:
    node.agent.start()
    node.until(lambda: node.published() == "")
    for number in range(10):
        node.pods.pods = {"a": (f"GPU-{number % 4}",)}
        threads = [
            threading.Thread(target=node.agent.wake, args=(reason,))
            for reason in (Reason.ALLOCATE, Reason.PODS, Reason.HARDWARE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        node.until(lambda n=number: node.published() == f"GPU-{n % 4}")  # type: ignore[misc]


def test_stopping_before_anything_is_there_is_quick(make_node: MakeNode) -> None:
    node = make_node()
    node.agent.start()
    start = time.monotonic()
    node.agent.stop()
    assert time.monotonic() - start < 15  # seconds; a poll is after 30


def test_the_files_that_are_watched_are_the_kubelets(tmp_path: Path) -> None:
    kubelet = Kubelet(
        channel=grpc.insecure_channel("unix:/nowhere"),
        root=tmp_path,
        plugin_dir=tmp_path / "device-plugins",
        registry_dir=tmp_path / "plugins_registry",
        pod_resources_socket=tmp_path / "pod-resources" / "kubelet.sock",
        configuration=(tmp_path / "config.yaml",),
    )
    named = {str(p.relative_to(tmp_path)): reason for p, reason in kubelet.watched().items()}
    assert named == {
        "cpu_manager_state": Reason.STATE_FILE,
        "memory_manager_state": Reason.STATE_FILE,
        "device-plugins/kubelet_internal_checkpoint": Reason.STATE_FILE,
        "pod-resources/kubelet.sock": Reason.KUBELET_RESTART,
        "config.yaml": Reason.KUBELET_CONFIGURATION,
    }
    kubelet.channel.close()
