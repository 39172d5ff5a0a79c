"""What is published, and the next write: create, apply, the smallest patch, or none.

A `Publication` is one object in the API server that is ours. It knows what it last wrote and at
which resource version, so that an unchanged body costs no request and changed figures cost a patch
of a few bytes. Another writer's changes are reported and put back at the long interval only:
writers that fight cost the API server more than stale figures cost the scheduler.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec

from rte.model import CpuId, Policy, Scope, TopologyManagerPolicy, parse_ranges
from rte.publish.access import ApiError
from rte.publish.apply import FIELD_MANAGER, ApiServer, Body
from rte.publish.patch import ECHO, changes, with_echo

log = logging.getLogger(__name__)

REPORTED_S = 3600.0
"""How long a foreign change is reported after it last happened."""

SELDOM = 6
"""Of so many re-readings one is of an object that schedulers do not read."""

FORMER_ANNOTATIONS = (
    "k8stopoawareschedwg/rte-update",
    "k8stopoawareschedwg/sleep-duration",
    "k8stopoawareschedwg/update-interval",
    "topology.node.k8s.io/fingerprint",
)
"""What resource-topology-exporter says of its own writes beside zones and attributes."""

PLURAL = {"NodeResourceTopology": "noderesourcetopologies", "GPUFabric": "gpufabrics"}


class Wrote(StrEnum):
    """What a publication came to."""

    CREATED = "create"
    APPLIED = "apply"
    PATCHED = "patch"
    ECHOED = "echo"
    UNCHANGED = "unchanged"
    HELD = "held"
    """Not written: another writer's object, or one that was changed or deleted behind us."""

    @property
    def is_write(self) -> bool:
        return self not in (Wrote.UNCHANGED, Wrote.HELD)


class Outcome(NamedTuple):
    kind: str  # of the object
    wrote: Wrote
    size_bytes: int = 0  # of the request's body
    again_s: float | None = None  # when to publish again though nothing changes


class Sink(Protocol):
    """Where bodies go. `now` is monotonic time in seconds."""

    def publish(self, body: Body, now: float) -> Outcome:
        """Makes the object of this kind and name say what the body says. Raises ApiError."""

    def reread(self, now: float) -> tuple[Outcome, ...]:
        """Looks whether what was published is still there, and puts it back. Raises ApiError."""

    def echo(self) -> Outcome | None:
        """One more small write that wakes waiting pods, or None where nothing is published."""

    def problems(self, now: float) -> Mapping[str, str]:
        """What others did to our objects: a kind each, in words."""

    def forget(self) -> None:
        """What was published belongs to a Node that is gone, and may have gone with it."""


# The API server


class ApiSink:
    """Objects in an API server; labels are applied to the Node itself."""

    def __init__(
        self, api: ApiServer, *, node: str, takeover_after_s: float, owner: bool = True
    ) -> None:
        """`owner` makes the Node the owner of all objects, which needs the right to get it."""
        self.api = api
        self._node = node
        self._takeover_after_s = takeover_after_s
        self._owner = Owner(api, node) if owner else None
        self._objects: dict[str, Publication] = {}
        self._rereads = 0
        self._labels: NodeLabels | None = None

    def publish(self, body: Body, now: float) -> Outcome:
        kind = str(body["kind"])
        if kind == "Node":
            self._labels = self._labels or NodeLabels(self.api, self._node)
            return self._labels.publish(body)
        name = str(body["metadata"]["name"])
        path = f"/apis/{body['apiVersion']}/{PLURAL[kind]}/{quote(name, safe='')}"
        if path not in self._objects:
            self._objects[path] = Publication(
                self.api, path, owner=self._owner, takeover_after_s=self._takeover_after_s
            )
        return self._objects[path].publish(body, now)

    def reread(self, now: float) -> tuple[Outcome, ...]:
        """One request if nothing was changed: of the NodeResourceTopology, which schedulers read,
        and every sixth time of something else instead."""
        self._rereads += 1
        nrt = PLURAL["NodeResourceTopology"]
        often = [of.reread for path, of in self._objects.items() if nrt in path]
        seldom = [of.reread for path, of in self._objects.items() if nrt not in path]
        if self._labels is not None:
            seldom.append(self._labels.reread)
        if seldom and (not often or self._rereads % SELDOM == 0):
            turn = self._rereads // (SELDOM if often else 1) % len(seldom)
            return (seldom[turn](now),)
        return tuple(reread(now) for reread in often)

    def echo(self) -> Outcome | None:
        for path, publication in self._objects.items():
            if PLURAL["NodeResourceTopology"] in path:
                return publication.echo()
        return None

    def published_policy(self) -> Policy | None:
        """The policy that the published object states, whoever wrote it. Raises ApiError."""
        plural = PLURAL["NodeResourceTopology"]
        live = self.api.read(f"/apis/topology.node.k8s.io/v1alpha2/{plural}/{self._node}")
        return published_policy(live) if live else None

    def problems(self, now: float) -> Mapping[str, str]:
        return {
            path: problem
            for path, publication in tuple(self._objects.items())
            if (problem := publication.problem(now)) is not None
        }

    def forget(self) -> None:
        if self._owner is not None:
            self._owner.forget()
        for publication in self._objects.values():
            publication.forget()
        if self._labels is not None:
            self._labels.forget()


