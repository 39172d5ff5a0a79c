"""What is not as it should be, since when, and what to do about it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from rte.model import rfc3339

log = logging.getLogger(__name__)

DO: Mapping[str, str] = {
    "kubelet": "is it running, and its folder mounted? `rte doctor` tries its sockets",
    "API server": "`rte doctor` tries each right and each definition",
    "policy": "is kubelet.configFile right? Or state kubelet.topologyManagerPolicy",
    "hardware": "`rte doctor` looks at sysfs and NVML",
    "publication": "another line here, or the log, says why",
    "plugin": "the log says what the kubelet answered; is another plugin there for the resource?",
    "agent": "a bug: the log has its trace, and `rte record` makes a report",
    "another writer": "let one program write the object: remove the other from this node",
    "pods": "may it list and watch pods? Else set nrt.fingerprint.watchPods to false",
    "state files": "allocations are seen at the next poll; report the file and the kubelet",
    "kubelet configuration": "restart the kubelet, or put its file back",
    "configuration": "repair the file; the last good one is in force",
    "certificate": "see what renews its Secret; the last good one is in force",
    "Node": "may it get nodes? Unbound resources have the machine's figures until then",
}
"""By subject. docs/alerts.md has the same list, with what each means."""


def do(subject: str) -> str:
    """What to do; never empty."""
    return DO.get(subject, "the log has the whole story")


class Problem(NamedTuple):
    words: str
    since: float  # seconds since the epoch

    def __str__(self) -> str:
        return f"{self.words} (since {rfc3339(self.since)})"


class Known(NamedTuple):
    problem: Problem
    began_s: float  # monotonic
    is_logged: bool


class Problems:
    """What is wrong now, by subject; each is logged when it begins, changes and ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}

    def report(self, subject: str, words: str, *, after_s: float = 0) -> None:
        """What is usual for a moment is logged only by a report that comes `after_s` after the
        first; it is a problem from the first."""
        now = time.monotonic()
        with self._lock:
            new = Known(Problem(words, time.time()), now, is_logged=False)
            known = self._known.get(subject, new)
            first = not known.is_logged and now - known.began_s >= after_s
            self._known[subject] = Known(
                known.problem._replace(words=words), known.began_s, known.is_logged or first
            )
        if first:
            log.warning("%s: %s", subject, "; ".join(filter(None, [words, DO.get(subject)])))
        elif known.is_logged and known.problem.words != words:
            log.info("%s: now %s", subject, words)

    def end(self, subject: str) -> None:
        now = time.monotonic()
        with self._lock:
            known = self._known.pop(subject, None)
        if known is not None and known.is_logged:
            log.info("%s: in order again, after %.0f s", subject, now - known.began_s)

    def current(self) -> Mapping[str, Problem]:
        """A copy, in the order in which they began."""
        with self._lock:
            return {subject: known.problem for subject, known in self._known.items()}
