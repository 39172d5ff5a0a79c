"""By chance: what becomes of pods, and of the kubelet that tells of them. Whenever it is quiet, the
facts are what the API server says; in between none says what never was, and no pod that ran then
and runs is missing."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from rte.kubelet import following, pods
from rte.kubelet.following import NodePods
from rte.kubelet.pods import PodsApi
from rte.publish.pods import PodWatch
from tests.conftest import GoProgram
from tests.real_apiserver import ApiServer as RealApiServer
from tests.real_apiserver import Json
from tests.real_kubelet import Kubelet, pod
from tests.test_pods_api import Both, Followed, until, with_requests

STEPS, LONG_STEPS = 60, 2000
QUIET_EVERY = 6
MIRROR = "kubernetes.io/config.mirror"
CONFIG: Json = {"cpuManagerPolicy": "static", "featureGates": {"PodsAPI": True}}
KINDS: tuple[Callable[[str], Json], ...] = (
    lambda name: pod(name, {}),
    lambda name: pod(name, {"cpu": "1", "memory": "64Mi"}),
    lambda name: pod(name, {"cpu": "500m"}, init=[{"cpu": "1"}]),
    lambda name: with_requests(name, cpu="250m"),
    lambda name: pod(name, {"cpu": "1000"}),  # refused
)


class World:
    """A node's pods, who follows them, and what each pod has been."""

    def __init__(self, both: Both, stack: ExitStack, *, api_server: bool) -> None:
        self.both = both
        self.alive: dict[str, str] = {}  # name → UID
        self.static: set[str] = set()
        self.evicted: set[str] = set()  # and their containers still run
        self.ended: set[str] = set()
        self.phases: dict[str, set[str]] = {}  # that a pod has had, by UID
        self.seen: set[str] = set()
        self.settled: frozenset[str] = frozenset()  # that ran when it was quiet
        self.wrong: list[str] = []
        self.numbers = 0
        self.truth = Followed(lambda wake, tell: PodWatch(both.client(), both.node, wake, tell))
        stack.callback(self.truth.follower.stop)
        socket = both.kubelet.pods_api
        self.ours = Followed(
            lambda wake, tell: (
                NodePods(socket=socket, api_server=self.watch, wake=wake, tell=tell)
                if api_server
                else PodsApi(socket, wake, tell)
            )
        )
        stack.callback(self.ours.follower.stop)
        self.over = threading.Event()
        self.looking = threading.Thread(target=self.look_on)
        self.looking.start()
        stack.callback(self.looking.join)
        stack.callback(self.over.set)

    def watch(self, *told: Callable[..., None]) -> PodWatch:
        return PodWatch(self.both.client(), self.both.node, *told)

    def look_on(self) -> None:
        while not self.over.wait(0.001):
            self.look()

    def look(self) -> None:
        """One reading, at any time: what is alive only after it was so all the while."""
        settled = self.settled
        facts = self.ours.follower.read()
        if facts is None:
            return
        now = {fact.uid for fact in facts}
        must = set(self.alive.values()) & settled
        self.wrong += [f"{uid} runs and is missing" for uid in must - now]
        self.wrong += [
            f"{fact.pod.name} was never {fact.phase}"
            for fact in facts
            if fact.phase not in self.phases.get(fact.uid, {"Pending"})
        ]
        self.seen |= now

    def until_quiet(self) -> None:
        """Returns when the facts are those of the watch, and both what the API server lists."""
        there = self.alive.keys() | self.ended
        listed = self.listed()
        assert {name for name, *_ in listed} == there

        def same() -> bool:
            truth = self.truth.follower.read() or ()
            told = {(fact.pod.name, fact.uid, fact.phase, fact.qos) for fact in truth}
            return told == listed and self.ours.follower.read() == truth

        def differ() -> object:
            ours, truth = (set(map(str, each.follower.read() or ())) for each in followed)
            return listed, ours - truth, truth - ours, self.ours.follower.problem

        followed = (self.ours, self.truth)
        until(same, differ)
        self.settled = frozenset(self.alive.values())

    def listed(self) -> set[tuple[str, str, str, str]]:
        """Name, UID, phase and QoS class of the pods that the API server has on the node."""
        path = f"/api/v1/namespaces/{self.both.namespace}/pods"
        selected = f"?fieldSelector=spec.nodeName%3D{self.both.node}"
        found = set()
        for each in self.both.apiserver.get(path + selected)["items"]:
            metadata, status = each["metadata"], each["status"]
            uid = metadata.get("annotations", {}).get(MIRROR, metadata["uid"])
            found.add((metadata["name"], uid, status["phase"], status["qosClass"]))
        return found

    # What happens

    def run(self, chance: random.Random, name: str = "") -> None:
        self.numbers += 1
        name = name or f"p{self.numbers}"
        made = chance.choice(KINDS)(name)
        created = self.both.create(made)
        uid = created["metadata"]["uid"]
        self.phases[uid] = {"Pending", "Running", "Failed"}
        created["metadata"].pop("managedFields")
        del created["spec"]["nodeName"]
        if self.both.kubelet.admit(created).admitted:
            self.both.report(name, "Running")
            self.phases[uid] = {"Pending", "Running"}
            self.alive[name] = uid
        else:
            self.both.report(name, "Failed")
            self.ended.add(name)

    def run_static(self, chance: random.Random) -> None:
        self.numbers += 1
        name = f"s{self.numbers}"
        self.phases[name] = {"Pending", "Running"}
        self.both.run_static(pod(name, {"cpu": "1", "memory": "64Mi"}), uid=name)
        self.alive[name] = name
        self.static.add(name)

    def one(self, chance: random.Random) -> str | None:
        left = sorted(self.alive.keys() - self.static - self.evicted)
        return chance.choice(left) if left else None

    def finish(self, chance: random.Random) -> None:
        name = self.one(chance)
        if name is not None:
            self.end(name, chance.choice(["Succeeded", "Failed"]))

    def end(self, name: str, phase: str) -> None:
        self.phases[self.alive.pop(name)].add(phase)
        self.both.kubelet.finish(name, self.both.namespace, phase=phase)
        self.both.report(name, phase)
        self.ended.add(name)

    def evict(self, chance: random.Random) -> None:
        name = self.one(chance)
        if name is not None:
            self.evicted.add(name)
            self.both.kubelet.evict(name, self.both.namespace)

    def end_evicted(self, chance: random.Random) -> None:
        for name in sorted(self.evicted):
            self.end(name, "Failed")
        self.evicted.clear()

    def delete(self, chance: random.Random, *, forced: bool = False) -> str | None:
        left = sorted((self.alive.keys() | self.ended) - self.evicted)
        if not left:
            return None
        name = chance.choice(left)
        uid = self.alive.pop(name, None)
        if uid is not None:
            self.phases[uid].add("Failed")  # as which it ends
        self.ended.discard(name)
        self.static.discard(name)
        self.both.delete(name, forced=forced)
        return name

    def delete_by_force(self, chance: random.Random) -> None:
        self.delete(chance, forced=True)

    def make_again(self, chance: random.Random) -> None:
        """Under the same name, at once."""
        name = self.delete(chance, forced=chance.random() < 0.3)
        if name is not None:
            self.run(chance, name)

    def restart(self, chance: random.Random) -> None:
        self.evicted.clear()  # of which a kubelet that starts knows nothing
        self.both.kubelet.restart()

    def crash(self, chance: random.Random) -> None:
        self.evicted.clear()
        self.both.kubelet.kill()
        time.sleep(chance.choice([0, 0.2]))
        self.both.kubelet.start()

    def step(self, chance: random.Random, number: int) -> None:
        crowded = len(self.alive) > 6
        kinds: dict[Callable[[random.Random], object], float] = {
            self.run: 10 if crowded else 40,
            self.run_static: 1 if crowded else 4,
            self.finish: 10,
            self.evict: 5,
            self.end_evicted: 4,
            self.delete: 20 if crowded else 8,
            self.delete_by_force: 4,
            self.make_again: 8,
            self.restart: 3,
            self.crash: 2,
        }
        (kind,) = chance.choices(list(kinds), list(kinds.values()))
        print(number, kind.__name__, sorted(self.alive), sorted(self.evicted), sorted(self.ended))
        kind(chance)


