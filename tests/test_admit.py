"""`rte admit`: as the real kubelet's managers decide, and what is said where nothing is known."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from plugin.devices import Advertising, MigStrategy
from plugin.life import DevicePlugin, Options
from rte.__main__ import main as rte
from rte.commands.aligning import kubelet_configuration
from rte.commands.demo import EXAMPLES
from rte.commands.record import KUBELET
from rte.model import Machine, huge_pages_name
from rte.sources.recorded import read_recorded
from rte.standin.kubelet import likely_cores
from tests.machines.description import FOLDER
from tests.real_kubelet import Kubelet, pod

GPU = "nvidia.com/gpu"
MATRICES = Path(__file__).parent / "matrices"
PAIRS = str(FOLDER / "pcie-a100-pairs")
HGX = str(FOLDER / "hgx-h100-oci")
TRAINING, INFERENCE, ETL, NOTEBOOK = (
    str(EXAMPLES / f"{name}.yaml") for name in ("training", "inference", "etl", "notebook")
)

Json = dict[str, Any]
StartKubelet = Callable[..., Kubelet]
Asks = dict[str, str | int]


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., str]:
    """Writes pods into one file; each is its name and the requests of its containers."""

    def write(*pods: Json, name: str = "pods.yaml") -> str:
        file = tmp_path / name
        kind = {"apiVersion": "v1", "kind": "Pod"}
        file.write_text(yaml.safe_dump_all([{**kind, **each} for each in pods]))
        return str(file)

    return write


@pytest.fixture
def admit(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Runs the command; its exit status and what it said."""

    def run(*arguments: str) -> SimpleNamespace:
        status = rte(["admit", *arguments])
        said = capsys.readouterr()
        return SimpleNamespace(status=status, out=said.out, err=said.err)

    return run


@pytest.fixture
def document(admit: Callable[..., SimpleNamespace]) -> Callable[..., Json]:
    """The JSON of a run; the exit status is checked against it."""

    def run(*arguments: str) -> Json:
        done = admit(*arguments, "-o", "json")
        found: Json = json.loads(done.out)
        assert found["admitted"] == all(pod["admitted"] for pod in found["pods"])
        assert done.status == (0 if found["admitted"] else 1)
        return found

    return run


def gpus(found: Json, number: int = 0) -> list[str]:
    """Names of the GPUs of an admitted pod."""
    assert found["pods"][number]["admitted"], found["pods"][number]
    return [d["name"] for c in found["pods"][number]["containers"] for d in c["devices"]]


# Beside the real kubelet's managers


def described(machine: Machine) -> list[Json]:
    """The machine as the real kubelet is told it, memory and huge pages included."""
    cores = likely_cores(machine.numa_nodes)
    return [
        {
            "id": node.id,
            "socket": index,
            "cores": [[*core] for core in cores if core[0] in node.cpus]
            or [[cpu] for cpu in node.cpus],
            "memory": str(node.memory_bytes),
            "hugepages": {
                huge_pages_name(size).removeprefix("hugepages-"): count
                for size, count in node.huge_pages.items()
            },
            "distances": [node.distance.get(other.id, 20) for other in machine.numa_nodes],
        }
        for index, node in enumerate(machine.numa_nodes)
    ]


PODS: Sequence[tuple[str, Sequence[Asks], Sequence[Asks]]] = (
    # name, containers, init containers; what is admitted stays
    ("pair", [{GPU: 2, "cpu": 4, "memory": "8Gi"}], []),
    ("burst", [{GPU: 1}], []),
    ("five", [{GPU: 5}], []),
    ("two", [{GPU: 1, "cpu": 2, "memory": "1Gi"}, {GPU: 1, "cpu": 2, "memory": "1Gi"}], []),
    ("odd", [{"cpu": 3, "memory": "1Gi"}], []),
    # Of two that an init container leaves to one the kubelet takes any: here all are used again.
    ("init", [{GPU: 2, "cpu": 2, "memory": "1Gi"}], [{GPU: 1, "cpu": 4, "memory": "2Gi"}]),
    ("wide", [{"cpu": 70, "memory": "1Gi"}], []),
    ("large", [{"cpu": 2, "memory": "600Gi"}], []),
    ("other", [{"b.com/thing": 1, "cpu": 2, "memory": "1Gi"}], []),
    ("last", [{GPU: 2, "cpu": 2, "memory": "1Gi"}], []),
)


