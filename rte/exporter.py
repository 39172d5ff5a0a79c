"""The configuration files of resource-topology-exporter and of NFD's topology updater in our words.

Their keys stand at the top of a file, where ours has none of these names. What cannot be done here
stops the start with their own dotted key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rte.foreign import ForeignError, Json, Translated, put

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
    }
)

# What counts only together.
METRICS_MODE, METRICS_TLS = "topologyExporter.metricsMode", "topologyExporter.metricsTLS"
# The keys of the latter and what they are by default.
TLS_DEFAULTS: Json = {
    "certsDir": "/etc/secrets/rte",
    "certFile": "tls.crt",
    "keyFile": "tls.key",
    "wantCliAuth": False,
    "minTLSVersion": "",
    "cipherSuites": "",
}
TRUE = (True, "true", "True", "TRUE", "T", "t", "1")
CLIENTS = (
    "metrics need no client certificate here, only the pages that name pods do "
    "(http.tls.clientCAFile); leave it out"
)
SUITES = "the suites of TLS 1.2 are OpenSSL's here; say VersionTLS13, which has its own, or none"
ALL_PODS = "an object without the pods of all namespaces misleads the scheduler; leave it out"
FINGERPRINT = "an object without the pods' fingerprint misleads the scheduler; leave it out"


def is_theirs(data: Mapping[str, Any]) -> bool:
    """Whether a file has keys of theirs."""
    return not data.keys().isdisjoint(FIRST)


def translated(data: Mapping[str, Any]) -> Translated:
    """The options of a file; other keys stay as they are. Raises ForeignError."""
    ours: Json = {key: value for key, value in data.items() if key not in FIRST}
    passed_over: list[str] = []
    for name, value in data.items():
        if name in FIRST:
            _take(name, value, ours, passed_over)
    _take_metrics(data.get("topologyExporter") or {}, ours, passed_over)
    return Translated(ours, tuple(passed_over))


def _take(key: str, value: Any, ours: Json, passed_over: list[str]) -> None:
    if value is None or key in (METRICS_MODE, METRICS_TLS):
        return
    if key in TAKEN:
        put(ours, TAKEN[key], value)
    elif key in SPECIAL:
        try:
            found = SPECIAL[key](value)
        except ValueError as error:
            raise ForeignError(key, str(error)) from error
        for ours_key, text in found.items():
            put(ours, ours_key, text)
    elif key in PASSED_OVER:
        passed_over.append(f"{key} changes nothing")
    elif key in SECTIONS:
        if not isinstance(value, dict):
            raise ForeignError(key, f"expected a mapping, got {value!r}")
        for name, each in value.items():
            _take(f"{key}.{name}", each, ours, passed_over)
    else:
        raise ForeignError(key, "there is nothing like it here")


def _take_metrics(exporter: Mapping[str, Any], ours: Json, passed_over: list[str]) -> None:
    """How metrics are served, which is said after their port."""
    mode, tls = exporter.get("metricsMode"), exporter.get("metricsTLS")
    if tls is not None and not isinstance(tls, dict):
        raise ForeignError(METRICS_TLS, f"expected a mapping, got {tls!r}")
    try:
        mode = "http" if mode is None else metrics_mode(mode)
        found = metrics_tls(tls or {}) if mode == "httptls" else {}
    except ForeignError as error:
        raise ForeignError(f"{METRICS_TLS}.{error.key}", error.problem) from error
    except ValueError as error:
        raise ForeignError(METRICS_MODE, str(error)) from error
    if mode == "disabled":
        found = {"http.port": 0}
    if tls and mode != "httptls":
        passed_over.append(f"{METRICS_TLS} changes nothing without metricsMode: httptls")
    for key, value in found.items():
        put(ours, key, value)


def metrics_mode(mode: Any) -> str:
    """disabled, http or httptls. Raises ValueError."""
    word = str(mode).lower()
    if word not in ("disabled", "http", "httptls"):
        raise ValueError(f"expected disabled, http or httptls, got {mode!r}")
    return word


def metrics_tls(said: Mapping[str, Any]) -> Json:
    """What `said`, by the keys of TLS_DEFAULTS, comes to. Raises ForeignError, with such a key."""
    for key in said:
        if key not in TLS_DEFAULTS:
            raise ForeignError(key, "there is nothing like it here")
    chosen = TLS_DEFAULTS | {key: value for key, value in said.items() if value not in (None, "")}
    version = chosen["minTLSVersion"] or "VersionTLS12"
    if version not in ("VersionTLS12", "VersionTLS13"):
        raise ForeignError("minTLSVersion", f"expected VersionTLS12 or VersionTLS13: {version!r}")
    if chosen["wantCliAuth"] in TRUE:
        raise ForeignError("wantCliAuth", CLIENTS)
    if chosen["cipherSuites"] and version != "VersionTLS13":
        raise ForeignError("cipherSuites", SUITES)
    return {
        "http.tls.certFile": f"{chosen['certsDir']}/{chosen['certFile']}",
        "http.tls.keyFile": f"{chosen['certsDir']}/{chosen['keyFile']}",
        "http.tls.minVersion": version,
    }


def all_pods(namespace: Any) -> Json:
    """Nothing for all namespaces. Raises ValueError."""
    if namespace in ("", "*"):
        return {}
    raise ValueError(ALL_PODS)


def fingerprint(wanted: Any) -> Json:
    """Nothing where it is wanted. Raises ValueError."""
    if wanted in TRUE:
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


# Keys that are more than another word for one of ours; they raise ValueError.
SPECIAL: Mapping[str, Callable[[Any], Json]] = {
    "global.debug": _debug,
    "nrtUpdater.noPublish": _silent,
    "nrtUpdater.oneShot": _once,
    "resourceMonitor.namespace": all_pods,
    "resourceMonitor.podSetFingerprint": fingerprint,
    "topologyExporter.sleepInterval": _nanoseconds,
}
SECTIONS = {key.rpartition(".")[0] for key in (*TAKEN, *SPECIAL)} - {""}
FIRST = SECTIONS | {key for key in TAKEN if "." not in key}
