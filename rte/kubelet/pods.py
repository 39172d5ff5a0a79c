"""What the kubelet's pods API says of the pods on this node: phase, QoS class, requests.

Kubelets have that API from 1.37 on, and in 1.36 behind the feature gate PodsAPI. Its watch tells
when to ask; what is so is in its list:

* a pod is DELETED to the watch when its last container has ended, though its object may stay long,
* that an object goes is told by nobody, nor that it went by force while its containers still run,
* the watch has a pod's spec as the kubelet has granted it, the list as the API server has it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from rte.backoff import doubled_s
from rte.follower import FORGET_S, Follower, Tell, Wake
from rte.kubelet.api import pod_pb2 as core
from rte.kubelet.api import pods_pb2 as api
from rte.kubelet.api import pods_pb2_grpc as rpc
from rte.kubelet.ended import ENDED
from rte.kubelet.usage import COME_BACK_S, KubeletError, ask, channel
from rte.kubelet.watch import Signature, signature, watch
from rte.model import PodFacts, PodName

log = logging.getLogger(__name__)

ANSWER_S = 5.0
LOOK_S = 60.0
"""The list is asked for so often though nothing is told."""
LOOK_FIRST_S, LOOK_LAST_S = 0.1, 10.0
"""While there are pods that have ended: the object of one often goes at once, so the list is asked
for that soon, then after as long as the last of them has ended, up to the last."""
BETWEEN_S = 0.05
"""Between two lists: a pod that starts is told of five times."""
COME_BACK_LOOK_S = 1.0
ONE_THREAD = ("SingleThreadedUnaryStream", 1)
"""Of gRPC's: a watch that says nothing otherwise wakes two threads, for 4 s of CPU an hour."""
RETRY_FIRST_S = 0.25
RETRY_LONGEST_S = 5.0
RETRY_NOT_SERVED_S = 300.0
"""A kubelet without the API will not have it before it is another one, with another socket."""

ABSENT = frozenset({grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED})

# What is asked, as KubeletError names it.
LIST = "pods API ListPods"
WATCH = "pods API WatchPods"


