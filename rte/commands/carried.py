"""Flags of resource-topology-exporter, of NFD's topology updater and of NVIDIA's device plugin that
are no options of ours: what they come to here, so that a manifest can be carried over."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rte.config import ConfigError
from rte.exporter import all_pods, fingerprint, metrics_mode, metrics_tls
from rte.foreign import ForeignError

# Flags of NVIDIA's device plugin that change nothing here; docs/migrate.md says why.
NVIDIA = (
    "--fail-on-init-error",
    "--mps-root",
    "--nvidia-ctk-path",
    "--nvidia-cdi-hook-path",
    "--cdi-feature-flags",
    "--cdi-disable-hooks",
)
# Those of resource-topology-exporter; docs/publisher.md says why.
EXPORTER = (
    "--patch-mode",
    "--patch-resync",
    "--notify-file",
    "--max-events-per-second",
    "--podreadiness",
    "--expose-timing",
    "--refresh-node-resources",
    "--exclude-terminal-pods",
    "--reference-container",
    "--pods-fingerprint-status-file",
)
# Those that count with --metrics-mode=httptls only → the keys of its file for them.
METRICS_TLS = {
    "--metrics-certs-dir": "certsDir",
    "--metrics-cert-file": "certFile",
    "--metrics-key-file": "keyFile",
    "--metrics-want-cli-auth": "wantCliAuth",
    "--metrics-tls-min-version": "minTLSVersion",
    "--metrics-tls-cipher-suites": "cipherSuites",
}
# Those of nfd-topology-updater; docs/migrate.md says why.
UPDATER = ("--api-auth-token-file",)
# Those of klog, which both log with.
KLOG = (
    "-v",
    "--v",
    "--vmodule",
    "--logtostderr",
    "--alsologtostderr",
    "--stderrthreshold",
    "--log-dir",
    "--log-file",
    "--log-file-max-size",
    "--log-backtrace-at",
    "--one-output",
    "--add-dir-header",
    "--skip-headers",
    "--skip-log-headers",
)
PASSED_OVER = (*NVIDIA, *EXPORTER, *UPDATER, *KLOG)

METRICS_MODE = "metrics_mode"
"""Set to disabled, http or httptls, which counts whatever the port and wherever that is named."""

Meant = Callable[[str], Mapping[str, Any]]
"""A flag's value → our dotted keys and their values; raises ValueError with the reason."""


def _kubelet_config_uri(uri: str) -> Mapping[str, Any]:
    if uri.startswith("file://"):
        return {"kubelet.configFile": uri.removeprefix("file://")}
    if uri.startswith("https://") and uri.rstrip("/").endswith("/configz"):
        return {}  # it is asked where no file is named
    raise ValueError("expected file:///PATH or https://ADDRESS:PORT/configz")


def _metrics_mode(mode: str) -> Mapping[str, Any]:
    return {METRICS_MODE: metrics_mode(mode)}


def _debug(wanted: str) -> Mapping[str, Any]:
    return {"logLevel": "debug"} if wanted.lower() in ("true", "t", "1") else {}


MEANT: Mapping[str, Meant] = {
    "--debug": _debug,
    "--metrics-mode": _metrics_mode,
    "--watch-namespace": all_pods,
    "--pods-fingerprint": fingerprint,
    "--kubelet-config-uri": _kubelet_config_uri,
    "--kubelet-state-dir": lambda folder: {"kubelet.rootDir": folder},
    "--port": lambda port: {"http.port": port},
}
BOOLEAN = frozenset({"--debug", "--pods-fingerprint"})


class Carry(argparse.Action):
    """Sets what the flag comes to, or refuses it with the reason."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        try:
            found = MEANT[option_string](str(values))
        except ValueError as error:
            parser.error(f"argument {option_string}: {error}")
        for key, value in found.items():
            setattr(namespace, key, str(value))


def add_carried(parser: argparse.ArgumentParser, *, publishes: bool) -> None:
    """The flags, which the help does not list; those of exporters only where it `publishes`."""
    for flag in PASSED_OVER:
        parser.add_argument(flag, nargs="?", dest="passed_over", help=argparse.SUPPRESS)
    for flag in METRICS_TLS:
        parser.add_argument(flag, nargs="?", const="true", help=argparse.SUPPRESS)
    for flag in MEANT if publishes else ():
        optional: dict[str, Any] = {"nargs": "?", "const": "true"} if flag in BOOLEAN else {}
        parser.add_argument(
            flag, action=Carry, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **optional
        )


def carried(given: Mapping[str, Any]) -> Mapping[str, str]:
    """Dotted keys and their texts of what flags come to together. Raises ConfigError."""
    mode = given.get(METRICS_MODE)
    if mode == "disabled":
        return {"http.port": "0"}
    if mode != "httptls":
        return {}
    of_key = {key: flag for flag, key in METRICS_TLS.items()}
    said = {key: given.get(flag[2:].replace("-", "_")) for key, flag in of_key.items()}
    try:
        return metrics_tls(said)
    except ForeignError as error:
        flag = f"flag {of_key[error.key]}"
        raise ConfigError("http.tls", flag, error.problem) from error


def with_two_dashes(words: Sequence[str]) -> list[str]:
    """Go's programs take their long flags with one dash too, and klog's with underscores."""
    return [
        f"-{word}" if re.match(r"-[a-z][a-z-]+(=|$)", word) else word
        for word in (_hyphens(word) for word in words)
    ]


def _hyphens(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("-") else word
