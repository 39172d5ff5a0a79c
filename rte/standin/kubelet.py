"""The stand-in itself: sockets and files outside, one `KubeletState` inside.

Unlike the kubelet it limits no client's calls, and frees what a pod held when it is removed.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from plugin.api import deviceplugin_pb2 as plugin_api
from plugin.api import deviceplugin_pb2_grpc as plugin_rpc
from rte.kubelet.admission import Admitted, Rejected, admit
from rte.kubelet.api import podresources_pb2 as api
from rte.kubelet.api import podresources_pb2_grpc as rpc
from rte.kubelet.node import KubeletState, allocatable, kubelet_state, node_memory, usage, without
from rte.kubelet.policy import API_VERSION, KIND, parse_policy
from rte.kubelet.spec import PodSpec
from rte.kubelet.state import CPU_STATE, DEVICE_CHECKPOINT, MEMORY_STATE
from rte.kubelet.usage import target
from rte.model import (
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    MemoryBlock,
    NumaNode,
    PodName,
    PodUse,
    Policy,
    Usage,
)
from rte.standin.files import DeviceEntry, cpu_state, device_checkpoint, memory_state, write
from rte.standin.plugins import Listed, Plugins

CALLS = 16  # at once, on either socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What became of a pod."""

    answer: Admitted | Rejected
    answers: Mapping[tuple[str, str], plugin_api.ContainerAllocateResponse]
    """Container, resource → what the plugin's Allocate answered; empty for a rejected pod."""


