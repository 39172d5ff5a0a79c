"""Probes, metrics and pages over real HTTP."""

import contextlib
import http.client
import io
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rte.metrics import CONTENT_TYPE, METRICS, Measured, reference, renderer
from rte.model import (
    Allocatable,
    ContainerUse,
    DeviceId,
    DeviceUse,
    Fault,
    FaultClass,
    Observation,
    PodName,
    PodUse,
    Usage,
)
from rte.status import (
    MOST_CONNECTIONS,
    Page,
    Probes,
    StatusError,
    StatusServer,
    Timed,
    is_loopback,
)
from tests.small_machine import address, machine
from tests.waiting import until

GPU = "nvidia.com/gpu"
DOCUMENT = Path(__file__).parents[1] / "docs" / "metrics.md"


class Daemon:
    """What a probe sees of a daemon."""

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}
        self.hangs: str | None = None
        pages = {
            "/metrics": Page(CONTENT_TYPE, lambda: b"rte_build_info 1\n"),
            "/topology": Page("application/json", lambda: b"{}", names_pods=True),
            "/broken": Page("text/plain", self.break_down),
        }
        probes = Probes(not_ready=lambda: self.problems, stuck=lambda: self.hangs)
        self.server = StatusServer(probes, pages, open_pages=False)
        self.server.start("127.0.0.1", 0)

    @staticmethod
    def break_down() -> bytes:
        raise ZeroDivisionError

    def ask(self, path: str, method: str = "GET") -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
        finally:
            connection.close()

    def ask_often(self, path: str) -> None:
        for _ in range(3):  # the first may come before the silent ones are all accepted
            self.ask(path)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon()
    yield daemon
    daemon.server.stop()


def test_a_daemon_that_is_well_says_so(daemon: Daemon) -> None:
    assert daemon.ask("/healthz")[::2] == (200, "ok\n")
    assert daemon.ask("/readyz")[::2] == (200, "ready\n")


def test_what_is_not_ready_is_said_in_words(daemon: Daemon) -> None:
    daemon.problems = {"kubelet": "no answer", "policy": "unknown"}
    assert daemon.ask("/readyz")[::2] == (503, "kubelet: no answer\npolicy: unknown\n")
    assert daemon.ask("/healthz")[0] == 200, "a kubelet that is away is no reason to restart us"
    daemon.hangs = "for an hour"
    assert daemon.ask("/healthz")[::2] == (503, "stuck: for an hour\n")


def test_pages_are_found_by_path_alone(daemon: Daemon) -> None:
    assert daemon.ask("/metrics?x=1") == (200, CONTENT_TYPE, "rte_build_info 1\n")
    assert daemon.ask("/metrics", "HEAD")[::2] == (200, "")
    assert daemon.ask("/nothing")[0] == 404
    assert "/topology" in daemon.ask("/")[2]
    assert daemon.ask("/metrics", "POST")[0] == 501


def test_pages_that_name_pods_are_for_loopback(daemon: Daemon) -> None:
    assert daemon.ask("/topology")[0] == 200
    status, _, text = daemon.server.answer("/topology", trusted=False)
    assert (status, b"port-forward" in text) == (403, True)
    assert daemon.server.answer("/metrics", trusted=False)[0] == 200
    daemon.server.open_pages = True
    assert daemon.server.answer("/topology", trusted=False)[0] == 200


ADDRESSES = {
    "127.0.0.1": True,
    "127.8.8.8": True,
    "::1": True,
    "::ffff:127.0.0.1": True,
    "10.0.0.7": False,
    "::ffff:10.0.0.7": False,
    "fe80::1%eth0": False,
    "": False,
}


@pytest.mark.parametrize(("text", "local"), ADDRESSES.items())
def test_which_addresses_are_loopback(text: str, local: bool) -> None:
    assert is_loopback(text) == local


@pytest.mark.survives_bugs
def test_a_page_that_breaks_ends_its_connection_only(daemon: Daemon) -> None:
    with pytest.raises(http.client.RemoteDisconnected):
        daemon.ask("/broken")
    assert daemon.ask("/healthz")[0] == 200


def test_silent_clients_do_not_use_up_the_daemon(daemon: Daemon) -> None:
    assert daemon.server.port is not None
    silent = [
        socket.create_connection(("127.0.0.1", daemon.server.port)) for _ in range(MOST_CONNECTIONS)
    ]
    try:
        with pytest.raises(ConnectionError):
            daemon.ask_often("/healthz")
    finally:
        for client in silent:
            client.close()

    def is_served() -> bool:
        """A place is given back a moment after its client has gone."""
        with contextlib.suppress(ConnectionError):
            return daemon.ask("/healthz")[0] == 200
        return False

    until(is_served)


