"""`rte show` and `rte choose`: the real commands on recorded machines."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from rte.__main__ import main
from rte.commands.show import json_text
from rte.graph.build import build
from rte.graph.choose import choose
from rte.graph.groups import groups
from rte.model import NumaSource
from rte.sources.recorded import unpack
from rte.view.document import document
from rte.view.reason import reason
from rte.view.smi import smi
from rte.view.text import WIDTH, text
from rte.view.words import columns, size, speed
from tests.fake_nvml import fake_nvml
from tests.graphs import meshed, random_machine
from tests.machines.description import FOLDER

PAIRS = str(FOLDER / "pcie-a100-pairs")
MIG = str(FOLDER / "mig-half")


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(words) == status
    out, err = capsys.readouterr()
    return err if status else out


def chosen(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(capsys, "choose", *words, "-o", "json"))
    return found


def numbers(source: str, ids: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    shown = json.loads(said(capsys, "show", source, "-o", "json"))
    name = {gpu["uuid"]: gpu["id"] for gpu in shown["gpus"]}
    name |= {slice["id"]: gpu["id"] for gpu in shown["gpus"] for slice in gpu["mig"]}
    return [name[id.partition("::")[0]] for id in ids]


def test_yaml_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert yaml.safe_load(said(capsys, "show", PAIRS, "-o", "yaml")) == json.loads(
        said(capsys, "show", PAIRS, "-o", "json")
    )


def test_text_shows_the_tree_the_groups_and_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "show", PAIRS).splitlines()
    assert lines[0].startswith("8x NVIDIA A100 80GB PCIe (80 GiB), 2 NUMA nodes with CPUs, 2 NICs")
    at = lines.index("├─ switch 0000:16:00.0")
    assert lines[at + 1].startswith("│  ├─ gpu-0   0000:18:00.0  group-0  PCIe 31.5 GB/s")
    assert lines[at + 2].startswith("│  └─ gpu-1 ")
    assert "  group-0  mesh of 2  gpu 0,2  12 lanes a linked pair, 300 GB/s" in lines
    assert "GPU0  X     PIX   NV12  NODE  SYS   SYS   SYS   SYS" in lines
    assert "GPU4  SYS     NODE" in lines


def test_lost_gpus_keep_their_place_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "show", str(FOLDER / "one-lost"))
    assert "7x NVIDIA H100 80GB HBM3 (79.6 GiB), 1 lost" in shown
    assert "gpu-3   0000:5b:00.0           LOST: GPU is lost (NVML 15)" in shown


def test_where_a_numa_node_was_learnt_is_marked() -> None:
    machine = meshed(2)
    sources = (NumaSource.OVERRIDE, NumaSource.LOCAL_CPUS)
    pci = tuple(
        replace(device, numa_from=source)
        for device, source in zip(machine.pci, sources, strict=True)
    )
    graph = build(replace(machine, pci=pci))
    shown = text(graph, groups(graph))
    assert "gpu-0  0000:01:00.0  PCIe 31.5 GB/s, NUMA node by override" in shown
    assert "gpu-1  0001:01:00.0  PCIe 31.5 GB/s, NUMA node inferred from local_cpulist" in shown


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "nowhere: cannot be read: No such file or directory"),
        (__file__, "test_show.py: no row such as"),
        (str(Path(__file__).parent), "sys.txt"),
    ],
)
def test_a_source_that_is_none_says_so(
    source: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in said(capsys, "show", source, status=2)
    assert words in said(capsys, "choose", source, "--size", "1", status=2)


def test_this_node_without_a_driver_is_what_the_kernel_knows(tmp_path: Path) -> None:
    """The worker finds an empty library: whatever the node of the test has, NVML is not there."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    command = [sys.executable, "-m", "rte", "show", "-o", "json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={"LD_LIBRARY_PATH": str(tmp_path), "PATH": ""},
        cwd=Path(__file__).parent.parent,
    )
    shown = json.loads(done.stdout)
    assert shown["driver"] is None
    assert shown["numa_nodes"]
    assert shown["unknown"]
    assert "rte: nothing from the NVIDIA driver: " in done.stderr


