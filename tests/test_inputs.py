"""What a published value depends on: each change of it is noticed, and is one write.

The whole publisher as `rte run` makes it, beside a real kubelet's managers and a real API server.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plugin.life import DevicePlugin
from rte.agent import Reason
from rte.commands import parts
from rte.commands.publisher import Publisher
from rte.config import convert
from rte.graph.build import build
from rte.model import (
    CpuId,
    Fault,
    FaultClass,
    Faults,
    Machine,
    NumaId,
    NumaNode,
    PodName,
    base_units,
    rfc3339,
)
from rte.publish.fingerprint import fingerprint
from tests.conftest import GoProgram, StartKubelet
from tests.generated import GPU
from tests.http_faults import FaultyProxy
from tests.real_apiserver import MERGE
from tests.real_apiserver import ApiServer as RealApiServer
from tests.real_kubelet import Kubelet, numa_nodes, pod
from tests.small_machine import address, machine, slices, with_gpu
from tests.waiting import until

CRDS = Path(__file__).parents[1] / "crds"
NODES = "/api/v1/nodes/"
TOPOLOGIES = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/"
GRAPHS = "/apis/rte.dev/v1alpha1/gpufabrics/"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"
MIG = "nvidia.com/mig-1g.10gb"
NUMBERS = itertools.count()
Json = dict[str, Any]


class Seen(msgspec.Struct, frozen=True):
    machine: Machine
    faults: Faults


class Hardware:
    """What discovery would tell, as the test says."""

    def __init__(self) -> None:
        self.latest = Seen(machine(), {})
        self.subscribers: list[Callable[[Seen], None]] = []

    def subscribe(self, callback: Callable[[Seen], None]) -> None:
        self.subscribers.append(callback)
        callback(self.latest)

    def say(
        self,
        machine: Machine,
        faults: Faults | None = None,
        *,
        before_telling: Callable[[], None] = lambda: None,
    ) -> None:
        self.latest = Seen(machine, faults or {})
        before_telling()
        for callback in self.subscribers:
            callback(self.latest)


class World:
    """One node with its publisher and, where there is one, its device plugin."""

    def __init__(
        self,
        kubelet: Kubelet,
        real: RealApiServer,
        proxy: FaultyProxy,
        folder: Path,
        stack: ExitStack,
        *,
        plugs: bool,
        config: Mapping[str, Any],
        name: str | None,
    ) -> None:
        self.name = name or f"inputs-{next(NUMBERS)}"
        self.kubelet, self.real, self.proxy = kubelet, real, proxy
        self.hardware = Hardware()
        self.withheld: Mapping[str, str] = {}
        if name is None:
            real.create_node(self.name)
        kubeconfig = real.write_kubeconfig(folder / "kubeconfig", token=real.token, url=proxy.url)
        self.config = convert(
            {
                "nodeName": self.name,
                "kubelet": {
                    "rootDir": str(kubelet.root),
                    "configFile": str(kubelet.root / "config.yaml"),
                    "podsApi": False,
                    **config.get("kubelet", {}),
                },
                "api": {"kubeconfig": str(kubeconfig)},
                **{key: value for key, value in config.items() if key != "kubelet"},
            },
            "the test",
        )
        self.plugin: DevicePlugin | None = None
        if plugs:
            self.plugin = DevicePlugin(
                replace(parts.plugin_options(self.config), is_told=True),
                on_allocate=lambda: self.agent.wake(Reason.ALLOCATE),
            )
        self.publisher = Publisher(
            self.config,
            self.name,
            hardware=self.hardware,  # type: ignore[arg-type]
            graph_of=build,
            plugin=self.plugin,
            withheld=lambda: self.withheld,
            out=None,
            on_published=lambda: None,
        )
        self.agent = self.publisher.agent
        self._stack = stack

    def start(self) -> "World":
        if self.plugin is not None:
            plugin = self.plugin
            self.hardware.subscribe(lambda seen: plugin.update(seen.machine, seen.faults))
            plugin.start()
            self._stack.callback(plugin.stop)
        self.publisher.start()
        self._stack.callback(self.publisher.stop)
        self.until(lambda: self.publisher.pods.source)
        return self

    def topology(self) -> Json:
        answer = self.real.request("GET", TOPOLOGIES + self.name)
        return answer.body if answer.status == 200 else {"zones": [], "attributes": []}

    def attribute(self, name: str) -> str | None:
        found = {item["name"]: item["value"] for item in self.topology()["attributes"]}
        return found.get(name)

    def figures(self, resource: str) -> list[tuple[str, str, str]]:
        """Capacity, allocatable and available of each zone that has the resource."""
        return [
            (each["capacity"], each["allocatable"], each["available"])
            for zone in self.topology()["zones"]
            for each in zone.get("resources", ())
            if each["name"] == resource
        ]

    def until(self, holds: Callable[[], object], within_s: float = 30) -> None:
        until(
            holds,
            lambda: (self.topology(), self.agent.problems.current(), vars(self.agent.counts)),
            within_s=within_s,
        )

    def look(self) -> None:
        """Returns when another look has been published, if there was anything new."""
        looks = self.agent.counts.looks.total()
        self.agent.wake(Reason.PODS)
        self.until(lambda: self.agent.counts.looks.total() > looks)
        self.until(lambda: self.agent._busy_since is None)

    def tell_api_server(self, **allocatable: str) -> None:
        """As the kubelet does."""
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": rfc3339(time.time())}
        status = {"allocatable": allocatable, "conditions": [ready]}
        self.real.ask("PATCH", f"{NODES}{self.name}/status", {"status": status}, content_type=MERGE)

    def asked(self, what: str) -> int:
        """Requests so far whose path ends like that."""
        return sum(path.endswith(what) for _, path, _ in self.proxy.seen)

    def writes(self, of: str = "/") -> int:
        return sum(m != "GET" and path.startswith(of) for m, path, _ in self.proxy.seen)


MakeWorld = Callable[..., World]


@pytest.fixture
def world(
    kubelet: StartKubelet, apiserver: RealApiServer, tmp_path: Path, stack: ExitStack
) -> MakeWorld:
    """Makes a node, which ends with the test. Its machine has two NUMA nodes with two GPUs each."""
    apiserver.apply_files(*sorted(CRDS.glob("*/crd.yaml")))

    def made(
        kubelet_config: Mapping[str, Any] | None = None,
        *,
        plugs: bool = False,
        after: World | None = None,
        **config: Any,
    ) -> World:
        """`after` makes another process of the same node."""
        if after is not None:
            running, name = after.kubelet, after.name
        else:
            of_node = numa_nodes(cpus=2, threads=1, memory="4Gi")
            running, name = kubelet(kubelet_config or {}, machine=of_node), None
        proxy = stack.enter_context(FaultyProxy(apiserver))
        return World(
            running, apiserver, proxy, tmp_path, stack, plugs=plugs, config=config, name=name
        )

    return made


# Other objects


def test_what_schedulers_read_waits_for_no_definition_of_another_kind(
    world: MakeWorld, apiserver: RealApiServer
) -> None:
    node = world()
    apiserver.delete(f"{DEFINITIONS}gpufabrics.rte.dev")
    until(lambda: apiserver.request("GET", GRAPHS + node.name).body.get("kind") != "Status")
    try:
        node.start()
        node.until(lambda: node.topology()["zones"])
        node.until(lambda: "gpufabrics" in node.agent.not_ready().get("API server", ""))
        before = node.writes()
        node.withheld = {node.hardware.latest.machine.gpus[0].pci: "repair"}
        node.publisher.cordoned()
        node.until(lambda: "withheld" in str(node.topology()["zones"]))
        assert node.writes() == before + 1
        composed = node.agent.counts.outcomes["NodeResourceTopology", "unchanged"]
        for _ in range(10):  # of which at most a few are as late as the next try
            node.look()
        now = node.agent.counts.outcomes["NodeResourceTopology", "unchanged"]
        assert now <= composed + 3
    finally:
        apiserver.apply_files(CRDS / "gpufabric" / "crd.yaml")
    node.until(lambda: not node.agent.not_ready())
    assert apiserver.get(GRAPHS + node.name)["status"]["gpus"]


# The device plugin of this process


def test_devices_that_the_plugin_lists_later_than_a_look_are_in_the_capacity(
    world: MakeWorld,
) -> None:
    """Slices of a GPU that is sick: the kubelet offers none of them, before and after."""
    node = world(plugs=True, devices={"migStrategy": "mixed"})
    sick = {address(0): (Fault(severity=FaultClass.WITHHOLD, reason="xid-79"),)}
    node.hardware.latest = Seen(machine(), sick)
    node.start()
    node.until(lambda: node.figures(GPU) == [("2", "1", "1"), ("2", "2", "2")])
    cut = with_gpu(machine(), 0, mig_enabled=True, slices=slices(0, "1g.10gb", "1g.10gb"))
    node.hardware.say(cut, sick, before_telling=node.look)
    node.until(lambda: node.figures(MIG) == [("2", "0", "0")])
    assert node.figures(GPU) == [("1", "1", "1"), ("2", "2", "2")]


# The own Node


def test_what_the_kubelet_tells_the_api_server_after_its_restart_is_published(
    world: MakeWorld,
) -> None:
    """It does so seconds after it has made its sockets."""
    node = world({"topologyManagerPolicy": "single-numa-node"})
    node.tell_api_server(cpu="4")
    node.start()
    node.until(lambda: node.figures("cpu") == [("4", "4", "4")] * 2)
    time.sleep(1)  # what the kubelet tells is of whole seconds
    asked, looks = node.asked(NODES + node.name), node.agent.counts.looks
    node.kubelet.restart()
    # Again, though it was answered: more often than a socket's event asks for it.
    node.until(lambda: node.asked(NODES + node.name) - asked > looks["kubelet-restart"] > 0)
    node.tell_api_server(cpu="3")
    node.until(lambda: node.figures("cpu") == [("3", "3", "3")] * 2)
    node.until(lambda: not node.agent._own_node._is_due)
    asked, restarts = node.asked(NODES + node.name), looks["kubelet-restart"]
    for _ in range(3):
        node.look()
    late = looks["kubelet-restart"] - restarts  # each socket's event is one
    assert node.asked(NODES + node.name) - asked <= late


def test_a_node_that_is_not_there_yet_is_a_problem_and_awaited(world: MakeWorld) -> None:
    node = world({"topologyManagerPolicy": "single-numa-node"}, nrt={"owner": False})
    node.real.delete(NODES + node.name)
    node.start()
    node.until(lambda: "no Node of this name" in str(node.agent.problems.current().get("Node")))
    node.until(lambda: node.figures("cpu") == [("4", "4", "4")] * 2)  # the machine's
    asked = node.asked(NODES + node.name)
    for _ in range(10):
        node.look()
    assert node.asked(NODES + node.name) <= asked + 2
    node.real.create_node(node.name)
    node.tell_api_server(cpu="3")
    node.until(lambda: node.figures("cpu") == [("3", "3", "3")] * 2)
    node.until(lambda: not node.agent.problems.current())


def test_another_node_of_the_same_name_takes_over_all_objects(world: MakeWorld) -> None:
    key = "example.com/nvlink"
    labels = {"write": "node", "keys": {"topology.kubernetes.io/nvlink-group": key}}
    node = world(labels=labels)
    node.hardware.latest = Seen(machine(pairs=((0, 1),)), {})

    def owners() -> set[str]:
        found = (node.real.get(path + node.name) for path in (TOPOLOGIES, GRAPHS))
        return {o["uid"] for each in found for o in each["metadata"]["ownerReferences"]}

    def label() -> str | None:
        labels: dict[str, str] = node.real.get(NODES + node.name)["metadata"].get("labels", {})
        return labels.get(key)

    node.start()
    node.until(lambda: not node.agent.not_ready())
    for _ in range(2):
        uid = node.real.get(NODES + node.name)["metadata"]["uid"]
        node.until(lambda: label() == f"{uid[:8]}.group-0")  # noqa: B023 - called in this turn
        assert owners() == {uid}
        node.real.delete(NODES + node.name)
        node.real.create_node(node.name)
        node.real.delete(GRAPHS + node.name)  # as the garbage collector does, sooner or later
        node.kubelet.restart()
        node.until(lambda: node.real.request("GET", GRAPHS + node.name).status == 200)


# The kubelet's configuration


def test_a_configuration_that_cannot_be_read_costs_a_look_nothing(
    world: MakeWorld, tmp_path: Path
) -> None:
    """It is asked for again, and what was published, but not at every look."""
    file = tmp_path / "kubelet.yaml"
    file.write_text("[")
    node = world(kubelet={"configFile": str(file)}).start()
    node.until(lambda: "policy" in node.agent.not_ready())
    asked = node.asked(TOPOLOGIES + node.name)
    for _ in range(20):
        node.look()
    assert node.asked(TOPOLOGIES + node.name) <= asked + 4
    assert node.attribute("topologyManagerPolicy") is None
    file.write_text((node.kubelet.root / "config.yaml").read_text())
    node.kubelet.restart()
    node.until(lambda: node.attribute("topologyManagerPolicy") == "none")
    node.until(lambda: not node.agent.not_ready())


def test_a_changed_drop_in_is_said_before_the_kubelet_restarts_with_it(
    world: MakeWorld, tmp_path: Path
) -> None:
    drop_ins = tmp_path / "kubelet.conf.d"
    drop_ins.mkdir()
    node = world(kubelet={"configDir": str(drop_ins)}, nrt={"reread": "1s"}).start()
    node.until(lambda: node.attribute("topologyManagerPolicy") == "none")
    said = (node.kubelet.root / "config.yaml").read_text()
    (drop_ins / "10-numa.conf").write_text(f"{said}\ntopologyManagerPolicy: restricted\n")

    def is_said() -> bool:
        node.look()
        return "kubelet configuration" in node.agent.problems.current()

    node.until(is_said)
    assert node.attribute("topologyManagerPolicy") == "none"
    node.kubelet.restart()
    node.until(lambda: node.attribute("topologyManagerPolicy") == "restricted")
    node.until(lambda: not node.agent.problems.current())


# Hardware that changes while the kubelet runs, which goes on as at its start

STATIC = {
    "topologyManagerPolicy": "single-numa-node",
    "cpuManagerPolicy": "static",
    "memoryManagerPolicy": "Static",
}
HUGE = 2 << 20


def numa_node(number: int, **changes: Any) -> NumaNode:
    """As the kubelet's machine has it."""
    node = NumaNode(
        id=NumaId(number),
        cpus=tuple(CpuId(4 * number + n) for n in range(4)),
        memory_bytes=4 << 30,
        huge_pages={HUGE: 256},
        distance={NumaId(0): 20 - 10 * (number == 0), NumaId(1): 20 - 10 * (number == 1)},
    )
    return replace(node, **changes)