class Beside:
    """A real kubelet with our plugin, on a recorded machine."""

    def __init__(self, start: StartKubelet, machine: Machine, config: Json, **more: Any) -> None:
        self.kubelet = start(config, machine=described(machine))
        self.plugin = DevicePlugin(
            Options(
                plugin_dir=self.kubelet.plugin_dir,
                pod_resources=self.kubelet.pod_resources,
                **more,
            )
        )
        self.plugin.start()
        self.plugin.update(machine, {})
        for name, resource in self.plugin.resources.items():
            self.kubelet.wait_devices(name, len(resource.tables.healthy))

    def admit(self, manifest: Json) -> Json:
        """What became of it, in the words of our JSON."""
        real = self.kubelet.admit(manifest)
        if not real.admitted:
            # The real one shows a Failed pod's devices until it next looks.
            self.kubelet.remove(real.name)
        return {
            "admitted": real.admitted,
            "reason": real.reason or None,
            "message": real.message or None,
            "containers": [
                {
                    "devices": {r: sorted(ids) for r, ids in (c.devices or {}).items() if ids},
                    "cpus": list(c.exclusive_cpus or ()),
                    "memory": list(c.memory_nodes or ()),
                }
                for c in real.containers
            ]
            if real.admitted
            else [],
        }


def ours(entry: Json) -> Json:
    """One of our pods, as `Beside.admit` has it."""
    containers = []
    for container in entry["containers"]:
        ids: dict[str, list[str]] = {}
        for device in container["devices"]:
            ids.setdefault(device["resource"], []).append(device["id"])
        containers.append(
            {
                "devices": {resource: sorted(found) for resource, found in ids.items()},
                "cpus": container["cpus"],
                "memory": sorted({n for m in container["memory"] for n in m["numa_nodes"]}),
            }
        )
    return {
        "admitted": entry["admitted"],
        "reason": entry["reason"],
        "message": entry["message"],
        "containers": containers,
    }


@pytest.fixture
def beside(kubelet: StartKubelet) -> Iterator[Callable[..., Beside]]:
    opened: list[Beside] = []

    def start(machine: Machine, config: Json, **more: Any) -> Beside:
        opened.append(Beside(kubelet, machine, config, **more))
        return opened[-1]

    yield start
    for found in opened:
        found.plugin.stop()


@pytest.mark.parametrize(
    ("name", "policy", "scope"),
    [
        ("pcie-a100-pairs", "single-numa-node", "container"),
        ("pcie-a100-pairs", "restricted", "pod"),
        ("dgx1-v100", "best-effort", "container"),
        ("hgx-h100-oci", "none", "container"),
        ("h100-snc4", "single-numa-node", "pod"),
        ("numa-ids-0-2", "single-numa-node", "container"),
    ],
)
def test_as_the_real_managers_decide(
    beside: Callable[..., Beside],
    document: Callable[..., Json],
    manifest: Callable[..., str],
    name: str,
    policy: str,
    scope: str,
) -> None:
    machine = read_recorded(FOLDER / name)
    real = beside(machine, kubelet_configuration(machine, policy=policy, scope=scope))
    pods = [pod(each, *containers, init=init) for each, containers, init in PODS]
    found = document(str(FOLDER / name), manifest(*pods), "--policy", policy, "--scope", scope)
    assert len(found["pods"]) == len(pods)
    for manifested, mine in zip(pods, found["pods"], strict=True):
        assert ours(mine) == real.admit(manifested), manifested["metadata"]["name"]
    admitted = {mine["admitted"] for mine in found["pods"]}
    assert admitted == {True, False}


