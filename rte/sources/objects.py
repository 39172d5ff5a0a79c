"""Objects of the API server as text: one of ours, or a list with one in it."""

from __future__ import annotations

import json
from typing import Any

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
