"""The daemon's few requests to the API server. The only importer of urllib3.

The official client costs the daemon more than it may (docs/decisions/0001-thin-api-client.md), so
this is a thin one: JSON over one kept-alive TLS connection, no redirects, no proxies, bounded
answers, one time-out. It retries nothing but a 401 whose credentials have changed; when to ask
again is for the caller to say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import http.client
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import urllib3
import urllib3.connection
import urllib3.exceptions

from rte.publish.access import Access, ApiError

FIELD_MANAGER = "rte"

APPLY = "application/apply-patch+yaml"  # JSON is YAML
JSON_PATCH = "application/json-patch+json"

MOST_BYTES = 8 << 20  # etcd refuses objects above 1.5 MiB; a page of 100 pods stays below this
EVENT_BYTES = 4 << 20  # one line of a watch
REFUSAL_BYTES = 64 << 10  # what is read of a refusal
REFUSAL_CHARACTERS = 1000
"""What is kept of a refusal's words: they go to the log and to /readyz."""
PODS_A_PAGE = 100
MOST_WAIT_S = 300.0
"""No Retry-After counts for more: the object would be wrong for as long."""
SILENT_S = 600.0
"""A watch that says nothing for so long, no bookmark either, has lost its connection."""

Body = Mapping[str, Any]
"""An object as plain JSON values."""


