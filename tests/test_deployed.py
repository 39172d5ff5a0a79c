"""`rte run` as the DaemonSet runs it, with its pod's own token: a real API server, a real kubelet's
managers, NVML over the fake library; and what happens when a right is missing."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3
import yaml

from rte.sources.recorded import read_recorded, unpack
from tests.config_map import write_config_map
from tests.conftest import GoProgram, StartKubelet
from tests.deployed import (
    DEPLOY,
    ROOT,
    Cluster,
    apply_strictly,
    config_text,
    deploy,
    give_rights,
    of_kind,
    render,
)
from tests.fake_nvml import XID, Driver
from tests.http_faults import FaultyProxy
from tests.machines.description import FOLDER
from tests.ports import free_port
from tests.real_apiserver import ApiServer, Json
from tests.real_kubelet import Kubelet, numa_nodes, pod
from tests.stopwatch import Stopwatch
from tests.waiting import until

RECORDED = "hgx-h100-oci"
GPU = "nvidia.com/gpu"
NRT = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
NUMBERS = itertools.count()

POLICIES = {
    "topologyManagerPolicy": "single-numa-node",
    "cpuManagerPolicy": "static",
    "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
    "memoryManagerPolicy": "Static",
}

# A pod finds its credentials at a fixed path, which tests must not write to: this moves it.
LAUNCHER = """
import sys
from pathlib import Path
from rte.publish import access
access.in_cluster.__kwdefaults__["secrets"] = Path(sys.argv.pop(1))
from rte.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def cluster(apiserver: ApiServer, go_program: GoProgram) -> Cluster:
    return deploy(apiserver, go_program("kustomize"))


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """/sys and /proc of a recorded machine."""

    @cache
    def tree(name: str) -> Path:
        root = tmp_path_factory.mktemp(name)
        unpack(FOLDER / name / "sys.txt", root)
        return root

    return tree


