"""Thousands of changes of names, slices, pods and kubelets, over a clock of the test's own.

The kubelet is a model of what counts here: lists on their way, resource names that are counted each
apart, admissions that take a while, and PodResources that is late. The same with a real kubelet's
managers, and so some hundred times slower, is tests/test_plugin_random.py.
"""

import heapq
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from plugin.allocation import CannotAllocate
from plugin.devices import Advertising, MigStrategy
from plugin.life import DevicePlugin, Options
from plugin.pod_resources import PodResources
from plugin.unheard import CHECKPOINT
from rte.graph.build import Graph, build
from rte.kubelet.usage import COME_BACK_S
from rte.model import (
    Allocatable,
    ContainerUse,
    DeviceId,
    DeviceUse,
    Machine,
    PodName,
    PodUse,
    Usage,
)
from tests.small_machine import address, machine, uuid
from tests.troubles import Troubles

GPU = "nvidia.com/gpu"
QUAD = machine((0, 0, 1, 1), pairs=[(0, 1), (2, 3)])
GROUPS = {address(n): f"ring-{n // 2}" for n in range(4)}
SETTLES_S = 18.0  # what a kubelet that starts is yet to hear of counts for 15 s
TICK_S = 0.05
STEPS, SEEDS = 250, 4
LONG_SEEDS = 200

Pair = tuple[str, str]
"""A resource name and an id."""
Pods = dict[str, frozenset[Pair]]


class Later(NamedTuple):
    at: float
    number: int
    what: Callable[[], None]


