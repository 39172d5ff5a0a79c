"""hwloc's XML of three versions: each machine must be what its owners know it to be."""

from __future__ import annotations

from collections import Counter

import pytest

from rte.graph.build import build
from rte.graph.groups import groups
from rte.model import LinkPeer, Machine
from rte.sources import SourceError, parse_source
from tests.corpus import xml_files


def read(name: str) -> Machine:
    return parse_source(xml_files()[f"hwloc/{name}"], name)


def test_dgx_2_of_version_3_has_sixteen_gpus_on_switches() -> None:
    machine = read("nvidiaDGX2.xml")
    graph = build(machine)
    assert len(machine.gpus) == 16
    assert {gpu.product for gpu in machine.gpus} == {"Tesla V100-SXM3-32GB-H"}
    assert [gpu.index for gpu in machine.gpus] == list(range(16))
    # One lane to each of six switches, also to the one whose ids the kernel could not read.
    assert {
        Counter((e.peer, e.lanes) for e in g.links)[LinkPeer.SWITCH, 1] for g in machine.gpus
    } == {6}
    (group,) = groups(graph)
    assert (group.shape, len(group.gpus)) == ("mesh", 16)
    assert graph.numa == (0,) * 8 + (1,) * 8
    assert [level.name for level in graph.levels[0][1:9]] == [
        *("PIX", "PXB", "PXB"),
        *["NODE"] * 4,
        "SYS",
    ]
    assert sum(device.is_nvswitch for device in machine.pci) == 12


def test_h100_of_version_2_under_sub_numa_clusters() -> None:
    machine = read("fluxcore-ipa20.xml")
    graph = build(machine)
    assert len(machine.numa_nodes) == 8
    assert graph.numa == (3, 1, 7, 5)
    assert graph.lanes[0] == (0, 6, 6, 6)
    assert graph.closeness[0][1].nvlink_megabytes_per_s == 150_000
    assert machine.numa_nodes[0].distance == dict(
        zip(range(8), (10, 12, 12, 12, 21, 21, 21, 21), strict=True)
    )
    assert machine.numa_nodes[0].cpus == (*range(14), *range(112, 126))
    assert {nic.rdma for nic in machine.nics if nic.rdma} == {(f"mlx5_{n}",) for n in range(4)}
    assert all(gpu.uuid and gpu.uuid.startswith("GPU-") for gpu in machine.gpus)


def test_power8_links_to_gpus_and_to_the_cpu() -> None:
    machine = read("power8gpudistances.xml")
    graph = build(machine)
    assert [g.shape for g in groups(graph)] == ["mesh", "mesh"]
    assert [(e.peer, e.lanes, e.lane_megabytes_per_s) for e in machine.gpus[0].links] == [
        (LinkPeer.CPU, 2, 20_000),
        (LinkPeer.GPU, 2, 20_000),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "mpibind-coral-lassen-hwloc1.xml",
        "mpibind-coral-lassen.xml",
        "fluxcore-sierra.xml",
    ],
)
def test_power9_has_four_gpus_and_its_gpu_memory_bears_no_cpus(name: str) -> None:
    machine = read(name)
    assert build(machine).numa == (0, 0, 8, 8)
    assert [node.id for node in machine.numa_nodes if node.cpus] == [0, 8]
    assert any("NVLinks: hwloc wrote none" in said for said in machine.unknown)


@pytest.mark.parametrize(
    ("name", "bearing", "memory"),
    [
        ("64intel64-heteromem.xml", [0, 1, 2, 3], [4, 5, 6, 7]),
        ("mpibind-knl-snc4-flat-hwloc1.xml", [0, 1, 2, 3], [4, 5, 6, 7]),
        ("mpibind-knl-quad-flat-hwloc1.xml", [0], [1]),
    ],
)
def test_nodes_of_memory_alone_have_no_cpus(
    name: str, bearing: list[int], memory: list[int]
) -> None:
    nodes = read(name).numa_nodes
    assert [node.id for node in nodes if node.cpus] == bearing
    assert [node.id for node in nodes if not node.cpus and node.memory_bytes] == memory
    cpus = [cpu for node in nodes for cpu in node.cpus]
    assert len(cpus) == len(set(cpus))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mpibind-eas-tioga.xml", 8),
        ("fluxcore-tuo.CPX.xml", 4),
        ("fluxcore-corona.xml", 8),
    ],
)
def test_gpus_of_amd_are_left_out_and_this_is_said(name: str, count: int) -> None:
    machine = read(name)
    assert machine.gpus == ()
    assert machine.nics
    assert any(said.startswith(f"{count} GPUs or accelerators of AMD") for said in machine.unknown)