class Daemon:
    """One process: the container of a rendered DaemonSet, on a node of the test."""

    def __init__(
        self,
        cluster: Cluster,
        objects: list[Json],
        name: str,
        *,
        kubelet: Kubelet,
        node: str,
        tree: Path,
        driver: Driver,
        folder: Path,
    ) -> None:
        self.objects = objects
        (self.daemon_set,) = (
            each for each in of_kind(objects, "DaemonSet") if each["metadata"]["name"] == name
        )
        (self.container,) = self.daemon_set["spec"]["template"]["spec"]["containers"]
        self.config: Json = yaml.safe_load(config_text(objects, self.daemon_set))
        self.cluster = cluster
        self.kubelet = kubelet
        self.node = node
        self.tree = tree
        self.driver = driver
        self.folder = folder
        self.secrets = folder / f"secrets-{name}"
        self.log_file = folder / f"log-{name}"
        self.config_folder = folder / f"config-{name}"
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.http = urllib3.PoolManager(retries=False, timeout=30)
        self.make_secrets()

    def make_secrets(self) -> None:
        """What the kubelet would project into the pod: nothing where the pod wants nothing."""
        self.secrets.mkdir()
        spec = self.daemon_set["spec"]["template"]["spec"]
        if spec.get("automountServiceAccountToken", True):
            pod_name = f"{self.daemon_set['metadata']['name']}-{self.node}"
            token = self.cluster.token(self.daemon_set, pod_name, node=self.node)
            (self.secrets / "token").write_text(token)
            (self.secrets / "ca.crt").write_bytes(self.cluster.apiserver.ca.read_bytes())

    def write_config(self, port: int) -> Path:
        """The pod's own, with the paths and the port of this test."""
        config = self.config
        assert config["kubelet"]["configFile"] == "/var/lib/kubelet/config.yaml"
        config["host"] = {
            "sysfs": str(self.tree / "sys"),
            "procfs": str(self.tree / "proc"),
            "interval": 1,
        }
        config["kubelet"] |= {
            "rootDir": str(self.kubelet.root),
            "configFile": str(self.kubelet.root / "config.yaml"),
        }
        state = self.folder / f"run-{self.daemon_set['metadata']['name']}"
        state.mkdir(exist_ok=True)
        config["stateDir"] = str(state)
        config["http"] = {"address": "127.0.0.1", "port": port}
        return write_config_map(self.config_folder, yaml.safe_dump(config))

    def start(self, **environment: str) -> "Daemon":
        """Starts it with the container's arguments and variables, and these."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        role, option, _, *more = self.container["args"]
        file = self.write_config(port)
        arguments = [str(self.secrets), role, option, str(file), *more]
        command = [sys.executable, "-c", LAUNCHER, *arguments]
        server = urlsplit(self.cluster.apiserver.url)
        variables = {
            "PATH": os.environ["PATH"],
            "PYTHONWARNINGS": "error",
            "NODE_NAME": self.node,
            "KUBERNETES_SERVICE_HOST": str(server.hostname),
            "KUBERNETES_SERVICE_PORT": str(server.port),
            **{v["name"]: v["value"] for v in self.container["env"] if "value" in v},
            **self.driver.env,
            **environment,
        }
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=variables, cwd=ROOT, stdout=log, stderr=log
            )
        return self

    def end(self) -> int:
        """SIGTERM, as the kubelet sends it; the exit status."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.process = None
        self.http.clear()
        return status

    def log(self) -> str:
        return self.log_file.read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Status and text; 0 while nothing listens."""
        try:
            answer = self.http.request("GET", self.url + path)
        except urllib3.exceptions.HTTPError:
            return 0, ""
        return answer.status, answer.data.decode()

    def until(self, holds: Callable[[], bool], what: str, *, within_s: float = 30) -> None:
        stopwatch = Stopwatch()
        while not holds():
            assert self.process is not None
            alive = self.process.poll() is None
            ready = self.get("/readyz")
            if not alive or stopwatch.past(within_s):
                pytest.fail(
                    f"{'not within' if alive else 'ended before'} {within_s} s: {what}\n"
                    f"/readyz: {ready}\n{self.log()[-3000:]}"
                )
            time.sleep(0.05)

    def is_ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def nrt(self) -> Json | None:
        answer = self.cluster.apiserver.request("GET", f"{NRT}/{self.node}")
        return answer.body if answer.status == 200 else None

    def free_gpus(self) -> list[int]:
        """Available GPUs of each NUMA zone as published."""
        zones = (self.nrt() or {"zones": []})["zones"]
        return [
            int(resource["available"])
            for zone in zones
            if zone["type"] == "Node"
            for resource in zone["resources"]
            if resource["name"] == GPU
        ]


StartDaemon = Callable[..., Daemon]


@pytest.fixture
def daemons(
    cluster: Cluster,
    go_program: GoProgram,
    kubelet: StartKubelet,
    trees: Callable[[str], Path],
    tmp_path: Path,
) -> Iterator[StartDaemon]:
    """Makes the daemons of one node, not yet started.

    Its kubelet has the CPUs of the recorded machine and the policies of the sample.
    """
    node = f"deployed-{next(NUMBERS)}"
    cluster.apiserver.create_node(node)
    k = kubelet(POLICIES, machine=numa_nodes(cpus=112, memory="1Ti"))
    made: list[Daemon] = []

    def make(folder: str = "base", name: str = "rte", *, recorded: str = RECORDED) -> Daemon:
        daemon = Daemon(
            cluster,
            render(go_program("kustomize"), DEPLOY / folder),
            name,
            kubelet=k,
            node=node,
            tree=trees(recorded),
            driver=Driver(tmp_path / "nvml", FOLDER / recorded),
            folder=tmp_path,
        )
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.end()


@pytest.fixture
def daemon(daemons: StartDaemon) -> Daemon:
    return daemons()


def test_with_exactly_its_token_it_does_all_of_its_work(daemon: Daemon) -> None:
    daemon.start()
    daemon.until(daemon.is_ready, "ready")
    daemon.kubelet.wait_devices(GPU, 8)
    daemon.until(lambda: daemon.free_gpus() == [4, 4], "the plugin's GPUs are in the zones")

    nrt = daemon.nrt()
    assert nrt is not None
    (owner,) = nrt["metadata"]["ownerReferences"]
    uid = daemon.cluster.apiserver.get(f"/api/v1/nodes/{daemon.node}")["metadata"]["uid"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", daemon.node, uid)
    attributes = {each["name"]: each["value"] for each in nrt["attributes"]}
    assert attributes["topologyManagerPolicy"] == "single-numa-node"

    admission = daemon.kubelet.admit(pod("training", {GPU: 4, "cpu": 16, "memory": "32Gi"}))
    assert admission.admitted, admission.message
    daemon.until(lambda: sorted(daemon.free_gpus()) == [0, 4], "the pod's GPUs are taken")
    assert re.search(r"^rte_\w+ ", daemon.get("/metrics")[1], re.MULTILINE)
    assert "forbidden" not in daemon.log(), "its rights suffice"

    assert daemon.end() == 0
    assert sockets(daemon) == {"kubelet.sock"}
    assert daemon.driver.sessions() == 0


def test_a_cordon_in_the_config_map_counts_without_a_restart(daemon: Daemon) -> None:
    daemon.start()
    daemon.until(daemon.is_ready, "ready")
    daemon.kubelet.wait_devices(GPU, 8)
    withheld = {"pci": "0000:0f:00.0", "reason": "to be replaced"}
    changed = {**daemon.config, "devices": {"withhold": [withheld]}}
    write_config_map(daemon.config_folder, yaml.safe_dump(changed))
    daemon.kubelet.wait_devices(GPU, 7)
    daemon.until(lambda: sorted(daemon.free_gpus()) == [3, 4], "the scheduler is told")
    write_config_map(daemon.config_folder, yaml.safe_dump(daemon.config))
    daemon.kubelet.wait_devices(GPU, 8)
    assert daemon.is_ready()


def test_k8s_device_plugin_519_health_is_told_with_its_reason_everywhere(
    daemons: StartDaemon, stack: ExitStack
) -> None:
    """Node Event, NodeResourceTopology, metric and log; once at its beginning, once at its end."""
    daemon = daemons("overlays/events")
    daemon.config["health"] = {"coolDown": "100ms"}
    daemon.config["devices"] = {"withhold": [{"pci": "0000:0f:00.0", "reason": "fan"}]}
    server = daemon.cluster.apiserver
    stack.callback(give_rights, server, daemon.cluster.objects)
    for each in daemon.objects:
        apply_strictly(server, each)
    daemon.start()
    daemon.until(daemon.is_ready, "ready")
    daemon.kubelet.wait_devices(GPU, 7)
    daemon.driver.event(4, XID, 79)
    daemon.kubelet.wait_devices(GPU, 6)
    known = {gpu.number: gpu for gpu in read_recorded(FOLDER / RECORDED).gpus}
    cordoned = next(gpu for gpu in known.values() if gpu.pci == "0000:0f:00.0")

    def events() -> list[tuple[str, str]]:
        found = server.get(
            f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3D{daemon.node}"
        )["items"]
        return [(each["reason"], each["message"]) for each in found]

    def healths() -> dict[str, tuple[str, str]]:
        zones = (daemon.nrt() or {"zones": []})["zones"]
        said = {z["name"]: {a["name"]: a["value"] for a in z.get("attributes", ())} for z in zones}
        return {
            name: (values["health"], values["healthReason"])
            for name, values in said.items()
            if "healthReason" in values
        }

    daemon.until(
        lambda: (
            healths()
            == {"gpu-4": ("unhealthy", "xid-79"), cordoned.name: ("unhealthy", "withheld")}
        ),
        "the NodeResourceTopology says it",
    )
    who = f"gpu-4 ({known[4].pci}, {known[4].uuid})"
    begun = (
        "GPUUnhealthy",
        f"{who} gets no new work: xid-79: the driver reported Xid 79, the GPU has fallen off the "
        "bus",
    )
    daemon.until(lambda: events() == [begun], "the Event")
    metrics = daemon.get("/metrics")[1]
    assert 'rte_gpu_fault{gpu="gpu-4",reason="xid-79",severity="withhold"} 1.0' in metrics
    assert 'rte_device_withheld{device="0000:0f:00.0",reason="fan"} 1.0' in metrics
    daemon.driver.control("lost 4")
    both = ("unhealthy", "lost,xid-79")
    daemon.until(lambda: healths().get("gpu-4") == both, "lost")
    daemon.driver.control()
    daemon.until(lambda: set(healths()) == {cordoned.name}, "well again")
    daemon.until(lambda: len(events()) == 4, "Events of the ends")
    assert ("GPURecovered", f"{who} no longer xid-79") in events()
    daemon.until(lambda: daemon.log().count("gpu-4 (0000:") >= 4, "four lines")
    assert daemon.log().count("gpu-4 (0000:") == 4
    assert "0000:0f:00.0 is cordoned: fan" in daemon.log()


def test_a_kubelet_configuration_that_is_not_there_is_named_until_it_is(daemon: Daemon) -> None:
    file = daemon.kubelet.root / "config.yaml"
    aside = file.rename(file.with_name("aside.yaml"))
    daemon.start()
    daemon.until(lambda: str(file) in daemon.get("/readyz")[1], "not ready, with the file's name")
    daemon.kubelet.wait_devices(GPU, 8)
    aside.rename(file)
    daemon.until(daemon.is_ready, "ready")

    def policy() -> str | None:
        attributes = {
            each["name"]: each["value"] for each in (daemon.nrt() or {}).get("attributes", ())
        }
        return attributes.get("topologyManagerPolicy")

    daemon.until(lambda: policy() == "single-numa-node", "the policy is published")


def test_the_fabric_is_written_once_and_belongs_to_the_node(daemon: Daemon) -> None:
    daemon.start()
    path = f"{fabric_path(daemon.cluster)}/{daemon.node}"
    request = daemon.cluster.apiserver.request
    daemon.until(lambda: request("GET", path).status == 200, "the GPUFabric")
    fabric = request("GET", path).body
    (owner,) = fabric["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Node", daemon.node)
    daemon.until(daemon.is_ready, "ready")
    daemon.kubelet.admit(pod("training", {GPU: 2}))
    daemon.until(lambda: sorted(daemon.free_gpus()) == [2, 4], "the pod's GPUs are taken")
    after = request("GET", path).body
    assert after["metadata"]["resourceVersion"] == fabric["metadata"]["resourceVersion"]


def test_it_takes_over_from_an_exporter_with_exactly_its_token(daemon: Daemon) -> None:
    """It may not delete the object, and so set no owner: OwnerReferencesPermissionEnforcement."""
    former = {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": daemon.node},
        "topologyPolicies": ["None"],
        "zones": [],
    }
    manager = "node-feature-discovery-topology-updater"
    daemon.cluster.apiserver.apply(former, field_manager=manager)
    daemon.config["nrt"] = {"takeoverAfter": 0}
    daemon.start()
    daemon.until(lambda: daemon.is_ready() and daemon.free_gpus() == [4, 4], "taken over")
    nrt = daemon.nrt()
    assert nrt is not None
    assert "topologyPolicies" not in nrt
    assert "ownerReferences" not in nrt["metadata"]
    assert "it stays without an owner" in daemon.log()


def sockets(daemon: Daemon) -> set[str]:
    return {path.name for path in daemon.kubelet.plugin_dir.glob("*.sock")}


def fabric_path(cluster: Cluster) -> str:
    (crd,) = (
        each
        for each in of_kind(cluster.objects, "CustomResourceDefinition")
        if each["spec"]["names"]["kind"] == "GPUFabric"
    )
    spec = crd["spec"]
    version = next(v["name"] for v in spec["versions"] if v["storage"])
    return f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"


# The overlays


def test_two_processes_do_the_same_work_and_the_plugin_has_no_token(daemons: StartDaemon) -> None:
    publisher = daemons("overlays/two-processes").start()
    plugin = daemons("overlays/two-processes", "rte-plugin").start()
    assert not list(plugin.secrets.iterdir())
    publisher.until(publisher.is_ready, "the publisher is ready")
    plugin.until(plugin.is_ready, "the plugin is ready")
    publisher.until(lambda: publisher.free_gpus() == [4, 4], "the plugin's GPUs are in the zones")
    admission = plugin.kubelet.admit(pod("training", {GPU: 4}))
    assert admission.admitted, admission.message
    publisher.until(lambda: sorted(publisher.free_gpus()) == [0, 4], "the pod's GPUs are taken")
    # Each goes without the other noticing.
    assert publisher.end() == 0
    assert plugin.is_ready()


def test_a_mounted_driver_is_found_below_its_root(daemons: StartDaemon, tmp_path: Path) -> None:
    daemon = daemons("overlays/mounted-driver")
    library = daemon.driver.library.library_dir / "libnvidia-ml.so.1"
    folder = tmp_path / "driver-root" / "usr" / "lib64"
    folder.mkdir(parents=True)
    shutil.copy(library, folder)
    daemon.start(CONTAINER_DRIVER_ROOT=str(tmp_path / "driver-root"), LD_LIBRARY_PATH="")
    daemon.until(daemon.is_ready, "ready")
    daemon.kubelet.wait_devices(GPU, 8)


def test_mig_slices_are_resources_of_their_own(daemons: StartDaemon) -> None:
    daemon = daemons("overlays/mig", recorded="mig-half").start()
    daemon.until(daemon.is_ready, "ready")
    expected = {
        GPU: "4",  # the other four are in MIG mode
        "nvidia.com/mig-1g.10gb": "8",
        "nvidia.com/mig-1g.10gb.me": "1",
        "nvidia.com/mig-2g.20gb": "1",
        "nvidia.com/mig-3g.40gb": "2",
    }
    daemon.until(lambda: offered(daemon) == expected, f"{expected}, not {offered(daemon)}")


def offered(daemon: Daemon) -> dict[str, str]:
    """Allocatable GPUs and slices of the node."""
    allocatable = daemon.kubelet.state().allocatable
    return {name: count for name, count in allocatable.items() if name.startswith("nvidia.com/")}


LABELS = {
    "hardware.gpu.per-numa": "4-4",
    "hardware.nvlink.group": "group-0",
    "hardware.nvlink.group-size": "8",
    "hardware.nvlink.groups": "1",
    "hardware.nvlink.shape": "mesh",
}


def test_labels_are_on_the_node(daemons: StartDaemon) -> None:
    daemon = daemons("overlays/node-labels")
    server = daemon.cluster.apiserver

    def found() -> dict[str, str]:
        labels: dict[str, str] = server.get(f"/api/v1/nodes/{daemon.node}")["metadata"]["labels"]
        return {key: value for key, value in labels.items() if key.startswith("hardware.")}

    try:
        for each in daemon.objects:
            apply_strictly(server, each)
        daemon.start()
        daemon.until(daemon.is_ready, "ready")
        daemon.until(lambda: found() == LABELS, f"{LABELS}, not {found()}")
    finally:
        give_rights(server, daemon.cluster.objects)


def test_labels_are_in_a_feature_file(daemons: StartDaemon, tmp_path: Path) -> None:
    daemon = daemons("overlays/feature-file")
    file = tmp_path / "features.d" / "rte"
    file.parent.mkdir()
    daemon.config["labels"] = {"featureFile": str(file)}
    daemon.start()
    daemon.until(file.exists, "the feature file")
    assert dict(line.split("=") for line in file.read_text().splitlines()) == LABELS
    daemon.until(daemon.is_ready, "ready")
    assert "forbidden" not in daemon.log()


@pytest.mark.parametrize("gate", [True, False], ids=["pods API", "no pods API"])
def test_no_pod_is_asked_of_the_api_server_where_the_kubelet_tells_of_them(
    daemon: Daemon, gate: bool
) -> None:
    kubelet = daemon.kubelet
    wanted: Json = {GPU: 4, "cpu": 16, "memory": "32Gi"}
    kubelet.configure({**POLICIES, "featureGates": {"PodsAPI": gate}})
    kubelet.restart()
    kubelet.admit(pod("its-own", {"cpu": "1"}))
    with FaultyProxy(daemon.cluster.apiserver) as proxy:
        file = daemon.folder / "kubeconfig"
        file.write_text(yaml.safe_dump(kubeconfig(proxy.url, daemon.secrets / "token")))
        daemon.config["api"] = {**daemon.config.get("api", {}), "kubeconfig": str(file)}
        daemon.start()
        daemon.until(lambda: daemon.free_gpus() == [4, 4], "published")
        source = f'rte_pods_source{{source="{"kubelet" if gate else "api-server"}"}} 1.0'
        daemon.until(lambda: source in daemon.get("/metrics")[1], source)
        assert kubelet.admit(pod("job", wanted)).admitted
        daemon.until(lambda: sorted(daemon.free_gpus()) == [0, 4], "the job's GPUs are taken")
        kubelet.finish("job")
        kubelet.remove("job")
        kubelet.restart()
        kubelet.wait_devices(GPU, 8)
        assert kubelet.admit(pod("another", {**wanted, GPU: 2})).admitted
        daemon.until(lambda: sorted(daemon.free_gpus()) == [2, 4], "the other's GPUs are taken")
        assert daemon.end() == 0
        of_pods = {path for _, path in proxy.asked if "pods" in urlsplit(path).path}
    watches = {path for path in of_pods if "watch=true" in path}
    assert bool(watches) is bool(of_pods - watches) is not gate, of_pods
    assert all(f"spec.nodeName%3D{daemon.node}&" in f"{path}&" for path in of_pods)


def kubeconfig(server: str, token_file: Path) -> Json:
    return {
        "clusters": [{"name": "a", "cluster": {"server": server}}],
        "users": [{"name": "a", "user": {"tokenFile": str(token_file)}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "current-context": "a",
    }


def test_without_the_pod_watch_the_kubelet_tells_of_the_pods(daemons: StartDaemon) -> None:
    daemon = daemons("overlays/no-pod-watch")
    daemon.kubelet.admit(pod("any", {"cpu": "1"}))
    daemon.start()
    daemon.until(daemon.is_ready, "ready")
    told = 'rte_pods_source{source="kubelet"} 1.0'
    daemon.until(lambda: told in daemon.get("/metrics")[1], told)
    assert "cannot" not in daemon.log()


def test_without_the_pod_watch_it_is_ready_though_nobody_tells_of_the_pods(
    daemons: StartDaemon,
) -> None:
    daemon = daemons("overlays/no-pod-watch")
    daemon.config["kubelet"]["podsApiSocket"] = str(daemon.folder / "of-a-newer-kubelet.sock")
    daemon.start()
    daemon.until(daemon.is_ready, "ready")
    assert "rte_pods_source{" not in daemon.get("/metrics")[1]
    assert "cannot" not in daemon.log()
    assert "rte_problem{" not in daemon.get("/metrics")[1]


# A right that is missing


RIGHTS = [
    ("nodes", "get"),
    ("pods", "list"),
    ("pods", "watch"),
    ("noderesourcetopologies", "get"),
    ("noderesourcetopologies", "create"),
    ("noderesourcetopologies", "patch"),
    ("gpufabrics", "get"),
    ("gpufabrics", "create"),
    ("gpufabrics", "patch"),
]


@pytest.mark.parametrize(("resource", "verb"), RIGHTS)
def test_without_a_right_it_goes_on_says_which_and_recovers(
    daemon: Daemon, resource: str, verb: str
) -> None:
    (role,) = of_kind(daemon.cluster.objects, "ClusterRole")
    taken = [
        {**rule, "verbs": [v for v in rule["verbs"] if v != verb]}
        if rule["resources"] == [resource]
        else rule
        for rule in role["rules"]
    ]
    assert taken != role["rules"]
    apply_strictly(daemon.cluster.apiserver, {**role, "rules": [r for r in taken if r["verbs"]]})
    try:
        until(lambda: not may(daemon, resource, verb), lambda: "the role is still in force")
        if resource == "pods":
            daemon.config["kubelet"]["podsApi"] = False  # it would take the right's place
        daemon.start()
        words = rf"cannot {verb} resource \\?\"{resource}\\?\""
        daemon.until(
            lambda: bool(re.search(words, daemon.get("/readyz")[1] + daemon.log())),
            f"told that it cannot {verb} {resource}",
        )
        # The kubelet is served whatever the API server says.
        daemon.kubelet.wait_devices(GPU, 8)
        assert daemon.get("/healthz")[0] == 200
    finally:
        give_rights(daemon.cluster.apiserver, daemon.cluster.objects)
    daemon.until(lambda: daemon.is_ready() and daemon.free_gpus() == [4, 4], "well again")


def may(daemon: Daemon, resource: str, verb: str) -> bool:
    """Whether the daemon's token has the right, by the API server's word."""
    (role,) = of_kind(daemon.cluster.objects, "ClusterRole")
    (group,) = (r["apiGroups"][0] for r in role["rules"] if r["resources"] == [resource])
    attributes: dict[str, Any] = {"group": group, "resource": resource, "verb": verb}
    answer = daemon.cluster.apiserver.ask(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        },
        token=(daemon.secrets / "token").read_text(),
    )
    allowed: bool = answer["status"]["allowed"]
    return allowed


# What it refuses


def test_it_does_not_start_where_the_kubelets_keys_can_be_read(daemon: Daemon) -> None:
    keys = daemon.kubelet.root / "pki"
    keys.mkdir()
    (keys / "kubelet-client-current.pem").write_text("a key\n")
    daemon.start()
    assert daemon.process is not None
    assert daemon.process.wait(30) != 0
    assert str(keys) in daemon.log()
    assert sockets(daemon) == {"kubelet.sock"}
    assert daemon.nrt() is None


def test_a_cover_over_the_keys_is_no_reason_to_refuse(daemon: Daemon) -> None:
    (daemon.kubelet.root / "pki").mkdir()
    daemon.start()
    daemon.until(daemon.is_ready, "ready")
