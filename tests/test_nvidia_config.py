"""NVIDIA's configuration file, variables and flags, and its config-manager's way of changing it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rte.__main__ import main
from rte.commands.carried import NVIDIA as FLAGS
from rte.config import Config, ConfigError, load, options
from rte.nvidia import PASSED_OVER, TAKEN, translated
from tests.daemon_process import DaemonProcess
from tests.small_kubelet import GPUS, SmallKubelet

FULL = """
version: v1
flags:
  migStrategy: mixed
  failOnInitError: true
  mpsRoot: /run/nvidia/mps
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: true
  useNodeFeatureAPI: null
  deviceDiscoveryStrategy: auto
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [envvar, cdi-cri]
    deviceIDStrategy: index
    cdiAnnotationPrefix: example.com/
    nvidiaCTKPath: /usr/bin/nvidia-ctk
    containerDriverRoot: /host-driver
    sharedDevicesAllocationPolicy: packed
  gfd:
    oneshot: false
    sleepInterval: 60s
resources:
  gpus: [{pattern: "*", name: nvidia.com/gpu}]
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
      - name: nvidia.com/gpu
        replicas: 4
      - name: mig-1g.10gb
        rename: small
        devices: [0, 1]
        replicas: 2
imex:
  channelIDs: [0]
  required: false
