"""How long it takes to write the NodeResourceTopology of a large node, and how large it is.

Goal: median at most 5 ms, since it shares the interpreter with the plugin's calls. 16 GPUs on 8
NUMA nodes, 110 pods that hold CPUs, memory and some a GPU, all known to the pods API.
`python -m tests.bench nrt [CALLS]`
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from statistics import median

from rte.graph.build import build
from rte.graph.groups import groups
from rte.model import (
    Allocatable,
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    Gpu,
    LinkPeer,
    Machine,
    MemoryBlock,
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
    TopologyManagerPolicy,
    Usage,
    pci_address,
)
from rte.publish.nrt import Detail, nrt
from rte.publish.patch import changes
from rte.view.words import columns

NODES, CPUS, GPUS, PODS = 8, 32, 16, 110
RESOURCE = "nvidia.com/gpu"
POLICIES = (TopologyManagerPolicy.SINGLE_NUMA_NODE, TopologyManagerPolicy.RESTRICTED)
POD_REQUESTS = {"main": {"cpu": "1", "memory": "1Gi", RESOURCE: "1"}}


def machine() -> Machine:
    addresses = [pci_address(f"0000:{n + 1:02x}:00.0") for n in range(GPUS)]
    lanes = (NvLinkEnd(peer=LinkPeer.SWITCH, lanes=6, lane_megabytes_per_s=25_000),)
    return Machine(
        numa_nodes=tuple(
            NumaNode(
                id=NumaId(n),
                cpus=tuple(CpuId(cpu) for cpu in range(n * CPUS, (n + 1) * CPUS)),
                memory_bytes=1 << 38,
                huge_pages={1 << 30: 4},
                distance={NumaId(other): 10 if other == n else 20 for other in range(NODES)},
            )
            for n in range(NODES)
        ),
        pci=tuple(
            PciDevice(
                address=address,
                root="pci0000:00",
                vendor=0x10DE,
                device=0x20B0,
                class_code=0x030200,
                numa=NumaId(n * NODES // GPUS),
                numa_from=NumaSource.SYSFS,
            )
            for n, address in enumerate(addresses)
        ),
        gpus=tuple(
            Gpu(number=n, pci=address, uuid=DeviceId(f"GPU-{n:036d}"), product="A100", links=lanes)
            for n, address in enumerate(addresses)
        ),
    )


def observation(policy: TopologyManagerPolicy, *, pods: int = PODS) -> Observation:
    hardware = machine()
    listed = tuple(
        DeviceUse(resource=RESOURCE, id=gpu.uuid, numa=(NumaId(gpu.number * NODES // GPUS),))
        for gpu in hardware.gpus
        if gpu.uuid is not None
    )
    names = [PodName(namespace="bench", name=f"pod-{n}") for n in range(pods)]
    held = []
    for n, name in enumerate(names):
        numa = NumaId(n % NODES)
        block = MemoryBlock(type="memory", size_bytes=1 << 30, numa=(numa,))
        use = ContainerUse(
            name="main",
            devices=(listed[numa * GPUS // NODES],) if n < NODES else (),
            cpus=(CpuId(numa * CPUS + n // NODES),),
            memory=(block,),
        )
        held.append(PodUse(pod=name, containers=(use,)))
    return Observation(
        machine=hardware,
        usage=Usage(pods=tuple(held)),
        allocatable=Allocatable(
            devices=listed,
            cpus=tuple(cpu for node in hardware.numa_nodes for cpu in node.cpus),
            memory=tuple(
                MemoryBlock(type="memory", size_bytes=1 << 37, numa=(node.id,))
                for node in hardware.numa_nodes
            ),
        ),
        policy=Policy(topology_manager=policy, cpu_manager="static", memory_manager="Static"),
        pods=tuple(
            PodFacts(pod=name, phase="Running", qos="Guaranteed", requests=POD_REQUESTS)
            for name in names
        ),
    )


def main(arguments: Sequence[str]) -> int:
    calls = int(arguments[0]) if arguments else 100
    rows = [("policy", "detail", "median ms", "p99 ms", "bytes", "patch bytes")]
    for policy in POLICIES:
        seen, before = observation(policy), observation(policy, pods=PODS - 1)
        graph = build(seen.machine)
        found = groups(graph)
        for detail in Detail:
            times = []
            for _ in range(calls):
                start = time.perf_counter()
                body = nrt(
                    seen,
                    graph,
                    node_name="bench",
                    node_uid="7e2f5f3e-0c2a-4b56-9a3c-2f0f6f1f2f11",
                    version="0",
                    groups=found,
                    detail=detail,
                )
                times.append(1000 * (time.perf_counter() - start))
            other = nrt(
                before,
                graph,
                node_name="bench",
                node_uid="7e2f5f3e-0c2a-4b56-9a3c-2f0f6f1f2f11",
                version="0",
                groups=found,
                detail=detail,
            )
            rows.append(
                (
                    policy.value,
                    detail.value,
                    f"{median(times):.2f}",
                    f"{sorted(times)[int(0.99 * len(times))]:.2f}",
                    str(len(json.dumps(body, separators=(",", ":")))),
                    str(len(json.dumps(changes(other, body), separators=(",", ":")))),
                )
            )
    print("\n".join(columns(rows)))
    return 0
