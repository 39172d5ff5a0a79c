"""Manifests and files of resource-topology-exporter and of NFD's topology updater, as they are."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from rte.__main__ import main
from rte.commands.carried import EXPORTER, KLOG, MEANT, UPDATER
from rte.commands.parts import excluded_pods, excluded_resources, pace
from rte.config import Config, ConfigError, load, options
from rte.exporter import PASSED_OVER, SPECIAL, TAKEN
from rte.model import PodName, PodUse, Usage

ROOT = Path(__file__).parents[1]

# Every flag of resource-topology-exporter but klog's, with a value as in its manifests.
EXPORTERS: Mapping[str, str | None] = {
    "config": None,
    "debug": "true",
    "kubeconfig": "/k",
    "no-publish": None,
    "oneshot": None,
    "hostname": "node-b",
    "patch-mode": "true",
    "patch-resync": "60",
    "watch-namespace": "",
    "sysfs": "/host-sys",
    "pods-fingerprint": None,
    "expose-timing": None,
    "refresh-node-resources": None,
    "pods-fingerprint-status-file": "/run/pfpstatus/dump.json",
    "exclude-terminal-pods": "true",
    "pods-fingerprint-method": "with-exclusive-resources",
    "topology-manager-policy": "single-numa-node",
    "topology-manager-scope": "container",
    "sleep-interval": "10s",
    "kubelet-config-file": "/host-var/lib/kubelet/config.yaml",
    "podresources-socket": "unix:///host-var/lib/kubelet/pod-resources/kubelet.sock",
    "podreadiness": "true",
    "add-nrt-owner": "true",
    "metrics-mode": "http",
    "metrics-port": "2112",
    "metrics-ip": "0.0.0.0",
    "metrics-certs-dir": "/etc/secrets/rte",
    "metrics-cert-file": "tls.crt",
    "metrics-key-file": "tls.key",
    "metrics-want-cli-auth": "false",
    "metrics-tls-min-version": "VersionTLS13",
    "metrics-tls-cipher-suites": "",
    "reference-container": "rte/rte/shared-pool",
    "notify-file": "/host-run/rte/notify",
    "max-events-per-second": "5",
    "version": None,
    "dump-config": ".andexit",
}
# And of nfd-topology-updater.
UPDATERS: Mapping[str, str | None] = {
    "oneshot": None,
    "no-publish": None,
    "kubeconfig": "/k",
    "port": "8080",
    "sleep-interval": "60s",
    "watch-namespace": "*",
    "kubelet-config-uri": "file:///host-var/kubelet-config",
    "api-auth-token-file": "/var/run/secrets/token",
    "podresources-socket": "/host-var/lib/kubelet/pod-resources/kubelet.sock",
    "config": None,
    "pods-fingerprint": "true",
    "kubelet-state-dir": "/host-var/lib/kubelet",
    "version": None,
}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Dotted keys and values of what `rte publish` would work by."""
    assert main(["publish", *arguments, "--dump-config=.andexit"]) == 0
    found: dict[str, str] = {}
    path: list[str] = []
    for line in capsys.readouterr().out.splitlines():
        key, _, value = line.strip().partition(":")
        path = [*path[: (len(line) - len(line.lstrip())) // 2], key]
        found[".".join(path)] = value.strip()
    return found


def words(flags: Mapping[str, str | None], dashes: str) -> list[str]:
    apart = {"config", "version", "dump-config"}
    return [
        f"{dashes}{flag}" if value is None else f"{dashes}{flag}={value}"
        for flag, value in flags.items()
        if flag not in apart
    ]


@pytest.mark.parametrize("dashes", ["--", "-"])
def test_every_flag_of_the_exporter_is_taken(
    capsys: pytest.CaptureFixture[str], dashes: str
) -> None:
    found = said(capsys, *words(EXPORTERS, dashes))
    assert found["nodeName"] == "node-b"
    assert found["logLevel"] == "debug"
    assert found["host.sysfs"] == "/host-sys"
    assert found["kubelet.configFile"] == "/host-var/lib/kubelet/config.yaml"
    assert found["kubelet.poll"] == "10.0"
    assert found["kubelet.topologyManagerPolicy"] == "single-numa-node"
    assert (found["nrt.publish"], found["nrt.owner"]) == ("false", "true")
    assert found["http.port"] == "2112"


@pytest.mark.parametrize("dashes", ["--", "-"])
def test_every_flag_of_the_updater_is_taken(
    capsys: pytest.CaptureFixture[str], dashes: str
) -> None:
    found = said(capsys, *words(UPDATERS, dashes))
    assert found["kubelet.configFile"] == "/host-var/kubelet-config"
    assert found["kubelet.rootDir"] == "/host-var/lib/kubelet"
    assert found["http.port"] == "8080"
    assert found["kubelet.poll"] == "60.0"


@pytest.mark.parametrize("word", ["--version", "-version"])
def test_the_version_is_said(capsys: pytest.CaptureFixture[str], word: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["publish", word])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("rte ")


@pytest.mark.parametrize("where", ["-", ".log"])
def test_where_the_configuration_goes_besides_running(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, where: str
) -> None:
    """It then starts, which is refused here for want of a cluster."""
    arguments = ["--kubeconfig", str(tmp_path / "none"), "--port=0"]
    assert main(["publish", f"--dump-config={where}", *arguments]) == 1
    said = capsys.readouterr()
    assert "nodeName:" in (said.out if where == "-" else said.err)
    file = tmp_path / "dumped"
    assert main(["publish", f"--dump-config={file}", *arguments]) == 1
    assert "nodeName:" in file.read_text()
    assert main(["publish", f"--dump-config={tmp_path}/no/file", *arguments]) == 2


def test_flags_of_their_logs_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = said(capsys)
    assert said(capsys, "-v=4", "--v", "4", "--log_dir=/x", "-logtostderr") == before


REFUSED = {
    "--pods-fingerprint=false": "fingerprint",
    "--watch-namespace=rte": "all namespaces",
    "--metrics-mode=https": "disabled, http or httptls",
    "--kubelet-config-uri=http://localhost:10255/configz": "file:///PATH",
    "--no-such-flag": "unrecognized",
}


@pytest.mark.parametrize(("flag", "why"), REFUSED.items())
def test_what_cannot_be_done_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], flag: str, why: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["publish", flag])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_metrics_that_are_disabled_are_so_whatever_the_port(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said(capsys, "--metrics-mode=disabled", "--metrics-port=2112")["http.port"] == "0"


TLS = ("http.tls.certFile", "http.tls.keyFile", "http.tls.minVersion")


def test_metrics_by_tls_take_the_exporters_files(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "--metrics-mode=httptls")
    assert [found[key] for key in TLS] == [
        "/etc/secrets/rte/tls.crt",
        "/etc/secrets/rte/tls.key",
        "VersionTLS12",
    ]
    flags = {**EXPORTERS, "metrics-mode": "httptls", "metrics-certs-dir": "/x"}
    flags["metrics-cert-file"] = "a.pem"
    found = said(capsys, *words(flags, "--"))
    assert [found[key] for key in TLS] == ["/x/a.pem", "/x/tls.key", "VersionTLS13"]
    assert found["http.port"] == "2112"
    found = said(capsys, *words(EXPORTERS, "--"))
    assert [found[key] for key in TLS] == ["null", "null", "VersionTLS12"], "not without the mode"


NO_TLS = {
    "--metrics-want-cli-auth": "clientCAFile",
    "--metrics-tls-min-version=VersionTLS10": "VersionTLS12 or VersionTLS13",
    "--metrics-tls-cipher-suites=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "VersionTLS13",
}


@pytest.mark.parametrize(("flag", "why"), NO_TLS.items())
def test_tls_that_would_be_less_than_was_asked_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str, why: str
) -> None:
    assert main(["publish", "--metrics-mode=httptls", flag, "--dump-config"]) == 2
    error = capsys.readouterr().err
    assert flag.partition("=")[0] in error
    assert why in error
    assert main(["publish", "--metrics-mode=http", flag, "--dump-config"]) == 0