"""


def config(folder: Path, text: str, **more: Any) -> Config:
    file = folder / "config.yaml"
    file.write_text(text)
    return load(file=file, environ=more.pop("environ", {}), **more)


def test_a_full_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    got = config(tmp_path, FULL)
    assert got.devices.mig_strategy == "mixed"
    assert (got.nvml.driver_root, got.nvml.dev_root) == ("/run/nvidia/driver", "/")
    assert got.nvml.container_driver_root == "/host-driver"
    assert got.devices.gdrcopy_enabled
    assert got.devices.gds_enabled
    assert got.devices.mofed_enabled
    assert got.devices.pass_device_specs
    assert got.devices.device_list_strategy == ("envvar", "cdi-cri")
    assert got.devices.device_id_strategy == "index"
    assert got.cdi.annotation_prefix == "example.com/"
    assert got.devices.shared_allocation == "packed"
    sharing = got.sharing.time_slicing
    assert sharing.rename_by_default
    assert sharing.fail_requests_greater_than_one
    assert [(r.name, r.replicas) for r in sharing.resources] == [
        ("nvidia.com/gpu", 4),
        ("nvidia.com/mig-1g.10gb", 2),
    ]
    assert got.imex.channel_ids == (0,)
    # What changes nothing is told, key by key.
    for key in (
        "flags.failOnInitError",
        "flags.mpsRoot",
        "flags.gfd",
        "flags.plugin.nvidiaCTKPath",
        "resources",
        "sharing.timeSlicing.resources[1].rename",
        "sharing.timeSlicing.resources[1].devices",
    ):
        assert f"{key} changes nothing" in caplog.text


def test_a_file_that_says_nothing_changes_nothing(tmp_path: Path) -> None:
    assert config(tmp_path, "version: v1") == Config()
    assert config(tmp_path, "version: v1\nflags: {}\nsharing: {mps: null}") == Config()


def test_every_key_is_an_option_of_ours() -> None:
    known = {option.key for option in options()}
    assert set(TAKEN.values()) <= known
    assert not TAKEN.keys() & PASSED_OVER.keys()


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        pytest.param("sharing: {mps: {resources: []}}", "sharing.mps", "MPS", id="MPS"),
        *(
            pytest.param(
                f"flags: {{deviceDiscoveryStrategy: {word}}}",
                "flags.deviceDiscoveryStrategy",
                f"'{word}' is not supported",
                id=word,
            )
            for word in ("tegra", "wsl", "vgpu", "vfio")
        ),
        pytest.param("flags: {migStrategi: mixed}", "flags.migStrategi", "nothing", id="misspelt"),
        pytest.param("flags: [a]", "flags", "expected a mapping", id="no mapping"),
        pytest.param(
            "flags: {migStrategy: some}", "devices.migStrategy", "none, single, mixed", id="word"
        ),
        pytest.param(
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}",
            "sharing.timeSlicing.resources[0].replicas",
            ">= 2",
            id="one replica",
        ),
        pytest.param(
            "sharing: {timeSlicing: {resources: [{name: gpu, replica: 2}]}}",
            "sharing.timeSlicing.resources[0].replica",
            "nothing like it",
            id="misspelt in a list",
        ),
        pytest.param(
            "sharing: {timeSlicing: {resources: 3}}",
            "sharing.timeSlicing.resources",
            "list of mappings",
            id="no list",
        ),
        pytest.param(
            "imex: {channelIDs: [0, 1]}", "imex.channelIDs", "must be [] or [0]", id="channels"
        ),
    ],
)
def test_what_cannot_be_followed_stops_the_start_with_the_key(
    tmp_path: Path, text: str, key: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, f"version: v1\n{text}")
    assert caught.value.key == key
    assert problem in str(caught.value)
    assert "config.yaml" in str(caught.value)


def test_another_version_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"version: expected v1, got 'v2'"):
        config(tmp_path, "version: v2")


def test_the_second_file_wins_over_the_first_and_the_environment_over_both(tmp_path: Path) -> None:
    second = tmp_path / "nvidia.yaml"
    second.write_text("version: v1\nflags: {migStrategy: single, gdsEnabled: true}")
    ours = "devices: {migStrategy: mixed, cudaOrder: nvlink}\nnodeName: n"
    got = config(tmp_path, ours, over=second, environ={"GDS_ENABLED": "false"})
    assert got.devices.mig_strategy == "single"
    assert got.devices.cuda_order == "nvlink"
    assert got.node_name == "n"
    assert not got.devices.gds_enabled


VARIABLES = {
    "MIG_STRATEGY": "mixed",
    "NVIDIA_DRIVER_ROOT": "/run/nvidia/driver",
    "NVIDIA_DEV_ROOT": "/dev-root",
    "PASS_DEVICE_SPECS": "true",
    "DEVICE_LIST_STRATEGY": "volume-mounts",
    "DEVICE_ID_STRATEGY": "index",
    "GDRCOPY_ENABLED": "true",
    "GDS_ENABLED": "true",
    "MOFED_ENABLED": "true",
    "CDI_ANNOTATION_PREFIX": "x/",
    "DRIVER_ROOT_CTR_PATH": "/host",
    "SHARED_DEVICES_ALLOCATION_POLICY": "packed",
    "DEVICE_DISCOVERY_STRATEGY": "nvml",
    "IMEX_CHANNEL_IDS": "0",
    "IMEX_REQUIRED": "false",
    "KUBELET_SOCKET": "/k/device-plugins/kubelet.sock",
    "DP_DISABLE_HEALTHCHECKS": "xids",
    "DP_ENABLE_HEALTHCHECKS": "79",
}


def test_variables_are_understood() -> None:
    got = load(environ=VARIABLES)
    assert got.devices.mig_strategy == "mixed"
    assert (got.nvml.driver_root, got.nvml.dev_root) == ("/run/nvidia/driver", "/dev-root")
    assert got.nvml.container_driver_root == "/host"
    assert got.plugin_dir == Path("/k/device-plugins")
    assert got.imex.channel_ids == (0,)
    assert got.health.enable == "79"
    assert load(environ={"CONTAINER_DRIVER_ROOT": "/a"}).nvml.container_driver_root == "/a"


@pytest.mark.parametrize("variable", sorted(VARIABLES))
def test_each_variable_is_an_option(variable: str) -> None:
    assert [o.key for o in options() if variable in o.envs]


def test_tegra_by_variable_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"nvml\.discovery.*'tegra'.*one of auto, nvml"):
        load(environ={"DEVICE_DISCOVERY_STRATEGY": "tegra"})


def test_flags_are_understood_and_those_that_change_nothing_are_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = {
        "--mig-strategy": "mixed",
        "--nvidia-driver-root": "/a",
        "--dev-root": "/b",
        "--driver-root-ctr-path": "/c",
        "--device-list-strategy": "envvar",
        "--device-id-strategy": "index",
        "--cdi-annotation-prefix": "x/",
        "--shared-devices-allocation-policy": "packed",
        "--device-discovery-strategy": "auto",
        "--imex-channel-ids": "0",
        "--kubelet-socket": "/k/kubelet.sock",
        **dict.fromkeys(FLAGS, "x"),
    }
    given = [word for pair in flags.items() for word in pair]
    given += ["--pass-device-specs", "--gds-enabled", "--imex-required=false"]
    assert main(["config", *given]) == 0
    got = yaml.safe_load(capsys.readouterr().out)
    assert got["nvml"]["driverRoot"] == "/a"
    assert got["nvml"]["containerDriverRoot"] == "/c"
    assert got["devices"]["passDeviceSpecs"]
    assert got["imex"]["channelIDs"] == [0]


def test_the_document_has_every_key() -> None:
    text = (Path(__file__).parents[1] / "docs/migrate.md").read_text()
    for key in (*TAKEN, *PASSED_OVER, *FLAGS):
        assert f"`{key}`" in text, f"docs/migrate.md does not say what becomes of {key}"
    for key, ours in TAKEN.items():
        assert f"`{ours}`" in text, (key, ours)


def test_a_translation_says_the_same_twice() -> None:
    data = yaml.safe_load(FULL)
    assert translated(data) == translated(data)


# While it runs


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path) as daemon:
        yield daemon


def point(link: Path, name: str) -> None:
    """As NVIDIA's config-manager does it: another link in the place of the old one."""
    fresh = link.with_name(".fresh")
    fresh.symlink_to(link.parent / "available" / name)
    fresh.replace(link)


