"""Where no object of this API can make scheduler and kubelet agree: the rows of docs/scheduler.md.

Each limit is a node in one state with pods that its kubelet admits and pods that it refuses. For
each of them the scheduler is wrong about one of the pods by our object, and by every other object
with a zone for each NUMA node with CPUs it is wrong about that one or another.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rte.kubelet import usage
from rte.kubelet.admission import Admitted
from rte.kubelet.node import KubeletState
from rte.kubelet.spec import PodSpec, parse_pod
from rte.model import (
    CpuId,
    DeviceId,
    Machine,
    NumaId,
    NumaNode,
    Scope,
    TopologyManagerPolicy,
    base_units,
)
from rte.publish.nrt import nrt
from tests.chance import OVERHEAD, RUNTIME_CLASS
from tests.conftest import StartKubelet, StartScheduler
from tests.observed import observe
from tests.real_apiserver import ApiServer
from tests.real_kubelet import Json, pod
from tests.scheduling import (
    CRD,
    GPU,
    NIC,
    Cluster,
    ModelNode,
    NodeModel,
    kubelet_machine,
    model_node,
    node_allocatable,
    with_runtime_class,
)
from tests.scheduling import kubelet as model_kubelet
from tests.simple_plugin import SimplePlugin
from tests.topology_match import FACTS, Seen, effective, places, why

DOCS = Path(__file__).parents[1] / "docs" / "scheduler.md"
T = TypeVar("T")

GI = 1 << 30
SINGLE = "single-numa-node"
LEFT, RIGHT = "example.com/left", "example.com/right"
PLENTY = 1 << 60
FEW_OBJECTS = 500


def small(*, nodes: int = 2, bare: bool = False) -> Machine:
    """NUMA nodes of 8 CPUs and 8 GiB, and perhaps one of memory alone."""
    with_cpus = [
        NumaNode(
            id=NumaId(n),
            cpus=(*cores(n), *(CpuId(40 + c) for c in cores(n))),
            cores=tuple((c, CpuId(40 + c)) for c in cores(n)),
            memory_bytes=8 * GI,
            huge_pages={2 << 20: 0},
        )
        for n in range(nodes)
    ]
    rest = [NumaNode(id=NumaId(5), cpus=(), memory_bytes=8 * GI, huge_pages={2 << 20: 0})]
    return Machine(numa_nodes=(*with_cpus, *(rest if bare else ())))


def cores(node: int) -> tuple[CpuId, ...]:
    return tuple(map(CpuId, range(4 * node, 4 * node + 4)))


@dataclass(frozen=True, kw_only=True)
class Limit:
    config: Json
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # GPU → NUMA nodes
    others: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # a resource each
    before: tuple[Json, ...] = ()
    sick: tuple[str, ...] = ()  # GPUs, from then on
    admitted: tuple[Json, ...]  # by the kubelet, one or the other
    refused: tuple[Json, ...]
    wrong: str  # the pod about which the scheduler is wrong by our object
    machine: Machine = field(default_factory=small)

    @property
    def pods(self) -> dict[str, tuple[Json, bool]]:
        """Name → pod, and whether the kubelet admits it."""
        both = [(self.admitted, True), (self.refused, False)]
        return {each["metadata"]["name"]: (each, runs) for pods, runs in both for each in pods}

    @cached_property
    def specs(self) -> dict[str, tuple[PodSpec, bool]]:
        return {name: (parse_pod(made), runs) for name, (made, runs) in self.pods.items()}

    @property
    def all_devices(self) -> dict[str, dict[DeviceId, tuple[NumaId, ...]]]:
        named = {GPU: self.devices, **{r: {f"{r}-0": numa} for r, numa in self.others.items()}}
        return {
            resource: {DeviceId(id): tuple(map(NumaId, numa)) for id, numa in ids.items()}
            for resource, ids in named.items()
            if ids
        }


def gpus(*nodes: int) -> dict[str, tuple[int, ...]]:
    """A GPU on each of these NUMA nodes."""
    return {f"g{number}": (node,) for number, node in enumerate(nodes)}


def sidecar(made: Json) -> Json:
    made["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    return made


def pod_level(made: Json, cpus: str = "2") -> Json:
    own = {"cpu": cpus, "memory": "1Gi"}
    made["spec"]["resources"] = {"requests": own, "limits": own}
    return made


def heavy(made: Json) -> Json:
    made["spec"] |= {"runtimeClassName": RUNTIME_CLASS, "overhead": OVERHEAD}
    return made


def bound(**wanted: str | int) -> dict[str, str | int]:
    """A Guaranteed container's request of 2 CPUs and 1 GiB, but for what is said."""
    return {"cpu": 2, "memory": "1Gi", **wanted}


