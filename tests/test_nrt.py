"""The NodeResourceTopology object: figures, attributes, zones, patches and size."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rte.graph.build import build
from rte.graph.groups import groups
from rte.model import (
    Allocatable,
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    Fault,
    FaultClass,
    Gpu,
    LinkPeer,
    Machine,
    MemoryBlock,
    MigSlice,
    Nic,
    NumaId,
    NumaNode,
    NumaSource,
    NvLinkEnd,
    Observation,
    PciDevice,
    PodFacts,
    PodName,
    PodUse,
    Policy,
    Scope,
    TopologyManagerPolicy,
    Usage,
    huge_pages_name,
    pci_address,
    thousandths,
)
from rte.publish.accounting import Unbound
from rte.publish.fingerprint import InformerMode, fingerprint
from rte.publish.forms import binary_quantity, decimal_quantity
from rte.publish.nrt import Detail, FingerprintMethod, nrt
from rte.publish.patch import ECHO, changes, freed_something, may_wake, rest, with_echo
from rte.publish.placement import METADATA, VECTOR
from rte.sources.recorded import read_recorded
from tests.real_apiserver import ApiServer
from tests.structural import check, schema

ROOT = Path(__file__).parent
CRD = ROOT.parent / "crds" / "noderesourcetopology" / "crd.yaml"
MACHINES = ROOT / "machines"
GI = 2**30
SINGLE = Policy(
    topology_manager=TopologyManagerPolicy.SINGLE_NUMA_NODE,
    cpu_manager="static",
    memory_manager="Static",
)
GPU = "nvidia.com/gpu"


def node(id: int, cpus: range = range(0), memory: int = 64, **fields: Any) -> NumaNode:
    distance = fields.pop("distance", {})
    return NumaNode(
        id=NumaId(id),
        cpus=tuple(CpuId(cpu) for cpu in cpus),
        memory_bytes=memory * GI or None,
        distance={NumaId(to): far for to, far in distance.items()},
        **fields,
    )


TWO_NODES = Machine(
    numa_nodes=(
        node(0, range(0, 8), distance={0: 10, 1: 21}),
        node(1, range(8, 16), distance={0: 21, 1: 10}),
    )
)


def device(id: str, *numa: int, resource: str = GPU) -> DeviceUse:
    return DeviceUse(resource=resource, id=DeviceId(id), numa=tuple(NumaId(n) for n in numa))


def block(size_gi: int, *numa: int, type: str = "memory") -> MemoryBlock:
    return MemoryBlock(type=type, size_bytes=size_gi * GI, numa=tuple(NumaId(n) for n in numa))


def cpus(*ids: int) -> tuple[CpuId, ...]:
    return tuple(CpuId(cpu) for cpu in ids)


def pod(name: str, **fields: Any) -> PodUse:
    container = ContainerUse(name="main", **fields)
    return PodUse(pod=PodName(namespace="ns", name=name), containers=(container,))


ALLOCATABLE = Allocatable(
    devices=tuple(device(f"GPU-{i}", i // 2) for i in range(4)),
    cpus=cpus(*range(1, 16)),
    memory=(block(60, 0), block(60, 1)),
)


def look(*pods: PodUse, **fields: Any) -> Observation:
    values: dict[str, Any] = {
        "machine": TWO_NODES,
        "usage": Usage(pods=pods),
        "allocatable": ALLOCATABLE,
        "policy": SINGLE,
        **fields,
    }
    return Observation(**values)


def body(observation: Observation, **options: Any) -> dict[str, Any]:
    graph = build(observation.machine)
    values: dict[str, Any] = {"node_name": "n1", "node_uid": "uid-1", "version": "0.1", **options}
    return nrt(observation, graph, groups=groups(graph), **values)


def figures(object_: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Zone → resource → `capacity allocatable available`."""
    return {
        zone["name"]: {
            r["name"]: f"{r['capacity']} {r['allocatable']} {r['available']}"
            for r in zone["resources"]
        }
        for zone in object_["zones"]
        if zone["type"] == "Node"
    }


