"""PodResources as values, over a real socket and real messages."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from select import select
from socket import AF_UNIX
from socket import socket as Socket

import grpc
import pytest

from rte.kubelet import usage
from rte.kubelet.api import podresources_pb2 as api
from rte.model import (
    CpuId,
    DeviceId,
    DeviceUse,
    Gpu,
    Machine,
    MemoryBlock,
    MigSlice,
    NumaId,
    PciAddress,
    PodName,
)
from tests.pod_resources import PodResourcesSocket, entry
from tests.stopwatch import Stopwatch


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "kubelet.sock"


@pytest.fixture
def kubelet(socket: Path) -> Iterator[PodResourcesSocket]:
    with PodResourcesSocket(socket) as kubelet:
        yield kubelet


@pytest.fixture
def channel(socket: Path) -> Iterator[grpc.Channel]:
    with usage.channel(socket) as channel:
        yield channel


def test_a_device_with_an_entry_for_each_numa_node_is_one_device(
    kubelet: PodResourcesSocket, channel: grpc.Channel
) -> None:
    kubelet.listed = [
        api.PodResources(
            namespace="a",
            name="p",
            containers=[
                api.ContainerResources(
                    name="c",
                    devices=[
                        entry("nvidia.com/gpu", ["GPU-b", "GPU-a"], 1),
                        entry("nvidia.com/gpu", ["GPU-a"], 0),
                        entry("example.com/nic", ["GPU-a"]),
                    ],
                )
            ],
        )
    ]
    (pod,) = usage.read_usage(channel, 5).pods
    assert pod.containers[0].devices == (
        DeviceUse(resource="example.com/nic", id=DeviceId("GPU-a")),
        DeviceUse(resource="nvidia.com/gpu", id=DeviceId("GPU-a"), numa=(NumaId(0), NumaId(1))),
        DeviceUse(resource="nvidia.com/gpu", id=DeviceId("GPU-b"), numa=(NumaId(1),)),
    )


def test_everything_else_of_a_pod_is_read_and_sorted(
    kubelet: PodResourcesSocket, channel: grpc.Channel
) -> None:
    two_nodes = api.TopologyInfo(nodes=[api.NUMANode(ID=1), api.NUMANode(ID=0)])
    memory = api.ContainerMemory(memory_type="memory", size=1 << 33, topology=two_nodes)
    claim = api.DynamicResource(
        claim_name="x",
        claim_resources=[
            api.ClaimResource(
                driver_name="gpu.nvidia.com",
                pool_name="n1",
                device_name="gpu-0",
                cdi_devices=[api.CDIDevice(name="k8s.gpu.nvidia.com/claim=1")],
            )
        ],
    )
    kubelet.listed = [
        api.PodResources(namespace="b", name="idle"),
        api.PodResources(
            namespace="a",
            name="busy",
            cpu_ids=[3, 2],
            memory=[memory],
            containers=[
                api.ContainerResources(
                    name="z", cpu_ids=[17, 1], memory=[memory], dynamic_resources=[claim]
                ),
                api.ContainerResources(name="a"),
            ],
        ),
    ]
    busy, idle = usage.read_usage(channel, 5).pods
    block = MemoryBlock(type="memory", size_bytes=1 << 33, numa=(NumaId(0), NumaId(1)))
    assert idle.pod == PodName(namespace="b", name="idle")
    assert idle.containers == ()
    assert busy.cpus == (CpuId(2), CpuId(3))
    assert busy.memory == (block,)
    assert [c.name for c in busy.containers] == ["z", "a"]
    assert busy.containers[0].cpus == (CpuId(1), CpuId(17))
    assert busy.containers[0].memory == (block,)
    assert busy.containers[0].claims == (
        "gpu.nvidia.com/n1/gpu-0",
        "k8s.gpu.nvidia.com/claim=1",
    )


def test_allocatable_devices_cpus_and_memory(
    kubelet: PodResourcesSocket, channel: grpc.Channel
) -> None:
    kubelet.allocatable = api.AllocatableResourcesResponse(
        devices=[entry("nvidia.com/gpu", ["GPU-a"], 1), entry("nvidia.com/gpu", ["GPU-a"], 0)],
        cpu_ids=[1, 0],
        memory=[
            api.ContainerMemory(
                memory_type="hugepages-1Gi",
                size=1 << 30,
                topology=api.TopologyInfo(nodes=[api.NUMANode(ID=0)]),
            )
        ],
    )
    allocatable = usage.read_allocatable(channel, 5)
    assert allocatable.devices == (
        DeviceUse(resource="nvidia.com/gpu", id=DeviceId("GPU-a"), numa=(NumaId(0), NumaId(1))),
    )
    assert allocatable.cpus == (CpuId(0), CpuId(1))
    assert allocatable.memory == (
        MemoryBlock(type="hugepages-1Gi", size_bytes=1 << 30, numa=(NumaId(0),)),
    )


def test_the_rate_limit_is_waited_out(socket: Path) -> None:
    with PodResourcesSocket(socket, refuse=3) as kubelet, usage.channel(socket) as channel:
        assert usage.read_usage(channel, 5).pods == ()
    assert kubelet.lists == 4


def test_a_rate_limit_that_does_not_end_is_an_error_in_time(socket: Path) -> None:
    stopwatch = Stopwatch()
    with (
        PodResourcesSocket(socket, refuse=1000) as kubelet,
        usage.channel(socket) as channel,
        pytest.raises(usage.KubeletError, match="PodResources List: RESOURCE_EXHAUSTED") as caught,
    ):
        usage.read_usage(channel, 2)
    assert stopwatch.took_s < 10
    assert 2 <= kubelet.lists < 20
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("mib", [5, 40])
def test_a_long_list_is_read_and_one_that_is_too_long_is_asked_for_once(
    kubelet: PodResourcesSocket, channel: grpc.Channel, mib: int
) -> None:
    """gRPC takes 4 MiB by default, the kubelet's own client 16."""
    pod = api.PodResources(
        namespace="a",
        containers=[api.ContainerResources(name="c" * 4096, devices=[entry("r", ["x"], 0)])] * 16,
    )
    kubelet.listed = [pod] * (16 * mib)
    if mib == 5:
        assert len(usage.read_usage(channel, 20).pods) == 16 * mib
    else:
        with pytest.raises(usage.KubeletError, match="larger than max"):
            usage.read_usage(channel, 20)
    assert kubelet.lists == 1


