"""The publisher as a process: from state file to API server, bytes a write, memory, idle CPU.

`rte publish` runs on a recorded 8-GPU machine over the fake NVML, beside a PodResources socket
with 50 pods and a real API server. `python -m tests.bench publish [SECONDS]` (60 by default) says
how long it idles before its memory is read.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import urllib3
import yaml

from rte.sources.recorded import read_recorded, unpack
from tests.fake_nvml import fake_nvml
from tests.gobuild import program
from tests.machines.description import FOLDER
from tests.pod_resources import GPU, PodResources
from tests.ports import free_port
from tests.real_apiserver import ApiServer
from tests.small_kubelet import SmallKubelet

CRDS = Path(__file__).parents[2] / "crds"
MACHINE = "hgx-h100-oci"
NODE = "bench-node"
OBJECT = f"/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/{NODE}"
PODS = 50
CHANGES = 100
BURST, BURSTS = 20, 9
LAGS, LAG_S = 10, 0.3


class Memory(NamedTuple):
    resident_mib: float
    anonymous_mib: float


class Bench:
    """One node with its publisher."""

    def __init__(self, server: ApiServer, pods: PodResources, root: Path, process: int) -> None:
        self.server = server
        self.pods = pods
        self.root = root
        self.process = process
        self.port = 0
        self._free: int | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._follow, name="follow", daemon=True).start()

    def _follow(self) -> None:
        """Watches the object: asking again and again would take the time that is measured."""
        http = urllib3.PoolManager(ca_certs=str(self.server.ca), retries=False)
        list_, _, name = OBJECT.rpartition("/")
        url = f"{self.server.url}{list_}?watch=true&fieldSelector=metadata.name%3D{name}"
        headers = {"Authorization": f"Bearer {self.server.token}"}
        try:
            answer = http.request("GET", url, headers=headers, preload_content=False)
            rest = b""
            while part := answer.read1():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    with self._changed:
                        self._free = free_of(json.loads(line)["object"])
                        self._changed.notify_all()
        except urllib3.exceptions.HTTPError:
            return  # the server has ended

    def hold(self, *gpus: str) -> None:
        """One more pod with these GPUs beside 49 that hold none, as the kubelet would say it."""
        self.list(*gpus)
        self.write_checkpoint(*gpus)

    def list(self, *gpus: str) -> None:
        idle: dict[str, tuple[str, ...]] = {f"idle-{n}": () for n in range(PODS - 1)}
        self.pods.pods = {**idle, "worker": gpus}

    def write_checkpoint(self, *gpus: str) -> None:
        entry = {
            "PodUID": "uid-worker",
            "ContainerName": "c",
            "ResourceName": GPU,
            "DeviceIDs": {"0": list(gpus)},
            "AllocResp": "",
        }
        data = {"PodDeviceEntries": [entry], "RegisteredDevices": {GPU: list(self.pods.gpus)}}
        path = self.root / "device-plugins" / "kubelet_internal_checkpoint"
        temporary = path.with_name(".checkpoint")
        temporary.write_text(json.dumps({"Data": data, "Checksum": 1}))
        temporary.rename(path)

    def free(self) -> int | None:
        """GPUs that the object in the API server says are available."""
        return self._free

    def until_free(self, count: int, within_s: float = 30) -> float:
        began = time.perf_counter()
        with self._changed:
            if not self._changed.wait_for(lambda: self._free == count, within_s):
                raise TimeoutError(f"{count} free GPUs were not published within {within_s} s")
        return time.perf_counter() - began

    def metric(self, name: str) -> float:
        url = f"http://127.0.0.1:{self.port}/metrics"
        text = urllib.request.urlopen(url, timeout=5).read().decode()
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))


def free_of(body: Mapping[str, Any]) -> int:
    return sum(
        int(resource["available"])
        for zone in body["zones"]
        for resource in zone.get("resources", ())
        if resource["name"] == GPU
    )


def memory(process: int) -> Memory:
    text = Path(f"/proc/{process}/status").read_text()
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}
    return Memory(kib["VmRSS"] / 1024, kib["RssAnon"] / 1024)


def children(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task")
    return [int(c) for task in path.iterdir() for c in (task / "children").read_text().split()]


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(role: str = "publish") -> Iterator[tuple[Bench, SmallKubelet]]:
    """A daemon in this role that has published, and the kubelet whose plugin it may be."""
    with ApiServer(program("apiserver", print)) as server:
        for crd in sorted(CRDS.glob("*/crd.yaml")):
            server.apply_files(crd)
        server.create_node(NODE)
        folder = Path(tempfile.mkdtemp(prefix="rte-"))
        try:
            yield from publishing(server, folder, role)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publishing(server: ApiServer, folder: Path, role: str) -> Iterator[tuple[Bench, SmallKubelet]]:
    host, root = folder / "host", folder / "kubelet"
    unpack(FOLDER / MACHINE / "sys.txt", host)
    (root / "device-plugins").mkdir(parents=True)
    machine = read_recorded(FOLDER / MACHINE)
    gpus = {str(gpu.uuid): int(machine.numa_of(gpu.pci) or 0) for gpu in machine.gpus}
    kubelet = {"topologyManagerPolicy": "single-numa-node", "kind": "KubeletConfiguration"}
    kubelet["apiVersion"] = "kubelet.config.k8s.io/v1beta1"
    (root / "config.yaml").write_text(yaml.safe_dump(kubelet))
    port = free_port()
    config = {
        "nodeName": NODE,
        "host": {"sysfs": str(host / "sys"), "procfs": str(host / "proc")},
        "kubelet": {"rootDir": str(root), "configFile": str(root / "config.yaml")},
        "api": {"kubeconfig": str(server.kubeconfig)},
        "nrt": {"echo": 0},
        "http": {"address": "127.0.0.1", "port": port},
    }
    (folder / "rte.yaml").write_text(yaml.safe_dump(config))
    with (
        PodResources(root / "pod-resources" / "kubelet.sock", gpus) as pods,
        SmallKubelet(root / "device-plugins") as small,
    ):
        command = [sys.executable, "-m", "rte", role, "--config", str(folder / "rte.yaml")]
        environment = {**os.environ, **fake_nvml().env(FOLDER / MACHINE)}
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stderr=log)
            bench = Bench(server, pods, root, process.pid)
            bench.port = port
            try:
                bench.hold()
                bench.until_free(len(gpus))
                yield bench, small
            except TimeoutError:
                print((folder / "log").read_text()[-3000:], file=sys.stderr)
                raise
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(20)


def latencies_ms(bench: Bench) -> list[float]:
    """From the rename of the checkpoint until a watch shows it, each after a quiet time."""
    gpus = list(bench.pods.gpus)
    took = []
    for number in range(CHANGES):
        time.sleep(0.4)
        held = gpus[: 1 + number % 4]
        bench.hold(*held)
        took.append(1000 * bench.until_free(len(gpus) - len(held)))
    return sorted(took)


def lags_ms(bench: Bench) -> list[float]:
    """From the list that shows what the checkpoint said 0.3 s before, to the right object."""
    gpus = list(bench.pods.gpus)
    took = []
    for number in range(LAGS):
        bench.hold()
        bench.until_free(len(gpus))
        time.sleep(0.4)
        held = gpus[: 1 + number % 4]
        bench.list()
        bench.write_checkpoint(*held)
        time.sleep(LAG_S)
        bench.list(*held)
        took.append(1000 * bench.until_free(len(gpus) - len(held)))
    return sorted(took)


TRAINS: Mapping[str, Callable[[random.Random], list[float]]] = {
    "one every 50 ms": lambda chance: [n / BURST for n in range(BURST)],
    "each up to 25 ms late": lambda chance: [
        n / BURST + chance.uniform(0, 0.025) for n in range(BURST)
    ],
    "one every 15 ms": lambda chance: [n * 0.015 for n in range(BURST)],
    "at random": lambda chance: sorted(chance.random() for _ in range(BURST)),
}
"""20 changes in a second: when each comes, in seconds."""


def burst(bench: Bench, times_s: Sequence[float], *, first: int) -> tuple[float, float]:
    """Writes, and ms from the last change to the right object."""
    gpus = list(bench.pods.gpus)
    before = writes(bench)
    began = time.perf_counter()
    for number, at_s in enumerate(times_s):
        time.sleep(max(0.0, began + at_s - time.perf_counter()))
        held = gpus[: 1 + (first + number) % 7]
        bench.hold(*held)
    settled = 1000 * bench.until_free(len(gpus) - len(held))
    return writes(bench) - before, settled


def bursts(bench: Bench, row: Callable[..., str]) -> None:
    for name, train in TRAINS.items():
        chance, found = random.Random(1), []
        for number in range(BURSTS):
            time.sleep(1.2)  # a quiet time
            found.append(burst(bench, train(chance), first=number))
        many, settled = (sorted(each) for each in zip(*found, strict=True))
        print(row(f"{BURST} changes, {name}: writes", f"{many[BURSTS // 2]:.0f}"))
        print(row("  most of " + str(BURSTS), f"{many[-1]:.0f}"))
        print(row("  last change → right, median ms", f"{settled[BURSTS // 2]:.0f}"))
        print(row("  longest of " + str(BURSTS), f"{settled[-1]:.0f}"))


def writes(bench: Bench) -> float:
    return bench.metric("rte_writes_total")


def main(arguments: Sequence[str]) -> None:
    idle_s = float(arguments[0]) if arguments else 60.0
    with running() as (bench, _):
        before = writes(bench), bench.metric("rte_written_bytes_total")
        took = latencies_ms(bench)
        written = writes(bench) - before[0]
        size = (bench.metric("rte_written_bytes_total") - before[1]) / written
        late = lags_ms(bench)
        row = "{:<52} {:>9}".format
        print(row("state file → readable in the API server", "ms"))
        if bench.metric("rte_files_polled"):
            print("  the kernel gave no inotify instance: the files were polled every second")
        print(row("  median", f"{took[len(took) // 2]:.1f}"))
        print(row("  p99", f"{took[len(took) * 99 // 100 - 1]:.1f}"))
        print(row("  longest of " + str(len(took)), f"{took[-1]:.1f}"))
        print(row("bytes a write (patch)", f"{size:.0f}"))
        bursts(bench, row)
        print(row("list 0.3 s behind: shown → right, median ms", f"{late[len(late) // 2]:.0f}"))
        print(row("  longest of " + str(len(late)), f"{late[-1]:.0f}"))
        idle(bench, idle_s, row)


def idle(bench: Bench, idle_s: float, row: Callable[..., str]) -> None:
    before = cpu_s(bench.process), writes(bench)
    time.sleep(idle_s)
    used = (cpu_s(bench.process) - before[0]) * 3600 / idle_s
    print(row(f"after {idle_s:g} s idle, {PODS} pods", "rss  anon MiB"))
    print(row("  daemon", "{:.1f}  {:.1f}".format(*memory(bench.process))))
    for child in children(bench.process):
        print(row("  NVML worker", "{:.1f}  {:.1f}".format(*memory(child))))
    print(row("idle CPU, s an hour", f"{used:.1f}"))
    print(row("idle writes", f"{writes(bench) - before[1]:.0f}"))


if __name__ == "__main__":
    main(sys.argv[1:])