CHANGED: dict[str, tuple[tuple[NumaNode, ...], int]] = {
    "a CPU goes offline": ((numa_node(0), numa_node(1, cpus=(4, 5, 6))), 2),
    "all CPUs of a node go offline": ((numa_node(0), numa_node(1, cpus=())), 1),
    "all CPUs of the first node go offline": ((numa_node(0, cpus=()), numa_node(1)), 1),
    "a node goes": ((numa_node(0, distance={0: 10}),), 1),
    "a node of memory comes": ((numa_node(0), numa_node(1), numa_node(2, cpus=())), 2),
    "a node with CPUs comes": ((numa_node(0), numa_node(1), numa_node(2)), 3),
    "a node comes whose id no scheduler takes": ((numa_node(0), numa_node(1), numa_node(70)), 3),
    "memory comes": ((numa_node(0), numa_node(1, memory_bytes=8 << 30)), 2),
    "memory goes": ((numa_node(0), numa_node(1, memory_bytes=1 << 30)), 2),
    "huge pages come": ((numa_node(0), numa_node(1, huge_pages={HUGE: 512})), 2),
    "huge pages go": ((numa_node(0), numa_node(1, huge_pages={HUGE: 0})), 2),
    "huge pages of another size come": (
        (numa_node(0), numa_node(1, huge_pages={HUGE: 256, 1 << 30: 1})),
        2,
    ),
}