def test_a_client_has_its_time_as_a_whole() -> None:
    """However often it says a byte, or takes one."""
    ended = threading.Event()
    ours, theirs = socket.socketpair()
    theirs.settimeout(0.02)

    def trickle() -> None:
        while not ended.is_set():
            for at_a_time in (lambda: theirs.send(b"x"), lambda: theirs.recv(1)):
                with contextlib.suppress(TimeoutError):
                    at_a_time()

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            io.BufferedReader(Timed(ours, within_s=0.2)).readline()
        written = io.BufferedWriter(Timed(ours, within_s=0.2))
        with pytest.raises(TimeoutError):
            written.write(bytes(1 << 26))
    finally:
        ended.set()
        thread.join()
        ours.close()
        theirs.close()


def test_an_oversized_request_is_refused(daemon: Daemon) -> None:
    assert daemon.ask("/" + "a" * 70_000)[0] == 414


def test_a_taken_port_names_the_option(daemon: Daemon) -> None:
    assert daemon.server.port is not None
    second = StatusServer(daemon.server.probes, {}, open_pages=False)
    with pytest.raises(StatusError, match=r"http\.port"):
        second.start("127.0.0.1", daemon.server.port)
    second.stop()


# Metrics


def use(*numbers: int) -> tuple[DeviceUse, ...]:
    return tuple(DeviceUse(resource=GPU, id=DeviceId(f"GPU-{n}")) for n in numbers)


def measured(**parts: Any) -> dict[str, float]:
    """Samples as scraped: name with labels → value."""
    text = renderer(Measured(version="1", **parts))().decode()
    samples = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in samples)}


def publisher() -> SimpleNamespace:
    holds = ContainerUse(name="c", devices=use(0, 1))
    pod = PodUse(pod=PodName(namespace="n", name="p"), containers=(holds,))
    return SimpleNamespace(
        clock=lambda: 100.0,
        observed_at=99.0,
        published_at=98.0,
        polling=None,
        counts=SimpleNamespace(
            looks=Counter({"poll": 3}),
            outcomes=Counter(
                {
                    ("NodeResourceTopology", "patch"): 2,
                    ("NodeResourceTopology", "unchanged"): 5,
                    ("GPUFabric", "held"): 1,
                }
            ),
            written_bytes=Counter({"NodeResourceTopology": 300}),
            failures=Counter({("API server", "Forbidden"): 1}),
            doubted=4,
            publish_seconds=0.5,
            publications=2,
        ),
        observation=Observation(
            machine=machine(),
            usage=Usage(pods=(pod,)),
            allocatable=Allocatable(devices=use(0, 1, 2)),
            policy=None,
        ),
        topology={
            "attributes": [
                {"name": f"largestAligned.{GPU}", "value": "2"},
                {"name": "rteVersion", "value": "1"},
            ]
        },
    )


def test_the_publisher_is_measured() -> None:
    samples = measured(
        publisher=publisher(),
        disagreement=lambda: True,
        pods_source=lambda: "kubelet",
        problems=lambda: {"policy": "unknown"},
    )
    expected = {
        'rte_looks_total{reason="poll"}': 3,
        "rte_looks_doubted_total": 4,
        'rte_writes_total{kind="NodeResourceTopology",verb="patch"}': 2,
        'rte_writes_skipped_total{kind="NodeResourceTopology"}': 5,
        'rte_writes_held_total{kind="GPUFabric"}': 1,
        'rte_written_bytes_total{kind="NodeResourceTopology"}': 300,
        'rte_failures_total{reason="Forbidden",source="API server"}': 1,
        "rte_publish_duration_seconds_sum": 0.5,
        "rte_publish_duration_seconds_count": 2,
        "rte_published_age_seconds": 2,
        "rte_usage_age_seconds": 1,
        'rte_problem{subject="policy"}': 1,
        "rte_files_polled": 0,
        "rte_pods": 1,
        f'rte_devices_allocatable{{resource="{GPU}"}}': 3,
        f'rte_devices_used{{resource="{GPU}"}}': 2,
        f'rte_largest_aligned_devices{{resource="{GPU}"}}': 2,
        "rte_fingerprint_disagreement": 1,
        'rte_pods_source{source="kubelet"}': 1,
    }
    assert {name: samples.get(name) for name in expected} == expected


