"""The familiar matrix: how each GPU and RDMA device reaches each other one."""

from __future__ import annotations

import re
from typing import NamedTuple

from rte.graph.build import Graph
from rte.model import PciAddress, is_made_up
from rte.view.words import CELLS


class Relations(NamedTuple):
    names: tuple[str, ...]  # GPU<number of gpu-<number>> of those that answer, then NIC0 …
    nics: tuple[tuple[str, str], ...]  # (NIC0, RDMA device)
    matrix: tuple[tuple[str, ...], ...]  # row: from; column: to


def relations(graph: Graph) -> Relations:
    """What nvidia-smi would say, a direction each as the source says it.

    NVLink wins over PCIe: NV<lanes as this GPU sees them>. NICs are the RDMA devices with a PCI
    function, counted as nvidia-smi counts them: by name, numbers in it by value. Where nvidia-smi
    itself is the source they keep its order.
    """
    devices = rdma_devices(graph)
    gpus = [gpu.pci for gpu in graph.gpus]
    places: list[PciAddress] = [*gpus, *(pci for _, pci in devices)]
    return Relations(
        names=(
            *(f"GPU{gpu.number}" for gpu in graph.gpus),
            *(f"NIC{i}" for i in range(len(devices))),
        ),
        nics=tuple((f"NIC{i}", name) for i, (name, _) in enumerate(devices)),
        matrix=tuple(
            tuple(cell(graph, places, len(gpus), i, j) for j in range(len(places)))
            for i in range(len(places))
        ),
    )


def cell(graph: Graph, places: list[PciAddress], gpus: int, i: int, j: int) -> str:
    if i == j:
        return "X"
    if i < gpus and j < gpus:
        lanes = graph.lanes[i][j]
        return f"NV{lanes}" if lanes else CELLS[graph.levels[i][j]]
    return CELLS[graph.relation(places[i], places[j])]


def rdma_devices(graph: Graph) -> list[tuple[str, PciAddress]]:
    found = [
        (name, nic.pci) for nic in graph.machine.nics if nic.pci is not None for name in nic.rdma
    ]
    if any(is_made_up(pci) for _, pci in found):
        return found
    return sorted(found, key=lambda device: by_value(device[0]))


def by_value(name: str) -> list[tuple[int, str]]:
    """A sort key under which mlx5_2 comes before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
