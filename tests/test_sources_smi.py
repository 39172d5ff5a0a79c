"""Pasted matrices: every way in which people and terminals deform them, and what is refused."""

from __future__ import annotations

import contextlib
import textwrap
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rte.graph.build import build
from rte.graph.groups import groups
from rte.model import DeviceId, Level, LinkPeer, NumaSource
from rte.sources.matrix import Matrix, parse_matrix
from rte.sources.problem import SourceError
from rte.sources.smi import parse_smi
from rte.view.relations import relations
from rte.view.smi import smi
from tests.corpus import matrices
from tests.graphs import random_machine

HEALTHY = [name for name in matrices() if "/" not in name]

PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV4\tNODE\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV4\t X \tNODE\tSYS\tNODE\t0-31\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tSYS\tNODE\t0-31\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tNODE\tNODE\tSYS\t X \t\t\t\t

NIC Legend:

  NIC0: mlx5_0
"""


def facts(matrix: Matrix) -> tuple[object, ...]:
    return matrix.names, matrix.cells, matrix.numa, matrix.memory, matrix.rdma


def spaced(text: str) -> str:
    return "\n".join(line.expandtabs(8) for line in text.split("\n"))


# What is read


def test_matrix_becomes_a_machine_that_says_where_it_knows_things_from() -> None:
    machine = parse_smi(PAIRS)
    graph = build(machine)
    assert [gpu.name for gpu in machine.gpus] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    assert graph.numa == (0, 0, 0, 1)
    assert {d.numa_from for d in machine.pci if d.is_gpu} == {NumaSource.SOURCE}
    (nic,) = machine.nics
    assert nic.rdma == ("mlx5_0",)
    device = graph.tree.devices[nic.pci]  # type: ignore[index]
    assert (device.numa, device.numa_from) == (0, NumaSource.RELATION)
    assert [group.shape for group in groups(graph)] == ["mesh"]
    assert graph.levels[0][2] == Level.NODE
    assert graph.tree.level(machine.gpus[0].pci, nic.pci) == Level.PIX  # type: ignore[arg-type]
    assert all(node.cpus == () and not node.cpus_known for node in machine.numa_nodes)
    said = "\n".join(machine.unknown)
    assert "PCI addresses" in said
    assert "NV# hides both" in said
    assert "repaired" not in said


DEFORMED = {
    "as spaces": spaced(PAIRS),
    "underlined": PAIRS.replace("\tGPU0", "\t\x1b[4mGPU0", 1).replace("ID\n", "ID\x1b[0m\n", 1),
    "escape bytes lost": PAIRS.replace("\tGPU0", "\t[4mGPU0", 1).replace("ID\n", "ID[0m\n", 1),
    "escapes shown": PAIRS.replace("\tGPU0", "\t^[[4mGPU0", 1).replace("ID\n", "ID^[[0m\n", 1),
    "escape bytes replaced": PAIRS.replace("\tGPU0", "\N{REPLACEMENT CHARACTER}GPU0", 1),
    "with window title": f"\x1b]0;root@host\x07{PAIRS}",
    "Windows line ends": PAIRS.replace("\n", "\r\n"),
    "byte order mark": f"\ufeff{PAIRS}",
    "no-break spaces": spaced(PAIRS).replace(" ", "\xa0"),
    "blank lines between": PAIRS.replace("\n", "\n\n"),
    "in a terminal": f"$ nvidia-smi topo -m\n{PAIRS}\n$ echo GPU0\nGPU0\n$ ",
    "in a code block": f"```\n{PAIRS}```\n",
    "quoted in a mail": "\n".join(f"> {line}" for line in PAIRS.split("\n")),
    "twice": f"{PAIRS}\n{PAIRS}",
    "header's first tab lost": PAIRS.lstrip("\t"),
    "ends trimmed": "\n".join(line.rstrip() for line in PAIRS.split("\n")),
    "prefixed by a host": "\n".join(f"node7: {line}" for line in PAIRS.split("\n")[:6])
    + "\n  NIC0: mlx5_0\n",
    "a table of bars": "\n".join(
        "|" + line.replace("\t\tN", "\tN").replace("\t", " | ") + "|"
        for line in PAIRS.split("\n")[:6]
    ).replace("|\n", "|\n|" + "---|" * 9 + "\n", 1)
    + "\n  NIC0: mlx5_0\n",
    "glued": spaced(PAIRS).replace("NIC0    CPU", "NIC0CPU").replace("PIX     0", "PIX0")
    .replace("NODE    0-31", "NODE0-31").replace("SYS     32", "SYS32"),
    "log lines inside": PAIRS.replace("GPU2\tNODE", "WARNING: clocks are low\nGPU2\tNODE"),
}  # fmt: skip


SAID = {
    "escape bytes replaced": ("the marks of lost bytes are left out",),
    "glued": ("cells without blanks between them are parted: header GPU0 GPU1 GPU2 GPU3",),
}


@pytest.mark.parametrize("how", DEFORMED)
def test_deformed_matrix_is_read_as_the_original(how: str) -> None:
    assert facts(parse_matrix(DEFORMED[how])) == facts(parse_matrix(PAIRS))
    assert parse_matrix(DEFORMED[how]).repairs == SAID.get(how, ())


@pytest.mark.parametrize("width", [40, 79, 80, 100, 132])
@pytest.mark.parametrize(
    "how", ["by the terminal", "by the terminal, ends trimmed", "by an editor"]
)
def test_wrapped_matrix_is_read_as_the_original(width: int, how: str) -> None:
    for name in HEALTHY[:: len(HEALTHY) // 20]:
        if name.startswith(("H100_g8n10_sglang-3658", "H100-80GB-HBM3_g8n9_sglang-3797")):
            continue  # already glued: wrapped as well, their NUMA column has two readings
        lines = spaced(matrices()[name]).split("\n")
        if how == "by an editor":
            parts = [part for line in lines for part in textwrap.wrap(line, width) or [""]]
        else:
            parts = [
                line[i : i + width] for line in lines for i in range(0, max(len(line), 1), width)
            ]
            if "trimmed" in how:
                parts = [part.rstrip() for part in parts]
        whole = parse_matrix(matrices()[name])
        assert facts(parse_matrix("\n".join(parts)))[:4] == facts(whole)[:4], name


def test_old_drivers_name_nics_by_device_and_levels_otherwise() -> None:
    text = """\
        GPU0    GPU1    mlx5_0  mlx4_bond_0     CPU Affinity
