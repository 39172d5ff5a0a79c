"""What the kubelet's files add to a PodResources list: what init containers that have ended still
hold, and what the Memory Manager has left. Pure.

The kubelet gives the containers of a pod what its init containers had. Of that which none of them
takes it says nothing in PodResources, and yet gives it to nobody else before the pod has ended: it
stands in the checkpoint and in the state files, by the pod's UID.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rte.kubelet.memory import with_memory
from rte.kubelet.state import HandedOut, Holder, PodUid
from rte.model import (
    ContainerUse,
    CpuId,
    DeviceUse,
    PodFacts,
    PodName,
    PodUse,
    Usage,
)

ENDED = frozenset({"Succeeded", "Failed"})  # phases of pods that hold nothing any more


def with_ended(usage: Usage, handed_out: HandedOut, *, pods: tuple[PodFacts, ...] | None) -> Usage:
    """The usage with each pod's `ended` containers, and without pods that have ended as a whole.

    A pod's UID is what those say who tell of the pods; where nobody does, what a listed container
    holds for itself tells whose the UID is, and a pod none of whose containers holds anything
    cannot be told.
    """
    usage = _without_ended_pods(usage, handed_out, pods or ())
    holders: dict[PodUid, list[str]] = {}
    for uid, container in sorted({*handed_out.devices, *handed_out.cpus, *handed_out.memory}):
        holders.setdefault(uid, []).append(container)
    uids = {name: uid for uid, name in _uids(usage, handed_out, pods).items()}
    whole = replace(
        usage,
        pods=tuple(
            _with_unlisted(pod, uids[pod.pod], holders.get(uids[pod.pod], ()), handed_out)
            if pod.pod in uids
            else pod
            for pod in usage.pods
        ),
        cpus_managed=handed_out.shared_cpus.union(*handed_out.cpus.values()),
    )
    return with_memory(whole, handed_out)


def _with_unlisted(
    pod: PodUse, uid: PodUid, holders: Iterable[str], handed_out: HandedOut
) -> PodUse:
    """The pod with its ended containers, and with what it holds as a whole, which 1.36 does not
    list."""
    listed = {container.name for container in pod.containers}  # sidecars too
    unlisted = [name for name in holders if name not in listed]
    if not unlisted:
        return pod
    whole = (uid, "")
    return replace(
        pod,
        ended=tuple(_use(name, (uid, name), handed_out) for name in unlisted if name),
        cpus=pod.cpus or tuple(sorted(handed_out.cpus.get(whole, ()))),
        memory=pod.memory or handed_out.memory.get(whole, ()),
    )


def _without_ended_pods(usage: Usage, handed_out: HandedOut, pods: tuple[PodFacts, ...]) -> Usage:
    """Kubelets before 1.34 list pods that have ended, with CPUs until the CPU Manager's next round
    and with memory until the next admission, before which the Memory Manager takes it back.

    Of devices they list none, so that a pod with devices is one that is only ending. Nor is one
    that holds what it lists by another UID: a pod of the same name has come, of which the API
    server has not told yet.
    """
    over = {pod.pod: PodUid(pod.uid) for pod in pods if pod.phase in ENDED}
    if not over:
        return usage

    def has_ended(pod: PodUse) -> bool:
        uid = over.get(pod.pod)
        return uid is not None and all(
            not container.devices
            and handed_out.cpus.get((uid, container.name), frozenset()).issuperset(container.cpus)
            and {*container.memory} <= {*handed_out.memory.get((uid, container.name), ())}
            for container in pod.containers
        )

    return replace(usage, pods=tuple(pod for pod in usage.pods if not has_ended(pod)))


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


def _use(name: str, holder: Holder, handed_out: HandedOut) -> ContainerUse:
    devices = sorted(handed_out.devices.get(holder, ()))
    cpus: Iterable[CpuId] = handed_out.cpus.get(holder, ())
    return ContainerUse(
        name=name,
        devices=tuple(
            DeviceUse(resource=resource, id=id_, numa=handed_out.device_nodes[resource, id_])
            for resource, id_ in devices
        ),
        cpus=tuple(sorted(cpus)),
        memory=handed_out.memory.get(holder, ()),
    )
