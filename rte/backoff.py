"""How long to wait before something that failed is tried again, in seconds."""

from __future__ import annotations

import random


def doubled_s(first_s: float, longest_s: float, failures: int, *, chance: float = 0.0) -> float:
    """After as many failures in a row and one more: from the first time doubled to the longest, and
    cut by up to half by `chance` in [0, 1), so that many who fail together do not ask together."""
    return min(first_s * 2.0 ** min(failures, 30), longest_s) * (1 - chance / 2)


def ordered_s(after_s: float | None, *, chance: float) -> float:
    """What a server asked for, and up to half of it more: it has told many nodes the same."""
    return (after_s or 0) * (1 + chance / 2)


class Retry:
    """When to try again what failed. Times are by the clock of whoever tells them."""

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self.at: float | None = None  # None: it has not failed since it last went well
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0  # in a row

    def is_due(self, now: float) -> bool:
        return self.at is None or now >= self.at

    def failed(self, now: float, *, after_s: float | None = None) -> None:
        """`after_s` is what a server asked for."""
        chance = random.random()
        wait_s = doubled_s(self._first_s, self._longest_s, self._failures, chance=chance)
        self.at = now + max(wait_s, ordered_s(after_s, chance=chance))
        self._failures += 1

    def end(self) -> None:
        self.at, self._failures = None, 0