GPU0     X      SOC     PHB     SOC     0-9
GPU1    SOC      X      SOC     PHB     10-19
mlx5_0  PHB     SOC      X      SOC
mlx4_bond_0     SOC     PHB     SOC      X

Legend:

  X   = Self
  SOC = Path traverses a socket-level link (e.g. QPI)
"""
    machine = parse_smi(text)
    assert [nic.rdma for nic in machine.nics] == [("mlx5_0",), ("mlx4_bond_0",)]
    assert relations(build(machine)).matrix[0] == ("X", "SYS", "PHB", "SYS")


FOUND_ELSEWHERE = {
    "a report that aligned the columns with more tabs": (
        "\t\tGPU0\tGPU1\tGPU2\tmlx5_0\tCPU Affinity    NUMA Affinity\n"
        "GPU0\t X \t\tNV1\t    NV2\t\tNODE\t0-23,48-71\t\t0\n"
        "GPU1\tNV1\t \tX \t\tNV1\t\tNODE\t0-23,48-71\t\t0\n"
        "GPU2\tNV2\t\tNV1\t \tX \t\tPIX\t\t24-47,72-95\t\t1\n"
        "mlx5_0\tNODE\tNODE\tPIX\t\tX \t\n",
        {"GPU0": 0, "GPU1": 0, "GPU2": 1},
    ),
    "a list item, then a code block": (
        "- **topology:** \tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n\n```\n"
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tSYS\t0,2,4,6,8,10\t0\t\tN/A\nGPU1\tSYS\t X \t1,3,5,7,9,11\t1\t\tN/A\n```\n",
        {"GPU0": 0, "GPU1": 1},
    ),
    "a sentence that names GPUs": (
        "- Topology: PCIe only (PHB between GPU0/GPU1; no NVLink) - see nvidia-smi topo -m\n"
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tPHB\t0-23\t0\t\tN/A\nGPU1\tPHB\t X \t0-23\t0\t\tN/A\n",
        {"GPU0": 0, "GPU1": 0},
    ),
    "tabs and blanks mixed": (
        "\t   GPU0\tGPU1 GPU2\nGPU0\t X \tPIX\t PHB\nGPU1\tPIX\t X \t PHB\n"
        "GPU2\tPHB\tPHB\t X \nLegend:\n  X    = Self\n",
        {},
    ),
    "one GPU between the sections of a bug report": (
        "triton: 3.4.0\nNVIDIA Topology: \n\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \t0-25\t0\t\tN/A\n\nLegend:\n\n  X    = Self\n",
        {"GPU0": 0},
    ),
}


@pytest.mark.parametrize("what", FOUND_ELSEWHERE)
def test_what_people_wrote_around_and_into_it(what: str) -> None:
    text, nodes = FOUND_ELSEWHERE[what]
    matrix = parse_matrix(text)
    assert matrix.numa == nodes
    assert matrix.repairs == ()
    assert len(matrix.cells) == len(matrix.names) * (len(matrix.names) - 1)


def test_pcie_matrix_does_not_say_that_there_is_no_nvlink() -> None:
    without = PAIRS.replace("NV4", "PIX")
    assert any("topo -mp" in said for said in parse_smi(without).unknown)
    legend = without + "\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    assert not any("topo -mp" in said for said in parse_smi(legend).unknown)


def test_unreadable_level_is_worse_than_any_other() -> None:
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tN/A\tSYS\nGPU1\tN/A\tX\tSYS\nGPU2\tSYS\tSYS\tX\n"
    graph = build(parse_smi(text))
    assert graph.closeness[0][1].level == Level.UNKNOWN < graph.closeness[0][2].level


def test_more_lanes_to_each_than_a_gpu_has_are_lanes_to_switches() -> None:
    rows = [["X" if i == j else "NV18" for j in range(8)] for i in range(8)]
    machine = parse_smi(table(rows))
    assert {(end.peer, end.lanes) for gpu in machine.gpus for end in gpu.links} == {
        (LinkPeer.SWITCH, 18)
    }
    rows[3] = ["NV17" if cell == "NV18" else cell for cell in rows[3]]
    for i, row in enumerate(rows):
        row[3] = "X" if i == 3 else "NV17"
    lanes = [gpu.links[0].lanes for gpu in parse_smi(table(rows)).gpus]
    assert lanes == [18, 18, 18, 17, 18, 18, 18, 18]


def test_lanes_that_no_switch_explains_are_kept_pair_by_pair() -> None:
    rows = [["X" if i == j else "NV12" for j in range(4)] for i in range(4)]
    rows[1][2] = "SYS"
    graph = build(parse_smi(table(rows)))
    assert graph.lanes[1][2] == 0
    assert graph.lanes[2][1] == 12
    assert graph.closeness[1][2].nvlink_megabytes_per_s == 0
    assert graph.suspects == 0b0110


def table(rows: list[list[str]]) -> str:
    names = [f"GPU{i}" for i in range(len(rows))]
    lines = ["\t" + "\t".join(names)]
    lines += ["\t".join([name, *row]) for name, row in zip(names, rows, strict=True)]
    return "\n".join(lines) + "\n"


def test_products_uuids_and_driver_are_taken_from_a_list_beside_the_matrix() -> None:
    uuids = [f"GPU-0000000{i}-1111-2222-3333-444444444444" for i in range(4)]
    beside = "Driver Version: 550.54.15\n" + "".join(
        f"GPU {i}: NVIDIA B200 (UUID: {uuid})\n" for i, uuid in enumerate(uuids)
    )
    machine = parse_smi(beside + PAIRS)
    assert [gpu.uuid for gpu in machine.gpus] == list(map(DeviceId, uuids))
    assert {gpu.product for gpu in machine.gpus} == {"NVIDIA B200"}
    assert machine.driver == "550.54.15"
    assert machine.gpus[0].links[0].lane_megabytes_per_s == 50_000
    together = parse_smi("GPU 0,1,2,3: NVIDIA H20\nGPU 0,1,2,3 Compute Capability: 9.0\n" + PAIRS)
    assert {gpu.product for gpu in together.gpus} == {"NVIDIA H20"}
    lacking = parse_smi(beside.replace("GPU 3", "GPU 9") + PAIRS)
    assert {gpu.uuid for gpu in lacking.gpus} == {None}


def test_memory_of_a_grace_gpu_is_a_node_without_cpus_and_not_its_place() -> None:
    machine = parse_smi(matrices()["GB200_g4n4_vllm-19703.txt"])
    assert [gpu.memory_node for gpu in machine.gpus] == [2, 10, 18, 26]
    assert build(machine).numa == (0, 0, 1, 1)
    memory = {node.id: node for node in machine.numa_nodes if node.gpu}
    assert set(memory) == {2, 10, 18, 26}
    assert all(node.cpus_known for node in memory.values())


def test_where_cells_were_parted_is_said() -> None:
    text = spaced(PAIRS).replace("GPU1    GPU2    GPU3", "GPU1GPU2    GPU3", 1)
    text = text.replace("GPU3    SYS     SYS     SYS", "GPU3    SYS     SYSSYS", 1)
    matrix = parse_matrix(text)
    assert facts(matrix) == facts(parse_matrix(PAIRS))
    assert matrix.repairs == ("cells without blanks between them are parted: header GPU3",)


def test_glued_lanes_are_read_as_the_cell_across_says() -> None:
    one = "\tGPU0\tGPU1CPU Affinity\nGPU0\t X \tNV10-31\nGPU1\tNV1\t X 0-31\n"
    assert parse_matrix(one).cells["GPU0", "GPU1"] == "NV1"
    ten = one.replace("NV1\t", "NV10\t")
    assert parse_matrix(ten).cells["GPU0", "GPU1"] == "NV10"


def test_last_row_may_be_cut_off_when_the_others_say_the_rest() -> None:
    text = table([["X", "NV4", "SYS"], ["NV4", "X", "SYS"], ["SYS", "SYS", "X"]])
    cut = parse_matrix(text[: text.rindex("SYS") + 1])
    assert cut.cells["GPU2", "GPU1"] == "SYS"
    assert cut.repairs == (
        "the row of GPU2 is cut off and left out",
        "what is not there is taken from the other direction",
    )


def test_header_that_is_lost_is_taken_from_the_rows() -> None:
    text = table([["X", "NV4"], ["NV4", "X"]]).split("\n", 1)[1]
    assert parse_matrix(text).cells["GPU0", "GPU1"] == "NV4"
    assert parse_matrix(text).repairs == (
        "the header is lost or damaged: columns are named as the rows are",
    )


# What is refused

REFUSED = {
    "nothing": ("hello\n", "no row such as"),
    "a header alone": ("\tGPU0\tGPU1\tCPU Affinity\n", "no row such as"),
    "a missing cell": (
        PAIRS.replace("GPU1\tNV4\t X \tNODE", "GPU1\tNV4\t X "),
        "line 3, column 23: the row of GPU1 has 4 cells for 5 columns, then '0-31'",
    ),
    "a missing cell before its own": (
        PAIRS.replace("GPU2\tNODE\tNODE", "GPU2\tNODE"),
        "line 4, column 12: the row of GPU2 says X in the column of GPU1",
    ),
    "one cell more": (
        PAIRS.replace("GPU3\tSYS\tSYS\tSYS\t X \tSYS", "GPU3\tSYS\tSYS\tSYS\t X \tSYS\tSYS"),
        "line 5, column 26: the row of GPU3 goes on with SYS behind its 5 cells",
    ),
    "a word": (
        PAIRS.replace("GPU1\tNV4\t X \tNODE", "GPU1\tNV4\t X \tFAST"),
        "line 3, column 14: the row of GPU1 has 2 cells for 5 columns, then 'FAST'",
    ),
    "more lanes than there are": (PAIRS.replace("NV4", "NV99"), "line 2, column "),
    "capabilities": (
        "\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n",
        "OK is what `topo -p2p` says",
    ),
    "two machines": (PAIRS + PAIRS.replace("NV4", "PIX"), "2 matrices that differ"),
    "most rows cut off": (
        "\n".join(PAIRS.split("\n")[:3]),
        "neither the row of GPU2 nor that of GPU3 is there",
    ),
    "a row of a stranger": (
        PAIRS.replace("GPU3\tSYS", "GPU7\tSYS"),
        "line 5: the row of GPU7 has no column in the header",
    ),
    "a column twice": (PAIRS.replace("\tNIC0\tCPU", "\tNIC0\tGPU3\tCPU"), "two columns are called"),
    "one lost N/A": (
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tN/A\nGPU1\tSYS\tX\t0-3\n",
        "line 2: GPU0 to GPU1 says N/A and GPU1 to GPU0 says SYS",
    ),
    "glued, and read in two ways": (
        "\tGPU0\tGPU1CPU Affinity\nGPU0\t X \tNV10-31\nGPU1\tSYS\t X 0-31\n",
        "line 2: GPU0 to GPU1: NV10 or NV1",
    ),
    "too many GPUs": (
        table([["X" if i == j else "SYS" for j in range(129)] for i in range(129)]),
        "129 GPUs of 129 columns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_single_reading_is_refused_with_its_place(why: str) -> None:
    text, words = REFUSED[why]
    with pytest.raises(SourceError) as refused:
        parse_smi(text, "paste.txt")
    assert words in str(refused.value)
    assert str(refused.value).startswith("paste.txt: ")


@given(st.randoms(use_true_random=False))
def test_a_matrix_that_lost_any_piece_is_never_read_as_another(dice: Random) -> None:
    """Cuts, repeats and swaps: what is read agrees with the original wherever both speak."""
    name = dice.choice(HEALTHY)
    text = spaced(matrices()[name])
    whole = parse_matrix(text)
    at = dice.randrange(len(text))
    piece = dice.choice([1, 2, 3, 8, 40])
    damaged = dice.choice(
        [
            text[:at],
            text[at:],
            text[:at] + text[at + piece :],
            text[:at] + text[at : at + piece] * 2 + text[at + piece :],
        ]
    )
    try:
        found = parse_matrix(damaged)
    except SourceError:
        return
    same = set(found.names) & set(whole.names)
    wrong = {
        pair: (cell, whole.cells[pair])
        for pair, cell in found.cells.items()
        if same.issuperset(pair) and cell != whole.cells[pair]
    }
    # One character can turn NV12 into NV1, and nobody can see it: but only if no row says
    # otherwise, and then it is said that the two directions disagree.
    assert all(pair[::-1] not in wrong for pair in wrong), (name, at, piece, wrong)


@given(st.text(alphabet="GPUNIC0123X \t\nVSYOEHB/A-,mlx5_", max_size=400))
def test_no_text_raises_anything_else(text: str) -> None:
    with contextlib.suppress(SourceError):
        parse_smi(text)


# And back


@given(st.randoms(use_true_random=False))
def test_matrix_that_we_print_reads_back_as_the_same_relations(dice: Random) -> None:
    machine = random_machine(dice)
    graph = build(machine)
    if not graph.gpus:
        return
    printed = smi(graph)
    back = build(parse_smi(printed))
    assert relations(back).matrix == relations(graph).matrix
    assert smi(back).split("\n")[0] == printed.split("\n")[0]
