"""What /metrics says: computed when it is asked for, from the latest look and plain counters.

`METRICS` is the whole list, which docs/metrics.md repeats and a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from rte.model import FaultClass, Faults, Machine, Observation

MOST_REASON = 80  # of an operator's words, which are for people and might be a page
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Named(NamedTuple):
    """One metric: its name as scraped, its type, its labels, and what it says."""

    name: str
    type: str
    labels: tuple[str, ...]
    says: str


METRICS = (
    Named("rte_build_info", "gauge", ("version",), "1, for the version that runs."),
    Named("rte_problem", "gauge", ("subject",), "1 for each thing that is wrong now."),
    Named(
        "rte_http_certificate_expiration_timestamp_seconds",
        "gauge",
        (),
        "When the certificate that is served ends, in seconds since the epoch; without TLS absent.",
    ),
    # The publisher
    Named("rte_looks_total", "counter", ("reason",), "Looks at the node, by what asked for them."),
    Named(
        "rte_looks_doubted_total", "counter", (), "Looks whose reading was not believed at first."
    ),
    Named("rte_writes_total", "counter", ("kind", "verb"), "Objects written, by kind and verb."),
    Named("rte_writes_skipped_total", "counter", ("kind",), "Publications that changed nothing."),
    Named(
        "rte_writes_held_total",
        "counter",
        ("kind",),
        "Publications held back because another writer changed or deleted the object.",
    ),
    Named("rte_written_bytes_total", "counter", ("kind",), "Bytes of the written requests."),
    Named(
        "rte_failures_total",
        "counter",
        ("source", "reason"),
        "Turns of the publisher that failed, by whom it asked and why.",
    ),
    Named(
        "rte_publish_duration_seconds",
        "summary",
        (),
        "From a reason to look to the written object.",
    ),
    Named(
        "rte_published_age_seconds",
        "gauge",
        (),
        "Since the published objects were last known to say what the node is.",
    ),
    Named("rte_usage_age_seconds", "gauge", (), "Since the last look at PodResources that counts."),
    Named("rte_files_polled", "gauge", (), "1 where the kubelet's files cannot be watched."),
    Named("rte_pods", "gauge", (), "Pods that PodResources lists."),
    Named(
        "rte_devices_allocatable", "gauge", ("resource",), "Devices that the kubelet can hand out."
    ),
    Named("rte_devices_used", "gauge", ("resource",), "Devices that the kubelet has handed out."),
    Named(
        "rte_largest_aligned_devices",
        "gauge",
        ("resource",),
        "The largest request that would be admitted on one NUMA node.",
    ),
    Named(
        "rte_largest_nvlink_aligned_devices",
        "gauge",
        ("resource",),
        "The largest such request whose devices are all linked by NVLink.",
    ),
    Named(
        "rte_fingerprint_disagreement",
        "gauge",
        (),
        "1 where PodResources and the pods' own facts give different fingerprints.",
    ),
    Named(
        "rte_pods_source",
        "gauge",
        ("source",),
        "1 for who tells of the pods' phases and requests: kubelet or api-server.",
    ),
    # The hardware
    Named("rte_gpus", "gauge", ("health",), "GPUs by their gravest fault."),
    Named("rte_gpu_fault", "gauge", ("gpu", "severity", "reason"), "1 for each fault of a GPU."),
    Named(
        "rte_device_withheld",
        "gauge",
        ("device", "reason"),
        "1 for each cordoned device, by id or PCI address, with the operator's reason.",
    ),
    Named("rte_nvml_reading_age_seconds", "gauge", (), "Since NVML last answered in full."),
    Named("rte_nvml_released", "gauge", (), "1 while NVML is closed on request (rte release)."),
    Named("rte_nvml_worker_starts_total", "counter", (), "Worker processes started for NVML."),
    Named("rte_nvml_worker_resident_bytes", "gauge", (), "Resident memory of the NVML worker."),
    # The device plugin
    Named(
        "rte_plugin_devices",
        "gauge",
        ("resource", "health"),
        "Devices that the plugin lists to the kubelet.",
    ),
    Named("rte_plugin_registered", "gauge", ("resource",), "1 while the kubelet has the plugin."),
    Named("rte_plugin_registrations_total", "counter", ("resource",), "Registrations."),
    Named(
        "rte_plugin_registration_failures_total",
        "counter",
        ("resource",),
        "Registrations that the kubelet refused or did not answer.",
    ),
    Named("rte_plugin_lists_sent_total", "counter", ("resource",), "Device lists sent."),
    Named(
        "rte_preferred_allocation_duration_seconds",
        "histogram",
        ("resource",),
        "Time of one GetPreferredAllocation inside the plugin.",
    ),
    Named(
        "rte_preferred_allocation_errors_total",
        "counter",
        ("resource",),
        "GetPreferredAllocation calls answered empty because of a fault of ours.",
    ),
    Named("rte_allocations_total", "counter", ("resource",), "Containers served by Allocate."),
    Named(
        "rte_double_use_total",
        "counter",
        (),
        "Devices that PodResources newly showed with several pods at once.",
    ),
    Named("rte_allocations_refused_total", "counter", ("resource",), "Allocate calls refused."),
)

_BY_NAME = {metric.name: metric for metric in METRICS}


# What the metrics are read from


class Counts(Protocol):
    """agent.Counts."""

    looks: Any  # Counter by reason
    outcomes: Any  # Counter by (kind, wrote)
    written_bytes: Any  # Counter by kind
    failures: Any  # Counter by (source, reason)
    doubted: int
    publish_seconds: float
    publications: int


class Publisher(Protocol):
    """agent.Agent, as far as it is measured."""

    @property
    def counts(self) -> Counts: ...
    @property
    def observation(self) -> Observation | None: ...
    @property
    def observed_at(self) -> float | None: ...
    @property
    def published_at(self) -> float | None: ...
    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def polling(self) -> str | None: ...
    @property
    def topology(self) -> Mapping[str, Any] | None: ...


class Worker(Protocol):
    """discovery.nvml_worker.NvmlWorker, as far as it is measured."""

    @property
    def age_s(self) -> float | None: ...
    @property
    def starts(self) -> int: ...
    @property
    def released(self) -> bool: ...
    def rss_bytes(self) -> int | None: ...


class Snapshot(Protocol):
    @property
    def machine(self) -> Machine: ...
    @property
    def faults(self) -> Faults: ...


class Hardware(Protocol):
    @property
    def latest(self) -> Snapshot | None: ...


class Plugin(Protocol):
    """plugin.life.DevicePlugin, as far as it is measured: its resources and registrations."""

    @property
    def resources(self) -> Mapping[str, Any]: ...
    @property
    def registrations(self) -> Mapping[str, Any]: ...
    @property
    def double_uses(self) -> int: ...


class Measured(NamedTuple):
    """What runs in this process; what does not run is None and has no metrics."""

    version: str
    publisher: Publisher | None = None
    hardware: Hardware | None = None
    worker: Worker | None = None
    plugin: Plugin | None = None
    plugin_buckets_s: Sequence[float] = ()
    """Upper bounds of the plugin's preference times, as its counters have them."""
    disagreement: Callable[[], bool | None] = lambda: None
    """Whether the two rules for the fingerprint differ now; None: there is one only."""
    withheld: Callable[[], Mapping[str, str]] = dict
    """Cordoned devices and the reason."""
    pods_source: Callable[[], str | None] = lambda: None
    """Who tells of the pods' phases and requests; None: nobody."""
    problems: Callable[[], Mapping[str, object]] = dict
    """What is wrong now, by subject."""
    certificate_ends: Callable[[], float | None] = lambda: None
    """When the server's certificate ends, in seconds since the epoch; None: it has none."""


