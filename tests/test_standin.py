"""The kubelet stand-in beside the real kubelet: one sequence of pods, the same of everything."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import yaml

from rte.kubelet.admission import Admitted, Rejected
from rte.kubelet.api import podresources_pb2 as api
from rte.kubelet.api import podresources_pb2_grpc as rpc
from rte.kubelet.policy import PolicyError, read_policy
from rte.kubelet.spec import parse_pod
from rte.kubelet.state import HandedOut, read_handed_out
from rte.kubelet.usage import KubeletError, channel, read_allocatable, read_usage
from rte.model import CpuId, NumaId, NumaNode, PodName, base_units
from rte.standin.kubelet import StandIn, likely_cores
from tests.conftest import StartKubelet
from tests.real_kubelet import Kubelet, numa_nodes, pod, short_folder
from tests.simple_plugin import SimplePlugin

GPU, NIC = "nvidia.com/gpu", "a.com/nic"
GPUS = {f"g{n}": (n // 4,) for n in range(8)}
NICS: dict[str, tuple[int, ...] | None] = {"n0": (0,), "n1": (1,), "n2": None}
SINGLE = {"topologyManagerPolicy": "single-numa-node"}
STATIC = {
    **SINGLE,
    "cpuManagerPolicy": "static",
    "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
    "memoryManagerPolicy": "Static",
}


def nodes_of(machine: Sequence[Mapping[str, Any]]) -> list[NumaNode]:
    """What the real kubelet's machine.json describes, as the model has it."""
    return [
        NumaNode(
            id=NumaId(node["id"]),
            cpus=tuple(sorted(CpuId(cpu) for core in node["cores"] for cpu in core)),
            memory_bytes=base_units(node["memory"]),
        )
        for node in machine
    ]


@pytest.fixture
def root() -> Iterator[Path]:
    folder = short_folder()
    yield folder / "kubelet"
    shutil.rmtree(folder)


class Both:
    """A real kubelet and a stand-in with the same machine, configuration and plugins."""

    def __init__(self, kubelet: Kubelet, root: Path) -> None:
        self.kubelet = kubelet
        configuration = yaml.safe_load((kubelet.root / "config.yaml").read_text())
        self.standin = StandIn(
            root,
            configuration,
            nodes_of(kubelet.machine),
            cores=[tuple(map(CpuId, c)) for n in kubelet.machine for c in n["cores"]],
        )
        self.standin.start()
        self.plugins = [
            (where, SimplePlugin(resource, devices))
            for resource, devices in ((GPU, GPUS), (NIC, NICS))
            for where in (kubelet.plugin_dir, self.standin.plugin_dir)
        ]
        for where, plugin in self.plugins:
            plugin.serve(where)
        for resource, count in ((GPU, len(GPUS)), (NIC, len(NICS))):
            kubelet.wait_devices(resource, count)
            assert self.standin.wait_devices(resource, count)

    def close(self) -> None:
        for _, plugin in self.plugins:
            plugin.stop()
        self.standin.stop()

    def admit(self, manifest: dict[str, Any]) -> str:
        """`admitted`, or the reason: after everything was found to be the same."""
        real = self.kubelet.admit(manifest)
        ours = self.standin.admit(parse_pod(manifest)).answer
        if isinstance(ours, Rejected):
            assert (ours.reason, ours.message) == (real.reason, real.message)
            assert not real.admitted
            # The real one shows a Failed pod's devices until it next looks.
            self.kubelet.remove(real.name)
            return ours.reason
        assert real.admitted, real
        for mine, other in zip(ours.containers, real.containers, strict=True):
            ids: dict[str, list[str]] = {}
            for device in mine.devices:
                ids.setdefault(device.resource, []).append(device.id)
            assert ids == {r: sorted(found) for r, found in (other.devices or {}).items()}
        self.compare()
        return "admitted"

    def remove(self, name: str) -> None:
        self.kubelet.remove(name)
        self.standin.remove(PodName(namespace="default", name=name))

    def compare(self) -> None:
        """What a publisher reads: the sockets, and the files but for the pods' UIDs."""
        with channel(self.kubelet.pod_resources) as one, channel(self.standin.pod_resources) as two:
            assert read_usage(one, 5) == read_usage(two, 5)
            assert read_allocatable(one, 5) == read_allocatable(two, 5)
        real = read_handed_out(self.kubelet.root, self.kubelet.plugin_dir)
        ours = read_handed_out(self.standin.root, self.standin.plugin_dir)
        assert anonymous(ours) == anonymous(real)


