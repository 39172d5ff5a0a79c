"""This node's pods, followed through a real API server."""

import itertools
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from rte.model import PodFacts, PodName
from rte.publish.access import Access, ApiError
from rte.publish.apply import ApiServer
from rte.publish.pods import FORBIDDEN_LONGEST_S, PodWatch, parse_pod, retry_s
from tests.http_faults import Fault, FaultyProxy
from tests.real_apiserver import MERGE
from tests.real_apiserver import ApiServer as RealApiServer
from tests.waiting import until

NUMBERS = itertools.count()


@pytest.fixture
def namespace(apiserver: RealApiServer) -> str:
    name = apiserver.create_namespace()
    apiserver.create_service_account(name, "default")
    return name


@pytest.fixture
def node(apiserver: RealApiServer) -> str:
    name = f"pods-{next(NUMBERS)}"
    apiserver.create_node(name)
    return name


class Followed:
    """A running watch, and what it said whenever it called."""

    def __init__(self, api: ApiServer, node: str) -> None:
        self.woken: list[dict[str, str]] = []  # name → phase
        self.told: list[str | None] = []
        self.watch = PodWatch(api, node, self.wake, self.told.append)
        self.watch.start()

    def wake(self) -> None:
        self.woken.append({fact.pod.name: fact.phase for fact in self.watch.read() or ()})

    def until(self, holds: Callable[[tuple[PodFacts, ...] | None], bool]) -> None:
        until(lambda: holds(self.watch.read()), self.watch.read)


@pytest.fixture
def followed(apiserver: RealApiServer, node: str) -> Iterator[Followed]:
    api = ApiServer(Access(server=apiserver.url, ca_file=apiserver.ca, token=apiserver.token))
    followed = Followed(api, node)
    yield followed
    followed.watch.stop()


def names(facts: tuple[PodFacts, ...] | None) -> list[str]:
    return [fact.pod.name for fact in facts or ()]


def test_pods_of_this_node_come_change_and_go(
    apiserver: RealApiServer, namespace: str, node: str, followed: Followed
) -> None:
    followed.until(lambda facts: facts == ())
    apiserver.create_pod(namespace, "elsewhere", service_account="default", node="other")
    apiserver.create_pod(namespace, "here", service_account="default", node=node)
    followed.until(lambda facts: names(facts) == ["here"])
    path = f"/api/v1/namespaces/{namespace}/pods/here"
    apiserver.ask("PATCH", f"{path}/status", {"status": {"phase": "Running"}}, content_type=MERGE)
    followed.until(lambda facts: facts is not None and facts[0].phase == "Running")
    annotation = {"metadata": {"annotations": {"a": "b"}}}
    apiserver.ask("PATCH", path, annotation, content_type=MERGE)
    apiserver.request("DELETE", path, {"gracePeriodSeconds": 0})
    until(lambda: followed.woken[1:] and followed.woken[-1] == {})
    changes = [{}, {"here": "Pending"}, {"here": "Running"}, {}]
    assert followed.woken == changes, "what does not matter wakes nobody"


