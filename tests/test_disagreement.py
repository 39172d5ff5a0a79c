"""When a publisher that may not watch pods would say another fingerprint than the scheduler."""

import pytest

from rte.model import (
    Allocatable,
    ContainerUse,
    DeviceId,
    DeviceUse,
    NumaId,
    Observation,
    PodFacts,
    PodName,
    PodUse,
    Usage,
)
from rte.publish.disagreement import rules_disagree
from rte.publish.fingerprint import InformerMode
from rte.publish.nrt import FingerprintMethod
from tests.small_machine import machine

GPU = "nvidia.com/gpu"
BODY = {"zones": [{"name": "node-0", "resources": [{"name": GPU}]}]}
A = PodName(namespace="n", name="a")


def facts(phase: str) -> tuple[PodFacts, ...]:
    return (PodFacts(pod=A, phase=phase, qos="Burstable", requests={"c": {GPU: "1"}}),)


ROWS: dict[str, tuple[tuple[PodFacts, ...] | None, bool, bool | None]] = {
    "nobody tells of pods": (None, True, None),
    "a pod runs with its GPU": (facts("Running"), True, False),
    "a pod is listed and still pending": (facts("Pending"), True, True),
    "a completed pod that nobody deleted": (facts("Succeeded"), False, True),
}


@pytest.mark.parametrize(("pods", "listed", "differ"), ROWS.values(), ids=ROWS.keys())
def test_the_rules_differ(
    pods: tuple[PodFacts, ...] | None, listed: bool, differ: bool | None
) -> None:
    device = DeviceUse(resource=GPU, id=DeviceId("GPU-0"), numa=(NumaId(0),))
    holds = ContainerUse(name="c", devices=(device,))
    observation = Observation(
        machine=machine(),
        usage=Usage(pods=(PodUse(pod=A, containers=(holds,)),) if listed else ()),
        allocatable=Allocatable(devices=(device,)),
        policy=None,
        pods=pods,
    )
    found = rules_disagree(
        observation,
        BODY,
        mode=InformerMode.DEDICATED,
        method=FingerprintMethod.WITH_EXCLUSIVE_RESOURCES,
    )
    assert found is differ
