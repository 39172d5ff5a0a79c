"""File, environment and flags → one frozen `Config`; an error names its dotted key.

Later sources win: defaults, file, environment, flags.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rte.config.checks import check
from rte.config.options import Option, expected, options, type_name
from rte.config.schema import Config, ConfigError, Duration, Withhold
from rte.foreign import ForeignError, put

__all__ = [
    "Config",
    "ConfigError",
    "Duration",
    "Option",
    "Withhold",
    "dump",
    "load",
    "options",
    "type_name",
]

MAX_BYTES = 1 << 20  # of a file


def load(
    *,
    file: Path | None = None,
    over: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of all sources; `flags` maps dotted keys to the texts that were given.

    What the file `over` says wins over `file`; either may be one of NVIDIA's device plugin or of
    an exporter.

    Raises ConfigError, which names the source (file, variable or flag), the dotted key and what
    was expected.
    """
    merged: dict[str, Any] = {}  # as one file would say it
    for source in (file, over):
        if source is not None:
            said = read_file(source, may_be_empty=source is over)
            convert(said, str(source))  # blame the file for its own errors
            merged = joined(merged, said)
    for option in options():
        for variable in option.envs:
            if text := environ.get(variable):
                set_option(merged, option, text, f"environment variable {variable}")
                break
    for option in options():
        if flags and option.key in flags:
            set_option(merged, option, flags[option.key], f"flag {option.flag}")
    config = convert(merged, "configuration")
    check(config, " and ".join(str(f) for f in (file, over) if f) or "configuration")
    return config


def read_file(path: Path, *, may_be_empty: bool) -> dict[str, Any]:
    """What a file says, in our words. Raises ConfigError.

    An empty one is half a deployment, as a rule, and would take every option back; for NVIDIA's
    config-manager it is a node without a choice.
    """
    import yaml  # noqa: PLC0415 - the daemon without a file does not pay for it

    try:
        content = read_bounded(path)
    except OSError as error:
        raise ConfigError("", str(path), f"cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError("", str(path), "is larger than 1 MiB")
    if not may_be_empty and not content.strip():
        raise ConfigError("", str(path), "is empty; expected options, or {} for all defaults")
    try:
        loader = yaml.SafeLoader(content)
        root = loader.get_single_node()
        repeated = next(twice(root), None)
        data = None if root is None else loader.construct_document(root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 31 February
        raise ConfigError("", str(path), f"is not YAML: {error}") from error
    if repeated is not None:
        key, line = repeated
        raise ConfigError(key, str(path), f"is there twice, again in line {line}")
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError("", str(path), f"must hold a mapping, not {type(data).__name__}")
    return ours(data, str(path))


def read_bounded(path: Path) -> bytes:
    """At most one byte more than is allowed.

    In a ConfigMap the kubelet changes a link on the way to it, and then removes what that led to:
    who comes by in between finds nothing, once.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        file = path.open("rb")
    with file:
        return file.read(MAX_BYTES + 1)


def twice(root: Any) -> Iterator[tuple[str, int]]:
    """The keys that a mapping has twice, dotted, and the line of the second; YAML's readers take
    the last one, and the first section would be lost without a word.

    `root` is a YAML node or None, of which no value has been made yet: that moves what is merged.
    """
    waiting = [] if root is None else [("", root)]
    seen_nodes = set()
    while waiting:
        where, node = waiting.pop()
        if node.id == "scalar" or id(node) in seen_nodes:  # an alias
            continue
        seen_nodes.add(id(node))
        if node.id == "sequence":
            waiting += [(f"{where}[{number}]", item) for number, item in enumerate(node.value)]
            continue
        seen = set()
        for key, value in node.value:
            if key.id != "scalar":
                continue  # no value can be made of it
            name = f"{where}.{key.value}".lstrip(".")
            if name in seen:
                yield name, key.start_mark.line + 1
            seen.add(name)
            waiting.append((name, value))


def ours(data: dict[str, Any], source: str) -> dict[str, Any]:
    """A file in our words, also one of NVIDIA's device plugin or of an exporter."""
    import logging  # noqa: PLC0415 - as what follows

    from rte import exporter, nvidia  # noqa: PLC0415 - only who has a file

    try:
        if "version" in data:
            found = nvidia.translated(data)
        elif exporter.is_theirs(data):
            found = exporter.translated(data)
        else:
            return data
    except ForeignError as error:
        raise ConfigError(error.key, source, error.problem) from error
    for sentence in found.passed_over:
        logging.getLogger(__name__).warning("%s: %s", source, sentence)
    return found.ours


def joined(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, section by section; what `above` says wins."""
    merged = {**below, **above}
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = joined(below[key], value)
    return merged


def set_option(merged: dict[str, Any], option: Option, text: str, source: str) -> None:
    """Puts what a variable or flag says in its place. Raises ConfigError."""
    value: Any = text
    if type_name(option).startswith("list of"):
        value = [part.strip() for part in text.split(",") if part.strip()]
    elif type_name(option) in ("mapping", "object"):
        raise ConfigError(option.key, source, "can be set in the configuration file only")
    try:
        value = msgspec.convert(value, option.type, strict=False, dec_hook=decode)
    except msgspec.ValidationError as error:
        problem = str(error).partition(" - at `$")[0]
        raise ConfigError(option.key, source, f"{problem}; expected {expected(option)}") from error
    put(merged, option.key, value)


def decode(kind: type, value: Any) -> Any:
    if kind is Duration:
        return value if isinstance(value, Duration) else Duration.parse(value)
    raise NotImplementedError(f"no decoder for {kind}")


def convert(data: dict[str, Any], source: str) -> Config:
    """Raises ConfigError, which names the key and, of an unknown one, the closest that there is."""
    try:
        return msgspec.convert(data, Config, dec_hook=decode)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        key = where.strip("`").lstrip(".")
        unknown = re.search(r"unknown field `([^`]+)`", problem)
        if unknown:
            key = ".".join(part for part in (key, unknown[1]) if part)
            problem = "no such option" + closest(key)
        elif option := next((o for o in options() if key.split("[")[0] == o.key), None):
            problem = f"{problem}; expected {expected(option)}"
        raise ConfigError(key, source, problem) from error


def closest(key: str) -> str:
    import difflib  # noqa: PLC0415 - only for a message that ends the program

    near = difflib.get_close_matches(key, [o.key for o in options()], n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def dump(config: Config) -> str:
    """The effective configuration as YAML, every option with its value."""
    import yaml  # noqa: PLC0415 - a command's output

    def plain(kind: Any) -> Any:
        if isinstance(kind, Duration):
            return float(kind)
        raise NotImplementedError(type(kind))

    return yaml.safe_dump(
        msgspec.to_builtins(config, enc_hook=plain), sort_keys=False, allow_unicode=True
    )
