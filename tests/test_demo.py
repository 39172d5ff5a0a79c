"""`rte demo` as a stranger runs it: a command in an empty folder, nothing left behind."""

import contextlib
import fnmatch
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rte.__main__ import main as rte
from rte.commands.demo import EXAMPLES, MACHINE, PODS
from rte.commands.manifests import ManifestError, read_manifest
from rte.graph.build import build
from rte.graph.choose import choose
from rte.kubelet.usage import channel, read_usage
from rte.model import base_units
from rte.sources.recorded import read_recorded
from rte.view.why import why
from rte.view.zones import available, right_aligned
from tests import structural
from tests.machines.about import expectations
from tests.machines.description import FOLDER
from tests.real_kubelet import short_folder
from tests.small_kubelet import until

ROOT = Path(__file__).parent.parent
NAME = MACHINE.name
GPU = "nvidia.com/gpu"
COMMAND = [sys.executable, "-W", "error", "-m", "rte", "demo"]
WITHIN_S = 60  # it takes one second

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """What the command takes for the temporary folder; empty when the test ends."""
    folder = short_folder()
    yield folder
    left = list(folder.iterdir())
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture
def environment(temporary: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "TERM": "xterm"}


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """Runs `rte demo` with these arguments in an empty folder; nothing may be on stderr."""

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        found = subprocess.run(
            [*COMMAND, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert found.returncode == status, found
        if status == 0:
            assert found.stderr == ""
        return found

    return run


@pytest.fixture(scope="module")
def output() -> str:
    """What `rte demo` prints where there is no terminal."""
    found = subprocess.run(
        COMMAND,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
    )
    assert found.stderr == ""
    return found.stdout


def pods(output: str) -> dict[str, dict[str, str]]:
    """Pod → label → what was said, without continued lines."""
    found: dict[str, dict[str, str]] = {}
    for line in output.splitlines():
        if match := re.match(r"Pod (\S+) asks ", line):
            of = found.setdefault(match[1], {})
        elif found and (match := re.match(r"  (\w[\w ]*?)  +(\S.*)", line)):
            of.setdefault(match[1], match[2])
        elif not line.startswith(" ") and found and line:
            break
    return found


def gpus(words: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"gpu-(\d+)", words))


def by_hand(free: set[int], offered: tuple[int, ...], size: int) -> tuple[int, ...]:
    """What about.md of the machine says is chosen."""
    (row,) = (
        row
        for row in expectations(NAME)
        if (set(row.free), row.offered, row.size) == (free, offered, size)
    )
    return row.chosen


# The default run


def test_each_pod_gets_what_about_md_worked_out_by_hand(output: str) -> None:
    said = pods(output)
    assert list(said) == list(PODS)
    everything = set(range(8))

    training = gpus(said["training"]["chosen"])
    offered = gpus(said["training"]["offered"])
    assert training == by_hand(everything, offered, 2) != offered[:2]
    assert gpus(said["training"]["admitted"]) == training
    assert gpus(said["training"]["instead of"]) == offered[:2]

    server = gpus(said["inference"]["admitted"])
    assert server == by_hand(everything - set(training), server, 4)
    assert "CPUs 32-47,96-111, 64 GiB" in said["inference"]["admitted"]
    assert said["inference"]["plugin"].startswith("was not asked: there was no choice")

    assert said["etl"]["rejected"].startswith("TopologyAffinityError: ")
    assert said["etl"]["free"] == f"node-0: 2 {GPU}, 46 CPUs (too few), 375 GiB"
    assert said["etl"]["published"] == "nothing: nothing has changed"

    free = everything - set(training) - set(server)
    notebook = gpus(said["notebook"]["chosen"])
    assert notebook == by_hand(free, tuple(sorted(free)), 1)


def test_it_reads_well_without_colour_in_a_hundred_columns(output: str) -> None:
    lines = output.splitlines()
    assert "\x1b" not in "".join(lines)
    commands = [line for line in lines if line.strip().startswith(("diff ", "python -m", "rte "))]
    assert [line for line in lines if len(line) > 100 and line not in commands] == []
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_terminal_gets_the_same_words_in_colour(environment: dict[str, str], output: str) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND], env=environment, stdout=theirs, cwd="/") as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 1 << 16):
                text += part
        except OSError:  # how Linux says that the other side is closed
            pass
        assert process.wait(WITHIN_S) == 0
    os.close(ours)
    coloured = text.decode().replace("\r\n", "\n")
    assert "\x1b[1m" in coloured
    # Two numbers of milliseconds differ from run to run.
    assert timeless(re.sub(r"\x1b\[[0-9;]*m", "", coloured)) == timeless(output)


