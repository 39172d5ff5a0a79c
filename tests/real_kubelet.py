"""A real kubelet's managers and servers over a described machine: see tests/kubelet/main.go."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import msgspec
import yaml

Json = dict[str, Any]

# The longest socket path that Linux takes, without the closing zero.
SOCKET_PATH_BYTES = 107
# Of a plugin's socket, which is named after its resource.
SOCKET_NAME_BYTES = 40


class KubeletError(Exception):
    """The kubelet program did not do what it was asked, with the end of its log."""


class Hint(msgspec.Struct, frozen=True):
    """NUMA nodes that a manager offers; None is any."""

    nodes: tuple[int, ...] | None
    preferred: bool


class Container(msgspec.Struct, frozen=True):
    """What the managers decided for a container; of a rejected pod there are only hints."""

    name: str
    devices: dict[str, tuple[str, ...]] | None
    cpus: tuple[int, ...] | None
    exclusive_cpus: tuple[int, ...] | None
    memory_nodes: tuple[int, ...] | None
    affinity: Hint | None
    # By manager (devices, cpus, memory) and resource; None is no preference.
    hints: dict[str, dict[str, tuple[Hint, ...] | None]] | None
    # What Allocate's answers came to; None without devices and after a restart.
    options: Json | None
    # Why the container could not be created.
    error: str


class Admission(msgspec.Struct, frozen=True):
    """What became of a pod: `reason` and `message` are the kubelet's when it was rejected."""

    namespace: str
    name: str
    uid: str
    admitted: bool
    reason: str
    message: str
    containers: tuple[Container, ...]

    def devices(self, resource: str) -> tuple[str, ...]:
        """The devices of all containers, in their order."""
        held = (c.devices or {} for c in self.containers)
        return tuple(itertools.chain.from_iterable(d.get(resource, ()) for d in held))


class PodState(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    uid: str
    phase: str
    reason: str
    message: str


class State(msgspec.Struct, frozen=True):
    capacity: dict[str, str]
    allocatable: dict[str, str]
    pods: tuple[PodState, ...]
    # CPUs that no container has to itself, and those that a container can get to itself.
    shared_cpus: tuple[int, ...]
    allocatable_cpus: tuple[int, ...]


def numa_nodes(
    ids: Sequence[int] = (0, 1),
    *,
    cpus: int = 16,
    threads: int = 2,
    memory: str = "64Gi",
    hugepages: Mapping[str, int] | None = None,
) -> list[Json]:
    """A machine of like NUMA nodes, a socket each, as machine.json lists them.

    `cpus` is per node. CPUs are numbered as Linux does: the first threads of all cores, then the
    second ones. A list like this can be changed; a node with no cores has memory only.
    """
    cores = cpus // threads
    total = cores * len(ids)
    return [
        {
            "id": node,
            "socket": index,
            "cores": [
                [thread * total + index * cores + core for thread in range(threads)]
                for core in range(cores)
            ],
            "memory": memory,
            "hugepages": dict(hugepages or {}),
            "distances": [10 if other == node else 20 for other in ids],
        }
        for index, node in enumerate(ids)
    ]


def pod(
    name: str,
    *containers: Mapping[str, str | int],
    init: Sequence[Mapping[str, str | int]] = (),
    namespace: str = "default",
) -> Json:
    """A v1.Pod whose containers c0, c1, … (init0, …) have these requests as limits too."""

    def made(prefix: str, wanted: Sequence[Mapping[str, str | int]]) -> list[Json]:
        quantities = [{resource: str(q) for resource, q in each.items()} for each in wanted]
        return [
            {"name": f"{prefix}{i}", "image": "none", "resources": {"requests": q, "limits": q}}
            for i, q in enumerate(quantities)
        ]

    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": made("c", containers), "initContainers": made("init", init)},
    }


