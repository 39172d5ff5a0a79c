"""The plugin with the kubelet before the newest, whose device manager keeps plugins otherwise.

Up to 1.36 a plugin is kept by its resource and not by its socket: when one stream of a resource
ends, whichever plugin is current is stopped. All else is tested with the newest.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from plugin.life import DevicePlugin, Options
from tests.conftest import GoProgram
from tests.real_kubelet import Kubelet, pod
from tests.simple_plugin import SimplePlugin
from tests.small_kubelet import until
from tests.small_machine import machine, uuid
from tests.test_plugin_random import World

GPU = "nvidia.com/gpu"
SINGLE = {"topologyManagerPolicy": "single-numa-node"}
QUAD = machine((0, 0, 1, 1), pairs=[(0, 1), (2, 3)])
OLDER = "kubelet136"
STEPS = 150


@pytest.fixture
def kubelet(go_program: GoProgram) -> Iterator[Kubelet]:
    with Kubelet(go_program(OLDER), SINGLE) as kubelet:
        yield kubelet


@pytest.fixture
def plugin(kubelet: Kubelet) -> Iterator[DevicePlugin]:
    plugin = started(kubelet)
    kubelet.wait_devices(GPU, 4)
    yield plugin
    plugin.stop()


def started(kubelet: Kubelet, **options: Any) -> DevicePlugin:
    plugin = DevicePlugin(
        Options(plugin_dir=kubelet.plugin_dir, pod_resources=kubelet.pod_resources, **options)
    )
    plugin.start()
    plugin.update(QUAD, {})
    return plugin


def gpus(kubelet: Kubelet, name: str, count: int) -> set[str]:
    admitted = kubelet.admit(pod(name, {GPU: count}))
    assert admitted.admitted, admitted
    return set(admitted.devices(GPU))


def test_pods_get_pairs_before_and_after_a_kubelet_restart(
    kubelet: Kubelet, plugin: DevicePlugin
) -> None:
    pairs = [{uuid(0), uuid(1)}, {uuid(2), uuid(3)}]
    first = gpus(kubelet, "first", 2)
    assert first in pairs
    (again,) = kubelet.restart()
    assert set(again.devices(GPU)) == first
    kubelet.wait_devices(GPU, 4)
    assert gpus(kubelet, "second", 2) in [pair for pair in pairs if pair != first]


def test_a_rival_that_ends_does_not_take_the_plugin_down_with_it(kubelet: Kubelet) -> None:
    with SimplePlugin(GPU, {"other-0": (0,)}) as rival:
        rival.serve(kubelet.plugin_dir)
        kubelet.wait_devices(GPU, 1)
        plugin = started(kubelet)
        time.sleep(0.7)
        assert plugin.resources[GPU].counters.registrations == 0
    kubelet.wait_devices(GPU, 4)
    assert until(lambda: plugin.ready)
    time.sleep(0.5)
    assert kubelet.state().allocatable[GPU] == "4"
    assert plugin.resources[GPU].counters.registrations == 1
    plugin.stop()


def test_an_instance_takes_over_from_the_one_before(kubelet: Kubelet, plugin: DevicePlugin) -> None:
    held = gpus(kubelet, "train", 2)
    second = started(kubelet)
    assert until(lambda: second.registrations)
    plugin.stop()
    assert until(lambda: second.ready)
    kubelet.wait_devices(GPU, 4)
    assert not held & gpus(kubelet, "next", 2)
    second.stop()


def test_the_plugin_watcher_finds_the_socket_after_each_restart(kubelet: Kubelet) -> None:
    plugin = started(kubelet, registry_dir=kubelet.registry_dir)
    kubelet.wait_devices(GPU, 4)
    kubelet.restart()
    kubelet.wait_devices(GPU, 4)
    assert len(gpus(kubelet, "two", 2)) == 2
    plugin.stop()


def test_random_steps_lose_nothing_and_hand_nothing_out_twice(go_program: GoProgram) -> None:
    world = World(go_program(OLDER), 7)
    try:
        for number in range(STEPS):
            world.step(number)
        world.nothing_lost()
        world.all_well()
    finally:
        world.close()
