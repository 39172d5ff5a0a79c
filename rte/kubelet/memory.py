"""What the Memory Manager has left of each NUMA node, by its own file. Pure.

How much a block of several nodes takes of each depends on what was there before it, so that no sum
over the blocks says it; and a small block beside it may take its node out of the group. Nor does a
sum know what the manager has lost: 1.37 hands out a pod-level budget anew whenever the kubelet
starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from rte.kubelet.state import HandedOut, Holder, PodUid
from rte.model import MemoryBlock, NumaId, Usage

Bytes = dict[str, dict[NumaId, int]]
"""By resource and node."""


def with_memory(usage: Usage, handed_out: HandedOut) -> Usage:
    """The usage with what the manager has left and which nodes it has joined, unless the list has
    more than its file.

    What the file has more than the list is of pods that have ended: the manager takes it back
    before the next admission.
    """
    blocks = [block for pod in usage.pods for block in pod.memory_blocks()]
    listed = Counter(blocks)
    held = Counter(block for _, block in held_memory(handed_out))
    if listed - held:
        return usage
    free: Bytes = {name: dict(of) for name, of in handed_out.memory_free.items()}
    taken: Bytes = {name: dict(of) for name, of in handed_out.memory_taken.items()}
    for block in (held - listed).elements():
        _take_back(block, free.get(block.type, {}), taken.get(block.type, {}))
    in_use = {node for block in blocks for node in block.numa}
    cells = handed_out.memory_cells.items()
    return replace(
        usage,
        memory_free=free,
        memory_groups={node: nodes for node, nodes in cells if len(nodes) > 1 and node in in_use},
    )


def held_memory(handed_out: HandedOut) -> Iterator[tuple[Holder, MemoryBlock]]:
    """Each block that the file says is held, with its holder: a pod's own blocks are its whole
    budget, its containers' are parts of that."""
    whole: set[PodUid] = {uid for uid, container in handed_out.memory if not container}
    for (uid, container), blocks in handed_out.memory.items():
        if not container or uid not in whole:
            yield from (((uid, container), block) for block in blocks)


def _take_back(block: MemoryBlock, free: dict[NumaId, int], taken: dict[NumaId, int]) -> None:
    """Of each node what is taken there, in ascending order, whoever has it: as the manager does."""
    rest = block.size_bytes
    for node in block.numa:
        back = min(rest, taken.get(node, 0))
        if back:
            taken[node] -= back
            free[node] = free.get(node, 0) + back
            rest -= back
