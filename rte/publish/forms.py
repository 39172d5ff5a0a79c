"""The forms in which objects are written: metadata, zones, attributes, quantities and CPU lists."""

from __future__ import annotations

from collections.abc import Mapping
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
    power = 0
    while size_bytes and size_bytes % 1024 == 0 and power < 6:
        size_bytes //= 1024
        power += 1
    return f"{size_bytes}{('', 'Ki', 'Mi', 'Gi', 'Ti', 'Pi', 'Ei')[power]}"


def decimal_quantity(count: int) -> str:
    """The canonical form that apimachinery gives a DecimalSI quantity: 8, 1k."""
    power = 0
    while count and count % 1000 == 0 and power < 6:
        count //= 1000
        power += 1
    return f"{count}{('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}"