def test_mixed_makers_keep_nvidias() -> None:
    machine = read("fluxsched-multi_gpu_types-chimera.xml")
    assert [gpu.product for gpu in machine.gpus] == ["GeForce GTX 1070"]
    assert any("of AMD" in said for said in machine.unknown)


def test_a_machine_without_numa_nodes_is_one() -> None:
    (node,) = read("16em64t-4s2c2t.xml").numa_nodes
    assert (node.id, node.cpus) == (0, tuple(range(16)))


def test_relative_distances_of_version_1_are_acpis() -> None:
    nodes = read("mpibind-epyc-corona-hwloc1.xml").numa_nodes
    assert {node.distance[node.id] for node in nodes} == {10}
    assert max(d for node in nodes for d in node.distance.values()) == 32


def test_an_address_that_two_functions_claim_is_repaired_and_said() -> None:
    machine = read("32em64t-2n8c2t-pci-normalio.xml")
    assert "repaired: two functions are called 0000:04:00.0; the second one is left out" in (
        machine.unknown
    )


def document(inner: str, version: str = "2.0", after: str = "") -> Machine:
    text = (
        f'<topology version="{version}"><object type="Machine" cpuset="0x3" nodeset="0x1">'
        f"{inner}</object>{after}</topology>"
    )
    return parse_source(text.encode(), "lstopo.xml")


BRIDGE = '<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-03]">{}</object>'
GPU = (
    '<object type="PCIDev" gp_index="{0}" pci_busid="0000:0{0}:00.0" '
    'pci_type="0302 [10de:2330] [0000:0000] a1 00" pci_link_speed="{1}">'
    '<object type="OSDev" gp_index="1{0}" name="nvml{0}" osdev_type="1"/></object>'
)
NODE = '<object type="NUMANode" os_index="0" cpuset="0x3" nodeset="0x1"/>'


@pytest.mark.parametrize(
    ("speed", "expected"),
    [("15.753846", (8, 16)), ("63.015385", (32, 16)), ("4.000000", (2.5, 16)), ("0.000000", None)],
)
def test_bandwidth_is_the_widest_link_that_has_it(
    speed: str, expected: tuple[float, int] | None
) -> None:
    machine = document(NODE + BRIDGE.format(GPU.format(1, speed)))
    link = machine.pci[0].link
    assert (link and (link.gigatransfers, link.width)) == expected


REFUSED = {
    "two machines": (
        '<topology><object type="Machine"/><object type="Machine"/></topology>',
        "2 objects of type Machine",
    ),
    "an address": (
        "",
        BRIDGE.format(GPU.format(1, "1").replace("0000:01:00.0", "nowhere")),
        "pci_busid 'nowhere'",
    ),
    "a type": ("", BRIDGE.format(GPU.format(1, "1").replace("0302 [", "GPU [")), "pci_type"),
    "a GPU twice": ("", BRIDGE.format(GPU.format(1, "1") * 2), "a second GPU 0000:01:00.0"),
    "a node twice": ("", NODE + NODE, "a second NUMA node 0"),
    "a set": ("", NODE.replace("0x3", "0-3"), "the set '0-3'"),
    "a matrix": (
        '<topology version="2.0"><object type="Machine" cpuset="0x1"/>'
        '<distances2 type="OSDev" name="NVLinkBandwidth"><indexes>1 2</indexes>'
        "<u64values>1 2 3</u64values></distances2></topology>",
        "3 values for 2 objects",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_hwloc_never_writes_is_refused_with_its_line(what: str) -> None:
    *texts, words = REFUSED[what]
    with pytest.raises(SourceError) as refused:
        parse_source(texts[0].encode(), "lstopo.xml") if len(texts) == 1 else document(texts[1])
    assert words in str(refused.value)
    assert str(refused.value).startswith("lstopo.xml: line 1: ")


def test_nvlinks_are_read_by_index_from_the_matrix() -> None:
    matrix = (
        '<distances2 type="OSDev" name="NVLinkBandwidth" indexing="gp"><indexes>11 12</indexes>'
        "<u64values>1000000 100000</u64values><u64values>50000 1000000</u64values></distances2>"
    )
    gpus = BRIDGE.format(GPU.format(1, "1") + GPU.format(2, "1"))
    graph = build(document(NODE + gpus, after=matrix))
    assert graph.lanes == ((0, 4), (2, 0))
    assert graph.suspects == 0b11
