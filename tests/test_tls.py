"""HTTP by TLS: over real sockets, with real certificates and a real daemon."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import ssl
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509 import load_pem_x509_certificate
from hypothesis import given, note
from hypothesis import strategies as st

from rte.status import MOST_CONNECTIONS, Page, Probes, StatusServer
from rte.tls import Tls, TlsError, TlsFiles, parse_validity
from tests.config_map import write_volume
from tests.daemon_process import DaemonProcess
from tests.ports import free_port
from tests.small_kubelet import until

NAME = "rte.rte.svc"
DAY_S = 86400.0


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def clients() -> trustme.CA:
    """The authority of clients."""
    return trustme.CA()


def pem(issued: trustme.LeafCert) -> dict[str, str]:
    """A Secret of the type kubernetes.io/tls."""
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    return {"tls.crt": chain.decode(), "tls.key": issued.private_key_pem.bytes().decode()}


def serial(issued: trustme.LeafCert) -> int:
    return load_pem_x509_certificate(issued.cert_chain_pems[0].bytes()).serial_number


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> TlsFiles:
    """A Secret that is mounted."""
    write_volume(tmp_path / "tls", pem(authority.issue_cert(NAME)))
    return TlsFiles(tmp_path / "tls/tls.crt", tmp_path / "tls/tls.key", None)


@pytest.fixture
def for_clients(files: TlsFiles, clients: trustme.CA) -> TlsFiles:
    path = files.certificate.parent / "ca.crt"
    path.write_bytes(clients.cert_pem.bytes())
    return files._replace(client_ca=path)


class FarServer(StatusServer):
    """All of whose clients are of another host."""

    def is_trusted(self, client: str, connection: socket.socket) -> bool:
        assert client == "127.0.0.1"
        return super().is_trusted("10.0.0.7", connection)


class Server:
    def __init__(self, files: TlsFiles, authority: trustme.CA) -> None:
        self.tls = Tls(files)
        pages = {
            "/metrics": Page("text/plain", lambda: b"rte_build_info 1\n"),
            "/topology": Page("application/json", lambda: b"{}", names_pods=True),
        }
        probes = Probes(not_ready=dict, stuck=lambda: None)
        self.status = FarServer(probes, pages, open_pages=False, tls=self.tls)
        self.status.start("127.0.0.1", 0)
        assert self.status.port is not None
        self.port = self.status.port
        self.authority = authority

    def client(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.authority.configure_trust(context)
        return context

    def connect(self, client: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        try:
            return (client or self.client()).wrap_socket(plain, server_hostname=NAME)
        except OSError:
            plain.close()
            raise

    def ask(self, path: str, client: ssl.SSLContext | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(NAME)
        connection.sock = self.connect(client)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def ask_often(self, path: str) -> None:
        for _ in range(3):  # the first may come before the silent ones are all accepted
            self.ask(path)

    def ask_until_served(self, path: str) -> None:
        """A place is given back a moment after its client has gone."""

        def is_served() -> bool:
            with contextlib.suppress(OSError):
                return self.ask(path)[0] == 200
            return False

        assert until(is_served), "no place is given back"

    def serial(self) -> int:
        """Of the certificate that is shown."""
        with self.connect() as connection:
            found = connection.getpeercert()
        assert found is not None
        return int(str(found["serialNumber"]), 16)

    def say(self, content: bytes) -> bytes:
        """What is answered to a client that does not speak TLS."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as plain:
            plain.sendall(content)
            plain.shutdown(socket.SHUT_WR)
            return plain.makefile("rb").read()


@pytest.fixture
def server(files: TlsFiles, authority: trustme.CA) -> Iterator[Server]:
    server = Server(files, authority)
    yield server
    server.status.stop()


@pytest.fixture
def server_for_clients(for_clients: TlsFiles, authority: trustme.CA) -> Iterator[Server]:
    server = Server(for_clients, authority)
    yield server
    server.status.stop()


# Who may see what


def test_probes_and_metrics_need_no_client_certificate(server_for_clients: Server) -> None:
    assert server_for_clients.ask("/healthz") == (200, "ok\n")
    assert server_for_clients.ask("/readyz") == (200, "ready\n")
    assert server_for_clients.ask("/metrics") == (200, "rte_build_info 1\n")


def test_a_kubelets_probe_does_not_look_at_the_certificate(server: Server) -> None:
    probe = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    probe.check_hostname = False
    probe.verify_mode = ssl.CERT_NONE
    assert server.ask("/readyz", probe) == (200, "ready\n")


