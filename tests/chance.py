"""Small nodes and pods by chance, of everything that scheduler and kubelet may see differently."""

import random
from collections.abc import Mapping
from typing import Any

from rte.kubelet.node import KubeletState
from rte.kubelet.spec import parse_pod, pod_total
from rte.model import CpuId, DeviceId, Machine, NumaId, NumaNode, thousandths
from tests.real_kubelet import Json, pod
from tests.scheduling import GPU, NIC, NodeModel, kubelet, threads

GI = 1 << 30
RUNTIME_CLASS = "heavy"
OVERHEAD = {"cpu": "250m", "memory": "128Mi"}  # of that class


def node(chance: random.Random, name: str) -> NodeModel:
    machine = a_machine(chance)
    config = a_config(chance, machine)
    state = kubelet(machine, config, devices=some_devices(chance, machine))
    return NodeModel(name=name, machine=machine, state=state)


def a_machine(chance: random.Random) -> Machine:
    """Ids with gaps, NUMA nodes without memory, without huge pages, without CPUs."""
    ids = chance.choice([[0], [0, 1], [0, 1], [0, 2], [0, 1, 2, 3], [1, 3], [0, 1, 2]])
    cores = [chance.choice([2, 4, 4, 6]) for _ in ids]
    nodes = []
    for number, id in enumerate(ids):
        first = range(sum(cores[:number]), sum(cores[: number + 1]))
        second = [core + sum(cores) for core in first]
        memory = chance.choice([8, 8, 8, 16]) if chance.random() < 0.95 or not number else 0
        pages = {2 << 20: chance.choice([0, 512, 512, 1024]), 1 << 30: chance.choice([0, 0, 0, 2])}
        nodes.append(
            NumaNode(
                id=NumaId(id),
                cpus=tuple(map(CpuId, (*first, *second))),
                cores=tuple((CpuId(a), CpuId(b)) for a, b in zip(first, second, strict=True)),
                memory_bytes=memory * GI,
                huge_pages=pages if memory else dict.fromkeys(pages, 0),
            )
        )
    if chance.random() < 0.25:
        bare = chance.choice([id for id in range(6) if id not in ids])
        pages = {2 << 20: chance.choice([0, 0, 512]), 1 << 30: 0}
        size = chance.choice([4, 8]) * GI
        nodes.append(NumaNode(id=NumaId(bare), cpus=(), memory_bytes=size, huge_pages=pages))
    return Machine(numa_nodes=tuple(sorted(nodes, key=lambda each: each.id)))


def a_config(chance: random.Random, machine: Machine) -> Json:
    cores = [core for each in machine.numa_nodes for core in threads(each.cpus)]
    reserved = {*cores[0], *(chance.choice(cores) if chance.random() < 0.3 else ())}
    if chance.random() < 0.05:
        reserved = {core[0] for core in chance.sample(cores, 2)}
    config: Json = {
        "topologyManagerPolicy": chance.choice(
            ["single-numa-node"] * 5 + ["restricted", "best-effort", "none"]
        ),
        "topologyManagerScope": chance.choice(["container", "pod"]),
        "cpuManagerPolicy": chance.choice(["none", "static", "static"]),
        "memoryManagerPolicy": chance.choice(["None", "Static", "Static"]),
        "reservedSystemCPUs": ",".join(map(str, sorted(reserved))),
    }
    if config["cpuManagerPolicy"] == "static" and chance.random() < 0.5:
        option = chance.choice(
            ["full-pcpus-only", "distribute-cpus-across-cores", "strict-cpu-reservation"]
        )
        config["cpuManagerPolicyOptions"] = {option: "true"}
    return config


def some_devices(
    chance: random.Random, machine: Machine
) -> dict[str, dict[DeviceId, tuple[NumaId, ...]]]:
    """Of one NUMA node, of several, of none, of one without CPUs."""
    kind = chance.choice(["one", "one", "one", "several", "some of none", "none", "bare"])
    ids = [each.id for each in machine.numa_nodes if each.cpus or kind == "bare"]

    def numa() -> tuple[NumaId, ...]:
        if kind == "none" or (kind == "some of none" and chance.random() < 0.3):
            return ()
        count = chance.choice([1, 2]) if kind == "several" and len(ids) > 1 else 1
        return tuple(sorted(chance.sample(ids, count)))

    counts = {GPU: chance.choice([0, 2, 4, 8]), NIC: chance.choice([0, 0, 2, 3])}
    return {
        resource: {DeviceId(f"{resource[0]}{number}"): numa() for number in range(count)}
        for resource, count in counts.items()
        if count
    }


def a_pod(chance: random.Random, state: KubeletState, name: str) -> Json:
    kind = chance.choice(["Guaranteed"] * 3 + ["Burstable", "BestEffort"])
    made = pod(
        name,
        *(a_container(chance, state, kind) for _ in range(chance.choice([1, 1, 2, 3]))),
        init=[a_container(chance, state, kind) for _ in range(chance.choice([0, 0, 0, 1, 2]))],
    )
    for each in made["spec"]["initContainers"]:
        if chance.random() < 0.5:
            each["restartPolicy"] = "Always"
    if kind == "Burstable":
        for each in (*made["spec"]["initContainers"], *made["spec"]["containers"]):
            limits = {n: a for n, a in each["resources"]["limits"].items() if n != "cpu"}
            each["resources"] = {**each["resources"], "limits": limits}
    if chance.random() < 0.05 and kind != "BestEffort":
        own = chance.choice([{"cpu": "4", "memory": "6Gi"}, {"cpu": "12", "memory": "24Gi"}])
        if fit_into(made["spec"], own):
            made["spec"]["resources"] = {"requests": own, "limits": own}
    if chance.random() < 0.1:
        made["spec"] |= {"runtimeClassName": RUNTIME_CLASS, "overhead": OVERHEAD}
    return made


def a_container(chance: random.Random, state: KubeletState, kind: str) -> dict[str, str | int]:
    wanted: dict[str, str | int] = {}
    if chance.random() < 0.6 and GPU in state.devices:
        wanted[GPU] = chance.choice([0, 1, 1, 1, 2, 2, 3, 4])
    if chance.random() < 0.2 and NIC in state.devices:
        wanted[NIC] = chance.choice([1, 2])
    if kind != "BestEffort":
        whole = chance.choice([1, 2, 2, 4, 4, 6, 8])
        wanted["cpu"] = whole if chance.random() < 0.85 else chance.choice(["500m", "1500m"])
        wanted["memory"] = f"{chance.choice([256, 512, 1024, 2048, 4096, 7000, 9000])}Mi"
        for pages, sizes in {"hugepages-2Mi": ["64Mi", "1Gi"], "hugepages-1Gi": ["1Gi"]}.items():
            if chance.random() < 0.15 and state.allocatable.get(pages):
                wanted[pages] = chance.choice(sizes)
    return wanted


def fit_into(spec: Mapping[str, Any], own: Mapping[str, str]) -> bool:
    """Whether the API server takes a pod with such resources of its own: no container may want
    more, nor all together."""
    parsed = parse_pod({"metadata": {"name": "p"}, "spec": spec})
    return all(
        pod_total(parsed, {c.name: c.requests.get(name, 0) for c in parsed.containers})
        <= thousandths(amount)
        for name, amount in own.items()
    )
