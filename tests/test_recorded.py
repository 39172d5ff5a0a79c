"""Recorded machines: read, written again, and kept from leading out of their folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rte.__main__ import main
from rte.commands.record import nvml_text, podresources_text, renamed_serials
from rte.discovery.reading import GpuReading, NvmlReading
from rte.discovery.sysfs import Host, read_host
from rte.model import (
    Allocatable,
    ContainerUse,
    DeviceId,
    DeviceUse,
    Machine,
    NumaSource,
    PciDevice,
    PodName,
    PodUse,
    Usage,
)
from rte.sources.pseudonyms import Pseudonyms
from rte.sources.recorded import (
    Entry,
    RecordedError,
    escape,
    memory_folder,
    pack,
    parse,
    read_recorded,
    unpack,
)
from tests.fake_nvml import Driver, fake_nvml
from tests.real_kubelet import Kubelet, pod
from tests.simple_plugin import SimplePlugin
from tests.sysfs_tree import TWO_NODES, function, netdev, nic, tree

MACHINES = Path(__file__).with_name("machines")
NAMES = sorted(path.parent.name for path in MACHINES.glob("*/sys.txt"))


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in memory: a machine is a thousand small files."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        yield Path(folder)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Gives up root's right to read everything, if this is root, and takes it back afterwards."""
    was = os.geteuid()
    os.seteuid(was or 65534)
    try:
        yield
    finally:
        os.seteuid(was)


def read(root: Path) -> Host:
    return read_host(root / "sys", proc=root / "proc")


def by_address(machine: Machine) -> dict[str, PciDevice]:
    return {str(device.address): device for device in machine.pci}


# Writing what was read


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_of_a_recorded_machine_is_that_machine(name: str, root: Path) -> None:
    unpack(MACHINES / name / "sys.txt", root / "once")
    text = pack(root / "once/sys", root / "once/proc")
    (root / "sys.txt").write_text(text)
    unpack(root / "sys.txt", root / "twice")
    assert read(root / "twice") == read(root / "once")
    assert pack(root / "twice/sys", root / "twice/proc") == text
    assert "# " not in text


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("qemu", "hwloc"))])
def test_machines_of_a_real_kernel_are_as_record_writes_them(name: str, root: Path) -> None:
    recorded = (MACHINES / name / "sys.txt").read_text()
    unpack(MACHINES / name / "sys.txt", root)
    assert Pseudonyms().text(pack(root / "sys", root / "proc")) == recorded


def test_what_may_not_be_read_is_a_comment(root: Path) -> None:
    gpu = "pci0000:01/0000:01:00.0"
    sys = tree(root, TWO_NODES, function(gpu, numa_node="0", label="x"))
    root.chmod(0o755)
    (sys / "devices" / gpu / "label").chmod(0)
    with unprivileged():
        text = pack(sys)
    assert f"# sys/devices/{gpu}/label: Permission denied" in text.splitlines()
    assert f"sys/devices/{gpu}/numa_node = 0" in text.splitlines()


def test_bytes_that_are_no_text_are_recorded_as_such(tmp_path: Path) -> None:
    gpu = "pci0000:01/0000:01:00.0"
    sys = tree(tmp_path, TWO_NODES, function(gpu, label="x"))
    (sys / "devices" / gpu / "label").write_bytes(b"slot \xff\n")
    assert f"sys/devices/{gpu}/label = slot \ufffd" in pack(sys).splitlines()


def test_pods_ends_of_cables_are_not_recorded(tmp_path: Path) -> None:
    sys = tree(
        tmp_path,
        TWO_NODES,
        nic("pci0000:01/0000:01:00.0"),
        netdev("pci0000:01/0000:01:00.0/net/eth0", carrier="1"),
        netdev("virtual/net/veth12ab", carrier="1"),
        netdev("virtual/net/bond0", **{"bonding/slaves": "eth0"}),
    )
    text = pack(sys)
    assert "veth12ab" not in text
    assert "sys/devices/virtual/net/bond0/bonding/slaves = eth0" in text.splitlines()
    assert "sys/devices/pci0000:01/0000:01:00.0/net/eth0/carrier = 1" in text.splitlines()


# The format

PATHS = st.lists(st.sampled_from(["a", "b", "pci0000:00", "0000:00:1f.2"]), min_size=1).map(
    lambda parts: "sys/" + "/".join(parts)
)


@given(PATHS, st.text(st.characters(codec="utf-8")))
def test_any_content_survives(path: str, content: str) -> None:
    (entry,) = parse(f"{path} = {escape(content)}")
    assert entry == Entry(path, content=content)


