"""The socket by which a person tells a daemon something: strict, bounded, one owner."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rte.control import MOST_BYTES, NAME, Answer, Asked, ControlError, ControlServer, ask


def echo(asked: Asked) -> Answer:
    return Answer(ok=asked.do != "end", says=f"{asked.do} {asked.hold_s}", state={"a": [1]})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    server = ControlServer(tmp_path, echo)
    server.start()
    yield server
    server.stop()


def raw(path: Path, text: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(path))
        client.sendall(text)
        client.shutdown(socket.SHUT_WR)
        return client.recv(65536)


def test_a_question_has_an_answer_and_only_the_owner_may_ask(server: ControlServer) -> None:
    assert ask(server.path, Asked(do="release", hold_s=5)) == Answer(
        ok=True, says="release 5.0", state={"a": [1]}
    )
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"rubbish\n",
        b'{"do": "format"}\n',
        b'{"do": "release", "hold_s": -1}\n',
        b'{"do": "release", "hold_s": 1e9}\n',
        b'{"do": "state", "more": 1}\n',
        b"[" * MOST_BYTES,
    ],
    ids=["nothing", "empty", "no JSON", "another verb", "negative", "for years", "more", "long"],
)
def test_what_is_not_understood_is_refused_and_the_next_is_answered(
    server: ControlServer, text: bytes
) -> None:
    assert b'"ok":false' in raw(server.path, text)
    assert ask(server.path, Asked(do="state")).ok


def test_a_client_that_goes_away_is_no_trouble(server: ControlServer) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.path))
    assert ask(server.path, Asked(do="state")).ok


def test_two_daemons_do_not_share_a_folder_and_a_dead_ones_socket_is_replaced(
    server: ControlServer, tmp_path: Path
) -> None:
    with pytest.raises(ControlError, match="another daemon answers there"):
        ControlServer(tmp_path, echo).start()
    assert ask(server.path, Asked(do="state")).ok
    server.stop()
    assert not server.path.exists()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / NAME))
    again = ControlServer(tmp_path, echo)
    again.start()
    assert ask(again.path, Asked(do="state")).ok
    again.stop()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="No such file or directory"):
        ControlServer(tmp_path / "gone", echo).start()
    with pytest.raises(ControlError, match="no daemon answers"):
        ask(tmp_path / NAME, Asked(do="state"))


@pytest.mark.survives_bugs
def test_a_bug_in_an_answer_does_not_end_the_answering(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(asked: Asked) -> Answer:
        if asked.do == "end":
            raise KeyError("gpu")
        return echo(asked)

    server = ControlServer(tmp_path, broken)
    server.start()
    assert not ask(server.path, Asked(do="end")).ok
    assert ask(server.path, Asked(do="state")).ok
    server.stop()
    assert "this is a bug" in caplog.text