def anonymous(held: HandedOut) -> Any:
    """Without UIDs, and without CPUs of init containers: the stand-in's have ended at once, the
    kubelet keeps theirs until it next looks."""
    by_uid: dict[str, list[Any]] = {}
    for kind in (held.devices, held.cpus, held.memory):
        for (uid, container), things in kind.items():
            if kind is not held.cpus or not container.startswith("init"):
                by_uid.setdefault(uid, []).append((container, sorted(map(str, things))))
    return sorted(map(sorted, by_uid.values())), held.registered


@pytest.fixture
def both(kubelet: StartKubelet, root: Path) -> Iterator[Any]:
    opened: list[Both] = []

    def start(config: dict[str, Any], **machine: Any) -> Both:
        opened.append(Both(kubelet(config, machine=numa_nodes(**machine)), root))
        return opened[-1]

    yield start
    for found in opened:
        found.close()


def test_exclusive_cpus_memory_and_devices_are_handed_out_alike(both: Any) -> None:
    node = both(STATIC)
    guaranteed: dict[str, str | int] = {"cpu": 4, "memory": "8Gi"}
    assert node.admit(pod("training", {GPU: 2, **guaranteed})) == "admitted"
    assert node.admit(pod("server", {GPU: 4, **guaranteed})) == "admitted"
    # Two GPUs are free in node 0 and ten CPUs, and in node 1 only twelve CPUs.
    assert node.admit(pod("etl", {GPU: 2, "cpu": 12, "memory": "1Gi"})) == "TopologyAffinityError"
    assert node.admit(pod("odd", {GPU: 1, "cpu": 3, "memory": "1Gi"})) == "SMTAlignmentError"
    assert node.admit(pod("notebook", {GPU: 1, "cpu": 2, "memory": "1Gi"})) == "admitted"
    assert node.admit(pod("shared", {"memory": "1Gi"})) == "admitted"
    # No node has so much: the Memory Manager has no hint then, which counts as no preference.
    assert node.admit(pod("large", {"cpu": 2, "memory": "70Gi"})) == "UnexpectedAdmissionError"


def test_init_containers_and_several_resources_are_handed_out_alike(both: Any) -> None:
    node = both(STATIC)
    with_init = pod(
        "p", {GPU: 2, NIC: 1, "cpu": 2, "memory": "1Gi"}, init=[{GPU: 1, "cpu": 4, "memory": "2Gi"}]
    )
    assert node.admit(with_init) == "admitted"
    assert node.admit(pod("q", {GPU: 1, NIC: 1}, {GPU: 2})) == "admitted"


def test_the_pod_scope_and_best_effort_decide_alike(both: Any) -> None:
    node = both({"topologyManagerPolicy": "best-effort", "topologyManagerScope": "pod"})
    assert node.admit(pod("five", {GPU: 5})) == "admitted"
    assert node.admit(pod("two", {GPU: 1}, {GPU: 1})) == "admitted"
    assert node.admit(pod("one", {GPU: 1, "cpu": 1})) == "admitted"
    assert node.admit(pod("none-left", {GPU: 1})) == "UnexpectedAdmissionError"


def test_what_a_pod_held_is_free_after_it(both: Any) -> None:
    node = both(STATIC)
    four: dict[str, str | int] = {GPU: 4, "cpu": 8, "memory": "2Gi"}
    assert node.admit(pod("a", four)) == "admitted"
    assert node.admit(pod("b", four)) == "admitted"
    assert node.admit(pod("c", four)) == "TopologyAffinityError"
    node.remove("a")
    assert node.admit(pod("c", four)) == "admitted"


def test_a_sick_device_and_a_plugin_that_is_gone_are_seen_alike(both: Any) -> None:
    node = both(SINGLE)
    for _, plugin in node.plugins[:2]:
        plugin.set_unhealthy("g0", "g1")
    node.kubelet.wait_devices(GPU, 6)
    assert node.standin.wait_devices(GPU, 6)
    assert node.admit(pod("three", {GPU: 3})) == "admitted"  # of node 1
    assert node.admit(pod("more", {GPU: 3})) == "TopologyAffinityError"
    for _, plugin in node.plugins[:2]:
        plugin.stop()
    node.kubelet.wait_devices(GPU, 0)
    assert node.standin.wait_devices(GPU, 0)
    assert node.admit(pod("late", {GPU: 1})) == "TopologyAffinityError"


# Without the real one


@pytest.fixture
def alone(root: Path) -> Iterator[StandIn]:
    with StandIn(root, SINGLE, nodes_of(numa_nodes())) as standin:
        yield standin


def test_the_configuration_that_counts_is_in_the_file(root: Path) -> None:
    config = {**STATIC, "topologyManagerScope": "pod", "reservedSystemCPUs": "0,16"}
    with StandIn(root, config, nodes_of(numa_nodes())) as standin:
        assert read_policy(standin.configuration_file) == standin.policy
        assert standin.policy.reserved_cpus == (0, 16)