def policy(name: str, **config: Any) -> Json:
    return {"topologyManagerPolicy": name, **config}


CPUS = {"cpuManagerPolicy": "static"}
WHOLE = {"full-pcpus-only": "true"}
MEMORY = {"memoryManagerPolicy": "Static"}
POD = {"topologyManagerScope": "pod"}

# Devices of one NUMA node each say which node a container is on.
ON_ONE_NODE = (pod("left", {LEFT: 1}), pod("right", {RIGHT: 1}))
ON_BOTH = pod("both", {LEFT: 1, RIGHT: 1})
ON_EACH = pod("each", {LEFT: 1}, {RIGHT: 1})  # which the scope decides

LIMITS: Mapping[str, Limit] = {
    "restricted": Limit(
        config=policy("restricted"),
        devices=gpus(0, 0, 0, 0, 1, 1, 1),
        before=(pod("a", {GPU: 1}),),
        admitted=(pod("five", {GPU: 5}),),
        refused=(pod("four", {GPU: 4}),),
        wrong="four",
    ),
    "memory group": Limit(
        config=policy("best-effort", **MEMORY),
        admitted=(pod("one", {"cpu": 6, "memory": "15Gi"}),),
        refused=(pod("three", *[bound(memory="5Gi")] * 3),),
        wrong="three",
    ),
    "odd CPUs": Limit(
        config=policy(SINGLE, **CPUS, cpuManagerPolicyOptions=WHOLE),
        admitted=(pod("four", bound(cpu=4)),),
        refused=(pod("three", bound(cpu=3)),),
        wrong="three",
    ),
    "half cores": Limit(
        config=policy(SINGLE, **CPUS, reservedSystemCPUs="0,1", cpuManagerPolicyOptions=WHOLE),
        admitted=(pod("small-large", bound(cpu=6), bound(cpu=8)),),
        refused=(pod("large-small", bound(cpu=8), bound(cpu=6)),),
        wrong="large-small",
    ),
    "shared CPUs": Limit(
        config=policy(SINGLE, **CPUS),
        devices=gpus(0),
        before=(pod("a", bound(cpu=6)),),
        admitted=(pod("shared", bound(cpu="1500m") | {GPU: 1}),),
        refused=(pod("own", bound(cpu=1) | {GPU: 1}),),
        wrong="shared",
    ),
    "node without CPUs": Limit(
        config=policy(SINGLE, **MEMORY),
        machine=small(bare=True),
        others={LEFT: (0,), RIGHT: (1,)},
        before=(pod("a", bound(memory="6Gi")), pod("b", bound(memory="6Gi"))),
        admitted=(
            pod("much", bound(memory="4Gi")),
            pod("left", bound() | {LEFT: 1}),
            pod("right", bound() | {RIGHT: 1}),
        ),
        refused=(
            pod("much-left", bound(memory="4Gi") | {LEFT: 1}),
            pod("much-right", bound(memory="4Gi") | {RIGHT: 1}),
            pod("both", bound() | {LEFT: 1, RIGHT: 1}),
        ),
        wrong="much",
    ),
    "pod-level resources": Limit(
        config=policy(SINGLE, **CPUS),
        devices=gpus(0),
        before=(pod("a", bound(cpu=6)),),
        admitted=(pod_level(pod("own", bound() | {GPU: 1})),),
        refused=(pod("none", bound() | {GPU: 1}),),
        wrong="own",
    ),
    "overhead": Limit(
        config=policy(SINGLE, **MEMORY, **POD),
        others={LEFT: (0,), RIGHT: (1,)},
        admitted=(heavy(pod("heavy", bound(memory="8090Mi") | {LEFT: 1})), *ON_ONE_NODE),
        refused=(pod("light", bound(memory="8200Mi") | {LEFT: 1}), ON_BOTH, ON_EACH),
        wrong="heavy",
    ),
    "init container": Limit(
        config=policy(SINGLE),
        devices=gpus(0, 0, 1, 1, 1, 1),
        admitted=(pod("without", {GPU: 4}),),
        refused=(pod("with", {GPU: 4}, init=[{GPU: 2}]),),
        wrong="with",
    ),
    "ended init container": Limit(
        config=policy("none", **CPUS),
        before=(pod("a", bound(cpu=2), init=[bound(cpu=8)]),),
        admitted=(pod("four", bound(cpu=4)),),
        refused=(sidecar(pod("six", bound(cpu=3), init=[bound(cpu=3)])),),
        wrong="six",
    ),
    "sidecar": Limit(
        config=policy(SINGLE),
        devices=gpus(0, 1, 1, 1, 1),
        admitted=(pod("one", {GPU: 4}),),
        refused=(sidecar(pod("two", {GPU: 3}, init=[{GPU: 2}])),),
        wrong="two",
    ),
    "memory of a whole pod": Limit(
        config=policy(SINGLE, **MEMORY, **POD),
        others={LEFT: (0,), RIGHT: (1,)},
        before=(pod("a", bound(memory="2Gi")),),
        admitted=(pod("two", bound(memory="5Gi"), bound(memory="5Gi")), *ON_ONE_NODE),
        refused=(pod("one", {"cpu": 4, "memory": "10Gi"}), ON_BOTH, ON_EACH),
        wrong="two",
    ),
    "request for none": Limit(
        config=policy(SINGLE, **CPUS),
        devices=gpus(1),
        before=(pod("a", bound(cpu=8)),),
        admitted=(pod("silent", bound()),),
        refused=(pod("none", bound() | {GPU: 0}),),
        wrong="none",
    ),
    "device without a node": Limit(
        config=policy(SINGLE),
        machine=small(nodes=1),
        devices={"g0": (), "g1": (), "g2": (0,), "g3": (0,)},
        admitted=(pod("apart", {GPU: 2}, {GPU: 1}),),
        refused=(pod("together", {GPU: 3}),),
        wrong="apart",
    ),
    "device of several nodes": Limit(
        config=policy(SINGLE),
        devices={"g0": (0, 1), "g1": ()},
        others={LEFT: (0,), RIGHT: (1,)},
        admitted=(
            pod("left-gpu", {GPU: 1, LEFT: 1}),
            pod("right-gpu", {GPU: 1, RIGHT: 1}),
            ON_EACH,
        ),
        refused=(ON_BOTH, pod("two-gpus", {GPU: 1, LEFT: 1}, {GPU: 1, RIGHT: 1})),
        wrong="two-gpus",
    ),
    "sick device in use": Limit(
        config=policy(SINGLE),
        devices=gpus(0, 0, 0, 0),
        before=(pod("a", {GPU: 2}),),
        sick=("g0",),
        admitted=(pod("two", {GPU: 2}),),
        refused=(pod("three", {GPU: 3}),),
        wrong="two",
    ),
}