class Kubelet:
    """One kubelet process; `config` is a KubeletConfiguration's fields, in the kubelet's words."""

    def __init__(
        self,
        program: Path,
        config: Mapping[str, Any] | None = None,
        *,
        machine: Sequence[Mapping[str, Any]] | None = None,
        rate_limit: bool = True,
    ) -> None:
        self.program = program
        self.machine = list(machine if machine is not None else numa_nodes())
        self.rate_limit = rate_limit
        self.dir = short_folder()
        self.root = self.dir / "kubelet"
        self.root.mkdir()
        self.plugin_dir = self.root / "device-plugins"
        self.registry_dir = self.root / "plugins_registry"
        self.pod_resources = self.root / "pod-resources" / "kubelet.sock"
        self.pods_api = self.root / "pods-api" / "pods-api.sock"
        (self.dir / "machine.json").write_text(json.dumps(self.machine))
        self.configure(config or {})
        self.process: Process | None = None
        try:
            self.start()
        except KubeletError:
            self.close()
            raise

    def __enter__(self) -> "Kubelet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write another configuration; it counts from the next start or restart."""
        full = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            **least_reservations(config, self.machine),
            **config,
        }
        (self.root / "config.yaml").write_text(yaml.safe_dump(full))

    def start(self) -> None:
        """Start the process; after `kill` on what that one left, as a kubelet after a crash."""
        limit = "true" if self.rate_limit else "false"
        command = [str(self.program), "-dir", str(self.dir), f"-rate-limit={limit}"]
        try:
            self.process = Process(command)
        except KubeletError as error:
            raise KubeletError(f"{error}\n{self.log()[-2000:]}") from error

    def kill(self) -> None:
        """End the process as a crash would; pods, sockets and state files stay."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def close(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None
        shutil.rmtree(self.dir, ignore_errors=True)

    def submit(self, op: str, **arguments: Any) -> "Future[Any]":
        """The answer to come of a request; other requests can be made meanwhile."""
        if self.process is None:
            raise KubeletError(f"{op}: the kubelet is not running")
        return self.process.submit(op, arguments)

    def call(self, op: str, *, timeout_s: float = 60, **arguments: Any) -> Any:
        try:
            return self.submit(op, **arguments).result(timeout_s)
        except KubeletError as error:
            raise KubeletError(f"{op}: {error}\n{self.log()[-2000:]}") from error

    def admit(self, pod: Mapping[str, Any], *, timeout_s: float = 60) -> Admission:
        """What becomes of the pod. A rejected one stays, as Failed, until it is removed."""
        return msgspec.convert(self.call("admit", timeout_s=timeout_s, pod=pod), Admission)

    def remove(self, name: str, namespace: str = "default", *, forced: bool = False) -> None:
        """The pod is deleted. A forced deletion is that of its object alone: nothing in the kubelet
        tells of it before the containers have ended."""
        self.call("remove", name=name, namespace=namespace, forced=forced)

    def finish(self, name: str, namespace: str = "default", *, phase: str = "Succeeded") -> None:
        """The pod's containers end; it stays in the phase, Succeeded or Failed."""
        self.call("finish", name=name, namespace=namespace, phase=phase)

    def evict(self, name: str, namespace: str = "default") -> None:
        """The pod's containers are told to end, which they do when the pod is finished."""
        self.call("evict", name=name, namespace=namespace)

    def restart(self) -> tuple[Admission, ...]:
        """Restart the kubelet: containers go on, and their pods are admitted again."""
        return msgspec.convert(self.call("restart", running=True) or (), tuple[Admission, ...])

    def restart_deaf(self) -> None:
        """Restart the kubelet while nobody tells it of its pods: it lists none, though their
        containers go on and it keeps what they have, until `hear_of_pods`."""
        self.call("restart", running=True, deaf=True)

    def reboot(self) -> tuple[Admission, ...]:
        """Restart the machine: the containers are gone, and the pods are admitted again."""
        return msgspec.convert(self.call("restart", running=False) or (), tuple[Admission, ...])

    def hear_of_pods(self, ready: bool) -> None:
        """Whether the kubelet has heard of its pods; it has when it is started, unless by
        `restart_deaf`."""
        self.call("sources_ready", ready=ready)

    def state(self) -> State:
        return msgspec.convert(self.call("state"), State)

    def wait_devices(self, resource: str, count: int, *, within_s: float = 30) -> None:
        """Return when exactly `count` devices of the resource are healthy."""
        self.call("wait_devices", resource=resource, count=count, within_s=within_s)

    def pod_status(self, name: str, namespace: str = "default") -> Json:
        """The pod's status with the health of its devices."""
        status: Json = self.call("pod_status", name=name, namespace=namespace)
        return status

    def disturb_pod_resources(
        self, *, before_s: float = 0, after_s: float = 0, error: str = ""
    ) -> None:
        """From now on each PodResources call is slow, stale, or answered with an error.

        It waits `before_s`, looks, and waits `after_s`; `error` is the name of a gRPC code, such
        as UNAVAILABLE. Calls that wait are let go by the next change; without arguments all is
        well again.
        """
        self.call("pod_resources", before_s=before_s, after_s=after_s, error=error)

    def log(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.dir / "kubelet.log").read_text()
        return ""


