"""A real kube-scheduler with NodeResourceTopologyMatch, driven by what we publish.

A scheduler is right when a pod lands only where the kubelet then admits it, and when each pod that
the kubelet would admit is placed. What an object of this API cannot tell it is a row in
docs/scheduler.md, and a case of `EXCEPTIONS` here.
"""

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rte.agent import Pace
from rte.kubelet.admission import Admitted
from rte.model import Machine
from rte.publish.fingerprint import InformerMode
from rte.publish.nrt import FingerprintMethod
from rte.sources.recorded import read_recorded
from tests.conftest import StartKubelet, StartScheduler
from tests.machines.description import FOLDER
from tests.real_apiserver import ApiServer
from tests.real_kubelet import Json, pod
from tests.real_scheduler import Scheduler
from tests.scheduling import (
    GPU,
    NIC,
    Cluster,
    ModelNode,
    RealNode,
    fingerprint_of,
    model_node,
)

CRD = Path(__file__).parents[1] / "crds" / "noderesourcetopology" / "crd.yaml"
SINGLE = "single-numa-node"
PAGES = "hugepages-2Mi"


@pytest.fixture
def cluster(apiserver: ApiServer) -> Cluster:
    apiserver.apply_files(CRD)
    return Cluster(apiserver, "scheduled")


@pytest.fixture
def is_long(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("long"))


def machine(name: str) -> Machine:
    """A recorded machine, with 16 GiB of huge pages on every NUMA node with CPUs."""
    found = read_recorded(FOLDER / name)
    return replace(
        found,
        numa_nodes=tuple(
            replace(node, huge_pages={2 << 20: 8192} if node.cpus else {})
            for node in found.numa_nodes
        ),
    )


# Nodes and pods by chance


class Combination(NamedTuple):
    policy: str
    scope: str
    cpus: str
    memory: str
    machine: str

    @property
    def config(self) -> Json:
        found: Json = {
            "topologyManagerPolicy": self.policy,
            "topologyManagerScope": self.scope,
            "cpuManagerPolicy": self.cpus,
            "memoryManagerPolicy": self.memory,
            "topologyManagerPolicyOptions": {"max-allowable-numa-nodes": "64"},
        }
        if self.cpus == "static" and self.scope == "pod":
            found["cpuManagerPolicyOptions"] = {"full-pcpus-only": "true"}
        return found


MACHINES = (
    "hgx-h100-oci",
    "hgx-a100-oci-bm4",
    "numa-ids-0-2",
    "dgx1-v100",
    "one-lost",
    "h100-snc4",
    "gb200-tray-cdmm",
    "pcie-a100-pairs",
    "numa0-offline",
    "vm-all-minus-one",
)


def combinations(machines: int) -> Iterator[Combination]:
    """Each combination of policies on so many machines, which take turns."""
    number = 0
    for policy in (SINGLE, "restricted", "best-effort", "none"):
        for scope in ("container", "pod"):
            for cpus in ("none", "static"):
                for memory in ("None", "Static"):
                    for _ in range(machines):
                        name = MACHINES[number % len(MACHINES)]
                        number += 1
                        yield Combination(policy, scope, cpus, memory, name)


