"""What was chosen and why: the last answers, for the page, the log and `rte choose`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from rte.graph.choose import Preference, RunnerUp
from rte.model import DeviceId

KEPT = 256


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

    def __str__(self) -> str:
        chosen = " ".join(self.answer) or "nothing"
        if self.call is Call.ALLOCATED:
            return f"{self.resource}: allocated {chosen}: {self.why}"
        must = f", {len(self.required)} required" if self.required else ""
        by = f", decided by {self.decided_by}" if self.decided_by else ""
        return (
            f"{self.resource}: {self.size} of {len(self.offered)} offered{must} → {chosen}{by}"
            f"{'' if self.exact else ', not exact'}{', ' + self.why if self.why else ''}, "
            f"{1000 * self.took_s:.1f} ms"
        )


class Decisions:
    """The last decisions of all resources, oldest first; threads may share it."""

    def __init__(self) -> None:
        self.number = itertools.count(1).__next__  # of the next decision
        self._kept: deque[Decision] = deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[Decision]:
        return iter(tuple(self._kept))

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, decision: Decision) -> None:
        self._kept.append(decision)

    def since(self, number: int) -> tuple[Decision, ...]:
        """Those numbered above `number`, as far as they are kept."""
        return tuple(d for d in self if d.number > number)
