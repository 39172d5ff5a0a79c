"""How long the kubelet waits: every size asked over a Unix socket, beside an empty call.

The plugin is a process of its own on a recorded machine, as it is beside a kubelet; the clock is
the caller's. Besides recorded machines there are `56-slices`, `8x10-replicas` and the shapes of
the bench of the choice with their number of GPUs, such as `16-pairs` and `64-random`.
`python -m tests.bench rpc [--calls N] [--grid | MACHINE…]`; `--grid` is every size of every shape.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from plugin.api import deviceplugin_pb2 as api
from plugin.devices import Advertising, MigStrategy
from plugin.life import DevicePlugin, Options
from rte.model import Machine
from rte.sources.recorded import read_recorded
from rte.view.words import columns
from tests.bench import choose as choices
from tests.machines.description import FOLDER
from tests.small_kubelet import GPUS, SmallKubelet, until
from tests.small_machine import slices

MACHINES = (
    "hgx-h100-oci",
    "pcie-a100-pairs",
    "dgx1-v100",
    "dgx2-v100",
    "56-slices",
    "8x10-replicas",
    "64-all-to-all",
    "64-random",
)
CALLS = 400
FEW = 16  # sizes that are asked of machines with more devices than that


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
    resource = next(iter(kubelet.lists))
    ids = list(kubelet.devices(resource))
    yield "empty", lambda: plugin.GetDevicePluginOptions(api.Empty())
    sizes = range(1, len(ids) + 1)
    for size in sizes if len(ids) <= FEW else sizes[:: -(-len(ids) // FEW)]:
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
            assert until(lambda: any(kubelet.lists.values()))
            yield kubelet
        finally:
            process.communicate()


def serve(machine: str, folder: Path) -> None:
    """The plugin process: ends with its standard input."""
    plugin = DevicePlugin(Options(plugin_dir=folder, advertising=advertising(machine)))
    plugin.start()
    plugin.update(described(machine), {})
    sys.stdin.read()
    plugin.stop()


def advertising(name: str) -> Advertising:
    if name == "56-slices":
        return Advertising(mig=MigStrategy.SINGLE)
    return Advertising(replicas={GPUS: 10} if name == "8x10-replicas" else {})


def described(name: str) -> Machine:
    if name == "8x10-replicas":
        return read_recorded(FOLDER / "hgx-h100-oci")
    if name == "56-slices":
        whole = read_recorded(FOLDER / "hgx-h100-oci")
        cut = [
            replace(gpu, mig_enabled=True, slices=slices(gpu.number, *["1g.10gb"] * 7))
            for gpu in whole.gpus
        ]
        return replace(whole, gpus=tuple(cut))
    count, _, shape = name.partition("-")
    if count.isdecimal():
        return choices.machine(int(count), shape.replace("-", " "), flat=False)
    return read_recorded(FOLDER / name)


def grid(calls: int) -> Iterator[list[str]]:
    """The median of every size of every shape, in ms."""
    shapes = [shape.replace(" ", "-") for shape in choices.SHAPES]
    yield ["GPUs", "size", *choices.SHAPES]
    for count in choices.COUNTS:
        found = [
            [row for row in rows([f"{count}-{shape}"], calls=calls) if "prefer" in row.call]
            for shape in shapes
        ]
        for size in range(count):
            medians = (f"{column[size].median_ms:.2f}" for column in found)
            yield [str(count), str(size + 1), *medians]


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--serve"]:
        serve(arguments[1], Path(arguments[2]))
        return
    parser = argparse.ArgumentParser(prog="python -m tests.bench rpc")
    parser.add_argument("machines", nargs="*", metavar="MACHINE", default=MACHINES)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--grid", action="store_true")
    args = parser.parse_args(arguments)
    if args.grid:
        print("GetPreferredAllocation, median ms", *columns(list(grid(args.calls))), sep="\n")
        return
    print(f"{'machine':<18} {'call':<16} {'median':>8} {'p99':>8} {'longest':>8}  ms")
    for row in rows(args.machines, calls=args.calls):
        print(
            f"{row.machine:<18} {row.call:<16} {row.median_ms:8.2f} {row.p99_ms:8.2f} "
            f"{row.longest_ms:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
