"""Files that other processes create, replace and remove, and sockets that come and go in a folder:
a change calls back.

The only importer of inotify_simple. All watches of a process share one inotify instance and one
thread: a node has 128 instances for each user, and root's are often all taken. The kubelet replaces
its state files by rename and deletes and re-creates its sockets, so directories are watched, not
files. A directory that does not exist yet, or is replaced, is awaited through its nearest ancestor.
Where the kernel gives no inotify (the limits of instances or watches are reached) the files are
looked at five times a second, which is said once, and inotify is asked for again every minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from inotify_simple import INotify, flags

log = logging.getLogger(__name__)

POLL_S = 0.2  # seven stat calls; about 1 s of CPU an hour
INOTIFY_RETRY_S = 60.0

_CHANGES = (
    flags.CREATE | flags.MOVED_TO | flags.MOVED_FROM | flags.DELETE | flags.CLOSE_WRITE
)  # MODIFY is left out: a file that is being written is not worth reading yet
_DIRECTORY_GONE = flags.DELETE_SELF | flags.MOVE_SELF | flags.UNMOUNT | flags.IGNORED
_MASK = int(_CHANGES | flags.DELETE_SELF | flags.MOVE_SELF | flags.ONLYDIR)


class Signature(NamedTuple):
    """What tells one state of a path from another."""

    device: int
    inode: int
    size: int
    changed_ns: int  # since the epoch, by the clock of this node; of a socket, when it was made


Sockets = frozenset[tuple[str, int, int]]
"""Name, inode and time of change of each socket in a folder."""


def watch(
    paths: Iterable[Path],
    wake: Callable[[Path], None],
    *,
    folders: Iterable[Path] = (),
    poll_s: float = POLL_S,
) -> FileWatch:
    """A running watch: each change of one of the paths calls `wake` with that path, and each socket
    that appears in one of the folders, is replaced or goes, with that folder.

    Creation, replacement, completed writing and removal count. `wake` is called from a thread that
    all watches share, at least once a change and possibly more often; it must return soon. Paths
    that exist when the watch starts are not reported. Ends with `close()`.
    """
    return FileWatch(paths, wake, folders=folders, poll_s=poll_s).start()


class FileWatch:
    """Any number of paths and folders, and who is told of their changes."""

    def __init__(
        self,
        paths: Iterable[Path],
        wake: Callable[[Path], None],
        *,
        folders: Iterable[Path],
        poll_s: float,
    ) -> None:
        self.paths = absolute(paths)
        self.folders = absolute(folders)
        self.poll_s = poll_s
        self._wake = wake
        self._lock = threading.RLock()  # one who is told may close
        self._closed = False
        self._files: Files | None = None

    def start(self) -> FileWatch:
        """Returns when changes from now on are noticed."""
        self._files = Files.join(self)
        return self

    @property
    def polling(self) -> str | None:
        """Why the files are polled, or None while inotify works."""
        return self._files.polling if self._files is not None else None

    def tell(self, path: Path) -> None:
        with self._lock:
            if not self._closed:
                self._wake(path)

    def close(self) -> None:
        """Returns when `wake` will not be called any more; may be called again."""
        with self._lock:
            self._closed = True
        if self._files is not None:
            self._files.leave(self)


class Files:
    """The one thread and the one inotify instance of all watches; there while there is a watch."""

    _running: ClassVar[Files | None] = None
    _membership: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.polling: str | None = None
        self._lock = threading.RLock()  # of all below, which watches come to and go from
        self._watches: list[FileWatch] = []
        self._inotify: INotify | None = None
        self._seen: dict[Path, Signature | Sockets | None] = {}  # of each path and folder
        self._directories: dict[int, Path] = {}  # watch descriptor → directory
        self._poke_read, self._poke_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closes_itself = False  # the last watch was closed by the thread that it told
        self._thread = threading.Thread(target=self._run, name="file-watch", daemon=True)

    @classmethod
    def join(cls, watch: FileWatch) -> Files:
        with cls._membership:
            files = cls._running
            if files is None:
                files = cls._running = Files()
                files._add(watch)
                files._thread.start()
            else:
                files._add(watch)
            return files

    def leave(self, watch: FileWatch) -> None:
        with Files._membership:
            with self._lock:
                if watch not in self._watches:
                    return
                self._watches.remove(watch)
                last = not self._watches
                if not last:
                    self._seen = {path: self._seen.get(path) for path in self._signatures}
                    self._rearm()
            if last:
                Files._running = None
            self._poke()
        if not last:
            return
        if threading.current_thread() is self._thread:
            self._closes_itself = True
        else:
            self._thread.join()
            self._close()

    def _add(self, watch: FileWatch) -> None:
        with self._lock:
            self._watches.append(watch)
            if self._inotify is None and self.polling is None:
                self._open()
            else:
                self._rearm()
            for path, of in self._signatures.items():
                if path not in self._seen:
                    self._seen[path] = of(path)
            self._poke()

    @property
    def paths(self) -> frozenset[Path]:
        return frozenset(path for watch in self._watches for path in watch.paths)

    @property
    def folders(self) -> frozenset[Path]:
        return frozenset(folder for watch in self._watches for folder in watch.folders)

    @property
    def _signatures(self) -> Mapping[Path, Callable[[Path], Signature | Sockets | None]]:
        """Each path and folder, with what tells its states apart."""
        return {**dict.fromkeys(self.paths, signature), **dict.fromkeys(self.folders, sockets)}

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of pokes
            os.write(self._poke_write, b".")

    def _tell(self, changed: Iterable[Path]) -> None:
        """Without the lock: whoever is told may close a watch, or open one."""
        changed = set(changed)
        for watch in tuple(self._watches):
            for path in (*watch.paths, *watch.folders):
                if path in changed:
                    watch.tell(path)

    def _run(self) -> None:
        while self._watches:
            if self._inotify is None:
                self._poll_files()
            else:
                self._follow(self._inotify)
        if self._closes_itself:
            self._close()

    def _close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
        os.close(self._poke_read)
        os.close(self._poke_write)

    # inotify

    def _open(self) -> None:
        """Makes an inotify instance with all watches set, where the kernel gives one."""
        try:
            inotify = INotify(nonblocking=True)
        except OSError as error:
            self._fall_back(f"no inotify instance ({error}; see fs.inotify.max_user_instances)")
            return
        self._inotify = inotify
        if self._rearm() and self.polling is not None:
            log.info("files are watched again instead of polled")
            self.polling = None

    def _rearm(self) -> bool:
        """Whether inotify is there and watches all that it should."""
        if self._inotify is None:
            return False
        try:
            self._arm(self._inotify)
        except OSError as error:
            self._inotify.close()
            self._inotify = None
            self._directories = {}
            self._fall_back(f"no inotify watch ({error}; see fs.inotify.max_user_watches)")
            return False
        return True

    def _fall_back(self, why: str) -> None:
        if self.polling is None:
            log.warning(
                "files are looked at every %g s: %s: %s",
                self._poll_s,
                why,
                ", ".join(map(str, sorted(self._signatures))),
            )
        self.polling = why

    @property
    def _poll_s(self) -> float:
        return min((watch.poll_s for watch in self._watches), default=POLL_S)

    def _arm(self, inotify: INotify) -> None:
        """Watches each path's directory and each folder, or for a missing one its nearest existing
        ancestor."""
        armed: dict[int, Path] = {}
        for directory in {path.parent for path in self.paths} | self.folders:
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

    def _follow(self, inotify: INotify) -> None:
        """Until the last watch has gone, or until inotify fails."""
        poller = select.poll()
        poller.register(inotify.fileno(), select.POLLIN)
        poller.register(self._poke_read, select.POLLIN)
        while True:
            poller.poll()
            self._drain()
            with self._lock:
                if not self._watches or self._inotify is not inotify:
                    return
                changed, rearm = self._changes(inotify)
                if rearm:
                    self._rearm()
                    changed |= self._differing()
                signatures = self._signatures
                for path in changed:
                    self._seen[path] = signatures[path](path)
            self._tell(changed)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._poke_read, 4096):
                pass

    def _changes(self, inotify: INotify) -> tuple[set[Path], bool]:
        """The paths that events name, and whether directories came or went."""
        changed: set[Path] = set()
        touched: set[Path] = set()
        rearm = False
        paths, folders = self.paths, self.folders
        for event in inotify.read(timeout=0):
            directory = self._directories.get(event.wd)
            if event.mask & flags.Q_OVERFLOW:
                changed |= set(paths)
                rearm = True
            elif directory is None:  # of a watch that is gone
                continue
            elif event.mask & _DIRECTORY_GONE:
                rearm = True
            else:
                entry = directory / event.name
                touched.add(directory)
                if entry in paths:
                    changed.add(entry)
                elif any(path.parent == directory and path.is_symlink() for path in paths):
                    # A ConfigMap's files are links through `..data`, which alone is replaced.
                    changed |= self._differing()
                rearm = rearm or any(entry in path.parents for path in paths)
                rearm = rearm or any(entry in (folder, *folder.parents) for folder in folders)
        for folder in touched & folders:
            if sockets(folder) != self._seen.get(folder):
                changed.add(folder)
        return changed, rearm

    # polling

    def _poll_files(self) -> None:
        """Until the last watch has gone, or until inotify is to be had again."""
        poller = select.poll()
        poller.register(self._poke_read, select.POLLIN)
        until = time.monotonic() + INOTIFY_RETRY_S
        while self._watches and self._inotify is None:
            poller.poll(self._poll_s * 1000)
            self._drain()
            with self._lock:
                if time.monotonic() >= until:
                    until = time.monotonic() + INOTIFY_RETRY_S
                    self._open()
                changed = self._differing()
            self._tell(changed)

    def _differing(self) -> set[Path]:
        """The paths whose signature is not the last seen, which it becomes."""
        now = {path: of(path) for path, of in self._signatures.items()}
        changed = {path for path in now if now[path] != self._seen.get(path)}
        self._seen = now
        return changed


def absolute(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(Path(os.path.abspath(path)) for path in paths))


def signature(path: Path) -> Signature | None:
    """What stat says of a path, or None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    # An inode is soon used again, for the next kubelet's socket say, so its time of change counts.
    return Signature(found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)


def sockets(folder: Path) -> Sockets | None:
    """The sockets in a folder, or None where there is no such folder."""
    found = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it has just gone
                    its = entry.stat(follow_symlinks=False)
                    if stat.S_ISSOCK(its.st_mode):
                        found.add((entry.name, its.st_ino, its.st_ctime_ns))
    except OSError:
        return None
    return frozenset(found)