def test_a_verified_client_certificate_opens_the_pages(
    server_for_clients: Server, clients: trustme.CA
) -> None:
    status, words = server_for_clients.ask("/topology")
    assert status == 403
    assert "http.tls.clientCAFile" in words
    client = server_for_clients.client()
    clients.issue_cert("someone").configure_cert(client)
    assert server_for_clients.ask("/topology", client) == (200, "{}")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_any_other_client_certificate_is_refused(
    server_for_clients: Server,
    authority: trustme.CA,
    clients: trustme.CA,
    version: ssl.TLSVersion,
) -> None:
    """That of the server's own authority, and one whose time is over."""
    past = datetime.now(UTC) - timedelta(days=1)
    for issued in (
        authority.issue_cert("someone"),
        clients.issue_cert("someone", not_before=past - timedelta(days=1), not_after=past),
    ):
        client = server_for_clients.client()
        client.minimum_version = client.maximum_version = version
        issued.configure_cert(client)
        with pytest.raises(OSError, match=r"(?i)unknown ca|expired|reset|broken pipe|EOF"):
            server_for_clients.ask("/metrics", client)
    assert server_for_clients.ask("/healthz")[0] == 200


def test_without_an_authority_of_clients_a_certificate_opens_nothing(
    server: Server, authority: trustme.CA
) -> None:
    client = server.client()
    authority.issue_cert("someone").configure_cert(client)
    assert server.ask("/metrics", client)[0] == 200
    assert server.ask("/topology", client)[0] == 403


# Versions


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_are_spoken_and_leave_no_session_behind(
    server: Server, version: ssl.TLSVersion
) -> None:
    client = server.client()
    client.minimum_version = client.maximum_version = version
    client.options |= ssl.OP_NO_TICKET
    for _ in range(3):
        assert server.ask("/healthz", client)[0] == 200
    server.status.stop()
    # The last connection ends in a thread of its own.
    assert until(lambda: server.tls._served.context.session_stats()["number"] == 0)


def test_older_versions_are_not(server: Server) -> None:
    client = server.client()
    client.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        client.minimum_version = ssl.TLSVersion.TLSv1
        client.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match=r"(?i)version"):
        server.ask("/healthz", client)


def test_a_least_version_is_kept(files: TlsFiles, authority: trustme.CA) -> None:
    server = Server(files._replace(min_version="VersionTLS13"), authority)
    try:
        client = server.client()
        assert server.ask("/healthz", client)[0] == 200
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError, match=r"(?i)version"):
            server.ask("/healthz", client)
    finally:
        server.status.stop()


# Clients that behave otherwise


def test_a_client_that_speaks_http_is_told_and_nothing_is_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert b"400" in server.say(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").splitlines()[0]
    assert b"https://" in server.say(b"x")
    assert server.say(b"") == b""
    for begun in (b"\x16\x03\x01\xff\xff" + b"x" * 300, b"\x16"):
        with contextlib.suppress(OSError):  # what it said is not all read: reset, or gone already
            server.say(begun)
    server.status.stop()
    assert caplog.records == []


def test_silent_clients_hold_nobody(server: Server) -> None:
    """Also one that has begun a handshake and does not go on."""
    silent = [
        socket.create_connection(("127.0.0.1", server.port)) for _ in range(MOST_CONNECTIONS - 1)
    ]
    silent[0].sendall(b"\x16\x03\x01")
    try:
        for _ in range(3):  # the first may come before the silent ones are all accepted
            server.ask_until_served("/healthz")
    finally:
        for client in silent:
            client.close()


def test_more_clients_than_are_served_are_turned_away(server: Server) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MOST_CONNECTIONS)]
    try:
        with pytest.raises(OSError, match=r"(?i)EOF|reset|broken pipe"):
            server.ask_often("/healthz")
    finally:
        for client in silent:
            client.close()
    server.ask_until_served("/healthz")


def test_a_handshake_has_its_time_as_a_whole(files: TlsFiles) -> None:
    """However often a byte comes."""
    ended = threading.Event()
    ours, theirs = socket.socketpair()

    def trickle() -> None:
        for byte in b"\x16\x03\x01\x20\x00\x01\x00" + bytes(8000):
            try:
                theirs.sendall(bytes([byte]))
            except OSError:
                return
            if ended.wait(0.02):
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(TimeoutError), Tls(files).accepted(ours, within_s=0.2):
            pass
    finally:
        ended.set()
        thread.join()
        theirs.close()
    assert ours.fileno() == -1, "the connection is closed"


# Files


def test_new_connections_have_the_new_certificate(
    server: Server, files: TlsFiles, authority: trustme.CA
) -> None:
    before = server.serial()
    with server.connect() as held:
        fresh = authority.issue_cert(NAME)
        write_volume(files.certificate.parent, pem(fresh))
        assert server.serial() == before, "nobody has said that it changed"
        server.tls.reload()
        assert server.serial() == serial(fresh) != before
        held.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert held.makefile("rb").read().endswith(b"ok\n")


