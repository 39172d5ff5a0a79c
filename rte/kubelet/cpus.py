"""Which CPUs the CPU Manager's static policy takes: the packed way, the kubelet's default."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rte.model import CpuId, NumaId

Level = Mapping[CpuId, int]
"""The unit that each CPU is part of: a NUMA node, a socket or a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTopology:
    """What each CPU is part of. Cores are called by their lowest CPU, as the kubelet does."""

    node: Mapping[CpuId, NumaId]
    core: Mapping[CpuId, int]
    socket: Mapping[CpuId, int]

    @property
    def threads(self) -> int:
        """CPUs of a core; the kubelet takes all cores to be alike."""
        return len(self.core) // max(1, len(set(self.core.values())))

    def siblings(self, cpus: Collection[CpuId]) -> frozenset[CpuId]:
        cores = {self.core[cpu] for cpu in cpus if cpu in self.core}
        return frozenset(cpu for cpu, core in self.core.items() if core in cores)


def take(
    topology: CpuTopology, available: Collection[CpuId], count: int, *, packed: bool = True
) -> frozenset[CpuId] | None:
    """`count` of the available CPUs; None when there are not enough.

    Whole free NUMA nodes and sockets first, then whole free cores, then single CPUs; of each the
    ones with the fewest free CPUs left. Not packed, single CPUs come right after sockets.
    """
    if count > len(available):
        return None
    free, taken = set(available), set[CpuId]()

    def take_whole(path: Sequence[Level]) -> None:
        for cpus in whole(path, free):
            if len(cpus) <= count - len(taken):
                taken.update(cpus)
                free.difference_update(cpus)

    outer: Level = topology.node
    inner: Level = topology.socket
    if len(set(inner.values())) < len(set(outer.values())):
        outer, inner = inner, outer
    take_whole([outer])
    take_whole([outer, inner])
    path = [outer, inner, topology.core]
    if packed:
        take_whole(path)
    else:
        path = [outer, inner] if inner is topology.socket else [outer]
    singles = [
        cpu for unit in ranked(free, path) for cpu in sorted(c for c in free if path[-1][c] == unit)
    ]
    taken.update(singles[: count - len(taken)])
    return frozenset(taken)


def whole(path: Sequence[Level], free: Collection[CpuId]) -> list[list[CpuId]]:
    """The CPUs of each unit of the last level that is wholly free."""
    units = []
    for unit in ranked(free, path):
        cpus = [cpu for cpu, of in path[-1].items() if of == unit]
        if all(cpu in free for cpu in cpus):
            units.append(cpus)
    return units


def ranked(free: Collection[CpuId], path: Sequence[Level]) -> list[int]:
    """The units of the path's last level that have free CPUs, in the order in which they are
    taken: level by level, each sorted by free CPUs, then by id."""
    level, *below = path
    members: dict[int, list[CpuId]] = {}
    for cpu in free:
        members.setdefault(level[cpu], []).append(cpu)
    units = sorted(members, key=lambda unit: (len(members[unit]), unit))
    if not below:
        return units
    return [unit for outer in units for unit in ranked(members[outer], below)]