class ApiServer:
    """One API server, as one identity. Each method is one request; threads may share it."""

    def __init__(
        self,
        access: Access,
        *,
        timeout_s: float = 10,
        again: Callable[[], Access] | None = None,
    ) -> None:
        """`timeout_s` bounds a whole request: connecting, sending, and reading the answer. `again`
        reads the access anew where that may be another by then; it may raise ApiError."""
        self.access = access
        self._again = again
        self.timeout_s = timeout_s
        self.server_time: float | None = None
        """The Date of the newest answer, seconds since the epoch: times in objects are its."""
        self._pool: urllib3.HTTPConnectionPool | None = None
        self._streams: set[urllib3.BaseHTTPResponse] = set()
        self._ca_changed_ns = 0
        self._token = access.token
        self._token_changed_ns = 0

    # What the publisher asks

    def read(self, path: str, *, cached: bool = False) -> Body | None:
        """An object, or None where there is none. Cached may be late, and costs a tenth."""
        try:
            return self._stored("GET", path, query={"resourceVersion": "0"} if cached else {})
        except ApiError as error:
            if error.status == 404 and not error.unknown_kind:
                return None
            raise

    def apply(self, path: str, body: Body, *, force: bool) -> Body:
        """Server-side apply under our field manager: the object as it then is.

        With metadata.resourceVersion in the body it is refused (409) when the object has changed,
        with metadata.uid when it is another or gone.
        """
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        return self._stored("PATCH", path, query=query, body=body, content_type=APPLY)

    def patch(self, path: str, operations: list[dict[str, Any]], *, version: str) -> Body:
        """A JSON patch that is refused (409) unless the object has this resource version."""
        guard = {"op": "replace", "path": "/metadata/resourceVersion", "value": version}
        return self._stored(
            "PATCH",
            path,
            query={"fieldManager": FIELD_MANAGER},
            body=[guard, *operations],
            content_type=JSON_PATCH,
        )

    def read_node(self, node: str) -> Body | None:
        """The Node object, or None."""
        return self.read(f"/api/v1/nodes/{quote(node, safe='')}")

    def read_configz(self, node: str) -> Body:
        """The configuration that the node's kubelet works by, asked of the kubelet itself.

        That needs `get` on `nodes/configz` only; the API server's node proxy would need
        `nodes/proxy`, which is the right to run commands in every pod. The kubelet's certificate
        must be signed by the cluster's authority: our token is not shown to anybody else.
        """
        asked = f"GET /configz of the kubelet on {node}"
        found: Any = self.read_node(node) or {}
        status = found.get("status") or {}
        addresses = {a["type"]: a["address"] for a in status.get("addresses") or ()}
        port = (status.get("daemonEndpoints") or {}).get("kubeletEndpoint", {}).get("Port")
        address = addresses.get("InternalIP")
        if not address or not port:
            raise ApiError(asked, "NoAddress", "the Node has no InternalIP or no kubelet port")
        host = f"[{address}]" if ":" in address else address
        kubelet = ApiServer(
            dataclasses.replace(self.access, server=f"https://{host}:{port}", server_name=None),
            timeout_s=self.timeout_s,
        )
        try:
            answer = kubelet._object("GET", "/configz")
        except ApiError as error:
            raise ApiError(
                asked,
                error.reason,
                f"{error.message}; it takes the right to get nodes/configz and a kubelet with "
                "serverTLSBootstrap, or name its file by kubelet.configFile",
                status=error.status,
                retry_after_s=error.retry_after_s,
            ) from error
        finally:
            kubelet.close()
        configuration = answer.get("kubeletconfig")
        if not isinstance(configuration, dict):
            raise ApiError(asked, "Malformed", "it has no kubeletconfig")
        return configuration

    def label_node(self, node: str, labels: Mapping[str, str], *, uid: str) -> Body:
        """Applies these labels to the Node, and takes back those of ours that are not among them.

        The uid keeps the apply from creating a Node that is gone.
        """
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node, "uid": uid, "labels": dict(labels)},
        }
        return self.apply(f"/api/v1/nodes/{quote(node, safe='')}", body, force=True)

    def create_event(self, event: Body, *, namespace: str = "default") -> Body:
        """Creates an Event; those about a Node live in the namespace `default`."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
        return self._object("POST", path, body=event, content_type="application/json")

    def may(self, verb: str, resource: str, *, group: str = "") -> bool:
        """Whether this identity has a right on all objects of a resource. Everybody may ask."""
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {"group": group, "resource": resource, "verb": verb}},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer: Any = self._object("POST", path, body=review, content_type="application/json")
        return bool(answer.get("status", {}).get("allowed"))

    def list_pods(self, node: str) -> tuple[list[bytes], str]:
        """The pods bound to a node, each as its JSON text, and the list's resource version.

        From the API server's cache, which has them by node; etcd would be searched through all
        pods of the cluster. It may be late, and a watch from that version catches up.
        """
        query = {
            "fieldSelector": f"spec.nodeName={node}",
            "limit": str(PODS_A_PAGE),
            "resourceVersion": "0",
        }
        pods: list[bytes] = []
        while True:
            text = self._request("GET", "/api/v1/pods", query=query)
            try:
                page = msgspec.json.decode(text, type=_PodList)
            except msgspec.DecodeError as error:
                raise ApiError(f"list of the pods on {node}", "Malformed", str(error)) from error
            pods += [bytes(item) for item in page.items]
            if not page.metadata.continue_:
                return pods, page.metadata.resourceVersion
            query["continue"] = page.metadata.continue_
            query.pop("resourceVersion", None)  # the token has it

    def watch_pods(
        self, node: str, *, version: str, for_s: float
    ) -> Iterator[tuple[str, bytes] | None]:
        """Changes of the pods bound to a node since a resource version.

        Yields the event's type (ADDED, MODIFIED, DELETED, BOOKMARK) with the pod's JSON text, and
        None once at the start, when the server has accepted the watch. Ends when the server ends
        it, after `for_s` at the latest. Raises ApiError; 410 means that the version is too old.
        """
        query = {
            "fieldSelector": f"spec.nodeName={node}",
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(for_s)),
        }
        asked = f"watch of the pods on {node}"
        answer = self._send("GET", "/api/v1/pods", query, None, None)
        self._streams.add(answer)
        if (sock := getattr(answer.connection, "sock", None)) is not None:
            # Between two events; there is a bookmark every minute.
            sock.settimeout(min(for_s, SILENT_S) + self.timeout_s)
        try:
            if answer.status != 200:
                self._refuse(asked, answer, self._content(answer, asked, self.timeout_s))
            yield None
            for line in _lines(answer, asked):
                event = msgspec.json.decode(line, type=_WatchEvent)
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=_Status)
                    raise ApiError(asked, status.reason, status.message, status=status.code or 410)
                yield event.type, bytes(event.object)
        except (urllib3.exceptions.HTTPError, msgspec.DecodeError) as error:
            raise ApiError(asked, "Unreachable", str(error)) from error
        finally:
            self._streams.discard(answer)
            answer.close()

    def close(self) -> None:
        """Ends the watches that other threads follow, and closes the connections."""
        for answer in tuple(self._streams):
            answer.shutdown()
        self._drop_connections()

    def _drop_connections(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # One request

    def _stored(self, method: str, path: str, **request: Any) -> Body:
        """An object with what every object in an API server has."""
        found: Any = self._object(method, path, **request)
        metadata = found.get("metadata")
        for key in ("resourceVersion", "uid"):
            if not isinstance(metadata, dict) or not isinstance(metadata.get(key), str):
                raise ApiError(f"{method} {path}", "Malformed", f"an object without metadata.{key}")
        return dict(found)

    def _object(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str | None = None,
    ) -> Body:
        text = self._request(method, path, query=query, body=body, content_type=content_type)
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ApiError(f"{method} {path}", "Malformed", f"not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ApiError(f"{method} {path}", "Malformed", "not an object")
        return value

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str | None = None,
    ) -> bytes:
        """The text of a successful answer. Raises ApiError."""
        asked = f"{method} {path}"
        deadline = time.monotonic() + self.timeout_s
        content = None if body is None else msgspec.json.encode(body)
        answer = self._send(method, path, query or {}, content, content_type)
        if answer.status == 401 and (self._token_replaced(at_once=True) or self._renewed()):
            answer.close()
            answer = self._send(method, path, query or {}, content, content_type)
        try:
            text = self._content(answer, asked, deadline - time.monotonic())
        except BaseException:
            answer.close()
            raise
        if answer.length_remaining:
            answer.close()
        answer.release_conn()
        if not _granted(answer):
            self._refuse(asked, answer, text)
        return text

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        content: bytes | None,
        content_type: str | None,
    ) -> urllib3.BaseHTTPResponse:
        asked = f"{method} {path}"
        self._token_replaced()
        headers = {"Accept": "application/json", "User-Agent": "rte"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if content_type:
            headers["Content-Type"] = content_type
        pool = self._connections(asked)
        try:
            answer = pool.urlopen(
                method,
                f"{path}?{urlencode(query)}" if query else path,
                body=content,
                headers=headers,
                retries=False,
                redirect=False,
                preload_content=False,
                timeout=urllib3.Timeout(connect=min(self.timeout_s, 5), read=self.timeout_s),
            )
        except urllib3.exceptions.HTTPError as error:
            if isinstance(error, urllib3.exceptions.SSLError):
                self._drop_connections()  # the authority's file may be new: read it again
            self._renewed()
            raise ApiError(asked, "Unreachable", f"{self.access.server}: {error}") from error
        if date := answer.headers.get("Date"):
            with contextlib.suppress(TypeError, ValueError):
                self.server_time = email.utils.parsedate_to_datetime(date).timestamp()
        return answer

    def _content(self, answer: urllib3.BaseHTTPResponse, asked: str, within_s: float) -> bytes:
        """All of an answer; of a refusal the first 64 KiB are enough."""
        deadline = time.monotonic() + within_s
        most = MOST_BYTES if _granted(answer) else REFUSAL_BYTES
        parts: list[bytes] = []
        size = 0
        try:
            while part := answer.read1(65536):
                parts.append(part)
                size += len(part)
                if size > most:
                    if not _granted(answer):
                        break
                    raise ApiError(asked, "TooLarge", f"the answer exceeds {most} bytes")
                if time.monotonic() > deadline:
                    raise ApiError(asked, "Unreachable", "the answer takes too long")
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(asked, "Unreachable", str(error)) from error
        return b"".join(parts)

    def _refuse(self, asked: str, answer: urllib3.BaseHTTPResponse, text: bytes) -> NoReturn:
        try:
            status = msgspec.json.decode(text, type=_Status)
        except msgspec.DecodeError:  # "404 page not found", a proxy's page
            status = _Status(message=text.decode(errors="replace").strip()[:200])
        now = self.server_time or time.time()
        raise ApiError(
            asked,
            status.reason[:100]
            or {404: "NotFound", 429: "TooManyRequests"}.get(answer.status, "Refused"),
            status.message[:REFUSAL_CHARACTERS],
            status=answer.status,
            retry_after_s=retry_after_s(answer.headers.get("Retry-After", ""), now=now),
            unknown_kind=answer.status == 404 and status.kind != "Status",
        )

    def _token_replaced(self, *, at_once: bool = False) -> bool:
        """Whether the token file now holds another token than the one in use, which is taken.

        Kubelets replace the file before the token expires. Its time tells; after a 401 the
        content does.
        """
        path = self.access.token_file
        if path is None:
            return False
        try:
            changed_ns = path.stat().st_mtime_ns
            if changed_ns == self._token_changed_ns and not at_once:
                return False
            token = path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return False  # the old one may still do
        before, self._token = self._token, token
        self._token_changed_ns = changed_ns
        return token != before

    def _renewed(self) -> bool:
        """Whether the access was read anew and is another, which is taken: whoever renews a client
        certificate, an authority or a token writes a new kubeconfig, or new files beside it."""
        if self._again is None:
            return False
        try:
            access = self._again()
        except ApiError:
            return False  # it may be half written
        if access == self.access:
            return False
        self.access, self._token = access, access.token
        self._token_changed_ns = 0
        self._drop_connections()
        return True

    def _connections(self, asked: str) -> urllib3.HTTPConnectionPool:
        if (changed_ns := self._ca_file_changed()) is not None:
            self._drop_connections()
            self._ca_changed_ns = changed_ns
        if self._pool is None:
            url = urlsplit(self.access.server)
            host = url.hostname or ""
            if url.scheme == "http":
                self._pool = urllib3.HTTPConnectionPool(host, url.port, maxsize=2)
                self._pool.ConnectionCls = _Plain
            else:
                name = self.access.server_name
                self._pool = urllib3.HTTPSConnectionPool(
                    host,
                    url.port,
                    maxsize=2,
                    ssl_context=self._tls(asked),
                    server_hostname=name,
                    assert_hostname=name,
                )
                self._pool.ConnectionCls = _Secure
        return self._pool

    def _ca_file_changed(self) -> int | None:
        if self.access.ca_file is None:
            return None
        try:
            changed_ns = self.access.ca_file.stat().st_mtime_ns
        except OSError:
            return None
        return changed_ns if changed_ns != self._ca_changed_ns else None

    def _tls(self, asked: str) -> ssl.SSLContext:
        access = self.access
        try:
            context = ssl.create_default_context(
                cafile=str(access.ca_file) if access.ca_file else None, cadata=access.ca_data
            )
            if access.certificate and access.key:
                # OpenSSL reads a certificate from files only.
                with tempfile.NamedTemporaryFile() as file:
                    file.write(access.certificate + b"\n" + access.key)
                    file.flush()
                    context.load_cert_chain(file.name)
        except OSError as error:  # an SSLError is one
            raise ApiError(asked, "NoAccess", f"TLS to {access.server}: {error}") from error
        return context


def _granted(answer: urllib3.BaseHTTPResponse) -> bool:
    return answer.status in (200, 201)


def retry_after_s(text: str, *, now: float) -> float | None:
    """Seconds of a Retry-After header, which has a number of them or a date; None where it has
    neither. `now` is the server's clock, seconds since the epoch."""
    if text.isdecimal():
        return min(float(text), MOST_WAIT_S)
    try:
        wait_s = email.utils.parsedate_to_datetime(text).timestamp() - now
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(wait_s, 0.0), MOST_WAIT_S)


