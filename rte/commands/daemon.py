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
from rte.commands import node, parts
from rte.commands.cordons import Cordons
from rte.config import Config, ConfigError
from rte.control import Answer, Asked, ControlError, ControlServer
from rte.discovery.hardware import Hardware
from rte.discovery.injection import Injection
from rte.discovery.nvml_worker import NvmlWorker
from rte.graph.build import Graph, build
from rte.graph.groups import GroupsError, groups
from rte.kubelet.usage import KubeletError, channel
from rte.kubelet.watch import watch
from rte.model import Machine
from rte.status import JSON, TEXT, Page, Probes, StatusError, StatusServer

if TYPE_CHECKING:
    from rte.agent import Agent
    from rte.commands.compose import Composer
    from rte.publish.publisher import Sink

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
    OUTGROWN = "outgrown"


class Refused(Exception):
    """The daemon must not start like this; the message says what to do."""


def run(
    config: Config,
    *,
    publishes: bool,
    plugs: bool,
    files: Sequence[Path] = (),
    again: Callable[[], Config] | None = None,
    out: Path | None = None,
    oneshot: bool = False,
) -> int:
    """Runs the roles until SIGTERM or SIGINT; the exit status.

    `files` are those of the configuration: `devices.withhold` of the first is followed, and at
    each change, and on SIGHUP, what the plugin can follow of what `again` gives. `out` is a folder
    that the publisher writes to in place of the API server; `oneshot` ends with the first
    publication.
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
            daemon = Daemon(
                config, told, publishes=publishes, plugs=plugs, files=files, again=again, out=out
            )
            if oneshot and daemon.agent is not None:
                daemon.agent.on_published = lambda: told.put(Told.STOP)
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
    """The parts of one process. `start` and `stop` are called once each."""

    def __init__(
        self,
        config: Config,
        told: queue.SimpleQueue[Told],
        *,
        publishes: bool,
        plugs: bool,
        files: Sequence[Path],
        again: Callable[[], Config] | None,
        out: Path | None,
    ) -> None:
        refuse_secrets(Path(config.kubelet.root_dir))
        self.config = config
        self.told = told
        self.files = files
        self.cordons = Cordons(config, files[0] if files else None)
        self.again = again
        self.refused: str | None = None  # why a changed configuration is not in force
        self.node = parts.node_name(config)
        self.outgrown: str | None = None  # why only a new container can go on
        self.graphs = Graphs(config)
        self.worker = NvmlWorker(
            on_event=lambda _: None,  # Hardware takes it over
            library_folders=lambda: node.nvml_folders(config),
            answer_s=config.nvml.timeout,
        )
        self.hardware = Hardware(
            sys=Path(config.host.sysfs),
            proc=Path(config.host.procfs),
            worker=self.worker,
            overrides=node.overrides(config),
            rules=parts.fault_rules(config),
            interval_s=config.host.interval,
            state=parts.state_dir(config),
            injection=Injection() if config.driver == "injected" else None,
            on_outgrown=self._outgrown,
        )
        self.control: ControlServer | None = None
        self.plugin: DevicePlugin | None = None
        self.agent: Agent | None = None
        self.composer: Composer | None = None
        self._ends: list[Callable[[], None]] = []  # in the order of stopping
        if plugs:
            self.plugin = DevicePlugin(
                replace(parts.plugin_options(config), is_told=publishes),
                on_allocate=lambda: self._wake("allocate"),
            )
        if publishes:
            self.agent = self._agent(out)
        self.status = StatusServer(
            Probes(not_ready=self.not_ready, stuck=self.stuck),
            self._pages(),
            open_pages=config.http.open_pages,
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
        config = self.config
        default = PORT if self.agent is not None else PLUGIN_PORT
        port = default if config.http.port is None else config.http.port
        if port:
            self.status.start(config.http.address, port)
            self._ends.append(self.status.stop)
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
        if self.agent is not None:
            agent = self.agent
            self.hardware.subscribe(lambda _: self._wake("hardware"))
            agent.start()
            self._ends.insert(0, agent.stop)
        self.hardware.start()
        self._ends.append(self.hardware.stop)
        log.info(
            "rte %s on %s: %s",
            __version__,
            self.node,
            " and ".join(
                name
                for name, part in [("publisher", self.agent), ("device plugin", self.plugin)]
                if part is not None
            ),
        )

    def wait(self) -> int:
        """Does what it is told until the end; the exit status."""
        watched = None
        if self.files:
            watched = watch(self.files, lambda _: self.told.put(Told.CONFIGURATION))
            self.told.put(Told.CONFIGURATION)  # it may have changed since it was read
        try:
            while True:
                word = self._told()
                if word is Told.STOP:
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
                    self.cordons.reload()
                    self._reread()
        finally:
            if watched is not None:
                watched.close()

    def _reread(self) -> None:
        """Lets the parts follow the configuration as it is now, as a whole or not at all."""
        if self.again is None:
            return
        problem = None
        try:
            fresh = self.again()
            held = self.plugin.reconfigure(parts.plugin_options(fresh)) if self.plugin else {}
        except (ConfigError, CdiError) as error:
            problem = str(error)
        else:
            if held:
                problem = (
                    f"{parts.holders(held)}: these devices would leave their resource; let the "
                    "pods end, or restart this agent, which waits for them device by device"
                )
        if problem not in (self.refused, self.cordons.problem, None):
            log.error("the changed configuration is not taken over: %s", problem)
        self.refused = problem
        if problem is None and self.composer is not None and self.agent is not None:
            self.composer.follow(fresh)
            self.agent.follow(parts.pace(fresh))

    def _told(self) -> Told | None:
        """The next word; None when there is none before cordons are worth a look."""
        before = self.cordons.now
        ends_s = self.cordons.look()
        if self.cordons.now != before:
            if self.plugin is not None:
                self.plugin.withhold(self.cordons.now)
            self._wake("hardware")
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
            log.info("stateDir %s does not exist: nothing is kept there", self.config.state_dir)
            return
        control = ControlServer(folder, self.answer)
        try:
            control.start()
        except ControlError as error:
            log.warning("rte release and rte doctor cannot ask this process: %s", error)
            return
        self.control = control
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
        self.worker.release(hold_s=hold_s)
        child = self.worker.child
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
        self.worker.resume()
        self.hardware.wake()
        return Answer(ok=True, says="NVML is opened again")

    def state(self) -> dict[str, Any]:
        """What `rte doctor` asks."""
        seen = self.hardware.latest
        return {
            "version": __version__,
            "roles": [
                name for name, part in (("publish", self.agent), ("plugin", self.plugin)) if part
            ],
            "released": self.worker.released,
            "nvmlAgeSeconds": self.worker.age_s,
            "problems": list(self.hardware.problems),
            "notReady": dict(self.not_ready()),
            "withheld": dict(self.cordons.now),
            "configuration": self.cordons.problem or self.refused,
            "outgrown": self.outgrown,
            "faults": {
                f"{gpu.name} ({gpu.pci})": [msgspec.to_builtins(f) for f in found]
                for gpu in (seen.machine.gpus if seen else ())
                if (found := seen.faults.get(gpu.pci) if seen else None)
            },
        }

    # What the parts ask of each other

    def _wake(self, reason: str) -> None:
        if self.agent is not None:
            from rte.agent import Reason  # noqa: PLC0415 - loaded already where there is an agent

            self.agent.wake(Reason(reason))

    def _agent(self, out: Path | None) -> Agent:
        # Not imported by the plugin alone: its memory is a promise.
        from rte.agent import Agent, Kubelet, Sources  # noqa: PLC0415
        from rte.commands.compose import Composer  # noqa: PLC0415
        from rte.publish.access import ApiError  # noqa: PLC0415
        from rte.publish.pods import PodWatch  # noqa: PLC0415
        from rte.publish.publisher import ApiSink, FolderSink, NoSink  # noqa: PLC0415

        config, plugin = self.config, self.plugin
        sink: Sink
        published_fabric = None
        node_uid: Callable[[], str | None] = lambda: None  # noqa: E731 - the absence of an API
        if out is None:
            try:
                api = parts.api_server(config)
            except ApiError as error:
                key = "api.kubeconfig: " if config.api.kubeconfig else ""
                raise Refused(f"{key}{error}") from error
            published_fabric = parts.published_fabric(api, self.node)
            node_uid = parts.node_uid(api, self.node)
            sink = ApiSink(
                api,
                node=self.node,
                takeover_after_s=config.nrt.takeover_after,
                owner=config.nrt.owner,
            )
            kubelet = parts.kubelet_configuration(config, api, self.node)
            sources = Sources(
                policy=parts.kubelet_policy(config, kubelet),
                policy_changed=lambda: kubelet.changed,
                published_policy=sink.published_policy,
                node_allocatable=parts.node_allocatable(api, self.node),
            )
            if config.health.events:
                self._announce()
            if config.nrt.fingerprint.watch_pods:
                # A client of its own: its watch must not wait for other requests, nor they for it.
                pods = PodWatch(parts.api_server(config), self.node, lambda: self._wake("pods"))
                sources = sources._replace(pods=pods.read)
                pods.start()
                self._ends.append(pods.stop)
        else:
            sink = FolderSink(out)
            kubelet = parts.kubelet_configuration(config, None, self.node)
            sources = Sources(
                policy=parts.kubelet_policy(config, kubelet),
                policy_changed=lambda: kubelet.changed,
            )
        sources = sources._replace(withheld=lambda: self.cordons.now)
        if plugin is not None:
            observe = plugin.observe
            sources = sources._replace(listed=lambda usage, asked: observe(usage, asked=asked))
        if not config.nrt.publish:
            sink = NoSink()
        self.composer = Composer(
            config,
            self.node,
            self.graphs.of,
            advertised=(lambda: parts.advertised(plugin)) if plugin else None,
            published_fabric=published_fabric,
            node_uid=node_uid,
        )
        return Agent(
            kubelet=Kubelet(
                channel=channel(config.pod_resources_socket),
                root=Path(config.kubelet.root_dir),
                plugin_dir=config.plugin_dir,
                pod_resources_socket=config.pod_resources_socket,
                configuration=parts.configuration_files(config),
            ),
            hardware=self.hardware,
            sources=sources,
            compose=self.composer,
            sink=sink,
            pace=parts.pace(config),
        )

    def _announce(self) -> None:
        from rte.publish.events import Announcer  # noqa: PLC0415 - an option of the publisher

        announcer = Announcer(parts.api_server(self.config).create_event, node=self.node)
        announcer.start()
        self.hardware.subscribe(announcer.tell)
        self._ends.append(announcer.stop)

    # HTTP

    def not_ready(self) -> Mapping[str, str]:
        """What is wrong, by subject; empty when the daemon does its work."""
        found = dict(self.agent.not_ready()) if self.agent is not None else {}
        if self.hardware.latest is None:
            found["hardware"] = "; ".join(self.hardware.problems) or "no reading yet"
        if self.plugin is not None and not self.plugin.ready and "hardware" not in found:
            found["plugin"] = "not registered with the kubelet"
        return found

    def stuck(self) -> str | None:
        """Why this process should be replaced, or None."""
        if not self.hardware.thread.is_alive() and not self.hardware.ending.is_set():
            return "the thread that looks at the hardware has ended"
        return self.agent.stuck() if self.agent is not None else None

    def _pages(self) -> Mapping[str, Page]:
        from rte.metrics import CONTENT_TYPE, Measured, renderer  # noqa: PLC0415

        measured = Measured(
            version=__version__,
            publisher=self.agent,
            hardware=self.hardware,
            worker=self.worker,
            plugin=self.plugin,
            plugin_buckets_s=TOOK_BUCKETS_S,
            disagreement=self._disagreement,
            withheld=lambda: self.cordons.now,
        )
        pages = {
            "/metrics": Page(CONTENT_TYPE, renderer(measured)),
            "/topology": Page(JSON, self._topology, names_pods=True),
        }
        if self.plugin is not None:
            pages["/decisions"] = Page(JSON, self._decisions, names_pods=True)
            pages["/decisions.txt"] = Page(TEXT, self._decisions_text, names_pods=True)
        return pages

    def _disagreement(self) -> bool | None:
        """Whether the two rules for the fingerprint differ in what was published last."""
        from rte.publish.disagreement import rules_disagree  # noqa: PLC0415 - the publisher only
        from rte.publish.fingerprint import InformerMode  # noqa: PLC0415
        from rte.publish.nrt import KIND, FingerprintMethod  # noqa: PLC0415

        body = self.agent.published(KIND) if self.agent is not None else None
        if self.agent is None or self.agent.observation is None or body is None:
            return None
        chosen = self.config.nrt.fingerprint
        return rules_disagree(
            self.agent.observation,
            body,
            mode=InformerMode(chosen.informer_mode),
            method=FingerprintMethod(chosen.method),
        )

    def _topology(self) -> bytes:
        from rte.view.document import document  # noqa: PLC0415 - only who asks pays

        seen = self.hardware.latest
        if seen is None:
            return b"{}\n"
        graph = self.graphs.of(seen.machine)
        found = groups(graph, by=self.config.groups.by, names=self.config.groups.names)
        return msgspec.json.encode(document(graph, found)) + b"\n"

    def _decisions(self) -> bytes:
        from rte.commands.decided import decisions_json  # noqa: PLC0415 - only who asks pays

        assert self.plugin is not None
        return decisions_json(self.plugin.decisions)

    def _decisions_text(self) -> bytes:
        from rte.commands.decided import decisions_text  # noqa: PLC0415 - only who asks pays

        assert self.plugin is not None
        seen = self.hardware.latest
        graph = None if seen is None else self.graphs.of(seen.machine)
        return decisions_text(self.plugin.decisions, graph)


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
