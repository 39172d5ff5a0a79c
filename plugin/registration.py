"""One resource's life with the kubelet: socket, server, Register, watch; and again.

The kubelet dials back while it answers Register, so the server answers before. A server registers
once: kubelet 1.37 loses a plugin that registers twice on a live socket, so each further Register
comes after a clean stop and a new socket.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.service import OPTIONS, Resource, Service
from rte.kubelet.usage import KubeletError, channel, target
from rte.kubelet.watch import watch

log = logging.getLogger(__name__)

VERSION = "v1beta1"
KUBELET_SOCKET = "kubelet.sock"
# The kubelet gives itself 10 s to dial back.
REGISTER_S = 10.0
# Files are watched; this is for a file system whose events do not come.
CHECK_S = 5.0
# What is not announced by an event (a socket that is bound and not yet listened on, another
# plugin's end) is asked for again after the first pause, then less and less often.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
# An Allocate that is being answered when the plugin ends may take this long.
GRACE_S = 1.0
# The kubelet opens one stream and makes one call at a time. Threads are made when needed.
CALLS = 32

Signature = tuple[int, int, int]
"""Device, inode and time of making: a new socket in the place of the old one differs."""


class Registration:
    """A thread that keeps one resource registered until `stop`."""

    def __init__(
        self,
        resource: Resource,
        plugin_dir: Path,
        *,
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        self.resource = resource
        self.kubelet = plugin_dir / KUBELET_SOCKET
        self.sockets = tuple(plugin_dir / name for name in socket_names(resource.name))
        self.socket = self.sockets[0]
        self.registered_at: float | None = None  # monotonic seconds; None: not registered now
        self.kubelet_seen: Signature | None = None  # the kubelet that was registered with last
        self._kubelet_tried: Signature | None = None
        self._on_registered = on_registered
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._again: str | None = None
        self._said: str | None = None
        self._thread = threading.Thread(
            target=self.run, name=f"register {resource.name}", daemon=True
        )

    def start(self) -> None:
        """Raises KubeletError when the sockets' paths are too long."""
        target(self.kubelet)
        target(self._temporary())
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Returns at once; `stop` waits for the end."""
        self._stopping.set()
        self._wake.set()

    def stop(self) -> None:
        """Returns when the server has ended and its socket is gone."""
        self.ask_to_stop()
        if self._thread.is_alive():
            self._thread.join()

    def again(self, why: str) -> None:
        """Ask for one clean stop, serve and Register."""
        self._again = why
        self._wake.set()

    def run(self) -> None:
        """`run_once` again and again until `stop`; no error ends it."""
        pause_s = FIRST_PAUSE_S
        with self._watching():
            while not self._stopping.is_set():
                try:
                    why = self.run_once()
                except (OSError, RuntimeError, KubeletError, grpc.RpcError) as error:
                    if self._stopping.is_set():
                        break
                    self.resource.counters.registrations_failed += 1
                    self._say(logging.WARNING, f"not registered: {_problem(error)}")
                    if _is_burnt(error):
                        self.socket = _next(self.sockets, self.socket)
                    self._pause(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    continue
                pause_s = FIRST_PAUSE_S
                self._said = None
                if not self._stopping.is_set():
                    log.info("%s: %s: registering again", self.resource.name, why)

    def run_once(self) -> str:
        """Serve, register, and stay until there is a reason to do so again, which is returned.

        Raises what prevented it: OSError or RuntimeError of the socket, grpc.RpcError of Register.
        """
        kubelet = self._await_kubelet()
        if kubelet != self._kubelet_tried:  # another one has burnt no names
            self._kubelet_tried = kubelet
            self.socket = self.sockets[0]
        if kubelet is None or not self._await_others():
            return "stopped"
        self._again = None
        with self._serving() as own:
            self._register(kubelet, own)
            self.kubelet_seen = kubelet
            self.registered_at = time.monotonic()
            self.resource.counters.registrations += 1
            log.info("%s: registered as %s", self.resource.name, self.socket.name)
            self._on_registered()
            try:
                return self._stay(kubelet, own)
            finally:
                self.registered_at = None

    def _await_kubelet(self) -> Signature | None:
        """The socket of a kubelet that answers; None when stopped before there was one."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            found = signature(self.kubelet)
            if found is not None and answers(self.kubelet):
                return found
            self._say(logging.INFO, f"no kubelet answers on {self.kubelet} yet: waiting for it")
            pause_s = FIRST_PAUSE_S if self._wait(pause_s) else min(2 * pause_s, LONGEST_PAUSE_S)
        return None

    def _await_others(self) -> bool:
        """True when no other plugin serves this resource; False when stopped before.

        Kubelets up to 1.36 stop whichever plugin is current when the stream of the other ends.
        """
        others = [*self.sockets]
        domain, _, short = self.resource.name.rpartition("/")
        if domain == "nvidia.com":  # NVIDIA's own plugin has no other names
            others.append(self.socket.with_name(f"nvidia-{short}.sock"))
        while not self._stopping.is_set():
            other = next((path for path in others if answers(path)), None)
            if other is None:
                return True
            self._say(
                logging.WARNING,
                f"another device plugin answers on {other}: waiting for its end before "
                "registering, since its end would take this one down",
            )
            self._wait(LONGEST_PAUSE_S / 2)
        return False

    @contextmanager
    def _serving(self) -> Iterator[Signature]:
        """A server that answers on the socket; the socket's signature."""
        pool = ThreadPoolExecutor(CALLS, thread_name_prefix=self.socket.stem)
        server = grpc.server(
            pool, options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=CALLS
        )
        service = Service(self.resource)
        rpc.add_DevicePluginServicer_to_server(service, server)
        # gRPC removes the path that it bound, whenever it gets to it: under a name of its own
        # that cannot be the socket that a next server has put there meanwhile.
        temporary = self._temporary()
        temporary.unlink(missing_ok=True)
        server.add_insecure_port(target(temporary))
        server.start()
        own = None
        try:
            own = signature(temporary)
            os.rename(temporary, self.socket)
            if own is None:
                raise FileNotFoundError(f"{temporary} was removed")
            yield own
        finally:
            service.stop()
            if own is not None and signature(self.socket) == own:
                self.socket.unlink(missing_ok=True)
            server.stop(GRACE_S).wait()
            pool.shutdown(wait=False)
            temporary.unlink(missing_ok=True)

    def _register(self, kubelet: Signature, own: Signature) -> None:
        request = api.RegisterRequest(
            version=VERSION,
            endpoint=self.socket.name,
            resource_name=self.resource.name,
            options=OPTIONS,
        )
        with channel(self.kubelet) as dialled:
            call = rpc.RegistrationStub(dialled).Register.future(request, timeout=REGISTER_S)
            call.add_done_callback(lambda _: self._wake.set())
            while not call.done():
                self._wait(CHECK_S)
                reason = self._reason(kubelet, own)
                if reason is not None and not call.done():
                    # A kubelet that starts removes our socket, and then dials it for 10 s.
                    call.cancel()
                    raise KubeletError("Register", f"given up: {reason}")
            call.result()

    def _stay(self, kubelet: Signature, own: Signature) -> str:
        while (reason := self._reason(kubelet, own)) is None:
            self._wait(CHECK_S)
        return reason

    def _reason(self, kubelet: Signature, own: Signature) -> str | None:
        """Why to begin again, if there is a reason."""
        if self._stopping.is_set():
            return "stopped"
        if self._again is not None:
            return self._again
        if signature(self.socket) != own:
            return f"{self.socket.name} was removed (a kubelet that starts does that)"
        if signature(self.kubelet) not in (None, kubelet):
            return "the kubelet was restarted"
        return None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        files = watch([self.kubelet, *self.sockets], lambda _: self._wake.set())
        try:
            yield
        finally:
            files.close()

    def _wait(self, limit_s: float) -> bool:
        """Whether something happened within the limit."""
        happened = self._wake.wait(limit_s)
        self._wake.clear()
        return happened

    def _pause(self, limit_s: float) -> None:
        """Until the limit, or until stopped or there is another kubelet."""
        before = signature(self.kubelet)
        end = time.monotonic() + limit_s
        while (left_s := end - time.monotonic()) > 0:
            self._wait(left_s)  # our own sockets come and go too
            if self._stopping.is_set() or signature(self.kubelet) != before:
                return

    def _say(self, level: int, what: str) -> None:
        """Log a state once, until registered again."""
        if what != self._said:
            log.log(level, "%s: %s", self.resource.name, what)
            self._said = what

    def _temporary(self) -> Path:
        return self.socket.with_name(f".{self.socket.stem}.{os.getpid()}")


