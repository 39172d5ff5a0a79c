"""NCCL's topology files, as it dumps them and as clouds write them, read and written."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rte.__main__ import main
from rte.graph.build import Graph, build
from rte.graph.groups import groups
from rte.model import CpuId, Level, LinkPeer, Machine
from rte.sources import SourceError, parse_source, read_source
from rte.view.nccl import NotForNccl, nccl
from rte.view.relations import relations
from tests.corpus import matrices, xml_files
from tests.graphs import random_machine

MACHINES = Path(__file__).parent / "machines"


def read(body: str) -> Machine:
    return parse_source(f"<system version='1'>{body}</system>".encode(), "topo.xml")


def gpu(bus: str, inner: str = "", **words: str) -> str:
    said = {"class": "0x030200", "vendor": "0x10de", "device": "0x2330", **words}
    attributes = "".join(f" {name}='{value}'" for name, value in said.items())
    return f"<pci busid='{bus}'{attributes}><gpu dev='0' sm='90'>{inner}</gpu></pci>"


def one(inner: str, **words: str) -> str:
    return f"<cpu numaid='0'>{gpu('0000:01:00.0', inner, **words)}</cpu>"


# Reading


def test_dump_of_an_hgx_h100_has_all_that_the_sysfs_of_its_kind_has() -> None:
    """The recorded machine was made from the same dump by another program."""
    dumped = build(parse_source(xml_files()["nccl/oci-H100-topology.xml"], "dump"))
    recorded = build(read_source(MACHINES / "hgx-h100-oci"))
    assert [g.pci for g in dumped.gpus] == [g.pci for g in recorded.gpus]
    assert dumped.numa == recorded.numa
    assert dumped.lanes == recorded.lanes
    assert dumped.levels[0][1:] == recorded.levels[0][1:]
    for graph in (dumped, recorded):
        assert by_device(graph)["mlx5_0"] == ("PXB", *["NODE"] * 3, *["SYS"] * 4)
        assert by_device(graph)["mlx5_17"] == (*["SYS"] * 4, *["NODE"] * 3, "PXB")
    nodes = {node.id: node.cpus for node in dumped.machine.numa_nodes}
    assert nodes == {node.id: node.cpus for node in recorded.machine.numa_nodes}


def by_device(graph: Graph) -> dict[str, tuple[str, ...]]:
    found = relations(graph)
    at = {name: i for i, name in enumerate(found.names)}
    return {device: tuple(found.matrix[at[name]][: len(graph.gpus)]) for name, device in found.nics}


def test_one_switch_is_pix_and_several_are_pxb() -> None:
    graph = build(parse_source(xml_files()["nccl/oci-oke-BM.GPU4.8.xml"], "dump"))
    assert Counter(graph.levels[0][1:]) == {Level.PXB: 1, Level.SYS: 6}
    nested = build(
        read(
            "<cpu numaid='0'><pci busid='0000:01:00.0' class='0x060400'>"
            f"<pci busid='0000:02:00.0' class='0x060400'>{gpu('0000:03:00.0')}</pci>"
            f"<pci busid='0000:04:00.0' class='0x060400'>{gpu('0000:05:00.0')}</pci>"
            f"{gpu('0000:06:00.0')}</pci>{gpu('0000:07:00.0')}</cpu>"
        )
    )
    assert nested.levels[0][1:] == (Level.PXB, Level.PXB, Level.NODE)


ENDS = {
    "a switch": ("0000:1c:00.0", "0x068000", LinkPeer.SWITCH, "0000:1c:00.0"),
    "a hidden switch": ("fffffff:ffff:ff", "0x068000", LinkPeer.SWITCH, None),
    "a hidden switch, spelled otherwise": ("fffffff:ff:ff.0", "0x068000", LinkPeer.SWITCH, None),
    "a switch without address": ("", "", LinkPeer.SWITCH, None),
    "the other GPU": ("0000:02:00.0", "0x030200", LinkPeer.GPU, "0000:02:00.0"),
    "POWER's NPU": ("0004:00:00.0", "0x068001", LinkPeer.CPU, "0004:00:00.0"),
}


@pytest.mark.parametrize("what", ENDS)
def test_far_end_of_nvlinks(what: str) -> None:
    target, kind, peer, remote = ENDS[what]
    link = f"<nvlink target='{target}' count='4' tclass='{kind}'/>"
    machine = read(f"<cpu numaid='0'>{gpu('0000:01:00.0', link)}{gpu('0000:02:00.0')}</cpu>")
    assert [(e.peer, e.remote, e.lanes) for e in machine.gpus[0].links] == [(peer, remote, 4)]


@pytest.mark.parametrize("target", ["0000:01:00.0", "0000:99:00.0"])
def test_links_to_oneself_or_to_nobody_lead_nowhere(target: str) -> None:
    link = f"<nvlink target='{target}' count='12' tclass='0x030200'/>"
    machine = read(one(link))
    assert machine.gpus[0].links == ()
    assert any("12 NVLinks lead to" in said for said in machine.unknown)


@pytest.mark.parametrize(("sm", "speed"), [("60", 20_000), ("80", 25_000), ("100", 50_000)])
def test_lanes_are_as_fast_as_their_generation(sm: str, speed: int) -> None:
    link = "<nvlink target='fffffff:ffff:ff' count='2' tclass='0x068000'/>"
    body = gpu("0000:01:00.0", link).replace("sm='90'", f"sm='{sm}'")
    assert read(f"<cpu numaid='0'>{body}</cpu>").gpus[0].links[0].lane_megabytes_per_s == speed


def test_grace_reaches_its_cpu_by_c2c() -> None:
    machine = read(one("<c2c bw='44712' count='10'/>"))
    (end,) = machine.gpus[0].links
    assert (end.peer, end.lanes, end.lane_megabytes_per_s) == (LinkPeer.CPU, 10, 44_712)


def test_parts_of_a_gpu_are_one_gpu() -> None:
    """Vera Rubin's dumps have a <gpu> for each part that CUDA shows."""
    link = "<nvlink target='fffffff:ff:ff.0' count='36' tclass='0x068000'/>"
    two = gpu("0000:01:00.0", link).replace(
        "</gpu>", f"</gpu><gpu dev='0' mlopart='1'>{link}</gpu>"
    )
    machine = read(f"<cpu numaid='0'>{two}</cpu>")
    assert [sum(end.lanes for end in g.links) for g in machine.gpus] == [36]
    assert any("mlopart" in said for said in machine.unknown)