def test_this_node_without_sysfs_is_an_error_that_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = said(capsys, "show", "--sysfs", str(tmp_path / "none"), status=2)
    assert str(tmp_path / "none") in error
    assert "--sysfs" in error


# choose


def test_reason_names_the_set_the_runner_up_and_the_deciding_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = said(capsys, "choose", PAIRS, "--size", "1", "--available", "1-7").splitlines()
    assert lines[0] == "gpu-2   (exactly, of 7 sets)"
    assert lines[3].split() == ["chosen", "runner-up:", "gpu-1"]
    assert [line for line in lines if line.startswith("> ")] == [
        "> leftover     NVLink 900 GB/s, NUMA 4,2, switches 2,2,1,1  "
        "NVLink 600 GB/s, NUMA 4,2, switches 2,2,2,0"
    ]
    assert lines[-2].startswith("Decided by leftover: ")


def test_json_has_the_contract_s_fields(capsys: pytest.CaptureFixture[str]) -> None:
    found = chosen(capsys, PAIRS, "--size", "2", "--available", "0-3")
    assert numbers(PAIRS, found["chosen"], capsys) == ["gpu-0", "gpu-2"]
    assert found["exact"] is True
    assert found["considered"] == 6
    assert found["decided_by"] == "order"
    assert found["preference"]["bottleneck"] == {
        "nvlink_megabytes_per_s": 300_000,
        "level": 2,
        "link_megabytes_per_s": 31_507,
    }
    assert numbers(PAIRS, found["runner_up"]["chosen"], capsys) == ["gpu-1", "gpu-3"]
    assert found["runner_up"]["preference"].keys() == found["preference"].keys()


@pytest.mark.parametrize(
    "ids",
    [
        "1,3,4",
        "1 3-4",
        "gpu-1,gpu-3,gpu-4",
        "0000:19:00.0,0000:3b:00.0,00000000:9A:00.0",
    ],
)
def test_ids_may_be_written_in_many_ways(ids: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = chosen(capsys, PAIRS, "--size", "2", "--available", ids)
    assert numbers(PAIRS, found["chosen"], capsys) == ["gpu-1", "gpu-3"]


def test_uuids_go_in_as_they_come_out(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(said(capsys, "show", PAIRS, "-o", "json"))
    ids = [gpu["uuid"] for gpu in shown["gpus"]]
    found = chosen(
        capsys, PAIRS, "--size=3", f"--available={','.join(ids[:4])}", f"--required={ids[3]}"
    )
    assert numbers(PAIRS, found["chosen"], capsys) == ["gpu-0", "gpu-1", "gpu-3"]


def test_what_is_free_elsewhere_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """0 or 1 of socket 0: 2 is free as well, though not offered, and 0 is its partner."""
    found = chosen(capsys, PAIRS, "--size", "1", "--available", "0,1", "--free", "2,4-7")
    assert numbers(PAIRS, found["chosen"], capsys) == ["gpu-1"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--size", "0"], "--size 0: expected at least 1"),
        (["--size", "1", "--available", "9"], "'9': no GPU or MIG slice of this machine"),
        (["--size", "1", "--required", "x"], "'x': no GPU or MIG slice of this machine"),
        (["--size", "1", "--free", "0000:00:00.0"], "'0000:00:00.0': no GPU or MIG slice"),
    ],
)
def test_wrong_words_are_named(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error in said(capsys, "choose", PAIRS, *words, status=2)


def test_a_lost_gpu_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["choose", str(FOLDER / "one-lost"), "--size", "1", "--available", "3"]
    assert "and lost are gpu-3" in said(capsys, *words, status=2)


def test_mig_slices_are_chosen_gpu_by_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(said(capsys, "show", MIG, "-o", "json"))
    small = [s["id"] for g in shown["gpus"] for s in g["mig"] if s["profile"] == "1g.10gb"]
    by_gpu = numbers(MIG, small, capsys)
    assert by_gpu == ["gpu-2"] * 7 + ["gpu-3"]
    words = [MIG, "--size", "2", "--available", ",".join(small)]
    assert numbers(MIG, chosen(capsys, *words)["chosen"], capsys) == ["gpu-2", "gpu-3"]
    packed = chosen(capsys, *words, "--sharing", "packed")
    assert numbers(MIG, packed["chosen"], capsys) == ["gpu-2", "gpu-2"]


def test_replicas_are_named_by_their_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    replicas = "gpu-0::0,gpu-0::1,gpu-1::0,gpu-2::0"
    found = chosen(capsys, PAIRS, "--size", "2", "--available", replicas)
    assert numbers(PAIRS, found["chosen"], capsys) == ["gpu-0", "gpu-2"]
    assert all("::" in id for id in found["chosen"])


def test_a_choice_without_gpus_says_so() -> None:
    graph = build(meshed(1))
    assert reason(graph, choose(graph, available=[], size=1)) == "nothing to choose\n"
    alone = reason(graph, choose(graph, available=graph.ids, size=1, explain=True))
    assert alone.endswith("There is no other set.\n")


def test_fewer_gpus_than_asked_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "choose", str(FOLDER / "dgx1-v100"), "--size", "9")
    assert "Asked for 9: no more than these are offered.\n" in shown
    assert "e+" not in shown
    assert "Asked for" not in said(capsys, "choose", str(FOLDER / "dgx1-v100"), "--size", "8")


@pytest.mark.parametrize(
    ("megabytes_per_s", "words"),
    [(0, "0 GB/s"), (31_508, "31.5 GB/s"), (999_700, "1000 GB/s"), (1_234_500, "1234 GB/s")],
)
def test_speed(megabytes_per_s: int, words: str) -> None:
    assert speed(megabytes_per_s) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (2 << 20, "2 MiB"), (85_520_809_984, "79.6 GiB")],
)
def test_size(count: int, words: str) -> None:
    assert size(count) == words


