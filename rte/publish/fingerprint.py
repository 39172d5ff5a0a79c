"""The pod fingerprint: by it a scheduler knows that an NRT has seen the pods it has placed itself.

The format is podfingerprint's v0.2: the sum does not depend on the order of the pods, knows their
namespaces and names only, and a pod that comes twice counts twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

from xxhash import xxh64_hexdigest, xxh64_intdigest

from rte.model import ContainerUse, PodFacts, PodName, PodUse, Usage, thousandths

PREFIX = "pfp0v001"
METHOD_WITH_EXCLUSIVE_RESOURCES = "with-exclusive-resources"
"""The value of the Method attribute: only pods that hold something exclusively are counted."""


class InformerMode(StrEnum):
    """Which pods the scheduler counts at all: its plugin's cache.informerMode."""

    DEDICATED = "Dedicated"
    """Every bound pod that is not Pending, Completed ones that nobody deleted among them."""
    SHARED = "Shared"
    """Running pods."""


def fingerprint(pods: Iterable[PodName]) -> str:
    """24 characters: `pfp0v001` and 16 hex digits."""
    sums = sorted(
        xxh64_intdigest(pod.name.encode(), xxh64_intdigest(pod.namespace.encode())) for pod in pods
    )
    return PREFIX + xxh64_hexdigest(b"".join(value.to_bytes(8, "little") for value in sums))


def pods_by_usage(usage: Usage) -> tuple[PodName, ...]:
    """The pods that hold something of a NUMA node, as PodResources tells it (the exporters' rule).

    What it cannot know: phases, and requests that no manager of the kubelet binds.
    """
    return tuple(pod.pod for pod in usage.pods if holds_exclusively(pod))


def holds_exclusively(pod: PodUse) -> bool:
    return bool(
        pod.cpus
        or any(block.numa and block.size_bytes for block in pod.memory)
        or any(container_holds_exclusively(container) for container in pod.containers)
    )


def container_holds_exclusively(container: ContainerUse) -> bool:
    return bool(
        container.cpus
        or any(block.numa and block.size_bytes for block in container.memory)
        or any(device.numa for device in container.devices)
    )


def pods_by_requests(
    pods: Iterable[PodFacts], *, resources: Collection[str], mode: InformerMode
) -> tuple[PodName, ...]:
    """The pods that NodeResourceTopologyMatch counts when it reads an NRT with these resources.

    `resources` are the names that the zones of that NRT list: an extended resource is exclusive
    only if it is among them, of whatever QoS class the pod is.
    """
    return tuple(
        pod.pod
        for pod in pods
        if counts(pod.phase, mode) and any(exclusive_containers(pod, resources=resources))
    )


def pods_by_any_request(pods: Iterable[PodFacts], *, mode: InformerMode) -> tuple[PodName, ...]:
    """The same as releases of the scheduler's plugin up to v0.34 count it: an extended resource is
    exclusive though no zone lists it, and initialisation that ends is asked as well."""
    return tuple(
        pod.pod
        for pod in pods
        if counts(pod.phase, mode)
        and any(
            requests_exclusively(requests, qos=pod.qos, resources=None)
            for requests in (*pod.requests.values(), *pod.init_requests.values())
        )
    )


def counts(phase: str, mode: InformerMode) -> bool:
    return phase == "Running" if mode is InformerMode.SHARED else phase != "Pending"


def exclusive_containers(pod: PodFacts, *, resources: Collection[str]) -> Iterable[str]:
    """Names of the containers with an exclusive request; initialisation that ends is not asked."""
    for container, requests in pod.requests.items():
        if requests_exclusively(requests, qos=pod.qos, resources=resources):
            yield container


def requests_exclusively(
    requests: Mapping[str, str], *, qos: str, resources: Collection[str] | None
) -> bool:
    """`resources` None takes every extended resource for exclusive."""
    return any(
        is_exclusive(resource, quantity, qos=qos, resources=resources)
        for resource, quantity in requests.items()
    )


def is_exclusive(
    resource: str, quantity: str, *, qos: str, resources: Collection[str] | None
) -> bool:
    if not is_native(resource):
        return resources is None or resource in resources
    if qos != "Guaranteed":
        return False
    if resource == "cpu":
        milli = thousandths(quantity)
        return milli > 0 and milli % 1000 == 0
    return is_memory(resource) and thousandths(quantity) > 0


def is_native(resource: str) -> bool:
    """Whether Kubernetes itself defines the resource (IsNativeResource of its helpers)."""
    return "/" not in resource or "kubernetes.io/" in resource


def is_memory(resource: str) -> bool:
    return resource == "memory" or resource.startswith("hugepages-")
