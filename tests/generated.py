"""Nodes by chance: machines, kubelet configurations, device plugins and what happens to pods."""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rte.model import NumaNode, base_units, huge_pages_name, thousandths
from rte.sources.recorded import read_recorded
from tests.machines.description import FOLDER
from tests.real_kubelet import numa_nodes

GPU, NIC, FPGA = "nvidia.com/gpu", "example.com/nic", "example.com/fpga"
Json = dict[str, Any]
Chance = random.Random

MOST_NODES = 6  # of a recorded machine: a kubelet with 34 would try all 2^34 sets of them
NODE_IDS = 64  # the kubelet has none above
RECORDED = (
    "ac922-power9",
    "azure-domains",
    "dgx1-v100",
    "gb200-tray",
    "gh200-quad",
    "h100-snc4",
    "hgx-a100-oci-bm4",
    "numa-ids-0-2",
    "numa0-offline",
    "pcie-mixed",
    "vm-all-minus-one",
)
GATES = {
    "PodLevelResources": True,
    "PodLevelResourceManagers": True,
    "CPUManagerPolicyAlphaOptions": True,
}


# Machines


def machine(chance: Chance) -> list[Json]:
    """As machine.json lists it: made up, or a recorded one."""
    return recorded(chance) if chance.random() < 0.3 else made_up(chance)


def recorded(chance: Chance) -> list[Json]:
    nodes = read_recorded(FOLDER / chance.choice(RECORDED)).numa_nodes
    usable = [n for n in nodes if n.id < NODE_IDS and (n.cpus or n.memory_bytes)][:MOST_NODES]
    listed = [described(node) for node in usable]
    for node in listed:
        node["distances"] = [10 if other is node else 20 for other in listed]
    return listed


def described(node: NumaNode) -> Json:
    """A recorded NUMA node as the kubelet's machine.json has it, two threads a core."""
    half = len(node.cpus) // 2
    return {
        "id": node.id,
        "socket": node.id,
        "cores": [list(pair) for pair in zip(node.cpus[:half], node.cpus[half:], strict=True)],
        "memory": str(node.memory_bytes or 0),
        "hugepages": {f"{size >> 10}Ki": n for size, n in node.huge_pages.items()},
        "distances": list(node.distance.values()),
    }


def made_up(chance: Chance) -> list[Json]:
    ids = chance.choice(
        [(0,), (1,), (0, 1), (0, 1), (0, 1), (0, 2), (0, 3, 8), (0, 1, 2, 3), (2, 5)]
    )
    threads = chance.choice([1, 2, 2, 2, 4])
    nodes = numa_nodes(
        ids,
        cpus=threads * chance.choice([2, 4, 8]),
        threads=threads,
        memory=chance.choice(["4Gi", "16Gi", "64Gi"]),
    )
    sizes = chance.choice([(), ("2Mi",), ("1Gi",), ("2Mi", "1Gi")])
    sockets = chance.choice([1, 1, 2])
    for number, node in enumerate(nodes):
        node["socket"] = number // sockets
        node["hugepages"] = {
            size: chance.choice([0, 1, 128] if size == "2Mi" else [0, 1]) for size in sizes
        }
        if number and chance.random() < 0.1:
            node["cores"] = []
    return nodes


# Configurations


