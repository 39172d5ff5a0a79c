"""What the publisher writes, against a real API server: created, applied, patched, or nothing."""

import base64
import contextlib
import copy
import email.utils
import itertools
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from rte.commands import parts
from rte.config import Config
from rte.publish.access import Access, ApiError, in_cluster, read_kubeconfig
from rte.publish.apply import MOST_WAIT_S, ApiServer, retry_after_s
from rte.publish.patch import changes
from rte.publish.publisher import (
    REPORTED_S,
    SELDOM,
    ApiSink,
    FolderSink,
    Outcome,
    Publication,
    Wrote,
    last_foreign_writer,
    published_policy,
)
from tests.http_faults import Fault, FaultyProxy
from tests.ports import free_port
from tests.real_apiserver import APPLY, MERGE
from tests.real_apiserver import ApiServer as RealApiServer
from tests.stopwatch import Stopwatch
from tests.waiting import until

CRD = Path(__file__).parents[1] / "crds" / "noderesourcetopology" / "crd.yaml"
PATH = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/"

Json = dict[str, Any]


def nrt(name: str, *, available: int = 4, zones: int = 2) -> Json:
    def zone(number: int) -> Json:
        figures = {"capacity": "4", "allocatable": "4", "available": str(available)}
        return {
            "name": f"node-{number}",
            "type": "Node",
            "costs": [{"name": f"node-{n}", "value": 10 if n == number else 21} for n in range(2)],
            "resources": [{"name": "nvidia.com/gpu", **figures}],
        }

    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "rte"}},
        "attributes": [
            {"name": "nodeTopologyPodsFingerprint", "value": f"pfp0v001{available:016x}"},
            {"name": "topologyManagerPolicy", "value": "single-numa-node"},
        ],
        "zones": [zone(number) for number in range(zones)],
    }


@pytest.fixture(scope="module")
def real(apiserver: RealApiServer) -> RealApiServer:
    apiserver.apply_files(CRD)
    return apiserver


NUMBERS = itertools.count()


@pytest.fixture
def node(real: RealApiServer) -> str:
    name = f"apply-{next(NUMBERS)}"
    real.create_node(name)
    return name


@pytest.fixture
def api(real: RealApiServer) -> Iterator[ApiServer]:
    api = ApiServer(Access(server=real.url, ca_file=real.ca, token=real.token))
    yield api
    api.close()


@pytest.fixture
def sink(api: ApiServer, node: str) -> ApiSink:
    return ApiSink(api, node=node, takeover_after_s=180)


def version(real: RealApiServer, name: str) -> str:
    found: str = real.get(PATH + name)["metadata"]["resourceVersion"]
    return found


def held(outcome: Outcome) -> bool:
    return outcome.wrote is Wrote.HELD


# The ordinary life of an object