def plain_pod(node: ModelNode, chance: random.Random, name: str) -> Json:
    """A pod of containers that a NUMA node may or may not have room for.

    Guaranteed with whole cores, Burstable or BestEffort; without init containers.
    """
    cpus = max(len(n.cpus) for n in node.machine.numa_nodes)
    memory = max(n.memory_bytes or 0 for n in node.machine.numa_nodes if n.cpus)
    gpus = max(len(node.state.devices.get(GPU, ())), 1)
    kind = chance.choice(["Guaranteed", "Guaranteed", "Guaranteed", "Burstable", "BestEffort"])

    def container() -> dict[str, str | int]:
        wanted: dict[str, str | int] = {}
        if chance.random() < 0.7:
            wanted[GPU] = chance.choice([1, 1, 2, max(gpus // 2, 1), gpus // 2 + 1])
        if chance.random() < 0.2 and NIC in node.state.devices:
            wanted[NIC] = 1
        if kind != "BestEffort":
            share = chance.choice([0, 0, 0.25, 0.5, 0.9, 1.1])
            wanted["cpu"] = max(int(cpus * share) // 2 * 2, 2)
            share = chance.choice([0, 0, 0.3, 0.6, 1.1])
            wanted["memory"] = max(int(memory * share) >> 20, 512) << 20
            if chance.random() < 0.2:
                wanted[PAGES] = chance.choice(["64Mi", "9Gi", "20Gi"])
        return wanted

    made = pod(name, *(container() for _ in range(chance.choice([1, 1, 2]))))
    if kind == "Burstable":
        for each in made["spec"]["containers"]:
            del each["resources"]["limits"]["cpu"]
    return made


class Tally:
    """What the scheduler and the kubelet said of the same pods."""

    def __init__(self) -> None:
        self.placed = 0
        self.refused = 0
        self.exceptions: dict[str, int] = {}

    def count(self, node: ModelNode, pod: Json, *, placed: bool, cluster: Cluster) -> bool:
        """Whether the pod runs now. Fails where the two differ and no exception says why."""
        answer = node.admit(pod)
        admitted = isinstance(answer, Admitted)
        name = pod["metadata"]["name"]
        if placed == admitted:
            self.placed += placed
            self.refused += not placed
            return placed
        about = (
            f"{node.name}: placed {placed}, admitted {admitted}: {answer}\n"
            f"{pod['spec']}\n{node.state.policy}\n{cluster.refusal(name)}\n{node.live()['zones']}"
        )
        assert placed, about
        exception = unfiltered(node)
        assert exception is not None, about
        self.exceptions[exception] = self.exceptions.get(exception, 0) + 1
        return False


def unfiltered(node: ModelNode) -> str | None:
    """The exception that lets a pod through to this node though its kubelet may refuse it."""
    policy = node.state.policy
    if policy.topology_manager.value == SINGLE:
        return None
    if policy.topology_manager.value == "restricted":
        return "restricted"
    return "memory group" if policy.memory_manager == "Static" else None


def play(
    cluster: Cluster,
    scheduler: Scheduler,
    nodes: list[ModelNode],
    *,
    rounds: int,
    settle: Callable[[dict[str, tuple[ModelNode, Json]]], Any] = lambda _: None,
) -> Tally:
    """Rounds of one pod for each node; some go again. `settle` is given those that are refused
    though their kubelets would admit them, and may wait until they are placed."""
    chance = random.Random(20261129)
    running: dict[str, list[str]] = {node.name: [] for node in nodes}
    tally = Tally()
    for number in range(rounds):
        asked = {}
        for index, node in enumerate(nodes):
            name = f"p{number}-{index}"
            asked[name] = (node, plain_pod(node, chance, name))
            cluster.create(asked[name][1], scheduler.name, node=node.name)
        said = cluster.verdicts(scheduler, asked)
        late = {
            name: (node, made)
            for name, (node, made) in asked.items()
            if said[name] is None and node.would_admit(made)
        }
        if late:
            settle(late)
            said |= cluster.verdicts(scheduler, late)
        for name, (node, made) in asked.items():
            if tally.count(node, made, placed=said[name] is not None, cluster=cluster):
                cluster.set_phase(name, "Running")
                running[node.name].append(name)
            else:
                cluster.delete(name)
        for node in nodes:
            held = running[node.name]
            while held and chance.random() < len(held) / 6:
                gone = held.pop(chance.randrange(len(held)))
                cluster.delete(gone)
                node.remove(gone)
            node.publish()
    return tally


def test_pods_land_only_where_the_kubelet_admits_them_and_all_that_it_admits_are_placed(
    cluster: Cluster, scheduler: StartScheduler, is_long: bool
) -> None:
    nodes = [
        model_node(cluster, f"{cluster.namespace}-{i}", machine(combination.machine), combination.config)
        for i, combination in enumerate(combinations(3 if is_long else 1))
    ]
    for node in nodes:
        node.publish()
    tally = play(cluster, scheduler(), nodes, rounds=25 if is_long else 8)
    print(vars(tally))
    assert tally.placed > 2 * len(nodes)
    assert tally.refused > 2 * len(nodes)
    assert set(tally.exceptions) == {"restricted", "memory group"}


# The fingerprint


CHECK = re.compile(
    r'"podset fingerprint check".* node="(?P<node>[^"]+)".*'
    r' expected="(?P<expected>\w+)" computed="(?P<computed>\w+)"'
)

# Pods and their phases on one node: name, phase, then what `pod` takes.
Told = tuple[str, str, Json]
HELD: Mapping[str, list[Told]] = {
    "GPUs": [("a", "Running", pod("a", {GPU: 2}))],
    "pending": [
        ("a", "Running", pod("a", {GPU: 1})),
        ("b", "Pending", pod("b", {GPU: 1, "cpu": 2, "memory": "1Gi"})),
    ],
    "completed": [
        ("a", "Succeeded", pod("a", {GPU: 1})),
        ("b", "Failed", pod("b", {"cpu": 2, "memory": "1Gi"})),
        ("c", "Running", pod("c", {"cpu": 2, "memory": "1Gi"})),
    ],
    "shared CPUs": [
        ("a", "Running", pod("a", {"cpu": "1500m", "memory": "1Gi"})),
        ("b", "Running", pod("b", {GPU: 1})),
    ],
    "Burstable": [
        ("a", "Running", pod("a", {"cpu": 2})),
        ("b", "Running", pod("b", {"memory": "1Gi", NIC: 1})),
        ("c", "Running", pod("c", {})),
    ],
    "without topology": [
        ("a", "Running", pod("a", {"example.com/plain": 1})),
        ("b", "Running", pod("b", {GPU: 1})),
    ],
    "excluded": [("a", "Running", pod("a", {NIC: 1})), ("b", "Running", pod("b", {}))],
    "init container": [
        ("a", "Running", pod("a", {}, init=[{GPU: 1}])),
        ("b", "Running", pod("b", {"cpu": 2, "memory": "1Gi"})),
    ],
}


@pytest.mark.parametrize("mode", list(InformerMode))
def test_the_fingerprint_is_the_one_that_the_scheduler_computes_from_the_object(
    cluster: Cluster, scheduler: StartScheduler, mode: InformerMode
) -> None:
    """Pods of another scheduler make a node unusable until an object with the fingerprint comes."""
    nodes = {
        f"{cluster.namespace}-{number}": (
            model_node(
                cluster,
                f"{cluster.namespace}-{number}",
                machine("hgx-h100-oci"),
                {"topologyManagerPolicy": SINGLE, "cpuManagerPolicy": "static"},
                method=method,
                informer_mode=mode,
                exclude=(NIC,) if case == "excluded" else (),
            ),
            case,
        )
        for number, (case, method) in enumerate(
            (case, method) for case in HELD for method in FingerprintMethod
        )
    }
    wrong = "completed"  # where the modes differ
    other = InformerMode.SHARED if mode is InformerMode.DEDICATED else InformerMode.DEDICATED
    mistaken = f"{cluster.namespace}-mistaken"
    nodes[mistaken] = (
        model_node(
            cluster,
            mistaken,
            machine("hgx-h100-oci"),
            {"topologyManagerPolicy": SINGLE, "cpuManagerPolicy": "static"},
            informer_mode=other,
        ),
        wrong,
    )
    for node, _ in nodes.values():
        node.publish()
    started = scheduler(resync_s=1, cache={"informerMode": mode.value}, verbosity=4)
    for number, (node, case) in enumerate(nodes.values()):
        for name, phase, made in HELD[case]:
            made = {**made, "metadata": {"name": f"{name}-{number}"}}
            cluster.bind(made, node.name)
            if phase != "Pending":
                cluster.set_phase(f"{name}-{number}", phase)
            if phase in ("Pending", "Running"):
                assert isinstance(node.admit(made), Admitted)
        node.publish()
    right = {name for name in nodes if name != mistaken}

    said = {name: fingerprint_of(node.live()) for name, (node, _) in nodes.items()}

    def last_checks() -> dict[str, str] | None:
        """What it computed last for each node, once that was for the object as it is now."""
        checks = {m["node"]: m for m in CHECK.finditer(started.log()) if m["node"] in nodes}
        if len(checks) < len(nodes) or any(said[n] != m["expected"] for n, m in checks.items()):
            return None
        return {name: check["computed"] for name, check in checks.items()}

    computed = started.wait(last_checks, "not every object was looked at", 20)
    differ = {name: case for name, (_, case) in nodes.items() if computed[name] != said[name]}
    assert differ == {mistaken: wrong}
    started.wait_log("flushing")
    # The next pods are placed where the object was taken in, and nowhere else.
    for number, name in enumerate(nodes):
        cluster.create(pod(f"next-{number}", {GPU: 1}), started.name, node=name)
    names = [f"next-{number}" for number in range(len(nodes))]
    placed = cluster.verdicts(started, names)
    assert {node for node in placed.values() if node is not None} == right
    assert "invalid node topology data" in cluster.refusal(names[list(nodes).index(mistaken)])


# The real kubelet's managers, our plugin, our publisher


STATIC = {
    "topologyManagerPolicy": SINGLE,
    "cpuManagerPolicy": "static",
    "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
    "memoryManagerPolicy": "Static",
}
RESYNC_S = 1
# As in use, with an echo that fits the resync period of these schedulers.
PACE = Pace(echo_s=1.2 * RESYNC_S, poll_s=60)

StartNode = Callable[..., RealNode]


@pytest.fixture
def real_node(cluster: Cluster, kubelet: StartKubelet) -> Iterator[StartNode]:
    nodes: list[RealNode] = []

    def start(recorded: str, config: Json, pace: Pace = PACE, **options: Any) -> RealNode:
        name = f"{cluster.namespace}-{len(nodes)}"
        node = RealNode(name, cluster, kubelet, machine(recorded), config, pace, options)
        nodes.append(node)
        node.start()
        return node

    yield start
    for node in nodes:
        node.stop()


@pytest.mark.parametrize("waits_for", ["a release", "an assumed pod"])
def test_a_pod_that_waits_is_placed_within_two_resync_periods(
    cluster: Cluster, scheduler: StartScheduler, real_node: StartNode, waits_for: str
) -> None:
    node = real_node("hgx-h100-oci", STATIC)
    started = scheduler(resync_s=RESYNC_S)
    names = ["a", "b"] if waits_for == "a release" else ["a"]
    # A node without any running pod is never taken in: a DaemonSet's pod is always there.
    running = ["daemon"]
    daemon = pod("daemon", {"cpu": 2, "memory": "1Gi"})
    cluster.create(daemon, started.name, node=node.name)
    cluster.wait_placed(started, running, within_s=10)
    assert node.start_pod(daemon).admitted
    for name in names:
        made = pod(name, {GPU: 4, "cpu": 2, "memory": "1Gi"})
        cluster.create(made, started.name)
        cluster.wait_placed(started, [name], within_s=15)
        assert node.start_pod(made).admitted
        running.append(name)
        node.until_told(*running)
    waiting = pod("waiting", {GPU: 4, "cpu": 2, "memory": "1Gi"})
    cluster.create(waiting, started.name)
    assert cluster.verdicts(started, ["waiting"]) == {"waiting": None}
    released = time.monotonic()
    if waits_for == "a release":
        time.sleep(2 * RESYNC_S)
        released = time.monotonic()
        node.end_pod("a")
    placed = cluster.wait_placed(started, ["waiting"], within_s=15)
    print(waits_for, placed["waiting"] - released)
    assert node.start_pod(waiting).admitted
    assert placed["waiting"] - released < 2 * RESYNC_S + 0.5