class Owner:
    """The own Node as an owner reference; the same name with another UID is another node."""

    def __init__(self, api: ApiServer, node: str) -> None:
        self._api = api
        self._node = node
        self._references: list[dict[str, Any]] | None = None

    def references(self, *, anew: bool) -> list[dict[str, Any]]:
        """One owner reference. Raises ApiError, also when there is no such Node."""
        if self._references is None or anew:
            node = self._api.read_node(self._node)
            if node is None:
                raise ApiError(
                    f"GET node {self._node}",
                    "NotFound",
                    "the API server has no Node of this name; check --node-name",
                    status=404,
                )
            self._references = [
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "name": self._node,
                    "uid": node["metadata"]["uid"],
                }
            ]
        return self._references

    def forget(self) -> None:
        self._references = None


class Publication:
    """One object of ours: what is known to be published, and how it becomes the next body."""

    def __init__(
        self, api: ApiServer, path: str, *, owner: Owner | None, takeover_after_s: float
    ) -> None:
        self._api = api
        self._path = path
        self._owner = owner
        self._takeover_after_s = takeover_after_s
        self._wanted: Body | None = None
        self._published: Body | None = None  # None: unknown, to be read
        self._version = ""  # of the published body
        self._echo = 0
        self._ours = False  # we have written it, or found it as we want it
        self._awaited_until = 0.0  # until when a former writer is left alone
        self._held = False  # until the next re-reading
        self._problem: str | None = None
        self._problem_until = 0.0

    def publish(self, body: Body, now: float) -> Outcome:
        """The outcome of the one to three requests it takes. Raises ApiError.

        After an error the object counts as unknown and is read before the next write. One that
        went with its definition was deleted by nobody: it comes back with that.
        """
        try:
            return self._publish(body, now)
        except ApiError as error:
            if error.unknown_kind:
                self._ours = False
            raise

    def _publish(self, body: Body, now: float) -> Outcome:
        self._wanted = body
        if self._held:
            return self._outcome(Wrote.HELD)
        if self._published is None and now < self._awaited_until:
            return self._await_writer(now)
        if self._published is None:
            return self._settle(now, timer=False)
        if self._published == body:
            return self._outcome(Wrote.UNCHANGED)
        before, self._published = self._published, None
        operations = changes(before, body) if body["kind"] == "NodeResourceTopology" else None
        try:
            if not operations:
                return self._apply(body, version=self._version)
            return self._patch(body, operations, Wrote.PATCHED)
        except ApiError as error:
            if error.status in (404, 409, 422) and not error.unknown_kind:
                return self._settle(now, timer=False, before=before)
            raise

    def reread(self, now: float) -> Outcome:
        """Puts back what others changed or deleted since. Raises ApiError."""
        if self._wanted is None:
            return self._outcome(Wrote.UNCHANGED)
        live = self._api.read(self._path, cached=True)
        untouched = live is not None and live["metadata"]["resourceVersion"] == self._version
        if untouched and self._published is not None:
            return self._outcome(Wrote.UNCHANGED)
        return self._settle(now, timer=True)

    def echo(self) -> Outcome | None:
        """Counts the echo attribute up; None when the object is not known to be as we want it."""
        if self._published is None or self._held:
            return None
        body, self._published = self._published, None
        number = len(body.get("attributes") or ())
        value = str(self._echo + 1)
        operation: dict[str, Any] = (
            {"op": "replace", "path": f"/attributes/{number}/value", "value": value}
            if self._echo
            else {"op": "add", "path": "/attributes/-", "value": {"name": ECHO, "value": value}}
        )
        try:
            outcome = self._patch(body, [operation], Wrote.ECHOED)
        except ApiError as error:
            if error.status in (404, 409, 422):  # somebody else wrote, which wakes pods as well
                return None
            raise
        self._echo += 1
        return outcome

    def forget(self) -> None:
        """Nothing is known of it any more: it is read before the next write."""
        self._published = None
        self._ours = self._held = False
        self._awaited_until = 0.0

    def problem(self, now: float) -> str | None:
        """What others did to it, until it has not happened again for an hour."""
        if now >= self._problem_until:
            self._problem = None
        return self._problem

    # An object whose state is not known

    def _settle(self, now: float, *, timer: bool, before: Body | None = None) -> Outcome:
        """Reads the object and decides. `before` is what we last knew to be published."""
        body = self._wanted
        assert body is not None
        live = self._api.read(self._path)
        if live is None:
            if self._ours and not timer and not self._owner_changed():
                return self._hold(now, "was deleted by another")
            self._held = False
            return self._create(body)
        self._echo = _echo_of(live)
        said = _without_echo(live)
        version = str(live["metadata"]["resourceVersion"])
        wanted = self._with_owner(body, anew=False)
        if holds(said, wanted) and not leftovers(said, wanted):
            self._known(body, version)
            return self._outcome(Wrote.UNCHANGED)
        writer = last_foreign_writer(live)
        if writer is None or (before is not None and holds(said, before)):
            # Only we ourselves, or others beside what we write.
            return self._apply(body, version=version)
        if self._ours:
            words = f"was changed by {writer.manager!r} at {writer.time}"
            if not timer:
                return self._hold(now, words)
            self._report(now, f"{words}; two writers on one object, let only one of them run")
            return self._apply(body, version=version)
        server_now = self._api.server_time or time.time()
        silent_s = server_now - writer.seconds
        if silent_s < self._takeover_after_s:
            wait_s = self._takeover_after_s - silent_s
            self._report(
                now,
                f"is written by {writer.manager!r}, last at {writer.time}; it is taken over when "
                f"that has been silent for {self._takeover_after_s:g} s",
                for_s=wait_s,
            )
            self._awaited_until = now + wait_s
            return self._await_writer(now)
        return self._apply(body, version=version)

    def _await_writer(self, now: float) -> Outcome:
        """What it says meanwhile is of no use to us, so it is not read."""
        return self._outcome(Wrote.HELD)._replace(again_s=self._awaited_until - now)

    def _hold(self, now: float, words: str) -> Outcome:
        self._held = True
        self._report(now, f"{words}; it is put back at the next re-reading")
        return self._outcome(Wrote.HELD)

    def _report(self, now: float, words: str, *, for_s: float = REPORTED_S) -> None:
        self._problem = f"{self._path} {words}"
        self._problem_until = now + for_s

    def _owner_changed(self) -> bool:
        """Whether the Node is another than before, whose object the garbage collector deletes."""
        if self._owner is None:
            return False
        before = self._owner.references(anew=False)
        return self._owner.references(anew=True) != before

    # Requests

    def _create(self, body: Body) -> Outcome:
        sent = self._with_owner(body, anew=True)
        # Without force: if another creates it at this moment, that is a writer to be respected.
        live = self._api.apply(self._path, sent, force=False)
        self._echo = 0
        self._known(body, str(live["metadata"]["resourceVersion"]))
        return self._outcome(Wrote.CREATED, sent)

    def _apply(self, body: Body, *, version: str) -> Outcome:
        """Forced, and guarded by the version that was read: nothing unseen is overwritten."""
        sent = self._with_owner(body, anew=False)
        sent = with_echo(sent, self._echo) if self._echo else sent
        sent = {**sent, "metadata": {**sent["metadata"], "resourceVersion": version}}
        try:
            live = self._api.apply(self._path, sent, force=True)
        except ApiError as error:
            if self._owner is None or not refuses_owner(error):
                raise
            log.warning("%s; it stays without an owner: %s", self._path, error.message)
            self._owner = None
            return self._apply(body, version=version)
        self._known(body, str(live["metadata"]["resourceVersion"]))
        if operations := leftovers(live, sent):
            self._published = None
            self._patch(body, operations, Wrote.APPLIED)
        return self._outcome(Wrote.APPLIED, sent)

    def _patch(self, body: Body, operations: list[dict[str, Any]], wrote: Wrote) -> Outcome:
        live = self._api.patch(self._path, operations, version=self._version)
        self._known(body, str(live["metadata"]["resourceVersion"]))
        return self._outcome(wrote, operations)

    def _with_owner(self, body: Body, *, anew: bool) -> Body:
        if self._owner is None:
            return body
        references = self._owner.references(anew=anew)
        return {**body, "metadata": {**body["metadata"], "ownerReferences": references}}

    def _known(self, body: Body, version: str) -> None:
        self._published, self._version = body, version
        self._ours, self._held = True, False

    def _outcome(self, wrote: Wrote, sent: Any = None) -> Outcome:
        kind = str(self._wanted["kind"]) if self._wanted else ""
        return Outcome(kind, wrote, len(msgspec.json.encode(sent)) if sent else 0)


