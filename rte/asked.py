"""What is not asked for at every look, but at the start and when it may have changed: the kubelet's
configuration and the own Node. What cannot be had is asked for again, later and later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rte.backoff import Retry
from rte.kubelet.policy import InForce, PolicyError, says
from rte.kubelet.usage import KubeletError
from rte.kubelet.watch import Signature, signature
from rte.model import OwnNode, Policy, rfc3339
from rte.problems import Problems
from rte.publish.access import ApiError

FIRST_S = 1.0
POLICY_LONGEST_S = 60.0
"""Where nothing tells of the configuration each try may be three requests and seconds of waiting,
for which a look waits."""
NODE_LONGEST_S = 600.0


class KubeletPolicy:
    """What the kubelet works by: what it read when it started."""

    def __init__(
        self,
        read: Callable[[], Policy | None],
        *,
        changed: Callable[[], float | None],
        published: Callable[[], Policy | None],
        socket: Path,
        problems: Problems,
    ) -> None:
        """`read` may raise PolicyError, KubeletError or ApiError. `changed` says when the files
        that it was read from last changed, seconds since the epoch, or None where the running
        kubelet has said it. `published` is what a former publisher said; it may raise ApiError.
        `socket` is made anew at each start of the kubelet.
        """
        self._read = read
        self._changed = changed
        self._read_published = published
        self._socket = socket
        self._problems = problems
        self._is_due = True
        self._retry = Retry(first_s=FIRST_S, longest_s=POLICY_LONGEST_S)
        self._in_force = InForce()
        self._meanwhile: Policy | None = None  # while none is in force

    def ask(self) -> None:
        """Lets the next `read` ask: the kubelet has restarted, or its files have changed."""
        self._is_due = True
        self._retry.end()

    def ask_files(self) -> None:
        """Likewise where that costs nobody else anything: not all files are watched, and what was
        changed should be said before the kubelet restarts with it."""
        if not self._is_due and self._changed() is not None:
            self._is_due = True

    @property
    def again_at(self) -> float | None:
        """When it is worth another `read`, by the clock that `read` was told."""
        return self._retry.at

    def read(self, now: float) -> Policy | None:
        """The policy in force, None while it is not known; asks only while it is due."""
        if self._is_due and self._retry.is_due(now):
            problem = self._ask()
            if problem is None:
                self._is_due = False
                self._retry.end()
                self._problems.end("policy")
            else:
                self._retry.failed(now)
                self._problems.report("policy", f"unknown: {problem}")
        return self._in_force.policy or self._meanwhile

    def _ask(self) -> str | None:
        """Why it is not known, in words, or None."""
        try:
            read = self._read()
            problem = "no source of the kubelet's configuration"
        except (PolicyError, KubeletError, ApiError) as error:
            read, problem = None, str(error)
        if read is None:
            self._meanwhile = self._in_force.policy or self._published()
            return problem
        kubelet = signature(self._socket)
        if self._in_force.policy is None and (changed := self._changed_since_start(kubelet)):
            published = self._meanwhile = self._published()
            if published is None:
                return (
                    f"the kubelet's configuration was changed at {changed}, after its start; "
                    "restart the kubelet"
                )
            if not says(published, read):
                self._in_force = InForce(policy=published, kubelet=kubelet)
        self._in_force = self._in_force.after(read, kubelet=kubelet)
        if self._in_force.pending is None:
            self._problems.end("kubelet configuration")
        else:
            self._problems.report(
                "kubelet configuration", "changed; it counts when the kubelet has restarted"
            )
        return None

    def _changed_since_start(self, kubelet: Signature | None) -> str | None:
        """When the files changed after the kubelet's start, which made its socket: what it read is
        then not known but from what was published."""
        changed = self._changed()
        if kubelet is None or changed is None or changed <= kubelet.changed_ns / 1e9:
            return None
        return rfc3339(changed)

    def _published(self) -> Policy | None:
        try:
            return self._read_published()
        except ApiError:
            return None


class AskedNode:
    """The own Node as the API server has it: what the kubelet offers of what it binds to no NUMA
    node, and the UID, which another Node of the same name does not have."""

    def __init__(
        self, read: Callable[[], OwnNode | None], *, socket: Path, problems: Problems
    ) -> None:
        """`read` may raise ApiError; None means that nobody can tell. `socket` is made anew at each
        start of the kubelet."""
        self._read = read
        self._socket = socket
        self._problems = problems
        self._is_due = True
        self._retry = Retry(first_s=FIRST_S, longest_s=NODE_LONGEST_S)
        self._last: OwnNode | None = None

    def ask(self) -> None:
        """Lets the next `read` ask: the kubelet has restarted, or it is time."""
        self._is_due = True
        self._retry.end()

    @property
    def again_at(self) -> float | None:
        """When it is worth another `read`, by the clock that `read` was told."""
        return self._retry.at

    def read(self, now: float) -> OwnNode | None:
        """As last read, None before it could be; asks only while it is due."""
        if self._is_due and self._retry.is_due(now):
            try:
                self._last = self._read()
            except ApiError as error:
                self._problems.report("Node", f"status.allocatable is unknown: {error}")
                self._retry.failed(now)
                return self._last
            self._problems.end("Node")
            if self._is_of_former_kubelet():
                self._retry.failed(now)
            else:
                self._is_due = False
                self._retry.end()
        return self._last

    def _is_of_former_kubelet(self) -> bool:
        """Whether the kubelet has not told the API server anything since its start: it takes
        seconds until it does, and up to five minutes where its first report was lost."""
        kubelet = signature(self._socket)
        if self._last is None or self._last.told is None or kubelet is None:
            return False
        return self._last.told < kubelet.changed_ns // 10**9