def test_columns_leave_out_what_is_empty() -> None:
    assert columns([["a", "", "b"], ["long", "", ""]]) == ["a     b", "long"]


# This node: the real worker over a fake driver, and the kernel's files where we say


@pytest.mark.parametrize("name", ["hgx-h100-oci", "mig-half", "one-lost", "gb200-tray"])
def test_this_node_shows_what_its_recording_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unpack(FOLDER / name / "sys.txt", tmp_path)
    for key, value in fake_nvml().env(FOLDER / name).items():
        monkeypatch.setenv(key, value)
    places = ["--sysfs", str(tmp_path / "sys"), "--procfs", str(tmp_path / "proc")]
    live = said(capsys, "show", *places, "-o", "json")
    assert live == (FOLDER / name / "expected" / "show.json").read_text()


def test_overrides_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unpack(FOLDER / "vm-all-minus-one" / "sys.txt", tmp_path)
    for key, value in fake_nvml().env(FOLDER / "vm-all-minus-one").items():
        monkeypatch.setenv(key, value)
    config = tmp_path / "rte.yaml"
    config.write_text(
        "numa: {overrides: {'0000:04:00.0': 1}}\n"
        "groups: {names: {ring-0: ['0000:04:00.0', '0000:06:00.0']}}\n"
    )
    places = ["--sysfs", str(tmp_path / "sys"), "--config", str(config)]
    shown = json.loads(said(capsys, "show", *places, "-o", "json"))
    first = shown["gpus"][0]
    assert (first["numa_node"], first["numa_from"], first["group"]) == (1, "override", "ring-0")
    assert shown["gpus"][2]["numa_node"] is None
    assert [group["name"] for group in shown["groups"]] == ["ring-0", "group-0"]


@pytest.mark.parametrize("seed", range(60))
def test_any_machine_can_be_shown(seed: int) -> None:
    machine = random_machine(Random(seed), most=12)
    graph = build(machine)
    found = groups(graph)
    assert all(len(line) <= WIDTH for line in text(graph, found).splitlines())
    shown = json.loads(json_text(document(graph, found)))
    assert len(shown["gpus"]) == len(machine.gpus)
    cells = {cell for row in shown["relations"]["matrix"] for cell in row}
    assert cells <= {"X", "PIX", "PXB", "PHB", "NODE", "SYS", "N/A"} | {
        f"NV{n}" for n in range(1, 20)
    }
    rows = smi(graph).partition("\n\n")[0].splitlines()
    assert len(rows) == 1 + len(shown["relations"]["names"])
