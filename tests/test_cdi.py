"""Our CDI specification as the CDI project's own library reads it, and how long it lives."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plugin.allocation import IMEX_NODES, Handing, Strategy
from plugin.cdi import OWN_FILE, OWN_KIND
from plugin.devices import Advertising, MigStrategy
from plugin.life import DevicePlugin, Options
from rte.model import Machine, Usage
from rte.sources.recorded import read_recorded
from tests.conftest import GoProgram
from tests.machines.description import FOLDER
from tests.pod_resources import PodResources
from tests.real_kubelet import short_folder
from tests.small_kubelet import SmallKubelet, until
from tests.small_machine import machine, slices, uuid, with_gpu

QUAD = machine((0, 0, 1, 1))
CUT = with_gpu(QUAD, 3, mig_enabled=True, slices=slices(3, "3g.40gb", "1g.10gb+me"))
CRI = Handing(strategies=frozenset({Strategy.CDI_CRI}))
MINORS = "gpu3/gi1/access 12\ngpu3/gi1/ci0/access 13\ngpu3/gi2/access 21\ngpu3/gi2/ci0/access 22\n"

Start = Callable[..., DevicePlugin]
Judge = Callable[..., dict[str, Any]]


@pytest.fixture
def folder() -> Iterator[Path]:
    yield (folder := short_folder())
    subprocess.run(["rm", "-r", str(folder)], check=True)


@pytest.fixture
def judge(go_program: GoProgram) -> Judge:
    """What the library makes of folders."""
    program = go_program("cdi")

    def judge(*folders: Path) -> dict[str, Any]:
        done = subprocess.run([program, *folders], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    return judge


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Plugins with their own specification, over device nodes that are plain files."""
    started: list[DevicePlugin] = []
    (folder / "dp").mkdir()
    (folder / "cdi").mkdir()
    (folder / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        (folder / "dev" / name).touch()
    (folder / "proc/driver/nvidia-caps").mkdir(parents=True)
    (folder / "proc/driver/nvidia-caps/mig-minors").write_text(MINORS)

    def start(machine: Machine = QUAD, **options: Any) -> DevicePlugin:
        options = {"handing": CRI, "cdi_nodes_only": True, **options}
        plugin = DevicePlugin(
            Options(
                plugin_dir=folder / "dp",
                cdi_directories=(folder / "etc", folder / "cdi"),
                dev=folder / "dev",
                proc=folder / "proc",
                **options,
            )
        )
        started.append(plugin)
        plugin.start()
        plugin.update(machine, {})
        return plugin

    yield start
    for plugin in started:
        plugin.stop()


def toolkit_spec(folder: Path, *names: str) -> None:
    devices = [{"name": n, "containerEdits": {"env": ["A=B"]}} for n in names]
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    (folder / "nvidia.json").write_text(json.dumps(spec))


def named(plugin: DevicePlugin) -> set[str]:
    return {n for r in plugin.resources.values() for n in r.tables.cdi_names.values()}


@pytest.mark.parametrize(
    ("handing", "version"),
    [
        pytest.param({}, "0.3.0", id="by UUID"),
        pytest.param({"ids": "index"}, "0.5.0", id="by index: names begin with a digit"),
        pytest.param({"dev_root": "/run/nvidia/driver"}, "0.5.0", id="nodes elsewhere"),
    ],
)
@pytest.mark.parametrize("of", [QUAD, CUT], ids=["whole", "slices"])
def test_the_library_takes_every_device_at_the_lowest_version(
    start: Start, judge: Judge, folder: Path, of: Machine, handing: dict[str, Any], version: str
) -> None:
    plugin = start(
        of,
        advertising=Advertising(mig=MigStrategy.MIXED),
        handing=Handing(strategies=CRI.strategies, **handing),
    )
    found = judge(folder / "cdi")
    assert found["errors"] == {}
    assert set(found["devices"]) == named(plugin)
    assert len(found["devices"]) == (4 if of is QUAD else 5)
    assert found["specs"] == {
        str(folder / "cdi" / OWN_FILE): {"version": version, "lowest": version}
    }


@pytest.mark.parametrize("name", ["hgx-h100-oci", "mig-half", "gb200-tray", "one-lost"])
def test_the_library_takes_what_recorded_machines_come_to(
    start: Start, judge: Judge, folder: Path, name: str
) -> None:
    plugin = start(
        read_recorded(FOLDER / name),
        advertising=Advertising(mig=MigStrategy.MIXED),
    )
    found = judge(folder / "cdi")
    assert found["errors"] == {}
    assert set(found["devices"]) == named(plugin) != set()


def test_a_slice_brings_its_gpu_and_its_two_capabilities(start: Start, folder: Path) -> None:
    start(CUT, advertising=Advertising(mig=MigStrategy.MIXED))
    spec = json.loads((folder / "cdi" / OWN_FILE).read_text())
    nodes = {
        d["name"]: [n["path"] for n in d["containerEdits"]["deviceNodes"]] for d in spec["devices"]
    }
    first, second = CUT.gpus[3].slices
    caps = "/dev/nvidia-caps/nvidia-cap"
    assert nodes[first.id] == ["/dev/nvidia3", f"{caps}12", f"{caps}13"]
    assert nodes[second.id] == ["/dev/nvidia3", f"{caps}21", f"{caps}22"]
    assert nodes[uuid(0)] == ["/dev/nvidia0"]


def test_the_toolkits_specification_leads_and_ours_takes_no_name_of_it(
    start: Start, judge: Judge, folder: Path
) -> None:
    toolkit_spec(folder / "cdi", uuid(0), uuid(1))
    plugin = start()
    assert named(plugin) == {
        *(f"nvidia.com/gpu={uuid(n)}" for n in (0, 1)),
        *(f"{OWN_KIND}={uuid(n)}" for n in (2, 3)),
    }
    found = judge(folder / "etc", folder / "cdi")
    assert named(plugin) <= set(found["devices"])
    assert found["errors"] == {}


def test_it_is_made_anew_when_devices_change_or_somebody_removes_it(
    start: Start, judge: Judge, folder: Path
) -> None:
    plugin = start(advertising=Advertising(mig=MigStrategy.MIXED))
    file = folder / "cdi" / OWN_FILE
    assert len(judge(folder / "cdi")["devices"]) == 4
    plugin.update(CUT, {})
    # With nothing in use the slices come after the kubelet let go of the GPU; nobody says so here.
    assert until(lambda: len(judge(folder / "cdi")["devices"]) == 5)
    renumbered = with_gpu(CUT, 0, minor=9)  # as a driver that is loaded anew may do
    plugin.update(renumbered, {})
    assert "/dev/nvidia9" in file.read_text()
    file.unlink()
    assert until(file.exists)


def test_it_is_whole_whenever_it_is_read(start: Start, folder: Path) -> None:
    plugin = start()
    stop = threading.Event()

    def change() -> None:
        minor = 0
        while not stop.is_set():
            minor = (minor + 1) % 7
            plugin.update(with_gpu(QUAD, 0, minor=minor), {})

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(300):
            assert len(json.loads((folder / "cdi" / OWN_FILE).read_text())["devices"]) == 4
    finally:
        stop.set()
        changing.join()
    assert [path.name for path in (folder / "cdi").iterdir()] == [OWN_FILE]


def test_it_goes_with_the_plugin_unless_a_pod_still_needs_it(start: Start, folder: Path) -> None:
    file = folder / "cdi" / OWN_FILE
    socket = folder / "pr/kubelet.sock"
    with (
        SmallKubelet(folder / "dp"),
        PodResources(socket, {uuid(n): 0 for n in range(4)}) as pods,
    ):
        pods.pods = {"train": (uuid(2),)}
        plugin = start(pod_resources=socket)
        assert until(plugin.held.ids)
        plugin.stop()
        assert file.exists(), "a container of the pod that starts again is given the same names"
        # A plugin that needs no specification removes it when the pod has ended.
        plugin = start(pod_resources=socket, handing=Handing())
        assert until(plugin.held.ids)
        time.sleep(0.2)
        assert file.exists()
        pods.pods = {}
        (folder / "dp/kubelet_internal_checkpoint").touch()  # as the kubelet does at a pod's end
        assert until(lambda: not file.exists())
        plugin.stop()
        plugin = start(pod_resources=socket)
        assert until(lambda: plugin.ready and file.exists())
        plugin.stop()
        assert not file.exists()


def test_it_goes_though_somebody_else_tells_what_is_in_use(start: Start, folder: Path) -> None:
    file = folder / "cdi" / OWN_FILE
    with SmallKubelet(folder / "dp"), PodResources(folder / "pr/kubelet.sock", {}) as pods:
        plugin = start(pod_resources=pods.socket, is_told=True)
        assert until(lambda: plugin.ready and file.exists())
        assert not plugin.reconfigure(replace(plugin.options, handing=Handing()))

        def told_and_gone() -> bool:
            plugin.observe(Usage(), asked=time.monotonic())
            return not file.exists()

        assert until(told_and_gone)
        plugin.stop()


def test_names_that_the_toolkit_adds_are_given_however_often_pods_are_listed(
    start: Start, folder: Path
) -> None:
    (folder / "etc").mkdir()
    toolkit_spec(folder / "etc", uuid(0))
    with SmallKubelet(folder / "dp"), PodResources(folder / "pr/kubelet.sock", {}) as pods:
        plugin = start(pod_resources=pods.socket, cdi_nodes_only=False)
        assert until(lambda: plugin.ready and named(plugin) == {f"nvidia.com/gpu={uuid(0)}"})
        toolkit_spec(folder / "etc", *(uuid(n) for n in range(4)))
        lists = pods.lists
        (folder / "dp/kubelet_internal_checkpoint").touch()
        assert until(lambda: pods.lists > lists)
        assert until(lambda: len(named(plugin)) == 4)
        plugin.stop()


def test_device_nodes_that_come_later_are_given_to_pods_from_then_on(
    start: Start, folder: Path
) -> None:
    """Channels and tools' nodes appear with a daemon or a module; the machine is the same."""
    handing = Handing(device_specs=True, imex_channels=(0,))
    with SmallKubelet(folder / "dp"):
        plugin = start(handing=handing)
        assert until(lambda: plugin.ready)
        (gpus,) = plugin.resources.values()
        assert "NVIDIA_IMEX_CHANNELS" not in gpus.allocate([uuid(0)]).envs
        (folder / "dev" / IMEX_NODES).mkdir()
        (folder / "dev" / IMEX_NODES / "channel0").touch()
        (folder / "dev/nvidia-modeset").touch()
        assert until(lambda: gpus.allocate([uuid(0)]).envs.get("NVIDIA_IMEX_CHANNELS") == "0")
        paths = {node.container for node in gpus.allocate([uuid(0)]).nodes}
        assert {"/dev/nvidia-modeset", f"/dev/{IMEX_NODES}/channel0"} <= paths
        plugin.stop()


def test_files_of_others_are_left_alone(start: Start, folder: Path) -> None:
    (folder / "cdi" / OWN_FILE).write_text('{"kind": "example.com/x", "devices": []}')
    socket = folder / "pr/kubelet.sock"
    with SmallKubelet(folder / "dp"), PodResources(socket, {}):
        plugin = start(pod_resources=socket, handing=Handing())
        assert until(lambda: plugin.ready)
        plugin.stop()
    assert (folder / "cdi" / OWN_FILE).exists()
