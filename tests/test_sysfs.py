"""Reading /sys: each trap is a test named by what would be wrong."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rte.discovery import assemble
from rte.discovery.sysfs import Host, SysfsError, read_host
from rte.model import Nic, NumaSource, PciAddress, PciDevice, PciLink
from rte.sources.recorded import escape
from tests.sysfs_tree import (
    TWO_NODES,
    bridge,
    function,
    host,
    link,
    netdev,
    nic,
    rdma,
    tree,
)

GPU = "pci0000:37/0000:37:01.0/0000:3b:00.0"


def device(found: Host, address: str) -> PciDevice:
    return next(device for device in found.pci if device.address == address)


def only(nics: tuple[Nic, ...]) -> Nic:
    assert len(nics) == 1, nics
    return nics[0]


# NUMA nodes


def test_distances_belong_to_online_nodes_not_to_ids() -> None:
    found = host(
        """\
        sys/devices/system/node/online = 0,8,250
        sys/devices/system/node/possible = 0-255
        sys/devices/system/node/node0/cpulist = 0-3
        sys/devices/system/node/node0/distance = 10 40 80
        sys/devices/system/node/node8/cpulist = 88-91
        sys/devices/system/node/node8/distance = 40 10 80
        sys/devices/system/node/node250/cpulist =
        sys/devices/system/node/node250/distance = 80 80 10
        """
    )
    assert [node.id for node in found.numa_nodes] == [0, 8, 250]
    assert found.numa_nodes[1].distance == {0: 40, 8: 10, 250: 80}
    assert found.numa_nodes[1].cpus == (88, 89, 90, 91)
    assert found.numa_nodes[2].cpus == ()
    assert not found.problems


def test_cores_are_the_cpus_that_share_one() -> None:
    found = host(
        """\
        sys/devices/system/node/online = 0-2
        sys/devices/system/node/node0/cpulist = 0-1,4-5
        sys/devices/system/node/node1/cpulist = 2-3
        sys/devices/system/node/node2/cpulist = 6-7
        sys/devices/system/cpu/cpu0/topology/thread_siblings_list = 0,4
        sys/devices/system/cpu/cpu1/topology/thread_siblings_list = 1,5
        sys/devices/system/cpu/cpu4/topology/thread_siblings_list = 0,4
        sys/devices/system/cpu/cpu5/topology/thread_siblings_list = 1,5
        sys/devices/system/cpu/cpu2/topology/thread_siblings_list = 2
        sys/devices/system/cpu/cpu3/topology/thread_siblings_list = 3
        """
    )
    assert [node.cores for node in found.numa_nodes] == [((0, 4), (1, 5)), (), ()]
    assert not found.problems


def test_a_node_that_is_offline_is_no_node() -> None:
    found = host(
        """\
        sys/devices/system/node/online = 1
        sys/devices/system/node/possible = 0-1
        sys/devices/system/node/node0/cpulist =
        sys/devices/system/node/node1/cpulist = 1,3,5
        sys/devices/system/node/node1/distance = 21 10
        """
    )
    assert [(node.id, node.cpus, node.distance) for node in found.numa_nodes] == [
        (1, (1, 3, 5), {1: 10})
    ]
    assert not found.problems


def test_memory_and_huge_pages_of_every_size_are_read_also_when_there_are_none() -> None:
    found = host(
        """\
        sys/devices/system/node/online = 0
        sys/devices/system/node/node0/cpulist = 0
        sys/devices/system/node/node0/meminfo = \\nNode 0 MemTotal:   1024 kB\\nNode 0 MemFree: 1 kB
        sys/devices/system/node/node0/hugepages/hugepages-64kB/nr_hugepages = 7
        sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages = 0
        sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages = 4
        """
    )
    (node,) = found.numa_nodes
    assert node.memory_bytes == 1 << 20
    assert node.huge_pages == {64 << 10: 7, 2 << 20: 0, 1 << 30: 4}


def test_gpu_memory_nodes_are_those_that_the_driver_names_and_has_online() -> None:
    found = host(
        """\
        sys/devices/system/node/online = 0-3
        sys/devices/system/node/node0/cpulist = 0-3
        sys/devices/system/node/node1/cpulist =
        sys/devices/system/node/node2/cpulist =
        sys/devices/system/node/node3/cpulist =
        proc/driver/nvidia/gpus/0008:01:00.0/numa_status = Node:      1\\nStatus:    online
        proc/driver/nvidia/gpus/0009:01:00.0/numa_status = Node:      2\\nStatus:    offline
        proc/driver/nvidia/gpus/0018:01:00.0/numa_status = Node:      -1\\nStatus:    disabled
        proc/driver/nvidia/gpus/0019:01:00.0/numa_status = gibberish
        """
    )
    assert [node.gpu for node in found.numa_nodes] == [None, "0008:01:00.0", None, None]
    (problem,) = found.problems
    assert "0019:01:00.0/numa_status: expected a line with Node, read 'gibberish'" in problem


def test_a_kernel_without_numa_is_one_node_with_all_cpus() -> None:
    found = host(
        """\
        sys/devices/system/cpu/online = 0-5
        sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages = 3
        """
    )
    (node,) = found.numa_nodes
    assert (node.id, node.cpus, node.huge_pages) == (0, (0, 1, 2, 3, 4, 5), {2 << 20: 3})


def test_a_tree_without_nodes_and_cpus_is_no_sysfs(tmp_path: Path) -> None:
    with pytest.raises(SysfsError, match="expected NUMA nodes or CPUs, found none") as raised:
        read_host(tmp_path)
    assert raised.value.root == tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(
            "sys/devices/system/node/online = zero",
            "node/online: expected a list of numbers, read 'zero'",
            id="online",
        ),
        pytest.param(
            "sys/devices/system/node/node1/distance = 21",
            "node1/distance: expected 2 distances, one for each online node, read '21'",
            id="distance that is short",
        ),
        pytest.param(
            "sys/devices/system/node/node1/distance = 21 far",
            "node1/distance: expected 2 distances, one for each online node, read '21 far'",
            id="distance that is no number",
        ),
        pytest.param(
            "sys/devices/system/node/node1/cpulist = 4-99999999999",
            "node1/cpulist: expected a list of numbers, read '4-99999999999'",
            id="cpulist without end",
        ),
        pytest.param(
            "sys/devices/system/node/node1/meminfo = Node 1 MemTotal: much kB",
            "node1/meminfo: expected a line with MemTotal, read 'Node 1 MemTotal: much kB'",
            id="meminfo",
        ),
        pytest.param(
            "sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages = some",
            "nr_hugepages: expected an integer, read 'some'",
            id="huge pages",
        ),
    ],
)
def test_what_is_no_number_is_reported_with_its_path_and_the_rest_is_read(
    line: str, expected: str
) -> None:
    path = line.partition(" = ")[0]
    others = [other for other in TWO_NODES.splitlines() if not other.startswith(f"{path} =")]
    found = host(others, [line], function(GPU, numa_node="1"))
    (problem,) = found.problems
    assert problem.endswith(expected)
    assert [node.id for node in found.numa_nodes] == [0, 1]
    assert device(found, "0000:3b:00.0").numa == 1


def test_a_list_may_end_in_a_zero_byte(tmp_path: Path) -> None:
    sys = tree(tmp_path, TWO_NODES)  # Linux 2.6.32
    (sys / "devices/system/node/online").write_bytes(b"0-1\n\0")
    assert len(read_host(sys).numa_nodes) == 2


# PCI functions


def test_parents_and_root_come_from_the_real_path() -> None:
    found = host(
        TWO_NODES,
        bridge("pci0000:37/0000:37:01.0"),
        bridge("pci0000:37/0000:37:01.0/0000:38:00.0"),
        bridge("pci0000:37/0000:37:01.0/0000:38:00.0/0000:39:02.0"),
        function("pci0000:37/0000:37:01.0/0000:38:00.0/0000:39:02.0/0000:3a:00.0"),
    )
    assert [(d.address, d.parent, d.root) for d in found.pci] == [
        ("0000:37:01.0", None, "pci0000:37"),
        ("0000:38:00.0", "0000:37:01.0", "pci0000:37"),
        ("0000:39:02.0", "0000:38:00.0", "pci0000:37"),
        ("0000:3a:00.0", "0000:39:02.0", "pci0000:37"),
    ]
    assert [d.is_bridge for d in found.pci] == [True, True, True, False]


def test_functions_are_in_numerical_order_also_with_long_domains() -> None:
    found = host(
        TWO_NODES,
        function("pci10000:00/10000:00:01.0"),
        function("pciffff:00/ffff:00:01.0"),
        function("pci0002:00/0002:00:01.0"),
    )
    assert [d.address for d in found.pci] == ["0002:00:01.0", "ffff:00:01.0", "10000:00:01.0"]


def test_a_random_32_bit_domain_below_hyper_v_keeps_all_of_its_digits() -> None:
    path = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500/pci3f8cfdd:00/3f8cfdd:00:00.0"
    found = host(TWO_NODES, function(path, numa_node="0"))
    assert [(d.address, d.root, d.parent) for d in found.pci] == [
        ("3f8cfdd:00:00.0", "pci3f8cfdd:00", None)
    ]


def test_functions_behind_vmd_hang_from_the_processors_root_and_have_its_node() -> None:
    controller = "pci0000:16/0000:16:05.5"
    port = f"{controller}/pci10000:00/10000:00:02.0"
    found = host(
        TWO_NODES,
        function(controller, kind="0x010400", vendor="0x8086", numa_node="1"),
        bridge(port, numa_node="-1"),
        function(f"{port}/10000:01:00.0", kind="0x010802", numa_node="-1"),
    )
    behind = device(found, "10000:01:00.0")
    assert (behind.parent, behind.root) == ("10000:00:02.0", "pci0000:16")
    assert (behind.numa, behind.numa_from) == (1, NumaSource.PARENT)
    assert device(found, "10000:00:02.0").parent is None


@pytest.mark.parametrize(
    ("files", "numa", "source"),
    [
        pytest.param({"numa_node": "1"}, 1, NumaSource.SYSFS, id="the kernel says it"),
        pytest.param(
            {"numa_node": "-1", "local_cpulist": "0-7"}, None, None, id="all CPUs are no locality"
        ),
        pytest.param(
            {"numa_node": "-1", "local_cpulist": "4-7"},
            1,
            NumaSource.LOCAL_CPUS,
            id="the CPUs of one node",
        ),
        pytest.param(
            {"numa_node": "-1", "local_cpulist": "5"},
            1,
            NumaSource.LOCAL_CPUS,
            id="a part of one node",
        ),
        pytest.param(
            {"numa_node": "-1", "local_cpulist": "3-4"}, None, None, id="CPUs of two nodes"
        ),
        pytest.param({"numa_node": "-1", "local_cpulist": ""}, None, None, id="no CPU"),
        pytest.param({}, None, None, id="neither file"),
    ],
)
def test_numa_node_of_a_function(
    files: dict[str, str], numa: int | None, source: NumaSource | None
) -> None:
    found = device(host(TWO_NODES, function(GPU, **files)), "0000:3b:00.0")
    assert (found.numa, found.numa_from) == (numa, source)


def test_all_cpus_of_a_single_node_are_no_locality_either() -> None:
    one_node = ["sys/devices/system/node/online = 0", "sys/devices/system/node/node0/cpulist = 0-7"]
    found = host(one_node, function(GPU, numa_node="-1", local_cpulist="0-7"))
    assert device(found, "0000:3b:00.0").numa is None


def test_a_bridge_above_knows_the_node_better_than_local_cpus() -> None:
    found = host(
        TWO_NODES,
        bridge("pci0000:37/0000:37:01.0", numa_node="0"),
        function(GPU, numa_node="-1", local_cpulist="4-7"),
    )
    gpu = device(found, "0000:3b:00.0")
    assert (gpu.numa, gpu.numa_from) == (0, NumaSource.PARENT)


def test_a_node_that_is_not_online_is_reported_and_not_believed() -> None:
    found = host(TWO_NODES, function(GPU, numa_node="70", local_cpulist="0-3"))
    gpu = device(found, "0000:3b:00.0")
    assert (gpu.numa, gpu.numa_from) == (0, NumaSource.LOCAL_CPUS)
    (problem,) = found.problems
    assert problem.endswith("0000:3b:00.0/numa_node: expected an online NUMA node, read '70'")


def test_a_numa_node_that_is_no_number_is_reported_and_the_function_stays() -> None:
    found = host(TWO_NODES, function(GPU, numa_node="x"))
    assert device(found, "0000:3b:00.0").numa is None
    (problem,) = found.problems
    assert problem.endswith("0000:3b:00.0/numa_node: expected an integer, read 'x'")


def link_of(gpu: dict[str, str], port: dict[str, str] | None = None) -> PciLink | None:
    above = bridge("pci0000:37/0000:37:01.0", **port) if port else []
    return device(host(TWO_NODES, above, function(GPU, **gpu)), "0000:3b:00.0").link


def speeds(speed: str, width: str) -> dict[str, str]:
    return {"max_link_speed": speed, "max_link_width": width}


@pytest.mark.parametrize(
    ("gpu", "port", "expected"),
    [
        pytest.param(
            speeds("32.0 GT/s PCIe", "16"), speeds("32.0 GT/s PCIe", "16"), (32, 16), id="alike"
        ),
        pytest.param(
            speeds("32.0 GT/s PCIe", "16"), speeds("16.0 GT/s PCIe", "16"), (16, 16), id="slow slot"
        ),
        pytest.param(
            speeds("32.0 GT/s PCIe", "8"), speeds("16.0 GT/s PCIe", "16"), (16, 8), id="each end"
        ),
        pytest.param(speeds("8 GT/s", "16"), None, (8, 16), id="Linux before 5.8, no port above"),
        pytest.param(speeds("2.5 GT/s PCIe", "1"), speeds("Unknown", "0"), (2.5, 1), id="QEMU"),
        pytest.param(speeds("Unknown", "255"), None, None, id="inside the root complex"),
        pytest.param(speeds("Unknown speed", "0"), None, None, id="older word"),
        pytest.param(speeds("16.0 GT/s PCIe", "63"), None, None, id="fell off the bus"),
        pytest.param({}, speeds("16.0 GT/s PCIe", "16"), None, id="conventional, or before 4.13"),
        pytest.param(
            {**speeds("16.0 GT/s PCIe", "16"), "current_link_speed": "2.5 GT/s PCIe"},
            None,
            (16, 16),
            id="idle",
        ),
    ],
)
def test_a_link_is_what_both_ends_can_at_most(
    gpu: dict[str, str], port: dict[str, str] | None, expected: tuple[float, int] | None
) -> None:
    found = link_of(gpu, port)
    assert (found and (found.gigatransfers, found.width)) == expected


def test_a_speed_that_is_none_is_reported() -> None:
    found = host(TWO_NODES, function(GPU, max_link_speed="fast", max_link_width="16"))
    assert device(found, "0000:3b:00.0").link is None
    (problem,) = found.problems
    assert problem.endswith("max_link_speed: expected a speed in GT/s, read 'fast'")


def test_ports_inside_a_switch_have_no_link_between_them() -> None:
    root, up = "pci0000:37/0000:37:01.0", "pci0000:37/0000:37:01.0/0000:38:00.0"
    gen5 = {"max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe"}
    gen4 = {"max_link_width": "8", "max_link_speed": "16.0 GT/s PCIe"}
    found = host(
        TWO_NODES,
        bridge(root, **gen4),
        bridge(up, **gen5),
        bridge(f"{up}/0000:39:00.0", **gen5),
        function(f"{up}/0000:39:00.0/0000:3a:00.0", **gen5),
    )
    links = {d.address: d.link and (d.link.gigatransfers, d.link.width) for d in found.pci}
    assert links == {
        "0000:37:01.0": None,
        "0000:38:00.0": (16, 8),  # of the switch to the root port
        "0000:39:00.0": None,
        "0000:3a:00.0": (32, 16),
    }


def test_driver_and_virtual_function() -> None:
    port = "pci0000:20/0000:20:01.0"
    found = host(
        TWO_NODES,
        function(f"{port}/0000:26:00.0", driver="mlx5_core"),
        function(f"{port}/0000:26:00.1", driver="vfio-pci"),
        [link(f"sys/devices/{port}/0000:26:00.1/physfn", f"sys/devices/{port}/0000:26:00.0")],
    )
    assert [(d.driver, d.physical_function) for d in found.pci] == [
        ("mlx5_core", None),
        ("vfio-pci", "0000:26:00.0"),
    ]


@pytest.mark.parametrize("gone", ["the device", "class", "vendor", "device"])
def test_a_function_that_is_going_away_is_left_out_without_a_word(
    tmp_path: Path, gone: str
) -> None:
    sys = tree(tmp_path, TWO_NODES, function(GPU), function("pci0000:37/0000:37:02.0"))
    folder = sys / "devices" / GPU
    if gone == "the device":
        folder.rename(tmp_path / "elsewhere")
    else:
        (folder / gone).unlink()
    found = read_host(sys)
    assert [d.address for d in found.pci] == ["0000:37:02.0"]
    assert not found.problems


def test_a_function_that_does_not_say_what_it_is_is_reported() -> None:
    found = host(TWO_NODES, function(GPU, kind="0xzz"), function("pci0000:37/0000:37:02.0"))
    assert [d.address for d in found.pci] == ["0000:37:02.0"]
    (problem,) = found.problems
    assert problem.endswith("0000:3b:00.0/class: expected an integer, read '0xzz'")


def test_an_attribute_that_fails_while_it_is_read_is_absent(tmp_path: Path) -> None:
    sys = tree(tmp_path, TWO_NODES, function(GPU, numa_node="0"))
    attribute = sys / "devices" / GPU / "numa_node"
    attribute.unlink()
    attribute.symlink_to("/proc/self/mem")  # opens well, and its first byte gives EIO
    found = read_host(sys)
    assert device(found, "0000:3b:00.0").numa is None
    assert not found.problems


def test_a_file_that_we_may_not_read_is_reported(tmp_path: Path) -> None:
    sys = tree(tmp_path, TWO_NODES, function(GPU, numa_node="0"))
    attribute = sys / "devices" / GPU / "numa_node"
    attribute.unlink()
    attribute.mkdir()  # for root, who may read all, EISDIR stands for EACCES
    found = read_host(sys)
    assert device(found, "0000:3b:00.0").numa is None
    (problem,) = found.problems
    assert problem == f"{sys}/bus/pci/devices/0000:3b:00.0/numa_node: Is a directory"


def test_everything_is_read_again(tmp_path: Path) -> None:
    sys = tree(tmp_path, TWO_NODES, function(GPU, numa_node="0"))
    before = read_host(sys)
    (sys / "devices" / GPU / "numa_node").write_text("1\n")
    os.unlink(sys / "bus/pci/devices/0000:3b:00.0")
    os.symlink(f"../../../devices/{GPU}", sys / "bus/pci/devices/0000:3b:00.0")
    after = read_host(sys)
    assert (device(before, "0000:3b:00.0").numa, device(after, "0000:3b:00.0").numa) == (0, 1)
    assert read_host(sys) == after


def test_a_machine_without_pci_is_read() -> None:
    found = host(TWO_NODES, ["proc/sys/kernel/random/boot_id = 29a25258"])
    assert (found.pci, found.nics, found.boot_id) == ((), (), "29a25258")


VALUES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=12),
    st.from_regex(r"[0-9]{1,6}([-,][0-9]{1,6}){0,3}", fullmatch=True),
    st.sampled_from(["9" * 5000, "-" + "9" * 5000, "0x" + "f" * 500, "9" * 500 + " Gb/sec"]),
    st.sampled_from(["9" * 500 + " GT/s", f"MemTotal: {'9' * 5000} kB", "Node: " + "9" * 5000]),
)
WHOLE = (
    *TWO_NODES.splitlines(),
    "sys/devices/system/node/node1/meminfo = Node 1 MemTotal: 4 kB",
    "sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages = 0",
    "proc/driver/nvidia/gpus/0000:3b:00.0/numa_status = Node: 1",
    "proc/sys/kernel/random/boot_id = 1",
    *function(
        GPU, numa_node="-1", local_cpulist="4-7", max_link_speed="8 GT/s", max_link_width="8"
    ),
    *nic("pci0000:01/0000:01:00.0", sriov_numvfs="0"),
    *netdev("pci0000:01/0000:01:00.0/net/eth0", carrier="1", speed="1000"),
    *rdma("virtual/infiniband/rxe0", port1="4: ACTIVE|10 Gb/sec (4X SDR)"),
    *netdev("virtual/net/bond0", **{"bonding/slaves": "eth0"}),
)
FILES = [number for number, line in enumerate(WHOLE) if " = " in line]


@given(st.dictionaries(st.sampled_from(FILES), VALUES, min_size=1, max_size=4))
@settings(deadline=None)
def test_no_content_of_any_file_stops_the_reading(changes: dict[int, str]) -> None:
    lines = list(WHOLE)
    for number, value in changes.items():
        lines[number] = f"{lines[number].partition(' = ')[0]} = {escape(value)}"
    with contextlib.suppress(SysfsError):  # when no node is left
        assemble(host(lines), None)


# NICs

PORT = "pci0000:37/0000:37:01.0/0000:3b:00.0"


def test_a_virtio_nic_is_the_function_above_its_virtio_device() -> None:
    found = host(TWO_NODES, nic(PORT), netdev(f"{PORT}/virtio3/net/eth3", speed="-1", carrier="1"))
    assert only(found.nics) == Nic(pci=PciAddress("0000:3b:00.0"), netdevs=("eth3",), up=True)


def test_a_nic_that_a_pod_holds_is_found_by_its_class() -> None:
    found = host(TWO_NODES, nic(PORT), [f"sys/devices/{PORT}/net/"])
    assert only(found.nics) == Nic(pci=PciAddress("0000:3b:00.0"))


@pytest.mark.parametrize("kind", ["0x020800", "0x0c0600"])
def test_a_nic_of_another_class_is_found_by_its_name(kind: str) -> None:
    found = host(
        TWO_NODES,
        nic(PORT, kind=kind),
        rdma(f"{PORT}/infiniband/hfi1_0", port1="4: ACTIVE|100 Gb/sec (4X EDR)"),
    )
    assert only(found.nics).name == "hfi1_0"


def test_vlans_bridges_loopback_and_pods_ends_are_no_nics() -> None:
    virtual = ("lo", "cni0", "eth0.1015", "veth12ab", "docker0")
    lines = [line for name in virtual for line in netdev(f"virtual/net/{name}", carrier="1")]
    assert host(TWO_NODES, lines).nics == ()


def test_a_usb_adapter_is_no_nic() -> None:
    usb = "pci0000:00/0000:00:14.0"  # such as the one to the BMC, or of a DPU's console
    found = host(
        TWO_NODES,
        function(usb, kind="0x0c0330", vendor="0x8086"),
        netdev(f"{usb}/usb1/1-1/1-1:1.0/net/enx020000000001", carrier="1"),
    )
    assert found.nics == ()


def test_a_bond_is_a_nic_with_members_and_without_members_is_none() -> None:
    found = host(
        TWO_NODES,
        netdev("virtual/net/bond0", **{"bonding/slaves": "eth1 eth0", "carrier": "1"}),
        netdev("virtual/net/bond1", **{"bonding/slaves": ""}),
    )
    bond = only(found.nics)
    assert (bond.kind, bond.name, bond.members, bond.pci) == (
        "bond",
        "bond0",
        ("eth0", "eth1"),
        None,
    )


def test_hyper_v_shows_a_synthetic_nic_and_its_virtual_function() -> None:
    bus = "LNXSYSTM:00/VMBUS:00/f8615163"
    function_ = f"{bus}-1/pci4c3b:00/4c3b:00:02.0"
    found = host(
        TWO_NODES,
        netdev(f"{bus}/net/eth0", carrier="1", speed="50000"),
        [
            link(f"sys/devices/{bus}/net/eth0/device", f"sys/devices/{bus}"),
            link(f"sys/devices/{bus}/driver", "sys/bus/vmbus/drivers/hv_netvsc"),
            link(
                f"sys/devices/{bus}/net/eth0/lower_enP19515s1",
                f"sys/devices/{function_}/net/enP19515s1",
            ),
        ],
        nic(function_),
        netdev(f"{function_}/net/enP19515s1", carrier="1", speed="50000"),
    )
    passed, synthetic = found.nics
    assert (passed.pci, passed.netdevs, passed.kind) == ("4c3b:00:02.0", ("enP19515s1",), "pci")
    assert (synthetic.kind, synthetic.name, synthetic.members) == (
        "netvsc",
        "eth0",
        ("enP19515s1",),
    )


def test_software_rdma_has_no_function_and_names_what_it_runs_on() -> None:
    found = host(
        TWO_NODES,
        nic(PORT),
        netdev(f"{PORT}/net/eth0", carrier="1", speed="25000"),
        rdma("virtual/infiniband/rxe0", port1="4: ACTIVE|10 Gb/sec (4X SDR)"),
        ["sys/devices/virtual/infiniband/rxe0/parent = eth0"],
        rdma("virtual/infiniband/siw0", port1="4: ACTIVE|2.5 Gb/sec (1X SDR)"),
    )
    assert [(n.name, n.kind, n.members, n.rate_megabits_per_s) for n in found.nics] == [
        ("eth0", "pci", (), 25_000),
        ("rxe0", "rdma", ("eth0",), 10_000),
        ("siw0", "rdma", (), 2_500),
    ]


def test_two_ports_are_two_functions_or_two_ports_of_one() -> None:
    card = "pci0000:37/0000:37:01.0"
    found = host(
        TWO_NODES,
        nic(f"{card}/0000:3b:00.0"),
        nic(f"{card}/0000:3b:00.1"),
        rdma(f"{card}/0000:3b:00.0/infiniband/mlx5_0", port1="4: ACTIVE|200 Gb/sec (4X HDR)"),
        rdma(f"{card}/0000:3b:00.1/infiniband/mlx5_1", port1="1: DOWN|40 Gb/sec (4X QDR)"),
        nic(f"{card}/0000:3c:00.0"),
        rdma(
            f"{card}/0000:3c:00.0/infiniband/mlx4_0",
            port1="1: DOWN|10 Gb/sec (4X SDR)",
            port2="4: ACTIVE|40 Gb/sec (4X QDR)",
        ),
        netdev(f"{card}/0000:3c:00.0/net/ib0"),
        netdev(f"{card}/0000:3c:00.0/net/ib1"),
    )
    assert [(n.rdma, n.netdevs, n.rate_megabits_per_s, n.up) for n in found.nics] == [
        (("mlx5_0",), (), 200_000, True),
        (("mlx5_1",), (), None, False),  # a default of the firmware, not a rate
        (("mlx4_0",), ("ib0", "ib1"), 40_000, True),
    ]


def test_efa_has_a_name_for_rdma_and_none_for_the_network() -> None:
    found = host(
        TWO_NODES,
        nic(PORT, vendor="0x1d0f", device="0xefa2"),
        rdma(f"{PORT}/infiniband/rdmap59s0", port1="4: ACTIVE|100 Gb/sec (4X EDR)"),
    )
    assert only(found.nics) == Nic(
        pci=PciAddress("0000:3b:00.0"), rdma=("rdmap59s0",), rate_megabits_per_s=100_000, up=True
    )


@pytest.mark.parametrize(
    ("files", "rate", "up"),
    [
        pytest.param({"speed": "100000", "carrier": "1"}, 100_000, True, id="up"),
        pytest.param({"speed": "-1", "carrier": "0"}, None, False, id="cable out"),
        pytest.param({"speed": "4294967295", "carrier": "0"}, None, False, id="before Linux 5.3"),
        pytest.param({"operstate": "down"}, None, False, id="administratively down"),
        pytest.param({"operstate": "unknown"}, None, None, id="says nothing"),
    ],
)
def test_speed_and_carrier_of_a_network_device(
    files: dict[str, str], rate: int | None, up: bool | None
) -> None:
    found = only(host(TWO_NODES, nic(PORT), netdev(f"{PORT}/net/eth0", **files)).nics)
    assert (found.rate_megabits_per_s, found.up) == (rate, up)


def test_a_physical_function_counts_its_virtual_ones_and_they_name_it() -> None:
    card = "pci0000:37/0000:37:01.0"
    found = host(
        TWO_NODES,
        nic(f"{card}/0000:3b:00.0", sriov_totalvfs="8", sriov_numvfs="1"),
        nic(f"{card}/0000:3b:00.2"),
        [link(f"sys/devices/{card}/0000:3b:00.2/physfn", f"sys/devices/{card}/0000:3b:00.0")],
    )
    assert [(n.virtual_functions, n.physical_function) for n in found.nics] == [
        (1, None),
        (0, "0000:3b:00.0"),
    ]


def test_a_function_passed_into_a_virtual_machine_names_no_physical_function() -> None:
    """Neither does a physical one, though its virtual functions are counted."""
    found = host(
        TWO_NODES,
        nic("pci0000:00/0000:00:06.0"),  # a virtual function, inside the root complex
        nic(PORT, sriov_totalvfs="8", sriov_numvfs="0"),
    )
    assert [(n.virtual_functions, n.physical_function) for n in found.nics] == [(0, None)] * 2


def test_of_a_dpus_functions_the_network_controllers_are_nics() -> None:
    card = "pci0000:37/0000:37:01.0"
    found = host(
        TWO_NODES,
        nic(f"{card}/0000:3b:00.0", kind="0x020700", device="0xa2dc"),
        nic(f"{card}/0000:3b:00.1", device="0xa2dc"),
        nic(f"{card}/0000:3b:00.2", kind="0x080100", device="0xc2d5"),  # its management
        rdma(f"{card}/0000:3b:00.0/infiniband/mlx5_0", port1="4: ACTIVE|400 Gb/sec (4X NDR)"),
    )
    assert [(n.pci, n.rdma) for n in found.nics] == [
        ("0000:3b:00.0", ("mlx5_0",)),
        ("0000:3b:00.1", ()),
    ]


def test_a_rate_that_is_none_is_reported() -> None:
    found = host(TWO_NODES, nic(PORT), rdma(f"{PORT}/infiniband/mlx5_0", port1="4: ACTIVE|quick"))
    assert only(found.nics).rate_megabits_per_s is None
    (problem,) = found.problems
    assert problem.endswith("ports/1/rate: expected a rate in Gb/sec, read 'quick'")


def test_an_old_class_entry_is_a_folder_with_a_link_to_the_device() -> None:
    found = host(
        TWO_NODES,
        nic(PORT),
        [
            "sys/class/net/eth0/carrier = 1",
            link("sys/class/net/eth0/device", f"sys/devices/{PORT}"),
        ],
    )
    assert only(found.nics) == Nic(pci=PciAddress("0000:3b:00.0"), netdevs=("eth0",), up=True)