PARTS = st.sampled_from(["sys", "proc", "a", "b", "..", ".", "", "etc", "->", "="])
LINES = st.lists(
    st.one_of(
        st.tuples(st.lists(PARTS, max_size=5).map("/".join), st.lists(PARTS).map("/".join)).map(
            " -> ".join
        ),
        st.lists(PARTS, max_size=5).map("/".join),
        st.lists(PARTS, max_size=5).map(lambda parts: "/".join(parts) + " = x"),
        st.text(max_size=20),
    ),
    max_size=8,
)


@given(LINES)
@settings(deadline=None)
def test_no_text_makes_anything_outside(lines: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        text = Path(folder, "sys.txt")
        text.write_bytes("\n".join(lines).encode(errors="replace"))
        root = Path(folder, "machine")
        with contextlib.suppress(RecordedError):
            unpack(text, root)
        assert {path.name for path in Path(folder).iterdir()} <= {"sys.txt", "machine"}
        if root.exists():
            assert {path.name for path in root.iterdir()} <= {"sys", "proc"}
        for path in root.rglob("*"):
            assert Path(os.path.realpath(path)).is_relative_to(root.resolve())  # a loop too


def test_the_three_kinds_of_lines(root: Path) -> None:
    text = root / "sys.txt"
    text.write_text(
        "# a comment\n"
        "\n"
        "sys/a/empty =\n"
        "sys/a/also = \n"
        "sys/a/lines = one\\ntwo \\\\n -> three = 3\n"
        "sys/a/link -> ../b/c\n"
        "sys/a/up -> ..\n"
        "sys/a/net/\n"
        "sys/b/c/value = 7\n"
    )
    unpack(text, root)
    assert (root / "sys/a/empty").read_text() == (root / "sys/a/also").read_text() == "\n"
    assert (root / "sys/a/lines").read_text() == "one\ntwo \\n -> three = 3\n"
    assert (root / "sys/a/link/value").read_text() == "7\n"
    assert (root / "sys/a/up/b/c/value").read_text() == "7\n"
    assert list((root / "sys/a/net").iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("etc/passwd = x", id="elsewhere"),
        pytest.param("/sys/a = x", id="absolute"),
        pytest.param("sys/../etc/passwd = x", id="climbing"),
        pytest.param("sys/./a = x", id="dot"),
        pytest.param("sys//a = x", id="empty part"),
        pytest.param("sys/a -> /etc/passwd", id="absolute link"),
        pytest.param("sys/a -> ../../etc/passwd", id="link out of the tree"),
        pytest.param("sys/a/b -> ../../..", id="link above the tree"),
        pytest.param("sys/a/b -> ../c/../../../..", id="link that descends to climb"),
        pytest.param("sys/a -> ", id="link to nothing"),
        pytest.param("../sys/", id="directory elsewhere"),
        pytest.param("sys/a", id="none of the three"),
        pytest.param("sys/a = 1\nsys/a = 2", id="twice"),
        pytest.param("sys/a = 1\nsys/a/b = 2", id="a file as a folder"),
        pytest.param("sys/b -> a\nsys/b/c = 2", id="through a link"),
    ],
)
def test_a_line_that_leads_astray_is_refused(line: str, root: Path) -> None:
    text = root / "sys.txt"
    text.write_text(line + "\n")
    with pytest.raises(RecordedError) as raised:
        unpack(text, root / "machine")
    assert str(raised.value).startswith(f"{text}: ")
    assert raised.value.path == text


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("sys.txt", None, "expected a recorded tree: No such file or directory"),
        ("sys.txt", b"sys/a = \xff", "invalid start byte"),
        ("nvml.json", b"{", "expected an NVML reading"),
        ("nvml.json", b'{"driver": 1}', "Expected `str`, got `int` - at `$.driver`"),
    ],
)
def test_a_broken_folder_says_which_file(
    file: str, content: bytes | None, said: str, root: Path
) -> None:
    shutil.copy(MACHINES / "l40s-8/sys.txt", root)
    shutil.copy(MACHINES / "l40s-8/nvml.json", root)
    (root / file).unlink()
    if content is not None:
        (root / file).write_bytes(content)
    with pytest.raises(RecordedError) as raised:
        read_recorded(root)
    assert str(raised.value).startswith(str(root / file))
    assert said in str(raised.value)


# What a real kernel showed


