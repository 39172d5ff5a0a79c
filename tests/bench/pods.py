"""Who tells of the pods: the kubelet's pods API and a watch at the API server, side by side.

A real kubelet serves its pods API and a real API server has the same pods, each about 8 KiB long.
`python -m tests.bench pods [SECONDS]` (60 by default) says for how long both idle.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from rte.follower import Follower
from rte.kubelet.api import pods_pb2 as api
from rte.kubelet.api import pods_pb2_grpc as rpc
from rte.kubelet.pods import PodsApi, parse_pods
from rte.kubelet.usage import channel
from rte.publish.access import Access
from rte.publish.apply import ApiServer
from rte.publish.pods import PodWatch
from tests.gobuild import program
from tests.real_apiserver import MERGE, Json
from tests.real_apiserver import ApiServer as RealApiServer
from tests.real_kubelet import Kubelet, numa_nodes, pod

NODE = "bench-node"
PODS = 110
CHANGES = 50
LISTS = 100
POD_BYTES = 8000


def main(arguments: Sequence[str]) -> None:
    idle_s = float(arguments[0]) if arguments else 60.0
    row = "{:<44} {:>10}".format
    with (
        RealApiServer(program("apiserver", print)) as server,
        Kubelet(program("kubelet", print), machine=numa_nodes(cpus=128)) as kubelet,
    ):
        namespace = server.create_namespace()
        server.create_service_account(namespace, "default")
        for number in range(PODS):
            run(server, kubelet, namespace, f"p{number}")
        with channel(kubelet.pods_api) as opened:
            size, took = lists_ms(rpc.PodsStub(opened))
        print(row(f"a list of {PODS} pods, KiB", f"{size / 1024:.0f}"))
        print(row("  asked and read, ms", f"{took:.1f}"))
        print(row("", "kubelet    API server"))
        found = {}
        for name, make, change in (
            (
                "kubelet",
                lambda wake: PodsApi(kubelet.pods_api, wake, lambda _: None),
                lambda pod: kubelet.finish(pod, namespace),
            ),
            (
                "API server",
                lambda wake: PodWatch(client(server), NODE, wake, lambda _: None),
                lambda pod: report(server, namespace, pod, "Succeeded"),
            ),
        ):
            with followed(make) as changed:
                used = idle(idle_s)
                found[name] = used, changes_ms(change, changed)
        for words, index in (("idle CPU, s an hour", 0), ("a pod ended → known, median ms", 1)):
            print(row(words, "    ".join(f"{each[index]:7.2f}" for each in found.values())))


def client(server: RealApiServer) -> ApiServer:
    return ApiServer(Access(server=server.url, ca_file=server.ca, token=server.token))


def run(server: RealApiServer, kubelet: Kubelet, namespace: str, name: str) -> None:
    manifest = pod(name, {"cpu": "100m", "memory": "64Mi"}, namespace=namespace)
    (container,) = manifest["spec"]["containers"]
    container["env"] = [{"name": "LONG", "value": "x" * POD_BYTES}]
    kubelet.admit(manifest)
    body: Json = {"metadata": {"name": name}, "spec": {**manifest["spec"], "nodeName": NODE}}
    server.create(f"/api/v1/namespaces/{namespace}/pods", body)
    report(server, namespace, name, "Running")


def report(server: RealApiServer, namespace: str, name: str, phase: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
    server.ask("PATCH", path, {"status": {"phase": phase}}, content_type=MERGE)


def lists_ms(kubelet: rpc.PodsStub) -> tuple[int, float]:
    """Bytes of a list, and the median of how long it takes."""
    took = []
    for _ in range(LISTS):
        time.sleep(0.02)  # the kubelet allows 100 a second
        began = time.perf_counter()
        answer = kubelet.ListPods(api.ListPodsRequest())
        parse_pods(answer.pods, known={})
        took.append(1000 * (time.perf_counter() - began))
    return answer.ByteSize(), statistics.median(took)


@contextlib.contextmanager
def followed(make: Callable[[Callable[[], None]], Follower]) -> Iterator[threading.Semaphore]:
    """A follower that knows the pods; the semaphore is released at each change."""
    changed = threading.Semaphore(0)
    follower = make(changed.release)
    follower.start()
    try:
        changed.acquire()
        yield changed
    finally:
        follower.stop()


def idle(seconds: float) -> float:
    """CPU seconds of this process in an hour like these seconds."""
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) * 3600 / seconds


def changes_ms(change: Callable[[str], None], changed: threading.Semaphore) -> float:
    took = []
    for number in range(CHANGES):
        time.sleep(0.2)
        while changed.acquire(blocking=False):
            pass
        began = time.perf_counter()
        change(f"p{number}")
        if not changed.acquire(timeout=5):
            raise TimeoutError(f"p{number} was not seen to end")
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)


if __name__ == "__main__":
    main(sys.argv[1:])
