"""Every request of a publisher's whole life, held to a list: nothing of the cluster but its own."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.daemon_process import DaemonProcess
from tests.fake_nvml import XID
from tests.http_faults import Fault, FaultyProxy
from tests.pod_resources import GPU
from tests.real_apiserver import MERGE, ApiServer

ROOT = Path(__file__).parents[1]
NRT = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
FABRIC = "/apis/rte.dev/v1alpha1/gpufabrics"
NODE = "/api/v1/nodes/node-a"

# Method, path, and the values of a query; "" for one that may be anything.
ALLOWED = {
    ("GET", NODE): {},
    ("PATCH", NODE): {"fieldManager": "rte", "force": "true"},  # the labels
    ("GET", f"{NRT}/node-a"): {"resourceVersion": "0"},
    ("PATCH", f"{NRT}/node-a"): {"fieldManager": "rte", "force": ""},
    ("GET", f"{FABRIC}/node-a"): {"resourceVersion": "0"},
    ("PATCH", f"{FABRIC}/node-a"): {"fieldManager": "rte", "force": ""},
    ("GET", "/api/v1/pods"): {
        "fieldSelector": "spec.nodeName=node-a",
        "limit": "100",
        "resourceVersion": "",
        "watch": "true",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "",
    },
    ("POST", "/api/v1/namespaces/default/events"): {},
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path, role="publish")
    (tmp_path / "config.yaml").write_text("topologyManagerPolicy: restricted\n")
    with daemon:
        yield daemon


def test_nothing_of_the_cluster_is_listed_or_watched_but_the_nodes_own_pods(
    daemon: DaemonProcess, apiserver: ApiServer
) -> None:
    apiserver.apply_files(ROOT / "crds/noderesourcetopology/crd.yaml")
    apiserver.apply_files(ROOT / "crds/gpufabric/crd.yaml")
    apiserver.create_node("node-a")
    ids = [str(gpu.uuid) for gpu in daemon.gpus]

    def available() -> int:
        answer = apiserver.request("GET", f"{NRT}/node-a")
        zones = answer.body.get("zones", ()) if answer.status == 200 else ()
        figures = [r for z in zones for r in z.get("resources", ()) if r["name"] == GPU]
        return sum(int(each["available"]) for each in figures) if figures else -1

    def hold(*numbers: int) -> None:
        """A pod holds these GPUs, and what was published follows."""
        daemon.pods.pods = {"a": tuple(ids[n] for n in numbers)} if numbers else {}
        daemon.until(lambda: available() == len(ids) - len(numbers), f"{numbers} are taken")

    with FaultyProxy(apiserver) as proxy:
        kubeconfig = apiserver.write_kubeconfig(
            daemon.folder / "kubeconfig", token=apiserver.token, url=proxy.url
        )
        settings = {
            "api": {"kubeconfig": str(kubeconfig), "timeout": 1},
            "kubelet": {"rootDir": str(daemon.folder), "poll": 0.1},
            "nrt": {"echo": 0.2, "reread": 1, "takeoverAfter": 0},
            "labels": {"write": "node"},
            "health": {"events": True, "coolDown": "100ms"},
        }
        daemon.start(**settings)
        hold(0)
        hold()
        daemon.driver.event(0, XID, 79)  # an Event of the Node
        for fault in (Fault(500), Fault(raw=b""), Fault(409), Fault(404)):
            proxy.faults = [fault]
            hold(1, 2)
            hold(3)
        edit = {"metadata": {"labels": {"hardware.nvlink.groups": "x"}}}
        apiserver.ask("PATCH", NODE, edit, content_type=MERGE)
        apiserver.delete(f"{NRT}/node-a")
        daemon.until(lambda: available() >= 0, "put back")
        daemon.pods.stop()
        daemon.pods.start()
        hold(0, 1)
        seen = set(ALLOWED)
        daemon.until(lambda: seen <= {(m, p) for m, p, _ in proxy.seen}, "all of the list")
        assert daemon.end() == 0
        daemon.start()
        hold(2)
        assert daemon.end() == 0
    for method, path in sorted(proxy.asked):
        url = urlsplit(path)
        allowed = ALLOWED.get((method, url.path))
        assert allowed is not None, f"{method} {path}"
        for key, (value,) in parse_qs(url.query).items():
            assert allowed.get(key) in ("", value), f"{method} {path}"
        if url.path == "/api/v1/pods":
            assert "fieldSelector=spec.nodeName%3Dnode-a" in url.query
    apiserver.delete(f"{NRT}/node-a")
    apiserver.delete(f"{FABRIC}/node-a")
    apiserver.delete(NODE)
