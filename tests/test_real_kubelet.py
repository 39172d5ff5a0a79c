"""That the kubelet the other tests lean on is one, and does what its options say."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from plugin.api import deviceplugin_pb2_grpc as device_service
from plugin.api import pluginregistration_pb2 as registration
from plugin.api import pluginregistration_pb2_grpc as registration_service
from rte.kubelet.api import podresources_pb2 as api
from rte.kubelet.api import podresources_pb2_grpc as service
from tests.real_kubelet import Kubelet, KubeletError, numa_nodes, pod
from tests.simple_plugin import SimplePlugin

GPU = "nvidia.com/gpu"
EIGHT = {f"GPU-{n}": (n // 4,) for n in range(8)}
SINGLE = {"topologyManagerPolicy": "single-numa-node"}

StartKubelet = Callable[..., Kubelet]


@pytest.fixture
def gpus() -> Iterator[SimplePlugin]:
    with SimplePlugin(GPU, EIGHT) as plugin:
        yield plugin


def pod_resources(kubelet: Kubelet, *, timeout_s: float = 5) -> api.ListPodResourcesResponse:
    with grpc.insecure_channel(f"unix://{kubelet.pod_resources}") as channel:
        stub = service.PodResourcesListerStub(channel)
        answer: api.ListPodResourcesResponse = stub.List(
            api.ListPodResourcesRequest(), timeout=timeout_s
        )
        return answer


def serve(plugin: SimplePlugin, kubelet: Kubelet) -> None:
    plugin.serve(kubelet.plugin_dir)
    kubelet.wait_devices(plugin.resource, len(plugin.devices))


def test_pods_are_aligned_or_rejected_with_the_kubelets_reason(
    kubelet: StartKubelet, gpus: SimplePlugin
) -> None:
    k = kubelet(SINGLE)
    serve(gpus, k)

    two = k.admit(pod("two", {GPU: 2}))
    assert two.admitted
    assert two.devices(GPU) == ("GPU-0", "GPU-1")
    assert two.containers[0].options is not None
    assert two.containers[0].options["envs"] == {"DEVICES": "GPU-0,GPU-1"}
    assert two.containers[0].affinity is not None
    assert two.containers[0].affinity.nodes == (0,)
    assert [len(request.available_deviceIDs) for request in gpus.preferred] == [4]

    five = k.admit(pod("five", {GPU: 5}))
    assert not five.admitted
    assert five.reason == "TopologyAffinityError"
    assert "Topology locality" in five.message
    assert {p.name: p.phase for p in k.state().pods} == {"two": "Running", "five": "Failed"}

    listed = pod_resources(k).pod_resources
    assert [p.name for p in listed] == ["two"]
    k.remove("two")
    assert not pod_resources(k).pod_resources


def test_a_restart_keeps_devices_and_a_reboot_rejects_without_the_plugin(
    kubelet: StartKubelet, gpus: SimplePlugin
) -> None:
    k = kubelet(SINGLE)
    serve(gpus, k)
    held = k.admit(pod("a", {GPU: 3})).devices(GPU)

    (again,) = k.restart()
    assert again.admitted
    assert again.devices(GPU) == held
    assert not (k.plugin_dir / "nvidia.com_gpu.sock").exists()

    gpus.stop()
    (rebooted,) = k.reboot()
    assert not rebooted.admitted
    assert "no healthy devices present" in rebooted.message


def test_a_killed_kubelet_comes_back_with_its_pods(
    kubelet: StartKubelet, gpus: SimplePlugin
) -> None:
    k = kubelet()
    serve(gpus, k)
    k.admit(pod("a", {GPU: 1}))
    k.kill()
    k.start()
    assert [p.name for p in k.state().pods] == ["a"]
    with pytest.raises(KubeletError, match=r"8 devices|devices after"):
        k.wait_devices(GPU, 8, within_s=0)


def test_an_unhealthy_device_is_not_allocatable(kubelet: StartKubelet, gpus: SimplePlugin) -> None:
    k = kubelet()
    serve(gpus, k)
    gpus.set_unhealthy("GPU-3")
    k.wait_devices(GPU, 7)
    assert (k.state().capacity[GPU], k.state().allocatable[GPU]) == ("8", "7")


def test_memory_in_huge_pages_is_not_allocatable_as_memory(kubelet: StartKubelet) -> None:
    for pages, left in ((512, "6Gi"), (2048, "0")):
        machine = numa_nodes(memory="4Gi", hugepages={"2Mi": pages})
        k = kubelet({"evictionHard": {"memory.available": "0"}}, machine=machine)
        said = k.state()
        assert (said.capacity["memory"], said.allocatable["memory"]) == ("8Gi", left)
    assert not k.admit(pod("a", {"memory": "1Mi"})).admitted


class Registrar(registration_service.RegistrationServicer):
    """What the plugin watcher asks of a socket that it finds."""

    def GetInfo(self, request: registration.InfoRequest, context: Any) -> registration.PluginInfo:
        return registration.PluginInfo(
            type="DevicePlugin", name=GPU, supported_versions=["v1beta1"]
        )

    def NotifyRegistrationStatus(
        self, request: registration.RegistrationStatus, context: Any
    ) -> registration.RegistrationStatusResponse:
        return registration.RegistrationStatusResponse()


def test_the_plugin_watcher_finds_a_socket(kubelet: StartKubelet, gpus: SimplePlugin) -> None:
    k = kubelet()
    server = grpc.server(ThreadPoolExecutor(4))
    registration_service.add_RegistrationServicer_to_server(Registrar(), server)
    device_service.add_DevicePluginServicer_to_server(gpus, server)
    server.add_insecure_port(f"unix://{k.registry_dir}/gpu.sock")
    server.start()
    k.wait_devices(GPU, 8)
    gpus.changed.put(False)
    server.stop(None).wait()


def test_cpus_memory_and_huge_pages_are_bound_to_nodes_with_gaps_in_their_numbers(
    kubelet: StartKubelet,
) -> None:
    k = kubelet(
        {
            **SINGLE,
            "cpuManagerPolicy": "static",
            "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
            "memoryManagerPolicy": "Static",
        },
        machine=numa_nodes((0, 8), cpus=8, hugepages={"2Mi": 512}),
    )
    odd = k.admit(pod("odd", {"cpu": 3, "memory": "1Gi"}))
    assert (odd.admitted, odd.reason) == (False, "SMTAlignmentError")

    whole = k.admit(pod("whole", {"cpu": 8, "memory": "1Gi", "hugepages-2Mi": "1Gi"}))
    assert whole.containers[0].memory_nodes == (8,)
    assert whole.containers[0].exclusive_cpus == (4, 5, 6, 7, 12, 13, 14, 15)
    (listed,) = pod_resources(k).pod_resources
    (container,) = listed.containers
    assert sorted(container.cpu_ids) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert {m.memory_type: m.size for m in container.memory} == {
        "memory": 1 << 30,
        "hugepages-2Mi": 1 << 30,
    }
    assert {n.ID for m in container.memory for n in m.topology.nodes} == {8}


def test_memory_of_a_large_pod_comes_from_both_nodes(kubelet: StartKubelet) -> None:
    k = kubelet({"topologyManagerPolicy": "best-effort", "memoryManagerPolicy": "Static"})
    large = k.admit(pod("large", {"cpu": 2, "memory": "100Gi"}))
    assert large.containers[0].memory_nodes == (0, 1)
    (listed,) = pod_resources(k).pod_resources
    blocks = listed.containers[0].memory
    assert [sorted(n.ID for n in b.topology.nodes) for b in blocks] == [[0, 1]]


def test_pod_scope_places_the_containers_of_a_pod_together(
    kubelet: StartKubelet, gpus: SimplePlugin
) -> None:
    k = kubelet({**SINGLE, "topologyManagerScope": "pod"})
    serve(gpus, k)
    k.admit(pod("three", {GPU: 3}))
    pair = k.admit(pod("pair", {GPU: 1}, {GPU: 2}))
    assert set(pair.devices(GPU)) < {"GPU-4", "GPU-5", "GPU-6", "GPU-7"}


def test_pod_resources_can_be_slow_stale_or_failing(
    kubelet: StartKubelet, gpus: SimplePlugin
) -> None:
    k = kubelet(rate_limit=False)
    serve(gpus, k)
    k.disturb_pod_resources(before_s=60)
    with pytest.raises(grpc.RpcError) as late:
        pod_resources(k, timeout_s=0.05)
    # Go's server resets a stream at its deadline too, and now and then that is heard first.
    too_late = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
    assert late.value.code() in too_late

    k.disturb_pod_resources(error="UNAVAILABLE")
    with pytest.raises(grpc.RpcError) as failed:
        pod_resources(k)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE

    with grpc.insecure_channel(f"unix://{k.pod_resources}") as channel:
        stub = service.PodResourcesListerStub(channel)

        def before_a_pod(looks_after_s: float) -> api.ListPodResourcesResponse:
            """What a call says that was made so long before the pod was admitted."""
            k.disturb_pod_resources(after_s=60)
            before = stub.List.future(api.ListPodResourcesRequest(), timeout=60)
            time.sleep(looks_after_s)
            k.admit(pod("a", {GPU: 1}))
            k.disturb_pod_resources()
            assert len(stub.List(api.ListPodResourcesRequest()).pod_resources) == 1
            k.remove("a")
            answer: api.ListPodResourcesResponse = before.result()
            return answer

        # No sign says that the kubelet has looked.
        assert any(not before_a_pod(pause_s).pod_resources for pause_s in (0.1, 1, 10))


@pytest.mark.parametrize(("limited", "refused"), [(True, True), (False, False)])
def test_the_rate_limit_is_the_kubelets_and_can_be_off(
    kubelet: StartKubelet, limited: bool, refused: bool
) -> None:
    k = kubelet(rate_limit=limited)
    with grpc.insecure_channel(f"unix://{k.pod_resources}") as channel:
        stub = service.PodResourcesListerStub(channel)
        # Far more than are allowed in the time that they take on a busy machine.
        calls = [stub.List.future(api.ListPodResourcesRequest(), timeout=60) for _ in range(600)]
        codes = {call.code() for call in calls}
    assert (grpc.StatusCode.RESOURCE_EXHAUSTED in codes) is refused


def test_nothing_is_left_when_its_input_ends(kubelet: StartKubelet) -> None:
    k = kubelet()
    assert k.process is not None
    k.process.end()
    assert not k.dir.exists()


def test_a_configuration_that_the_kubelet_refuses_is_an_error(kubelet: StartKubelet) -> None:
    with pytest.raises(KubeletError, match="unknown policy"):
        kubelet({"topologyManagerPolicy": "tightest"})
    with pytest.raises(KubeletError, match="unknown field"):
        kubelet({"topologyManagerPolice": "none"})