def test_the_first_body_creates_the_object_owned_by_its_node(
    real: RealApiServer, sink: ApiSink, node: str
) -> None:
    outcome = sink.publish(nrt(node), 0)
    live = real.get(PATH + node)
    assert outcome.wrote is Wrote.CREATED
    assert live["zones"] == nrt(node)["zones"]
    assert live["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "rte"}
    (owner,) = live["metadata"]["ownerReferences"]
    uid = real.get(f"/api/v1/nodes/{node}")["metadata"]["uid"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", node, uid)


def test_an_unchanged_body_costs_no_request(real: RealApiServer, node: str) -> None:
    with FaultyProxy(real) as proxy:
        api = ApiServer(Access(server=proxy.url, token=real.token))
        sink = ApiSink(api, node=node, takeover_after_s=180)
        sink.publish(nrt(node), 0)
        before = version(real, node)
        requests = len(proxy.seen)
        assert sink.publish(nrt(node), 1).wrote is Wrote.UNCHANGED
        assert len(proxy.seen) == requests
        api.close()
    assert version(real, node) == before


def test_changed_figures_are_a_patch_of_a_fraction_of_the_object(
    real: RealApiServer, sink: ApiSink, node: str
) -> None:
    created = sink.publish(nrt(node), 0)
    outcome = sink.publish(nrt(node, available=2), 1)
    assert outcome.wrote is Wrote.PATCHED
    assert outcome.size_bytes < created.size_bytes / 2
    assert real.get(PATH + node)["zones"] == nrt(node, available=2)["zones"]


def test_the_head_of_a_request_is_a_third_of_a_kib(
    real: RealApiServer, faulty: ApiServer, proxy: FaultyProxy
) -> None:
    """Beside the token, which is a KiB by itself."""
    name = "gpu-h100-0017.eu-central.example.com"
    real.create_node(name)
    sink = ApiSink(faulty, node=name, takeover_after_s=180)
    sink.publish(nrt(name), 0)
    assert sink.publish(nrt(name, available=2), 1).wrote is Wrote.PATCHED
    assert max(proxy.heads) <= 360


def test_a_changed_shape_is_an_apply(real: RealApiServer, sink: ApiSink, node: str) -> None:
    sink.publish(nrt(node), 0)
    sink.publish(nrt(node, available=3), 1)  # a patch in between owns the lists as an update
    assert sink.publish(nrt(node, available=3, zones=1), 2).wrote is Wrote.APPLIED
    assert len(real.get(PATH + node)["zones"]) == 1


def test_a_new_process_that_finds_what_it_would_write_writes_nothing(
    real: RealApiServer, api: ApiServer, sink: ApiSink, node: str
) -> None:
    sink.publish(nrt(node), 0)
    sink.publish(nrt(node, available=1), 1)
    sink.echo()
    before = version(real, node)
    again = ApiSink(api, node=node, takeover_after_s=180)
    assert again.publish(nrt(node, available=1), 2).wrote is Wrote.UNCHANGED
    assert version(real, node) == before
    assert again.publish(nrt(node, available=2), 3).wrote is Wrote.PATCHED
    assert real.get(PATH + node)["attributes"][-1] == {"name": "rteEcho", "value": "1"}


def test_a_new_process_that_finds_something_else_of_ours_applies_at_once(
    real: RealApiServer, api: ApiServer, sink: ApiSink, node: str
) -> None:
    sink.publish(nrt(node), 0)
    sink.publish(nrt(node, available=1), 1)
    again = ApiSink(api, node=node, takeover_after_s=180)
    assert again.publish(nrt(node, available=4), 2).wrote is Wrote.APPLIED
    assert real.get(PATH + node)["zones"] == nrt(node)["zones"]


def test_an_echo_changes_one_attribute_and_nothing_that_is_compared(
    real: RealApiServer, sink: ApiSink, node: str
) -> None:
    sink.publish(nrt(node), 0)
    for count in ("1", "2"):
        outcome = sink.echo()
        assert outcome is not None
        assert outcome.wrote is Wrote.ECHOED
        assert real.get(PATH + node)["attributes"][-1] == {"name": "rteEcho", "value": count}
        assert sink.publish(nrt(node), 1).wrote is Wrote.UNCHANGED
    assert sink.publish(nrt(node, zones=1), 2).wrote is Wrote.APPLIED
    assert real.get(PATH + node)["attributes"][-1] == {"name": "rteEcho", "value": "2"}
    third = sink.echo()
    assert third is not None
    assert real.get(PATH + node)["attributes"][-1] == {"name": "rteEcho", "value": "3"}


def test_labels_of_the_node_are_ours_alone_to_take_back(
    real: RealApiServer, sink: ApiSink, node: str
) -> None:
    path = f"/api/v1/nodes/{node}"
    real.ask("PATCH", path, {"metadata": {"labels": {"foreign": "x"}}}, content_type=MERGE)

    def labels(**ours: str) -> Json:
        return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": ours}}

    assert sink.publish(labels(a="1", b="2"), 0).wrote is Wrote.APPLIED
    assert sink.publish(labels(a="1", b="2"), 0).wrote is Wrote.UNCHANGED
    assert sink.publish(labels(a="3"), 0).wrote is Wrote.APPLIED
    now = real.get(path)["metadata"]["labels"]
    assert (now["foreign"], now["a"], now.get("b")) == ("x", "3", None)

    again = ApiSink(sink.api, node=node, takeover_after_s=180)
    assert again.publish(labels(a="3"), 0).wrote is Wrote.UNCHANGED
    assert ApiSink(sink.api, node=node, takeover_after_s=180).publish(labels(), 0).wrote.is_write
    assert "a" not in real.get(path)["metadata"]["labels"]
    assert [outcome.wrote for outcome in again.reread(1)] == [Wrote.APPLIED]
    assert real.get(path)["metadata"]["labels"]["a"] == "3"


def test_labels_never_create_a_node(real: RealApiServer, api: ApiServer, node: str) -> None:
    uid = real.get(f"/api/v1/nodes/{node}")["metadata"]["uid"]
    real.delete(f"/api/v1/nodes/{node}")
    with pytest.raises(ApiError) as refused:
        api.label_node(node, {"a": "b"}, uid=uid)
    assert refused.value.status == 409
    assert real.request("GET", f"/api/v1/nodes/{node}").status == 404


def test_an_event_about_the_node_is_created(real: RealApiServer, api: ApiServer, node: str) -> None:
    about = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}
    event = {
        "metadata": {"generateName": f"{node}."},
        "involvedObject": about,
        "reason": "GpuLost",
        "message": "gpu-3 fell off the bus",
        "type": "Warning",
        "source": {"component": "rte"},
    }
    name = api.create_event(event)["metadata"]["name"]
    assert real.get(f"/api/v1/namespaces/default/events/{name}")["reason"] == "GpuLost"


# The kubelet's own view of its configuration


@pytest.fixture
def kubelet_port(real: RealApiServer) -> Iterator[int]:
    """What a kubelet serves, with a certificate that the cluster's authority has signed."""

    class Configz(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self.headers["Authorization"] == f"Bearer {real.token}"
            content = b'{"kubeletconfig":{"topologyManagerPolicy":"restricted"}}'
            self.send_response(200 if right and self.path == "/configz" else 403)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("", 0), Configz) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(real.ca, real.ca.with_suffix(".key"))
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def say_kubelet(real: RealApiServer, node: str, port: int) -> None:
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    real.ask("PATCH", f"/api/v1/nodes/{node}/status", {"status": status}, content_type=MERGE)


def test_configz_is_asked_of_the_kubelet_itself(
    real: RealApiServer, api: ApiServer, node: str, kubelet_port: int
) -> None:
    say_kubelet(real, node, kubelet_port)
    assert api.read_configz(node) == {"topologyManagerPolicy": "restricted"}


def test_a_kubelet_that_does_not_answer_is_met_with_advice(
    real: RealApiServer, api: ApiServer, node: str
) -> None:
    say_kubelet(real, node, 1)
    with pytest.raises(ApiError, match=r"nodes/configz .* kubelet\.configFile"):
        api.read_configz(node)


def test_the_token_is_not_shown_to_a_kubelet_of_another_authority(
    real: RealApiServer, api: ApiServer, node: str, kubelet_port: int
) -> None:
    say_kubelet(real, node, kubelet_port)
    address = [{"type": "InternalIP", "address": "127.0.0.2"}]  # not in the certificate
    status = {"status": {"addresses": address}}
    real.ask("PATCH", f"/api/v1/nodes/{node}/status", status, content_type=MERGE)
    with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
        api.read_configz(node)


def test_a_node_without_an_address_has_no_configz(api: ApiServer, node: str) -> None:
    with pytest.raises(ApiError, match="InternalIP"):
        api.read_configz(node)


# Others write, too


def edit(real: RealApiServer, name: str, change: Json, *, manager: str = "kubectl-edit") -> None:
    real.ask("PATCH", f"{PATH}{name}?fieldManager={manager}", change, content_type=MERGE)


def test_a_label_that_somebody_adds_is_kept_and_hinders_nothing(
    real: RealApiServer, sink: ApiSink, node: str
) -> None:
    sink.publish(nrt(node), 0)
    edit(real, node, {"metadata": {"labels": {"team": "a"}}})
    outcome = sink.publish(nrt(node, available=0), 1)
    assert outcome.wrote.is_write
    live = real.get(PATH + node)
    assert live["metadata"]["labels"]["team"] == "a"
    assert live["zones"] == nrt(node, available=0)["zones"]
    assert sink.problems(1) == {}


def test_a_foreign_edit_is_reported_and_put_back_at_the_next_re_reading_only(
    real: RealApiServer, sink: ApiSink, node: str
) -> None:
    sink.publish(nrt(node), 0)
    edit(real, node, {"zones": nrt(node, available=0)["zones"]})
    before = version(real, node)
    assert held(sink.publish(nrt(node, available=3), 1))
    assert held(sink.publish(nrt(node, available=2), 2))
    assert version(real, node) == before
    assert "kubectl-edit" in next(iter(sink.problems(2).values()))
    (outcome,) = sink.reread(600)
    assert outcome.wrote is Wrote.APPLIED
    assert real.get(PATH + node)["zones"] == nrt(node, available=2)["zones"]
    assert sink.problems(600 + REPORTED_S - 1)
    assert not sink.problems(600 + REPORTED_S)
    assert sink.publish(nrt(node, available=1), 601).wrote is Wrote.PATCHED


def test_a_foreign_edit_is_found_by_re_reading_though_nothing_is_to_be_published(
    real: RealApiServer, api: ApiServer, sink: ApiSink, node: str
) -> None:
    sink.publish(nrt(node), 0)
    (quiet,) = sink.reread(600)
    assert quiet.wrote is Wrote.UNCHANGED
    edit(real, node, {"attributes": []}, manager="second-exporter")
    until(lambda: not (api.read(PATH + node, cached=True) or {}).get("attributes"))
    (outcome,) = sink.reread(1200)
    assert outcome.wrote is Wrote.APPLIED
    assert real.get(PATH + node)["attributes"] == nrt(node)["attributes"]
    assert "second-exporter" in next(iter(sink.problems(1200).values()))


ATTRIBUTES = nrt("")["attributes"]
COUNTER = {"name": "rteEcho", "value": "1"}
BY_HAND: dict[str, list[Json]] = {
    "a figure": [{"op": "replace", "path": "/zones/0/resources/0/available", "value": "9"}],
    "a figure as a number": [
        {"op": "replace", "path": "/zones/0/resources/0/available", "value": 4}
    ],
    "a resource more": [
        {
            "op": "add",
            "path": "/zones/0/resources/0",
            "value": {"name": "a.b/c", "capacity": "1", "allocatable": "1", "available": "1"},
        }
    ],
    "no resources": [{"op": "remove", "path": "/zones/0/resources"}],
    "costs": [{"op": "replace", "path": "/zones/0/costs/0/value", "value": 11}],
    "a zone's type": [{"op": "replace", "path": "/zones/0/type", "value": "Socket"}],
    "a zone's parent": [{"op": "add", "path": "/zones/0/parent", "value": "node-1"}],
    "a zone's attributes": [
        {"op": "add", "path": "/zones/0/attributes", "value": [{"name": "a", "value": "b"}]}
    ],
    "zones in another order": [{"op": "move", "from": "/zones/0", "path": "/zones/1"}],
    "a zone less": [{"op": "remove", "path": "/zones/1"}],
    "no zones": [{"op": "replace", "path": "/zones", "value": []}],
    "an attribute": [{"op": "replace", "path": "/attributes/0/value", "value": "x"}],
    "an attribute more": [{"op": "add", "path": "/attributes/0", "value": COUNTER | {"name": "a"}}],
    "an attribute twice": [{"op": "add", "path": "/attributes/0", "value": ATTRIBUTES[0]}],
    "attributes in another order": [
        {"op": "move", "from": "/attributes/0", "path": "/attributes/1"}
    ],
    "no attributes": [{"op": "remove", "path": "/attributes"}],
    "the counter before the rest": [
        {"op": "move", "from": "/attributes/2", "path": "/attributes/0"}
    ],
    "the counter twice": [{"op": "add", "path": "/attributes/-", "value": COUNTER}],
    "the counter as a word": [{"op": "replace", "path": "/attributes/2/value", "value": "x"}],
    "the counter": [{"op": "replace", "path": "/attributes/2/value", "value": "70"}],
    "no counter": [{"op": "remove", "path": "/attributes/2"}],
    "a field of the former kind": [
        {"op": "add", "path": "/topologyPolicies", "value": ["SingleNUMANodeContainerLevel"]}
    ],
    "no label": [{"op": "remove", "path": "/metadata/labels"}],
    "no owner": [{"op": "remove", "path": "/metadata/ownerReferences"}],
    "a strange annotation": [{"op": "add", "path": "/metadata/annotations", "value": {"a": "b"}}],
    "a finalizer": [{"op": "add", "path": "/metadata/finalizers", "value": ["example.com/a"]}],
}


@pytest.mark.parametrize("operations", BY_HAND.values(), ids=BY_HAND.keys())
def test_whatever_is_edited_by_hand_is_right_after_the_next_re_reading_and_stays_so(
    real: RealApiServer, sink: ApiSink, node: str, operations: list[Json]
) -> None:
    sink.publish(nrt(node), 0)
    assert sink.echo()
    path = f"{PATH}{node}?fieldManager=kubectl-edit"
    real.ask("PATCH", path, operations, content_type="application/json-patch+json")

    def said() -> tuple[Any, ...]:
        live = real.get(PATH + node)
        attributes = live.get("attributes", [])
        names = [item["name"] for item in attributes]
        plain = [item for item in attributes if item["name"] != "rteEcho"]
        metadata = live["metadata"]
        owners = len(metadata.get("ownerReferences", ()))
        in_place = "rteEcho" not in names[:-1] and "topologyPolicies" not in live
        return plain, live.get("zones"), metadata.get("labels"), owners, in_place

    def right(body: Json) -> tuple[Any, ...]:
        return body["attributes"], body["zones"], body["metadata"]["labels"], 1, True

    def settle(body: Json) -> None:
        sink.publish(body, 1)
        until(lambda: not sink.reread(600)[0].wrote.is_write and said() == right(body))

    settle(nrt(node))
    assert sink.publish(nrt(node, available=3), 601).wrote.is_write
    assert said() == right(nrt(node, available=3))
    assert sink.echo()
    assert said() == right(nrt(node, available=3))
    real.ask("PATCH", path, {"metadata": {"finalizers": None}}, content_type=MERGE)


def test_a_deleted_object_is_put_back_at_the_next_re_reading_only(
    real: RealApiServer, sink: ApiSink, node: str
) -> None:
    sink.publish(nrt(node), 0)
    real.delete(PATH + node)
    assert held(sink.publish(nrt(node, available=3), 1))
    assert real.request("GET", PATH + node).status == 404
    assert "deleted" in next(iter(sink.problems(1).values()))
    (outcome,) = sink.reread(600)
    assert outcome.wrote is Wrote.CREATED
    assert real.get(PATH + node)["zones"] == nrt(node, available=3)["zones"]


def test_an_object_that_is_being_deleted_is_written_until_it_is_gone(
    real: RealApiServer, api: ApiServer, sink: ApiSink, node: str
) -> None:
    sink.publish(nrt(node), 0)
    edit(real, node, {"metadata": {"finalizers": ["example.com/slow"]}})
    real.delete(PATH + node)
    assert real.get(PATH + node)["metadata"]["deletionTimestamp"]
    assert sink.publish(nrt(node, available=3), 1).wrote.is_write
    assert sink.publish(nrt(node, available=2), 2).wrote is Wrote.PATCHED
    assert real.get(PATH + node)["zones"] == nrt(node, available=2)["zones"]
    edit(real, node, {"metadata": {"finalizers": None}})
    assert real.request("GET", PATH + node).status == 404
    assert held(sink.publish(nrt(node, available=1), 3))
    until(lambda: api.read(PATH + node, cached=True) is None)
    assert [outcome.wrote for outcome in sink.reread(600)] == [Wrote.CREATED]


def test_putting_back_reads_the_nodes_uid_again(
    real: RealApiServer, api: ApiServer, sink: ApiSink, node: str
) -> None:
    sink.publish(nrt(node), 0)
    real.delete(f"/api/v1/nodes/{node}")
    real.create_node(node)
    real.delete(PATH + node)
    until(lambda: api.read(PATH + node, cached=True) is None)
    sink.reread(600)
    (owner,) = real.get(PATH + node)["metadata"]["ownerReferences"]
    assert owner["uid"] == real.get(f"/api/v1/nodes/{node}")["metadata"]["uid"]


def test_a_node_that_is_made_anew_has_its_object_at_once(
    real: RealApiServer, sink: ApiSink, node: str
) -> None:
    """The garbage collector deletes the object of the Node before: no second writer."""
    sink.publish(nrt(node), 0)
    real.delete(f"/api/v1/nodes/{node}")
    real.create_node(node)
    real.delete(PATH + node)
    assert sink.publish(nrt(node, available=3), 1).wrote is Wrote.CREATED
    (owner,) = real.get(PATH + node)["metadata"]["ownerReferences"]
    assert owner["uid"] == real.get(f"/api/v1/nodes/{node}")["metadata"]["uid"]
    assert not sink.problems(2)


def test_another_process_of_ours_is_no_second_writer(
    real: RealApiServer, api: ApiServer, sink: ApiSink, node: str
) -> None:
    """A rolling update: the old pod's last patch is unknown to the new one, and the other way."""
    sink.publish(nrt(node), 0)
    again = ApiSink(api, node=node, takeover_after_s=180)
    again.publish(nrt(node, available=1), 1)
    assert sink.publish(nrt(node, available=2), 2).wrote is Wrote.APPLIED  # after a 409
    assert again.publish(nrt(node, available=3), 3).wrote is Wrote.APPLIED
    assert real.get(PATH + node)["zones"] == nrt(node, available=3)["zones"]
    assert not again.problems(4)


@pytest.fixture
def poor(real: RealApiServer) -> Iterator[ApiServer]:
    """May get, create and patch, and delete nothing."""
    namespace = real.create_namespace("poor")
    real.create_service_account(namespace, "rte")
    rights = {
        "topology.node.k8s.io": (["noderesourcetopologies"], ["get", "create", "patch"]),
        "": (["nodes"], ["get"]),
    }
    rules = [{"apiGroups": [g], "resources": r, "verbs": v} for g, (r, v) in rights.items()]
    real.grant(namespace, "rte", rules)
    token = real.create_token(namespace, "rte")
    api = ApiServer(Access(server=real.url, ca_file=real.ca, token=token))
    until(lambda: api.may("patch", "noderesourcetopologies", group="topology.node.k8s.io"))
    yield api
    api.close()


def test_an_owner_may_be_set_where_an_object_is_created(
    real: RealApiServer, poor: ApiServer, node: str
) -> None:
    """OwnerReferencesPermissionEnforcement is on here."""
    sink = ApiSink(poor, node=node, takeover_after_s=180)
    assert sink.publish(nrt(node), 0).wrote is Wrote.CREATED
    assert sink.publish(nrt(node, zones=1), 1).wrote is Wrote.APPLIED
    (owner,) = real.get(PATH + node)["metadata"]["ownerReferences"]
    assert owner["name"] == node


def test_an_owner_that_may_not_be_set_is_left_out_and_said_once(
    real: RealApiServer, poor: ApiServer, node: str, caplog: pytest.LogCaptureFixture
) -> None:
    """We take over an object that we may not delete."""
    former = nrt(node, available=0) | {"topologyPolicies": ["None"]}
    real.ask("PATCH", f"{PATH}{node}?fieldManager=nfd", former, content_type=APPLY)
    sink = ApiSink(poor, node=node, takeover_after_s=0)
    until(lambda: sink.publish(nrt(node), 1).wrote is Wrote.APPLIED)
    live = real.get(PATH + node)
    assert live["zones"] == nrt(node)["zones"]
    assert "topologyPolicies" not in live
    assert "ownerReferences" not in live["metadata"]
    assert sink.publish(nrt(node, zones=1), 2).wrote is Wrote.APPLIED
    assert sum("without an owner" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("verb", ["merge", "apply"])
def test_a_writer_that_never_rests_costs_one_write_a_period(
    real: RealApiServer, faulty: ApiServer, proxy: FaultyProxy, node: str, verb: str
) -> None:
    """Whether it patches, or applies by force under a name of its own."""
    sink = ApiSink(faulty, node=node, takeover_after_s=180)
    sink.publish(nrt(node), 0)

    def writes() -> list[str]:
        return [method for method, _, _ in proxy.seen if method != "GET"]

    def theirs(available: int) -> None:
        body = nrt(node, available=available)
        if verb == "merge":
            edit(real, node, {"zones": body["zones"]}, manager="other")
        else:
            query = "?fieldManager=other&force=true"
            real.ask("PATCH", PATH + node + query, body, content_type=APPLY)

    before = len(writes())
    for period in (1, 2):
        for number in range(5):
            theirs(number)
            assert held(sink.publish(nrt(node, available=(number + period) % 4), 600 * period))
        # The first change of a period is refused for its version, and nothing more is tried.
        assert len(writes()) == before + 1
        assert "'other'" in next(iter(sink.problems(600 * period).values()))
        assert [outcome.wrote for outcome in sink.reread(600 * period)] == [Wrote.APPLIED]
        before = len(writes())


@pytest.mark.parametrize("taken", [False, True], ids=["at once", "after a restart"])
def test_what_topology_updater_leaves_goes_with_it(
    real: RealApiServer, api: ApiServer, node: str, taken: bool
) -> None:
    """It applies by force, with a field that is out of use and its Namespace as the owner."""
    query = "?fieldManager=node-feature-discovery-topology-updater&force=true"
    namespace = real.get("/api/v1/namespaces/default")["metadata"]
    owner = {"apiVersion": "v1", "kind": "Namespace", "name": "default", "uid": namespace["uid"]}
    former = nrt(node, available=0, zones=2)
    former["metadata"] |= {"ownerReferences": [owner]}
    former["topologyPolicies"] = ["SingleNUMANodePodLevel"]
    former["zones"][1]["resources"].append(
        {"name": "example.com/gone", "capacity": "1", "allocatable": "1", "available": "1"}
    )
    former["attributes"].append({"name": "cpu_core", "value": "0-7"})
    real.ask("PATCH", PATH + node + query, former, content_type=APPLY)
    if taken:  # by a process that left them
        ours = {**nrt(node), "metadata": {"name": node}}
        path = f"{PATH}{node}?fieldManager=rte&force=true"
        real.ask("PATCH", path, ours, content_type=APPLY)
    sink = ApiSink(api, node=node, takeover_after_s=0)
    until(lambda: sink.publish(nrt(node), 1).wrote is Wrote.APPLIED)
    live = real.get(PATH + node)
    assert "topologyPolicies" not in live
    assert (live["zones"], live["attributes"]) == (nrt(node)["zones"], nrt(node)["attributes"])
    assert [one["kind"] for one in live["metadata"]["ownerReferences"]] == ["Node"]
    assert last_foreign_writer(live) is None
    assert sink.publish(nrt(node, available=1), 2).wrote is Wrote.PATCHED
    again = ApiSink(api, node=node, takeover_after_s=180)
    assert again.publish(nrt(node, available=1), 3).wrote is Wrote.UNCHANGED


def test_what_resource_topology_exporter_leaves_goes_with_it(
    real: RealApiServer, api: ApiServer, node: str
) -> None:
    """It creates and updates whole objects, with annotations about its own pace."""
    uid = real.get(f"/api/v1/nodes/{node}")["metadata"]["uid"]
    former = nrt(node, available=0)
    former["metadata"] = {
        "name": node,
        "annotations": {
            "k8stopoawareschedwg/rte-update": "periodic",
            "k8stopoawareschedwg/sleep-duration": "60s",
            "topology.node.k8s.io/fingerprint": "pfp0v0010000000000000000",
            "team": "a",
        },
        "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}],
    }
    query = "?fieldManager=resource-topology-exporter"
    made = real.create(f"{PATH.rstrip('/')}{query}", former)
    real.ask("PUT", PATH + node + query, {**made, "zones": nrt(node, available=1)["zones"]})
    sink = ApiSink(api, node=node, takeover_after_s=0)
    until(lambda: sink.publish(nrt(node), 1).wrote is Wrote.APPLIED)
    live = real.get(PATH + node)
    assert live["metadata"]["annotations"] == {"team": "a"}
    assert [one["uid"] for one in live["metadata"]["ownerReferences"]] == [uid]
    assert live["zones"] == nrt(node)["zones"]
    assert sink.publish(nrt(node, available=1), 2).wrote is Wrote.PATCHED


MANAGERS = ["resource-topology-exporter", "node-feature-discovery-topology-updater", "nrt-updater"]


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("verb", ["apply", "update"])
def test_whoever_wrote_before_is_respected_and_then_taken_over_from(
    real: RealApiServer, api: ApiServer, node: str, manager: str, verb: str
) -> None:
    """RTE patches or updates, NFD applies by force."""
    body = nrt(node, available=0)
    if verb == "apply":
        query = f"?fieldManager={manager}&force=true"
        real.ask("PATCH", PATH + node + query, body, content_type=APPLY)
    else:
        real.create(f"{PATH.rstrip('/')}?fieldManager={manager}", body)
        edit(real, node, {"zones": nrt(node, available=1)["zones"]}, manager=manager)
    first = ApiSink(api, node=node, takeover_after_s=180).publish(nrt(node), 0)
    assert held(first)
    last = ApiSink(api, node=node, takeover_after_s=0)
    until(lambda: last.publish(nrt(node), 1).wrote is Wrote.APPLIED)
    live = real.get(PATH + node)
    assert live["zones"] == nrt(node)["zones"]
    assert last_foreign_writer(live) is None


def test_re_reading_asks_for_one_object_at_a_time(
    real: RealApiServer, faulty: ApiServer, proxy: FaultyProxy, node: str
) -> None:
    sink = ApiSink(faulty, node=node, takeover_after_s=180)
    sink.publish(nrt(node), 0)
    until(lambda: faulty.read(PATH + node, cached=True) == faulty.read(PATH + node))
    labels = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": {"a": "b"}}}
    sink.publish(labels, 0)
    before = len(proxy.seen)
    for number in range(SELDOM):
        sink.reread(600.0 * number)
    paths = [path for _, path, _ in proxy.seen[before:]]
    assert paths == [PATH + node] * (SELDOM - 1) + [f"/api/v1/nodes/{node}"]


def test_a_former_writer_is_taken_over_from_when_it_has_been_silent(
    real: RealApiServer, api: ApiServer, faulty: ApiServer, proxy: FaultyProxy, node: str
) -> None:
    former = nrt(node, available=0) | {"topologyPolicies": ["SingleNUMANodeContainerLevel"]}
    query = "?fieldManager=resource-topology-exporter"
    real.ask("PATCH", PATH + node + query, former, content_type=APPLY)
    patient = ApiSink(faulty, node=node, takeover_after_s=180)
    outcome = patient.publish(nrt(node), 0)
    assert held(outcome)
    assert outcome.again_s is not None
    assert 170 < outcome.again_s <= 181
    assert "resource-topology-exporter" in next(iter(patient.problems(0).values()))
    assert real.get(PATH + node)["zones"] == former["zones"]

    before = len(proxy.seen)
    outcome = patient.publish(nrt(node, available=3), 60)  # nor is it asked again before
    assert held(outcome)
    assert outcome.again_s is not None
    assert 110 < outcome.again_s <= 121
    assert proxy.seen[before:] == []
    assert held(patient.publish(nrt(node, available=3), 181))  # by the server's clock
    assert len(proxy.seen) == before + 1

    impatient = ApiSink(api, node=node, takeover_after_s=0)
    until(lambda: impatient.publish(nrt(node), 1).wrote is Wrote.APPLIED)
    assert real.get(PATH + node)["zones"] == nrt(node)["zones"]
    assert impatient.publish(nrt(node, available=1), 2).wrote is Wrote.PATCHED


def test_entries_of_our_own_manager_are_no_second_writer(
    real: RealApiServer, sink: ApiSink, node: str
) -> None:
    sink.publish(nrt(node), 0)
    sink.publish(nrt(node, available=1), 1)
    entries = real.get(PATH + node)["metadata"]["managedFields"]
    assert {(e["manager"], e["operation"]) for e in entries} == {
        ("rte", "Apply"),
        ("rte", "Update"),
    }
    assert last_foreign_writer(real.get(PATH + node)) is None


# Refusals and faults


def test_a_missing_definition_says_so(api: ApiServer) -> None:
    with pytest.raises(ApiError) as refused:
        api.apply("/apis/fabric.rte.example/v1/gpufabrics/n", {"kind": "GPUFabric"}, force=True)
    assert refused.value.unknown_kind
    with pytest.raises(ApiError):
        api.read("/apis/fabric.rte.example/v1/gpufabrics/n")


def test_a_cluster_with_another_version_of_the_kind_only_says_so(api: ApiServer) -> None:
    path = PATH.replace("v1alpha2", "v1alpha3") + "x"
    with pytest.raises(ApiError, match="v1alpha3") as refused:
        api.read(path)
    assert refused.value.unknown_kind
    with pytest.raises(ApiError, match="v1alpha3") as refused:
        api.apply(path, nrt("x"), force=True)
    assert refused.value.unknown_kind


def test_an_object_that_went_with_its_definition_comes_back_with_it(
    real: RealApiServer, api: ApiServer, node: str
) -> None:
    group = f"{node}.example.com"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"things.{group}"},
        "spec": {
            "group": group,
            "scope": "Cluster",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }
    real.apply(definition)
    body = {"apiVersion": f"{group}/v1", "kind": "Thing", "metadata": {"name": "n"}, "a": 1}
    path = f"/apis/{group}/v1/things/n"
    publication = Publication(api, path, owner=None, takeover_after_s=180)
    assert publication.publish(body, 0).wrote is Wrote.CREATED
    real.delete(real.path(definition))

    def gone() -> bool:
        answer = real.request("GET", path)
        return answer.status == 404 and "page not found" in answer.body["message"]

    until(gone)
    with pytest.raises(ApiError) as refused:
        publication.publish(body | {"a": 2}, 1)
    assert refused.value.unknown_kind
    real.apply(definition)
    assert publication.publish(body | {"a": 3}, 2).wrote is Wrote.CREATED
    assert publication.problem(3) is None
    real.delete(real.path(definition))


DENIALS = {
    "a policy": (
        "ValidatingAdmissionPolicy",
        {
            "failurePolicy": "Fail",
            "validations": [{"expression": "false", "message": "not on this cluster"}],
        },
        422,
        "not on this cluster",
    ),
    "a webhook that is away": (
        "ValidatingWebhookConfiguration",
        {
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "timeoutSeconds": 1,
            "clientConfig": {"url": "https://127.0.0.1:1/"},
        },
        500,
        "failed calling webhook",
    ),
}


@pytest.mark.parametrize(("kind", "how", "status", "words"), DENIALS.values(), ids=DENIALS.keys())
def test_an_admission_that_denies_is_said_until_it_does_not(
    real: RealApiServer, sink: ApiSink, node: str, kind: str, how: Json, status: int, words: str
) -> None:
    sink.publish(nrt(node), 0)
    rule = {
        "apiGroups": ["topology.node.k8s.io"],
        "apiVersions": ["*"],
        "resources": ["*"],
        "operations": ["UPDATE"],
    }
    only = [{"name": "this", "expression": f"object.metadata.name == '{node}'"}]
    made = []

    def make(kind: str, rest: Json) -> None:
        version = "admissionregistration.k8s.io/v1"
        body = {"apiVersion": version, "kind": kind, "metadata": {"name": node}, **rest}
        made.append(real.path(body))
        real.apply(body)

    if kind == "ValidatingAdmissionPolicy":
        constraints = {"resourceRules": [rule]}
        spec = {**how, "matchConstraints": constraints, "matchConditions": only}
        make(kind, {"spec": spec})
        make(f"{kind}Binding", {"spec": {"policyName": node, "validationActions": ["Deny"]}})
    else:
        hook = {**how, "name": "x.example.com", "rules": [rule], "matchConditions": only}
        make(kind, {"webhooks": [hook]})
    numbers = itertools.count(5)  # each another than what is published

    def refusal() -> ApiError | None:
        try:
            sink.publish(nrt(node, available=next(numbers)), 1)
        except ApiError as error:
            return error
        return None

    until(lambda: refusal() is not None)
    refused = refusal()
    assert refused is not None
    assert refused.status == status
    assert words in refused.message
    for path in made:
        real.delete(path)
    until(lambda: refusal() is None)
    assert not sink.problems(2)


def test_a_missing_object_is_none(api: ApiServer, real: RealApiServer) -> None:
    assert api.read(f"{PATH}nobody-made-this") is None


def test_a_node_that_does_not_exist_is_an_error_with_advice(
    real: RealApiServer, api: ApiServer
) -> None:
    sink = ApiSink(api, node="no-such-node", takeover_after_s=180)
    with pytest.raises(ApiError, match="--node-name"):
        sink.publish(nrt("no-such-node"), 0)
    assert real.request("GET", f"{PATH}no-such-node").status == 404
    real.create_node("no-such-node")
    assert sink.publish(nrt("no-such-node"), 1).wrote is Wrote.CREATED


def test_a_token_without_rights_is_refused_in_the_api_servers_words(
    real: RealApiServer, node: str
) -> None:
    namespace = real.create_namespace()
    real.create_service_account(namespace, "poor")
    token = real.create_token(namespace, "poor")
    api = ApiServer(Access(server=real.url, ca_file=real.ca, token=token))
    with pytest.raises(ApiError) as refused:
        ApiSink(api, node=node, takeover_after_s=180, owner=False).publish(nrt(node), 0)
    api.close()
    assert (refused.value.status, refused.value.reason) == (403, "Forbidden")
    assert "cannot get resource" in refused.value.message


def test_a_token_file_that_is_replaced_is_read_again(
    real: RealApiServer, node: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("expired")
    api = ApiServer(Access(server=real.url, ca_file=real.ca, token_file=file))
    sink = ApiSink(api, node=node, takeover_after_s=180)
    with pytest.raises(ApiError) as refused:
        sink.publish(nrt(node), 0)
    assert refused.value.status == 401
    stamp = file.stat()
    file.write_text(real.token)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # the 401 alone makes it look
    assert sink.publish(nrt(node), 1).wrote is Wrote.CREATED
    api.close()


def write_later(path: Path, text: str) -> None:
    """Changes a file as some time later: two changes within a tick of the clock have one time."""
    changed_ns = path.stat().st_mtime_ns + 10**9
    path.write_text(text)
    os.utime(path, ns=(changed_ns, changed_ns))


def test_a_token_that_is_replaced_counts_on_a_connection_that_is_kept(
    real: RealApiServer, proxy: FaultyProxy, node: str, tmp_path: Path
) -> None:
    namespace = real.create_namespace()
    real.create_service_account(namespace, "poor")
    file = tmp_path / "token"
    file.write_text(real.token)
    api = ApiServer(Access(server=proxy.url, token_file=file))
    assert api.read_node(node) is not None
    connections = set(proxy.connections)
    write_later(file, real.create_token(namespace, "poor"))
    with pytest.raises(ApiError, match="Forbidden"):
        api.read_node(node)
    write_later(file, real.token)
    assert api.read_node(node) is not None
    file.unlink()
    assert api.read_node(node) is not None, "the one in use may still do"
    assert proxy.connections == connections
    api.close()


def test_an_authority_that_is_replaced_counts_though_a_connection_is_kept(
    real: RealApiServer, node: str, tmp_path: Path
) -> None:
    authority = tmp_path / "ca.crt"
    authority.write_bytes(real.ca.read_bytes())
    api = ApiServer(Access(server=real.url, ca_file=authority, token=real.token))
    assert api.read_node(node) is not None
    write_later(authority, "no certificate")
    with pytest.raises(ApiError) as failed:
        api.read_node(node)
    assert failed.value.reason == "NoAccess"
    authority.write_bytes(real.ca.read_bytes())
    assert api.read_node(node) is not None
    authority.unlink()
    assert api.read_node(node) is not None, "the connection is kept"
    api.close()


def test_a_certificate_of_another_authority_is_refused_until_the_file_is_replaced(
    real: RealApiServer, node: str, tmp_path: Path
) -> None:
    authority = tmp_path / "ca.crt"
    other = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    blocks = Path(other).read_text().split("-----END CERTIFICATE-----")
    authority.write_text(blocks[0] + "-----END CERTIFICATE-----\n")
    api = ApiServer(Access(server=real.url, ca_file=authority, token=real.token))
    with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
        api.read_node(node)
    authority.write_bytes(real.ca.read_bytes())
    assert api.read_node(node) is not None
    api.close()


def test_a_kubeconfig_that_is_written_anew_counts(
    real: RealApiServer, node: str, tmp_path: Path
) -> None:
    """As who renews a client certificate, a token or an authority does, or moves the server."""
    file = real.write_kubeconfig(tmp_path / "kubeconfig", token="expired")
    right = yaml.safe_load(real.kubeconfig.read_text())
    api = parts.api_server(msgspec.convert({"api": {"kubeconfig": str(file)}}, Config))
    with pytest.raises(ApiError, match="Unauthorized"):
        api.read_node(node)
    file.write_text("clusters: [")  # half of it
    with pytest.raises(ApiError, match="Unauthorized"):
        api.read_node(node)
    file.write_text(yaml.safe_dump(right))
    assert api.read_node(node) is not None, "a 401 makes it look, and ask again"

    other = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    block = Path(other).read_text().partition("-----END CERTIFICATE-----")
    wrong = copy.deepcopy(right)
    wrong["clusters"][0]["cluster"] = {
        "server": right["clusters"][0]["cluster"]["server"],
        "certificate-authority-data": base64.b64encode("".join(block[:2]).encode()).decode(),
    }
    moved = copy.deepcopy(right)
    moved["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{free_port()}"
    api.close()
    for was in (wrong, moved):
        file.write_text(yaml.safe_dump(was))
        api = parts.api_server(msgspec.convert({"api": {"kubeconfig": str(file)}}, Config))
        with pytest.raises(ApiError, match="Unreachable"):
            api.read_node(node)
        file.write_text(yaml.safe_dump(right))
        with contextlib.suppress(ApiError):  # this one makes it look
            api.read_node(node)
        assert api.read_node(node) is not None
        api.close()


@pytest.fixture
def proxy(real: RealApiServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(real) as proxy:
        yield proxy


@pytest.fixture
def faulty(real: RealApiServer, proxy: FaultyProxy) -> Iterator[ApiServer]:
    api = ApiServer(Access(server=proxy.url, token=real.token))
    yield api
    api.close()


FAULTS = {
    "too many requests": (Fault(429, (("Retry-After", "7"),)), 429, 7),
    "a server error": (Fault(500, body=b"etcdserver: request timed out"), 500, None),
    "a proxy's page": (Fault(502, (("Content-Type", "text/html"),), b"<html>"), 502, None),
    "a redirect, which is not followed": (Fault(302, (("Location", "/"),)), 302, None),
    "no answer": (Fault(), None, None),
    "not JSON": (Fault(200, body=b"[1"), None, None),
    "JSON that is no object": (Fault(200, body=b"[]"), None, None),
    "an endless answer": (Fault(200, body=b" " * (9 << 20)), None, None),
    "a refusal of 9 MiB": (Fault(503, body=b"x" * (9 << 20)), 503, None),
    "an object without a version": (Fault(200, body=b'{"metadata":{"name":"n"}}'), None, None),
    "an object without metadata": (Fault(200, body=b'{"kind":"Status"}'), None, None),
    "a connection that ends": (Fault(raw=b""), None, None),
    "half a head": (Fault(raw=b"HTTP/1.1 200 OK\r\nConte"), None, None),
    "half a body": (
        Fault(raw=b'HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"metadata":{'),
        None,
        None,
    ),
    "half of a body in chunks": (
        Fault(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{}"),
        None,
        None,
    ),
    "a head that trickles": (Fault(raw=b"HTTP/1.1 200 OK\r\n" * 20, pause_s=0.05), None, None),
    "a body that trickles": (
        Fault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + b" " * 999, pause_s=0.02),
        None,
        None,
    ),
    "no HTTP": (Fault(raw=b"SSH-2.0-OpenSSH_9.6\r\n"), None, None),
}


@pytest.mark.parametrize(("fault", "status", "wait_s"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_an_error_and_the_next_request_is_right(
    faulty: ApiServer,
    proxy: FaultyProxy,
    real: RealApiServer,
    node: str,
    fault: Fault,
    status: int | None,
    wait_s: float | None,
) -> None:
    sink = ApiSink(faulty, node=node, takeover_after_s=180)
    sink.publish(nrt(node), 0)
    proxy.faults = [fault]
    requests = len(proxy.seen)
    patience_s, stopwatch = faulty.timeout_s, Stopwatch()
    if fault.pause_s or fault == Fault():  # else what is said is waited for
        faulty.timeout_s = 0.5
    with pytest.raises(ApiError) as failed:
        sink.publish(nrt(node, available=1), 1)
    faulty.timeout_s = patience_s
    assert stopwatch.took_s < 8, "what trickles would take twice as long"
    until(lambda: not proxy.faults)
    assert len(proxy.seen) == requests + 1
    assert (failed.value.status, failed.value.retry_after_s) == (status, wait_s)
    assert sink.publish(nrt(node, available=1), 2).wrote.is_write
    assert real.get(PATH + node)["zones"] == nrt(node, available=1)["zones"]


@pytest.mark.parametrize("fault", ["no answer", "a head that trickles"])
def test_a_server_that_keeps_us_waiting_is_named_as_that(
    faulty: ApiServer, proxy: FaultyProxy, fault: str
) -> None:
    """The socket's own time-out and that of the whole answer end at the same moment."""
    faulty.timeout_s = 0.05
    proxy.faults = [FAULTS[fault][0]] * 40
    for _ in range(20):
        with pytest.raises(ApiError, match="timed out"):
            faulty.read_node("any")


WAITS = {
    "7": 7,
    "0": 0,
    "Wed, 21 Oct 2015 07:28:00 GMT": 20,
    "Wed, 21 Oct 2015 07:27:00 GMT": 0,
    "Wed, 21 Oct 2026 07:28:00 GMT": MOST_WAIT_S,
    "86400": MOST_WAIT_S,
    "9" * 400: MOST_WAIT_S,
    "-5": None,
    "1.5": None,
    "nan": None,
    "soon": None,
    "": None,
    "Wed, 31 Feb 2015 07:28:00 GMT": None,
    "Wed, 21 Oct 99999 07:28:00 GMT": None,
}


@pytest.mark.parametrize(("said", "wait_s"), WAITS.items(), ids=[w[:30] for w in WAITS])
def test_how_long_a_server_wants_to_be_left_alone(said: str, wait_s: float | None) -> None:
    assert retry_after_s(said, now=1445412460) == wait_s  # 07:27:40


def test_a_date_of_retry_after_is_the_servers_time(
    faulty: ApiServer, proxy: FaultyProxy, node: str
) -> None:
    date = email.utils.formatdate(time.time() + 60, usegmt=True)
    proxy.faults = [Fault(429, (("Retry-After", date),))]
    with pytest.raises(ApiError) as refused:
        faulty.read_node(node)
    assert refused.value.retry_after_s == pytest.approx(60, abs=5)


def test_a_refusals_words_have_a_bound(faulty: ApiServer, proxy: FaultyProxy, node: str) -> None:
    status = {"kind": "Status", "reason": "Invalid" * 99, "message": "y" * 60000}
    proxy.faults = [Fault(422, body=json.dumps(status).encode())]
    with pytest.raises(ApiError) as refused:
        faulty.read_node(node)
    assert len(str(refused.value)) < 1300


def test_a_version_that_was_not_the_objects_costs_a_reading(
    faulty: ApiServer, proxy: FaultyProxy, real: RealApiServer, node: str
) -> None:
    sink = ApiSink(faulty, node=node, takeover_after_s=180)
    sink.publish(nrt(node), 0)
    wrong = json.dumps({"metadata": {"resourceVersion": "1", "uid": "u"}}).encode()
    proxy.faults = [Fault(200, body=wrong, after=True)]
    assert sink.publish(nrt(node, available=1), 1).wrote is Wrote.PATCHED
    before = len(proxy.seen)
    assert sink.publish(nrt(node, available=2), 2).wrote is Wrote.APPLIED
    assert [method for method, _, _ in proxy.seen[before:]] == ["PATCH", "GET", "PATCH"]
    assert real.get(PATH + node)["zones"] == nrt(node, available=2)["zones"]


def test_a_kept_connection_that_was_closed_meanwhile_is_no_error(
    faulty: ApiServer, proxy: FaultyProxy, node: str
) -> None:
    sink = ApiSink(faulty, node=node, takeover_after_s=180)
    sink.publish(nrt(node), 0)
    (connection,) = proxy.connections
    connection.shutdown(socket.SHUT_RDWR)
    until(lambda: not proxy.connections)
    assert sink.publish(nrt(node, available=1), 1).wrote is Wrote.PATCHED


def test_requests_share_a_connection(faulty: ApiServer, proxy: FaultyProxy, node: str) -> None:
    sink = ApiSink(faulty, node=node, takeover_after_s=180)
    sink.publish(nrt(node), 0)
    connections = set(proxy.connections)
    for number in range(4):
        sink.publish(nrt(node, available=number), number)
    sink.reread(600)
    assert proxy.connections == connections
    assert len(connections) == 1


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_takes_the_connection_and_says_nothing(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"{scheme}://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ApiError) as failed:
            ApiServer(Access(server=url), timeout_s=0.2).read_node("x")
    assert failed.value.reason == "Unreachable"


def test_a_server_without_tls_where_tls_is_expected(proxy: FaultyProxy) -> None:
    url = proxy.url.replace("http:", "https:")
    with pytest.raises(ApiError, match="SSL") as failed:
        ApiServer(Access(server=url), timeout_s=0.5).read_node("x")
    assert failed.value.reason == "Unreachable"


def test_a_certificate_for_another_name_is_refused(real: RealApiServer) -> None:
    access = Access(server=real.url, ca_file=real.ca, server_name="other", token=real.token)
    with pytest.raises(ApiError, match="hostname 'other' doesn't match"):
        ApiServer(access).read_node("x")


def test_proxies_of_the_environment_are_not_asked(
    api: ApiServer, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert api.read_node(node) is not None


def test_an_api_server_at_an_ipv6_address(real: RealApiServer, node: str, tmp_path: Path) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    (tmp_path / "token").write_text(real.token)
    assert in_cluster(environment, secrets=tmp_path).server == "https://[fd00::1]:443"
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with FaultyProxy(real, host="::1") as proxy:
        api = ApiServer(Access(server=proxy.url, token=real.token))
        assert api.read_node(node) is not None
        api.close()


def test_a_write_whose_answer_was_lost_is_not_written_twice(
    faulty: ApiServer, proxy: FaultyProxy, real: RealApiServer, node: str
) -> None:
    sink = ApiSink(faulty, node=node, takeover_after_s=180)
    sink.publish(nrt(node), 0)
    proxy.faults = [Fault(503, after=True)]
    with pytest.raises(ApiError):
        sink.publish(nrt(node, available=1), 1)
    before = version(real, node)
    assert sink.publish(nrt(node, available=1), 2).wrote is Wrote.UNCHANGED
    assert version(real, node) == before


def test_nobody_there_is_an_error_that_names_the_address() -> None:
    api = ApiServer(Access(server="http://127.0.0.1:1"), timeout_s=0.5)
    with pytest.raises(ApiError, match=r"127\.0\.0\.1:1") as failed:
        api.read_node("x")
    assert failed.value.reason == "Unreachable"


# Access


def test_a_kubeconfig_with_a_token_gives_access(real: RealApiServer, node: str) -> None:
    api = ApiServer(read_kubeconfig(real.kubeconfig))
    assert api.read_node(node) is not None
    api.close()


REFUSED = {
    "exec": (lambda c: c["users"][0]["user"].update({"exec": {"command": "x"}}), "user.exec"),
    "insecure": (
        lambda c: c["clusters"][0]["cluster"].update({"insecure-skip-tls-verify": True}),
        "insecure-skip-tls-verify",
    ),
    "no such context": (lambda c: c.update({"current-context": "x"}), "contexts has no entry 'x'"),
    "plain http": (
        lambda c: c["clusters"][0]["cluster"].update({"server": "http://192.0.2.1"}),
        "https",
    ),
    "missing authority": (
        lambda c: c["clusters"][0]["cluster"].update({"certificate-authority": "gone"}),
        "certificate-authority",
    ),
    "authority that is no text": (
        lambda c: c["clusters"][0]["cluster"].update({"certificate-authority-data": "gICA"}),
        "certificate-authority: not PEM",
    ),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_kubeconfig_that_cannot_be_used_says_why(
    real: RealApiServer, tmp_path: Path, change: Callable[[Json], None], words: str
) -> None:
    config = yaml.safe_load(real.kubeconfig.read_text())
    change(config)
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ApiError, match=words):
        read_kubeconfig(path)


@pytest.mark.parametrize("text", ["", "- a", "{", "contexts: 3", "a: 2026-02-31"])
def test_what_is_no_kubeconfig_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ApiError):
        read_kubeconfig(path)


def test_a_pods_own_account_is_found_by_environment_and_files(
    real: RealApiServer, node: str, tmp_path: Path
) -> None:
    host, port = real.url.removeprefix("https://").split(":")
    (tmp_path / "token").write_text(real.token)
    (tmp_path / "ca.crt").write_bytes(real.ca.read_bytes())
    environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    api = ApiServer(in_cluster(environment, secrets=tmp_path))
    assert api.read_node(node) is not None
    api.close()
    with pytest.raises(ApiError, match="--kubeconfig"):
        in_cluster({}, secrets=tmp_path)
    with pytest.raises(ApiError, match="automountServiceAccountToken"):
        in_cluster(environment, secrets=tmp_path / "none")


def test_access_never_shows_a_token() -> None:
    access = Access(server="https://192.0.2.1:6443", token="secret")
    assert "secret" not in repr(access)


# A folder


def test_a_folder_gets_the_same_objects_as_files(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path / "out")
    assert sink.publish(nrt("n"), 0).wrote is Wrote.CREATED
    assert sink.publish(nrt("n"), 0).wrote is Wrote.UNCHANGED
    assert sink.publish(nrt("n", available=1), 0).wrote is Wrote.APPLIED
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "noderesourcetopology-n.json"
    assert yaml.safe_load(file.read_text()) == nrt("n", available=1)
    file.unlink()
    assert [o.wrote for o in sink.reread(600)] == [Wrote.CREATED]
    assert file.exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ApiError, match="file/out"):
        FolderSink(tmp_path / "file" / "out").publish(nrt("n"), 0)


# Values


def test_the_published_policy_is_read_back_from_the_attributes() -> None:
    policy = published_policy(nrt("n"))
    assert policy is not None
    assert policy.topology_manager == "single-numa-node"
    assert published_policy({"attributes": [{"name": "x", "value": "y"}]}) is None
    assert published_policy({}) is None


def test_the_published_reserved_cpus_are_read_back_however_long_a_range_another_wrote() -> None:
    body = nrt("n")
    for text, cpus in (("0-2,64", (0, 1, 2, 64)), ("", ())):
        said = {"name": "reservedCPUs", "value": text}
        policy = published_policy({**body, "attributes": [*body["attributes"], said]})
        assert policy is not None
        assert policy.reserved_cpus == cpus
    endless = {"name": "reservedCPUs", "value": "0-99999999999"}
    assert published_policy({**body, "attributes": [*body["attributes"], endless]}) is None


def test_an_object_of_another_kind_is_applied_whole(api: ApiServer, node: str) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": node}, "data": {"a": "1"}}
    path = f"/api/v1/namespaces/default/configmaps/{node}"
    publication = Publication(api, path, owner=None, takeover_after_s=180)
    assert publication.publish(body, 0).wrote is Wrote.CREATED
    changed = copy.deepcopy(body) | {"data": {"a": "2"}}
    assert publication.publish(changed, 0).wrote is Wrote.APPLIED


def test_the_patch_of_our_bodies_names_only_what_differs() -> None:
    operations = changes(nrt("n"), nrt("n", available=1))
    assert operations is not None
    assert {o["path"] for o in operations} == {
        "/attributes/0/value",
        "/zones/0/resources/0/available",
        "/zones/1/resources/0/available",
    }
