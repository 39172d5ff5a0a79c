"""A device that changes its resource name leaves the old list before it enters the new one.

The kubelet counts each resource name apart: a GPU that is under two names, be it for the moment in
which two lists are on their way, can be handed out twice. So it also is when a pod still holds it
under the former name, or holds the GPU that has been cut into slices meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from plugin.allocation import Owner
from plugin.devices import Device, held_devices
from rte.model import DeviceId, PodName

MOVING = "moving"  # why a device gets no more work under its former name


class Listed(NamedTuple):
    """An id under a resource name."""

    resource: str
    id: DeviceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The lists to send, and what they have to wait for."""

    resources: Mapping[str, tuple[Device, ...]]
    waiting: Mapping[Listed, Listed]
    """What is not offered yet → what has to be over before."""


def pairs(resources: Mapping[str, Iterable[Device]]) -> frozenset[Listed]:
    return frozenset(Listed(n, device.id) for n, found in resources.items() for device in found)


def offers(resources: Mapping[str, Iterable[Device]]) -> frozenset[Listed]:
    """What is listed as it should be, for new pods if it is healthy."""
    return pairs({n: [d for d in found if d.unhealthy != MOVING] for n, found in resources.items()})


def settled(
    wanted: Mapping[str, tuple[Device, ...]],
    *,
    listed: Mapping[str, Mapping[str, Device]],
    used: Collection[Listed],
    leaving: Collection[Listed],
    owners: Mapping[DeviceId, Owner],
    former: Mapping[DeviceId, Owner],
) -> Settled:
    """The wanted lists, without what the kubelet could hand out or has handed out otherwise.

    `listed` is what the lists have now, `used` what pods hold, `leaving` what is offered no more
    and may be handed out until the kubelet has seen that. What pods hold stays in its list
    until they end: unhealthy where nobody is to be given it after them. `former` are owners of
    what is no more: a slice that a pod had is in nobody's way, one that is still offered is.
    """
    now = pairs(wanted)
    over = [pair for pair in {*used, *leaving} if pair not in now]
    waiting: dict[Listed, Listed] = {}
    if over:  # seldom: all else is wanted as it is
        whose = {o: {**former, **owners} if o in leaving else owners for o in sorted(over)}
        for name, devices in wanted.items():
            for device in devices:
                before = next((o for o in whose if overlaps(o.id, device, whose[o])), None)
                if before is not None:
                    waiting[Listed(name, device.id)] = before
    kept: dict[str, list[Device]] = {}
    for resource, id in over:
        was = listed.get(resource, {}).get(id)
        if was is not None and (resource, id) in used:
            kept.setdefault(resource, []).append(replace(was, unhealthy=MOVING))

    def listable(name: str) -> Iterator[Device]:
        for device in wanted.get(name, ()):
            pair = Listed(name, device.id)
            if pair not in waiting:
                yield device
            elif pair in used:
                yield replace(device, unhealthy=device.unhealthy or MOVING)

    return Settled(
        resources={
            name: (
                *listable(name),
                *sorted(kept.get(name, ()), key=lambda device: device.id),
            )
            for name in sorted({*wanted, *kept})
        },
        waiting=waiting,
    )


def twice_held(
    used: Mapping[Listed, tuple[PodName, ...]],
) -> Mapping[DeviceId, tuple[PodName, ...]]:
    """Devices that several pods hold, under whatever names, though it was given out alone.

    Replicas of one device may have a pod each. A device that a pod's init container hands on to
    its main one has one pod.
    """
    pods: dict[DeviceId, set[PodName]] = {}
    for pair, holders in used.items():
        pods.setdefault(pair.id, set()).update(holders)
    for id in tuple(pods):
        (whole,) = held_devices([id])
        if whole in pods:  # with its replicas it is held as one
            pods[whole] |= pods[id]
    return {id: tuple(sorted(found)) for id, found in sorted(pods.items()) if len(found) > 1}


def overlaps(id: DeviceId, device: Device, owners: Mapping[DeviceId, Owner]) -> bool:
    """Whether the two are one device, or a GPU and a slice of it."""
    (held,) = held_devices([id])
    if held == device.holds:
        return True
    other, this = owners.get(held), owners.get(device.holds)
    if other is None or this is None or other.gpu.pci != this.gpu.pci:
        return False  # a slice that is no more overlaps nothing
    return other.slice is None or this.slice is None
