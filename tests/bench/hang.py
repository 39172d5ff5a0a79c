"""The kubelet's calls during an NVML hang beside those without, over real sockets.

`python -m tests.bench hang [ROUNDS]` runs `rte plugin` with its own NVML worker on the fake driver,
and asks in turns: while NVML is well, and while a reading of it hangs. Turns of a few calls each,
so that whatever else the machine does falls on both. Exit 1 where p50 or p99 during the hang are
worse by more than 20 % and more than 0.2 ms.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from plugin.api import deviceplugin_pb2 as api
from rte.control import NAME as CONTROL
from rte.control import Asked, ask
from tests.bench.rpc import preference
from tests.daemon_process import DaemonProcess
from tests.fake_nvml import MIG_CONFIG_CHANGE
from tests.small_kubelet import until

ROUNDS = 40
HANG_S = 1.5
CALLS = 50  # a round and state
RELATIVE, ABSOLUTE_MS = 1.2, 0.2


class Times(NamedTuple):
    p50_ms: float
    p99_ms: float

    def holds(self, well: Times) -> bool:
        """Whether these are no worse than the well ones, by the goal."""
        return all(
            hung <= max(good * RELATIVE, good + ABSOLUTE_MS)
            for hung, good in zip(self, well, strict=True)
        )


class Result(NamedTuple):
    well: Times
    hung: Times


def measure(folder: Path, *, rounds: int = ROUNDS, calls: int = CALLS) -> Mapping[str, Result]:
    """Times of each call in both states."""
    with DaemonProcess(folder) as daemon:
        host = {**daemon.config["host"], "interval": 600}  # no reading but those that hang
        daemon.start(host=host).registered()
        ids = [str(gpu.uuid) for gpu in daemon.gpus]
        plugin = daemon.kubelet.plugin()
        two = api.AllocateRequest(
            container_requests=[api.ContainerAllocateRequest(devices_ids=ids[:2])]
        )
        asked: Mapping[str, Callable[[], object]] = {
            "prefer 4 of 8": lambda: plugin.GetPreferredAllocation(preference(ids, 4)),
            "allocate 2": lambda: plugin.Allocate(two),
        }
        well: dict[str, list[float]] = {name: [] for name in asked}
        hung: dict[str, list[float]] = {name: [] for name in asked}
        for call in asked.values():
            timed(call, calls)  # warm
        for _ in range(rounds):
            for name, call in asked.items():
                well[name] += timed(call, calls)
            with hanging(daemon):
                for name, call in asked.items():
                    hung[name] += timed(call, calls)
    return {name: Result(well=times(well[name]), hung=times(hung[name])) for name in asked}


@contextmanager
def hanging(daemon: DaemonProcess) -> Iterator[None]:
    """While a reading hangs, as the age of the last one proves."""
    daemon.driver.control(f"call nvmlDeviceGetCount_v2 hang {HANG_S}")
    began = time.monotonic()
    daemon.driver.event(0, MIG_CONFIG_CHANGE)  # a reason to look
    time.sleep(0.4)  # looks are a quarter of a second apart
    yield
    lasted = time.monotonic() - began
    assert lasted < HANG_S, f"{lasted:.1f} s: more calls than a hang of {HANG_S} s has room for"
    assert age_s(daemon) >= lasted
    daemon.driver.control()
    assert until(lambda: age_s(daemon) < time.monotonic() - began, 5), "it does not end"


def age_s(daemon: DaemonProcess) -> float:
    state = ask(daemon.state / CONTROL, Asked(do="state")).state
    return float(state["nvmlAgeSeconds"])


def timed(call: Callable[[], object], calls: int) -> list[float]:
    took = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        took.append(1000 * (time.perf_counter() - began))
    return took


def times(took: Sequence[float]) -> Times:
    ordered = sorted(took)
    return Times(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100])


def main(arguments: Sequence[str]) -> int:
    rounds = int(arguments[0]) if arguments else ROUNDS
    with tempfile.TemporaryDirectory(prefix="rte-") as folder:
        found = measure(Path(folder), rounds=rounds)
    holds = True
    print(f"{rounds} rounds of {CALLS} calls; ms        well p50    p99   hung p50    p99")
    for name, (well, hung) in found.items():
        good = hung.holds(well)
        holds = holds and good
        print(
            f"{name:<34} {well.p50_ms:8.3f} {well.p99_ms:6.2f} {hung.p50_ms:10.3f} "
            f"{hung.p99_ms:6.2f}  {'holds' if good else 'WORSE'}"
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
