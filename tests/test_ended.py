"""Which listed pods hold nothing any more: kubelets before 1.34 list those that have ended.

tests/test_accounting_kubelet.py has the cases that a kubelet's managers can make; these are moments
between the list, its files and the API server.
"""

from typing import Any

import pytest

from rte.kubelet.ended import with_ended
from rte.kubelet.memory import with_memory
from rte.kubelet.state import HandedOut, PodUid
from rte.model import (
    ContainerUse,
    CpuId,
    DeviceId,
    DeviceUse,
    MemoryBlock,
    NumaId,
    PodFacts,
    PodName,
    PodUse,
    Usage,
)

WEB = PodName(namespace="ns", name="web-0")
BLOCK = MemoryBlock(type="memory", size_bytes=1 << 30, numa=(NumaId(0),))
CPUS = frozenset({CpuId(2), CpuId(3)})
GPU = DeviceUse(resource="nvidia.com/gpu", id=DeviceId("GPU-0"), numa=(NumaId(0),))


def listed(**held: Any) -> Usage:
    return Usage(pods=(PodUse(pod=WEB, containers=(ContainerUse(name="c", **held),)),))


def names(usage: Usage, handed_out: HandedOut, *, phase: str = "Failed") -> list[PodName]:
    """The pods that count, when the API server says this phase of the pod with UID `old`."""
    facts = PodFacts(pod=WEB, phase=phase, qos="Guaranteed", uid="old")
    return [pod.pod for pod in with_ended(usage, handed_out, pods=(facts,)).pods]


def held_by(uid: str) -> HandedOut:
    holder = (PodUid(uid), "c")
    return HandedOut(cpus={holder: CPUS}, memory={holder: (BLOCK,)})


USAGE = listed(cpus=tuple(sorted(CPUS)), memory=(BLOCK,))


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_listed_pod_that_has_ended_holds_nothing(phase: str) -> None:
    assert names(USAGE, held_by("old"), phase=phase) == []
    assert names(USAGE, held_by("old"), phase="Running") == [WEB]


def test_a_pod_of_the_same_name_that_the_api_server_has_not_told_of_holds_what_it_lists() -> None:
    assert names(USAGE, held_by("new")) == [WEB]
    assert names(listed(memory=(BLOCK,)), held_by("new")) == [WEB]


def test_a_pod_with_devices_is_still_ending() -> None:
    holder = (PodUid("old"), "c")
    files = HandedOut(
        devices={holder: frozenset({(GPU.resource, GPU.id)})},
        device_nodes={(GPU.resource, GPU.id): GPU.numa},
    )
    assert names(listed(devices=(GPU,)), files) == [WEB]


def test_memory_of_ended_pods_comes_back_to_a_node_once() -> None:
    """Of the first node of the group what is taken there, whoever has taken it, and the rest of the
    next: what one block gave back is no more to be had by another."""
    both = (NumaId(0), NumaId(1))
    files = HandedOut(
        memory={
            (PodUid(uid), "c"): (MemoryBlock(type="memory", size_bytes=size, numa=both),)
            for uid, size in (("one", 5), ("two", 2))
        },
        memory_free={"memory": {NumaId(0): 0, NumaId(1): 1}},
        memory_taken={"memory": {NumaId(0): 4, NumaId(1): 3}},
        memory_cells={NumaId(0): both, NumaId(1): both},
    )
    usage = with_memory(Usage(), files)
    assert usage.memory_free == {"memory": {0: 4, 1: 4}}
    assert usage.memory_groups == {}


def test_without_the_files_the_list_counts() -> None:
    assert names(USAGE, HandedOut()) == [WEB]
