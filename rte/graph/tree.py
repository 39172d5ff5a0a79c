"""How far apart any two PCI functions are, from the kernel's tree of bridges."""

from __future__ import annotations

from collections.abc import Mapping

from rte.model import Level, Machine, PciAddress, PciDevice


class PciTree:
    """The PCI functions of one machine by address; answers for any two of them, and is immutable.

    Functions that the machine does not list are far from everything: UNKNOWN, 0 MB/s.
    """

    __slots__ = ("bridges", "devices")

    def __init__(self, machine: Machine) -> None:
        self.devices: Mapping[PciAddress, PciDevice] = {d.address: d for d in machine.pci}
        self.bridges: Mapping[PciAddress, tuple[PciAddress, ...]] = {
            address: bridges_above(self.devices, address) for address in self.devices
        }

    def ancestor(self, a: PciAddress, b: PciAddress) -> tuple[int, int] | None:
        """The steps from each of two functions to their nearest common bridge; None without one."""
        above = self.bridges[b]
        for steps, bridge in enumerate(self.bridges[a]):
            if bridge in above:
                return steps, above.index(bridge)
        return None

    def level(self, a: PciAddress, b: PciAddress) -> Level:
        """The nearest thing that joins two functions, as NVML names it.

        A switch is two bridges of the tree, its upstream port and a downstream port: two functions
        of one switch are one step below the common bridge, and functions of one slot none.
        Without a common root complex only the NUMA nodes can tell, and they may be unknown.
        """
        one, other = self.devices.get(a), self.devices.get(b)
        if one is None or other is None:
            return Level.UNKNOWN
        steps = self.ancestor(a, b)
        if steps is not None:
            return Level.PIX if max(steps) <= 1 else Level.PXB
        if one.root == other.root:
            return Level.PHB
        if one.numa is None or other.numa is None:
            return Level.UNKNOWN
        return Level.NODE if one.numa == other.numa else Level.SYS

    def slowest_link(self, a: PciAddress, b: PciAddress) -> int:
        """MB/s of the slowest PCIe link between two functions; 0 when no link is known.

        The way leads from each of them up to the common bridge, or to the root complex.
        """
        if a not in self.devices or b not in self.devices:
            return 0
        steps = self.ancestor(a, b)
        ways = (
            (a, *self.bridges[a][: None if steps is None else steps[0]]),
            (b, *self.bridges[b][: None if steps is None else steps[1]]),
        )
        speeds = [
            device.link.megabytes_per_s
            for way in ways
            for device in map(self.devices.get, way)
            if device is not None and device.link is not None
        ]
        return min(speeds, default=0)


def bridges_above(
    devices: Mapping[PciAddress, PciDevice], address: PciAddress
) -> tuple[PciAddress, ...]:
    """The bridges from a function up to the root complex, nearest first; none of an unknown one."""
    found: list[PciAddress] = []
    device = devices.get(address)
    while device is not None and device.parent is not None and device.parent not in found:
        found.append(device.parent)
        device = devices.get(device.parent)
    return tuple(found)
