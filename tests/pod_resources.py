"""PodResources sockets that answer what a test gives them, over real gRPC."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc

from rte.kubelet.api import podresources_pb2 as api
from rte.kubelet.api import podresources_pb2_grpc as rpc

GPU = "nvidia.com/gpu"


class PodResourcesSocket(rpc.PodResourcesListerServicer):
    """Use as a context manager. Answers with the messages that it is given."""

    def __init__(self, socket: Path, *, refuse: int = 0) -> None:
        """The first `refuse` lists are refused, as the kubelet's rate limit does."""
        self.socket = socket
        self.refuse = refuse
        self.listed: Sequence[api.PodResources] = ()
        self.allocatable = api.AllocatableResourcesResponse()
        self.lists = self.offers = 0  # calls so far
        self.pool = ThreadPoolExecutor(4)
        self.server: grpc.Server | None = None
        self.hang_ends = threading.Event()
        self.hang_ends.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.pool.shutdown()

    def start(self) -> None:
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self.server = grpc.server(self.pool)
        rpc.add_PodResourcesListerServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{self.socket}")
        self.server.start()

    def stop(self) -> None:
        self.hang_ends.set()
        if self.server is not None:
            self.server.stop(0).wait()
            self.server = None
            self.socket.unlink(missing_ok=True)

    def hang(self) -> None:
        """Lists are not answered until `hang_ends` is set."""
        self.hang_ends.clear()

    def List(self, request: Any, context: Any) -> api.ListPodResourcesResponse:
        self.lists += 1
        if self.lists <= self.refuse:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self.hang_ends.wait(30)
        return api.ListPodResourcesResponse(pod_resources=self.in_list())

    def GetAllocatableResources(
        self, request: Any, context: Any
    ) -> api.AllocatableResourcesResponse:
        self.offers += 1
        return self.on_offer()

    def in_list(self) -> Iterable[api.PodResources]:
        return self.listed

    def on_offer(self) -> api.AllocatableResourcesResponse:
        return self.allocatable


class PodResources(PodResourcesSocket):
    """Pods are set by name as the GPUs that they hold."""

    def __init__(self, socket: Path, gpus: Mapping[str, int]) -> None:
        """`gpus` is id → NUMA node."""
        super().__init__(socket)
        self.gpus = gpus
        self.pods: dict[str, tuple[str, ...]] = {}
        self.offered: Iterable[str] = gpus
        self.next_lists: list[dict[str, tuple[str, ...]]] = []
        """What the next calls see instead, one each."""

    def in_list(self) -> Iterable[api.PodResources]:
        pods = self.next_lists.pop(0) if self.next_lists else self.pods
        for name, ids in sorted(pods.items()):
            held = api.ContainerResources(name="c", devices=self.devices(ids))
            yield api.PodResources(namespace="default", name=name, containers=[held])

    def on_offer(self) -> api.AllocatableResourcesResponse:
        return api.AllocatableResourcesResponse(devices=self.devices(self.offered))

    def devices(self, ids: Iterable[str]) -> list[api.ContainerDevices]:
        return [entry(GPU, [id], self.gpus[id]) for id in sorted(ids)]


def entry(resource: str, ids: Sequence[str], *numa: int) -> api.ContainerDevices:
    """Devices of some NUMA nodes; without one they have no topology."""
    nodes = [api.NUMANode(ID=node) for node in numa]
    topology = api.TopologyInfo(nodes=nodes) if numa else None
    return api.ContainerDevices(resource_name=resource, device_ids=ids, topology=topology)
