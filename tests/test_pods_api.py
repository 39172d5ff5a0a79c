"""This node's pods, followed through a real kubelet's pods API, and by whom else it is not served.

The kubelet's own server answers, from its own pod and status managers; hostile answers come from a
server of the tests.
"""

import itertools
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from rte.follower import Follower, Tell, Wake
from rte.kubelet import following, pods
from rte.kubelet.api import pod_pb2 as core
from rte.kubelet.api import pods_pb2 as api
from rte.kubelet.api import pods_pb2_grpc as rpc
from rte.kubelet.following import NodePods, Source
from rte.kubelet.pods import ABSENT, RETRY_NOT_SERVED_S, PodsApi, parse_pods, retry_s
from rte.kubelet.usage import COME_BACK_S, KubeletError
from rte.model import PodFacts, PodName
from rte.publish.access import Access
from rte.publish.apply import ApiServer
from rte.publish.fingerprint import InformerMode, fingerprint, pods_by_requests
from rte.publish.pods import MIRRORED, PodWatch
from tests import waiting
from tests.conftest import GoProgram, StartKubelet
from tests.real_apiserver import MERGE, Json
from tests.real_apiserver import ApiServer as RealApiServer
from tests.real_kubelet import Kubelet, pod, short_folder

NUMBERS = itertools.count()
STATIC = {"cpuManagerPolicy": "static"}
SOURCE = "kubernetes.io/config.source"


until = partial(waiting.until, within_s=20)


class Followed:
    """A follower that runs, what it said whenever it called, and what it told."""

    def __init__(self, make: Callable[[Wake, Tell], Follower | NodePods]) -> None:
        self.woken: list[dict[str, str] | None] = []
        self.told: list[str | None] = []
        self.follower = make(self.wake, self.told.append)
        self.follower.start()

    def wake(self) -> None:
        self.woken.append(self.phases())

    def phases(self) -> dict[str, str] | None:
        facts = self.follower.read()
        return None if facts is None else {fact.pod.name: fact.phase for fact in facts}

    def until_phases(self, **phases: str) -> None:
        until(lambda: self.phases() == phases, self.phases)


Follow = Callable[[Path], Followed]


@pytest.fixture
def follow(stack: ExitStack) -> Follow:
    def start(socket: Path) -> Followed:
        followed = Followed(lambda wake, tell: PodsApi(socket, wake, tell))
        stack.callback(followed.follower.stop)
        return followed

    return start


