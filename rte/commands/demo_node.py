"""A node to look at: a recorded machine, the kubelet stand-in, the plugin and the publisher.

The parts are those of `rte run`, in one process and over real sockets; only the hardware is
recorded and the objects go into a folder.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from plugin.decisions import Decision
from plugin.life import DevicePlugin
from plugin.service import TOOK_BUCKETS_S
from rte import __version__
from rte.agent import Agent, Reason, Sources
from rte.commands import parts
from rte.commands.aligning import kubelet_configuration
from rte.commands.compose import Composer
from rte.commands.pages import pages
from rte.config import Config, load
from rte.discovery.faults import FaultMemory, faults
from rte.graph.build import Graph, build
from rte.graph.groups import Group
from rte.kubelet.spec import PodSpec
from rte.metrics import Measured
from rte.model import ContainerUse, Faults, Machine, Observation, OwnNode, PodName, Usage
from rte.publish.access import ApiError
from rte.publish.nrt import KIND
from rte.publish.publisher import FolderSink, Outcome
from rte.sources.recorded import NVML, read_nvml
from rte.standin.kubelet import Admission, StandIn, likely_cores
from rte.status import Probes, StatusServer

NODE = "demo"
WITHIN_S = 10.0  # all takes milliseconds; a machine under load may take longer
Body = Mapping[str, Any]


class DemoFailed(Exception):
    """A part did not do what it is for: what was waited for, and what it says itself."""


class Written(NamedTuple):
    """One object as it was written."""

    kind: str
    body: Body
    file: Path


class Seen(NamedTuple):
    """One look at the recorded hardware."""

    machine: Machine
    faults: Faults


class Still:
    """Hardware that never changes."""

    def __init__(self, seen: Seen) -> None:
        self.latest = seen


class Journal:
    """Composes and keeps each write as a file of its own, so that one can compare them."""

    def __init__(self, folder: Path, compose: Composer) -> None:
        self.folder = folder
        self.written: list[Written] = []
        self._current = FolderSink(folder)
        self._compose = compose
        self._changed = threading.Condition()
        self._composed: Observation | None = None
        self._left = 0  # bodies of the last observation that are still to be published
        self._published: Observation | None = None

    def compose(self, observation: Observation) -> Iterable[Body]:
        bodies = list(self._compose(observation))
        with self._changed:
            self._composed, self._left = observation, len(bodies)
        return bodies

    def wait(self, true: Callable[[Observation], bool], within_s: float) -> bool:
        """Whether `true` of the published observation came to hold in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._published is not None and true(self._published), within_s
            )

    # publisher.Sink

    def publish(self, body: Body, now: float) -> Outcome:
        outcome = self._current.publish(body, now)
        if outcome.wrote.is_write:
            self._keep(str(body["kind"]), body)
        with self._changed:
            self._left -= 1
            if self._left == 0:
                self._published = self._composed
                self._changed.notify_all()
        return outcome

    def reread(self, now: float) -> tuple[Outcome, ...]:
        return self._current.reread(now)

    def echo(self) -> Outcome | None:
        return None

    def problems(self, now: float) -> Mapping[str, str]:
        return {}

    def forget(self) -> None:
        self._current.forget()

    def _keep(self, kind: str, body: Body) -> None:
        number = 1 + sum(written.kind == kind for written in self.written)
        file = self.folder / f"{kind.lower()}-{number:02}.json"
        try:
            shutil.copyfile(self.folder / f"{kind.lower()}-{NODE}.json", file)
        except OSError as error:
            raise ApiError(f"write {file}", "Unwritable", error.strerror or str(error)) from error
        self.written.append(Written(kind, body, file))


