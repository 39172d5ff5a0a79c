"""`rte doctor`: what is wrong on a node and what to do, as a person would find it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.daemon_process import DaemonProcess
from tests.fake_nvml import XID
from tests.real_apiserver import ApiServer
from tests.small_kubelet import GPUS


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A node with a kubelet whose policies are the sample's, and no daemon yet."""
    with DaemonProcess(tmp_path) as node:
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "topologyManagerPolicy": "single-numa-node",
            "cpuManagerPolicy": "static",
            "memoryManagerPolicy": "Static",
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(kubelet))
        node.config["kubelet"]["configFile"] = str(tmp_path / "config.yaml")
        node.write_config()
        yield node


Found = dict[str, list[dict[str, str]]]


def doctor(node: DaemonProcess) -> tuple[int, Found]:
    """Exit status and findings by subject."""
    done = node.command("doctor", "-o", "json")
    assert done.stderr == ""
    found: Found = {}
    for finding in json.loads(done.stdout)["findings"]:
        assert finding["do"]
        found.setdefault(finding["subject"], []).append(finding)
    return done.returncode, found


def subjects(found: Found, level: str = "wrong") -> set[str]:
    return {name for name, rows in found.items() if any(r["level"] == level for r in rows)}


def test_a_node_that_is_well_has_nothing_wrong(node: DaemonProcess) -> None:
    node.start().registered()
    status, found = doctor(node)
    assert (status, subjects(found)) == (0, set())
    done = node.command("doctor")
    assert done.returncode == 0
    assert done.stdout.endswith("nothing is wrong here\n")


def test_what_only_the_daemon_knows_is_asked_of_it(node: DaemonProcess) -> None:
    withheld = {"withhold": [{"pci": node.gpus[3].pci, "reason": "fan"}]}
    node.start(devices=withheld).registered()
    node.driver.event(1, XID, 79)
    node.until_unhealthy(1, 3)
    status, found = doctor(node)
    assert (status, subjects(found)) == (1, {"gpu"})
    (gpu,) = found["gpu"]
    assert gpu["what"].startswith(f"gpu-1 ({node.gpus[1].pci}) gets no work: xid-79: ")
    assert "docs/health.md" in gpu["do"]
    (cordon,) = found["cordon"]
    assert cordon["what"] == f"{node.gpus[3].pci} gets no work: fan"
    assert cordon["level"] == "advice"


def test_a_release_is_said_and_not_broken_by_the_question(node: DaemonProcess) -> None:
    node.start().registered()
    node.signal(signal.SIGUSR1)
    node.until(lambda: node.driver.sessions() == 0, "released")
    began = len(node.driver.journal())
    status, found = doctor(node)
    assert (status, subjects(found)) == (1, {"nvml"})
    assert "rte release --end" in found["nvml"][0]["do"]
    assert len(node.driver.journal()) == began


@pytest.mark.parametrize(
    ("control", "says", "do"),
    [
        ("call nvmlInitWithFlags fail 9", "Driver Not Loaded (9)", "load the driver"),
        ("call nvmlInitWithFlags fail 12", "Not Found (12)", "runtimeClassName nvidia"),
        ("call nvmlInitWithFlags fail 18", "mismatch (18)", "restart the pod"),
        ("call nvmlInitWithFlags abort", "killed by SIGABRT in nvmlInit", "kernel's log"),
        ("call nvmlInitWithFlags hang", "has not come back for 1 s", "killed"),
    ],
    ids=["no driver", "no library", "another version", "crash", "hang"],
)
def test_nvml_that_does_not_work_is_named_with_what_helps(
    node: DaemonProcess, control: str, says: str, do: str
) -> None:
    node.config["nvml"] = {"timeout": 1}
    node.write_config()
    node.driver.control(control)
    status, found = doctor(node)
    assert status == 1
    (nvml,) = found["nvml"]
    assert says in nvml["what"]
    assert do in nvml["do"]


