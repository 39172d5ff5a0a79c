"""The daemon's life: open the parts, start them, wait for a signal, stop them in order."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plugin.cdi import CdiError
from plugin.life import DevicePlugin
from plugin.service import TOOK_BUCKETS_S
from rte import __version__
from rte.commands import node, parts
from rte.config import Config, ConfigError, load
from rte.discovery.hardware import Hardware
from rte.discovery.nvml_worker import NvmlWorker
from rte.graph.build import Graph, build
from rte.graph.groups import GroupsError, groups
from rte.kubelet.usage import KubeletError, channel
from rte.kubelet.watch import FileWatch, watch
from rte.model import Machine
from rte.status import JSON, Page, Probes, StatusError, StatusServer

if TYPE_CHECKING:
    from rte.agent import Agent
    from rte.publish.publisher import Sink

log = logging.getLogger(__name__)

# The defaults differ so that the two roles can run beside each other on the host's network.
PORT, PLUGIN_PORT = 2112, 2113
RELEASE_S = 300.0  # time for a MIG reset or a driver's unloading; SIGUSR1 again asks for more


class Refused(Exception):
    """The daemon must not start like this; the message says what to do."""


def run(
    config: Config, *, publishes: bool, plugs: bool, file: Path | None = None, out: Path | None
) -> int:
    """Runs the roles until SIGTERM or SIGINT; the exit status.

    `file` is the configuration file, whose `devices.withhold` is followed. `out` is a folder that
    the publisher writes to in place of the API server.
    """
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # A publication computes for milliseconds; a kubelet's call must not wait for the default 5 ms.
    sys.setswitchinterval(0.0005)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        daemon = Daemon(config, publishes=publishes, plugs=plugs, file=file, out=out)
        daemon.start()
    except (Refused, ConfigError, CdiError, KubeletError, GroupsError, StatusError) as error:
        log.error("refusing to start: %s", error)
        return 1
    signal.signal(signal.SIGUSR1, lambda *_: daemon.release())
    daemon.wait(stop)
    daemon.stop()
    return 0


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
        self, config: Config, *, publishes: bool, plugs: bool, file: Path | None, out: Path | None
    ) -> None:
        refuse_secrets(Path(config.kubelet.root_dir))
        self.config = config
        self.file = file
        self.node = parts.node_name(config)
        self.graphs = Graphs(config)
        self.worker = NvmlWorker(
            on_event=lambda _: None,  # Hardware takes it over
            library_folders=node.nvml_folders(config),
            answer_s=config.nvml.timeout,
        )
        self.hardware = Hardware(
            sys=Path(config.host.sysfs),
            proc=Path(config.host.procfs),
            worker=self.worker,
            overrides=node.overrides(config),
            rules=parts.fault_rules(config),
            interval_s=config.host.interval,
        )
        self.plugin: DevicePlugin | None = None
        self.agent: Agent | None = None
        self._ends: list[Callable[[], None]] = []  # in the order of stopping
        if plugs:
            self.plugin = DevicePlugin(
                parts.plugin_options(config), on_allocate=lambda: self._wake("allocate")
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
        if self.plugin is not None:
            plugin = self.plugin
            self.hardware.subscribe(
                lambda seen: plugin.update(
                    seen.machine, seen.faults, graph=self.graphs.of(seen.machine)
                )
            )
            self._withhold(datetime.now(UTC))
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

    def wait(self, stop: threading.Event) -> None:
        """Returns when `stop` is set; meanwhile follows what is cordoned."""
        changed = threading.Event()
        watched: FileWatch | None = None
        if self.plugin is not None and self.file is not None:
            watched = watch([self.file], lambda _: changed.set())
        while not stop.wait(0.5):
            if self.plugin is None:
                stop.wait()
                break
            if changed.is_set():
                changed.clear()
                self._reload()
            if self._cordon_ends is not None and datetime.now(UTC) >= self._cordon_ends:
                self._withhold(datetime.now(UTC))
        if watched is not None:
            watched.close()

    def stop(self) -> None:
        """Returns when every thread, server and child has ended."""
        for end in self._ends:
            end()
        self._ends = []

    def release(self) -> None:
        """Closes every NVML session within 2 s, for a MIG reset or the driver's unloading."""
        log.info("NVML is released for %d s", RELEASE_S)
        self.worker.release(hold_s=RELEASE_S)

    # Cordons

    _cordon_ends: datetime | None = None

    def _withhold(self, now: datetime) -> None:
        if self.plugin is not None:
            devices, self._cordon_ends = parts.withheld(self.config, now)
            self.plugin.withhold(devices)

    def _reload(self) -> None:
        """Takes over the cordons of a changed file; the rest of it counts from the next start."""
        try:
            fresh = load(file=self.file, environ={})
        except ConfigError as error:
            log.warning("the changed configuration is not taken over: %s", error)
            return
        if fresh.devices.withhold != self.config.devices.withhold:
            log.info("withheld devices: %d entries", len(fresh.devices.withhold))
            devices = msgspec.structs.replace(self.config.devices, withhold=fresh.devices.withhold)
            self.config = msgspec.structs.replace(self.config, devices=devices)
            self._withhold(datetime.now(UTC))

    # What the parts ask of each other

    def _wake(self, reason: str) -> None:
        if self.agent is not None:
            from rte.agent import Reason  # noqa: PLC0415 - loaded already where there is an agent

            self.agent.wake(Reason(reason))

    def _agent(self, out: Path | None) -> Agent:
        # Not imported by the plugin alone: its memory is a promise.
        from rte.agent import Agent, Kubelet, Pace, Sources  # noqa: PLC0415
        from rte.commands.compose import Composer  # noqa: PLC0415
        from rte.publish.access import ApiError  # noqa: PLC0415
        from rte.publish.pods import PodWatch  # noqa: PLC0415
        from rte.publish.publisher import ApiSink, FolderSink  # noqa: PLC0415

        config, plugin = self.config, self.plugin
        sink: Sink
        published_fabric = None
        node_uid: Callable[[], str | None] = lambda: None  # noqa: E731 - the absence of an API
        if out is None:
            try:
                api = parts.api_server(config)
            except ApiError as error:
                raise Refused(str(error)) from error
            published_fabric = parts.published_fabric(api, self.node)
            node_uid = parts.node_uid(api, self.node)
            sink = ApiSink(api, node=self.node, takeover_after_s=config.nrt.takeover_after)
            sources = Sources(
                policy=parts.kubelet_policy(config, api, self.node),
                published_policy=sink.published_policy,
                node_allocatable=parts.node_allocatable(api, self.node),
            )
            if config.nrt.fingerprint.watch_pods:
                # A client of its own: its watch must not wait for other requests, nor they for it.
                pods = PodWatch(parts.api_server(config), self.node, lambda: self._wake("pods"))
                sources = sources._replace(pods=pods.read)
                pods.start()
                self._ends.append(pods.stop)
        else:
            sink = FolderSink(out)
            sources = Sources(policy=parts.kubelet_policy(config, None, self.node))
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
            compose=Composer(
                config,
                self.node,
                self.graphs.of,
                advertised=(lambda: parts.advertised(plugin)) if plugin else None,
                published_fabric=published_fabric,
                node_uid=node_uid,
            ),
            sink=sink,
            pace=Pace(
                poll_s=config.kubelet.poll, reread_s=config.nrt.reread, echo_s=config.nrt.echo
            ),
        )

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
        )
        pages = {
            "/metrics": Page(CONTENT_TYPE, renderer(measured)),
            "/topology": Page(JSON, self._topology, names_pods=True),
        }
        if self.plugin is not None:
            pages["/decisions"] = Page(JSON, self._decisions, names_pods=True)
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
        assert self.plugin is not None
        return msgspec.json.encode(list(self.plugin.decisions)) + b"\n"


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
