"""Both roles in one process: the kubelet's calls while each Allocate starts a publication, memory.

`rte run` on a recorded 8-GPU machine over the fake NVML, beside a kubelet's sockets with 50 pods
and a real API server. `python -m tests.bench both [SECONDS]` (60 by default) says how long it idles
before its memory is read.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial

from plugin.api import deviceplugin_pb2 as api
from tests.bench.publish import Bench, idle, running, writes
from tests.bench.rpc import preference
from tests.small_kubelet import GPUS, SmallKubelet, until

CALLS = 600
CHANGES = 200
HEAD = f"{'call':<44} {'median':>8} {'p99':>8} {'longest':>8}  ms"


def main(arguments: Sequence[str]) -> None:
    idle_s = float(arguments[0]) if arguments else 60.0
    with running("run") as (bench, kubelet):
        kubelet.await_register(30)
        assert until(lambda: kubelet.lists[GPUS])
        print(HEAD)
        plugin = kubelet.plugin()
        ids = list(kubelet.devices())
        report("empty", lambda: plugin.GetDevicePluginOptions(api.Empty()))
        ask = partial(preferred, kubelet, ids)
        report("prefer 4 of 8, one after the other", ask)
        gc.collect()
        gc.freeze()  # this process plays kubelet and PodResources, too: its own pauses do not count
        report(
            "empty, 3 a second",
            lambda: plugin.GetDevicePluginOptions(api.Empty()),
            calls=CHANGES,
            before=lambda _: time.sleep(0.3),
        )
        # At the same pace as below: over a minute a busy machine shows in the tail by itself.
        report("prefer 4 of 8, 3 a second", ask, calls=CHANGES, before=lambda _: time.sleep(0.3))
        before = writes(bench)
        report(
            "prefer 4 of 8, a publication each",
            ask,
            calls=CHANGES,
            before=lambda n: change(bench, kubelet, n),
        )
        print(f"{'  writes meanwhile':<44} {writes(bench) - before:8.0f}")
        idle(bench, idle_s, "{:<44} {:>9}".format)


def preferred(kubelet: SmallKubelet, ids: Sequence[str]) -> object:
    return kubelet.plugin().GetPreferredAllocation(preference(ids, 4))


def change(bench: Bench, kubelet: SmallKubelet, number: int) -> None:
    """An Allocate, which wakes the publisher, and what the kubelet then says."""
    time.sleep(0.3)  # so that the next is no burst but a publication of its own
    held = list(bench.pods.gpus)[: 1 + number % 4]
    request = api.ContainerAllocateRequest(devices_ids=held)
    kubelet.plugin().Allocate(api.AllocateRequest(container_requests=[request]))
    bench.hold(*held)
    time.sleep(0.0007 * (number % 40))  # at every stage of a publication


def report(
    name: str,
    call: Callable[[], object],
    *,
    calls: int = CALLS,
    before: Callable[[int], None] = lambda _: None,
) -> None:
    took = []
    for number in range(calls):
        before(number)
        began = time.perf_counter()
        call()
        took.append(1000 * (time.perf_counter() - began))
    took.sort()
    middle, late = took[calls // 2], took[calls * 99 // 100]
    print(f"{name:<44} {middle:8.2f} {late:8.2f} {took[-1]:8.2f}", flush=True)
