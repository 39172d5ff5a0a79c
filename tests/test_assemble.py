"""The kernel's and NVML's words joined: each trap is a test named by what would be wrong."""

from __future__ import annotations

import random

import msgspec
import pytest

from rte.discovery import Overrides, assemble
from rte.discovery.reading import (
    FabricReading,
    GpuReading,
    LinkReading,
    MigReading,
    NvmlReading,
)
from rte.discovery.sysfs import Host
from rte.model import (
    FabricState,
    Gpu,
    Level,
    LinkPeer,
    Machine,
    NumaId,
    NumaSource,
    PciAddress,
)
from tests.sysfs_tree import TWO_NODES, bridge, function, host, link, netdev, nic

FIRST, SECOND, THIRD = (
    PciAddress("0000:01:00.0"),
    PciAddress("0000:02:00.0"),
    PciAddress("0000:03:00.0"),
)


def gpus(*addresses: str, driver: str | None = "nvidia", **files: str) -> list[str]:
    """Functions, each below a root port of its own."""
    lines = []
    for address in addresses:
        domain, bus, _ = address.split(":")
        lines += function(f"pci{domain}:{bus}/{address}", driver=driver, **files)
    return lines


def three_gpus() -> Host:
    return host(TWO_NODES, gpus(FIRST, SECOND, THIRD))


def answer(index: int, address: str, **more: object) -> GpuReading:
    """What NVML says of one GPU, spelled as NVML spells it."""
    domain, rest = address.split(":", 1)
    bus_id = f"{domain.zfill(8)}:{rest}".upper()
    return msgspec.convert(
        {"index": index, "bus_id": bus_id, "uuid": f"GPU-{address}", **more}, GpuReading
    )


def nvml(*answers: GpuReading, **more: object) -> NvmlReading:
    return msgspec.convert({"driver": "570.86", "gpus": answers, **more}, NvmlReading)


def only(found: Machine) -> Gpu:
    assert len(found.gpus) == 1, found.gpus
    return found.gpus[0]


def one(**more: object) -> Gpu:
    """The GPU of a machine with one, of which NVML says more."""
    return only(assemble(host(TWO_NODES, gpus(FIRST)), nvml(answer(0, FIRST, **more))))


# Which GPUs there are


def test_nvml_and_sysfs_spell_one_address_differently() -> None:
    domain = "3f8cfdd:00:00.0"  # Hyper-V
    found = assemble(
        host(TWO_NODES, gpus("000f:01:00.0", domain)),
        nvml(answer(0, "000f:01:00.0"), answer(1, domain)),
    )
    assert [(g.pci, g.lost, g.index) for g in found.gpus] == [
        ("000f:01:00.0", None, 0),
        (domain, None, 1),
    ]
    assert len(found.pci) == 2
    assert found.unknown == ()


def test_gpus_are_numbered_in_pci_order_whatever_nvmls_order_is() -> None:
    answers = [answer(2, FIRST), answer(0, THIRD), answer(1, SECOND)]
    found = assemble(three_gpus(), nvml(*answers))
    assert [(g.name, g.pci, g.index) for g in found.gpus] == [
        ("gpu-0", FIRST, 2),
        ("gpu-1", SECOND, 1),
        ("gpu-2", THIRD, 0),
    ]
    random.Random(1).shuffle(answers)
    assert assemble(three_gpus(), nvml(*answers)) == found


@pytest.mark.parametrize(
    ("entry", "lost"),
    [
        pytest.param(
            GpuReading(index=1, error=15, bus_id="00000000:02:00.0"),
            "GPU is lost (NVML 15)",
            id="with its bus id",
        ),
        pytest.param(GpuReading(index=1, error=15), "GPU is lost (NVML 15)", id="without"),
        pytest.param(GpuReading(index=1, error=999), "unknown error (NVML 999)", id="unknown"),
        pytest.param(GpuReading(index=1, error=77), "NVML error (NVML 77)", id="a new code"),
        pytest.param(None, "NVML does not list it", id="not listed"),
    ],
)
def test_a_lost_gpu_keeps_its_number_and_renames_no_other(
    entry: GpuReading | None, lost: str
) -> None:
    entries = [entry] if entry else []
    found = assemble(three_gpus(), nvml(answer(0, FIRST), *entries, answer(2, THIRD)))
    assert [(g.name, g.pci, g.lost) for g in found.gpus] == [
        ("gpu-0", FIRST, None),
        ("gpu-1", SECOND, lost),
        ("gpu-2", THIRD, None),
    ]
    assert found.gpus[1].uuid is None
    assert found.unknown == ()


