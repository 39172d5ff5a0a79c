"""The pod fingerprint against the literals that its users' own tests hold, and who is counted."""

import random
from pathlib import Path

import pytest

from rte.model import (
    ContainerUse,
    DeviceId,
    DeviceUse,
    MemoryBlock,
    NumaId,
    PodFacts,
    PodName,
    PodUse,
    Usage,
    base_units,
    thousandths,
)
from rte.publish.fingerprint import InformerMode, fingerprint, pods_by_requests, pods_by_usage

PUBLISHED_PODS = Path(__file__).parent / "data" / "podfingerprint-pods.txt"


def names(*pods: str) -> list[PodName]:
    parts = [pod.split("/") for pod in pods]
    return [PodName(namespace=namespace, name=name) for namespace, name in parts]


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        # podfingerprint tracing_test.go, scheduler-plugins overreserve_test.go, RTE's tests
        (["ns1/n1", "ns1/n2", "ns2/n1", "ns3/n1", "ns3/n2"], "pfp0v001b92008c14168b3a6"),
        (["namespace1/pod1"], "pfp0v0019e0420efb37746c6"),
        (["default/test-pod-0"], "pfp0v001fe53c4dbd2c5f4a0"),
        # computed by the reference implementation
        ([], "pfp0v001ef46db3751d8e999"),
        (["default/nginx"], "pfp0v0016a5a78cfbc52d821"),
        (["ns1/pod1", "ns2/pod2"], "pfp0v001d4294c0b68c76415"),
        (["namespace1/pod1", "namespace2/pod2"], "pfp0v00147229ba6b99c1493"),
        (["namespace1/pod1", "namespace1/pod1"], "pfp0v0011bbf33856a38ab48"),
    ],
)
def test_published_vectors(pods: list[str], expected: str) -> None:
    assert fingerprint(names(*pods)) == expected
    assert fingerprint(names(*reversed(pods))) == expected


def test_the_259_pods_of_the_reference_in_any_order() -> None:
    lines = PUBLISHED_PODS.read_text().splitlines()
    pods = names(*(line for line in lines if not line.startswith("#")))
    assert len(pods) == 259
    for seed in range(3):
        random.Random(seed).shuffle(pods)
        assert fingerprint(pods) == "pfp0v001e477a4e3b2fc0ec6"


def used(**fields: object) -> Usage:
    container = ContainerUse(name="main", **fields)  # type: ignore[arg-type]
    return Usage(pods=(PodUse(pod=PodName(namespace="ns", name="pod"), containers=(container,)),))


def device(*numa: int) -> DeviceUse:
    nodes = tuple(NumaId(node) for node in numa)
    return DeviceUse(resource="nvidia.com/gpu", id=DeviceId("GPU-0"), numa=nodes)


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        pytest.param(used(), False, id="a pod that holds nothing is not counted"),
        pytest.param(used(cpus=(1, 2)), True, id="exclusive CPUs count"),
        pytest.param(used(devices=(device(0),)), True, id="a device with a NUMA node counts"),
        pytest.param(used(devices=(device(),)), False, id="a device without a NUMA node does not"),
        pytest.param(
            used(memory=(MemoryBlock(type="memory", size_bytes=1, numa=(NumaId(0),)),)),
            True,
            id="bound memory counts",
        ),
        pytest.param(
            used(memory=(MemoryBlock(type="memory", size_bytes=1, numa=()),)),
            False,
            id="memory of no NUMA node does not count",
        ),
        pytest.param(
            Usage(pods=(PodUse(pod=PodName(namespace="ns", name="pod"), cpus=(4,)),)),  # type: ignore[arg-type]
            True,
            id="CPUs that the pod's containers share count",
        ),
    ],
)
def test_rule_of_pod_resources(usage: Usage, counted: bool) -> None:
    assert bool(pods_by_usage(usage)) is counted


def facts(
    *, phase: str = "Running", qos: str = "Guaranteed", **requests: dict[str, str]
) -> PodFacts:
    pod = PodName(namespace="ns", name="pod")
    return PodFacts(pod=pod, phase=phase, qos=qos, requests=requests)


GPU = {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize(
    ("pod", "dedicated", "shared"),
    [
        pytest.param(facts(main=GPU), True, True, id="a listed device, Guaranteed"),
        pytest.param(facts(main=GPU, qos="BestEffort"), True, True, id="a listed device, any QoS"),
        pytest.param(facts(main={"a.com/b": "1"}), False, False, id="a device no zone lists"),
        pytest.param(facts(main={"cpu": "2"}), True, True, id="whole CPUs"),
        pytest.param(facts(main={"cpu": "2000m"}), True, True, id="whole CPUs in thousandths"),
        pytest.param(facts(main={"cpu": "2.0"}), True, True, id="whole CPUs with a fraction of 0"),
        pytest.param(facts(main={"cpu": "1500m"}), False, False, id="a part of a CPU"),
        pytest.param(facts(main={"cpu": "0"}), False, False, id="no CPU"),
        pytest.param(facts(main={"cpu": "2"}, qos="Burstable"), False, False, id="Burstable"),
        pytest.param(facts(main={"memory": "1Gi"}), True, True, id="memory"),
        pytest.param(facts(main={"hugepages-2Mi": "2Mi"}), True, True, id="huge pages"),
        pytest.param(facts(main={"memory": "0"}), False, False, id="no memory"),
        pytest.param(
            facts(main={"ephemeral-storage": "1Gi"}), False, False, id="native, of no NUMA node"
        ),
        pytest.param(facts(main={}, proxy=GPU), True, True, id="a second container's device"),
        pytest.param(facts(main=GPU, phase="Pending"), False, False, id="Pending is never counted"),
        pytest.param(
            facts(main=GPU, phase="Succeeded"), True, False, id="Completed, not deleted: Dedicated"
        ),
        pytest.param(facts(main=GPU, phase="Failed"), True, False, id="Failed: Dedicated"),
    ],
)
def test_rule_of_the_scheduler(pod: PodFacts, dedicated: bool, shared: bool) -> None:
    for mode, counted in [(InformerMode.DEDICATED, dedicated), (InformerMode.SHARED, shared)]:
        found = pods_by_requests([pod], resources={"cpu", "nvidia.com/gpu"}, mode=mode)
        assert found == ((pod.pod,) if counted else ()), mode


@pytest.mark.parametrize(
    ("text", "milli"),
    [
        ("0", 0),
        ("2", 2000),
        ("500m", 500),
        ("0.5", 500),
        (".5", 500),
        ("5.", 5000),
        ("1Ki", 1024_000),
        ("1.5Gi", 3 * 2**29 * 1000),
        ("2e3", 2_000_000),
        ("2E3", 2_000_000),
        ("25e-1", 2500),
        ("1E", 10**21),
        ("1Ei", 2**60 * 1000),
        ("1u", 1),
        ("1n", 1),
        ("-1500m", -1500),
        ("+3k", 3_000_000),
    ],
)
def test_quantities_are_read_as_apimachinery_reads_them(text: str, milli: int) -> None:
    assert thousandths(text) == milli


@pytest.mark.parametrize(
    "text", ["", "x", "1 Gi", "1gi", "1e", "--1", "1Mi2", "0x10", "1_000", "\u0661"]
)
def test_no_quantity_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        thousandths(text)


def test_base_units_round_away_from_zero() -> None:
    read = [base_units(text) for text in ("1500m", "1", "1n", "-1500m", "64Gi")]
    assert read == [2, 1, 1, -2, 64 * 2**30]
