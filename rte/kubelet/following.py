"""Who follows the pods of this node: the kubelet's pods API where it is served, else another.

The kubelet is asked first: that costs the API server nothing, needs no right, and shows a pod's
phase before the API server has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from rte.follower import Follower, Tell, Wake
from rte.kubelet.pods import PodsApi
from rte.model import PodFacts

RESTART_S = 10.0
"""A kubelet that has served its API is waited for so long: a restart takes seconds."""


class Source(StrEnum):
    """Where the pods' facts come from."""

    KUBELET = "kubelet"
    API_SERVER = "api-server"


Watch = Callable[[Wake, Tell], Follower]
"""Makes one that follows the pods at the API server."""


class NodePods:
    """The pods of this node, followed by the kubelet's API or by a watch that is there meanwhile.

    One of the two is followed, but in the moments of changing over: what was known last stands
    until the other is through with its first list.
    """

    def __init__(
        self, *, socket: Path | None, api_server: Watch | None, wake: Wake, tell: Tell
    ) -> None:
        """`socket` is that of the pods API, `api_server` makes the watch; None is not asked.

        `wake` is called after each change of what `read` says, `tell` with why the pods are not
        followed, and with None when they are again.
        """
        self._wake = wake
        self._tell = tell
        self._kubelet = (
            None if socket is None else PodsApi(socket, self._changed, lambda _: self._look())
        )
        self._make = api_server
        self._watch: Follower | None = None
        self._told: str | None = None
        self._due = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)

    def start(self) -> None:
        if self._kubelet is not None:
            self._kubelet.start()
        self._thread.start()

    def stop(self) -> None:
        """Returns when every thread has ended."""
        self._stopped.set()
        self._look()
        self._thread.join()
        for follower in (self._kubelet, self._watch):
            if follower is not None:
                follower.stop()

    def read(self) -> tuple[PodFacts, ...] | None:
        """The pods by name, or None when nobody knows them or has followed them lately."""
        return self._now()[1]

    @property
    def source(self) -> Source | None:
        """Who says what `read` gives."""
        return self._now()[0]

    @property
    def awaited(self) -> bool:
        """Whether nobody has told of the pods yet, and somebody may soon."""
        watch = self._watch
        kubelet_may = self._kubelet is not None and self._kubelet.problem is None
        server_may = self._make is not None and (watch is None or watch.problem is None)
        return self.source is None and (kubelet_may or server_may)

    @property
    def problem(self) -> str | None:
        """Why the pods are not followed, in the words of all that could; None while they are.

        That the kubelet has no such API is none where nothing takes its place.
        """
        if self._make is None and self._kubelet is not None and self._kubelet.absent:
            return None
        words = []
        for name, follower in (("kubelet", self._kubelet), ("API server", self._watch)):
            if follower is not None:
                if follower.problem is None:
                    return None
                words.append(f"{name}: {follower.problem}")
        return "; ".join(words) or None

    def told(self) -> dict[str, str | None]:
        """Who tells of the pods, and why the kubelet does not, for `rte doctor`."""
        kubelet = self._kubelet
        return {"source": self.source, "kubelet": None if kubelet is None else kubelet.problem}

    def _now(self) -> tuple[Source | None, tuple[PodFacts, ...] | None]:
        kubelet, watch = self._kubelet, self._watch
        if watch is not None and (kubelet is None or kubelet.lost_s is not None):
            facts = watch.read()
            if facts is not None:
                return Source.API_SERVER, facts
        facts = None if kubelet is None else kubelet.read()
        return (None if facts is None else Source.KUBELET), facts

    def _changed(self) -> None:
        self._wake()
        self._look()

    def _look(self) -> None:
        self._due.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._due.wait(self._change_over())
            self._due.clear()

    def _change_over(self) -> float | None:
        """Starts or ends the watch as the kubelet's API fails or is back; when to look again."""
        lost_s = float("inf") if self._kubelet is None else self._kubelet.lost_s
        if lost_s is None:
            if self._watch is not None:
                ended, self._watch = self._watch, None
                self._wake()
                ended.stop()
        elif self._watch is None and self._make is not None and self._tried:
            if lost_s < RESTART_S:
                return RESTART_S - lost_s
            self._watch = self._make(self._changed, lambda _: self._look())
            self._watch.start()
        problem = self.problem
        if problem != self._told:
            self._told = problem
            self._tell(problem)
        return None

    @property
    def _tried(self) -> bool:
        """Whether the kubelet has been asked at all."""
        return self._kubelet is None or self._kubelet.problem is not None