def timeless(output: str) -> str:
    return re.sub(r"[0-9.]+ ms", "… ms", output)


def test_what_is_published_is_what_the_api_server_takes(run: Run, tmp_path: Path) -> None:
    said = pods(run("--out", "objects").stdout)
    out = tmp_path / "objects"
    topologies = sorted(out.glob("noderesourcetopology-0*.json"))
    assert [file.name for file in topologies] == [
        f"noderesourcetopology-{number:02}.json" for number in range(1, 5)
    ]
    for kind, version in (("noderesourcetopology", "v1alpha2"), ("gpufabric", "v1alpha1")):
        schema = structural.schema(ROOT / "crds" / kind / "crd.yaml", version)
        for file in out.glob(f"{kind}-*.json"):
            structural.check(json.loads(file.read_text()), schema)
    kept = {"gpufabric-01.json", "gpufabric-demo.json", "noderesourcetopology-demo.json"}
    assert {file.name for file in out.iterdir()} == kept | {file.name for file in topologies}
    assert (out / "noderesourcetopology-demo.json").read_text() == topologies[-1].read_text()

    first, last = (json.loads(topologies[at].read_text()) for at in (0, -1))
    assert {zone: free[GPU] for zone, free in available(first).items()} == dict.fromkeys(
        ("node-0", "node-1"), 4
    )
    held = {name: gpus(words["admitted"]) for name, words in said.items() if "admitted" in words}
    taken = [number for numbers in held.values() for number in numbers]
    free = available(last)
    for node in (0, 1):
        here = sum(number // 4 == node for number in taken)
        assert free[f"node-{node}"][GPU] == 4 - here
        # Every pod with GPUs has its CPUs beside them: 16 + 8 and 32, and two are reserved.
        assert free[f"node-{node}"]["cpu"] == (64 - 2 - 24, 64 - 32)[node]
    assert free["node-1"]["memory"] == available(first)["node-1"]["memory"] - base_units("64Gi")


def test_another_policy_admits_what_is_not_aligned(run: Run) -> None:
    said = pods(run("--policy", "best-effort").stdout)
    assert said["etl"]["admitted"].startswith("NUMA nodes 0-1: gpu-1 gpu-3, CPUs ")
    assert said["notebook"]["rejected"].startswith("UnexpectedAdmissionError: ")


def test_own_pods_on_an_own_machine(run: Run, tmp_path: Path) -> None:
    (tmp_path / "web.yaml").write_text(
        """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: prod}
spec:
  template:
    spec:
      containers:
        - name: a
          resources: {limits: {nvidia.com/gpu: 2}, requests: {cpu: 500m}}
        - name: b
          resources: {limits: {example.com/nic: 1}}
---
apiVersion: v1
kind: Pod
metadata: {name: bare}
spec: {containers: [{name: c}]}
"""
    )
    machine = str(FOLDER / "dgx1-v100")
    output = run("web.yaml", "--machine", machine, "--scope", "pod").stdout
    said = pods(output)
    assert gpus(said["prod/web"]["chosen"]) == (2, 3)
    assert "no plugin has registered example.com/nic" in output
    assert said["bare"]["admitted"] == "nothing of its own, a share of the node"


def test_what_next_can_be_typed(environment: dict[str, str], output: str) -> None:
    (command,) = re.findall(r"^ +(python -m rte choose .*)$", output, re.MULTILINE)
    found = subprocess.run(
        [sys.executable, *command.split()[1:]],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
    )
    assert found.stdout.startswith("gpu-0 gpu-2")


# What cannot be used

CONTAINER = "spec: {containers: [{name: a, resources: {%s}}]}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kind: Service", "kind: expected one of Pod, Deployment"),
        ("a: [", "is not YAML: "),
        ("", "holds no manifest"),
        ("- a", "expected a manifest, read ['a']"),
        ("kind: Pod\nmetadata: {name: x}", "spec.containers: expected at least one container"),
        ("kind: Job\nmetadata: {name: x}\nspec: {}", "spec.template: expected a map, read None"),
        (
            "kind: Pod\nmetadata: {name: x}\n" + CONTAINER % "limits: {nvidia.com/gpu: two}",
            "spec.containers[0].resources.limits.nvidia.com/gpu: not a quantity: 'two'",
        ),
        (
            "kind: Pod\nmetadata: {name: x}\n" + CONTAINER % "requests: {nvidia.com/gpu: 2}",
            "spec.containers[0].resources.limits.nvidia.com/gpu: must be set, and equal to",
        ),
        (
            "kind: Pod\nmetadata: {name: x}\n" + CONTAINER % "limits: {nvidia.com/gpu: 500m}",
            "spec.containers[0].resources.limits.nvidia.com/gpu: expected a whole number",
        ),
        (
            "kind: Pod\nmetadata: {name: x}\n" + CONTAINER % "limits: {cpu: 1}, requests: {cpu: 2}",
            "spec.containers[0].resources.requests.cpu: is more than the limit",
        ),
        (
            "kind: Pod\nmetadata: {name: x}\nspec: {containers: [{name: a}]}\n---\nkind: List",
            "document 2: kind: expected one of",
        ),
    ],
)
def test_a_manifest_that_no_api_server_takes_names_the_field(
    text: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(text)
    with pytest.raises(ManifestError) as error:
        read_manifest(file)
    assert str(error.value).startswith(f"{file}: {problem}")


def test_what_was_given_wrongly_ends_with_2_before_anything_starts(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "pod.yaml").write_text("kind: Pod\nmetadata: {name: [x]}")
    found = run("pod.yaml", status=2)
    assert found.stdout == ""
    problem = "pod.yaml: metadata.name: expected a string, read ['x']"
    assert found.stderr == f"rte demo: {problem}\n"


def test_each_thing_given_wrongly_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    twice = str(EXAMPLES / "etl.yaml")
    for arguments, problem in (
        (["none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        ([twice, twice], f"{twice}: metadata.name: default/etl is in {twice} too"),
        (["--machine", "none"], "none: expected a folder that `rte record` wrote, there is none"),
        (["--out", "used"], "--out used: expected a new or empty folder, it holds files"),
    ):
        assert rte(["demo", *arguments]) == 2
        assert capsys.readouterr() == ("", f"rte demo: {problem}\n")


# --stay


class Staying:
    """A `rte demo --stay` that runs."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.output = folder / "output.txt"
        with self.output.open("w") as output, (folder / "errors.txt").open("w") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, "--stay"], env=environment, cwd=folder, stdout=output, stderr=errors
            )
        assert until(lambda: "add a manifest" in self.text(), WITHIN_S), self.text()

    def text(self) -> str:
        return self.output.read_text()

    def place(self, label: str) -> str:
        found = re.search(rf"^  {label} +(\S+)", self.text().partition("Serving until")[2], re.M)
        assert found is not None
        return found[1].rstrip(":")

    def get(self, path: str) -> str:
        address = self.place("http").removesuffix("/metrics")
        with urllib.request.urlopen(f"{address}{path}", timeout=WITHIN_S) as answer:
            text: str = answer.read().decode()
        return text


@pytest.fixture
def staying(environment: dict[str, str], tmp_path: Path) -> Iterator[Staying]:
    found = Staying(environment, tmp_path)
    yield found
    if found.process.poll() is None:
        found.process.kill()
        found.process.wait()


def test_it_stays_and_serves_until_ctrl_c(staying: Staying, tmp_path: Path) -> None:
    assert staying.get("/readyz") == "ready\n"
    assert f'rte_devices_used{{resource="{GPU}"}} 7.0' in staying.get("/metrics")
    assert [d["size"] for d in json.loads(staying.get("/decisions"))] == [2, 4, 1]
    assert len(json.loads(staying.get("/topology"))["gpus"]) == 8
    folder = Path(staying.place("pods"))
    assert {file.name for file in folder.iterdir()} == {f"{name}.yaml" for name in PODS}
    with channel(Path(staying.place("PodResources"))) as kubelet:
        assert len(read_usage(kubelet, WITHIN_S).device_ids()[GPU]) == 7

        (folder / "inference.yaml").unlink()
        assert until(lambda: "Pod inference has ended" in staying.text(), WITHIN_S)
        assert len(read_usage(kubelet, WITHIN_S).device_ids()[GPU]) == 3

        pod = (folder / "training.yaml").read_text().replace("name: training", "name: second")
        (folder / "new").write_text(pod)
        (folder / "new").rename(folder / "second.yaml")
        assert until(lambda: "second" in pods(staying.text()[-2000:]), WITHIN_S)
        assert until(lambda: "free" in pods(staying.text()[-2000:])["second"], WITHIN_S)
        assert gpus(pods(staying.text()[-2000:])["second"]["chosen"]) == (4, 6)
        assert len(read_usage(kubelet, WITHIN_S).device_ids()[GPU]) == 5

    (folder / "bad.yaml").write_text("kind: Service\n")
    assert until(lambda: "bad.yaml: kind: expected one of Pod" in staying.text(), WITHIN_S)
    objects = Path(staying.place("objects"))
    last: Any = json.loads((objects / "noderesourcetopology-demo.json").read_text())
    assert {zone: free[GPU] for zone, free in available(last).items()} == {"node-0": 1, "node-1": 2}

    staying.process.send_signal(signal.SIGINT)
    assert staying.process.wait(WITHIN_S) == 0
    assert staying.text().endswith("\nstopped\n")
    assert (tmp_path / "errors.txt").read_text() == ""


def test_it_ends_cleanly_when_it_is_terminated(staying: Staying, tmp_path: Path) -> None:
    staying.process.terminate()
    assert staying.process.wait(WITHIN_S) == 0
    assert (tmp_path / "errors.txt").read_text() == ""


def test_a_reader_that_goes_away_leaves_nothing_behind(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        COMMAND,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        pipesize=4096,  # it does not hold all that there is to say: the end waits for a reader
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(WITHIN_S) == 141


def test_an_interrupt_on_the_way_leaves_nothing_behind(
    environment: dict[str, str], temporary: Path
) -> None:
    def is_on_its_way() -> bool:
        with contextlib.suppress(FileNotFoundError):  # a folder that went while we looked
            return any(temporary.rglob("rte-gpu.sock"))
        return False

    with subprocess.Popen(COMMAND, env=environment, stdout=subprocess.DEVNULL) as process:
        assert until(lambda: is_on_its_way() or process.poll() is not None, WITHIN_S)
        process.terminate()
        assert process.wait(WITHIN_S) in (0, 130)  # it may have ended by itself just before


# What is shipped


def test_the_machine_in_the_package_is_the_one_that_the_tests_check() -> None:
    for name in ("about.md", "sys.txt", "nvml.json"):
        assert (FOLDER / NAME / name).resolve() == MACHINE / name
        assert (MACHINE / name).is_file()
        assert not (MACHINE / name).is_symlink()


def test_all_that_the_demo_reads_is_package_data() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["rte"]
    shipped = [file for folder in (MACHINE.parent, EXAMPLES) for file in folder.rglob("*")]
    names = [str(f.relative_to(ROOT / "rte")) for f in shipped if f.is_file()]
    assert len(names) == 3 + len(PODS)
    assert [n for n in names if not any(fnmatch.fnmatch(n, p) for p in patterns)] == []


def test_the_examples_are_pods_that_get_cpus_and_memory_of_their_own() -> None:
    for name in PODS:
        (spec,) = read_manifest(EXAMPLES / f"{name}.yaml")
        assert (spec.pod.name, spec.qos) == (name, "Guaranteed")
    (server,) = read_manifest(EXAMPLES / "inference.yaml")
    assert server.containers[0].limits == {
        GPU: 4000,
        "cpu": 32_000,
        "memory": 1000 * base_units("64Gi"),
    }


# Words


@pytest.mark.parametrize(
    ("machine", "offered", "free", "size", "sentence"),
    [
        (
            "pcie-a100-pairs",
            "0-3",
            "0-7",
            2,
            "NVLink at 300 GB/s; gpu-1 gpu-3 would do as well, the smaller PCI addresses decide",
        ),
        (
            "pcie-a100-pairs",
            "1-3",
            "1-7",
            2,
            "NVLink at 300 GB/s; the next best, gpu-2 gpu-3, is not joined by NVLink",
        ),
        (
            "pcie-a100-pairs",
            "1,3-7",
            "1,3-7",
            4,
            "slowest pair: no NVLink, PCIe NODE at 31.5 GB/s; "
            "the next best, gpu-1 gpu-3 gpu-4 gpu-6, has PCIe SYS, not NODE",
        ),
        (
            "dgx1-v100",
            "0-2",
            "0-2,4-7",
            2,
            "NVLink at 50 GB/s; the next best, gpu-0 gpu-1, has NVLink at 25 GB/s only",
        ),
        (
            "hgx-h100-oci",
            "1-7",
            "1-7",
            1,
            "gpu-2 would do as well, the smaller PCI addresses decide",
        ),
        ("dgx1-v100", "0,1", "0,1,4-7", 2, "NVLink at 25 GB/s; there was no other set"),
    ],
)
def test_the_reason_is_one_sentence(
    machine: str, offered: str, free: str, size: int, sentence: str
) -> None:
    graph = build(read_recorded(FOLDER / machine))

    def ids(text: str) -> list[str]:
        ends = [part.split("-") for part in text.split(",")]
        return [graph.ids[n] for e in ends for n in range(int(e[0]), int(e[-1]) + 1)]

    choice = choose(graph, available=ids(offered), free=ids(free), size=size, explain=True)
    assert choice.preference is not None
    found = why(graph, choice.preference, runner_up=choice.runner_up, decided_by=choice.decided_by)
    assert found == sentence


def test_columns_of_figures_end_under_each_other() -> None:
    rows = right_aligned([["", "a", "free"], ["node-0", "cpu", "8"]], left=2)
    assert ["".join(row) for row in rows] == ["      a  free", "node-0cpu   8"]