@pytest.mark.parametrize("api_server", [False, True], ids=["kubelet alone", "and API server"])
@pytest.mark.parametrize("release", ["kubelet", "kubelet136"])
def test_when_it_is_quiet_the_facts_are_those_of_the_api_server(
    apiserver: RealApiServer,
    go_program: GoProgram,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    release: str,
    api_server: bool,
) -> None:
    monkeypatch.setattr(pods, "LOOK_S", 0.4)
    monkeypatch.setattr(pods, "LOOK_LAST_S", 0.4)
    # A kubelet that is slow to hear of its pods on a busy machine is waited for too.
    monkeypatch.setattr(pods, "COME_BACK_S", 5.0)
    monkeypatch.setattr(following, "RESTART_S", 0.1)
    node = stack.enter_context(Kubelet(go_program(release), CONFIG))
    world = World(Both(apiserver, node), stack, api_server=api_server)
    seed = f"{release} {api_server}"
    world.run_static(random.Random(seed))  # a node without any pod is not believed for a while
    for number in range(LONG_STEPS if pytestconfig.getoption("long") else STEPS):
        # Each step by a chance of its own: one that had less to choose from changes no later one.
        world.step(random.Random(f"{seed} {number}"), number)
        if number % QUIET_EVERY == 0:
            world.until_quiet()
    world.until_quiet()
    assert world.looking.is_alive()
    assert not world.wrong, world.wrong[:5]
    assert len(world.seen) > STEPS / 4
