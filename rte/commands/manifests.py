"""Pods from the YAML manifests that a person gives: Pods, and what has a Pod's template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rte.kubelet.spec import PodSpec, parse_pod
from rte.model import PodName

MOST_BYTES = 1 << 20  # etcd takes no object larger than this
NAME_CHARACTERS = 253

TEMPLATED = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job")
KIND_LINE = re.compile(rb"^kind:\s*[\"']?(?:Pod|%s)\b" % "|".join(TEMPLATED).encode(), re.MULTILINE)


class Given(NamedTuple):
    """A pod and the file that it came from."""

    spec: PodSpec
    file: Path


class ManifestError(Exception):
    """A file that holds no pod that an API server would take; the message names file and field."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


def read_manifests(files: Iterable[Path]) -> list[Given]:
    """The pods of all files, in their order. Raises ManifestError, also for a name given twice."""
    found = [Given(spec, file) for file in files for spec in read_manifest(file)]
    seen: dict[PodName, Path] = {}
    for spec, file in found:
        if spec.pod in seen:
            named = f"{spec.pod.namespace}/{spec.pod.name}"
            raise ManifestError(file, f"metadata.name: {named} is in {seen[spec.pod]} too")
        seen[spec.pod] = file
    return found


def is_manifest(path: Path) -> bool:
    """Whether a file means to be a manifest of pods, well-formed or not."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES)
    except OSError:
        return False
    try:
        document = next(filter(None, yaml.safe_load_all(text)), None)
    except (yaml.YAMLError, RecursionError, ValueError):
        return KIND_LINE.search(text) is not None
    return isinstance(document, dict) and document.get("kind") in ("Pod", *TEMPLATED)


def read_manifest(path: Path) -> tuple[PodSpec, ...]:
    """The pods of a file, a document each. Raises ManifestError."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ManifestError(path, f"cannot be read: {error.strerror}") from error
    if len(text) > MOST_BYTES:
        raise ManifestError(path, f"is larger than {MOST_BYTES} bytes")
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ManifestError(path, f"is not YAML: {' '.join(str(error).split())}") from error
    if not documents:
        raise ManifestError(path, "holds no manifest")
    found = []
    for number, document in enumerate(documents, start=1):
        try:
            found.append(parse_manifest(document))
        except ValueError as error:
            at = f"document {number}: " if len(documents) > 1 else ""
            raise ManifestError(path, f"{at}{error}") from error
    return tuple(found)


def parse_manifest(document: Any) -> PodSpec:
    """The one pod that a document describes; of a Deployment and the like the first replica.

    Raises ValueError naming the field.
    """
    if not isinstance(document, dict):
        raise ValueError(f"expected a manifest, read {document!r:.80}")
    kind = document.get("kind")
    if kind in TEMPLATED:
        document = from_template(document)
    elif kind != "Pod":
        known = ", ".join(("Pod", *TEMPLATED))
        raise ValueError(f"kind: expected one of {known}, read {kind!r:.80}")
    spec = parse_pod(document)
    if not 0 < len(spec.pod.name) <= NAME_CHARACTERS:
        raise ValueError(f"metadata.name: expected 1 to {NAME_CHARACTERS} characters")
    refuse_what_the_api_server_refuses(spec)
    return spec


def from_template(document: Mapping[str, Any]) -> dict[str, Any]:
    spec = document.get("spec")
    template = spec.get("template") if isinstance(spec, dict) else None
    if not isinstance(template, dict):
        raise ValueError(f"spec.template: expected a map, read {template!r:.80}")
    metadata = document.get("metadata")
    named = metadata if isinstance(metadata, dict) else {}
    return {
        "metadata": {"name": named.get("name"), "namespace": named.get("namespace")},
        "spec": template.get("spec"),
    }


def refuse_what_the_api_server_refuses(spec: PodSpec) -> None:
    """Amounts that would never reach a kubelet. Raises ValueError naming the field."""
    numbers = {False: 0, True: 0}
    for container in spec.containers:
        kind = "initContainers" if container.init else "containers"
        at = f"spec.{kind}[{numbers[container.init]}].resources"
        numbers[container.init] += 1
        for name in sorted({*container.requests, *container.limits}):
            requested, limit = container.requests.get(name), container.limits.get(name)
            if limit is not None and requested is not None and requested > limit:
                raise ValueError(f"{at}.requests.{name}: is more than the limit")
            if "/" not in name and not name.startswith("hugepages-"):
                continue
            # Extended resources and huge pages cannot be overcommitted.
            if limit is None or requested != limit:
                raise ValueError(f"{at}.limits.{name}: must be set, and equal to the request")
            if "/" in name and limit % 1000:
                raise ValueError(f"{at}.limits.{name}: expected a whole number")
