"""`rte publish` as a process: once, dry, and following its own configuration."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rte.agent import UNREAD_S
from tests.daemon_process import DaemonProcess
from tests.ports import free_port


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with configured(DaemonProcess(tmp_path, role="publish")) as daemon:
        yield daemon


def configured(daemon: DaemonProcess) -> DaemonProcess:
    """Before the kubelet starts: a file that is younger than its socket is not what it works by."""
    (daemon.folder / "config.yaml").write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
        "topologyManagerPolicy: restricted\n"
    )
    return daemon


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
    policy = attribute(daemon, "topologyManagerPolicy")
    assert policy == "restricted", daemon.log()  # of the usual file


def test_a_normal_start_warns_of_nothing(tmp_path: Path) -> None:
    began = time.monotonic()
    with configured(DaemonProcess(tmp_path, role="run")) as daemon:
        daemon.start("--out", str(daemon.folder / "out")).registered()
        daemon.until(lambda: published(daemon)["zones"], "an object")
        is_late = time.monotonic() - began > UNREAD_S
        assert daemon.end() == 0
    warned = [line for line in daemon.log().splitlines() if " INFO " not in line]
    if is_late:  # so it is said, and rightly
        warned = [line for line in warned if " hardware: no good reading yet" not in line]
    assert warned == []


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


def leave_empty(daemon: DaemonProcess) -> None:
    daemon.write_config("\n")


def misspell(daemon: DaemonProcess) -> None:
    daemon.write_config("nrt: {detial: gpu}")


def remove(daemon: DaemonProcess) -> None:
    daemon.file.unlink()


def make_unreadable(daemon: DaemonProcess) -> None:
    daemon.file.unlink()
    daemon.file.mkdir()


SPOILT = {
    "is empty": leave_empty,
    "nrt.detial: no such option": misspell,
    "cannot be read: No such file": remove,
    "cannot be read: Is a directory": make_unreadable,
}


@pytest.mark.parametrize(("words", "spoil"), SPOILT.items(), ids=list(SPOILT))
def test_a_spoilt_configuration_leaves_the_old_one_in_force_and_is_said(
    daemon: DaemonProcess, words: str, spoil: Callable[[DaemonProcess], None]
) -> None:
    """On its way into a pod a ConfigMap can be all of this."""
    problem = 'rte_problem{subject="configuration"} 1.0'
    gpu = daemon.gpus[3]
    chosen = {
        "nrt": {"detail": "node"},
        "devices": {"withhold": [{"pci": gpu.pci, "reason": "fan"}]},
        "http": {"address": "127.0.0.1", "port": free_port()},
    }
    daemon.start("--out", str(daemon.folder / "out"), **chosen)
    daemon.until(lambda: published(daemon)["zones"], "the object")
    cordon = f'rte_device_withheld{{device="{gpu.pci}"'
    daemon.until(lambda: cordon in daemon.get("/metrics"), "the cordon")
    before = published(daemon)
    spoil(daemon)
    daemon.until(lambda: problem in daemon.get("/metrics"), problem)
    daemon.until_logged(f"is not taken over.*{re.escape(words)}")
    said = [line for line in daemon.log().splitlines() if "is not taken over" in line]
    assert sum(words in line for line in said) == 1
    assert published(daemon) == before
    assert cordon in daemon.get("/metrics")
    if daemon.file.is_dir():
        daemon.file.rmdir()
    daemon.write_config(nrt={"detail": "gpu"})
    daemon.until(lambda: published(daemon) != before, "the mended one counts")
    daemon.until(lambda: problem not in daemon.get("/metrics"), "in order")
    assert daemon.end() == 0


def test_an_exporters_daemon_set_publishes(daemon: DaemonProcess) -> None:
    """Its container's arguments, and its file with what is left out."""
    extra = daemon.folder / "extra.yaml"
    extra.write_text('resourceExclude:\n  "*": [nvidia.com/gpu]\n')
    arguments = [
        "--dump-config=.log",
        "--sleep-interval=10s",
        "--metrics-mode=disabled",
        "--metrics-want-cli-auth=false",
        f"--sysfs={daemon.sys}",
        f"--kubelet-config-file={daemon.folder}/config.yaml",
        f"--podresources-socket=unix://{daemon.folder}/pod-resources/kubelet.sock",
        "--notify-file=/host-run/rte/notify",
        "-v=4",
    ]
    out = str(daemon.folder / "out")
    daemon.start(*arguments, "--config-file", str(extra), "--out", out, "--oneshot")
    assert daemon.wait() == 0
    assert "nodeName: node-a" in daemon.log()
    assert attribute(daemon, "topologyManagerPolicy") == "restricted"
    zones = [zone for zone in published(daemon)["zones"] if zone["type"] == "Node"]
    assert zones
    assert not [r for z in zones for r in z.get("resources", ()) if r["name"] == "nvidia.com/gpu"]
