"""GPUs that turned sick or well, as Events of the Node: bodies (pure), and a thread that sends."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from rte.model import Fault, FaultClass, Faults, Machine
from rte.publish.access import ApiError

log = logging.getLogger(__name__)

NAMESPACE = "default"  # of Events about objects that have no namespace
COMPONENT = "rte"
MOST_WAITING = 64
MOST_WORDS = 1000  # the API server takes 1 024 bytes
# A node whose sixteen GPUs all turn sick at once gets through; one that flaps does not fill etcd.
BURST, A_MINUTE = 32, 6
WARNED_AGAIN_S = 600.0


class Change(Protocol):
    """hardware.Snapshot, as far as Events are made of it."""

    @property
    def machine(self) -> Machine: ...
    @property
    def faults(self) -> Faults: ...


def events(before: Faults, seen: Change, *, node: str) -> Iterator[dict[str, Any]]:
    """An Event for each fault that began or ended, without name and times."""
    for gpu in seen.machine.gpus:
        was = {fault.reason: fault for fault in told(before.get(gpu.pci, ()))}
        now = {fault.reason: fault for fault in told(seen.faults.get(gpu.pci, ()))}
        who = f"{gpu.name} ({gpu.pci}{f', {gpu.uuid}' if gpu.uuid else ''})"
        for reason in sorted(now.keys() - was.keys()):
            fault = now[reason]
            withheld = fault.severity is FaultClass.WITHHOLD
            what = "gets no new work" if withheld else "is degraded"
            yield event(
                node,
                kind="Warning",
                reason="GPUUnhealthy" if withheld else "GPUDegraded",
                words=f"{who} {what}: {reason}: {fault.detail}",
            )
        for reason in sorted(was.keys() - now.keys()):
            yield event(
                node, kind="Normal", reason="GPURecovered", words=f"{who} no longer {reason}"
            )


def told(found: tuple[Fault, ...]) -> Iterator[Fault]:
    return (fault for fault in found if fault.severity is not FaultClass.INFO)


def event(node: str, *, kind: str, reason: str, words: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        # kubelets give the Node's name as its UID, and `kubectl describe node` looks for that too.
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "type": kind,
        "reason": reason,
        "message": words[:MOST_WORDS],
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "action": "HealthChanged",
        "count": 1,
    }


class Announcer:
    """Sends Events in a thread of its own; an API server that is away loses them, and nothing
    else waits for it. `tell` is called with each snapshot, in order."""

    def __init__(
        self,
        create: Callable[[Mapping[str, Any]], object],
        *,
        node: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`create` creates one Event in the namespace `default`; it may raise ApiError."""
        self.lost = 0  # not sent: too many, or refused
        self._create = create
        self._node = node
        self._clock = clock
        self._before: Faults = {}
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._budget, self._filled_at = float(BURST), clock()
        self._warned: tuple[str, float] | None = None
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the Event that is being sent has been answered."""
        while True:
            try:
                self._waiting.put_nowait(None)
                break
            except queue.Full:
                self._waiting.get_nowait()
        self._thread.join()

    def tell(self, seen: Change) -> None:
        """Takes a snapshot; returns at once."""
        for body in events(self._before, seen, node=self._node):
            now = datetime.now(UTC)
            stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
            name = f"{self._node}.{time.time_ns():x}"
            body |= {
                "metadata": {"name": name, "namespace": NAMESPACE},
                "firstTimestamp": stamp,
                "lastTimestamp": stamp,
                "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            }
            if not self._may_send():
                continue
            try:
                self._waiting.put_nowait(body)
            except queue.Full:
                self.lost += 1
        self._before = seen.faults

    def _may_send(self) -> bool:
        now = self._clock()
        self._budget = min(BURST, self._budget + (now - self._filled_at) * A_MINUTE / 60)
        self._filled_at = now
        if self._budget < 1:
            self.lost += 1
            return False
        self._budget -= 1
        return True

    def _run(self) -> None:
        while (body := self._waiting.get()) is not None:
            try:
                self._create(body)
            except ApiError as error:
                self.lost += 1
                self._warn(str(error))

    def _warn(self, words: str) -> None:
        now = self._clock()
        if (
            self._warned is None
            or self._warned[0] != words
            or (now - self._warned[1] >= WARNED_AGAIN_S)
        ):
            log.warning("an Event about a GPU is lost: %s", words)
            self._warned = (words, now)
