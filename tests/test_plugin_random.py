"""Whatever happens, in whatever order: no device is handed out twice, and none is lost.

The kubelet's managers are the real ones; what they say a pod holds is the truth. `--long` takes
many more steps and seeds, `-k` with a seed repeats one: its steps are the same again, as far as the
kubelet decides the same.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, TypeVar

import pytest

from plugin.devices import Advertising, MigStrategy
from plugin.life import DevicePlugin, Options
from rte.kubelet.usage import KubeletError, channel, read_allocatable, read_usage
from rte.model import (
    PodName,
)
from tests.conftest import GoProgram
from tests.real_kubelet import Kubelet, pod
from tests.small_machine import address, machine, uuid
from tests.stopwatch import Stopwatch
from tests.troubles import PROFILES, Troubles, parts

Answer = TypeVar("Answer")

GPU = "nvidia.com/gpu"
SINGLE = {"topologyManagerPolicy": "single-numa-node"}
EIGHT = machine((0, 0, 0, 0, 1, 1, 1, 1), pairs=[(0, 2), (1, 3), (4, 6), (5, 7)])
GROUPS = {address(n): f"ring-{n // 4}" for n in range(8)}
SETTLES_S = 15.0  # an Allocate of which no list ever tells counts for 10 s
STEPS, SEEDS = 500, 1
LONG_STEPS, LONG_SEEDS = 2000, 5


class World(Troubles):
    """A node whose hardware, kubelet, plugin and pods a seed throws about."""

    def __init__(self, program: Any, seed: int) -> None:
        super().__init__(EIGHT, Random(seed))
        self.seed = seed
        self.kubelet = Kubelet(program, SINGLE, rate_limit=False)
        self.asked = channel(self.kubelet.pod_resources)
        self.by_group = False
        self.watched = False
        self.pods: dict[str, str] = {}  # name → the resource that it asked for
        self.serial = 0
        self.made: set[tuple[str, PodName, PodName]] = set()  # overlaps by the hardware's change
        self.told: list[str] = []
        self.counts = {"admitted": 0, "rejected": 0, "moved": 0}
        self.plugin = self.started()

    def close(self) -> None:
        self.plugin.stop()
        self.asked.close()
        self.kubelet.close()

    # The plugin

    def options(self) -> Options:
        return Options(
            plugin_dir=self.kubelet.plugin_dir,
            registry_dir=self.kubelet.registry_dir if self.watched else None,
            pod_resources=self.kubelet.pod_resources,
            advertising=Advertising(mig=MigStrategy.MIXED, fabric=GROUPS if self.by_group else {}),
        )

    def started(self) -> DevicePlugin:
        self.plugin = DevicePlugin(self.options())
        self.plugin.withhold(self.withheld())
        self.plugin.start()
        self.look()
        return self.plugin

    # What can happen

    def admit(self) -> None:
        resources = sorted(self.plugin.resources)
        if not resources:
            return
        resource = self.dice.choice(resources)
        self.serial += 1
        name = f"pod-{self.serial}"
        count = self.dice.choice((1, 1, 2, 2, 3, 4))
        admitted = self.kubelet.admit(pod(name, {resource: count}))
        self.told[-1] += f" {name}, {count} {resource}: {admitted.devices(resource)}"
        if admitted.admitted:
            self.pods[name] = resource
            self.counts["admitted"] += 1
        else:
            self.kubelet.remove(name)
            self.counts["rejected"] += 1

    def end(self) -> None:
        if self.pods:
            name = self.dice.choice(sorted(self.pods))
            self.told[-1] += f" {name}"
            del self.pods[name]
            self.kubelet.remove(name)

    def reshape(self) -> None:
        super().reshape()
        self.made |= self.overlaps()

    def several(self) -> None:
        for _ in range(self.dice.randrange(2, 5)):
            self.dice.choice((self.fault, self.plug, self.reshape, self.cordon))()

    def restart_plugin(self) -> None:
        # The plugin watcher looks once a second: too slow for all restarts to wait for it.
        self.watched = self.watched and self.dice.random() < 0.2
        self.again()

    def again(self) -> None:
        self.plugin.stop()
        self.started()

    def rename(self) -> None:
        """Other resource names from the plugin's next start."""
        self.by_group = not self.by_group
        self.counts["moved"] += 1
        self.restart_plugin()

    def reconfigure(self) -> None:
        self.by_group = not self.by_group
        if self.plugin.reconfigure(self.options()):
            self.by_group = not self.by_group

    def other_way(self) -> None:
        self.watched = not self.watched
        self.again()

    def restart_kubelet(self) -> None:
        self.kubelet.restart()

    def crash_kubelet(self) -> None:
        self.kubelet.kill()
        self.kubelet.start()

    CHANCES: Mapping[str, int] = {
        "admit": 40,
        "end": 25,
        "fault": 6,
        "lose": 4,
        "plug": 5,
        "cordon": 4,
        "reshape": 8,
        "several": 3,
        "restart_plugin": 3,
        "rename": 1,
        "reconfigure": 1,
        "other_way": 1,
        "restart_kubelet": 2,
        "crash_kubelet": 1,
    }

    def step(self, number: int) -> None:
        # Each by dice of its own: a step that came out otherwise changes no later one.
        self.dice = Random(f"{self.seed} {number}")
        (what,) = self.dice.choices(list(self.CHANCES), weights=self.CHANCES.values())  # type: ignore[arg-type]
        self.told.append(what)
        try:
            getattr(self, what)()
        finally:
            print(number, self.told[-1])
        self.no_device_twice()
        if self.dice.random() < 0.2:
            self.nothing_lost()

    # What must hold

    def held(self) -> dict[PodName, set[tuple[str, str]]]:
        usage = patiently(lambda: read_usage(self.asked, 10))
        return {
            p.pod: {(d.resource, d.id) for c in p.containers for d in c.devices} for p in usage.pods
        }

    def no_device_twice(self) -> None:
        """No two pods have one GPU, one slice, or a GPU and a slice that is there of it.

        But for those of which the GPU was cut, or made whole, under a pod that had it.
        """
        whole = {uuid(n) for n in range(8)}
        overlaps = self.overlaps() - self.made
        assert not overlaps, self.story(f"given out twice: {overlaps}")
        holders = {id for devices in self.held().values() for _, id in devices}
        assert set(holders) <= whole | {
            s.id for n in range(8) for p in PROFILES for s in parts(n, p)
        }, self.story("an id that never was")

    def overlaps(self) -> set[tuple[str, PodName, PodName]]:
        """A device, or a slice, and the two pods that have it, or it and its GPU."""
        parent = self.parent()
        holders: dict[str, set[PodName]] = {}
        for name, devices in self.held().items():
            for _, id in devices:
                holders.setdefault(id, set()).add(name)
        return {
            (id, one, other)
            for id, names in holders.items()
            for one in names
            for other in names | holders.get(parent.get(id, id), set())
            if one != other
        }

    def name_of(self, number: int) -> str:
        if not self.by_group:
            return GPU
        return f"nvidia.com/gpu-fabric.{GROUPS[address(number)]}"

    def expected(self) -> set[tuple[str, str]]:
        """What the kubelet should be able to hand out, or have handed out, in full health."""
        here = {pair for pairs in self.held().values() for pair in pairs}
        wanted: set[tuple[str, str]] = set()
        for n in self.plugged - self.lost - self.sick - self.cordoned:
            if n not in self.cut:
                wanted.add((self.name_of(n), uuid(n)))
            else:
                profile = self.cut[n]
                wanted |= {(f"nvidia.com/mig-{profile}", str(s.id)) for s in parts(n, profile)}
        parent = self.parent()
        strays = {(name, id) for name, id in here if (name, id) not in wanted}

        def blocked(id: str) -> bool:
            """Held under another name, or as a whole and in parts."""
            return any(
                other == id or parent.get(other) == id or parent.get(id) == other
                for _, other in strays
            )

        return {pair for pair in wanted if not blocked(pair[1])}

    def offered(self) -> set[tuple[str, str]]:
        found = patiently(lambda: read_allocatable(self.asked, 10))
        return {(d.resource, d.id) for d in found.devices}

    def nothing_lost(self) -> None:
        """Sooner or later the kubelet has exactly what is there and well."""
        stopwatch = Stopwatch()
        while (offered := self.offered()) != (expected := self.expected()):
            assert not stopwatch.past(SETTLES_S), self.story(
                f"missing {sorted(expected - offered)}, too many {sorted(offered - expected)}"
            )
            self.no_device_twice()
            time.sleep(0.01)

    def ends_well(self) -> None:
        for name in list(self.pods):
            self.kubelet.remove(name)
        self.pods = {}
        self.all_well()
        self.plugin.withhold({})
        self.look()
        self.nothing_lost()
        assert len(self.offered()) == 8
        assert self.plugin.double_uses == 0
        for resource in self.plugin.resources.values():
            assert resource.counters.preference_faults == 0

    def story(self, problem: str) -> str:
        return (
            f"{problem}\nseed {self.seed}, after {len(self.told)} steps, the last "
            f"{self.told[-12:]}\n"
            f"{self} by_group {self.by_group}\nheld {self.held()}"
        )


def patiently(read: Callable[[], Answer]) -> Answer:
    """A connection to a kubelet that has just restarted breaks once."""
    stopwatch = Stopwatch()
    while True:
        try:
            return read()
        except KubeletError:
            if stopwatch.past(5):
                raise
            time.sleep(0.01)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    long = metafunc.config.getoption("long")
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(1, (LONG_SEEDS if long else SEEDS) + 1))


@pytest.fixture
def world(go_program: GoProgram, seed: int) -> Iterator[World]:
    world = World(go_program("kubelet"), seed)
    yield world
    world.close()


def test_no_device_is_handed_out_twice_and_none_is_lost(
    world: World, pytestconfig: pytest.Config
) -> None:
    steps = LONG_STEPS if pytestconfig.getoption("long") else STEPS
    for number in range(steps):
        world.step(number)
    world.nothing_lost()
    world.ends_well()
    assert world.counts["admitted"] > steps / 20
    assert world.counts["moved"]
