"""How long to wait before something that failed is tried again, in seconds. Pure."""

from __future__ import annotations


def doubled_s(first_s: float, longest_s: float, failures: int, *, chance: float = 0.0) -> float:
    """After as many failures in a row and one more: from the first time doubled to the longest, and
    cut by up to half by `chance` in [0, 1), so that many who fail together do not ask together."""
    return min(first_s * 2.0 ** min(failures, 30), longest_s) * (1 - chance / 2)


def ordered_s(after_s: float | None, *, chance: float) -> float:
    """What a server asked for, and up to half of it more: it has told many nodes the same."""
    return (after_s or 0) * (1 + chance / 2)
