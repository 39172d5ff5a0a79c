"""A libnvidia-ml.so.1 that answers from a recorded machine, and takes faults while a daemon runs.

`fake_nvml()` builds it once and keeps it under ${XDG_CACHE_HOME:-~/.cache}/rte-tests. `Driver` is
one machine's driver: it writes the files that the library reads and looks at what it did.

Lines of the control file; GPU is a position in nvml.json, a bus id, a UUID or `*`:

    call NAME[@GPU] fail CODE         a call (or *) gives an nvmlReturn_t; 13 is an absent symbol
    call NAME[@GPU] hang [SECONDS]    it comes back late, or never
    call NAME[@GPU] abort             the process dies in it
    lost GPU [CODE]                   no handle: 15, lost
    broken GPU [CODE]                 a handle and a bus id, and nothing more: 999, unknown
    removed GPU                       not there; the indices of those behind it shift
    link GPU LINK|* down|up
    fabric GPU STATE [STATUS]
    remap GPU CORRECTABLE UNCORRECTABLE PENDING FAILED
    recovery GPU ACTION
    ecc GPU COUNT
    mig GPU CURRENT PENDING           MIG mode
    mig-gone GPU INDEX                that MIG device was destroyed
    events GPU MASK                   the event types that the GPU supports
    driver VERSION
    print WORD                        nvmlInit prints it to standard output
    event NUMBER GPU TYPE DATA [GPU-INSTANCE COMPUTE-INSTANCE]     numbers rise
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from rte.discovery.reading import NvmlReading

SOURCE = Path(__file__).with_name("fake_nvml.c")
FLAGS = ("-std=c11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")

XID = 0x8
MIG_CONFIG_CHANGE = 0x100
RECOVERY_ACTION = 0x8000


class FakeNvml:
    """A built library, in a folder of its own."""

    def __init__(self, library_dir: Path) -> None:
        self.library_dir = library_dir

    def env(self, machine: Path, control: Path | None = None) -> dict[str, str]:
        """What a client needs in its environment; a machine is its folder or its nvml.json."""
        reading = machine / "nvml.json" if machine.is_dir() else machine
        env = {"LD_LIBRARY_PATH": str(self.library_dir), "FAKE_NVML_JSON": str(reading)}
        if control is not None:
            env["FAKE_NVML_CONTROL"] = str(control)
        return env


def fake_nvml(*, without: Iterable[str] = ()) -> FakeNvml:
    """The library, built unless it was before; `without` names symbols that an old driver lacks.

    Raises RuntimeError where the machine has no C compiler and ziglang is not installed.
    """
    compiler = compiler_command()
    command = [*compiler, *FLAGS, *(f"-D{name}=absent_{name}" for name in sorted(without))]
    key = hashlib.sha256()
    for part in (*command, platform.machine(), SOURCE.read_text()):
        key.update(part.encode() + b"\0")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rte-tests"
    folder = cache / f"fake-nvml-{key.hexdigest()[:16]}"
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        building = folder / f".building-{os.getpid()}.so"
        done = subprocess.run(
            [*command, "-o", str(building), str(SOURCE)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
        building.replace(library)  # whole or not at all: several test runs may build at once
    return FakeNvml(folder)


def compiler_command() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    probe = subprocess.run(
        [sys.executable, "-m", "ziglang", "version"], capture_output=True, check=False
    )
    if probe.returncode == 0:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise RuntimeError(
        "the fake NVML library needs a C compiler: no cc, gcc or clang on PATH and no ziglang "
        f"in {sys.executable}; install one of them (pip install ziglang)"
    )


class Driver:
    """The fake driver of one machine, in a folder of a test."""

    def __init__(
        self, folder: Path, machine: Path | NvmlReading, *, without: Iterable[str] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.library = fake_nvml(without=without)
        self.json = folder / "nvml.json"
        self.control_file = folder / "control"
        self.device = folder / "nvidiactl"
        self.journal_file = folder / "journal"
        self.lines: tuple[str, ...] = ()
        self.events: list[str] = []
        if isinstance(machine, Path):
            machine = msgspec.json.decode(
                (machine / "nvml.json" if machine.is_dir() else machine).read_bytes(),
                type=NvmlReading,
            )
        self.write(machine)
        self.control()

    @property
    def env(self) -> dict[str, str]:
        return {
            **self.library.env(self.json, self.control_file),
            "FAKE_NVML_DEVICE": str(self.device),
            "FAKE_NVML_JOURNAL": str(self.journal_file),
        }

    def write(self, reading: NvmlReading) -> None:
        """Changes the hardware: a GPU plugged in, MIG devices made."""
        replace(self.json, msgspec.json.encode(reading))

    def control(self, *lines: str) -> None:
        """Puts these faults in force and ends all others; events that happened stay."""
        self.lines = lines
        replace(self.control_file, "\n".join([*self.lines, *self.events, ""]).encode())

    def event(self, gpu: int | str, type: int, data: int = 0, instances: str = "") -> None:
        """Lets an event happen now: those who wait for it get it once."""
        self.events.append(f"event {len(self.events) + 1} {gpu} {type:#x} {data} {instances}")
        self.control(*self.lines)

    def sessions(self) -> int:
        """Open sessions of all living processes, as fuser would count those of /dev/nvidiactl."""
        return sum(
            opened == str(self.device)
            for process in os.listdir("/proc")
            if process.isdecimal()
            for opened in open_files(process)
        )

    def journal(self) -> list[str]:
        """`init PID` and `shutdown PID`, oldest first."""
        return self.journal_file.read_text().splitlines() if self.journal_file.exists() else []


def open_files(process: str) -> Iterator[str]:
    """What a process has open; less or nothing where it ends meanwhile."""
    folder = f"/proc/{process}/fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed since
                yield os.readlink(f"{folder}/{number}")


def replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(content)
    fresh.replace(path)
