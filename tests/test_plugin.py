"""The plugin over real sockets: register, list, prefer, allocate, and a kubelet that restarts."""

import dataclasses
import json
import logging
import random
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from plugin.allocation import Handing, Strategy
from plugin.api import deviceplugin_pb2 as api
from plugin.cdi import CdiError
from plugin.decisions import KEPT, Call
from plugin.devices import Advertising, MigStrategy
from plugin.held import OWN_ALLOCATION_S, Held, NicUse, nic_use
from plugin.life import DevicePlugin, Options
from plugin.registration import socket_names
from rte.kubelet.api import podresources_pb2 as pod_resources_api
from rte.kubelet.usage import KubeletError
from rte.model import (
    ContainerUse,
    DeviceId,
    DeviceUse,
    Fault,
    FaultClass,
    PciAddress,
    PodName,
    PodUse,
    Usage,
)
from tests.pod_resources import PodResourcesSocket, entry
from tests.small_kubelet import GPUS, SmallKubelet, until
from tests.small_machine import address, machine, slices, uuid, with_gpu, without_gpu
from tests.stopwatch import Stopwatch

PAIRS = machine((0, 0, 0, 0, 1, 1, 1, 1), pairs=[(0, 2), (1, 3), (4, 6), (5, 7)])

Start = Callable[..., DevicePlugin]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "dp"
    made.mkdir()
    return made


@pytest.fixture
def kubelet(folder: Path) -> Iterator[SmallKubelet]:
    with SmallKubelet(folder) as kubelet:
        yield kubelet


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts plugins that end with the test."""
    started: list[DevicePlugin] = []

    def start(
        machine: Any = PAIRS, on_allocate: Callable[[], None] | None = None, **options: Any
    ) -> DevicePlugin:
        plugin = DevicePlugin(Options(plugin_dir=folder, **options), on_allocate=on_allocate)
        started.append(plugin)
        plugin.start()
        if machine is not None:
            plugin.update(machine, {})
        return plugin

    yield start
    for plugin in started:
        plugin.stop()


@pytest.fixture
def plugin(start: Start, kubelet: SmallKubelet) -> DevicePlugin:
    """A registered plugin of PAIRS."""
    plugin = start()
    kubelet.await_register()
    assert until(lambda: kubelet.lists[GPUS])
    return plugin


def gpus(*numbers: int) -> tuple[DeviceId, ...]:
    return tuple(uuid(number) for number in numbers)


def leave_dead_socket(path: Path) -> None:
    """What a process that was killed leaves: a socket on which nobody listens."""
    with sockets.socket(sockets.AF_UNIX) as left:
        left.bind(str(path))


# Registration


def test_registers_with_a_short_socket_and_the_options_are_answered_meanwhile(
    plugin: DevicePlugin, kubelet: SmallKubelet, folder: Path
) -> None:
    assert (folder / "rte-gpu.sock").is_socket()
    (options,) = kubelet.options
    assert options.get_preferred_allocation_available
    assert not options.pre_start_required
    assert until(lambda: plugin.ready)
    assert kubelet.plugin().PreStartContainer(api.PreStartContainerRequest()) is not None


def test_the_request_names_version_endpoint_and_resource(
    start: Start, kubelet: SmallKubelet
) -> None:
    start()
    request = kubelet.await_register()
    assert request.version == "v1beta1"
    assert request.endpoint == "rte-gpu.sock"
    assert request.resource_name == GPUS
    assert request.options == kubelet.options[0]


def test_nothing_is_registered_before_the_machine_is_known(
    start: Start, kubelet: SmallKubelet
) -> None:
    plugin = start(None)
    assert not plugin.ready
    assert not plugin.registrations
    plugin.update(PAIRS, {})
    kubelet.await_register()


@pytest.mark.parametrize(
    ("resource", "name"),
    [(GPUS, "rte-gpu.sock"), ("nvidia.com/mig-1g.10gb.me", "rte-mig-1g.10gb.me.sock")],
)
def test_socket_names(resource: str, name: str) -> None:
    assert socket_names(resource)[0] == name


def test_a_kubelet_that_is_not_there_is_waited_for_and_said_once(
    start: Start, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plugin = start()
    waiting = f"no kubelet answers on {folder}/kubelet.sock yet"
    assert until(lambda: waiting in caplog.text)
    leave_dead_socket(folder / "kubelet.sock")
    assert not plugin.ready
    with SmallKubelet(folder) as kubelet:
        assert until(lambda: not kubelet.registered.empty(), within_s=2)
        plugin.stop()
    assert caplog.text.count(waiting) == 1


def test_a_kubelet_restart_leads_to_one_register_on_a_new_socket_within_a_second(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    for _ in range(3):
        kubelet.stop()
        stopwatch = Stopwatch()
        kubelet.start()
        kubelet.await_register()
        assert stopwatch.took_s < 1
        assert until(lambda: plugin.ready)
    assert kubelet.registered.empty()
    found = kubelet.sockets["rte-gpu.sock"]
    assert len(found) == 4
    assert all(a != b for a, b in pairwise(found))
    assert set(kubelet.devices()) == set(gpus(*range(8)))


def test_the_own_socket_removed_leads_to_a_register_within_a_second(
    plugin: DevicePlugin, kubelet: SmallKubelet, folder: Path
) -> None:
    stopwatch = Stopwatch()
    (folder / "rte-gpu.sock").unlink()
    kubelet.await_register()
    assert stopwatch.took_s < 1
    assert (folder / "rte-gpu.sock").is_socket()


def test_a_refused_register_is_tried_again_on_a_new_socket(
    start: Start, kubelet: SmallKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet.refuse = 3
    plugin = start()
    kubelet.await_register()
    assert until(lambda: plugin.ready)
    counters = plugin.resources[GPUS].counters
    assert (counters.registrations, counters.registrations_failed) == (1, 3)
    assert caplog.text.count("Register: the kubelet answered UNKNOWN: not now") == 1


def test_refusals_are_answered_by_waiting_longer_each_time(
    start: Start, kubelet: SmallKubelet
) -> None:
    kubelet.refuse = 1_000_000
    start()
    assert until(lambda: len(kubelet.refused) > 5)
    waited_s = [after - before for before, after in pairwise(kubelet.refused[:6])]
    least_s = (0.02, 0.04, 0.08, 0.16, 0.32)
    assert all(w >= least for w, least in zip(waited_s, least_s, strict=True)), waited_s


@pytest.fixture
def nvidia(kubelet: SmallKubelet, folder: Path) -> Iterator[grpc.Server]:
    """Something that listens where NVIDIA's plugin does."""
    pool = ThreadPoolExecutor(1)
    other = grpc.server(pool)
    other.add_insecure_port(f"unix:{folder}/nvidia-gpu.sock")
    other.start()
    yield other
    other.stop(0).wait()
    pool.shutdown()