class StandIn(rpc.PodResourcesListerServicer):
    """A kubelet without containers. `root` is what /var/lib/kubelet is on a node."""

    def __init__(
        self,
        root: Path,
        configuration: Mapping[str, Any],
        numa_nodes: Sequence[NumaNode],
        *,
        cores: Sequence[Sequence[CpuId]] = (),
    ) -> None:
        """`configuration` are fields of a KubeletConfiguration; `cores` the hardware threads of
        each core. Raises PolicyError for a configuration that the kubelet would not start with."""
        self.root = root
        self.plugin_dir = root / "device-plugins"
        self.plugin_socket = self.plugin_dir / "kubelet.sock"
        self.pod_resources = root / "pod-resources" / "kubelet.sock"
        self.configuration_file = root / "config.yaml"
        self._configuration = {"apiVersion": API_VERSION, "kind": KIND, **configuration}
        policy = parse_policy(self._configuration, where=str(self.configuration_file))
        state = kubelet_state(numa_nodes, policy, cores=cores)
        self._state = replace(state, allocatable=node_allocatable(state))
        self._changed = threading.Condition()  # guards the state and all below
        self._admission = threading.Lock()  # the kubelet admits one pod at a time
        self._being_admitted: PodSpec | None = None
        self._uids: dict[PodName, str] = {}
        self._answers: dict[PodName, Mapping[tuple[str, str], bytes]] = {}
        self._plugins = Plugins(self.plugin_dir, self._listed)
        self._servers: list[tuple[grpc.Server, ThreadPoolExecutor]] = []

    def __enter__(self) -> StandIn:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def state(self) -> KubeletState:
        """As it is now; a value that does not change."""
        return self._state

    @property
    def policy(self) -> Policy:
        return self._state.policy

    # Life

    def start(self) -> None:
        """Makes the folders, files and sockets. Raises KubeletError for a path too long."""
        for folder in (self.plugin_dir, self.pod_resources.parent):
            folder.mkdir(parents=True, exist_ok=True)
        for path in self.plugin_dir.iterdir():
            if path.is_socket():
                path.unlink()
        self.configuration_file.write_text(json.dumps(self._configuration, indent=2) + "\n")
        with self._changed:
            self._write_files()
        self._serve(self.pod_resources, rpc.add_PodResourcesListerServicer_to_server, self)
        self._serve(
            self.plugin_socket, plugin_rpc.add_RegistrationServicer_to_server, self._plugins
        )

    def stop(self) -> None:
        """Returns when the sockets are gone and every thread has ended; the files stay."""
        self._plugins.stop()
        ends = [server.stop(0) for server, _ in self._servers]
        for end in ends:
            end.wait()
        for _, pool in self._servers:
            pool.shutdown()
        self._servers = []

    def _serve(self, socket: Path, add: Any, servicer: object) -> None:
        pool = ThreadPoolExecutor(CALLS, thread_name_prefix=socket.parent.name)
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        add(servicer, server)
        server.add_insecure_port(target(socket))
        server.start()
        self._servers.append((server, pool))

    # Pods

    def admit(self, spec: PodSpec) -> Admission:
        """Decides about a pod and remembers it; a rejected one leaves nothing behind.

        Raises ValueError for a name that a pod here already has.
        """
        calls: list[tuple[str, frozenset[DeviceId], plugin_api.ContainerAllocateResponse]] = []

        def allocate(resource: str, ids: Sequence[DeviceId]) -> None:
            calls.append((resource, frozenset(ids), self._plugins.allocate(resource, ids)))

        with self._admission:
            with self._changed:
                state = self._state
                if spec.pod in state.pods:
                    raise ValueError(f"{spec.pod.namespace}/{spec.pod.name} is here already")
                self._being_admitted = spec
            answer = admit(state, spec, prefer=self._plugins.prefer, allocate=allocate)
            answers = by_container(answer, calls)
            with self._changed:
                self._being_admitted = None
                if answer.state is not None:
                    # Devices may have come and gone meanwhile: the rest is the admission's.
                    after = answer.state
                    self._state = replace(self._state, pods=after.pods, memory=after.memory)
                if isinstance(answer, Admitted):
                    self._uids[spec.pod] = str(uuid.uuid4())
                    self._answers[spec.pod] = {
                        key: value.SerializeToString() for key, value in answers.items()
                    }
                    self._write_files()
        return Admission(answer=answer, answers=answers)

    def remove(self, pod: PodName) -> None:
        """The pod has ended; what it held is free."""
        with self._admission, self._changed:
            self._state = without(self._state, pod)
            self._write_files()
            self._uids.pop(pod, None)
            self._answers.pop(pod, None)

    # Devices

    def wait_devices(self, resource: str, count: int, *, within_s: float = 10) -> bool:
        """Whether exactly `count` devices of the resource are healthy, before the time is up."""
        end = time.monotonic() + within_s
        with self._changed:
            while len(self._healthy().get(resource, ())) != count:
                if not self._changed.wait(end - time.monotonic()):
                    return False
        return True

    def _listed(self, resource: str, devices: tuple[Listed, ...]) -> None:
        with self._changed:
            state = self._state
            others = {entry for entry in state.unhealthy if entry[0] != resource}
            ill = {(resource, device.id) for device in devices if not device.healthy}
            self._state = replace(
                state,
                devices={**state.devices, resource: {d.id: d.numa for d in devices}},
                unhealthy=frozenset(others | ill),
            )
            self._write_files()
            self._changed.notify_all()

    def _healthy(self) -> dict[str, list[DeviceId]]:
        state = self._state
        return {
            resource: [id for id in ids if (resource, id) not in state.unhealthy]
            for resource, ids in state.devices.items()
        }

    # Files

    def _write_files(self) -> None:
        """In the order of the kubelet's managers: readers see each whole, not all at once."""
        state = self._state
        checkpoint = device_checkpoint(self._entries(), self._healthy())
        write(self.plugin_dir / DEVICE_CHECKPOINT, checkpoint)
        write(self.root / CPU_STATE, cpu_state(state, self._uids))
        write(self.root / MEMORY_STATE, memory_state(state, self._uids))

    def _entries(self) -> Iterator[DeviceEntry]:
        for name, held in self._state.pods.items():
            for use in held.containers:
                for resource in sorted({device.resource for device in use.devices}):
                    yield DeviceEntry(
                        uid=self._uids[name],
                        container=use.name,
                        resource=resource,
                        devices=tuple(d for d in use.devices if d.resource == resource),
                        answer=self._answers[name].get((use.name, resource), b""),
                    )

    # PodResources

    def usage(self) -> Usage:
        """What List says: a pod that is just being admitted is there, with nothing yet."""
        with self._changed:
            listed, arriving = usage(self._state), self._being_admitted
        if arriving is None or any(use.pod == arriving.pod for use in listed.pods):
            return listed
        bare = tuple(
            ContainerUse(name=container.name)
            for container in arriving.containers
            if not container.ends_before_the_others
        )
        return Usage(pods=(*listed.pods, PodUse(pod=arriving.pod, containers=bare)))

    def List(
        self, request: api.ListPodResourcesRequest, context: grpc.ServicerContext
    ) -> api.ListPodResourcesResponse:
        return api.ListPodResourcesResponse(pod_resources=map(pod_message, self.usage().pods))

    def Get(
        self, request: api.GetPodResourcesRequest, context: grpc.ServicerContext
    ) -> api.GetPodResourcesResponse:
        wanted = PodName(namespace=request.pod_namespace, name=request.pod_name)
        found = next((pod for pod in self.usage().pods if pod.pod == wanted), None)
        if found is None:
            words = f"pod {wanted.name} in namespace {wanted.namespace} not found"
            context.abort(grpc.StatusCode.UNKNOWN, words)
        return api.GetPodResourcesResponse(pod_resources=pod_message(found))

    def GetAllocatableResources(
        self, request: api.AllocatableResourcesRequest, context: grpc.ServicerContext
    ) -> api.AllocatableResourcesResponse:
        found = allocatable(self._state)
        return api.AllocatableResourcesResponse(
            devices=device_messages(found.devices),
            cpu_ids=found.cpus,
            memory=memory_messages(found.memory),
        )


