"""HTTP for probes, Prometheus and people: /metrics /healthz /readyz and the pages that name pods.

Read-only, one request a connection, bounded in size, time and number. Pages that name pods answer
on loopback (`kubectl port-forward`) and to a verified client certificate only, unless the operator
opens them.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from rte.tls import Tls

log = logging.getLogger(__name__)

CONNECTION_S = 10.0  # for what a client says and is told, as a whole
MOST_CONNECTIONS = 16
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
HANDSHAKE = b"\x16"  # the first byte of whoever speaks TLS (RFC 8446, 5.1)
NO_TLS = b"HTTP/1.0 400 Bad Request\r\nConnection: close\r\n\r\nTLS is spoken here: use https://\n"


class StatusError(OSError):
    """The address cannot be listened on."""


class Page(NamedTuple):
    """One answer to GET; it is made anew for each request, in the connection's own thread."""

    content_type: str
    content: Callable[[], bytes]
    names_pods: bool = False


class Probes(NamedTuple):
    """What the kubelet asks. Both are in words: empty or None means that all is well."""

    not_ready: Callable[[], Mapping[str, str]]  # subject → what is wrong
    stuck: Callable[[], str | None]


class StatusServer:
    """Serves until `stop`."""

    def __init__(
        self,
        probes: Probes,
        pages: Mapping[str, Page],
        *,
        open_pages: bool,
        tls: Tls | None = None,
    ) -> None:
        """`pages` is path → page; /healthz, /readyz and / are added to them."""
        self.probes = probes
        self.pages = pages
        self.open_pages = open_pages
        self.tls = tls
        self.port: int | None = None
        self._stopping = threading.Event()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, address: str, port: int) -> None:
        """Listens; port 0 lets the kernel choose one, which `port` then is. Raises StatusError."""
        try:
            self._server = _Server(address, port, self)
        except OSError as error:
            raise StatusError(
                f"http.address {address}, port {port}: {error.strerror or error}; "
                "choose another with http.port"
            ) from error
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._serve, args=(self._server,), name="http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Returns when nothing listens any more."""
        if self._server is not None and self._thread is not None:
            self._stopping.set()
            # serve_forever would look five times a second whether it is to end; a connection wakes.
            with contextlib.suppress(OSError), socket.create_connection(self._server.own(), 1):
                pass
            self._thread.join(5)
            self._server.server_close()

    def _serve(self, server: _Server) -> None:
        while not self._stopping.is_set():
            server.handle_request()

    def is_trusted(self, client: str, connection: socket.socket) -> bool:
        """Whether pages that name pods are for a client, by its address or its certificate."""
        if is_loopback(client):
            return True
        return self.tls is not None and self.tls.is_verified(connection)

    def answer(self, path: str, *, trusted: bool) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and content for a path."""
        if path == "/healthz":
            stuck = self.probes.stuck()
            return _words({} if stuck is None else {"stuck": stuck}, "ok")
        if path == "/readyz":
            return _words(self.probes.not_ready(), "ready")
        if path == "/" and path not in self.pages:
            paths = "\n".join(sorted((*self.pages, "/healthz", "/readyz")))
            return HTTPStatus.OK, TEXT, f"{paths}\n".encode()
        page = self.pages.get(path)
        if page is None:
            return HTTPStatus.NOT_FOUND, TEXT, b"not found; / lists what is here\n"
        if page.names_pods and not trusted and not self.open_pages:
            text = (
                b"this page names pods: use kubectl port-forward, or a client certificate of "
                b"http.tls.clientCAFile, or set http.openPages\n"
            )
            return HTTPStatus.FORBIDDEN, TEXT, text
        return HTTPStatus.OK, page.content_type, page.content()


def _words(problems: Mapping[str, str], well: str) -> tuple[HTTPStatus, str, bytes]:
    if not problems:
        return HTTPStatus.OK, TEXT, f"{well}\n".encode()
    lines = "".join(f"{subject}: {words}\n" for subject, words in problems.items())
    return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, lines.encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: str, port: int, status: StatusServer) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.status = status
        self.free = threading.Semaphore(MOST_CONNECTIONS)
        super().__init__((address, port), _Handler)

    def own(self) -> tuple[str, int]:
        """An address that reaches this server from here."""
        host, port = self.server_address[:2]
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host)), int(port)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service for this host's name, which can take minutes.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread, so that a handshake holds nobody else."""
        tls = self.status.tls
        if tls is None:
            super().finish_request(request, client_address)
        elif speaks_tls(request):
            with tls.accepted(request, within_s=CONNECTION_S) as connection:
                super().finish_request(connection, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ends the connection; the server goes on."""
        if isinstance(sys.exception(), OSError):
            log.debug("http: %s went away", client_address[0])
        else:
            log.exception("http: a page could not be made; this is a bug")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "rte"
    sys_version = ""

    def setup(self) -> None:
        self.connection = self.request
        timed = Timed(self.connection, within_s=CONNECTION_S)
        self.rfile = io.BufferedReader(timed)
        self.wfile = io.BufferedWriter(timed)  # head and body in one packet

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        server = self.server.status
        trusted = server.is_trusted(str(self.client_address[0]), self.connection)
        status, content_type, content = server.answer(path, trusted=trusted)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http: %s %s", self.client_address[0], format % args)


def speaks_tls(connection: socket.socket) -> bool:
    """Whether a client begins with TLS; one that says something else is told."""
    connection.settimeout(CONNECTION_S)
    first = connection.recv(1, socket.MSG_PEEK)
    if first in (HANDSHAKE, b""):
        return first == HANDSHAKE
    connection.recv(1 << 16)  # what is left unread would end the connection before the answer
    connection.sendall(NO_TLS)
    return False


class Timed(io.RawIOBase):
    """A connection's bytes, within a time as a whole: a socket's own time-out starts anew at each
    byte, and a client that trickles would keep its place for ever. Raises TimeoutError."""

    def __init__(self, connection: socket.socket, *, within_s: float) -> None:
        self.connection = connection
        self.until = time.monotonic() + within_s

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._set_timeout()
        return self.connection.recv_into(buffer)

    def write(self, content: Any) -> int:
        self._set_timeout()
        return self.connection.send(content)

    def _set_timeout(self) -> None:
        left_s = self.until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self.connection.settimeout(left_s)


def is_loopback(address: str) -> bool:
    """Whether a client's address is this host's own; also IPv4 in IPv6's clothes."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
