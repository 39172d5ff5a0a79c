"""The TLS of the HTTP server: its certificate, read from files and anew when they change, and the
handshake of a connection."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rte.model import rfc3339

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20  # of a file, which is a bundle of authorities at most
# cert-manager renews after two thirds of the time, OpenShift's service CA after half of it.
SOON = 0.1  # of the time that a certificate is valid
SOON_S = 7 * 86400.0  # at most
VERSIONS = {"VersionTLS12": ssl.TLSVersion.TLSv1_2, "VersionTLS13": ssl.TLSVersion.TLSv1_3}


class TlsError(Exception):
    """Files that cannot be served with; the message names option and file."""


class TlsFiles(NamedTuple):
    """What the operator names by http.tls."""

    certificate: Path  # PEM, with the authorities in between, if there are any
    key: Path  # PEM, without a password
    client_ca: Path | None  # PEM; None: no client is asked for a certificate
    min_version: str = "VersionTLS12"  # or VersionTLS13, the kubelet's words

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.certificate, self.key, self.client_ca) if path)


class Served(NamedTuple):
    """What new connections are served with."""

    context: ssl.SSLContext
    certificate: bytes  # the server's own, DER
    begins: float  # seconds since the epoch
    ends: float


class Tls:
    """Serves with what the files last held that could be served with."""

    def __init__(self, files: TlsFiles, *, clock: Callable[[], float] = time.time) -> None:
        """Raises TlsError. `clock` gives seconds since the epoch."""
        self.files = files
        self._clock = clock
        self._refused: str | None = None  # why changed files are not in force
        self._served = read(files)
        self._tell()

    @property
    def ends(self) -> float:
        """When the certificate in force ends, in seconds since the epoch."""
        return self._served.ends

    @property
    def problem(self) -> str | None:
        """What is wrong with the files or with what is served, in words."""
        if self._refused is not None:
            return f"{self._refused} (in force: the former one, which ends at {rfc3339(self.ends)})"
        left_s = self.ends - self._clock()
        name = f"http.tls.certFile {self.files.certificate}"
        if left_s <= 0:
            return f"{name}: ended at {rfc3339(self.ends)}"
        if left_s < min(SOON * (self.ends - self._served.begins), SOON_S):
            return f"{name}: ends at {rfc3339(self.ends)}, and has not been renewed"
        return None

    def reload(self) -> None:
        """Serves with the files as they are, where that can be; else all stays as it is."""
        before = self._served.certificate
        try:
            self._served = read(self.files)
        except TlsError as error:
            if str(error) != self._refused:
                log.warning("the changed certificate is not taken over: %s", error)
            self._refused = str(error)
            return
        was_refused, self._refused = self._refused, None
        if was_refused or self._served.certificate != before:
            self._tell()

    def _tell(self) -> None:
        log.info("http: certificate %s, until %s", self.files.certificate, rfc3339(self.ends))

    @contextmanager
    def accepted(self, plain: socket.socket, *, within_s: float) -> Iterator[ssl.SSLSocket]:
        """The connection after its handshake, which takes the time-out as a whole. Closes it.

        Raises OSError for a client that does not speak TLS, is too late or has a certificate of
        another authority.
        """
        plain.settimeout(within_s)
        context = self._served.context
        with context.wrap_socket(
            plain, server_side=True, do_handshake_on_connect=False
        ) as connection:
            connection.do_handshake()
            yield connection
            # OpenSSL keeps a session of TLS 1.2 that was ended in order, up to 20 000 of them.
            if connection.version() == "TLSv1.3":
                connection.settimeout(0)  # say that this is the end, and do not wait for an answer
                with contextlib.suppress(OSError):
                    connection.unwrap()

    @staticmethod
    def is_verified(connection: socket.socket) -> bool:
        """Whether a client has shown a certificate of `client_ca`."""
        return isinstance(connection, ssl.SSLSocket) and bool(connection.getpeercert())


# Files


def read(files: TlsFiles) -> Served:
    """Raises TlsError."""
    chain = read_pem("certFile", files.certificate, "CERTIFICATE")
    try:
        certificate = ssl.PEM_cert_to_DER_cert(first_certificate(chain))
        begins, ends = parse_validity(certificate)
    except ValueError as error:
        raise refused("certFile", files.certificate, f"is damaged: {error}") from error
    key = read_pem("keyFile", files.key, "PRIVATE KEY")
    if "ENCRYPTED" in key:
        raise refused("keyFile", files.key, "has a password; write the key without one")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[files.min_version]
    context.num_tickets = 0  # whoever comes again shakes hands again
    try:
        context.load_cert_chain(files.certificate, files.key, password="")  # never ask
    except OSError as error:  # an SSLError is one
        what = f"does not go with {files.certificate}: {reason(error)}"
        raise refused("keyFile", files.key, what) from error
    if files.client_ca is not None:
        read_pem("clientCAFile", files.client_ca, "CERTIFICATE")
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            what = f"is damaged: {reason(error)}"
            raise refused("clientCAFile", files.client_ca, what) from error
        context.verify_mode = ssl.CERT_OPTIONAL
    return Served(context, certificate, begins, ends)


def read_pem(option: str, path: Path, kind: str) -> str:
    """The text of a file that has at least one block of a kind. Raises TlsError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        what = f"{error.strerror or error}; is its Secret mounted, and the path right?"
        raise refused(option, path, what) from error
    if len(content) > MAX_BYTES:
        raise refused(option, path, "is larger than 1 MiB")
    text = content.decode("ascii", "replace")
    if f"{kind}-----" not in text:
        raise refused(option, path, f"holds no {kind.lower()} in PEM (-----BEGIN {kind}-----)")
    return text


