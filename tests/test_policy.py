"""The kubelet's configuration: files, drop-ins, /configz, the command line."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rte.kubelet.configuration import Configuration, Unanswered
from rte.kubelet.policy import (
    InForce,
    KubeletCommand,
    PolicyError,
    drop_in_files,
    from_flags,
    parse_flags,
    parse_policy,
    read_kubelet_commands,
    read_policy,
    stated,
)
from rte.model import NumaId, Policy, Scope, TopologyManagerPolicy

HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "config.yaml",
        """
topologyManagerPolicy: single-numa-node
topologyManagerScope: pod
topologyManagerPolicyOptions: {max-allowable-numa-nodes: "16"}
cpuManagerPolicy: static
cpuManagerPolicyOptions: {full-pcpus-only: "true"}
memoryManagerPolicy: Static
reservedSystemCPUs: 0-1,56
reservedMemory:
- numaNode: 1
  limits: {memory: 1Gi}
- numaNode: 0
  limits: {memory: 1Gi, hugepages-2Mi: 64Mi}
- numaNode: 0
  limits: {hugepages-1Gi: 1073741824}
imageGCHighThresholdPercent: 85
""",
    )
    assert read_policy(file) == Policy(
        topology_manager=TopologyManagerPolicy.SINGLE_NUMA_NODE,
        scope=Scope.POD,
        max_numa_nodes=16,
        cpu_manager="static",
        cpu_manager_options={"full-pcpus-only": "true"},
        memory_manager="Static",
        reserved_cpus=(0, 1, 56),  # type: ignore[arg-type]
        reserved_memory={
            NumaId(0): {"hugepages-1Gi": 2**30, "hugepages-2Mi": 2**26, "memory": 2**30},
            NumaId(1): {"memory": 2**30},
        },
    )


def test_absent_keys_have_the_kubelets_own_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "config.yaml", "topologyManagerPolicy: ''\n")
    assert read_policy(file) == Policy()


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("topologyManagerPolicy: strict", "topologyManagerPolicy", "'strict'"),
        ("topologyManagerPolicy: [none]", "topologyManagerPolicy", r"\['none'\]"),
        ("topologyManagerPolicy: Single-NUMA-Node", "topologyManagerPolicy", "one of none"),
        ("topologyManagerScope: node", "topologyManagerScope", "container, pod"),
        ("cpuManagerPolicy: dynamic", "cpuManagerPolicy", "none, static"),
        ("memoryManagerPolicy: static", "memoryManagerPolicy", "None, Static"),
        ("memoryManagerPolicy: BestEffort", "memoryManagerPolicy", "BestEffort"),
        ("reservedSystemCPUs: 3", "reservedSystemCPUs", "a string"),
        ("reservedSystemCPUs: 3-1", "reservedSystemCPUs", "no range"),
        ("reservedSystemCPUs: 0-99999999", "reservedSystemCPUs", "not a list such as"),
        (
            "topologyManagerPolicyOptions: {max-allowable-numa-nodes: 16}",
            "topologyManagerPolicyOptions.max-allowable-numa-nodes",
            "a string",
        ),
        (
            "topologyManagerPolicyOptions: {max-allowable-numa-nodes: many}",
            "topologyManagerPolicyOptions.max-allowable-numa-nodes",
            "from 8",
        ),
        ("cpuManagerPolicyOptions: [full-pcpus-only]", "cpuManagerPolicyOptions", "a map"),
        ("reservedMemory: {memory: 1Gi}", "reservedMemory", "a list"),
        ("reservedMemory: [3]", "reservedMemory[0]", "a map"),
        ("reservedMemory: [{numaNode: -1}]", "reservedMemory[0].numaNode", "-1"),
        (
            "reservedMemory: [{limits: {memory: 1 GB}}]",
            "reservedMemory[0].limits.memory",
            "not a quantity",
        ),
    ],
)
def test_a_wrong_value_names_file_and_key(
    tmp_path: Path, text: str, key: str, problem: str
) -> None:
    file = write(tmp_path / "config.yaml", text)
    with pytest.raises(PolicyError, match=problem) as caught:
        read_policy(file)
    assert str(file) in str(caught.value)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "expected a KubeletConfiguration"),
        (b"- 1", "expected a KubeletConfiguration"),
        (b"a: [", "is no YAML"),
        (b"a: \x00", "is no YAML"),
        (b"[" * 2_000, "is no YAML"),
        (b"topologyManagerPolicy: none", "apiVersion"),
        (b"apiVersion: v1\nkind: Pod\n", "read 'v1', 'Pod'"),
        (b"#" * (1 << 20) + b"\n", "more than"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: bytes, problem: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text)
    with pytest.raises(PolicyError, match=problem):
        read_policy(file)


def test_a_missing_file_is_an_error_not_a_default(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="No such file"):
        read_policy(tmp_path / "absent.yaml")
    with pytest.raises(PolicyError, match="No such file"):
        read_policy(None, drop_ins=tmp_path / "absent.d")


def test_drop_ins_are_merged_in_the_order_of_their_names(tmp_path: Path) -> None:
    file = write(
        tmp_path / "config.yaml",
        "cpuManagerPolicy: static\nreservedSystemCPUs: '0'\n"
        "cpuManagerPolicyOptions: {full-pcpus-only: 'true', align-by-socket: 'true'}\n",
    )
    directory = tmp_path / "config.d"
    write(directory / "20-b.conf", "topologyManagerPolicy: restricted\nreservedSystemCPUs: null\n")
    write(directory / "10-a.conf", "topologyManagerPolicy: best-effort\n")
    write(directory / "20-b.d" / "x.conf", "topologyManagerScope: pod\n")
    write(directory / "30-c.conf", "cpuManagerPolicyOptions: {align-by-socket: null}\n")
    (directory / "README.md").write_text("not a drop-in")
    (directory / "40-d.yaml").write_text("topologyManagerPolicy: none")
    names = [str(path.relative_to(directory)) for path in drop_in_files(directory)]
    assert names == ["10-a.conf", "20-b.conf", "20-b.d/x.conf", "30-c.conf"]
    assert read_policy(file, drop_ins=directory) == Policy(
        topology_manager=TopologyManagerPolicy.RESTRICTED,
        scope=Scope.POD,
        cpu_manager="static",
        cpu_manager_options={"full-pcpus-only": "true"},
    )


def test_a_drop_in_of_another_kind_names_itself(tmp_path: Path) -> None:
    (tmp_path / "10.conf").write_text("topologyManagerPolicy: none\n")
    with pytest.raises(PolicyError, match=r"10\.conf.*apiVersion"):
        read_policy(None, drop_ins=tmp_path)


def test_configz_is_understood_with_and_without_its_envelope() -> None:
    configuration = {"topologyManagerPolicy": "restricted", "reservedMemory": None}
    for answer in (configuration, {"kubeletconfig": configuration}):
        assert parse_policy(answer).topology_manager is TopologyManagerPolicy.RESTRICTED
    with pytest.raises(PolicyError, match="/configz: topologyManagerPolicy"):
        parse_policy({"kubeletconfig": {"topologyManagerPolicy": "x"}})


def test_an_operators_word_takes_the_place_of_what_was_read() -> None:
    assert stated(None) is None
    assert stated(None, scope="pod") is None
    alone = stated(None, topology_manager="restricted")
    assert alone == Policy(topology_manager=TopologyManagerPolicy.RESTRICTED)
    read = Policy(cpu_manager="static", scope=Scope.POD)
    both = stated(read, topology_manager="single-numa-node", scope="container")
    assert both == Policy(
        topology_manager=TopologyManagerPolicy.SINGLE_NUMA_NODE, cpu_manager="static"
    )


def test_a_changed_file_counts_only_after_a_restart_of_the_kubelet() -> None:
    old, new = Policy(), Policy(cpu_manager="static")
    state = InForce().after(None, kubelet=1)
    assert state.policy is None
    state = state.after(old, kubelet=1)
    assert (state.policy, state.pending) == (old, None)
    state = state.after(new, kubelet=1)
    assert (state.policy, state.pending) == (old, new)
    assert state.after(old, kubelet=1).pending is None, "changed back before any restart"
    state = state.after(None, kubelet=2)
    assert state.policy == old, "unreadable: the last known one stays"
    state = state.after(new, kubelet=2)
    assert (state.policy, state.pending) == (new, None)


def test_flags_of_the_command_line_win_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "config.yaml", "topologyManagerPolicy: none\ncpuManagerPolicy: none\n")
    flags = parse_flags(
        [
            "--topology-manager-policy=restricted",
            *("--cpu_manager_policy", "static", "--v=2", "--fail-swap-on"),
            "--cpu-manager-policy-options=full-pcpus-only=true",
            "--reserved-cpus=0-1",
            "--reserved-memory=0:memory=1Gi,hugepages-1Gi=1Gi;1:memory=2Gi",
        ]
    )
    flags = {name: value for name, value in flags.items() if name not in {"v", "fail-swap-on"}}
    policy = read_policy(file, flags=flags)
    assert policy.topology_manager is TopologyManagerPolicy.RESTRICTED
    assert (policy.cpu_manager, policy.reserved_cpus) == ("static", (0, 1))
    assert policy.cpu_manager_options == {"full-pcpus-only": "true"}
    assert policy.reserved_memory == {
        0: {"hugepages-1Gi": 2**30, "memory": 2**30},
        1: {"memory": 2**31},
    }
    for flag in ("cpu-manager-policy-options", "reserved-memory"):
        with pytest.raises(PolicyError, match=flag):
            from_flags({flag: "nonsense"})


def test_the_kubelets_files_are_found_in_its_command_line(tmp_path: Path) -> None:
    kubelet = tmp_path / "kubelet"
    kubelet.symlink_to(sys.executable)
    # A process that is called kubelet and has its arguments; Python runs the text after -c.
    command = [str(kubelet), "-c", "input()", "--config=/etc/k.yaml", "--config-dir", "/etc/k.d"]
    command += ["--root-dir=/data/kubelet", "--topology_manager_policy=restricted"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ}) as process:
        try:
            visible = read_kubelet_commands()
        finally:
            process.communicate(b"\n")
    (found,) = [one for one in visible if one.pid == process.pid]
    assert (found.config, found.config_dir) == (Path("/etc/k.yaml"), Path("/etc/k.d"))
    assert found.root_dir == Path("/data/kubelet")
    assert found.flags == {"topology-manager-policy": "restricted"}


# Where it is read


def configuration(folder: Path, **options: Any) -> Configuration:
    return Configuration(
        **{"file": None, "drop_ins": None, "default": folder / "config.yaml", **options}
    )


def restricted() -> dict[str, Any]:
    return {"kubeletconfig": {"topologyManagerPolicy": "restricted"}}


def unanswered() -> dict[str, Any]:
    raise Unanswered("/configz", "Forbidden")


def test_a_kubelet_that_has_answered_is_asked_again_though_the_usual_file_is_there(
    tmp_path: Path,
) -> None:
    """Its flags may say otherwise than the file, and at its start it takes a moment to answer."""
    write(tmp_path / "config.yaml", "topologyManagerPolicy: best-effort\n")
    answers = iter([restricted, unanswered, restricted])

    def asked() -> dict[str, Any]:
        return next(answers)()

    found = configuration(tmp_path, configz=asked)
    assert policy_word(found) == "restricted"
    with pytest.raises(Unanswered):
        found.read()
    assert policy_word(found) == "restricted"


def test_a_named_file_comes_before_the_kubelets_answer_and_that_before_the_usual_file(
    tmp_path: Path,
) -> None:
    named = write(tmp_path / "named.yaml", "topologyManagerPolicy: single-numa-node\n")
    usual = write(tmp_path / "config.yaml", "topologyManagerPolicy: best-effort\n")
    found = configuration(tmp_path, file=named, configz=restricted)
    assert policy_word(found) == "single-numa-node"
    assert found.changed == named.stat().st_mtime_ns / 1e9
    found = configuration(tmp_path, configz=restricted)
    assert policy_word(found) == "restricted"
    assert found.changed is None
    found = configuration(tmp_path, configz=unanswered)
    assert policy_word(found) == "best-effort"
    assert found.changed == usual.stat().st_mtime_ns / 1e9
    # Of the same tick as the kubelet's socket is not younger: st_mtime is another float than that
    # of st_mtime_ns, which signatures have.
    moment = 1_796_000_000_987_656_000
    os.utime(usual, ns=(moment, moment))
    found.read()
    assert found.changed == moment / 1e9
    usual.unlink()
    with pytest.raises(PolicyError, match="/configz: Forbidden"):
        found.read()
    assert configuration(tmp_path).read() is None


def policy_word(found: Configuration) -> str:
    policy = found.read()
    assert policy is not None
    return policy.topology_manager.value


def test_the_running_kubelets_command_line_names_file_drop_ins_and_flags(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "k.yaml", "topologyManagerPolicy: restricted\n")
    write(tmp_path / "k.d" / "10.conf", "topologyManagerScope: pod\n")
    arguments = [
        f"--config={file}",
        f"--config-dir={tmp_path / 'k.d'}",
        "--cpu-manager-policy=static",
        "--root-dir=/data/kubelet",
    ]
    process = subprocess.Popen(
        ["kubelet", "-c", "import sys; sys.stdin.read()", *arguments],
        executable=sys.executable,
        stdin=subprocess.PIPE,
    )

    def mine() -> list[KubeletCommand]:
        """As where no other test, and no kubelet of this machine, is running."""
        return [k for k in read_kubelet_commands() if k.pid == process.pid]

    monkeypatch.setattr("rte.kubelet.configuration.read_kubelet_commands", mine)
    try:
        assert [k.config for k in mine()] == [file]
        found = configuration(tmp_path, command=True, configz=unanswered)
        policy, again = found.read(), found.read()
    finally:
        process.communicate()
    assert policy is not None
    assert policy == again
    (said,) = caplog.messages
    assert "--root-dir is /data/kubelet" in said
    assert (policy.topology_manager, policy.scope, policy.cpu_manager) == (
        "restricted",
        "pod",
        "static",
    )
