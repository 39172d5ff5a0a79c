"""The kubelet's five calls for one resource: translates, decides nothing.

A call looks only at `Tables`, which are made when the machine changes and replaced as a whole: no
call waits for NVML, the kubelet, a file or a table that is being built.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from plugin.allocation import Allocation, CannotAllocate, Handing, Nodes, Owner, allocation
from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.decisions import Call, Decision, Decisions
from plugin.devices import Device
from plugin.held import Held
from rte.graph.build import Graph
from rte.graph.choose import Choice, choose
from rte.graph.order import nvlink_order
from rte.graph.parts import Sharing, choose_parts
from rte.model import DeviceId, PciAddress

log = logging.getLogger(__name__)

HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
OPTIONS = api.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)
# The kubelet allocates at once what it has asked about; an Allocate after this is another pod's.
FOLLOWS_S = 5.0
# Upper bounds in seconds of what is counted of the time a preference takes.
TOOK_BUCKETS_S = (0.0005, 0.001, 0.003, 0.005, 0.01, 0.05, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """All that a call looks at."""

    graph: Graph
    devices: Mapping[str, Device]  # by id, in the order of the list
    owners: Mapping[DeviceId, Owner]
    handing: Handing
    nodes: Nodes
    cdi_names: Mapping[DeviceId, str] = field(default_factory=dict)
    cdi_extra: tuple[str, ...] = ()

    healthy: frozenset[DeviceId]
    nics: frozenset[PciAddress]  # the compute NICs
    parts: Mapping[DeviceId, DeviceId] | None  # slice or replica → its GPU; None: whole GPUs
    sharing: Sharing = Sharing.DISTRIBUTED


@dataclass(slots=True, kw_only=True)
class Counters:
    """What happened to one resource since the start; the metrics read it."""

    lists_sent: int = 0
    preferences: int = 0
    preference_faults: int = 0  # answered empty because of a fault of ours
    preference_took_s: float = 0.0  # sum
    preference_took: list[int] = field(default_factory=lambda: [0] * (len(TOOK_BUCKETS_S) + 1))
    """How many preferences took at most each of TOOK_BUCKETS_S (not cumulative), last: longer."""
    allocations: int = 0  # containers
    allocations_refused: int = 0
    registrations: int = 0
    registrations_failed: int = 0
    streams: int = 0  # ListAndWatch calls that are open now


class Preferred(NamedTuple):
    """What was answered to the kubelet last."""

    number: int  # of the decision
    ids: frozenset[str]
    at: float  # of time.perf_counter


class Resource:
    """One resource name: the current tables, who waits for new ones, and what was answered."""

    def __init__(
        self,
        name: str,
        tables: Tables,
        *,
        held: Held,
        decisions: Decisions,
        on_allocate: Callable[[], None] = lambda: None,
        on_decision: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.counters = Counters()
        self.tables = tables
        self.list = list_message(tables.devices.values())
        self.changed = threading.Condition()
        self._held = held
        self._decisions = decisions
        self._on_allocate = on_allocate
        self._on_decision = on_decision
        self._preferred: Preferred | None = None  # the last answer, until it is allocated

    def update(self, tables: Tables) -> bool:
        """Take new tables; whether the kubelet's list differs, and so is sent to each stream."""
        message = list_message(tables.devices.values())
        with self.changed:
            self.tables = tables
            if message == self.list:
                return False
            self.list = message
            self.changed.notify_all()
        return True

    def prefer(self, wanted: api.ContainerPreferredAllocationRequest) -> tuple[str, ...]:
        """The answer to one container's offer, best first; empty after a fault of ours."""
        began = time.perf_counter()
        try:
            decision = self._decide(wanted, began)
        except Exception:
            # An error would reject the pod for good; an empty answer lets the kubelet choose.
            log.exception("%s: no preference for %s", self.name, wanted)
            self.counters.preference_faults += 1
            self._preferred = None
            return ()
        self._count(decision.took_s)
        self._decisions.add(decision)
        self._preferred = Preferred(decision.number, frozenset(decision.answer), began)
        self._on_decision()
        return decision.answer

    def allocate(self, ids: Sequence[str]) -> Allocation:
        """What a container gets that is given these ids, healthy or not.

        A device that turned unhealthy after the kubelet chose it is still handed over, as the
        kubelet counts it as allocated already. Raises CannotAllocate for ids that were never
        advertised.
        """
        tables = self.tables
        unknown = sorted(id for id in ids if id not in tables.devices)
        if unknown:
            raise CannotAllocate(f"{self.name} has no such device", unknown)
        chosen = tuple(tables.devices[id] for id in self._in_order(tables, ids))
        answer = allocation(
            chosen,
            owners=tables.owners,
            handing=tables.handing,
            nodes=tables.nodes,
            cdi_names=tables.cdi_names,
            cdi_extra=tables.cdi_extra,
        )
        preferred, self._preferred = self._preferred, None
        if preferred is not None and time.perf_counter() - preferred.at > FOLLOWS_S:
            preferred = None
        numbers = () if preferred is None else (preferred.number,)
        if preferred is None or preferred.ids != frozenset(ids):
            taken = self._taken(tables, ids, asked=preferred is not None)
            self._decisions.add(taken)
            self._on_decision()
            numbers = (*numbers, taken.number)
        self._decisions.allocated(numbers, self.name, ids)
        self._held.allocated(device.id for device in chosen)
        self.counters.allocations += 1
        self._on_allocate()
        return answer

    def _decide(self, wanted: api.ContainerPreferredAllocationRequest, began: float) -> Decision:
        tables = self.tables
        # The kubelet offers in random order: sorted, the same question gets the same answer.
        offered = _known(wanted.available_deviceIDs, tables)
        required = _known(wanted.must_include_deviceIDs, tables)
        choice = self._choose(tables, offered, required, wanted.allocation_size)
        return Decision(
            number=self._decisions.number(),
            call=Call.PREFERRED,
            resource=self.name,
            at=time.time(),
            offered=offered,
            required=required,
            size=wanted.allocation_size,
            answer=choice.chosen,
            preference=choice.preference,
            runner_up=choice.runner_up,
            decided_by=choice.decided_by,
            exact=choice.exact,
            why=self._why_no_nics(tables, choice),
            took_s=time.perf_counter() - began,
        )

    def _choose(
        self,
        tables: Tables,
        offered: tuple[DeviceId, ...],
        required: tuple[DeviceId, ...],
        size: int,
    ) -> Choice:
        """What is offered counts as free in any case, else what is healthy and not in use."""
        held = self._held.ids()
        if tables.parts is not None:
            touched = {tables.parts[id] for id in held if id in tables.parts}
            return choose_parts(
                tables.graph,
                parts=tables.parts,
                available=offered,
                required=required,
                size=size,
                free=set(tables.parts.values()) - touched,
                sharing=tables.sharing,
            )
        nics = self._held.nics
        free_nics: frozenset[PciAddress] | None = None
        if not self._held.has_named(tables.nics):
            free_nics = frozenset()
        elif nics.held:
            free_nics = tables.nics - nics.held
        return choose(
            tables.graph,
            available=offered,
            required=required,
            size=size,
            explain=True,
            free=tables.healthy - held,
            free_nics=free_nics,
            own_nics=nics.own,
        )

    def _taken(self, tables: Tables, ids: Sequence[str], *, asked: bool) -> Decision:
        """An Allocate that no preference of ours explains, ranked for comparison."""
        began = time.perf_counter()
        taken = _known(ids, tables)
        choice = self._choose(tables, taken, taken, len(taken))
        return Decision(
            number=self._decisions.number(),
            call=Call.ALLOCATED,
            resource=self.name,
            at=time.time(),
            offered=(),
            required=(),
            size=len(taken),
            answer=taken,
            preference=choice.preference,
            why="the kubelet took others than preferred"
            if asked
            else f"not asked: {self._why_unasked(tables, taken)}",
            took_s=time.perf_counter() - began,
        )

    def _why_no_nics(self, tables: Tables, choice: Choice) -> str:
        """That NICs did not count, where there are some; empty where they did."""
        if choice.preference is None or not tables.nics or self._held.has_named(tables.nics):
            return ""
        return "NICs not counted, as no resource names them by PCI address"

    def _why_unasked(self, tables: Tables, taken: Sequence[DeviceId]) -> str:
        """Why the kubelet had no question: it asks only where it has a choice."""
        used = self._held.ids()
        nodes = {node for id in taken for node in tables.devices[id].numa}
        others = {
            id
            for id, device in tables.devices.items()
            if device.healthy and id not in used and nodes.intersection(device.numa)
        }
        if nodes and others <= set(taken):
            named = ", ".join(map(str, sorted(nodes)))
            return f"all that was free in NUMA node{'s' if len(nodes) > 1 else ''} {named}"
        if used.intersection(taken):
            return "used again, as after an init container or a restart"
        return "all that was aligned, or used again"

    def _in_order(self, tables: Tables, ids: Sequence[str]) -> tuple[DeviceId, ...]:
        """The ids in the order of the list, which is PCI order; over NVLink where that is on."""
        listed = _known(ids, tables)
        if not tables.handing.cuda_order:
            return listed
        return nvlink_order(tables.graph, listed)

    def _count(self, took_s: float) -> None:
        counters = self.counters
        counters.preferences += 1
        counters.preference_took_s += took_s
        bucket = sum(took_s > bound for bound in TOOK_BUCKETS_S)
        counters.preference_took[bucket] += 1


