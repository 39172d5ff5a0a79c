"""`rte publish` as a process: once, dry, and following its own configuration."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import DaemonProcess


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path, role="publish")
    # Before the kubelet starts: a file that is younger than its socket is not what it works by.
    (tmp_path / "config.yaml").write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
        "topologyManagerPolicy: restricted\n"
    )
    with daemon:
        yield daemon


RTE = ("--patch-mode=false", "--notify-file=/x", "--max-events-per-second=5")  # its manifest's


def published(daemon: DaemonProcess) -> dict[str, Any]:
    path = daemon.folder / "out" / "noderesourcetopology-node-a.json"
    body: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"zones": []}
    return body


def attribute(daemon: DaemonProcess, name: str) -> str | None:
    found = {item["name"]: item["value"] for item in published(daemon).get("attributes", ())}
    return found.get(name)


def test_once_and_no_longer(daemon: DaemonProcess) -> None:
    assert daemon.start("--oneshot", "--out", str(daemon.folder / "out")).wait() == 0
    assert published(daemon)["zones"]
    assert attribute(daemon, "topologyManagerPolicy") == "restricted"  # of the usual file


def test_its_own_configuration_is_followed_while_it_runs(daemon: DaemonProcess) -> None:
    daemon.start("--out", str(daemon.folder / "out"))
    gpus = {"GPU", "NVLinkGroup"}
    daemon.until(lambda: gpus & {z["type"] for z in published(daemon)["zones"]}, "GPU zones")
    daemon.write_config(nrt={"detail": "node", "exclude": ["nvidia.com/gpu"]})
    daemon.until(
        lambda: {z["type"] for z in published(daemon)["zones"]} == {"Node"}, "no GPU zones"
    )
    assert daemon.end() == 0


def test_the_effective_configuration_is_printed(daemon: DaemonProcess) -> None:
    daemon.write_config()
    said = daemon.command("publish", "--dump-config", "--no-publish", "--hostname", "b", *RTE)
    assert said.returncode == 0
    assert "nodeName: b\n" in said.stdout
    assert "  publish: false\n" in said.stdout
