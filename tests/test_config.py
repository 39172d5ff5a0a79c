"""Each error names its source and dotted key; later sources win."""

import subprocess
import sys
from pathlib import Path

import pytest

from rte.config import Config, ConfigError, Duration, dump, load, options, type_name


def config(tmp_path: Path, text: str, **sources: dict[str, str]) -> Config:
    file = tmp_path / "rte.yaml"
    file.write_text(text)
    return load(file=file, environ=sources.get("environ", {}), flags=sources.get("flags"))


def test_nothing_said_is_the_default() -> None:
    assert load(environ={}) == Config()


@pytest.mark.parametrize(
    ("text", "environ", "flags", "expected"),
    [
        pytest.param("{}", {}, {}, "gpu", id="default"),
        pytest.param("nrt: {detail: node}", {}, {}, "node", id="file"),
        pytest.param("nrt: {detail: node}", {}, {"nrt.detail": "full"}, "full", id="flag wins"),
    ],
)
def test_later_sources_win(
    tmp_path: Path, text: str, environ: dict[str, str], flags: dict[str, str], expected: str
) -> None:
    assert config(tmp_path, text, environ=environ, flags=flags).nrt.detail == expected


def test_the_environment_wins_over_the_file_and_the_flag_over_both(tmp_path: Path) -> None:
    text, environ = "devices: {migStrategy: mixed}", {"MIG_STRATEGY": "single"}
    assert config(tmp_path, text, environ=environ).devices.mig_strategy == "single"
    flags = {"devices.migStrategy": "none"}
    assert config(tmp_path, text, environ=environ, flags=flags).devices.mig_strategy == "none"


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        pytest.param("nrt: {ecko: 3}", "nrt.ecko", "did you mean nrt.echo?", id="misspelt"),
        pytest.param("nrt: {echo: soon}", "nrt.echo", "1h30m, got 'soon'", id="no duration"),
        pytest.param("nrt: {echo: -1}", "nrt.echo", "at least 0", id="negative duration"),
        pytest.param("nrt: {echo: .inf}", "nrt.echo", "finite", id="endless duration"),
        pytest.param("", "", "is empty; expected options, or {}", id="empty"),
        pytest.param(" \n", "", "is empty", id="blank"),
        pytest.param(
            "nrt: {echo: 1}\nnrt: {detail: gpu}",
            "nrt",
            "twice, again in line 2",
            id="a section twice",
        ),
        pytest.param(
            "health:\n  events: true\n  events: false", "health.events", "line 3", id="a key twice"
        ),
        pytest.param(
            "nrt: {podExclude: [{namePattern: a, namePattern: b}]}",
            "nrt.podExclude[0].namePattern",
            "twice",
            id="twice in a list",
        ),
        pytest.param("a: &a [*a]", "a", "no such option", id="endless"),
        pytest.param(
            "nrt: {podExclude: [{name: a}]}", "nrt.podExclude[0].name", "no such", id="misspelt pod"
        ),
        pytest.param(
            "nrt: {resourceExclude: {n: gpu}}",
            "nrt.resourceExclude[...]",
            "array",
            id="text for a list",
        ),
        *(
            pytest.param(text, key, "must be at least", id=f"{key} too short")
            for text, key in [
                ("kubelet: {poll: 10ms}", "kubelet.poll"),
                ("host: {interval: 1ms}", "host.interval"),
                ("nrt: {reread: 0.5}", "nrt.reread"),
                ("api: {timeout: 0}", "api.timeout"),
                ("nvml: {timeout: 0}", "nvml.timeout"),
            ]
        ),
        pytest.param(
            "numa: {overrides: {'0000:3b:00.0': -1}}",
            "numa.overrides",
            "no NUMA node",
            id="node -1",
        ),
        pytest.param("numa: {sameSocket: [[0, -2]]}", "numa.sameSocket", "-2", id="node -2"),
        pytest.param("http: {port: 70000}", "http.port", "65535", id="no port"),
        pytest.param(
            "http: {tls: {certFile: /a}}",
            "http.tls.keyFile",
            "certFile",
            id="no key of a certificate",
        ),
        pytest.param(
            "http: {tls: {keyFile: /a}}",
            "http.tls.certFile",
            "keyFile",
            id="no certificate of a key",
        ),
        pytest.param(
            "http: {tls: {clientCAFile: /a}}",
            "http.tls.clientCAFile",
            "without TLS",
            id="clients' authority without TLS",
        ),
        pytest.param("http: {port: '80'}", "http.port", "an integer", id="text for a number"),
        pytest.param("nrt: {detail: all}", "nrt.detail", "one of node, gpu, full", id="no choice"),
        pytest.param("nrt: 3", "nrt", "Expected `object`", id="number for a section"),
        pytest.param("[1]", "", "must hold a mapping", id="list for the whole"),
        pytest.param("a: b: c", "", "is not YAML", id="not YAML"),
        pytest.param("a: 2026-02-31", "", "is not YAML", id="a day that does not exist"),
        pytest.param("a: \x07", "", "is not YAML", id="a character that YAML does not have"),
        pytest.param(
            "numa: {overrides: {'3b:00.0': 1}}", "numa.overrides", "'3b:00.0'", id="no domain"
        ),
        pytest.param(
            "groups: {names: {ring-0: [x]}}", "groups.names.ring-0", "'x'", id="group of nothing"
        ),
        pytest.param(
            "groups: {names: {a: ['0000:18:00.0'], b: ['0000:18:00.0']}}",
            "groups.names.b",
            "0000:18:00.0 is in a too",
            id="a GPU in two groups",
        ),
        *(
            pytest.param(f"devices: {{resource: {name}}}", "devices.resource", "DOMAIN/NAME", id=id)
            for name, id in [
                ("gpu", "no domain"),
                ("example.com/g p u", "no resource name"),
                ("example.com/", "half a resource name"),
                ("kubernetes.io/gpu", "Kubernetes' own domain"),
            ]
        ),
        pytest.param(
            "devices: {ncclTopologyDir: run/nccl}",
            "devices.ncclTopologyDir",
            "begin with /",
            id="relative folder",
        ),
        pytest.param(
            "devices: {withhold: [{}]}", "devices.withhold[0]", "either id or pci", id="who?"
        ),
        pytest.param(
            "devices: {deviceListStrategy: []}",
            "devices.deviceListStrategy",
            "at least one",
            id="no strategy",
        ),
    ],
)
def test_an_error_names_file_key_and_what_was_expected(
    tmp_path: Path, text: str, key: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, text)
    assert caught.value.key == key
    assert problem in str(caught.value)
    assert "rte.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "flags", "words"),
    [
        pytest.param(
            {"DEVICE_LIST_STRATEGY": "envvar,cdi"},
            {},
            ["environment variable DEVICE_LIST_STRATEGY", "'cdi'", "cdi-annotations"],
            id="variable",
        ),
        pytest.param(
            {}, {"http.port": "http"}, ["flag --metrics-port", "http.port", "integer"], id="flag"
        ),
    ],
)
def test_an_error_names_the_variable_or_flag(
    environ: dict[str, str], flags: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ, flags=flags)
    for word in words:
        assert word in str(caught.value)


