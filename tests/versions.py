"""Every version of one object, as a watcher of the API server sees it."""

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

from tests.real_apiserver import ApiServer

PATIENCE_S = 60.0


class Versions:
    """Use as a context manager. The object need not be there yet; all of the watch is kept."""

    def __init__(self, server: ApiServer, collection: str, name: str) -> None:
        """`collection` is the path that the objects' names are appended to."""
        query = {"watch": "true", "fieldSelector": f"metadata.name={name}", "timeoutSeconds": 86400}
        target = urlsplit(server.url)
        self.connection = http.client.HTTPSConnection(
            target.hostname or "",
            target.port,
            context=ssl.create_default_context(cafile=str(server.ca)),
        )
        self.connection.request(
            "GET",
            f"{collection.rstrip('/')}?{urlencode(query)}",
            headers={"Authorization": f"Bearer {server.token}"},
        )
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200, self.answer.read()
        self.bodies: list[dict[str, Any]] = []  # in their order; a deletion is {}
        self.come = threading.Condition()
        self.reader = threading.Thread(target=self.read, name="versions", daemon=True)

    def __enter__(self) -> Self:
        self.reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sock = self.connection.sock
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        self.reader.join()
        self.connection.close()

    def read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            for line in self.answer:
                event = json.loads(line)
                with self.come:
                    self.bodies.append({} if event["type"] == "DELETED" else event["object"])
                    self.come.notify_all()

    def until(self, version: str) -> list[dict[str, Any]]:
        """All versions so far, when this one is among them."""
        end = time.monotonic() + PATIENCE_S
        with self.come:
            while version not in {
                body["metadata"]["resourceVersion"] for body in self.bodies[-99:]
            }:
                assert self.come.wait(end - time.monotonic()), f"version {version} was not seen"
            return list(self.bodies)
