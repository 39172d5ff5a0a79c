"""The lines of the documents by which our objects are removed or handed over, on a real API server.

What each line of kubectl asks of the API server is asked here; kubectl itself is not needed.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rte.publish.access import Access
from rte.publish.apply import ApiServer
from rte.publish.labels import Label
from rte.publish.publisher import ApiSink
from tests.conftest import GoProgram
from tests.deployed import Cluster, deploy, of_kind
from tests.real_apiserver import MERGE
from tests.real_apiserver import ApiServer as RealApiServer
from tests.test_apply import nrt
from tests.test_compose import bodies, composer

DOCS = Path(__file__).parents[1] / "docs"
NUMBERS = itertools.count()
GROUPS = {
    "daemonsets": "/apis/apps/v1",
    "noderesourcetopologies": "/apis/topology.node.k8s.io/v1alpha2",
    "gpufabrics": "/apis/rte.dev/v1alpha1",
    "nodes": "/api/v1",
    "namespaces": "/api/v1",
    "clusterroles": "/apis/rbac.authorization.k8s.io/v1",
    "clusterrolebindings": "/apis/rbac.authorization.k8s.io/v1",
    "validatingadmissionpolicies": "/apis/admissionregistration.k8s.io/v1",
    "validatingadmissionpolicybindings": "/apis/admissionregistration.k8s.io/v1",
}


def lines(document: str, heading: str) -> list[list[str]]:
    """The words of each line of kubectl below a heading, without the first."""
    text = (DOCS / document).read_text()
    section = re.split(r"^## ", text.split(f"\n## {heading}\n", 1)[1], flags=re.MULTILINE)[0]
    found = [shlex.split(line) for line in re.findall(r"^\$ kubectl (.*)$", section, re.MULTILINE)]
    assert found
    return found


def kubectl(server: RealApiServer, words: list[str]) -> None:
    """Does what `kubectl delete` or `kubectl label` does; a word that is not known fails."""
    verb, what, *rest = words
    options = {"-l": "", "-n": ""}
    keys = []
    while rest:
        word = rest.pop(0)
        if word in options:
            options[word] = rest.pop(0)
        elif word != "--all":
            assert word.endswith("-"), word
            keys.append(word.removesuffix("-"))
    within = f"/namespaces/{options['-n']}" if options["-n"] else ""
    if verb == "delete" and "/" in what:
        kind, name = what.split("/")
        # Nobody here would finish a namespace's deletion, and the next tests would have none.
        dry = "?dryRun=All" if kind == "namespaces" else ""
        server.delete(f"{GROUPS[kind]}{within}/{kind}/{name}{dry}")
        return
    for kind in what.split(","):
        collection = f"{GROUPS[kind]}{within}/{kind}"
        selected = f"{collection}?labelSelector={quote(options['-l'])}"
        if verb == "delete":
            server.ask("DELETE", selected)
            continue
        assert verb == "label"
        for each in server.get(selected)["items"]:
            present = [key for key in keys if key in (each["metadata"].get("labels") or {})]
            if present:
                patch = {"metadata": {"labels": dict.fromkeys(present)}}
                path = f"{collection}/{each['metadata']['name']}"
                server.ask("PATCH", path, patch, content_type=MERGE)


@pytest.fixture
def cluster(apiserver: RealApiServer, go_program: GoProgram) -> Iterator[Cluster]:
    yield deploy(apiserver, go_program("kustomize"))
    deploy(apiserver, go_program("kustomize"))  # other tests of this process have deployed it too


@pytest.fixture
def api(apiserver: RealApiServer) -> Iterator[ApiServer]:
    api = ApiServer(Access(server=apiserver.url, ca_file=apiserver.ca, token=apiserver.token))
    yield api
    api.close()


def publish(api: ApiServer, server: RealApiServer) -> str:
    """A node with all that the publisher writes; its name."""
    node = f"migrated-{next(NUMBERS)}"
    server.create_node(node)
    sink = ApiSink(api, node=node, takeover_after_s=180)
    for body in bodies(composer("labels: {write: node}")).values():
        body["metadata"]["name"] = node
        sink.publish(body, 0)
    return node


def exists(server: RealApiServer, kind: str, name: str) -> bool:
    return server.request("GET", f"{GROUPS[kind]}/{kind}/{name}").status == 200


def other(node: str) -> dict[str, Any]:
    """An object as resource-topology-exporter creates it."""
    body = {key: value for key, value in nrt(node).items() if key != "metadata"}
    return {
        **body,
        "metadata": {"name": node, "annotations": {"k8stopoawareschedwg/rte-update": "periodic"}},
    }


def test_the_lines_of_removal_leave_nothing_of_ours_and_all_of_others(
    cluster: Cluster, api: ApiServer
) -> None:
    server = cluster.apiserver
    node = publish(api, server)
    server.create_node("anothers")
    path = f"{GROUPS['noderesourcetopologies']}/noderesourcetopologies"
    server.create(f"{path}?fieldManager=resource-topology-exporter", other("anothers"))
    server.ask(
        "PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": {"a": "b"}}}, content_type=MERGE
    )
    try:
        for words in lines("install.md", "Remove"):
            kubectl(server, words)
        assert not exists(server, "noderesourcetopologies", node)
        assert not exists(server, "gpufabrics", node)
        assert exists(server, "noderesourcetopologies", "anothers")
        assert server.get(f"/api/v1/nodes/{node}")["metadata"]["labels"] == {"a": "b"}
        gone = [each for each in cluster.objects if each["metadata"].get("namespace") is None]
        for each in gone:
            answer = server.request("GET", server.path(each))
            if each["kind"] == "CustomResourceDefinition":
                assert answer.status == 200
            elif each["kind"] != "Namespace":
                assert answer.status == 404, each["kind"]
        for each in of_kind(cluster.objects, "DaemonSet"):
            assert server.request("GET", server.path(each)).status == 404
    finally:
        server.delete(f"{path}/anothers")


def test_after_the_way_back_removal_spares_the_other_exporters_objects(
    cluster: Cluster, api: ApiServer
) -> None:
    server = cluster.apiserver
    node = publish(api, server)
    path = f"{GROUPS['noderesourcetopologies']}/noderesourcetopologies/{node}"
    # As resource-topology-exporter does: it reads, puts its own zones and attributes, and updates.
    live = server.get(path)
    theirs = {**live, "zones": live["zones"][:1], "attributes": live["attributes"][:1]}
    server.ask("PUT", f"{path}?fieldManager=resource-topology-exporter", theirs)
    for words in lines("migrate.md", "Back to another exporter"):
        kubectl(server, words)
    for words in lines("install.md", "Remove")[1:3]:
        kubectl(server, words)
    left = server.get(path)
    assert left["zones"] == theirs["zones"]
    assert left["attributes"] == theirs["attributes"]
    assert not exists(server, "gpufabrics", node)


def test_every_label_that_we_may_write_is_in_the_line_that_removes_them() -> None:
    (words,) = (words for words in lines("install.md", "Remove") if words[0] == "label")
    assert [word.removesuffix("-") for word in words[3:]] == [label.value for label in Label]
