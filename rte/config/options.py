"""The options as a list: for the reference, the flags, the environment and messages."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from rte.config.schema import Config, Duration, Section


class Option(NamedTuple):
    """One option as the reference lists it."""

    key: str  # dotted, as in the file
    type: Any
    default: Any
    description: str
    env: str | None
    flag: str | None
    also: tuple[str, ...] = ()  # further flags and variables

    @property
    def envs(self) -> tuple[str, ...]:
        return tuple(n for n in (self.env, *self.also) if n and not n.startswith("--"))

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(n for n in (self.flag, *self.also) if n and n.startswith("--"))


@functools.cache
def options() -> tuple[Option, ...]:
    """All options in the order of their declaration."""
    return tuple(declared(Config, ""))


def declared(section: type[Section], prefix: str) -> Iterator[Option]:
    hints = typing.get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        hint = hints[field.name]
        key = f"{prefix}{field.encode_name}"
        if isinstance(hint, type) and issubclass(hint, Section):
            yield from declared(hint, f"{key}.")
            continue
        meta = hint.__metadata__[-1]
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        extra = meta.extra
        yield Option(
            key, hint, default, meta.description, extra["env"], extra["flag"], extra["also"]
        )


def type_name(option: Option) -> str:
    """The type as the reference words it: boolean, duration, one of a, b; list, mapping, text."""
    return name_of(option.type)


def expected(option: Option) -> str:
    """The type as a message says it: a duration, an integer, one of a, b."""
    name = type_name(option)
    return name if name.startswith("one of") else f"a {name}".replace("a i", "an i")


def name_of(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return name_of(hint.__origin__)
    if origin is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return name_of(next(a for a in typing.get_args(hint) if a is not type(None)))
    if origin is tuple:
        return f"list of {name_of(typing.get_args(hint)[0])}"
    if origin is not None:
        return "mapping"
    names = {bool: "boolean", int: "integer", str: "text", Duration: "duration"}
    return names.get(hint, "object")
