"""The matrix in the format of `nvidia-smi topo -m`, for tools that read that.

Columns are separated by tabs, as a current driver (550 and later) prints them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rte.graph.build import Graph
from rte.model import ranges
from rte.view.relations import relations

LEGEND = """
Legend:

  X    = the device itself
  SYS  = over PCIe and the link between NUMA nodes
  NODE = over PCIe and the host bridges of one NUMA node
  PHB  = over PCIe and one host bridge
  PXB  = over several PCIe bridges, none of them a host bridge
  PIX  = over one PCIe bridge at most
  NV#  = over # NVLinks together
"""


def smi(graph: Graph) -> str:
    return "".join(lines(graph))


def lines(graph: Graph) -> Iterator[str]:
    found = relations(graph)
    cpus = {node.id: ranges(node.cpus) for node in graph.machine.numa_nodes}
    header = ["", *found.names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    yield "\t".join(header) + "\n"
    for i, (name, row) in enumerate(zip(found.names, found.matrix, strict=True)):
        cells = [name, *(" X " if cell == "X" else cell for cell in row)]
        if i < len(graph.gpus):
            node = graph.numa[i]
            own = graph.gpus[i].memory_node
            cells += [
                "N/A" if node is None else cpus.get(node) or "N/A",
                "N/A" if node is None else str(node),
                "",  # the header of NUMA Affinity is two tab stops wide
                "N/A" if own is None else str(own),
            ]
        yield "\t".join(cells) + "\n"
    yield LEGEND
    if found.nics:
        yield "\nNIC Legend:\n\n"
        yield from (f"  {name}: {device}\n" for name, device in found.nics)
