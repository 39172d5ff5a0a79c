"""The plugin as a process: start to Register, and its memory after a minute beside 50 pods.

`rte plugin` runs over the fake NVML on a recorded machine, beside a PodResources socket, with its
metrics scraped. `python -m tests.bench daemon [SECONDS]` (60 by default) says how long it runs.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rte.sources.recorded import read_recorded, unpack
from tests.bench.rpc import preference
from tests.fake_nvml import Driver
from tests.machines.description import FOLDER
from tests.pod_resources import GPU, PodResources
from tests.ports import free_port
from tests.small_kubelet import SmallKubelet, until

MACHINE = "hgx-h100-oci"
PODS = 50
STARTS = 5


class Memory(NamedTuple):
    resident_mib: float
    anonymous_mib: float


class Plugin(NamedTuple):
    process: int
    registered_s: float
    kubelet: SmallKubelet
    pods: PodResources
    port: int


@contextmanager
def plugin() -> Iterator[Plugin]:
    """`rte plugin`, registered."""
    machine = FOLDER / MACHINE
    with tempfile.TemporaryDirectory(prefix="rte-") as folder:
        root = Path(folder)
        (root / "device-plugins").mkdir()
        (root / "pod-resources").mkdir()
        unpack(machine / "sys.txt", root / "host")
        known = read_recorded(machine)
        nodes = {str(gpu.uuid): known.numa_of(gpu.pci) or 0 for gpu in known.gpus}
        with (
            SmallKubelet(root / "device-plugins") as kubelet,
            PodResources(root / "pod-resources/kubelet.sock", nodes) as pods,
            (root / "log").open("w") as log,
        ):
            port = free_port()
            began = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "rte", "plugin"],
                env={
                    **os.environ,
                    **Driver(root / "driver", machine).env,
                    "KUBELET_ROOT": folder,
                    "RTE_SYSFS": str(root / "host/sys"),
                    "RTE_PROCFS": str(root / "host/proc"),
                    "METRICS_ADDRESS": "127.0.0.1",
                    "METRICS_PORT": str(port),
                },
                stderr=log,
            )
            try:
                kubelet.await_register(30)
                registered_s = time.monotonic() - began
                yield Plugin(process.pid, registered_s, kubelet, pods, port)
            finally:
                process.terminate()
                process.wait()


def memory(process: int) -> Memory:
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    resident, anonymous = (
        int(re.findall(rf"^{name}: +(\d+) kB", text, re.MULTILINE)[0]) / 1024
        for name in ("Rss", "Anonymous")
    )
    return Memory(resident, anonymous)


def workers(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def main(arguments: Sequence[str]) -> int:
    seconds = float(arguments[0]) if arguments else 60
    starts = []
    for _ in range(STARTS):
        with plugin() as found:
            starts.append(found.registered_s)
    print(
        f"start to Register, {STARTS} times: median {statistics.median(starts):.2f} s, "
        f"longest {max(starts):.2f} s (goal 1 s)"
    )
    with plugin() as found:
        assert until(lambda: found.kubelet.lists[GPU])
        ids = list(found.kubelet.devices())
        for number in range(PODS):
            found.pods.pods[f"pod-{number}"] = tuple(ids[number : number + 1])
        url = f"http://127.0.0.1:{found.port}/metrics"
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            urllib.request.urlopen(url, timeout=5).read()
            found.kubelet.plugin().GetPreferredAllocation(preference(ids, 4))
            found.kubelet.allocate(*ids[:2])
            time.sleep(min(5, seconds / 4))
        own = memory(found.process)
        print(
            f"memory after {seconds:.0f} s with {PODS} pods: {own.resident_mib:.1f} MiB resident, "
            f"{own.anonymous_mib:.1f} anonymous (goal 50 MiB resident)"
        )
        for worker in workers(found.process):
            its = memory(worker)
            print(
                f"  NVML worker: {its.resident_mib:.1f} MiB resident, "
                f"{its.anonymous_mib:.1f} anonymous"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
