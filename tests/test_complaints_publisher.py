"""Public complaints about programs that publish NodeResourceTopology objects.

docs/complaints.md lists them, each with the test that holds what is so here. Those that no other
test holds are below, named after the issue.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rte.graph.build import build
from rte.graph.groups import groups
from rte.kubelet.usage import channel
from rte.metrics import observation_metrics
from rte.model import (
    Allocatable,
    ContainerUse,
    DeviceId,
    DeviceUse,
    NumaId,
    Observation,
    PodName,
    PodUse,
    Usage,
)
from rte.publish.nrt import nrt
from rte.sources.recorded import read_recorded
from tests.daemon_process import DaemonProcess
from tests.machines.description import FOLDER
from tests.observed import observe
from tests.pod_resources import entry
from tests.real_apiserver import APPLY, ApiServer
from tests.real_kubelet import Kubelet, numa_nodes, pod
from tests.simple_plugin import SimplePlugin
from tests.test_deploy import markdown_table

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "complaints.md"
CRD = ROOT / "crds" / "noderesourcetopology" / "crd.yaml"
MOST_BYTES = 1 << 20  # etcd refuses 1.5 MiB

StartKubelet = Callable[..., Kubelet]


def complaints() -> list[tuple[str, str]]:
    """Issue and test of each row of the document."""
    rows = markdown_table(DOCUMENT, "## What hurt")
    return [(row["where"], name) for row in rows for name in re.findall(r"`([^`]+)`", row["test"])]


def functions() -> set[str]:
    """Names of all test functions, in whatever file they are."""
    texts = (path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    return {name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}


def test_each_complaint_is_held_by_a_test_that_there_is() -> None:
    listed = complaints()
    assert len(listed) > 40
    known = functions()
    missing = [f"{where}: there is no {name}" for where, name in listed if name not in known]
    assert not missing, "\n".join(missing)


# The kubelet


def plain(daemon: DaemonProcess) -> Mapping[str, Any]:
    path = daemon.folder / "out" / "noderesourcetopology-node-a.json"
    body: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {"zones": []}
    return body


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A publisher that writes into a folder; neither it nor its kubelet runs yet."""
    daemon = DaemonProcess(tmp_path, role="publish")
    (tmp_path / "config.yaml").write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
    )
    daemon.config["kubelet"]["poll"] = 0.3
    yield daemon
    daemon.end()


def test_nfd_810_a_kubelet_without_the_call_is_named_and_awaited(daemon: DaemonProcess) -> None:
    answers = daemon.pods.GetAllocatableResources
    lacks = True

    def sometimes(request: Any, context: grpc.ServicerContext) -> Any:
        if lacks:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method")
        return answers(request, context)

    daemon.pods.GetAllocatableResources = sometimes  # type: ignore[method-assign]
    with daemon:
        daemon.start("--out", str(daemon.folder / "out"))
        daemon.until_logged(r"kubelet: PodResources GetAllocatableResources: UNIMPLEMENTED")
        assert not plain(daemon)["zones"]
        done = daemon.command("doctor", "-o", "json")
        findings = json.loads(done.stdout)["findings"]
        said = {row["subject"]: row["do"] for row in findings if "UNIMPLEMENTED" in row["what"]}
        assert said.keys() == {"kubelet", "pod-resources"}
        assert "is the feature on" in said["pod-resources"]
        lacks = False
        daemon.until(lambda: plain(daemon)["zones"], "the object")


