"""What another program's configuration file comes to, whoever's it is."""

from __future__ import annotations

from typing import Any, NamedTuple

Json = dict[str, Any]


class ForeignError(ValueError):
    """A file that cannot be followed. `key` is its program's dotted key."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class Translated(NamedTuple):
    """What a file comes to."""

    ours: Json
    passed_over: tuple[str, ...]  # sentences for people


def put(ours: Json, key: str, value: Any) -> None:
    """Gives the option of a dotted key of ours its value."""
    *path, last = key.split(".")
    section = ours
    for part in path:
        section = section.setdefault(part, {})
    section[last] = value
