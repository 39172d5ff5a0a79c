"""What the operator states where firmware says nothing or something wrong, by PCI address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rte.model import (
    Gpu,
    LinkPeer,
    Machine,
    NumaId,
    NumaSource,
    PciAddress,
    PciDevice,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Addresses that a machine does not have mean nothing there: one configuration may serve many.

    Each part is named as in the configuration: numa.overrides, nvlinks.absent, nics.homes.
    """

    numa: Mapping[PciAddress, NumaId] = field(default_factory=dict)
    absent_links: tuple[tuple[PciAddress, PciAddress], ...] = ()
    """NVLinks that do not exist: two GPUs, or a GPU and an NVSwitch."""
    homes: Mapping[PciAddress, PciAddress] = field(default_factory=dict)
    """A NIC, and the switch that it hangs from or a device beside it."""


NONE = Overrides()


def overridden(machine: Machine, overrides: Overrides | None) -> Machine:
    """The machine as the operator knows it; `overridden` says what was changed, and from what."""
    if overrides is None or overrides == NONE:
        return machine
    before = {device.address: device for device in machine.pci}
    devices = with_homes(with_nodes(before, overrides), overrides)
    moved = {nic for nic in overrides.homes if devices.get(nic) != before.get(nic)}
    gpus = tuple(without_absent(gpu, overrides) for gpu in machine.gpus)
    return replace(
        machine,
        pci=tuple(devices[device.address] for device in machine.pci),
        gpus=gpus,
        levels={pair: level for pair, level in machine.levels.items() if moved.isdisjoint(pair)},
        overridden=(
            *machine.overridden,
            *node_words(before, overrides),
            *link_words(machine, gpus, overrides),
            *home_words(before, machine, overrides),
        ),
    )


# NUMA nodes


def with_nodes(
    devices: Mapping[PciAddress, PciDevice], overrides: Overrides
) -> dict[PciAddress, PciDevice]:
    found = {}
    for address, device in devices.items():
        node = overrides.numa.get(address)
        # What a source states stays; the others follow what is above them.
        stays = device.numa_from is not None and device.numa_from.is_stated
        above = None if stays else node_above(device, devices, overrides)
        if node is not None:
            found[address] = replace(device, numa=node, numa_from=NumaSource.OVERRIDE)
        elif above is not None:
            found[address] = replace(device, numa=above, numa_from=NumaSource.PARENT)
        else:
            found[address] = device
    return found


def node_above(
    device: PciDevice, devices: Mapping[PciAddress, PciDevice], overrides: Overrides
) -> NumaId | None:
    """The node that is stated for the nearest function above."""
    for _ in devices:
        if device.parent is None or device.parent not in devices:
            break
        device = devices[device.parent]
        if device.address in overrides.numa:
            return overrides.numa[device.address]
    return None


def node_words(before: Mapping[PciAddress, PciDevice], overrides: Overrides) -> Iterator[str]:
    for address, node in sorted(overrides.numa.items()):
        device = before.get(address)
        if device is not None and device.numa_from is not NumaSource.OVERRIDE:
            yield node_word(device, node)


def node_word(device: PciDevice, node: NumaId) -> str:
    said = "none" if device.numa is None else f"{device.numa}, from {device.numa_from}"
    return f"{device.address}: NUMA node {node} by numa.overrides (was {said})"


# NVLinks


def without_absent(gpu: Gpu, overrides: Overrides) -> Gpu:
    away = {b for pair in overrides.absent_links for a, b in (pair, pair[::-1]) if a == gpu.pci}
    links = tuple(end for end in gpu.links if end.remote not in away)
    return gpu if links == gpu.links else replace(gpu, links=links)


def link_words(machine: Machine, after: tuple[Gpu, ...], overrides: Overrides) -> Iterator[str]:
    gpus = {gpu.pci: gpu for gpu in machine.gpus}
    left = {gpu.pci: gpu for gpu in after}
    switches = {e.remote for gpu in machine.gpus for e in gpu.links if e.peer is LinkPeer.SWITCH}
    for a, b in overrides.absent_links:
        ends = [pci for pci in (a, b) if pci in gpus]
        if not ends or not {a, b} <= gpus.keys() | switches:
            continue
        gone = sum(lanes_to(gpus[pci], {a, b}) - lanes_to(left[pci], {a, b}) for pci in ends)
        names = " and ".join(gpus[pci].name if pci in gpus else pci for pci in (a, b))
        if gone:
            yield f"{names}: {gone} ends of NVLinks left out by nvlinks.absent"
        else:
            yield f"{names}: nvlinks.absent names no NVLink that either end has"


def lanes_to(gpu: Gpu, ends: set[PciAddress]) -> int:
    return sum(end.lanes for end in gpu.links if end.remote in ends)


# NICs


def with_homes(
    devices: Mapping[PciAddress, PciDevice], overrides: Overrides
) -> dict[PciAddress, PciDevice]:
    found = dict(devices)
    for address, home in overrides.homes.items():
        nic, beside = devices.get(address), devices.get(home)
        if nic is None or beside is None or is_below(beside, address, devices):
            continue
        found[address] = replace(
            nic,
            root=beside.root,
            parent=beside.address if beside.is_bridge else beside.parent,
            numa=nic.numa if beside.numa is None else beside.numa,
            numa_from=nic.numa_from if beside.numa is None else NumaSource.OVERRIDE,
        )
    return found


def is_below(
    device: PciDevice, address: PciAddress, devices: Mapping[PciAddress, PciDevice]
) -> bool:
    """Whether a function is another or hangs from it: no home for that one."""
    for _ in devices:
        if device.address == address:
            return True
        if device.parent is None or device.parent not in devices:
            return False
        device = devices[device.parent]
    return True


def home_words(
    before: Mapping[PciAddress, PciDevice], machine: Machine, overrides: Overrides
) -> Iterator[str]:
    name = {nic.pci: nic.name for nic in machine.nics}
    for address, home in sorted(overrides.homes.items()):
        if address not in before:
            continue
        what = f"{name.get(address, 'NIC')} ({address})"
        was = before[address].parent or before[address].root
        if home not in before:
            yield f"{what}: nics.homes names {home}, which this machine does not have"
        elif is_below(before[home], address, before):
            yield f"{what}: nics.homes names {home}, which hangs from it"
        else:
            beside = "below" if before[home].is_bridge else "beside"
            yield f"{what}: {beside} {home} by nics.homes (was below {was})"
