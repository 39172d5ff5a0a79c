"""The parent of the NVML worker: starts it, asks it with a time-out, replaces it when it fails.

NVML is never loaded here: nvmlInit can hang, a lost GPU can crash the process inside the library,
a driver upgrade needs a new process, and an open session blocks the unloading of the driver. All
four end with the worker, so closing NVML and ending the worker are one thing: its standard input is
closed, and it is killed if that is not enough.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from rte.backoff import doubled_s
from rte.discovery.reading import (
    EVENT_WAIT_MS,
    NvmlEvent,
    NvmlFailure,
    NvmlReading,
    WorkerLine,
    WorkerRequest,
)

LIBRARY = "libnvidia-ml.so.1"
# Where distributions and the driver container put it below the driver's root.
LIBRARY_FOLDERS = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
)
LINE_BYTES = 32 << 20  # 16 GPUs fill 50 KB; more than this is no reading
START_S = 60.0  # for the interpreter's start, on a node that is busy; nothing in it can hang
END_S = 1.0  # the worker's own end takes milliseconds; `release` promises 2 s with the kill
RELEASED = "NVML is released on request: its sessions are closed"
ADVICE = {
    9: "load the driver (nvidia-smi on the host tells more)",
    12: f"no {LIBRARY}: run the pod with runtimeClassName nvidia, or mount the driver's root",
    18: "the driver was changed under this container: restart it, or mount the driver's root",
}


class NvmlUnavailable(Exception):
    """There is no reading now; `problem` says why and stays the same while the reason does."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class NvmlWorker:
    """NVML, as far as this process has to do with it. Every method may be called by any thread.

    `on_event` is called in a thread of this object for each event, and with an event of type 0
    when the worker ended by itself; it must not block.
    """

    def __init__(
        self,
        *,
        on_event: Callable[[NvmlEvent], None] = lambda event: None,
        library_folders: Callable[[], Sequence[Path]] = tuple,  # asked at each start of a worker
        env: Mapping[str, str] | None = None,
        answer_s: float = 60.0,  # a step; a cold nvmlInit takes seconds a GPU without persistence
        retry_s: tuple[float, float] = (1.0, 60.0),  # first and longest wait before a new worker
        event_wait_ms: int = EVENT_WAIT_MS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_event = on_event
        self.library_folders = library_folders
        self.env = env
        self.answer_s = answer_s
        self.retry_s = retry_s
        self.event_wait_ms = event_wait_ms
        self.clock = clock
        self.last: NvmlReading | None = None
        self.last_at: float | None = None
        self.notes: tuple[str, ...] = ()  # of the last good reading: calls that failed oddly
        self.problem: str | None = None
        self.failure_code: int | None = None  # nvmlReturn_t where NVML itself gave the problem
        self.starts = 0  # workers started so far
        self.asking = threading.Lock()  # one question at a time
        self.child: Child | None = None
        self.failures = 0  # in a row
        self.not_before = 0.0  # when the next worker may be started
        self.released_until = 0.0

    def reading(self, *, timeout_s: float | None = None) -> NvmlReading:
        """A new reading. Raises NvmlUnavailable, at once when it is too early to try again."""
        with self.asking:
            self.refuse_when_early()
            child = self.child = self.child or self.start()
            if self.released:  # released since the first look
                raise self.failed(child, RELEASED)
            limit_s = self.answer_s if timeout_s is None else timeout_s
            try:
                line = child.ask(limit_s)
            except ChildFailed as failed:
                raise self.failed(child, str(failed)) from failed
            if line.failure or line.reading is None:
                code = line.failure.code if line.failure else None
                raise self.failed(child, failure_text(line.failure), code=code)
            self.last, self.last_at, self.notes = line.reading, self.clock(), line.notes
            self.failures, self.problem, self.failure_code = 0, None, None
            return line.reading

    @property
    def age_s(self) -> float | None:
        """Seconds since the last good reading; None before the first."""
        return None if self.last_at is None else self.clock() - self.last_at

    def retry_in_s(self) -> float | None:
        """Seconds until `reading` tries again, 0: it would now; None while the worker is well."""
        if self.problem is None:
            return None
        return max(0.0, max(self.not_before, self.released_until) - self.clock())

    def release(self, *, hold_s: float) -> None:
        """Closes every NVML session within 2 s and keeps it closed for `hold_s` or until resume.

        A reading that is under way ends with NvmlUnavailable; the last good one stays.
        """
        self.released_until = self.clock() + hold_s
        child = self.child
        if child:
            child.end()

    @property
    def released(self) -> bool:
        return self.clock() < self.released_until

    def resume(self) -> None:
        """Ends a release now."""
        self.released_until = 0.0

    def stop(self) -> None:
        """Ends the worker for good."""
        self.release(hold_s=float("inf"))

    def rss_bytes(self) -> int | None:
        """Resident memory of the worker, from /proc/<pid>/statm; None when there is no worker."""
        child = self.child
        try:
            pages = Path(f"/proc/{child.pid}/statm").read_text().split()[1] if child else "0"
        except (OSError, IndexError):
            return None
        return int(pages) * os.sysconf("SC_PAGE_SIZE") or None

    def refuse_when_early(self) -> None:
        if self.released:
            self.problem = RELEASED
            raise NvmlUnavailable(RELEASED)
        if self.child and self.child.ending:
            if self.child.alive():  # stuck in the kernel
                self.not_before = self.clock() + self.retry_s[1]
                raise NvmlUnavailable(self.problem or "the last NVML worker does not end")
            self.child = None
        if self.child and not self.child.alive():
            raise self.failed(self.child, self.child.obituary())
        if self.problem and self.clock() < self.not_before:
            raise NvmlUnavailable(self.problem)

    def failed(self, child: Child, problem: str, *, code: int | None = None) -> NvmlUnavailable:
        """Ends a worker that did not answer well, and puts off the next."""
        self.failure_code = code
        child.end()
        self.child = None if child.process.poll() is not None else child
        if self.released:
            problem = RELEASED
        elif self.child:
            # Uninterruptible, inside the driver. Another worker would only get stuck as well.
            problem = f"{problem}; it cannot be killed: stuck in the kernel"
        else:
            first, longest = self.retry_s
            self.not_before = self.clock() + doubled_s(first, longest, self.failures)
            self.failures += 1
        self.problem = problem
        return NvmlUnavailable(problem)

    def start(self) -> Child:
        self.starts += 1
        return Child(self.command(), env=self.environment(), on_event=self.on_event)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "rte.discovery.nvml", str(self.event_wait_ms)]

    def environment(self) -> dict[str, str]:
        env = {**os.environ, **(self.env or {})}
        ours = str(Path(__file__).parents[2])
        folders = [*map(str, self.library_folders()), env.get("LD_LIBRARY_PATH", "")]
        return {
            **env,
            "PYTHONPATH": os.pathsep.join(filter(None, [ours, env.get("PYTHONPATH", "")])),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
            "MALLOC_ARENA_MAX": "1",  # three threads that hardly allocate share one arena
        }


