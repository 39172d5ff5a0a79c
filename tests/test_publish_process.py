"""`rte publish` as a process: into a folder, and only looking."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from tests.daemon_process import DaemonProcess


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, role="publish") as node:
        file = tmp_path / "config.yaml"
        file.write_text(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
            "topologyManagerPolicy: restricted\n"
        )
        node.config["kubelet"]["configFile"] = str(file)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            node.config["http"] = {"address": "127.0.0.1", "port": probe.getsockname()[1]}
        yield node


def metrics(node: DaemonProcess) -> list[str]:
    try:
        url = f"http://127.0.0.1:{node.config['http']['port']}/metrics"
        return urllib3.request("GET", url, retries=False).data.decode().splitlines()
    except urllib3.exceptions.HTTPError:
        return []


def test_objects_can_be_had_in_a_folder(node: DaemonProcess, tmp_path: Path) -> None:
    out = tmp_path / "out"
    node.start("--out", str(out))
    node.until((out / "gpufabric-node-a.json").exists, "both objects")
    body = json.loads((out / "noderesourcetopology-node-a.json").read_text())
    assert {"name": "topologyManagerPolicy", "value": "restricted"} in body["attributes"]
    assert [zone["name"] for zone in body["zones"] if zone["type"] == "Node"] == [
        "node-0",
        "node-1",
    ]
    assert node.kubelet.registered.empty()
    assert node.end() == 0


def test_a_publisher_that_only_looks_writes_nothing(node: DaemonProcess, tmp_path: Path) -> None:
    out, features = tmp_path / "out", tmp_path / "features"
    labels = {"write": "feature-file", "featureFile": str(features)}
    node.start("--out", str(out), "--publish=false", labels=labels)
    node.until(
        lambda: 'rte_devices_allocatable{resource="nvidia.com/gpu"} 8.0' in metrics(node),
        "metrics of a first look",
    )
    time.sleep(0.5)
    assert not out.exists()
    assert not features.exists()
    assert not [line for line in metrics(node) if line.startswith("rte_writes_total{")]
