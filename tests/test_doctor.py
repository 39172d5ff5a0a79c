"""`rte doctor`: what is wrong on a node and what to do, as a person would find it."""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from rte.agent import UNREADY
from rte.problems import do
from tests.daemon_process import DaemonProcess
from tests.fake_nvml import XID
from tests.ports import free_port
from tests.real_apiserver import MERGE, ApiServer
from tests.small_kubelet import GPUS

ROOT = Path(__file__).parents[1]
CRDS = [ROOT / "crds" / kind / "crd.yaml" for kind in ("noderesourcetopology", "gpufabric")]
NUMBERS = itertools.count()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A node with a kubelet whose policies are the sample's, and no daemon yet."""
    node = DaemonProcess(tmp_path)
    kubelet = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "topologyManagerPolicy": "single-numa-node",
        "cpuManagerPolicy": "static",
        "memoryManagerPolicy": "Static",
    }
    # Before the kubelet starts: a file that is younger than its socket is not what it works by.
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(kubelet))
    node.config["kubelet"]["configFile"] = str(tmp_path / "config.yaml")
    node.write_config()
    with node:
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
    node.config["nvml"] = {"timeout": 1 if "hang" in control else 20}
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


def test_a_node_without_gpus_misses_none(tmp_path: Path) -> None:
    """The publisher alone runs on nodes of any kind."""
    with DaemonProcess(tmp_path, role="publish") as node:
        for device in (node.sys / "bus/pci/devices").iterdir():
            if (device / "vendor").read_text().strip() == "0x10de":
                device.unlink()
        node.pods.offered = ()
        node.write_config()
        assert "registration" not in doctor(node)[1]


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


# What the publisher's bad states look like


@pytest.fixture
def both(node: DaemonProcess, apiserver: ApiServer) -> Iterator[DaemonProcess]:
    """A daemon of both roles that publishes to an API server."""
    apiserver.apply_files(*CRDS)
    node.role = "run"
    node.config["nodeName"] = f"doctor-{next(NUMBERS)}"
    file = apiserver.write_kubeconfig(node.folder / "kubeconfig", token=apiserver.token)
    node.config["api"] = {"kubeconfig": str(file)}
    node.config["kubelet"]["poll"] = 0.3
    node.config["nrt"] = {"reread": 1}
    node.config["http"] = {"address": "127.0.0.1", "port": free_port()}
    apiserver.create_node(node.config["nodeName"])
    yield node
    node.end()
    apiserver.apply_files(*CRDS)  # where a test has taken one away


def until_ready(node: DaemonProcess) -> DaemonProcess:
    node.until(lambda: node.get("/readyz") == "ready\n", "ready")
    return node


def path_of(node: DaemonProcess) -> str:
    return f"/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/{node.config['nodeName']}"


def break_kubelet(node: DaemonProcess, apiserver: ApiServer) -> None:
    node.pods.stop()


def break_state_file(node: DaemonProcess, apiserver: ApiServer) -> None:
    (node.folder / "cpu_manager_state").write_text("not the kubelet's")


def change_kubelet_configuration(node: DaemonProcess, apiserver: ApiServer) -> None:
    file = Path(node.config["kubelet"]["configFile"])
    changed = {**yaml.safe_load(file.read_text()), "topologyManagerPolicy": "restricted"}
    fresh = file.with_name("fresh")
    fresh.write_text(yaml.safe_dump(changed))
    fresh.replace(file)


def write_too(node: DaemonProcess, apiserver: ApiServer) -> None:
    path = f"{path_of(node)}?fieldManager=other-exporter"
    zones = apiserver.get(path_of(node))["zones"]
    apiserver.ask("PATCH", path, {"zones": zones[:1]}, content_type=MERGE)


def take_definition(node: DaemonProcess, apiserver: ApiServer) -> None:
    apiserver.request("DELETE", DEFINITION)
    node.write_config(nrt={**node.config["nrt"], "detail": "node"})  # something to write


BAD_STATES = {
    "kubelet": break_kubelet,
    "state files": break_state_file,
    "kubelet configuration": change_kubelet_configuration,
    "another writer": write_too,
    "API server": take_definition,
}
NOT_INSTALLED = "is the custom resource definition installed?"
DEFINITION = (
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"
    "noderesourcetopologies.topology.node.k8s.io"
)