def test_more_pods_than_a_page_are_all_listed(
    apiserver: RealApiServer, namespace: str, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rte.publish.apply.PODS_A_PAGE", 2)
    for number in range(5):
        apiserver.create_pod(namespace, f"p{number}", service_account="default", node=node)
    api = ApiServer(Access(server=apiserver.url, ca_file=apiserver.ca, token=apiserver.token))
    pods, version = api.list_pods(node)
    api.close()
    assert sorted(parse_pod(pod).pod.name for pod in pods) == [f"p{n}" for n in range(5)]
    assert version.isdecimal()


def test_without_the_right_nothing_is_known_and_it_is_said_once(
    apiserver: RealApiServer, namespace: str, node: str
) -> None:
    token = apiserver.create_token(namespace, "default")
    api = ApiServer(Access(server=apiserver.url, ca_file=apiserver.ca, token=token))
    followed = Followed(api, node)
    until(lambda: followed.watch.problem is not None)
    assert followed.watch.read() is None
    assert "Forbidden" in str(followed.watch.problem)
    followed.watch.stop()
    assert followed.told == [followed.watch.problem]


def test_a_right_that_comes_late_is_noticed(
    apiserver: RealApiServer, namespace: str, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment an API server that has just started refuses what is allowed."""
    monkeypatch.setattr("rte.publish.pods.RETRY_FIRST_S", 0.05)
    token = apiserver.create_token(namespace, "default")
    api = ApiServer(Access(server=apiserver.url, ca_file=apiserver.ca, token=token))
    followed = Followed(api, node)
    until(lambda: followed.watch.problem is not None)
    apiserver.grant(
        namespace,
        "default",
        [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}],
    )
    followed.until(lambda facts: facts == () and followed.watch.problem is None)
    followed.watch.stop()


def test_a_list_that_fails_once_is_asked_again(
    apiserver: RealApiServer, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rte.publish.pods.RETRY_FIRST_S", 0.01)
    with FaultyProxy(apiserver) as proxy:
        proxy.faults = [Fault(500), Fault(200, body=b'{"metadata":{},"items":3}'), Fault(503)]
        followed = Followed(
            ApiServer(Access(server=proxy.url, token=apiserver.token), timeout_s=2), node
        )
        followed.until(lambda facts: facts == () and followed.watch.problem is None)
        until(lambda: followed.told[-1] is None)
        assert not proxy.faults
        proxy.hang_ends.set()
        followed.watch.stop()


def test_a_quiet_watch_outlives_the_time_out_of_a_request(
    apiserver: RealApiServer, namespace: str, node: str
) -> None:
    access = Access(server=apiserver.url, ca_file=apiserver.ca, token=apiserver.token)
    api = ApiServer(access, timeout_s=1)
    _, version = api.list_pods(node)
    events = api.watch_pods(node, version=version, for_s=30)
    assert next(events) is None
    create = [namespace, "late"]
    later = threading.Timer(
        2, apiserver.create_pod, create, {"service_account": "default", "node": node}
    )
    later.start()
    event = next(events)
    assert event is not None
    assert (event[0], parse_pod(event[1]).pod.name) == ("ADDED", "late")
    later.join()
    events.close()  # type: ignore[attr-defined]
    api.close()


class LateServer:
    """An API server without pods that answers a watch when it is told to, and then says nothing."""

    def __init__(self) -> None:
        self.asked, self.go, self.ends = (threading.Event() for _ in range(3))
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.ends.set()
        self.http.shutdown()
        self.http.server_close()

    def handler(late) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if "watch=true" in self.path:
                    late.asked.set()
                    late.go.wait(20)
                    self.answer(("Transfer-Encoding", "chunked"), b"")
                    late.ends.wait(60)
                else:
                    nothing = b'{"metadata":{"resourceVersion":"1"},"items":[]}'
                    self.answer(("Content-Length", str(len(nothing))), nothing)

            def answer(self, length: tuple[str, str], body: bytes) -> None:
                self.send_response(200)
                self.send_header(*length)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def test_a_watch_that_begins_while_it_is_stopped_ends() -> None:
    server = LateServer()
    followed = Followed(ApiServer(Access(server=server.url, token="t")), "n")
    try:
        assert server.asked.wait(20)
        stopping = threading.Thread(target=followed.watch.stop, daemon=True)
        stopping.start()
        assert followed.watch._stopped.wait(20)
        stopping.join(0.1)  # the connections are closed, and this one is not among them yet
        server.go.set()
        stopping.join(20)
        assert not stopping.is_alive()
    finally:
        server.close()


RETRIES = {
    "at first": (ApiError("x", "Unreachable", ""), 1, 1),
    "doubled": (ApiError("x", "Unreachable", ""), 4, 8),
    "at the most": (ApiError("x", "Unreachable", ""), 100, 60),
    "as the server says": (ApiError("x", "TooMany", "", status=429, retry_after_s=30), 1, 30),
    "a right that may come": (ApiError("x", "Forbidden", "", status=403), 1, 1),
    "a missing right": (ApiError("x", "Forbidden", "", status=403), 100, FORBIDDEN_LONGEST_S),
}


@pytest.mark.parametrize(("error", "failures", "wait_s"), RETRIES.values(), ids=RETRIES.keys())
def test_when_the_list_is_asked_again(error: ApiError, failures: int, wait_s: float) -> None:
    assert retry_s(error, failures, chance=0) == wait_s
    assert retry_s(error, failures, chance=0.5) in (wait_s * 0.75, wait_s * 1.25)


def pod(**spec: Any) -> bytes:
    return msgspec.json.encode(
        {
            "metadata": {"name": "p", "namespace": "n"},
            "spec": spec,
            "status": {"phase": "Running", "qosClass": "Guaranteed"},
        }
    )


def test_requests_are_those_of_containers_and_sidecars() -> None:
    text = pod(
        initContainers=[
            {"name": "once", "resources": {"requests": {"cpu": "9"}}},
            {
                "name": "sidecar",
                "restartPolicy": "Always",
                "resources": {"requests": {"cpu": "100m"}},
            },
        ],
        containers=[{"name": "main", "resources": {"requests": {"cpu": 2}}}, {"name": "idle"}],
    )
    assert parse_pod(text) == PodFacts(
        pod=PodName(namespace="n", name="p"),
        phase="Running",
        qos="Guaranteed",
        requests={"sidecar": {"cpu": "100m"}, "main": {"cpu": "2"}, "idle": {}},
        init_requests={"once": {"cpu": "9"}},
    )


@pytest.mark.parametrize("text", [b"", b"[]", b'{"metadata":{},"spec":{"containers":1}}'])
def test_what_is_no_pod_is_an_error(text: bytes) -> None:
    with pytest.raises(ApiError):
        parse_pod(text)
