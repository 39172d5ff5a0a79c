"""The worker's reading, over the real nvidia-ml-py and the fake library."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from rte.discovery.reading import (
    FabricReading,
    GpuReading,
    LinkReading,
    MigReading,
    NvmlEvent,
    NvmlReading,
    WorkerLine,
    WorkerRequest,
)
from tests.fake_nvml import MIG_CONFIG_CHANGE, XID, Driver, fake_nvml

ROOT = Path(__file__).parent.parent
RECORDED = sorted((ROOT / "tests/machines").glob("*/nvml.json"))


class Worker:
    """A worker process, spoken to by its lines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def line(self) -> WorkerLine:
        assert self.process.stdout is not None
        raw = self.process.stdout.readline()
        assert raw, f"the worker ended: {self.process.wait()}"
        return msgspec.json.decode(raw, type=WorkerLine)

    def ask(self, number: int = 1) -> WorkerLine:
        """The answer to one request, events and steps before it left out."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(WorkerRequest(read=number)) + b"\n")
        self.process.stdin.flush()
        while (line := self.line()).id is None:
            continue
        assert line.id == number
        return line

    def read(self) -> NvmlReading:
        answer = self.ask()
        assert answer.reading is not None, answer.failure
        return answer.reading

    def event(self) -> NvmlEvent:
        event = self.line().event
        assert event is not None
        return event


@contextmanager
def worker(driver: Driver) -> Iterator[Worker]:
    with subprocess.Popen(
        [sys.executable, "-m", "rte.discovery.nvml", "50"],
        cwd=ROOT,
        env={**os.environ, **driver.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def differences(read: NvmlReading, recorded: NvmlReading) -> list[str]:
    """Where two readings differ, a line each: their whole text is too long for a message."""
    rows = [("", read, recorded)]
    if len(read.gpus) == len(recorded.gpus):
        rows = [
            (f"GPU {new.index} ", new, old)
            for new, old in zip(read.gpus, recorded.gpus, strict=True)
            if new != old
        ] + [
            ("", msgspec.structs.replace(read, gpus=()), msgspec.structs.replace(recorded, gpus=()))
        ]
    return [
        f"{where}{name}: read {getattr(new, name)}, recorded {getattr(old, name)}"
        for where, new, old in rows
        for name in new.__struct_fields__
        if getattr(new, name) != getattr(old, name)
    ]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_reading_a_recorded_machine_gives_its_nvml_json(path: Path, tmp_path: Path) -> None:
    recorded = msgspec.json.decode(path.read_bytes(), type=NvmlReading)
    with worker(Driver(tmp_path, recorded)) as asked:
        assert differences(asked.read(), recorded) == []
