"""What a person on the node tells a running daemon: a Unix socket in the state folder.

`rte release` and `rte doctor` are its clients. A question and an answer are a line of JSON each, a
connection each; only the daemon's own user (root in the pod) may ask.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

log = logging.getLogger(__name__)

NAME = "control.sock"
MOST_BYTES = 64 << 10
CONNECTION_S = 10.0  # a release takes 2 s


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question."""

    do: Literal["release", "end", "state"]
    hold_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None  # of release
    was_reset: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()  # of end: ids, PCI


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was done, or why not; for `state` what the daemon knows."""

    ok: bool
    says: str
    state: dict[str, Any] = {}


class ControlError(Exception):
    """Nobody answers on the socket, or not as expected."""


class ControlServer:
    """Answers one connection after the other, in a thread of its own, until `stop`."""

    def __init__(self, folder: Path, answer: Callable[[Asked], Answer]) -> None:
        self.path = folder / NAME
        self.answer = answer
        self._listening: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listens. Raises ControlError where the folder does not let it, or another daemon does."""
        if is_listened_on(self.path):
            raise ControlError(f"{self.path}: another daemon answers there")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)
            listening.bind(str(self.path))
            self.path.chmod(0o600)
            listening.listen(4)
        except OSError as error:
            listening.close()
            raise ControlError(f"{self.path}: {error.strerror or error}") from error
        self._listening = listening
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when nothing listens any more and the socket is gone."""
        if self._listening is None or self._thread is None:
            return
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(CONNECTION_S)
        self._listening.close()
        self.path.unlink(missing_ok=True)
        self._listening = None

    def _serve(self) -> None:
        assert self._listening is not None
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # stopped
                return
            with connection:
                connection.settimeout(CONNECTION_S)
                try:
                    connection.sendall(msgspec.json.encode(self._answer(connection)) + b"\n")
                except OSError as error:
                    log.debug("control: a client went away: %s", error)

    def _answer(self, connection: socket.socket) -> Answer:
        size = struct.calcsize("3i")
        _, user, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        if user not in (0, os.getuid()):
            return Answer(ok=False, says=f"user {user} may not ask")
        try:
            asked = msgspec.json.decode(read_line(connection), type=Asked)
        except msgspec.MsgspecError as error:
            return Answer(ok=False, says=f"not understood: {error}")
        try:
            return self.answer(asked)
        except Exception as error:
            # The thread must not end: a release may be what is needed most now.
            log.exception("control: %s could not be answered; this is a bug", asked.do)
            return Answer(ok=False, says=f"{error!r}; this is a bug, see the log")


def ask(path: Path, asked: Asked, *, timeout_s: float = CONNECTION_S) -> Answer:
    """The daemon's answer. Raises ControlError, which says what to do."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(asked) + b"\n")
            return msgspec.json.decode(read_line(connection), type=Answer)
    except OSError as error:
        raise ControlError(
            f"{path}: no daemon answers ({error.strerror or error}); run this in its pod, or name "
            "its folder by stateDir"
        ) from error
    except msgspec.MsgspecError as error:
        raise ControlError(f"{path}: not an answer of rte: {error}") from error


def is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex(str(path)) == 0


def read_line(connection: socket.socket) -> bytes:
    """Up to the first newline, or the end, or the bound."""
    text = b""
    while b"\n" not in text and len(text) < MOST_BYTES:
        part = connection.recv(65536)
        if not part:
            break
        text += part
    return text.partition(b"\n")[0]
