"""Events of the Node: what is said, how often, and that nothing waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from rte.model import Fault, FaultClass, Faults, Machine
from rte.publish.access import ApiError
from rte.publish.events import BURST, Announcer, events
from tests.small_kubelet import until
from tests.small_machine import address, machine, uuid

XID = Fault(severity=FaultClass.WITHHOLD, reason="xid-79", detail="fell off the bus")
LESS = Fault(severity=FaultClass.DEGRADED, reason="nvlink-lost", detail="10 of 12")
HOT = Fault(severity=FaultClass.INFO, reason="thermal-slowdown")


class Seen(NamedTuple):
    machine: Machine
    faults: Faults


def said(before: Faults, now: Faults) -> list[tuple[str, str, str]]:
    found = events(before, Seen(machine(), now), node="node-a")
    return [(e["type"], e["reason"], e["message"]) for e in found]


def test_a_beginning_and_an_end_are_an_event_each_and_information_is_none() -> None:
    who = f"gpu-1 ({address(1)}, {uuid(1)})"
    assert said({}, {address(1): (XID, HOT)}) == [
        ("Warning", "GPUUnhealthy", f"{who} gets no new work: xid-79: fell off the bus")
    ]
    assert said({address(1): (XID,)}, {address(1): (XID, LESS)}) == [
        ("Warning", "GPUDegraded", f"{who} is degraded: nvlink-lost: 10 of 12")
    ]
    assert said({address(1): (XID, HOT)}, {}) == [
        ("Normal", "GPURecovered", f"{who} no longer xid-79")
    ]
    assert said({address(1): (XID,)}, {address(1): (XID,)}) == []


def test_a_message_fits_what_the_api_server_takes() -> None:
    wordy = Fault(severity=FaultClass.WITHHOLD, reason="lost", detail="x" * 5000)
    ((_, _, message),) = said({}, {address(0): (wordy,)})
    assert len(message) <= 1024


class Server:
    """Takes Events, or refuses them, or lets them wait."""

    def __init__(self) -> None:
        self.taken: list[Mapping[str, Any]] = []
        self.refuses = False
        self.free = threading.Event()
        self.free.set()

    def create(self, body: Mapping[str, Any]) -> None:
        self.free.wait()
        if self.refuses:
            raise ApiError("POST events", "Forbidden", "no right to create events", status=403)
        self.taken.append(body)


def announce(server: Server, clock: Callable[[], float], changes: int) -> Announcer:
    announcer = Announcer(server.create, node="node-a", clock=clock)
    announcer.start()
    for number in range(changes):
        announcer.tell(Seen(machine(), {address(0): (XID,)} if number % 2 == 0 else {}))
    return announcer


def test_a_gpu_that_flaps_does_not_fill_the_cluster() -> None:
    server, now = Server(), [0.0]
    announcer = announce(server, lambda: now[0], 100)
    assert until(lambda: len(server.taken) == BURST)
    assert announcer.lost == 100 - BURST
    now[0] = 60.0
    for number in range(100, 120):
        announcer.tell(Seen(machine(), {address(0): (XID,)} if number % 2 == 0 else {}))
    assert until(lambda: len(server.taken) == BURST + 6)
    announcer.stop()
    assert len({body["metadata"]["name"] for body in server.taken}) == BURST + 6


def test_a_refusal_is_said_once_and_costs_nobody_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    server.refuses = True
    announcer = announce(server, lambda: 0.0, 10)
    assert until(lambda: announcer.lost == 10)
    announcer.stop()
    assert [line for line in caplog.messages if "is lost" in line] == [
        line for line in caplog.messages if "no right to create events" in line
    ]
    assert len(caplog.messages) == 1


def test_an_api_server_that_does_not_answer_holds_nobody_up() -> None:
    server = Server()
    server.free.clear()
    announcer = announce(server, lambda: 0.0, 200)  # returned, so it did not wait
    server.free.set()
    announcer.stop()
    assert 0 < len(server.taken) <= BURST
