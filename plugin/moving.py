"""A device that changes its resource name leaves the old list before it enters the new one.

The kubelet counts each resource name apart: a GPU that is under two names, be it for the moment in
which two lists are on their way, can be handed out twice. So it also is when a pod still holds it
under the former name, or holds the GPU that has been cut into slices meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
    in_use: frozenset[Listed]
    """What would have to wait too, but is listed because a pod has it: until that pod's end."""


def pairs(resources: Mapping[str, Iterable[Device]]) -> frozenset[Listed]:
    return frozenset(Listed(n, device.id) for n, found in resources.items() for device in found)


def settled(
    wanted: Mapping[str, tuple[Device, ...]],
    *,
    listed: Mapping[str, Mapping[str, Device]],
    used: Collection[Listed],
    leaving: Collection[Listed],
    owners: Mapping[DeviceId, Owner],
    former: Mapping[DeviceId, Owner] | None = None,
) -> Settled:
    """The wanted lists, without what the kubelet could hand out or has handed out otherwise.

    `listed` is what the lists have now, `used` what pods hold, `leaving` what was taken out of a
    list and may be handed out until the kubelet has seen that. What pods hold stays in its list,
    unhealthy, until they end. `former` are owners of what is no more: a slice that a pod had is
    in nobody's way, one that is still offered is.
    """
    now = pairs(wanted)
    over = [pair for pair in {*used, *leaving} if pair not in now]
    waiting: dict[Listed, Listed] = {}
    in_use: set[Listed] = set()
    if over:  # seldom: all else is wanted as it is
        whose = {o: owners if o in used else {**(former or {}), **owners} for o in sorted(over)}
        for name, devices in wanted.items():
            for device in devices:
                before = next((o for o in whose if overlaps(o.id, device, whose[o])), None)
                pair = Listed(name, device.id)
                if before is not None and pair in used:
                    in_use.add(pair)
                elif before is not None:
                    waiting[pair] = before
    kept: dict[str, list[Device]] = {}
    for resource, id in over:
        was = listed.get(resource, {}).get(id)
        if was is not None and (resource, id) in used:
            kept.setdefault(resource, []).append(replace(was, unhealthy=MOVING))
    return Settled(
        resources={
            name: (
                *(d for d in wanted.get(name, ()) if Listed(name, d.id) not in waiting),
                *sorted(kept.get(name, ()), key=lambda device: device.id),
            )
            for name in sorted({*wanted, *kept})
        },
        waiting=waiting,
        in_use=frozenset(in_use),
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