def start(limit: Limit) -> KubeletState:
    return model_kubelet(limit.machine, limit.config, devices=limit.all_devices)


def a_node(limit: Limit) -> NodeModel:
    """The node with the pods that came before."""
    node = NodeModel(name="n", machine=limit.machine, state=start(limit))
    for each in limit.before:
        assert isinstance(node.admit(each), Admitted), each
    sicken(limit, node)
    return node


def sicken(limit: Limit, node: NodeModel) -> None:
    unhealthy = frozenset((GPU, DeviceId(id)) for id in limit.sick)
    node.state = replace(node.state, unhealthy=unhealthy)


@pytest.mark.parametrize("name", LIMITS)
def test_by_our_object_one_pod_is_misjudged_for_this_reason_alone(name: str) -> None:
    limit = LIMITS[name]
    node = a_node(limit)
    for pod_name, (made, runs) in limit.pods.items():
        assert node.would_admit(made) is runs, pod_name
        seen, spec = node.seen(), node.spec(made)
        assert (places(seen, spec) is runs) is (pod_name != limit.wrong), pod_name
        if pod_name == limit.wrong:
            assert why(seen, node.state, spec) == frozenset({name})


# Every object


def objects(limit: Limit, node: NodeModel, *, zones: int) -> Iterator[Seen]:
    """All that can be told apart of objects with so many zones.

    What a zone offers is only ever compared with sums of what containers want. A native resource
    of which all want the same that want any is plenty everywhere: with less none of them is placed.
    """
    seen = node.seen()
    wanted = levels([spec for spec, _ in limit.specs.values()])
    for unlisted in subsets([name for name in wanted if "/" in name]):
        listed = {name: offers for name, offers in wanted.items() if name not in unlisted}
        zone = [dict(zip(listed, offers, strict=True)) for offers in product(*listed.values())]
        for scope, chosen in product(Scope, product(zone, repeat=zones)):
            yield replace(seen, zones=chosen, policy=SINGLE, scope=scope.value)
    yield replace(seen, policy=TopologyManagerPolicy.NONE.value)  # all that filter nothing are one


