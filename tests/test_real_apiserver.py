"""That the API server the other tests lean on is one, with all that they need of it."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GoProgram
from tests.real_apiserver import APPLY, ApiServer, ApiServerError
from tests.waiting import until

CRD = Path(__file__).parents[1] / "crds" / "noderesourcetopology"


def nrt(name: str, available: str) -> dict[str, Any]:
    gpu = {"name": "nvidia.com/gpu", "capacity": "4", "allocatable": "4", "available": available}
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": name},
        "zones": [{"name": "node-0", "type": "Node", "resources": [gpu]}],
    }


def test_it_is_ready_and_of_the_release_that_is_claimed(apiserver: ApiServer) -> None:
    assert apiserver.request("GET", "/readyz").body == {"message": "ok"}
    assert apiserver.get("/version")["gitVersion"] == "v1.37.2"


def test_an_nrt_that_is_applied_twice_keeps_its_resource_version(apiserver: ApiServer) -> None:
    apiserver.apply_files(CRD / "crd.yaml", CRD / "example.yaml")
    first = apiserver.apply(nrt("twice", "4"))
    second = apiserver.apply(nrt("twice", "4"))
    third = apiserver.apply(nrt("twice", "3"))
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
    assert second["metadata"]["resourceVersion"] != third["metadata"]["resourceVersion"]
    with pytest.raises(ApiServerError) as conflict:
        apiserver.apply(nrt("twice", "2"), field_manager="another", force=False)
    assert conflict.value.status == 409


def test_a_pods_token_may_do_what_rbac_says_and_names_its_node(apiserver: ApiServer) -> None:
    apiserver.apply_files(CRD / "crd.yaml")
    namespace = apiserver.create_namespace()
    apiserver.create_service_account(namespace, "publisher")
    apiserver.create_node("worker-7")
    pod = apiserver.create_pod(namespace, "p", service_account="publisher", node="worker-7")
    token = apiserver.create_token(namespace, "publisher", pod=pod)

    path = f"{apiserver.path(nrt('worker-7', '4'))}?fieldManager=publisher"
    options: dict[str, Any] = {"token": token, "content_type": APPLY}
    assert apiserver.request("PATCH", path, nrt("worker-7", "4"), **options).status == 403

    rule = {
        "apiGroups": ["topology.node.k8s.io"],
        "resources": ["noderesourcetopologies"],
        "verbs": ["get", "create", "patch"],
    }
    apiserver.grant(namespace, "publisher", [rule])
    until(
        lambda: apiserver.request("PATCH", path, nrt("worker-7", "4"), **options).status == 201,
        lambda: "the role is in force",
    )

    who = apiserver.create(
        "/apis/authentication.k8s.io/v1/tokenreviews", {"spec": {"token": token}}
    )
    extra = who["status"]["user"]["extra"]
    assert extra["authentication.kubernetes.io/node-name"] == ["worker-7"]


def test_an_admission_policy_denies(apiserver: ApiServer) -> None:
    apiserver.apply_files(CRD / "crd.yaml")
    api_version = "admissionregistration.k8s.io/v1"
    rule = {
        "apiGroups": ["topology.node.k8s.io"],
        "apiVersions": ["*"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["noderesourcetopologies"],
    }
    policy = {
        "apiVersion": api_version,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "no-forbidden-names"},
        "spec": {
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": "!object.metadata.name.startsWith('forbidden')"}],
        },
    }
    binding = {
        "apiVersion": api_version,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "no-forbidden-names"},
        "spec": {"policyName": "no-forbidden-names", "validationActions": ["Deny"]},
    }
    apiserver.apply(policy)
    apiserver.apply(binding)

    names = iter(range(1000))

    def denied() -> bool:
        name = f"forbidden-{next(names)}"
        path = apiserver.path(nrt(name, "4"))
        return apiserver.request(
            "PATCH", f"{path}?fieldManager=t", nrt(name, "4"), content_type=APPLY
        ).status in {403, 422}

    until(denied, lambda: "the policy is in force")
    apiserver.apply(nrt("allowed", "4"))


def test_a_server_that_cannot_start_says_why(go_program: GoProgram) -> None:
    with pytest.raises(ApiServerError, match="unknown flag: --no-such-flag"):
        ApiServer(go_program("apiserver"), ["--no-such-flag"])