def test_slices_as_the_real_managers_decide(
    beside: Callable[..., Beside], document: Callable[..., Json], manifest: Callable[..., str]
) -> None:
    machine = read_recorded(FOLDER / "mig-half")
    config = kubelet_configuration(machine, policy="single-numa-node", scope="container")
    real = beside(machine, config, advertising=Advertising(mig=MigStrategy.MIXED))
    slices = sorted(name for name in real.plugin.resources if "mig-" in name)
    assert len(slices) > 1
    pods = [pod(f"p{n}", {resource: 1 + n % 2}) for n, resource in enumerate([*slices, GPU])]
    found = document(str(FOLDER / "mig-half"), manifest(*pods), "--mig-strategy", "mixed")
    for manifested, mine in zip(pods, found["pods"], strict=True):
        assert ours(mine) == real.admit(manifested)
    admitted = {entry["admitted"] for entry in found["pods"]}
    assert admitted == {True, False}  # of some profiles there is a slice in each socket, no two


# Choices


def test_the_plugins_own_choice_and_its_reason(document: Callable[..., Json]) -> None:
    found = document(PAIRS, TRAINING, INFERENCE, ETL, NOTEBOOK)
    assert [entry["admitted"] for entry in found["pods"]] == [True, True, False, True]
    assert gpus(found) == ["gpu-0", "gpu-2"]  # bridged; first fit would take gpu-0 gpu-1
    assert [d["call"] for d in found["pods"][0]["decisions"]] == ["preferred"]
    assert [d["call"] for d in found["pods"][1]["decisions"]] == ["allocated"]
    assert found["pods"][2]["reason"] == "TopologyAffinityError"
    assert found["pods"][2]["decisions"] == []
    free = found["pods"][2]["free_before"]
    assert [each["resources"][GPU] for each in free] == [2, 0]
    assert [each["numa_node"] for each in free] == [0, 1]


def test_the_text_says_where_and_why(admit: Callable[..., SimpleNamespace]) -> None:
    done = admit(PAIRS, TRAINING, INFERENCE, ETL)
    assert done.status == 1
    assert "admitted    NUMA node 0: gpu-0 gpu-2, CPUs 1-8,65-72, 128 GiB\n" in done.out
    assert "instead of  the first of the list, gpu-0 gpu-1: no NVLink" in done.out
    rejected = "rejected    TopologyAffinityError: Resources cannot be allocated with Topology"
    assert rejected in done.out
    assert "node-0: 2 nvidia.com/gpu, 46 CPUs (too few)" in done.out
    assert done.out.endswith("2 of 3 pods admitted; rejected: etl\n")


def test_nothing_differs_from_run_to_run(admit: Callable[..., SimpleNamespace]) -> None:
    one, two = (admit(PAIRS, TRAINING, NOTEBOOK, "-o", "json").out for _ in range(2))
    assert one == two


def test_a_policy_decides_whether_five_of_four_and_four_fit(
    document: Callable[..., Json], manifest: Callable[..., str]
) -> None:
    five = manifest(pod("five", {GPU: 5}))
    assert [
        document(HGX, five, "--policy", policy)["admitted"]
        for policy in ("none", "best-effort", "restricted", "single-numa-node")
    ] == [True, True, True, False]


def test_a_scope_decides_where_two_containers_land(
    document: Callable[..., Json], manifest: Callable[..., str]
) -> None:
    two = manifest(pod("two", {GPU: 3}, {GPU: 3}))
    assert document(HGX, two, "--scope", "container")["admitted"]
    assert not document(HGX, two, "--scope", "pod")["admitted"]


