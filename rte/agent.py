"""The publisher's life: wait for a reason, look, publish; `Pacer` says when to look next.

One thread. Reasons come from other threads through `Agent.wake` and are coalesced; none is lost.
Whatever fails is said once, counted, and tried again; nothing ends the loop but `stop`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import grpc

from rte.kubelet.ended import ENDED, with_ended
from rte.kubelet.plausible import Doubt, Look, Patience, doubt
from rte.kubelet.policy import InForce, PolicyError, says
from rte.kubelet.state import (
    CPU_STATE,
    DEVICE_CHECKPOINT,
    MEMORY_STATE,
    HandedOut,
    StateFileError,
    read_handed_out,
)
from rte.kubelet.usage import KubeletError, read_allocatable, read_usage
from rte.kubelet.watch import FileWatch, signature, watch
from rte.model import Faults, Machine, Observation, PodFacts, Policy, Usage
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
    CONFIGURATION = "configuration"  # our own
    REREAD = "reread"
    RETRY = "retry"


# When to look


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times in seconds; why they are what they are stands beside each."""

    settle_s: float = 0.01
    """Between a first reason and the look: an admission writes two or three files within 5 ms,
    and one look then sees them all."""
    burst_s: float = 0.25
    """A reason that comes so soon after a write belongs to a burst."""
    quiet_s: float = 0.075
    """In a burst: how long no reason has come before the look. The last change of a burst is then
    published within 100 ms."""
    longest_s: float = 0.4
    """In a burst: the look after so long comes in any case; 20 changes in a second are 4 writes."""
    poll_s: float = 10.0
    """PodResources is asked so often though nothing calls; one look costs 3 ms of CPU."""
    reread_s: float = 600.0
    """The published object is read back so often; half as early at first, by chance, so that the
    nodes of a cluster do not ask together."""
    echo_s: float = 6.0
    """After a write by which a pod that waits may find room: the scheduler's cache has taken the
    object in after its resync period, 5 s at the least that is advised. 0: no echo."""
    retry_first_s: float = 0.5
    retry_longest_s: float = 30.0
    """After errors: doubled from the first to the longest, each cut by up to half by chance."""
    doubts_s: tuple[float, ...] = (0.02, 0.03, *[0.05] * 8, 0.1, 0.2, 0.4, 0.4)
    """Between looks at a reading that cannot be believed; then, after 1.6 s, it is published as it
    is. Seen: a state file 0.3 s ahead of the list, so up to there the looks are dense."""
    doubts_if_short: int = 8
    """How many of those looks a reading gets that is as likely true."""
    stale_s: float = 300.0
    """Nothing has been known for so long: the object says so. 0: never."""
    restart_s: float = 15.0
    """So long after the kubelet has started its readings are doubted, once a second at the last:
    it waits for its pods from the API server before it lists them."""


