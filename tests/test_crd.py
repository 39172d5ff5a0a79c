"""That our copy of the NodeResourceTopology API is the upstream module's."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gobuild import run_go, toolchain
from tests.real_apiserver import ApiServer

CRD = Path(__file__).parents[1] / "crds" / "noderesourcetopology"

UPSTREAM = "github.com/k8stopologyawareschedwg/noderesourcetopology-api@v0.1.3"
CHECKSUM = "h1:aXkBkkcxBYmr9anRPeaz68tvP2bX2HutrGgqr4hoXE4="


def structure(crd: dict[str, Any]) -> Any:
    """All that the API server goes by: no descriptions, no traces of the tool that wrote it."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if not is_text(k, v)}
        if isinstance(value, list):
            return [plain(v) for v in value]
        return value

    def is_text(key: str, value: Any) -> bool:
        return key == "description" and isinstance(value, str)

    spec = plain(crd["spec"])
    spec["versions"].sort(key=lambda version: version["name"])
    approval = crd["metadata"]["annotations"]["api-approved.kubernetes.io"]
    return {"name": crd["metadata"]["name"], "approval": approval, "spec": spec}


@pytest.mark.usefixtures("go_program")
def test_the_crd_is_upstreams_structure_for_structure() -> None:
    module = json.loads(run_go(toolchain()[0], "mod", "download", "-json", UPSTREAM))
    assert module["Sum"] == CHECKSUM
    upstream = yaml.safe_load((Path(module["Dir"]) / "manifests" / "crd.yaml").read_text())
    ours = yaml.safe_load((CRD / "crd.yaml").read_text())
    assert structure(ours) == structure(upstream)


def test_the_api_server_takes_the_crd_and_the_example(apiserver: ApiServer) -> None:
    apiserver.apply_files(CRD / "crd.yaml", CRD / "example.yaml")
    path = "/apis/topology.node.k8s.io/v1alpha1/noderesourcetopologies/example-node"
    stored = apiserver.get(path.replace("v1alpha1", "v1alpha2"))
    example = yaml.safe_load((CRD / "example.yaml").read_text())
    assert stored["zones"] == example["zones"]
    assert apiserver.get(path)["zones"] == example["zones"]
