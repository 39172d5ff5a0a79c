"""The publisher's life: wait for a reason, look, publish.

One thread. Reasons come from other threads through `Agent.wake` and are coalesced; none is lost.
Whatever fails is said once, counted, and tried again; nothing ends the loop but `stop`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import grpc

from rte.asked import AskedNode, KubeletPolicy
from rte.backoff import Retry, ordered_s
from rte.kubelet.ended import ENDED, with_ended
from rte.kubelet.plausible import Doubt, Look, doubt
from rte.kubelet.state import (
    CPU_STATE,
    DEVICE_CHECKPOINT,
    MEMORY_STATE,
    HandedOut,
    read_handed_out,
)
from rte.kubelet.usage import KubeletError, ask_allocatable, parse_allocatable, read_usage
from rte.kubelet.watch import FileWatch, watch
from rte.model import (
    DeviceUse,
    Faults,
    Machine,
    Observation,
    OwnNode,
    PodFacts,
    Policy,
    Usage,
    rfc3339,
)
from rte.pacer import Due, Pace, Pacer
from rte.problems import Problems
from rte.publish.access import ApiError
from rte.publish.patch import is_stale, may_wake, with_stale
from rte.publish.publisher import Outcome, Sink, Wrote

log = logging.getLogger(__name__)


class Reason(StrEnum):
    """Why to look."""

    START = "start"
    STATE_FILE = "state-file"
    POLL = "poll"
    ALLOCATE = "allocate"
    HARDWARE = "hardware"
    PODS = "pods"
    KUBELET_CONFIGURATION = "kubelet-configuration"
    KUBELET_RESTART = "kubelet-restart"
    ALLOCATABLE = "allocatable"
    CONFIGURATION = "configuration"  # our own
    REREAD = "reread"


Reasons = Mapping[Reason, float]
"""With the first time of each, but of the kubelet's starts the last; by the agent's clock."""


# What is not as it should be

UNREADY = frozenset({"kubelet", "hardware", "policy", "API server", "agent"})
NRT_KIND = "NodeResourceTopology"
NODE_SELDOM = 12
"""Of so many re-readings one is of what the Node offers, which a kubelet's restart changes."""
OTHERS_LONGEST_S = 300.0
"""Between two tries of what schedulers do not read: it may be a right that is never given."""
HANGS_S = 180.0
"""A turn is a few requests with time-outs of 5 and 10 s; one that takes so long hangs."""
UNREAD_S = 5.0
"""At a normal start the first reading of the hardware takes a second or two."""
UNTOLD_S = 5.0
"""So long the first publication waits for those who tell of the pods: without them it would cover
other pods than the object that a former process has left, and soon be written again."""
REREAD_RETRY_S = 30.0
"""After a re-reading that failed, and up to half of it later by chance; looks wait for none."""


# What the agent is made of


class Snapshot(Protocol):
    """One look at the hardware: what discovery.hardware hands out."""

    @property
    def machine(self) -> Machine: ...
    @property
    def faults(self) -> Faults: ...


class Hardware(Protocol):
    """The hardware as last looked at; None before the first good reading."""

    @property
    def latest(self) -> Snapshot | None: ...


class Kubelet(NamedTuple):
    """Where the kubelet of this node is."""

    channel: grpc.Channel  # to the PodResources socket
    root: Path  # its root directory, with the managers' state files
    plugin_dir: Path
    registry_dir: Path  # of its plugin watcher
    pod_resources_socket: Path
    configuration: tuple[Path, ...] = ()  # files whose change is worth a look
    timeout_s: float = 5.0

    def watched(self) -> Mapping[Path, Reason]:
        """The files whose change is a reason to look."""
        return {
            self.root / CPU_STATE: Reason.STATE_FILE,
            self.root / MEMORY_STATE: Reason.STATE_FILE,
            self.plugin_dir / DEVICE_CHECKPOINT: Reason.STATE_FILE,
            self.pod_resources_socket: Reason.KUBELET_RESTART,
            **dict.fromkeys(self.configuration, Reason.KUBELET_CONFIGURATION),
        }

    @property
    def plugin_folders(self) -> tuple[Path, ...]:
        """Where device plugins have their sockets."""
        return self.plugin_dir, self.registry_dir


