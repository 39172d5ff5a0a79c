"""What the configuration says reaches the containers: from its text to the kubelet's calls."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import grpc
import pytest

from plugin.life import DevicePlugin
from rte.commands.parts import plugin_options
from rte.config import ConfigError, load
from tests.real_kubelet import short_folder
from tests.small_kubelet import GPUS, SmallKubelet, until
from tests.small_machine import address, machine, slices, uuid, with_gpu

QUAD = machine((0, 0, 1, 1), pairs=[(0, 2), (1, 3)], cpu_nodes=(0, 1))
Start = Callable[..., DevicePlugin]


def configured(folder: Path, text: str) -> Any:
    file = folder / "rte.yaml"
    file.write_text(text)
    return load(file=file, environ={"KUBELET_ROOT": str(folder / "k")})


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Pytest's own is too long for sockets with long names."""
    folder = short_folder()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[SmallKubelet]:
    (tmp_path / "k/device-plugins").mkdir(parents=True)
    with SmallKubelet(tmp_path / "k/device-plugins") as kubelet:
        yield kubelet


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[DevicePlugin] = []

    def start(text: str, machine: Any = QUAD) -> DevicePlugin:
        plugin = DevicePlugin(plugin_options(configured(tmp_path, text)))
        started.append(plugin)
        plugin.start()
        plugin.update(machine, {})
        return plugin

    yield start
    for plugin in started:
        plugin.stop()


TIME_SLICING = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]%s}}\n"


def test_replicas_are_devices_that_share_a_gpu(start: Start, kubelet: SmallKubelet) -> None:
    start(TIME_SLICING % "")
    kubelet.await_register()
    assert len(kubelet.devices()) == 16
    assert f"{uuid(2)}::3" in kubelet.devices()
    answer = kubelet.allocate(f"{uuid(2)}::3", f"{uuid(2)}::1")
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == uuid(2)


def test_renamed_replicas_are_another_resource_and_more_than_one_is_refused(
    start: Start, kubelet: SmallKubelet
) -> None:
    start(TIME_SLICING % ", renameByDefault: true, failRequestsGreaterThanOne: true")
    assert kubelet.await_register().resource_name == f"{GPUS}.shared"
    shared = f"{GPUS}.shared"
    kubelet.allocate(f"{uuid(0)}::0", resource=shared)
    with pytest.raises(grpc.RpcError, match="failRequestsGreaterThanOne"):
        kubelet.allocate(f"{uuid(0)}::0", f"{uuid(1)}::0", resource=shared)


@pytest.mark.parametrize(
    ("policy", "gpus"), [("distributed", [uuid(0), uuid(2)]), ("packed", [uuid(0), uuid(0)])]
)
def test_replicas_are_spread_or_packed(
    start: Start, kubelet: SmallKubelet, policy: str, gpus: list[str]
) -> None:
    start(TIME_SLICING % "" + f"devices: {{sharedAllocation: {policy}}}")
    kubelet.await_register()
    chosen = kubelet.prefer(list(kubelet.devices()), 2)
    assert sorted(id.partition("::")[0] for id in chosen) == gpus


def test_slices_are_replicated_under_their_own_name(start: Start, kubelet: SmallKubelet) -> None:
    cut = with_gpu(QUAD, 3, mig_enabled=True, slices=slices(3, "1g.10gb"))
    mig = "nvidia.com/mig-1g.10gb"
    start(
        f"devices: {{migStrategy: mixed}}\n"
        f"sharing: {{timeSlicing: {{resources: [{{name: {mig}, replicas: 2}}]}}}}",
        cut,
    )
    assert {kubelet.await_register().resource_name for _ in range(2)} == {GPUS, mig}
    assert len(kubelet.devices()) == 3
    assert list(kubelet.devices(mig)) == [f"{cut.gpus[3].slices[0].id}::{n}" for n in range(2)]


def test_switches_are_variables(start: Start, kubelet: SmallKubelet) -> None:
    start("devices: {gdrcopyEnabled: true, gdsEnabled: true, mofedEnabled: true}")
    kubelet.await_register()
    assert dict(kubelet.allocate(uuid(0)).envs) == {
        "NVIDIA_VISIBLE_DEVICES": uuid(0),
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
    }


def test_a_device_is_on_all_nodes_of_its_socket(start: Start, kubelet: SmallKubelet) -> None:
    start("numa: {sameSocket: [[0, 1]]}")
    kubelet.await_register()
    listed = kubelet.devices()[uuid(0)]
    assert [node.ID for node in listed.topology.nodes] == [0, 1]


def test_a_channel_that_must_exist_stops_the_start(tmp_path: Path) -> None:
    config = configured(tmp_path, "imex: {channelIDs: [0], required: true}")
    with pytest.raises(ConfigError, match=r"imex.required: /dev/.*channel0 does not exist"):
        plugin_options(config)
    config = configured(tmp_path, "imex: {channelIDs: [0]}")
    assert plugin_options(config).handing.imex_channels == (0,)


# NCCL


