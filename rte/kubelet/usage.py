"""What the kubelet has handed out and could hand out, asked of its PodResources socket."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from rte.kubelet.api import podresources_pb2 as api
from rte.kubelet.api.pods_pb2 import ListPodsResponse
from rte.model import (
    Allocatable,
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    Machine,
    MemoryBlock,
    NumaId,
    PodName,
    PodUse,
    Usage,
)

# sockaddr_un's sun_path has 108 bytes, the last of them a NUL.
SOCKET_PATH_BYTES = 107
# The kubelet's own client takes answers of this size; gRPC's default of 4 MiB is not enough for
# a large node with exclusive CPUs.
ANSWER_BYTES = 16 << 20
KEPT_PODS = 256  # more than a node has; each is some hundred bytes
TOO_LARGE = "larger than max"  # gRPC's own words of an answer that it does not take
UndecodedPods = ListPodsResponse
"""ListPodResourcesResponse with each pod as its bytes, which is what a message within another is on
the wire: the pods API has a message of that very form."""
UNCONNECTED = re.compile(r"connect failed: addr: unix:(\S+) error: (.+)")
"""gRPC's words of a socket on which nobody answers, behind twice as many others."""
# The kubelet allows all clients together 100 calls a second, 10 at once, and refuses the others.
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
COME_BACK_S = 15.0
"""So long after its start a kubelet may list no pods that it has not heard of yet, in PodResources
and in the pods API: there it answers all the same up to 1.36, and later says that it is
initializing. The API server may be slow."""

# What is asked, as KubeletError names it.
LIST = "PodResources List"
ALLOCATABLE = "PodResources GetAllocatableResources"

Answer = TypeVar("Answer")