def test_a_lost_gpu_that_left_the_bus_stays_when_nvml_says_where_it_was() -> None:
    entry = GpuReading(index=1, error=15, bus_id="00000000:02:00.0")
    found = assemble(host(TWO_NODES, gpus(FIRST)), nvml(answer(0, FIRST), entry))
    assert [(g.pci, g.lost) for g in found.gpus] == [
        (FIRST, None),
        (SECOND, "GPU is lost (NVML 15)"),
    ]


def test_an_entry_for_which_no_function_is_left_is_said() -> None:
    found = assemble(
        host(TWO_NODES, gpus(FIRST)), nvml(answer(0, FIRST), GpuReading(index=1, error=15))
    )
    assert [g.pci for g in found.gpus] == [FIRST]
    assert found.unknown == ("NVML index 1: GPU is lost (NVML 15), and no PCI function for it",)


def test_a_gpu_of_a_virtual_machine_is_neither_ours_nor_lost_and_keeps_its_number() -> None:
    found = assemble(
        host(TWO_NODES, gpus(FIRST), gpus(SECOND, driver="vfio-pci"), gpus(THIRD)),
        nvml(answer(0, FIRST), answer(1, THIRD)),
    )
    assert [(g.name, g.pci, g.lost) for g in found.gpus] == [
        ("gpu-0", FIRST, None),
        ("gpu-2", THIRD, None),
    ]
    assert found.unknown == (f"{SECOND}: an NVIDIA GPU bound to vfio-pci; it is left alone",)


def test_a_gpu_that_was_just_passed_through_is_no_longer_ours() -> None:
    found = assemble(
        host(TWO_NODES, gpus(FIRST), gpus(SECOND, driver="vfio-pci")),
        nvml(answer(0, FIRST), answer(1, SECOND), levels=[(0, 1, 40)]),  # read before
    )
    assert [g.pci for g in found.gpus] == [FIRST]
    assert found.levels == {}


@pytest.mark.parametrize(
    ("driver", "said"), [("nouveau", "bound to nouveau"), (None, "without a driver")]
)
def test_a_gpu_without_nvidias_driver_is_not_lost(driver: str | None, said: str) -> None:
    found = assemble(
        host(TWO_NODES, gpus(FIRST), gpus(SECOND, driver=driver)), nvml(answer(0, FIRST))
    )
    assert [g.pci for g in found.gpus] == [FIRST]
    assert found.unknown == (f"{SECOND}: an NVIDIA GPU {said}; it is left alone",)


def test_functions_that_are_no_gpu_are_not_counted() -> None:
    audio = function("pci0000:01/0000:01:00.1", kind="0x040300", driver="snd_hda_intel")
    switch = function("pci0000:04/0000:04:00.0", kind="0x068000", driver="nvidia-nvswitch")
    other = function("pci0000:00/0000:00:02.0", kind="0x030000", vendor="0x1a03", driver="ast")
    found = assemble(
        host(TWO_NODES, audio, switch, other, gpus(FIRST, SECOND)),
        nvml(answer(0, FIRST), answer(1, SECOND)),
    )
    assert [g.pci for g in found.gpus] == [FIRST, SECOND]


def test_virtual_functions_of_a_gpu_rename_no_gpu() -> None:
    found = assemble(
        host(
            TWO_NODES,
            function("pci0000:01/0000:01:00.0", driver="nvidia"),
            function("pci0000:01/0000:01:00.4", driver="nvidia"),
            [
                link(
                    "sys/devices/pci0000:01/0000:01:00.4/physfn",
                    "sys/devices/pci0000:01/0000:01:00.0",
                )
            ],
            gpus(SECOND),
        ),
        nvml(answer(0, FIRST), answer(1, SECOND)),
    )
    assert [(g.name, g.pci) for g in found.gpus] == [("gpu-0", FIRST), ("gpu-1", SECOND)]