def test_a_nic_that_is_listed_below_each_cpu_is_one() -> None:
    nic = "<nic><net name='eth0' dev='0' speed='10000' port='0'/></nic>"
    machine = read(f"<cpu numaid='0' affinity='0xff'>{nic}</cpu><cpu numaid='1'>{nic}</cpu>")
    assert [one.name for one in machine.nics] == ["eth0"]
    assert machine.numa_nodes[0].cpus == tuple(range(8))


def test_a_file_made_by_hand_says_little_and_what_it_does_not_say_is_said() -> None:
    flat = parse_source(xml_files()["nccl/azure-ndv4-topo.xml"], "flat")
    graph = build(flat)
    assert [gpu.pci[:4] for gpu in graph.gpus] == [
        *("0001", "0002", "0003", "0004"),
        *("000b", "000c", "000d", "000e"),
    ]
    assert graph.levels[0][1] == Level.PIX
    assert not groups(graph)
    said = "\n".join(flat.unknown)
    for words in ("makers of some GPUs", "NVLinks", "names and kinds of some NICs"):
        assert words in said
    bare = parse_source(xml_files()["nccl/aws-g5.48xl-topo.xml"], "bare")
    assert bare.gpus == ()
    assert any("what 9 functions are" in said for said in bare.unknown)


def test_a_vm_without_numa_nodes_has_unknown_ones() -> None:
    machine = read(f"<cpu numaid='-1'>{gpu('0000:01:00.0')}{gpu('10000:02:00.0')}</cpu>")
    graph = build(machine)
    assert graph.numa == (None, None)
    assert graph.levels[0][1] == Level.UNKNOWN
    assert [gpu.pci for gpu in machine.gpus] == ["0000:01:00.0", "10000:02:00.0"]


