"""The PCI tree that a source tells of, while it is read."""

from __future__ import annotations

from rte.model import NumaId, NumaSource, PciAddress, PciDevice, made_up_address, pci_order

BRIDGE, GPU, NETWORK = 0x060400, 0x030200, 0x020000  # class codes
FIRST_PORT = 1 << 12  # below are the addresses that stand for GPUs and NICs without one


class Tree:
    """Functions by address. Ports that the source leaves out have addresses that are made up."""

    def __init__(self) -> None:
        self.devices: dict[PciAddress, PciDevice] = {}
        self._ports = FIRST_PORT

    def add_port(
        self,
        root: str,
        parent: PciAddress | None,
        *,
        numa: NumaId | None = None,
        numa_from: NumaSource = NumaSource.SOURCE,
    ) -> PciAddress:
        """A root port, where it has no `parent`, or a port of a switch."""
        address = made_up_address(self._ports)
        self._ports += 1
        self.devices[address] = PciDevice(
            address=address,
            root=root,
            parent=parent,
            vendor=0,
            device=0,
            class_code=BRIDGE,
            numa=numa,
            numa_from=None if numa is None else numa_from,
        )
        return address

    def in_order(self) -> tuple[PciDevice, ...]:
        """In PCI order."""
        return tuple(self.devices[address] for address in sorted(self.devices, key=pci_order))
