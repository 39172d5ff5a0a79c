"""The model of the kubelet's decisions: rows by hand, and thousands of the real kubelet's."""

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from rte.kubelet.admission import Admitted, PluginError, Rejected, admit, not_followed
from rte.kubelet.cpus import CpuTopology, take
from rte.kubelet.hints import Hint, best_hint, bits, mask
from rte.kubelet.node import KubeletState, allocatable, kubelet_state, usage, without
from rte.kubelet.policy import parse_policy
from rte.kubelet.spec import PodSpec, parse_pod
from rte.model import (
    CpuId,
    DeviceId,
    NumaId,
    NumaNode,
    PodName,
    Policy,
    Scope,
    TopologyManagerPolicy,
    base_units,
)
from tests.conftest import StartKubelet
from tests.real_kubelet import Container, Kubelet, numa_nodes, pod
from tests.simple_plugin import SimplePlugin, first_fit

GPU = "nvidia.com/gpu"
NIC = "a.com/nic"
SINGLE = TopologyManagerPolicy.SINGLE_NUMA_NODE
GI = 2**30
Request = Mapping[str, str | int]
SEEDS = 8  # machines for each policy and scope


def first(
    resource: str, offered: Sequence[DeviceId], must: Sequence[DeviceId], size: int
) -> list[DeviceId]:
    return [DeviceId(id) for id in first_fit(list(offered), list(must), size)]