def library_folders(driver_root: Path) -> tuple[Path, ...]:
    """The folders below the root of a driver installation that hold NVML."""
    folders = (driver_root / folder for folder in LIBRARY_FOLDERS)
    return tuple(folder for folder in folders if (folder / LIBRARY).exists())


def failure_text(failure: NvmlFailure | None) -> str:
    if failure is None:
        return "the NVML worker answered without a reading"
    advice = ADVICE.get(failure.code)
    return f"{failure.call}: {failure.text} ({failure.code})" + (f"; {advice}" if advice else "")


class ChildFailed(Exception):
    """A worker did not answer; the text says how."""


class Child:
    """One worker process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        on_event: Callable[[NvmlEvent], None],
    ) -> None:
        self.on_event = on_event
        self.doing = "its start"
        self.asked = 0
        self.ending = False
        self.lines: queue.SimpleQueue[WorkerLine | None] = queue.SimpleQueue()
        """Steps and answers; None: it ended."""
        self.said: collections.deque[bytes] = collections.deque(maxlen=8)  # on standard error
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self.thread = threading.Thread(target=self.follow, name="nvml-worker", daemon=True)
        self.thread.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, limit_s: float) -> WorkerLine:
        """The answer to a new question. Raises ChildFailed when a step of it, such as nvmlInit,
        takes longer than the limit; the start of the process has START_S at least."""
        self.asked += 1
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(WorkerRequest(read=self.asked)) + b"\n")
        except (OSError, ValueError):  # it ended, or was ended, just now
            raise ChildFailed(self.obituary()) from None
        wait_s = max(limit_s, START_S) if self.doing == "its start" else limit_s
        while True:
            try:
                line = self.lines.get(timeout=wait_s)
            except queue.Empty:
                raise ChildFailed(
                    f"{self.doing} has not come back for {wait_s:g} s; the worker was killed"
                ) from None
            if line is None:
                raise ChildFailed(self.obituary())
            if line.id == self.asked:
                return line
            wait_s = limit_s

    def end(self) -> None:
        """Ends the process within 2 s: NVML's sessions are closed then, unless the kernel hangs."""
        self.ending = True
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=END_S / 2)
        self.thread.join(timeout=END_S / 4)

    def obituary(self) -> str:
        """How the process ended, in words that are the same each time it ends so."""
        self.thread.join(timeout=END_S)  # its last words
        try:
            code = self.process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            return f"the NVML worker closed its output in {self.doing}"
        last = self.said[-1].decode(errors="replace").strip()[:300] if self.said else ""
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with {code}"
        return f"the NVML worker {how} in {self.doing}" + (f": {last}" if last else "")

    def follow(self) -> None:
        """Takes the worker's lines until it ends."""
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        decoder = msgspec.json.Decoder(WorkerLine)
        with out, err:
            for source, line in lines({out.fileno(): LINE_BYTES, err.fileno(): 4096}):
                if source == err.fileno():
                    self.said.append(line)
                    continue
                try:
                    self.take(decoder.decode(line))
                except msgspec.DecodeError as error:
                    self.said.append(f"not a line of ours: {error}".encode())
                    self.process.kill()
        self.lines.put(None)
        if not self.ending:
            self.on_event(NvmlEvent(type=0))

    def take(self, line: WorkerLine) -> None:
        if line.event:
            self.on_event(line.event)
            return
        self.doing = line.doing or "idleness"
        self.lines.put(line)


def lines(limits: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
    """Lines of several pipes as they come, until all have ended; one over its limit is cut."""
    rests = dict.fromkeys(limits, b"")
    with selectors.DefaultSelector() as ready:
        for pipe in limits:
            ready.register(pipe, selectors.EVENT_READ)
        while ready.get_map():
            for key, _ in ready.select():
                read = os.read(key.fd, 1 << 16)
                whole, newline, rest = (rests[key.fd] + read).rpartition(b"\n")
                if not read:
                    ready.unregister(key.fd)
                    whole, newline, rest = rest, b"\n" if rest else b"", b""
                elif len(rest) > limits[key.fd]:
                    whole, newline, rest = rest, b"\n", b""
                rests[key.fd] = rest
                for line in whole.split(b"\n") if newline else ():
                    yield key.fd, line


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
