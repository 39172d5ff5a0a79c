"""What every test can ask for: real parts of Kubernetes, built when first needed."""

import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.gobuild import GoBuildError, program
from tests.real_apiserver import ApiServer
from tests.real_kubelet import Kubelet
from tests.real_scheduler import Scheduler

# How long an example takes to make or to run says how busy the machine is.
settings.register_profile("rte", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rte")

GO_PROGRAMS_LEFT_OUT = pytest.StashKey[int]()

WORKERS = 3
"""Processes of a run of everything. Most of a test's time is waiting, so two cores feed more."""

GoProgram = Callable[[str], Path]
StartKubelet = Callable[..., Kubelet]
StartScheduler = Callable[..., Scheduler]
Golden = Callable[[Path, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-go",
        action="store_true",
        help="leave out the tests that need Go programs (a real kubelet's managers, a real API "
        "server, a real scheduler), for a machine that has no Go toolchain or cannot fetch Go "
        "modules",
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="all recorded machines and many more steps where the default is a sample",
    )
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the expected outputs instead of comparing with them; the diff is the review",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spreads a run of whole folders over workers, unless -n says how many.

    One file, or a run that somebody watches (-s, --pdb), stays in one process.
    """
    # Workers must collect the same tests in the same order, also of a parametrization by a set.
    os.environ.setdefault("PYTHONHASHSEED", str(random.randrange(2**32)))
    options = config.option
    if is_worker(config) or getattr(options, "numprocesses", 0) is not None:
        return  # 0 stands for: pytest-xdist is not installed
    watched = options.usepdb or options.trace or options.capture == "no" or options.collectonly
    if not watched and all(Path(argument).is_dir() for argument in config.args):
        options.numprocesses = WORKERS
        if options.dist == "no":
            options.dist = "worksteal"


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("without_go"):
        return
    left_out = [item for item in items if "go_program" in getattr(item, "fixturenames", ())]
    items[:] = [item for item in items if item not in left_out]
    config.stash[GO_PROGRAMS_LEFT_OUT] = len(left_out)
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker, which collects all tests as every other does, hands its count to the controller."""
    if is_worker(session.config):
        left_out = session.config.stash.get(GO_PROGRAMS_LEFT_OUT, 0)
        session.config.workeroutput["left_out"] = left_out  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    left_out = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[GO_PROGRAMS_LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    failed = terminalreporter.stats.keys() & {"failed", "error"}
    if failed and getattr(config.option, "numprocesses", 0):
        terminalreporter.write_line(
            f"The workers had PYTHONHASHSEED={os.environ['PYTHONHASHSEED']}."
        )
    left_out = config.stash.get(GO_PROGRAMS_LEFT_OUT, 0)
    if left_out:
        terminalreporter.write_line(
            f"--without-go: {left_out} tests were left out that need a real kubelet's managers, "
            "a real API server, a real scheduler or the Go modules of their protocols; nothing "
            "took their place.",
            yellow=True,
        )


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's own, under a shorter name: the path of a socket has at most 107 bytes."""
    name = re.sub(r"\W", "_", request.node.name.removeprefix("test_"))
    return tmp_path_factory.mktemp(name[:12])


@pytest.fixture(autouse=True)
def no_bug_is_survived(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """What must go on after a bug of its own says so with a traceback: that fails the test."""
    yield
    if request.node.get_closest_marker("survives_bugs") is None:
        for phase in ("setup", "call", "teardown"):
            records = (r for r in caplog.get_records(phase) if r.name.startswith(("rte", "plugin")))
            bugs = [record for record in records if record.exc_info]
            assert not bugs, f"{bugs[0].getMessage()}: {bugs[0].exc_text}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test leaves there ends with it, however that ends."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Golden:
    """Compares a text with the file that holds what it should be."""

    def compare(path: Path, text: str) -> None:
        if pytestconfig.getoption("update_golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        expected = path.read_text() if path.exists() else ""
        assert text == expected, f"{path} differs; pytest --update-golden rewrites it"

    return compare


@pytest.fixture(scope="session")
def go_program(pytestconfig: pytest.Config) -> GoProgram:
    """The executable of a package beside this file, such as "kubelet"."""
    known: dict[str, Path | GoBuildError] = {}
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def report(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", file=sys.stderr, flush=True)

    def executable(package: str) -> Path:
        # A failure is kept too, for all the tests that would wait for the same one.
        if package not in known:
            try:
                known[package] = program(package, report)
            except GoBuildError as error:
                known[package] = error
        result = known[package]
        if isinstance(result, GoBuildError):
            raise result
        return result

    return executable


@pytest.fixture
def kubelet(go_program: GoProgram) -> Iterator[StartKubelet]:
    """Starts kubelets that end with the test; takes what `Kubelet` takes after the program."""
    with ExitStack() as stack:

        def start(*args: Any, **options: Any) -> Kubelet:
            return stack.enter_context(Kubelet(go_program("kubelet"), *args, **options))

        yield start


@pytest.fixture(scope="session")
def apiserver(go_program: GoProgram) -> Iterator[ApiServer]:
    """One API server for the whole session, as strict as some distributions have it."""
    strict = "--enable-admission-plugins=OwnerReferencesPermissionEnforcement"
    with ApiServer(go_program("apiserver"), [strict]) as server:
        yield server
    # Checked here and not in a test, which would have to start another one.
    assert not server.ca.parent.exists(), "the API server has left its folder behind"


@pytest.fixture
def scheduler(go_program: GoProgram, apiserver: ApiServer) -> Iterator[StartScheduler]:
    """Starts schedulers that end with the test; takes what `Scheduler` takes after the API server.

    One that has panicked or ended by itself fails the test.
    """
    with ExitStack() as stack:

        def start(**options: Any) -> Scheduler:
            return stack.enter_context(Scheduler(go_program("scheduler"), apiserver, **options))

        yield start
