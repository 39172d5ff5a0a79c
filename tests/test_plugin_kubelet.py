"""The plugin with a real kubelet's managers: what pods get, row by row as about.md says."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from random import Random
from typing import Any

import grpc
import pytest

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.decisions import Call
from plugin.devices import Advertising, MigStrategy
from plugin.life import DevicePlugin, Options
from rte.kubelet.usage import channel
from rte.model import Machine
from rte.sources.recorded import read_recorded
from tests.conftest import StartKubelet
from tests.machines.about import expectations
from tests.machines.description import FOLDER
from tests.real_kubelet import Admission, Kubelet, numa_nodes, pod
from tests.small_kubelet import until
from tests.small_machine import with_gpu
from tests.stopwatch import Stopwatch

GPU = "nvidia.com/gpu"
SINGLE = {"topologyManagerPolicy": "single-numa-node"}
STATIC_CPUS = {**SINGLE, "cpuManagerPolicy": "static"}

Run = Callable[..., "Node"]


class Node:
    """A real kubelet with our plugin on a recorded machine."""

    def __init__(self, kubelet: Kubelet, name: str, **options: Any) -> None:
        self.name = name
        self.kubelet = kubelet
        self.machine: Machine = read_recorded(FOLDER / name)
        self.plugin = DevicePlugin(
            Options(
                plugin_dir=kubelet.plugin_dir,
                pod_resources=kubelet.pod_resources,
                **options,
            )
        )
        self.plugin.start()
        self.plugin.update(self.machine, {})

    def ready(self) -> None:
        """Returns when the kubelet has every healthy device."""
        for name, resource in self.plugin.resources.items():
            self.kubelet.wait_devices(name, len(resource.tables.healthy))

    def admit(self, name: str, *containers: dict[str, Any], **more: Any) -> Admission:
        return self.kubelet.admit(pod(name, *containers, **more))

    def gpus(self, admission: Admission, resource: str = GPU) -> tuple[int, ...]:
        """Numbers of the GPUs of an admitted pod."""
        assert admission.admitted, admission
        numbers = {gpu.uuid: gpu.number for gpu in self.machine.gpus}
        return tuple(sorted(numbers[id] for id in admission.devices(resource)))  # type: ignore[index]

    def calls(self) -> list[tuple[Call, int, int]]:
        """(call, offered, size) of each decision."""
        return [(d.call, len(d.offered), d.size) for d in self.plugin.decisions]

    def withhold_all_but(self, *numbers: int) -> None:
        self.plugin.withhold(
            {gpu.pci: "test" for gpu in self.machine.gpus if gpu.number not in numbers}
        )
        self.ready()


def runs(kubelet: StartKubelet, stack: ExitStack) -> Run:
    """Starts a kubelet and a plugin that is registered with it and ends with the stack."""

    def run(name: str, config: Any = SINGLE, *, cpus: int = 16, **options: Any) -> Node:
        bearing = [n.id for n in read_recorded(FOLDER / name).numa_nodes if n.cpus]
        node = Node(kubelet(config, machine=numa_nodes(bearing, cpus=cpus)), name, **options)
        stack.callback(node.plugin.stop)
        node.ready()
        return node

    return run


@pytest.fixture
def run(kubelet: StartKubelet, stack: ExitStack) -> Run:
    return runs(kubelet, stack)


def by_hand(name: str, *, free: str, offered: str, size: int) -> tuple[int, ...]:
    """What about.md of the machine says is chosen."""

    def numbers(text: str) -> tuple[int, ...]:
        ends = [part.split("-") for part in text.split(",")]
        return tuple(n for e in ends for n in range(int(e[0]), int(e[-1]) + 1))

    (row,) = (
        e
        for e in expectations(name)
        if (e.free, e.offered, e.size) == (numbers(free), numbers(offered), size)
    )
    return row.chosen


# The pair


@pytest.mark.parametrize(("name", "third_free"), [("pcie-a100-pairs", "0-7"), ("dgx1-v100", "4-7")])
def test_a_pod_of_two_gets_the_pair_that_was_written_by_hand(
    run: Run, name: str, third_free: str
) -> None:
    node = run(name)
    first = node.gpus(node.admit("first", {GPU: 2}))
    assert first == by_hand(name, free="0-7", offered="0-3", size=2)
    assert first != (0, 1)  # what first-fit would take
    # Two are left in the first node, and an exact fit is taken without asking.
    second = node.gpus(node.admit("second", {GPU: 2}))
    assert sorted(first + second) == [0, 1, 2, 3]
    third = node.gpus(node.admit("third", {GPU: 2}))
    assert third == by_hand(name, free=third_free, offered="4-7", size=2)
    assert node.calls() == [(Call.PREFERRED, 4, 2), (Call.ALLOCATED, 0, 2), (Call.PREFERRED, 4, 2)]


def test_the_reduced_gpu_is_left_with_two_of_the_other_socket_taken(run: Run) -> None:
    node = run("h100-one-reduced", STATIC_CPUS, cpus=16)
    assert node.admit("cpus", {"cpu": 12, "memory": "1Gi"}).admitted
    there = node.admit("there", {GPU: 2, "cpu": 8, "memory": "1Gi"})
    assert set(node.gpus(there)) < {4, 5, 6, 7}
    node.kubelet.remove("cpus")
    free = ",".join(str(n) for n in range(8) if n not in node.gpus(there))
    assert free == "0,1,2,3,6,7"
    chosen = node.gpus(node.admit("two", {GPU: 2, "cpu": 2, "memory": "1Gi"}))
    assert chosen == by_hand(node.name, free="0-3,6,7", offered="0-3", size=2)
    assert chosen != (0, 1)


def test_the_reduced_gpu_is_left_with_one_of_each_socket_taken(run: Run) -> None:
    node = run("h100-one-reduced")
    node.withhold_all_but(0, 4)
    assert node.gpus(node.admit("a", {GPU: 1})) == (0,)
    assert node.gpus(node.admit("b", {GPU: 1})) == (4,)
    node.withhold_all_but(*range(8))
    chosen = node.gpus(node.admit("two", {GPU: 2}))
    assert chosen == by_hand(node.name, free="1-3,5-7", offered="1-3", size=2)
    assert chosen != (1, 2)


def test_single_gpus_leave_the_pairs_whole(run: Run) -> None:
    node = run("pcie-a100-pairs")
    singles = [node.gpus(node.admit(f"p{n}", {GPU: 1}))[0] for n in range(4)]
    assert singles == [0, 2, 1, 3]
    assert node.gpus(node.admit("two", {GPU: 2})) == (4, 6)


# The kubelet's answers


def test_five_of_four_and_four_is_a_topology_affinity_error(run: Run) -> None:
    node = run("hgx-h100-oci")
    five = node.admit("five", {GPU: 5})
    assert not five.admitted
    assert five.reason == "TopologyAffinityError"
    assert node.calls() == []
    four = node.admit("four", {GPU: 4})
    assert node.gpus(four) in {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_gpus_and_exclusive_cpus_are_of_one_numa_node(run: Run) -> None:
    node = run("hgx-h100-oci", STATIC_CPUS)
    for name in ("first", "second"):
        admitted = node.admit(name, {GPU: 3, "cpu": 6, "memory": "1Gi"})
        socket = {n // 4 for n in node.gpus(admitted)}
        cpus = admitted.containers[0].exclusive_cpus
        assert cpus is not None
        cores = {
            n["id"] for n in node.kubelet.machine for core in n["cores"] if set(core) & set(cpus)
        }
        assert len(socket) == 1
        assert cores == socket


def test_without_a_policy_the_plugin_alone_decides(run: Run) -> None:
    node = run("pcie-a100-pairs", {"topologyManagerPolicy": "none"})
    assert node.gpus(node.admit("two", {GPU: 2})) == by_hand(
        node.name, free="0-7", offered="0-7", size=2
    )
    assert node.gpus(node.admit("four", {GPU: 4})) == (4, 5, 6, 7)
    assert node.calls() == [(Call.PREFERRED, 8, 2), (Call.PREFERRED, 6, 4)]


def test_the_gpu_of_an_init_container_is_used_again(run: Run) -> None:
    node = run("pcie-a100-pairs")
    admitted = node.admit("p", {GPU: 2}, init=[{GPU: 1}])
    assert admitted.admitted
    chosen = {c.name: c.devices[GPU] for c in admitted.containers if c.devices}
    assert set(chosen["init0"]) < set(chosen["c0"])
    numbers = {gpu.uuid: gpu.number for gpu in node.machine.gpus}
    assert sorted(numbers[id] for id in chosen["c0"]) == [0, 2]  # type: ignore[index]
    assert list(node.plugin.decisions)[-1].required == chosen["init0"]


def test_a_kubelet_restart_loses_nothing_and_registers_within_a_second(run: Run) -> None:
    node = run("pcie-a100-pairs")
    before = node.gpus(node.admit("before", {GPU: 2}))
    again = node.kubelet.restart()
    stopwatch = Stopwatch()
    assert [a.admitted for a in again] == [True]
    node.kubelet.wait_devices(GPU, 8)
    assert stopwatch.took_s < 1
    assert until(lambda: node.plugin.resources[GPU].counters.registrations == 2)
    assert until(lambda: set(before) == held(node))
    after = node.gpus(node.admit("after", {GPU: 2}))
    assert not set(before) & set(after)
    assert sorted(before + after) == [0, 1, 2, 3]


def test_a_kubelet_restart_at_any_moment_of_a_registration_is_got_over(run: Run) -> None:
    node = run("pcie-a100-pairs")
    dice = Random(1)
    for _ in range(12):
        node.plugin.stop()
        node = Node(node.kubelet, node.name)
        time.sleep(dice.uniform(0, 0.02))  # serving takes 5 ms, Register 5 more
        node.kubelet.restart()
        stopwatch = Stopwatch()
        node.ready()
        assert stopwatch.took_s < 1
    node.plugin.stop()


def test_a_kubelet_that_crashed_is_found_again(run: Run) -> None:
    node = run("pcie-a100-pairs")
    before = node.gpus(node.admit("before", {GPU: 2}))
    node.kubelet.kill()
    node.kubelet.start()
    stopwatch = Stopwatch()
    node.kubelet.wait_devices(GPU, 8)
    assert stopwatch.took_s < 1
    after = node.gpus(node.admit("after", {GPU: 2}))
    assert sorted(before + after) == [0, 1, 2, 3]


def test_a_socket_name_that_the_kubelet_has_burnt_is_left_for_another(run: Run) -> None:
    node = run("pcie-a100-pairs")
    # Somebody registers our socket a second time: this kubelet now loses the first registration
    # when it ends, and takes the name never again.
    request = api.RegisterRequest(version="v1beta1", endpoint="rte-gpu.sock", resource_name=GPU)
    with (
        channel(node.kubelet.plugin_dir / "kubelet.sock") as kubelet,
        pytest.raises(grpc.RpcError, match="already connected"),
    ):
        rpc.RegistrationStub(kubelet).Register(request)
    node.plugin.registrations[GPU].again("the test wants it")
    assert until(lambda: node.plugin.resources[GPU].counters.registrations == 2)
    assert (node.kubelet.plugin_dir / "rte-gpu.2.sock").is_socket()
    node.plugin.withhold({node.machine.gpus[0].pci: "test"})
    node.kubelet.wait_devices(GPU, 7)
    assert node.gpus(node.admit("two", {GPU: 2})) == (1, 3)
    # A plugin that starts now finds the name burnt, too.
    node.plugin.stop()
    fresh = Node(node.kubelet, node.name)
    fresh.ready()
    assert fresh.plugin.registrations[GPU].socket.name == "rte-gpu.2.sock"
    fresh.plugin.stop()
    node = Node(node.kubelet, node.name)
    node.kubelet.restart()
    node.ready()
    assert (node.kubelet.plugin_dir / "rte-gpu.sock").is_socket()
    node.plugin.stop()


def held(node: Node) -> set[int]:
    numbers = {gpu.uuid: gpu.number for gpu in node.machine.gpus}
    return {numbers[id] for id in node.plugin.held.ids()}


def test_a_plugin_that_is_gone_leaves_capacity_and_comes_back(run: Run) -> None:
    node = run("pcie-a100-pairs")
    node.plugin.stop()
    node.kubelet.wait_devices(GPU, 0)
    state = node.kubelet.state()
    assert (state.capacity[GPU], state.allocatable[GPU]) == ("8", "0")
    assert node.admit("early", {GPU: 2}).reason == "TopologyAffinityError"
    back = Node(node.kubelet, node.name)
    back.ready()
    assert back.gpus(back.admit("two", {GPU: 2})) == (0, 2)
    back.plugin.stop()


def test_a_lost_gpu_stays_in_the_capacity_and_takes_none_with_it(run: Run) -> None:
    node = run("pcie-a100-pairs")
    node.plugin.update(with_gpu(node.machine, 0, uuid=None, lost="GPU is lost"), {})
    node.kubelet.wait_devices(GPU, 7)
    assert node.kubelet.state().capacity[GPU] == "8"
    assert node.gpus(node.admit("two", {GPU: 2})) == (1, 3)
    node.plugin.update(node.machine, {})
    node.kubelet.wait_devices(GPU, 8)


def test_slices_and_gpus_are_resources_side_by_side(run: Run) -> None:
    node = run("mig-half", advertising=Advertising(mig=MigStrategy.MIXED))
    mig = sorted(set(node.plugin.resources) - {GPU})
    assert mig
    wanted = {GPU: 1, mig[0]: 1}
    admitted = node.admit("both", wanted)
    assert admitted.admitted
    (gpu,) = admitted.devices(GPU)
    (part,) = admitted.devices(mig[0])
    whole = {g.uuid for g in node.machine.gpus if not g.mig_enabled}
    cut = {s.id for g in node.machine.gpus if g.mig_enabled for s in g.slices}
    assert gpu in whole
    assert part in cut
    node.kubelet.restart()
    node.ready()
    assert until(lambda: node.plugin.ready)


def test_devices_without_a_numa_node_are_handed_out_under_single_numa_node(run: Run) -> None:
    node = run("vm-all-minus-one")
    count = len(node.plugin.resources[GPU].tables.devices)
    admitted = node.admit("all", {GPU: count})
    assert len(node.gpus(admitted)) == count


def test_the_allocate_of_a_pod_is_what_its_container_gets(run: Run) -> None:
    node = run("pcie-a100-pairs")
    admitted = node.admit("two", {GPU: 2})
    ids = [g.uuid for g in node.machine.gpus if g.uuid in admitted.devices(GPU)]
    options = admitted.containers[0].options
    assert options is not None
    assert options["envs"] == {"NVIDIA_VISIBLE_DEVICES": ",".join(map(str, ids))}
