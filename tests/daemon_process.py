"""A daemon as a process, on a recorded machine: its kubelet, its driver, its folders."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Self

import urllib3
import yaml

from plugin.api import deviceplugin_pb2 as api
from rte.model import PciAddress
from rte.sources.recorded import read_recorded, unpack
from tests.config_map import write_config_map
from tests.fake_nvml import Driver
from tests.machines.description import FOLDER
from tests.pod_resources import PodResources
from tests.small_kubelet import GPUS, SmallKubelet
from tests.stopwatch import Stopwatch

ROOT = Path(__file__).parent.parent
PAIRS = "pcie-a100-pairs"
PATIENCE_S = 20.0
VERSIONS = count()


class DaemonProcess:
    """`rte plugin` (or another role) over the fake NVML, beside a small kubelet and PodResources.

    The kubelet's folders, the machine's /sys, the state folder and the configuration are real
    files below `folder`, which a test changes as the world would.
    """

    def __init__(self, folder: Path, machine: str = PAIRS, *, role: str = "plugin") -> None:
        self.folder = folder
        self.role = role
        self.machine = read_recorded(FOLDER / machine)
        self.gpus = self.machine.gpus
        self.sys = folder / "host/sys"
        unpack(FOLDER / machine / "sys.txt", folder / "host")
        self.boot_id = folder / "host/proc/sys/kernel/random/boot_id"
        self.driver = Driver(folder / "driver", FOLDER / machine)
        self.state = folder / "run"
        self.state.mkdir()
        for name in ("device-plugins", "pod-resources"):
            (folder / name).mkdir()
        self.kubelet = SmallKubelet(folder / "device-plugins")
        nodes = {str(g.uuid): self.machine.numa_of(g.pci) or 0 for g in self.gpus if g.uuid}
        self.pods = PodResources(folder / "pod-resources/kubelet.sock", nodes)
        self.config: dict[str, Any] = {
            "nodeName": "node-a",
            "stateDir": str(self.state),
            "host": {"sysfs": str(self.sys), "procfs": str(folder / "host/proc"), "interval": 0.3},
            "kubelet": {"rootDir": str(folder)},
            "health": {"coolDown": "300ms"},
            "http": {"port": 0},
        }
        self.file = folder / "config/rte.yaml"
        self.log_file = folder / "log"
        self.lists_before = 0  # of whole GPUs, when the process was started
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log_file.touch()
        self.kubelet.start()
        self.pods.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.pods.__exit__(None, None, None)
        self.kubelet.stop()
        assert "Traceback" not in self.log(), self.log()[-3000:]

    def write_config(self, text: str | None = None, **changed: Any) -> None:
        """As the kubelet changes a ConfigMap."""
        write_config_map(self.file.parent, text or yaml.safe_dump({**self.config, **changed}))

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "PYTHONWARNINGS": "error", **self.driver.env}

    def start(self, *arguments: str, **changed: Any) -> Self:
        """Starts it, without waiting for anything."""
        self.config |= changed
        self.write_config()
        self.lists_before = len(self.kubelet.lists[GPUS])
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rte", self.role, "--config", str(self.file), *arguments],
                env=self.environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        return self

    def registered(self) -> Self:
        """Returns when the kubelet has its first list since it was started."""
        self.kubelet.await_register(PATIENCE_S)
        self.until(lambda: len(self.kubelet.lists[GPUS]) > self.lists_before, "a list")
        return self

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command in the same pod."""
        return subprocess.run(
            [sys.executable, "-m", "rte", *arguments, "--config", str(self.file)],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    def get(self, path: str) -> str:
        """A page at the port of its configuration; "" while nothing listens there."""
        url = f"http://127.0.0.1:{self.config['http']['port']}{path}"
        try:
            return urllib3.request("GET", url, retries=False).data.decode()
        except urllib3.exceptions.HTTPError:
            return ""

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """The exit status of a process that ends by itself."""
        assert self.process is not None
        stopwatch = Stopwatch()
        while (status := self.process.poll()) is None:
            if stopwatch.past(within_s):
                raise subprocess.TimeoutExpired(self.process.args, within_s)
            time.sleep(0.01)
        self.process = None
        return status

    def end(self) -> int:
        if self.process is None:
            return 0
        self.signal(signal.SIGTERM)
        try:
            return self.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.wait()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.wait()

    def log(self) -> str:
        return self.log_file.read_text()

    def until(
        self, holds: Callable[[], object], what: str, *, within_s: float = PATIENCE_S
    ) -> None:
        stopwatch = Stopwatch()
        while not holds():
            assert self.process is None or self.process.poll() is None, (
                f"ended with {self.process.returncode}\n{self.log()[-3000:]}"
            )
            assert not stopwatch.past(within_s), (
                f"not within {within_s} s: {what}\n{self.log()[-3000:]}"
            )
            time.sleep(0.01)

    def until_logged(self, pattern: str, *, times: int = 1) -> None:
        self.until(lambda: len(re.findall(pattern, self.log())) >= times, pattern)

    def logged_at(self, pattern: str) -> datetime:
        """When the first such line was logged, in the time of the log."""
        found = re.search(rf"^(\S+ \S+) [A-Z]+ .*{pattern}", self.log(), re.MULTILINE)
        assert found, f"{pattern}\n{self.log()[-3000:]}"
        return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f")

    def unhealthy(self, resource: str = GPUS) -> list[int]:
        """Numbers of the GPUs that the last list calls Unhealthy."""
        return self.sick(self.kubelet.devices(resource).values())

    def was_unhealthy(self, *numbers: int) -> bool:
        """Whether some list since the first called these GPUs Unhealthy, and no others."""
        return any(self.sick(found.devices) == [*numbers] for found in self.kubelet.lists[GPUS])

    def sick(self, listed: Iterable[api.Device]) -> list[int]:
        number = {str(gpu.uuid): gpu.number for gpu in self.gpus}
        return sorted(number[d.ID] for d in listed if d.health != "Healthy")

    def until_unhealthy(self, *numbers: int) -> None:
        self.until(lambda: self.unhealthy() == sorted(numbers), f"unhealthy GPUs {sorted(numbers)}")

    def answers(self) -> None:
        """Asserts that the kubelet's calls are answered."""
        ids = [str(gpu.uuid) for gpu in self.gpus if gpu.uuid]
        assert len(self.kubelet.prefer(ids, 2)) == 2

    # The hardware

    def load_driver(self) -> None:
        """Loads the kernel module, anew if it was loaded: the folder has another inode then."""
        folder = self.sys / "module/nvidia"
        fresh = folder.with_name("fresh")
        fresh.mkdir(parents=True)
        if folder.exists():
            folder.rename(self.folder / f"unloaded-{next(VERSIONS)}")  # keeps its inode in use
        fresh.rename(folder)

    def plug_in(self, address: PciAddress, as_: PciAddress) -> None:
        """One more GPU beside another: the same kind of function at a free address."""
        devices = self.sys / "bus/pci/devices"
        there = (devices / address).resolve()
        fresh = there.with_name(as_)
        shutil.copytree(there, fresh, symlinks=True)
        (devices / as_).symlink_to(os.path.relpath(fresh, devices))
