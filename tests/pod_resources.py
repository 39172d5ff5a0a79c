"""A PodResources socket that answers what a test gives it, over real gRPC."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from rte.kubelet.api import podresources_pb2 as api
from rte.kubelet.api import podresources_pb2_grpc as rpc

GPU = "nvidia.com/gpu"


class PodResources(rpc.PodResourcesListerServicer):
    """Use as a context manager. Pods are set by name as the GPUs that they hold."""

    def __init__(self, socket: Path, gpus: Mapping[str, int]) -> None:
        """`gpus` is id → NUMA node."""
        self.socket = socket
        self.gpus = gpus
        self.pods: dict[str, tuple[str, ...]] = {}
        self.offered: Iterable[str] = gpus
        self.lists = 0
        self.next_lists: list[dict[str, tuple[str, ...]]] = []
        """What the next calls see instead, one each."""
        self.pool = ThreadPoolExecutor(4)
        self.server: grpc.Server | None = None
        self.hang_ends = threading.Event()
        self.hang_ends.set()

    def __enter__(self) -> "PodResources":
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
        self.hang_ends.wait(30)
        pods = self.next_lists.pop(0) if self.next_lists else self.pods
        return api.ListPodResourcesResponse(
            pod_resources=[
                api.PodResources(
                    namespace="default",
                    name=name,
                    containers=[
                        api.ContainerResources(name="c", devices=self.devices(sorted(ids)))
                    ],
                )
                for name, ids in sorted(pods.items())
            ]
        )

    def GetAllocatableResources(
        self, request: Any, context: Any
    ) -> api.AllocatableResourcesResponse:
        return api.AllocatableResourcesResponse(devices=self.devices(sorted(self.offered)))

    def devices(self, ids: Sequence[str]) -> list[api.ContainerDevices]:
        return [
            api.ContainerDevices(
                resource_name=GPU,
                device_ids=[id],
                topology=api.TopologyInfo(nodes=[api.NUMANode(ID=self.gpus[id])]),
            )
            for id in ids
        ]