@pytest.fixture(scope="module")
def busy(
    go_program: GoProgram, apiserver: RealApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """A node with static managers and a pod that has something of each kind on each NUMA node."""
    apiserver.apply_files(*sorted(CRDS.glob("*/crd.yaml")))
    of_node = numa_nodes(cpus=4, threads=1, memory="4Gi", hugepages={"2Mi": 256})
    with ExitStack() as stack:
        kubelet = stack.enter_context(Kubelet(go_program("kubelet"), STATIC, machine=of_node))
        proxy = stack.enter_context(FaultyProxy(apiserver))
        folder = tmp_path_factory.mktemp("busy")
        config = {"nrt": {"echo": 0}}
        node = World(kubelet, apiserver, proxy, folder, stack, plugs=True, config=config, name=None)
        node.hardware.latest = Seen(two_nodes((numa_node(0), numa_node(1))), {})
        node.start()
        kubelet.wait_devices(GPU, 4)
        wanted: dict[str, str | int] = {GPU: 1, "cpu": 2, "memory": "1Gi", "hugepages-2Mi": "64Mi"}
        assert kubelet.admit(pod("busy", wanted, wanted)).admitted
        node.until(lambda: [each[2] for each in node.figures(GPU)] == ["1", "1"])
        node.until(lambda: not node.agent.not_ready())
        yield node


def two_nodes(nodes: tuple[NumaNode, ...]) -> Machine:
    """Two GPUs on each of the first two NUMA nodes."""
    return replace(machine(), numa_nodes=nodes)


UNSAID = {"a node of memory comes", "huge pages go"}
"""No zone is a node without CPUs, and what the kubelet hands out stays in the capacity."""


@pytest.mark.parametrize("change", CHANGED)
def test_numa_nodes_that_change_are_one_write_each_way(busy: World, change: str) -> None:
    nodes, zones = CHANGED[change]
    busy.look()
    before, writes = busy.topology(), busy.writes(TOPOLOGIES)
    busy.hardware.say(two_nodes(nodes))
    busy.look()
    assert busy.writes(TOPOLOGIES) == writes + (change not in UNSAID)
    of_nodes = [zone for zone in busy.topology()["zones"] if zone["type"] == "Node"]
    assert [zone["name"] for zone in of_nodes] == [f"node-{n}" for n in range(zones)]
    for each in (each for zone in of_nodes for each in zone["resources"]):
        figures = [base_units(each[key]) for key in ("capacity", "allocatable", "available")]
        assert figures == sorted(figures, reverse=True), each
        assert figures[2] >= 0
    busy.hardware.say(two_nodes((numa_node(0), numa_node(1))))
    busy.look()
    assert busy.topology()["zones"] == before["zones"]
    assert busy.topology()["attributes"] == before["attributes"]
    assert busy.writes(TOPOLOGIES) == writes + 2 * (change not in UNSAID)


# The pods


@pytest.mark.parametrize("asks_kubelet", [True, False])
def test_another_process_of_ours_waits_for_the_pods_and_writes_nothing(
    world: MakeWorld, asks_kubelet: bool
) -> None:
    """A pod that has ended and is still there is told of by nobody else."""
    of_kubelet = {"podsApi": asks_kubelet}
    node = world(kubelet=of_kubelet)
    for name in ("ended", "runs"):
        body = pod(name, {"cpu": 1, "memory": "1Mi"})
        spec = {**body["spec"], "nodeName": node.name}
        there = node.real.create("/api/v1/namespaces/default/pods", {**body, "spec": spec})
        body["metadata"]["uid"] = there["metadata"]["uid"]
        assert node.kubelet.admit(body).admitted
        phase = {"ended": "Succeeded"}.get(name, "Running")
        path = f"/api/v1/namespaces/default/pods/{name}/status"
        node.real.ask("PATCH", path, {"status": {"phase": phase}}, content_type=MERGE)
    node.kubelet.finish("ended")
    node.start()
    both = fingerprint(PodName(namespace="default", name=name) for name in ("ended", "runs"))
    node.until(lambda: node.attribute("nodeTopologyPodsFingerprint") == both)
    node.publisher.stop()
    before = node.topology()
    later = world(kubelet=of_kubelet, after=node).start()
    later.until(lambda: not later.agent.not_ready())
    later.look()
    assert later.topology() == before
    assert later.writes() == 0
    for name in ("ended", "runs"):
        node.real.delete(f"/api/v1/namespaces/default/pods/{name}?gracePeriodSeconds=0")


def test_two_processes_of_ours_on_one_node_write_each_change_once(world: MakeWorld) -> None:
    one = world(plugs=True, nrt={"echo": 0}).start()
    one.kubelet.wait_devices(GPU, 4)
    one.until(lambda: one.figures(GPU) == [("2", "2", "2")] * 2)
    other = world(after=one, nrt={"echo": 0}).start()
    other.until(lambda: not other.agent.not_ready())
    generation = one.topology()["metadata"]["generation"]
    for name, left in (("a", 3), ("b", 2), ("c", 1)):
        assert one.kubelet.admit(pod(name, {GPU: 1})).admitted
        one.until(lambda: sum(int(zone[2]) for zone in one.figures(GPU)) == left)  # noqa: B023
        for node in (one, other):
            node.look()
        generation += 1
        assert one.topology()["metadata"]["generation"] == generation
    assert not one.agent.problems.current()
    assert not other.agent.problems.current()
