"""What events told, over a restart of ours: the only state that is kept (`/run/rte/faults.json`).

The file is of one boot and names the loading of the driver, so that neither a reboot nor a driver
loaded anew leaves a GPU withheld for what it no longer has. Rows go by UUID: a GPU that took the
place of another inherits nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from rte.discovery.faults import EVENTS_A_GPU, EventFault, FaultMemory, FaultRules, GpuMemory
from rte.model import DeviceId, Fault, FaultClass, pci_address

NAME = "faults.json"
MOST_BYTES = 256 << 10
MOST_GPUS = 256  # no machine has more functions of GPUs

MOST_WORDS = 256
Word = Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class FaultFileError(Exception):
    """The file cannot be used. `path` is the file."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the parts of the file."""


class EventRow(Row, frozen=True, kw_only=True, omit_defaults=True):
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    detail: Word = ""
    xid: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    reset_asked: bool = False
    remap_pending: bool = False
    sign: Word | None = None
    ended_s: Seconds | None = None  # CLOCK_MONOTONIC, as all times here: it counts from the boot


class GpuRow(Row, frozen=True, kw_only=True, omit_defaults=True):
    pci: Word
    uuid: Word
    lanes: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    events: Annotated[tuple[EventRow, ...], msgspec.Meta(max_length=EVENTS_A_GPU)] = ()
    ends: Annotated[int, msgspec.Meta(ge=0)] = 0
    ended_s: Seconds | None = None


class Kept(Row, frozen=True, kw_only=True):
    """The whole file."""

    version: Literal[1] = 1
    boot: Word
    load: Word
    gpus: Annotated[tuple[GpuRow, ...], msgspec.Meta(max_length=MOST_GPUS)]


def read_fault_file(path: Path, *, boot: str, rules: FaultRules) -> FaultMemory | None:
    """What was remembered in this boot; None where there is no file, or one of another boot.

    Xids that no longer count by the rules are left out. Raises FaultFileError for a file that is
    damaged or cannot be read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FaultFileError(path, f"cannot be read: {error.strerror}") from error
    if len(text) > MOST_BYTES:
        raise FaultFileError(path, f"is larger than {MOST_BYTES} bytes")
    try:
        kept = msgspec.json.decode(text, type=Kept)
        found = {pci_address(row.pci): remembered(row, rules) for row in kept.gpus}
    except ValueError as error:
        raise FaultFileError(path, f"is damaged: {error}") from error
    return FaultMemory(load=kept.load or None, gpus=found) if kept.boot == boot else None


def remembered(row: GpuRow, rules: FaultRules) -> GpuMemory:
    return GpuMemory(
        uuid=DeviceId(row.uuid),
        lanes=row.lanes,
        events=tuple(
            EventFault(
                fault=Fault(
                    severity=FaultClass.WITHHOLD,
                    reason=event.reason,
                    detail=event.detail,
                    gpu_instance=event.gpu_instance,
                    compute_instance=event.compute_instance,
                ),
                xid=event.xid,
                reset_asked=event.reset_asked,
                remap_pending=event.remap_pending,
                sign=event.sign,
                ended_s=event.ended_s,
            )
            for event in row.events
            if event.xid is None or rules.counts(event.xid)
        ),
        ends=row.ends,
        ended_s=row.ended_s,
    )


def fault_text(memory: FaultMemory, *, boot: str) -> bytes:
    """The file that says what is remembered. GPUs whose UUID was never read are left out."""
    kept = Kept(
        boot=boot,
        load=memory.load or "",
        gpus=tuple(
            GpuRow(
                pci=address,
                uuid=row.uuid,
                lanes=row.lanes,
                events=tuple(map(event_row, row.events)),
                ends=row.ends,
                ended_s=row.ended_s,
            )
            for address, row in sorted(memory.gpus.items())[:MOST_GPUS]
            if row.uuid is not None and (row.lanes or row.events or row.ends)
        ),
    )
    return msgspec.json.encode(kept) + b"\n"


def event_row(known: EventFault) -> EventRow:
    return EventRow(
        reason=known.fault.reason,
        detail=known.fault.detail[:MOST_WORDS],
        xid=known.xid,
        gpu_instance=known.fault.gpu_instance,
        compute_instance=known.fault.compute_instance,
        reset_asked=known.reset_asked,
        remap_pending=known.remap_pending,
        sign=known.sign,
        ended_s=known.ended_s,
    )


def write_fault_file(path: Path, text: bytes) -> None:
    """Replaces the file, whole or not at all. Raises FaultFileError.

    Not synced to a disk: the folder is in memory, and what it says ends with the boot.
    """
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_bytes(text)
        os.replace(fresh, path)
    except OSError as error:
        raise FaultFileError(path, f"cannot be written: {error.strerror}") from error
