"""Hot-plug: the kernel's own events are reasons to look. They carry no data. Only door to pyudev.

The kernel's events are listened to, not udevd's, which do not reach a pod's network namespace. In
such a namespace the kernel shows the events of all buses, and of network devices only its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from typing import Any

# node and memory: GPU memory that comes online as a NUMA node, and memory hot-plug.
SUBSYSTEMS = ("pci", "net", "infiniband", "node", "memory")


class UdevError(Exception):
    """The kernel's events cannot be had; the text says why, and what happens instead is up to
    the caller."""


def watch_udev(wake: Callable[[], None]) -> UdevWatch:
    """Calls `wake`, in a thread of its own, after events of the hardware; it must not block.

    Events that come together are one call. Costs about 5 MiB. Raises UdevError when libudev is
    not installed or the kernel refuses the netlink socket.
    """
    try:
        import pyudev  # noqa: PLC0415 - libudev is looked for at import, and may be absent

        monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
        for subsystem in SUBSYSTEMS:
            monitor.filter_by(subsystem)
        monitor.start()
    except ImportError as error:
        raise UdevError(f"kernel events: libudev cannot be loaded: {error}") from error
    except OSError as error:
        raise UdevError(f"kernel events: netlink refused: {error}") from error
    return UdevWatch(monitor, wake)


class UdevWatch:
    """Kernel events on their way; `close` ends it."""

    def __init__(self, monitor: Any, wake: Callable[[], None]) -> None:
        self.monitor = monitor
        self.wake = wake
        self.ending, self.end = os.pipe()
        self.thread = threading.Thread(target=self.follow, name="udev", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """No `wake` is called after it, unless one is under way."""
        with contextlib.suppress(OSError):  # closed twice
            os.close(self.end)
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def follow(self) -> None:
        waiting = select.poll()
        waiting.register(self.monitor.fileno(), select.POLLIN)
        waiting.register(self.ending, select.POLLIN)
        while not any(fd == self.ending for fd, _ in waiting.poll()):
            if self.take():
                self.wake()
        os.close(self.ending)

    def take(self) -> bool:
        """Whether any of the events that have arrived is one of ours."""
        ours = False
        try:
            while self.monitor.poll(timeout=0) is not None:
                ours = True
        except OSError:
            return True  # ENOBUFS: too many at once, and some were lost; any may have been ours
        return ours