class Listed:
    """The healthy devices of the last list, which a kubelet offers."""

    def __init__(self, kubelet: SmallKubelet) -> None:
        self.lists = kubelet.lists[GPUS]

    def __iter__(self) -> Iterator[str]:
        return (d.ID for found in self.lists[-1:] for d in found.devices if d.health == "Healthy")


def test_the_link_of_the_config_manager_is_followed_unless_ids_in_use_would_go(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "nvidia"
    (folder / "available").mkdir(parents=True)
    slicing = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}"
    for name, text in {
        "plain": "",
        "shared": slicing,
        "damaged": "sharing: {mps: {resources: []}}",
    }.items():
        (folder / "available" / name).write_text(f"version: v1\n{text}\n")
    link = folder / "config.yaml"
    point(link, "plain")
    on = {str(gpu.uuid): daemon.machine.numa_of(gpu.pci) or 0 for gpu in daemon.gpus}
    replicas = {f"{id}::{n}": node for id, node in on.items() for n in range(2)}
    daemon.pods.gpus = {**on, **replicas}
    daemon.pods.offered = Listed(daemon.kubelet)
    daemon.start("--config-file", str(link)).registered()
    assert len(daemon.kubelet.devices()) == 8

    point(link, "shared")
    daemon.signal(signal.SIGHUP)
    daemon.until(lambda: len(daemon.kubelet.devices()) == 16, "replicas")
    assert len(daemon.kubelet.sockets["rte-gpu.sock"]) == 1  # no new registration

    id = f"{daemon.gpus[3].uuid}::1"
    daemon.pods.pods = {"train": (id,)}
    point(link, "plain")
    daemon.signal(signal.SIGHUP)
    daemon.until_logged(rf"not taken over: {id} \(nvidia.com/gpu\) is in use by default/train")
    assert len(daemon.kubelet.devices()) == 16

    point(link, "damaged")
    daemon.until_logged(r"not taken over: .*sharing\.mps: MPS is not supported")
    assert len(daemon.kubelet.devices()) == 16

    daemon.pods.pods = {}
    point(link, "plain")  # no signal: the link is watched as well
    daemon.until(lambda: len(daemon.kubelet.devices()) == 8, "whole GPUs")
    assert daemon.end() == 0
    assert os.path.lexists(link)


def test_a_change_of_our_own_file_is_followed_too(daemon: DaemonProcess) -> None:
    daemon.start().registered()
    daemon.write_config(devices={"cudaOrder": "nvlink", "gdsEnabled": True})
    daemon.until_logged("the changed configuration is in force")
    ids = [str(gpu.uuid) for gpu in daemon.gpus[:2]]
    envs = daemon.kubelet.allocate(*ids).envs
    assert envs["NVIDIA_GDS"] == "enabled"
    assert "CUDA_VISIBLE_DEVICES" in envs
    assert len(daemon.kubelet.lists[GPUS]) == 1
