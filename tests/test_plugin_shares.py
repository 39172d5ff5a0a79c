"""GPUs beside NICs, and whose a decision was, with a real kubelet's managers."""

import json
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from plugin.api import deviceplugin_pb2 as api
from plugin.decisions import Call, Decision
from plugin.life import ADMITTED_WITHIN_S
from rte.commands.decided import decisions_json, decisions_text
from rte.kubelet.usage import channel, read_allocatable, read_usage
from rte.model import PciAddress, PodName
from tests.conftest import StartKubelet
from tests.ports import free_port
from tests.real_kubelet import pod
from tests.simple_plugin import SimplePlugin
from tests.small_kubelet import until
from tests.test_plugin_kubelet import GPU, SINGLE, Node, Run, runs
from tests.test_plugin_process import Node as ProcessNode

VF, SLOW = "example.com/vf", "example.com/slow"


@pytest.fixture
def run(kubelet: StartKubelet, stack: ExitStack) -> Run:
    return runs(kubelet, stack)


class Held(SimplePlugin):
    """A plugin that answers an Allocate only when it may."""

    def __init__(self, resource: str, devices: dict[str, tuple[int, ...] | None]) -> None:
        super().__init__(resource, devices)
        self.asked = threading.Event()
        self.may = threading.Event()

    def Allocate(self, request: api.AllocateRequest, context: Any) -> api.AllocateResponse:
        self.asked.set()
        assert self.may.wait(30)
        return super().Allocate(request, context)


def settle(node: Node) -> None:
    """Returns when the plugin knows what PodResources shows now."""
    with channel(node.kubelet.pod_resources) as kubelet:
        asked = time.monotonic()
        node.plugin.observe(read_usage(kubelet, 5), asked=asked)


# NICs


def test_a_nic_that_another_pod_holds_is_not_counted_for_gpus(run: Run) -> None:
    """All GPUs of the board are equal but for their NICs; those of gpu-1 are taken."""
    node = run("hgx-h100-oci", {"topologyManagerPolicy": "none"})
    below_gpu_1 = {"0000:2a:00.0": (0,), "0000:2a:00.1": (0,)}
    with SimplePlugin(VF, below_gpu_1) as nics:
        nics.serve(node.kubelet.plugin_dir)
        node.kubelet.wait_devices(VF, 2)
        both = node.admit("both", {GPU: 1, VF: 2})
        assert node.gpus(both) == (0,)
        assert until(lambda: node.plugin.held.nics == (frozenset(below_gpu_1), frozenset()))
        know_what_is_offered(node)
        # Two want NICs, so gpu-1 is of no use to them; one wants none, and it is just right.
        assert node.gpus(node.admit("two", {GPU: 2})) == (2, 3)
        decision = list(node.plugin.decisions)[-1]
        assert decision.preference is not None
        assert decision.preference.nics == (2, 2)
        assert decision.runner_up is not None
        assert node.gpus(node.admit("one", {GPU: 1})) == (1,)


def settle_old(node: Node) -> None:
    """The same, so long after that a container with NICs is known to get no GPU."""
    with channel(node.kubelet.pod_resources) as kubelet:
        usage = read_usage(kubelet, 5)
    node.plugin.observe(usage, asked=time.monotonic())
    node.plugin.observe(usage, asked=time.monotonic() + ADMITTED_WITHIN_S + 1)


@pytest.mark.parametrize("policy", ["none", "single-numa-node"])
def test_nics_and_gpus_of_one_container_in_both_orders(run: Run, policy: str) -> None:
    """The kubelet asks for a container's resources in random order. Where the NIC is given first
    and PodResources shows it in time, the GPU is one near it; where the GPU comes first, a single
    one is taken from where no NIC is free."""
    node = run("hgx-h100-oci", {"topologyManagerPolicy": policy})
    # The container's NIC is the one below gpu-2's switch.
    near = "0000:41:00.0"
    seen: dict[str, tuple[int, ...]] = {}
    slow = Held(SLOW, {"one": None})
    with SimplePlugin(VF, {near: (0,)}) as nics, slow:
        for plugin in (nics, slow):
            plugin.serve(node.kubelet.plugin_dir)
            node.kubelet.wait_devices(plugin.resource, 1)
        for number in range(60):
            slow.asked.clear()
            slow.may.clear()
            name = f"p{number}"
            nics.allocated.clear()
            decided = len(node.plugin.decisions)
            # Go begins a small map anywhere and goes on in the order in which it was filled.
            wanted = [GPU, SLOW, VF][:: number % 2 * 2 - 1]
            coming = node.kubelet.submit("admit", pod=pod(name, dict.fromkeys(wanted, 1)))
            assert slow.asked.wait(30)
            has_nic, has_gpu = bool(nics.allocated), len(node.plugin.decisions) > decided
            settle(node)  # as the plugin's thread does at its next look
            own = node.plugin.held.nics.own
            slow.may.set()
            assert coming.result(30)["admitted"]
            if has_nic != has_gpu:
                order = "NIC first" if has_nic else "GPU first"
                (decision,) = list(node.plugin.decisions)[-1:]
                numbers = {gpu.uuid: gpu.number for gpu in node.machine.gpus}
                seen[order] = tuple(numbers[id] for id in decision.answer)
                if order == "NIC first":
                    assert own == {near}
            node.kubelet.remove(name)
            settle(node)
            if len(seen) == 2:
                break
    assert seen["NIC first"] == (2,)
    assert seen["GPU first"] != (2,)


