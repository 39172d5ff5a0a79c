"""Bad input by name: the daemon keeps running, says what is wrong once, and recovers when it ends.

Each test is `rte run` as a process, on a recorded machine, with real files and sockets.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.daemon_process import DaemonProcess
from tests.fake_nvml import FakeNvml
from tests.http_faults import Fault, FaultyProxy
from tests.ports import free_port
from tests.real_apiserver import ApiServer

ROOT = Path(__file__).parents[1]
CRDS = [ROOT / "crds" / kind / "crd.yaml" for kind in ("noderesourcetopology", "gpufabric")]
NRT = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
GPU = "nvidia.com/gpu"
SOME_LOOKS_S = 1.2  # four of the intervals of DaemonProcess
NUMBERS = itertools.count()


class Node(DaemonProcess):
    """Both roles in one process; the objects go into a folder unless there is an API server."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, role="run")
        self.out = folder / "out"
        self.arguments: tuple[str, ...] = ("--out", str(self.out))
        self.config["nodeName"] = "node-a"
        self.config["kubelet"] |= {"configFile": str(folder / "config.yaml"), "poll": 0.3}
        self.config["nrt"] = {"echo": 0}
        (folder / "config.yaml").write_text(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
            "topologyManagerPolicy: single-numa-node\n"
        )

    def begin(self, **changed: Any) -> Self:
        self.start(*self.arguments, **changed)
        return self

    def free(self) -> list[int]:
        """Free GPUs of each NUMA zone, as published in the folder."""
        file = self.out / "noderesourcetopology-node-a.json"
        return free_gpus(json.loads(file.read_text())) if file.exists() else []

    def until_well(self) -> None:
        """All that there is to say is published, and the kubelet has eight GPUs."""
        self.until(lambda: self.free() == [4, 4], "four GPUs free on each NUMA node")
        self.until(lambda: len(self.kubelet.devices()) == 8, "eight devices")
        self.until_unhealthy()

    def said_once(self, pattern: str) -> None:
        """Asserts that the trouble was named, and that no warning was given twice."""
        lines = [line.split(" ", 2)[-1] for line in self.log().splitlines()]  # without the time
        assert sum(bool(re.search(pattern, line)) for line in lines) == 1, self.log()
        warnings = Counter(line for line in lines if line.startswith(("WARNING ", "ERROR ")))
        assert {line for line, times in warnings.items() if times > 1} == set()

    def has_place(self, number: int) -> bool:
        """Whether the kubelet was told of a NUMA node for this GPU."""
        return self.kubelet.devices()[str(self.gpus[number].uuid)].HasField("topology")


def free_gpus(body: dict[str, Any]) -> list[int]:
    return [
        int(resource["available"])
        for zone in body["zones"]
        if zone["type"] == "Node"
        for resource in zone["resources"]
        if resource["name"] == GPU
    ]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path) as node:
        yield node


def function(node: Node, number: int) -> Path:
    """The folder of a GPU's PCI function."""
    return (node.sys / "bus/pci/devices" / node.gpus[number].pci).resolve()


# /sys


def test_a_missing_sys_file(node: Node) -> None:
    node.begin().until_well()
    file = function(node, 0) / "numa_node"
    text = file.read_text()
    file.unlink()
    node.until(lambda: not node.has_place(0), "a GPU without a NUMA node")
    words = r"the kernel states no NUMA node of gpu-0 \(0000:18:00\.0\)"
    node.until_logged(words)
    time.sleep(SOME_LOOKS_S)
    node.said_once(words)
    node.answers()
    file.write_text(text)
    node.until_logged(r"no longer: the kernel states no NUMA node of gpu-0")
    node.until(lambda: node.has_place(0), "its NUMA node")
    node.until_well()


def test_a_missing_sys(node: Node) -> None:
    node.begin().until_well()
    node.sys.rename(node.folder / "away")
    node.until_logged("expected NUMA nodes or CPUs, found none")
    time.sleep(SOME_LOOKS_S)
    node.said_once("expected NUMA nodes or CPUs, found none")
    node.answers()
    assert node.free() == [4, 4]  # the last look stays in force
    (node.folder / "away").rename(node.sys)
    node.until_logged("no longer: .* found none")
    node.until_well()