def levels(specs: Sequence[PodSpec]) -> dict[str, tuple[int, ...]]:
    """Resource → the offers, in thousandths, that make a difference."""
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted({n for spec in specs for c in spec.containers for n in c.requests}):
        wanted = [[c.requests.get(name, 0) for c in spec.containers] for spec in specs]
        if "/" not in name and len({tuple(each) for each in wanted if any(each)}) == 1:
            found[name] = (PLENTY,)
            continue
        sums = {sum(part) for each in wanted for part in subsets(each)}
        found[name] = tuple(sorted({*sums, *(effective(spec).get(name, 0) for spec in specs)}))
    return found


def subsets(every: Sequence[T]) -> Iterator[tuple[T, ...]]:
    for taken in product((False, True), repeat=len(every)):
        yield tuple(each for each, is_taken in zip(every, taken, strict=True) if is_taken)


def misjudged(limit: Limit, seen: Seen) -> list[str]:
    return [name for name, (spec, runs) in limit.specs.items() if places(seen, spec) != runs]


def is_right(limit: Limit, seen: Seen) -> bool:
    return all(places(seen, spec) == runs for spec, runs in limit.specs.values())


@pytest.mark.parametrize("name", LIMITS)
def test_every_object_misjudges_a_pod(name: str) -> None:
    limit = LIMITS[name]
    node = a_node(limit)
    every = objects(limit, node, zones=zone_count(limit))
    tried = [is_right(limit, seen) for seen in every]
    assert len(tried) > 4
    assert not any(tried)


def test_zones_of_no_numa_node_with_cpus_would_tell_of_two_alone(
    pytestconfig: pytest.Config,
) -> None:
    """Which the contract excludes. Of most limits one zone more, whatever is in it, changes
    nothing."""
    told, tried = set(), set()
    for name, limit in LIMITS.items():
        node = a_node(limit)
        every = objects(limit, node, zones=zone_count(limit) + 1)
        few = list(islice(every, FEW_OBJECTS + 1))
        if len(few) > FEW_OBJECTS and not pytestconfig.getoption("long"):
            continue
        tried.add(name)
        if any(is_right(limit, seen) for seen in chain(few, every)):
            told.add(name)
    assert len(tried) > len(LIMITS) / 2
    assert told == tried & {"node without CPUs", "device without a node"}


def test_a_zone_of_its_own_would_tell_of_a_node_without_cpus() -> None:
    """Which the contract excludes, and nothing else."""
    limit = LIMITS["node without CPUs"]
    node = a_node(limit)
    body = node.body()
    body["zones"].append(
        {
            "name": "node-2",
            "type": "Node",
            "resources": [
                {"name": "cpu", "available": "14"},
                {"name": "memory", "available": "8Gi"},
            ],
        }
    )
    assert misjudged(limit, node.seen(body)) == []


# The real ones


@pytest.fixture
def cluster(apiserver: ApiServer) -> Iterator[Cluster]:
    apiserver.apply_files(CRD)
    with_runtime_class(apiserver, RUNTIME_CLASS, OVERHEAD)
    cluster = Cluster(apiserver, "limits")
    yield cluster
    cluster.close()