def test_the_hardware_is_measured() -> None:
    lost = Fault(severity=FaultClass.WITHHOLD, reason="lost")
    slow = Fault(severity=FaultClass.DEGRADED, reason="link")
    faults = {address(0): (slow, lost), address(1): (slow,)}
    hardware = SimpleNamespace(latest=SimpleNamespace(machine=machine(), faults=faults))
    worker = SimpleNamespace(age_s=3.0, starts=2, released=True, rss_bytes=lambda: 1 << 20)
    samples = measured(hardware=hardware, worker=worker)
    expected = {
        'rte_gpus{health="healthy"}': 2,
        'rte_gpus{health="withhold"}': 1,
        'rte_gpus{health="degraded"}': 1,
        'rte_gpus{health="info"}': 0,
        'rte_gpu_fault{gpu="gpu-0",reason="lost",severity="withhold"}': 1,
        "rte_nvml_reading_age_seconds": 3,
        "rte_nvml_released": 1,
        "rte_nvml_worker_starts_total": 2,
        "rte_nvml_worker_resident_bytes": 1 << 20,
    }
    assert {name: samples.get(name) for name in expected} == expected


def plugin() -> SimpleNamespace:
    devices = {"a": SimpleNamespace(healthy=True), "b": SimpleNamespace(healthy=False)}
    counters = SimpleNamespace(
        lists_sent=1,
        preference_faults=1,
        preference_took_s=0.006,
        preference_took=[1, 2, 1],
        allocations=4,
        allocations_refused=0,
        registrations=2,
        registrations_failed=1,
    )
    resource = SimpleNamespace(tables=SimpleNamespace(devices=devices), counters=counters)
    return SimpleNamespace(
        resources={GPU: resource},
        registrations={GPU: SimpleNamespace(registered_at=None)},
        double_uses=3,
    )


def test_the_plugin_is_measured() -> None:
    samples = measured(plugin=plugin(), plugin_buckets_s=(0.001, 0.003))
    name = "rte_preferred_allocation_duration_seconds"
    expected = {
        f'rte_plugin_devices{{health="healthy",resource="{GPU}"}}': 1,
        f'rte_plugin_devices{{health="unhealthy",resource="{GPU}"}}': 1,
        f'rte_plugin_registered{{resource="{GPU}"}}': 0,
        f'rte_plugin_registrations_total{{resource="{GPU}"}}': 2,
        f'rte_plugin_registration_failures_total{{resource="{GPU}"}}': 1,
        f'{name}_bucket{{le="0.001",resource="{GPU}"}}': 1,
        f'{name}_bucket{{le="0.003",resource="{GPU}"}}': 3,
        f'{name}_bucket{{le="+Inf",resource="{GPU}"}}': 4,
        f'{name}_count{{resource="{GPU}"}}': 4,
        f'{name}_sum{{resource="{GPU}"}}': 0.006,
        f'rte_preferred_allocation_errors_total{{resource="{GPU}"}}': 1,
        f'rte_allocations_total{{resource="{GPU}"}}': 4,
        "rte_double_use_total": 3,
    }
    assert {name: samples.get(name) for name in expected} == expected


def test_a_process_with_one_role_has_its_metrics_only() -> None:
    names = {name.partition("{")[0] for name in measured()}
    assert {name for name in names if not name.startswith("process_")} == {"rte_build_info"}


def test_every_metric_of_the_list_is_given_and_no_other() -> None:
    text = renderer(
        Measured(
            version="1",
            publisher=publisher(),
            hardware=SimpleNamespace(latest=SimpleNamespace(machine=machine(), faults={})),
            worker=SimpleNamespace(age_s=3.0, starts=2, released=False, rss_bytes=lambda: 1),
            plugin=plugin(),
            plugin_buckets_s=(0.001, 0.003),
            disagreement=lambda: False,
            certificate_ends=lambda: 1.8e9,
        )
    )().decode()
    given = dict(re.findall(r"^# TYPE (rte_\S+) (\S+)$", text, re.MULTILINE))
    assert given == {metric.name: metric.type for metric in METRICS}


def test_the_document_has_the_list() -> None:
    assert reference() in DOCUMENT.read_text()


@pytest.mark.parametrize("metric", METRICS, ids=[metric.name for metric in METRICS])
def test_names_end_in_their_unit(metric: Any) -> None:
    assert metric.name.startswith("rte_")
    assert metric.name.endswith("_total") == (metric.type == "counter")
    if metric.type in ("summary", "histogram") or "_age_" in metric.name:
        assert metric.name.endswith("_seconds")
