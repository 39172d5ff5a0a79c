"""A real kube-scheduler with NodeResourceTopologyMatch: see tests/scheduler/main.go."""

import contextlib
import re
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.real_apiserver import ApiServer
from tests.stopwatch import Stopwatch

T = TypeVar("T")

Json = dict[str, Any]

PLUGIN = "NodeResourceTopologyMatch"
# Of Go's runtime, and of Kubernetes where a handler caught one.
PANIC = re.compile(r"^(panic:|fatal error:|.*Observed a panic)", re.MULTILINE)


class SchedulerError(Exception):
    """The scheduler has ended, has panicked, or did not decide; with the end of its log."""


class Scheduler:
    """One scheduler process, which schedules the pods that name it.

    NodeResourceTopology objects must be there before it starts: with its cache it never learns
    of later ones.
    """

    def __init__(
        self,
        program: Path,
        apiserver: ApiServer,
        *,
        cache: Mapping[str, str] | None = None,
        resync_s: int = 0,
        strategy: str = "LeastAllocated",
        verbosity: int = 2,
        kubeconfig: Path | None = None,
    ) -> None:
        """`resync_s` is cacheResyncPeriodSeconds: 0 is no cache. `cache` is the plugin's `cache`
        in its own words, such as informerMode."""
        self.apiserver = apiserver
        self.name = f"topology-{uuid.uuid4().hex[:8]}"
        self.folder = tempfile.TemporaryDirectory(prefix="rte-scheduler-")
        folder = Path(self.folder.name)
        config = self.configuration(
            kubeconfig or apiserver.kubeconfig, strategy, resync_s, dict(cache or {})
        )
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.log_file = folder / "log"
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [
                    str(program),
                    f"--config={folder / 'config.yaml'}",
                    "--secure-port=0",
                    f"-v={verbosity}",
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        try:
            # It is said before pods are watched, and after the plugin has listed its objects.
            self.wait_log("Starting Kubernetes Scheduler")
        except SchedulerError:
            self.end()
            raise

    def configuration(
        self, kubeconfig: Path, strategy: str, resync_s: int, cache: dict[str, str]
    ) -> Json:
        arguments: Json = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "NodeResourceTopologyMatchArgs",
            "scoringStrategy": {"type": strategy},
        }
        if resync_s:
            arguments |= {"cacheResyncPeriodSeconds": resync_s, "cache": cache}
        return {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            # Requests are not what is tested; the default of 50 a second would be the pace.
            "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 2000, "burst": 4000},
            "profiles": [
                {
                    "schedulerName": self.name,
                    "plugins": {"multiPoint": {"enabled": [{"name": PLUGIN}]}},
                    "pluginConfig": [{"name": PLUGIN, "args": arguments}],
                }
            ],
        }

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.check()
        self.close()

    def close(self) -> None:
        """Ends it. Raises SchedulerError if it panicked or had ended by itself."""
        try:
            self.end()
            self.check_log()
        finally:
            self.folder.cleanup()

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def check(self) -> None:
        """Raises SchedulerError unless it runs and has not panicked."""
        self.check_log()
        if self.process.poll() is not None:
            status = self.process.returncode
            raise SchedulerError(f"it has ended with {status}:\n{self.log()[-3000:]}")

    def check_log(self) -> None:
        log = self.log()
        panic = PANIC.search(log)
        if panic is not None:
            raise SchedulerError(f"it has panicked:\n{log[panic.start() : panic.start() + 6000]}")

    def wait_log(self, text: str, *, within_s: float = 60, after: int = 0) -> str:
        """The log from `after` on, once it has the text."""

        def look() -> str | None:
            found = self.log()[after:]
            return found if text in found else None

        return self.wait(look, f"its log did not say {text!r}", within_s)

    def wait(self, look: Callable[[], T | None], otherwise: str, within_s: float) -> T:
        """What `look` finds, once that is not None."""
        stopwatch = Stopwatch()
        while (found := look()) is None:
            self.check()
            if stopwatch.past(within_s):
                raise SchedulerError(f"{otherwise} in {within_s:g} s:\n{self.log()[-3000:]}")
            time.sleep(0.01)
        return found