def test_empty_speeds_are_unknown_and_not_zero() -> None:
    machine = read(
        f"<cpu numaid='0'>{gpu('0000:01:00.0', link_speed='', link_width='0')}"
        f"{gpu('0000:02:00.0', link_speed='16.0 GT/s PCIe', link_width='16')}</cpu>"
    )
    assert [device.link is None for device in machine.pci] == [True, False]


def test_a_nic_without_pci_is_nowhere_in_particular() -> None:
    machine = parse_source(xml_files()["nccl/azure-ncv4-topo.xml"], "vm")
    (nic,) = machine.nics
    assert (nic.pci, nic.netdevs, nic.kind, nic.numa) == (None, ("eth0",), "virtual", None)


REFUSED = {
    "AMD's links": (
        one("<xgmi target='0000:02:00.0'/>"),
        "AMD GPUs",
    ),
    "AMD's generation": (
        "<cpu numaid='0'><pci busid='0000:1d:00.0' class='0x038000'><gpu dev='0' sm='64' "
        "gcn='906'/></pci></cpu>",
        "AMD GPUs",
    ),
    "an AMD GPU": (one("", vendor="0x1002"), "vendor 0x1002"),
    "an address": (f"<cpu numaid='0'>{gpu('somewhere')}</cpu>", "busid 'somewhere': expected"),
    "an address twice": (
        f"<cpu numaid='0'>{gpu('0000:01:00.0')}{gpu('0000:01:00.0')}</cpu>",
        "0000:01:00.0 is there twice",
    ),
    "a NUMA node twice": ("<cpu numaid='0'/><cpu numaid='0'/>", "two <cpu> with numaid 0"),
    "a number": ("<cpu numaid='zero'/>", "numaid 'zero': expected a number"),
    "a mask": ("<cpu numaid='0' affinity='0-3'/>", "affinity '0-3': expected hexadecimal"),
    "lanes": (
        one("<nvlink target='' count='99'/>"),
        "count 99: expected 1 to 36",
    ),
    "several hosts": (
        "<cpu numaid='0' host_hash='0x1'/><cpu numaid='0' host_hash='0x2'/>",
        "CPUs of 2 hosts",
    ),
    "nothing": ("", "a <system> without <cpu> and <pci>"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_named_with_its_line(what: str) -> None:
    body, words = REFUSED[what]
    with pytest.raises(SourceError) as refused:
        read(body)
    assert words in str(refused.value)
    assert str(refused.value).startswith("topo.xml: ")


# Writing


def gpu_nic_relations(graph: Graph) -> dict[tuple[str, str], str]:
    """Between two GPUs, and between a GPU and an RDMA device."""
    found = relations(graph)
    device = dict(found.nics)
    names = [device.get(n, gpu.pci) for n, gpu in zip(found.names, graph.gpus, strict=False)]
    names += [device[n] for n in found.names[len(graph.gpus) :]]
    return {
        (a, b): found.matrix[i][j]
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i < len(graph.gpus) and i != j
    }


def agreed(cells: dict[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """NCCL gives up on a link that only one end has, so the smaller word of the two is written."""
    found = dict(cells)
    for (a, b), cell in cells.items():
        back = cells.get((b, a), cell)
        if cell.startswith("NV") and (not back.startswith("NV") or int(back[2:]) < int(cell[2:])):
            found[a, b] = back
    return found


NO_MACHINE = {"nccl/azure-ncv4-graph.xml", "nccl/superbench-dtk26.04-topo-mapping.xml"}
DUMPS = sorted({name for name in xml_files() if name.startswith("nccl/")} - NO_MACHINE)
RECORDED = sorted(path.parent.name for path in MACHINES.glob("*/sys.txt"))
# NCCL does not tell host bridges apart, and knows nothing of devices without a NUMA node.
LOST = {"PHB": "NODE"}
LOST_WITHOUT_NODES = {"PHB": "N/A"}


@pytest.mark.parametrize("name", DUMPS)
def test_file_that_was_read_is_written_as_one_that_reads_alike(name: str) -> None:
    first = build(parse_source(xml_files()[name], name))
    written = nccl(first)
    again = build(parse_source(written.encode(), "written"))
    assert gpu_nic_relations(again) == gpu_nic_relations(first)
    assert again.machine.numa_nodes == first.machine.numa_nodes
    assert nccl(again) == written


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_machine_reads_back_as_the_same_relations(name: str) -> None:
    first = build(read_source(MACHINES / name))
    again = build(parse_source(nccl(first).encode(), "written"))
    shown = set(gpu_nic_relations(again))
    lost = LOST_WITHOUT_NODES if name == "vm-all-minus-one" else LOST
    expected = {
        pair: lost.get(cell, cell)
        for pair, cell in agreed(gpu_nic_relations(first)).items()
        if pair in shown
    }
    assert gpu_nic_relations(again) == expected
    assert {g.pci for g in again.gpus} >= {g.pci for g in first.gpus}


@given(st.randoms(use_true_random=False))
def test_any_machine_can_be_written_and_read(dice: Random) -> None:
    first = build(random_machine(dice))
    if not first.gpus:
        return
    again = build(parse_source(nccl(first).encode(), "written"))
    bridged = {
        pair: cell
        for pair, cell in agreed(gpu_nic_relations(first)).items()
        if cell.startswith("NV") and first.machine.levels == {}
    }
    fabrics = any(gpu.fabric for gpu in first.gpus)  # NCCL's file has no word for them
    if not fabrics and not any(gpu.lost for gpu in first.machine.gpus):
        assert {p: c for p, c in gpu_nic_relations(again).items() if p in bridged} == bridged


def test_a_link_that_one_end_does_not_have_is_not_written() -> None:
    graph = build(read_source(MACHINES / "asymmetric-link"))
    written = nccl(graph)
    assert written.count('count="6" tclass="0x030200"') == 4  # 0-1 and 0-3, an end each
    again = build(parse_source(written.encode(), "written"))
    assert again.suspects == 0


def test_nccls_limit_of_elements_is_kept() -> None:
    """256 in all, of which NCCL needs some itself; switches are one to it."""
    big = build(read_source(MACHINES / "dgx2-v100"))
    assert nccl(big).count("<nvlink") == 96
    machine = big.machine
    nics = [
        replace(nic, rdma=tuple(f"{nic.rdma[0]}_{n}" for n in range(8))) if nic.rdma else nic
        for nic in machine.nics
    ]
    bigger = nccl(build(replace(machine, nics=tuple(nics))))
    assert bigger.count("<nvlink") == 16
    assert bigger.count('target="fffffff:ffff:ff" count="6"') == 16
    nics = [
        replace(nic, rdma=tuple(f"{nic.rdma[0]}_{n}" for n in range(40))) if nic.rdma else nic
        for nic in machine.nics
    ]
    with pytest.raises(NotForNccl, match="NCCL reads at most 256"):
        nccl(build(replace(machine, nics=tuple(nics))))


def test_names_and_masks_that_nccl_cannot_read_are_left_out() -> None:
    machine = read_source(MACHINES / "pcie-a100-pairs")
    nics = tuple(replace(nic, rdma=('mlx5_0"><gpu', "mlx5_1")) for nic in machine.nics)
    nodes = tuple(
        replace(node, cpus=(*node.cpus, CpuId(4000))) if node.id == 0 else node
        for node in machine.numa_nodes
    )
    written = nccl(build(replace(machine, nics=nics, numa_nodes=nodes)))
    assert "mlx5_0" not in written
    assert 'net name="mlx5_1"' in written
    assert "affinity" not in written
    assert all(len(value) < 256 for value in re.findall('"([^"]*)"', written))


def test_a_matrix_has_no_addresses_for_nccl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "T4_g2n0_vllm-13535.txt"
    with pytest.raises(NotForNccl):
        nccl(build(parse_source(matrices()[name].encode(), name)))
    (tmp_path / name).write_text(matrices()[name])
    assert main(["show", str(tmp_path / name), "-o", "nccl"]) == 2
    assert "this source has none" in capsys.readouterr().err