def test_four_nodes_with_switches_virtual_functions_and_a_bond() -> None:
    machine = read_recorded(MACHINES / "qemu-4-nodes")
    assert [(n.id, n.cpus) for n in machine.numa_nodes] == [
        (0, (0, 1)),
        (1, (2, 3)),
        (2, (4, 5)),
        (3, (6, 7)),
        (4, ()),
    ]
    assert machine.numa_nodes[4].distance == {0: 28, 1: 17, 2: 28, 3: 28, 4: 10}
    assert all(n.memory_bytes and n.memory_bytes > 400 << 20 for n in machine.numa_nodes)
    assert all(n.huge_pages == {2 << 20: 0, 1 << 30: 0} for n in machine.numa_nodes)
    pci = by_address(machine)
    assert len(pci) == 49
    for bus, node in {"2": 0, "6": 1, "a": 2, "e": 3}.items():
        # root port → upstream port → downstream ports → two devices and a NIC
        assert pci[f"0000:{bus}0:00.0"].parent is None
        assert pci[f"0000:{bus}1:00.0"].parent == f"0000:{bus}0:00.0"
        for port, below in enumerate("345"):
            end = pci[f"0000:{bus}{below}:00.0"]
            assert end.parent == f"0000:{bus}2:0{port}.0"
            assert pci[f"0000:{bus}2:0{port}.0"].parent == f"0000:{bus}1:00.0"
            assert (end.root, end.numa) == (f"pci0000:{bus}0", node)
            assert end.numa_from is NumaSource.SYSFS
    assert pci["0000:26:00.1"].physical_function == "0000:26:00.0"
    assert pci["0000:26:00.1"].numa == pci["0000:26:00.0"].numa == 0
    assert pci["0000:00:1e.0"].link is None  # inside the root complex: "Unknown", 255
    assert pci["0000:22:00.0"].link is None  # QEMU's switch: "Unknown", 0
    assert [(n.pci, n.name, n.up) for n in machine.nics] == [
        ("0000:25:00.0", "eth3", False),
        ("0000:65:00.0", "eth2", False),
        ("0000:a5:00.0", "eth1", True),
        ("0000:e5:00.0", "eth0", True),
        (None, "bond0", False),
    ]
    assert (machine.nics[4].members, machine.nics[4].numa) == (("eth0", "eth1"), None)


def test_a_removed_device_is_gone_and_nothing_else() -> None:
    before = by_address(read_recorded(MACHINES / "qemu-4-nodes"))
    after = by_address(read_recorded(MACHINES / "qemu-4-nodes-removed"))
    assert before.keys() - after.keys() == {"0000:23:00.0", "0000:26:00.1", "0000:26:00.2"}
    assert {a: d for a, d in before.items() if a in after} == after


def test_a_flat_virtual_machine_has_no_locality() -> None:
    machine = read_recorded(MACHINES / "qemu-flat-vm")
    assert len(machine.numa_nodes) == 1
    assert {(d.numa, d.numa_from) for d in machine.pci} == {(None, None)}
    assert [n.name for n in machine.nics] == ["eth0", "eth1", "eth2"]


def test_a_nic_in_another_network_namespace_keeps_its_function() -> None:
    machine = read_recorded(MACHINES / "qemu-flat-vm-netns")
    assert [(n.pci, n.netdevs) for n in machine.nics] == [
        ("0000:03:00.0", ("eth0",)),
        ("0000:04:00.0", ("eth1",)),
        ("0000:05:00.0", ()),
    ]
    assert machine.nics[2].name == "0000:05:00.0"


def test_power9_names_the_memory_of_six_gpus() -> None:
    machine = read_recorded(MACHINES / "hwloc-power9-gpu-memory")
    assert {n.id: n.gpu for n in machine.numa_nodes if n.gpu} == {
        255: "0004:05:00.0",
        254: "0004:06:00.0",
        253: "0006:00:00.0",
        252: "0007:00:00.0",
        251: "0035:04:00.0",
        250: "0035:05:00.0",
    }
    assert {n.id: len(n.cpus) for n in machine.numa_nodes if n.cpus} == {0: 88, 8: 88}
    assert machine.numa_nodes[1].distance == {0: 40, 8: 10, **dict.fromkeys(range(250, 256), 80)}
    assert {n.memory_bytes for n in machine.numa_nodes if not n.cpus} == {15 << 30}


def test_a_bridge_of_two_sockets_gives_no_node() -> None:
    machine = read_recorded(MACHINES / "hwloc-r910-local-cpus")
    assert {str(d.address): d.numa for d in machine.pci if d.numa is not None} == {
        "0000:43:00.0": 2
    }
    assert {d.root for d in machine.pci} == {"pci0000:00", "pci0000:40"}
    assert [(n.name, n.rate_megabits_per_s) for n in machine.nics if n.up] == [
        ("eth0", 1_000),
        ("qib0", 40_000),
    ]


