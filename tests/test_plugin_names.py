"""Resource names that change, rivals and the plugin watcher, with a real kubelet's managers."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from plugin.devices import Advertising, MigStrategy
from plugin.life import DevicePlugin, Options
from plugin.moving import Listed
from rte.kubelet.usage import channel, read_allocatable
from rte.model import DeviceId, Machine, PciAddress, PodName
from tests.real_kubelet import Kubelet, pod
from tests.simple_plugin import SimplePlugin
from tests.small_kubelet import until
from tests.small_machine import address, machine, slices, uuid, with_gpu
from tests.stopwatch import Stopwatch

GPU, SHARED, MIG = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-3g.40gb"
RING = "nvidia.com/gpu-fabric.ring-0"
SINGLE = {"topologyManagerPolicy": "single-numa-node"}
QUAD = machine((0, 0, 1, 1), pairs=[(0, 1), (2, 3)])
BY_GROUP = Advertising(fabric={address(n): "ring-0" for n in range(4)})
MIXED = Advertising(mig=MigStrategy.MIXED)
CUT = with_gpu(QUAD, 0, mig_enabled=True, slices=slices(0, "3g.40gb", "3g.40gb"))

StartKubelet = Callable[..., Kubelet]


class Node:
    """A real kubelet and one plugin after the other."""

    def __init__(self, kubelet: Kubelet) -> None:
        self.kubelet = kubelet
        self.plugin: DevicePlugin | None = None
        self.asked = channel(kubelet.pod_resources)

    def start(self, machine: Machine = QUAD, *, ready: bool = True, **options: Any) -> DevicePlugin:
        self.stop()
        plugin = DevicePlugin(
            Options(
                plugin_dir=self.kubelet.plugin_dir,
                pod_resources=self.kubelet.pod_resources,
                **options,
            )
        )
        self.plugin = plugin
        plugin.start()
        plugin.update(machine, {})
        if ready:
            assert until(lambda: plugin.ready)
            for name, resource in plugin.resources.items():
                self.kubelet.wait_devices(name, len(resource.tables.healthy))
        return plugin

    def stop(self) -> None:
        if self.plugin is not None:
            self.plugin.stop()
            self.plugin = None

    def offered(self) -> dict[str, set[str]]:
        """What the kubelet could hand out, by resource name."""
        found: dict[str, set[str]] = {}
        for device in read_allocatable(self.asked, 5).devices:
            found.setdefault(device.resource, set()).add(device.id)
        return found

    def admit(self, name: str, **wanted: int) -> tuple[str, ...]:
        requests = {f"nvidia.com/{key.replace('_', '-')}": n for key, n in wanted.items()}
        return self.take(name, requests)

    def take(self, name: str, requests: dict[str, int]) -> tuple[str, ...]:
        admitted = self.kubelet.admit(pod(name, requests))
        assert admitted.admitted, admitted
        return tuple(id for resource in requests for id in admitted.devices(resource))


@pytest.fixture
def node(kubelet: StartKubelet) -> Iterator[Node]:
    node = Node(kubelet(SINGLE, rate_limit=False))
    yield node
    node.stop()
    node.asked.close()


def test_a_gpu_in_use_under_its_former_name_comes_to_the_new_one_with_its_pods_end(
    node: Node,
) -> None:
    node.start()
    (held,) = node.admit("train", gpu=1)
    plugin = node.start(advertising=BY_GROUP)
    node.kubelet.wait_devices(RING, 3)
    assert held not in node.offered()[RING]
    assert plugin.ready
    rest = node.take("rest", {RING: 1})
    assert held not in rest
    node.kubelet.remove("train")
    node.kubelet.wait_devices(RING, 4)
    assert held in node.offered()[RING]
    # And back: what is in use as part of the ring is not offered as a GPU.
    plugin = node.start()
    node.kubelet.wait_devices(GPU, 3)
    assert not set(rest) & node.offered()[GPU]


def test_a_change_of_names_while_it_runs_is_refused_with_the_pods_that_would_lose_theirs(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = node.start()
    (held,) = node.admit("train", gpu=1)
    options = replace(plugin.options, advertising=BY_GROUP)
    train = PodName(namespace="default", name="train")
    assert plugin.reconfigure(options) == {Listed(GPU, DeviceId(held)): (train,)}
    assert set(node.offered()) == {GPU}
    node.kubelet.remove("train")
    assert plugin.reconfigure(options) == {}
    seen: set[str] = set()
    stopwatch = Stopwatch()
    while RING not in seen:
        assert not stopwatch.past(20), seen
        offered = node.offered()
        seen |= offered.keys()
        # At no moment a GPU is offered under both names.
        assert len(offered.get(GPU, set()) & offered.get(RING, set())) == 0
    node.kubelet.wait_devices(RING, 4)
    node.kubelet.wait_devices(GPU, 0)


def test_replicas_are_not_offered_of_a_gpu_that_a_pod_has_alone(node: Node) -> None:
    node.start()
    (held,) = node.admit("alone", gpu=1)
    node.start(advertising=Advertising(replicas={GPU: 2}, rename_shared=True))
    node.kubelet.wait_devices(SHARED, 6)
    assert not {f"{held}::0", f"{held}::1"} & node.offered()[SHARED]
    node.kubelet.remove("alone")
    node.kubelet.wait_devices(SHARED, 8)
    # And under one name.
    node.take("some", {SHARED: 1})
    node.start(advertising=Advertising(replicas={SHARED: 2, GPU: 2}))
    node.kubelet.wait_devices(GPU, 6)


def test_a_gpu_cut_while_a_pod_has_it_is_neither_whole_nor_slices_until_the_pod_ends(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = node.start(advertising=MIXED)
    ids = {node.admit(f"p{n}", gpu=1)[0] for n in range(4)}
    assert uuid(0) in ids
    plugin.update(CUT, {})
    assert MIG not in node.offered()
    assert node.kubelet.state().capacity[GPU] == "4"
    said = "is not offered as nvidia.com/mig-3g.40gb while default/p"
    assert until(lambda: said in caplog.text)
    for n in range(4):
        node.kubelet.remove(f"p{n}")
    node.kubelet.wait_devices(MIG, 2)
    node.kubelet.wait_devices(GPU, 3)
    assert uuid(0) not in node.offered()[GPU]


def test_a_slice_that_its_pod_alone_keeps_in_the_list_goes_with_that_pod(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut, made whole and cut again, under pods that have a slice of it and the whole."""
    plugin = node.start(CUT, advertising=MIXED)
    node.kubelet.wait_devices(MIG, 2)
    (part,) = node.take("part", {MIG: 1})
    plugin.update(QUAD, {})
    node.kubelet.wait_devices(GPU, 4)
    whole = {name: node.admit(name, gpu=2) for name in ("one", "other")}
    (holder,) = (name for name, ids in whole.items() if uuid(0) in ids)
    plugin.update(CUT, {})
    assert until(lambda: f"while default/{holder} has {uuid(0)}" in caplog.text)
    # Nobody can get it after its pod, either.
    assert MIG not in node.offered()
    assert node.kubelet.state().capacity[MIG] == "1"
    assert set(plugin.resources[MIG].tables.devices) == {part}
    node.kubelet.remove("part")
    assert until(lambda: not plugin.resources[MIG].tables.devices)
    assert until(lambda: node.kubelet.state().capacity[MIG] == "0")
    node.kubelet.remove(holder)
    node.kubelet.wait_devices(MIG, 2)


