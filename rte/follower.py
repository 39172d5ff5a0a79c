"""What is known of the pods of this node, whoever tells of them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from rte.model import PodFacts, PodName

FORGET_S = 60.0
"""Facts that could not be followed for so long are none."""

Wake = Callable[[], None]
Tell = Callable[[str | None], None]


class Follower(ABC):
    """Follows this node's pods in a thread; `read` is what is known now."""

    def __init__(self, wake: Wake, tell: Tell, *, thread: str) -> None:
        """`wake` is called after each change of what `read` says, `tell` with why the pods are not
        followed, and with None when they are again. `thread` is its name."""
        self.problem: str | None = None
        self._wake = wake
        self._tell = tell
        self._condition = threading.Condition(threading.RLock())  # of what is below
        self._facts: Mapping[PodName, PodFacts] | None = None
        self._lost_at: float | None = None  # since when the facts are not followed
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @abstractmethod
    def stop(self) -> None:
        """Returns when every thread has ended."""

    @abstractmethod
    def _run(self) -> None:
        """Follows the pods until `stop`."""

    def read(self) -> tuple[PodFacts, ...] | None:
        """The pods by name, or None when they are not known or have not been followed lately."""
        with self._condition:
            facts, lost_s = self._facts, self.lost_s
        if facts is None or (lost_s is not None and lost_s > FORGET_S):
            return None
        return tuple(facts[name] for name in sorted(facts))

    @property
    def lost_s(self) -> float | None:
        """How long the pods have not been followed: infinite before they first were, None now."""
        with self._condition:
            if self._facts is None:
                return float("inf")
            return None if self._lost_at is None else time.monotonic() - self._lost_at

    def _take(self, facts: Mapping[PodName, PodFacts]) -> None:
        """The pods are followed, and this is what they are."""
        with self._condition:
            changed = facts != self._facts
            self._facts = facts
            self._lost_at = None
        if self.problem is not None:
            self.problem = None
            self._tell(None)
        if changed:
            self._wake()

    def _lose(self, problem: str) -> None:
        with self._condition:
            if self._lost_at is None:
                self._lost_at = time.monotonic()
        if self.problem != problem:
            self.problem = problem
            self._tell(problem)