def test_a_gpu_that_only_nvml_shows_has_a_function_without_a_place() -> None:
    found = assemble(host(TWO_NODES), nvml(answer(0, FIRST)))
    assert only(found).pci == FIRST
    function_ = found.device(FIRST)
    assert function_ is not None
    assert (function_.numa, function_.numa_from, function_.parent) == (None, None, None)
    assert found.unknown == (
        f"{FIRST}: a GPU that only NVML shows; its place in the PCI tree is not known",
    )


def test_without_nvml_gpus_are_places_and_nothing_is_called_lost() -> None:
    found = assemble(three_gpus(), None)
    assert [(g.pci, g.uuid, g.lost) for g in found.gpus] == [
        (FIRST, None, None),
        (SECOND, None, None),
        (THIRD, None, None),
    ]
    assert found.unknown == (
        "NVML was not read: UUIDs, NVLinks, fabric and MIG slices are not known",
    )
    assert found.driver is None


# NUMA nodes

NO_NODE = {"numa_node": "-1", "local_cpulist": "0-7"}


@pytest.mark.parametrize(
    ("files", "affinity", "numa", "source"),
    [
        pytest.param(NO_NODE, [0b10], 1, NumaSource.NVML, id="firmware says nothing, NVML one"),
        pytest.param(NO_NODE, [0b11], None, None, id="a virtual machine is told of all"),
        pytest.param(NO_NODE, [0], None, None, id="of none"),
        pytest.param(NO_NODE, None, None, None, id="refused"),
        pytest.param(NO_NODE, [0b100], None, None, id="a node that is not there"),
        pytest.param({"numa_node": "0"}, [0b10], 0, NumaSource.SYSFS, id="sysfs goes first"),
        pytest.param(
            {"numa_node": "-1", "local_cpulist": "0-3"},
            [0b10],
            0,
            NumaSource.LOCAL_CPUS,
            id="what the kernel implies goes first",
        ),
    ],
)
def test_nvmls_memory_affinity_is_the_last_resort(
    files: dict[str, str], affinity: list[int] | None, numa: int | None, source: NumaSource | None
) -> None:
    found = assemble(
        host(TWO_NODES, gpus(FIRST, **files)), nvml(answer(0, FIRST, memory_affinity=affinity))
    ).device(FIRST)
    assert found is not None
    assert (found.numa, found.numa_from) == (numa, source)


def test_words_of_the_memory_affinity_are_64_nodes_each() -> None:
    nodes = """\
        sys/devices/system/node/online = 0,65
        sys/devices/system/node/node0/cpulist = 0-3
        sys/devices/system/node/node65/cpulist = 4-7
        """
    found = assemble(
        host(nodes, gpus(FIRST, **NO_NODE)), nvml(answer(0, FIRST, memory_affinity=[0, 0b10]))
    )
    assert found.numa_of(FIRST) == 65


GRACE = """\
    sys/devices/system/node/online = 0-2
    sys/devices/system/node/node0/cpulist = 0-71
    sys/devices/system/node/node1/cpulist =
    sys/devices/system/node/node2/cpulist = 72-143
    """


def test_gpu_memory_is_never_the_gpus_place() -> None:
    found = assemble(
        host(GRACE, gpus(FIRST, numa_node="-1", local_cpulist="0-143")),
        nvml(answer(0, FIRST, numa_node=1, memory_affinity=[0b110])),
    )
    assert found.numa_of(FIRST) == 2
    assert only(found).memory_node == 1
    assert [node.gpu for node in found.numa_nodes] == [None, FIRST, None]


def test_the_driver_names_the_memory_node_where_nvml_is_silent() -> None:
    status = [f"proc/driver/nvidia/gpus/{FIRST}/numa_status = Node: 1\\nStatus: online"]
    found = assemble(host(GRACE, gpus(FIRST), status), nvml(answer(0, FIRST)))
    assert only(found).memory_node == 1


def test_a_node_with_cpus_is_nobodys_gpu_memory() -> None:
    found = assemble(host(GRACE, gpus(FIRST)), nvml(answer(0, FIRST, numa_node=2)))
    assert only(found).memory_node is None  # GB10, where CPU and GPU share all memory
    assert [node.gpu for node in found.numa_nodes] == [None, None, None]


def test_the_operator_knows_better_than_firmware() -> None:
    found = assemble(
        host(TWO_NODES, gpus(FIRST, numa_node="1")),
        nvml(answer(0, FIRST)),
        overrides=Overrides(numa={FIRST: NumaId(0)}),
    ).device(FIRST)
    assert found is not None
    assert (found.numa, found.numa_from) == (0, NumaSource.OVERRIDE)


