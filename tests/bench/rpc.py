"""How long the kubelet waits: every size asked over a Unix socket, beside an empty call.

The plugin is a process of its own on a recorded machine, as it is beside a kubelet; the clock is
the caller's. `python -m tests.bench.rpc [MACHINE…]`
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from plugin.api import deviceplugin_pb2 as api
from plugin.life import DevicePlugin, Options
from rte.sources.recorded import read_recorded
from tests.machines.description import FOLDER
from tests.small_kubelet import GPUS, SmallKubelet, until

MACHINES = ("hgx-h100-oci", "pcie-a100-pairs", "dgx1-v100", "dgx2-v100")
CALLS = 400


class Row(NamedTuple):
    machine: str
    call: str
    median_ms: float
    p99_ms: float
    longest_ms: float


def rows(machines: Sequence[str] = MACHINES, *, calls: int = CALLS) -> Iterator[Row]:
    """Every size with all devices offered, in random order, and what surrounds it."""
    for machine in machines:
        with serving(machine) as kubelet:
            for name, call in questions(kubelet, calls):
                yield measured(machine, name, call, calls)


def questions(kubelet: SmallKubelet, calls: int) -> Iterator[tuple[str, Callable[[], object]]]:
    plugin = kubelet.plugin()
    ids = list(kubelet.devices())
    yield "empty", lambda: plugin.GetDevicePluginOptions(api.Empty())
    for size in range(1, len(ids) + 1):
        requests = iter([preference(ids, size) for _ in range(calls)])
        ask = map(plugin.GetPreferredAllocation, requests)
        yield f"prefer {size} of {len(ids)}", partial(next, ask)
    two = api.AllocateRequest(
        container_requests=[api.ContainerAllocateRequest(devices_ids=ids[:2])]
    )
    yield "allocate 2", lambda: plugin.Allocate(two)


def preference(ids: Sequence[str], size: int) -> api.PreferredAllocationRequest:
    offered = random.sample(ids, len(ids))
    return api.PreferredAllocationRequest(
        container_requests=[
            api.ContainerPreferredAllocationRequest(
                available_deviceIDs=offered, allocation_size=size
            )
        ]
    )


def measured(machine: str, name: str, call: Callable[[], object], calls: int) -> Row:
    took = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        took.append(1000 * (time.perf_counter() - began))
    took.sort()
    return Row(machine, name, took[calls // 2], took[calls * 99 // 100], took[-1])


@contextmanager
def serving(machine: str) -> Iterator[SmallKubelet]:
    """A kubelet with which a plugin process on the machine is registered."""
    with (
        tempfile.TemporaryDirectory(prefix="rte-") as folder,
        SmallKubelet(Path(folder)) as kubelet,
    ):
        command = [sys.executable, "-m", "tests.bench.rpc", "--serve", machine, folder]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            kubelet.await_register(30)
            assert until(lambda: kubelet.lists[GPUS])
            yield kubelet
        finally:
            process.communicate()


def serve(machine: str, folder: Path) -> None:
    """The plugin process: ends with its standard input."""
    plugin = DevicePlugin(Options(plugin_dir=folder))
    plugin.start()
    plugin.update(read_recorded(FOLDER / machine), {})
    sys.stdin.read()
    plugin.stop()


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--serve"]:
        serve(arguments[1], Path(arguments[2]))
        return
    print(f"{'machine':<18} {'call':<16} {'median':>8} {'p99':>8} {'longest':>8}  ms")
    for row in rows(arguments or MACHINES):
        print(
            f"{row.machine:<18} {row.call:<16} {row.median_ms:8.2f} {row.p99_ms:8.2f} "
            f"{row.longest_ms:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