def renderer(measured: Measured) -> Callable[[], bytes]:
    """A function that gives the page in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(measured))
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)


class _Collector(Collector):
    def __init__(self, measured: Measured) -> None:
        self._measured = measured

    def collect(self) -> Iterator[Metric]:
        it = self._measured
        yield _gauge("rte_build_info", [((it.version,), 1)])
        yield _gauge("rte_problem", (((subject,), 1) for subject in it.problems()))
        if (ends := it.certificate_ends()) is not None:
            yield _gauge("rte_http_certificate_expiration_timestamp_seconds", [((), ends)])
        if it.publisher is not None:
            yield from publisher_metrics(it.publisher, it.disagreement())
            source = it.pods_source()
            yield _gauge("rte_pods_source", [] if source is None else [((source,), 1)])
        if it.hardware is not None and it.hardware.latest is not None:
            yield from hardware_metrics(it.hardware.latest)
            yield _gauge(
                "rte_device_withheld",
                (((name, why[:MOST_REASON]), 1) for name, why in sorted(it.withheld().items())),
            )
        if it.worker is not None:
            yield from worker_metrics(it.worker)
        if it.plugin is not None:
            yield from plugin_metrics(it.plugin, it.plugin_buckets_s)


def publisher_metrics(publisher: Publisher, disagreement: bool | None) -> Iterator[Metric]:
    counts = publisher.counts
    yield _counter("rte_looks_total", (((r,), n) for r, n in _items(counts.looks)))
    yield _counter("rte_looks_doubted_total", [((), counts.doubted)])
    outcomes = _items(counts.outcomes)
    told_apart = {"unchanged": "rte_writes_skipped_total", "held": "rte_writes_held_total"}
    yield _counter("rte_writes_total", ((k, n) for k, n in outcomes if k[1] not in told_apart))
    for wrote, name in told_apart.items():
        yield _counter(name, (((kind,), n) for (kind, w), n in outcomes if w == wrote))
    yield _counter(
        "rte_written_bytes_total", (((kind,), n) for kind, n in _items(counts.written_bytes))
    )
    yield _counter("rte_failures_total", _items(counts.failures))
    summary = _BY_NAME["rte_publish_duration_seconds"]
    yield SummaryMetricFamily(
        summary.name,
        summary.says,
        count_value=counts.publications,
        sum_value=counts.publish_seconds,
    )
    now = publisher.clock()
    yield _gauge("rte_published_age_seconds", _age(now, publisher.published_at))
    yield _gauge("rte_usage_age_seconds", _age(now, publisher.observed_at))
    yield _gauge("rte_files_polled", [((), int(publisher.polling is not None))])
    if disagreement is not None:
        yield _gauge("rte_fingerprint_disagreement", [((), int(disagreement))])
    if publisher.observation is not None:
        yield from observation_metrics(publisher.observation)
    yield from forecast_metrics(publisher.topology or {})


def observation_metrics(observation: Observation) -> Iterator[Metric]:
    yield _gauge("rte_pods", [((), len(observation.usage.pods))])
    offered: dict[str, set[str]] = {}
    for device in observation.allocatable.devices:
        offered.setdefault(device.resource, set()).add(device.id)
    used = observation.usage.device_ids()
    resources = sorted({*offered, *used})
    yield _gauge("rte_devices_allocatable", (((r,), len(offered.get(r, ()))) for r in resources))
    yield _gauge("rte_devices_used", (((r,), len(used.get(r, ()))) for r in resources))


def forecast_metrics(body: Mapping[str, Any]) -> Iterator[Metric]:
    """The forecast, as the published attributes say it."""
    said = {str(a["name"]): str(a["value"]) for a in body.get("attributes") or ()}
    for prefix, name in (
        ("largestAligned.", "rte_largest_aligned_devices"),
        ("largestNvlinkAligned.", "rte_largest_nvlink_aligned_devices"),
    ):
        yield _gauge(
            name,
            (
                ((key.removeprefix(prefix),), int(value))
                for key, value in sorted(said.items())
                if key.startswith(prefix) and value.isdecimal()
            ),
        )


def hardware_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    order = {severity: rank for rank, severity in enumerate(FaultClass)}
    health = dict.fromkeys(("healthy", *FaultClass), 0)
    faults = []
    for gpu in snapshot.machine.gpus:
        found = snapshot.faults.get(gpu.pci, ())
        gravest = min((f.severity for f in found), key=order.__getitem__, default="healthy")
        health[gravest] += 1
        faults += [((gpu.name, fault.severity.value, fault.reason), 1) for fault in found]
    yield _gauge("rte_gpus", (((str(word),), count) for word, count in health.items()))
    yield _gauge("rte_gpu_fault", sorted(set(faults)))


def worker_metrics(worker: Worker) -> Iterator[Metric]:
    if (age_s := worker.age_s) is not None:
        yield _gauge("rte_nvml_reading_age_seconds", [((), age_s)])
    yield _gauge("rte_nvml_released", [((), int(worker.released))])
    yield _counter("rte_nvml_worker_starts_total", [((), worker.starts)])
    if (resident := worker.rss_bytes()) is not None:
        yield _gauge("rte_nvml_worker_resident_bytes", [((), resident)])


def plugin_metrics(plugin: Plugin, buckets_s: Sequence[float]) -> Iterator[Metric]:
    resources = sorted(plugin.resources.items())
    devices = []
    for name, resource in resources:
        healthy = sum(device.healthy for device in resource.tables.devices.values())
        unhealthy = len(resource.tables.devices) - healthy
        devices += [((name, "healthy"), healthy), ((name, "unhealthy"), unhealthy)]
    yield _gauge("rte_plugin_devices", devices)
    yield _gauge(
        "rte_plugin_registered",
        (
            ((name,), int(registration.registered_at is not None))
            for name, registration in sorted(plugin.registrations.items())
        ),
    )
    for metric, field in (
        ("rte_plugin_registrations_total", "registrations"),
        ("rte_plugin_registration_failures_total", "registrations_failed"),
        ("rte_plugin_lists_sent_total", "lists_sent"),
        ("rte_preferred_allocation_errors_total", "preference_faults"),
        ("rte_allocations_total", "allocations"),
        ("rte_allocations_refused_total", "allocations_refused"),
    ):
        yield _counter(metric, (((n,), getattr(r.counters, field)) for n, r in resources))
    yield _counter("rte_double_use_total", [((), plugin.double_uses)])
    histogram = _BY_NAME["rte_preferred_allocation_duration_seconds"]
    family = HistogramMetricFamily(histogram.name, histogram.says, labels=histogram.labels)
    for name, resource in resources:
        counters = resource.counters
        total, buckets = 0, []
        for bound, count in zip(
            (*map(str, buckets_s), "+Inf"), counters.preference_took, strict=True
        ):
            total += count
            buckets.append((bound, total))
        family.add_metric((name,), buckets, sum_value=counters.preference_took_s)
    yield family


Samples = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, samples: Samples) -> Metric:
    family = GaugeMetricFamily(name, _BY_NAME[name].says, labels=_BY_NAME[name].labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _counter(name: str, samples: Samples) -> Metric:
    family = CounterMetricFamily(name, _BY_NAME[name].says, labels=_BY_NAME[name].labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _items(counter: Mapping[Any, int]) -> list[tuple[Any, int]]:
    """A sorted copy: the loop adds keys while this thread reads."""
    return sorted(dict(counter).items())


def _age(now: float, at: float | None) -> Samples:
    return [] if at is None else [((), max(0.0, now - at))]


def reference() -> str:
    """The list as docs/metrics.md has it."""
    rows = "\n".join(
        f"| `{m.name}` | {m.type} | {', '.join(f'`{label}`' for label in m.labels)} | {m.says} |"
        for m in METRICS
    )
    return f"| name | type | labels | what it says |\n|---|---|---|---|\n{rows}\n"