def test_a_stated_node_of_a_bridge_holds_for_what_is_below_and_says_nothing_itself() -> None:
    port = "pci0000:00/0000:00:01.0"
    found = assemble(
        host(
            TWO_NODES,
            bridge(port, numa_node="-1"),
            function(f"{port}/0000:01:00.0", **NO_NODE),
            function(f"{port}/0000:02:00.0", numa_node="1"),
        ),
        None,
        overrides=Overrides(numa={PciAddress("0000:00:01.0"): NumaId(0)}),
    )
    assert [(d.numa, d.numa_from) for d in found.pci] == [
        (0, NumaSource.OVERRIDE),
        (0, NumaSource.PARENT),
        (1, NumaSource.SYSFS),
    ]


def bonded(*nodes: str) -> Machine:
    lines = []
    for number, node in enumerate(nodes):
        path = f"pci0000:0{number}/0000:0{number}:00.0"
        lines += nic(path, numa_node=node) + netdev(f"{path}/net/eth{number}", carrier="1")
    members = " ".join(f"eth{number}" for number in range(len(nodes)))
    bond = netdev("virtual/net/bond0", **{"bonding/slaves": members})
    return assemble(host(TWO_NODES, lines, bond), None)


@pytest.mark.parametrize(
    ("nodes", "numa"), [(("1", "1"), 1), (("0", "1"), None), (("1", "-1"), None)]
)
def test_a_bond_is_where_all_of_its_members_are(nodes: tuple[str, ...], numa: int | None) -> None:
    bond = bonded(*nodes).nics[-1]
    assert (bond.kind, bond.numa) == ("bond", numa)


# NVLinks

SWITCH = "0000:c1:00.0"
NPU = "0004:00:00.0"


def linked(*links: LinkReading) -> Machine:
    """The first of three GPUs with these links, beside a visible NVSwitch and a POWER NPU."""
    found = host(
        TWO_NODES,
        gpus(FIRST, SECOND),
        gpus(THIRD, driver="vfio-pci"),
        function("pci0000:c1/0000:c1:00.0", kind="0x068000", driver="nvidia-nvswitch"),
        function("pci0004:00/0004:00:00.0", kind="0x068000", vendor="0x1014", device="0x04ea"),
    )
    first = msgspec.structs.replace(answer(0, FIRST), links=links)
    return assemble(found, nvml(first, answer(1, SECOND)))


def lane(
    remote: str | None, kind: int | None = None, *, number: int = 0, active: bool = True
) -> LinkReading:
    return LinkReading(
        link=number, active=active, version=4, remote_type=kind, remote_bus_id=remote
    )


@pytest.mark.parametrize(
    ("remote", "kind", "expected"),
    [
        pytest.param("00000000:02:00.0", 0, (LinkPeer.GPU, SECOND), id="a GPU"),
        pytest.param("00000000:02:00.0", 255, (LinkPeer.GPU, SECOND), id="a GPU of no type"),
        pytest.param("00000000:C1:00.0", 2, (LinkPeer.SWITCH, SWITCH), id="an NVSwitch"),
        pytest.param("00000000:C1:00.0", None, (LinkPeer.SWITCH, SWITCH), id="NVSwitch, no type"),
        pytest.param("FFFFFFFF:FF:FF.0", 2, (LinkPeer.SWITCH, None), id="hidden"),
        pytest.param("FFFFFFFF:FF:FF.0", 0, (LinkPeer.SWITCH, None), id="hidden, called a GPU"),
        pytest.param("fffffff:ffff:ff", None, (LinkPeer.SWITCH, None), id="hidden, odd spelling"),
        pytest.param("", 255, (LinkPeer.SWITCH, None), id="hidden, empty"),
        pytest.param(None, None, (LinkPeer.SWITCH, None), id="hidden, refused"),
        pytest.param("00000000:05:00.0", 2, (LinkPeer.SWITCH, None), id="switch not in the tree"),
        pytest.param("00000000:05:00.0", None, (LinkPeer.SWITCH, None), id="no type, not there"),
        pytest.param("00000004:00:00.0", 1, (LinkPeer.CPU, NPU), id="POWER's NPU"),
        pytest.param("00000004:00:00.0", None, (LinkPeer.CPU, NPU), id="POWER's NPU, no type"),
        pytest.param("00000000:05:00.0", 0, None, id="a GPU of another virtual machine"),
        pytest.param("00000000:03:00.0", 255, None, id="a GPU that is passed through"),
        pytest.param("00000000:01:00.0", 0, None, id="itself"),
    ],
)
def test_who_is_at_the_other_end(
    remote: str | None, kind: int | None, expected: tuple[LinkPeer, str | None] | None
) -> None:
    found = linked(lane(remote, kind))
    assert [(end.peer, end.remote) for end in found.gpus[0].links] == (
        [expected] if expected else []
    )
    said = f"{FIRST}: 1 NVLinks lead to GPUs that are not this machine's"
    assert (said in found.unknown) == (expected is None)