def test_the_documents_name_every_flag() -> None:
    exporter = (ROOT / "docs/publisher.md").read_text()
    updater = (ROOT / "docs/migrate.md").read_text()
    assert not [flag for flag in EXPORTERS if f"`--{flag}`" not in exporter]
    assert not [flag for flag in UPDATERS if f"`-{flag}`" not in updater]
    known = {*EXPORTERS, *UPDATERS, *(flag.lstrip("-") for flag in KLOG)}
    carried = {flag.lstrip("-") for flag in (*EXPORTER, *UPDATER, *KLOG, *MEANT)}
    assert carried <= known, "no flag that they do not have"


# Files

EXTRA = """
kubelet:
  topologyManagerPolicy: single-numa-node
  topologyManagerScope: container
resourceExclude:
  masternode: [memory, device/exampleA]
  workernode1: [memory, device/exampleB]
  "*": [device/exampleC]
podExclude:
- namespacePattern: ns-*
  namePattern: "*"
- namespacePattern: default
  namePattern: db-[^0]
"""

DAEMON = """
global: {debug: true, verbose: 6, kubeconfig: /k}
nrtUpdater: {noPublish: false, oneShot: false, hostname: node-b, patchMode: true, patchResync: 60}
resourceMonitor:
  namespace: ""
  sysfsRoot: /host-sys
  refreshNodeResources: true
  podSetFingerprint: true
  podSetFingerprintMethod: all
  exposeTiming: true
  podSetFingerprintStatusFile: /run/x
  excludeTerminalPods: true
topologyExporter:
  podResourcesSocketPath: unix:///podresources/kubelet.sock
  kubeletConfigFile: /podresources/config.yaml
  sleepInterval: 60000000000
  podReadinessEnable: true
  notifyFilePath: /run/rte/notify
  maxEventPerTimeUnit: 1
  timeUnitToLimitEvents: 1000000000
  addNRTOwnerEnable: false
  metricsMode: disabled
  metricsPort: 2112
  MetricsAddress: 127.0.0.1
  metricsTLS: {certsDir: /etc/secrets/rte}
  referenceContainer: a/b/c
"""


