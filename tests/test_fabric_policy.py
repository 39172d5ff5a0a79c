"""Who may ask for fabric resources: deploy/components/fabric-namespaces on a real API server."""

from typing import Any

import pytest
import yaml

from tests.deployed import DEPLOY
from tests.real_apiserver import ApiServer
from tests.waiting import until

POLICY = DEPLOY / "components/fabric-namespaces/admission.yaml"
FABRIC = "nvidia.com/gpu-fabric.ring-0"


def asks(where: str, resource: str) -> dict[str, Any]:
    def container(name: str, limits: dict[str, str]) -> dict[str, Any]:
        return {"name": name, "image": "none", "resources": {"limits": limits}}

    wanted = container("c", {resource: "1"})
    plain = {"name": "p", "image": "none"}
    spec = {
        "containers": {"containers": [plain, wanted]},
        "initContainers": {"initContainers": [wanted], "containers": [plain]},
    }[where]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asks"}, "spec": spec}


@pytest.mark.parametrize("where", ["containers", "initContainers"])
def test_only_namespaces_with_the_label_may_ask(apiserver: ApiServer, where: str) -> None:
    for name, labels in (("fabric-yes", {"rte.dev/gpu-fabric": "allowed"}), ("fabric-no", {})):
        apiserver.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        )
    for each in yaml.safe_load_all(POLICY.read_text()):
        apiserver.apply(each)

    def status(namespace: str, resource: str) -> tuple[int, str]:
        path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
        answer = apiserver.request("POST", path, asks(where, resource))
        return answer.status, str(answer.body.get("message", ""))

    until(lambda: status("fabric-no", FABRIC)[0] != 201)  # in force a moment after it was written
    code, message = status("fabric-no", FABRIC)
    assert code == 422
    assert "namespace fabric-no may not ask for nvidia.com/gpu-fabric resources" in message
    assert status("fabric-yes", FABRIC)[0] == 201
    assert status("fabric-no", "nvidia.com/gpu")[0] == 201
    assert status("fabric-no", "nvidia.com/gpu-fabrication")[0] == 201