def leftovers(live: Body, wanted: Body) -> list[dict[str, Any]]:
    """The JSON patch that takes away what a former writer's NodeResourceTopology has beside ours,
    which an apply leaves as it is: topologyPolicies and the Namespace as an owner, which keeps the
    object when its Node goes, of nfd-topology-updater; annotations of resource-topology-exporter.
    """
    if wanted["kind"] != "NodeResourceTopology":
        return []
    metadata = live["metadata"]
    paths = [f"/{key}" for key in sorted(live.keys() - wanted.keys())]
    annotations = metadata.get("annotations") or {}
    paths += [
        f"/metadata/annotations/{key.replace('/', '~1')}"
        for key in FORMER_ANNOTATIONS
        if key in annotations
    ]
    operations: list[dict[str, Any]] = [{"op": "remove", "path": path} for path in paths]
    if owners := wanted["metadata"].get("ownerReferences"):
        kept = [
            owner
            for owner in metadata.get("ownerReferences") or ()
            if any(holds(owner, own) for own in owners)
        ]
        if len(kept) < len(metadata.get("ownerReferences") or ()):
            operations.append({"op": "replace", "path": "/metadata/ownerReferences", "value": kept})
    return operations


def refuses_owner(error: ApiError) -> bool:
    """Whether OwnerReferencesPermissionEnforcement, an admission plugin that some distributions
    turn on, lets no one set an owner who may not delete the object."""
    return error.status == 403 and "ownerRef" in error.message


