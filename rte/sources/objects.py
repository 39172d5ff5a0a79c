"""Objects of the API server as text: one of ours, or a list with one in it."""

from __future__ import annotations

import json
import re
from typing import Any

from rte.model import PciLink
from rte.sources.problem import SourceError

NRT, FABRIC = "NodeResourceTopology", "GPUFabric"
KINDS = (NRT, FABRIC)
LISTS = ("List", f"{NRT}List", f"{FABRIC}List")
MAX_EVENTS = 100_000
MAX_DEPTH = 32


def parse_object(text: str, name: str) -> dict[str, Any]:
    """The one object in a YAML or JSON text. Raises SourceError."""
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{name}: not JSON: {error}") from error
    else:
        value = parse_yaml(text, name)
    if isinstance(value, dict) and value.get("kind") in LISTS:
        items = value.get("items")
        if not isinstance(items, list) or len(items) != 1:
            count = len(items) if isinstance(items, list) else 0
            raise SourceError(f"{name}: a list of {count} objects; give one node's")
        value = items[0]
    if not isinstance(value, dict) or value.get("kind") not in KINDS:
        kind = value.get("kind") if isinstance(value, dict) else type(value).__name__
        raise SourceError(f"{name}: kind {str(kind)[:60]!r}; expected {' or '.join(KINDS)}")
    return value


# What objects of both kinds say alike


def gpu_number(name: str) -> int:
    """Of a GPU's name in our objects. Raises ValueError."""
    match = re.fullmatch("gpu-(0|[1-9][0-9]{0,3})", name)
    if match is None:
        raise ValueError(f"a GPU called {name[:60]!r}; expected gpu-0")
    return int(match[1])


def pcie_link(text: str) -> PciLink | None:
    """Of `16 GT/s x16`, None where that is not said."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9])?) GT/s x([0-9]{1,2})", text)
    return PciLink(gigatransfers=float(match[1]), width=int(match[2])) if match else None


def lost(health_reason: str) -> str | None:
    """Why NVML does not know a GPU: our objects say no more than that it is lost."""
    return "lost" if "lost" in health_reason.split(",") else None


# Text


def parse_yaml(text: str, name: str) -> Any:
    """YAML without aliases, which can make a small text a large value, and not deep."""
    import yaml  # noqa: PLC0415 - 10 MiB for one format

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = events = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            events += 1
            if isinstance(event, yaml.AliasEvent):
                raise SourceError(f"{name}: an alias; no object of the API has one")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH or events > MAX_EVENTS:
                raise SourceError(f"{name}: deeper or longer than any object of these kinds")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise SourceError(f"{name}: not YAML: {' '.join(str(error).split())[:200]}") from error
