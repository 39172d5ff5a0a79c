"""`rte run` as a process for many random steps: a real kubelet's managers, a real API server behind
a proxy that injects faults, NVML over the fake library.

After each step the published object is what a recount from the kubelet's own files says. A watcher
sees each version in between: none changes nothing, and none offers more than there was at any
moment since the last one that was right. While nothing happens nothing is written, and the
fingerprint covers the pods that the API server has. With an odd seed the kubelet has no pods API at
first. RTE_SOAK_STEPS says how many steps (2 000 with --long), and RTE_SOAK_SEED which: a seed has
the same steps again, as far as the kubelet decides the same.
"""

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from rte.publish.fingerprint import InformerMode, fingerprint, pods_by_any_request
from rte.publish.nrt import FingerprintMethod
from rte.publish.pods import parse_pod
from rte.sources.recorded import read_recorded, unpack
from tests.accounted import differences
from tests.conftest import StartKubelet
from tests.fake_nvml import Driver
from tests.generated import described
from tests.http_faults import Fault, FaultyProxy
from tests.machines.description import FOLDER
from tests.ports import free_port
from tests.real_apiserver import MERGE
from tests.real_apiserver import ApiServer as RealApiServer
from tests.real_kubelet import Kubelet, pod
from tests.recount import GPU, Counted, Zones, gpu_nodes, published, recount_all
from tests.simple_plugin import SimplePlugin
from tests.stopwatch import Stopwatch
from tests.versions import Versions
from tests.waiting import until