def test_a_pod_that_only_wants_nics_does_not_draw_gpus_for_ever(run: Run) -> None:
    node = run("hgx-h100-oci", {"topologyManagerPolicy": "none"})
    near: PciAddress = PciAddress("0000:41:00.0")
    with SimplePlugin(VF, {near: (0,)}) as nics:
        nics.serve(node.kubelet.plugin_dir)
        node.kubelet.wait_devices(VF, 1)
        assert node.admit("router", {VF: 1}).admitted
        settle(node)
        assert node.plugin.held.nics.own == {near}
        settle_old(node)
        assert node.plugin.held.nics == (frozenset({near}), frozenset())


def test_nics_count_only_where_a_resource_names_them_by_address(run: Run) -> None:
    """gpu-0 is near the only NIC. Left to others it is when others can ask for that NIC."""
    node = run("azure-domains", {"topologyManagerPolicy": "none"})
    assert until(lambda: not node.plugin.held.has_named(frozenset(nic_addresses(node))))
    with SimplePlugin("rdma/shared", {"0": None, "1": None}) as shared:
        shared.serve(node.kubelet.plugin_dir)
        node.kubelet.wait_devices("rdma/shared", 2)
        know_what_is_offered(node)
        assert node.gpus(node.admit("a", {GPU: 1})) == (0,)
        (decision,) = node.plugin.decisions
        assert decision.why == "NICs not counted, as no resource names them by PCI address"
        assert decision.preference is not None
        assert decision.preference.nics == (0, 0)
        assert f"  note     {decision.why}\n" in decisions_text([decision], None).decode()
    node.kubelet.remove("a")
    with SimplePlugin(VF, dict.fromkeys(nic_addresses(node), (0,))) as nics:
        nics.serve(node.kubelet.plugin_dir)
        node.kubelet.wait_devices(VF, 1)
        know_what_is_offered(node)
        assert node.gpus(node.admit("b", {GPU: 1})) == (1,)
        decision = list(node.plugin.decisions)[-1]
        assert decision.why == ""


def nic_addresses(node: Node) -> list[PciAddress]:
    return [nic.pci for nic in node.machine.nics if nic.pci is not None]


def know_what_is_offered(node: Node) -> None:
    """As the plugin's thread does every few seconds."""
    with channel(node.kubelet.pod_resources) as kubelet:
        node.plugin.held.offered(read_allocatable(kubelet, 5).devices)


# Pairs