def test_the_length_of_an_answer_on_the_wire_tells_what_is_offered(
    kubelet: PodResourcesSocket, channel: grpc.Channel
) -> None:
    """The kubelet lists devices in no order, so its answers are never the same bytes."""
    offered = [entry("nvidia.com/gpu", [f"GPU-{n}"], n) for n in range(4)]
    others = [entry("example.com/nic", ["0000:01:00.0"])]
    lengths, read = set(), set()
    for order in ([*offered, *others], [*others, *reversed(offered)]):
        kubelet.allocatable = api.AllocatableResourcesResponse(devices=order, cpu_ids=[2, 300])
        answer = usage.ask_allocatable(channel, 5)
        lengths.add(len(answer))
        read.add(usage.parse_allocatable(answer))
    assert len(lengths) == len(read) == 1
    kubelet.allocatable = api.AllocatableResourcesResponse(devices=offered, cpu_ids=[2, 300])
    assert len(usage.ask_allocatable(channel, 5)) < lengths.pop()


def test_bytes_that_are_no_answer_are_the_kubelets_error() -> None:
    with pytest.raises(usage.KubeletError, match="GetAllocatableResources: not an answer"):
        usage.parse_allocatable(b"\xff\xff")
    for answer in (b"\xff\xff", b"\x0a\x02\xff\xff"):  # as a whole, and one pod of it
        with pytest.raises(usage.KubeletError, match="List: not an answer"):
            usage.parse_usage(answer)


def test_a_kubelet_that_is_silent_is_an_error_in_time(
    kubelet: PodResourcesSocket, channel: grpc.Channel
) -> None:
    kubelet.hang()
    with pytest.raises(usage.KubeletError, match="DEADLINE_EXCEEDED"):
        usage.read_usage(channel, 0.2)