def by_container(
    answer: Admitted | Rejected,
    calls: Iterable[tuple[str, frozenset[DeviceId], plugin_api.ContainerAllocateResponse]],
) -> dict[tuple[str, str], plugin_api.ContainerAllocateResponse]:
    """Each container's answer: the calls name no container, and come in the containers' order."""
    if isinstance(answer, Rejected):
        return {}
    waiting = list(calls)
    found = {}
    for use in answer.containers:
        for resource in sorted({device.resource for device in use.devices}):
            ids = frozenset(d.id for d in use.devices if d.resource == resource)
            for call in waiting:
                if call[:2] == (resource, ids):
                    found[use.name, resource] = call[2]
                    waiting.remove(call)
                    break
    return found


def node_allocatable(state: KubeletState) -> dict[str, int]:
    """The Node's status.allocatable: what is there without what is reserved."""
    found: dict[str, int] = {"cpu": len(state.topology.node) - len(state.policy.reserved_cpus)}
    for (_, name), size_bytes in node_memory(state).items():
        found[name] = found.get(name, 0) + size_bytes
    return found


def likely_cores(numa_nodes: Iterable[NumaNode]) -> tuple[tuple[CpuId, ...], ...]:
    """The hardware threads of each core, where the source does not say them from the way Linux
    numbers them on x86: the first thread of every core, then the second ones. A machine whose NUMA
    nodes do not all have two runs of equal length is then taken for one without SMT."""
    numa_nodes = tuple(numa_nodes)
    cores = [core for node in numa_nodes for core in node.cores]
    if cores:
        return tuple(cores)
    for node in numa_nodes:
        half = len(node.cpus) // 2
        first, second = node.cpus[:half], node.cpus[half:]
        runs = all(run and run[-1] - run[0] == len(run) - 1 for run in (first, second))
        if node.cpus and not (runs and len(first) == len(second) and second[0] > first[-1] + 1):
            return ()
        cores += zip(first, second, strict=True) if node.cpus else ()
    return tuple(cores)


# Messages


def pod_message(pod: PodUse) -> api.PodResources:
    return api.PodResources(
        name=pod.pod.name,
        namespace=pod.pod.namespace,
        containers=[
            api.ContainerResources(
                name=use.name,
                devices=device_messages(use.devices),
                cpu_ids=use.cpus,
                memory=memory_messages(use.memory),
            )
            for use in pod.containers
        ],
    )


def device_messages(devices: Iterable[DeviceUse]) -> list[api.ContainerDevices]:
    """An entry for each device and NUMA node, as the kubelet has it."""
    return [
        api.ContainerDevices(
            resource_name=device.resource,
            device_ids=[device.id],
            topology=None if node is None else topology((node,)),
        )
        for device in devices
        for node in device.numa or (None,)
    ]


def memory_messages(blocks: Iterable[MemoryBlock]) -> list[api.ContainerMemory]:
    return [
        api.ContainerMemory(
            memory_type=block.type, size=block.size_bytes, topology=topology(block.numa)
        )
        for block in blocks
    ]


def topology(nodes: Iterable[int]) -> api.TopologyInfo:
    return api.TopologyInfo(nodes=[api.NUMANode(ID=node) for node in nodes])
