"""What a zone has, may hand out and has left, in every case that the real managers can make.

Each case drives the real managers and then compares every figure of every zone with a recount from
their own files. docs/publisher.md has the same cases as a table.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rte.model import PodName
from rte.publish.nrt import nrt
from tests.accounted import Node
from tests.observed import observe
from tests.real_kubelet import Kubelet, numa_nodes, pod
from tests.recount import published

DEVICE, OTHER = "example.com/gpu", "example.com/nic"
STATIC = {"cpuManagerPolicy": "static", "memoryManagerPolicy": "Static"}
SINGLE = {**STATIC, "topologyManagerPolicy": "single-numa-node"}
BEST = {**STATIC, "topologyManagerPolicy": "best-effort"}
POD_LEVEL = {"PodLevelResources": True, "PodLevelResourceManagers": True}
EIGHT = {f"d{n}": (n // 4,) for n in range(8)}

StartKubelet = Callable[..., Kubelet]


@pytest.fixture
def start(kubelet: StartKubelet) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(config: Mapping[str, Any], *, asks_api: bool = True, **options: Any) -> Node:
        options.setdefault("machine", numa_nodes(cpus=16, memory="64Gi", hugepages={"2Mi": 1024}))
        nodes.append(Node(kubelet(config, **options), asks_api=asks_api))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


Start = Callable[..., Node]


# CPUs


def test_reserved_cpus_are_not_allocatable_and_shared_ones_are_available(start: Start) -> None:
    node = start({**SINGLE, "reservedSystemCPUs": "0,1,16,8"})
    zones = node.check()
    assert [zone["cpu"] for zone in zones.values()] == [(16, 13, 13), (16, 15, 15)]
    node.run("exclusive", {"cpu": 4, "memory": "1Gi"})
    node.run("shared", {"cpu": "2500m", "memory": "1Gi"})
    burstable = pod("burstable", {"cpu": 2})
    burstable["spec"]["containers"][0]["resources"]["limits"] = {}
    node.admit(burstable)
    assert sum(node.available("cpu")) == 28 - 4
    node.remove("exclusive")
    assert sum(node.available("cpu")) == 28


def test_full_pcpus_only_counts_threads_and_refuses_odd_requests(start: Start) -> None:
    node = start({**SINGLE, "cpuManagerPolicyOptions": {"full-pcpus-only": "true"}})
    refused = node.admit(pod("odd", {"cpu": 3, "memory": "1Gi"}))
    assert refused.reason == "SMTAlignmentError"
    before = node.available("cpu")
    node.run("even", {"cpu": 6, "memory": "1Gi"})
    assert sum(node.available("cpu")) == sum(before) - 6


def test_no_more_cpus_are_available_than_whole_cores_are_left(start: Start) -> None:
    """Two CPUs of one NUMA node are free whose siblings are reserved: the kubelet fills a request
    up with them, but gives no container more than it has in whole cores of all nodes."""
    machine = numa_nodes(cpus=8)
    assert [node["cores"][0] for node in machine] == [[0, 8], [4, 12]]
    options = {"full-pcpus-only": "true"}
    config = {**SINGLE, "reservedSystemCPUs": "0,1", "cpuManagerPolicyOptions": options}
    node = start(config, machine=machine)
    assert node.available("cpu") == [6, 8]
    node.run("six", {"cpu": 6, "memory": "1Gi"})
    node.remove("six")
    node.run("eight", {"cpu": 8, "memory": "1Gi"})
    assert node.available("cpu") == [4, 0]
    refused = node.admit(pod("too-many", {"cpu": 6, "memory": "1Gi"}))
    assert refused.reason == "SMTAlignmentError"
    node.run("four", {"cpu": 4, "memory": "1Gi"})
    assert node.available("cpu") == [0, 0]


def test_odd_requests_break_cores_without_that_option(start: Start) -> None:
    node = start(SINGLE)
    for number in range(3):
        node.run(f"odd-{number}", {"cpu": 3, "memory": "1Gi"})
        node.check()


@pytest.mark.parametrize("policy", ["single-numa-node", "restricted"])
def test_what_no_manager_binds_is_the_nodes_total_or_in_no_zone(start: Start, policy: str) -> None:
    node = start({"topologyManagerPolicy": policy, "systemReserved": {"cpu": "1", "memory": "2Gi"}})
    node.plug(DEVICE, EIGHT)
    node.run("a", {"cpu": 4, "memory": "8Gi", DEVICE: 2})
    memory = (126 << 30) - (100 << 20) - (4 << 30)
    totals = {"cpu": 31, "memory": memory, "hugepages-2Mi": 4 << 30}
    node.check(totals if policy == "single-numa-node" else None)


# Memory


def test_memory_and_huge_pages_of_two_sizes(start: Start) -> None:
    machine = numa_nodes(cpus=16, memory="64Gi", hugepages={"2Mi": 512, "1Gi": 8})
    node = start(SINGLE, machine=machine)
    node.run("a", {"cpu": 2, "memory": "10Gi", "hugepages-1Gi": "2Gi", "hugepages-2Mi": "64Mi"})
    node.run("b", {"cpu": 2, "memory": "40Gi"}, {"cpu": 1, "memory": "3Gi"})
    assert node.available("hugepages-1Gi") == [6 << 30, 8 << 30]
    node.remove("a")
    node.check()


def test_memory_is_reserved_on_the_nodes_that_the_configuration_names(start: Start) -> None:
    reserved = [
        {"numaNode": 0, "limits": {"memory": "1Gi"}},
        {"numaNode": 1, "limits": {"memory": "3Gi", "hugepages-2Mi": "64Mi"}},
    ]
    node = start(
        {
            **SINGLE,
            "reservedSystemCPUs": "0,16",
            "systemReserved": {"memory": "4Gi", "hugepages-2Mi": "64Mi"},
            "evictionHard": {"memory.available": "0"},
            "reservedMemory": reserved,
        }
    )
    zones = list(node.check().values())
    assert zones[0]["memory"].allocatable - zones[1]["memory"].allocatable == 2 << 30
    assert zones[1]["hugepages-2Mi"].allocatable == (2 << 30) - (64 << 20)


def test_a_group_of_nodes_is_filled_in_order_and_ends_with_its_last_pod(start: Start) -> None:
    node = start(BEST)
    node.run("wide", {"cpu": 20, "memory": "90Gi"})
    first, second = node.available("memory")
    assert first == 0
    assert 0 < second < 40 << 30
    node.run("also", {"cpu": 2, "memory": "20Gi"})
    assert node.available("memory") == [0, second - (20 << 30)]
    node.remove("wide")
    node.run("small", {"cpu": 2, "memory": "1Gi"})  # the Memory Manager looks who has ended
    node.check()
    node.remove("also")
    node.remove("small")
    node.run("last", {"cpu": 2, "memory": "1Gi"})  # the group is no more
    assert min(node.available("memory")) > 60 << 30


def test_a_group_whose_pod_has_ended_is_counted_as_its_next_pod_will_find_it(start: Start) -> None:
    """The Memory Manager looks who has ended before the next admission, not sooner."""
    node = start(BEST)
    node.run("wide", {"cpu": 20, "memory": "90Gi"})
    node.run("also", {"cpu": 2, "memory": "20Gi"})
    left = node.available("memory")
    node.remove("also")
    # What comes back is taken from the group's first node, though it was of the second.
    assert node.available("memory") == [left[0] + (20 << 30), left[1]]
    node.run("also", {"cpu": 2, "memory": "20Gi"})
    assert node.available("memory") == left


def test_a_block_of_one_node_takes_it_out_of_the_group(start: Start) -> None:
    """In pod scope no hint says that a sidecar alone asks for huge pages: it gets them of two nodes
    even under single-numa-node, and the next container memory of one of them."""
    machine = numa_nodes(cpus=16, memory="16Gi", hugepages={"1Gi": 1})
    node = start({**SINGLE, "topologyManagerScope": "pod"}, machine=machine)
    body = pod(
        "a",
        {"cpu": 2, "memory": "64Mi"},
        init=[{"cpu": 2, "memory": "1Gi", "hugepages-1Gi": "2Gi"}],
    )
    body["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    assert node.admit(body).admitted
    assert sorted(node.available("memory")) == [0, (16 - 1 - 1) * (1 << 30) - (164 << 20)]


def test_a_group_ends_with_the_policy_that_allowed_it(start: Start) -> None:
    node = start(BEST)
    node.run("wide", {"cpu": 2, "memory": "90Gi"})
    node.check()
    node.kubelet.configure(SINGLE)
    (again,) = node.kubelet.restart()
    assert again.reason == "TopologyAffinityError"
    del node.alive["wide"]
    node.run("small", {"cpu": 2, "memory": "1Gi"})
    assert min(node.available("memory")) > 60 << 30


# Devices


def test_devices_of_no_one_and_several_nodes(start: Start) -> None:
    node = start(SINGLE)
    node.plug(
        DEVICE,
        {"none": None, "empty": (), "one-0": (0,), "one-1": (1,), "both": (0, 1), "b2": (0, 1)},
    )
    assert node.available(DEVICE) == [3, 3]
    taken = node.run("a", {DEVICE: 3}).devices(DEVICE)
    assert {"both", "b2"} < set(taken)
    assert sorted(node.available(DEVICE)) == [0, 1]
    node.remove("a")
    assert node.available(DEVICE) == [3, 3]


def test_devices_that_all_have_no_node_are_in_no_zone(start: Start) -> None:
    node = start(SINGLE)
    node.plug(DEVICE, {"a": None, "b": None})
    node.run("a", {DEVICE: 1})
    assert all(DEVICE not in zone for zone in node.check().values())


@pytest.mark.parametrize("ours", [True, False], ids=["of our plugin", "of another's"])
def test_an_unhealthy_device_is_not_offered_until_it_is_well(start: Start, ours: bool) -> None:
    node = start(SINGLE)
    node.plug(DEVICE, EIGHT, ours=ours)
    node.sicken(DEVICE, "d0", "d5")
    assert node.available(DEVICE) == [3, 3]
    assert [zone[DEVICE].capacity for zone in node.check().values()] == ([4, 4] if ours else [3, 3])
    held = node.run("a", {DEVICE: 2}).devices(DEVICE)
    node.sicken(DEVICE, held[0])  # it stays with its pod
    assert sum(node.available(DEVICE)) == 6
    assert sum(zone[DEVICE].capacity for zone in node.check().values()) == 8
    node.sicken(DEVICE)
    assert sum(node.available(DEVICE)) == 6
    node.remove("a")
    assert node.available(DEVICE) == [4, 4]


def test_a_late_plugin_adds_its_resource_and_a_lost_one_takes_it_away(start: Start) -> None:
    node = start(SINGLE)
    node.run("before", {"cpu": 2, "memory": "1Gi"})
    node.plug(DEVICE, EIGHT)
    assert node.available(DEVICE) == [4, 4]
    node.plug(OTHER, {"n0": (0,), "n1": (1,)})
    node.run("a", {DEVICE: 2, OTHER: 1, "cpu": 2, "memory": "1Gi"})
    assert sum(node.available(OTHER)) == 1
    node.plugins[OTHER].stop()
    node.kubelet.wait_devices(OTHER, 0)
    node.gone.add(OTHER)
    # Only what a pod still holds is known of it.
    assert [zone[OTHER] for zone in node.check().values() if OTHER in zone] == [(1, 0, 0)]
    node.gone.discard(OTHER)
    node.plugins[OTHER].serve(node.kubelet.plugin_dir)
    node.kubelet.wait_devices(OTHER, 2)
    assert sum(node.available(OTHER)) == 1


def test_devices_come_and_go_with_the_plugins_list(start: Start) -> None:
    node = start(SINGLE)
    plugin = node.plug(DEVICE, EIGHT)
    node.run("a", {DEVICE: 1})
    plugin.devices = {id: nodes for id, nodes in EIGHT.items() if id not in ("d3", "d7")}
    plugin.changed.put(True)
    node.kubelet.wait_devices(DEVICE, 6)
    assert sum(node.available(DEVICE)) == 5
    plugin.devices = {**plugin.devices, "new": (1,)}
    plugin.changed.put(True)
    node.kubelet.wait_devices(DEVICE, 7)
    assert sum(node.available(DEVICE)) == 6


# Containers of all kinds


@pytest.mark.parametrize("asks_api", [True, False], ids=["by UID", "by what it holds"])
def test_what_an_init_container_had_stays_with_the_pod(start: Start, asks_api: bool) -> None:
    """PodResources lists of it only what the containers have taken over."""
    node = start(SINGLE, asks_api=asks_api)
    node.plug(DEVICE, EIGHT)
    node.run(
        "a",
        {DEVICE: 1, "cpu": 2, "memory": "4Gi"},
        init=[{DEVICE: 3, "cpu": 6, "memory": "9Gi"}],
    )
    assert sum(node.available(DEVICE)) == 5
    assert sum(node.available("cpu")) == 30 - 6
    assert not node.admit(pod("b", {DEVICE: 2}, {DEVICE: 2}, {DEVICE: 2})).admitted
    node.run("c", {DEVICE: 4})
    assert sorted(node.available(DEVICE)) == [0, 1]
    node.remove("a")
    node.run("d", {"cpu": 1, "memory": "1Gi"})
    assert sorted(node.available(DEVICE)) == [0, 4]


@pytest.mark.parametrize("asks_api", [True, False], ids=["by UID", "by what it holds"])
def test_what_an_init_container_had_counts_though_it_is_not_healthy(
    start: Start, asks_api: bool
) -> None:
    node = start(SINGLE, asks_api=asks_api)
    node.plug(DEVICE, {**EIGHT, "both": (0, 1)})
    node.plug(OTHER, {"n0": (0,), "n1": (1,), "n2": (0, 1)})
    node.run("a", {DEVICE: 1}, init=[{DEVICE: 2, OTHER: 2}])
    node.plugins[OTHER].stop()
    node.kubelet.wait_devices(OTHER, 0)
    node.gone.add(OTHER)
    assert any(zone[OTHER].capacity for zone in node.check().values() if OTHER in zone)
    node.plugins[OTHER].serve(node.kubelet.plugin_dir)
    node.kubelet.wait_devices(OTHER, 3)
    node.gone.discard(OTHER)
    assert any(node.available(OTHER))


def test_an_init_container_alone_may_hold_devices(start: Start) -> None:
    node = start(SINGLE)
    node.plug(DEVICE, EIGHT)
    node.run("a", {"cpu": "500m"}, init=[{DEVICE: 2}, {DEVICE: 1}])
    assert sum(node.available(DEVICE)) == 6


def test_a_sidecar_keeps_its_own_and_its_neighbours_get_others(start: Start) -> None:
    node = start(SINGLE)
    node.plug(DEVICE, EIGHT)
    body = pod(
        "a",
        {DEVICE: 1, "cpu": 2, "memory": "4Gi"},
        init=[{DEVICE: 1, "cpu": 2, "memory": "1Gi"}, {DEVICE: 2, "cpu": 4, "memory": "2Gi"}],
    )
    body["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    assert node.admit(body).admitted
    assert sum(node.available(DEVICE)) == 5


# Pods of all kinds


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_holds_nothing_though_it_is_still_there(
    start: Start, phase: str
) -> None:
    node = start(SINGLE)
    node.plug(DEVICE, EIGHT)
    node.run("a", {DEVICE: 4, "cpu": 4, "memory": "8Gi"}, init=[{DEVICE: 4}])
    node.run("b", {DEVICE: 1, "cpu": 2, "memory": "1Gi"})
    node.kubelet.finish("a", phase=phase)
    del node.alive["a"]
    assert sum(node.available(DEVICE)) == 7
    node.run("c", {DEVICE: 4, "cpu": 4, "memory": "8Gi"})
    node.check()


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_kubelets_before_1_34_list_pods_that_have_ended(start: Start, phase: str) -> None:
    gates = {"KubeletPodResourcesListUseActivePods": False}
    node = start({**SINGLE, "featureGates": gates})
    node.plug(DEVICE, EIGHT)
    full = node.check()
    node.run("a", {DEVICE: 4, "cpu": 4, "memory": "8Gi"}, init=[{DEVICE: 4, "cpu": 6}])
    node.run("b", {"cpu": 2, "memory": "1Gi"})
    for name in ("a", "b"):
        node.kubelet.finish(name, phase=phase)
        del node.alive[name]
    assert {pod.name for pod in node.kubelet.state().pods} == {"a", "b"}
    assert node.check() == full
    refused = node.admit(pod("c", {DEVICE: 2, "cpu": 2, "memory": "1Gi"}, {DEVICE: 5}))
    assert not refused.admitted
    assert node.check() == full


def test_a_rejected_pod_holds_nothing_though_managers_had_given_it_some(start: Start) -> None:
    node = start({**SINGLE, "cpuManagerPolicyOptions": {"full-pcpus-only": "true"}})
    node.plug(DEVICE, EIGHT)
    refused = node.admit(pod("a", {DEVICE: 2, "cpu": 2, "memory": "1Gi"}, {DEVICE: 5}))
    assert not refused.admitted
    assert sum(node.available(DEVICE)) == 8
    refused = node.admit(pod("b", {DEVICE: 2, "cpu": 3, "memory": "1Gi"}))
    assert refused.reason == "SMTAlignmentError"
    assert sum(node.available(DEVICE)) == 8


@pytest.mark.parametrize("level", ["pod", "container"])
def test_a_new_pod_beside_leftovers_of_its_like_is_believed_at_once(
    start: Start, level: str
) -> None:
    """A rejected pod's memory stays in the file until the next admission, and looks like that of
    the pods beside it."""
    node = start(
        {
            **STATIC,
            "topologyManagerPolicy": "best-effort",
            "topologyManagerScope": level,
            "featureGates": POD_LEVEL,
        }
    )
    node.plug(DEVICE, EIGHT)
    believed = node.look()
    for number in range(6):
        body = pod(f"p{number}", {"cpu": "500m", "memory": "1Gi", DEVICE: 1}, {})
        budget = {"cpu": "2", "memory": "2Gi"}
        body["spec"]["resources"] = {"requests": budget, "limits": budget}
        node.admit(body)
        refused = node.admit(pod(f"q{number}", {"cpu": 1, "memory": "1Gi"}, {DEVICE: 9}))
        assert not refused.admitted
        look = node.look()
        assert node.doubt(look, believed) is None
        believed = look
        node.run(f"r{number}", {"cpu": 1, "memory": "1Gi"})
        look = node.look()
        assert node.doubt(look, believed) is None
        believed = look


@pytest.mark.parametrize("scope", ["pod", "container"])
def test_pod_level_resources_are_the_pods_budget(start: Start, scope: str) -> None:
    node = start(
        {
            **STATIC,
            "topologyManagerPolicy": "restricted",
            "topologyManagerScope": scope,
            "featureGates": POD_LEVEL,
        }
    )
    node.plug(DEVICE, EIGHT)
    body = pod("a", {"cpu": 2, "memory": "4Gi", DEVICE: 1}, {"cpu": "500m", "memory": "1Gi"})
    budget = {"cpu": "6", "memory": "8Gi"}
    body["spec"]["resources"] = {"requests": budget, "limits": budget}
    assert node.admit(body).admitted
    zones = node.check().values()
    if scope == "pod":
        assert sum(zone["cpu"].available for zone in zones) == 30 - 6
    node.run("b", {"cpu": 2, "memory": "1Gi"})
    node.check()
    node.remove("a")
    node.check()


def test_what_the_managers_lose_of_a_pods_budget_at_a_restart_is_not_available(
    start: Start,
) -> None:
    """1.37.2 hands out the budget anew, and remembers only the second."""
    config = {"topologyManagerPolicy": "best-effort", "topologyManagerScope": "pod"}
    node = start({**STATIC, **config, "featureGates": POD_LEVEL})
    body = pod("a", {})
    budget = {"cpu": "4", "memory": "2Gi"}
    body["spec"]["resources"] = {"requests": budget, "limits": budget}
    assert node.admit(body).admitted
    assert sum(node.available("cpu")) == 30 - 4
    (again,) = node.kubelet.restart()
    assert again.admitted
    assert sum(node.available("cpu")) == 30 - 8
    node.remove("a")
    node.run("b", {"cpu": 2, "memory": "1Gi"})
    assert sum(node.available("cpu")) == 30 - 4 - 2


def test_what_an_allocation_that_fails_leaves_of_a_budget_is_not_available(start: Start) -> None:
    """1.37.2 keeps the budget when a container asks for more than there is of it."""
    config = {"topologyManagerPolicy": "best-effort", "topologyManagerScope": "pod"}
    node = start({**STATIC, **config, "featureGates": POD_LEVEL})
    body = pod("a", {"cpu": 6, "memory": "1Gi"})
    budget = {"cpu": "4", "memory": "2Gi"}
    body["spec"]["resources"] = {"requests": budget, "limits": budget}
    assert node.admit(body).reason == "UnexpectedAdmissionError"
    assert sum(node.available("cpu")) == 30 - 4
    node.run("b", {"cpu": 26, "memory": "1Gi"})
    assert sum(node.available("cpu")) == 0


def test_a_static_pod_counts_as_any_other(start: Start) -> None:
    node = start(SINGLE)
    node.plug(DEVICE, EIGHT)
    body = pod("a-node", {DEVICE: 2, "cpu": 2, "memory": "1Gi"}, namespace="kube-system")
    uid = "8fbd8c04d33c3a0eb8c9e8a8a2ab5f04"  # a static pod's is no UUID but a hash
    body["metadata"] |= {"uid": uid, "annotations": {"kubernetes.io/config.source": "file"}}
    assert node.admit(body).uid == uid
    assert sum(node.available(DEVICE)) == 6


def test_pods_and_resources_that_are_excluded_do_not_count(start: Start) -> None:
    node = start(SINGLE)
    node.plug(DEVICE, EIGHT)
    node.plug(OTHER, {"n0": (0,)})
    node.run("a", {DEVICE: 2, "cpu": 2, "memory": "1Gi"})
    node.run("b", {DEVICE: 1, "cpu": 2, "memory": "1Gi"})
    body = nrt(
        observe(node.kubelet, node.channel, node.facts()),
        node_name="n",
        node_uid=None,
        version="test",
        exclude=(OTHER, "memory"),
        ignored={PodName(namespace="default", name="a")},
    )
    zones = published(body).values()
    assert sum(zone[DEVICE].available for zone in zones) == 7
    assert sum(zone["cpu"].available for zone in zones) == 28
    assert not any({OTHER, "memory"} & zone.keys() for zone in zones)


# Machines of all kinds


def test_zones_are_the_nodes_with_cpus_whatever_the_kernel_calls_them(start: Start) -> None:
    machine = numa_nodes((0, 3, 8), cpus=8, memory="16Gi")
    machine[1]["cores"] = []  # memory only
    node = start(
        {**SINGLE, "topologyManagerPolicyOptions": {"max-allowable-numa-nodes": "16"}},
        machine=machine,
    )
    node.plug(DEVICE, {"a": (0,), "b": (8,), "c": (3, 8)})
    node.run("a", {DEVICE: 2, "cpu": 2, "memory": "1Gi"})
    assert list(node.check()) == ["node-0", "node-1"]
    assert node.available(DEVICE) == [1, 0]


def test_all_is_as_before_after_a_restart(start: Start, tmp_path: Path) -> None:
    node = start(SINGLE)
    node.plug(DEVICE, EIGHT)
    node.run("a", {DEVICE: 2, "cpu": 4, "memory": "8Gi"}, init=[{DEVICE: 3}])
    before = node.check()
    node.kubelet.kill()
    node.plugins[DEVICE].stop()
    node.kubelet.start()
    node.plugins[DEVICE].serve(node.kubelet.plugin_dir)
    node.kubelet.wait_devices(DEVICE, 8)
    assert node.check() == before
