"""A real kube-scheduler with NodeResourceTopologyMatch, driven by what we publish.

A scheduler is right when a pod lands only where the kubelet then admits it, and when each pod that
the kubelet would admit is placed. What an object of this API cannot tell it is a row in
docs/scheduler.md, a case of tests/test_scheduler_limits.py, and all that may differ here.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest

from rte.kubelet.admission import Admitted
from rte.model import CpuId, Machine, NumaId, NumaNode
from rte.pacer import Pace
from rte.publish.fingerprint import InformerMode
from rte.publish.nrt import Detail, FingerprintMethod
from rte.sources.recorded import read_recorded
from tests.chance import OVERHEAD, RUNTIME_CLASS, a_pod
from tests.chance import node as a_node
from tests.conftest import GoProgram, StartKubelet, StartScheduler
from tests.machines.description import FOLDER
from tests.real_apiserver import MERGE, ApiServer
from tests.real_kubelet import Json, pod
from tests.real_scheduler import Scheduler, SchedulerError
from tests.scheduling import (
    CRD,
    GPU,
    NIC,
    Cluster,
    ModelNode,
    RealNode,
    advertised,
    fingerprint_of,
    model_node,
    with_runtime_class,
)
from tests.stopwatch import Stopwatch
from tests.topology_match import Seen, places, why

SINGLE = "single-numa-node"
PAGES = "hugepages-2Mi"
RESYNC_S = 1
ECHO_S = RESYNC_S + 1.0  # as in use: a scheduler may be so late
MEMORY_ONLY = "a memory expander"


@pytest.fixture
def cluster(apiserver: ApiServer) -> Iterator[Cluster]:
    apiserver.apply_files(CRD)
    cluster = Cluster(apiserver, "scheduled")
    yield cluster
    cluster.close()


@pytest.fixture
def is_long(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("long"))


@cache
def machine(name: str) -> Machine:
    """A recorded machine, with 16 GiB of huge pages on every NUMA node with CPUs."""
    if name == MEMORY_ONLY:
        base = machine("numa-ids-0-2")
        expander = NumaNode(id=NumaId(5), cpus=(), memory_bytes=64 << 30, huge_pages={2 << 20: 0})
        return replace(base, numa_nodes=(*base.numa_nodes, expander))
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
    MEMORY_ONLY,
)
# Of more NUMA nodes than the Memory Manager can combine.
MANY_NODES = ("gb200-tray", "gh200-quad")


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
    for name in MANY_NODES:
        yield Combination(SINGLE, "container", "static", "None", name)


class Room(NamedTuple):
    """What the largest NUMA node of a machine has, and the whole machine's devices."""

    cpus: int
    memory: int
    gpus: int
    nics: int


def room(machine: Machine, devices: Mapping[str, Collection[str]]) -> Room:
    return Room(
        cpus=max(len(node.cpus) for node in machine.numa_nodes),
        memory=max(node.memory_bytes or 0 for node in machine.numa_nodes if node.cpus),
        gpus=len(devices.get(GPU, ())),
        nics=len(devices.get(NIC, ())),
    )


def pod_for(chance: random.Random, node: ModelNode, name: str) -> Json:
    return plain_pod(room(node.machine, node.state.devices), chance, name)


def plain_pod(most: Room, chance: random.Random, name: str) -> Json:
    """A pod of containers that a NUMA node may or may not have room for.

    Guaranteed with whole cores, Burstable or BestEffort; without init containers.
    """
    kind = chance.choice(["Guaranteed", "Guaranteed", "Guaranteed", "Burstable", "BestEffort"])
    count = chance.choice([1, 1, 2])
    made = pod(name, *(container(most, chance, kind) for _ in range(count)))
    if kind == "Burstable":
        for each in made["spec"]["containers"]:
            del each["resources"]["limits"]["cpu"]
    return made


