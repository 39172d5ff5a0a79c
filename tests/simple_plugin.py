"""The least device plugin that a kubelet takes: enough to try the kubelet, not our plugin."""

import queue
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as service


class SimplePlugin(service.DevicePluginServicer):
    """Offers devices on NUMA nodes and prefers the first ones of the alphabet."""

    def __init__(self, resource: str, devices: Mapping[str, tuple[int, ...] | None]) -> None:
        """`devices` is id → NUMA nodes; None is no topology, () an empty one."""
        self.resource = resource
        self.devices = devices
        self.unhealthy: frozenset[str] = frozenset()
        self.preferred: list[api.ContainerPreferredAllocationRequest] = []
        self.allocated: list[list[str]] = []
        self.changed: queue.Queue[bool] = queue.Queue()
        self.server: grpc.Server | None = None

    def __enter__(self) -> "SimplePlugin":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def serve(self, plugin_dir: Path) -> None:
        """Listen and register, the first time or after a stop."""
        endpoint = self.resource.replace("/", "_") + ".sock"
        (plugin_dir / endpoint).unlink(missing_ok=True)
        self.changed = queue.Queue()
        self.server = grpc.server(ThreadPoolExecutor(8))
        service.add_DevicePluginServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix://{plugin_dir / endpoint}")
        self.server.start()
        with grpc.insecure_channel(f"unix://{plugin_dir / 'kubelet.sock'}") as channel:
            service.RegistrationStub(channel).Register(
                api.RegisterRequest(
                    version="v1beta1",
                    endpoint=endpoint,
                    resource_name=self.resource,
                    options=self.GetDevicePluginOptions(api.Empty(), None),
                ),
                timeout=10,
            )

    def stop(self) -> None:
        if self.server is not None:
            self.changed.put(False)
            self.server.stop(None).wait()
            self.server = None

    def set_unhealthy(self, *ids: str) -> None:
        self.unhealthy = frozenset(ids)
        self.changed.put(True)

    def list(self) -> api.ListAndWatchResponse:
        def topology(nodes: tuple[int, ...] | None) -> api.TopologyInfo | None:
            if nodes is None:
                return None
            return api.TopologyInfo(nodes=[api.NUMANode(ID=node) for node in nodes])

        return api.ListAndWatchResponse(
            devices=[
                api.Device(
                    ID=name,
                    health="Unhealthy" if name in self.unhealthy else "Healthy",
                    topology=topology(nodes),
                )
                for name, nodes in self.devices.items()
            ]
        )

    def GetDevicePluginOptions(self, _: api.Empty, context: Any) -> api.DevicePluginOptions:
        return api.DevicePluginOptions(get_preferred_allocation_available=True)

    def ListAndWatch(self, _: api.Empty, context: Any) -> Iterator[api.ListAndWatchResponse]:
        yield self.list()
        while self.changed.get():
            yield self.list()

    def GetPreferredAllocation(
        self, request: api.PreferredAllocationRequest, context: Any
    ) -> api.PreferredAllocationResponse:
        self.preferred.extend(request.container_requests)
        return api.PreferredAllocationResponse(
            container_responses=[
                api.ContainerPreferredAllocationResponse(
                    deviceIDs=first_fit(
                        sorted(each.available_deviceIDs),
                        list(each.must_include_deviceIDs),
                        each.allocation_size,
                    )
                )
                for each in request.container_requests
            ]
        )

    def Allocate(self, request: api.AllocateRequest, context: Any) -> api.AllocateResponse:
        self.allocated.extend(sorted(each.devices_ids) for each in request.container_requests)
        return api.AllocateResponse(
            container_responses=[
                api.ContainerAllocateResponse(envs={"DEVICES": ",".join(sorted(each.devices_ids))})
                for each in request.container_requests
            ]
        )


def first_fit(available: list[str], must: list[str], size: int) -> list[str]:
    return (must + [name for name in available if name not in must])[:size]
