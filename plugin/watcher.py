"""What the kubelet's plugin watcher asks a socket that it found in plugins_registry."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from plugin.api import pluginregistration_pb2 as api
from plugin.api import pluginregistration_pb2_grpc as rpc


class Watched(rpc.RegistrationServicer):
    """Answers for one resource; `notify` is told whether the kubelet took it, else with why not."""

    def __init__(self, resource: str, version: str, notify: Callable[[str | None], None]) -> None:
        self._resource = resource
        self._version = version
        self._notify = notify

    def GetInfo(self, request: api.InfoRequest, context: grpc.ServicerContext) -> api.PluginInfo:
        # No endpoint: it is this socket, whose path on the host we need not know.
        return api.PluginInfo(
            type="DevicePlugin", name=self._resource, supported_versions=[self._version]
        )

    def NotifyRegistrationStatus(
        self, request: api.RegistrationStatus, context: grpc.ServicerContext
    ) -> api.RegistrationStatusResponse:
        self._notify(None if request.plugin_registered else request.error)
        return api.RegistrationStatusResponse()


def serve(
    server: grpc.Server, resource: str, version: str, notify: Callable[[str | None], None]
) -> None:
    """Have a server answer the plugin watcher too."""
    rpc.add_RegistrationServicer_to_server(Watched(resource, version, notify), server)