class Sources(NamedTuple):
    """What a look needs beside the kubelet and the hardware. None means that nobody can tell."""

    policy: Callable[[], Policy | None]  # may raise PolicyError, KubeletError or ApiError
    policy_changed: Callable[[], float | None] = lambda: None
    """When the files that it was read from last changed, seconds since the epoch. None: the
    running kubelet has said it."""
    published_policy: Callable[[], Policy | None] = lambda: None
    """What a former publisher said, for as long as the kubelet's configuration is unknown. May
    raise ApiError."""
    pods: Callable[[], tuple[PodFacts, ...] | None] = lambda: None
    pods_awaited: Callable[[], bool] = lambda: False
    """Whether nobody has told of the pods yet, and somebody may soon."""
    own_node: Callable[[], OwnNode | None] = lambda: None  # may raise ApiError
    withheld: Callable[[], Mapping[str, str]] = dict  # cordoned devices and the reason
    advertised: Callable[[], tuple[DeviceUse, ...] | None] = lambda: None
    """What the device plugin of this process lists."""
    listed: Callable[[Usage, float], None] = lambda usage, asked: None
    """Told each list as it comes, believed or not, and when it was asked for (monotonic)."""


class Counts:
    """What has happened so far, for metrics. Written by the loop only."""

    def __init__(self) -> None:
        self.looks: Counter[str] = Counter()  # by reason
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by kind and Wrote
        self.written_bytes: Counter[str] = Counter()  # by kind
        self.failures: Counter[tuple[str, str]] = Counter()  # by source and reason
        self.doubted = 0
        self.publish_seconds = 0.0  # from the reason to the written object, summed
        self.publications = 0
        self.last_publish_s: float | None = None


Body = Mapping[str, object]
Compose = Callable[[Observation], Iterable[Body]]
"""The bodies that say what was observed: the NodeResourceTopology first, which waits for nothing,
then GPUFabric and the Node's labels. What comes after the first may raise ApiError."""