def test_a_configuration_that_no_kubelet_takes_is_refused(root: Path) -> None:
    with pytest.raises(PolicyError, match="topologyManagerPolicy"):
        StandIn(root, {"topologyManagerPolicy": "any"}, ())


def test_get_says_what_one_pod_has(alone: StandIn) -> None:
    with SimplePlugin(GPU, dict(GPUS)) as plugin, channel(alone.pod_resources) as to:
        plugin.serve(alone.plugin_dir)
        assert alone.wait_devices(GPU, 8)
        answer = alone.admit(parse_pod(pod("p", {GPU: 1})))
        assert isinstance(answer.answer, Admitted)
        assert dict(answer.answers["c0", GPU].envs) == {"DEVICES": "g0"}
        stub = rpc.PodResourcesListerStub(to)
        got = stub.Get(api.GetPodResourcesRequest(pod_name="p", pod_namespace="default"))
        assert [d.device_ids[:] for d in got.pod_resources.containers[0].devices] == [["g0"]]
        with pytest.raises(grpc.RpcError) as error:
            stub.Get(api.GetPodResourcesRequest(pod_name="q", pod_namespace="default"))
        assert error.value.details() == "pod q in namespace default not found"


def test_a_name_that_is_taken_is_refused(alone: StandIn) -> None:
    alone.admit(parse_pod(pod("p", {})))
    with pytest.raises(ValueError, match="default/p is here already"):
        alone.admit(parse_pod(pod("p", {})))


def test_the_answer_of_the_plugin_is_in_the_checkpoint(alone: StandIn) -> None:
    with SimplePlugin(GPU, dict(GPUS)) as plugin:
        plugin.serve(alone.plugin_dir)
        assert alone.wait_devices(GPU, 8)
        alone.admit(parse_pod(pod("p", {GPU: 2})))
        text = (alone.plugin_dir / "kubelet_internal_checkpoint").read_bytes()
        (entry,) = msgspec.json.decode(text)["Data"]["PodDeviceEntries"]
        assert entry["DeviceIDs"] == {"0": ["g0", "g1"]}
        assert entry["AllocResp"] == "ChAKB0RFVklDRVMSBWcwLGcx"  # as the real kubelet wrote it


def test_a_plugin_that_registers_again_takes_the_place_of_the_first(alone: StandIn) -> None:
    with SimplePlugin(GPU, dict(GPUS)) as first:
        first.serve(alone.plugin_dir)
        assert alone.wait_devices(GPU, 8)
        first.stop()
        assert alone.wait_devices(GPU, 0)
        with SimplePlugin(GPU, {"g0": (0,), "g1": (1,)}) as second:
            second.serve(alone.plugin_dir)
            assert alone.wait_devices(GPU, 2)
            assert isinstance(alone.admit(parse_pod(pod("p", {GPU: 1}))).answer, Admitted)
            assert second.allocated


def test_a_start_clears_old_sockets_away_and_an_end_its_own(root: Path) -> None:
    standin = StandIn(root, SINGLE, nodes_of(numa_nodes()))
    standin.start()
    assert standin.plugin_socket.is_socket()
    standin.stop()
    assert not [path for path in root.rglob("*") if path.is_socket()]


def test_a_path_that_no_socket_can_have_is_named(tmp_path: Path) -> None:
    standin = StandIn(tmp_path / ("x" * 100), SINGLE, ())
    with pytest.raises(KubeletError, match="Unix sockets allow 107"):
        standin.start()
    standin.stop()


@pytest.mark.parametrize(
    ("cpus", "cores"),
    [
        ((0, 1, 4, 5), ((0, 4), (1, 5))),
        ((0, 1, 2, 3), ()),
        ((0, 1, 4), ()),
        ((0, 2, 4, 6), ()),
    ],
    ids=["two runs", "one run", "uneven", "interleaved"],
)
def test_cores_are_told_from_the_numbers(
    cpus: tuple[int, ...], cores: tuple[tuple[int, ...], ...]
) -> None:
    assert likely_cores([NumaNode(id=NumaId(0), cpus=tuple(map(CpuId, cpus)))]) == cores


def test_cores_that_the_source_says_are_not_guessed() -> None:
    said = tuple(tuple(map(CpuId, core)) for core in ((0, 1), (4, 5)))
    node = NumaNode(id=NumaId(0), cpus=tuple(map(CpuId, (0, 1, 4, 5))), cores=said)
    assert likely_cores([node]) == said


def test_files_say_that_a_manager_is_off(alone: StandIn) -> None:
    cpu = json.loads((alone.root / "cpu_manager_state").read_text())
    memory = json.loads((alone.root / "memory_manager_state").read_text())
    assert (cpu["policyName"], memory["policyName"]) == ("none", "None")
    assert read_handed_out(alone.root, alone.plugin_dir) == HandedOut()