def test_nro_1205_a_socket_that_may_not_be_opened_is_named_with_its_path(tmp_path: Path) -> None:
    """As after a change of SELinux labels; here it is the folder's owner."""
    folder = tmp_path / "pod-resources"
    folder.mkdir()
    socket = folder / "kubelet.sock"
    socket.touch()
    folder.chmod(0o000)
    program = (
        "import os, sys\n"
        "from rte.commands.doctor import connect\n"
        "if not os.geteuid(): os.setuid(65534)\n"  # root may do all
        "print(connect(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, socket],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    folder.chmod(0o700)
    assert done.stdout == "Permission denied\n"


def test_nfd_2145_devices_without_a_numa_node_are_named(daemon: DaemonProcess) -> None:
    """That nothing aligns them was to be guessed from an object that does not have them."""
    answers = daemon.pods.GetAllocatableResources

    def more(request: Any, context: Any) -> Any:
        said = answers(request, context)
        said.devices.append(entry("example.com/nic", ["a"]))
        return said

    daemon.pods.GetAllocatableResources = more  # type: ignore[method-assign]
    with daemon:
        daemon.write_config()
        findings = json.loads(daemon.command("doctor", "-o", "json").stdout)["findings"]
        (said,) = (row for row in findings if row["subject"] == "numa")
        assert said["what"].startswith("1 devices of example.com/nic have no NUMA node")
        assert said["level"] == "advice"


def test_nfd_922_and_1978_pods_that_the_api_server_does_not_know_and_a_part_of_a_cpu(
    kubelet: StartKubelet,
) -> None:
    """One pod that was unknown stopped the whole scan; of a pod with whole and half CPUs none
    counted."""
    machine = numa_nodes(cpus=16, memory="64Gi")
    config = {"cpuManagerPolicy": "static", "topologyManagerPolicy": "single-numa-node"}
    k = kubelet(config, machine=machine)
    admission = k.admit(pod("mixed", {"cpu": 2, "memory": "1Gi"}, {"cpu": "500m", "memory": "1Gi"}))
    assert admission.admitted, admission.message
    with channel(k.pod_resources) as asked:
        for pods in ((), None):
            body = nrt(observe(k, asked, pods), node_name="n", node_uid=None, version="t")
            left = [
                int(resource["allocatable"]) - int(resource["available"])
                for zone in body["zones"]
                for resource in zone["resources"]
                if resource["name"] == "cpu"
            ]
            assert sorted(left) == [0, 2]


# Other plugins' devices: anything may be in them

MACHINE = read_recorded(FOLDER / "hgx-h100-oci")
GRAPH = build(MACHINE)
GROUPS = groups(GRAPH)
INT64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.from_regex(r"[a-z0-9]{1,60}(\.[a-z0-9]{1,60}){0,3}/[A-Za-z0-9]{1,63}", fullmatch=True)
IDS = st.one_of(st.text(max_size=300), st.sampled_from(["", "a::b", "::", "GPU-0::1", "\x00", '"']))
DEVICES = st.lists(
    st.builds(
        DeviceUse,
        resource=NAMES,
        id=IDS.map(DeviceId),
        numa=st.lists(st.one_of(st.integers(0, 3), INT64), max_size=4).map(
            lambda nodes: tuple(map(NumaId, nodes))
        ),
    ),
    max_size=30,
)


def observed(offered: list[DeviceUse], used: list[DeviceUse]) -> Observation:
    container = ContainerUse(name="c", devices=tuple(used))
    one = PodUse(pod=PodName(namespace="n", name="p"), containers=(container,))
    return Observation(
        machine=MACHINE,
        usage=Usage(pods=(one,) if used else ()),
        allocatable=Allocatable(devices=tuple(offered)),
        policy=None,
    )


def body_of(offered: list[DeviceUse], used: list[DeviceUse]) -> dict[str, Any]:
    return nrt(
        observed(offered, used),
        GRAPH,
        node_name="n",
        node_uid=None,
        version="t",
        groups=GROUPS,
    )


@settings(max_examples=30, deadline=None)
@given(offered=DEVICES, used=DEVICES)
def test_nfd_791_no_device_of_another_plugin_breaks_the_object(
    offered: list[DeviceUse], used: list[DeviceUse]
) -> None:
    """Odd ids, ids twice, NUMA nodes that there are not, -1 and 2^63 - 1."""
    body = body_of(offered, used)
    zones = [zone for zone in body["zones"] if zone["type"] == "Node"]
    assert [zone["name"] for zone in zones] == ["node-0", "node-1"]
    for resource in (r for zone in zones for r in zone["resources"] if "/" in r["name"]):
        figures = [int(resource[key]) for key in ("capacity", "allocatable", "available")]
        assert figures == sorted(figures, reverse=True)
        assert figures[-1] >= 0
    # What an id is makes no difference to the object's text.
    numbered = {device.id: DeviceId(str(n)) for n, device in enumerate([*offered, *used])}
    same = [
        [DeviceUse(resource=d.resource, id=numbered[d.id], numa=d.numa) for d in devices]
        for devices in (offered, used)
    ]
    assert body_of(*same) == body


@settings(max_examples=20, deadline=None)
@given(offered=DEVICES, used=DEVICES)
def test_metrics_of_any_devices_are_read_back_by_prometheus(
    offered: list[DeviceUse], used: list[DeviceUse]
) -> None:
    class One(Collector):
        def collect(self) -> Any:
            yield from observation_metrics(observed(offered, used))

    registry = CollectorRegistry(auto_describe=False)
    registry.register(One())
    text = generate_latest(registry).decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    resources = {d.resource for d in (*offered, *used)}
    for name in ("rte_devices_allocatable", "rte_devices_used"):
        samples = families[name].samples
        assert {s.labels["resource"] for s in samples} == resources
        assert all(set(s.labels) == {"resource"} for s in samples)


def test_many_devices_and_resources_stay_below_what_etcd_takes() -> None:
    many = [device("example.com/x", f"{n}", n % 2) for n in range(10_000)]
    assert len(json.dumps(body_of(many, many[:5000]))) < 8192
    long = f"{'a' * 240}.com/{'x' * 55}"
    broad = [device(f"{long}{n}", f"{n}-{k}", k % 2) for n in range(500) for k in range(4)]
    assert len(json.dumps(body_of(broad, broad[::3]))) < MOST_BYTES


def device(resource: str, id: str, node: int) -> DeviceUse:
    return DeviceUse(resource=resource, id=DeviceId(id), numa=(NumaId(node),))


def test_ten_thousand_devices_of_a_real_kubelet_are_taken_by_a_real_api_server(
    kubelet: StartKubelet, apiserver: ApiServer
) -> None:
    resource = "example.com/x"
    odd = ["a::b", "GPU-0::1", "with space", "é" * 100, '"quoted"\n', "x" * 250]
    nodes: dict[str, tuple[int, ...] | None] = {f"{n}": (n % 2,) for n in range(10_000)}
    nodes |= dict.fromkeys(odd, (0, 1))
    k = kubelet({"topologyManagerPolicy": "single-numa-node"}, machine=numa_nodes(cpus=8))
    with SimplePlugin(resource, nodes) as plugin:
        plugin.serve(k.plugin_dir)
        k.wait_devices(resource, len(nodes))
        assert k.admit(pod("big", {resource: 3000})).admitted
        with channel(k.pod_resources) as asked:
            body = nrt(observe(k, asked, None), node_name="many", node_uid=None, version="t")
    figures = [
        (int(r["allocatable"]), int(r["available"]))
        for zone in body["zones"]
        for r in zone["resources"]
        if r["name"] == resource
    ]
    assert [allocatable for allocatable, _ in figures] == [5000 + len(odd)] * 2
    assert sum(a - b for a, b in figures) in range(3000, 3000 + len(odd) + 1)
    apiserver.apply_files(CRD)
    path = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/many"
    apiserver.ask("PATCH", f"{path}?fieldManager=t&force=true", body, content_type=APPLY)