class DemoNode:
    """The parts of the node. `start` and `stop` are called once each."""

    def __init__(
        self, machine: Machine, recorded: Path, *, root: Path, out: Path, policy: str, scope: str
    ) -> None:
        """`root` is the kubelet's folder, whose path must be short; objects go to `out`."""
        self.machine = machine
        self.kubelet = StandIn(
            root,
            kubelet_configuration(machine, policy=policy, scope=scope),
            machine.numa_nodes,
            cores=likely_cores(machine.numa_nodes),
        )
        self.config = configuration(self.kubelet)
        self.graph: Graph = build(machine, compute_nics=self.config.nics.compute)
        found = faults(FaultMemory(), machine, read_nvml(recorded / NVML))
        self.hardware = Still(Seen(machine, found))
        self.plugin = DevicePlugin(
            parts.plugin_options(self.config),
            on_allocate=lambda: self.agent.wake(Reason.ALLOCATE),
        )
        self.composer = Composer(self.config, NODE, lambda _: self.graph)
        self.groups: tuple[Group, ...] = self.composer.groups(self.graph)
        self.journal = Journal(out, self.composer)
        self.agent = self._agent()
        self.status = self._status()
        self.registered_s = 0.0  # from the plugin's start until the kubelet had its devices

    def _agent(self) -> Agent:
        configuration = parts.kubelet_configuration(self.config, None, NODE)
        return Agent(
            kubelet=parts.kubelet(self.config),
            hardware=self.hardware,
            sources=Sources(
                policy=parts.kubelet_policy(self.config, configuration),
                own_node=lambda: OwnNode(allocatable=self.kubelet.state.allocatable),
                advertised=lambda: parts.advertised(self.plugin),
            ),
            compose=self.journal.compose,
            sink=self.journal,
        )

    def _status(self) -> StatusServer:
        measured = Measured(
            version=__version__,
            publisher=self.agent,
            hardware=self.hardware,
            plugin=self.plugin,
            plugin_buckets_s=TOOK_BUCKETS_S,
            problems=self.agent.problems.current,
        )
        return StatusServer(
            Probes(not_ready=self.agent.not_ready, stuck=self.agent.stuck),
            pages(
                measured,
                graph=lambda: self.graph,
                groups=self.composer.groups,
                plugin=self.plugin,
            ),
            open_pages=False,
        )

    def start(self) -> None:
        """Returns when the kubelet has every device and the first object is written.

        Raises DemoFailed, and KubeletError for a folder whose path is too long.
        """
        self.kubelet.start()
        began = time.monotonic()
        self.plugin.start()
        self.plugin.update(self.machine, self.hardware.latest.faults, graph=self.graph)
        for name, resource in self.plugin.resources.items():
            if not self.kubelet.wait_devices(name, len(resource.tables.healthy), within_s=WITHIN_S):
                raise DemoFailed(f"the plugin for {name} was not registered within {WITHIN_S:g} s")
        self.registered_s = time.monotonic() - began
        self.agent.start()
        self.settle()

    def stop(self) -> None:
        """Returns when every thread has ended and every socket is gone."""
        self.status.stop()
        self.agent.stop()
        self.agent.kubelet.channel.close()
        self.plugin.stop()
        self.kubelet.stop()

    # Pods

    def admit(self, spec: PodSpec) -> tuple[Admission, tuple[Decision, ...]]:
        """What became of the pod, and what the plugin decided on the way; all is published.

        Raises DemoFailed.
        """
        before = max((decision.number for decision in self.plugin.decisions), default=0)
        admission = self.kubelet.admit(spec)
        self.settle()
        return admission, self.plugin.decisions.since(before)

    def remove(self, pod: PodName) -> None:
        self.kubelet.remove(pod)
        self.settle()

    def settle(self) -> None:
        """Returns when the published objects say what the kubelet has handed out."""
        given = handed_out(self.kubelet.usage())
        if not self.journal.wait(lambda said: handed_out(said.usage) == given, WITHIN_S):
            problems = [f"{name}: {words}" for name, words in self.agent.not_ready().items()]
            raise DemoFailed(
                f"nothing was published within {WITHIN_S:g} s; "
                f"the publisher says: {'; '.join(problems) or 'all is well'}"
            )

    def topology(self) -> Body:
        """The NodeResourceTopology as it is published now."""
        return [written.body for written in self.journal.written if written.kind == KIND][-1]


def handed_out(usage: Usage) -> Mapping[PodName, tuple[ContainerUse, ...]]:
    """What PodResources lists of it; the publisher knows more, from the kubelet's files."""
    return {pod.pod: pod.containers for pod in usage.pods}


def configuration(kubelet: StandIn) -> Config:
    """The agent's own configuration: its defaults, but for where this kubelet is."""
    return load(
        environ={},
        flags={
            "nodeName": NODE,
            "kubelet.rootDir": str(kubelet.root),
            "kubelet.configFile": str(kubelet.configuration_file),
        },
    )
