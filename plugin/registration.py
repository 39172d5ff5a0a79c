"""One resource's life with the kubelet: socket, server, Register, watch; and again.

With the plugin watcher there is no Register: the socket lies in plugins_registry, where the kubelet
looks, asks whose it is, and says whether it took it.

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
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

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
# Our own last stream may be open in the kubelet's eyes for a moment more. And a kubelet 1.37 that
# lost a plugin shows its devices for ever, so that a socket which may be another resource's is not
# waited for without end.
HANDOVER_S, UNSURE_S = 0.3, 60.0
# What is not announced by an event (a socket that is bound and not yet listened on, another
# plugin's end) is asked for again after the first pause, then less and less often.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
# An Allocate that is being answered when the plugin ends may take this long.
GRACE_S = 1.0
# The kubelet opens one stream and makes one call at a time. Threads are made when needed.
CALLS = 32

Signature = tuple[int, int, int]
"""Device, inode and time of making: a new socket in the place of the old one differs."""


class Notice(NamedTuple):
    """What the plugin watcher said."""

    refused: str | None  # why the kubelet did not take the plugin


class Registration:
    """A thread that keeps one resource registered until `stop`."""

    def __init__(
        self,
        resource: Resource,
        plugin_dir: Path,
        *,
        registry_dir: Path | None = None,
        on_registered: Callable[[], None] = lambda: None,
        served: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """With `registry_dir` the plugin watcher finds the sockets there.

        `served` says whether the kubelet has healthy devices of a resource that we do not serve.
        """
        self.resource = resource
        self.plugin_dir = plugin_dir
        self.watched = registry_dir is not None
        self.kubelet = plugin_dir / KUBELET_SOCKET
        folder = registry_dir or plugin_dir
        self.sockets = tuple(folder / name for name in socket_names(resource.name))
        self.socket = self.sockets[0]
        self.registered_at: float | None = None  # monotonic seconds; None: not registered now
        self.kubelet_seen: Signature | None = None  # the kubelet that was registered with last
        self._kubelet_tried: Signature | None = None
        self._on_registered = on_registered
        self._served = served
        self._notified: Notice | None = None  # by the plugin watcher
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
        target(self.sockets[-1])
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

        Raises what prevented it: OSError or RuntimeError of the socket, grpc.RpcError of Register,
        KubeletError of the plugin watcher.
        """
        kubelet = self._await_kubelet()
        if kubelet != self._kubelet_tried:  # another one has burnt no names
            self._kubelet_tried = kubelet
            self.socket = self.sockets[0]
        if kubelet is None or not self._await_others():
            return "stopped"
        self._again = self._notified = None
        with self._serving() as own:
            if not self.watched:
                self._register(kubelet, own)
                self._registered(kubelet)
            try:
                return self._stay(kubelet, own)
            finally:
                self.registered_at = None

    def _registered(self, kubelet: Signature | None) -> None:
        self.kubelet_seen = kubelet
        self.resource.counters.registrations += 1
        self.registered_at = time.monotonic()
        log.info("%s: registered as %s", self.resource.name, self.socket.name)
        self._on_registered()

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
        began = time.monotonic()
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            waited_s = time.monotonic() - began
            other = self._other(sure=waited_s > UNSURE_S)
            if other is None:
                return True
            if waited_s > HANDOVER_S:
                self._say(
                    logging.WARNING,
                    f"another device plugin answers on {other}: waiting for its end before "
                    "registering, since its end would take this one down",
                )
            self._wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S / 2)
        return False

    def _other(self, *, sure: bool) -> str | None:
        """Where a plugin listens that serves this resource; `sure` leaves guesses out."""
        names = [*socket_names(self.resource.name)]
        if self.resource.name.startswith("nvidia.com/"):  # NVIDIA's own plugin has no other names
            names.append(f"nvidia-{_short(self.resource.name)}.sock")
        known = [*self.sockets, *(self.plugin_dir / name for name in names)]
        found = next((path for path in known if answers(path)), None)
        if found is not None:
            return str(found)
        if sure or not self._served(self.resource.name):
            return None
        # The kubelet has its devices and does not say from where.
        others = sorted(
            path
            for path in self.plugin_dir.glob("*.sock")
            if path.name != KUBELET_SOCKET and not path.name.startswith("rte-") and answers(path)
        )
        return " or ".join(map(str, others)) or None

    @contextmanager
    def _serving(self) -> Iterator[Signature]:
        """A server that answers on the socket; the socket's signature."""
        pool = ThreadPoolExecutor(CALLS, thread_name_prefix=self.socket.stem)
        server = grpc.server(
            pool, options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=CALLS
        )
        service = Service(self.resource)
        rpc.add_DevicePluginServicer_to_server(service, server)
        if self.watched:
            from plugin.watcher import serve  # noqa: PLC0415 - by option; memory

            serve(server, self.resource.name, VERSION, self.notify)
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
            self._take_notice()
            self._wait(CHECK_S)
        return reason

    def notify(self, refused: str | None) -> None:
        """What the plugin watcher says, each kubelet anew."""
        self._notified = Notice(refused)
        self._wake.set()

    def _take_notice(self) -> None:
        notice, self._notified = self._notified, None
        if notice is None:
            return
        if notice.refused is not None:
            self.registered_at = None
            raise KubeletError("plugin watcher", f"the kubelet did not take it: {notice.refused}")
        self._said = None
        self._registered(signature(self.kubelet))

    def _reason(self, kubelet: Signature, own: Signature) -> str | None:
        """Why to begin again, if there is a reason."""
        if self._stopping.is_set():
            return "stopped"
        if self._again is not None:
            return self._again
        if signature(self.socket) != own:
            return f"{self.socket.name} was removed (a kubelet that starts does that)"
        if not self.watched and signature(self.kubelet) not in (None, kubelet):
            return "the kubelet was restarted"  # the watcher of the new one finds the socket
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

    def _temporary(self) -> Path:  # the plugin watcher passes over names with a dot
        number = zlib.crc32(self.resource.name.encode())  # short: there are 107 bytes for the path
        return self.socket.with_name(f".rte.{os.getpid()}.{number:08x}")


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
    said = error.details() if isinstance(error, grpc.RpcError) else str(error)
    return "already connected" in (said or "")


def _problem(error: Exception) -> str:
    if isinstance(error, grpc.RpcError):
        return f"Register: the kubelet answered {error.code().name}: {error.details()}"
    return str(error)