def read(folder: Path, text: str) -> Config:
    file = folder / "config.yaml"
    file.write_text(text)
    return load(file=file, environ={})


def test_the_exporters_exclusions_are_ours(tmp_path: Path) -> None:
    found = read(tmp_path, EXTRA)
    assert found.kubelet.topology_manager_policy == "single-numa-node"
    assert excluded_resources(found, "masternode") == (
        "device/exampleC",
        "memory",
        "device/exampleA",
    )
    assert excluded_resources(found, "elsewhere") == ("device/exampleC",)
    pods = {("ns-1", "x"), ("ns", "x"), ("default", "db-1"), ("default", "db-0"), ("a", "db-1")}
    usage = Usage(
        pods=tuple(
            PodUse(pod=PodName(namespace=namespace, name=name), containers=())
            for namespace, name in sorted(pods)
        )
    )
    left_out = {(pod.namespace, pod.name) for pod in excluded_pods(found, usage)}
    assert left_out == {("ns-1", "x"), ("default", "db-1")}


def test_the_exporters_daemon_file_is_followed(tmp_path: Path) -> None:
    found = read(tmp_path, DAEMON)
    assert (found.node_name, found.log_level) == ("node-b", "debug")
    assert (found.host.sysfs, found.api.kubeconfig) == ("/host-sys", "/k")
    assert found.nrt.fingerprint.method == "all"
    assert float(found.kubelet.poll) == 60.0
    assert str(found.pod_resources_socket) == "/podresources/kubelet.sock"
    assert found.kubelet.config_file == "/podresources/config.yaml"
    assert (found.nrt.publish, found.nrt.owner) == (True, False)
    assert (found.http.port, found.http.address) == (0, "127.0.0.1")
    assert found.http.tls == Config().http.tls


