"""Other names for what identifies a machine and its workloads, the same one wherever it occurs.

Names are counted in the order of appearance. They cannot be computed back, as a hash of a MAC
address could, and a recording that is recorded again stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
IDENTITY = re.compile(
    rf"""
      (?P<uuid>\b{UUID}\b)                              # GPU, MIG slice, NVLink cluster, boot
    | (?<![0-9a-f:])(?P<address>(?:[0-9a-f]{{2}}:){{19}}[0-9a-f]{{2}})(?![0-9a-f:])  # of IPoIB
    | (?<![0-9a-f:])(?P<mac>(?:[0-9a-f]{{2}}:){{5}}[0-9a-f]{{2}})(?![0-9a-f:])
    | (?<![0-9a-f:])(?P<guid>[0-9a-f]{{4}}(?::[0-9a-f]{{4}}){{3}})(?![0-9a-f:])      # InfiniBand
    | (?<=\benx)(?P<named>[0-9a-f]{{12}})\b             # a USB adapter is named by its MAC address
    | (?<=/phys_switch_id\ =\ )(?P<switch>[0-9a-f]+)
    | (?<=/phys_port_id\ =\ )(?P<port>[0-9a-f]+)
    """,
    re.VERBOSE,
)
NOTHING = re.compile(r"[0:.-]+|(?:ff:)+ff|(?:ffff:)+ffff")  # says nothing, but that it is unset


@dataclass(frozen=True, slots=True)
class Pseudonyms:
    """What has been given which other name so far."""

    given: dict[tuple[str, str], str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        """The text with other UUIDs, MAC addresses and InfiniBand GUIDs."""
        return IDENTITY.sub(self.matched, text)

    def matched(self, match: re.Match[str]) -> str:
        kind, name = str(match.lastgroup), match[0]
        if NOTHING.fullmatch(name):
            return name
        if kind == "named":
            colons = ":".join(name[i : i + 2] for i in range(0, 12, 2))
            return self.name("mac", colons).replace(":", "")
        return self.name(kind, name.lower())

    def name(self, kind: str, name: str) -> str:
        """The other name of one thing, in the form that things of its kind have."""
        key = kind, name
        if key not in self.given:
            number = 1 + sum(1 for known, _ in self.given if known == kind)
            self.given[key] = form(kind, number)
        return self.given[key]

    def words(self, text: str, names: Iterable[str], kind: str) -> str:
        """The text with other names where these stand as whole words, as host names do."""
        for name in sorted({name for name in names if name}, key=lambda name: (-len(name), name)):
            other = self.name(kind, name)
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", other, text)
        return text


def form(kind: str, number: int) -> str:
    if kind == "uuid":
        return f"00000000-0000-4000-8000-{number:012d}"
    if kind == "mac":  # 02: locally administered
        return "02:" + pairs(f"{number:010x}", 2)
    if kind == "address":
        return "80:" + pairs(f"{number:038x}", 2)
    if kind == "guid":
        return pairs(f"02{number:014x}", 4)
    if kind in ("switch", "port"):
        return f"{number:016x}"
    if kind == "serial":
        return f"{number:013d}"
    return f"{kind}-{number}"


def pairs(digits: str, size: int) -> str:
    return ":".join(digits[i : i + size] for i in range(0, len(digits), size))
