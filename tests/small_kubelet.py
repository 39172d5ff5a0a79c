"""The part of a kubelet that a device plugin sees: registration, and a stream for each plugin.

For what the kubelet decides there is the real one (tests/real_kubelet.py); this one is for what
it does to sockets and calls, and shows what it was told.
"""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from tests.stopwatch import Stopwatch

GPUS = "nvidia.com/gpu"
WITHIN_S = 20.0  # for what must come, on a machine that is busy with other tests


def until(true: Callable[[], object], within_s: float = WITHIN_S) -> bool:
    """Whether it became true in time."""
    stopwatch = Stopwatch()
    while not true():
        if stopwatch.past(within_s):
            return False
        time.sleep(0.005)
    return True


class SmallKubelet(rpc.RegistrationServicer):
    """Answers Register as the kubelet does: dials back, asks for the options, opens a stream."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "kubelet.sock"
        self.registered: queue.Queue[api.RegisterRequest] = queue.Queue()
        self.sockets: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Inode and time of making of the plugin's socket at each Register, by endpoint."""
        self.lists: dict[str, list[api.ListAndWatchResponse]] = defaultdict(list)
        self.options: list[api.DevicePluginOptions] = []
        self.refuse = 0  # so many calls of Register
        self.refused: list[float] = []  # when, monotonic seconds
        self.unwatched = 0  # so many calls of Register are followed by no stream
        self.channels: dict[str, grpc.Channel] = {}
        self.threads: list[threading.Thread] = []
        self.server: grpc.Server | None = None

    def __enter__(self) -> "SmallKubelet":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """As the kubelet does: remove all sockets, then make its own."""
        for path in self.folder.iterdir():
            if path.is_socket():
                path.unlink(missing_ok=True)  # its plugin may be ending
        self.pool = ThreadPoolExecutor(4, thread_name_prefix="kubelet")
        self.server = grpc.server(self.pool)
        rpc.add_RegistrationServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{self.socket}")
        self.server.start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop(0).wait()
            self.pool.shutdown()
            self.server = None
        for channel in self.channels.values():
            channel.close()
        for thread in self.threads:
            thread.join(WITHIN_S)
        self.channels = {}
        self.threads = []

    def Register(self, request: api.RegisterRequest, context: Any) -> api.Empty:
        if self.refuse:
            self.refuse -= 1
            self.refused.append(time.monotonic())
            context.abort(grpc.StatusCode.UNKNOWN, "not now")
        path = self.folder / request.endpoint
        channel = grpc.insecure_channel(
            f"unix:{path}",
            options=[
                ("grpc.default_authority", "localhost"),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        stub = rpc.DevicePluginStub(channel)
        deadline = context.time_remaining()
        try:
            found = path.stat()
            options = stub.GetDevicePluginOptions(api.Empty(), timeout=deadline)
        except (OSError, grpc.RpcError) as error:  # the plugin has gone meanwhile
            channel.close()
            context.abort(grpc.StatusCode.UNKNOWN, str(error))
        self.sockets[request.endpoint].append((found.st_ino, found.st_mtime_ns))
        self.options.append(options)
        self.channels[request.resource_name] = channel
        if self.unwatched:
            self.unwatched -= 1
        else:
            watch = threading.Thread(
                target=self.follow,
                args=(request.resource_name, stub.ListAndWatch(api.Empty())),
                name="kubelet follows",
                daemon=True,
            )
            watch.start()
            self.threads.append(watch)
        self.registered.put(request)
        return api.Empty()

    def follow(self, resource: str, stream: Any) -> None:
        try:
            for message in stream:
                self.lists[resource].append(message)
        except grpc.RpcError:
            return

    def await_register(self, within_s: float = WITHIN_S) -> api.RegisterRequest:
        assert until(lambda: not self.registered.empty(), within_s), "no Register"
        return self.registered.get()

    def devices(self, resource: str = GPUS) -> Mapping[str, api.Device]:
        """The last list by id; waits for the first."""
        assert until(lambda: self.lists[resource]), f"no list of {resource}"
        return {device.ID: device for device in self.lists[resource][-1].devices}

    def plugin(self, resource: str = GPUS) -> rpc.DevicePluginStub:
        return rpc.DevicePluginStub(self.channels[resource])

    def prefer(
        self, offered: Any, size: int, required: Any = (), resource: str = GPUS
    ) -> tuple[str, ...]:
        request = api.PreferredAllocationRequest(
            container_requests=[
                api.ContainerPreferredAllocationRequest(
                    available_deviceIDs=offered,
                    must_include_deviceIDs=required,
                    allocation_size=size,
                )
            ]
        )
        (answer,) = self.plugin(resource).GetPreferredAllocation(request).container_responses
        return tuple(answer.deviceIDs)

    def allocate(self, *ids: str, resource: str = GPUS) -> api.ContainerAllocateResponse:
        request = api.AllocateRequest(
            container_requests=[api.ContainerAllocateRequest(devices_ids=ids)]
        )
        (answer,) = self.plugin(resource).Allocate(request).container_responses
        return answer  # type: ignore[no-any-return]
