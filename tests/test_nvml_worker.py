"""The parent keeps running whatever NVML does, says what is wrong once, and recovers."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rte.discovery.nvml_worker import Child, ChildFailed, NvmlUnavailable, NvmlWorker, lines
from rte.discovery.nvml_worker import library_folders as folders_below
from rte.discovery.reading import GpuReading, LinkReading, NvmlEvent, NvmlReading
from tests.fake_nvml import MIG_CONFIG_CHANGE, XID, Driver, open_files
from tests.stopwatch import Stopwatch
from tests.waiting import until

ROOT = Path(__file__).parent.parent
BUS_IDS = ("00000000:17:00.0", "00000000:65:00.0")
PAIR = NvmlReading(
    driver="580.95.05",
    gpus=tuple(
        GpuReading(
            index=n,
            bus_id=BUS_IDS[n],
            uuid=f"GPU-{n}",
            links=tuple(
                LinkReading(link=link, active=True, remote_type=0, remote_bus_id=BUS_IDS[1 - n])
                for link in range(4)
            ),
        )
        for n in (0, 1)
    ),
    levels=((0, 1, 40),),
    p2p=((0, 1, 0, 0), (1, 0, 0, 0)),
)
PATIENCE_S = 20.0  # for what must come, on a machine that is busy with other tests
HANG_S = 1.5  # more than NVML's opening and a reading of two GPUs take

Make = Callable[..., NvmlWorker]


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path / "driver", PAIR)


@pytest.fixture
def events() -> queue.SimpleQueue[NvmlEvent]:
    return queue.SimpleQueue()


@pytest.fixture
def make(driver: Driver, events: queue.SimpleQueue[NvmlEvent]) -> Iterator[Make]:
    made = []

    def make(**options: Any) -> NvmlWorker:
        options = {"env": driver.env, "retry_s": (0.01, 0.1), "event_wait_ms": 50, **options}
        worker = NvmlWorker(on_event=events.put, answer_s=PATIENCE_S, **options)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.stop()


def problem(worker: NvmlWorker, *, timeout_s: float = PATIENCE_S) -> str:
    """What a reading that cannot be had says."""
    with pytest.raises(NvmlUnavailable) as caught:
        worker.reading(timeout_s=timeout_s)
    assert worker.problem == caught.value.problem
    return caught.value.problem


def recovered(worker: NvmlWorker) -> NvmlReading:
    """The first reading after the trouble has ended."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        time.sleep(worker.retry_in_s() or 0)
        try:
            reading = worker.reading()
        except NvmlUnavailable:
            continue
        assert worker.problem is None
        assert worker.retry_in_s() is None
        return reading
    raise AssertionError(f"no reading for {PATIENCE_S} s: {worker.problem}")


def test_a_reading_comes_from_a_worker(make: Make, driver: Driver) -> None:
    worker = make()
    assert worker.reading() == PAIR
    assert worker.reading() == PAIR
    assert (worker.starts, driver.sessions()) == (1, 1)
    assert worker.last == PAIR
    rss_bytes = worker.rss_bytes()
    assert rss_bytes is not None
    assert 1 << 20 < rss_bytes < 64 << 20


def test_the_parent_never_loads_nvml() -> None:
    code = "import sys, rte.discovery.nvml_worker as w; print('pynvml' in sys.modules, w.LIBRARY)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False libnvidia-ml.so.1\n"