def container(most: Room, chance: random.Random, kind: str) -> dict[str, str | int]:
    wanted: dict[str, str | int] = {}
    if chance.random() < 0.7:
        half = max(most.gpus // 2, 1)
        wanted[GPU] = chance.choice([1, 1, 2, half, half + 1])
    if chance.random() < 0.2 and most.nics:
        wanted[NIC] = 1
    if kind != "BestEffort":
        share = chance.choice([0, 0, 0.25, 0.5, 0.9, 1.1])
        wanted["cpu"] = max(int(most.cpus * share) // 2 * 2, 2)
        share = chance.choice([0, 0, 0.3, 0.6, 1.1])
        wanted["memory"] = max(int(most.memory * share) >> 20, 512) << 20
        if chance.random() < 0.2:
            wanted[PAGES] = chance.choice(["64Mi", "9Gi", "20Gi"])
    return wanted


class Tally:
    """What the scheduler and the kubelet said of the same pods."""

    def __init__(self) -> None:
        self.placed = 0
        self.refused = 0
        self.limits = Counter[str]()

    def count(self, node: ModelNode, pod: Json, *, placed: bool, cluster: Cluster) -> bool:
        """Whether the pod runs now. Fails where the scheduler decides otherwise than its model,
        and where the two differ and none of the limits explains it."""
        seen, state, spec = node.seen(node.live()), node.state, node.spec(pod)
        answer = node.admit(pod)
        admitted = isinstance(answer, Admitted)
        name = pod["metadata"]["name"]
        about = (
            f"{node.name}: placed {placed}, admitted {admitted}: {answer}\n{pod['spec']}\n"
            f"{state.policy}\n{cluster.refusal(name)}\n{seen}"
        )
        assert places(seen, spec) == placed, about
        if placed == admitted:
            self.placed += placed
            self.refused += not placed
            return placed
        limits = why(seen, state, spec)
        assert limits is not None, about
        self.limits.update(limits)
        if admitted:
            node.remove(name)
        return False


Settle = Callable[[dict[str, tuple[ModelNode, Json]]], None]
"""Waits for pods that are refused though the scheduler is to place them."""


def play(
    cluster: Cluster,
    scheduler: Scheduler,
    nodes: list[ModelNode],
    *,
    rounds: int,
    make: Callable[[random.Random, ModelNode, str], Json] = pod_for,
    settle: Settle = lambda _: None,
) -> Tally:
    """Rounds of one pod for each node; some go again. `settle` is given those that are refused
    though the object says that they fit, and may wait until they are placed."""
    chance = random.Random(20261129)
    running: dict[str, list[str]] = {node.name: [] for node in nodes}
    tally = Tally()
    for number in range(rounds):
        asked = {}
        for index, node in enumerate(nodes):
            name = f"p{number}-{index}"
            asked[name] = (node, make(chance, node, name))
            cluster.create(asked[name][1], scheduler.name, node=node.name)
        said = cluster.verdicts(scheduler, asked)
        late = {
            name: (node, made)
            for name, (node, made) in asked.items()
            if said[name] is None and places(node.seen(node.live()), node.spec(made))
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


def nodes_of(cluster: Cluster, wanted: Iterable[Combination]) -> list[ModelNode]:
    nodes = [
        model_node(cluster, f"{cluster.namespace}-{i}", machine(of.machine), of.config)
        for i, of in enumerate(wanted)
    ]
    for node in nodes:
        node.publish()
    return nodes


def test_pods_land_only_where_the_kubelet_admits_them_and_all_that_it_admits_are_placed(
    cluster: Cluster, scheduler: StartScheduler, is_long: bool
) -> None:
    nodes = nodes_of(cluster, combinations(3 if is_long else 1))
    tally = play(cluster, scheduler(), nodes, rounds=25 if is_long else 3)
    print(vars(tally))
    assert min(tally.placed, tally.refused) > len(nodes) / 2
    assert set(tally.limits) <= {"restricted", "memory group", "node without CPUs"}


def test_pods_that_may_go_anywhere_are_refused_only_where_no_kubelet_would_admit_them(
    cluster: Cluster, scheduler: StartScheduler, is_long: bool
) -> None:
    wanted = [of for of in combinations(1) if of.policy == SINGLE and of.machine != MEMORY_ONLY]
    nodes = {node.name: node for node in nodes_of(cluster, wanted)}
    chance = random.Random(20261129)
    started = scheduler()
    running: dict[str, ModelNode] = {}
    refused = 0
    for number in range(300 if is_long else 30):
        like = nodes[chance.choice(sorted(nodes))]
        name = f"p{number}"
        made = plain_pod(room(like.machine, like.state.devices), chance, name)
        cluster.create(made, started.name)
        chosen = cluster.verdicts(started, [name])[name]
        if chosen is None:
            assert [node.name for node in nodes.values() if node.would_admit(made)] == []
            refused += 1
            cluster.delete(name)
            continue
        node = running[name] = nodes[chosen]
        assert isinstance(node.admit(made), Admitted), made["spec"]
        cluster.set_phase(name, "Running")
        node.publish()
        if chance.random() < len(running) / 80:
            gone = chance.choice(sorted(running))
            cluster.delete(gone)
            running[gone].remove(gone)
            running.pop(gone).publish()
    assert len({node.name for node in running.values()}) > len(nodes) // 2
    assert refused > 2, refused


@pytest.mark.parametrize("resync_s", [0, RESYNC_S])
def test_what_an_object_cannot_tell_is_all_that_differs(
    cluster: Cluster, scheduler: StartScheduler, is_long: bool, resync_s: int
) -> None:
    """Of small nodes and pods by chance, with init containers, sidecars, devices of any kind."""
    chance = random.Random(f"{resync_s} {is_long}")
    with_runtime_class(cluster.real, RUNTIME_CLASS, OVERHEAD)
    nodes = []
    for number in range(80 if is_long else 32):
        name = f"{cluster.namespace}-{number}"
        made = a_node(chance, name)
        nodes.append(model_node(cluster, name, made.machine, {}, state=made.state))
        nodes[-1].publish()
    started = scheduler(resync_s=resync_s)
    settle = until_taken_in(cluster, started, nodes, [])
    rounds = 20 if is_long else 4
    tally = play(cluster, started, nodes, rounds=rounds, make=any_pod, settle=settle)
    print(vars(tally))
    assert min(tally.placed, tally.refused) > len(nodes) / 2
    assert tally.limits


def any_pod(chance: random.Random, node: ModelNode, name: str) -> Json:
    return a_pod(chance, node.state, name)


def test_no_node_and_no_pod_by_chance_differ_for_a_reason_that_is_not_known(is_long: bool) -> None:
    """The same between the two models, of which the plugin's is held to the real one above."""
    limits, count = Counter[str](), 0
    for seed in range(4000 if is_long else 150):
        chance = random.Random(seed)
        node = a_node(chance, "n")
        for number in range(30):
            made = a_pod(chance, node.state, f"p{number}")
            state, seen, spec = node.state, node.seen(), node.spec(made)
            admitted = isinstance(node.admit(made), Admitted)
            count += 1
            if admitted != places(seen, spec):
                found = why(seen, state, spec)
                assert found is not None, (seed, number, state.policy, made["spec"], seen)
                limits.update(found)
                if admitted:
                    node.remove(made["metadata"]["name"])
            while node.state.pods and chance.random() < len(node.state.pods) / 7:
                node.remove(chance.choice(sorted(node.state.pods)).name)
    print(count, limits)
    assert len(limits) > 5


def changed(name: str, by: int = 0, *, turned: bool = False) -> Callable[[Seen], Seen]:
    """The object with so much more of a resource in every zone, in base units, or with the
    figures of other zones."""

    def change(seen: Seen) -> Seen:
        offers = [zone.get(name) for zone in seen.zones]
        turn = offers[1:] + offers[:1] if turned else offers
        zones = [
            zone if new is None else {**zone, name: max(new + 1000 * by, 0)}
            for zone, new in zip(seen.zones, turn, strict=True)
        ]
        return replace(seen, zones=tuple(zones))

    return change


def unlisted(name: str) -> Callable[[Seen], Seen]:
    return lambda seen: replace(
        seen, zones=tuple({n: a for n, a in zone.items() if n != name} for zone in seen.zones)
    )


def of_other_scope(seen: Seen) -> Seen:
    return replace(seen, scope="pod" if seen.scope == "container" else "container")


WRONG: Mapping[str, Callable[[Seen], Seen]] = {
    **{f"{name} + {by}": changed(name, by) for name, by in product((GPU, "cpu"), (-2, 2))},
    **{f"memory + {by} GiB": changed("memory", by << 30) for by in (-1, 1)},
    **{f"{name} of another zone": changed(name, turned=True) for name in (GPU, "cpu", "memory")},
    **{f"{name} unlisted": unlisted(name) for name in (GPU, "cpu", "memory", PAGES)},
    "policy": lambda seen: replace(seen, policy="none" if seen.policy == SINGLE else SINGLE),
    "scope": of_other_scope,
}
"""What could be wrong with an object."""


def test_what_a_wrong_object_makes_differ_is_put_down_to_no_row() -> None:
    """Where a right object lets the two agree a wrong one makes them differ: that must not be
    taken for what no object can tell, also where the pod is one that a row is about."""
    seen_through, taken_for = Counter[str](), Counter[str]()
    for seed in range(50):
        chance = random.Random(f"wrong {seed}")
        node = a_node(chance, "n")
        for number in range(12):
            made = a_pod(chance, node.state, f"p{number}")
            state, right, spec = node.state, node.seen(), node.spec(made)
            admitted = isinstance(node.admit(made), Admitted)
            if admitted != places(right, spec):
                continue
            for name, change in WRONG.items():
                wrong = change(right)
                if places(wrong, spec) != admitted:
                    rows = why(wrong, state, spec)
                    (seen_through if rows is None else taken_for)[name] += 1
    print(seen_through, taken_for)
    assert set(seen_through) == set(WRONG)
    assert sum(taken_for.values()) < 0.05 * sum(seen_through.values())


def test_with_its_cache_the_same_pods_are_placed_soon(
    cluster: Cluster, scheduler: StartScheduler, is_long: bool
) -> None:
    """As the agent does it: an echo follows when the scheduler has taken the object in."""
    wanted = [of for of in combinations(2 if is_long else 1) if of.policy == SINGLE]
    nodes = nodes_of(cluster, wanted)
    started = scheduler(resync_s=RESYNC_S)
    waits: list[float] = []
    settle = until_taken_in(cluster, started, nodes, waits)
    tally = play(cluster, started, nodes, rounds=25 if is_long else 4, settle=settle)
    print(vars(tally), sorted(waits))
    assert tally.placed > len(nodes)
    assert tally.refused > len(nodes)
    assert waits, "some pods wait for the cache"
    assert max(waits) < 2 * RESYNC_S + 1
    assert set(tally.limits) <= {"node without CPUs"}


def until_taken_in(
    cluster: Cluster, started: Scheduler, nodes: Sequence[ModelNode], waits: list[float]
) -> Settle:
    """Waits for late pods as the agent has them wait, and notes how long. A node without any
    running pod is never taken in: a DaemonSet's pod is always there."""
    for node in nodes:
        daemon = pod(f"daemon-{node.name}", {})
        cluster.create(daemon, started.name, node=node.name)
        cluster.wait_placed(started, [daemon["metadata"]["name"]], within_s=10)
        cluster.set_phase(daemon["metadata"]["name"], "Running")
        node.publish()

    def settle(late: dict[str, tuple[ModelNode, Json]]) -> None:
        stopwatch = Stopwatch()
        time.sleep(ECHO_S)
        for node, _ in late.values():
            node.sink.echo()
        cluster.wait_placed(started, late, within_s=10)
        waits.append(stopwatch.took_s)  # until the last

    return settle


def test_a_pod_that_binds_no_memory_gets_a_device_where_there_are_no_huge_pages(
    cluster: Cluster, scheduler: StartScheduler
) -> None:
    base = machine("hgx-h100-oci")
    nodes = (base.numa_nodes[0], *(replace(n, huge_pages={}) for n in base.numa_nodes[1:]))
    config = {"topologyManagerPolicy": SINGLE, "memoryManagerPolicy": "Static"}
    name = f"{cluster.namespace}-0"
    node = model_node(cluster, name, replace(base, numa_nodes=nodes), config)
    node.publish()
    started = scheduler()
    asked: dict[str, str | int] = {"cpu": 2, "memory": "1Gi", PAGES: "64Mi"}
    bound = pod("bound", {GPU: 1, **asked})
    burstable = pod("burstable", {GPU: 1, **asked})
    burstable["spec"]["containers"][0]["resources"]["limits"] = {GPU: "1", PAGES: "64Mi"}
    for made, runs in [(pod("a", {GPU: 4}), True), (bound, False), (burstable, True)]:
        own = made["metadata"]["name"]
        cluster.create(made, started.name, node=name)
        assert (cluster.verdicts(started, [own])[own] is not None) is runs, own
        assert isinstance(node.admit(made), Admitted) is runs, own
        if runs:
            cluster.set_phase(own, "Running")
        node.publish()


# Nothing panics


def wide(count: int) -> Machine:
    """A machine of so many NUMA nodes with CPUs, without any devices."""
    (first, *_) = read_recorded(FOLDER / "dgx1-v100").numa_nodes
    return Machine(
        numa_nodes=tuple(
            replace(
                first,
                id=NumaId(n),
                cpus=(CpuId(2 * n), CpuId(2 * n + 1)),
                distance={NumaId(n): 10},
            )
            for n in range(count)
        )
    )


STRATEGIES = ("LeastAllocated", "MostAllocated", "BalancedAllocation", "LeastNUMANodes")


def test_nothing_panics_over_any_recorded_machine(
    cluster: Cluster, scheduler: StartScheduler
) -> None:
    """Pods that may go anywhere are filtered and scored on all of them."""
    recorded = [read_recorded(folder.parent) for folder in sorted(FOLDER.glob("*/sys.txt"))]
    for number, each in enumerate([*recorded, wide(64), wide(70)]):
        config = {
            "topologyManagerPolicy": SINGLE,
            "topologyManagerScope": ("container", "pod")[number % 2],
            "cpuManagerPolicy": "static",
        }
        name = f"{cluster.namespace}-{number}"
        model_node(cluster, name, each, config, detail=Detail.FULL).publish()
    for strategy in STRATEGIES:
        for resync_s in (0, RESYNC_S):
            started = scheduler(resync_s=resync_s, strategy=strategy)
            pods = [
                pod("a", {GPU: 1, "cpu": 2, "memory": "1Gi"}),
                pod("b", {"cpu": 2, "memory": "256Mi"}),
                pod("c", {"cpu": 2, "memory": "256Mi"}, {"cpu": 2, "memory": "256Mi"}),
                pod("d", {GPU: 1}),
            ]
            names = [made["metadata"]["name"] for made in pods]
            for made in pods:
                cluster.create(made, started.name)
            assert None not in cluster.verdicts(started, names).values(), (strategy, resync_s)
            started.check()
            for name in names:
                cluster.delete(name)


def test_a_panic_would_be_seen(
    cluster: Cluster, apiserver: ApiServer, go_program: GoProgram
) -> None:
    """What the numbers without gaps are for: ids as the kernel has them end the scheduler."""
    for number in range(2):  # one alone is not scored
        node = model_node(
            cluster,
            f"{cluster.namespace}-{number}",
            machine("numa-ids-0-2"),
            {"topologyManagerPolicy": SINGLE},
        )
        body = node.body()
        body["zones"][1]["name"] = "node-2"
        apiserver.apply(body)
    started = Scheduler(go_program("scheduler"), apiserver)

    def place_some() -> None:
        for name in ("a", "b", "c"):  # the first may come before the second node is seen
            cluster.create(pod(name, {GPU: 1, "cpu": 2, "memory": "1Gi"}), started.name)
            cluster.wait_placed(started, [name], within_s=10)

    with pytest.raises(SchedulerError, match="index out of range"):
        place_some()
    with pytest.raises(SchedulerError, match="index out of range"):
        started.close()


@pytest.mark.parametrize(
    ("strategy", "ends"),
    [
        ("LeastAllocated", "integer divide by zero"),
        ("MostAllocated", "integer divide by zero"),
        ("LeastNUMANodes", None),
    ],
)
def test_one_kind_of_pod_ends_it_whatever_the_objects_say(
    cluster: Cluster, apiserver: ApiServer, go_program: GoProgram, strategy: str, ends: str | None
) -> None:
    """A Guaranteed pod by its own resources, with a container that requests nothing: its score is
    a sum over no request, divided by their number."""
    for number in range(2):  # one alone is not scored
        name = f"{cluster.namespace}-{number}"
        config = {"topologyManagerPolicy": SINGLE}
        model_node(cluster, name, machine("hgx-h100-oci"), config).publish()
    started = Scheduler(go_program("scheduler"), apiserver, strategy=strategy)
    own = {"cpu": "2", "memory": "1Gi"}

    def place_some() -> None:
        for number in range(3):  # the first may come before the second node is seen
            made = pod(f"p{number}", {})
            made["spec"]["resources"] = {"requests": own, "limits": own}
            cluster.create(made, started.name)
            cluster.wait_placed(started, [f"p{number}"], within_s=30)

    try:
        if ends is None:
            place_some()
            started.close()
            return
        with pytest.raises(SchedulerError, match=ends):
            place_some()
        with pytest.raises(SchedulerError, match=ends):
            started.close()
    finally:
        started.end()


# The fingerprint


def numbered(made: Json, number: int) -> Json:
    return {**made, "metadata": {"name": f"{made['metadata']['name']}-{number}"}}


CHECK = re.compile(
    r'"podset fingerprint check".* node="(?P<node>[^"]+)".*'
    r' expected="(?P<expected>\w+)" computed="(?P<computed>\w+)"'
)
FLUSH = re.compile(r'"flushing".* node="(?P<node>[^"]+)"')

# Pods on one node, each with its phase.
HELD: Mapping[str, list[tuple[str, Json]]] = {
    "GPUs": [("Running", pod("a", {GPU: 2}))],
    "pending": [
        ("Running", pod("a", {GPU: 1})),
        ("Pending", pod("b", {GPU: 1, "cpu": 2, "memory": "1Gi"})),
    ],
    "completed": [
        ("Succeeded", pod("a", {GPU: 1})),
        ("Failed", pod("b", {"cpu": 2, "memory": "1Gi"})),
        ("Running", pod("c", {"cpu": 2, "memory": "1Gi"})),
    ],
    "shared CPUs": [
        ("Running", pod("a", {"cpu": "1500m", "memory": "1Gi"})),
        ("Running", pod("b", {GPU: 1})),
    ],
    "Burstable": [
        ("Running", pod("a", {"cpu": 2})),
        ("Running", pod("b", {"memory": "1Gi", NIC: 1})),
        ("Running", pod("c", {})),
    ],
    "without topology": [
        ("Running", pod("a", {"example.com/plain": 1})),
        ("Running", pod("b", {GPU: 1})),
    ],
    "excluded": [("Running", pod("a", {NIC: 1})), ("Running", pod("b", {}))],
    "init container": [
        ("Running", pod("a", {}, init=[{GPU: 1}])),
        ("Running", pod("b", {"cpu": 2, "memory": "1Gi"})),
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
        for phase, each in HELD[case]:
            made = numbered(each, number)
            cluster.bind(made, node.name)
            if phase != "Pending":
                cluster.set_phase(made["metadata"]["name"], phase)
            if phase in ("Pending", "Running"):
                assert isinstance(node.admit(made), Admitted)
        node.publish()
    right = {name for name in nodes if name != mistaken}

    said = {name: fingerprint_of(node.live()) for name, (node, _) in nodes.items()}

    assert not_taken_in(cluster, started, said, allowed={mistaken}) == {mistaken}
    # The next pods are placed where the object was taken in, and nowhere else.
    for number, name in enumerate(nodes):
        cluster.create(pod(f"next-{number}", {GPU: 1}), started.name, node=name)
    names = [f"next-{number}" for number in range(len(nodes))]
    placed = cluster.verdicts(started, names)
    assert {node for node in placed.values() if node is not None} == right
    assert "invalid node topology data" in cluster.refusal(names[list(nodes).index(mistaken)])


def not_taken_in(
    cluster: Cluster, started: Scheduler, said: Mapping[str, str], *, allowed: Collection[str] = ()
) -> set[str]:
    """The nodes for whose object, whose fingerprint is given, the scheduler finds another one.

    Returns when it has taken in all others as they are now. It forgets a pod of another scheduler
    that comes while it takes in the object from before: the next change of a pod makes it look."""
    touched_at = time.monotonic()

    def late() -> set[str] | None:
        nonlocal touched_at
        log = started.log()
        checks = {m["node"]: m for m in CHECK.finditer(log) if m["node"] in said}
        unseen = {
            name for name in said if name not in checks or said[name] != checks[name]["expected"]
        }
        taken_in = {m["node"]: m.start() for m in FLUSH.finditer(log)}
        found = {name for name, check in checks.items() if taken_in.get(name, 0) < check.start()}
        if not unseen and found <= set(allowed):
            return found
        if time.monotonic() - touched_at > 3 * RESYNC_S:
            touched_at = time.monotonic()
            for name in unseen:
                cluster.touch(name)
        return None

    return started.wait(late, "not every object was taken in", 20)


def counted_pod(chance: random.Random, name: str, node: str, *, alike: bool) -> Json:
    """A pod on a node; unless `alike` it may count for one release of the scheduler and not for
    another."""
    amounts: dict[str, list[str]] = {
        "cpu": ["0", "1", "2", "2.0", "2000m", "500m", "1500m"],
        "memory": ["0", "1Mi", "1Gi"],
        "ephemeral-storage": ["1Gi"],
        GPU: ["0", "1"],
        **({} if alike else {NIC: ["1"], "example.com/plain": ["0", "1"]}),
    }

    def containers(count: int) -> list[dict[str, str | int]]:
        return [
            {n: chance.choice(each) for n, each in amounts.items() if chance.random() < 0.25}
            for _ in range(count)
        ]

    init = containers(0 if alike else chance.choice([0, 1]))
    made = pod(name, *containers(chance.choice([1, 1, 2])), init=init)
    for each in (*made["spec"]["initContainers"], *made["spec"]["containers"]):
        if chance.random() < 0.3:  # of no QoS class that binds
            each["resources"]["requests"] = dict(each["resources"]["requests"])
            each["resources"]["requests"].setdefault("cpu", "1m")
    for each in made["spec"]["initContainers"]:
        if chance.random() < 0.5:
            each["restartPolicy"] = "Always"
    made["spec"] |= {"nodeName": node, "hostNetwork": chance.random() < 0.2}
    made["spec"]["terminationGracePeriodSeconds"] = 0
    made["metadata"] = {"name": name}
    if chance.random() < 0.2:
        made["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "file"}
    return made


@pytest.mark.parametrize("mode", list(InformerMode))
def test_the_fingerprint_covers_pods_by_chance_as_the_scheduler_does(
    cluster: Cluster, scheduler: StartScheduler, mode: InformerMode
) -> None:
    """Also pods that are being deleted, mirrors of static pods, and as many as a node takes."""
    chance = random.Random(mode.value)
    nodes, held = [], []
    for number in range(16):
        name = f"{cluster.namespace}-{number}"
        node = model_node(
            cluster,
            name,
            machine("hgx-h100-oci"),
            {"topologyManagerPolicy": SINGLE, "cpuManagerPolicy": "static"},
            informer_mode=mode,
            exclude=(NIC,) if number % 3 == 0 else (),
        )
        node.publish()
        nodes.append(node)
    started = scheduler(resync_s=1, cache={"informerMode": mode.value}, verbosity=4)
    for number, node in enumerate(nodes):
        for index in range(110 if number == 0 else chance.choice([1, 2, 4, 8])):
            name = chance.choice(["p{}", "web-{}.example.com", "a{}" + 200 * "x"])
            name = name.format(f"{number}-{index}")
            made = counted_pod(chance, name, node.name, alike=number % 2 == 0)
            ends = chance.random() < 0.1
            if ends:
                made["metadata"]["finalizers"] = ["example.com/hold"]
                held.append(made["metadata"]["name"])
            cluster.real.create(cluster.pods, made)
            phase = chance.choice(["Running"] * 4 + ["Pending", "Succeeded", "Failed", "Unknown"])
            cluster.set_phase(made["metadata"]["name"], "Running" if index == 0 else phase)
            if ends:
                cluster.delete(made["metadata"]["name"])
        node.publish()
    said = {node.name: fingerprint_of(node.live()) for node in nodes}
    methods = {
        each["value"]
        for node in nodes
        for each in node.live()["attributes"]
        if each["name"] == "nodeTopologyPodsFingerprintMethod"
    }
    assert methods == {method.value for method in FingerprintMethod}
    try:
        assert not_taken_in(cluster, started, said) == set()
    finally:
        for name in held:
            nothing = {"metadata": {"finalizers": None}}
            cluster.real.ask("PATCH", cluster.pods + name, nothing, content_type=MERGE)
    assert len(set(said.values())) > len(nodes) / 2


# The real kubelet's managers, our plugin, our publisher


STATIC = {
    "topologyManagerPolicy": SINGLE,
    "cpuManagerPolicy": "static",
    "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
    "memoryManagerPolicy": "Static",
}
# As in use, with an echo that fits the resync period of these schedulers.
PACE = Pace(echo_s=ECHO_S, poll_s=60)

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
        cluster.create(made, started.name, node=node.name)
        cluster.wait_placed(started, [name], within_s=15)
        assert node.start_pod(made).admitted
        running.append(name)
        node.until_published(running)
    waiting = pod("waiting", {GPU: 4, "cpu": 2, "memory": "1Gi"})
    cluster.create(waiting, started.name, node=node.name)
    assert cluster.verdicts(started, ["waiting"]) == {"waiting": None}
    stopwatch = Stopwatch()
    if waits_for == "a release":
        time.sleep(2 * RESYNC_S)
        stopwatch = Stopwatch()
        node.end_pod("a")
    cluster.wait_placed(started, ["waiting"], within_s=15)
    took_s = stopwatch.took_s
    print(waits_for, took_s)
    assert node.start_pod(waiting).admitted
    assert took_s < 2 * RESYNC_S + 1


REAL = (
    Combination(SINGLE, "container", "static", "Static", "numa-ids-0-2"),
    Combination(SINGLE, "pod", "static", "Static", "hgx-h100-oci"),
)
REAL_LONG = tuple(
    of
    for of in combinations(1)
    if of.policy != "restricted" and of.machine not in (*MANY_NODES, MEMORY_ONLY)
)


def test_the_real_managers_admit_what_is_placed_and_nothing_else(
    cluster: Cluster, scheduler: StartScheduler, real_node: StartNode, is_long: bool
) -> None:
    outcomes = Counter[bool]()
    for combination in REAL_LONG if is_long else REAL:
        chance = random.Random(repr(combination))
        node = real_node(combination.machine, combination.config)
        started = scheduler()  # one that is there before may hear of the pod before the node
        most = room(node.machine, {GPU: advertised(node.machine)[GPU]})
        running: set[str] = set()
        for number in range(30 if is_long else 12):
            name = f"{node.name}-{number}"
            made = plain_pod(most, chance, name)
            cluster.create(made, started.name, node=node.name)
            placed = cluster.verdicts(started, [name])[name] is not None
            about = (combination, made["spec"], cluster.refusal(name), node.body()["zones"])
            admission = node.start_pod(made) if placed else node.try_pod(made)
            may_differ = combination.policy != SINGLE and combination.memory == "Static"
            assert admission.admitted == placed or (placed and may_differ), (admission, about)
            outcomes[placed] += 1
            if admission.admitted:
                running.add(name)
            else:
                cluster.delete(name)
            while running and chance.random() < len(running) / 6:
                gone = chance.choice(sorted(running))
                running.discard(gone)
                node.end_pod(gone)
            node.until_published(running)
    print(outcomes)
    assert min(outcomes[True], outcomes[False]) > 4


def test_a_scheduler_ends_with_its_parent(apiserver: ApiServer, go_program: GoProgram) -> None:
    started = Scheduler(go_program("scheduler"), apiserver)
    assert started.process.stdin is not None
    started.process.stdin.close()
    assert started.process.wait(10) == 0
    started.close()