def test_without_a_daemon_the_hardware_is_looked_at_all_the_same(node: DaemonProcess) -> None:
    node.driver.control("lost 2", "fabric 3 2", "remap 4 0 1 1 0")
    status, found = doctor(node)
    assert status == 1
    assert "daemon" in subjects(found, "advice")
    said = sorted(row["what"].split(":")[0] + row["what"].split(":")[3] for row in found["gpu"])
    assert [words.split(" ")[0] for words in said] == ["gpu-2", "gpu-3", "gpu-4"]
    assert any("NVLSM" in row["do"] for row in found["gpu"])


def test_a_gpu_without_a_numa_node_is_named_with_the_option_that_says_it(
    tmp_path: Path,
) -> None:
    with DaemonProcess(tmp_path, "vm-all-minus-one") as node:
        node.write_config()
        _, found = doctor(node)
        assert len(found["numa"]) == len(node.gpus)
        assert "numa.overrides" in found["numa"][0]["do"]


def test_a_numa_node_that_is_only_inferred_is_named_until_it_is_advertised(
    node: DaemonProcess,
) -> None:
    (node.sys / "bus/pci/devices" / node.gpus[0].pci / "numa_node").unlink()
    node.write_config()
    (said,) = doctor(node)[1]["numa"]
    assert "gpu-0" in said["what"]
    assert "inferred from parent: 0" in said["what"]
    node.write_config(numa={"advertiseInferred": True})
    assert "numa" not in doctor(node)[1]


def test_the_kubelet_is_compared_with_the_sample(node: DaemonProcess) -> None:
    Path(node.config["kubelet"]["configFile"]).write_text(
        "{apiVersion: kubelet.config.k8s.io/v1beta1, kind: KubeletConfiguration}"
    )
    status, found = doctor(node)
    assert "kubelet" not in subjects(found)
    said = " ".join(row["what"] for row in found["kubelet"])
    for name in ("topologyManagerPolicy", "cpuManagerPolicy", "memoryManagerPolicy"):
        assert f"{name} is " in said
    assert status in (0, 1)


def test_sockets_and_folders_that_are_not_there_are_named(node: DaemonProcess) -> None:
    node.kubelet.stop()
    node.pods.stop()
    (node.folder / "pki").mkdir()
    (node.folder / "pki/kubelet.key").write_text("secret")
    status, found = doctor(node)
    assert status == 1
    assert {"kubelet.sock", "pod-resources", "secrets"} <= subjects(found)
    node.kubelet.start()


def test_a_kubelet_without_our_devices_is_named(node: DaemonProcess) -> None:
    node.pods.offered = ()
    node.start().registered()
    assert GPUS.partition("/")[0] in doctor(node)[1]["registration"][0]["what"]


def test_a_damaged_configuration_that_the_daemon_does_not_follow_is_named(
    node: DaemonProcess,
) -> None:
    node.start().registered()
    node.write_config("nrt: {detial: gpu}")
    node.until_logged("is not taken over")
    done = node.command("doctor")
    assert done.returncode == 2
    assert "nrt.detial: no such option" in done.stderr


def test_definitions_and_rights_are_asked_where_a_kubeconfig_is_given(
    node: DaemonProcess, apiserver: ApiServer
) -> None:
    def kubeconfig(token: str) -> str:
        return str(apiserver.write_kubeconfig(node.folder / "kubeconfig", token=token))

    apiserver.create_service_account("default", "doctor")
    token = apiserver.create_token("default", "doctor")
    node.config["api"] = {"kubeconfig": kubeconfig(token)}
    node.config["health"]["events"] = True
    node.write_config()
    status, found = doctor(node)
    assert status == 1
    said = {row["what"].split(" (for")[0] for row in found["rbac"]}
    assert {
        "may not get nodes",
        "may not watch pods",
        "may not patch noderesourcetopologies.topology.node.k8s.io",
        "may not create events",
    } <= said
    node.config["api"] = {"kubeconfig": kubeconfig(apiserver.token)}
    node.write_config()
    _, found = doctor(node)
    assert "rbac" not in found
    node.config["api"] = {"kubeconfig": str(node.folder / "none")}
    node.write_config()
    assert "api" in subjects(doctor(node)[1])
