"""Checks a value against a CustomResourceDefinition's structural schema, as far as ours use it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rte.model import thousandths

JSON_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
DATE_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def schema(crd: Path, version: str) -> Mapping[str, Any]:
    versions = yaml.safe_load(crd.read_text())["spec"]["versions"]
    (found,) = [each for each in versions if each["name"] == version]
    result: Mapping[str, Any] = found["schema"]["openAPIV3Schema"]
    return result


def check(value: Any, schema: Mapping[str, Any], at: str = "") -> None:
    """Types, required fields, bounds, and nothing that the schema does not know."""
    if schema.get("x-kubernetes-int-or-string"):
        assert isinstance(value, str), f"{at}: canonical quantities are strings"
        thousandths(value)
        return
    assert type(value) is JSON_TYPES[schema["type"]], f"{at}: {value!r}"
    if "enum" in schema:
        assert value in schema["enum"], f"{at}: {value!r}"
    if isinstance(value, str):
        assert len(value) <= schema.get("maxLength", len(value)), at
        assert schema.get("format") != "date-time" or DATE_TIME.fullmatch(value), at
    if isinstance(value, int):
        assert value >= schema.get("minimum", value), f"{at}: {value!r}"
    if isinstance(value, list):
        assert len(value) <= schema.get("maxItems", len(value)), at
        for index, item in enumerate(value):
            check(item, schema["items"], f"{at}[{index}]")
    if isinstance(value, dict) and "properties" in schema:
        assert set(schema.get("required", ())) <= set(value), at
        assert set(value) <= set(schema["properties"]), f"{at}: {sorted(value)}"
        for name, item in value.items():
            if at or name != "metadata":
                check(item, schema["properties"][name], f"{at}.{name}")
