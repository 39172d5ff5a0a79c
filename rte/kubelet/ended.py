"""What the kubelet's files add to a PodResources list: what init containers that have ended still
hold, and what the Memory Manager has left. Pure.

The kubelet gives the containers of a pod what its init containers had. Of that which none of them
takes it says nothing in PodResources, and yet gives it to nobody else before the pod has ended: it
stands in the checkpoint and in the state files, by the pod's UID.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rte.kubelet.state import HandedOut, Holder, PodUid
from rte.model import (
    Allocatable,
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    MemoryBlock,
    PodFacts,
    PodName,
    PodUse,
    Usage,
)

ENDED = frozenset({"Succeeded", "Failed"})  # phases of pods that hold nothing any more


def with_ended(
    usage: Usage,
    handed_out: HandedOut | None,
    *,
    allocatable: Allocatable,
    pods: tuple[PodFacts, ...] | None,
) -> Usage:
    """The usage with each pod's `ended` containers.

    A pod's UID is what the API server says; where that is not asked, what a listed container holds
    for itself tells whose the UID is, and a pod none of whose containers holds anything cannot be
    told. A device that is not healthy is left out: nothing says where it is, and it is not offered.
    """
    if handed_out is None:
        return usage
    holders = {*handed_out.devices, *handed_out.cpus, *handed_out.memory}
    names = {pod.pod: {c.name for c in pod.containers} for pod in usage.pods}
    uids = _uids(usage, handed_out, pods)
    nodes = {(device.resource, device.id): device for device in allocatable.devices}
    found: dict[PodName, list[ContainerUse]] = {}
    for uid, container in sorted(holders):
        name = uids.get(uid)
        # Sidecars are listed; "" is what a pod holds as a whole.
        if name is not None and container and container not in names[name]:
            use = _use(container, (uid, container), handed_out, nodes)
            found.setdefault(name, []).append(use)
    whole = Usage(
        pods=tuple(
            replace(pod, ended=tuple(found[pod.pod])) if pod.pod in found else pod
            for pod in usage.pods
        )
    )
    listed = _listed_memory(whole)
    if all(len(block.numa) < 2 for block in listed):
        return whole  # sums are enough
    same = listed == Counter(b for blocks in handed_out.memory.values() for b in blocks)
    return replace(whole, memory_free=handed_out.memory_free) if same else whole


def _listed_memory(usage: Usage) -> Counter[MemoryBlock]:
    blocks: Counter[MemoryBlock] = Counter()
    for pod in usage.pods:
        blocks.update(pod.memory)
        for container in (*pod.containers, *pod.ended):
            blocks.update(container.memory)
    return blocks


def _uids(
    usage: Usage, handed_out: HandedOut, pods: tuple[PodFacts, ...] | None
) -> Mapping[PodUid, PodName]:
    """The listed pods by UID, as far as it is known."""
    listed = {pod.pod for pod in usage.pods}
    if pods is not None:
        return {
            PodUid(pod.uid): pod.pod
            for pod in pods
            if pod.uid and pod.pod in listed and pod.phase not in ENDED
        }
    holder = {thing: pod.pod for pod in usage.pods for thing in _held(pod)}
    found: dict[PodUid, PodName] = {}
    things: Iterable[tuple[Holder, object]] = (
        *((h, device) for h, devices in handed_out.devices.items() for device in devices),
        *((h, cpu) for h, cpus in handed_out.cpus.items() for cpu in cpus),
    )
    for (uid, container), thing in things:
        pod = holder.get((container, thing))
        if pod is not None:
            found[uid] = pod
    return found


def _held(pod: PodUse) -> Iterable[tuple[str, object]]:
    """Container and what it alone has: memory has no ids."""
    for container in pod.containers:
        yield from ((container.name, (use.resource, use.id)) for use in container.devices)
        yield from ((container.name, cpu) for cpu in container.cpus)


def _use(
    name: str,
    holder: Holder,
    handed_out: HandedOut,
    nodes: Mapping[tuple[str, DeviceId], DeviceUse],
) -> ContainerUse:
    devices = sorted(handed_out.devices.get(holder, ()))
    cpus: Iterable[CpuId] = handed_out.cpus.get(holder, ())
    return ContainerUse(
        name=name,
        devices=tuple(nodes[device] for device in devices if device in nodes),
        cpus=tuple(sorted(cpus)),
        memory=handed_out.memory.get(holder, ()),
    )
