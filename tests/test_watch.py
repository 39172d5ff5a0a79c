"""Real files, real inotify: each change of a watched path is reported, however it is made."""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rte.kubelet import watch as watch_module
from rte.kubelet.watch import FileWatch, watch
from tests.stopwatch import Stopwatch
from tests.waiting import until

SOON_S = 20.0


class Woken:
    """The paths that were reported, in order."""

    def __init__(self) -> None:
        self.paths: queue.Queue[Path] = queue.Queue()

    def __call__(self, path: Path) -> None:
        self.paths.put(path)

    def next(self) -> Path:
        return self.paths.get(timeout=SOON_S)

    def until(self, path: Path) -> set[Path]:
        """What is reported up to this one."""
        before = set()
        while (found := self.next()) != path:
            before.add(found)
        return before

    def drain(self) -> None:
        """Returns when nothing has been reported for a while."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.paths.get(timeout=0.05)


@contextmanager
def watching(
    *paths: Path, folders: Iterable[Path] = (), poll_s: float = 0.02
) -> Iterator[tuple[FileWatch, Woken]]:
    woken = Woken()
    running = watch(paths, woken, folders=folders, poll_s=poll_s)
    try:
        yield running, woken
    finally:
        running.close()


def replace(path: Path, text: str) -> None:
    """As the kubelet writes: a temporary file beside it, then a rename."""
    temporary = path.with_name(f".{path.name}123")
    temporary.write_text(text)
    temporary.rename(path)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def rewrite(path: Path) -> None:
    path.write_text("new")


CHANGES = {
    "replaced by rename": lambda path: replace(path, "new"),
    "written in place": rewrite,
    "removed": Path.unlink,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("inotify", [True, False], ids=["inotify", "polled"])
def test_a_change_of_a_file_wakes(
    tmp_path: Path, change: object, inotify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not inotify:
        monkeypatch.setattr(watch_module, "INotify", refused)
    state = tmp_path / "cpu_manager_state"
    state.write_text("a")
    with watching(state) as (running, woken):
        assert (running.polling is None) == inotify
        change(state)  # type: ignore[operator]
        assert woken.next() == state


def refused(**_: object) -> None:
    raise OSError(24, "Too many open files")


def test_a_socket_that_is_made_anew_wakes(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.sock"
    bind(path)
    with watching(path) as (_, woken):
        path.unlink()
        assert woken.next() == path
        woken.drain()
        bind(path)
        assert woken.next() == path


def test_files_that_were_not_asked_for_are_silent(tmp_path: Path) -> None:
    asked, other = tmp_path / "asked", tmp_path / "other"
    with watching(asked) as (_, woken):
        other.write_text("x")
        replace(other, "y")
        asked.write_text("x")
        assert woken.next() == asked
        woken.drain()


def test_a_directory_that_does_not_exist_yet_is_awaited(tmp_path: Path) -> None:
    path = tmp_path / "pod-resources" / "deeper" / "kubelet.sock"
    with watching(path) as (_, woken):
        path.parent.mkdir(parents=True)
        bind(path)
        assert woken.next() == path
        woken.drain()
        path.unlink()
        assert woken.next() == path


def test_a_file_made_together_with_its_directory_is_not_missed(tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    (prepared / "state").write_text("x")
    path = tmp_path / "there" / "state"
    with watching(path) as (_, woken):
        prepared.rename(path.parent)
        assert woken.next() == path


@pytest.mark.parametrize("how", ["moved away", "deleted"])
def test_a_directory_that_is_replaced_is_followed(tmp_path: Path, how: str) -> None:
    path = tmp_path / "device-plugins" / "kubelet_internal_checkpoint"
    path.parent.mkdir()
    path.write_text("old")
    with watching(path) as (_, woken):
        if how == "moved away":
            path.parent.rename(tmp_path / "old")
        else:
            path.unlink()
            path.parent.rmdir()
        assert woken.next() == path
        path.parent.mkdir()
        path.write_text("new")
        woken.drain()
        replace(path, "newer")
        assert woken.next() == path


@pytest.mark.parametrize("inotify", [True, False], ids=["inotify", "polled"])
def test_a_socket_that_comes_or_goes_in_a_folder_wakes(
    tmp_path: Path, inotify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not inotify:
        monkeypatch.setattr(watch_module, "INotify", refused)
    folder, checkpoint = tmp_path / "device-plugins", tmp_path / "device-plugins" / "checkpoint"
    folder.mkdir()
    bind(folder / "there.sock")
    with watching(checkpoint, folders=[folder]) as (_, woken):
        replace(checkpoint, "x")
        assert woken.next() == checkpoint
        (folder / "file").touch()
        bind(folder / "come.sock")
        assert woken.next() == folder
        woken.drain()
        (folder / "there.sock").unlink()
        assert woken.next() == folder
        woken.drain()
        (folder / "come.sock").unlink()
        bind(folder / "come.sock")
        assert woken.next() == folder


def test_a_folder_that_does_not_exist_yet_is_awaited(tmp_path: Path) -> None:
    folder = tmp_path / "kubelet" / "plugins_registry"
    with watching(folders=[folder]) as (_, woken):
        folder.mkdir(parents=True)
        bind(folder / "a.sock")
        assert woken.next() == folder
        woken.drain()
        folder.rename(tmp_path / "old")
        assert woken.next() == folder
        folder.mkdir()
        woken.drain()
        bind(folder / "b.sock")
        assert woken.next() == folder


def test_more_events_than_the_kernel_keeps_lose_no_change(tmp_path: Path) -> None:
    """The thread is held up while the queue overflows; what changed then is told all the same."""
    keeps = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    first, second, folder = tmp_path / "first", tmp_path / "second", tmp_path / "plugins"
    folder.mkdir()
    held, go_on = threading.Event(), threading.Event()
    told: queue.Queue[Path] = queue.Queue()

    def wake(path: Path) -> None:
        held.set()
        go_on.wait(SOON_S * 10)
        told.put(path)

    running = watch([first, second], wake, folders=[folder])
    try:
        first.touch()
        assert held.wait(SOON_S)
        (tmp_path / "a").touch()
        for number in range(keeps // 2 + 1):  # two events each, and none like the one before it
            (tmp_path / "ab"[number % 2]).rename(tmp_path / "ba"[number % 2])
        second.touch()
        bind(folder / "late.sock")
        go_on.set()
        seen: set[Path] = set()
        while not {second, folder} <= seen:
            seen.add(told.get(timeout=SOON_S * 10))
    finally:
        go_on.set()
        running.close()


def test_polling_ends_when_inotify_is_to_be_had_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    with monkeypatch.context() as limited:
        limited.setattr(watch_module, "INotify", refused)
        limited.setattr(watch_module, "INOTIFY_RETRY_S", 0.05)
        running = watch([path], woken := Woken(), poll_s=0.01)
        path.write_text("1")
        assert woken.next() == path
    try:
        stopwatch, size = Stopwatch(), 1
        while running.polling is not None and not stopwatch.past(SOON_S):
            size += 1  # the only difference between two files of one clock tick
            path.write_text("x" * size)
            woken.next()
        assert running.polling is None
        woken.drain()
        path.write_text("2")
        assert woken.next() == path
    finally:
        running.close()
    assert sum("looked at every" in record.message for record in caplog.records) == 1


def test_a_file_of_a_config_map_is_replaced_behind_its_link(tmp_path: Path) -> None:
    """The kubelet makes a new folder and points `..data` at it; the file itself stays a link."""
    for number in (1, 2):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "file").write_text(f"{number}")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "file").symlink_to("..data/file")
    with watching(*(tmp_path / name for name in ("file", "then", "last"))) as (_, woken):
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        assert woken.next() == tmp_path / "file"
        (tmp_path / "then").touch()  # what came before it has been told when it is
        woken.until(tmp_path / "then")
        (tmp_path / "another").touch()
        (tmp_path / "last").touch()
        assert woken.until(tmp_path / "last") <= {tmp_path / "then"}


def inotify_instances() -> int:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread's, which is closed
            links.append(os.readlink(path))
    return links.count("anon_inode:inotify")


def watch_threads() -> int:
    return sum(thread.name == "file-watch" for thread in threading.enumerate())


def test_all_watches_of_a_process_share_one_inotify_instance(tmp_path: Path) -> None:
    before = inotify_instances()
    assert watch_threads() == 0, "another test has left its watch"
    first, second = tmp_path / "a" / "file", tmp_path / "b" / "file"
    with watching(first) as (_, one), watching(second, first) as (_, both):
        assert inotify_instances() == before + 1
        assert watch_threads() == 1
        second.parent.mkdir()
        second.write_text("x")
        assert both.next() == second
        first.parent.mkdir()
        first.write_text("x")
        assert one.next() == first
        both.drain()
        with watching(tmp_path / "c") as (_, third):
            (tmp_path / "c").touch()
            assert third.next() == tmp_path / "c"
        replace(first, "y")
        assert one.next() == first
        assert both.next() == first
    assert inotify_instances() == before
    assert watch_threads() == 0


def test_whoever_is_told_may_close_and_open_watches(tmp_path: Path) -> None:
    opened: queue.Queue[FileWatch] = queue.Queue()
    path = tmp_path / "file"
    running: list[FileWatch] = []

    def wake(changed: Path) -> None:
        opened.put(watch([tmp_path / "next"], woken))

    woken = Woken()
    running.append(watch([path], wake))
    path.touch()
    opened_now = [opened.get(timeout=SOON_S)]
    (tmp_path / "next").touch()
    assert woken.next() == tmp_path / "next"
    running[0].close()
    while not opened.empty():  # it may be told more than once
        opened_now.append(opened.get())
    for fresh in opened_now:
        fresh.close()


def test_whoever_is_told_may_close_the_only_watch(tmp_path: Path) -> None:
    before = inotify_instances()
    closed = threading.Event()

    def wake(_: Path) -> None:
        only.close()
        closed.set()

    only = watch([tmp_path / "file"], wake)
    (tmp_path / "file").touch()
    assert closed.wait(SOON_S)
    until(lambda: inotify_instances() == before)


def test_after_close_nothing_is_told(tmp_path: Path) -> None:
    path, others = tmp_path / "file", [tmp_path / f"{number}" for number in range(5)]
    with watching(*others) as (_, told):
        for other in others:
            with watching(path) as (_, woken):
                path.write_text("x")
            before = woken.paths.qsize()
            path.write_text("y")
            other.touch()  # told when all before it has been
            told.until(other)
            assert woken.paths.qsize() == before


def test_closing_twice_and_at_once_is_fine(tmp_path: Path) -> None:
    running = watch([tmp_path / "state"], Woken())
    running.close()
    running.close()