def test_a_value_that_is_no_number(node: Node) -> None:
    node.begin().until_well()
    file = function(node, 7) / "numa_node"
    text = file.read_text()
    file.write_text("none\n")
    node.until(lambda: not node.has_place(7), "a GPU without a NUMA node")
    words = rf"{re.escape(node.gpus[7].pci)}/numa_node: expected an integer, read 'none'"
    node.until_logged(words)
    time.sleep(SOME_LOOKS_S)
    node.said_once(words)
    node.answers()
    file.write_text(text)
    node.until_logged("no longer: .*/numa_node: expected an integer")
    node.until(lambda: node.has_place(7), "its NUMA node")
    node.until_well()


# NVML


def test_nvml_that_is_absent(node: Node) -> None:
    real = node.driver.library.library_dir / "libnvidia-ml.so.1"
    library = node.folder / "lib" / real.name
    library.parent.mkdir()
    library.write_text("no library")  # stops the search also on a machine that has one
    node.driver.library = FakeNvml(library.parent)
    node.begin()
    node.until_logged("NVML Shared Library Not Found")
    time.sleep(2 * SOME_LOOKS_S)
    node.said_once("NVML Shared Library Not Found")
    assert node.kubelet.registered.empty()
    assert node.free() == []
    library.unlink()
    library.symlink_to(real)
    node.until_well()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param("nvmlInitWithFlags hang", "nvmlInit has not come back for 2 s", id="hangs"),
        pytest.param("nvmlInitWithFlags abort", "killed by SIGABRT in nvmlInit", id="crashes"),
    ],
)
def test_nvml_that_hangs_or_crashes_from_the_start(node: Node, call: str, words: str) -> None:
    node.driver.control(f"call {call}")
    node.begin(nvml={"timeout": 2})
    node.until_logged(words)
    time.sleep(2 * SOME_LOOKS_S)
    node.said_once(f"WARNING .*{words}")
    assert node.kubelet.registered.empty()
    assert node.free() == []
    node.driver.control()
    node.until_well()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param("hang", "the reading has not come back for 2 s", id="hangs"),
        pytest.param("abort", "killed by SIGABRT in the reading", id="crashes"),
    ],
)
def test_nvml_that_hangs_or_crashes_later(node: Node, call: str, words: str) -> None:
    node.begin(nvml={"timeout": 2}).until_well()
    lists = len(node.kubelet.lists[GPU])
    node.driver.control(f"call nvmlDeviceGetUUID@3 {call}")
    node.until_logged(words)
    time.sleep(2 * SOME_LOOKS_S)
    node.said_once(words)
    node.answers()
    assert node.free() == [4, 4]
    assert len(node.kubelet.lists[GPU]) == lists
    node.driver.control()
    node.until_logged(f"no longer: .*{words}")
    node.until_well()


# The kubelet


def test_a_kubelet_that_is_not_there(node: Node) -> None:
    node.kubelet.stop()
    node.kubelet.socket.unlink(missing_ok=True)
    node.pods.stop()
    node.begin()
    node.until_logged("no kubelet answers on")
    node.until_logged("kubelet: PodResources")
    time.sleep(2 * SOME_LOOKS_S)
    node.said_once("no kubelet answers on")
    node.said_once("rte.problems: kubelet: PodResources")
    assert node.free() == []
    node.kubelet.start()
    node.pods.start()
    node.until_well()


def test_a_kubelet_that_goes_away_for_a_while(node: Node) -> None:
    node.begin().until_well()
    node.kubelet.stop()
    node.pods.stop()
    node.until_logged("rte.problems: kubelet: PodResources")
    time.sleep(4.5)  # so often in vain that the next try would be seconds away
    node.said_once("rte.problems: kubelet: PodResources")
    assert node.free() == [4, 4]
    node.pods.start()
    node.kubelet.start()
    node.until(
        lambda: "kubelet: in order again" in node.log(), "soon, for its socket said so", within_s=3
    )
    node.until(lambda: node.kubelet.registered.qsize() == 2, "registered again")
    node.until_well()


