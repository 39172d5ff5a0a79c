"""Every recorded machine: it is what its about.md says, and what make.py makes is checked in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rte.discovery.reading import NvmlReading
from rte.discovery.sysfs import read_host
from rte.graph.build import build
from rte.graph.choose import choose
from rte.graph.tree import PciTree
from rte.model import Level, Machine
from rte.sources.recorded import read_recorded, unpack
from tests.machines.about import counts, expectations, names
from tests.machines.description import FOLDER
from tests.machines.make import made_names, make

SIZE_LIMIT = 200 << 10

COUNTS: dict[str, Callable[[Machine], int]] = {
    "GPUs": lambda machine: len(machine.gpus),
    "lost GPUs": lambda machine: sum(gpu.lost is not None for gpu in machine.gpus),
    "MIG devices": lambda machine: sum(len(gpu.slices) for gpu in machine.gpus),
    "NICs": lambda machine: len(machine.nics),
    "NUMA nodes": lambda machine: len(machine.numa_nodes),
    "NUMA nodes with CPUs": lambda machine: sum(bool(node.cpus) for node in machine.numa_nodes),
    "NVSwitches": lambda machine: sum(device.is_nvswitch for device in machine.pci),
}


@pytest.mark.parametrize("name", made_names())
def test_what_is_checked_in_is_what_make_makes(name: str) -> None:
    for file, text in make(name).items():
        assert (FOLDER / name / file).read_text() == text, (
            f"run python -m tests.machines.make {name}"
        )


@pytest.mark.parametrize("name", names())
def test_machine_is_what_its_about_says(name: str) -> None:
    machine = read_recorded(FOLDER / name)
    said = counts(name)
    assert {"GPUs", "NICs", "NUMA nodes", "NUMA nodes with CPUs"} <= said.keys()
    assert {what: COUNTS[what](machine) for what in said} == said


@pytest.mark.parametrize("name", made_names())
def test_made_machine_holds_nothing_that_cannot_be_understood(name: str, tmp_path: Path) -> None:
    unpack(FOLDER / name / "sys.txt", tmp_path)
    assert read_host(tmp_path / "sys", proc=tmp_path / "proc").problems == ()


@pytest.mark.parametrize("name", [n for n in names() if (FOLDER / n / "nvml.json").exists()])
def test_nvml_json_has_no_unknown_field(name: str) -> None:
    text = (FOLDER / name / "nvml.json").read_bytes()
    reading = msgspec.json.decode(text, type=NvmlReading)
    assert msgspec.json.decode(msgspec.json.encode(reading)) == msgspec.json.decode(text)
    assert len(reading.gpus) == counts(name)["GPUs"]


@pytest.mark.parametrize("name", names())
def test_sys_txt_is_sorted_small_and_within_sys_and_proc(name: str) -> None:
    path: Path = FOLDER / name / "sys.txt"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    assert all(line.startswith(("sys/", "proc/")) for line in lines)
    assert path.stat().st_size < SIZE_LIMIT


@pytest.mark.parametrize("name", names())
def test_expected_choices_make_sense_in_themselves(name: str) -> None:
    gpus = range(counts(name)["GPUs"])
    for row in expectations(name):
        assert set(row.chosen) <= set(row.offered) <= set(row.free) <= set(gpus), row
        assert len(row.chosen) == row.size, row
        assert row.why, row


@pytest.mark.parametrize("name", [n for n in names() if expectations(n)])
def test_choice_is_what_about_md_worked_out_by_hand(name: str) -> None:
    machine = read_recorded(FOLDER / name)
    graph = build(machine)
    uuid = {gpu.number: gpu.uuid for gpu in machine.gpus if gpu.uuid}
    for row in expectations(name):
        choice = choose(
            graph,
            available=[uuid[number] for number in row.offered],
            free=[uuid[number] for number in row.free],
            size=row.size,
        )
        assert choice.chosen == tuple(uuid[number] for number in row.chosen), row


@pytest.mark.parametrize("name", made_names())
def test_the_tree_says_of_gpus_what_nvml_says(name: str) -> None:
    """`level` of the made nvml.json and PciTree were written apart."""
    machine = read_recorded(FOLDER / name)
    tree = PciTree(machine)
    levels = {pair: tree.level(*pair) for pair in machine.levels}
    assert Level.UNKNOWN not in levels.values()
    assert levels == machine.levels