def state(policy: Policy | None = None, **fields: Any) -> KubeletState:
    """4+4 GPUs, 8+8 CPUs in cores of two, 60+60 GiB for pods."""
    nodes = [
        NumaNode(
            id=NumaId(n),
            cpus=tuple(CpuId(cpu) for cpu in range(8 * n, 8 * n + 8)),
            memory_bytes=64 * GI,
        )
        for n in (0, 1)
    ]
    values: dict[str, Any] = {
        "cores": [(CpuId(cpu), CpuId(cpu + 1)) for cpu in range(0, 16, 2)],
        "devices": {GPU: {DeviceId(f"g{i}"): (NumaId(i // 4),) for i in range(8)}},
        **fields,
    }
    return kubelet_state(nodes, policy or Policy(topology_manager=SINGLE), **values)


def spec(
    *containers: Mapping[str, str | int],
    init: Sequence[Mapping[str, str | int]] = (),
    name: str = "p",
) -> PodSpec:
    return parse_pod(pod(name, *containers, init=init))


def admitted(answer: Admitted | Rejected) -> Admitted:
    assert isinstance(answer, Admitted), answer
    return answer


def rejected(answer: Admitted | Rejected) -> Rejected:
    assert isinstance(answer, Rejected), answer
    return answer


def devices(answer: Admitted | Rejected, container: int = 0) -> list[str]:
    return [str(device.id) for device in admitted(answer).containers[container].devices]


class Calls:
    """What a plugin was asked, with answers of first fit."""

    def __init__(self) -> None:
        self.preferred: list[tuple[list[str], list[str], int]] = []
        self.allocated: list[list[str]] = []

    def prefer(
        self, resource: str, offered: Sequence[DeviceId], must: Sequence[DeviceId], size: int
    ) -> list[DeviceId]:
        self.preferred.append(([*offered], [*must], size))
        return first(resource, offered, must, size)

    def allocate(self, resource: str, ids: Sequence[DeviceId]) -> None:
        self.allocated.append([*ids])


# Devices: what the real kubelet was seen to do


def test_a_choice_is_left_to_the_plugin_inside_the_aligned_set() -> None:
    calls = Calls()
    answer = admit(state(), spec({GPU: 2}), prefer=calls.prefer, allocate=calls.allocate)
    assert calls.preferred == [(["g0", "g1", "g2", "g3"], [], 2)]
    assert calls.allocated == [["g0", "g1"]]
    assert admitted(answer).affinity == {"c0": (0,)}


def test_five_of_four_and_four_are_rejected_without_a_call() -> None:
    calls = Calls()
    answer = rejected(admit(state(), spec({GPU: 5}), prefer=calls.prefer))
    assert answer == Rejected(
        reason="TopologyAffinityError",
        message="Resources cannot be allocated with Topology locality",
    )
    assert calls.preferred == []


def test_an_exact_fit_of_the_aligned_set_is_no_question() -> None:
    calls = Calls()
    assert len(devices(admit(state(), spec({GPU: 4}), prefer=calls.prefer))) == 4
    assert calls.preferred == []


def test_policy_none_offers_everything_even_for_an_exact_fit() -> None:
    calls = Calls()
    assert len(devices(admit(state(Policy()), spec({GPU: 8}), prefer=calls.prefer))) == 8
    assert calls.preferred == [([f"g{i}" for i in range(8)], [], 8)]


def test_best_effort_reaches_devices_without_topology_after_the_aligned() -> None:
    calls = Calls()
    mixed = state(
        Policy(topology_manager=TopologyManagerPolicy.BEST_EFFORT),
        devices={GPU: {DeviceId("a"): (NumaId(0),), DeviceId("b"): ()}},
    )
    assert devices(admit(mixed, spec({GPU: 2}), prefer=calls.prefer)) == ["a", "b"]
    assert calls.preferred == [(["a", "b"], ["a"], 2)]
    strict = replace(mixed, policy=Policy(topology_manager=SINGLE))
    assert rejected(admit(strict, spec({GPU: 2}))).reason == "TopologyAffinityError"


def test_what_an_init_container_had_is_taken_first() -> None:
    calls = Calls()
    answer = admit(state(), spec({GPU: 2}, init=[{GPU: 1}]), prefer=calls.prefer)
    assert (devices(answer, 0), devices(answer, 1)) == (["g0"], ["g0", "g1"])
    assert calls.preferred[1] == (["g0", "g1", "g2", "g3"], ["g0"], 2)
    calls = Calls()
    answer = admit(state(), spec({GPU: 1}, init=[{GPU: 2}]), prefer=calls.prefer)
    assert devices(answer, 1) == ["g0"]
    assert len(calls.preferred) == 1


def test_cpus_of_an_init_container_that_nobody_has_taken_over_stay_with_the_pod() -> None:
    policy = replace(STATIC, topology_manager=TopologyManagerPolicy.NONE)
    before: Request = {"cpu": 8, "memory": "1Gi"}
    start = state(policy)
    held = admitted(admit(start, spec({"cpu": 2, "memory": "1Gi"}, init=[before], name="a")))
    init, container = held.containers
    assert (init.cpus, container.cpus) == (tuple(range(8, 16)), (2, 3))
    assert isinstance(admit(held.state, spec({"cpu": 4, "memory": "1Gi"})), Admitted)
    assert "not enough cpus" in rejected(admit(held.state, spec(before))).message
    freed = without(held.state, PodName(namespace="default", name="a"))
    assert isinstance(admit(freed, spec(before)), Admitted)


def test_answers_that_are_short_foreign_or_empty_are_filled_up() -> None:
    for wish in ([], ["g9"], ["g3"], ["g3", "g3", "g7"]):
        answer = admit(state(), spec({GPU: 2}), prefer=lambda *_, w=wish: w)
        found = devices(answer)
        assert len(found) == 2
        assert set(found) <= {"g0", "g1", "g2", "g3"}
        assert ("g3" in found) is ("g3" in wish)


def test_errors_of_the_plugin_reject_the_pod() -> None:
    def fail(*_: object) -> Any:
        raise PluginError("rpc error: code = Unknown desc = no")

    answer = rejected(admit(state(), spec({GPU: 2}), prefer=fail))
    assert answer.reason == "UnexpectedAdmissionError"
    assert answer.message == (
        "Allocate failed due to device plugin GetPreferredAllocation rpc failed with err: "
        "rpc error: code = Unknown desc = no, which is unexpected"
    )
    assert rejected(admit(state(), spec({GPU: 2}), allocate=fail)).message == (
        "Allocate failed due to rpc error: code = Unknown desc = no, which is unexpected"
    )


def test_a_resource_of_no_plugin_is_not_the_managers_business() -> None:
    assert devices(admit(state(devices={}), spec({GPU: 2}))) == []


def test_unhealthy_and_used_devices_are_not_given() -> None:
    sick = state(unhealthy=frozenset({(GPU, DeviceId(f"g{i}")) for i in range(3)}))
    one = admitted(admit(sick, spec({GPU: 1}, name="one")))
    assert devices(one) == ["g3"]
    assert devices(admit(one.state, spec({GPU: 1}, name="two"))) == ["g4"]
    freed = without(one.state, PodName(namespace="default", name="one"))
    assert devices(admit(freed, spec({GPU: 1}, name="three"))) == ["g3"]
    none = state(unhealthy=frozenset({(GPU, DeviceId(f"g{i}")) for i in range(8)}))
    assert rejected(admit(none, spec({GPU: 1}))).reason == "TopologyAffinityError"
    without_policy = replace(none, policy=Policy())
    assert "no healthy devices present" in rejected(admit(without_policy, spec({GPU: 1}))).message


# CPUs and memory

STATIC = Policy(
    topology_manager=SINGLE,
    cpu_manager="static",
    memory_manager="Static",
    reserved_cpus=(CpuId(0), CpuId(1)),
    reserved_memory={NumaId(0): {"memory": GI}},
)


def test_cpus_memory_and_devices_come_from_one_node() -> None:
    busy = admitted(admit(state(STATIC), spec({"cpu": 2, "memory": "40Gi"}, name="a"))).state
    answer = admitted(admit(busy, spec({GPU: 2, "cpu": 4, "memory": "40Gi"}, name="b")))
    (container,) = answer.containers
    assert answer.affinity == {"c0": (1,)}
    assert [device.id for device in container.devices] == ["g4", "g5"]
    assert container.cpus == (8, 9, 10, 11)
    assert [(block.size_bytes, block.numa) for block in container.memory] == [(40 * GI, (1,))]
    assert usage(answer.state).device_ids() == {GPU: {"g4", "g5"}}


def test_half_cores_are_refused_after_allocate_where_whole_ones_are_asked() -> None:
    whole = replace(STATIC, cpu_manager_options={"full-pcpus-only": "true"})
    calls = Calls()
    odd = spec({GPU: 1, "cpu": 3, "memory": "1Gi"})
    assert admit(state(whole), odd, allocate=calls.allocate) == Rejected(
        reason="SMTAlignmentError",
        message="SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2",
    )
    assert calls.allocated == [["g0"]]


def test_whole_cores_are_asked_for_twice_where_an_init_container_hands_them_on() -> None:
    whole = replace(STATIC, cpu_manager_options={"full-pcpus-only": "true"})
    eight: Request = {"cpu": 8, "memory": "1Gi"}
    assert isinstance(admit(state(whole), spec(eight)), Admitted)
    refused = rejected(admit(state(whole), spec(eight, init=[eight])))
    assert refused.reason == "SMTAlignmentError"
    assert "available physical CPUs = 6, requested CPUs = 8" in refused.message
    assert isinstance(admit(state(STATIC), spec(eight, init=[eight])), Admitted)


def test_the_nodes_own_limits_come_last() -> None:
    small = state(STATIC, allocatable={"cpu": 2, "memory": 200 * GI})
    answer = rejected(admit(small, spec({"cpu": 4, "memory": "1Gi"})))
    assert answer == Rejected(
        reason="OutOfcpu",
        message="Node didn't have enough resource: cpu, requested: 4000, used: 0, capacity: 2000",
    )
    full = state(STATIC, most_pods=0)
    assert rejected(admit(full, spec({}))).reason == "OutOfpods"


def test_allocatable_is_what_pod_resources_would_say() -> None:
    said = allocatable(state(STATIC, unhealthy=frozenset({(GPU, DeviceId("g0"))})))
    assert said.cpus == tuple(range(2, 16))
    assert [(b.type, b.numa, b.size_bytes) for b in said.memory] == [
        ("memory", (0,), 63 * GI),
        ("memory", (1,), 64 * GI),
    ]
    assert [device.id for device in said.devices] == [f"g{i}" for i in range(1, 8)]


def test_options_that_the_model_does_not_follow_are_named() -> None:
    options = {"align-by-socket": "true", "full-pcpus-only": "true", "x": "false"}
    assert not_followed(Policy(cpu_manager_options=options)) == (
        "cpuManagerPolicyOptions.align-by-socket",
    )


def test_too_few_cpus_are_none() -> None:
    topology = CpuTopology(node={CpuId(0): NumaId(0)}, core={CpuId(0): 0}, socket={CpuId(0): 0})
    assert take(topology, [CpuId(0)], 2) is None
    assert take(topology, [CpuId(0)], 0) == frozenset()


# Hints


@pytest.mark.parametrize("seed", range(40))
def test_merging_is_the_best_of_all_combinations(seed: int) -> None:
    """Against the definition: every combination of hints is formed and compared."""
    rng = random.Random(seed)
    providers = [
        {
            f"r{i}": [
                Hint(rng.choice([None, *range(1, 8)]), rng.random() < 0.5)
                for _ in range(rng.randint(1, 5))
            ]
        }
        for i in range(rng.randint(1, 3))
    ]
    lists = [hints for provider in providers for hints in provider.values()]
    combinations: list[list[Hint]] = [[]]
    for hints in lists:
        combinations = [[*before, hint] for before in combinations for hint in hints]
    found = []
    for combination in combinations:
        stated = [hint.nodes for hint in combination if hint.nodes is not None]
        nodes = 0b111
        for each in stated:
            nodes &= each
        preferred = all(hint.preferred for hint in combination) and len(set(stated)) <= 1
        if nodes:
            found.append(Hint(nodes, preferred))
    best, admits = best_hint(TopologyManagerPolicy.RESTRICTED, providers, every_node=0b111)
    assert admits is best.preferred
    if any(hint.preferred for hint in found):
        width = min((h.nodes or 0).bit_count() for h in found if h.preferred)
        lowest = min(
            h.nodes or 0 for h in found if h.preferred and (h.nodes or 0).bit_count() == width
        )
        assert best == Hint(lowest, True)
    else:
        assert best in found or best == Hint(0b111, False)
        assert not best.preferred


def test_masks_name_their_nodes() -> None:
    assert bits(mask([0, 8, 63])) == [0, 8, 63]
    assert mask(()) == 0


# Manifests


@pytest.mark.parametrize(
    ("resources", "qos"),
    [
        ([{}], "BestEffort"),
        ([{"limits": {GPU: 1}}], "BestEffort"),
        ([{"limits": {"cpu": 1, "memory": "1Gi"}}], "Guaranteed"),
        ([{"limits": {"cpu": 1, "memory": "1Gi"}, "requests": {"cpu": "1000m"}}], "Guaranteed"),
        ([{"limits": {"cpu": 1, "memory": "1Gi"}, "requests": {"cpu": 0.5}}], "Burstable"),
        ([{"requests": {"cpu": 1, "memory": "1Gi"}}], "Burstable"),
        ([{"limits": {"cpu": 1}}], "Burstable"),
        ([{"limits": {"cpu": 1, "memory": "1Gi"}}, {}], "Burstable"),
        ([{"limits": {"cpu": "0", "memory": "0"}}], "BestEffort"),
    ],
)
def test_qos_classes(resources: list[dict[str, Any]], qos: str) -> None:
    containers = [{"name": f"c{i}", "resources": each} for i, each in enumerate(resources)]
    manifest = {"metadata": {"name": "p"}, "spec": {"containers": containers}}
    assert parse_pod(manifest).qos == qos


@pytest.mark.parametrize(
    ("manifest", "at"),
    [
        ({}, "metadata.name"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"name": "p"}}, "spec.containers"),
        ({"metadata": {"name": "p"}, "spec": {"containers": {}}}, "spec.containers"),
        ({"metadata": {"name": "p"}, "spec": {"containers": [3]}}, r"spec.containers\[0\]"),
        ({"metadata": {"name": "p"}, "spec": {"containers": [{}]}}, r"containers\[0\].name"),
        (
            {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a"}, {"name": "a"}]}},
            "one name",
        ),
        (
            {
                "metadata": {"name": "p"},
                "spec": {"containers": [{"name": "a", "resources": {"limits": {"cpu": "x"}}}]},
            },
            r"resources.limits.cpu",
        ),
        (
            {
                "metadata": {"name": "p"},
                "spec": {"containers": [{"name": "a", "resources": {"limits": {"cpu": -1}}}]},
            },
            "less than nothing",
        ),
    ],
)
def test_what_is_no_pod_names_the_field(manifest: dict[str, Any], at: str) -> None:
    with pytest.raises(ValueError, match=at):
        parse_pod(manifest)


# The real kubelet


def all_containers(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*manifest["spec"]["initContainers"], *manifest["spec"]["containers"]]


class Side:
    """A random machine with a random kubelet, and the model of both."""

    def __init__(
        self, rng: random.Random, policy: str, scope: str, stack: ExitStack, start: StartKubelet
    ) -> None:
        self.rng = rng
        ids = rng.choice([(0,), (0, 1), (0, 1), (0, 1, 2, 3), (0, 8)])
        threads = rng.choice([1, 2])
        machine = numa_nodes(
            ids,
            cpus=rng.choice([4, 8]),
            threads=threads,
            memory="4Gi",
            hugepages={"2Mi": rng.choice([0, 128])},
        )
        if rng.random() < 0.3:
            # Every page size is there, if 0 times: without one the Memory Manager 1.37.2 crashes.
            only_memory: dict[str, Any] = {
                "hugepages": {"2Mi": 0},
                "memory": "2Gi",
                "distances": [],
            }
            machine.append({"id": 5, "socket": 0, "cores": [], **only_memory})
            for node in machine:
                node["distances"] = [10 if node is other else 20 for other in machine]
        first_core = machine[0]["cores"][0]
        config: dict[str, Any] = {
            "topologyManagerPolicy": policy,
            "topologyManagerScope": scope,
            "cpuManagerPolicy": rng.choice(["none", "static", "static"]),
            "memoryManagerPolicy": rng.choice(["None", "Static"]),
            "reservedSystemCPUs": ",".join(map(str, first_core)),
        }
        if config["cpuManagerPolicy"] == "static" and rng.random() < 0.5:
            config["cpuManagerPolicyOptions"] = {"full-pcpus-only": "true"}
        if config["memoryManagerPolicy"] == "Static":
            config["reservedMemory"] = [
                {"numaNode": machine[0]["id"], "limits": {"memory": "100Mi"}}
            ]
        self.kubelet: Kubelet = start(config, machine=machine)
        self.plugins: dict[str, SimplePlugin] = {}
        every_id = [int(node["id"]) for node in machine]
        for resource, prefix in ((GPU, "g"), (NIC, "n")):
            listed = {f"{prefix}{i}": self.some_nodes(every_id) for i in range(rng.randint(1, 8))}
            plugin = stack.enter_context(SimplePlugin(resource, listed))
            plugin.serve(self.kubelet.plugin_dir)
            self.plugins[resource] = plugin
            self.kubelet.wait_devices(resource, len(listed))
            sick = [id for id in listed if rng.random() < 0.15]
            if sick and len(sick) < len(listed):
                plugin.set_unhealthy(*sick)
                self.kubelet.wait_devices(resource, len(listed) - len(sick))
        said = self.kubelet.state()
        self.model = kubelet_state(
            [
                NumaNode(
                    id=NumaId(node["id"]),
                    cpus=tuple(sorted(CpuId(c) for core in node["cores"] for c in core)),
                    memory_bytes=base_units(node["memory"]),
                    huge_pages={
                        base_units(size): n for size, n in node.get("hugepages", {}).items()
                    },
                )
                for node in machine
            ],
            parse_policy(config),
            cores=[tuple(CpuId(c) for c in core) for node in machine for core in node["cores"]],
            devices={
                resource: {
                    DeviceId(id): tuple(NumaId(n) for n in nodes or ())
                    for id, nodes in plugin.devices.items()
                }
                for resource, plugin in self.plugins.items()
            },
            unhealthy=frozenset(
                (resource, DeviceId(id))
                for resource, plugin in self.plugins.items()
                for id in plugin.unhealthy
            ),
            allocatable={
                name: base_units(quantity)
                for name, quantity in said.allocatable.items()
                if name != "pods"
            },
        )
        self.config = config

    def some_nodes(self, ids: Sequence[int]) -> tuple[int, ...] | None:
        if self.rng.random() < 0.1:
            return None
        return tuple(
            sorted(self.rng.sample(ids, 2 if self.rng.random() < 0.1 < len(ids) - 1 else 1))
        )

    def request(self) -> dict[str, str | int]:
        wanted: dict[str, str | int] = {}
        if self.rng.random() < 0.8:
            wanted["cpu"] = self.rng.choice(["1", "2", "2", "3", "4", "500m"])
            wanted["memory"] = self.rng.choice(["100Mi", "1Gi", "2500Mi", "5Gi"])
        if self.rng.random() < 0.2:
            wanted["hugepages-2Mi"] = self.rng.choice(["64Mi", "200Mi"])
        if self.rng.random() < 0.6:
            wanted[GPU] = self.rng.choice([1, 1, 2, 3, 4])
        if self.rng.random() < 0.2:
            wanted[NIC] = 1
        return wanted

    def next_pod(self, name: str) -> dict[str, Any]:
        containers = [self.request() for _ in range(self.rng.choice([1, 1, 1, 2]))]
        init: list[dict[str, str | int]] = []
        if self.rng.random() < 0.25:
            # Which of several re-usable devices the kubelet takes is chance; all is not.
            init = [{k: v for k, v in containers[0].items() if self.rng.random() < 0.8}]
            if GPU not in init[0] and NIC not in init[0] and self.rng.random() < 0.5:
                init = [{"cpu": self.rng.choice(["2", "4", "6"]), "memory": "100Mi"}]
        made: dict[str, Any] = pod(name, *containers, init=init)
        if init and self.rng.random() < 0.4:
            made["spec"]["initContainers"][0]["restartPolicy"] = "Always"
        return made

    def step(self, name: str) -> str:
        """One pod on both sides; the reason, or "" when it was admitted."""
        manifest = self.next_pod(name)
        real = self.kubelet.admit(manifest)
        answer = admit(self.model, parse_pod(manifest), prefer=first)
        about = (self.config, manifest, real, answer, self.model.pods)
        if isinstance(answer, Rejected):
            assert answer.reason == real.reason, about
            both = any(
                {GPU, NIC} <= set(c["resources"]["limits"]) for c in all_containers(manifest)
            )
            # Which of two resources that lack devices the kubelet names is chance.
            assert answer.message == real.message or both, about
            self.kubelet.remove(name)
            assert answer.state is not None
            self.model = answer.state
            return answer.reason
        assert real.admitted, about
        for ours, theirs in zip(answer.containers, real.containers, strict=True):
            assert {
                resource: tuple(sorted(d.id for d in ours.devices if d.resource == resource))
                for resource in {d.resource for d in ours.devices}
            } == {k: v for k, v in (theirs.devices or {}).items() if v}, about
            assert ours.cpus == (theirs.exclusive_cpus or ()), about
            assert sorted({n for block in ours.memory for n in block.numa}) == sorted(
                theirs.memory_nodes or ()
            ), about
            self.compare_affinity(answer, theirs, about)
        self.model = answer.state
        return ""

    def compare_affinity(self, answer: Admitted, theirs: Container, about: object) -> None:
        if theirs.affinity is not None and theirs.name in answer.affinity:
            assert answer.affinity[theirs.name] == theirs.affinity.nodes, about

    def remove_one(self) -> None:
        if self.model.pods:
            name = self.rng.choice(sorted(self.model.pods))
            self.kubelet.remove(name.name)
            self.model = without(self.model, name)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("policy", list(TopologyManagerPolicy))
def test_the_real_kubelet_decides_the_same(
    kubelet: StartKubelet, policy: TopologyManagerPolicy, scope: Scope
) -> None:
    outcomes: dict[str, int] = {}
    for seed in range(SEEDS):
        rng = random.Random(f"{policy} {scope} {seed}")
        with ExitStack() as stack:
            side = Side(rng, policy.value, scope.value, stack, kubelet)
            for number in range(12):
                reason = side.step(f"p{number}")
                outcomes[reason] = outcomes.get(reason, 0) + 1
                if rng.random() < 0.25:
                    side.remove_one()
    print(policy.value, scope.value, outcomes)
    assert outcomes[""] >= 20
    assert len(outcomes) >= 3, "the cases reach several reasons to reject"