def test_an_empty_second_file_is_a_node_without_a_choice(tmp_path: Path) -> None:
    """NVIDIA's config-manager makes one."""
    second = tmp_path / "second.yaml"
    second.touch()
    (tmp_path / "first.yaml").write_text("nrt: {detail: node}")
    assert load(file=tmp_path / "first.yaml", over=second, environ={}).nrt.detail == "node"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load(file=tmp_path / "absent.yaml", environ={})


def test_a_config_map_that_changes_while_it_is_read_is_not_missing(tmp_path: Path) -> None:
    """Audit hooks cannot be taken back, so that this is a process of its own."""
    (tmp_path / "rte.yaml").symlink_to("..data/rte.yaml")
    (tmp_path / "..1").mkdir()
    (tmp_path / "..1/rte.yaml").write_text("nodeName: fresh")
    (tmp_path / "..data").symlink_to("..0")  # which the kubelet has just removed
    script = """
import sys
from pathlib import Path
from rte.config import load
file = Path(sys.argv[1])
opened = []
def kubelet(event, arguments):
    if event == "open" and arguments[0] == str(file):
        opened.append(event)
        if len(opened) == 2:
            fresh = file.parent / "..data_tmp"
            fresh.symlink_to("..1")
            fresh.replace(file.parent / "..data")
sys.addaudithook(kubelet)
print(load(file=file, environ={}).node_name, len(opened))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "rte.yaml")],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "fresh 2\n", done.stderr


def test_peers_variables_are_understood() -> None:
    environ = {
        "DEVICE_LIST_STRATEGY": "envvar, cdi-cri",
        "PASS_DEVICE_SPECS": "true",
        "NODE_NAME": "n1",
        "TOPOLOGY_MANAGER_POLICY": "restricted",
    }
    got = load(environ=environ)
    assert got.devices.device_list_strategy == ("envvar", "cdi-cri")
    assert got.devices.pass_device_specs is True
    assert got.node_name == "n1"
    assert got.kubelet.topology_manager_policy == "restricted"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("90s", 90), ("1h30m", 5400), (7, 7), ("7", 7), (0, 0), ("1.5s", 1.5)],
)
def test_durations(text: object, seconds: float) -> None:
    assert Duration.parse(text) == seconds


def test_a_dump_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    first = config(tmp_path, "nrt: {echo: 250ms, exclude: [a/b]}\ndevices: {migStrategy: mixed}")
    assert config(tmp_path, dump(first)) == first


def test_every_option_is_described_once() -> None:
    keys = [option.key for option in options()]
    assert len(keys) == len(set(keys))
    flags = [option.flag for option in options() if option.flag]
    assert len(flags) == len(set(flags))
    variables = [option.env for option in options() if option.env]
    assert len(variables) == len(set(variables))
    for option in options():
        assert option.description.endswith("."), option.key
        assert type_name(option) != "object", option.key
