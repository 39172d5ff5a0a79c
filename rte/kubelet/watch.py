"""Files that other processes create, replace and remove: a change calls back.

The only importer of inotify_simple. The kubelet replaces its state files by rename and deletes and
re-creates its sockets, so directories are watched, not files. A directory that does not exist yet,
or is replaced, is awaited through its nearest ancestor. Where the kernel gives no inotify (the
limits of instances or watches are reached) the files are looked at five times a second, which is
said once, and inotify is asked for again every minute.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from inotify_simple import INotify, flags

log = logging.getLogger(__name__)

POLL_S = 0.2  # seven stat calls; about 1 s of CPU an hour
INOTIFY_RETRY_S = 60.0

_CHANGES = (
    flags.CREATE | flags.MOVED_TO | flags.MOVED_FROM | flags.DELETE | flags.CLOSE_WRITE
)  # MODIFY is left out: a file that is being written is not worth reading yet
_DIRECTORY_GONE = flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT | flags.IGNORED
_MASK = int(_CHANGES | flags.DELETE_SELF | flags.MOVE_SELF | flags.ONLYDIR)

Signature = tuple[int, int, int, int]
"""Device, inode, size, time of change: what tells one state of a path from another."""


def watch(
    paths: Iterable[Path], wake: Callable[[Path], None], *, poll_s: float = POLL_S
) -> FileWatch:
    """A running watch: each change of one of the paths calls `wake` with that path.

    Creation, replacement, completed writing and removal count. `wake` is called from the watch's
    own thread, at least once a change and possibly more often; it must return soon. Paths that
    exist when the watch starts are not reported. Ends with `close()`.
    """
    return FileWatch(paths, wake, poll_s=poll_s).start()


class FileWatch:
    """One thread over any number of paths."""

    def __init__(
        self, paths: Iterable[Path], wake: Callable[[Path], None], *, poll_s: float
    ) -> None:
        self.paths = tuple(dict.fromkeys(Path(os.path.abspath(path)) for path in paths))
        self.polling: str | None = None
        """Why the files are polled, or None while inotify works."""
        self._wake = wake
        self._poll_s = poll_s
        self._seen: dict[Path, Signature | None] = {}
        self._directories: dict[int, Path] = {}  # watch descriptor → directory
        self._stop_read, self._stop_write = -1, -1
        self._thread: threading.Thread | None = None

    def start(self) -> FileWatch:
        """Returns when changes from now on are noticed."""
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        inotify = self._open()
        self._seen = {path: signature(path) for path in self.paths}
        self._thread = threading.Thread(
            target=self._run, args=(inotify,), name="file-watch", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Returns when the thread has ended; may be called again."""
        if self._thread is None:
            return
        os.close(self._stop_write)
        self._thread.join()
        os.close(self._stop_read)
        self._thread = None

    def _run(self, inotify: INotify | None) -> None:
        stopped = False
        while not stopped:
            if inotify is None:
                stopped = self._poll_files()
                inotify = None if stopped else self._open()
                for path in self._differing():
                    self._wake(path)
            else:
                stopped = self._follow(inotify)
                inotify.close()
                inotify = None

    # inotify

    def _open(self) -> INotify | None:
        """An inotify instance with all watches set, or None where the kernel refuses one."""
        try:
            inotify = INotify(nonblocking=True)
        except OSError as error:
            self._fall_back(f"no inotify instance ({error}; see fs.inotify.max_user_instances)")
            return None
        try:
            self._arm(inotify)
        except OSError as error:
            inotify.close()
            self._fall_back(f"no inotify watch ({error}; see fs.inotify.max_user_watches)")
            return None
        if self.polling is not None:
            log.info("files are watched again instead of polled")
            self.polling = None
        return inotify

    def _fall_back(self, why: str) -> None:
        if self.polling is None:
            log.warning(
                "files are looked at every %g s: %s: %s",
                self._poll_s,
                why,
                ", ".join(map(str, self.paths)),
            )
        self.polling = why

    def _arm(self, inotify: INotify) -> None:
        """Watches each path's directory, or for a missing one its nearest existing ancestor."""
        armed: dict[int, Path] = {}
        for directory in dict.fromkeys(path.parent for path in self.paths):
            at = directory
            while True:
                try:
                    armed[inotify.add_watch(at, _MASK)] = at
                except (FileNotFoundError, NotADirectoryError):
                    at = at.parent
                    continue
                # What we climbed over may have appeared before the watch on `at` was set.
                if at == directory or not self._step_towards(at, directory).is_dir():
                    break
                at = directory
        for descriptor in set(self._directories) - set(armed):
            try:
                inotify.rm_watch(descriptor)
            except OSError:  # the kernel has removed it with its directory
                continue
        self._directories = armed

    @staticmethod
    def _step_towards(ancestor: Path, directory: Path) -> Path:
        return ancestor / directory.relative_to(ancestor).parts[0]

    def _follow(self, inotify: INotify) -> bool:
        """Until stopped (True) or until inotify fails (False)."""
        poller = select.poll()
        poller.register(inotify.fileno(), select.POLLIN)
        poller.register(self._stop_read, select.POLLIN | select.POLLHUP)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._stop_read in ready:
                self._directories = {}
                return True
            changed, rearm = self._changes(inotify)
            if rearm:
                try:
                    self._arm(inotify)
                except OSError as error:
                    self._directories = {}
                    self._fall_back(f"no inotify watch ({error})")
                    return False
                changed |= self._differing()
            for path in self.paths:
                if path in changed:
                    self._seen[path] = signature(path)
                    self._wake(path)

    def _changes(self, inotify: INotify) -> tuple[set[Path], bool]:
        """The paths that events name, and whether directories came or went."""
        changed: set[Path] = set()
        rearm = False
        for event in inotify.read(timeout=0):
            directory = self._directories.get(event.wd)
            if event.mask & flags.Q_OVERFLOW:
                changed |= set(self.paths)
                rearm = True
            elif directory is None:  # of a watch that is gone
                continue
            elif event.mask & _DIRECTORY_GONE:
                rearm = True
            else:
                entry = directory / event.name
                if entry in self.paths:
                    changed.add(entry)
                elif any(path.parent == directory and path.is_symlink() for path in self.paths):
                    # A ConfigMap's files are links through `..data`, which alone is replaced.
                    changed |= self._differing()
                rearm = rearm or any(entry in path.parents for path in self.paths)
        return changed, rearm

    # polling

    def _poll_files(self) -> bool:
        """Until stopped (True) or until it is time to ask for inotify again (False)."""
        poller = select.poll()
        poller.register(self._stop_read, select.POLLIN | select.POLLHUP)
        until = time.monotonic() + INOTIFY_RETRY_S
        while time.monotonic() < until:
            if poller.poll(self._poll_s * 1000):
                return True
            for path in self._differing():
                self._wake(path)
        return False

    def _differing(self) -> set[Path]:
        """The paths whose signature is not the last seen, which it becomes."""
        now = {path: signature(path) for path in self.paths}
        changed = {path for path in self.paths if now[path] != self._seen.get(path)}
        self._seen = now
        return changed


def signature(path: Path) -> Signature | None:
    """What stat says of a path, or None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    # An inode is soon used again, for the next kubelet's socket say, so its time of change counts.
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns
