"""Waiting for what comes a moment later."""

import time
from collections.abc import Callable

from tests.stopwatch import Stopwatch


def until(
    holds: Callable[[], object],
    says: Callable[[], object] = lambda: "it does not hold",
    *,
    within_s: float = 30,
) -> None:
    """Returns when it holds; fails with what is said then."""
    stopwatch = Stopwatch()
    while not holds():
        assert not stopwatch.past(within_s), f"not within {within_s} s: {says()}"
        time.sleep(0.01)
