"""What is in use on this node, as far as it is known at the moment of a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from rte.model import ContainerUse, DeviceId, DeviceUse, PciAddress, PodName, Usage, pci_address

# PodResources shows an allocation as soon as the kubelet has written its checkpoint; a pod that
# is not there by then was refused after our Allocate, and there is no call that would say so.
OWN_ALLOCATION_S = 10.0


Container = tuple[PodName, str]
"""A container's pod and its name."""


class NicUse(NamedTuple):
    """Which compute NICs containers hold, as far as their ids are PCI addresses."""

    held: frozenset[PciAddress] = frozenset()
    own: frozenset[PciAddress] = frozenset()
    """Those of the one container that has compute NICs and no GPU, which may be about to get one:
    the calls name no pod. Empty when there is no such container, or several."""


NO_NICS = NicUse()


def nic_use(
    usage: Usage,
    *,
    nics: frozenset[PciAddress],
    gpus: frozenset[DeviceId],
    admitted: Collection[Container] = (),
) -> NicUse:
    """Who holds which of the compute NICs `nics`; `gpus` are the ids that we hand out.

    `admitted` are containers that have had their NICs for so long that no GPU will follow.
    """
    held: set[PciAddress] = set()
    waiting = []
    for pod in usage.pods:
        for container in pod.containers:
            here = nics_of(container, nics)
            held |= here
            has_gpu = any(device.id in gpus for device in container.devices)
            if here and not has_gpu and (pod.pod, container.name) not in admitted:
                waiting.append(here)
    return NicUse(frozenset(held), frozenset(waiting[0]) if len(waiting) == 1 else frozenset())


def nic_holders(usage: Usage, nics: frozenset[PciAddress]) -> Iterator[Container]:
    """The containers that hold compute NICs."""
    for pod in usage.pods:
        for container in pod.containers:
            if nics_of(container, nics):
                yield pod.pod, container.name


def nics_of(container: ContainerUse, nics: frozenset[PciAddress]) -> frozenset[PciAddress]:
    ids = (device.id for device in container.devices)
    return nics.intersection(filter(None, map(_address, ids)))


def _address(id: DeviceId) -> PciAddress | None:
    try:
        return pci_address(id)
    except ValueError:
        return None


class Held:
    """The ids that PodResources last showed, and our own allocations it may not have seen.

    Threads share it: calls read, one thread tells it what PodResources says.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._listed: frozenset[DeviceId] = frozenset()
        self._own: dict[DeviceId, float] = {}  # by id, when it was allocated
        self.nics = NO_NICS
        self._addresses: frozenset[PciAddress] | None = None  # of all that the kubelet can give

    def ids(self) -> frozenset[DeviceId]:
        """The ids in use, replicas as `<id>::<n>`."""
        with self._lock:
            return self._listed.union(self._answered())

    def own(self) -> frozenset[DeviceId]:
        """Those of our own latest answers that no list has shown yet."""
        with self._lock:
            return frozenset(self._answered())

    def offered(self, devices: Iterable[DeviceUse]) -> None:
        """Take note of all that the kubelet can hand out, in use or not."""
        found = (_address(device.id) for device in devices)
        self._addresses = frozenset(address for address in found if address is not None)

    def has_named(self, nics: frozenset[PciAddress]) -> bool:
        """Whether some resource hands out any of these NICs by address; True while not known."""
        return self._addresses is None or not nics.isdisjoint(self._addresses)

    def allocated(self, ids: Iterable[DeviceId]) -> None:
        """Take note of an Allocate that is being answered."""
        now = self._clock()
        with self._lock:
            self._own.update((id, now) for id in ids)

    def listed(self, ids: frozenset[DeviceId], *, asked: float, nics: NicUse = NO_NICS) -> None:
        """Take note of a list of ids in use that was asked for at `asked` (monotonic seconds).

        An own allocation that this list shows is its to say from now on; an older list that
        shows the id shows who had it before.
        """
        with self._lock:
            self._listed = ids
            self.nics = nics
            self._own = {
                id: self._own[id]
                for id in self._answered()
                if not (id in ids and self._own[id] <= asked)
            }

    def _answered(self) -> list[DeviceId]:
        oldest = self._clock() - OWN_ALLOCATION_S
        return [id for id, taken in self._own.items() if taken > oldest]