ROOT = Path(__file__).parents[1]
CRDS = ROOT / "crds"
RECORDED = FOLDER / "pcie-a100-pairs"
OTHER = "example.com/nic"
NICS = {f"nic-{n}": (n % 2,) for n in range(4)}
PATH = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/"
PODS = "/api/v1/namespaces/default/pods"
STEPS, LONG_STEPS = 60, 2000
IDLE_EVERY, IDLE_S = 200, 2.0
RIGHT_WITHIN_S = 20.0
BACKOFF_S = 40.0
NOTHING = Counted(0, 0, 0)
NUMBERS = itertools.count()
CONFIG = {
    "topologyManagerPolicy": "single-numa-node",
    "cpuManagerPolicy": "static",
    "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
    "memoryManagerPolicy": "Static",
}
FAULTS = {
    "a server error": [Fault(500)],
    "three server errors": [Fault(503)] * 3,
    "a conflict": [Fault(409, body=b'{"kind":"Status","code":409,"reason":"Conflict"}')],
    "too many requests": [Fault(429, (("Retry-After", "1"),))],
    "a lost answer": [Fault(503, after=True)],
    "no answer": [Fault()],
    "unauthorized": [Fault(401)],
    "forbidden": [Fault(403)],
    "a proxy's page": [Fault(502, (("Content-Type", "text/html"),), b"<html>")],
    "a redirect": [Fault(302, (("Location", "/"),))],
    "no JSON": [Fault(200, body=b"[1"), Fault(200, body=b"[1", after=True)],
    "a connection that ends": [Fault(raw=b""), Fault(raw=b"", after=True)],
    "half an answer": [Fault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{", after=True)],
    "an answer that trickles": [Fault(raw=b"HTTP/1.1 200 OK\r\n" * 9, pause_s=0.02)],
    "no HTTP": [Fault(raw=b"SSH-2.0-OpenSSH_9.6\r\n")],
}


class World:
    """One node with everything around the daemon, and the steps that change it."""

    def __init__(
        self,
        kubelet: StartKubelet,
        real: RealApiServer,
        proxy: FaultyProxy,
        folder: Path,
        *,
        pods_api: bool,
    ) -> None:
        self.name = f"soak-{next(NUMBERS)}"
        self.real = real
        self.versions = Versions(real, PATH, self.name)
        self.proxy = proxy
        self.folder = folder
        machine = read_recorded(RECORDED)
        self.pods_api = pods_api
        self.kubelet: Kubelet = kubelet(
            self.kubelet_config, machine=list(map(described, machine.numa_nodes))
        )
        self.gpus = gpu_nodes(RECORDED)
        self.numbers = {str(gpu.uuid): gpu.number for gpu in machine.gpus}
        self.driver = Driver(folder / "driver", RECORDED)
        self.nics = SimplePlugin(OTHER, NICS)
        self.has_nics = False
        self.alive: dict[str, str] = {}  # name → UID
        self.ended: list[str] = []  # pods that have ended and are still there
        self.sick: dict[str, str] = {}  # GPU → line of the control file
        self.done: Counter[str] = Counter()
        self.states: list[Zones] = []  # what was right, one after the other, since the last check
        self.checked = 0  # versions of the object
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        real.create_node(self.name)

    @property
    def kubelet_config(self) -> dict[str, Any]:
        return {**CONFIG, "featureGates": {"PodsAPI": self.pods_api}}

    # The daemon

    def start(self) -> None:
        host = self.folder / "host"
        unpack(RECORDED / "sys.txt", host)
        kubeconfig = self.real.write_kubeconfig(
            self.folder / "kubeconfig", token=self.real.token, url=self.proxy.url
        )
        self.port = free_port()
        config = {
            "nodeName": self.name,
            "stateDir": str(self.folder / "run"),
            "host": {"sysfs": str(host / "sys"), "procfs": str(host / "proc"), "interval": "300ms"},
            "kubelet": {
                "rootDir": str(self.kubelet.root),
                "configFile": str(self.kubelet.root / "config.yaml"),
            },
            "api": {"kubeconfig": str(kubeconfig), "timeout": "1s"},
            "nrt": {"echo": 0},
            "health": {"coolDown": "100ms"},
            "http": {"address": "127.0.0.1", "port": self.port},
        }
        (self.folder / "run").mkdir()
        (self.folder / "rte.yaml").write_text(yaml.safe_dump(config))
        self.launch()

    def launch(self) -> None:
        command = [sys.executable, "-m", "rte", "run", "--config", str(self.folder / "rte.yaml")]
        environment = {**os.environ, "PYTHONWARNINGS": "error", **self.driver.env}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=log, stderr=log
            )
        self.kubelet.wait_devices(GPU, len(self.gpus) - len(self.sick))

    def end(self) -> None:
        self.nics.stop()
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(60) == 0, self.log()

    def log(self) -> str:
        """Its end, and what it has said of problems before."""
        text = (self.folder / "log").read_text()
        problems = [line for line in text.splitlines() if " rte.problems: " in line]
        return "\n".join(["", *problems[-20:], "…", text[-3000:]])

    def metrics(self) -> str:
        url = f"http://127.0.0.1:{self.port}/metrics"
        return str(urllib.request.urlopen(url, timeout=60).read().decode())

    def metric(self, name: str) -> float:
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.metrics(), re.MULTILINE)
        return sum(map(float, values))

    def problems(self) -> list[str]:
        return re.findall(r"^rte_problem{.*$", self.metrics(), re.MULTILINE)

    # Comparing

    def expected(self) -> Zones:
        return recount_all(
            self.kubelet.root,
            self.kubelet.machine,
            {GPU: {id: (node,) for id, node in self.gpus.items()}, OTHER: NICS},
            set(self.alive.values()),
            ours={GPU},
            gone=() if self.has_nics else {OTHER},
        )

    def body(self) -> dict[str, Any]:
        answer = self.real.request("GET", PATH + self.name)
        return answer.body if answer.status == 200 else {"zones": []}

    def until_right(self) -> float:
        begun = time.monotonic()
        stopwatch = Stopwatch()
        while self.wrong(body := self.body()):
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            assert not stopwatch.past(RIGHT_WITHIN_S), (self.wrong(body), self.done, self.log())
            time.sleep(0.005)
        took = time.monotonic() - begun
        self.check_versions(body["metadata"]["resourceVersion"])
        self.states = self.states[-1:]
        return took

    def wrong(self, body: Mapping[str, Any]) -> str:
        """What differs from the state as it is; empty if nothing does. A kubelet writes its
        checkpoint a moment after it works by it."""
        figures = differences(published(body), self.note())
        unhealthy = self.unhealthy(body)
        return figures if unhealthy == set(self.sick) else f"{figures}\nunhealthy: {unhealthy}"

    def note(self) -> Zones:
        """The state as it is; all that were are kept until the next check."""
        state = self.expected()
        if state not in self.states[-1:]:
            self.states.append(state)
        return state

    def unhealthy(self, body: Mapping[str, Any]) -> set[str]:
        """UUIDs of the GPUs that the object calls unhealthy."""
        named = {f"gpu-{number}": uuid for uuid, number in self.numbers.items()}
        return {
            named[zone["name"]]
            for zone in body["zones"]
            if zone["type"] == "GPU"
            and {"name": "health", "value": "unhealthy"} in zone["attributes"]
        }

    def check_versions(self, last: str) -> None:
        """Each version since the last check says something new, and no more than was true."""
        bodies = self.versions.until(last)
        assert all(bodies), "the object was deleted"
        for number in range(self.checked, len(bodies)):
            body = bodies[number]
            assert not number or difference(bodies[number - 1], body), (body, self.log())
            for zone, resources in published(body).items():
                for resource, counted in resources.items():
                    was = [state[zone].get(resource, NOTHING) for state in self.states]
                    most = Counted(*map(max, zip(*was, strict=True)))
                    assert all(a <= b for a, b in zip(counted, most, strict=True)), (
                        f"{zone} {resource}: {counted} published, {was} true",
                        self.log(),
                    )
        self.checked = len(bodies)

    def until_covered(self) -> None:
        """The pods of the fingerprint are those that the API server has on the node."""
        on_node = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.name}"
        listed = self.real.get(on_node)["items"]
        facts = [parse_pod(msgspec.json.encode(each)) for each in listed]
        covered = {
            FingerprintMethod.ALL: [pod.pod for pod in facts if pod.phase != "Pending"],
            FingerprintMethod.WITH_EXCLUSIVE_RESOURCES: pods_by_any_request(
                facts, mode=InformerMode.DEDICATED
            ),
        }
        wanted = {(method.value, fingerprint(pods)) for method, pods in covered.items()}

        def said() -> dict[str, str]:
            return {each["name"]: each["value"] for each in self.body()["attributes"]}

        def is_covered() -> bool:
            name, found = "nodeTopologyPodsFingerprint", said()
            return (found[f"{name}Method"], found[name]) in wanted

        until(is_covered, lambda: (facts, said(), self.log()), within_s=RIGHT_WITHIN_S)

    def until_no_problem(self) -> None:
        """After faults one request more may be waited with for a while."""
        until(
            lambda: not self.problems(), lambda: (self.problems(), self.log()), within_s=BACKOFF_S
        )

    def until_published(self) -> None:
        """Returns when all that was there when it was called has been looked at, believed and
        published: a doubt may hold back what the object says beside the figures."""
        since = time.monotonic()

        def is_later() -> bool:
            now = time.monotonic()
            return now - self.metric("rte_published_age_seconds") > since

        until(is_later, self.log, within_s=BACKOFF_S)

    # What happens

    def admit(self, chance: random.Random) -> None:
        name = f"p{next(NUMBERS)}"
        init = containers(chance, 1) if chance.random() < 0.2 else []
        body = pod(name, *containers(chance, chance.choice([1, 1, 1, 2])), init=init)
        if init and chance.random() < 0.3:
            body["spec"]["initContainers"][0]["restartPolicy"] = "Always"
        bound = {**body, "spec": {**body["spec"], "nodeName": self.name}}
        there = self.real.create(PODS, bound)
        body["metadata"]["uid"] = there["metadata"]["uid"]
        admission = self.kubelet.admit(body)
        if admission.admitted:
            self.alive[name] = admission.uid
        else:
            self.ended.append(name)
            self.done["rejected"] += 1
        self.note()
        self.say(name, "Running" if admission.admitted else "Failed")

    def say(self, name: str, phase: str) -> None:
        """The kubelet tells the API server, some time after it has decided."""
        path = f"{PODS}/{name}/status"
        self.real.ask("PATCH", path, {"status": {"phase": phase}}, content_type=MERGE)

    def remove(self, chance: random.Random) -> None:
        if not self.alive:
            return
        name = chance.choice(sorted(self.alive))
        self.kubelet.remove(name)
        del self.alive[name]
        self.note()
        self.forget(name)

    def forget(self, name: str) -> None:
        path = f"{PODS}/{name}?gracePeriodSeconds=0"
        self.real.delete(path)

    def finish(self, chance: random.Random) -> None:
        if not self.alive:
            return
        name = chance.choice(sorted(self.alive))
        phase = chance.choice(["Succeeded", "Failed"])
        self.kubelet.finish(name, phase=phase)
        del self.alive[name]
        self.note()
        self.say(name, phase)
        self.ended.append(name)

    def clear(self, chance: random.Random) -> None:
        for name in self.ended:
            self.kubelet.remove(name)
            self.forget(name)
        self.ended = []

    def sicken(self, chance: random.Random) -> None:
        gpu = chance.choice(sorted(self.gpus))
        if self.sick.pop(gpu, None) is None:
            self.sick[gpu] = chance.choice(["recovery {} 1", "lost {}"])
        self.say_sick()
        self.kubelet.wait_devices(GPU, len(self.gpus) - len(self.sick))

    def say_sick(self) -> None:
        self.driver.control(*(word.format(self.numbers[gpu]) for gpu, word in self.sick.items()))

    def plug(self, chance: random.Random) -> None:
        if self.has_nics:
            self.nics.stop()
            self.kubelet.wait_devices(OTHER, 0)
        else:
            self.nics.serve(self.kubelet.plugin_dir)
            self.kubelet.wait_devices(OTHER, len(NICS))
        self.has_nics = not self.has_nics

    def restart_kubelet(self, chance: random.Random) -> None:
        self.nics.stop()
        had_nics, self.has_nics = self.has_nics, False
        self.kubelet.kill()
        time.sleep(chance.choice([0, 0.3]))
        self.kubelet.start()
        self.kubelet.wait_devices(GPU, len(self.gpus) - len(self.sick))
        running = {p.name for p in self.kubelet.state().pods if p.phase == "Running"}
        for name in sorted(self.alive.keys() - running):
            # A pod that comes back to a device that has turned sick, or has no plugin, is refused.
            del self.alive[name]
            self.say(name, "Failed")
            self.ended.append(name)
        self.note()
        self.has_nics = had_nics
        if self.has_nics:
            self.nics.serve(self.kubelet.plugin_dir)
            self.kubelet.wait_devices(OTHER, len(NICS))

    def switch_pods_api(self, chance: random.Random) -> None:
        """Another kubelet has it, or has it no more; the socket of the former may stay."""
        self.pods_api = not self.pods_api
        self.kubelet.configure(self.kubelet_config)
        if chance.random() < 0.5:
            self.kubelet.pods_api.unlink(missing_ok=True)
        self.restart_kubelet(chance)

    def restart_daemon(self, chance: random.Random) -> None:
        # A process does not know the id of a GPU that was lost before it started.
        self.sick = dict.fromkeys(self.sick, "recovery {} 1")
        self.say_sick()
        assert self.process is not None
        self.process.send_signal(chance.choice([signal.SIGTERM, signal.SIGKILL]))
        self.process.wait(60)
        self.kubelet.wait_devices(GPU, 0)
        self.launch()

    def disturb(self, chance: random.Random) -> None:
        """The next requests fail; what changes meanwhile is not lost."""
        kind = chance.choice([*sorted(FAULTS), "all connections end"])
        self.done[kind] += 1
        self.proxy.faults = list(FAULTS.get(kind, ()))
        if kind not in FAULTS:
            for connection in tuple(self.proxy.connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for step in chance.choices([self.admit, self.remove], k=2):
            step(chance)

    def burst(self, chance: random.Random) -> None:
        for step in chance.choices([self.admit, self.remove, self.finish], k=8):
            step(chance)

    def step(self, chance: random.Random, number: int) -> str:
        crowded = len(self.alive) > 8
        kinds: dict[Callable[[random.Random], None], float] = {
            self.admit: 10 if crowded else 40,
            self.remove: 40 if crowded else 15,
            self.finish: 10,
            self.clear: 4,
            self.sicken: 6,
            self.plug: 4,
            self.disturb: 14,
            self.burst: 4,
            self.restart_kubelet: 2,
            self.switch_pods_api: 2,
            self.restart_daemon: 0.7,
        }
        (kind,) = chance.choices(list(kinds), list(kinds.values()))
        print(number, kind.__name__, *sorted(self.alive), "sick:", *sorted(self.sick))
        kind(chance)
        self.done[kind.__name__] += 1
        return kind.__name__


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Attributes and zones that are not the same, both as they were and as they are."""
    pairs = [
        pair
        for part in ("attributes", "zones")
        for pair in itertools.zip_longest(before[part], after[part])
    ]
    return [(was, now) for was, now in pairs if was != now]


def is_of_this_node(world: World, path: str) -> bool:
    """Nothing of the cluster as a whole is read, listed or watched from a node."""
    where, _, query = path.partition("?")
    if where == "/api/v1/pods":
        return f"fieldSelector=spec.nodeName%3D{world.name}&" in f"{query}&"
    return where.endswith(f"/{world.name}")


def containers(chance: random.Random, count: int) -> list[Mapping[str, str | int]]:
    """With or without GPUs, NICs, exclusive CPUs and bound memory."""

    def container() -> Mapping[str, str | int]:
        wanted: dict[str, str | int] = {}
        if chance.random() < 0.7:
            wanted[GPU] = chance.choice([1, 1, 2, 2, 3, 4, 5])
        if chance.random() < 0.2:
            wanted[OTHER] = chance.choice([1, 2])
        if chance.random() < 0.7:
            wanted["cpu"] = chance.choice(["2", "4", "16", "24", "3", "500m"])
            wanted["memory"] = chance.choice(["1Gi", "10Gi", "90Gi", "200Gi"])
        return wanted

    return [container() for _ in range(count)]


def soak_seed() -> int:
    """By default one whose first 60 steps are of every kind."""
    return int(os.environ.get("RTE_SOAK_SEED") or 20261221)


@pytest.fixture
def world(kubelet: StartKubelet, apiserver: RealApiServer, tmp_path: Path) -> Iterator[World]:
    apiserver.apply_files(*sorted(CRDS.glob("*/crd.yaml")))
    with FaultyProxy(apiserver) as proxy:
        world = World(kubelet, apiserver, proxy, tmp_path, pods_api=soak_seed() % 2 == 0)
        with world.versions:
            world.start()
            yield world
            for name in (*world.alive, *world.ended):
                world.forget(name)
            world.end()


def test_every_published_state_is_what_a_recount_says(
    world: World, pytestconfig: pytest.Config
) -> None:
    default = LONG_STEPS if pytestconfig.getoption("long") else STEPS
    steps = int(os.environ.get("RTE_SOAK_STEPS") or default)
    seed = soak_seed()
    print(f"\nRTE_SOAK_SEED={seed} RTE_SOAK_STEPS={steps}")
    took: dict[str, list[float]] = {}
    world.until_right()
    for number in range(1, steps + 1):
        # Each step by a chance of its own: one that came out otherwise changes no later one.
        kind = world.step(random.Random(f"{seed} {number}"), number)
        took.setdefault(kind, []).append(world.until_right())
        print(f"{number} right after {1000 * took[kind][-1]:.0f} ms")
        if number % IDLE_EVERY == 0 or number == steps:
            world.until_no_problem()
            world.until_covered()
            world.until_published()
            body, writes = world.body(), world.metric("rte_writes_total")
            time.sleep(IDLE_S)
            after = world.body()
            assert not (changed := difference(body, after)), (changed, world.log())
            assert after["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"]
            assert world.metric("rte_writes_total") == writes, world.log()
            assert not world.problems(), world.log()
    world.until_right()
    assert all(is_of_this_node(world, path) for _, path in world.proxy.asked), world.proxy.asked
    print(f"\n{steps} steps, seed {seed}, {world.checked} versions: {dict(world.done)}")
    for kind, times in sorted(took.items()):
        times.sort()
        middle, last = times[len(times) // 2], times[-1]
        print(f"{kind:16} right after {1000 * middle:5.0f} ms, {1000 * last:6.0f} ms at the most")