def refused(option: str, path: Path, what: str) -> TlsError:
    return TlsError(f"http.tls.{option} {path}: {what}")


def reason(error: OSError) -> str:
    """OpenSSL's own word, without the place in its source."""
    return str(getattr(error, "reason", None) or error.strerror or error).lower().replace("_", " ")


def first_certificate(chain: str) -> str:
    begin, end = ssl.PEM_HEADER, ssl.PEM_FOOTER
    at = chain.find(begin)
    to = chain.find(end, at)
    if at < 0 or to < 0:
        raise ValueError("its first block is cut")
    return chain[at : to + len(end)]


# X.509, as far as the standard library does not tell (RFC 5280, 4.1)

SEQUENCE, UTC_TIME, GENERALIZED_TIME, VERSION = 0x30, 0x17, 0x18, 0xA0


def parse_validity(certificate: bytes) -> tuple[float, float]:
    """notBefore and notAfter of a certificate in DER, in seconds since the epoch. Raises
    ValueError."""
    signed = inner(elements(inner(elements(certificate))))
    fields = [content for tag, content in elements(signed) if tag != VERSION]
    if len(fields) < 4:  # serial number, algorithm, issuer, validity
        raise ValueError("no validity")
    times = [parse_time(tag, content) for tag, content in elements(fields[3])]
    if len(times) != 2:
        raise ValueError("no validity")
    return times[0], times[1]


def inner(found: list[tuple[int, bytes]]) -> bytes:
    """The content of the first element, which is a sequence."""
    if not found or found[0][0] != SEQUENCE:
        raise ValueError("no X.509 certificate")
    return found[0][1]


def elements(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element in a row. Raises ValueError."""
    found = []
    at = 0
    while at < len(der):
        head = der[at : at + 2]
        if len(head) < 2:
            raise ValueError("cut")
        at += 2
        length = head[1]
        if length >= 0x80:  # the length's own length
            bytes_ = length - 0x80
            length = int.from_bytes(der[at : at + bytes_], "big")
            at += bytes_
        content = der[at : at + length]
        if len(content) < length:
            raise ValueError("cut")
        found.append((head[0], content))
        at += length
    return found


def parse_time(tag: int, content: bytes) -> float:
    text = content.decode("ascii")
    if tag == UTC_TIME:
        text = ("20" if text < "50" else "19") + text
    elif tag != GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