def test_the_library_is_absent_and_is_installed_later(
    make: Make, driver: Driver, tmp_path: Path
) -> None:
    # A file that is no library stops the search also on a machine that has the real one.
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvidia-ml.so.1").write_text("no library")
    worker = make(library_folders=lambda: (tmp_path / "lib",))
    first = problem(worker)
    assert first.startswith("nvmlInit: NVML Shared Library Not Found (12); no libnvidia-ml.so.1:")
    time.sleep(worker.retry_in_s() or 0)
    assert problem(worker) == first
    (tmp_path / "lib" / "libnvidia-ml.so.1").unlink()
    assert recovered(worker) == PAIR


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            "call nvmlInitWithFlags hang",
            "nvmlInit has not come back for {} s; the worker was killed",
            id="the library hangs in init and the worker is replaced",
        ),
        pytest.param(
            "call nvmlDeviceGetNvLinkState@1 hang",
            "the reading has not come back for {} s; the worker was killed",
            id="the library hangs in the middle of a reading and the worker is replaced",
        ),
        pytest.param(
            "call nvmlInitWithFlags abort",
            "the NVML worker was killed by SIGABRT in nvmlInit",
            id="the library crashes in init and the worker is replaced",
        ),
        pytest.param(
            "call nvmlDeviceGetUUID@1 abort",
            "the NVML worker was killed by SIGABRT in the reading",
            id="the library crashes at a GPU and the worker is replaced",
        ),
        pytest.param(
            "call nvmlInitWithFlags fail 9",
            "nvmlInit: Driver Not Loaded (9); load the driver",
            id="the driver is not loaded",
        ),
        pytest.param(
            "call nvmlInitWithFlags fail 18",
            "nvmlInit: RM has detected an NVML/RM version mismatch (18); the driver was changed",
            id="library and driver differ and a new process loads the new library",
        ),
        pytest.param(
            "call nvmlDeviceGetCount_v2 fail 999",
            "nvmlDeviceGetCount: Unknown Error (999)",
            id="a driver half initialised cannot count its GPUs",
        ),
        pytest.param(
            "call nvmlDeviceGetHandleByIndex_v2 fail 1",
            "nvmlDeviceGetHandleByIndex: Uninitialized (1)",
            id="the session is lost between two calls",
        ),
    ],
)
def test_trouble_is_said_once_and_ends(make: Make, driver: Driver, fault: str, said: str) -> None:
    driver.control(fault)
    limit_s = HANG_S if "hang" in fault else PATIENCE_S
    worker = make()
    first = problem(worker, timeout_s=limit_s)
    time.sleep(worker.retry_in_s() or 0)
    again = problem(worker, timeout_s=limit_s)
    assert first.startswith(said.format(f"{limit_s:g}"))
    assert again == first
    assert worker.starts == 2
    driver.control()
    assert recovered(worker) == PAIR
    assert worker.starts == 3


def test_each_step_may_take_as_long_as_it_is_given_and_the_start_longer(
    make: Make, driver: Driver, tmp_path: Path
) -> None:
    """On a busy node the interpreter alone can take longer to start than NVML may."""
    limit_s = 2.5
    (tmp_path / "sitecustomize.py").write_text(f"import time\ntime.sleep({limit_s + 0.1})\n")
    driver.control(
        f"call nvmlInitWithFlags hang {limit_s / 2 + 0.1}",
        f"call nvmlSystemGetDriverVersion hang {limit_s / 2 + 0.1}",
    )
    worker = make(env={**driver.env, "PYTHONPATH": str(tmp_path)})
    began = time.monotonic()
    assert worker.reading(timeout_s=limit_s) == PAIR
    assert time.monotonic() - began > 2 * limit_s
    assert worker.starts == 1


def test_the_last_good_reading_stays_and_grows_old(make: Make, driver: Driver) -> None:
    now = 100.0
    worker = make(clock=lambda: now)
    assert worker.age_s is None
    worker.reading()
    driver.control("call nvmlDeviceGetCount_v2 fail 999")
    now = 130.0
    problem(worker)
    assert worker.last == PAIR
    assert worker.age_s == 30.0


def test_new_workers_are_started_at_longer_and_longer_intervals(make: Make, driver: Driver) -> None:
    now = 0.0
    worker = make(clock=lambda: now, retry_s=(1.0, 4.0))
    driver.control("call nvmlInitWithFlags fail 9")
    waits = []
    for starts in range(1, 6):
        problem(worker)
        problem(worker)  # too early: answered at once, from memory
        assert worker.starts == starts
        waits.append(worker.retry_in_s())
        now += waits[-1] or 0
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]
    driver.control()
    assert worker.reading() == PAIR
    driver.control("call nvmlDeviceGetCount_v2 fail 999")
    problem(worker)
    assert worker.retry_in_s() == 1.0


def test_a_worker_that_dies_while_idle_wakes_and_is_replaced(
    make: Make, driver: Driver, events: queue.SimpleQueue[NvmlEvent]
) -> None:
    worker = make()
    worker.reading()
    driver.control("call nvmlEventSetWait_v2 abort")
    assert events.get(timeout=PATIENCE_S) == NvmlEvent(type=0)
    driver.control()
    assert problem(worker) == "the NVML worker was killed by SIGABRT in idleness"
    assert recovered(worker) == PAIR