class Kubelet(PodResources):
    """What it has heard of the plugin's lists, and which pods it has admitted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "kubelet.sock"
        self.offered: dict[str, dict[str, bool]] = {}  # by resource and id, whether healthy
        self.pods: Pods = {}
        self.admitting: Pods = {}  # the devices are theirs, and no list shows it yet
        self.heard_of: set[str] = set()
        self.up = True
        self.start()

    def start(self) -> None:
        self.up = True
        self.socket.unlink(missing_ok=True)
        self.socket.touch()

    def has_run_for_long(self) -> None:
        os.utime(self.socket, (0, 0))

    def held(self) -> set[Pair]:
        return {pair for pairs in (self.pods | self.admitting).values() for pair in pairs}

    def write(self) -> None:
        entries = [
            {
                "PodUID": name,
                "ContainerName": "c",
                "ResourceName": resource,
                "DeviceIDs": {"0": [i]},
            }
            for name, pairs in (self.pods | self.admitting).items()
            for resource, i in pairs
        ]
        (self.folder / CHECKPOINT).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))

    def usage(self) -> Usage | None:
        return self.listed() if self.up else None

    def listed(self) -> Usage:
        heard_of = {n: pairs for n, pairs in sorted(self.pods.items()) if n in self.heard_of}
        return Usage(
            pods=tuple(
                PodUse(
                    pod=PodName(namespace="n", name=name),
                    containers=(ContainerUse(name="c", devices=uses(pairs)),),
                )
                for name, pairs in heard_of.items()
            )
        )

    def allocatable(self) -> Allocatable | None:
        well = ((r, i) for r, ids in self.offered.items() for i, healthy in ids.items() if healthy)
        return Allocatable(devices=uses(well), cpus=(), memory=()) if self.up else None


def uses(pairs: Iterable[Pair]) -> tuple[DeviceUse, ...]:
    return tuple(DeviceUse(resource=r, id=DeviceId(i)) for r, i in sorted(pairs))


def whole(id: str) -> str:
    return id.partition("::")[0]


class World(Troubles):
    """A machine, a kubelet and one plugin after the other, that a seed throws about."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(QUAD, Random(seed))
        self.folder, self.seed = folder, seed
        self.now = 1000.0
        self.coming: list[Later] = []
        self.numbers = itertools.count()
        self.made: set[frozenset[tuple[str, Pair]]] = set()  # overlaps by the hardware's change
        self.told: list[Any] = []
        self.is_told = self.dice.random() < 0.5
        self.kubelet = Kubelet(folder)
        self.starts = 0  # the number of the kubelet's last start
        self.is_busy = False  # a kubelet admits one pod at a time
        self.lists: dict[str, Any] = {}  # those that are on their way or have come
        self.served: set[str] = set()
        self.advertising = Advertising()
        self.start()

    # The plugin

    def start(self) -> None:
        self.advertising = self.any_advertising()
        self.plugin = DevicePlugin(self.options(), clock=lambda: self.now)
        self.lists, self.served = {}, set()
        for ids in self.kubelet.offered.values():  # their streams have ended
            ids.update(dict.fromkeys(ids, False))
        self.plugin.withhold(self.withheld())
        self.look()

    def options(self) -> Options:
        return Options(
            plugin_dir=self.folder,
            pod_resources=self.kubelet.socket,
            is_told=self.is_told,
            advertising=self.advertising,
        )

    def any_advertising(self) -> Advertising:
        mixed, single = MigStrategy.MIXED, MigStrategy.SINGLE
        mig = self.dice.choice((mixed, mixed, MigStrategy.NONE, single))
        shared = {"replicas": {GPU: 2}, "rename_shared": self.dice.random() < 0.5}
        by_name: tuple[dict[str, Any], ...] = ({}, {}, {"fabric": GROUPS}, shared)
        return Advertising(mig=mig, **self.dice.choice(by_name))

    def look(self) -> None:
        found = self.machine()
        self.plugin.update(found, self.faults(), graph=graph(found))

    # The kubelet

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.coming, Later(self.now + delay_s, next(self.numbers), what))

    def hear(self) -> None:
        """New lists go on their way, each after the one before."""
        if not self.kubelet.up:
            return
        for name, resource in self.plugin.resources.items():
            if name not in self.served:  # asked before each first Register
                if not self.served:
                    self.tell()
                self.served.add(name)
                resource.counters.streams = 1
                self.plugin.registrations[name].registered_at = self.now
            if self.lists.get(name) is not resource.list:
                self.lists[name] = message = resource.list
                on_its_way_s = self.dice.choice((0, 0.001, 0.02, 0.06))
                self.later(on_its_way_s, lambda n=name, m=message: self.has_come(n, m))  # type: ignore[misc]
        self.nothing_of_a_pod_is_offered()

    def has_come(self, name: str, message: Any) -> None:
        if (
            name in self.lists and self.lists[name] is message
        ):  # none of another stream, or overtaken
            self.kubelet.offered[name] = {d.ID: d.health == "Healthy" for d in message.devices}
            self.kubelet.write()
            self.nothing_is_offered_twice()

    def tell(self) -> None:
        if self.kubelet.up:
            self.plugin.observe(self.kubelet.listed(), asked=self.now)

    def written(self) -> None:
        self.kubelet.write()
        if self.is_told:
            self.later(0.002, self.tell)

    # What can happen

    def admit(self) -> None:
        resources = sorted(self.kubelet.offered)
        if self.is_busy or not resources or not self.kubelet.up:
            return
        resource, count = self.dice.choice(resources), self.dice.choice((1, 1, 2, 3))
        free = [
            id
            for id, healthy in sorted(self.kubelet.offered[resource].items())
            if healthy and (resource, id) not in self.kubelet.held()
        ]
        if len(free) < count or self.kubelet.heard_of != self.kubelet.pods.keys():
            return
        ids, name = self.dice.sample(free, count), f"pod-{next(self.numbers)}"
        self.told.append((name, resource, ids))
        self.is_busy = True
        plugin = self.plugin
        self.later(
            self.dice.choice((0, 0.003, 0.03)), lambda: self.allocate(plugin, name, resource, ids)
        )

    def allocate(self, plugin: DevicePlugin, name: str, resource: str, ids: list[str]) -> None:
        self.is_busy = False
        if plugin is not self.plugin or not self.kubelet.up or resource not in plugin.resources:
            return
        try:
            plugin.resources[resource].allocate(ids)
        except CannotAllocate:
            return
        self.is_busy = True
        self.kubelet.admitting[name] = frozenset((resource, id) for id in ids)
        refused = self.dice.random() < 0.1  # for want of something else
        what = self.refuse if refused else self.admitted
        self.later(self.dice.choice((0.001, 0.01, 0.05)), lambda: what(name))

    def refuse(self, name: str) -> None:
        self.is_busy = False
        self.kubelet.admitting.pop(name, None)

    def admitted(self, name: str) -> None:
        self.is_busy = False
        if name in self.kubelet.admitting:
            self.kubelet.pods[name] = self.kubelet.admitting.pop(name)
            self.kubelet.heard_of.add(name)
            self.written()

    def end(self) -> None:
        if self.kubelet.pods:
            name = self.dice.choice(sorted(self.kubelet.pods))
            del self.kubelet.pods[name]
            self.kubelet.heard_of.discard(name)

    def reshape(self) -> None:
        super().reshape()
        self.made |= self.overlaps()

    def reconfigure(self) -> None:
        before, self.advertising = self.advertising, self.any_advertising()
        self.tell()
        if self.plugin.reconfigure(self.options()):
            self.advertising = before

    def restart(self) -> None:
        if not self.is_busy:  # it answers before it ends
            self.start()

    def restart_kubelet(self) -> None:
        if self.kubelet.up:
            self.kubelet.up, self.kubelet.offered, self.kubelet.admitting = False, {}, {}
            self.lists, self.served = {}, set()
            for registration in self.plugin.registrations.values():
                registration.registered_at = None
            self.later(self.dice.choice((0.3, 2, 12)), self.kubelet_starts)

    def kubelet_starts(self) -> None:
        self.kubelet.start()
        self.kubelet.heard_of = set()
        self.later(self.dice.choice((0.1, 1, 5)), self.hears_of_a_pod)
        starts = self.starts = next(self.numbers)
        self.later(
            COME_BACK_S,
            lambda: self.kubelet.has_run_for_long() if self.starts == starts else None,
        )

    def hears_of_a_pod(self) -> None:
        if unheard := sorted(self.kubelet.pods.keys() - self.kubelet.heard_of):
            self.kubelet.heard_of.add(self.dice.choice(unheard))
            self.later(0.01, self.hears_of_a_pod)
        if self.dice.random() < 0.5:
            self.tell()

    CHANCES: Mapping[str, int] = {
        "admit": 40,
        "end": 22,
        "fault": 4,
        "lose": 3,
        "plug": 4,
        "cordon": 3,
        "reshape": 12,
        "restart": 3,
        "reconfigure": 4,
        "restart_kubelet": 2,
    }

    def step(self) -> None:
        (what,) = self.dice.choices(list(self.CHANCES), weights=list(self.CHANCES.values()))
        self.told.append((round(self.now, 3), what))
        getattr(self, what)()
        self.hear()
        self.goes_on(self.dice.choice((0, 0, 0.004, 0.03, 0.1, 0.5, 1.5, 5)))
        if self.dice.random() < 0.1:
            self.settles()

    def goes_on(self, for_s: float) -> None:
        """What comes in that time, and the plugin's own looks."""
        end = self.now + for_s
        while True:
            next_look = self.now + TICK_S
            event = self.coming[0].at if self.coming else next_look
            if min(event, next_look) > end:
                self.now = end
                return
            self.now = max(self.now, min(event, next_look))
            if event <= next_look and self.coming:
                heapq.heappop(self.coming).what()
            else:
                self.plugin.look(self.kubelet)
                if self.is_told and round(self.now / TICK_S) % 200 == 0:
                    self.tell()  # as the publisher does now and then
            self.hear()
            self.no_device_has_two_pods()

    # What must hold

    def overlaps(self) -> set[frozenset[tuple[str, Pair]]]:
        """Pods that have one device, or a GPU and a slice that is there of it."""
        parent = self.parent()
        pods = (self.kubelet.pods | self.kubelet.admitting).items()
        taken = [(name, pair) for name, pairs in pods for pair in pairs]
        found = set()
        for one, other in itertools.combinations(taken, 2):
            (mine, (_, a)), (yours, (_, b)) = one, other
            same = a == b or (whole(a) == whole(b) and "::" not in min(a, b, key=len))
            nested = parent.get(whole(a)) == whole(b) or parent.get(whole(b)) == whole(a)
            if mine != yours and (same or nested):
                found.add(frozenset((one, other)))
        return found

    def no_device_has_two_pods(self) -> None:
        assert not self.overlaps() - self.made, self.story(self.overlaps() - self.made)

    def nothing_is_offered_twice(self) -> None:
        """As the kubelet sees it, but for what a pod has."""
        held = self.kubelet.held()
        names: dict[str, set[str]] = {}
        for name, ids in self.kubelet.offered.items():
            for id in (id for id, healthy in ids.items() if healthy and (name, id) not in held):
                names.setdefault(whole(id), set()).add(name)
        twice = {id for id, under in names.items() if len(under) > 1}
        twice |= {part for part, of in self.parent().items() if part in names and of in names}
        assert not twice, self.story(twice)

    def nothing_of_a_pod_is_offered(self) -> None:
        """To others, whether the kubelet has heard of the pod or not."""
        held, parent = self.kubelet.held(), self.parent()
        for name in self.served:
            for device in self.plugin.resources[name].tables.devices.values():
                id = whole(device.id)
                if not device.healthy or (name, device.id) in held:
                    continue
                for under, taken in held:
                    same = whole(taken) == id and under != name
                    nested = parent.get(whole(taken)) == id or parent.get(id) == whole(taken)
                    overlap = same or nested
                    assert not overlap, self.story((name, device.id, under, taken))

    def wanted(self) -> set[Pair]:
        """What is there and well, by the names that it should have."""
        options, alive = self.advertising, self.plugged - self.lost
        cut = {} if options.mig is MigStrategy.NONE else self.cut
        if options.mig is MigStrategy.SINGLE:
            shapes = {cut.get(n) for n in alive}
            if len(shapes) > 1:
                return set()
        found: set[Pair] = set()
        for n in alive - self.sick - self.cordoned:
            ids = [i for i, of in self.parent().items() if of == uuid(n)] if n in cut else [uuid(n)]
            if n not in cut and options.fabric:
                name = f"nvidia.com/gpu-fabric.{GROUPS[address(n)]}"
            elif n not in cut or options.mig is MigStrategy.SINGLE:
                name = GPU
            else:
                name = f"nvidia.com/mig-{cut[n]}"
            count = options.replicas.get(name, 0)
            shown = f"{name}.shared" if count and options.rename_shared else name
            found |= (
                {(shown, f"{i}::{k}") for i in ids for k in range(count)}
                if count
                else {(name, i) for i in ids}
            )
        return found

    def expected(self) -> set[Pair]:
        """Of that, what nothing is in the way of that a pod has otherwise."""
        wanted, parent = self.wanted(), self.parent()
        in_the_way = {whole(id) for name, id in self.kubelet.held() if (name, id) not in wanted}

        def blocked(id: str) -> bool:
            return (
                id in in_the_way
                or parent.get(id) in in_the_way
                or any(parent.get(other) == id for other in in_the_way)
            )

        return {(name, id) for name, id in wanted if not blocked(whole(id))}

    def settles(self) -> None:
        """Sooner or later the kubelet has exactly that, and then no list is made any more."""
        left_s = SETTLES_S
        while (offered := self.well()) != (expected := self.expected()) or self.is_restless():
            assert left_s > 0, self.story((sorted(expected - offered), sorted(offered - expected)))
            self.goes_on(0.25)
            left_s = SETTLES_S if self.is_restless() else left_s - 0.25
        if self.dice.random() < 0.2:
            self.goes_on(SETTLES_S)
            before = [resource.tables for resource in self.plugin.resources.values()]
            self.goes_on(30)
            assert self.well() == self.expected(), self.story("later")
            after = [resource.tables for resource in self.plugin.resources.values()]
            assert all(a is b for a, b in zip(after, before, strict=True)), self.story("at no rest")

    def well(self) -> set[Pair]:
        offered = self.kubelet.offered.items()
        return {(name, i) for name, ids in offered for i, healthy in ids.items() if healthy}

    def is_restless(self) -> bool:
        kubelet = self.kubelet
        return not kubelet.up or bool(kubelet.admitting) or kubelet.heard_of != kubelet.pods.keys()

    def story(self, problem: object) -> str:
        return (
            f"{problem}\nseed {self.seed}, told: {self.is_told}, the last of {len(self.told)}: "
            f"{self.told[-12:]}\n{self} {self.advertising}\nheld {self.kubelet.pods}"
        )


GRAPHS: dict[object, Graph] = {}


def graph(machine: Machine) -> Graph:
    """Few differ, and each takes longer to make than a step."""
    key = tuple((gpu.pci, gpu.lost, len(gpu.slices)) for gpu in machine.gpus)
    if key not in GRAPHS:
        GRAPHS[key] = build(machine, compute_nics=())
    return GRAPHS[key]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        long = metafunc.config.getoption("long")
        metafunc.parametrize("seed", range(1, (LONG_SEEDS if long else SEEDS) + 1))


def test_lists_are_right_whatever_happens_and_only_then_at_rest(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    for _ in range(STEPS):
        world.step()
    world.goes_on(SETTLES_S)
    world.settles()