def encrypted(key: str) -> str:
    private = load_pem_private_key(key.encode(), None)
    return private.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")
    ).decode()


def spoilt(authority: trustme.CA) -> dict[str, tuple[dict[str, str], str]]:
    """Files of a Secret, and what is said of them."""
    good = pem(authority.issue_cert(NAME))
    other = pem(authority.issue_cert(NAME))
    cut = good["tls.crt"]
    return {
        "an empty certificate": ({**good, "tls.crt": ""}, r"certFile \S+tls.crt: holds no cert"),
        "no certificate": ({**good, "tls.crt": good["tls.key"]}, r"certFile \S+: holds no cert"),
        "a cut certificate": (
            {**good, "tls.crt": cut[: len(cut) // 2]},
            r"certFile \S+tls.crt: is damaged",
        ),
        "another text in it": (
            {**good, "tls.crt": cut[:40] + "####" + cut[44:]},
            r"(certFile \S+tls.crt: is damaged|keyFile \S+tls.key: does not go with)",
        ),
        "no key": ({**good, "tls.key": "x"}, r"keyFile \S+tls.key: holds no private key"),
        "a key of another": (
            {**good, "tls.key": other["tls.key"]},
            r"keyFile \S+tls.key: does not go with \S+tls.crt: key values mismatch",
        ),
        "a damaged key": (
            {**good, "tls.key": good["tls.key"].replace("\nM", "\nB")},
            r"keyFile \S+tls.key: does not go with",
        ),
        "a key with a password": (
            {**good, "tls.key": encrypted(good["tls.key"])},
            r"keyFile \S+tls.key: has a password",
        ),
        "a large file": ({**good, "tls.crt": "x" * (2 << 20)}, "larger than 1 MiB"),
    }


def test_files_that_cannot_be_served_with_are_named_and_leave_the_former_ones_in_force(
    files: TlsFiles,
    server: Server,
    authority: trustme.CA,
) -> None:
    before = server.serial()
    for case, (content, words) in spoilt(authority).items():
        write_volume(files.certificate.parent, content)
        with pytest.raises(TlsError, match=rf"^http\.tls\.{words}" if "File" in words else words):
            Tls(files)
        server.tls.reload()
        assert server.serial() == before, case
        assert server.tls.problem is not None, case
        assert "in force: the former one" in server.tls.problem
    write_volume(files.certificate.parent, pem(authority.issue_cert(NAME)))
    server.tls.reload()
    assert server.serial() != before
    assert server.tls.problem is None


def test_a_missing_file_is_named(files: TlsFiles, tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "gone", "No such file .*mounted"),
        (tmp_path, "Is a directory"),
    ):
        for option, named in (
            ("certFile", files._replace(certificate=path)),
            ("keyFile", files._replace(key=path)),
            ("clientCAFile", files._replace(client_ca=path)),
        ):
            with pytest.raises(TlsError, match=rf"^http\.tls\.{option} {path}: {words}"):
                Tls(named)


def test_an_authority_of_clients_that_is_none_is_named(files: TlsFiles, tmp_path: Path) -> None:
    ca = tmp_path / "ca.crt"
    ca.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    with pytest.raises(TlsError, match=rf"^http\.tls\.clientCAFile {ca}: is damaged"):
        Tls(files._replace(client_ca=ca))


def test_each_refusal_is_logged_once_and_so_is_its_end(
    files: TlsFiles, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tls = Tls(files)
    good = {name: (files.certificate.parent / name).read_text() for name in ("tls.crt", "tls.key")}
    write_volume(files.certificate.parent, {**good, "tls.key": "x"})
    tls.reload()
    tls.reload()
    write_volume(files.certificate.parent, good)
    tls.reload()
    tls.reload()
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING", "INFO"]


# Its end


END = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)


@pytest.mark.parametrize(
    ("valid_s", "left_s", "words"),
    [
        (90 * DAY_S, 8 * DAY_S, None),
        (90 * DAY_S, 6 * DAY_S, "ends at 2031-05-06T07:08:09Z, and has not been renewed"),
        (DAY_S, 0.3 * DAY_S, None),  # of a short life, which is renewed after two thirds
        (DAY_S, 0.05 * DAY_S, "has not been renewed"),
        (DAY_S, -1, "ended at 2031-05-06T07:08:09Z"),
    ],
)
def test_a_certificate_that_nobody_renews_is_a_problem(
    files: TlsFiles, authority: trustme.CA, valid_s: float, left_s: float, words: str | None
) -> None:
    issued = authority.issue_cert(NAME, not_before=END - timedelta(seconds=valid_s), not_after=END)
    write_volume(files.certificate.parent, pem(issued))
    tls = Tls(files, clock=lambda: END.timestamp() - left_s)
    assert tls.ends == END.timestamp()
    if words is None:
        assert tls.problem is None
    else:
        assert tls.problem is not None
        assert words in tls.problem
        assert str(files.certificate) in tls.problem


@pytest.mark.parametrize("year", [1951, 1999, 2049, 2050, 2999, 9999])
def test_the_validity_is_what_another_reader_finds(authority: trustme.CA, year: int) -> None:
    """From 2050 on times have another form."""
    begins = datetime(year - 1, 2, 28, 12, 30, tzinfo=UTC)
    ends = datetime(year, 12, 31, 23, 59, 59, tzinfo=UTC)
    issued = authority.issue_cert(NAME, not_before=begins, not_after=ends)
    text = issued.cert_chain_pems[0].bytes()
    found = parse_validity(ssl.PEM_cert_to_DER_cert(text.decode()))
    theirs = load_pem_x509_certificate(text)
    assert found == (
        theirs.not_valid_before_utc.timestamp(),
        theirs.not_valid_after_utc.timestamp(),
    )
    assert found == (begins.timestamp(), ends.timestamp())


@given(at=st.integers(0, 400), wrong=st.binary(min_size=1, max_size=4), cut=st.integers(0, 500))
def test_a_certificate_that_is_none_is_an_error_of_one_kind(
    at: int, wrong: bytes, cut: int
) -> None:
    note(ssl.DER_cert_to_PEM_cert(CERTIFICATE))
    der = CERTIFICATE[:at] + wrong + CERTIFICATE[at + len(wrong) :]
    for content in (der, der[:cut], wrong):
        try:
            begins, ends = parse_validity(content)
        except ValueError:
            continue
        assert isinstance(begins, float)
        assert isinstance(ends, float)


CERTIFICATE = ssl.PEM_cert_to_DER_cert(
    trustme.CA().issue_cert(NAME).cert_chain_pems[0].bytes().decode()
)


# The daemon


def test_a_daemon_without_tls_does_not_load_it() -> None:
    code = (
        "import sys; from rte.commands import daemon, parts; from rte.config import Config; "
        "assert parts.tls(Config()) is None; print('rte.tls' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_daemon_follows_its_secret(tmp_path: Path, authority: trustme.CA) -> None:
    secret, port = tmp_path / "tls", free_port()
    first, second = authority.issue_cert(NAME), authority.issue_cert(NAME)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(client)

    def shown() -> tuple[int, str]:
        """The serial number of the certificate that is shown, and the metrics."""
        try:
            plain = socket.create_connection(("127.0.0.1", port), timeout=20)
        except OSError:
            return 0, ""
        with plain, client.wrap_socket(plain, server_hostname=NAME) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            certificate = connection.getpeercert() or {}
            metrics = connection.makefile("rb").read().decode()
            return int(str(certificate["serialNumber"]), 16), metrics

    def until(number: int, line: str) -> str:
        node.until(lambda: shown()[0] == number and line in shown()[1], line)
        return shown()[1]

    problem = 'rte_problem{subject="certificate"} 1.0'
    with DaemonProcess(tmp_path) as node:
        tls = {"certFile": str(secret / "tls.crt"), "keyFile": str(secret / "tls.key")}
        node.start(http={"address": "127.0.0.1", "port": port, "tls": tls})
        assert node.wait() == 1
        assert f"refusing to start: http.tls.certFile {secret}/tls.crt: No such file" in node.log()
        write_volume(secret, pem(first))
        node.start().registered()
        metrics = until(serial(first), "rte_build_info")
        assert problem not in metrics
        ends = load_pem_x509_certificate(first.cert_chain_pems[0].bytes()).not_valid_after_utc
        name = "rte_http_certificate_expiration_timestamp_seconds"
        (line,) = (each for each in metrics.splitlines() if each.startswith(name))
        assert float(line.split()[1]) == ends.timestamp()
        write_volume(secret, {**pem(second), "tls.key": pem(first)["tls.key"]})
        until(serial(first), problem)
        (finding,) = (
            line
            for line in node.command("doctor").stdout.splitlines()
            if line.startswith("wrong   certificate: ")
        )
        assert f"{secret}/tls.key: does not go with {secret}/tls.crt" in finding
        write_volume(secret, pem(second))
        node.until(lambda: problem not in shown()[1], "in order")
        assert shown()[0] == serial(second)
        assert node.end() == 0