class Writer(NamedTuple):
    manager: str
    time: str  # RFC 3339, the API server's clock
    seconds: float  # the same, since the epoch


def last_foreign_writer(live: Body) -> Writer | None:
    """Who else last wrote what an object is about, if that was after our own last write.

    Managers of labels and annotations only are no writers, and neither are our own entries,
    whether made by apply or by patch.
    """
    ours: list[Writer] = []
    others: list[Writer] = []
    for entry in live["metadata"].get("managedFields") or ():
        fields = entry.get("fieldsV1") or {}
        if not any(key not in ("f:metadata", "f:apiVersion", "f:kind") for key in fields):
            continue
        when = str(entry.get("time") or "1970-01-01T00:00:00Z")
        writer = Writer(str(entry.get("manager")), when, datetime.fromisoformat(when).timestamp())
        (ours if writer.manager == FIELD_MANAGER else others).append(writer)
    last = max(others, key=lambda writer: writer.seconds, default=None)
    if last is None or any(own.seconds > last.seconds for own in ours):
        return None
    return last


def _echo_of(live: Body) -> int:
    """The counter that is the last of the attributes; anywhere else it is none of ours."""
    for last in (live.get("attributes") or ())[-1:]:
        if last.get("name") == ECHO and str(last.get("value")).isdecimal():
            return int(last["value"])
    return 0


def _without_echo(live: Body) -> Body:
    return {**live, "attributes": live["attributes"][:-1]} if _echo_of(live) else live


def published_policy(body: Body) -> Policy | None:
    """The kubelet's policy as a NodeResourceTopology states it, or None where it states none."""
    said = {str(a.get("name")): str(a.get("value")) for a in body.get("attributes") or ()}
    most = said.get("topologyManagerMaxNUMANodes", "")
    try:
        return Policy(
            topology_manager=TopologyManagerPolicy(said["topologyManagerPolicy"]),
            scope=Scope(said.get("topologyManagerScope", Scope.CONTAINER)),
            max_numa_nodes=int(most) if most.isdecimal() else None,
            cpu_manager=said.get("cpuManagerPolicy", "none"),
            memory_manager=said.get("memoryManagerPolicy", "None"),
            reserved_cpus=tuple(map(CpuId, parse_ranges(said.get("reservedCPUs", "")))),
        )
    except (KeyError, ValueError):
        return None