def test_events_come_from_known_gpus_and_from_new_ones(
    make: Make, driver: Driver, events: queue.SimpleQueue[NvmlEvent]
) -> None:
    driver.control("removed 1")
    worker = make()
    worker.reading()
    driver.event(0, XID, 79)
    assert events.get(timeout=PATIENCE_S) == NvmlEvent(type=XID, data=79, bus_id=BUS_IDS[0])
    driver.control()  # the second GPU is plugged in
    assert worker.reading() == PAIR
    driver.event(1, MIG_CONFIG_CHANGE, 0, "2 0")
    assert events.get(timeout=PATIENCE_S) == NvmlEvent(
        type=MIG_CONFIG_CHANGE, bus_id=BUS_IDS[1], gpu_instance=2, compute_instance=0
    )


def test_no_event_is_lost_while_another_set_of_gpus_is_listened_to(
    make: Make, driver: Driver, events: queue.SimpleQueue[NvmlEvent]
) -> None:
    driver.control("removed 1")
    worker = make()
    worker.reading()
    driver.control("call nvmlEventSetCreate hang 0.5")  # the second GPU is plugged in
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(worker.reading)
        child = worker.child
        assert child is not None
        until(lambda: child.doing == "the reading")
        time.sleep(0.2)  # four waits of those who listen to the first GPU
        driver.event(0, XID, 79)
        assert read.result() == PAIR
    assert events.get(timeout=PATIENCE_S) == NvmlEvent(type=XID, data=79, bus_id=BUS_IDS[0])


def test_an_event_wait_that_fails_is_a_reason_to_look_once(
    make: Make, driver: Driver, events: queue.SimpleQueue[NvmlEvent]
) -> None:
    worker = make()
    worker.reading()
    driver.control("call nvmlEventSetWait_v2 fail 15")
    assert events.get(timeout=PATIENCE_S) == NvmlEvent(type=0, data=15)
    with pytest.raises(queue.Empty):
        events.get(timeout=0.2)  # four more waits have failed meanwhile
    assert worker.reading() == PAIR


def test_release_closes_every_session_within_two_seconds(make: Make, driver: Driver) -> None:
    worker = make()
    worker.reading()
    assert driver.sessions() == 1
    stopwatch = Stopwatch()
    worker.release(hold_s=60)
    assert stopwatch.took_s < 2
    assert driver.sessions() == 0
    assert problem(worker).startswith("NVML is released on request")
    assert worker.last == PAIR
    worker.resume()
    assert worker.reading() == PAIR
    assert driver.sessions() == 1


def test_a_release_ends_by_itself(make: Make) -> None:
    now = 100.0
    worker = make(clock=lambda: now)
    worker.reading()
    worker.release(hold_s=60)
    problem(worker)
    assert worker.retry_in_s() == 60
    now += 60
    assert worker.reading() == PAIR


def test_release_also_ends_a_call_that_hangs(make: Make, driver: Driver) -> None:
    worker = make()
    worker.reading()
    driver.control("call nvmlDeviceGetUUID hang")
    caught: queue.SimpleQueue[str] = queue.SimpleQueue()
    asking = threading.Thread(target=lambda: caught.put(problem(worker)))
    asking.start()
    child = worker.child
    assert child is not None
    until(lambda: child.doing == "the reading")
    stopwatch = Stopwatch()
    worker.release(hold_s=60)
    assert stopwatch.took_s < 2
    assert driver.sessions() == 0
    assert caught.get(timeout=PATIENCE_S).startswith("NVML is released on request")
    asking.join()


def test_what_the_library_prints_does_not_disturb_the_lines(make: Make, driver: Driver) -> None:
    driver.control("print rubbish", "print more")
    assert make().reading() == PAIR


