"""How long a pod waits for a released GPU, with the echo and without.

A real kube-scheduler with NodeResourceTopologyMatch and its cache at the shortest period that is
advised, 5 s; a real kubelet's managers, our plugin, our publisher. `python -m tests.bench scheduler
[RELEASES [WITHOUT]]`: 10 releases with the echo and 1 without by default; one without takes
minutes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rte.pacer import Pace
from rte.sources.recorded import read_recorded
from tests.gobuild import program
from tests.machines.description import FOLDER
from tests.real_apiserver import ApiServer
from tests.real_kubelet import Kubelet, pod
from tests.real_scheduler import Scheduler
from tests.scheduling import CRD, GPU, Cluster, RealNode

RESYNC_S = 5
PATIENCE_S = 400.0  # a scheduler retries a pod after 300 s though nothing happens
CONFIG = {"topologyManagerPolicy": "single-numa-node", "cpuManagerPolicy": "static"}


def main(arguments: Sequence[str]) -> int:
    releases = int(arguments[0]) if arguments else 10
    without = int(arguments[1]) if len(arguments) > 1 else 1
    with ApiServer(program("apiserver", print)) as server:
        server.apply_files(CRD)
        for words, echo_s, count in (
            ("with the echo", Pace().echo_s, releases),
            ("without", 0.0, without),
        ):
            if not count:
                continue
            waits = measure(server, echo_s=echo_s, releases=count)
            print(
                f"{words}: {count} releases, waited {statistics.median(waits):.1f} s (median), "
                f"{max(waits):.1f} s (longest); resync period {RESYNC_S} s",
                flush=True,
            )
    return 0


def measure(server: ApiServer, *, echo_s: float, releases: int) -> list[float]:
    """Seconds from the end of a pod to the placement of the one that waits for its GPUs."""
    chance = random.Random(1)
    cluster = Cluster(server, "bench")
    with (
        node_of(cluster, Pace(echo_s=echo_s, poll_s=60)) as node,
        Scheduler(program("scheduler", print), server, resync_s=RESYNC_S) as scheduler,
    ):
        create = partial(cluster.create, scheduler=scheduler.name, node=node.name)
        running = []
        for name, wanted in {"daemon": {}, "a": {GPU: 4}, "b": {GPU: 4}}.items():
            made = pod(name, wanted)
            create(made)
            # The second waits for the cache.
            cluster.wait_placed(scheduler, [name], within_s=PATIENCE_S)
            node.start_pod(made)
            running.append(name)
        waits = []
        for number in range(releases):
            name = f"waiting-{number}"
            waiting = pod(name, {GPU: 4})
            create(waiting)
            cluster.verdicts(scheduler, [name])
            node.until_published(running)
            # Anywhere in a resync period, and after the echo of what came before.
            time.sleep(2 * RESYNC_S + chance.random() * RESYNC_S)
            released = time.monotonic()
            node.end_pod(running.pop(1))
            placed = cluster.wait_placed(scheduler, [name], within_s=PATIENCE_S)
            waits.append(placed[name] - released)
            node.start_pod(waiting)
            running.append(name)
    cluster.close()
    return waits


@contextmanager
def node_of(cluster: Cluster, pace: Pace) -> Iterator[RealNode]:
    machine = read_recorded(FOLDER / "hgx-h100-oci")
    start = partial(Kubelet, program("kubelet", print))
    node = RealNode(f"{cluster.namespace}-node", cluster, start, machine, CONFIG, pace)
    try:
        node.start()
        yield node
    finally:
        node.stop()
        node.kubelet.close()