class Pacer:
    """When to look next. Pure arithmetic over the times that it is told; it knows no clock."""

    def __init__(self, pace: Pace, now: float, *, chance: float) -> None:
        """`chance` in [0, 1) spreads the first re-reading over the period."""
        self.pace = pace
        self.reread_at = now + pace.reread_s * (0.5 + chance / 2)
        self.echo_at: float | None = None
        self._poll_at = now
        self._first: float | None = None  # the first and the last reason that wait
        self._last = now
        self._wrote_at = now - pace.burst_s
        self._retry_at: float | None = None
        self._retry_is_order = False
        self._failures = 0
        self._doubts = 0
        self._doubt_at: float | None = None

    def woken(self, now: float, *, urgent: bool = False) -> None:
        """A reason has come. An urgent one ends a back-off that nobody has ordered."""
        self._first = now if self._first is None else self._first
        self._last = now
        if urgent and not self._retry_is_order:
            self._retry_at = None
            self._failures = 0  # a socket that is just being made may need another try, soon

    def next(self) -> float:
        """When to wake up: to look, to read back or to echo, whichever is first."""
        others = [at for at in (self.reread_at, self.echo_at) if at is not None]
        if self._retry_at is not None:
            return self._retry_at
        return min([self.look_at(), *others])

    def look_at(self) -> float:
        """When to look next, as things are."""
        if self._retry_at is not None:
            return self._retry_at
        if self._doubt_at is not None:
            return self._doubt_at
        if self._first is None:
            return self._poll_at
        pace = self.pace
        if self._first - self._wrote_at >= pace.burst_s:
            return min(self._first + pace.settle_s, self._poll_at)
        return min(self._last + pace.quiet_s, max(self._first, self._wrote_at) + pace.longest_s)

    def looking(self) -> None:
        """A look begins: the reasons so far are answered by it."""
        self._first = None
        self._doubt_at = self._retry_at = None

    def looked(self, now: float, *, wrote: bool, wakes: bool = False) -> None:
        """A look was believed, and published if there was anything new; pods that wait may find
        room by it."""
        self._poll_at = now + self.pace.poll_s
        self._failures = self._doubts = 0
        if wrote:
            self._wrote_at = now
            waiting = self.echo_at is not None
            self.echo_at = now + self.pace.echo_s if (wakes or waiting) else None
        if not self.pace.echo_s:
            self.echo_at = None

    def doubted(self, now: float, patience: Patience, *, restarted_at: float | None = None) -> bool:
        """Whether to look again before the reading is believed; then it says when."""
        short = patience is Patience.SHORT
        waits = self.pace.doubts_s[: self.pace.doubts_if_short if short else None]
        if self._doubts < len(waits):
            wait_s = waits[self._doubts]
        elif (
            patience is Patience.LONG
            and restarted_at is not None
            and now < restarted_at + self.pace.restart_s
        ):
            wait_s = 1.0
        else:
            return False
        self._doubts += 1
        self._doubt_at = now + wait_s
        return True

    def failed(self, now: float, *, chance: float, after_s: float | None = None) -> None:
        """Something could not be done: `after_s` is when the other side wants to be asked again."""
        pace = self.pace
        wait_s = backoff_s(pace, self._failures, pace.retry_longest_s, chance=chance)
        self._failures = min(self._failures + 1, 30)
        self._retry_is_order = after_s is not None
        self._retry_at = now + max(wait_s, ordered_s(after_s, chance=chance))

    def again(self, now: float, after_s: float) -> None:
        """A look is wanted then, though no reason may come."""
        self._poll_at = min(self._poll_at, now + after_s)

    def reread(self, now: float, *, chance: float) -> None:
        self.reread_at = now + self.pace.reread_s * (0.9 + chance / 5)

    def echoed(self) -> None:
        self.echo_at = None


def backoff_s(pace: Pace, failures: int, longest_s: float, *, chance: float) -> float:
    """How long to wait after as many failures in a row and one more."""
    return min(pace.retry_first_s * 2.0 ** min(failures, 30), longest_s) * (1 - chance / 2)


def ordered_s(after_s: float | None, *, chance: float) -> float:
    """What a server asked for, and up to half of it more: it has told many nodes the same."""
    return (after_s or 0) * (1 + chance / 2)


# What is not as it should be

UNREADY = frozenset({"kubelet", "hardware", "policy", "API server", "agent"})
NRT_KIND = "NodeResourceTopology"
NODE_SELDOM = 12
"""Of so many re-readings one is of what the Node offers, which a kubelet's restart changes."""
OTHERS_LONGEST_S = 300.0
"""Between two tries of what schedulers do not read: it may be a right that is never given."""
HANGS_S = 180.0
"""A turn is a few requests with time-outs of 5 and 10 s; one that takes so long hangs."""


class Problem(NamedTuple):
    words: str
    since: float  # seconds since the epoch

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC)
        return f"{self.words} (since {since:%Y-%m-%dT%H:%M:%SZ})"