def test_a_kubelet_that_is_absent_is_an_error_and_found_when_it_comes(socket: Path) -> None:
    with usage.channel(socket) as channel:
        for read in (usage.read_usage, usage.read_allocatable):
            words = f"^PodResources: UNAVAILABLE: {socket}: No such file or directory$"
            with pytest.raises(usage.KubeletError, match=words):
                read(channel, 1)
        with PodResourcesSocket(socket):
            assert soon_answered(channel)


def test_a_new_socket_on_the_same_path_is_connected_to(socket: Path) -> None:
    with usage.channel(socket) as channel:
        with PodResourcesSocket(socket):
            usage.read_usage(channel, 5)
        with PodResourcesSocket(socket):
            assert soon_answered(channel)


def soon_answered(channel: grpc.Channel) -> bool:
    """By itself gRPC would try again after a second, and after longer the next time."""
    stopwatch = Stopwatch()
    while not stopwatch.past(2):
        try:
            usage.read_usage(channel, 1)
        except usage.KubeletError:
            time.sleep(0.02)
        else:
            return True
    return False


def test_a_kubelet_that_is_slow_to_answer_a_connection_is_waited_for(
    tmp_path: Path, channel: grpc.Channel, socket: Path
) -> None:
    def late() -> None:
        connection, _ = front.accept()
        time.sleep(0.6)
        with connection, Socket(AF_UNIX) as back:
            back.connect(str(tmp_path / "behind.sock"))
            while ready := select([connection, back], [], [], 10)[0]:
                for end in ready:
                    part = end.recv(65536)
                    if not part:
                        return
                    (back if end is connection else connection).sendall(part)

    with PodResourcesSocket(tmp_path / "behind.sock") as kubelet, Socket(AF_UNIX) as front:
        kubelet.listed = [api.PodResources(namespace="a", name="p")]
        front.bind(str(socket))
        front.listen()
        thread = threading.Thread(target=late)
        thread.start()
        assert len(usage.read_usage(channel, 10).pods) == 1
        channel.close()
        thread.join()


def test_a_path_that_no_socket_can_have_is_refused_with_its_length() -> None:
    with pytest.raises(usage.KubeletError, match="has 121 bytes, Unix sockets allow 107"):
        usage.channel(Path("/") / ("d" * 107) / "kubelet.sock")


@pytest.mark.parametrize(
    ("claim", "held"),
    [
        pytest.param("gpu.nvidia.com/n1/gpu-1", {"GPU-b"}, id="a whole GPU by its minor"),
        pytest.param("gpu.nvidia.com/n1/gpu-0-mig-19-0-1", {"MIG-a0", "MIG-a1"}, id="a slice"),
        pytest.param("k8s.gpu.nvidia.com/device=GPU-a", {"GPU-a"}, id="an id in a CDI name"),
        pytest.param("gpu.nvidia.com/n1/gpu-10", set(), id="a minor that no GPU has"),
        pytest.param("other.example.com/n1/gpu-0", set(), id="another driver"),
    ],
)
def test_dra_claims_name_our_devices(claim: str, held: set[str]) -> None:
    def slice_(id: str, instance: int) -> MigSlice:
        return MigSlice(
            id=DeviceId(id),
            profile="1g.10gb",
            memory_bytes=10 << 30,
            gpu_instance=instance,
            compute_instance=0,
        )

    machine = Machine(
        numa_nodes=(),
        gpus=(
            Gpu(
                number=0,
                pci=PciAddress("0000:01:00.0"),
                uuid=DeviceId("GPU-a"),
                minor=0,
                slices=(slice_("MIG-a0", 1), slice_("MIG-a1", 2)),
            ),
            Gpu(number=1, pci=PciAddress("0000:02:00.0"), uuid=DeviceId("GPU-b"), minor=1),
        ),
    )
    driver, pool, device, *_ = [*claim.split("/"), "x"]
    claims = api.DynamicResource(
        claim_resources=[
            api.ClaimResource(
                driver_name=driver,
                pool_name=pool,
                device_name=device,
                cdi_devices=[api.CDIDevice(name=claim)] if "=" in claim else [],
            )
        ]
    )
    pod = api.PodResources(
        containers=[api.ContainerResources(name="c", dynamic_resources=[claims])]
    )
    answer = api.ListPodResourcesResponse(pod_resources=[pod])
    assert usage.claimed(usage.parse_usage(answer.SerializeToString()), machine) == held