class PodsApi(Follower):
    """Follows the pods of a node at its kubelet."""

    def __init__(self, socket: Path, wake: Wake, tell: Tell) -> None:
        super().__init__(wake, tell, thread="pods-api")
        self.absent = False  # the problem is that the kubelet has no such API
        self._socket = socket
        self._made_anew = False  # the socket, since it was last tried
        self._awaited: Signature | None = None  # the socket of a kubelet that was initializing
        self._heard: Signature | None = None  # and of one whose list was believed
        self._channel: grpc.Channel | None = None

    def start(self) -> None:
        self._files = watch([self._socket], lambda _: self._anew())
        super().start()

    def stop(self) -> None:
        self._files.close()
        with self._condition:
            self._stopped.set()
            self._condition.notify_all()
            if self._channel is not None:
                self._channel.close()
        self._thread.join()

    def _anew(self) -> None:
        with self._condition:
            self._made_anew = True
            self._condition.notify_all()

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            with self._condition:
                self._made_anew = False
            try:
                self._follow()
            except KubeletError as error:
                if error.code is grpc.StatusCode.FAILED_PRECONDITION:
                    self._awaited = signature(self._socket)
                failures = 1 if self.lost_s is None else failures + 1
                wait_s = retry_s(error.code, failures)
                if not self._stopped.is_set():
                    self.absent = error.code in ABSENT
                    self._lose(str(error))
            except ValueError:
                if not self._stopped.is_set():
                    raise
                return  # `stop` has closed the channel before a call
            else:
                return
            with self._condition:
                if self._condition.wait_for(
                    lambda: self._stopped.is_set() or self._made_anew, wait_s
                ):
                    failures = 0

    def _follow(self) -> None:
        """Follows the pods until that fails, which raises KubeletError, or until `stop`."""
        served = signature(self._socket)
        if served is None:
            raise KubeletError(WATCH, f"there is no {self._socket}", grpc.StatusCode.NOT_FOUND)
        with channel(self._socket, ONE_THREAD) as opened:
            with self._condition:
                self._channel = opened
            kubelet = rpc.PodsStub(opened)
            told = Told(kubelet.WatchPods(api.WatchPodsRequest()), self._condition)
            try:
                self._await_all(told)
                self._ask_again_and_again(kubelet, told, served)
            finally:
                told.end()

    def _await_all(self, told: Told) -> None:
        """Returns when the kubelet is through with what there is: later changes are told."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._stopped.is_set() or told.all or told.error is not None, ANSWER_S
            )
        if told.error is not None:
            raise told.error
        if not told.all:
            raise KubeletError(WATCH, f"not through with the pods after {ANSWER_S:g} s")

    def _ask_again_and_again(self, kubelet: rpc.PodsStub, told: Told, served: Signature) -> None:
        """`served` is the socket of the kubelet that is watched."""
        began = last_end = time.monotonic()
        # It answers when it has heard of all, or has been there for long, or was believed before:
        # it ends the watch of who is too slow for it, a drained node's say.
        settled = served in (self._awaited, self._heard) or age_s(served) >= COME_BACK_S
        while not self._stopped.is_set():
            asked_at = time.monotonic()
            with self._condition:
                told.news = self._made_anew = False
            answer = ask(LIST, kubelet.ListPods, api.ListPodsRequest(), ANSWER_S)
            if signature(self._socket) not in (None, served):
                # Another kubelet than the watched one may have answered, whose first list may
                # lack pods.
                raise KubeletError(LIST, "the socket was made anew")
            known = self._known()
            facts = parse_pods(answer.pods, known=known)
            settled = settled or all_back(facts, known) or asked_at - began >= COME_BACK_S
            if settled:
                self._heard = served
                ended = ended_uids(facts)
                if ended - ended_uids(known):
                    last_end = asked_at
                pause_s = look_pause_s(asked_at - last_end if ended else None)
                self._take(facts)
            else:
                pause_s = COME_BACK_LOOK_S
            with self._condition:
                self._condition.wait_for(
                    lambda: (
                        self._stopped.is_set()
                        or told.news
                        or told.error is not None
                        or self._made_anew
                    ),
                    pause_s,
                )
                over_s = asked_at + BETWEEN_S - time.monotonic()
                self._condition.wait_for(
                    lambda: self._stopped.is_set() or told.error is not None, max(over_s, 0)
                )
            if told.error is not None:
                raise told.error

    def _known(self) -> Mapping[PodName, PodFacts]:
        """What was last followed, unless it is too long ago to say anything."""
        lost_s = self.lost_s
        return self._facts or {} if lost_s is None or lost_s < FORGET_S else {}


class Told:
    """A watch and the thread that reads it. What a pod is it does not tell, only that something
    has changed."""

    def __init__(self, call: Iterator[api.WatchPodsEvent], condition: threading.Condition) -> None:
        self.all = False  # what there was when the watch began has been told
        self.news = False  # something has changed; whoever asks for the list takes it away
        self.error: KubeletError | None = None  # the watch has ended
        self._call = call
        self._condition = condition
        self._thread = threading.Thread(target=self._read, name="pods-api-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._call.cancel()  # type: ignore[attr-defined]
        self._thread.join()

    def _read(self) -> None:
        error = KubeletError(WATCH, "the kubelet has ended it")
        try:
            for event in self._call:
                with self._condition:
                    self.all = self.all or event.type == api.INITIAL_SYNC_COMPLETE
                    self.news = True
                    if self.all:
                        self._condition.notify_all()
        except grpc.RpcError as failed:
            code = failed.code()
            error = KubeletError(WATCH, f"{code.name}: {failed.details()}", code)
        with self._condition:
            self.error = error
            self._condition.notify_all()


def retry_s(code: grpc.StatusCode | None, failures: int) -> float:
    """How long to wait after the n-th failure in a row, if the socket is not made anew before."""
    if code in ABSENT:
        return RETRY_NOT_SERVED_S
    return doubled_s(RETRY_FIRST_S, RETRY_LONGEST_S, failures - 1)


def all_back(facts: Mapping[PodName, PodFacts], known: Mapping[PodName, PodFacts]) -> bool:
    """Whether a kubelet's first list can be all: it has the pods that ran before, and ours."""
    live = {pod.uid for pod in known.values() if pod.phase not in ENDED}
    return bool(facts) and live <= {pod.uid for pod in facts.values()}