def test_a_lost_gpu_is_still_the_other_end() -> None:
    first = msgspec.structs.replace(answer(0, FIRST), links=(lane("00000000:02:00.0", 0),))
    found = assemble(three_gpus(), nvml(first, GpuReading(index=1, error=15), answer(2, THIRD)))
    assert [(end.peer, end.remote) for end in found.gpus[0].links] == [(LinkPeer.GPU, SECOND)]


def test_lanes_are_counted_by_state_for_each_other_end() -> None:
    found = linked(
        lane("00000000:C1:00.0", 2, number=0),
        lane("00000000:02:00.0", 0, number=1),
        lane("00000000:C1:00.0", 2, number=2),
        lane("00000000:02:00.0", 0, number=3, active=False),
        lane(None, 255, number=4, active=False),
    ).gpus[0]
    assert [(end.peer, end.remote, end.lanes) for end in found.links] == [
        (LinkPeer.GPU, SECOND, 1),
        (LinkPeer.SWITCH, SWITCH, 2),
    ]
    assert found.links_down == 2


def test_links_that_exist_and_were_never_up_are_no_links() -> None:
    found = one(links=[{"link": n, "active": False} for n in range(12)])  # a card without bridge
    assert (found.links, found.links_down) == ((), 12)


@pytest.mark.parametrize(
    ("version", "speed", "expected"),
    [
        (1, None, 20_000),
        (2, None, 25_000),
        (6, None, 25_000),
        (7, None, 50_000),
        (8, None, 50_000),
        (None, None, 25_000),
        (6, 26_562, 26_562),
        (6, 0, 25_000),
    ],
)
def test_speed_of_a_lane(version: int | None, speed: int | None, expected: int) -> None:
    found = one(links=[{"link": 0, "active": True, "version": version, "speed_mbps": speed}])
    assert found.links[0].lane_megabytes_per_s == expected


def test_lanes_to_one_end_are_as_fast_as_the_slowest() -> None:
    speeds = (26_562, 25_781)
    found = one(
        links=[{"link": n, "active": True, "speed_mbps": speed} for n, speed in enumerate(speeds)]
    )
    assert [(end.lanes, end.lane_megabytes_per_s) for end in found.links] == [(2, 25_781)]


# Fabric, MIG, levels

CLUSTER = "8D2A4E8C-0000-4000-8000-00000000000A"


@pytest.mark.parametrize(
    ("reading", "state", "cluster", "clique"),
    [
        pytest.param(
            FabricReading(state=3, cluster=CLUSTER, clique=4026),
            FabricState.COMPLETED,
            CLUSTER.lower(),
            4026,
            id="GB200",
        ),
        pytest.param(
            FabricReading(state=3), FabricState.COMPLETED, None, 0, id="HGX: the UUID is zero"
        ),
        pytest.param(
            FabricReading(state=2, cluster=CLUSTER, clique=1),
            FabricState.IN_PROGRESS,
            None,
            None,
            id="not yet: the rest means nothing",
        ),
        pytest.param(FabricReading(state=1), FabricState.NOT_STARTED, None, None, id="not started"),
        pytest.param(FabricReading(state=0), FabricState.NOT_SUPPORTED, None, None, id="none"),
    ],
)
def test_fabric(
    reading: FabricReading, state: FabricState, cluster: str | None, clique: int | None
) -> None:
    found = one(fabric=reading).fabric
    assert found is not None
    assert (found.state, found.cluster, found.clique) == (state, cluster, clique)


def test_a_fabric_state_of_a_later_driver_is_not_guessed() -> None:
    assert one(fabric=FabricReading(state=9)).fabric is None


