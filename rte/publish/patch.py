"""Whether two NRT bodies say the same, and the smallest patch from one to the other.

Lists of the CRD are atomic under server-side apply, so a figure is changed by its index. That is
safe only in a patch that is guarded by the resource version which the indexes were taken from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rte.model import thousandths

ECHO = "rteEcho"
"""An attribute that only wakes the scheduler: a counter that comparison ignores."""

STALE = "staleSince"
"""An attribute of an object that may not be true any more."""


def rest(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """All but attributes and zones, and of the metadata what we say."""
    metadata = body.get("metadata", {})
    parts = {"apiVersion", "kind", "metadata", "attributes", "zones"}
    return (
        {key: value for key, value in body.items() if key not in parts},
        metadata.get("name"),
        metadata.get("labels", {}).get("app.kubernetes.io/managed-by"),
        [owner.get("uid") for owner in metadata.get("ownerReferences", ())],
    )


def with_echo(body: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The body with the counter as its last attribute."""
    attributes = [item for item in body.get("attributes", ()) if item["name"] != ECHO]
    return {**body, "attributes": [*attributes, {"name": ECHO, "value": str(count)}]}


def with_stale(body: Mapping[str, Any], since: str) -> dict[str, Any]:
    """The body with the time since when nothing has been known, RFC 3339."""
    attributes = [*body.get("attributes", ()), {"name": STALE, "value": since}]
    return {**body, "attributes": sorted(attributes, key=lambda item: str(item["name"]))}


def is_stale(body: Mapping[str, Any]) -> bool:
    return any(item["name"] == STALE for item in body.get("attributes", ()))


def changes(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """JSON Patch operations from the stored object to the wanted one, for a guarded patch.

    None when the shape differs (zones, resources, costs, parents, owner), which only an apply can
    change; empty when nothing does. The counter rteEcho stays as it is stored.
    """
    echo = [item for item in stored.get("attributes", ()) if item["name"] == ECHO]
    if not any(item["name"] == ECHO for item in wanted.get("attributes", ())):
        wanted = {**wanted, "attributes": [*wanted.get("attributes", ()), *echo]}
    if shape(stored) != shape(wanted):
        return None
    found = attribute_changes("", stored, wanted)
    zones = zip(stored.get("zones", ()), wanted.get("zones", ()), strict=True)
    for number, (before, after) in enumerate(zones):
        at = f"/zones/{number}"
        found += attribute_changes(at, before, after)
        found += figure_changes(at, before, after)
    return found


def shape(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """All but figures and attributes."""
    zones = [
        {
            **{key: value for key, value in zone.items() if key != "attributes"},
            "resources": [resource["name"] for resource in zone.get("resources", ())],
        }
        for zone in body.get("zones", ())
    ]
    return (zones, *rest(body))


def figure_changes(
    at: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Of a zone whose resources are the same."""
    pairs = zip(before.get("resources", ()), after.get("resources", ()), strict=True)
    return [
        {"op": "replace", "path": f"{at}/resources/{index}/{field}", "value": new[field]}
        for index, (old, new) in enumerate(pairs)
        for field in ("capacity", "allocatable", "available")
        if old[field] != new[field]
    ]


def attribute_changes(
    at: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Operations that hold one after the other: what goes, from the end; what comes; new values."""
    path = f"{at}/attributes"
    old, new = list(before.get("attributes", ())), list(after.get("attributes", ()))
    if not old or not new:
        if old or new:
            return [{"op": "add", "path": path, "value": new} if new else remove(path)]
        return []
    found = []
    names = [item["name"] for item in new]
    for index in reversed(range(len(old))):
        if old[index]["name"] not in names:
            found.append(remove(f"{path}/{index}"))
            del old[index]
    for index, item in enumerate(new):
        if index == len(old) or old[index]["name"] != item["name"]:
            found.append({"op": "add", "path": f"{path}/{index}", "value": item})
            old.insert(index, item)
        elif old[index]["value"] != item["value"]:
            value = item["value"]
            found.append({"op": "replace", "path": f"{path}/{index}/value", "value": value})
    if len(old) > len(new):  # in another order
        return [{"op": "replace", "path": path, "value": new}]
    return found


def remove(path: str) -> dict[str, Any]:
    return {"op": "remove", "path": path}


def may_wake(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> bool:
    """Whether a pod that waits may find room now: a reason for an echo.

    Something was freed, or the object covers other pods: until then a scheduler with reservations
    subtracts a pod that it has placed from every zone. None is an object that another process left.
    """
    if before is None:
        return True
    return freed_something(before, after) or fingerprint_of(before) != fingerprint_of(after)


def fingerprint_of(body: Mapping[str, Any]) -> str | None:
    name = "nodeTopologyPodsFingerprint"
    return next((item["value"] for item in body["attributes"] if item["name"] == name), None)


def freed_something(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether some zone has more available of some resource than before."""
    old = available(before)
    return any(
        quantity != old.get(key) and is_more(quantity, old.get(key, "0"))
        for key, quantity in available(after).items()
    )


def available(body: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    return {
        (zone["name"], resource["name"]): resource["available"]
        for zone in body.get("zones", ())
        for resource in zone.get("resources", ())
    }


def is_more(quantity: str, than: str) -> bool:
    return thousandths(str(quantity)) > thousandths(str(than))