def socket_names(resource: str) -> tuple[str, ...]:
    """`rte-gpu.sock` for nvidia.com/gpu, and more to go on with when the kubelet has burnt that.

    They are short: the path of a socket has room for 107 bytes.
    """
    short = _short(resource)
    return (f"rte-{short}.sock", *(f"rte-{short}.{n}.sock" for n in range(2, 6)))


def signature(path: Path) -> Signature | None:
    """What tells this file from a later one of the same name; None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def answers(path: Path) -> bool:
    """Whether a process listens on the socket: the file alone may be left from one that died."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _short(resource: str) -> str:
    return resource.rpartition("/")[2]


def _next(paths: tuple[Path, ...], path: Path) -> Path:
    return paths[(paths.index(path) + 1) % len(paths)]


def _is_burnt(error: Exception) -> bool:
    """Whether the kubelet takes the socket's name for that of a plugin it still has.

    Kubelet 1.37 forgets to close a client when anybody registers twice for its socket, and then
    refuses the name for the rest of its life.
    """
    return isinstance(error, grpc.RpcError) and "already connected" in (error.details() or "")


def _problem(error: Exception) -> str:
    if isinstance(error, grpc.RpcError):
        return f"Register: the kubelet answered {error.code().name}: {error.details()}"
    return str(error)
