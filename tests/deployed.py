"""deploy/ as a cluster gets it: rendered with kubectl's library, applied strictly."""

import subprocess
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.real_apiserver import APPLY, ApiServer, Json
from tests.waiting import until

Rule = tuple[str, str, str]  # API group, resource, verb

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


@cache
def rendered(program: Path, folder: Path) -> tuple[Json, ...]:
    done = subprocess.run([program, folder], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(yaml.load_all(done.stdout, loader))


def render(program: Path, folder: Path) -> list[Json]:
    """The objects of a folder in the order in which kubectl sends them; they may be changed."""
    return deepcopy(list(rendered(program, folder)))


def of_kind(objects: Iterable[Json], kind: str) -> list[Json]:
    return [each for each in objects if each["kind"] == kind]


def config_text(objects: list[Json], daemon_set: Json) -> str:
    """The configuration file that a DaemonSet's pods find."""
    volumes = daemon_set["spec"]["template"]["spec"]["volumes"]
    (name,) = (v["configMap"]["name"] for v in volumes if "configMap" in v)
    (data,) = (c["data"] for c in of_kind(objects, "ConfigMap") if c["metadata"]["name"] == name)
    text: str = data["rte.yaml"]
    return text


def apply_strictly(apiserver: ApiServer, manifest: Json) -> Json:
    """Apply it; a field that the API does not know is an error."""
    path = apiserver.path(manifest)
    query = "?fieldManager=deploy&force=true&fieldValidation=Strict"
    applied = apiserver.ask("PATCH", path + query, manifest, content_type=APPLY)
    if manifest["kind"] == "CustomResourceDefinition":
        apiserver.wait_established(path)
    return applied


def rules(of: Iterable[Json]) -> set[Rule]:
    return {
        (group, resource, verb)
        for rule in of
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def granted(apiserver: ApiServer, token: str) -> set[Rule]:
    """All that a token may do with resources, by the API server's own word."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview"}
    answer = apiserver.ask(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
        {**review, "spec": {"namespace": "rte"}},
        token=token,
    )
    found: list[Json] = answer["status"]["resourceRules"]
    assert not any(rule.get("resourceNames") for rule in found)
    return rules(found)


def give_rights(apiserver: ApiServer, objects: Iterable[Json]) -> None:
    """The agents have the rights of these objects, and no others, from now on: all tests of a
    process share its API server, in whatever order they come."""
    (role,) = of_kind(objects, "ClusterRole")
    apply_strictly(apiserver, role)
    token = apiserver.create_token("rte", "rte")
    # What every service account may do is about these.
    of_everybody = ("authentication.k8s.io", "authorization.k8s.io", "certificates.k8s.io")

    def own() -> set[Rule]:
        return {rule for rule in granted(apiserver, token) if rule[0] not in of_everybody}

    wanted = rules(role["rules"])
    until(lambda: own() == wanted, lambda: f"{sorted(own())}, not {sorted(wanted)}")


class Cluster(NamedTuple):
    """An API server in which the base is applied."""

    apiserver: ApiServer
    objects: list[Json]

    def token(self, daemon_set: Json, pod: str, *, node: str | None) -> str:
        """The token that a new pod of the DaemonSet would find; the pod is bound to the node."""
        template = daemon_set["spec"]["template"]
        spec = {**template["spec"], **({"nodeName": node} if node else {})}
        metadata = {**template["metadata"], "name": pod, "namespace": "rte"}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        collection = self.apiserver.path(manifest).rsplit("/", 1)[0]
        made = self.apiserver.create(f"{collection}?fieldValidation=Strict", manifest)
        return self.apiserver.create_token("rte", spec["serviceAccountName"], pod=made)


def deploy(apiserver: ApiServer, program: Path) -> Cluster:
    """Apply the base, and what else its pods need of a cluster."""
    objects = render(program, DEPLOY / "base")
    for each in objects:
        apply_strictly(apiserver, each)
    runtime_class = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia"}
    apply_strictly(apiserver, {**runtime_class, "metadata": {"name": "nvidia"}})
    return Cluster(apiserver, objects)
