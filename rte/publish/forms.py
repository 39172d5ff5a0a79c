"""The forms in which objects are written: metadata, zones, attributes and quantities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MANAGED_BY = {"app.kubernetes.io/managed-by": "rte"}


def metadata(node_name: str, node_uid: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {"name": node_name, "labels": dict(MANAGED_BY)}
    if node_uid is not None:
        owner = {"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": node_uid}
        body["ownerReferences"] = [owner]
    return body


def zone_body(
    name: str, type_: str, *, parent: str | None = None, values: Mapping[str, str]
) -> dict[str, Any]:
    body: dict[str, Any] = {"name": name, "type": type_}
    if parent is not None:
        body["parent"] = parent
    if values:
        body["attributes"] = attributes(values)
    return body


def attributes(values: Mapping[str, str]) -> list[dict[str, str]]:
    """By name."""
    return [{"name": name, "value": values[name]} for name in sorted(values)]


def binary_quantity(size_bytes: int) -> str:
    """The canonical form that apimachinery gives a BinarySI quantity: 256Gi, 263906744Ki, 1023."""
    return canonical(size_bytes, 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))


def decimal_quantity(count: int) -> str:
    """The canonical form that apimachinery gives a DecimalSI quantity: 8, 1k."""
    return canonical(count, 1000, ("", "k", "M", "G", "T", "P", "E"))


def canonical(number: int, step: int, suffixes: Sequence[str]) -> str:
    """With the largest suffix that leaves it whole."""
    power = 0
    while number and number % step == 0 and power < len(suffixes) - 1:
        number //= step
        power += 1
    return f"{number}{suffixes[power]}"