def test_faulty_gpus_of_a_recording_get_no_work(
    document: Callable[..., Json], manifest: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "machine"
    folder.mkdir()
    for file in (FOLDER / "hgx-h100-oci").iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    reading = json.loads((folder / "nvml.json").read_text())
    reading["gpus"][0]["remap"] = [0, 0, False, True]  # a row could not be remapped
    (folder / "nvml.json").write_text(json.dumps(reading))
    found = document(str(folder), manifest(pod("four", {GPU: 4}), pod("all", {GPU: 4})))
    assert [device["name"] for device in found["devices"] if not device["healthy"]] == ["gpu-0"]
    assert [entry["admitted"] for entry in found["pods"]] == [True, False]
    assert gpus(found) == ["gpu-4", "gpu-5", "gpu-6", "gpu-7"]


def test_replicas_more_than_one_are_refused_where_configured(
    document: Callable[..., Json], manifest: Callable[..., str], tmp_path: Path
) -> None:
    config = tmp_path / "rte.yaml"
    config.write_text(
        "sharing: {timeSlicing: {failRequestsGreaterThanOne: true, "
        "resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
    )
    pods = manifest(pod("one", {GPU: 1}), pod("two", {GPU: 2}))
    found = document(HGX, pods, "--config", str(config))
    assert len(found["devices"]) == 32
    one, two = found["pods"]
    assert one["admitted"]
    assert two["reason"] == "UnexpectedAdmissionError"
    assert "rpc error: code = InvalidArgument desc = " in two["message"]


# The kubelet's configuration


def test_a_kubelets_own_configuration_and_flags_over_it(
    document: Callable[..., Json], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
        "topologyManagerPolicy: restricted\ntopologyManagerScope: pod\ncpuManagerPolicy: static\n"
        "kubeReserved: {cpu: 1500m}\n"
    )
    found = document(HGX, NOTEBOOK, "--kubelet-config", str(file))["kubelet"]
    assert (found["topology_manager"], found["scope"]) == ("restricted", "pod")
    assert (found["cpu_manager"], found["memory_manager"]) == ("static", "None")
    # As many as are reserved in all, as a kubelet takes them: a whole core.
    assert found["reserved_cpus"] == [0, 112]
    flags = ["--scope", "container", "--cpu-manager", "none", "--reserved-cpus", "4,5"]
    found = document(HGX, NOTEBOOK, "--kubelet-config", str(file), *flags)["kubelet"]
    assert (found["topology_manager"], found["scope"]) == ("restricted", "container")
    assert (found["cpu_manager"], found["reserved_cpus"]) == ("none", [4, 5])


def test_the_configuration_of_a_recording_counts(
    document: Callable[..., Json], tmp_path: Path
) -> None:
    folder = tmp_path / "machine"
    folder.mkdir()
    for file in (FOLDER / "hgx-h100-oci").iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / KUBELET).write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
        "topologyManagerPolicy: best-effort\n"
    )
    found = document(str(folder), NOTEBOOK)["kubelet"]
    assert found["topology_manager"] == "best-effort"
    assert found["from"].endswith(f"machine/{KUBELET}")


def test_options_of_the_cpu_manager_that_are_not_followed_are_named(
    admit: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
        "cpuManagerPolicy: static\nreservedSystemCPUs: '0'\n"
        "cpuManagerPolicyOptions: {align-by-socket: 'true'}\n"
    )
    done = admit(HGX, NOTEBOOK, "--kubelet-config", str(file))
    assert "not followed: cpuManagerPolicyOptions.align-by-socket\n" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--reserved-cpus", "0-"], "--reserved-cpus: not a list such as 0-3,8: '0-'"),
        (["--reserved-cpus", "9999"], "CPU 9999 is to be reserved, and the machine has none such"),
        (["--reserved-cpus", ""], "CPU Manager policy static needs reserved CPUs"),
        (["--kubelet-config", "/nowhere"], "/nowhere: cannot be read: No such file or directory"),
    ],
)
def test_a_kubelet_that_would_not_start_ends_with_2(
    admit: Callable[..., SimpleNamespace], arguments: list[str], words: str
) -> None:
    done = admit(HGX, NOTEBOOK, *arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"rte admit: {words}")