class Agent:
    """The publisher of one node. `start` and `stop`, or `run` in a thread of one's own."""

    def __init__(
        self,
        *,
        kubelet: Kubelet,
        hardware: Hardware,
        sources: Sources,
        compose: Compose,
        sink: Sink,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_published: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_published` is called each time the sink has all of what was observed."""
        self.on_published = on_published
        self.kubelet = kubelet
        self.sink = sink
        self.problems = Problems()
        self.counts = Counts()
        self.observation: Observation | None = None
        """The last one that was believed."""
        self.observed_at: float | None = None  # by the clock
        self.published_at: float | None = None
        """When the sink last had what schedulers read of what was observed."""
        self.clock = clock
        pace = pace or Pace()
        self.stale_after_s = max(60.0, 3 * pace.poll_s)
        self._stale_s = pace.stale_s
        self._hardware = hardware
        self._sources = sources
        self._compose = compose
        self._pacer = Pacer(pace, clock(), chance=random.random())
        self._condition = threading.Condition()
        self._reasons: Reasons = {Reason.START: clock()}
        self._stopped = False
        self._started_at = clock()
        self._believed: Look | None = None
        self._offered_bytes: int | None = None  # how long the kubelet's offer was, as last read
        self._restarted_at: float | None = None
        self._policy = KubeletPolicy(
            sources.policy,
            changed=sources.policy_changed,
            published=sources.published_policy,
            socket=kubelet.pod_resources_socket,
            problems=self.problems,
        )
        self._own_node = AskedNode(
            sources.own_node, socket=kubelet.pod_resources_socket, problems=self.problems
        )
        self._rereads = 0
        self._topology: Body | None = None  # as last published
        self._sink_is_due = True
        self._reread_failed = False
        # What schedulers do not read is tried again by itself.
        self._others = Retry(first_s=pace.retry_first_s, longest_s=OTHERS_LONGEST_S)
        self._held: frozenset[str] = frozenset()  # kinds
        self._is_failing = False  # something, since the last good look
        self._busy_since: float | None = None
        self._unanswered: Reasons = {}  # until a look is published
        self._watch: FileWatch | None = None
        self._thread: threading.Thread | None = None

    # From other threads

    def wake(self, reason: Reason) -> None:
        """Looks soon. Returns at once; may be called from any thread, gRPC's included."""
        now = self.clock()
        with self._condition:
            self._reasons = with_later(self._reasons, {reason: now})
            self._pacer.woken(now, urgent=reason is Reason.KUBELET_RESTART)
            self._condition.notify()

    def plugin_moved(self) -> None:
        """A device plugin's socket has come or gone: what the kubelet offers may soon differ."""
        with self._condition:
            self._pacer.plugin_moved(self.clock())
            self._condition.notify()

    def follow(self, pace: Pace) -> None:
        """Goes on at this pace, and publishes what is now composed."""
        with self._condition:
            self._pacer.follow(pace, self.clock(), chance=random.random())
        self._stale_s = pace.stale_s
        self.stale_after_s = max(60.0, 3 * pace.poll_s)
        self.wake(Reason.CONFIGURATION)

    def start(self) -> None:
        """Watches the kubelet's files and runs the loop in a thread."""
        reasons = self.kubelet.watched()
        by_path = {Path(path).absolute(): reason for path, reason in reasons.items()}

        def told(path: Path) -> None:
            if path in by_path:
                self.wake(by_path[path])
            else:
                self.plugin_moved()

        self._watch = watch(by_path, told, folders=self.kubelet.plugin_folders)
        self._thread = threading.Thread(target=self.run, name="agent", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the loop has ended: after the request that is under way, at the most."""
        with self._condition:
            self._stopped = True
            self._condition.notify()
        if self._watch is not None:
            self._watch.close()
        if self._thread is not None:
            self._thread.join()

    @property
    def polling(self) -> str | None:
        """Why the kubelet's files are polled, or None."""
        return self._watch.polling if self._watch else None

    @property
    def topology(self) -> Body | None:
        """The NodeResourceTopology as last published by this process, or None."""
        return self._topology

    def not_ready(self) -> Mapping[str, str]:
        """What stands between the node and a right object, by subject, in words; empty: nothing.

        Another writer and a broken state file are problems, but no reason to be not ready.
        """
        found = {
            subject: str(problem)
            for subject, problem in self.problems.current().items()
            if subject in UNREADY
        }
        if self.published_at is None:
            found.setdefault("publication", "nothing has been published yet")
        elif (late_s := self.clock() - (self.observed_at or 0)) > self.stale_after_s:
            found.setdefault("publication", f"stale: the last good look was {late_s:.0f} s ago")
        return found

    def stuck(self) -> str | None:
        """Why this process should be replaced, or None: the loop has ended or hangs."""
        if self._thread is not None and not self._thread.is_alive() and not self._stopped:
            return "the publisher's thread has ended"
        since = self._busy_since
        if since is not None and (busy_s := self.clock() - since) > HANGS_S:
            return f"the publisher has been at one turn for {busy_s:.0f} s"
        return None

    # The loop

    def run(self) -> None:
        """Until `stop`."""
        while (due := self._wait()) is not None:
            self._busy_since = self.clock()
            try:
                self._turn(due)
            except Exception as error:
                self._fail("agent", type(error).__name__, repr(error))
                log.exception("the publisher goes on after")
            else:
                self.problems.end("agent")
            self._busy_since = None

    def _wait(self) -> frozenset[Due] | None:
        """What is due, when it is time for it; None at the end. The reasons that a look answers are
        taken at the same moment: one that comes later is answered by the next."""
        with self._condition:
            while not self._stopped:
                due = self._pacer.due(self.clock())
                if due:
                    if Due.LOOK in due:
                        self._unanswered = with_later(self._unanswered, self._reasons)
                        self._reasons = {}
                        self._pacer.looking()
                    return due
                self._condition.wait(self._pacer.next() - self.clock())
        return None

    def _turn(self, due: frozenset[Due]) -> None:
        """Does what is due; what comes after something that fails stays due."""
        now = self.clock()
        try:
            if Due.LOOK in due:
                self._look(now)
            if Due.GLANCE in due:
                self._glance(now)
            if Due.ECHO in due:
                self._echo()
        except KubeletError as error:
            code = error.code.name if error.code else "OTHER"
            longest_s = self._pacer.pace.retry_kubelet_s
            self._fail("kubelet", code, str(error), longest_s=longest_s)
        except ApiError as error:
            self._sink_is_due = True
            self._fail("API server", error.reason, refused(error), after_s=error.retry_after_s)
        else:
            if Due.REREAD in due:
                self._reread(now)
        finally:
            if self._is_failing:
                self._tell_stale()

    def _fail(
        self,
        subject: str,
        reason: str,
        words: str,
        *,
        after_s: float | None = None,
        longest_s: float | None = None,
    ) -> None:
        self._is_failing = True
        self.counts.failures[subject, reason] += 1
        self.problems.report(subject, words)
        with self._condition:
            self._pacer.failed(
                self.clock(), chance=random.random(), after_s=after_s, longest_s=longest_s
            )

    def _look(self, now: float) -> None:
        reasons = self._unanswered or {Reason.POLL: now}
        self.counts.looks.update(reason.value for reason in reasons)
        self._take(reasons)
        observation = self._observe(now)
        if observation is None:
            return
        others_due = self._others.at is not None and self._others.is_due(now)
        if observation == self.observation and not self._sink_is_due and not others_due:
            self._pacer_looked(now, wrote=False)
            self._unanswered = {}
            self.observed_at = now
            if not self._is_held:
                self.published_at = now
            return
        before = None if self.observation is None else self.observation.node_uid
        if before is not None and observation.node_uid not in (None, before):
            self.sink.forget()
        self.observation, self.observed_at, self._sink_is_due = observation, now, True
        self._publish(observation, reasons, now)

    def _take(self, reasons: Reasons) -> None:
        """Forgets what a reason makes doubtful of what is known."""
        if (restarted_at := reasons.get(Reason.KUBELET_RESTART)) is not None:
            if self._restarted_at is None:
                self._policy.ask()
                self._own_node.ask()
            self._restarted_at = restarted_at
        if Reason.KUBELET_CONFIGURATION in reasons:
            self._policy.ask()
        if Reason.CONFIGURATION in reasons:
            self._sink_is_due = True

    def _observe(self, now: float) -> Observation | None:
        """All that is known of the node, or None while it is not to be published."""
        snapshot = self._hardware.latest
        look, pods = self._read_kubelet()
        if not self._is_believed(look, pods, snapshot, now):
            return None
        self._believed, self._restarted_at = look, None
        self._unanswered = without_restart(self._unanswered)
        if snapshot is None:
            self._say_unread(now)
            return None
        self.problems.end("hardware")
        if pods is None and self.observation is None and self._awaits_pods(now):
            return None
        policy, own_node = self._policy.read(now), self._own_node.read(now)
        return Observation(
            machine=snapshot.machine,
            faults=snapshot.faults,
            usage=look.usage,
            allocatable=look.allocatable,
            policy=policy,
            pods=pods,
            node_allocatable={} if own_node is None else own_node.allocatable,
            node_uid=None if own_node is None else own_node.uid,
            withheld=self._sources.withheld(),
            advertised=self._sources.advertised(),
        )

    def _read_kubelet(self) -> tuple[Look, tuple[PodFacts, ...] | None]:
        """What the kubelet says now, what is known of its pods, and what its files say. Raises
        KubeletError."""
        asked = time.monotonic()
        kubelet = self.kubelet
        usage = read_usage(kubelet.channel, kubelet.timeout_s)
        offer = ask_allocatable(kubelet.channel, kubelet.timeout_s)
        self._offered_bytes = len(offer)
        # Files that are younger than the pods' facts: a pod that is counted, and that the list does
        # not have, is in them.
        pods, handed_out = self._sources.pods(), self._handed_out()
        usage = with_ended(usage, handed_out, pods=pods)
        self._sources.listed(usage, asked)
        self.problems.end("kubelet")
        look = Look(usage=usage, allocatable=parse_allocatable(offer), handed_out=handed_out)
        return look, pods

    def _handed_out(self) -> HandedOut:
        handed_out = read_handed_out(self.kubelet.root, self.kubelet.plugin_dir)
        if handed_out.unread:
            self.problems.report("state files", "; ".join(handed_out.unread.values()))
        else:
            self.problems.end("state files")
        return handed_out

    def _is_believed(
        self,
        look: Look,
        pods: tuple[PodFacts, ...] | None,
        snapshot: Snapshot | None,
        now: float,
    ) -> bool:
        """Whether this reading counts; otherwise the pacer knows when to look again."""
        found = doubt(
            look,
            before=self._believed,
            restarted=self._restarted_at is not None,
            running=None
            if pods is None
            else frozenset(pod.pod for pod in pods if pod.phase not in ENDED),
            ended=frozenset(pod.uid for pod in pods or () if pod.phase in ENDED),
        )
        gpus_before = self.observation.machine.gpus if self.observation else ()
        if found is None and gpus_before and snapshot is not None and not snapshot.machine.gpus:
            found = Doubt("all GPUs are gone")
        if found is None:
            return True
        with self._condition:
            again = self._pacer.doubted(now, found.patience, restarted_at=self._restarted_at)
        if again:
            self.counts.doubted += 1
            log.debug("looking again: %s", found.why)
            return False
        log.info("published as it is, since it stays so: %s", found.why)
        return True

    def _say_unread(self, now: float) -> None:
        self.problems.report(
            "hardware", "no good reading yet; nothing is published before it", after_s=UNREAD_S
        )
        self._look_again(now, self._started_at + UNREAD_S)

    def _awaits_pods(self, now: float) -> bool:
        """Whether they may be told in a moment, which is a reason to look."""
        until = self._started_at + UNTOLD_S
        if now >= until or not self._sources.pods_awaited():
            return False
        self._look_again(now, until)
        return True

    def _look_again(self, now: float, at: float) -> None:
        """After a look that published nothing; not if that time is over."""
        self._pacer_looked(now, wrote=False)
        if now < at:
            with self._condition:
                self._pacer.again(now, at - now)

    def _glance(self, now: float) -> None:
        """Whether the kubelet's offer is as long as it was: the end of a device plugin's stream is
        in no file, and so many bytes more or less are a resource or a device."""
        offer = ask_allocatable(self.kubelet.channel, self.kubelet.timeout_s)
        with self._condition:
            self._pacer.glanced(now)
        if len(offer) != self._offered_bytes:
            self.wake(Reason.ALLOCATABLE)

    def _publish(self, observation: Observation, reasons: Reasons, now: float) -> None:
        bodies = iter(self._compose(observation))
        topology = next(bodies)
        outcome = self.sink.publish(topology, now)
        wakes = outcome.wrote is not Wrote.CREATED and may_wake(self._topology, topology)
        self._topology = topology
        outcomes = [outcome, *self._publish_others(bodies, now)]
        wrote = any(outcome.wrote.is_write for outcome in outcomes)
        self._reread_failed = self._reread_failed and not wrote
        if self._others.at is None and not self._reread_failed:
            self.problems.end("API server")
        self._sink_is_due = False
        self._unanswered = {}
        self._count(outcomes)
        end = self.clock()
        self._note_held(outcomes)
        if not self._is_held:
            self.published_at = end
        if not self._held and self._others.at is None:
            self.on_published()
        if wrote:
            took_s = end - min(reasons.values())
            self.counts.last_publish_s = took_s
            self.counts.publish_seconds += took_s
            self.counts.publications += 1
            log.info(
                "%s, %.0f ms after %s", _in_words(outcomes), took_s * 1000, " and ".join(reasons)
            )
        self._pacer_looked(end, wrote=wrote, wakes=wakes)
        self._report_others(now, outcomes)

    def _publish_others(self, bodies: Iterator[Body], now: float) -> list[Outcome]:
        """All but what schedulers read, which waits for none of them: where one cannot be composed
        or written, such as without its custom resource definition, they are tried again by
        themselves."""
        if not self._others.is_due(now):
            return []
        outcomes: list[Outcome] = []
        errors: list[ApiError] = []
        try:
            for body in bodies:
                try:
                    outcomes.append(self.sink.publish(body, now))
                except ApiError as error:
                    errors.append(error)
        except ApiError as error:  # of what a body goes by
            errors.append(error)
        for failed in errors:
            self.counts.failures["API server", failed.reason] += 1
            self.problems.report("API server", refused(failed))
        if errors:
            self._others.failed(now, after_s=errors[-1].retry_after_s)
        else:
            self._others.end()
        return outcomes

    @property
    def _is_held(self) -> bool:
        """Whether what schedulers read is held back."""
        return NRT_KIND in self._held

    def _note_held(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self._held -= {outcome.kind}
            if outcome.wrote is Wrote.HELD:
                self._held |= {outcome.kind}

    def _tell_stale(self) -> None:
        """Adds to the published object since when nothing has been known; the next good look takes
        that away."""
        now = self.clock()
        body = self._topology
        if not self._stale_s or self.observed_at is None or body is None:
            return
        late_s = now - self.observed_at
        if late_s < self._stale_s or is_stale(body):
            return
        body = with_stale(body, rfc3339(time.time() - late_s))
        self._sink_is_due = True  # the next good look publishes though it may see nothing new
        try:
            self._count([self.sink.publish(body, now)])
        except ApiError as error:
            self.problems.report("API server", refused(error))
            return
        self._topology = body
        log.warning("the object says that nothing has been known of the node for %.0f s", late_s)

    def _pacer_looked(self, now: float, *, wrote: bool, wakes: bool = False) -> None:
        self._is_failing = False
        with self._condition:
            self._pacer.looked(now, wrote=wrote, wakes=wakes)
            for at in (self._policy.again_at, self._own_node.again_at, self._others.at):
                if at is not None:
                    self._pacer.again(now, max(at - now, 0))

    def _report_others(self, now: float, outcomes: Iterable[Outcome]) -> None:
        problems = self.sink.problems(now)
        if problems:
            self.problems.report("another writer", "; ".join(problems.values()))
        else:
            self.problems.end("another writer")
        for outcome in outcomes:
            if outcome.again_s is not None:
                self._sink_is_due = True
                with self._condition:
                    self._pacer.again(now, outcome.again_s)

    def _reread(self, now: float) -> None:
        with self._condition:
            self._pacer.reread(now, chance=random.random())
        self._rereads += 1
        self._policy.ask_files()
        if self._rereads % NODE_SELDOM == 0:
            # In place of the other: an idle hour is six requests.
            self._own_node.ask()
            self.wake(Reason.REREAD)
            return
        try:
            outcomes = self.sink.reread(now)
        except ApiError as error:
            self._reread_later(error)
            return
        self._reread_failed = False
        if self._others.at is None:
            self.problems.end("API server")
        self._note_held(outcomes)
        self._count(outcomes)
        self._report_others(now, outcomes)
        for outcome in outcomes:
            if outcome.wrote.is_write:
                log.info("put back: %s", _in_words([outcome]))

    def _reread_later(self, error: ApiError) -> None:
        """Looks go on meanwhile: what they find may be written all the same."""
        self._reread_failed = True
        self.counts.failures["API server", error.reason] += 1
        self.problems.report("API server", refused(error))
        chance = random.random()
        after_s = max(
            REREAD_RETRY_S * (1 + chance / 2), ordered_s(error.retry_after_s, chance=chance)
        )
        with self._condition:
            self._pacer.reread_at = min(self._pacer.reread_at, self.clock() + after_s)

    def _echo(self) -> None:
        outcome = self.sink.echo()
        with self._condition:
            self._pacer.echoed()
        if outcome is not None:
            self._count([outcome])

    def _count(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.counts.outcomes[outcome.kind, outcome.wrote.value] += 1
            self.counts.written_bytes[outcome.kind] += outcome.size_bytes


def without_restart(reasons: Reasons) -> Reasons:
    return {reason: at for reason, at in reasons.items() if reason is not Reason.KUBELET_RESTART}


def with_later(reasons: Reasons, later: Reasons) -> Reasons:
    earlier = without_restart(reasons) if Reason.KUBELET_RESTART in later else reasons
    return {**later, **earlier}


def refused(error: ApiError) -> str:
    """What the API server has against it, and where that may come from."""
    words = error.answer if error.is_of_all else str(error)
    if error.unknown_kind:
        words += "; is the custom resource definition installed?"
    return words


def _in_words(outcomes: Iterable[Outcome]) -> str:
    """What was written, for one log line."""
    return ", ".join(
        f"{outcome.wrote.value} {outcome.kind} ({outcome.size_bytes} bytes)"
        for outcome in outcomes
        if outcome.wrote.is_write
    )