def test_another_plugin_beside_another_resource_is_none(
    start: Start, kubelet: SmallKubelet, nvidia: grpc.Server
) -> None:
    start(advertising=Advertising(resource="example.com/gpu"))
    assert kubelet.await_register().resource_name == "example.com/gpu"


def test_another_plugin_that_answers_for_the_resource_is_waited_for_by_name(
    start: Start,
    kubelet: SmallKubelet,
    nvidia: grpc.Server,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugin = start()
    assert until(
        lambda: f"another device plugin answers on {folder}/nvidia-gpu.sock" in caplog.text
    )
    assert not plugin.ready
    assert kubelet.registered.empty()
    nvidia.stop(0).wait()
    kubelet.await_register()


def test_an_instance_that_still_serves_is_not_pushed_aside(
    plugin: DevicePlugin, kubelet: SmallKubelet, folder: Path, start: Start
) -> None:
    inode = (folder / "rte-gpu.sock").stat().st_ino
    second = start()
    assert until(lambda: second.registrations)
    time.sleep(0.2)
    assert (folder / "rte-gpu.sock").stat().st_ino == inode
    assert not second.ready
    plugin.stop()
    kubelet.await_register()
    assert until(lambda: second.ready)


def test_a_file_that_a_dead_process_left_is_replaced(
    start: Start, kubelet: SmallKubelet, folder: Path
) -> None:

    leave_dead_socket(folder / "rte-gpu.sock")
    start()
    kubelet.await_register()


def test_stop_removes_the_socket_ends_the_stream_and_all_threads(
    start: Start, kubelet: SmallKubelet, folder: Path
) -> None:
    before = set(threading.enumerate())
    plugin = start()
    kubelet.await_register()
    kubelet.devices()
    stopwatch = Stopwatch()
    plugin.stop()
    assert stopwatch.took_s < 1
    assert [path.name for path in folder.iterdir()] == ["kubelet.sock"]
    assert until(lambda: not kubelet.threads[0].is_alive())
    ours = [t for t in set(threading.enumerate()) - before if not t.name.startswith("kubelet")]
    assert until(lambda: not [t for t in ours if t.is_alive()]), ours


def test_a_path_too_long_for_a_socket_stops_the_start(tmp_path: Path) -> None:
    plugin = DevicePlugin(Options(plugin_dir=tmp_path / ("d" * 107)))
    plugin.update(PAIRS, {})
    with pytest.raises(KubeletError, match="Unix sockets allow 107"):
        plugin.start()


def test_cdi_without_a_specification_stops_the_start(tmp_path: Path) -> None:
    options = Options(
        plugin_dir=tmp_path,
        handing=Handing(strategies=frozenset({Strategy.CDI_CRI})),
        cdi_directories=(tmp_path / "cdi",),
    )
    with pytest.raises(CdiError, match="nvidia-ctk cdi generate"):
        DevicePlugin(options).start()


@pytest.fixture
def resources(tmp_path: Path) -> Iterator[PodResourcesSocket]:
    """Alive, and has none of our devices."""
    with PodResourcesSocket(tmp_path / "pr.sock") as socket:
        yield socket


def test_a_plugin_that_the_kubelet_lost_registers_once_more_and_only_once(
    start: Start, kubelet: SmallKubelet, resources: PodResourcesSocket
) -> None:
    plugin = start(pod_resources=resources.socket, lost_after_s=0.3)
    kubelet.await_register()
    kubelet.await_register()
    first, second = kubelet.sockets["rte-gpu.sock"]
    assert first != second
    time.sleep(1.5)
    assert kubelet.registered.empty()
    plugin.stop()


def test_a_plugin_whose_devices_the_kubelet_has_stays_registered(
    start: Start, kubelet: SmallKubelet, resources: PodResourcesSocket
) -> None:
    resources.allocatable.devices.append(entry(GPUS, [uuid(0)], 0))
    plugin = start(pod_resources=resources.socket, lost_after_s=0.3)
    kubelet.await_register()
    time.sleep(1.5)
    assert kubelet.registered.empty()
    plugin.stop()


def test_a_kubelet_that_opens_no_stream_is_registered_with_once_more(
    start: Start, kubelet: SmallKubelet
) -> None:
    kubelet.unwatched = 1
    start(lost_after_s=0.3)
    kubelet.await_register()
    kubelet.await_register()
    assert set(kubelet.devices()) == set(gpus(*range(8)))


# ListAndWatch


def test_the_list_is_whole_at_the_start(plugin: DevicePlugin, kubelet: SmallKubelet) -> None:
    listed = kubelet.devices()
    assert list(listed) == list(gpus(*range(8)))
    assert {device.health for device in listed.values()} == {"Healthy"}
    numa = [[node.ID for node in listed[id].topology.nodes] for id in gpus(0, 7)]
    assert numa == [[0], [1]]


def test_a_device_without_a_numa_node_has_no_topology_at_all(
    start: Start, kubelet: SmallKubelet
) -> None:
    start(machine((None, 1)))
    kubelet.await_register()
    listed = kubelet.devices()
    assert [listed[id].HasField("topology") for id in gpus(0, 1)] == [False, True]


def test_only_a_list_that_changed_is_sent(plugin: DevicePlugin, kubelet: SmallKubelet) -> None:
    plugin.update(PAIRS, {address(0): (Fault(severity=FaultClass.INFO, reason="warm"),)})
    plugin.update(dataclasses.replace(PAIRS, driver="999.1"), {})
    plugin.update(with_gpu(PAIRS, 3, uuid=None, lost="GPU is lost"), {})
    assert until(lambda: kubelet.devices()[uuid(3)].health == "Unhealthy")
    plugin.update(PAIRS, {})
    assert until(lambda: kubelet.devices()[uuid(3)].health == "Healthy")
    assert len(kubelet.lists[GPUS]) == 3


def test_a_cordoned_gpu_turns_unhealthy_and_back(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    plugin.withhold({uuid(5): "wrong cable"})
    assert until(lambda: kubelet.devices()[uuid(5)].health == "Unhealthy")
    plugin.withhold({})
    assert until(lambda: kubelet.devices()[uuid(5)].health == "Healthy")


def test_a_gpu_that_was_pulled_out_leaves_the_list_with_its_last_pod(
    start: Start, kubelet: SmallKubelet
) -> None:
    plugin = start(advertising=Advertising(replicas={GPUS: 2}))
    kubelet.await_register()
    plugin.observe(Usage(pods=(use(f"{uuid(7)}::1"),)), asked=time.monotonic())
    plugin.update(without_gpu(PAIRS, 7), {})
    assert until(lambda: kubelet.devices()[f"{uuid(7)}::0"].health == "Unhealthy")
    assert len(kubelet.devices()) == 16
    plugin.observe(Usage(), asked=time.monotonic())
    assert until(lambda: len(kubelet.devices()) == 14)


def test_streams_are_side_by_side_and_leave_no_thread_behind(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    counters = plugin.resources[GPUS].counters
    streams = [kubelet.plugin().ListAndWatch(api.Empty()) for _ in range(3)]
    for stream in streams:
        assert len(next(stream).devices) == 8
    assert counters.streams == 4
    plugin.withhold({uuid(0): "test"})
    for stream in streams:
        assert next(stream).devices[0].health == "Unhealthy"
        stream.cancel()
    assert until(lambda: counters.streams == 1)
    before = threading.active_count()
    for _ in range(20):
        stream = kubelet.plugin().ListAndWatch(api.Empty())
        next(stream)
        stream.cancel()
        assert until(lambda: counters.streams == 1)
    assert threading.active_count() <= before + 2


def test_several_resources_have_a_socket_each(
    start: Start, kubelet: SmallKubelet, folder: Path
) -> None:
    cut = with_gpu(PAIRS, 7, mig_enabled=True, slices=slices(7, "3g.40gb", "1g.10gb+me"))
    plugin = start(cut, advertising=Advertising(mig=MigStrategy.MIXED))
    names = {kubelet.await_register().resource_name for _ in range(3)}
    assert names == {GPUS, "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb.me"}
    assert until(lambda: plugin.ready)
    assert {path.name for path in folder.glob("rte-*")} == {
        "rte-gpu.sock",
        "rte-mig-3g.40gb.sock",
        "rte-mig-1g.10gb.me.sock",
    }
    id = cut.gpus[7].slices[0].id
    answer = kubelet.allocate(id, resource="nvidia.com/mig-3g.40gb")
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == id
    # MIG is turned off: the whole GPU is back, and nothing is left under the slices' names.
    plugin.update(PAIRS, {})
    assert until(lambda: len(kubelet.devices()) == 8)
    assert until(lambda: not kubelet.devices("nvidia.com/mig-3g.40gb"))


# GetPreferredAllocation


def test_the_offer_comes_in_any_order_and_the_answer_is_the_same(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    offer = list(gpus(0, 1, 2, 3))
    shuffle = random.Random(1)
    for _ in range(20):
        shuffle.shuffle(offer)
        assert kubelet.prefer(offer, 2) == gpus(0, 2)


@pytest.mark.parametrize(
    ("offered", "required", "size", "expected"),
    [
        pytest.param((1, 2, 3), (), 2, (1, 3), id="the pair that is whole, not the first two"),
        pytest.param((0, 1, 2, 3), (3,), 2, (1, 3), id="with what is required"),
        pytest.param((0, 1), (), 5, (0, 1), id="too few: what there is"),
        pytest.param((), (), 1, (), id="nothing offered"),
        pytest.param((0, 1), (), 0, (), id="nothing asked"),
        pytest.param((0, 1), (), -1, (), id="less than nothing asked"),
    ],
)
def test_preferences(
    plugin: DevicePlugin,
    kubelet: SmallKubelet,
    offered: tuple[int, ...],
    required: tuple[int, ...],
    size: int,
    expected: tuple[int, ...],
) -> None:
    assert kubelet.prefer(gpus(*offered), size, gpus(*required)) == gpus(*expected)


def test_unknown_and_duplicate_ids_are_ignored(plugin: DevicePlugin, kubelet: SmallKubelet) -> None:
    offer = ["GPU-unknown", *gpus(1, 1, 3, 0), ""]
    assert kubelet.prefer(offer, 2, ["GPU-foreign"]) == gpus(1, 3)


def test_several_containers_in_one_call(plugin: DevicePlugin, kubelet: SmallKubelet) -> None:
    wanted = [
        api.ContainerPreferredAllocationRequest(available_deviceIDs=ids, allocation_size=2)
        for ids in (gpus(0, 1, 2), gpus(4, 5, 7))
    ]
    answer = kubelet.plugin().GetPreferredAllocation(
        api.PreferredAllocationRequest(container_requests=wanted)
    )
    assert [tuple(c.deviceIDs) for c in answer.container_responses] == [gpus(0, 2), gpus(5, 7)]


@pytest.mark.survives_bugs
def test_a_fault_of_ours_is_an_empty_answer_a_line_and_a_count(
    plugin: DevicePlugin, kubelet: SmallKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    resource = plugin.resources[GPUS]
    broken = dataclasses.replace(resource.tables.graph, position={uuid(0): 99})
    resource.update(dataclasses.replace(resource.tables, graph=broken))
    assert kubelet.prefer(gpus(0, 1), 1) == ()
    assert resource.counters.preference_faults == 1
    assert "no preference for" in caplog.text


def test_a_single_gpu_is_taken_from_a_broken_pair(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    assert kubelet.prefer(gpus(0, 1, 2, 3), 1) == gpus(0)
    kubelet.allocate(*gpus(0))
    # 2 has lost its partner to our own Allocate, which no list shows yet.
    assert kubelet.prefer(gpus(1, 2, 3), 1) == gpus(2)


# What is in use


def use(*devices: str, pod: str = "p", resource: str = GPUS) -> PodUse:
    held = tuple(DeviceUse(resource=resource, id=DeviceId(id)) for id in devices)
    return PodUse(
        pod=PodName(namespace="n", name=pod),
        containers=(ContainerUse(name="c", devices=held),),
    )


def test_own_allocations_count_until_a_later_list_shows_them_or_ten_seconds_pass() -> None:
    now = [100.0]
    held = Held(clock=lambda: now[0])
    held.allocated(gpus(0, 1))
    assert held.ids() == set(gpus(0, 1))
    held.listed(frozenset(gpus(0)), asked=99.0)  # the one who had 0 before
    assert held.ids() == set(gpus(0, 1))
    held.listed(frozenset(), asked=99.5)
    assert held.ids() == set(gpus(0, 1))
    held.listed(frozenset(gpus(0)), asked=101.0)
    assert held.ids() == set(gpus(0, 1))
    held.listed(frozenset(), asked=102.0)  # the pod with 0 ended; 1 was never seen
    assert held.ids() == set(gpus(1))
    now[0] = 100.0 + OWN_ALLOCATION_S
    assert held.ids() == set()


def test_pod_resources_say_what_is_in_use(
    start: Start, kubelet: SmallKubelet, resources: PodResourcesSocket
) -> None:
    container = pod_resources_api.ContainerResources(name="c", devices=[entry(GPUS, [uuid(2)], 0)])
    resources.listed = [pod_resources_api.PodResources(name="p", containers=[container])]
    plugin = start(pod_resources=resources.socket, lost_after_s=600)
    kubelet.await_register()
    assert until(lambda: plugin.held.ids() == {uuid(2)})
    assert kubelet.prefer(gpus(0, 1, 3), 1) == gpus(0)  # its partner is in use, nothing breaks
    resources.listed = []
    (kubelet.folder / "kubelet_internal_checkpoint").write_text("changed")
    assert until(lambda: plugin.held.ids() == frozenset())
    plugin.stop()


def test_a_plugin_that_is_told_does_not_ask(
    start: Start, kubelet: SmallKubelet, resources: PodResourcesSocket
) -> None:
    plugin = start(pod_resources=resources.socket, is_told=True, lost_after_s=600)
    kubelet.await_register()
    assert until(lambda: resources.lists)  # nobody may have told it anything yet
    assert until(lambda: resources.offers > 1)  # before the Register; now its own thread has begun
    seen = Usage(pods=(use(uuid(2)),))
    plugin.observe(seen, asked=time.monotonic())
    assert plugin.held.ids() == {uuid(2)}
    calls = resources.lists
    (kubelet.folder / "kubelet_internal_checkpoint").write_text("changed")
    kubelet.prefer(gpus(0, 1), 1)
    time.sleep(0.3)
    assert resources.lists == calls
    plugin.stop()


def test_a_list_that_an_answer_to_a_later_question_has_overtaken_says_nothing(
    plugin: DevicePlugin,
) -> None:
    """The plugin's thread, a Register and the publisher ask, each for itself."""
    asked = time.monotonic()
    plugin.observe(Usage(pods=(use(uuid(2)),)), asked=asked)
    plugin.observe(Usage(), asked=asked - 0.01)
    assert plugin.held.ids() == {uuid(2)}
    plugin.observe(Usage(), asked=asked)
    assert plugin.held.ids() == set()


CUT = with_gpu(PAIRS, 0, mig_enabled=True, slices=slices(0, "1g.10gb", "1g.10gb"))
MIXED = Advertising(mig=MigStrategy.MIXED)
MIG = "nvidia.com/mig-1g.10gb"


def test_a_slice_that_turns_out_to_be_in_use_is_listed_though_it_has_to_wait(
    start: Start, kubelet: SmallKubelet
) -> None:
    """A kubelet that has just restarted hears of its pods one by one."""
    plugin = start(CUT, advertising=MIXED)
    (first, _) = CUT.gpus[0].slices
    whole = use(uuid(0), pod="whole")
    assert until(lambda: len(kubelet.devices(MIG)) == 2)
    plugin.observe(Usage(pods=(whole,)), asked=time.monotonic())
    assert until(lambda: not kubelet.devices(MIG))
    part = use(first.id, pod="part", resource=MIG)
    plugin.observe(Usage(pods=(whole, part)), asked=time.monotonic())
    assert until(lambda: list(kubelet.devices(MIG)) == [first.id])
    assert kubelet.devices(MIG)[first.id].health == "Unhealthy"
    plugin.observe(Usage(pods=(part,)), asked=time.monotonic())
    assert until(lambda: len(kubelet.devices(MIG)) == 2)
    assert {device.health for device in kubelet.devices(MIG).values()} == {"Healthy"}


def test_what_a_pod_keeps_from_moving_is_not_asked_for_ten_times_a_second(
    start: Start, kubelet: SmallKubelet, resources: PodResourcesSocket
) -> None:
    """A GPU is cut while the pod that was given it is being admitted, and runs for hours."""
    plugin = start(pod_resources=resources.socket, is_told=True, advertising=MIXED)
    assert until(lambda: plugin.ready and kubelet.devices())
    kubelet.allocate(uuid(0))
    plugin.update(CUT, {})
    plugin.observe(Usage(pods=(use(uuid(0)),)), asked=time.monotonic())
    time.sleep(0.5)  # until the kubelet has seen the list
    before = resources.offers
    time.sleep(1.5)
    assert resources.offers - before <= 4  # it may have lost us: once a second
    plugin.stop()


def test_pod_resources_that_do_not_answer_leave_the_plugin_alone(
    start: Start, kubelet: SmallKubelet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    socket = tmp_path / "absent.sock"
    plugin = start(pod_resources=socket, lost_after_s=600)
    kubelet.await_register()
    lines = ("what is in use", "what the kubelet has of the devices here")
    assert until(lambda: all(f"{line} is not known for now" in caplog.text for line in lines))
    problem = f"PodResources: UNAVAILABLE: {socket}: No such file or directory"
    for line in lines:
        (said,) = (r.getMessage() for r in caplog.records if line in r.getMessage())
        assert said == f"{line} is not known for now: {problem}"
    assert kubelet.prefer(gpus(0, 1, 2), 2) == gpus(0, 2)
    checkpoint = kubelet.folder / "kubelet_internal_checkpoint"
    with PodResourcesSocket(socket):
        assert until(
            lambda: (
                checkpoint.write_text("changed") and "what is in use is known again" in caplog.text
            )
        )
        plugin.stop()


NIC, OTHER_NIC = PciAddress("0000:21:00.0"), PciAddress("0000:22:00.0")


@pytest.mark.parametrize(
    ("pods", "held", "own"),
    [
        pytest.param([use(NIC)], {NIC}, {NIC}, id="one container with a NIC and no GPU"),
        pytest.param([use(NIC, uuid(0))], {NIC}, set(), id="it has its GPU"),
        pytest.param([use(NIC), use(OTHER_NIC, pod="q")], {NIC, OTHER_NIC}, set(), id="two"),
        pytest.param([use("vf-7")], set(), set(), id="an id that is no address"),
        pytest.param([use("0000:99:00.0")], set(), set(), id="no compute NIC"),
    ],
)
def test_nics_that_lead(pods: list[PodUse], held: set[PciAddress], own: set[PciAddress]) -> None:
    nics = frozenset({NIC, OTHER_NIC})
    found = nic_use(Usage(pods=tuple(pods)), nics=nics, gpus=frozenset(gpus(0)))
    assert found == NicUse(frozenset(held), frozenset(own))


def test_one_device_with_two_pods_is_told_and_counted_once(
    plugin: DevicePlugin, caplog: pytest.LogCaptureFixture
) -> None:
    handed_on = PodUse(
        pod=PodName(namespace="n", name="p"),
        containers=use(uuid(0)).containers + use(uuid(0)).containers,
    )
    plugin.observe(Usage(pods=(handed_on,)), asked=0)
    assert plugin.double_uses == 0
    for _ in range(2):
        plugin.observe(Usage(pods=(handed_on, use(uuid(0), pod="q"))), asked=0)
    assert plugin.double_uses == 1
    assert f"{uuid(0)} is held by n/p and n/q at once" in caplog.text
    plugin.observe(Usage(pods=(handed_on,)), asked=0)
    plugin.observe(Usage(pods=(handed_on, use(uuid(0), pod="q"))), asked=0)
    assert plugin.double_uses == 2


# Allocate


def test_allocate_answers_and_wakes_the_publisher(start: Start, kubelet: SmallKubelet) -> None:
    woken = threading.Event()
    plugin = start(on_allocate=woken.set)
    kubelet.await_register()
    answer = kubelet.allocate(*gpus(3, 1))
    assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": ",".join(gpus(1, 3))}
    assert woken.is_set()
    assert plugin.held.ids() == set(gpus(1, 3))
    assert plugin.resources[GPUS].counters.allocations == 1


def test_ids_that_were_never_advertised_are_refused_by_name(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        kubelet.allocate(uuid(0), "GPU-unknown")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == f"{GPUS} has no such device: GPU-unknown"
    assert plugin.held.ids() == frozenset()
    assert plugin.resources[GPUS].counters.allocations_refused == 1


def test_a_device_that_turned_unhealthy_in_mid_call_is_still_handed_over(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    plugin.update(with_gpu(PAIRS, 1, uuid=None, lost="GPU is lost", index=None), {})
    assert kubelet.allocate(uuid(1)).envs["NVIDIA_VISIBLE_DEVICES"] == uuid(1)


def test_cuda_gets_the_order_of_the_links(start: Start, kubelet: SmallKubelet) -> None:
    start(handing=Handing(cuda_order=True))
    kubelet.await_register()
    envs = kubelet.allocate(*gpus(0, 1, 2, 3)).envs
    assert envs["CUDA_VISIBLE_DEVICES"] == ",".join(gpus(0, 2, 1, 3))


def test_mounts_nodes_annotations_and_cdi_names_reach_the_wire(
    start: Start, kubelet: SmallKubelet, tmp_path: Path
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    start(
        dev=tmp_path / "dev",
        handing=Handing(strategies=frozenset(Strategy), device_specs=True, dev_root="/host"),
        cdi_nodes_only=True,
        cdi_directories=(tmp_path / "cdi",),
    )
    kubelet.await_register()
    answer = kubelet.allocate(uuid(1))
    (mount,) = answer.mounts
    assert mount.container_path == f"/var/run/nvidia-container-devices/{uuid(1)}"
    assert mount.host_path == "/dev/null"
    assert [(d.container_path, d.host_path, d.permissions) for d in answer.devices] == [
        ("/dev/nvidiactl", "/host/dev/nvidiactl", "rw"),
        ("/dev/nvidia1", "/host/dev/nvidia1", "rw"),
    ]
    name = f"k8s.device-plugin.nvidia.com/gpu={uuid(1)}"
    assert [device.name for device in answer.cdi_devices] == [name]
    assert list(answer.annotations.values()) == [name]
    assert (tmp_path / "cdi/k8s.device-plugin.nvidia.com-gpu.json").exists()


def test_what_the_toolkit_writes_later_is_referred_to(
    start: Start, kubelet: SmallKubelet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(*gpus: int) -> None:
        devices = [{"name": uuid(n), "containerEdits": {"env": ["A=B"]}} for n in gpus]
        spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
        (tmp_path / "nvidia.json").write_text(json.dumps(spec))

    write(0)
    plugin = start(
        handing=Handing(strategies=frozenset({Strategy.CDI_CRI})), cdi_directories=(tmp_path,)
    )
    kubelet.await_register()
    assert f"no CDI specification lists {uuid(1)}" in caplog.text
    with pytest.raises(grpc.RpcError, match="no CDI specification lists"):
        kubelet.allocate(uuid(1))
    write(0, 1)
    tables = plugin.resources[GPUS]
    assert until(lambda: uuid(1) in tables.tables.cdi_names)
    (device,) = kubelet.allocate(uuid(1)).cdi_devices
    assert device.name == f"nvidia.com/gpu={uuid(1)}"


# Decisions


def test_an_answer_is_a_decision_with_its_tuple_and_a_line(
    plugin: DevicePlugin, kubelet: SmallKubelet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    began = time.monotonic()
    kubelet.prefer(gpus(2, 1, 0), 2)
    took_s = time.monotonic() - began
    kubelet.allocate(*gpus(0, 2))
    (decision,) = plugin.decisions
    assert decision.call is Call.PREFERRED
    assert decision.offered == gpus(0, 1, 2)
    assert decision.answer == gpus(0, 2)
    assert decision.preference is not None
    assert decision.preference.linked
    assert decision.decided_by == "linked"
    assert decision.runner_up is not None
    assert 0 < decision.took_s < took_s
    line = f"{GPUS}: 2 of 3 offered → {uuid(0)} {uuid(2)}, decided by linked"
    assert until(lambda: line in caplog.text)


def test_an_allocate_that_no_preference_preceded_is_a_decision_too(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    kubelet.allocate(*gpus(1, 0))
    (decision,) = plugin.decisions
    assert decision.call is Call.ALLOCATED
    assert decision.answer == gpus(0, 1)
    assert decision.preference is not None
    assert not decision.preference.linked
    assert decision.why == "not asked: all that was aligned, or used again"


def test_an_allocate_of_others_than_preferred_says_so(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    kubelet.prefer(gpus(0, 1, 2), 2)
    kubelet.allocate(*gpus(0, 1))
    assert list(plugin.decisions)[-1].why == "the kubelet took others than preferred"


def test_so_many_decisions_are_kept(plugin: DevicePlugin) -> None:
    resource = plugin.resources[GPUS]
    wanted = api.ContainerPreferredAllocationRequest(
        available_deviceIDs=gpus(0, 1), allocation_size=1
    )
    for _ in range(KEPT + 10):
        resource.prefer(wanted)
    kept = list(plugin.decisions)
    assert len(kept) == KEPT
    assert kept[-1].number == KEPT + 10
    assert resource.counters.preferences == KEPT + 10
    assert sum(resource.counters.preference_took) == KEPT + 10


def test_tables_are_replaced_whole_while_calls_go_on(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    other = machine((0, 0, 0, 0, 1, 1, 1, 1), pairs=[(0, 1), (2, 3), (4, 5), (6, 7)])
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            plugin.update(other, {})
            plugin.update(PAIRS, {})

    changing = threading.Thread(target=change)
    changing.start()
    answers = {kubelet.prefer(gpus(0, 1, 2, 3), 2) for _ in range(200)}
    stop.set()
    changing.join()
    assert answers <= {gpus(0, 1), gpus(0, 2)}
    assert plugin.resources[GPUS].counters.preference_faults == 0


def test_a_preference_opens_nothing_and_writes_nothing(tmp_path: Path) -> None:
    """Audit hooks cannot be taken back, so that this is a process of its own."""
    script = """
import sys
from plugin.api import deviceplugin_pb2 as api
from plugin.life import DevicePlugin, Options
from tests.test_plugin import PAIRS, gpus
plugin = DevicePlugin(Options())
plugin.update(PAIRS, {})
resource = plugin.resources["nvidia.com/gpu"]
wanted = api.ContainerPreferredAllocationRequest(
    available_deviceIDs=gpus(0, 1, 2), allocation_size=2
)
seen = []
sys.addaudithook(lambda event, _: seen.append(event))
print("audited") if open("/dev/null") and "open" in seen else None
seen.clear()
answer = resource.prefer(wanted)
events = [event for event in seen if not event.startswith(("object.", "gc."))]
print(events, answer == gpus(0, 2))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "audited\n[] True\n", done.stderr