def short_folder() -> Path:
    """A new folder with room for the names of sockets in it.

    In memory where there is such a place: the kubelet waits for the disk after every change of its
    state, and an admission takes ten times as long then.
    """
    memory = Path("/dev/shm")
    places = [str(memory)] if os.access(memory, os.W_OK) else []
    for place in [*places, tempfile.gettempdir(), "/tmp"]:
        room = SOCKET_PATH_BYTES - len(f"{place}/rte-xxxxxxxx/kubelet/device-plugins/")
        if room >= SOCKET_NAME_BYTES:
            return Path(tempfile.mkdtemp(prefix="rte-", dir=place))
    raise KubeletError("no folder with a path short enough for sockets")


def least_reservations(config: Mapping[str, Any], machine: Sequence[Mapping[str, Any]]) -> Json:
    """What static managers insist on, where the test says nothing of reservations.

    The Memory Manager wants exactly what is reserved in all, which by default is hard eviction's
    100Mi, and the CPU Manager at least one CPU; it gets a whole core.
    """
    named = {"reservedSystemCPUs", "systemReserved", "kubeReserved", "evictionHard"} & set(config)
    least: Json = {}
    if config.get("cpuManagerPolicy") == "static" and not named:
        first = next(node for node in machine if node.get("cores"))
        least["reservedSystemCPUs"] = ",".join(map(str, first["cores"][0]))
    if config.get("memoryManagerPolicy") == "Static" and not named & {
        "systemReserved",
        "kubeReserved",
        "evictionHard",
    }:
        least["reservedMemory"] = [{"numaNode": machine[0]["id"], "limits": {"memory": "100Mi"}}]
    return least


class Process:
    """A running program, its requests, and the thread that reads its answers."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin: IO[str] = self.process.stdin
        self.stdout: IO[str] = self.process.stdout
        self.ids = itertools.count(1)
        self.lock = threading.Lock()
        self.waiting: dict[int, Future[Any]] = {}
        self.reader = threading.Thread(target=self.read, name="kubelet answers", daemon=True)
        first = json.loads(self.stdout.readline() or '{"error": "ended at once"}')
        self.reader.start()
        if "error" in first:
            self.kill()
            raise KubeletError(first["error"])

    def submit(self, op: str, arguments: Mapping[str, Any]) -> "Future[Any]":
        answer: Future[Any] = Future()
        with self.lock:
            number = next(self.ids)
            self.waiting[number] = answer
            try:
                self.stdin.write(json.dumps({"id": number, "op": op, **arguments}) + "\n")
                self.stdin.flush()
            except BrokenPipeError:
                del self.waiting[number]
                answer.set_exception(KubeletError("the program has ended"))
        return answer

    def read(self) -> None:
        for number, line in answers(self.stdout):
            with self.lock:
                answer = self.waiting.pop(number)
            if "error" in line:
                answer.set_exception(KubeletError(line["error"]))
            else:
                answer.set_result(line["result"])
        with self.lock:
            left, self.waiting = self.waiting, {}
        for answer in left.values():
            answer.set_exception(KubeletError("the program has ended"))

    def end(self) -> None:
        """Close its standard input, which is its sign to stop."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join()
        self.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()


def answers(lines: IO[str]) -> Iterator[tuple[int, Json]]:
    for text in lines:
        if text.endswith("\n"):  # it may be killed while it writes
            line = json.loads(text)
            yield line["id"], line
