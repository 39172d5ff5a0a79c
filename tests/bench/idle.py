"""An idle hour of each command: CPU of the daemon and its NVML worker, wake-ups, memory.

`rte publish`, `rte plugin` and `rte run` on a recorded 8-GPU machine over the fake NVML, each
beside a real kubelet's managers and sockets with 50 pods, all at the same time, and a real API
server. `python -m tests.bench idle [SECONDS [CHECKOUT…]]` says for how long (600 by default), and
which other checkouts' commands idle beside ours, to compare with.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rte.sources.recorded import read_recorded, unpack
from tests.bench.publish import CRDS, MACHINE, PODS, children, cpu_s, memory
from tests.fake_nvml import fake_nvml
from tests.gobuild import program
from tests.machines.description import FOLDER
from tests.pod_resources import GPU
from tests.ports import free_port
from tests.real_apiserver import ApiServer
from tests.real_kubelet import Kubelet, numa_nodes, pod
from tests.simple_plugin import SimplePlugin

ROLES = ("publish", "plugin", "run")
GPU_PODS = 4
START_S = 60.0
SETTLE_S = 45.0  # the plugin tidies up its memory 10 s after its start; clients' back-offs end
NUMBERS = itertools.count()
OURS = Path(__file__).parents[2]


class Used(NamedTuple):
    """Until now."""

    cpu_s: float
    wakes: int


class Daemon(NamedTuple):
    checkout: Path
    role: str
    process: int

    def used(self) -> tuple[Used, Used]:
        """By the daemon and by its NVML worker."""
        own = Used(cpu_s(self.process), wakes(self.process))
        its = [Used(cpu_s(child), wakes(child)) for child in children(self.process)]
        return own, Used(sum(each.cpu_s for each in its), sum(each.wakes for each in its))


def main(arguments: Sequence[str]) -> None:
    idle_s = float(arguments[0]) if arguments else 600.0
    checkouts = [OURS, *map(Path, arguments[1:])]
    with ExitStack() as stack:
        server = stack.enter_context(ApiServer(program("apiserver", print)))
        for crd in sorted(CRDS.glob("*/crd.yaml")):
            server.apply_files(crd)
        daemons = [
            stack.enter_context(idling(server, checkout, role))
            for role in ROLES
            for checkout in checkouts
        ]
        time.sleep(SETTLE_S)
        before, began = [daemon.used() for daemon in daemons], time.monotonic()
        time.sleep(idle_s)
        after, hours = [daemon.used() for daemon in daemons], (time.monotonic() - began) / 3600
        print(f"{idle_s:g} s idle, {PODS} pods, load {os.getloadavg()[1]:.0f}")
        row = "{:<36} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8}".format
        print(row("CPU seconds an hour", "all", "daemon", "worker", "wakes/s", "rss MiB", "worker"))
        for daemon, old, new in zip(daemons, before, after, strict=True):
            own, its = ((b.cpu_s - a.cpu_s) / hours for a, b in zip(old, new, strict=True))
            woken = sum(b.wakes - a.wakes for a, b in zip(old, new, strict=True)) / hours / 3600
            sizes = [memory(each).resident_mib for each in (daemon.process, *workers(daemon))]
            name = f"rte {daemon.role}" + (
                "" if daemon.checkout == OURS else f"  {daemon.checkout}"
            )
            figures = (f"{value:.1f}" for value in (own + its, own, its, woken, *sizes))
            print(row(name, *figures))


def workers(daemon: Daemon) -> list[int]:
    return children(daemon.process)[:1]


def wakes(process: int) -> int:
    """How often its threads, those that are there now, have slept and been woken."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    found = (re.search(r"^voluntary.*?(\d+)$", (t / "status").read_text(), re.M) for t in tasks)
    return sum(int(each[1]) for each in found if each is not None)


@contextmanager
def idling(server: ApiServer, checkout: Path, role: str) -> Iterator[Daemon]:
    """A daemon of that checkout that has published or registered, on a node with pods."""
    node = f"{role}-{next(NUMBERS)}"
    server.create_node(node)
    machine = read_recorded(FOLDER / MACHINE)
    gpus = {str(gpu.uuid): (int(machine.numa_of(gpu.pci) or 0),) for gpu in machine.gpus}
    ids = [int(node.id) for node in machine.numa_nodes if node.cpus]
    with (
        tempfile.TemporaryDirectory(prefix="rte-") as name,
        Kubelet(program("kubelet", print), machine=numa_nodes(ids, cpus=64)) as kubelet,
        SimplePlugin(GPU, gpus) as other,
    ):
        folder, port = Path(name), free_port()
        unpack(FOLDER / MACHINE / "sys.txt", folder / "host")
        (folder / "run").mkdir()
        config = configuration(server, kubelet, folder, node=node, port=port)
        (folder / "rte.yaml").write_text(yaml.safe_dump(config))
        if role == "publish":
            other.serve(kubelet.plugin_dir)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "rte", role, "--config", str(folder / "rte.yaml")],
                env={
                    **os.environ,
                    **fake_nvml().env(FOLDER / MACHINE),
                    "PYTHONPATH": str(checkout),
                },
                cwd=checkout,
                stderr=log,
            )
        try:
            kubelet.wait_devices(GPU, len(gpus))
            for number in range(PODS):
                gpu = {GPU: 1} if number < GPU_PODS else {}
                kubelet.admit(pod(f"p{number}", {"cpu": "100m", "memory": "64Mi", **gpu}))
            await_ready(port)
            yield Daemon(checkout, role, process.pid)
        except TimeoutError:
            print((folder / "log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


def configuration(
    server: ApiServer, kubelet: Kubelet, folder: Path, *, node: str, port: int
) -> Mapping[str, Any]:
    host = folder / "host"
    return {
        "nodeName": node,
        "stateDir": str(folder / "run"),
        "host": {"sysfs": str(host / "sys"), "procfs": str(host / "proc")},
        "kubelet": {"rootDir": str(kubelet.root), "configFile": str(kubelet.root / "config.yaml")},
        "api": {"kubeconfig": str(server.kubeconfig)},
        "http": {"address": "127.0.0.1", "port": port},
    }


def await_ready(port: int) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5)
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"not ready within {START_S:g} s")


if __name__ == "__main__":
    main(sys.argv[1:])
