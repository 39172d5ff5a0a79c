"""The configuration files of resource-topology-exporter and of NFD's topology updater in our words.

Their keys stand at the top of a file, where ours has none of these names. What cannot be done here
stops the start with their own dotted key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Json = dict[str, Any]

# Their dotted key → ours. Types and choices are checked under our key, as for our own file.
TAKEN = {
    "excludeList": "nrt.resourceExclude",  # of the topology updater
    "resourceExclude": "nrt.resourceExclude",
    "podExclude": "nrt.podExclude",
    "global.kubeconfig": "api.kubeconfig",
    "nrtUpdater.hostname": "nodeName",
    "resourceMonitor.sysfsRoot": "host.sysfs",
    "resourceMonitor.podSetFingerprintMethod": "nrt.fingerprint.method",
    "topologyExporter.podResourcesSocketPath": "kubelet.podResourcesSocket",
    "topologyExporter.kubeletConfigFile": "kubelet.configFile",
    "topologyExporter.addNRTOwnerEnable": "nrt.owner",
    "topologyExporter.metricsPort": "http.port",
    "topologyExporter.metricsAddress": "http.address",
    "topologyExporter.MetricsAddress": "http.address",  # as it is spelt there
}

# What changes nothing here; docs/publisher.md says why.
PASSED_OVER = frozenset(
    {
        "global.verbose",
        "nrtUpdater.patchMode",
        "nrtUpdater.patchResync",
        "resourceMonitor.refreshNodeResources",
        "resourceMonitor.exposeTiming",
        "resourceMonitor.podSetFingerprintStatusFile",
        "resourceMonitor.excludeTerminalPods",
        "topologyExporter.podReadinessEnable",
        "topologyExporter.notifyFilePath",
        "topologyExporter.maxEventPerTimeUnit",
        "topologyExporter.timeUnitToLimitEvents",
        "topologyExporter.referenceContainer",
        "topologyExporter.metricsTLS",
    }
)

NO_TLS = "metrics are served without TLS here; say http or disabled"
ALL_PODS = "an object without the pods of all namespaces misleads the scheduler; leave it out"
FINGERPRINT = "an object without the pods' fingerprint misleads the scheduler; leave it out"


class ExporterError(ValueError):
    """A file that cannot be followed. `key` is their dotted key."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class Translated(NamedTuple):
    """What a file comes to."""

    ours: Json
    passed_over: tuple[str, ...]  # sentences for people


def is_theirs(data: Mapping[str, Any]) -> bool:
    """Whether a file has keys of theirs."""
    return not data.keys().isdisjoint(FIRST)


def translated(data: Mapping[str, Any]) -> Translated:
    """The options of a file; other keys stay as they are. Raises ExporterError."""
    ours: Json = {key: value for key, value in data.items() if key not in FIRST}
    passed_over: list[str] = []
    for name in FIRST & data.keys():
        _take(name, data[name], ours, passed_over)
    return Translated(ours, tuple(sorted(passed_over)))


def _take(key: str, value: Any, ours: Json, passed_over: list[str]) -> None:
    if value is None:
        return
    if key in TAKEN:
        put(ours, TAKEN[key], value)
    elif key in SPECIAL:
        for ours_key, text in SPECIAL[key](value).items():
            put(ours, ours_key, text)
    elif key in PASSED_OVER:
        passed_over.append(f"{key} changes nothing")
    elif key in SECTIONS:
        if not isinstance(value, dict):
            raise ExporterError(key, f"expected a mapping, got {value!r}")
        inner = {f"{key}.{name}": each for name, each in value.items()}
        for name in sorted(inner, key=lambda name: name in SPECIAL):  # metricsMode after its port
            _take(name, inner[name], ours, passed_over)
    else:
        raise ExporterError(key, "there is nothing like it here")


def metrics_mode(mode: Any) -> Json:
    """What disabled, http or httptls comes to. Raises ValueError."""
    if mode == "disabled":
        return {"http.port": 0}
    if mode == "http":
        return {}
    raise ValueError(NO_TLS if mode == "httptls" else f"expected disabled or http, got {mode!r}")


def all_pods(namespace: Any) -> Json:
    """Nothing for all namespaces. Raises ValueError."""
    if namespace in ("", "*"):
        return {}
    raise ValueError(ALL_PODS)


def fingerprint(wanted: Any) -> Json:
    """Nothing where it is wanted. Raises ValueError."""
    if wanted in (True, "true", "True", "TRUE", "T", "t", "1"):
        return {}
    raise ValueError(FINGERPRINT)


def _debug(wanted: Any) -> Json:
    return {"logLevel": "debug"} if wanted else {}


def _silent(wanted: Any) -> Json:
    return {"nrt.publish": not wanted}


def _once(wanted: Any) -> Json:
    if wanted:
        raise ValueError("say --oneshot")
    return {}


def _nanoseconds(value: Any) -> Json:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number of nanoseconds, got {value!r}")
    return {"kubelet.poll": value / 1e9}


def _named(key: str, meant: Callable[[Any], Json]) -> Callable[[Any], Json]:
    def take(value: Any) -> Json:
        try:
            return meant(value)
        except ValueError as error:
            raise ExporterError(key, str(error)) from error

    return take


# Keys that are more than another word for one of ours.
SPECIAL: Mapping[str, Callable[[Any], Json]] = {
    key: _named(key, meant)
    for key, meant in {
        "global.debug": _debug,
        "nrtUpdater.noPublish": _silent,
        "nrtUpdater.oneShot": _once,
        "resourceMonitor.namespace": all_pods,
        "resourceMonitor.podSetFingerprint": fingerprint,
        "topologyExporter.sleepInterval": _nanoseconds,
        "topologyExporter.metricsMode": metrics_mode,
    }.items()
}
SECTIONS = {key.rpartition(".")[0] for key in (*TAKEN, *SPECIAL)} - {""}
FIRST = SECTIONS | {key for key in TAKEN if "." not in key}


def put(ours: Json, key: str, value: Any) -> None:
    *path, last = key.split(".")
    section = ours
    for part in path:
        section = section.setdefault(part, {})
    section[last] = value
