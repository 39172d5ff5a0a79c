"""What `nvidia-smi topo -m` printed, as people paste it → Machine.

A matrix names neither places nor people's paths: there are no PCI addresses in it, CPU lists are
cut off at the width of their column, and where it says NV# it does not say the PCIe level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from rte.model import (
    NVIDIA_VENDOR,
    DeviceId,
    Gpu,
    Level,
    Machine,
    Nic,
    NumaId,
    NumaNode,
    NumaSource,
    NvLinkEnd,
    PciAddress,
    PciDevice,
    made_up_address,
)
from rte.sources.matrix import (
    LEVELS,
    Matrix,
    gpu_number,
    is_gpu,
    lanes,
    parse_matrix,
    spoken,
)
from rte.sources.nvlink import lane_speed, link_ends
from rte.sources.tree import GPU, NETWORK, Tree


def parse_smi(text: str, name: str = "matrix") -> Machine:
    """The machine that a pasted matrix describes. Raises SourceError, and nothing else."""
    return machine(parse_matrix(text, name))


def machine(matrix: Matrix) -> Machine:
    """What follows from a matrix, and in `unknown` what does not."""
    names = (*matrix.gpus, *matrix.nics)
    address = {name: made_up_address(i) for i, name in enumerate(names)}
    levels = {
        pair: LEVELS[word] for pair, word in matrix.cells.items() if not word.startswith("NV")
    }
    numa, inferred = with_neighbours(matrix.numa, levels)
    bearing = {node: NumaNode(id=node, cpus=(), cpus_known=False) for node in numa.values()}
    own = {
        node: NumaNode(id=node, cpus=(), gpu=address[gpu])
        for gpu, node in matrix.memory.items()
        if node not in bearing
    }
    functions = [
        PciDevice(
            address=address[name],
            root="",
            vendor=NVIDIA_VENDOR if is_gpu(name) else 0,
            device=0,
            class_code=GPU if is_gpu(name) else NETWORK,
            numa=numa.get(name),
            numa_from=source(name, numa, inferred),
            driver="nvidia" if is_gpu(name) else None,
        )
        for name in names
    ]
    links = nvlinks(matrix, address)
    return Machine(
        numa_nodes=tuple(sorted((own | bearing).values(), key=lambda node: node.id)),
        pci=hung(functions, names, levels),
        gpus=tuple(
            Gpu(
                number=gpu_number(gpu),
                pci=address[gpu],
                uuid=DeviceId(matrix.uuids[gpu]) if gpu in matrix.uuids else None,
                product=matrix.products.get(gpu),
                links=links[gpu],
                memory_node=matrix.memory.get(gpu),
            )
            for gpu in matrix.gpus
        ),
        nics=tuple(Nic(pci=address[nic], rdma=(matrix.rdma.get(nic, nic),)) for nic in matrix.nics),
        levels={(address[a], address[b]): level for (a, b), level in levels.items()},
        driver=matrix.driver,
        unknown=tuple(unknown(matrix)),
    )


Levels = Mapping[tuple[str, str], Level]


def with_neighbours(
    stated: Mapping[str, NumaId], levels: Levels
) -> tuple[dict[str, NumaId], frozenset[str]]:
    """NUMA nodes with those that a neighbour tells, and who has it from there.

    A device that is not across NUMA nodes from one with a node has the same, unless two neighbours
    contradict each other.
    """
    found = dict(stated)
    while True:
        told: dict[str, set[NumaId]] = {}
        for (a, b), level in levels.items():
            if level >= Level.NODE and b in found and a not in found:
                told.setdefault(a, set()).add(found[b])
        new = {name: nodes.pop() for name, nodes in told.items() if len(nodes) == 1}
        if not new:
            return found, frozenset(found.keys() - stated.keys())
        found |= new


def source(name: str, numa: Mapping[str, NumaId], inferred: frozenset[str]) -> NumaSource | None:
    if name not in numa:
        return None
    return NumaSource.RELATION if name in inferred else NumaSource.SOURCE


def hung(
    functions: Sequence[PciDevice], names: Sequence[str], levels: Levels
) -> tuple[PciDevice, ...]:
    """The functions with a tree above them that has the switches and host bridges they share.

    A switch is an upstream and downstream ports, as in the kernel's tree; none has a name.
    """

    def together(least: Level) -> list[list[int]]:
        return classes(names, {pair for pair, level in levels.items() if level >= least}, levels)

    tree = Tree()

    def port(root: str, parent: PciAddress | None, numa: NumaId | None) -> PciAddress:
        return tree.add_port(root, parent, numa=numa, numa_from=NumaSource.RELATION)

    root_of = {i: f"pci{n}" for n, c in enumerate(together(Level.PHB)) for i in c}
    switches = together(Level.PIX)
    parent: dict[int, PciAddress] = {}
    for block in together(Level.PXB):
        if len(block) == 1:
            continue
        root, numa = root_of[block[0]], functions[block[0]].numa
        top = port(root, None, numa)
        inner = [members for members in switches if members[0] in block]
        for members in inner:
            upstream = top if len(inner) == 1 else port(root, port(root, top, numa), numa)
            for i in members:
                parent[i] = port(root, upstream, numa)
    for i, function in enumerate(functions):
        tree.devices[function.address] = replace(function, root=root_of[i], parent=parent.get(i))
    return tree.in_order()


def classes(
    names: Sequence[str], joined: Iterable[tuple[str, str]], levels: Levels
) -> list[list[int]]:
    """Positions in sets that the pairs join, by smallest; only what both directions say counts."""
    at = {name: i for i, name in enumerate(names)}
    pairs = set(joined)
    leader = list(range(len(names)))

    def top(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for a, b in pairs:
        if (b, a) in pairs or (b, a) not in levels:
            one, other = sorted((top(at[a]), top(at[b])))
            leader[other] = one
    found: dict[int, list[int]] = {}
    for i in range(len(names)):
        found.setdefault(top(i), []).append(i)
    return list(found.values())


def nvlinks(
    matrix: Matrix, address: Mapping[str, PciAddress]
) -> Mapping[str, tuple[NvLinkEnd, ...]]:
    row = {
        address[a]: {address[b]: lanes(matrix.cells.get((a, b), "")) for b in matrix.gpus if b != a}
        for a in matrix.gpus
    }
    speed = {address[gpu]: lane_speed(matrix.products.get(gpu)) for gpu in matrix.gpus}
    found = link_ends(row, speed)
    return {gpu: found[address[gpu]] for gpu in matrix.gpus}


def unknown(matrix: Matrix) -> Iterator[str]:
    for repair in matrix.repairs:
        yield f"repaired: {repair}"
    yield "PCI addresses, link speeds, CPUs and memory of NUMA nodes: no matrix says them"
    if not matrix.uuids:
        what = "UUIDs" if matrix.products else "UUIDs and products"
        yield f"{what}: `nvidia-smi -L` says them"
    if matrix.nics and not all(nic in matrix.rdma for nic in matrix.nics):
        yield "names of some RDMA devices: there is no NIC legend for them"
    words = set(matrix.cells.values())
    if any(word.startswith("NV") for word in words):
        yield "PCIe levels of GPUs that NVLink joins, and whether over switches: NV# hides both"
        if not matrix.products:
            yield "NVLink generation: a lane is taken for 25 GB/s"
    elif not matrix.knows_nvlink:
        yield "NVLinks: no cell says NV#, but nothing shows that this is not `topo -mp`"
    several = spoken(matrix.vague)
    if several:
        yield f"NUMA node of {several}: the matrix names more than one"
    nowhere = [g for g in matrix.gpus if g not in matrix.numa and g not in matrix.vague]
    if nowhere:
        yield f"NUMA node of {spoken(nowhere)}: the matrix says none that can be read"
    uneven = [
        f"{a}-{b}"
        for a, b in combinations(matrix.names, 2)
        if matrix.cells.get((a, b)) != matrix.cells.get((b, a))
    ]
    if uneven:
        yield f"the two directions disagree, and the worse one counts: {spoken(uneven)}"
