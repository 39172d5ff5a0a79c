"""`nvidia-smi topo -m` of real machines, and which of our recorded machines must reproduce which.

The files are facts copied from public issues and documents; the first line names each source.
This reader is the tests' own, so that `rte.sources.smi` is not checked by itself: it knows only
names, relations and the legend, and copes with columns that a terminal's width glued together
(`NIC6NIC7`, `NODENODE`), which is how the HGX H100 matrices were pasted.

Which columns correspond: `GPU<n>` is the machine's GPU number n. A NIC column is the machine's NIC
of the RDMA device in `CORRESPONDING`. The OCI H100 has one column for each of its sixteen ports
and two front-end NICs, under the same names and in PCI order, as the matrices of that machine kind
have. The matrices of the A100 kind are of hosts with one port a card where OCI's have two: a
column there is the first port of the card in the same PCI order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

NAME = re.compile(r"GPU\d+|NIC\d+|mlx\d+_\d+")
CELL = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One matrix: rows may be fewer than columns where only a part was published."""

    names: tuple[str, ...]  # of the columns, in order
    cells: Mapping[tuple[str, str], str]  # (row, column) → X, NV#, PIX, PXB, PHB, NODE, SYS
    devices: Mapping[str, str]  # NIC column → RDMA device, from the legend or the name itself


def read_matrix(name: str) -> Matrix:
    """The matrix in `<name>.txt`. Raises ValueError where a row has not a cell for each column."""
    return parse_matrix((FOLDER / f"{name}.txt").read_text(), name)


def parse_matrix(text: str, name: str) -> Matrix:
    """The matrix in a text that `name` says the origin of. Raises ValueError as read_matrix."""
    table = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    names = tuple(NAME.findall(table[0].split("CPU Affinity")[0]))
    cells: dict[tuple[str, str], str] = {}
    devices = {column: column for column in names if not column.startswith(("GPU", "NIC"))}
    for line in table[1:]:
        legend = re.fullmatch(r"\s+(NIC\d+): (\S+)", line)
        row = NAME.match(line)
        if legend:
            devices[legend[1]] = legend[2]
        elif row:
            values = CELL.findall(line[row.end() :])
            if len(values) != len(names):
                raise ValueError(f"{name}: {row[0]}: {len(values)} cells, {len(names)} columns")
            cells.update({(row[0], column): v for column, v in zip(names, values, strict=True)})
    return Matrix(names=names, cells=cells, devices=devices)


HGX_H100 = {f"NIC{n}": f"mlx5_{n}" for n in range(18)}
# Card by card in PCI order; `mlx5_4` and `mlx5_5` are the two ports of the front-end NIC.
A100_CARDS = ("mlx5_0", "mlx5_2", "mlx5_6", "mlx5_8")
A100_CARDS_ACROSS = ("mlx5_10", "mlx5_12", "mlx5_14", "mlx5_16")
A100_FRONT = ("mlx5_4", "mlx5_5")


def _columns(*devices: str) -> dict[str, str]:
    return {f"NIC{n}": device for n, device in enumerate(devices)}


A100_1923 = _columns(*A100_CARDS, *A100_FRONT, *A100_CARDS_ACROSS)
A100_6199 = _columns(*A100_CARDS, *A100_CARDS_ACROSS, *A100_FRONT)

CORRESPONDING: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    # Made from NCCL's dump of the PCI tree: these prove the reading of trees.
    ("hgx-h100-oci", "H100-80GB-HBM3_g8n18_sglang-4188", HGX_H100),
    ("hgx-h100-oci", "H100-80GB-HBM3_g8n18_sglang-5212", HGX_H100),
    ("hgx-h100-oci", "H100-80GB-HBM3_g8n18_sglang-6933", HGX_H100),
    ("hgx-a100-oci-bm4", "A100-SXM4-80GB_g8n12_sglang-1923", A100_1923),
    ("hgx-a100-oci-bm4", "A100-SXM4-40GB_g8n10_vllm-6199", A100_6199),
    ("hgx-a100-oci-v2", "A100-SXM4-80GB_g8n12_sglang-1923", A100_1923),
    ("hgx-a100-oci-v2", "A100-SXM4-40GB_g8n10_vllm-6199", A100_6199),
    # Made from hwloc's dump: the tree of the GPUs is real, the NICs were added.
    ("dgx2-v100", "V100-DGX-2_g16n10_nccl-tests-78", {f"mlx5_{n}": f"mlx5_{n}" for n in range(10)}),
    # Trees made to fit their matrix: these prove only that the machine is what it claims to be.
    ("dgx1-v100", "V100-DGX-1_g8n4_ucx-py-docs", {f"mlx5_{n}": f"mlx5_{n}" for n in range(4)}),
    ("l40s-8", "L40S_g8n0_sglang-6200", {}),
    ("gb200-tray", "GB200_g4n4_vllm-19703", _columns("mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5")),
    ("gh200-quad", "GH200-quad_g4n0_hpc-course", {}),
    ("asymmetric-link", "H100_g4n2_vllm-8947", _columns("mlx5_0", "mlx5_1")),
    ("azure-domains", "A100-80GB-PCIe_g4n1_vllm-14845", _columns("mlx5_0")),
)
"""(machine, matrix, NIC column → RDMA device of the machine); other NIC columns have no counterpart
in the machine and are left out of the comparison."""