def test_a_domain_of_more_than_16_bits_is_last_in_order() -> None:
    machine = read_recorded(MACHINES / "hwloc-kvm-domain-32-bits")
    assert [d.address for d in machine.pci][-3:] == [
        "0000:00:03.0",
        "10000:00:00.0",
        "10000:00:04.0",
    ]
    assert machine.pci[-1].root == "pci10000:00"


# rte record


@pytest.fixture
def recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the command on a recorded machine, with NVML answering for it."""

    def run(name: str, *, with_library: bool = True) -> Path:
        machine = MACHINES / name
        unpack(machine / "sys.txt", root / name)
        for key, value in Driver(root / f"{name}-driver", machine).env.items():
            if with_library or key != "LD_LIBRARY_PATH":
                monkeypatch.setenv(key, value)
        monkeypatch.setenv("KUBELET_ROOT", str(root / "kubelet"))
        folder = root / f"{name}-recorded"
        where = ["--sysfs", str(root / name / "sys"), "--procfs", str(root / name / "proc")]
        assert main(["record", str(folder), *where]) == 0
        return folder

    return run


def without_names(machine: Machine) -> bytes:
    """The machine as JSON under names that are counted, so that two recordings compare."""
    return Pseudonyms().text(msgspec.json.encode(_plain(machine)).decode()).encode()


def _plain(machine: Machine) -> dict[str, object]:
    fields = {name: getattr(machine, name) for name in machine.__slots__}
    for name in ("levels", "peer_reads"):  # keyed by pairs, which JSON has no keys for
        fields[name] = sorted((*pair, value) for pair, value in fields[name].items())
    return fields


@pytest.mark.parametrize("name", ["hgx-h100-oci", "mig-half", "gb200-tray", "one-lost"])
def test_rte_record_gives_the_same_machine_under_other_names(
    name: str, recorded: Callable[..., Path]
) -> None:
    folder = recorded(name)
    assert without_names(read_recorded(folder)) == without_names(read_recorded(MACHINES / name))
    original = read_recorded(MACHINES / name)
    text = "".join(path.read_text() for path in folder.iterdir())
    for gpu in original.gpus:
        assert gpu.uuid is None or str(gpu.uuid) not in text
    assert not any(slice_.id in text for gpu in original.gpus for slice_ in gpu.slices)


def test_rte_record_finds_nvml_where_the_driver_is_mounted(
    recorded: Callable[..., Path], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = root / "driver-root/usr/lib64"
    shutil.copytree(fake_nvml().library_dir, library)
    monkeypatch.setenv("RTE_DRIVER", "mounted")
    monkeypatch.setenv("CONTAINER_DRIVER_ROOT", str(root / "driver-root"))
    folder = recorded("one-lost", with_library=False)
    assert (folder / "nvml.json").exists()


def test_rte_record_says_what_it_could_not_read(
    recorded: Callable[..., Path], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "kubelet").mkdir()
    (root / "kubelet/config.yaml").write_text(
        "kind: KubeletConfiguration\n"
        "apiVersion: kubelet.config.k8s.io/v1beta1\n"
        "topologyManagerPolicy: single-numa-node\n"
        "clusterDNS: [10.1.2.3]\n"
    )
    folder = recorded("pcie-a100-pairs")
    said = capsys.readouterr()
    assert "not recorded: podresources.json: " in said.err
    assert sorted(path.name for path in folder.iterdir()) == [
        "about.md",
        "kubelet.yaml",
        "nvml.json",
        "sys.txt",
    ]
    assert (folder / "kubelet.yaml").read_text() == (
        "apiVersion: kubelet.config.k8s.io/v1beta1\n"
        "kind: KubeletConfiguration\n"
        "topologyManagerPolicy: single-numa-node\n"
    )
    assert "- podresources.json: " in (folder / "about.md").read_text()


def test_rte_record_asks_the_kubelet_what_is_in_use(
    kubelet: Callable[..., Kubelet],
    recorded: Callable[..., Path],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "pcie-a100-pairs"
    machine = read_recorded(MACHINES / name)
    ids = {str(g.uuid): (machine.numa_of(g.pci) or 0,) for g in machine.gpus}
    node = kubelet({"topologyManagerPolicy": "single-numa-node"})
    with SimplePlugin("nvidia.com/gpu", ids) as plugin:
        plugin.serve(node.plugin_dir)
        node.wait_devices("nvidia.com/gpu", 8)
        held = node.admit(pod("secret-trainer", {"nvidia.com/gpu": 2})).devices("nvidia.com/gpu")
        monkeypatch.setenv("PODRESOURCES_SOCKET", str(node.pod_resources))
        folder = recorded(name)
    answers = msgspec.json.decode((folder / "podresources.json").read_bytes())
    (used,) = answers["usage"]["pods"]
    assert used["pod"] == {"namespace": "namespace-1", "name": "pod-1"}
    given = {d["id"] for c in used["containers"] for d in c["devices"]}
    positions = {str(g.uuid): g.number for g in machine.gpus}
    names = {str(g.uuid): g.number for g in read_recorded(folder).gpus}
    assert {names[id] for id in given} == {positions[id] for id in held}
    assert {d["id"] for d in answers["allocatable"]["devices"]} == names.keys()
    assert "secret" not in (folder / "podresources.json").read_text()


def test_rte_record_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    assert main(["record", str(tmp_path)]) == 1
    expected = f"rte: {tmp_path}: expected a new or empty folder, it holds files\n"
    assert capsys.readouterr().err == expected
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# Other names

UUID = "29a25258-985a-5225-a4e9-05270c282f79"
FIRST_UUID = "00000000-0000-4000-8000-000000000001"
UNSET = (
    "00000000-0000-0000-0000-000000000000 00:00:00:00:00:00 ff:ff:ff:ff:ff:ff 0000:0000:0000:0000"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            f"GPU-{UUID} MIG-GPU-{UUID.upper()}/1",
            f"GPU-{FIRST_UUID} MIG-GPU-{FIRST_UUID}/1",
            id="one UUID is one, in either case",
        ),
        pytest.param(UNSET, UNSET, id="what is unset says nothing"),
        pytest.param(
            "net/enxb8cef6a1b2c4/address = b8:ce:f6:a1:b2:c4",
            "net/enx020000000001/address = 02:00:00:00:00:01",
            id="a MAC address in a name is the address",
        ),
        pytest.param(
            "net/ib0/address = 80:00:0a:28:fe:80:00:00:00:00:00:00:00:02:c9:03:00:1f:17:41",
            "net/ib0/address = 80:00:00:00:00:00:00:00:00:00:00:00:00:00:00:00:00:00:00:01",
            id="IPoIB",
        ),
        pytest.param(
            "mlx5_0/node_guid = b8ce:f603:00a1:b2c4",
            "mlx5_0/node_guid = 0200:0000:0000:0001",
            id="GUID",
        ),
        pytest.param(
            "eth0/phys_switch_id = b8cef6", "eth0/phys_switch_id = 0000000000000001", id="switch"
        ),
        pytest.param(
            "sys/bus/pci/devices/0000:3b:00.0 -> ../../../devices/pci0000:37/0000:3b:00.0",
            "sys/bus/pci/devices/0000:3b:00.0 -> ../../../devices/pci0000:37/0000:3b:00.0",
            id="PCI addresses stay",
        ),
    ],
)
def test_names_that_identify_are_replaced(text: str, expected: str) -> None:
    assert Pseudonyms().text(text) == expected
    assert Pseudonyms().text(expected) == expected


def test_serial_numbers_are_replaced_and_the_reading_stays_readable() -> None:
    reading = NvmlReading(
        driver="570",
        gpus=(
            GpuReading(index=0, serial="1322621081234", uuid="GPU-0"),
            GpuReading(index=1, serial="1322621081235"),
            GpuReading(index=2),
        ),
    )
    others = Pseudonyms()
    text = nvml_text(renamed_serials(reading, others), others)
    assert "13226" not in text
    again = msgspec.json.decode(text, type=NvmlReading)
    assert [gpu.serial for gpu in again.gpus] == ["0000000000001", "0000000000002", None]
    assert text.count("\n") == 8  # a GPU a line


def test_workloads_are_replaced_and_their_devices_named_as_in_nvml() -> None:
    uuid = f"GPU-{UUID}"
    usage = Usage(
        pods=(
            PodUse(
                pod=PodName(namespace="secret-team", name="secret-model-0"),
                containers=(
                    ContainerUse(
                        name="secret-trainer",
                        devices=(DeviceUse(resource="nvidia.com/gpu", id=DeviceId(uuid)),),
                        claims=("gpu.nvidia.com/gpu-host-7.example.com/gpu-0",),
                    ),
                ),
            ),
        )
    )
    others = Pseudonyms()
    known = others.text(uuid)
    text = podresources_text(
        usage, Allocatable(), others, host_names=("gpu-host-7", "gpu-host-7.example.com")
    )
    assert "secret" not in text
    assert "gpu-host-7" not in text
    assert known in text
    assert '"gpu.nvidia.com/host-1/gpu-0"' in text