# The API server


def publish_to(node: Node, apiserver: ApiServer, url: str, *, timeout_s: float = 10) -> None:
    """The node publishes to the API server, which it finds at another address."""
    name = f"bad-input-{next(NUMBERS)}"
    apiserver.apply_files(*CRDS)
    apiserver.create_node(name)
    file = apiserver.write_kubeconfig(node.folder / "kubeconfig", token=apiserver.token, url=url)
    node.arguments = ()
    node.config["nodeName"] = name
    node.config["nrt"]["fingerprint"] = {"watchPods": False}
    node.config["api"] = {"kubeconfig": str(file), "timeout": timeout_s}

    def free() -> list[int]:
        answer = apiserver.request("GET", f"{NRT}/{name}")
        return free_gpus(answer.body) if answer.status == 200 else []

    node.free = free  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "words", "timeout_s"),
    [
        pytest.param(Fault(503), "503", 10, id="unavailable"),
        pytest.param(Fault(200, body=b"<html>"), "not JSON", 10, id="something else answers"),
        pytest.param(Fault(), "timed out", 1, id="no answer"),
    ],
)
def test_an_api_server_that_refuses(
    node: Node, apiserver: ApiServer, fault: Fault, words: str, timeout_s: float
) -> None:
    with FaultyProxy(apiserver) as proxy:
        publish_to(node, apiserver, proxy.url, timeout_s=timeout_s)
        proxy.faults = [fault] * 1000
        node.begin().registered()
        problem = rf"rte\.problems: API server: .*{words}"
        node.until_logged(problem)
        node.until(lambda: len(proxy.seen) >= 5, "requests in vain")
        node.said_once(problem)
        node.answers()  # the kubelet is served whatever the API server says
        proxy.faults = []
        node.until_well()
        node.end()  # before the proxy


def test_an_api_server_that_is_not_there(node: Node, apiserver: ApiServer) -> None:
    port = free_port()
    publish_to(node, apiserver, f"http://127.0.0.1:{port}")
    node.begin().registered()
    node.until_logged("rte.problems: API server: ")
    time.sleep(2 * SOME_LOOKS_S)
    node.said_once(r"rte\.problems: API server: .*Connection refused")
    node.answers()
    with FaultyProxy(apiserver, port=port):
        node.until_well()
        node.end()


# The configuration


@pytest.mark.parametrize(
    ("role", "text", "key"),
    [
        pytest.param("run", "nrt: {ecko: 3}", "nrt.ecko", id="misspelt"),
        pytest.param("publish", "http: {port: soon}", "http.port", id="no number"),
        pytest.param("plugin", "groups: {names: {ring: [x]}}", "groups.names.ring", id="no GPU"),
    ],
)
def test_a_configuration_error_names_its_key_and_stops_the_start(
    node: Node, role: str, text: str, key: str
) -> None:
    node.write_config(text)
    done = node.command(role, *node.arguments[: 2 * (role != "plugin")])
    assert done.returncode == 2
    assert done.stderr.startswith(f"rte: {node.file}: {key}: "), done.stderr
    assert done.stderr.count("\n") == 1
    assert node.kubelet.registered.empty()
    assert not node.out.exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        pytest.param(
            {"api": {"kubeconfig": "/absent"}}, "api.kubeconfig: /absent: ", id="kubeconfig"
        ),
        pytest.param(
            {
                "devices": {"deviceListStrategy": ["cdi-cri"]},
                "cdi": {"directories": ["/absent/cdi"]},
            },
            "devices.deviceListStrategy: cdi-cri: no CDI specification in /absent/cdi",
            id="CDI",
        ),
        pytest.param({"health": {"disable": "79,mem"}}, "health.disable: '79,mem': ", id="Xids"),
    ],
)
def test_what_the_node_or_a_part_refuses_is_named_by_its_key(
    node: Node, changed: dict[str, Any], words: str
) -> None:
    node.arguments = () if "api" in changed else node.arguments
    node.begin(**changed)
    assert node.wait() == 1
    assert words in node.log().partition("refusing to start: ")[2]
    assert node.kubelet.registered.empty()
    assert not node.out.exists()
