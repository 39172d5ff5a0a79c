"""Random machines, for properties that must hold on any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from rte.model import (
    CpuId,
    DeviceId,
    Fabric,
    FabricState,
    Gpu,
    Level,
    LinkPeer,
    Machine,
    Nic,
    NumaId,
    NumaNode,
    NumaSource,
    NvLinkEnd,
    PciAddress,
    PciDevice,
    PciLink,
    pci_address,
    pci_order,
)


def random_machine(dice: Random, *, most: int = 7) -> Machine:
    """A machine that may be as odd as the model allows, with symmetries more often than not."""
    nodes = dice.choice([0, 1, 2, 2, 4])
    pci = [*tree(dice, nodes=nodes)]
    slots = [d for d in pci if d.class_code == SLOT]
    gpu_slots = dice.sample(slots, min(len(slots), dice.randint(1, most)))
    nic_slots = [s for s in slots if s not in gpu_slots][: dice.choice([0, 0, 2, 4, 8])]
    functions = {s.address: function(dice, s, 0x10DE, 0x030200) for s in gpu_slots}
    functions |= {s.address: function(dice, s, 0x15B3, 0x020700) for s in nic_slots}
    gpus = sorted((functions[s.address] for s in gpu_slots), key=lambda d: pci_order(d.address))
    return Machine(
        numa_nodes=numa_nodes(dice, nodes),
        pci=tuple(
            sorted(
                [d for d in pci if d.class_code != SLOT] + list(functions.values()),
                key=lambda d: pci_order(d.address),
            )
        ),
        gpus=gpus_with_links(dice, [g.address for g in gpus]),
        nics=tuple(
            Nic(
                pci=functions[s.address].address,
                rdma=(f"mlx5_{i}",) if dice.random() < 0.8 else (),
                rate_megabits_per_s=dice.choice([400_000, 400_000, 100_000, None]),
            )
            for i, s in enumerate(sorted(nic_slots, key=lambda s: pci_order(s.address)))
        ),
        levels=stated_levels(dice, [g.address for g in gpus]),
        peer_reads={
            (a.address, b.address): dice.random() < 0.8
            for a in gpus
            for b in gpus
            if a is not b and dice.random() < 0.1
        }
        if dice.random() < 0.3
        else {},
    )


SLOT = 0xFFFFFF  # where a function may be put; never in a machine


def tree(dice: Random, *, nodes: int) -> list[PciDevice]:
    """Root ports with nothing, one switch, or a switch below a switch; each has slots below it."""
    found: list[PciDevice] = []
    bus = 0
    known = dice.random() < 0.8

    def add(root: str, parent: PciAddress | None, numa: NumaId | None, *, slot: bool) -> PciAddress:
        nonlocal bus
        bus += 1
        address = pci_address(f"0000:{bus:02x}:00.0")
        link = PciLink(gigatransfers=dice.choice([8, 16, 16, 16]), width=16)
        found.append(
            PciDevice(
                address=address,
                root=root,
                parent=parent,
                vendor=0x8086,
                device=1,
                class_code=SLOT if slot else 0x060400,
                numa=numa,
                link=link if dice.random() < 0.9 else None,
            )
        )
        return address

    for number in range(dice.randint(1, 4)):
        numa = NumaId(dice.randrange(nodes)) if nodes and known else None
        root = f"pci0000:{number:02x}"
        for _ in range(dice.randint(1, 2)):
            port = add(root, None, numa, slot=False)
            kind = dice.choice(["slot", "switch", "switch", "nested"])
            if kind == "slot":
                add(root, port, numa, slot=True)
                continue
            upstream = add(root, port, numa, slot=False)
            for _ in range(dice.randint(1, 3)):
                downstream = add(root, upstream, numa, slot=False)
                if kind == "switch":
                    add(root, downstream, numa, slot=True)
                else:
                    inner = add(root, downstream, numa, slot=False)
                    for _ in range(2):
                        add(root, add(root, inner, numa, slot=False), numa, slot=True)
    return found


def function(dice: Random, slot: PciDevice, vendor: int, class_code: int) -> PciDevice:
    """The slot with something in it; firmware forgets its NUMA node now and then."""
    return PciDevice(
        address=slot.address,
        root=slot.root,
        parent=slot.parent,
        vendor=vendor,
        device=1,
        class_code=class_code,
        numa=None if dice.random() < 0.05 else slot.numa,
        link=slot.link,
    )


def numa_nodes(dice: Random, count: int) -> tuple[NumaNode, ...]:
    ids = [NumaId(i) for i in range(count)]
    far = dice.choice([[20], [20, 32], [12, 21, 40]])
    return tuple(
        NumaNode(
            id=i,
            cpus=(),
            distance={j: 10 if i == j else dice.choice(far) for j in ids},
        )
        for i in ids
    )


def gpus_with_links(dice: Random, addresses: list[PciAddress]) -> tuple[Gpu, ...]:
    shape = dice.choice(["none", "random", "random", "pairs", "switch", "switch", "ring", "mesh"])
    count = len(addresses)
    products = dice.choice([["A"], ["A"], ["A", "B"]])
    lanes: dict[tuple[int, int], int] = {}
    for i in range(count):
        for j in range(i):
            linked = {
                "none": 0,
                "random": dice.choice([0, 0, 1, 2, 4]),
                "pairs": 4 if i // 2 == j // 2 else 0,
                "switch": 0,
                "ring": 2 if (i - j) % count in (1, count - 1) else 0,
                "mesh": 2,
            }[shape]
            lanes[i, j] = lanes[j, i] = linked
            if linked and dice.random() < 0.05:
                lanes[i, j] = dice.choice([0, 1])  # this end alone says so
    cluster = dice.choice([None, "11111111-1111-1111-1111-111111111111"])
    found = []
    for i, address in enumerate(addresses):
        ends = [
            NvLinkEnd(
                peer=LinkPeer.GPU,
                remote=addresses[j],
                lanes=lanes[i, j],
                lane_megabytes_per_s=25_000,
            )
            for j in range(count)
            if j != i and lanes[i, j]
        ]
        if shape == "switch":
            some = dice.choice([6, 6, 6, 6, 5])
            ends.append(NvLinkEnd(peer=LinkPeer.SWITCH, lanes=some, lane_megabytes_per_s=25_000))
        if dice.random() < 0.1:
            ends.append(NvLinkEnd(peer=LinkPeer.CPU, lanes=2, lane_megabytes_per_s=25_000))
        found.append(
            Gpu(
                number=i,
                pci=address,
                uuid=DeviceId(f"GPU-{i:02d}") if (lost := dice.random() < 0.03) is False else None,
                lost="GPU is lost" if lost else None,
                product=dice.choice(products),
                memory_bytes=80 << 30,
                links=tuple(ends),
                fabric=Fabric(
                    state=dice.choice(
                        [FabricState.COMPLETED] * 6
                        + [FabricState.IN_PROGRESS, FabricState.NOT_SUPPORTED]
                    ),
                    cluster=cluster,
                    clique=dice.choice([0, 0, 0, 1]),
                )
                if shape == "switch" and dice.random() < 0.7
                else None,
            )
        )
    return tuple(found)


def stated_levels(
    dice: Random, addresses: list[PciAddress]
) -> dict[tuple[PciAddress, PciAddress], Level]:
    """Now and then the source says levels itself, perhaps only one way, perhaps not all."""
    if dice.random() < 0.7:
        return {}
    found = {}
    for a in addresses:
        for b in addresses:
            if a != b and dice.random() < 0.8:
                found[a, b] = dice.choice([Level.PIX, Level.PXB, Level.NODE, Level.SYS])
    return found


def meshed(
    count: int, lanes: Mapping[tuple[int, int], int] | None = None, *, sockets: int = 1
) -> Machine:
    """GPUs `GPU-<n>` on host bridges of their own, with NVLinks of 25 GB/s a lane."""
    numbers = range(count)
    addresses = [pci_address(f"{i:04x}:01:00.0") for i in numbers]
    numa = [NumaId(i * sockets // count) for i in numbers]
    links = dict(lanes or {})
    links |= {(b, a): n for (a, b), n in links.items()}
    return Machine(
        numa_nodes=tuple(
            NumaNode(
                id=NumaId(node),
                cpus=(CpuId(node),),
                distance={NumaId(n): 10 if n == node else 20 for n in range(sockets)},
            )
            for node in range(sockets)
        ),
        pci=tuple(
            PciDevice(
                address=addresses[i],
                root=f"pci{i:04x}:00",
                vendor=0x10DE,
                device=1,
                class_code=0x030200,
                numa=numa[i],
                numa_from=NumaSource.SYSFS,
                link=PciLink(gigatransfers=16, width=16),
            )
            for i in numbers
        ),
        gpus=tuple(
            Gpu(
                number=i,
                pci=addresses[i],
                uuid=DeviceId(f"GPU-{i}"),
                product="GPU",
                memory_bytes=80 << 30,
                links=tuple(
                    NvLinkEnd(
                        peer=LinkPeer.GPU,
                        remote=addresses[j],
                        lanes=links[i, j],
                        lane_megabytes_per_s=25_000,
                    )
                    for j in numbers
                    if links.get((i, j))
                ),
            )
            for i in numbers
        ),
    )


def with_nics(machine: Machine, nodes: Sequence[int]) -> Machine:
    """The machine with RDMA NICs `mlx5_<n>` on host bridges of their own, in these NUMA nodes."""
    functions = [
        PciDevice(
            address=pci_address(f"{0x1000 + i:04x}:01:00.0"),
            root=f"pci{0x1000 + i:04x}:00",
            vendor=0x15B3,
            device=1,
            class_code=0x020000,
            numa=NumaId(node),
            numa_from=NumaSource.SYSFS,
        )
        for i, node in enumerate(nodes)
    ]
    return replace(
        machine,
        pci=(*machine.pci, *functions),
        nics=tuple(
            Nic(pci=f.address, rdma=(f"mlx5_{i}",), rate_megabits_per_s=400_000)
            for i, f in enumerate(functions)
        ),
    )