class Service(rpc.DevicePluginServicer):
    """What one server answers for a resource; each server has its own, and ends its streams."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._stopped = False

    def stop(self) -> None:
        """End all ListAndWatch streams; other calls are answered to their end."""
        with self._resource.changed:
            self._stopped = True
            self._resource.changed.notify_all()

    def GetDevicePluginOptions(
        self, request: api.Empty, context: grpc.ServicerContext
    ) -> api.DevicePluginOptions:
        return OPTIONS

    def ListAndWatch(
        self, request: api.Empty, context: grpc.ServicerContext
    ) -> Iterator[api.ListAndWatchResponse]:
        """The full list at once and after each change, until either side ends the call."""
        resource = self._resource
        if not context.add_callback(self._wake):
            return  # the call had ended before it began
        sent: api.ListAndWatchResponse | None = None
        with resource.changed:
            resource.counters.streams += 1
        try:
            while True:
                with resource.changed:
                    while resource.list is sent and not self._over(context):
                        resource.changed.wait()
                    if self._over(context):
                        return
                    sent = resource.list
                    resource.counters.lists_sent += 1
                yield sent
        finally:
            with resource.changed:
                resource.counters.streams -= 1

    def GetPreferredAllocation(
        self, request: api.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> api.PreferredAllocationResponse:
        return api.PreferredAllocationResponse(
            container_responses=[
                api.ContainerPreferredAllocationResponse(deviceIDs=self._resource.prefer(wanted))
                for wanted in request.container_requests
            ]
        )

    def Allocate(
        self, request: api.AllocateRequest, context: grpc.ServicerContext
    ) -> api.AllocateResponse:
        try:
            answers = [self._resource.allocate(c.devices_ids) for c in request.container_requests]
        except CannotAllocate as error:
            self._resource.counters.allocations_refused += 1
            log.warning("%s: Allocate refused: %s", self._resource.name, error)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return api.AllocateResponse(container_responses=map(allocate_message, answers))

    def PreStartContainer(
        self, request: api.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> api.PreStartContainerResponse:
        return api.PreStartContainerResponse()

    def _over(self, context: grpc.ServicerContext) -> bool:
        return self._stopped or not context.is_active()

    def _wake(self) -> None:
        with self._resource.changed:
            self._resource.changed.notify_all()


def list_message(devices: Iterable[Device]) -> api.ListAndWatchResponse:
    """The kubelet's list; a device of which no NUMA node is known has no topology at all."""
    return api.ListAndWatchResponse(
        devices=[
            api.Device(
                ID=device.id,
                health=HEALTHY if device.healthy else UNHEALTHY,
                # An empty TopologyInfo would make the kubelet hide the device from PodResources.
                topology=api.TopologyInfo(nodes=[api.NUMANode(ID=node) for node in device.numa])
                if device.numa
                else None,
            )
            for device in devices
        ]
    )


def allocate_message(answer: Allocation) -> api.ContainerAllocateResponse:
    return api.ContainerAllocateResponse(
        envs=answer.envs,
        mounts=[
            api.Mount(container_path=m.container, host_path=m.host, read_only=m.read_only)
            for m in answer.mounts
        ],
        devices=[
            api.DeviceSpec(container_path=n.container, host_path=n.host, permissions=n.permissions)
            for n in answer.nodes
        ],
        annotations=answer.annotations,
        cdi_devices=[api.CDIDevice(name=name) for name in answer.cdi],
    )


def _known(ids: Iterable[str], tables: Tables) -> tuple[DeviceId, ...]:
    """The ids that are ours, once each, in the order of the list."""
    wanted = set(ids)
    return tuple(device.id for id, device in tables.devices.items() if id in wanted)
