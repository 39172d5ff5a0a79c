"""Machine + faults → what the kubelet is told: resource name → devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rte.model import (
    DeviceId,
    Fault,
    FaultClass,
    Faults,
    Gpu,
    Machine,
    MigSlice,
    NumaId,
    PciAddress,
    PciDevice,
    pci_order,
)

# The kubelet's masks of NUMA nodes are 64-bit words: a greater id fits no hint.
NUMA_IDS = 64


class MigStrategy(StrEnum):
    """NVIDIA's word for how MIG slices are advertised."""

    NONE = "none"
    """Whole GPUs only; slices are not looked at."""
    SINGLE = "single"
    """Slices under the GPUs' resource name; all GPUs must be cut alike."""
    MIXED = "mixed"
    """Slices under a resource name for each profile, GPUs without MIG under theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertising:
    """How devices are advertised."""

    resource: str = "nvidia.com/gpu"  # of whole GPUs; slices share its domain
    mig: MigStrategy = MigStrategy.NONE
    advertise_inferred: bool = False  # NUMA nodes that are inferred, not stated
    same_socket: tuple[tuple[NumaId, ...], ...] = ()
    """Sub-NUMA clusters: a device on one node of a list is advertised on all nodes of it."""
    replicas: Mapping[str, int] = field(default_factory=dict)  # by resource name, from 2
    rename_shared: bool = False  # `.shared` after the name of a resource with replicas
    fabric: Mapping[PciAddress, str] = field(default_factory=dict)
    """Configured group of each GPU; when there are any, whole GPUs are advertised by group."""

    def __post_init__(self) -> None:
        for resource, count in self.replicas.items():
            if count < 2:
                raise ValueError(f"replicas of {resource}: expected at least 2, got {count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of the kubelet's list."""

    id: DeviceId
    holds: DeviceId  # the GPU or MIG slice itself: the id without a replica's `::<n>`
    gpu: PciAddress
    numa: tuple[NumaId, ...] = ()  # ascending; empty: sent without topology
    unhealthy: str | None = None  # why no work may be given to it; None: healthy

    @property
    def healthy(self) -> bool:
        return self.unhealthy is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A GPU as it was when it last answered."""

    gpu: Gpu
    pci: PciDevice | None

    @property
    def ids(self) -> frozenset[DeviceId]:
        return frozenset(i for i in (self.gpu.uuid, *(s.id for s in self.gpu.slices)) if i)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertised:
    """The lists of all resources."""

    resources: Mapping[str, tuple[Device, ...]] = field(default_factory=dict)
    """By resource name; devices in PCI order, then by MIG instance, then by replica."""
    left_out: tuple[str, ...] = ()  # what is in the machine and in no list, in words


def remember(
    known: Mapping[PciAddress, Known], machine: Machine, held: frozenset[DeviceId] | None
) -> Mapping[PciAddress, Known]:
    """Each GPU as it last answered, for `devices` to name those that no longer do.

    One that is lost is kept: its ids must not change. One that left the machine (unplugged, given
    to vfio-pci) is kept as long as `held`, the ids in use, has one of its ids; with None, when
    nobody says what is in use, for good.
    """
    functions = {f.address: f for f in machine.pci}
    answering = {
        g.pci: Known(gpu=g, pci=functions.get(g.pci))
        for g in machine.gpus
        if g.uuid is not None and g.lost is None
    }
    lost = {g.pci for g in machine.gpus if g.lost is not None}
    elsewhere = {k.gpu.uuid for k in answering.values()}
    kept = {
        address: k
        for address, k in known.items()
        if address not in answering
        and k.gpu.uuid not in elsewhere
        and (address in lost or held is None or held_devices(held) & k.ids)
    }
    return {**kept, **answering}


def held_devices(ids: Iterable[DeviceId]) -> frozenset[DeviceId]:
    """The GPUs and slices that these ids hold: those of replicas without their `::<n>`."""
    return frozenset(DeviceId(id.partition("::")[0]) for id in ids)


def devices(
    machine: Machine,
    faults: Faults,
    *,
    options: Advertising,
    known: Mapping[PciAddress, Known] | None = None,
    withheld: Mapping[str, str] | None = None,
) -> Advertised:
    """The lists of all resources, each GPU under exactly one of them.

    `known` (see `remember`) names GPUs that no longer answer; `withheld` maps ids or PCI
    addresses of cordoned devices to the reason. Resources without devices are absent.
    """
    functions = {f.address: f for f in machine.pci}
    cpu_nodes = {
        n.id for n in machine.numa_nodes if (n.cpus or not n.cpus_known) and n.id < NUMA_IDS
    }
    units, left_out = _units(machine, known or {}, options)
    resources: dict[str, list[Device]] = {}
    for gpu, resource, id, reason in units:
        function = functions.get(gpu.pci)
        if function is None and known and gpu.pci in known:
            function = known[gpu.pci].pci
        numa = _numa(function, cpu_nodes, options)
        unhealthy = reason or _unhealthy(gpu, id, faults, withheld or {})
        name, ids = _replicas(resource, id, options)
        resources.setdefault(name, []).extend(
            Device(id=i, holds=id, gpu=gpu.pci, numa=numa, unhealthy=unhealthy) for i in ids
        )
    return Advertised(
        resources={name: tuple(found) for name, found in sorted(resources.items())},
        left_out=tuple(left_out),
    )


# A GPU, the resource it or its slice is advertised under, the id, and why not to use it.
Unit = tuple[Gpu, str, DeviceId, str | None]


def _units(
    machine: Machine, known: Mapping[PciAddress, Known], options: Advertising
) -> tuple[list[Unit], list[str]]:
    gpus, left_out = _named(machine, known)
    problem = _not_uniform(gpus) if options.mig is MigStrategy.SINGLE else None
    if problem:
        left_out.append(f"MIG strategy single: {problem}; no device gets work until all are alike")
    units: list[Unit] = []
    for gpu in gpus:
        reason = "mig-not-uniform" if problem else gpu.lost
        if options.mig is MigStrategy.NONE or not gpu.mig_enabled:
            assert gpu.uuid is not None  # _named leaves out the others
            if (name := _gpu_resource(options, gpu)) is None:
                left_out.append(
                    f"{gpu.name} ({gpu.pci}) is in none of groups.names and is not advertised"
                )
            else:
                units.append((gpu, name, gpu.uuid, reason))
            continue
        for part in gpu.slices:
            if not _whole(part):
                left_out.append(
                    f"{gpu.name}: {part.id} ({part.profile}) has only some of its GPU instance's "
                    "compute slices and is not advertised"
                )
                continue
            single = options.mig is MigStrategy.SINGLE
            resource = options.resource if single else _mig_resource(options.resource, part)
            units.append((gpu, resource, part.id, reason))
    return units, left_out


def _named(machine: Machine, known: Mapping[PciAddress, Known]) -> tuple[list[Gpu], list[str]]:
    """GPUs that have an id, in PCI order; `lost` is the reason of those that do not answer."""
    gpus = []
    left_out = []
    here = {g.pci: g for g in machine.gpus}
    for address in sorted({*here, *known}, key=pci_order):
        now, before = here.get(address), known.get(address)
        if now is not None and now.lost is None and now.uuid is not None:
            gpus.append(now)
        elif now is not None and now.lost is not None and now.uuid is not None:
            gpus.append(replace(now, lost="lost"))
        elif before is not None:
            lost = "lost" if now is not None and now.lost is not None else "gone"
            gpus.append(replace(before.gpu, lost=lost))
        elif now is not None and now.lost is not None:
            left_out.append(
                f"{now.name} ({address}) is lost ({now.lost}) and its UUID was not seen since "
                "the start: it cannot be advertised, not even as unhealthy"
            )
    return gpus, left_out


def _not_uniform(gpus: Iterable[Gpu]) -> str | None:
    """Why these GPUs cannot be advertised under one name, or None."""
    gpus = [g for g in gpus if g.lost is None]
    cut = [g for g in gpus if g.mig_enabled]
    if not cut:
        return None
    if whole := next((g for g in gpus if not g.mig_enabled), None):
        return f"{cut[0].name} is in MIG mode and {whole.name} is not"
    if empty := next((g for g in cut if not g.slices), None):
        return f"{empty.name} is in MIG mode and has no slices"
    profiles = sorted({s.profile for g in cut for s in g.slices})
    return f"there are slices of {' and '.join(profiles)}" if len(profiles) > 1 else None


def _whole(part: MigSlice) -> bool:
    """Whether a slice has all compute of its GPU instance; others are named `1c.3g.40gb`."""
    return "c." not in part.profile.split("g.")[0]


def _gpu_resource(options: Advertising, gpu: Gpu) -> str | None:
    """`nvidia.com/gpu`, or `nvidia.com/gpu-fabric.ring-0` where GPUs go by group."""
    if not options.fabric:
        return options.resource
    group = options.fabric.get(gpu.pci)
    domain = options.resource.rpartition("/")[0]
    return None if group is None else f"{domain}/gpu-fabric.{group}"


def _mig_resource(gpu_resource: str, part: MigSlice) -> str:
    """`nvidia.com/mig-1g.10gb.me` for 1g.10gb+me: a resource name has no `+`."""
    domain = gpu_resource.rpartition("/")[0]
    return f"{domain}/mig-{part.profile.replace('+', '.')}"


def _numa(
    function: PciDevice | None, cpu_nodes: set[NumaId], options: Advertising
) -> tuple[NumaId, ...]:
    """Nodes to advertise: those with CPUs, and only what the machine or the operator stated.

    A node without CPUs would make a hint that no container with CPUs can follow.
    """
    if function is None or function.numa is None:
        return ()
    stated = function.numa_from is not None and function.numa_from.is_stated
    if not stated and not options.advertise_inferred:
        return ()
    nodes = next((s for s in options.same_socket if function.numa in s), (function.numa,))
    return tuple(sorted(cpu_nodes.intersection(nodes)))


def _unhealthy(gpu: Gpu, id: DeviceId, faults: Faults, withheld: Mapping[str, str]) -> str | None:
    for fault in faults.get(gpu.pci, ()):
        if fault.severity is FaultClass.WITHHOLD and _concerns(fault, gpu, id):
            return fault.reason
    names = (id, gpu.pci, gpu.uuid or "")
    return "withheld" if any(name in withheld for name in names) else None


def _concerns(fault: Fault, gpu: Gpu, id: DeviceId) -> bool:
    """Whether a fault of a GPU is one of this device; one of a GPU instance spares the others."""
    part = next((part for part in gpu.slices if part.id == id), None)
    if part is None or fault.gpu_instance is None:
        return True
    return fault.gpu_instance == part.gpu_instance and (
        fault.compute_instance in (None, part.compute_instance)
    )


def _replicas(
    resource: str, id: DeviceId, options: Advertising
) -> tuple[str, tuple[DeviceId, ...]]:
    count = options.replicas.get(resource)
    if count is None:
        return resource, (id,)
    name = f"{resource}.shared" if options.rename_shared else resource
    return name, tuple(DeviceId(f"{id}::{n}") for n in range(count))