def test_four_single_gpu_pods_on_four_pairs_break_two_and_not_four(run: Run) -> None:
    """k8s-device-plugin#1193, with no policy: the plugin alone chooses among all eight."""
    node = run("pcie-a100-pairs", {"topologyManagerPolicy": "none"})
    taken = [node.gpus(node.admit(f"p{n}", {GPU: 1}))[0] for n in range(4)]
    pairs = [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert sum(not set(pair) & set(taken) for pair in pairs) == 2
    assert node.gpus(node.admit("two", {GPU: 2})) in pairs
    assert node.gpus(node.admit("two more", {GPU: 2})) in pairs


def test_a_pair_that_a_pod_gave_back_is_known_to_be_whole(run: Run) -> None:
    """What is free is PodResources' to say, not the sum of our own allocations."""
    node = run("pcie-a100-pairs", {"topologyManagerPolicy": "none"})
    for n in range(3):
        node.admit(f"p{n}", {GPU: 1})  # 0, 2, then 1
    assert [d.answer for d in node.plugin.decisions] == [
        (node.machine.gpus[n].uuid,) for n in (0, 2, 1)
    ]
    node.kubelet.remove("p2")
    node.kubelet.remove("p0")  # no event tells of it, but the offer does
    assert node.gpus(node.admit("next", {GPU: 1})) == (0,)


# Decisions


def joined(node: Node) -> list[Decision]:
    assert until(lambda: all(d.pod for d in node.plugin.decisions))
    return list(node.plugin.decisions)


def test_pod_and_container_of_a_decision_come_from_pod_resources(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node = run("pcie-a100-pairs")
    first = node.admit("first", {GPU: 2})
    second = node.admit("second", {GPU: 1}, {GPU: 1})  # the two left: the last is not asked about
    decisions = joined(node)
    assert [(d.call, d.pod, d.container) for d in decisions] == [
        (Call.PREFERRED, PodName(namespace="default", name="first"), "c0"),
        (Call.PREFERRED, PodName(namespace="default", name="second"), "c0"),
        (Call.ALLOCATED, PodName(namespace="default", name="second"), "c1"),
    ]
    assert first.devices(GPU) != second.devices(GPU)
    assert decisions[2].why == "not asked: all that was free in NUMA node 0"
    assert decisions[2].preference is not None
    assert decisions[2].preference.leftover[1] == (4, 0)

    def logged(words: str) -> list[str]:
        """For whom."""
        lines = [r.getMessage() for r in caplog.records if words in r.getMessage()]
        return [line.rpartition(", for ")[2] for line in lines]

    assert until(lambda: len(logged(" offered → ") + logged("all that was free")) >= 3)
    assert logged(" offered → ") == ["default/first c0", "default/second c0"]
    assert logged("all that was free") == ["default/second c1"]


def test_a_device_used_again_is_said_to_be(run: Run) -> None:
    node = run("pcie-a100-pairs")
    admitted = node.admit("p", {GPU: 1}, init=[{GPU: 2}])
    assert admitted.admitted
    # Of the init container only what the main one goes on with is listed.
    assert until(lambda: list(node.plugin.decisions)[-1].pod is not None)
    first, again = node.plugin.decisions
    assert (first.call, again.call) == (Call.PREFERRED, Call.ALLOCATED)
    assert set(again.answer) < set(first.answer)
    assert again.why == "not asked: used again, as after an init container or a restart"
    assert again.container == "c0"


def test_a_pod_that_the_kubelet_refused_afterwards_has_no_decision_of_the_next(run: Run) -> None:
    """SMTAlignmentError comes after our Allocate; the same devices then go to another pod."""
    node = run(
        "pcie-a100-pairs",
        {
            **SINGLE,
            "cpuManagerPolicy": "static",
            "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
        },
    )
    refused = node.admit("odd", {GPU: 2, "cpu": 3, "memory": "1Gi"})
    assert refused.reason == "SMTAlignmentError"
    assert len(node.plugin.decisions) == 1
    node.kubelet.remove("odd")
    assert node.admit("even", {GPU: 2, "cpu": 2, "memory": "1Gi"}).admitted
    assert until(lambda: list(node.plugin.decisions)[-1].pod is not None)
    by_pod = [d.pod.name if d.pod else None for d in node.plugin.decisions]
    assert by_pod[-1] == "even"
    assert "even" not in by_pod[:-1]


def test_decisions_as_a_document_and_in_words(run: Run) -> None:
    node = run("pcie-a100-pairs")
    node.admit("first", {GPU: 2})
    node.admit("second", {GPU: 2})
    decisions = joined(node)
    asked, unasked = json.loads(decisions_json(decisions))
    assert asked["pod"] == {"namespace": "default", "name": "first"}
    assert asked["container"] == "c0"
    assert len(asked["offered"]) == 4
    assert asked["answer"] == list(decisions[0].answer)
    assert asked["preference"]["bottleneck"]["nvlink_megabytes_per_s"] > 0
    assert asked["decided_by"] == decisions[0].decided_by
    assert asked["runner_up"]["chosen"]
    assert (unasked["call"], unasked["offered"]) == ("allocated", [])
    assert unasked["preference"]["linked"] is True
    graph = node.plugin.resources[GPU].tables.graph
    text = decisions_text(decisions, graph).decode()
    assert (
        "nvidia.com/gpu for default/first, container c0\n"
        "  offered  gpu-0 gpu-1 gpu-2 gpu-3\n"
        "  chosen   gpu-0 gpu-2 in " in text
    )
    assert (
        "  taken    gpu-1 gpu-3\n  because  not asked: all that was free in NUMA node 0\n" in text
    )
    assert text.index("default/second") < text.index("default/first")
    assert decisions_text([], None) == b"no decision yet\n"


def test_the_daemon_answers_with_its_decisions(kubelet: StartKubelet, tmp_path: Path) -> None:
    """`rte plugin` as a process, asked over HTTP."""
    node = ProcessNode(kubelet(SINGLE), tmp_path, metrics_port=free_port())
    plugin = node.start()
    try:
        node.kubelet.wait_devices(GPU, 8)
        assert node.gpus("two", 2) == [0, 2]

        def page(path: str) -> bytes:
            url = f"http://127.0.0.1:{node.metrics_port}{path}"
            with urllib.request.urlopen(url, timeout=60) as answer:
                found: bytes = answer.read()
                return found

        assert until(lambda: json.loads(page("/decisions"))[0]["pod"] is not None)
        (decision,) = json.loads(page("/decisions"))
        assert decision["pod"]["name"] == "two"
        assert decision["size"] == 2
        text = page("/decisions.txt").decode()
        assert "chosen   gpu-0 gpu-2" in text
        assert until(lambda: plugin.said(", for default/two c0"))
        assert plugin.log.read_text().count("2 of 4 offered") == 1
    finally:
        plugin.end()
