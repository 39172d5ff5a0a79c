"""Machines of a few lines, for rows about one thing; whole ones are recorded in tests/machines."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rte.model import (
    NVIDIA_VENDOR,
    CpuId,
    DeviceId,
    Gpu,
    LinkPeer,
    Machine,
    MigSlice,
    NumaId,
    NumaNode,
    NumaSource,
    NvLinkEnd,
    PciAddress,
    PciDevice,
)


def address(number: int) -> PciAddress:
    return PciAddress(f"0000:{number + 1:02x}:00.0")


def uuid(number: int) -> DeviceId:
    """A UUID of NVIDIA's form that shows the GPU's number."""
    return DeviceId(f"GPU-{number:08x}-0000-4000-8000-000000000000")


def slices(gpu: int, *profiles: str) -> tuple[MigSlice, ...]:
    return tuple(
        MigSlice(
            id=DeviceId(f"MIG-{gpu:08x}-0000-4000-8000-{instance:012x}"),
            profile=profile,
            memory_bytes=10 << 30,
            gpu_instance=instance,
            compute_instance=0,
        )
        for instance, profile in enumerate(profiles, start=1)
    )


def machine(
    numa: Sequence[int | None] = (0, 0, 1, 1),
    *,
    numa_from: NumaSource = NumaSource.SYSFS,
    pairs: Sequence[tuple[int, int]] = (),
    cpu_nodes: Sequence[int] = (0, 1),
    memory_nodes: Sequence[int] = (),
) -> Machine:
    """A machine with a GPU for each entry of `numa`, and NVLinks of 12 lanes between pairs."""
    ends: dict[int, list[NvLinkEnd]] = {number: [] for number in range(len(numa))}
    for a, b in pairs:
        for here, there in ((a, b), (b, a)):
            end = NvLinkEnd(
                peer=LinkPeer.GPU, remote=address(there), lanes=12, lane_megabytes_per_s=25_000
            )
            ends[here].append(end)
    return Machine(
        numa_nodes=tuple(
            NumaNode(
                id=NumaId(node),
                cpus=(CpuId(2 * node), CpuId(2 * node + 1)) if node in cpu_nodes else (),
                distance={
                    NumaId(other): 10 if other == node else 20
                    for other in (*cpu_nodes, *memory_nodes)
                },
            )
            for node in sorted((*cpu_nodes, *memory_nodes))
        ),
        pci=tuple(
            PciDevice(
                address=address(number),
                root=f"pci0000:{number:02x}",
                vendor=NVIDIA_VENDOR,
                device=0x2330,
                class_code=0x030200,
                numa=None if node is None else NumaId(node),
                numa_from=None if node is None else numa_from,
                driver="nvidia",
            )
            for number, node in enumerate(numa)
        ),
        gpus=tuple(
            Gpu(
                number=number,
                pci=address(number),
                uuid=uuid(number),
                product="NVIDIA H100",
                memory_bytes=80 << 30,
                minor=number,
                index=number,
                links=tuple(ends[number]),
            )
            for number in range(len(numa))
        ),
    )


def with_gpu(machine: Machine, number: int, **changes: Any) -> Machine:
    """The machine with something different about one GPU."""
    gpus = tuple(replace(gpu, **changes) if gpu.number == number else gpu for gpu in machine.gpus)
    return replace(machine, gpus=gpus)


def without_gpu(machine: Machine, number: int) -> Machine:
    """The machine with one GPU pulled out."""
    gone = address(number)
    return replace(
        machine,
        pci=tuple(p for p in machine.pci if p.address != gone),
        gpus=tuple(
            replace(gpu, number=position)
            for position, gpu in enumerate(g for g in machine.gpus if g.pci != gone)
        ),
    )