class KubeletError(Exception):
    """The kubelet did not answer, or not usably. `asked` is the call, `code` gRPC's status."""

    def __init__(self, asked: str, problem: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(f"{asked}: {problem}")
        self.code = code


def target(socket: Path) -> str:
    """gRPC's name of a Unix socket. Raises KubeletError for a path no socket can have."""
    length = len(bytes(socket.absolute()))
    if length > SOCKET_PATH_BYTES:
        raise KubeletError(
            f"socket {socket}",
            f"the path has {length} bytes, Unix sockets allow {SOCKET_PATH_BYTES}; "
            "mount its directory at a shorter path",
        )
    return f"unix:{socket.absolute()}"


def channel(socket: Path, *more: tuple[str, int]) -> grpc.Channel:
    """A channel to one of the kubelet's sockets, which need not exist yet.

    It connects at the first call and again, without being told, when a new kubelet has put a new
    socket in the place of the old one. `more` are options of gRPC's beside these. Raises
    KubeletError when the path is too long.
    """
    return grpc.insecure_channel(
        target(socket),
        options=[
            # Without it gRPC sends the escaped path, which Go's HTTP/2 refuses.
            ("grpc.default_authority", "localhost"),
            ("grpc.max_receive_message_length", ANSWER_BYTES),
            # gRPC waits up to 2 minutes before it dials again; a kubelet restarts in seconds.
            ("grpc.initial_reconnect_backoff_ms", 100),
            # So long a kubelet of a busy node may take to answer a connection.
            ("grpc.min_reconnect_backoff_ms", 5000),
            ("grpc.max_reconnect_backoff_ms", 500),
            # A channel to the same path must not inherit another's back-off.
            ("grpc.use_local_subchannel_pool", 1),
            # How wide a socket on this machine is need not be found out. After each probe gRPC's
            # threads, up to 16 as the node has CPUs, look for more work again and again.
            ("grpc.http2.bdp_probe", 0),
            *more,
        ],
    )


def read_usage(channel: grpc.Channel, timeout_s: float) -> Usage:
    """PodResources List: all pods of the node by name, with what each container holds.

    Raises KubeletError when the kubelet has not answered within `timeout_s`.
    """
    list_pods: Callable[..., bytes] = channel.unary_unary(
        "/v1.PodResourcesLister/List",
        request_serializer=api.ListPodResourcesRequest.SerializeToString,
    )
    return parse_usage(ask(LIST, list_pods, api.ListPodResourcesRequest(), timeout_s))


def read_allocatable(channel: grpc.Channel, timeout_s: float) -> Allocatable:
    """PodResources GetAllocatableResources: healthy devices, CPUs and memory, used or not.

    Raises KubeletError when the kubelet has not answered within `timeout_s`.
    """
    return parse_allocatable(ask_allocatable(channel, timeout_s))


def ask_allocatable(channel: grpc.Channel, timeout_s: float) -> bytes:
    """GetAllocatableResources as it is on the wire: in no order, so that only its length can be
    compared. Raises KubeletError as `read_allocatable` does."""
    get: Callable[..., bytes] = channel.unary_unary(
        "/v1.PodResourcesLister/GetAllocatableResources",
        request_serializer=api.AllocatableResourcesRequest.SerializeToString,
    )
    return ask(ALLOCATABLE, get, api.AllocatableResourcesRequest(), timeout_s)


def parse_allocatable(answer: bytes) -> Allocatable:
    """The answer as a value. Raises KubeletError for bytes that are none."""
    try:
        said = api.AllocatableResourcesResponse.FromString(answer)
    except DecodeError as error:
        raise KubeletError(ALLOCATABLE, f"not an answer: {error}") from error
    return Allocatable(
        devices=_devices(said.devices), cpus=_cpus(said.cpu_ids), memory=_memory(said.memory)
    )


def parse_usage(answer: bytes) -> Usage:
    """The list's pods as values. Raises KubeletError for bytes that are none."""
    try:
        # The kubelet lists its pods in no order, and most of them as it did before.
        pods = [parse_pod(pod) for pod in UndecodedPods.FromString(answer).pods]
    except DecodeError as error:
        raise KubeletError(LIST, f"not an answer: {error}") from error
    return Usage(pods=tuple(sorted(pods, key=lambda p: p.pod)))


@lru_cache(maxsize=KEPT_PODS)
def parse_pod(text: bytes) -> PodUse:
    """One pod of the list. Raises DecodeError."""
    pod = api.PodResources.FromString(text)
    return PodUse(
        pod=PodName(namespace=pod.namespace, name=pod.name),
        containers=tuple(_container(c) for c in pod.containers),
        cpus=_cpus(pod.cpu_ids),
        memory=_memory(pod.memory),
    )


def claimed(usage: Usage, machine: Machine) -> frozenset[DeviceId]:
    """Our device ids that DRA claims hold.

    NVIDIA's DRA driver calls a GPU `gpu-<minor>` and its slices `gpu-<minor>-mig-…`; of a slice
    the name does not say which, so all slices of that GPU count as held.
    """
    held: set[DeviceId] = set()
    claims = {claim for pod in usage.pods for c in pod.containers for claim in c.claims}
    for claim in claims:
        name = _DRA_GPU.fullmatch(claim)
        for gpu in machine.gpus if name else ():
            if name and gpu.minor == int(name["minor"]):
                whole = name["slice"] is None
                held |= {gpu.uuid} if whole and gpu.uuid else {s.id for s in gpu.slices}
    if claims:
        ours = {i for g in machine.gpus for i in (g.uuid, *(s.id for s in g.slices)) if i}
        held |= {i for i in ours if any(i in claim for claim in claims)}
    return frozenset(held)


_DRA_GPU = re.compile(r"gpu\.nvidia\.com/[^/]+/gpu-(?P<minor>\d+)(?P<slice>-mig-.+)?")


def ask(asked: str, call: Callable[..., Answer], request: object, timeout_s: float) -> Answer:
    """The call's answer, asked again while the kubelet's rate limit refuses it."""
    end = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return call(request, timeout=max(end - time.monotonic(), 0.001))
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            # The limiter lets through whoever comes next: without jitter all clients that it
            # refused together would be refused together again.
            wait_s = pause_s * random.uniform(0.5, 1.5)
            exhausted = code is grpc.StatusCode.RESOURCE_EXHAUSTED
            limited = exhausted and TOO_LARGE not in (details or "")
            if limited and time.monotonic() + wait_s < end:
                time.sleep(wait_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            if absent := UNCONNECTED.search(details or ""):
                asked = asked.rpartition(" ")[0]  # whatever the call: nobody is there to be asked
                details = f"{absent[1]}: {absent[2]}"
            raise KubeletError(asked, f"{code.name}: {details}", code) from error


def _container(container: api.ContainerResources) -> ContainerUse:
    return ContainerUse(
        name=container.name,
        devices=_devices(container.devices),
        cpus=_cpus(container.cpu_ids),
        memory=_memory(container.memory),
        claims=tuple(sorted(set(_claims(container.dynamic_resources)))),
    )


def _devices(entries: Iterable[api.ContainerDevices]) -> tuple[DeviceUse, ...]:
    """One value a device; the kubelet sends an entry per device and NUMA node."""
    nodes: dict[tuple[str, str], set[NumaId]] = {}
    for entry in entries:
        touched = {NumaId(node.ID) for node in entry.topology.nodes}
        for id in entry.device_ids:
            nodes.setdefault((entry.resource_name, id), set()).update(touched)
    return tuple(
        DeviceUse(resource=resource, id=DeviceId(id), numa=tuple(sorted(numa)))
        for (resource, id), numa in sorted(nodes.items())
    )


def _cpus(ids: Iterable[int]) -> tuple[CpuId, ...]:
    return tuple(sorted(CpuId(cpu) for cpu in ids))


def _memory(blocks: Iterable[api.ContainerMemory]) -> tuple[MemoryBlock, ...]:
    values = (
        MemoryBlock(
            type=block.memory_type,
            size_bytes=block.size,
            numa=tuple(sorted(NumaId(node.ID) for node in block.topology.nodes)),
        )
        for block in blocks
    )
    return tuple(sorted(values, key=lambda m: (m.type, m.numa, m.size_bytes)))


def _claims(resources: Iterable[api.DynamicResource]) -> Iterable[str]:
    for claim in (c for resource in resources for c in resource.claim_resources):
        yield f"{claim.driver_name}/{claim.pool_name}/{claim.device_name}"
        yield from (device.name for device in claim.cdi_devices)