def test_the_real_scheduler_misjudges_these_pods_and_by_other_objects_others(
    cluster: Cluster, scheduler: StartScheduler
) -> None:
    nodes: dict[str, ModelNode] = {}
    for number, (name, limit) in enumerate(LIMITS.items()):
        own = f"{cluster.namespace}-{number}"
        nodes[name] = model_node(cluster, own, limit.machine, limit.config, state=start(limit))
        nodes[name].publish()
    started = scheduler()  # one that is there before may hear of a pod before its node
    numbers = {name: number for number, name in enumerate(LIMITS)}

    def asked(pods: Mapping[str, Json], *, stay: bool = False) -> dict[str, bool]:
        """Whether each pod, by the name of its limit, is placed."""
        own = {name: f"{made['metadata']['name']}-{numbers[name]}" for name, made in pods.items()}
        for name, made in pods.items():
            named = {**made, "metadata": {"name": own[name]}}
            cluster.create(named, started.name, node=nodes[name].name)
        said = cluster.verdicts(started, list(own.values()))
        for name, made in pods.items():
            if stay:
                named = {**made, "metadata": {"name": own[name]}}
                assert isinstance(nodes[name].admit(named), Admitted)
                cluster.set_phase(own[name], "Running")
                nodes[name].publish()
            else:
                cluster.delete(own[name])
        return {name: said[own[name]] is not None for name in pods}

    def rows(pods: Mapping[str, Sequence[Json]]) -> Iterator[dict[str, Json]]:
        for number in range(max(map(len, pods.values()))):
            yield {name: each[number] for name, each in pods.items() if number < len(each)}

    def all_asked() -> dict[str, list[str]]:
        """The pods that the scheduler misjudges, by the name of their limit."""
        found: dict[str, list[str]] = {name: [] for name in LIMITS}
        for row in rows({n: [made for made, _ in of.pods.values()] for n, of in LIMITS.items()}):
            for name, placed in asked(row).items():
                own = row[name]["metadata"]["name"]
                if placed != LIMITS[name].pods[own][1]:
                    found[name].append(own)
        return found

    for row in rows({name: limit.before for name, limit in LIMITS.items()}):
        assert set(asked(row, stay=True).values()) == {True}
    for name, limit in LIMITS.items():
        if limit.sick:
            sicken(limit, nodes[name])
            nodes[name].publish()
            cluster.set_allocatable(nodes[name].name, node_allocatable(nodes[name].state))
    assert all_asked() == {name: [limit.wrong] for name, limit in LIMITS.items()}

    expected = {}
    for name, limit in LIMITS.items():
        node = nodes[name]
        other = another(limit, node)
        expected[name] = misjudged(limit, other)
        node.sink.publish(as_object(other, node.body()), time.monotonic())
    assert all_asked() == expected


def another(limit: Limit, node: NodeModel) -> Seen:
    """An object that is right about the pod that ours misjudges, if there is any such."""
    tried = list(islice(objects(limit, node, zones=zone_count(limit)), 500))
    return next((seen for seen in tried if limit.wrong not in misjudged(limit, seen)), tried[-1])


def zone_count(limit: Limit) -> int:
    return sum(1 for each in limit.machine.numa_nodes if each.cpus)


def as_object(seen: Seen, body: Json) -> Json:
    """Our object with what is seen in another."""
    said = {"topologyManagerPolicy": seen.policy, "topologyManagerScope": seen.scope}
    attributes = [
        {**each, "value": said.get(each["name"], each["value"])} for each in body["attributes"]
    ]
    zones = [
        {
            **zone,
            "resources": [
                {
                    "name": name,
                    **dict.fromkeys(("capacity", "allocatable", "available"), f"{amount}m"),
                }
                for name, amount in sorted(offer.items())
            ],
        }
        for zone, offer in zip(body["zones"], seen.zones, strict=True)
    ]
    return {**body, "attributes": attributes, "zones": zones}


@pytest.mark.parametrize("name", LIMITS)
def test_the_real_managers_admit_and_refuse_these_pods(name: str, kubelet: StartKubelet) -> None:
    limit = LIMITS[name]
    real = kubelet(limit.config, machine=kubelet_machine(limit.machine))
    with ExitStack() as stack:
        plugins = {}
        for resource, ids in limit.all_devices.items():
            listed = {str(id): tuple(map(int, numa)) or None for id, numa in ids.items()}
            plugins[resource] = stack.enter_context(SimplePlugin(resource, listed))
            plugins[resource].serve(real.plugin_dir)
            real.wait_devices(resource, len(listed))
        for made in limit.before:
            assert real.admit(made).admitted
        if limit.sick:
            plugins[GPU].set_unhealthy(*limit.sick)
            real.wait_devices(GPU, len(limit.devices) - len(limit.sick))
        for pod_name, (made, runs) in limit.pods.items():
            answer = real.admit(made)
            assert answer.admitted is runs, (pod_name, answer)
            real.remove(pod_name)