def test_the_exporters_daemon_file_is_followed_in_tls(tmp_path: Path) -> None:
    found = read(tmp_path, DAEMON.replace("disabled", "HTTPTLS"))
    assert (found.http.port, found.http.address) == (2112, "127.0.0.1")
    assert found.http.tls.cert_file == "/etc/secrets/rte/tls.crt"
    assert found.http.tls.key_file == "/etc/secrets/rte/tls.key"


def test_the_updaters_file_is_followed(tmp_path: Path) -> None:
    found = read(tmp_path, "excludeList:\n  node1: [cpu]\n  '*': [hugepages-2Mi]\n")
    assert excluded_resources(found, "node1") == ("hugepages-2Mi", "cpu")
    assert excluded_resources(found, "node2") == ("hugepages-2Mi",)


def test_their_keys_stand_beside_ours(tmp_path: Path) -> None:
    found = read(tmp_path, "nrt: {detail: node}\nresourceExclude: {'*': [cpu]}\n")
    assert found.nrt.detail == "node"
    assert excluded_resources(found, "n") == ("cpu",)


BAD: dict[str, tuple[str, str]] = {
    "resourceMonitor.podSetFingerprint": (
        "resourceMonitor: {podSetFingerprint: false}",
        "misleads the scheduler",
    ),
    "resourceMonitor.namespace": ("resourceMonitor: {namespace: a}", "misleads the scheduler"),
    "nrtUpdater.oneShot": ("nrtUpdater: {oneShot: true}", "--oneshot"),
    "topologyExporter.metricsMode": ("topologyExporter: {metricsMode: tls}", "httptls"),
    "topologyExporter.metricsTLS": ("topologyExporter: {metricsTLS: x}", "a mapping"),
    "topologyExporter.metricsTLS.wantCliAuth": (
        "topologyExporter: {metricsMode: httptls, metricsTLS: {wantCliAuth: true}}",
        "clientCAFile",
    ),
    "topologyExporter.metricsTLS.new": (
        "topologyExporter: {metricsMode: httptls, metricsTLS: {new: 1}}",
        "nothing like it",
    ),
    "topologyExporter.sleepInterval": ("topologyExporter: {sleepInterval: 10s}", "nanoseconds"),
    "topologyExporter.new": ("topologyExporter: {new: 1}", "nothing like it"),
    "global": ("global: 3", "a mapping"),
    "nrt.resourceExclude": ("resourceExclude: [cpu]", "mapping"),
}


@pytest.mark.parametrize(("key", "case"), BAD.items())
def test_what_cannot_be_followed_is_named(tmp_path: Path, key: str, case: tuple[str, str]) -> None:
    text, why = case
    with pytest.raises(ConfigError, match=re.escape(why)) as refused:
        read(tmp_path, text)
    assert refused.value.key == key


SECTIONS = ("global", "nrtUpdater", "resourceMonitor", "topologyExporter")


@pytest.mark.parametrize("names", [SECTIONS, SECTIONS[::-1]], ids=["forth", "back"])
def test_the_first_key_of_the_file_that_cannot_be_followed_is_named(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, "".join(f"{name}: {{new: 1}}\n" for name in names))
    assert refused.value.key == f"{names[0]}.new"


@pytest.mark.parametrize(
    "names", [("excludeList", "resourceExclude"), ("resourceExclude", "excludeList")]
)
def test_of_two_words_for_one_option_the_later_counts(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    found = read(tmp_path, "".join(f"{name}: {{'*': [of-{name}]}}\n" for name in names))
    assert found.nrt.resource_exclude == {"*": (f"of-{names[1]}",)}


def test_every_key_that_is_taken_is_an_option_of_ours() -> None:
    keys = {option.key for option in options()}
    assert set(TAKEN.values()) <= keys
    assert not PASSED_OVER & {*TAKEN, *SPECIAL}


# Values that mean something else than a time


def test_no_interval_is_seldom() -> None:
    """There it turns the polling off."""
    assert pace(load(environ={}, flags={"kubelet.poll": "0"})).poll_s == 600
    flags = {"kubelet.poll": "0", "nrt.reread": "1h"}
    assert pace(load(environ={}, flags=flags)).poll_s == 3600