def attributes(holder: Mapping[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in holder.get("attributes", ())}


def zone(object_: Mapping[str, Any], name: str) -> dict[str, Any]:
    (found,) = [zone for zone in object_["zones"] if zone["name"] == name]
    return dict(found)


# Figures


def test_a_free_node() -> None:
    assert figures(body(look())) == {
        "node-0": {"cpu": "8 7 7", "memory": "64Gi 60Gi 60Gi", GPU: "2 2 2"},
        "node-1": {"cpu": "8 8 8", "memory": "64Gi 60Gi 60Gi", GPU: "2 2 2"},
    }


def test_what_a_pod_holds_is_not_available() -> None:
    held = pod("a", cpus=cpus(8, 9), devices=(device("GPU-3", 1),), memory=(block(10, 1),))
    assert figures(body(look(held)))["node-1"] == {
        "cpu": "8 8 6",
        "memory": "64Gi 60Gi 50Gi",
        GPU: "2 2 1",
    }


def test_a_pods_own_budget_is_counted_once_beside_its_containers() -> None:
    held = replace(
        pod("a", cpus=cpus(8), memory=(block(4, 1),)), cpus=cpus(8, 9), memory=(block(10, 1),)
    )
    found = figures(body(look(held)))["node-1"]
    assert (found["cpu"], found["memory"]) == ("8 8 6", "64Gi 60Gi 50Gi")


def test_an_unhealthy_device_is_capacity_and_not_allocatable() -> None:
    healthy = replace(ALLOCATABLE, devices=ALLOCATABLE.devices[:3])
    free = look(allocatable=healthy)
    assert figures(body(free))["node-1"][GPU] == "1 1 1", "the kubelet alone does not name it"
    assert figures(body(free, ours=ALLOCATABLE.devices))["node-1"][GPU] == "2 1 1"
    held = look(pod("a", devices=(device("GPU-3", 1),)), allocatable=healthy)
    assert figures(body(held))["node-1"][GPU] == "2 1 1", "in use and unhealthy"


def test_a_zone_whose_devices_have_all_failed_still_lists_them() -> None:
    gone = look(allocatable=replace(ALLOCATABLE, devices=()))
    found = figures(body(gone, ours=ALLOCATABLE.devices))
    assert found["node-0"][GPU] == found["node-1"][GPU] == "2 0 0"
    assert GPU not in figures(body(gone))["node-0"]


def test_a_device_of_several_nodes_counts_in_each_and_leaves_all() -> None:
    both = replace(ALLOCATABLE, devices=(device("X", 0, 1), device("Y", 1)))
    assert [f[GPU] for f in figures(body(look(allocatable=both))).values()] == ["1 1 1", "2 2 2"]
    held = look(pod("a", devices=(device("X", 0, 1),)), allocatable=both)
    assert [f[GPU] for f in figures(body(held)).values()] == ["1 1 0", "2 2 1"]


def test_the_kubelets_word_on_numa_nodes_stands_above_the_plugins() -> None:
    moved = replace(ALLOCATABLE, devices=(device("GPU-0", 1),))
    found = figures(body(look(allocatable=moved), ours=(device("GPU-0", 0),)))
    assert GPU not in found["node-0"]
    assert found["node-1"][GPU] == "1 1 1"


def test_devices_without_a_numa_node_are_in_no_zone() -> None:
    bare = replace(ALLOCATABLE, devices=(device("GPU-0"), device("GPU-1", 7)))
    assert all(GPU not in zone for zone in figures(body(look(allocatable=bare))).values())


def test_a_claimed_gpu_counts_as_used_with_its_replicas() -> None:
    replicas = tuple(device(f"GPU-{i}::{n}", i // 2) for i in range(4) for n in range(2))
    shared = look(allocatable=replace(ALLOCATABLE, devices=replicas))
    found = figures(body(shared, claimed={"GPU-0"}))
    assert (found["node-0"][GPU], found["node-1"][GPU]) == ("4 4 2", "4 4 4")


def test_two_resources_may_use_the_same_ids() -> None:
    nics = tuple(device("0", n, resource="a.com/nic") for n in (0, 1))
    mixed = replace(ALLOCATABLE, devices=(*nics[:1], device("0", 1)))
    held = look(pod("a", devices=(nics[0],)), allocatable=mixed)
    assert figures(body(held))["node-0"]["a.com/nic"] == "1 1 0"
    assert figures(body(held))["node-1"][GPU] == "1 1 1"


def test_excluded_resources_are_listed_nowhere() -> None:
    found = body(look(), exclude=(GPU, "memory"))
    assert all(set(zone) == {"cpu"} for zone in figures(found).values())
    assert f"largestAligned.{GPU}" not in attributes(found)


HUGE = Machine(
    numa_nodes=(
        node(0, range(0, 8), huge_pages={2**21: 512, 2**30: 0}),
        node(1, range(8, 16), huge_pages={2**21: 0, 2**30: 4}),
    )
)


def test_bound_huge_pages_of_all_sizes() -> None:
    some = replace(
        ALLOCATABLE,
        memory=(
            *ALLOCATABLE.memory,
            block(1, 0, type="hugepages-2Mi"),
            block(3, 1, type="hugepages-1Gi"),
        ),
    )
    held = pod("a", memory=(block(2, 1, type="hugepages-1Gi"),))
    found = figures(body(look(held, machine=HUGE, allocatable=some)))
    assert found["node-0"]["hugepages-2Mi"] == "1Gi 1Gi 1Gi"
    assert found["node-1"]["hugepages-1Gi"] == "4Gi 3Gi 1Gi"
    # A pod that binds no memory is given a device only in a zone that lists what it asks for.
    assert found["node-0"]["hugepages-1Gi"] == "0 0 0"
    assert found["node-1"]["hugepages-2Mi"] == "0 0 0"


def test_a_group_of_nodes_fills_up_in_order_and_says_so() -> None:
    held = pod("a", memory=(block(70, 0, 1),))
    restricted = replace(SINGLE, topology_manager=TopologyManagerPolicy.RESTRICTED)
    found = body(look(held, policy=restricted))
    memory = [zone["memory"] for zone in figures(found).values()]
    assert memory == ["64Gi 60Gi 0", "64Gi 60Gi 50Gi"]
    assert attributes(zone(found, "node-1"))["memoryGroup"] == "0,1"
    # Under single-numa-node the kubelet gives no single-node hint for a grouped node.
    assert [zone["memory"] for zone in figures(body(look(held))).values()] == ["64Gi 60Gi 0"] * 2


UNBOUND = Policy(topology_manager=TopologyManagerPolicy.SINGLE_NUMA_NODE)
TOTALS = {"cpu": 14, "memory": 120 * GI, "hugepages-2Mi": GI, "hugepages-1Gi": 0}
NOTHING_BOUND = Allocatable(devices=ALLOCATABLE.devices)


def test_unbound_resources_under_single_numa_node_are_the_nodes_total_in_each_zone() -> None:
    held = pod("a", devices=(device("GPU-0", 0),))
    seen = look(
        held, machine=HUGE, policy=UNBOUND, allocatable=NOTHING_BOUND, node_allocatable=TOTALS
    )
    found = body(seen)
    total = {"cpu": "14 14 14", "memory": "120Gi 120Gi 120Gi", "hugepages-2Mi": "1Gi 1Gi 1Gi"}
    assert figures(found) == {"node-0": {**total, GPU: "2 2 1"}, "node-1": {**total, GPU: "2 2 2"}}
    assert attributes(found)["unboundResources"] == "cpu,hugepages-1Gi,hugepages-2Mi,memory"


def test_unbound_totals_are_the_machines_where_the_node_was_not_read() -> None:
    found = figures(body(look(policy=UNBOUND, allocatable=NOTHING_BOUND)))
    assert found["node-0"]["cpu"] == "16 16 16"
    assert found["node-1"]["memory"] == "128Gi 128Gi 128Gi"


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted"])
def test_unbound_resources_are_in_no_zone_under_any_other_policy(policy: str) -> None:
    other = Policy(topology_manager=TopologyManagerPolicy(policy))
    found = body(look(policy=other, allocatable=NOTHING_BOUND, node_allocatable=TOTALS))
    assert figures(found) == {"node-0": {GPU: "2 2 2"}, "node-1": {GPU: "2 2 2"}}
    assert attributes(found)["unboundResources"] == "cpu,memory"


def test_unbound_resources_by_zone_are_its_physical_share() -> None:
    seen = look(machine=HUGE, policy=UNBOUND, allocatable=NOTHING_BOUND, node_allocatable=TOTALS)
    found = figures(body(seen, unbound=Unbound.ZONE))
    assert found["node-0"]["cpu"] == "8 7 7"
    assert found["node-0"]["hugepages-2Mi"] == "1Gi 1Gi 1Gi"
    assert found["node-1"]["memory"] == "64Gi 60Gi 60Gi"
    assert "hugepages-2Mi" not in found["node-1"]


def test_only_one_manager_off() -> None:
    cpu_only = replace(SINGLE, memory_manager="None")
    no_memory = replace(ALLOCATABLE, memory=())
    found = body(look(policy=cpu_only, allocatable=no_memory, node_allocatable=TOTALS))
    assert figures(found)["node-0"]["cpu"] == "8 7 7"
    assert figures(found)["node-0"]["memory"] == "120Gi 120Gi 120Gi"
    assert attributes(found)["unboundResources"] == "memory"


def test_without_a_readable_policy_nothing_is_claimed_of_it() -> None:
    found = body(look(policy=None))
    assert figures(found)["node-0"] == {"cpu": "8 7 7", "memory": "64Gi 60Gi 60Gi", GPU: "2 2 2"}
    assert not [name for name in attributes(found) if "Manager" in name]
    bare = body(look(policy=None, allocatable=NOTHING_BOUND))
    assert figures(bare)["node-0"] == {GPU: "2 2 2"}


# Zones


def test_zones_are_numbered_without_gaps_whatever_the_kernel_calls_them() -> None:
    power9 = Machine(
        numa_nodes=(
            node(0, range(0, 8), distance={0: 10, 8: 40, 250: 80}),
            node(8, range(8, 16), distance={0: 40, 8: 10, 250: 80}),
            node(250, memory=16),
        )
    )
    on_8 = Allocatable(devices=(device("GPU-0", 8), device("GPU-1", 250)), cpus=cpus(8))
    found = body(look(machine=power9, allocatable=on_8, policy=SINGLE))
    assert [z["name"] for z in found["zones"]] == ["node-0", "node-1"]
    second = zone(found, "node-1")
    assert attributes(second) == {"numaNode": "8"}
    assert second["costs"] == [{"name": "node-0", "value": 40}, {"name": "node-1", "value": 10}]
    assert figures(found)["node-1"][GPU] == "1 1 1"
    full = zone(body(look(machine=power9), detail=Detail.FULL), "memory-250")
    assert (full["type"], attributes(full)) == ("Memory", {"numaNode": "250", "memory": "16Gi"})


def test_a_node_without_distances_still_is_10_from_itself() -> None:
    found = body(look(machine=Machine(numa_nodes=(node(3, range(4)),))))
    assert zone(found, "node-0")["costs"] == [{"name": "node-0", "value": 10}]


def test_zones_stop_before_the_id_that_crashes_the_scheduler() -> None:
    many = Machine(numa_nodes=tuple(node(i, range(i, i + 1)) for i in range(70)))
    names = [z["name"] for z in body(look(machine=many))["zones"]]
    assert names == [f"node-{i}" for i in range(64)]


def gpu(number: int, *, peers: tuple[int, ...] = (), **fields: Any) -> Gpu:
    return Gpu(
        number=number,
        pci=pci_address(f"0000:{number + 1:02x}:00.0"),
        uuid=DeviceId(f"GPU-{number}"),
        product="H100",
        links=tuple(
            NvLinkEnd(
                peer=LinkPeer.GPU,
                remote=pci_address(f"0000:{peer + 1:02x}:00.0"),
                lanes=4,
                lane_megabytes_per_s=25_000,
            )
            for peer in peers
        ),
        **fields,
    )


def function(number: int, numa: int | None, source: NumaSource = NumaSource.SYSFS) -> PciDevice:
    return PciDevice(
        address=pci_address(f"0000:{number + 1:02x}:00.0"),
        root="pci0000:00",
        vendor=0x10DE,
        device=0x2330,
        class_code=0x030200,
        numa=None if numa is None else NumaId(numa),
        numa_from=None if numa is None else source,
    )


PAIRS = replace(
    TWO_NODES,
    gpus=(gpu(0, peers=(1,)), gpu(1, peers=(0,)), gpu(2, peers=(3,)), gpu(3, peers=(2,))),
    pci=(function(0, 0), function(1, 0), function(2, 1), function(3, 1)),
    nics=(
        Nic(pci=None, netdevs=("bond0",), kind="bond", numa=NumaId(1)),
        Nic(pci=pci_address("0000:09:00.1"), physical_function=pci_address("0000:09:00.0")),
    ),
)


def test_gpu_zones_say_what_they_are_and_carry_no_resources() -> None:
    bad = {
        PAIRS.gpus[1].pci: (Fault(severity=FaultClass.WITHHOLD, reason="xid-79"),),
        PAIRS.gpus[2].pci: (
            Fault(severity=FaultClass.DEGRADED, reason="lanes"),
            Fault(severity=FaultClass.INFO, reason="hot"),
        ),
        PAIRS.gpus[3].pci: (Fault(severity=FaultClass.INFO, reason="hot"),),
    }
    found = body(look(machine=PAIRS, faults=bad))
    assert attributes(zone(found, "gpu-0")) == {
        "health": "healthy",
        "nvlinkGroup": "group-0",
        "pci": "0000:01:00.0",
        "uuid": "GPU-0",
    }
    said = [attributes(zone(found, f"gpu-{i}")) for i in range(4)]
    assert [(s["health"], s.get("healthReason")) for s in said] == [
        ("healthy", None),
        ("unhealthy", "xid-79"),
        ("degraded", "lanes"),
        ("healthy", None),
    ]
    assert [zone(found, f"gpu-{i}")["parent"] for i in range(4)] == ["node-0"] * 2 + ["node-1"] * 2
    group = zone(found, "group-1")
    assert attributes(group) == {"shape": "mesh", "gpus": "gpu-2,gpu-3"}
    assert all("resources" not in z for z in found["zones"] if z["type"] != "Node")


def test_cordons_and_faults_of_slices_are_the_gpus_health() -> None:
    part = MigSlice(
        id=DeviceId("MIG-1"), profile="1g.10gb", memory_bytes=1, gpu_instance=3, compute_instance=0
    )
    cut = replace(PAIRS.gpus[2], mig_enabled=True, slices=(part,), links=())
    machine = replace(PAIRS, gpus=(*PAIRS.gpus[:2], cut, PAIRS.gpus[3]))
    one = Fault(severity=FaultClass.WITHHOLD, reason="xid-94", gpu_instance=3)
    rows: list[tuple[dict[str, str], Any, dict[str, tuple[str, str]]]] = [
        ({"GPU-0": "fan"}, {}, {"gpu-0": ("unhealthy", "withheld")}),
        ({PAIRS.gpus[1].pci: "fan"}, {}, {"gpu-1": ("unhealthy", "withheld")}),
        ({"MIG-1": "test"}, {}, {"gpu-2": ("degraded", "withheld")}),
        ({"MIG-1": "test"}, {cut.pci: (one,)}, {"gpu-2": ("degraded", "withheld,xid-94")}),
        ({"elsewhere": "-"}, {PAIRS.gpus[3].pci: (one,)}, {"gpu-3": ("unhealthy", "xid-94")}),
    ]
    for withheld, faults, expected in rows:
        found = body(replace(look(machine=machine, faults=faults), withheld=withheld))
        said = {f"gpu-{i}": attributes(zone(found, f"gpu-{i}")) for i in range(4)}
        assert {
            name: (values["health"], values["healthReason"])
            for name, values in said.items()
            if values["health"] != "healthy"
        } == expected


def test_a_lost_gpu_keeps_its_zone_and_says_so() -> None:
    lost = replace(PAIRS.gpus[1], uuid=None, lost="fell off the bus", links=())
    machine = replace(PAIRS, gpus=(PAIRS.gpus[0], lost, *PAIRS.gpus[2:]))
    found = body(look(machine=machine))
    assert [z["name"] for z in found["zones"] if z["type"] == "NVLinkGroup"] == ["group-0"]
    said = attributes(zone(found, "gpu-1"))
    assert said == {"health": "unhealthy", "healthReason": "lost", "pci": "0000:02:00.0"}


def test_an_inferred_numa_node_gives_a_zone_nothing() -> None:
    guessed = replace(PAIRS, pci=(function(0, 0, NumaSource.LOCAL_CPUS), *PAIRS.pci[1:]))
    found = body(look(machine=guessed))
    assert "parent" not in zone(found, "gpu-0")
    assert attributes(zone(body(look(machine=guessed), detail=Detail.NODE), "node-0")) == {
        "gpus": "gpu-1",
        "nvlinkGroups": "group-0",
    }


def test_detail_node_names_gpus_and_groups_in_the_numa_zones() -> None:
    found = body(look(machine=PAIRS), detail=Detail.NODE)
    assert [z["name"] for z in found["zones"]] == ["node-0", "node-1"]
    assert attributes(zone(found, "node-1")) == {"gpus": "gpu-2,gpu-3", "nvlinkGroups": "group-1"}


def test_detail_full_has_links_and_costs() -> None:
    found = body(look(machine=PAIRS), detail=Detail.FULL)
    first = zone(found, "gpu-0")
    assert attributes(first)["nvlinks.gpu-1"] == "4"
    assert attributes(first)["product"] == "H100"
    assert {"name": "gpu-1", "value": 1} in first["costs"]
    nics = [z for z in found["zones"] if z["type"] == "NIC"]
    assert [(z["name"], z["parent"], attributes(z)) for z in nics] == [
        ("nic-0", "node-1", {"kind": "bond", "netdev": "bond0"})
    ]


def test_switches_are_the_upstream_ports_above_gpus_and_nics() -> None:
    machine = read_recorded(MACHINES / "hgx-h100-oci")
    found = body(look(machine=machine), detail=Detail.FULL)
    switches = [z for z in found["zones"] if z["type"] == "PCIeSwitch"]
    by_name = {z["name"]: z for z in found["zones"]}
    assert switches
    for item in found["zones"]:
        if item["type"] == "GPU":
            assert by_name[item["parent"]]["type"] == "PCIeSwitch"
    assert {z["parent"] for z in switches} <= {"node-0", "node-1"} | {z["name"] for z in switches}
    bridges = {d.address for d in machine.pci if d.is_bridge}
    assert {attributes(z)["pci"] for z in switches} <= bridges


# The object's attributes


def test_attributes_of_the_policy() -> None:
    policy = replace(SINGLE, scope=Scope.POD, max_numa_nodes=16, reserved_cpus=cpus(0, 1, 2, 8))
    said = attributes(body(look(policy=policy)))
    assert said["topologyManagerPolicy"] == "single-numa-node"
    assert said["topologyManagerScope"] == "pod"
    assert said["topologyManagerMaxNUMANodes"] == "16"
    assert said["cpuManagerPolicy"] == "static"
    assert said["memoryManagerPolicy"] == "Static"
    assert said["reservedCPUs"] == "0-2,8"
    assert said["rteVersion"] == "0.1"
    assert attributes(body(look()))["topologyManagerMaxNUMANodes"] == "8"


def facts(name: str, phase: str = "Running", **requests: str) -> PodFacts:
    named = {key.replace("_", "/"): value for key, value in requests.items()}
    pod_name = PodName(namespace="ns", name=name)
    return PodFacts(pod=pod_name, phase=phase, qos="Guaranteed", requests={"main": named})


def expected_fingerprint(*names: str) -> str:
    return fingerprint(PodName(namespace="ns", name=name) for name in names)


def test_the_fingerprint_covers_the_pods_that_a_reader_of_this_object_counts() -> None:
    held = pod("a", devices=(device("GPU-0", 0),))
    shared = {"mode": "with-exclusive-resources"}
    said = attributes(body(look(held, pod("b"))))
    assert said["nodeTopologyPodsFingerprint"] == expected_fingerprint("a")
    assert said["nodeTopologyPodsFingerprintMethod"] == shared["mode"]
    told = (
        facts("a", **{GPU: "1"}),
        facts("done", phase="Succeeded", **{GPU: "1"}),
        facts("part", cpu="500m"),
    )
    dedicated = body(look(held, pods=told))
    assert attributes(dedicated)["nodeTopologyPodsFingerprint"] == expected_fingerprint("a", "done")
    running = body(look(held, pods=told), informer_mode=InformerMode.SHARED)
    assert attributes(running)["nodeTopologyPodsFingerprint"] == expected_fingerprint("a")
    everyone = body(look(held, pods=told), method=FingerprintMethod.ALL)
    assert attributes(everyone)["nodeTopologyPodsFingerprintMethod"] == "all"
    names = ("a", "done", "part")
    assert attributes(everyone)["nodeTopologyPodsFingerprint"] == expected_fingerprint(*names)


@pytest.mark.parametrize(
    ("told", "exclude"),
    [
        (facts("a", **{GPU: "1"}), (GPU,)),
        (facts("a", **{"a.com/no-zone": "1"}), ()),
        (replace(facts("a", cpu="500m"), init_requests={"once": {"cpu": "2"}}), ()),
    ],
    ids=["excluded", "without topology", "an init container's"],
)
def test_all_pods_are_counted_while_releases_of_the_scheduler_differ(
    told: PodFacts, exclude: tuple[str, ...]
) -> None:
    pods = (told, facts("b", phase="Pending", cpu="2"), facts("c", cpu="500m"))
    held = pod("a", devices=(device("GPU-0", 0),))
    said = attributes(body(look(held, pods=pods), exclude=exclude))
    assert said["nodeTopologyPodsFingerprintMethod"] == "all"
    assert said["nodeTopologyPodsFingerprint"] == expected_fingerprint("a", "c")


def test_placement_is_told_under_single_numa_node_when_every_container_has_one_zone() -> None:
    pods = (
        pod("a", devices=(device("GPU-0", 0),)),
        pod("b", cpus=cpus(8)),
        pod("c", memory=(block(1, 0),)),
        pod("idle"),
    )
    found = body(look(*pods))
    assert attributes(found)[METADATA] == "npv0v001::ve=leb89::cc=3::nn=2::bn=0"
    assert VECTOR in attributes(zone(found, "node-1"))
    assert VECTOR not in attributes(zone(found, "node-0"))
    restricted = replace(SINGLE, topology_manager=TopologyManagerPolicy.RESTRICTED)
    assert METADATA not in attributes(body(look(*pods, policy=restricted)))
    two_zones = pod("x", devices=(device("GPU-0", 0), device("GPU-3", 1)))
    assert METADATA not in attributes(body(look(*pods, two_zones)))
    # The scheduler counts this pod and PodResources knows no zone for it.
    told = (facts("a", **{GPU: "1"}), facts("idle", memory="1Gi"))
    assert METADATA not in attributes(body(look(*pods, pods=told)))
    assert attributes(body(look(*pods, pods=told[:1])))[METADATA].endswith("cc=1::nn=2::bn=0")


def forecast(observation: Observation) -> tuple[str, str]:
    said = attributes(body(observation))
    return said[f"largestAligned.{GPU}"], said[f"largestNvlinkAligned.{GPU}"]


@pytest.mark.parametrize(
    ("policy", "used", "aligned", "linked"),
    [
        ("single-numa-node", (), 2, 2),
        ("single-numa-node", (0,), 2, 2),
        ("single-numa-node", (0, 2), 1, 1),
        ("single-numa-node", (0, 1, 2, 3), 0, 0),
        ("none", (), 2, 2),
        # An empty node needs two NUMA nodes for 3 or 4, so both stay aligned there.
        ("restricted", (), 4, 2),
        ("restricted", (0,), 3, 2),
        # Two free on two nodes: a request for 2 could fit one empty node, so it is not aligned.
        ("restricted", (0, 2), 1, 1),
        ("best-effort", (3,), 3, 2),
    ],
)
def test_forecast(policy: str, used: tuple[int, ...], aligned: int, linked: int) -> None:
    held = [pod(f"p{i}", devices=(device(f"GPU-{i}", i // 2),)) for i in used]
    manager = TopologyManagerPolicy(policy)
    seen = look(*held, machine=PAIRS, policy=replace(SINGLE, topology_manager=manager))
    assert forecast(seen) == (str(aligned), str(linked))


def test_forecast_of_a_pair_that_is_broken_across_zones() -> None:
    """Bridged pairs that are no NUMA neighbours: aligned twos exist, linked ones do not."""
    crossed = replace(
        PAIRS,
        gpus=(gpu(0, peers=(2,)), gpu(1, peers=(3,)), gpu(2, peers=(0,)), gpu(3, peers=(1,))),
    )
    assert forecast(look(machine=crossed)) == ("2", "1")


def test_slices_have_no_nvlink_forecast() -> None:
    slices = tuple(
        MigSlice(
            id=DeviceId(f"MIG-{i}"),
            profile="1g.10gb",
            memory_bytes=GI,
            gpu_instance=i,
            compute_instance=0,
        )
        for i in range(2)
    )
    machine = replace(PAIRS, gpus=(replace(PAIRS.gpus[0], slices=slices), *PAIRS.gpus[1:]))
    name = "nvidia.com/mig-1g.10gb"
    mig = tuple(device(f"MIG-{i}", 0, resource=name) for i in range(2))
    said = attributes(body(look(machine=machine, allocatable=replace(ALLOCATABLE, devices=mig))))
    assert said[f"largestAligned.{name}"] == "2"
    assert f"largestNvlinkAligned.{name}" not in said


def test_owner_and_label() -> None:
    metadata = body(look())["metadata"]
    assert metadata["name"] == "n1"
    assert metadata["labels"] == {"app.kubernetes.io/managed-by": "rte"}
    assert metadata["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "uid-1"}
    ]
    assert "ownerReferences" not in body(look(), node_uid=None)["metadata"]


# Text


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (binary_quantity, 0, "0"),
        (binary_quantity, 1023, "1023"),
        (binary_quantity, 1024, "1Ki"),
        (binary_quantity, 1536, "1536"),
        (binary_quantity, 3 * 2**29, "1536Mi"),
        (binary_quantity, 2**40, "1Ti"),
        (binary_quantity, 2**70, "1024Ei"),
        (decimal_quantity, 0, "0"),
        (decimal_quantity, 100, "100"),
        (decimal_quantity, 1000, "1k"),
        (decimal_quantity, 1500, "1500"),
        (decimal_quantity, 2_000_000, "2M"),
    ],
)
def test_quantities_are_written_as_apimachinery_writes_them(
    write: Callable[[int], str], value: int, text: str
) -> None:
    assert write(value) == text
    assert thousandths(text) == value * 1000


def test_names_of_huge_pages() -> None:
    sizes = (2**16, 2**21, 2**25, 2**30, 2**34)
    assert [huge_pages_name(size) for size in sizes] == [
        "hugepages-64Ki",
        "hugepages-2Mi",
        "hugepages-32Mi",
        "hugepages-1Gi",
        "hugepages-16Gi",
    ]


# Comparing and patching


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether a scheduler would read the same in both; what the API server adds does not count."""

    def content(body: Mapping[str, Any]) -> tuple[Any, ...]:
        said = [item for item in body.get("attributes", ()) if item["name"] != ECHO]
        return said, body.get("zones", []), *rest(body)

    return content(a) == content(b)


def applied(object_: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """The object after a JSON Patch, by the letter of RFC 6902."""
    result = json.loads(json.dumps(object_))
    for operation in operations:
        *path, last = operation["path"].split("/")[1:]
        target = result
        for key in path:
            target = target[int(key)] if isinstance(target, list) else target[key]
        at = int(last) if isinstance(target, list) else last
        exists = at < len(target) if isinstance(target, list) else at in target
        match operation["op"], isinstance(target, list):
            case "add", True:
                assert at <= len(target)
                target.insert(at, operation["value"])
            case "add", False:
                target[at] = operation["value"]
            case "replace", _:
                assert exists
                target[at] = operation["value"]
            case "remove", _:
                assert exists
                del target[at]
            case other:
                raise AssertionError(other)
    return dict(result)


def test_only_changed_figures_are_patched() -> None:
    before = body(look())
    held = pod("a", cpus=cpus(8), devices=(device("GPU-3", 1),))
    quiet = replace(SINGLE, topology_manager=TopologyManagerPolicy.RESTRICTED)
    before, after = body(look(policy=quiet)), body(look(held, policy=quiet))
    operations = changes(before, after)
    assert operations is not None
    assert same(applied(before, operations), after)
    assert sorted(o["path"] for o in operations) == [
        "/attributes/1/value",
        "/attributes/3/value",
        "/zones/1/resources/0/available",
        "/zones/1/resources/2/available",
    ]
    assert changes(after, after) == []


def test_attributes_that_come_and_go_are_patched() -> None:
    """The placement of pods that hold CPUs or devices of one NUMA node."""
    before = body(look())
    after = body(look(pod("a", cpus=cpus(8), devices=(device("GPU-3", 1),))))
    for old, new, ops in (
        (before, after, {"add", "replace"}),
        (after, before, {"remove", "replace"}),
    ):
        for echoes in (0, 3):
            stored = with_echo(old, echoes) if echoes else old
            operations = changes(stored, new)
            assert operations is not None
            assert {operation["op"] for operation in operations} == ops
            wanted = with_echo(new, echoes) if echoes else new
            assert applied(stored, operations) == wanted
            assert len(json.dumps(operations)) < len(json.dumps(new)) / 2
    turned = {**after, "attributes": after["attributes"][::-1]}
    operations = changes(after, turned)
    assert operations is not None
    assert applied(after, operations) == turned


def test_a_new_shape_cannot_be_patched() -> None:
    before = body(look())
    assert changes(before, body(look(allocatable=replace(ALLOCATABLE, devices=())))) is None
    assert changes(before, body(look(), node_uid="other")) is None
    assert changes(before, body(look(), node_uid=None)) is None
    moved = replace(TWO_NODES, numa_nodes=TWO_NODES.numa_nodes[:1])
    assert changes(before, body(look(machine=moved))) is None


def test_what_the_server_adds_and_the_echo_do_not_count() -> None:
    wanted = body(look())
    stored = json.loads(json.dumps(with_echo(wanted, 3)))
    stored["metadata"] |= {"resourceVersion": "7", "managedFields": [{}], "uid": "u"}
    assert same(stored, wanted)
    assert changes(stored, wanted) == []
    held = body(look(pod("a", cpus=cpus(8)), policy=replace(SINGLE, cpu_manager="static")))
    assert not same(stored, held)
    assert with_echo(stored, 4)["attributes"][-1] == {"name": "rteEcho", "value": "4"}
    again = changes(stored, with_echo(wanted, 4))
    assert again == [
        {"op": "replace", "path": f"/attributes/{len(wanted['attributes'])}/value", "value": "4"}
    ]
    foreign = {**wanted, "zones": wanted["zones"][:1]}
    assert not same(foreign, wanted)
    assert not same({}, wanted)


def test_freeing_is_a_reason_to_wake_those_who_wait() -> None:
    free, held = body(look()), body(look(pod("a", cpus=cpus(8))))
    assert freed_something(held, free)
    assert not freed_something(free, held)
    assert not freed_something(free, free)
    assert may_wake(held, free)
    assert not may_wake(free, free)
    assert may_wake(None, free), "what another process left may have held more"


def test_pods_that_are_newly_covered_are_a_reason_too() -> None:
    """A scheduler with reservations has subtracted them from every zone until then."""
    holds = pod("a", cpus=cpus(8))
    bound, covered = (
        body(look(holds, pods=(facts("a", phase=phase, cpu="2"),)))
        for phase in ("Pending", "Running")
    )
    assert not freed_something(bound, covered)
    assert may_wake(bound, covered)


# Properties

NODE_IDS = st.lists(st.integers(0, 70), min_size=1, max_size=5, unique=True).map(sorted)


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    ids = draw(NODE_IDS)
    with_cpus = draw(st.lists(st.sampled_from(ids), unique=True))
    machine = Machine(
        numa_nodes=tuple(
            node(
                id,
                range(8 * place, 8 * place + 8) if id in with_cpus else range(0),
                memory=draw(st.integers(0, 4)),
                huge_pages={2**21: draw(st.integers(0, 2))},
                distance={to: 10 if to == id else 20 for to in ids if draw(st.booleans())},
            )
            for place, id in enumerate(ids)
        )
    )
    some_nodes = st.lists(st.sampled_from(ids), unique=True, max_size=2).map(sorted)
    devices = [
        device(f"D{n}", *draw(some_nodes), resource=draw(st.sampled_from([GPU, "a.com/nic"])))
        for n in range(draw(st.integers(0, 8)))
    ]
    healthy = [d for d in devices if draw(st.booleans())]
    in_use = [d for d in devices if draw(st.booleans())]
    blocks = st.builds(
        lambda size, numa, type_: block(size, *numa, type=type_),
        st.integers(0, 6),
        st.lists(st.sampled_from(ids), unique=True, min_size=1, max_size=3).map(sorted),
        st.sampled_from(["memory", "hugepages-2Mi"]),
    )
    singles = blocks.filter(lambda b: len(b.numa) == 1)
    cpu_ids = st.lists(st.integers(0, 8 * len(ids)), unique=True).map(lambda i: cpus(*sorted(i)))
    pods = tuple(
        pod(f"p{n}", devices=(use,), cpus=draw(cpu_ids), memory=tuple(draw(st.lists(blocks))))
        for n, use in enumerate(in_use)
    )
    policy = Policy(
        topology_manager=draw(st.sampled_from(TopologyManagerPolicy)),
        cpu_manager=draw(st.sampled_from(["none", "static"])),
        memory_manager=draw(st.sampled_from(["None", "Static"])),
    )
    return Observation(
        machine=machine,
        usage=Usage(pods=pods),
        allocatable=Allocatable(
            devices=tuple(healthy), cpus=draw(cpu_ids), memory=tuple(draw(st.lists(singles)))
        ),
        policy=draw(st.sampled_from([policy, None])),
        node_allocatable=draw(
            st.dictionaries(st.sampled_from(["cpu", "memory"]), st.integers(0, 2**40))
        ),
    )


OPTIONS = st.fixed_dictionaries(
    {"detail": st.sampled_from(Detail), "unbound": st.sampled_from(Unbound)}
)


SCHEMA = schema(CRD, "v1alpha2")


@settings(max_examples=100, deadline=None)
@given(observations(), OPTIONS, st.randoms(use_true_random=False))
def test_every_object_keeps_the_rules(
    seen: Observation, options: dict[str, Any], rng: random.Random
) -> None:
    found = body(seen, **options)
    check(found, SCHEMA)
    names = [z["name"] for z in found["zones"] if z["type"] == "Node"]
    assert names == [f"node-{n}" for n in range(len(names))]
    for item in found["zones"]:
        if item["type"] != "Node":
            assert "resources" not in item
            continue
        assert {"name": item["name"], "value": 10} in item["costs"]
        assert {cost["name"] for cost in item["costs"]} <= set(names)
        listed = [r["name"] for r in item["resources"]]
        assert listed == sorted(set(listed))
        for r in item["resources"]:
            capacity, allocatable, available = (
                thousandths(r[field]) for field in ("capacity", "allocatable", "available")
            )
            assert capacity >= allocatable >= available >= 0, r
    own = [item["name"] for item in found["attributes"]]
    assert own == sorted(set(own))
    assert body(shuffled(seen, rng), **options) == found


def shuffled(seen: Observation, rng: random.Random) -> Observation:
    """The same look with everything in another order that has no meaning."""
    pods, devices = list(seen.usage.pods), list(seen.allocatable.devices)
    rng.shuffle(pods)
    rng.shuffle(devices)
    return replace(
        seen,
        usage=Usage(pods=tuple(pods)),
        allocatable=replace(seen.allocatable, devices=tuple(devices)),
    )


@settings(max_examples=40, deadline=None)
@given(observations(), observations())
def test_a_patch_leads_to_the_wanted_object_or_is_none(
    before: Observation, after: Observation
) -> None:
    one, other = body(before), body(after)
    operations = changes(one, other)
    if operations is not None:
        assert same(applied(one, operations), other)
        assert bool(operations) is not same(one, other)
    held = replace(after, usage=Usage())
    assert changes(other, body(held)) is None or same(
        applied(other, changes(other, body(held)) or []), body(held)
    )


# Recorded machines


def in_use(machine: Machine) -> Observation:
    """A machine whose kubelet binds all it can, with three pods: two hold GPUs, one of them CPUs
    and memory too, and one holds nothing. Inferred NUMA nodes are not advertised."""
    zoned = [n for n in machine.numa_nodes if n.cpus]
    stated = (NumaSource.SYSFS, NumaSource.OVERRIDE)
    numa = {f.address: f.numa for f in machine.pci if f.numa_from in stated}
    gpus = [
        DeviceUse(
            resource=GPU,
            id=gpu.uuid,
            numa=tuple(n.id for n in zoned if n.id == numa.get(gpu.pci)),
        )
        for gpu in machine.gpus
        if gpu.uuid is not None
    ]
    first = zoned[0]
    memory = tuple(
        MemoryBlock(type="memory", size_bytes=n.memory_bytes - GI, numa=(n.id,))
        for n in machine.numa_nodes
        if n.memory_bytes
    )
    return look(
        pod(
            "inference",
            devices=tuple(gpus[:1]),
            cpus=first.cpus[2:6],
            memory=(MemoryBlock(type="memory", size_bytes=4 * GI, numa=(first.id,)),),
        ),
        pod("training", devices=tuple(gpus[-2:])),
        pod("web"),
        machine=machine,
        allocatable=Allocatable(
            devices=tuple(gpus),
            cpus=tuple(cpu for n in zoned for cpu in n.cpus if cpu not in first.cpus[:2]),
            memory=memory,
        ),
        policy=replace(SINGLE, reserved_cpus=first.cpus[:2]),
    )


def written(object_: Mapping[str, Any]) -> str:
    return yaml.safe_dump(object_, sort_keys=False, default_flow_style=None, width=98)


GOLDEN = (
    "ac922-power9",
    "dgx1-v100",
    "dgx2-v100",
    "gb200-tray",
    "hgx-a100-oci-v2",
    "hgx-h100-oci",
    "pcie-a100-pairs",
)


@pytest.mark.parametrize("name", GOLDEN)
def test_recorded_machine(name: str, golden: Callable[[Path, str], None]) -> None:
    machine = read_recorded(MACHINES / name)
    golden(MACHINES / name / "expected" / "nrt.yaml", written(body(in_use(machine))))


def test_every_recorded_machine_keeps_the_schema_in_every_detail() -> None:
    for folder in sorted(path.parent for path in MACHINES.glob("*/sys.txt")):
        seen = in_use(read_recorded(folder))
        for detail in Detail:
            found = body(seen, detail=detail)
            check(found, SCHEMA, folder.name)
            assert all(("resources" in z) is (z["type"] == "Node") for z in found["zones"])


LONG_NAMES: dict[str, Any] = {
    "node_name": "gpu-h100-0017.eu-central.example.com",
    "node_uid": "7e2f5f3e-0c2a-4b56-9a3c-2f0f6f1f2f11",
    "version": "0.10.12",
}
"""As long as real ones."""

EIGHT_GPUS = [
    name
    for name in sorted(path.parent.name for path in MACHINES.glob("*/sys.txt"))
    if len(read_recorded(MACHINES / name).gpus) == 8
]


def size(value: object) -> int:
    """Bytes of compact JSON."""
    return len(json.dumps(value, separators=(",", ":")).encode())


@pytest.mark.parametrize("name", EIGHT_GPUS)
def test_sizes_stay_within_what_a_write_may_cost(name: str) -> None:
    """Without managed fields. A NUMA node more than two is half a KiB more: its resources, and a
    distance more in every zone."""
    machine = read_recorded(MACHINES / name)
    zones = len([node for node in machine.numa_nodes if node.cpus])
    more_kib = 0.52 * max(0, zones - 2)
    found = {d: size(body(in_use(machine), detail=d, **LONG_NAMES)) / 1024 for d in Detail}
    assert found[Detail.NODE] <= 2.2 + more_kib
    assert found[Detail.GPU] <= 4.5 + more_kib


def taking(seen: Observation, nodes: Sequence[NumaNode]) -> Observation:
    """The same with a pod more that holds what is free of these NUMA nodes' GPUs, and CPUs and
    memory there."""
    used = seen.usage.device_ids().get(GPU, ())
    here = {node.id for node in nodes}
    free = [d for d in seen.allocatable.devices if d.id not in used and set(d.numa) <= here]
    held = pod(
        "training-job-7-worker-0-of-16",
        devices=tuple(free),
        cpus=tuple(cpu for node in nodes for cpu in node.cpus[6:8]),
        memory=tuple(
            MemoryBlock(type="memory", size_bytes=4 * GI, numa=(node.id,)) for node in nodes
        ),
    )
    return replace(seen, usage=replace(seen.usage, pods=(*seen.usage.pods, held)))


@pytest.mark.parametrize("name", EIGHT_GPUS)
def test_a_change_of_one_pod_is_a_patch_of_a_kib_at_most(name: str) -> None:
    """Whatever a pod of one or two NUMA nodes takes and frees."""
    machine = read_recorded(MACHINES / name)
    zoned = [node for node in machine.numa_nodes if node.cpus]
    before = in_use(machine)
    for nodes in (zoned[:1], zoned[-1:], zoned[:2]):
        without, with_it = (body(seen, **LONG_NAMES) for seen in (before, taking(before, nodes)))
        for old, new in ((without, with_it), (with_it, without)):
            operations = changes(old, new)
            assert operations is not None
            assert 0 < size(operations) <= 940  # and the guard


def test_the_real_api_server_takes_the_objects_and_gives_them_back(apiserver: ApiServer) -> None:
    apiserver.apply_files(CRD)
    for name in ("hgx-h100-oci", "gb200-tray"):
        for detail in Detail:
            wanted = body(in_use(read_recorded(MACHINES / name)), detail=detail, node_uid=None)
            wanted["metadata"]["name"] = f"{name}-{detail.value}"
            stored = apiserver.apply(wanted)
            assert same(stored, wanted)
            assert changes(stored, wanted) == []