def test_a_device_may_turn_sick_between_the_two_decisions(
    cluster: Cluster, scheduler: StartScheduler
) -> None:
    limit = LIMITS["init container"]
    own = f"{cluster.namespace}-0"
    node = model_node(cluster, own, limit.machine, limit.config, state=start(limit))
    node.publish()
    started = scheduler()
    made = pod("p", {GPU: 4})
    cluster.create(made, started.name, node=node.name)
    assert cluster.verdicts(started, ["p"]) == {"p": node.name}
    node.state = replace(node.state, unhealthy=frozenset({(GPU, DeviceId("g2"))}))
    assert not node.would_admit(made)


def test_what_a_pod_as_a_whole_asks_for_is_read_by_no_plugin(
    cluster: Cluster, scheduler: StartScheduler, kubelet: StartKubelet
) -> None:
    """Where the kubelet binds that, which takes a feature gate: of two pods that only this tells
    apart it admits the one and refuses the other."""
    gates = {"PodLevelResources": True, "PodLevelResourceManagers": True}
    config = policy(SINGLE, **CPUS, **POD, featureGates=gates)
    limit = Limit(config=config, admitted=(), refused=(), wrong="")
    before = (pod("left", bound(cpu=4)), pod("right", bound(cpu=4)))
    small_pod, large_pod = pod_level(pod("small", {}), "4"), pod_level(pod("large", {}), "6")
    real = kubelet(config, machine=kubelet_machine(limit.machine))
    for made in before:
        assert real.admit(made).admitted
    admitted = real.admit(small_pod)
    real.remove("small")
    refused = real.admit(large_pod)
    assert (admitted.admitted, refused.reason) == (True, "TopologyAffinityError")

    own = f"{cluster.namespace}-0"
    node = model_node(cluster, own, limit.machine, config)
    started = scheduler()
    for made in before:
        node.publish()
        cluster.create(made, started.name, node=own)
        cluster.wait_placed(started, [made["metadata"]["name"]], within_s=10)
        assert isinstance(node.admit(made), Admitted)
    node.publish()
    for made in (small_pod, large_pod):
        cluster.create(made, started.name, node=own)
        name = made["metadata"]["name"]
        assert cluster.verdicts(started, [name]) == {name: own}
        cluster.delete(name)


def test_nobody_tells_of_a_sick_device_of_anothers_plugin(
    cluster: Cluster, scheduler: StartScheduler, kubelet: StartKubelet
) -> None:
    """Of two kubelets of which all can be read alike one admits a pod and one refuses it."""
    limit = Limit(config=policy(SINGLE), admitted=(), refused=(), wrong="")
    made = pod("p", {NIC: 1})
    read, answers = [], []
    for numa in (None, (0,)):
        real = kubelet(limit.config, machine=kubelet_machine(limit.machine))
        with (
            SimplePlugin(NIC, {"sick": numa, "well": None}) as plugin,
            closing(usage.channel(real.pod_resources)) as channel,
        ):
            plugin.serve(real.plugin_dir)
            real.wait_devices(NIC, 2)
            plugin.set_unhealthy("sick")
            real.wait_devices(NIC, 1)
            read.append((observe(real, channel, ()), real.state()))
            answers.append(real.admit(made))
    assert [answer.admitted for answer in answers] == [True, False]
    assert answers[1].reason == "TopologyAffinityError"
    assert read[0] == read[1]

    observation, said = read[1]
    name = f"{cluster.namespace}-0"
    body = nrt(observation, node_name=name, node_uid=None, version="test")
    cluster.add_node(name, {key: base_units(value) for key, value in said.allocatable.items()})
    cluster.real.apply(body)
    started = scheduler()
    cluster.create(made, started.name, node=name)
    assert cluster.verdicts(started, ["p"]) == {"p": name}


def test_the_rows_of_the_docs_are_these() -> None:
    text = DOCS.read_text()
    table = text[text.index("## What it cannot be told") :]
    rows = re.findall(r"^\| `([^`]+)` \| (yes|no) \| (yes|no) \|", table, re.MULTILINE)
    runs = {name: limit.pods[limit.wrong][1] for name, limit in LIMITS.items()}
    said = {name: (placed == "yes", admitted == "yes") for name, placed, admitted in rows}
    assert said == {
        "health": (True, False),
        "sick device unseen": (True, False),
        **{name: (not admitted, admitted) for name, admitted in runs.items()},
    }
    assert {*LIMITS, "sick device unseen"} == set(FACTS)