def test_more_numa_nodes_than_a_kubelet_takes_end_with_2(
    admit: Callable[..., SimpleNamespace], document: Callable[..., Json], tmp_path: Path
) -> None:
    tray = str(FOLDER / "gb200-tray")
    file = tmp_path / "config.yaml"
    text = (
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
        "topologyManagerPolicy: single-numa-node\nmemoryManagerPolicy: Static\n"
    )
    file.write_text(text)
    done = admit(tray, NOTEBOOK, "--kubelet-config", str(file))
    assert done.status == 2
    assert "NUMA nodes, and with Topology Manager policy single-numa-node" in done.err
    # With the option a kubelet starts, and its Memory Manager never ends.
    file.write_text(f"{text}topologyManagerPolicyOptions: {{max-allowable-numa-nodes: '64'}}\n")
    found = document(tray, NOTEBOOK, "--kubelet-config", str(file))
    assert "memory" in [each["of"] for each in found["not_decided"]]
    assert found["pods"][0]["not_decided"] == ["memory"]
    assert found["pods"][0]["containers"][0]["memory"] == []


# What a source does not know


def test_of_a_matrix_only_devices_are_decided(
    document: Callable[..., Json], manifest: Callable[..., str]
) -> None:
    many = manifest(pod("many", {GPU: 3}))
    found = document(str(MATRICES / "H100-80GB-HBM3_g8n18_sglang-4188.txt"), ETL, INFERENCE, many)
    assert [each["of"] for each in found["not_decided"]] == ["cpu", "memory", "hugepages"]
    assert [entry["admitted"] for entry in found["pods"]] == [True, True, False]
    etl, inference, third = found["pods"]
    assert etl["not_decided"] == ["cpu", "memory"]
    assert all(c["cpus"] == c["memory"] == [] for c in etl["containers"])
    chosen = etl["containers"][0]["devices"]
    assert [device["numa_nodes"] for device in chosen] == [[0], [0]]
    assert etl["decisions"][0]["preference"]["linked"]
    assert [d["numa_nodes"] for d in inference["containers"][0]["devices"]] == [[1]] * 4
    assert third["reason"] == "TopologyAffinityError"


def test_the_text_says_what_is_not_decided(admit: Callable[..., SimpleNamespace]) -> None:
    done = admit(str(MATRICES / "H100-80GB-HBM3_g8n18_sglang-4188.txt"), ETL)
    assert done.status == 0
    assert "not decided cpu: the source does not say which CPUs the NUMA nodes have\n" in done.out
    assert "CPU Manager static with full-pcpus-only (not decided)" in " ".join(done.out.split())
    assert "not decided cpu, memory: see above\n" in done.out
    assert "CPUs 1" not in done.out


def test_of_a_matrix_without_numa_nodes_nothing_is_aligned(
    document: Callable[..., Json], manifest: Callable[..., str], tmp_path: Path
) -> None:
    matrix = tmp_path / "topo.txt"
    rows = ["\tGPU0\tGPU1\tGPU2", "GPU0\tX\tSYS\tNV2", "GPU1\tSYS\tX\tSYS", "GPU2\tNV2\tSYS\tX"]
    matrix.write_text("\n".join(rows) + "\n")
    found = document(str(matrix), manifest(pod("two", {GPU: 2})))
    assert found["not_decided"][0]["of"] == "alignment"
    assert gpus(found) == ["gpu-0", "gpu-2"]
    assert found["pods"][0]["containers"][0]["affinity"] is None


