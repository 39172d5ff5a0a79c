"""The made machines have the relations that nvidia-smi shows on real ones of their kind.

Relations are taken from the descriptions here, by the tests' own rule, and not from the product:
this says that the machines are right before the product is asked what it makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.machines.description import Description, describe
from tests.machines.nvml_json import GPU_PEER, SWITCH_PEER, bus_id, level, nvml_reading
from tests.matrices import CORRESPONDING, read_matrix

LETTERS = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

ROWS = [pytest.param(*row, id=f"{row[0]} as {row[1]}") for row in CORRESPONDING]


@pytest.mark.parametrize(("machine", "matrix", "columns"), ROWS)
def test_made_machine_has_the_relations_of_the_real_one(
    machine: str, matrix: str, columns: Mapping[str, str]
) -> None:
    real = read_matrix(matrix)
    made = relations(describe(machine), columns)
    compared = {pair: cell for pair, cell in real.cells.items() if pair in made}
    assert {pair: made[pair] for pair in compared} == compared
    gpus = sum(name.startswith("GPU") for name in real.names)
    rows = {row for row, _ in real.cells}
    known = gpus + len(columns)
    assert len(compared) == known * sum(row in rows for row in [*columns, *real.names[:gpus]])


def relations(machine: Description, columns: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """What nvidia-smi would print, a direction each."""
    gpus = machine.gpus()
    nics = {f.words.get("rdma"): f for f in machine.functions if f.kind == "nic"}
    functions = {f"GPU{n}": gpu for n, gpu in enumerate(gpus)}
    functions |= {column: nics[device] for column, device in columns.items()}
    cells = {
        (a, b): "X" if a == b else LETTERS[level(functions[a], functions[b])]
        for a in functions
        for b in functions
    }
    return cells | nvlinks(machine)


def nvlinks(machine: Description) -> dict[tuple[str, str], str]:
    """NV# between GPUs: lanes to the other GPU, or to switches that both have."""
    found = {}
    readings = nvml_reading(machine).gpus
    for a in readings:
        up = [link for link in a.links if link.active]
        for b in readings:
            direct = sum((x.remote_type, x.remote_bus_id) == (GPU_PEER, b.bus_id) for x in up)
            theirs = sum(x.remote_type == SWITCH_PEER for x in b.links if x.active)
            lanes = direct or min(sum(x.remote_type == SWITCH_PEER for x in up), theirs)
            if lanes and a.index != b.index:
                found[f"GPU{a.index}", f"GPU{b.index}"] = f"NV{lanes}"
    return found


def test_bus_id_is_spelt_as_nvml_spells_it() -> None:
    assert bus_id("3f8cfdd:00:00.0") == "03F8CFDD:00:00.0"
    assert bus_id("0000:3b:00.0") == "00000000:3B:00.0"


@pytest.mark.parametrize(
    ("matrix", "columns", "rows"),
    [
        ("H100-80GB-HBM3_g8n18_sglang-4188", 26, 26),
        ("A100-SXM4-40GB_g8n10_vllm-6199", 18, 18),
        ("V100-DGX-2_g16n10_nccl-tests-78", 26, 4),
    ],
)
def test_matrix_is_read_whole(matrix: str, columns: int, rows: int) -> None:
    read = read_matrix(matrix)
    assert len(read.names) == columns
    assert len(read.cells) == columns * rows
    assert all(read.cells[a, b] == "X" for a, b in read.cells if a == b)
