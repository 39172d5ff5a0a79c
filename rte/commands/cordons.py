"""What is cordoned: `devices.withhold` of the configuration file, followed without a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from rte.config import Config, ConfigError, Withhold, load
from rte.model import pci_address

log = logging.getLogger(__name__)


def utc_now() -> datetime:
    return datetime.now(UTC)


class Cordons:
    """The entries in force. One thread calls `reload` and `look`, any may read `now`."""

    def __init__(
        self, config: Config, file: Path | None, *, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self.file = file
        self.clock = clock
        self.entries: tuple[Withhold, ...] = config.devices.withhold
        self.problem: str | None = None  # why the file as it is now does not count
        self.now: Mapping[str, str] = {}
        """Device id or PCI address → reason, of the entries that have not expired."""

    def reload(self) -> None:
        """Reads the file again. A damaged one leaves the entries as they are, which is said once.

        Only `devices.withhold` is taken over; the rest of the file counts from the next start.
        """
        if self.file is None:
            return
        try:
            fresh = load(file=self.file, environ={})
        except ConfigError as error:
            if str(error) != self.problem:
                log.warning(
                    "the changed configuration is not taken over, %d cordons stay: %s",
                    len(self.entries),
                    error,
                )
            self.problem = str(error)
            return
        if self.problem is not None:
            log.info("the configuration can be read again")
            self.problem = None
        self.entries = fresh.devices.withhold

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
