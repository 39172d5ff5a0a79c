"""What was chosen and why: the last answers, for the page, the log and `rte choose`."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from rte.graph.choose import Preference, RunnerUp
from rte.model import ContainerUse, DeviceId, PodName, Usage

KEPT = 256
# A pod that PodResources does not show with its devices by then was refused after our Allocate.
JOINED_WITHIN_S = 10.0


class Call(StrEnum):
    """Which call a decision answered."""

    PREFERRED = "preferred"
    """GetPreferredAllocation: the plugin chose."""
    ALLOCATED = "allocated"
    """Allocate of a set that no preference preceded: the kubelet chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One answer."""

    number: int  # counts all decisions of this process from 1
    call: Call
    resource: str
    at: float  # Unix time in seconds
    offered: tuple[DeviceId, ...]  # sorted; empty for ALLOCATED
    required: tuple[DeviceId, ...]  # sorted
    size: int
    answer: tuple[DeviceId, ...]  # in the order of the choice
    preference: Preference | None = None  # the winning tuple; None where nothing was ranked
    runner_up: RunnerUp | None = None  # None without another set
    decided_by: str | None = None  # the first field in which the runner-up is worse
    exact: bool = True
    why: str = ""  # for people, where the tuple does not say it
    took_s: float = 0.0
    pod: PodName | None = None  # None: not (yet) seen in PodResources with what was decided on
    container: str | None = None  # None where `pod` is

    def __str__(self) -> str:
        chosen = " ".join(self.answer) or "nothing"
        whose = ""
        if self.pod is not None:
            whose = f", for {self.pod.namespace}/{self.pod.name} {self.container}"
        if self.call is Call.ALLOCATED:
            return f"{self.resource}: allocated {chosen}: {self.why}{whose}"
        must = f", {len(self.required)} required" if self.required else ""
        by = f", decided by {self.decided_by}" if self.decided_by else ""
        return (
            f"{self.resource}: {self.size} of {len(self.offered)} offered{must} → {chosen}{by}"
            f"{'' if self.exact else ', not exact'}{', ' + self.why if self.why else ''}, "
            f"{1000 * self.took_s:.1f} ms{whose}"
        )


@dataclass(slots=True, kw_only=True)
class Unjoined:
    """Decisions about one Allocate whose pod is not known yet."""

    numbers: tuple[int, ...]
    resource: str
    ids: frozenset[str]  # what Allocate was called with
    at: float  # of that call, monotonic seconds


class Decisions:
    """The last decisions of all resources, oldest first; threads may share it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = itertools.count(1).__next__  # of the next decision
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: deque[Decision] = deque(maxlen=KEPT)
        self._unjoined: deque[Unjoined] = deque(maxlen=KEPT)
        self._unlogged: dict[int, float] = {}  # by number, when it was made

    def __iter__(self) -> Iterator[Decision]:
        return iter(tuple(self._kept))

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, decision: Decision) -> None:
        with self._lock:
            self._kept.append(decision)
            self._unlogged[decision.number] = self._clock()

    def allocated(self, numbers: tuple[int, ...], resource: str, ids: Iterable[str]) -> None:
        """Take note of the Allocate that these decisions led to, or were made of."""
        found = Unjoined(numbers=numbers, resource=resource, ids=frozenset(ids), at=self._clock())
        with self._lock:
            self._unjoined.append(found)

    def since(self, number: int) -> tuple[Decision, ...]:
        """Those numbered above `number`, as far as they are kept."""
        return tuple(d for d in self if d.number > number)

    def join(self, usage: Usage, *, asked: float) -> None:
        """Give pod and container to the decisions whose devices this list shows.

        `asked` is when the list was asked for, in monotonic seconds: one from before an Allocate
        shows who had the devices earlier. Of several decisions about a device the last one counts.
        """
        with self._lock:
            waiting = list(self._unjoined)
        if not waiting:
            return
        found: dict[int, tuple[PodName, str]] = {}
        left: list[Unjoined] = []
        taken: set[tuple[str, str]] = set()
        for unjoined in reversed(waiting):
            devices = {(unjoined.resource, id) for id in unjoined.ids}
            if devices & taken:
                continue  # given to another since, so that its own pod never came
            taken |= devices
            holder = None if asked < unjoined.at else holding(usage, devices)
            if holder is not None:
                found |= dict.fromkeys(unjoined.numbers, holder)
            elif self._clock() - unjoined.at < JOINED_WITHIN_S:
                left.append(unjoined)
        with self._lock:
            later = [unjoined for unjoined in self._unjoined if unjoined not in waiting]
            self._unjoined = deque([*reversed(left), *later], maxlen=KEPT)
            for at, decision in enumerate(self._kept):
                holder = found.get(decision.number)
                if holder is not None:
                    self._kept[at] = replace(decision, pod=holder[0], container=holder[1])

    @property
    def waiting(self) -> bool:
        """Whether a decision may still be joined to its pod."""
        return bool(self._unjoined)

    def unlogged(self, *, wait_s: float) -> tuple[Decision, ...]:
        """Those to be logged now, each once: joined to a pod, or older than `wait_s`."""
        oldest = self._clock() - wait_s
        with self._lock:
            ready = tuple(
                decision
                for decision in self._kept
                if decision.number in self._unlogged
                and (decision.pod is not None or self._unlogged[decision.number] <= oldest)
            )
            for number in {decision.number for decision in ready}:
                del self._unlogged[number]
            kept = self._kept[0].number if self._kept else 0
            self._unlogged = {n: at for n, at in self._unlogged.items() if n >= kept}
        return ready

    def next_log_s(self, *, wait_s: float) -> float | None:
        """Seconds until a decision is to be logged without its pod; None when none waits."""
        with self._lock:
            first = min(self._unlogged.values(), default=None)
        return None if first is None else max(first + wait_s - self._clock(), 0)


def holding(usage: Usage, devices: set[tuple[str, str]]) -> tuple[PodName, str] | None:
    """The container that holds all of these (resource, id), the last one listed.

    An init container's devices are used again by a later container of its pod.
    """
    found = None
    for pod in usage.pods:
        for container in pod.containers:
            if devices and devices <= held_by(container):
                found = pod.pod, container.name
    return found


def held_by(container: ContainerUse) -> set[tuple[str, str]]:
    return {(device.resource, device.id) for device in container.devices}