def test_a_mig_reconfiguration_with_nothing_in_use_is_never_offered_twice(node: Node) -> None:
    plugin = node.start(advertising=MIXED)
    for _ in range(3):
        for now, there in ((CUT, {GPU: 3, MIG: 2}), (QUAD, {GPU: 4, MIG: 0})):
            plugin.update(now, {})
            stopwatch = Stopwatch()
            while True:
                offered = node.offered()
                both = uuid(0) in offered.get(GPU, set()) and offered.get(MIG)
                assert not both, offered
                if all(len(offered.get(name, set())) == n for name, n in there.items()):
                    break
                assert not stopwatch.past(20), (offered, there)


def test_slices_keep_their_ids_and_pods_when_others_are_made_beside_them(node: Node) -> None:
    """One list a change: what did not change is not sent again."""
    plugin = node.start(CUT, advertising=MIXED)
    (held,) = node.take("train", {MIG: 1})
    sent = plugin.resources[GPU].counters.lists_sent
    more = with_gpu(CUT, 1, mig_enabled=True, slices=slices(1, "3g.40gb"))
    plugin.update(more, {})
    node.kubelet.wait_devices(MIG, 3)
    node.kubelet.wait_devices(GPU, 2)
    assert plugin.resources[GPU].counters.lists_sent == sent + 1
    assert plugin.resources[MIG].counters.lists_sent <= 3  # the first, and the one that it needs
    assert held in node.offered()[MIG]
    status = node.kubelet.pod_status("train")
    assert "Unhealthy" not in str(status)


# Rivals


