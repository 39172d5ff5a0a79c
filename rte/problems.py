"""What is not as it should be, and since when."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

log = logging.getLogger(__name__)


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
        self._began: dict[str, float] = {}  # monotonic seconds
        self._logged: set[str] = set()

    def report(self, subject: str, words: str, *, after_s: float = 0) -> None:
        """What is usual for a moment is logged only by a report that comes `after_s` after the
        first; it is a problem from the first."""
        now = time.monotonic()
        with self._lock:
            known = self._problems.get(subject)
            self._problems[subject] = Problem(words, known.since if known else time.time())
            began = self._began.setdefault(subject, now)
            first = subject not in self._logged and now - began >= after_s
            if first:
                self._logged.add(subject)
            changed = subject in self._logged and known is not None and known.words != words
        if first:
            log.warning("%s: %s", subject, words)
        elif changed:
            log.info("%s: now %s", subject, words)

    def end(self, subject: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._problems.pop(subject, None)
            lasted_s = now - self._began.pop(subject, now)
            was_logged = subject in self._logged
            self._logged.discard(subject)
        if was_logged:
            log.info("%s: in order again, after %.0f s", subject, lasted_s)

    def current(self) -> Mapping[str, Problem]:
        """A copy, in the order in which they began."""
        with self._lock:
            return dict(self._problems)
