"""An HTTP server on loopback that passes requests on to an API server, or does as it is told."""

import http.client
import socket
import ssl
import threading
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.real_apiserver import ApiServer


class Fault(NamedTuple):
    """What one request gets instead of the API server's answer."""

    status: int = 0  # 0: no answer at all, the connection stays open
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    after: bool = False  # the request is passed on first, and only its answer is lost


class FaultyProxy:
    """Use as a context manager; `faults` are consumed by the next requests, one each."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str, int]] = []  # method, path without query, bytes of body
        self.hang_ends = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))

    def __enter__(self) -> "FaultyProxy":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_ends.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def handler(proxy) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet

            def do_GET(self) -> None:
                self.pass_on()

            def do_PATCH(self) -> None:
                self.pass_on()

            def do_POST(self) -> None:
                self.pass_on()

            def pass_on(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.seen.append((self.command, urlsplit(self.path).path, len(content)))
                fault = proxy.faults.pop(0) if proxy.faults else None
                if fault is None and "watch=true" in self.path:
                    fault = Fault()  # answers are passed on whole, and a watch has no end
                if fault is not None and not fault.after:
                    self.fail(fault)
                    return
                status, kind, body = proxy.ask(self.command, self.path, content, self.headers)
                if fault is not None:
                    self.fail(fault)
                    return
                self.reply(status, (("Content-Type", kind),), body)

            def fail(self, fault: Fault) -> None:
                if fault.status == 0:
                    proxy.hang_ends.wait(30)
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.reply(fault.status, fault.headers, fault.body)

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

    def ask(
        self, method: str, path: str, content: bytes, headers: Message
    ) -> tuple[int, str, bytes]:
        target = urlsplit(self.server.url)
        context = ssl.create_default_context(cafile=str(self.server.ca))
        connection = http.client.HTTPSConnection(
            target.hostname or "", target.port, context=context, timeout=30
        )
        try:
            kept = ("Authorization", "Content-Type", "Accept")
            passed = {name: headers[name] for name in kept if headers[name]}
            connection.request(method, path, content or None, passed)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("Content-Type", ""), answer.read()
        finally:
            connection.close()