def config(chance: Chance, nodes: Sequence[Mapping[str, Any]]) -> Json:
    """A KubeletConfiguration; some are such that no kubelet starts with them."""
    made: Json = {
        "topologyManagerPolicy": chance.choice(
            ["none", "best-effort", "restricted", "single-numa-node", "single-numa-node"]
        ),
        "topologyManagerScope": chance.choice(["container", "pod"]),
        "featureGates": {},
    }
    # With this option the Topology Manager of 1.37 ends the kubelet at ids with gaps.
    if [node["id"] for node in nodes] == list(range(len(nodes))) and chance.random() < 0.2:
        made["topologyManagerPolicyOptions"] = {"prefer-closest-numa-nodes": "true"}
    if chance.random() < 0.3:
        made["featureGates"] |= GATES
    if chance.random() < 0.2:
        made["featureGates"]["KubeletPodResourcesListUseActivePods"] = False
    kept: dict[str, str] = {}
    if chance.random() < 0.8:
        manager = cpu_manager(chance, nodes, kept)
        made["featureGates"] |= manager.pop("featureGates", {})
        made |= manager
    elif chance.random() < 0.3:
        kept["cpu"] = "1500m"
    if chance.random() < 0.8:
        made |= memory_manager(chance, nodes, kept)
    if kept:
        made[chance.choice(["systemReserved", "kubeReserved"])] = kept
    return made