def age_s(served: Signature) -> float:
    """How long ago a socket was made, by the clock of this node."""
    return time.time() - served.changed_ns / 1e9


def ended_uids(facts: Mapping[PodName, PodFacts]) -> set[str]:
    return {pod.uid for pod in facts.values() if pod.phase in ENDED}


def look_pause_s(ended_for_s: float | None) -> float:
    """When to ask again if nothing is told. Since a pod has ended so long ago, the last of those
    that are still there; None where there is none."""
    return LOOK_S if ended_for_s is None else min(max(ended_for_s, LOOK_FIRST_S), LOOK_LAST_S)


# A serialized Pod, as far as it matters


def parse_pods(
    texts: Iterable[bytes], *, known: Mapping[PodName, PodFacts]
) -> Mapping[PodName, PodFacts]:
    """The facts of serialized pods, after what was `known` of them. Raises KubeletError where one
    is none."""
    found: dict[PodName, PodFacts] = {}
    for text in texts:
        try:
            pod = core.Pod.FromString(text)
        except DecodeError as error:
            raise KubeletError(LIST, f"a pod cannot be read: {error}") from error
        facts = parse_pod(pod)
        before = known.get(facts.pod)
        if before is not None and before.uid != facts.uid:
            before = None
        facts = with_public_phase(facts, pod.status, before)
        other = found.get(facts.pod)  # one that is being replaced has the same name
        if other is None or other.phase in ENDED:
            found[facts.pod] = facts
    return found


def with_public_phase(facts: PodFacts, status: core.PodStatus, before: PodFacts | None) -> PodFacts:
    """The pod with the phase that the API server has, in the two places where the kubelet says
    another one.

    After its restart it has no status of a static pod before it has looked at its containers. And
    it calls a pod that it evicts, or that is past its deadline, failed at once; to the API server
    when the last container has ended.
    """
    if facts.phase == "Pending" and not status.HasField("startTime"):
        return facts if before is None else replace(facts, phase=before.phase, qos=before.qos)
    if facts.phase in ENDED and (phase := running_phase(status)) is not None:
        if phase == "Pending" and before is not None and before.phase not in ENDED:
            phase = before.phase  # its sidecars run on
        return replace(facts, phase=phase)
    return facts


def running_phase(status: core.PodStatus) -> str | None:
    """The phase of a pod that its containers tell while some run, or None: it is Pending while
    those are of its initialisation."""
    if any(container.state.HasField("running") for container in status.containerStatuses):
        return "Running"
    if any(container.state.HasField("running") for container in status.initContainerStatuses):
        return "Pending"
    return None


def parse_pod(pod: core.Pod) -> PodFacts:
    """A pod's facts. A static pod's UID is the kubelet's own, its name that of its mirror."""
    init = pod.spec.initContainers
    sidecars = [c for c in init if c.restartPolicy == "Always"]
    return PodFacts(
        pod=PodName(namespace=pod.metadata.namespace, name=pod.metadata.name),
        phase=pod.status.phase or "Pending",
        qos=pod.status.qosClass or "BestEffort",
        requests={c.name: _requests(c) for c in (*sidecars, *pod.spec.containers)},
        init_requests={c.name: _requests(c) for c in init if c.restartPolicy != "Always"},
        uid=pod.metadata.uid,
    )


def _requests(container: core.Container) -> Mapping[str, str]:
    return {name: quantity.string for name, quantity in container.resources.requests.items()}