class Both:
    """A node's pods as API server and kubelet have them, which here nobody but the test keeps
    alike."""

    def __init__(self, apiserver: RealApiServer, kubelet: Kubelet) -> None:
        self.apiserver, self.kubelet = apiserver, kubelet
        self.namespace = apiserver.create_namespace()
        apiserver.create_service_account(self.namespace, "default")
        self.node = f"pods-api-{next(NUMBERS)}"
        apiserver.create_node(self.node)

    def client(self) -> ApiServer:
        server = self.apiserver
        return ApiServer(Access(server=server.url, ca_file=server.ca, token=server.token))

    def path(self, name: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{name}"

    def create(self, manifest: Json, **metadata: Any) -> Json:
        """The object, bound to the node; the kubelet has not heard of it."""
        body = {
            "metadata": {"name": manifest["metadata"]["name"], **metadata},
            "spec": {**manifest["spec"], "nodeName": self.node},
        }
        return self.apiserver.create(f"/api/v1/namespaces/{self.namespace}/pods", body)

    def run(self, manifest: Json) -> str:
        """The pod is bound, and the kubelet decides; the phase that it reports."""
        created = self.create(manifest)
        created["metadata"].pop("managedFields")
        del created["spec"]["nodeName"]  # that kubelet has another name
        admitted = self.kubelet.admit(created).admitted
        return self.report(manifest["metadata"]["name"], "Running" if admitted else "Failed")

    def run_static(self, manifest: Json, *, uid: str) -> None:
        """A pod from a file of the kubelet, whose object is a mirror with a UID of its own."""
        name = manifest["metadata"]["name"]
        metadata = {"annotations": {SOURCE: "file"}, "uid": uid, "namespace": self.namespace}
        self.kubelet.admit({**manifest, "metadata": {**metadata, "name": name}})
        self.create(manifest, annotations={MIRRORED: uid, SOURCE: "file"})
        self.report(name, "Running")

    def report(self, name: str, phase: str) -> str:
        status = {"status": {"phase": phase}}
        self.apiserver.ask("PATCH", f"{self.path(name)}/status", status, content_type=MERGE)
        return phase

    def finish(self, name: str) -> None:
        self.kubelet.finish(name, self.namespace)
        self.report(name, "Succeeded")

    def delete(self, name: str, *, forced: bool = False) -> None:
        self.apiserver.ask("DELETE", self.path(name), {"gracePeriodSeconds": 0})
        self.kubelet.remove(name, self.namespace, forced=forced)


@pytest.fixture
def both(apiserver: RealApiServer, kubelet: StartKubelet) -> Both:
    return Both(apiserver, kubelet(STATIC))


def sidecar(name: str, main: Json, beside: Json) -> Json:
    made = pod(name, main, init=[beside])
    made["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    return made


def with_requests(name: str, **requests: str) -> Json:
    """Burstable: there are no limits."""
    made = pod(name, requests)
    del made["spec"]["containers"][0]["resources"]["limits"]
    return made


G = {"cpu": "2", "memory": "1Gi"}
MANY = 250


def test_it_says_what_the_api_server_says(both: Both, follow: Follow, stack: ExitStack) -> None:
    watch = Followed(lambda wake, tell: PodWatch(both.client(), both.node, wake, tell))
    stack.callback(watch.follower.stop)
    ours = follow(both.kubelet.pods_api)
    # QoS and phase of each kind that a scheduler tells apart.
    both.run(pod("whole", G))
    both.run(pod("fraction", {"cpu": "1500m", "memory": "1Gi"}))
    both.run(pod("init", G, init=[{"cpu": "3", "memory": "2Gi"}]))
    both.run(sidecar("beside", G, {"cpu": "1", "memory": "64Mi"}))
    both.run(with_requests("burstable", cpu="2"))
    both.run(pod("nothing", {}))
    assert both.run(pod("rejected", {"cpu": "1000", "memory": "1Gi"})) == "Failed"
    both.run_static(pod("static", {"cpu": "1", "memory": "1Gi"}), uid="of-its-file")
    both.run(pod("done", {"cpu": "1", "memory": "1Gi"}))
    both.finish("done")

    def same() -> bool:
        return ours.follower.read() == watch.follower.read() != ()

    live = ("whole", "fraction", "init", "beside", "burstable", "nothing", "static")
    phases = {**dict.fromkeys(live, "Running"), "rejected": "Failed", "done": "Succeeded"}
    until(lambda: same() and ours.phases() == phases, lambda: (ours.phases(), watch.phases()))
    facts = ours.follower.read()
    assert facts is not None
    assert {fact.uid for fact in facts if fact.pod.name == "static"} == {"of-its-file"}
    for mode in InformerMode:
        counted = pods_by_requests(facts, resources=(), mode=mode)
        theirs = watch.follower.read()
        assert theirs is not None
        assert fingerprint(counted) == fingerprint(
            pods_by_requests(theirs, resources=(), mode=mode)
        )
        assert ("done" in {pod.name for pod in counted}) is (mode is InformerMode.DEDICATED)

    # One that the kubelet has not heard of is Pending, and counts for nobody.
    both.create(pod("bound", G))
    until(lambda: (watch.phases() or {}).get("bound") == "Pending")
    theirs = watch.follower.read()
    assert theirs is not None
    for mode in InformerMode:
        assert pods_by_requests(theirs, resources=(), mode=mode) == pods_by_requests(
            facts, resources=(), mode=mode
        )


def test_a_pod_that_is_evicted_runs_until_its_containers_have_ended(
    both: Both, follow: Follow
) -> None:
    """To the kubelet it has failed already; to the API server, and to its devices, it has not."""
    ours = follow(both.kubelet.pods_api)
    both.run(pod("evicted", G))
    both.run(pod("other", {}))
    ours.until_phases(evicted="Running", other="Running")
    both.kubelet.evict("evicted", both.namespace)
    both.finish("other")  # so that the list has been read again
    ours.until_phases(evicted="Running", other="Succeeded")
    fresh = follow(both.kubelet.pods_api)  # which has not known it before
    fresh.until_phases(evicted="Running", other="Succeeded")
    both.kubelet.finish("evicted", both.namespace, phase="Failed")
    ours.until_phases(evicted="Failed", other="Succeeded")
    fresh.until_phases(evicted="Failed", other="Succeeded")


def test_a_pod_that_ended_stays_until_its_object_goes(both: Both, follow: Follow) -> None:
    ours = follow(both.kubelet.pods_api)
    both.run(pod("job", G))
    ours.until_phases(job="Running")
    both.finish("job")  # to the watch it is DELETED by that
    ours.until_phases(job="Succeeded")
    both.delete("job")  # of which the kubelet says nothing to anybody
    ours.until_phases()
    until(lambda: ours.woken[-1] == {})
    assert ours.woken[-2] == {"job": "Succeeded"}


def test_a_pod_deleted_by_force_goes_though_nobody_tells(
    both: Both, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "LOOK_S", 0.05)
    ours = follow(both.kubelet.pods_api)
    both.run(pod("stays", {}))
    both.run(pod("goes", G))
    ours.until_phases(stays="Running", goes="Running")
    both.delete("goes", forced=True)
    ours.until_phases(stays="Running")


def test_a_restart_of_the_kubelet_is_followed(kubelet: StartKubelet, follow: Follow) -> None:
    node = kubelet(STATIC)
    node.admit(pod("a", G))
    ours = follow(node.pods_api)
    ours.until_phases(a="Running")
    node.restart()
    node.admit(pod("b", {}))
    ours.until_phases(a="Running", b="Running")
    node.kill()  # its socket stays, and nobody answers there
    until(lambda: ours.follower.problem is not None)
    assert ours.phases() == {"a": "Running", "b": "Running"}, "what was known last stands"
    node.start()
    node.finish("b")
    ours.until_phases(a="Running", b="Succeeded")
    until(lambda: ours.told[-1] is None)
    assert ours.follower.problem is None


def test_a_kubelet_that_has_not_heard_of_its_pods_is_waited_for(
    kubelet: StartKubelet, follow: Follow
) -> None:
    node = kubelet(STATIC)
    node.admit(pod("a", G))
    node.hear_of_pods(False)
    ours = follow(node.pods_api)
    until(lambda: ours.follower.problem is not None)
    assert "FAILED_PRECONDITION" in str(ours.follower.problem)
    assert ours.follower.read() is None
    node.hear_of_pods(True)
    ours.until_phases(a="Running")


def test_as_many_pods_as_a_node_may_have_are_followed(
    kubelet: StartKubelet, follow: Follow
) -> None:
    """Their changes come faster than a watch may be behind."""
    node = kubelet({**STATIC, "maxPods": MANY})
    names = [f"p{number}" for number in range(MANY)]

    def all_at_once(op: str, *arguments: Json) -> None:
        for asked in [node.submit(op, **each) for each in arguments]:
            asked.result(60)

    ours = follow(node.pods_api)
    all_at_once("admit", *({"pod": pod(name, {})} for name in names))
    ours.until_phases(**dict.fromkeys(names, "Running"))
    node.restart()
    ours.until_phases(**dict.fromkeys(names, "Running"))
    ended = {"namespace": "default", "phase": "Succeeded"}
    all_at_once("finish", *({"name": name, **ended} for name in names))
    ours.until_phases(**dict.fromkeys(names, "Succeeded"))


def test_after_a_restart_a_static_pod_keeps_its_phase(
    kubelet: StartKubelet, follow: Follow
) -> None:
    """The kubelet has no status of it before it has looked at its containers."""
    node = kubelet(STATIC)
    static = pod("static", G)
    static["metadata"]["annotations"] = {SOURCE: "file"}
    node.admit(static)
    ours = follow(node.pods_api)
    ours.until_phases(static="Running")
    before = ours.follower.read()
    assert before is not None
    unsaid = core.Pod(metadata=core.ObjectMeta(name="static", namespace="default"))
    unsaid.metadata.uid = before[0].uid
    known = {before[0].pod: before[0]}
    (after,) = parse_pods([unsaid.SerializeToString()], known=known).values()
    assert (after.phase, after.qos) == ("Running", "Guaranteed")
    unsaid.metadata.uid = "of another file"
    (after,) = parse_pods([unsaid.SerializeToString()], known=known).values()
    assert after.phase == "Pending"


def test_the_release_before_says_the_same_behind_its_gate(
    go_program: GoProgram, follow: Follow
) -> None:
    with Kubelet(go_program("kubelet136"), {**STATIC, "featureGates": {"PodsAPI": True}}) as node:
        node.admit(pod("a", G))
        ours = follow(node.pods_api)
        ours.until_phases(a="Running")
        node.finish("a")
        ours.until_phases(a="Succeeded")
        node.remove("a")
        ours.until_phases()


# Who follows


class Node:
    """A kubelet, an API server and who follows the pods of them."""

    def __init__(self, both: Both, stack: ExitStack) -> None:
        self.both = both
        self.watches: list[PodWatch] = []
        self.followed = Followed(
            lambda wake, tell: NodePods(
                socket=both.kubelet.pods_api, api_server=self.watch, wake=wake, tell=tell
            )
        )
        stack.callback(self.followed.follower.stop)

    def watch(self, wake: Wake, tell: Tell) -> PodWatch:
        self.watches.append(PodWatch(self.both.client(), self.both.node, wake, tell))
        return self.watches[-1]

    @property
    def pods(self) -> NodePods:
        assert isinstance(self.followed.follower, NodePods)
        return self.followed.follower

    def until_from(self, source: Source, **phases: str) -> None:
        until(
            lambda: self.pods.source is source and self.followed.phases() == phases,
            lambda: (self.pods.source, self.followed.phases(), self.pods.problem),
        )

    @property
    def watching(self) -> int:
        """Threads that follow the pods at the API server."""
        return sum(watch._thread.is_alive() for watch in self.watches)


def test_the_kubelet_is_asked_and_the_api_server_is_not(both: Both, stack: ExitStack) -> None:
    both.run(pod("a", G))
    node = Node(both, stack)
    node.until_from(Source.KUBELET, a="Running")
    assert not node.watches
    assert node.pods.problem is None


def test_where_the_kubelet_has_no_such_api_the_api_server_is_watched(
    both: Both, stack: ExitStack
) -> None:
    gate: Json = {**STATIC, "featureGates": {"PodsAPI": False}}
    both.kubelet.configure(gate)
    both.kubelet.restart()
    both.run(pod("a", G))
    node = Node(both, stack)
    node.until_from(Source.API_SERVER, a="Running")
    assert node.pods.problem is None

    # A newer kubelet takes over, and the watch ends.
    gate["featureGates"]["PodsAPI"] = True
    both.kubelet.configure(gate)
    both.kubelet.restart()
    node.until_from(Source.KUBELET, a="Running")
    assert node.watches
    until(lambda: node.watching == 0)
    both.finish("a")
    node.until_from(Source.KUBELET, a="Succeeded")
    assert not [words for words in node.followed.told if words is not None]


def test_a_kubelet_that_stops_to_serve_it_is_replaced_by_the_api_server(
    both: Both, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RESTART_S", 0.3)
    both.run(pod("a", G))
    node = Node(both, stack)
    node.until_from(Source.KUBELET, a="Running")
    both.kubelet.kill()  # an older one follows, and the socket stays as it is
    both.kubelet.configure({**STATIC, "featureGates": {"PodsAPI": False}})
    both.kubelet.start()
    both.run(pod("b", {}))
    node.until_from(Source.API_SERVER, a="Running", b="Running")
    assert node.pods.problem is None


def test_a_restart_of_the_kubelet_does_not_reach_the_api_server(
    both: Both, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RESTART_S", 600.0)  # whatever else the machine does
    both.run(pod("a", G))
    node = Node(both, stack)
    node.until_from(Source.KUBELET, a="Running")
    both.kubelet.restart()
    both.run(pod("b", {}))
    node.until_from(Source.KUBELET, a="Running", b="Running")
    assert not node.watches
    assert not node.followed.told


def test_a_path_that_no_file_can_have_is_a_problem_and_the_api_server_is_watched(
    both: Both, stack: ExitStack, tmp_path: Path
) -> None:
    made: list[PodWatch] = []

    def watch(wake: Wake, tell: Tell) -> PodWatch:
        made.append(PodWatch(both.client(), both.node, wake, tell))
        return made[-1]

    both.create(pod("a", G))
    socket = tmp_path / ("x" * 300) / "pods-api.sock"
    followed = Followed(
        lambda wake, tell: NodePods(socket=socket, api_server=watch, wake=wake, tell=tell)
    )
    stack.callback(followed.follower.stop)
    followed.until_phases(a="Pending")
    assert made


def test_where_nobody_may_be_asked_nothing_is_known_and_that_is_no_problem(tmp_path: Path) -> None:
    alone = Followed(
        lambda wake, tell: NodePods(
            socket=tmp_path / "none.sock", api_server=None, wake=wake, tell=tell
        )
    )
    pods = alone.follower
    assert isinstance(pods, NodePods)
    until(lambda: pods._kubelet is not None and pods._kubelet.absent)
    assert (pods.read(), pods.source, pods.problem) == (None, None, None)
    pods.stop()
    assert not alone.told


# A kubelet that answers badly


class Bad(rpc.PodsServicer):
    """Answers as the test says."""

    def __init__(self) -> None:
        self.pods: list[bytes] = []
        self.refuse: dict[str, grpc.StatusCode] = {}  # by method
        self.watches = self.lists = 0
        self.ends = threading.Event()  # of the watches

    def WatchPods(
        self, request: api.WatchPodsRequest, context: grpc.ServicerContext
    ) -> Iterator[api.WatchPodsEvent]:
        if "WatchPods" in self.refuse:
            context.abort(self.refuse["WatchPods"], "as the test asked")
        self.watches += 1
        yield api.WatchPodsEvent(type=api.ADDED, pod=b"\xff" * 100)
        yield api.WatchPodsEvent(type=api.INITIAL_SYNC_COMPLETE)
        self.ends.wait()
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "watch client channel closed")

    def ListPods(
        self, request: api.ListPodsRequest, context: grpc.ServicerContext
    ) -> api.ListPodsResponse:
        if "ListPods" in self.refuse:
            context.abort(self.refuse["ListPods"], "as the test asked")
        self.lists += 1
        return api.ListPodsResponse(pods=self.pods)


@contextmanager
def served(servicer: Bad | None, path: Path | None = None) -> Iterator[Path]:
    """The socket of a server; None serves nothing that anybody asks for."""
    folder = short_folder()
    path = path or folder / "pods-api.sock"
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_send_message_length", -1)])
    if servicer is not None:
        rpc.add_PodsServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield path
    finally:
        if servicer is not None:
            servicer.ends.set()
        server.stop(0).wait()
        shutil.rmtree(folder)


def test_who_has_made_the_socket_anew_is_followed_though_the_former_still_answers(
    follow: Follow,
) -> None:
    former, kubelet = Bad(), Bad()
    former.pods = [serialized("a")]
    kubelet.pods = [serialized("a"), serialized("b")]
    with served(former) as path:
        ours = follow(path)
        ours.until_phases(a="Running")
        path.rename(path.with_name("former"))
        with served(kubelet, path):
            ours.until_phases(a="Running", b="Running")
            ours.follower.stop()


def test_a_socket_that_is_taken_away_is_no_end_while_the_kubelet_answers(follow: Follow) -> None:
    kubelet = Bad()
    kubelet.pods = [serialized("a")]
    with served(kubelet) as path:
        ours = follow(path)
        ours.until_phases(a="Running")
        kubelet.pods = [serialized("a", "Failed")]
        path.rename(path.with_name("elsewhere"))
        ours.until_phases(a="Failed")
        assert ours.follower.problem is None
        ours.follower.stop()


def serialized(name: str, phase: str = "Running") -> bytes:
    metadata = core.ObjectMeta(name=name, namespace="default", uid=name)
    made = core.Pod(metadata=metadata, status=core.PodStatus(phase=phase))
    return made.SerializeToString()


BAD_PODS = {
    "no message": b"\xff" * 50,
    "cut short": serialized("a")[:-1],
    "no text": core.Pod(metadata=core.ObjectMeta(name="abc")).SerializeToString()[:-3]
    + b"\xff\xfe\xfd",
}


@pytest.mark.parametrize("text", BAD_PODS.values(), ids=BAD_PODS.keys())
def test_a_pod_that_cannot_be_read_is_said_and_the_rest_stands(text: bytes, follow: Follow) -> None:
    kubelet = Bad()
    kubelet.pods = [serialized("a")]
    with served(kubelet) as path:
        ours = follow(path)
        ours.until_phases(a="Running")
        kubelet.pods = [serialized("b"), text]
        kubelet.ends.set()
        until(lambda: ours.follower.problem is not None)
        until(lambda: "a pod cannot be read" in str(ours.follower.problem))
        assert ours.phases() == {"a": "Running"}
        kubelet.pods = [serialized("a", "Succeeded")]
        kubelet.ends.clear()
        ours.until_phases(a="Succeeded")
        ours.follower.stop()


def test_a_list_that_is_too_large_is_refused(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "ANSWER_S", 0.5)
    kubelet = Bad()
    kubelet.pods = [b"\0" * (17 << 20)]
    with served(kubelet) as path:
        ours = follow(path)
        until(lambda: "RESOURCE_EXHAUSTED" in str(ours.follower.problem))
        assert ours.follower.read() is None
        ours.follower.stop()


def test_a_watch_that_the_kubelet_drops_is_taken_up_again(follow: Follow) -> None:
    """It drops who is 100 changes behind."""
    kubelet = Bad()
    kubelet.pods = [serialized("a")]
    with served(kubelet) as path:
        ours = follow(path)
        ours.until_phases(a="Running")
        kubelet.pods = [serialized("a", "Succeeded")]
        kubelet.ends.set()
        ours.until_phases(a="Succeeded")
        assert kubelet.watches >= 2
        ours.follower.stop()


def test_a_kubelet_that_drops_the_watch_and_goes_on_is_believed_at_once(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does when all pods of a node are deleted at once."""
    monkeypatch.setattr(pods, "COME_BACK_S", 600.0)
    kubelet = Bad()
    kubelet.pods = [serialized(f"p{number}") for number in range(100)]
    with served(kubelet) as path:
        ours = follow(path)
        until(lambda: len(ours.follower.read() or ()) == 100)
        kubelet.pods = [serialized("p0")]
        kubelet.ends.set()
        ours.until_phases(p0="Running")
        ours.follower.stop()


def test_a_kubelet_that_limits_its_callers_is_asked_again(follow: Follow) -> None:
    kubelet = Bad()
    kubelet.pods = [serialized("a")]
    kubelet.refuse = {"ListPods": grpc.StatusCode.RESOURCE_EXHAUSTED}
    with served(kubelet) as path:
        ours = follow(path)
        until(lambda: kubelet.watches == 1)
        kubelet.refuse = {}
        ours.until_phases(a="Running")
        assert not ours.told
        ours.follower.stop()


def test_a_server_without_the_call_is_as_good_as_none(follow: Follow) -> None:
    with served(None) as path:
        ours = follow(path)
        until(lambda: "UNIMPLEMENTED" in str(ours.follower.problem))
        assert isinstance(ours.follower, PodsApi)
        assert ours.follower.absent
        ours.follower.stop()


def test_who_listens_there_and_speaks_another_language_is_a_problem(
    tmp_path: Path, follow: Follow
) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(20)
        ours = follow(path)
        connection, _ = listening.accept()
        connection.sendall(os.urandom(1000))
        connection.close()
        until(lambda: ours.follower.problem is not None)
        assert ours.follower.read() is None
        ours.follower.stop()


# Kubelets up to 1.36 answer before they have heard of their pods.


Facts = Mapping[PodName, PodFacts]


def listed(*names: str, phase: str = "Running") -> Facts:
    return parse_pods([serialized(name, phase) for name in names], known={})


FIRST_LISTS: dict[str, tuple[Iterable[str], Iterable[str], bool]] = {
    "nothing, though our own pod is there": ((), (), False),
    "at the first start there is nothing to compare with": ((), ("a",), True),
    "all that ran": (("a", "b"), ("a", "b", "c"), True),
    "one is not back": (("a", "b"), ("a",), False),
}


@pytest.mark.parametrize(
    ("before", "now", "believed"), FIRST_LISTS.values(), ids=FIRST_LISTS.keys()
)
def test_the_first_list_of_a_kubelet_is_believed_when_all_are_back(
    before: Iterable[str], now: Iterable[str], believed: bool
) -> None:
    assert pods.all_back(listed(*now), listed(*before)) is believed
    assert pods.all_back(listed(*now), listed(*before, phase="Failed")) is bool(tuple(now))


def test_a_list_without_what_ran_is_asked_again_until_it_is_there(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "COME_BACK_LOOK_S", 0.01)
    monkeypatch.setattr(pods, "COME_BACK_S", 600.0)
    kubelet = Bad()
    kubelet.pods = [serialized("a"), serialized("b")]
    with served(kubelet) as path:
        ours = follow(path)
        ours.until_phases(a="Running", b="Running")
        kubelet.pods = [serialized("a")]
        path.chmod(0o700)  # as one that is made anew has another time
        kubelet.ends.set()
        until(lambda: kubelet.watches >= 2)
        kubelet.ends.clear()
        lists = kubelet.lists
        until(lambda: kubelet.lists > lists + 1)
        assert ours.follower.problem is not None
        kubelet.pods = [serialized("a"), serialized("b"), serialized("c")]
        ours.until_phases(a="Running", b="Running", c="Running")
        until(lambda: len(ours.woken[-1] or ()) == 3)
        assert ours.woken[-2] == {"a": "Running", "b": "Running"}
        monkeypatch.setattr(pods, "COME_BACK_S", 0.0)
        kubelet.pods = [serialized("a")]
        kubelet.ends.set()
        ours.until_phases(a="Running")
        ours.follower.stop()


def test_a_kubelet_that_has_been_there_for_long_is_believed_at_once(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that it has no pod at all, which nothing else tells from one that has just started."""
    later = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + 2 * COME_BACK_S)
    monkeypatch.setattr(pods, "COME_BACK_LOOK_S", 600.0)
    monkeypatch.setattr(pods, "time", later)
    with served(Bad()) as path:
        ours = follow(path)
        ours.until_phases()
        ours.follower.stop()


def test_a_kubelet_that_has_said_that_it_is_initializing_is_believed_at_once(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its pods was deleted while it was away."""
    monkeypatch.setattr(pods, "COME_BACK_S", 60.0)
    kubelet = Bad()
    kubelet.pods = [serialized("a"), serialized("b")]
    with served(kubelet) as path:
        ours = follow(path)
        ours.until_phases(a="Running", b="Running")
        kubelet.refuse = {"WatchPods": grpc.StatusCode.FAILED_PRECONDITION}
        kubelet.pods = [serialized("a")]
        path.chmod(0o700)  # as one that is made anew has another time
        kubelet.ends.set()
        until(lambda: "FAILED_PRECONDITION" in str(ours.follower.problem))
        kubelet.ends.clear()
        kubelet.refuse = {}
        ours.until_phases(a="Running")
        ours.follower.stop()


RETRIES = [
    (grpc.StatusCode.UNAVAILABLE, 1, 0.25),
    (grpc.StatusCode.UNAVAILABLE, 3, 1.0),
    (grpc.StatusCode.FAILED_PRECONDITION, 100, 5.0),
    *((code, 1, RETRY_NOT_SERVED_S) for code in sorted(ABSENT, key=str)),
    (None, 1, 0.25),
]


@pytest.mark.parametrize(("code", "failures", "wait_s"), RETRIES)
def test_when_the_kubelet_is_asked_again(
    code: grpc.StatusCode | None, failures: int, wait_s: float
) -> None:
    assert retry_s(code, failures) == wait_s


RUNS = core.ContainerStatus(state=core.ContainerState(running=core.ContainerStateRunning()))
WAITS = core.ContainerStatus(state=core.ContainerState())
PAUSES = {
    "a pod has ended": (0.0, 0.1),
    "it is still there": (0.4, 0.4),
    "and after long": (100.0, 10.0),
    "none is there": (None, 60.0),
}


@pytest.mark.parametrize(("ended_for_s", "pause_s"), PAUSES.values(), ids=PAUSES.keys())
def test_how_often_the_kubelet_is_asked_though_it_tells_nothing(
    ended_for_s: float | None, pause_s: float
) -> None:
    assert pods.look_pause_s(ended_for_s) == pause_s


EVICTED = {
    "its containers run": (core.PodStatus(containerStatuses=[RUNS]), "Running"),
    "it is being initialized": (
        core.PodStatus(initContainerStatuses=[RUNS], containerStatuses=[WAITS]),
        "Pending",
    ),
    "its sidecar and its containers run": (
        core.PodStatus(initContainerStatuses=[RUNS], containerStatuses=[RUNS]),
        "Running",
    ),
    "all have ended": (core.PodStatus(containerStatuses=[WAITS]), "Failed"),
}


@pytest.mark.parametrize(("status", "phase"), EVICTED.values(), ids=EVICTED.keys())
def test_a_pod_that_was_evicted_before_we_came_has_the_phase_of_its_containers(
    status: core.PodStatus, phase: str
) -> None:
    status.phase = "Failed"
    metadata = core.ObjectMeta(name="a", namespace="default", uid="a")
    text = core.Pod(metadata=metadata, status=status).SerializeToString()
    assert [pod.phase for pod in parse_pods([text], known={}).values()] == [phase]


@pytest.mark.parametrize(
    ("before", "status", "phase"),
    [
        ("Pending", core.PodStatus(containerStatuses=[RUNS]), "Running"),
        ("Running", core.PodStatus(initContainerStatuses=[RUNS]), "Running"),
        ("Pending", core.PodStatus(initContainerStatuses=[RUNS]), "Pending"),
    ],
    ids=["it has just started", "its sidecar runs on", "it is being initialized"],
)
def test_a_pod_that_is_evicted_has_the_phase_that_it_had_at_last(
    before: str, status: core.PodStatus, phase: str
) -> None:
    """Between two lists it may have started and be evicted."""
    status.phase = "Failed"
    metadata = core.ObjectMeta(name="a", namespace="default", uid="a")
    text = core.Pod(metadata=metadata, status=status).SerializeToString()
    known = listed("a", phase=before)
    assert [pod.phase for pod in parse_pods([text], known=known).values()] == [phase]


def test_of_two_pods_of_one_name_the_one_that_runs_counts() -> None:
    old, new = serialized("a", "Failed"), serialized("a")
    for texts in ([old, new], [new, old]):
        assert [pod.phase for pod in parse_pods(texts, known={}).values()] == ["Running"]


def test_what_is_no_pod_is_an_error() -> None:
    with pytest.raises(KubeletError):
        parse_pods([b"\xff"], known={})