def cpu_manager(chance: Chance, nodes: Sequence[Mapping[str, Any]], kept: dict[str, str]) -> Json:
    made: Json = {"cpuManagerPolicy": "static"}
    options = [
        ("full-pcpus-only", False),
        ("distribute-cpus-across-numa", False),
        ("strict-cpu-reservation", False),
        ("prefer-align-cpus-by-uncorecache", False),
        ("align-by-socket", True),
        ("distribute-cpus-across-cores", True),
    ]
    for name, is_alpha in options:
        if chance.random() < 0.2:
            made.setdefault("cpuManagerPolicyOptions", {})[name] = "true"
            if is_alpha:
                made["featureGates"] = {"CPUManagerPolicyAlphaOptions": True}
    cpus = [cpu for node in nodes for core in node["cores"] for cpu in core]
    if chance.random() < 0.6:
        reserved = chance.sample(cpus, k=min(len(cpus) // 2, chance.choice([1, 1, 2, 3])))
        made["reservedSystemCPUs"] = ",".join(map(str, sorted(reserved)))
    else:
        kept["cpu"] = chance.choice(["500m", "1", "2", "2500m"])
    return made


def memory_manager(
    chance: Chance, nodes: Sequence[Mapping[str, Any]], kept: dict[str, str]
) -> Json:
    """What the Memory Manager insists on: by node it reserves exactly what is reserved in all."""
    chosen = chance.sample(list(nodes), k=chance.choice([1, len(nodes)]))
    chosen = [node for node in chosen if node["memory"] != "0"] or [nodes[0]]
    limits: list[Json] = [{"memory": f"{chance.choice([100, 256, 700])}Mi"} for _ in chosen]
    total = sum(int(each["memory"].removesuffix("Mi")) for each in limits)
    for node, each in zip(chosen, limits, strict=True):
        pages = [size for size, count in node["hugepages"].items() if count]
        if pages and chance.random() < 0.3 and (name := f"hugepages-{pages[0]}") not in kept:
            each[name] = kept[name] = pages[0]
    made: Json = {
        "memoryManagerPolicy": "Static",
        "reservedMemory": [
            {"numaNode": node["id"], "limits": each}
            for node, each in zip(chosen, limits, strict=True)
        ],
    }
    if chance.random() < 0.5:
        made["evictionHard"] = {"memory.available": "0"}
        kept["memory"] = f"{total}Mi"
    else:
        made["evictionHard"] = {"memory.available": "100Mi"}
        if total > 100:
            kept["memory"] = f"{total - 100}Mi"
    return made


# Devices


def devices(chance: Chance, nodes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Resource → id → NUMA nodes, None or () for no one."""
    ids = [node["id"] for node in nodes]
    bearing = [node["id"] for node in nodes if node["cores"]] if chance.random() < 0.7 else ids

    def places(kinds: Sequence[str]) -> tuple[int, ...] | None:
        kind = chance.choice(kinds)
        if kind == "one":
            return (chance.choice(bearing),)
        if kind == "several":
            return tuple(sorted(chance.sample(bearing, k=min(2, len(bearing)))))
        return None if kind == "none" else ()

    gpus = range(chance.choice([2, 4, 8]))
    made: dict[str, dict[str, Any]] = {
        GPU: {f"GPU-{n}": (bearing[n % len(bearing)],) for n in gpus}
    }
    if chance.random() < 0.7:
        kinds = ["one", "one", "several", "none"]
        made[NIC] = {f"nic-{n}": places(kinds) for n in range(chance.choice([1, 3, 6]))}
    if chance.random() < 0.4:
        kinds = chance.choice([["none"], ["none", "empty"], ["several"], ["one", "empty"]])
        made[FPGA] = {f"fpga-{n}": places(kinds) for n in range(3)}
    return made


# Pods


def pod(
    chance: Chance,
    name: str,
    nodes: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    *,
    init: bool = True,
) -> Json:
    """A pod of any QoS class, with containers of all kinds.

    Of huge pages it asks only sizes that the machine has: the Memory Manager of 1.37 ends the
    kubelet at others.
    """
    sizes = {huge_pages_name(base_units(size)) for node in nodes for size in node["hugepages"]}
    qos = chance.choice(["Guaranteed"] * 4 + ["Burstable", "BestEffort"])
    spec: Json = {
        "containers": [
            {"name": f"c{n}", "image": "none", "resources": wanted(chance, qos, sizes)}
            for n in range(chance.choice([1, 1, 1, 2, 3]))
        ],
        "initContainers": [],
    }
    for n in range(chance.choice([0, 0, 0, 1, 2, 3]) if init else 0):
        container = {"name": f"init{n}", "image": "none", "resources": wanted(chance, qos, sizes)}
        if chance.random() < 0.35:
            container["restartPolicy"] = "Always"
        spec["initContainers"].append(container)
    if config["featureGates"].get("PodLevelResourceManagers") and chance.random() < 0.5:
        spec["resources"] = budget(chance, [*spec["containers"], *spec["initContainers"]])
    made: Json = {"metadata": {"name": name, "namespace": "default"}, "spec": spec}
    if chance.random() < 0.1:
        made["metadata"] |= {
            "uid": f"{chance.getrandbits(128):032x}",  # a static pod's is no UUID but a hash
            "annotations": {"kubernetes.io/config.source": "file"},
        }
    return made


def budget(chance: Chance, containers: Sequence[Json]) -> Json:
    """A pod's own resources, which are no less than its containers': the API server insists."""
    cpus, memory_bytes = chance.choice(["0", "1", "2", "500m"]), chance.choice([0, 1 << 30])
    millis = thousandths(cpus)
    for container in containers:
        if chance.random() < 0.4:
            container["resources"] = {}
        for of in container["resources"].values():
            for name in [name for name in of if name.startswith("hugepages-")]:
                del of[name]
        requests = container["resources"].get("requests", {})
        millis += thousandths(requests.get("cpu", "0"))
        memory_bytes += base_units(requests.get("memory", "0"))
    own = {"cpu": f"{millis or 1000}m", "memory": str(memory_bytes or 1 << 30)}
    return {"requests": own, "limits": own}


def wanted(chance: Chance, qos: str, sizes: Collection[str]) -> Json:
    counted: dict[str, str] = {}
    for resource, share, counts in ((GPU, 0.5, "1112"), (NIC, 0.25, "112"), (FPGA, 0.1, "12")):
        if chance.random() < share:
            counted[resource] = chance.choice(counts)
    native: dict[str, str] = {}
    if qos != "BestEffort":
        native["cpu"] = chance.choice(["1", "2", "2", "2", "4", "7", "500m", "500m"])
        native["memory"] = chance.choice(["64Mi", "64Mi", "1Gi", "1Gi", "3Gi", "20Gi", "90Gi"])
        for name in sorted(sizes) if qos == "Guaranteed" else ():
            if chance.random() < 0.15:
                counted[name] = chance.choice(["1Gi", "2Gi"] if "Gi" in name else ["2Mi", "100Mi"])
    return {
        "requests": {**counted, **native},
        "limits": {**counted, **(native if qos == "Guaranteed" else {})},
    }
