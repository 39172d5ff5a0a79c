"""Colours of pictures: one pair a group, told apart also by people who see few colours."""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    light: str  # behind dark text
    dark: str  # lines and edges; on white at least 4.5 to 1


GROUPS = (
    Colour("#dbeafe", "#1d4ed8"),
    Colour("#ffedd5", "#c2410c"),
    Colour("#dcfce7", "#15803d"),
    Colour("#f3e8ff", "#7e22ce"),
    Colour("#cffafe", "#0e7490"),
    Colour("#fce7f3", "#be185d"),
    Colour("#fef9c3", "#854d0e"),
    Colour("#e0e7ff", "#4338ca"),
)
GREY = Colour("#f1f5f9", "#475569")


def group_colour(number: int) -> Colour:
    return GROUPS[number % len(GROUPS)]
