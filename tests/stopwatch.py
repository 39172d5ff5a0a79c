"""How long something takes by itself, on a machine that is busy with other things too."""

import re
import time
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")
LONGEST_S = 120.0


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self.began, self.stalled = time.monotonic(), stalled_s()

    @property
    def took_s(self) -> float:
        """Seconds until now, less those in which some task of the machine waited for a core."""
        return time.monotonic() - self.began - (stalled_s() - self.stalled)

    def past(self, limit_s: float) -> bool:
        """Whether it took longer, or so long that no busy machine is the reason."""
        return self.took_s > limit_s or time.monotonic() - self.began > max(limit_s, LONGEST_S)


def stalled_s() -> float:
    """Of the machine, in all; 0 where the kernel does not count it."""
    try:
        found = re.search(r"^some .*\btotal=(\d+)$", PRESSURE.read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return int(found[1]) / 1e6 if found else 0.0
