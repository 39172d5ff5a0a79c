"""Beside NVIDIA's GPU operator: on which nodes the agent is, and when it leaves one."""

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from rte.config import load
from tests.conftest import GoProgram
from tests.deployed import DEPLOY, of_kind, render

PLUGIN, CLIENT = "nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.deploy.client"
UPGRADE, CUTTING = "paused-for-driver-upgrade", "paused-for-mig-change"


def matches(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A nodeSelectorTerm, as Kubernetes reads it: all expressions; NotIn is true without label."""
    for expression in term["matchExpressions"]:
        inside = labels.get(expression["key"]) in expression["values"]
        if inside != (expression["operator"] == "In"):
            return False
    return True


@pytest.mark.parametrize(
    ("labels", "there"),
    [
        pytest.param({}, False, id="a node without GPUs"),
        pytest.param({PLUGIN: "true"}, True, id="an operator before 26.7"),
        pytest.param({PLUGIN: "true", CLIENT: "true"}, True, id="an operator from 26.7 on"),
        pytest.param({PLUGIN: UPGRADE}, False, id="the driver is upgraded"),
        pytest.param({PLUGIN: CUTTING, CLIENT: "true"}, False, id="slices are made"),
        pytest.param({PLUGIN: "true", CLIENT: UPGRADE}, False, id="only clients are paused"),
        pytest.param({PLUGIN: "true", CLIENT: CUTTING}, False, id="clients, for slices"),
        pytest.param({PLUGIN: "false"}, False, id="switched off for the node"),
        pytest.param({PLUGIN: "true", CLIENT: "false"}, False, id="clients are switched off"),
    ],
)
def test_the_agent_is_where_the_operators_label_says_and_leaves_when_it_is_paused(
    go_program: GoProgram, labels: dict[str, str], there: bool
) -> None:
    objects = render(go_program("kustomize"), DEPLOY / "overlays/gpu-operator")
    (daemon_set,) = of_kind(objects, "DaemonSet")
    affinity = daemon_set["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    # Of a DaemonSet's pods this counts also later: its controller ends them on other nodes.
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert any(matches(term, labels) for term in terms) is there


def test_the_operators_values_leave_the_device_plugin_to_us_and_name_a_strategy_of_ours() -> None:
    values = yaml.safe_load((DEPLOY / "examples/gpu-operator-values.yaml").read_text())
    assert values["devicePlugin"] == {"enabled": False}
    strategy = values["mig"]["strategy"]
    assert load(environ={"MIG_STRATEGY": strategy}).devices.mig_strategy == strategy
