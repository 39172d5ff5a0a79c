"""The daemon's life: open the parts, start them, wait for a signal, stop them in order."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from plugin.cdi import CdiError
from plugin.life import DevicePlugin
from plugin.service import TOOK_BUCKETS_S
from rte import __version__
from rte.commands import parts
from rte.commands.cordons import Cordons
from rte.commands.pages import pages
from rte.commands.parts import Refused
from rte.config import Config, ConfigError
from rte.control import Answer, Asked, ControlError, ControlServer
from rte.graph.build import Graph, build
from rte.graph.groups import Group, GroupsError, groups
from rte.kubelet.usage import KubeletError
from rte.kubelet.watch import FileWatch, watch
from rte.metrics import Measured
from rte.model import Machine
from rte.problems import do
from rte.status import Probes, StatusError, StatusServer

if TYPE_CHECKING:
    from rte.commands.publisher import Publisher
    from rte.tls import Tls

log = logging.getLogger(__name__)

M_ARENA_MAX = -8  # of glibc's malloc.h
# The defaults differ so that the two roles can run beside each other on the host's network.
PORT, PLUGIN_PORT = 2112, 2113
OUTGROWN = 75  # EX_TEMPFAIL: a new container can do what this one cannot
# A wall clock may be set, so the end of a cordon is not slept towards in one go.
CORDON_LOOK_S = 1.0


class Told(Enum):
    """What the main thread is woken for."""

    STOP = "stop"
    RELEASE = "release"
    END = "end"  # of a release
    CONFIGURATION = "configuration"
    CERTIFICATE = "certificate"
    OUTGROWN = "outgrown"


def run(
    config: Config,
    *,
    publishes: bool,
    plugs: bool,
    files: Sequence[Path],
    again: Callable[[], Config],
    out: Path | None = None,
    oneshot: bool = False,
) -> int:
    """Runs the roles until SIGTERM or SIGINT; the exit status.

    `files` are those of the configuration: at each change, and on SIGHUP, `again` reads it, and
    the parts follow what they can without a restart. `out` is a folder that the publisher writes
    to in place of the API server; `oneshot` ends with the first publication.
    """
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # A publication computes for milliseconds; a kubelet's call must not wait for the default 5 ms.
    sys.setswitchinterval(0.0005)
    one_arena()
    told: queue.SimpleQueue[Told] = queue.SimpleQueue()
    with signals(told):
        try:
            daemon = Daemon(config, told, files=files, again=again)
            if plugs:
                daemon.plug(publishes=publishes)
            if publishes:
                daemon.publish(out, on_published=lambda: told.put(Told.STOP) if oneshot else None)
            daemon.start()
        except CdiError as error:
            log.error("refusing to start: devices.deviceListStrategy: %s", error)
            return 1
        except (Refused, ConfigError, KubeletError, GroupsError, StatusError) as error:
            log.error("refusing to start: %s", error)
            return 1
        status = daemon.wait()
        daemon.stop()
    return status


@contextmanager
def signals(told: queue.SimpleQueue[Told]) -> Iterator[None]:
    """Signals become words. A handler in Python would run only when the main thread wakes, and one
    that comes in the moment before it waits does not wake it: the kernel's signal writes to a
    socket, and a thread reads from there."""
    meant = {
        signal.SIGTERM: Told.STOP,
        signal.SIGINT: Told.STOP,
        signal.SIGUSR1: Told.RELEASE,
        signal.SIGUSR2: Told.END,
        signal.SIGHUP: Told.CONFIGURATION,
    }

    def follow() -> None:
        while numbers := ours.recv(64):
            for number in numbers:
                if number in meant:
                    told.put(meant[signal.Signals(number)])

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    thread = threading.Thread(target=follow, name="signals", daemon=True)
    thread.start()
    former = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    before = {number: signal.getsignal(number) for number in meant}
    for number in meant:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former)
        theirs.close()
        thread.join()
        ours.close()


class Graphs:
    """The graph of the machine as it is, built once for all who ask."""

    def __init__(self, config: Config) -> None:
        self._nics = config.nics.compute
        self._lock = threading.Lock()
        self._last: tuple[Machine, Graph] | None = None

    def of(self, machine: Machine) -> Graph:
        with self._lock:
            if self._last is None or self._last[0] != machine:
                self._last = (machine, build(machine, compute_nics=self._nics))
            return self._last[1]


class Daemon:
    """The parts of one process: what it needs for any role, and what `plug` and `publish` add.

    These come before `start`; `start` and `stop` are called once each.
    """

    def __init__(
        self,
        config: Config,
        told: queue.SimpleQueue[Told],
        *,
        files: Sequence[Path],
        again: Callable[[], Config],
    ) -> None:
        refuse_secrets(Path(config.kubelet.root_dir))
        self.config = config
        self.told = told
        self.files = files
        self.again = again
        self.refused: str | None = None  # why a changed configuration is not in force
        self.outgrown: str | None = None  # why only a new container can go on
        self.node = parts.node_name(config)
        self.cordons = Cordons(config.devices.withhold)
        self.graphs = Graphs(config)
        self.hardware = parts.hardware(config, on_outgrown=self._outgrown)
        self.plugin: DevicePlugin | None = None
        self.publisher: Publisher | None = None
        self.tls: Tls | None = None
        self._ends: list[Callable[[], None]] = []  # in the order of stopping

    def plug(self, *, publishes: bool) -> None:
        """Adds the device plugin; where the process `publishes` too, the publisher tells it what
        is in use. Raises ConfigError and CdiError."""
        self.plugin = DevicePlugin(
            replace(parts.plugin_options(self.config), is_told=publishes),
            on_allocate=self._allocated,
        )

    def publish(self, out: Path | None, *, on_published: Callable[[], None]) -> None:
        """Adds the publisher, to a folder or the API server. Raises Refused and ConfigError."""
        # Not imported by the plugin alone: its memory is a promise.
        from rte.commands.publisher import Publisher  # noqa: PLC0415

        self.publisher = Publisher(
            self.config,
            self.node,
            hardware=self.hardware,
            graph_of=self.graphs.of,
            plugin=self.plugin,
            withheld=lambda: self.cordons.now,
            out=out,
            on_published=on_published,
        )

    # Life

    def start(self) -> None:
        """Raises what a part refuses to start with; what has started by then is stopped."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        self._serve_pages()
        self._open_control()
        self.cordons.look()
        if self.plugin is not None:
            plugin = self.plugin
            self.hardware.subscribe(
                lambda seen: plugin.update(
                    seen.machine, seen.faults, graph=self.graphs.of(seen.machine)
                )
            )
            plugin.withhold(self.cordons.now)
            plugin.start()
            self._ends.insert(0, plugin.stop)
        if self.publisher is not None:
            self._ends.insert(0, self.publisher.stop)
            self.publisher.start()
        self.hardware.start()
        self._ends.append(self.hardware.stop)
        words = {"publish": "publisher", "plugin": "device plugin"}
        roles = " and ".join(words[role] for role in self.roles)
        log.info("rte %s on %s: %s", __version__, self.node, roles)

    @property
    def roles(self) -> list[str]:
        """The commands that this process stands for."""
        found = (("publish", self.publisher), ("plugin", self.plugin))
        return [name for name, part in found if part is not None]

    def wait(self) -> int:
        """Does what it is told until the end; the exit status."""
        with contextlib.ExitStack() as watches:
            if self.files:
                watches.callback(self._follow(self.files, Told.CONFIGURATION).close)
            if self.tls is not None:
                watches.callback(self._follow(self.tls.files.paths, Told.CERTIFICATE).close)
            while True:
                word = self._told()
                if word is Told.STOP:
                    log.info("rte on %s ends, as it was told", self.node)
                    return 0
                if word is Told.OUTGROWN:
                    log.error(
                        "%s; ending with %d, for a new container to be made",
                        self.outgrown,
                        OUTGROWN,
                    )
                    return OUTGROWN
                if word is Told.RELEASE:
                    log.info("%s", self.release(self.config.nvml.release).says)
                elif word is Told.END:
                    log.info("%s", self.end_release(()).says)
                elif word is Told.CONFIGURATION:
                    self._reread()
                elif word is Told.CERTIFICATE and self.tls is not None:
                    self.tls.reload()

    def _follow(self, files: Sequence[Path], word: Told) -> FileWatch:
        """Puts the word at each change from now on, and once for what came since they were read."""
        watched = watch(files, lambda _: self.told.put(word))
        self.told.put(word)
        return watched

    def _reread(self) -> None:
        """Lets the parts follow the configuration as it is now: cordons if it can be read, the
        rest as a whole or not at all. Why not is said once."""
        refused = None
        try:
            fresh = self.again()
            self.cordons.entries = fresh.devices.withhold
            held = self.plugin.reconfigure(parts.plugin_options(fresh)) if self.plugin else {}
        except (ConfigError, CdiError) as error:
            refused = str(error)
        else:
            if held:
                refused = (
                    f"{parts.holders(held)}: these devices would leave their resource; let the "
                    "pods end, or restart this agent, which waits for them device by device"
                )
            elif self.publisher is not None:
                self.publisher.follow(fresh)
        if refused is None and self.refused is not None:
            log.info("the configuration is in order again")
        elif refused != self.refused:
            log.error(
                "the changed configuration is not taken over: %s; %s (cordons in force: %d)",
                refused,
                do("configuration"),
                len(self.cordons.now),
            )
        self.refused = refused

    def _told(self) -> Told | None:
        """The next word; None when there is none before cordons are worth a look."""
        before = self.cordons.now
        ends_s = self.cordons.look()
        if self.cordons.now != before:
            if self.plugin is not None:
                self.plugin.withhold(self.cordons.now)
            if self.publisher is not None:
                self.publisher.cordoned()
        wait_s = None if ends_s is None else max(0.0, min(ends_s, CORDON_LOOK_S))
        try:
            return self.told.get(timeout=wait_s)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Returns when every thread, server and child has ended."""
        for end in self._ends:
            end()
        self._ends = []

    def _outgrown(self, why: str) -> None:
        self.outgrown = why
        self.told.put(Told.OUTGROWN)

    # What people tell it

    def _open_control(self) -> None:
        folder = parts.state_dir(self.config)
        if folder is None:
            log.info(
                "stateDir %s does not exist: what events told of GPUs ends with this process, and "
                "rte release and rte doctor cannot ask it",
                self.config.state_dir,
            )
            return
        control = ControlServer(folder, self.answer)
        try:
            control.start()
        except ControlError as error:
            log.warning("rte release and rte doctor cannot ask this process: %s", error)
            return
        self._ends.append(control.stop)

    def answer(self, asked: Asked) -> Answer:
        """What the control socket answers."""
        if asked.do == "release":
            return self.release(asked.hold_s or self.config.nvml.release)
        if asked.do == "end":
            return self.end_release(asked.was_reset)
        return Answer(ok=True, says="running", state=self.state())

    def release(self, hold_s: float) -> Answer:
        """Closes every NVML session within 2 s, for a MIG reset or the driver's unloading."""
        self.hardware.worker.release(hold_s=hold_s)
        child = self.hardware.worker.child
        if child is not None and child.alive():
            return Answer(
                ok=False,
                says=f"the NVML worker (process {child.pid}) is stuck in the kernel and keeps its "
                "session; only a reboot of the node ends that",
            )
        until = (datetime.now(UTC) + timedelta(seconds=hold_s)).strftime("%H:%M:%S")
        return Answer(
            ok=True, says=f"NVML is released until {until} UTC: this process has no session open"
        )

    def end_release(self, was_reset: tuple[str, ...]) -> Answer:
        """Opens NVML again; `was_reset` are the GPUs of which the operator says so."""
        seen = self.hardware.latest
        known = {name: gpu.pci for gpu in (seen.machine.gpus if seen else ()) for name in gpu.names}
        unknown = sorted(name for name in was_reset if name not in known)
        if unknown:
            return Answer(ok=False, says=f"no GPU here is called {', '.join(unknown)}")
        for name in was_reset:
            self.hardware.was_reset(known[name])
        self.hardware.worker.resume()
        self.hardware.wake()
        return Answer(ok=True, says="NVML is opened again")

    def state(self) -> dict[str, Any]:
        """What `rte doctor` asks."""
        seen = self.hardware.latest
        return {
            "version": __version__,
            "roles": self.roles,
            "released": self.hardware.worker.released,
            "nvmlAgeSeconds": self.hardware.worker.age_s,
            "problems": self.problems(),
            "disagreement": None if self.publisher is None else self.publisher.disagreement(),
            "pods": None if self.publisher is None else self.publisher.pods.told(),
            "withheld": dict(self.cordons.now),
            "outgrown": self.outgrown,
            "faults": {
                f"{gpu.name} ({gpu.pci})": [msgspec.to_builtins(f) for f in found]
                for gpu in (seen.machine.gpus if seen else ())
                if (found := seen.faults.get(gpu.pci) if seen else None)
            },
        }

    def _allocated(self) -> None:
        if self.publisher is not None:
            self.publisher.allocated()

    # HTTP

    def _serve_pages(self) -> None:
        publisher = self.publisher
        default = PLUGIN_PORT if publisher is None else PORT
        port = default if self.config.http.port is None else self.config.http.port
        if not port:
            return
        measured = Measured(
            version=__version__,
            publisher=None if publisher is None else publisher.agent,
            hardware=self.hardware,
            worker=self.hardware.worker,
            plugin=self.plugin,
            plugin_buckets_s=TOOK_BUCKETS_S,
            disagreement=(lambda: None) if publisher is None else publisher.disagreement,
            withheld=lambda: self.cordons.now,
            pods_source=lambda: None if publisher is None else publisher.pods.source,
            problems=self.problems,
            certificate_ends=lambda: None if self.tls is None else self.tls.ends,
        )
        self.tls = parts.tls(self.config)
        status = StatusServer(
            Probes(not_ready=self.not_ready, stuck=self.stuck),
            pages(measured, graph=self._graph, groups=self._groups, plugin=self.plugin),
            open_pages=self.config.http.open_pages,
            tls=self.tls,
        )
        status.start(self.config.http.address, port)
        self._ends.append(status.stop)

    def _graph(self) -> Graph | None:
        seen = self.hardware.latest
        return None if seen is None else self.graphs.of(seen.machine)

    def _groups(self, graph: Graph) -> Sequence[Group]:
        """As the published objects name them, where there are any."""
        if self.publisher is not None:
            return self.publisher.composer.groups(graph)
        return groups(graph, by=self.config.groups.by, names=self.config.groups.names)

    def not_ready(self) -> Mapping[str, str]:
        """What keeps the daemon from its work, by subject, and what to do; empty: nothing."""
        return {subject: f"{words}; {do(subject)}" for subject, words in self._in_the_way().items()}

    def problems(self) -> dict[str, str]:
        """All that is wrong, by subject, whether it is in the way or not."""
        publisher = self.publisher
        current = {} if publisher is None else publisher.agent.problems.current()
        found = {subject: str(each) for subject, each in current.items()} | self._in_the_way()
        if damaged := self.refused:
            found["configuration"] = damaged
        if self.tls is not None and (problem := self.tls.problem):
            found["certificate"] = problem
        return found

    def _in_the_way(self) -> dict[str, str]:
        found = {} if self.publisher is None else dict(self.publisher.agent.not_ready())
        if self.hardware.latest is None:
            found["hardware"] = "; ".join(self.hardware.problems) or "no reading yet"
        if self.plugin is not None and not self.plugin.ready and "hardware" not in found:
            found["plugin"] = "not registered with the kubelet"
        return found

    def stuck(self) -> str | None:
        """Why this process should be replaced, or None."""
        if not self.hardware.thread.is_alive() and not self.hardware.ending.is_set():
            return "the thread that looks at the hardware has ended"
        return None if self.publisher is None else self.publisher.agent.stuck()


def refuse_secrets(kubelet_root: Path) -> None:
    """Raises Refused where the kubelet's keys can be read: whoever takes over this process would
    be the node itself to the API server."""
    pki = kubelet_root / "pki"
    try:
        readable = next(pki.iterdir(), None)
    except OSError:
        return
    if readable is not None:
        raise Refused(
            f"{readable} can be read here: mount an empty folder over {pki}, as deploy/base does"
        )


def one_arena() -> None:
    """Lets all threads share malloc's first arena: a dozen threads that hardly allocate would each
    keep some of their own, 0.6 MiB together. Where malloc is not glibc's nothing happens."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