@pytest.mark.parametrize(("subject", "spoil"), BAD_STATES.items(), ids=list(BAD_STATES))
def test_each_bad_state_is_one_line_that_says_what_to_do(
    both: DaemonProcess,
    apiserver: ApiServer,
    subject: str,
    spoil: Callable[[DaemonProcess, ApiServer], None],
) -> None:
    until_ready(both.start())
    spoil(both, apiserver)
    problem = f'rte_problem{{subject="{subject}"}} 1.0'
    both.until(lambda: problem in both.get("/metrics"), problem)
    if subject == "API server":  # which refuses with other words while the definition is going
        both.until(lambda: NOT_INSTALLED in both.get("/readyz"), NOT_INSTALLED)
    status, found = doctor(both)
    assert status == 1
    (line,) = found[subject]
    assert line["do"] == do(subject)
    assert "\n" not in line["what"]
    readiness = both.get("/readyz")
    if subject in UNREADY:
        assert re.search(rf"^{subject}: .*; {re.escape(do(subject))}$", readiness, re.MULTILINE)
    else:
        assert readiness == "ready\n"
    if subject == "another writer":
        assert "'other-exporter'" in line["what"]
    if subject == "API server":
        assert NOT_INSTALLED in line["what"]
        assert "kubectl apply" in found["crd"][0]["do"]


def test_pods_that_may_not_be_followed_are_one_line_and_no_reason_to_be_not_ready(
    both: DaemonProcess, apiserver: ApiServer
) -> None:
    account = both.config["nodeName"]
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": ["get", "create", "patch"]}
        for group, resource in [
            ("", "nodes"),
            ("topology.node.k8s.io", "noderesourcetopologies"),
            ("rte.dev", "gpufabrics"),
        ]
    ]
    apiserver.create_service_account("default", account)
    apiserver.grant("default", account, rules)
    token = apiserver.create_token("default", account)
    apiserver.write_kubeconfig(Path(both.config["api"]["kubeconfig"]), token=token)
    problem = 'rte_problem{subject="pods"} 1.0'
    both.start()
    both.until(lambda: problem in both.get("/metrics"), problem)
    until_ready(both)
    _, found = doctor(both)
    (line,) = (row for row in found["pods"] if row["level"] == "wrong")
    assert "not followed" in line["what"]
    assert line["do"] == do("pods")
    assert subjects(found) == {"pods", "rbac"}
    assert {row["what"].split(" (for")[0] for row in found["rbac"]} == {
        "may not list pods",
        "may not watch pods",
    }


def test_what_is_chosen_to_be_so_is_said_as_advice(both: DaemonProcess) -> None:
    both.config["nrt"] |= {
        "exclude": [GPUS],
        "podExclude": [{"namespacePattern": "spare-*"}],
        "echo": 0,
        "fingerprint": {"watchPods": False},
    }
    until_ready(both.start())
    status, found = doctor(both)
    assert (status, subjects(found)) == (0, set()), found
    said = {row["what"] for name in ("excluded", "echo", "fingerprint") for row in found[name]}
    for words in (GPUS, "1 patterns", "nrt.echo: 0", "PodResources"):
        assert any(words in each for each in said), words
    both.end()
    both.write_config(nrt={"publish": False})
    (only,) = doctor(both)[1]["publish"]
    assert only["level"] == "advice"


def test_an_object_that_misleads_is_named_also_without_a_daemon(
    both: DaemonProcess, apiserver: ApiServer
) -> None:
    both.write_config()
    assert "no NodeResourceTopology" in doctor(both)[1]["object"][0]["what"]
    body = {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": both.config["nodeName"]},
        "attributes": [{"name": "staleSince", "value": "2026-11-29T00:00:00Z"}],
        "zones": [],
    }
    apiserver.create(f"{path_of(both).rpartition('/')[0]}?fieldManager=other-exporter", body)
    said = [row["what"] for row in doctor(both)[1]["object"]]
    assert said[0] == "nothing has been known of the node since 2026-11-29T00:00:00Z"
    assert said[1] == "states no policy: schedulers let every pod through"
    assert said[2].startswith("last written by 'other-exporter', at ")
    assert said[3].startswith(f"does not belong to the Node {both.config['nodeName']}")
    both.write_config(nodeName="unheard-of")
    assert "no Node unheard-of" in doctor(both)[1]["node"][0]["what"]
