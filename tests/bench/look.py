"""One whole look at a large node: ask the kubelet, read its files, doubt, and compose the object.

Goal: at most 20 ms with 110 pods, 16 GPUs and 8 NUMA nodes; the kubelet's answers come over a real
socket from another process. `python -m tests.bench look [CALLS]`
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from rte.graph.build import build
from rte.graph.groups import groups
from rte.kubelet.api import podresources_pb2 as api
from rte.kubelet.api import podresources_pb2_grpc as rpc
from rte.kubelet.ended import with_ended
from rte.kubelet.plausible import Look, doubt
from rte.kubelet.state import read_handed_out
from rte.kubelet.usage import channel, read_allocatable, read_usage
from rte.model import Observation, TopologyManagerPolicy
from rte.publish.nrt import nrt
from rte.standin.kubelet import device_messages, memory_messages, pod_message
from tests.bench.nrt import RESOURCE, observation


class Lister(rpc.PodResourcesListerServicer):
    """Answers what an observation says."""

    def __init__(self, seen: Observation) -> None:
        pods = [pod_message(pod) for pod in seen.usage.pods]
        self.usage = api.ListPodResourcesResponse(pod_resources=pods)
        self.allocatable = api.AllocatableResourcesResponse(
            devices=device_messages(seen.allocatable.devices),
            cpu_ids=seen.allocatable.cpus,
            memory=memory_messages(seen.allocatable.memory),
        )

    def List(self, request: Any, context: Any) -> api.ListPodResourcesResponse:
        return self.usage

    def GetAllocatableResources(
        self, request: Any, context: Any
    ) -> api.AllocatableResourcesResponse:
        return self.allocatable


def serve(socket: Path, ready: Any) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    lister = Lister(observation(TopologyManagerPolicy.SINGLE_NUMA_NODE))
    rpc.add_PodResourcesListerServicer_to_server(lister, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    ready.set()
    server.wait_for_termination()


def write_files(root: Path, seen: Observation) -> None:
    """The checkpoint and the managers' states that such a kubelet would have."""
    held = [(f"uid-{n}", pod.containers[0]) for n, pod in enumerate(seen.usage.pods)]
    entries = [
        {
            "PodUID": uid,
            "ContainerName": use.name,
            "ResourceName": RESOURCE,
            "DeviceIDs": {str(device.numa[0]): [device.id] for device in use.devices},
            "AllocResp": "x" * 200,
        }
        for uid, use in held
        if use.devices
    ]
    data = {"PodDeviceEntries": entries, "RegisteredDevices": {}}
    (root / "kubelet_internal_checkpoint").write_text(json.dumps({"Data": data, "Checksum": 1}))
    cpus = {uid: {use.name: ",".join(map(str, use.cpus))} for uid, use in held}
    (root / "cpu_manager_state").write_text(json.dumps({"policyName": "static", "entries": cpus}))
    blocks = {
        uid: {
            use.name: [
                {"numaAffinity": block.numa, "type": block.type, "size": block.size_bytes}
                for block in use.memory
            ]
        }
        for uid, use in held
    }
    state = {"policyName": "Static", "entries": blocks}
    (root / "memory_manager_state").write_text(json.dumps(state))


def main(arguments: Sequence[str]) -> int:
    calls = int(arguments[0]) if arguments else 200
    seen = observation(TopologyManagerPolicy.SINGLE_NUMA_NODE)
    pods = tuple(replace(pod, uid=f"uid-{n}") for n, pod in enumerate(seen.pods or ()))
    folder = Path(tempfile.mkdtemp(prefix="rte-"))
    ready = multiprocessing.get_context("spawn").Event()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(folder / "kubelet.sock", ready), daemon=True)
    server.start()
    try:
        write_files(folder, seen)
        ready.wait(20)
        graph = build(seen.machine)
        found = groups(graph)
        before = None
        took = []
        with channel(folder / "kubelet.sock") as kubelet:
            for _ in range(calls):
                start = time.perf_counter()
                usage = read_usage(kubelet, 5)
                allocatable = read_allocatable(kubelet, 5)
                handed_out = read_handed_out(folder, folder)
                usage = with_ended(usage, handed_out, pods=pods)
                look = Look(usage=usage, allocatable=allocatable, handed_out=handed_out)
                assert doubt(look, before=before, restarted=False) is None
                before = look
                nrt(
                    replace(seen, usage=usage, allocatable=allocatable, pods=pods),
                    graph,
                    node_name="bench",
                    node_uid=None,
                    version="0",
                    groups=found,
                )
                took.append(1000 * (time.perf_counter() - start))
    finally:
        server.terminate()
        server.join()
        shutil.rmtree(folder)
    took.sort()
    middle, late = took[calls // 2], took[calls * 99 // 100]
    print(f"one look, ms: median {middle:.1f}, p99 {late:.1f}, longest {took[-1]:.1f}")
    return 0
