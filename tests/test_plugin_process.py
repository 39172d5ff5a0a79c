"""`rte plugin` as it is run: a process over the fake NVML, with a real kubelet's managers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rte.sources.recorded import read_recorded, unpack
from tests.fake_nvml import Driver
from tests.machines.description import FOLDER
from tests.real_kubelet import Kubelet, pod
from tests.small_kubelet import until
from tests.stopwatch import Stopwatch

GPU = "nvidia.com/gpu"
MACHINE = FOLDER / "pcie-a100-pairs"
SINGLE = {"topologyManagerPolicy": "single-numa-node"}

StartKubelet = Callable[..., Kubelet]


class Process:
    """One `rte plugin` beside a kubelet."""

    def __init__(
        self, kubelet: Kubelet, driver: Driver, host: Path, log: Path, *, port: int = 0
    ) -> None:
        self.log = log
        with log.open("a") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rte", "plugin"],
                env={
                    **os.environ,
                    **driver.env,
                    "KUBELET_ROOT": str(kubelet.root),
                    "RTE_SYSFS": str(host / "sys"),
                    "RTE_PROCFS": str(host / "proc"),
                    "METRICS_PORT": str(port),
                },
                cwd=Path(__file__).parent.parent,
                stderr=stderr,
            )

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


class Node:
    def __init__(self, kubelet: Kubelet, folder: Path, *, metrics_port: int = 0) -> None:
        self.kubelet = kubelet
        self.metrics_port = metrics_port  # 0: no HTTP
        self.driver = Driver(folder / "driver", MACHINE)
        self.host = folder / "host"
        self.log = folder / "log"
        self.numbers = {gpu.uuid: gpu.number for gpu in read_recorded(MACHINE).gpus}
        unpack(MACHINE / "sys.txt", self.host)
        self.plugins: list[Process] = []

    def start(self) -> Process:
        port = self.metrics_port
        self.plugins.append(Process(self.kubelet, self.driver, self.host, self.log, port=port))
        return self.plugins[-1]

    def gpus(self, name: str, count: int) -> list[int]:
        admitted = self.kubelet.admit(pod(name, {GPU: count}))
        assert admitted.admitted, admitted
        return sorted(self.numbers[id] for id in admitted.devices(GPU))  # type: ignore[index]


@pytest.fixture
def node(kubelet: StartKubelet, tmp_path: Path) -> Iterator[Node]:
    node = Node(kubelet(SINGLE), tmp_path)
    yield node
    for plugin in node.plugins:
        if plugin.process.poll() is None:
            plugin.end()


def test_from_start_to_the_pair_and_to_the_end(node: Node) -> None:
    plugin = node.start()
    node.kubelet.wait_devices(GPU, 8)
    assert node.gpus("two", 2) == [0, 2]
    assert until(lambda: plugin.said(f"{GPU}: 2 of 4 offered"))
    stopwatch = Stopwatch()
    assert plugin.end() == 0
    assert stopwatch.took_s < 3
    node.kubelet.wait_devices(GPU, 0)
    assert not list(node.kubelet.plugin_dir.glob("*rte-gpu*"))
    assert node.driver.sessions() == 0


def test_a_plugin_that_was_killed_is_replaced_over_what_it_left(node: Node) -> None:
    first = node.start()
    node.kubelet.wait_devices(GPU, 8)
    before = node.gpus("before", 2)
    first.end(signal.SIGKILL)
    node.kubelet.wait_devices(GPU, 0)
    assert (node.kubelet.plugin_dir / "rte-gpu.sock").exists()
    node.start()
    node.kubelet.wait_devices(GPU, 8)
    assert sorted(before + node.gpus("after", 2)) == [0, 1, 2, 3]


def test_a_gpu_that_falls_off_the_bus_turns_unhealthy_and_the_others_go_on(node: Node) -> None:
    plugin = node.start()
    node.kubelet.wait_devices(GPU, 8)
    node.driver.control("lost 0")
    node.driver.event(0, 0x8, 79)  # Xid 79 comes with it, and wakes
    node.kubelet.wait_devices(GPU, 7)
    assert node.kubelet.state().capacity[GPU] == "8"
    assert node.gpus("two", 2) == [1, 3]
    assert plugin.process.poll() is None


def test_a_kubelet_that_comes_later_is_found(node: Node) -> None:
    node.kubelet.kill()
    plugin = node.start()
    assert until(lambda: node.log.exists() and plugin.said("no kubelet answers on"))
    node.kubelet.start()
    node.kubelet.wait_devices(GPU, 8)
    assert node.gpus("two", 2) == [0, 2]


def test_a_driver_that_hangs_registers_nothing_and_ends_nothing(node: Node) -> None:
    node.driver.control("call nvmlInitWithFlags hang")
    plugin = node.start()
    assert until(lambda: node.log.exists() and plugin.said(": device plugin"))
    time.sleep(0.5)
    assert plugin.process.poll() is None
    assert GPU not in node.kubelet.state().capacity
    assert plugin.end() == 0