@pytest.mark.parametrize(
    ("output", "said"),
    [
        pytest.param(
            'print(\'{"id": "one"}\', flush=True); import time; time.sleep(60)',
            "the NVML worker was killed by SIGKILL in its start: not a line of ours:",
            id="a line of the wrong kind",
        ),
        pytest.param(
            "import sys; sys.stderr.write('Traceback\\nImportError: no pynvml\\n'); sys.exit(1)",
            "the NVML worker ended with 1 in its start: ImportError: no pynvml",
            id="the interpreter fails: its last words",
        ),
        pytest.param(
            "import os; os.write(1, b'x' * 100_000); os._exit(3)",
            "the NVML worker ended with 3 in its start: not a line of ours:",
            id="a line that never ends",
        ),
    ],
)
def test_a_worker_that_talks_nonsense_is_ended(output: str, said: str) -> None:
    child = Child([sys.executable, "-c", output], env={}, on_event=lambda _: None)
    with pytest.raises(ChildFailed) as failed:
        child.ask(PATIENCE_S)
    assert str(failed.value).startswith(said)
    child.end()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        pytest.param([b"one\ntwo\n"], [b"one", b"two"], id="two in one piece"),
        pytest.param([b"on", b"e\nt", b"wo\n"], [b"one", b"two"], id="two in three pieces"),
        pytest.param([b"one\ntw"], [b"one", b"tw"], id="the last one has no end"),
        pytest.param([b"x" * 20, b"y\n"], [b"x" * 20, b"y"], id="one over the limit is cut"),
        pytest.param([b"\n"], [b""], id="an empty one"),
        pytest.param([], [], id="none"),
    ],
)
def test_lines_are_put_together_from_pieces(written: list[bytes], expected: list[bytes]) -> None:
    reading, writing = os.pipe()
    found = lines({reading: 10})
    got: list[bytes] = []
    with open(writing, "wb", buffering=0) as pipe:
        for piece in written:
            pipe.write(piece)
            if piece.endswith(b"\n") or len(piece) > 10:
                got.append(next(found)[1])
    got += [line for _, line in found]
    os.close(reading)
    assert got == expected


@pytest.mark.parametrize("fault", ["", "call nvmlInitWithFlags hang"], ids=["idle", "hanging"])
def test_no_worker_outlives_its_parent(driver: Driver, fault: str) -> None:
    driver.control(*([fault] if fault else []))
    code = """
import sys, threading, time
from rte.discovery.nvml_worker import NvmlWorker
worker = NvmlWorker(on_event=print)
threading.Thread(target=worker.reading).start()
while worker.child is None or worker.child.doing != sys.argv[1]: time.sleep(0.01)
print(worker.child.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, "nvmlInit" if fault else "idleness"],
        cwd=ROOT,
        env={**os.environ, **driver.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until(lambda: not running(pid))
    assert driver.sessions() == 0


def running(pid: int) -> bool:
    """Whether the process is there and no zombie: nobody may be left to reap it in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_replaced_workers_leave_nothing_open(make: Make, driver: Driver) -> None:
    worker = make(retry_s=(0.0, 0.0))
    driver.control("call nvmlInitWithFlags fail 9")
    problem(worker)
    before = opened()
    for _ in range(3):
        problem(worker)
    assert worker.starts == 4
    until(lambda: opened() <= before, lambda: opened() - before)


def opened() -> set[object]:
    """What this process has open, where pipes have a number each, and its threads for workers."""
    return {*open_files("self"), *(t for t in threading.enumerate() if t.name == "nvml-worker")}


def test_the_library_is_found_below_a_driver_root(
    make: Make, driver: Driver, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "usr/lib64").mkdir(parents=True)
    assert folders_below(root) == ()
    (root / "usr/lib64/libnvidia-ml.so.1").symlink_to(
        driver.library.library_dir / "libnvidia-ml.so.1"
    )
    assert folders_below(root) == (root / "usr/lib64",)
    env = {**driver.env, "LD_LIBRARY_PATH": ""}
    assert make(env=env, library_folders=lambda: folders_below(root)).reading() == PAIR


def test_why_clocks_are_held_down_is_read(make: Make, driver: Driver) -> None:
    hot = msgspec.structs.replace(PAIR.gpus[0], clock_events=0x44)
    reading = msgspec.structs.replace(PAIR, gpus=(hot, PAIR.gpus[1]))
    driver.write(reading)
    assert make().reading() == reading


def test_where_nvml_lies_is_asked_anew_for_each_worker(make: Make, driver: Driver) -> None:
    """A driver container puts its library there when it likes, and another with each version."""
    folders: list[tuple[Path, ...]] = [(), (driver.library.library_dir,)]
    env = {**driver.env, "LD_LIBRARY_PATH": ""}
    worker = make(env=env, library_folders=lambda: folders.pop(0), retry_s=(0.01, 0.01))
    with pytest.raises(NvmlUnavailable):
        worker.reading()
    assert worker.failure_code == 12
    time.sleep(0.02)
    assert worker.reading() == PAIR
    assert worker.failure_code is None
