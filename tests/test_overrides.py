"""What the operator states by PCI address: in force everywhere, marked, and said from what."""

from __future__ import annotations

from pathlib import Path

import pytest

from rte.__main__ import main
from rte.config import ConfigError, load
from rte.discovery.overrides import Overrides, overridden
from rte.graph.build import build
from rte.graph.groups import groups
from rte.model import Level, Machine, NumaId, NumaSource, PciAddress, pci_address
from rte.sources import parse_source, read_source
from rte.view.document import document
from rte.view.text import text
from tests.corpus import xml_files

MACHINES = Path(__file__).parent / "machines"


def recorded(name: str) -> Machine:
    return read_source(MACHINES / name)


def gpu(machine: Machine, number: int) -> PciAddress:
    return next(gpu.pci for gpu in machine.gpus if gpu.number == number)


def shown(machine: Machine) -> str:
    graph = build(machine)
    return text(graph, groups(graph))


def test_without_overrides_nothing_changes() -> None:
    machine = recorded("pcie-a100-pairs")
    assert overridden(machine, None) is machine
    assert overridden(machine, Overrides()) is machine
    elsewhere = pci_address("abcd:ef:00.0")
    foreign = Overrides(
        numa={elsewhere: NumaId(1)},
        absent_links=((elsewhere, gpu(machine, 0)),),
        homes={elsewhere: gpu(machine, 0)},
    )
    assert overridden(machine, foreign) == machine


def test_a_link_that_does_not_exist_joins_nobody() -> None:
    machine = recorded("pcie-a100-pairs")  # 0-2, 1-3, 4-6, 5-7
    pair = gpu(machine, 2), gpu(machine, 0)
    changed = overridden(machine, Overrides(absent_links=(pair,)))
    graph = build(changed)
    assert graph.lanes[0][2] == graph.lanes[2][0] == 0
    assert graph.suspects == 0
    assert [len(g.gpus) for g in groups(graph)] == [2, 2, 2]
    assert changed.overridden == ("gpu-2 and gpu-0: 24 ends of NVLinks left out by nvlinks.absent",)
    assert "Overridden\n  gpu-2 and gpu-0: 24 ends" in shown(changed)
    assert document(graph, ())["overridden"] == list(changed.overridden)


def test_a_link_to_a_switch_can_be_absent_and_one_that_nobody_has_is_said() -> None:
    machine = recorded("hgx-h100-oci")
    first = machine.gpus[0]
    switch = next(end.remote for end in first.links if end.remote)
    lanes = sum(end.lanes for end in first.links)
    less = overridden(machine, Overrides(absent_links=((first.pci, switch),)))
    assert sum(end.lanes for end in less.gpus[0].links) < lanes
    assert less.gpus[1] == machine.gpus[1]
    joined = overridden(machine, Overrides(absent_links=((first.pci, gpu(machine, 1)),)))
    assert joined.gpus == machine.gpus
    assert "names no NVLink that either end has" in joined.overridden[0]


def test_a_nic_has_the_home_that_is_stated() -> None:
    machine = recorded("vm-all-minus-one")
    nic = next(nic.pci for nic in machine.nics if nic.rdma)
    assert nic is not None
    near = gpu(machine, 3)
    before = build(machine)
    assert before.relation(near, nic) != Level.PIX
    changed = overridden(machine, Overrides(homes={nic: near}, numa={near: NumaId(0)}))
    graph = build(changed)
    assert graph.relation(near, nic) in (Level.PIX, Level.PHB)
    device = graph.tree.devices[nic]
    assert (device.numa, device.numa_from) == (NumaId(0), NumaSource.OVERRIDE)
    assert any(f"beside {near} by nics.homes (was below" in said for said in changed.overridden)
    assert "NUMA node by override" in shown(changed)


def test_a_nic_moves_below_a_switch_and_counts_as_its_gpus() -> None:
    machine = recorded("hgx-h100-oci")
    front = next(nic for nic in machine.nics if nic.rdma == ("mlx5_2",))
    assert front.pci is not None
    switch = pci_address("0000:08:00.0")
    changed = overridden(machine, Overrides(homes={front.pci: switch}))
    graph = build(changed)
    assert graph.relation(gpu(machine, 0), front.pci) >= Level.PXB
    assert build(machine).relation(gpu(machine, 0), front.pci) == Level.NODE
    assert any(f"below {switch} by nics.homes" in said for said in changed.overridden)


@pytest.mark.parametrize(
    ("home", "words"),
    [
        ("abcd:00:00.0", "which this machine does not have"),
        ("0000:0c:00.0", "which hangs from it"),
    ],
)
def test_a_home_that_cannot_be_is_said_and_changes_nothing(home: str, words: str) -> None:
    machine = parse_source(xml_files()["nccl/oci-H100-topology.xml"], "dump")
    nic = pci_address("0000:0c:00.0")
    changed = overridden(machine, Overrides(homes={nic: pci_address(home)}))
    assert changed.pci == machine.pci
    assert words in changed.overridden[0]


def test_a_switchs_node_is_that_of_all_below_it_that_have_none() -> None:
    dump = xml_files()["nccl/oci-H100-topology.xml"].replace(b'numaid="0"', b'numaid="-1"')
    machine = parse_source(dump, "dump")
    switch = pci_address("0000:08:00.0")
    changed = overridden(machine, Overrides(numa={switch: NumaId(5)}))
    assert build(changed).numa[0] == 5
    assert changed.overridden == ("0000:08:00.0: NUMA node 5 by numa.overrides (was none)",)
    # A device whose source says a node keeps it.
    stated = overridden(
        parse_source(xml_files()["nccl/oci-H100-topology.xml"], "dump"),
        Overrides(numa={switch: NumaId(5)}),
    )
    assert build(stated).numa[0] == 0


CONFIGURATION = """\
numa:
  overrides: {"0000:18:00.0": 1}
nvlinks:
  absent: [["0000:18:00.0", "0000:3a:00.0"]]
nics:
  homes: {"0000:3c:00.0": "0000:18:00.0"}
"""


def test_the_configuration_is_in_force_in_show_and_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rte.yaml"
    machine = recorded("pcie-a100-pairs")
    nic = next(nic.pci for nic in machine.nics if nic.rdma)
    file.write_text(CONFIGURATION.replace("0000:3c:00.0", str(nic)))
    arguments = ["--config", str(file), str(MACHINES / "pcie-a100-pairs")]
    assert main(["show", *arguments]) == 0
    said = capsys.readouterr().out
    assert "0000:18:00.0: NUMA node 1 by numa.overrides (was 0, from sysfs)" in said
    assert "gpu-0 and gpu-2: 24 ends of NVLinks left out" in said
    assert "beside 0000:18:00.0 by nics.homes" in said
    assert main(["choose", "--size", "2", "--required", "0", *arguments]) == 0
    assert "linked       no" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ('nvlinks: {absent: [["0000:18:00.0", "there"]]}', "nvlinks.absent"),
        ('nvlinks: {absent: [["0000:18:00.0"]]}', "nvlinks.absent"),
        ('nics: {homes: {"0000:18:00.0": "switch"}}', "nics.homes"),
        ('nics: {homes: {"eth0": "0000:18:00.0"}}', "nics.homes"),
    ],
)
def test_what_is_no_address_is_refused_by_its_key(tmp_path: Path, said: str, key: str) -> None:
    file = tmp_path / "rte.yaml"
    file.write_text(said)
    with pytest.raises(ConfigError) as refused:
        load(file=file, environ={})
    assert refused.value.key.startswith(key)
