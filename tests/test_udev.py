"""Kernel events wake: a real netlink socket and real devices."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from ctypes.util import find_library
from pathlib import Path

import pytest

from rte.discovery.udev import UdevError, watch_udev

ROOT = Path(__file__).parent.parent
PATIENCE_S = 60.0

# Runs in a network namespace of its own, where devices can be made without disturbing the machine,
# by root and, in a user namespace, by anyone.
LISTENER = """
import ctypes, os, socket, struct, sys
from rte.discovery.udev import watch_udev

NEW_USER, NEW_NET = 0x10000000, 0x40000000
ids = os.geteuid(), os.getegid()
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(NEW_NET | (NEW_USER if ids[0] else 0)):
    sys.exit("unshare: " + os.strerror(ctypes.get_errno()))
if ids[0]:  # libudev takes events only from the namespace's root
    user, group = (f"0 {id} 1" for id in ids)
    for name, text in ("setgroups", "deny"), ("uid_map", user), ("gid_map", group):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)

def request(type, flags, *attributes):
    "One rtnetlink message about a link; the errno that the kernel answers."
    body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + b"".join(attributes)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(struct.pack("IHHII", 16 + len(body), type, 5 | flags, 1, 0) + body)
        return -struct.unpack_from("i", netlink.recv(65536), 16)[0]

def attribute(type, value):
    return struct.pack("HH", 4 + len(value), type) + value + bytes(-len(value) % 4)

def new_link():
    # Which of these kinds a kernel has differs.
    for kind in b"dummy", b"veth", b"ifb", b"bridge":
        info = attribute(18, attribute(1, kind))  # IFLA_LINKINFO, IFLA_INFO_KIND
        error = request(16, 0x600, attribute(3, b"rte0\\0"), info)  # RTM_NEWLINK, IFLA_IFNAME
        if not error:
            return
    sys.exit("RTM_NEWLINK: " + os.strerror(error))

def del_link():
    error = request(17, 0, attribute(3, b"rte0\\0"))  # RTM_DELLINK
    if error:
        sys.exit("RTM_DELLINK: " + os.strerror(error))

watch = watch_udev(lambda: print("woken", flush=True))
steps = {"new": new_link, "del": del_link, "close": watch.close}
print("listening", flush=True)
for line in sys.stdin:
    steps[line.strip()]()
    print("did " + line.strip(), flush=True)
"""


@pytest.mark.skipif(find_library("udev") is None, reason="libudev is not installed")
def test_a_network_device_that_appears_or_goes_wakes() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as listener:
        assert listener.stdin is not None
        assert listener.stderr is not None
        said = Lines(listener)
        if said() != "listening":
            refused = listener.stderr.read()
            if refused.startswith("unshare: "):  # a container without the right to
                pytest.skip(f"no network namespace can be made here: {refused}")
            pytest.fail(refused)
        for step in ("new", "del"):
            listener.stdin.write(f"{step}\n")
            listener.stdin.flush()
            # One device can be several events, so there may be more of the same later.
            wanted = {"woken", f"did {step}"}
            while wanted:
                line = said()
                assert line, f"{step}: {listener.stderr.read()}"  # it ended
                wanted.discard(line)
            while said.waiting() == "woken":
                continue
        listener.stdin.write("close\n")
        listener.stdin.flush()
        while (line := said()) == "woken":
            continue
        assert line == "did close"
        listener.stdin.close()
        assert said() == ""


class Lines:
    """Takes a process' lines one by one, with patience."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self.follow, args=(process,), daemon=True).start()

    def follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.put(line.strip())
        self.lines.put("")

    def __call__(self) -> str:
        return self.lines.get(timeout=PATIENCE_S)

    def waiting(self) -> str | None:
        try:
            return self.lines.get(timeout=0.1)
        except queue.Empty:
            return None


def test_without_libudev_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyudev._ctypeslib.utils

    monkeypatch.setattr(pyudev._ctypeslib.utils, "find_library", lambda name: None)
    with pytest.raises(UdevError, match="libudev cannot be loaded: No library named udev"):
        watch_udev(lambda: None)


# By itself: another test's threads open and close things.
CLOSER = """
import os
from rte.discovery.udev import watch_udev

watch_udev(lambda: None).close()  # libudev itself keeps something open once
before = os.listdir("/proc/self/fd")
watch = watch_udev(lambda: None)
assert len(os.listdir("/proc/self/fd")) > len(before)
watch.close()
watch.close()
assert not watch.thread.is_alive()
del watch
assert os.listdir("/proc/self/fd") == before
"""


@pytest.mark.skipif(find_library("udev") is None, reason="libudev is not installed")
def test_closing_ends_the_thread_and_leaves_nothing_open() -> None:
    subprocess.run([sys.executable, "-c", CLOSER], cwd=ROOT, check=True)