@pytest.mark.parametrize(
    ("summary", "mask", "healthy"),
    [
        pytest.param(1, None, True, id="healthy"),
        pytest.param(2, None, False, id="unhealthy"),
        pytest.param(3, 0, False, id="limited"),
        pytest.param(0, 0, None, id="GB200 says not supported"),
        pytest.param(None, None, None, id="old driver"),
        pytest.param(None, 0b00_00_00_10, True, id="mask: bandwidth is full"),
        pytest.param(None, 0b00_00_00_01, False, id="mask: bandwidth is degraded"),
        pytest.param(None, 0b00_01_00_10, False, id="mask: a route is unhealthy"),
        pytest.param(None, 0b0001_00_00_00_10, True, id="mask: configuration is right"),
        pytest.param(None, 0b0010_00_00_00_10, False, id="mask: configuration is wrong"),
    ],
)
def test_health_of_the_fabric(summary: int | None, mask: int | None, healthy: bool | None) -> None:
    found = one(fabric=FabricReading(state=3, health_summary=summary, health_mask=mask)).fabric
    assert found is not None
    assert found.healthy is healthy


H100 = 85_520_809_984  # bytes that NVML gives for 80 GB


@pytest.mark.parametrize(
    ("gpu_slices", "compute_slices", "memory_mib", "profile"),
    [
        (1, 1, 9_984, "1g.10gb"),
        (1, 1, 20_096, "1g.20gb"),
        (3, 3, 40_448, "3g.40gb"),
        (3, 1, 40_448, "1c.3g.40gb"),
        (7, 7, 81_053, "7g.80gb"),
    ],
)
def test_profile_of_a_slice_that_nvml_does_not_name(
    gpu_slices: int, compute_slices: int, memory_mib: int, profile: str
) -> None:
    mig = MigReading(
        index=0,
        uuid="MIG-1",
        gpu_instance=1,
        compute_instance=0,
        gpu_slices=gpu_slices,
        compute_slices=compute_slices,
        memory_mib=memory_mib,
    )
    assert one(memory_bytes=H100, mig_mode=[1, 1], mig=[mig]).slices[0].profile == profile


def test_slices_are_in_the_order_of_their_instances() -> None:
    def mig(index: int, gpu: int, compute: int) -> MigReading:
        return MigReading(
            index=index,
            uuid=f"MIG-{index}",
            name="1g.10gb",
            gpu_instance=gpu,
            compute_instance=compute,
            gpu_slices=1,
            compute_slices=1,
            memory_mib=1,
        )

    found = one(mig_mode=[1, 1], mig=[mig(0, 9, 0), mig(1, 2, 1), mig(4, 2, 0)])
    assert [s.id for s in found.slices] == ["MIG-4", "MIG-1", "MIG-0"]
    assert found.mig_enabled


@pytest.mark.parametrize(("mode", "enabled"), [((1, 0), True), ((0, 1), False), (None, False)])
def test_mig_is_on_when_it_is_on_now(mode: tuple[int, int] | None, enabled: bool) -> None:
    assert one(mig_mode=mode).mig_enabled is enabled


def test_levels_hold_both_ways_and_reads_each_way() -> None:
    found = assemble(
        three_gpus(),
        nvml(
            answer(0, THIRD),
            answer(1, FIRST),
            GpuReading(index=2, error=15, bus_id="00000000:02:00.0"),
            levels=[(0, 1, 40), (0, 2, 10), (1, 2, 99)],
            p2p=[(0, 1, 0, 5), (1, 0, 2, 5)],
        ),
    )
    assert found.levels == {(THIRD, FIRST): Level.NODE, (FIRST, THIRD): Level.NODE}
    assert found.peer_reads == {(THIRD, FIRST): True, (FIRST, THIRD): False}


@pytest.mark.parametrize(
    ("number", "level"),
    [
        (0, Level.PIX),
        (10, Level.PIX),
        (20, Level.PXB),
        (30, Level.PHB),
        (40, Level.NODE),
        (50, Level.SYS),
    ],
)
def test_nvmls_levels(number: int, level: Level) -> None:
    found = assemble(
        three_gpus(), nvml(answer(0, FIRST), answer(1, SECOND), levels=[(0, 1, number)])
    )
    assert found.levels[FIRST, SECOND] is level