def test_of_nccls_xml_devices_and_cpus_are_decided(
    document: Callable[..., Json], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rte(["show", "-o", "nccl", HGX]) == 0
    file = tmp_path / "topology.xml"
    file.write_text(capsys.readouterr().out)
    found = document(str(file), INFERENCE, ETL)
    assert [each["of"] for each in found["not_decided"]] == ["memory", "hugepages"]
    whole = document(HGX, INFERENCE, ETL)
    for entry, recorded in zip(found["pods"], whole["pods"], strict=True):
        (one,), (other,) = entry["containers"], recorded["containers"]
        assert one["cpus"] == other["cpus"] != []
        assert one["memory"] == []
        assert [d["numa_nodes"] for d in one["devices"]] == [
            d["numa_nodes"] for d in other["devices"]
        ]


def test_huge_pages_count_where_they_are_known(
    document: Callable[..., Json], manifest: Callable[..., str]
) -> None:
    asks: Asks = {"cpu": 2, "memory": "1Gi", "hugepages-1Gi": "8Gi"}
    pods = manifest(pod("huge", asks))
    recorded = document(HGX, pods)["pods"][0]
    assert not recorded["admitted"]
    unknown = document(str(MATRICES / "H100-80GB-HBM3_g8n18_sglang-4188.txt"), pods)["pods"][0]
    assert unknown["admitted"]
    assert unknown["not_decided"] == ["cpu", "hugepages-1Gi", "memory"]


def test_a_resource_that_no_plugin_has_is_named(
    admit: Callable[..., SimpleNamespace], manifest: Callable[..., str]
) -> None:
    done = admit(HGX, manifest(pod("p", {"b.com/thing": 1})))
    assert done.status == 0
    assert "no plugin has registered b.com/thing" in done.out


def test_what_a_pod_asks_as_a_whole_is_told(
    admit: Callable[..., SimpleNamespace], manifest: Callable[..., str]
) -> None:
    level = pod("level", {GPU: 1})
    level["spec"]["resources"] = {"limits": {"cpu": "4", "memory": "1Gi"}}
    done = admit(HGX, manifest(level))
    assert "Pod level asks 1 nvidia.com/gpu, 4 CPUs, 1 GiB (Guaranteed)\n" in done.out


# What was given


def test_the_first_file_is_a_pod_when_it_says_so(
    document: Callable[..., Json],
    manifest: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # This node: no GPU, and one NUMA node.
    tree = tmp_path / "sys"
    (tree / "devices/system/node/node0").mkdir(parents=True)
    (tree / "devices/system/node/online").write_text("0\n")
    (tree / "devices/system/node/has_cpu").write_text("0\n")
    (tree / "devices/system/node/node0/cpulist").write_text("0-3\n")
    (tree / "devices/system/node/node0/distance").write_text("10\n")
    memory = "Node 0 MemTotal:       16777216 kB\n"
    (tree / "devices/system/node/node0/meminfo").write_text(memory)
    (tree / "bus/pci/devices").mkdir(parents=True)
    one = manifest(pod("one", {"cpu": 2, "memory": "1Gi"}), name="one.yaml")
    two = manifest(pod("two", {"cpu": 2, "memory": "1Gi"}), name="two.yaml")
    found = document(one, two, "--sysfs", str(tree))
    assert [entry["name"] for entry in found["pods"]] == ["one", "two"]
    assert [entry["admitted"] for entry in found["pods"]] == [True, False]
    assert found["devices"] == []


def test_a_matrix_on_standard_input(
    document: Callable[..., Json], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (MATRICES / "H100-80GB-HBM3_g8n18_sglang-4188.txt").read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert document("-", ETL)["admitted"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: Pod\nmetadata: {name: p}\nspec: {}\n", "spec.containers: expected at least one"),
        ("kind: Pod\nmetadata: [\n", "is not YAML"),
        ("kind: Service\nmetadata: {name: s}\n", "kind: expected one of Pod, "),
        ("", "holds no manifest"),
        (
            "kind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c, resources: "
            "{limits: {nvidia.com/gpu: 500m}}}]}\n",
            "limits.nvidia.com/gpu: expected a whole number",
        ),
    ],
)
def test_a_bad_manifest_ends_with_2_and_names_the_field(
    admit: Callable[..., SimpleNamespace], tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(text)
    for given in ([HGX, str(file)], [HGX, TRAINING, str(file)]):
        done = admit(*given)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith(f"rte admit: {file}: ")
        assert words in done.err


def test_a_broken_pod_that_comes_first_is_not_taken_for_a_machine(
    admit: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text("kind: Pod\nmetadata: [\n")
    done = admit(str(file), TRAINING)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"rte admit: {file}: is not YAML")


def test_what_is_no_machine_and_no_pod_ends_with_2(
    admit: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    for given, words in (
        ([HGX], "expected at least one POD.yaml after it"),
        (["-"], "expected at least one POD.yaml after it"),
        ([str(tmp_path / "none"), TRAINING], "cannot be read: No such file or directory"),
        ([HGX, TRAINING, TRAINING], "metadata.name: default/training is in"),
    ):
        done = admit(*given)
        assert (done.status, done.out) == (2, "")
        assert words in done.err, given