def test_a_plugin_of_another_name_that_serves_the_resource_is_waited_for(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with SimplePlugin(GPU, {"other-0": (0,)}) as other:
        other.serve(node.kubelet.plugin_dir)
        node.kubelet.wait_devices(GPU, 1)
        plugin = node.start(ready=False)
        socket = node.kubelet.plugin_dir / "nvidia.com_gpu.sock"
        assert until(lambda: f"another device plugin answers on {socket}" in caplog.text)
        time.sleep(0.5)
        assert plugin.resources[GPU].counters.registrations == 0
        node.kubelet.wait_devices(GPU, 1)
    node.kubelet.wait_devices(GPU, 4)
    assert caplog.text.count("another device plugin answers") == 1
    assert plugin.resources[GPU].counters.registrations_failed == 0


def test_plugins_of_other_resources_are_no_rivals(node: Node) -> None:
    with SimplePlugin("example.com/nic", {"nic-0": (0,)}) as other:
        other.serve(node.kubelet.plugin_dir)
        node.kubelet.wait_devices("example.com/nic", 1)
        node.start()
        node.kubelet.wait_devices(GPU, 4)


# The plugin watcher


def watcher(kubelet: Kubelet) -> dict[str, Any]:
    return {"registry_dir": kubelet.registry_dir}


def test_the_plugin_watcher_finds_the_sockets_and_pods_get_their_pair(node: Node) -> None:
    plugin = node.start(**watcher(node.kubelet))
    node.kubelet.wait_devices(GPU, 4)
    assert set(node.admit("two", gpu=2)) in ({uuid(0), uuid(1)}, {uuid(2), uuid(3)})
    assert [p.name for p in node.kubelet.registry_dir.glob("*.sock")] == ["rte-gpu.sock"]
    assert not list(node.kubelet.plugin_dir.glob("rte-*"))
    assert plugin.resources[GPU].counters.registrations == 1


def test_a_kubelet_that_restarts_finds_the_same_socket_again(node: Node) -> None:
    plugin = node.start(**watcher(node.kubelet))
    node.kubelet.wait_devices(GPU, 4)
    (held,) = node.admit("before", gpu=1)
    socket = node.kubelet.registry_dir / "rte-gpu.sock"
    inode = socket.stat().st_ino
    for turn in range(2, 5):
        node.kubelet.restart()
        node.kubelet.wait_devices(GPU, 4)
        assert until(lambda n=turn: plugin.resources[GPU].counters.registrations == n)  # type: ignore[misc]
    assert socket.stat().st_ino == inode
    assert held not in node.admit("after", gpu=1)


def test_a_plugin_that_ends_and_comes_back_is_found_by_the_watcher(node: Node) -> None:
    node.start(**watcher(node.kubelet))
    node.kubelet.wait_devices(GPU, 4)
    node.stop()
    node.kubelet.wait_devices(GPU, 0)
    assert not list(node.kubelet.registry_dir.iterdir())
    node.start(**watcher(node.kubelet))
    node.kubelet.wait_devices(GPU, 4)


def test_several_resources_and_changes_go_through_the_watcher_too(node: Node) -> None:
    plugin = node.start(CUT, advertising=MIXED, **watcher(node.kubelet))
    node.kubelet.wait_devices(GPU, 3)
    node.kubelet.wait_devices(MIG, 2)
    plugin.withhold({PciAddress(address(3)): "test"})
    node.kubelet.wait_devices(GPU, 2)
    (slice_,) = node.take("slice", {MIG: 1})
    assert slice_ in {s.id for s in CUT.gpus[0].slices}


def test_the_watcher_takes_over_from_register(node: Node) -> None:
    node.start()
    (held,) = node.admit("before", gpu=1)
    node.start(**watcher(node.kubelet))
    node.kubelet.wait_devices(GPU, 4)
    assert held not in node.admit("after", gpu=1)


# A kubelet that restarts


def test_a_kubelet_that_is_yet_to_hear_of_its_pods_is_offered_nothing_of_theirs(
    node: Node,
) -> None:
    """It lists no pods for a moment after its start, and keeps what they have."""
    plugin = node.start(advertising=MIXED)
    held = {name: node.admit(name, gpu=1)[0] for name in ("one", "two", "three", "four")}
    (holder,) = (name for name, id in held.items() if id == uuid(0))
    plugin.update(CUT, {})
    node.kubelet.wait_devices(GPU, 3)
    assert until(lambda: not plugin.held.own())
    node.kubelet.restart_deaf()
    node.kubelet.wait_devices(GPU, 3)
    assert until(lambda: not plugin.held.ids())
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert MIG not in node.offered()
    node.kubelet.hear_of_pods(True)
    assert until(lambda: plugin.held.ids() >= set(held.values()))
    node.kubelet.remove(holder)
    node.kubelet.wait_devices(MIG, 2)