class Problems:
    """What is wrong now, by subject; each is logged when it begins, changes and ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: dict[str, Problem] = {}

    def report(self, subject: str, words: str) -> None:
        with self._lock:
            known = self._problems.get(subject)
            since = known.since if known else time.time()
            self._problems[subject] = Problem(words, since)
        if known is None:
            log.warning("%s: %s", subject, words)
        elif known.words != words:
            log.info("%s: now %s", subject, words)

    def end(self, subject: str) -> None:
        with self._lock:
            known = self._problems.pop(subject, None)
        if known is not None:
            log.info("%s: in order again, after %.0f s", subject, time.time() - known.since)

    def current(self) -> Mapping[str, Problem]:
        """A copy, in the order in which they began."""
        with self._lock:
            return dict(self._problems)


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
    node_allocatable: Callable[[], Mapping[str, int]] = dict  # may raise ApiError
    withheld: Callable[[], Mapping[str, str]] = dict  # cordoned devices and the reason
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


Compose = Callable[[Observation], Iterable[Mapping[str, object]]]
"""The bodies that say what was observed: NodeResourceTopology, GPUFabric, the Node's labels."""


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
        self.stale_after_s = max(60.0, 3 * (pace or Pace()).poll_s)
        self._stale_s = (pace or Pace()).stale_s
        self._hardware = hardware
        self._sources = sources
        self._compose = compose
        self._pacer = Pacer(pace or Pace(), clock(), chance=random.random())
        self._condition = threading.Condition()
        self._reasons: dict[Reason, float] = {Reason.START: clock()}  # with their first time
        self._stopped = False
        self._believed: Look | None = None
        self._restarted_at: float | None = None
        self._in_force = InForce()
        self._policy_is_due = True
        self._node_allocatable: Mapping[str, int] | None = None
        self._rereads = 0
        self._node_failures = 0  # to read it, in a row
        self._bodies: Mapping[str, Mapping[str, object]] = {}  # by kind, as last published
        self._sink_is_due = True
        self._other_failed: ApiError | None = None  # of what schedulers do not read
        self._other_failures = 0  # in a row
        self._others_at = 0.0  # when they are tried again
        self._is_held = False
        self._busy_since: float | None = None
        self._unanswered: dict[Reason, float] = {}  # reasons until a look is published
        self._watch: FileWatch | None = None
        self._thread: threading.Thread | None = None

    # From other threads

    def wake(self, reason: Reason) -> None:
        """Looks soon. Returns at once; may be called from any thread, gRPC's included."""
        now = self.clock()
        with self._condition:
            self._reasons.setdefault(reason, now)
            self._pacer.woken(now, urgent=reason is Reason.KUBELET_RESTART)
            self._condition.notify()

    def follow(self, pace: Pace) -> None:
        """Goes on at this pace, and publishes what is now composed."""
        with self._condition:
            self._pacer.pace = pace
        self._stale_s = pace.stale_s
        self.stale_after_s = max(60.0, 3 * pace.poll_s)
        self.wake(Reason.CONFIGURATION)

    def start(self) -> None:
        """Watches the kubelet's files and runs the loop in a thread."""
        reasons = self.kubelet.watched()
        by_path = {Path(path).absolute(): reason for path, reason in reasons.items()}
        self._watch = watch(by_path, lambda path: self.wake(by_path[path]))
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

    def published(self, kind: str) -> Mapping[str, object] | None:
        """The body of this kind as last published by this process, or None."""
        return self._bodies.get(kind)

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
        while (reasons := self._wait()) is not None:
            self._busy_since = self.clock()
            try:
                self.turn(reasons)
            except Exception as error:
                self._fail("agent", type(error).__name__, f"{error!r}; this is a bug")
                log.exception("the publisher goes on after")
            self._busy_since = None

    def _wait(self) -> dict[Reason, float] | None:
        """The reasons that wait, when it is time for them; None at the end."""
        with self._condition:
            while not self._stopped:
                wait_s = self._pacer.next() - self.clock()
                if wait_s <= 0:
                    reasons, self._reasons = self._reasons, {}
                    return reasons
                self._condition.wait(wait_s)
        return None

    def turn(self, reasons: Mapping[Reason, float]) -> None:
        """One turn of the loop: what is due of reading back, looking, publishing and echoing."""
        now = self.clock()
        for reason, since in reasons.items():
            self._unanswered.setdefault(reason, since)
        with self._condition:
            due = {
                "look": self._pacer.look_at() <= now,
                "reread": self._pacer.reread_at <= now,
                "echo": self._pacer.echo_at is not None and self._pacer.echo_at <= now,
            }
            if due["look"]:
                self._pacer.looking()
        try:
            if due["reread"]:
                self._reread(now)
            if due["look"]:
                self._look(now)
            if due["echo"]:
                self._echo()
        except KubeletError as error:
            code = error.code.name if error.code else "OTHER"
            self._fail("kubelet", code, str(error))
            self._tell_stale()
        except ApiError as error:
            self._sink_is_due = True
            self._fail("API server", error.reason, in_words(error), after_s=error.retry_after_s)

    def _fail(self, subject: str, reason: str, words: str, *, after_s: float | None = None) -> None:
        self.counts.failures[subject, reason] += 1
        self.problems.report(subject, words)
        with self._condition:
            self._pacer.failed(self.clock(), chance=random.random(), after_s=after_s)

    def _look(self, now: float) -> None:
        reasons = self._unanswered or {Reason.POLL: now}
        self.counts.looks.update(reason.value for reason in reasons)
        if (restarted_at := self._unanswered.get(Reason.KUBELET_RESTART)) is not None:
            if self._restarted_at is None:
                self._policy_is_due = True
                self._node_allocatable = None
            self._restarted_at = restarted_at
        if Reason.KUBELET_CONFIGURATION in self._unanswered:
            self._policy_is_due = True
        if Reason.CONFIGURATION in self._unanswered:
            self._sink_is_due = True
        observation = self._observe(now)
        if observation is None:
            return
        if observation == self.observation and not self._sink_is_due:
            self._pacer_looked(now, wrote=False)
            self._unanswered = {}
            self.observed_at = now
            if not self._is_held:
                self.published_at = now
            return
        self.observation, self.observed_at, self._sink_is_due = observation, now, True
        self._publish(observation, since=min(reasons.values()), now=now)

    def _observe(self, now: float) -> Observation | None:
        """All that is known of the node, or None while it is not to be published."""
        snapshot = self._hardware.latest
        asked = time.monotonic()
        usage = read_usage(self.kubelet.channel, self.kubelet.timeout_s)
        allocatable = read_allocatable(self.kubelet.channel, self.kubelet.timeout_s)
        handed_out, pods = self._handed_out(), self._sources.pods()
        usage = with_ended(usage, handed_out, pods=pods)
        self._sources.listed(usage, asked)
        look = Look(usage=usage, allocatable=allocatable, handed_out=handed_out)
        self.problems.end("kubelet")
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
        if found is not None:
            with self._condition:
                again = self._pacer.doubted(now, found.patience, restarted_at=self._restarted_at)
            if again:
                self.counts.doubted += 1
                log.debug("looking again: %s", found.why)
                return None
            log.info("published as it is: %s", found.why)
        self._believed, self._restarted_at = look, None
        self._unanswered.pop(Reason.KUBELET_RESTART, None)
        if snapshot is None:
            self.problems.report("hardware", "no good reading yet; nothing is published before it")
            self._pacer_looked(now, wrote=False)
            return None
        self.problems.end("hardware")
        return Observation(
            machine=snapshot.machine,
            faults=snapshot.faults,
            usage=look.usage,
            allocatable=look.allocatable,
            policy=self._kubelet_policy(),
            pods=pods,
            node_allocatable=self._own_node_allocatable(),
            withheld=self._sources.withheld(),
        )

    def _handed_out(self) -> HandedOut | None:
        try:
            handed_out = read_handed_out(self.kubelet.root, self.kubelet.plugin_dir)
        except StateFileError as error:
            self.problems.report("state files", str(error))
            return None
        self.problems.end("state files")
        return handed_out

    def _kubelet_policy(self) -> Policy | None:
        """Read at start, after a restart of the kubelet and when its files change, until that
        succeeds; what counts is what the kubelet read when it started."""
        if not self._policy_is_due:
            return self._in_force.policy
        try:
            read = self._sources.policy()
            words = "no source of the kubelet's configuration"
        except (PolicyError, KubeletError, ApiError) as error:
            read, words = None, str(error)
        if read is None:
            self.problems.report("policy", f"unknown: {words}")
            return self._in_force.policy or self._published_policy()
        kubelet = signature(self.kubelet.pod_resources_socket)
        changed = self._sources.policy_changed()
        if (
            self._in_force.policy is None
            and kubelet is not None
            and changed is not None
            and changed > kubelet[3] / 1e9
        ):
            # Changed after the kubelet's start, which made its socket: what it read is not known
            # but from what was published.
            published = self._published_policy()
            if published is None:
                when = datetime.fromtimestamp(changed, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                words = f"the kubelet's configuration was changed at {when}, after its start"
                self.problems.report("policy", f"unknown: {words}; restart the kubelet")
                return None
            if not says(published, read):
                self._in_force = InForce(policy=published, kubelet=kubelet)
        self._in_force = self._in_force.after(read, kubelet=kubelet)
        self._policy_is_due = False
        self.problems.end("policy")
        if self._in_force.pending is None:
            self.problems.end("kubelet configuration")
        else:
            self.problems.report(
                "kubelet configuration", "changed; it counts when the kubelet has restarted"
            )
        return self._in_force.policy

    def _published_policy(self) -> Policy | None:
        try:
            return self._sources.published_policy()
        except ApiError:
            return None

    def _own_node_allocatable(self) -> Mapping[str, int]:
        """Read at start, after a restart of the kubelet and every two hours."""
        if self._node_allocatable is None:
            try:
                self._node_allocatable = self._sources.node_allocatable()
            except ApiError as error:
                self.problems.report("Node", f"status.allocatable is unknown: {error}")
                self._node_failures += 1
                return self.observation.node_allocatable if self.observation else {}
            self._node_failures = 0
            self.problems.end("Node")
        return self._node_allocatable

    def _publish(self, observation: Observation, *, since: float, now: float) -> None:
        bodies = {str(body["kind"]): body for body in self._compose(observation)}
        outcomes = [self.sink.publish(bodies[kind], now) for kind in bodies if kind == NRT_KIND]
        outcomes += self._publish_others(bodies, now)
        for subject in ("API server", "agent") if self._other_failed is None else ("agent",):
            self.problems.end(subject)
        self._sink_is_due = self._other_failed is not None
        self._unanswered = {}
        wakes = any(
            may_wake(self._bodies.get(outcome.kind), bodies[outcome.kind])
            for outcome in outcomes
            if outcome.kind == "NodeResourceTopology" and outcome.wrote is not Wrote.CREATED
        )
        self._bodies = bodies
        self._count(outcomes)
        wrote = any(outcome.wrote.is_write for outcome in outcomes)
        end = self.clock()
        self._is_held = any(outcome.wrote is Wrote.HELD for outcome in outcomes)
        if not self._is_held:
            self.published_at = end
        if not self._is_held and self._other_failed is None:
            self.on_published()
        if wrote:
            self.counts.last_publish_s = end - since
            self.counts.publish_seconds += end - since
            self.counts.publications += 1
            log.info("%s, %.0f ms", _in_words(outcomes), (end - since) * 1000)
        self._pacer_looked(end, wrote=wrote, wakes=wakes)
        self._report_others(now, outcomes)

    def _publish_others(
        self, bodies: Mapping[str, Mapping[str, object]], now: float
    ) -> list[Outcome]:
        """All but what schedulers read, which waits for none of them: where one cannot be written,
        such as without its custom resource definition, they are tried again by themselves."""
        if now < self._others_at:
            return []
        outcomes: list[Outcome] = []
        self._other_failed = None
        for body in (bodies[kind] for kind in bodies if kind != NRT_KIND):
            try:
                outcomes.append(self.sink.publish(body, now))
            except ApiError as error:
                self._other_failed = error
                self.counts.failures["API server", error.reason] += 1
                self.problems.report("API server", in_words(error))
        if self._other_failed is None:
            self._other_failures = 0
            return outcomes
        chance = random.random()
        wait_s = backoff_s(self._pacer.pace, self._other_failures, OTHERS_LONGEST_S, chance=chance)
        self._other_failures += 1
        self._others_at = now + max(
            wait_s, ordered_s(self._other_failed.retry_after_s, chance=chance)
        )
        return outcomes

    def _tell_stale(self) -> None:
        """Adds to the published object since when nothing has been known; the next good look takes
        that away."""
        now = self.clock()
        body = self._bodies.get(NRT_KIND)
        if not self._stale_s or self.observed_at is None or body is None:
            return
        late_s = now - self.observed_at
        if late_s < self._stale_s or is_stale(body):
            return
        since = datetime.fromtimestamp(time.time() - late_s, UTC)
        body = with_stale(body, f"{since:%Y-%m-%dT%H:%M:%SZ}")
        self._sink_is_due = True  # the next good look publishes though it may see nothing new
        try:
            self._count([self.sink.publish(body, now)])
        except ApiError as error:
            self.problems.report("API server", str(error))
            return
        self._bodies = {**self._bodies, NRT_KIND: body}
        log.warning("published that nothing has been known for %.0f s", late_s)

    def _pacer_looked(self, now: float, *, wrote: bool, wakes: bool = False) -> None:
        with self._condition:
            self._pacer.looked(now, wrote=wrote, wakes=wakes)
            if self._node_failures:
                self._pacer.again(now, min(2.0 ** (self._node_failures - 1), 600.0))
            if self._other_failed is not None:
                self._pacer.again(now, max(self._others_at - now, 0))

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
        if self._rereads % NODE_SELDOM == 0:
            # In place of the other: an idle hour is six requests.
            self._node_allocatable = None
            with self._condition:
                self._pacer.woken(now)
                self._reasons.setdefault(Reason.REREAD, now)
            return
        outcomes = self.sink.reread(now)
        self._is_held = any(outcome.wrote is Wrote.HELD for outcome in outcomes)
        self._count(outcomes)
        self._report_others(now, outcomes)
        for outcome in outcomes:
            if outcome.wrote.is_write:
                log.info("put back: %s", _in_words([outcome]))

    def _echo(self) -> None:
        with self._condition:
            self._pacer.echoed()
        outcome = self.sink.echo()
        if outcome is not None:
            self._count([outcome])

    def _count(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.counts.outcomes[outcome.kind, outcome.wrote.value] += 1
            self.counts.written_bytes[outcome.kind] += outcome.size_bytes


def in_words(error: ApiError) -> str:
    words = str(error)
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
