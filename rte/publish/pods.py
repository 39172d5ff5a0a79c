"""What the API server says of the pods on this node: phase, QoS class, requests.

One list and one watch of `spec.nodeName=<node>`; only the fields that are needed are decoded and
kept.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from rte.backoff import doubled_s, ordered_s
from rte.follower import Follower, Tell, Wake
from rte.model import PodFacts, PodName
from rte.publish.access import ApiError
from rte.publish.apply import ApiServer

T = TypeVar("T")

WATCH_S = 86400.0  # the server ends the watch then, as it was asked to, and is asked anew
RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 60.0
MIRRORED = "kubernetes.io/config.mirror"  # the UID that the kubelet gave to a static pod
FORBIDDEN_LONGEST_S = 300.0
"""A right that an installation leaves out on purpose; for a moment it is missing too when the API
server has just started, or the role has just been made."""


class PodWatch(Follower):
    """Follows the pods of a node at the API server."""

    def __init__(self, api: ApiServer, node: str, wake: Wake, tell: Tell) -> None:
        super().__init__(wake, tell, thread="pod-watch")
        self._api = api
        self._node = node

    def stop(self) -> None:
        """Returns when the thread has ended; ends the API server's other watches too."""
        self._stopped.set()
        self._api.close()
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                self._follow()
                failures = 0
            except ApiError as error:
                if self._stopped.is_set():
                    return
                failures = 1 if self.problem is None else failures + 1
                if error.status != 410:  # the version is too old: the next list is in order
                    self._lose(str(error))
                self._stopped.wait(retry_s(error, failures, chance=random.random()))

    def _follow(self) -> None:
        """Lists the pods and follows them until a watch cannot be continued. Raises ApiError."""
        items, version = self._api.list_pods(self._node)
        facts = {pod.pod: pod for pod in map(parse_pod, items)}
        while not self._stopped.is_set():
            changes = self._api.watch_pods(self._node, version=version, for_s=WATCH_S)
            for change in changes:
                if self._stopped.is_set():
                    return  # it was too late for `stop` to end this watch
                if change is not None:
                    kind, text = change
                    version = _decoded(text, _Versioned).metadata.resourceVersion
                    if kind != "BOOKMARK":
                        pod = parse_pod(text)
                        facts = {**facts, pod.pod: pod}
                        if kind == "DELETED":
                            del facts[pod.pod]
                self._take(facts)


def retry_s(error: ApiError, failures: int, *, chance: float) -> float:
    """How long to wait after the n-th failure in a row: never as long as all other nodes, whose
    watches an API server ends together."""
    longest_s = {410: RETRY_FIRST_S, 403: FORBIDDEN_LONGEST_S}.get(
        error.status or 0, RETRY_LONGEST_S
    )
    wait_s = doubled_s(RETRY_FIRST_S, longest_s, failures - 1, chance=chance)
    return max(wait_s, ordered_s(error.retry_after_s, chance=chance))


# A pod's JSON, as far as it matters


class _Meta(msgspec.Struct):
    name: str = ""
    namespace: str = "default"
    resourceVersion: str = ""
    uid: str = ""
    annotations: dict[str, str] | None = None


class _Versioned(msgspec.Struct):
    metadata: _Meta


class _Resources(msgspec.Struct):
    requests: dict[str, str | int | float] | None = None


class _Container(msgspec.Struct):
    name: str
    resources: _Resources = msgspec.field(default_factory=_Resources)
    restartPolicy: str | None = None


class _Spec(msgspec.Struct):
    containers: list[_Container]
    initContainers: list[_Container] | None = None


class _PodStatus(msgspec.Struct):
    phase: str = "Pending"
    qosClass: str = "BestEffort"


class _Pod(msgspec.Struct):
    metadata: _Meta
    spec: _Spec
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


def parse_pod(text: bytes) -> PodFacts:
    """A pod's facts from its JSON. Raises ApiError when it is none."""
    pod = _decoded(text, _Pod)
    init = pod.spec.initContainers or ()
    sidecars = [c for c in init if c.restartPolicy == "Always"]
    return PodFacts(
        pod=PodName(namespace=pod.metadata.namespace, name=pod.metadata.name),
        phase=pod.status.phase,
        qos=pod.status.qosClass,
        requests={c.name: _requests(c) for c in (*sidecars, *pod.spec.containers)},
        init_requests={c.name: _requests(c) for c in init if c.restartPolicy != "Always"},
        # The object of a static pod is a mirror with a UID of its own.
        uid=(pod.metadata.annotations or {}).get(MIRRORED, pod.metadata.uid),
    )


def _decoded(text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError("pods of this node", "Malformed", str(error)) from error


def _requests(container: _Container) -> Mapping[str, str]:
    return {name: str(value) for name, value in (container.resources.requests or {}).items()}