def holds(live: Any, body: Any) -> bool:
    """Whether a live object already says all that a body says; keys of others do not matter.

    Lists count as wholes, but for owner references, which are a set.
    """
    if not isinstance(body, Mapping):
        return bool(live == body)
    if not isinstance(live, Mapping):
        return False
    for key, value in body.items():
        if key == "ownerReferences":
            if not all(any(holds(owner, own) for owner in live.get(key) or ()) for own in value):
                return False
        elif not holds(live.get(key), value):
            return False
    return True


class NodeLabels:
    """Our labels on the own Node."""

    def __init__(self, api: ApiServer, node: str) -> None:
        self._api = api
        self._node = node
        self._wanted: dict[str, str] | None = None
        self._published: dict[str, str] | None = None  # None: unknown, to be read

    def publish(self, body: Body) -> Outcome:
        """One read and, where they differ, one apply; nothing while nothing changes."""
        self._wanted = dict(body["metadata"].get("labels") or {})
        if self._wanted == self._published:
            return Outcome("Node", Wrote.UNCHANGED)
        return self._settle(self._wanted)

    def reread(self, now: float) -> Outcome:
        """Puts back what others changed or removed."""
        if self._wanted is None:
            return Outcome("Node", Wrote.UNCHANGED)
        return self._settle(self._wanted)

    def forget(self) -> None:
        self._published = None

    def _settle(self, labels: dict[str, str]) -> Outcome:
        self._published = None
        node = self._api.read_node(self._node)
        if node is None:
            raise ApiError(f"GET node {self._node}", "NotFound", "no such Node", status=404)
        metadata = node["metadata"]
        right = holds(metadata.get("labels") or {}, labels) and own_labels(node) <= labels.keys()
        if not right:
            self._api.label_node(self._node, labels, uid=metadata["uid"])
        self._published = labels
        if right:
            return Outcome("Node", Wrote.UNCHANGED)
        return Outcome("Node", Wrote.APPLIED, len(msgspec.json.encode(labels)))


def own_labels(live: Body) -> frozenset[str]:
    """The labels that the API server knows as ours, from the managed fields."""
    return frozenset(
        key.removeprefix("f:")
        for entry in live["metadata"].get("managedFields") or ()
        if entry.get("manager") == FIELD_MANAGER
        for key in ((entry.get("fieldsV1") or {}).get("f:metadata") or {}).get("f:labels") or {}
        if key != "."
    )


# A folder


class FolderSink:
    """Objects as JSON files, `<kind>-<name>.json` in lower case: for a dry run and the demo."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._published: dict[Path, Body] = {}

    def publish(self, body: Body, now: float) -> Outcome:
        kind, name = str(body["kind"]), str(body["metadata"]["name"])
        path = self.folder / f"{kind.lower()}-{name}.json"
        if self._published.get(path) == body:
            return Outcome(kind, Wrote.UNCHANGED)
        created = path not in self._published
        size_bytes = self._write(path, body)
        return Outcome(kind, Wrote.CREATED if created else Wrote.APPLIED, size_bytes)

    def reread(self, now: float) -> tuple[Outcome, ...]:
        missing = {p: body for p, body in self._published.items() if not p.exists()}
        return tuple(
            Outcome(str(body["kind"]), Wrote.CREATED, self._write(path, body))
            for path, body in missing.items()
        )

    def echo(self) -> Outcome | None:
        """Files have no scheduler that waits."""
        return None

    def problems(self, now: float) -> Mapping[str, str]:
        return {}

    def forget(self) -> None:
        """A folder has no Nodes."""

    def _write(self, path: Path, body: Body) -> int:
        """Whoever reads the file never sees half of it."""
        text = msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"
        try:
            replace_file(path, text)
        except OSError as error:
            raise ApiError(f"write {path}", "Unwritable", error.strerror or str(error)) from error
        self._published[path] = body
        return len(text)


class NoSink:
    """Writes nothing: for a publisher that only looks (`nrt.publish: false`)."""

    def publish(self, body: Body, now: float) -> Outcome:
        return Outcome(str(body["kind"]), Wrote.UNCHANGED)

    def reread(self, now: float) -> tuple[Outcome, ...]:
        return ()

    def echo(self) -> Outcome | None:
        return None

    def problems(self, now: float) -> Mapping[str, str]:
        return {}

    def forget(self) -> None:
        pass


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file whole, its folder made if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
