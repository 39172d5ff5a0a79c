"""What is cordoned: `devices.withhold` of the configuration, followed without a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from rte.config import Withhold
from rte.model import pci_address

log = logging.getLogger(__name__)


def utc_now() -> datetime:
    return datetime.now(UTC)


class Cordons:
    """The entries in force. One thread sets `entries` and calls `look`, any may read `now`."""

    def __init__(
        self, entries: Sequence[Withhold], *, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self.entries = entries
        self.clock = clock
        self.now: Mapping[str, str] = {}
        """Device id or PCI address → reason, of the entries that have not expired."""

    def look(self) -> float | None:
        """Brings `now` up to date; seconds until that changes by itself, None: never."""
        moment = self.clock()
        ahead = [entry for entry in self.entries if entry.until is None or entry.until > moment]
        found = {name(entry): entry.reason for entry in ahead}
        for device in sorted(found.keys() - self.now.keys()):
            log.warning("%s is cordoned: %s", device, found[device])
        for device in sorted(self.now.keys() - found.keys()):
            log.info("%s is no longer cordoned", device)
        self.now = found
        ends = [(entry.until - moment).total_seconds() for entry in ahead if entry.until]
        return min(ends, default=None)


def name(entry: Withhold) -> str:
    """A cordoned device as faults and lists name it: its id, or the PCI address in the kernel's
    spelling."""
    return entry.id or pci_address(entry.pci or "")