def test_nccl_is_given_a_topology_file_of_the_graph(
    start: Start, kubelet: SmallKubelet, tmp_path: Path
) -> None:
    folder = tmp_path / "topology"
    folder.mkdir()
    plugin = start(f"devices: {{ncclTopologyDir: {folder}}}")
    kubelet.await_register()
    answer = kubelet.allocate(uuid(0))
    (mount,) = answer.mounts
    assert (mount.host_path, mount.read_only) == (str(folder), True)
    inside = Path(answer.envs["NCCL_TOPO_FILE"])
    assert inside.parent == Path(mount.container_path)
    file = folder / inside.name
    found = ElementTree.parse(file)
    assert {e.get("busid") for e in found.iter("pci")} == {address(n) for n in range(4)}
    assert file.stat().st_mode & 0o777 == 0o644
    # The same machine is no reason to write; a link that is gone is one.
    before = file.stat().st_ino
    plugin.update(QUAD, {})
    assert file.stat().st_ino == before
    plugin.update(machine((0, 0, 1, 1), pairs=[(0, 2)]), {})
    assert file.stat().st_ino != before
    assert len(list(ElementTree.parse(file).iter("nvlink"))) == 2
    assert [path.name for path in folder.iterdir()] == [inside.name]
    file.unlink()  # as who cleans the folder
    assert until(file.exists)


def test_nccls_file_is_whole_whenever_it_is_read(
    start: Start, kubelet: SmallKubelet, tmp_path: Path
) -> None:
    plugin = start(f"devices: {{ncclTopologyDir: {tmp_path}}}")
    file = tmp_path / "topology.xml"
    inodes = {file.stat().st_ino}

    def change() -> None:
        for pairs in [[(0, 2)], [(0, 2), (1, 3)]] * 50:
            plugin.update(machine((0, 0, 1, 1), pairs=pairs), {})
            inodes.add(file.stat().st_ino)

    changing = threading.Thread(target=change)
    changing.start()
    while changing.is_alive():
        assert ElementTree.parse(file).getroot().tag == "system"
    assert len(inodes) > 1


def test_a_folder_that_is_not_mounted_is_said_and_nothing_is_promised(
    start: Start, kubelet: SmallKubelet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(f"devices: {{ncclTopologyDir: {tmp_path / 'absent'}}}")
    kubelet.await_register()
    assert "NCCL_TOPO_FILE" not in kubelet.allocate(uuid(0)).envs
    assert f"mount the host's folder {tmp_path / 'absent'} here" in caplog.text
    (tmp_path / "absent").mkdir()
    assert until(lambda: "NCCL_TOPO_FILE" in kubelet.allocate(uuid(0)).envs)


# Fabric resources

FABRIC = f"""
devices: {{advertise: [gpu-fabric]}}
groups:
  names:
    ring-0: ["{address(0)}", "{address(2)}"]
    ring-1: ["{address(1)}"]
"""


def test_gpus_are_resources_by_configured_group(
    start: Start, kubelet: SmallKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = start(FABRIC)
    names = {kubelet.await_register().resource_name for _ in range(2)}
    first, second = sorted(names)
    assert (first, second) == ("nvidia.com/gpu-fabric.ring-0", "nvidia.com/gpu-fabric.ring-1")
    assert set(kubelet.devices(first)) == {uuid(0), uuid(2)}
    assert set(kubelet.devices(second)) == {uuid(1)}
    assert "gpu-3" in caplog.text
    assert "is in none of groups.names and is not advertised" in caplog.text
    # A broken link makes the group degraded, not renamed.
    plugin.update(machine((0, 0, 1, 1)), {})
    listed = {name: set(found.tables.devices) for name, found in plugin.resources.items()}
    assert listed == {first: {uuid(0), uuid(2)}, second: {uuid(1)}}


def test_config_of_nvidia_s_words_is_checked_by_key(tmp_path: Path) -> None:
    rows = {
        "devices: {advertise: [gpu, gpu-fabric]}": ("devices.advertise", "hand one GPU out twice"),
        "devices: {advertise: []}": ("devices.advertise", "needs gpu or gpu-fabric"),
        "devices: {advertise: [gpu-fabric]}": ("devices.advertise", "needs groups.names"),
        FABRIC.replace("[gpu-fabric]", "[gpu-fabric], migStrategy: single"): (
            "devices.advertise",
            "not with devices.migStrategy: single",
        ),
        FABRIC.replace("ring-0", "ring/0"): ("groups.names.ring/0", "end of a resource's name"),
        FABRIC.replace("ring-0", 53 * "r"): (f"groups.names.{53 * 'r'}", "resource's name"),
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpus, replicas: 2}]}}": (
            "sharing.timeSlicing.resources[0].name",
            "is no resource of this plugin",
        ),
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 1}]}}": (
            "sharing.timeSlicing.resources[0].replicas",
            ">= 2",
        ),
        "imex: {channelIDs: [1]}": ("imex.channelIDs", "must be [] or [0]"),
    }
    for text, (key, problem) in rows.items():
        with pytest.raises(ConfigError) as caught:
            configured(tmp_path, text)
        assert caught.value.key == key
        assert problem in str(caught.value)
