"""The kubelet's side of the device plugin protocol: Register, the list, and the two calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from rte.kubelet.admission import PluginError
from rte.kubelet.usage import KubeletError, channel
from rte.model import DeviceId, NumaId

log = logging.getLogger(__name__)

VERSION = "v1beta1"
DIAL_S = 10.0  # the kubelet gives a plugin so long to answer while it registers


class Listed(NamedTuple):
    """One device of a plugin's list."""

    id: DeviceId
    healthy: bool
    numa: tuple[NumaId, ...]


OnList = Callable[[str, tuple[Listed, ...]], None]
"""Resource, devices: the whole list, each time that there is a new one."""


class Plugins(rpc.RegistrationServicer):
    """The plugins that have registered, by resource; the last one that registers has it."""

    def __init__(self, plugin_dir: Path, on_list: OnList) -> None:
        self._plugin_dir = plugin_dir
        self._on_list = on_list
        self._lock = threading.Lock()
        self._endpoints: dict[str, Endpoint] = {}
        self._followed: list[Endpoint] = []  # also those whose end is just being told

    def stop(self) -> None:
        """Returns when every stream has ended, and every list and end has been told."""
        with self._lock:
            self._endpoints = {}
            followed, self._followed = self._followed, []
        for endpoint in followed:
            endpoint.close()

    def Register(self, request: api.RegisterRequest, context: grpc.ServicerContext) -> api.Empty:
        """Dials back before it answers, as the kubelet does."""
        if request.version != VERSION:
            context.abort(grpc.StatusCode.UNKNOWN, f"expected {VERSION}, got {request.version!r}")
        try:
            endpoint = Endpoint(request.resource_name, self._plugin_dir / request.endpoint)
        except (KubeletError, grpc.RpcError) as error:
            context.abort(grpc.StatusCode.UNKNOWN, f"failed to dial {request.endpoint}: {error}")
        with self._lock:
            before = self._endpoints.get(request.resource_name)
            self._endpoints[request.resource_name] = endpoint
            self._followed = [e for e in self._followed if e.is_followed] + [endpoint]
            endpoint.follow(self._listed, self._ended)
        if before is not None:
            before.close()
        return api.Empty()

    def prefer(
        self, resource: str, offered: Sequence[DeviceId], must: Sequence[DeviceId], size: int
    ) -> list[DeviceId]:
        """GetPreferredAllocation for one container; nothing from a plugin without it."""
        endpoint = self._endpoint(resource)
        if not endpoint.prefers:
            return []
        request = api.PreferredAllocationRequest(
            container_requests=[
                api.ContainerPreferredAllocationRequest(
                    available_deviceIDs=offered,
                    must_include_deviceIDs=must,
                    allocation_size=size,
                )
            ]
        )
        try:
            answers = endpoint.stub.GetPreferredAllocation(request).container_responses
        except grpc.RpcError as error:
            raise PluginError(in_go(error)) from error
        return [DeviceId(id) for id in answers[0].deviceIDs] if answers else []

    def allocate(self, resource: str, ids: Sequence[DeviceId]) -> api.ContainerAllocateResponse:
        """Allocate for one container."""
        request = api.AllocateRequest(
            container_requests=[api.ContainerAllocateRequest(devices_ids=ids)]
        )
        try:
            answer: api.AllocateResponse = self._endpoint(resource).stub.Allocate(request)
        except grpc.RpcError as error:
            raise PluginError(in_go(error)) from error
        if not answer.container_responses:
            raise PluginError("no containers return in allocation response")
        return answer.container_responses[0]

    def _endpoint(self, resource: str) -> Endpoint:
        with self._lock:
            endpoint = self._endpoints.get(resource)
        if endpoint is None:
            raise PluginError(f"endpoint not found in cache for a registered resource: {resource}")
        return endpoint

    def _listed(self, endpoint: Endpoint, devices: tuple[Listed, ...]) -> None:
        with self._lock:
            current = self._endpoints.get(endpoint.resource) is endpoint
        if current:
            self._on_list(endpoint.resource, devices)

    def _ended(self, endpoint: Endpoint) -> None:
        """A plugin whose stream has ended has no healthy device any more."""
        with self._lock:
            current = self._endpoints.get(endpoint.resource) is endpoint
            if current:
                del self._endpoints[endpoint.resource]
        if current:
            log.info("%s: the plugin's stream has ended", endpoint.resource)
            gone = (device._replace(healthy=False) for device in endpoint.devices)
            self._on_list(endpoint.resource, tuple(gone))
            endpoint.channel.close()


class Endpoint:
    """One plugin, as dialled."""

    def __init__(self, resource: str, socket: Path) -> None:
        """Asks for its options. Raises grpc.RpcError and KubeletError."""
        self.resource = resource
        self.devices: tuple[Listed, ...] = ()
        self.channel = channel(socket)
        self.stub = rpc.DevicePluginStub(self.channel)
        try:
            options = self.stub.GetDevicePluginOptions(api.Empty(), timeout=DIAL_S)
        except grpc.RpcError:
            self.channel.close()
            raise
        self.prefers: bool = options.get_preferred_allocation_available
        self._stream = self.stub.ListAndWatch(api.Empty())
        self._thread: threading.Thread | None = None

    def follow(
        self,
        listed: Callable[[Endpoint, tuple[Listed, ...]], None],
        ended: Callable[[Endpoint], None],
    ) -> None:
        """Tells each list in a thread, until the stream ends."""

        def run() -> None:
            try:
                for message in self._stream:
                    self.devices = devices(message)
                    listed(self, self.devices)
            except grpc.RpcError as error:
                log.debug("%s: %s", self.resource, in_go(error))
            ended(self)

        self._thread = threading.Thread(target=run, name=f"list {self.resource}", daemon=True)
        self._thread.start()

    @property
    def is_followed(self) -> bool:
        """Whether there may still be something to tell."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Returns when nothing more is told."""
        self._stream.cancel()
        if self._thread is not None:
            self._thread.join()
        self.channel.close()


def devices(message: api.ListAndWatchResponse) -> tuple[Listed, ...]:
    return tuple(
        Listed(
            id=DeviceId(device.ID),
            healthy=device.health == "Healthy",
            numa=tuple(sorted(NumaId(node.ID) for node in device.topology.nodes)),
        )
        for device in message.devices
    )


def in_go(error: grpc.RpcError) -> str:
    """The error as the kubelet's own client would print it."""
    name = "".join(word.capitalize() for word in error.code().name.split("_"))
    return f"rpc error: code = {name} desc = {error.details()}"
