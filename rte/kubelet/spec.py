"""What a pod asks for, from its manifest, with the API server's defaults and QoS class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rte.model import PodName, thousandths

MOST_CONTAINERS = 1000
"""A manifest is a stranger's file; a real pod has tens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """Requests and limits in thousandths of a unit; requests that are absent are the limits."""

    name: str
    requests: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    init: bool = False
    restartable: bool = False  # an init container that runs on beside the others

    @property
    def ends_before_the_others(self) -> bool:
        return self.init and not self.restartable


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    pod: PodName
    containers: tuple[ContainerSpec, ...]  # init containers first, each kind in its order
    requests: Mapping[str, int] = field(default_factory=dict)  # of the pod itself, thousandths
    limits: Mapping[str, int] = field(default_factory=dict)
    overhead: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_pod_level_resources(self) -> bool:
        return bool(self.requests or self.limits)

    @property
    def qos(self) -> str:
        """Guaranteed, Burstable or BestEffort, by cpu and memory alone."""
        holders = [self] if self.has_pod_level_resources else self.containers
        requests, limits = total(h.requests for h in holders), total(h.limits for h in holders)
        if not requests and not limits:
            return "BestEffort"
        limited = all(
            holder.limits.get("cpu") and holder.limits.get("memory") for holder in holders
        )
        return "Guaranteed" if limited and requests == limits else "Burstable"


def total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums of cpu and memory; what is zero is absent."""
    found: dict[str, int] = {}
    for part in parts:
        for name in ("cpu", "memory"):
            if part.get(name):
                found[name] = found.get(name, 0) + part[name]
    return found


def parse_pod(manifest: Mapping[str, Any]) -> PodSpec:
    """The pod in a manifest of kind Pod. Raises ValueError naming the field."""
    metadata = mapping(manifest.get("metadata"), "metadata")
    spec = mapping(manifest.get("spec"), "spec")
    name = metadata.get("name") or metadata.get("generateName")
    if not isinstance(name, str):
        raise ValueError(f"metadata.name: expected a string, read {name!r:.80}")
    namespace = metadata.get("namespace") or "default"
    if not isinstance(namespace, str):
        raise ValueError(f"metadata.namespace: expected a string, read {namespace!r:.80}")
    containers = [
        parse_container(entry, at=f"spec.{kind}[{number}]", init=kind == "initContainers")
        for kind in ("initContainers", "containers")
        for number, entry in enumerate(entries(spec, kind))
    ]
    if not any(not container.init for container in containers):
        raise ValueError("spec.containers: expected at least one container")
    names = [container.name for container in containers]
    if len(set(names)) != len(names):
        raise ValueError(f"spec.containers: two have one name: {sorted(names)!r:.200}")
    own = mapping(spec.get("resources"), "spec.resources")
    limits = quantities(own, "limits", "spec.resources")
    return PodSpec(
        pod=PodName(namespace=namespace, name=name),
        containers=tuple(containers),
        requests={**limits, **quantities(own, "requests", "spec.resources")},
        limits=limits,
        overhead=quantities(spec, "overhead", "spec"),
    )


def parse_container(entry: Any, *, at: str, init: bool) -> ContainerSpec:
    container = mapping(entry, at)
    name = container.get("name")
    if not isinstance(name, str):
        raise ValueError(f"{at}.name: expected a string, read {name!r:.80}")
    resources = mapping(container.get("resources"), f"{at}.resources")
    limits = quantities(resources, "limits", f"{at}.resources")
    return ContainerSpec(
        name=name,
        requests={**limits, **quantities(resources, "requests", f"{at}.resources")},
        limits=limits,
        init=init,
        restartable=init and container.get("restartPolicy") == "Always",
    )


def mapping(value: Any, at: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{at}: expected a map, read {value!r:.80}")
    return value


def entries(spec: Mapping[str, Any], key: str) -> list[Any]:
    value = spec.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MOST_CONTAINERS:
        raise ValueError(f"spec.{key}: expected a list of containers, read {value!r:.80}")
    return value


def quantities(holder: Mapping[str, Any], key: str, at: str) -> dict[str, int]:
    found = {}
    for name, value in mapping(holder.get(key), f"{at}.{key}").items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError(f"{at}.{key}.{name}: expected a quantity, read {value!r:.80}")
        try:
            found[str(name)] = thousandths(str(value))
        except ValueError as error:
            raise ValueError(f"{at}.{key}.{name}: {error}") from error
        if found[str(name)] < 0:
            raise ValueError(f"{at}.{key}.{name}: {value!r} is less than nothing")
    return found


def pod_total(spec: PodSpec, amounts: Mapping[str, int]) -> int:
    """What the pod needs at once of something, from what each container needs by name.

    Init containers run one by one, before the others and beside the restartable ones of before.
    """
    peak = restartable = 0
    for container in spec.containers:
        amount = amounts.get(container.name, 0)
        if container.restartable:
            restartable += amount
            peak = max(peak, restartable)
        elif container.init:
            peak = max(peak, restartable + amount)
    running = sum(amounts.get(c.name, 0) for c in spec.containers if not c.init)
    return max(peak, running + restartable)
