"""An HTTP server on loopback that passes requests on to an API server, or does as it is told."""

import contextlib
import http.client
import socket
import ssl
import sys
import threading
from email.message import Message
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.real_apiserver import ApiServer


class Fault(NamedTuple):
    """What one request gets instead of the API server's answer."""

    status: int = 0  # 0: no answer at all, the connection stays open
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    after: bool = False  # the request is passed on first, and only its answer is lost
    raw: bytes | None = None  # these bytes in place of an answer, and the end of the connection
    pause_s: float = 0  # between two bytes of `raw`


class QuietServer(ThreadingHTTPServer):
    """Says nothing of clients that have gone."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class QuietServer6(QuietServer):
    address_family = socket.AF_INET6


class FaultyProxy:
    """Use as a context manager; `faults` are consumed by the next requests, one each."""

    def __init__(self, server: ApiServer, *, port: int = 0, host: str = "127.0.0.1") -> None:
        self.server = server
        self.asked: set[tuple[str, str]] = set()  # method and path with query
        self.faults: list[Fault] = []
        self.then: dict[str, list[Fault]] = {}
        """Faults of the next requests of a method."""
        self.seen: list[tuple[str, str, int]] = []  # method, path without query, bytes of body
        self.heads: list[int] = []  # bytes of each request's head but for its token
        self.connections: set[socket.socket] = set()
        self.hang_ends = threading.Event()
        kind = QuietServer6 if ":" in host else QuietServer
        self.http = kind((host, port), self.handler())
        self.http.daemon_threads = True
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))

    def __enter__(self) -> "FaultyProxy":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_ends.set()
        self.http.shutdown()
        self.http.server_close()
        for connection in tuple(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.thread.join()

    def handler(proxy) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet

            def setup(self) -> None:
                super().setup()
                proxy.connections.add(self.connection)

            def finish(self) -> None:
                proxy.connections.discard(self.connection)
                super().finish()

            def do_GET(self) -> None:
                self.pass_on()

            def do_PATCH(self) -> None:
                self.pass_on()

            def do_POST(self) -> None:
                self.pass_on()

            def pass_on(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.seen.append((self.command, urlsplit(self.path).path, len(content)))
                proxy.asked.add((self.command, self.path))
                token = len(self.headers["Authorization"] or "")
                proxy.heads.append(len(f"{self.requestline}\r\n{self.headers}") - token)
                if "watch=true" in self.path:
                    self.pass_watch_on()
                    return
                fault = proxy.next_fault(self.command)
                if fault is not None and not fault.after:
                    self.fail(fault)
                    return
                status, kind, body = proxy.ask(self.command, self.path, content, self.headers)
                if fault is not None:
                    self.fail(fault)
                    return
                self.reply(status, (("Content-Type", kind),), body)

            def pass_watch_on(self) -> None:
                """As it comes, until one side ends it; faults are for the other requests."""
                connection, answer = proxy.open("GET", self.path, b"", self.headers)
                with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException):
                    self.send_response(answer.status)
                    self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    self.wfile.flush()
                    while part := answer.read1(65536):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                        self.wfile.flush()
                    self.wfile.write(b"0\r\n\r\n")
                    self.wfile.flush()

            def fail(self, fault: Fault) -> None:
                if fault.raw is not None:
                    self.trickle(fault.raw, fault.pause_s)
                    return
                if fault.status == 0:
                    proxy.hang_ends.wait(30)
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.reply(fault.status, fault.headers, fault.body)

            def trickle(self, raw: bytes, pause_s: float) -> None:
                with contextlib.suppress(OSError):
                    for number in range(len(raw)) if pause_s else ():
                        self.connection.sendall(raw[number : number + 1])
                        if proxy.hang_ends.wait(pause_s):
                            break
                    if not pause_s:
                        self.connection.sendall(raw)
                    self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

            def reply(self, status: int, headers: tuple[tuple[str, str], ...], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def next_fault(self, method: str) -> Fault | None:
        """What a request of the method gets; of two at once each takes its own."""
        for faults in (self.then.get(method, []), self.faults):
            with contextlib.suppress(IndexError):
                return faults.pop(0)
        return None

    def ask(
        self, method: str, path: str, content: bytes, headers: Message
    ) -> tuple[int, str, bytes]:
        connection, answer = self.open(method, path, content, headers)
        with contextlib.closing(connection):
            return answer.status, answer.headers.get("Content-Type", ""), answer.read()

    def open(
        self, method: str, path: str, content: bytes, headers: Message
    ) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        target = urlsplit(self.server.url)
        context = ssl.create_default_context(cafile=str(self.server.ca))
        connection = http.client.HTTPSConnection(
            target.hostname or "", target.port, context=context, timeout=None
        )
        kept = ("Authorization", "Content-Type", "Accept")
        passed = {name: headers[name] for name in kept if headers[name]}
        connection.request(method, path, content or None, passed)
        return connection, connection.getresponse()