@contextlib.contextmanager
def _in_time(connection: urllib3.connection.HTTPConnection) -> Iterator[None]:
    """Ends the connection when the time-out is over: a socket's own starts anew at each byte, so
    that a head that trickles would never end. Raises TimeoutError then."""
    over = threading.Event()

    def end() -> None:
        over.set()
        with contextlib.suppress(OSError):
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)

    seconds = connection.timeout
    if not isinstance(seconds, int | float):
        yield
        return
    alarm = threading.Timer(seconds, end)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not over.is_set():  # else the other side has nothing to do with it
            raise
    finally:
        alarm.cancel()
    if over.is_set():
        raise TimeoutError("timed out")


class _Plain(urllib3.connection.HTTPConnection):
    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]
        with _in_time(self):
            return super().getresponse()


class _Secure(urllib3.connection.HTTPSConnection):
    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]
        with _in_time(self):
            return super().getresponse()


class _Status(msgspec.Struct):
    kind: str = ""
    reason: str = ""
    message: str = ""
    code: int = 0


class _ListMeta(msgspec.Struct):
    resourceVersion: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _PodList(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw]


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


def _lines(answer: urllib3.BaseHTTPResponse, asked: str) -> Iterator[bytes]:
    """The lines of a streamed answer as they come."""
    rest = b""
    while part := answer.read1():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > EVENT_BYTES:
            raise ApiError(asked, "TooLarge", f"a watch event exceeds {EVENT_BYTES} bytes")
        yield from filter(None, lines)
