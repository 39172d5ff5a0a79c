"""That deploy/ is what it says: rendered as kubectl does, taken by a real API server, and tight."""

import argparse
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from msgspec import structs

from rte.commands.options import add_options, configuration
from rte.config import load
from tests.conftest import GoProgram, StartKubelet
from tests.deployed import (
    DEPLOY,
    ROOT,
    Rule,
    apply_strictly,
    config_text,
    deploy,
    give_rights,
    granted,
    of_kind,
    rules,
)
from tests.deployed import render as rendered_objects
from tests.real_apiserver import APPLY, MERGE, ApiServer, Json
from tests.real_kubelet import numa_nodes, pod
from tests.simple_plugin import SimplePlugin
from tests.waiting import until

COMPONENTS = sorted(path.name for path in (DEPLOY / "components").iterdir())
FOLDERS = ["base", *sorted(f"overlays/{path.name}" for path in (DEPLOY / "overlays").iterdir())]

NODE_CLAIM = "authentication.kubernetes.io/node-name"

Render = Callable[[Path], list[Json]]


@pytest.fixture(scope="module")
def render(go_program: GoProgram) -> Render:
    program = go_program("kustomize")
    return lambda folder: rendered_objects(program, folder)


def config_of(objects: list[Json], daemon_set: Json, folder: Path) -> Path:
    """The configuration file of a DaemonSet's pods, written into a folder."""
    file = folder / "rte.yaml"
    file.write_text(config_text(objects, daemon_set))
    return file


# What is applied


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_is_taken_in_the_order_of_kubectl_and_a_second_time_changes_nothing(
    apiserver: ApiServer, render: Render, folder: str
) -> None:
    objects = render(DEPLOY / folder)
    for each in objects:
        apply_strictly(apiserver, each)
    for each in objects:
        before = apiserver.get(apiserver.path(each))["metadata"]["resourceVersion"]
        assert apply_strictly(apiserver, each)["metadata"]["resourceVersion"] == before, each[
            "kind"
        ]
    give_rights(apiserver, render(DEPLOY / "base"))


def test_a_field_that_the_api_does_not_know_would_be_refused(
    apiserver: ApiServer, render: Render
) -> None:
    objects = render(DEPLOY / "base")
    for each in objects:
        if each["kind"] == "Namespace":
            apply_strictly(apiserver, each)
    (daemon_set,) = of_kind(objects, "DaemonSet")
    daemon_set["spec"]["template"]["spec"]["runtimeClass"] = "nvidia"
    path = f"{apiserver.path(daemon_set)}?fieldManager=deploy&force=true&fieldValidation=Strict"
    answer = apiserver.request("PATCH", path, daemon_set, content_type=APPLY)
    assert answer.status >= 400
    assert "runtimeClass" in answer.body["message"]


def test_all_components_go_together(apiserver: ApiServer, render: Render, tmp_path: Path) -> None:
    def relative(path: str) -> str:
        return os.path.relpath(DEPLOY / path, tmp_path)

    kustomization = {
        "resources": [relative("overlays/two-processes")],
        # Labels go one way or the other.
        "components": [relative(f"components/{n}") for n in COMPONENTS if n != "feature-file"],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    objects = render(tmp_path)
    daemon_sets = of_kind(objects, "DaemonSet")
    assert [each["metadata"]["name"] for each in daemon_sets] == ["rte", "rte-plugin"]
    for each in daemon_sets:
        apply_strictly(apiserver, each)
        template = each["spec"]["template"]["spec"]
        (container,) = template["containers"]
        environment = {v["name"]: v.get("value") for v in container["env"]}
        assert environment["MIG_STRATEGY"] == "mixed"
        assert environment["RTE_DRIVER"] == "mounted"
        assert container["securityContext"]["privileged"]
        assert template["affinity"]["nodeAffinity"]
        config = load(file=config_of(objects, each, tmp_path), environ={})
        assert not config.nrt.fingerprint.watch_pods


def test_each_component_has_an_overlay_of_its_name_that_adds_it_to_the_base() -> None:
    for name in COMPONENTS:
        kustomization = yaml.safe_load(
            (DEPLOY / "overlays" / name / "kustomization.yaml").read_text()
        )
        assert kustomization["resources"] == ["../../base"]
        assert kustomization["components"] == [f"../../components/{name}"]


# What a pod of it may do on the node


class Pod(NamedTuple):
    """A container of a rendered DaemonSet with its pod."""

    folder: str
    objects: list[Json]
    daemon_set: Json
    spec: Json
    container: Json

    @property
    def environment(self) -> dict[str, str]:
        return {v["name"]: v["value"] for v in self.container["env"] if "value" in v}

    def mounts(self) -> Iterator[tuple[Json, Json]]:
        """Each mount with its volume."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            yield mount, volumes[mount["name"]]


def pods(render: Render, folders: Iterable[str] = FOLDERS) -> Iterator[Pod]:
    for folder in folders:
        objects = render(DEPLOY / folder)
        for daemon_set in of_kind(objects, "DaemonSet"):
            spec = daemon_set["spec"]["template"]["spec"]
            for container in spec["containers"]:
                yield Pod(folder, objects, daemon_set, spec, container)


UNPRIVILEGED = [f for f in FOLDERS if f not in ("overlays/mounted-driver", "overlays/mig")]
# Folders that an overlay is for, beside those of the base.
# In memory, made by the kubelet; the second is of the plugin that runs beside the publisher.
STATE = {"/run/rte", "/run/rte-plugin"}
WRITTEN = {
    "overlays/mounted-driver": {"/dev"},
    "overlays/feature-file": {"/etc/kubernetes/node-feature-discovery/features.d"},
    "overlays/cdi-nodes-only": {"/var/run/cdi"},
    "overlays/plugin-watcher": {"/var/lib/kubelet/plugins_registry"},
    "overlays/nccl-topology": {"/run/rte-nccl"},
}
READ = {"overlays/cdi": {"/var/run/cdi"}}


def test_without_an_overlay_that_says_so_nothing_is_privileged(render: Render) -> None:
    for each in pods(render, UNPRIVILEGED):
        assert each.container["securityContext"] == {
            "runAsUser": 0,
            "runAsGroup": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert each.spec["runtimeClassName"] == "nvidia"
        host_paths = [v["hostPath"]["path"] for _, v in each.mounts() if "hostPath" in v]
        others = {path for path in host_paths if not path.startswith("/var/lib/kubelet")}
        wanted = WRITTEN.get(each.folder, set()) | READ.get(each.folder, set())
        assert others - STATE == {"/sys"} | {p for p in wanted if "/kubelet/" not in p}
        assert len(others & STATE) == 1


def test_no_overlay_uses_a_namespace_of_the_host(render: Render) -> None:
    for each in pods(render):
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(each.spec)
        assert each.container["securityContext"]["readOnlyRootFilesystem"], each.folder


def test_only_folders_are_mounted(render: Render) -> None:
    for each in pods(render):
        paths = {
            v["hostPath"]["path"]: v["hostPath"]["type"]
            for _, v in each.mounts()
            if "hostPath" in v
        }
        made = {path for path, type in paths.items() if type == "DirectoryOrCreate"}
        assert made <= STATE | {"/run/rte-nccl"}, "what is somebody else's is not made for him"
        types = {type for path, type in paths.items() if path not in made}
        assert types == {"Directory"}, "a file that is replaced by renaming stays the old one"


def test_two_processes_of_a_node_share_no_state(render: Render) -> None:
    paths = [
        volume["hostPath"]["path"]
        for each in pods(render, ["overlays/two-processes"])
        for mount, volume in each.mounts()
        if mount["mountPath"] == "/run/rte"
    ]
    assert set(paths) == STATE
    assert len(paths) == 2


def test_what_may_be_written_is_named(render: Render) -> None:
    for each in pods(render):
        written = {m["mountPath"] for m, _ in each.mounts() if not m.get("readOnly")}
        assert written == WRITTEN.get(each.folder, set()) | {
            "/run/rte",
            "/var/lib/kubelet/device-plugins",  # our socket
            "/var/lib/kubelet/pod-resources",  # to connect to a socket is to write to it
        }


def test_keys_pods_and_storage_sockets_of_the_kubelet_are_covered(render: Render) -> None:
    for each in pods(render):
        mounts = {mount["mountPath"]: (mount, volume) for mount, volume in each.mounts()}
        if "/var/lib/kubelet" not in mounts:
            assert each.container["args"][0] == "plugin"
            continue
        kubelet, _ = mounts["/var/lib/kubelet"]
        assert kubelet["readOnly"]
        assert kubelet["mountPropagation"] == "HostToContainer"
        for name in ("pki", "pods", "plugins"):
            mount, volume = mounts[f"/var/lib/kubelet/{name}"]
            assert volume["emptyDir"] == {}
            assert mount["readOnly"]


def test_the_plugin_alone_has_no_token_and_no_way_out(render: Render) -> None:
    (each,) = (
        p for p in pods(render, ["overlays/two-processes"]) if p.container["args"][0] == "plugin"
    )
    assert each.spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in each.spec
    labels = each.daemon_set["spec"]["template"]["metadata"]["labels"]
    policies = [
        policy["spec"]
        for policy in of_kind(each.objects, "NetworkPolicy")
        if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ]
    assert [policy.get("egress", []) for policy in policies] == [[]]
    assert policies[0]["policyTypes"] == ["Ingress", "Egress"]


def test_a_new_pod_waits_for_the_old_one(render: Render) -> None:
    for each in pods(render):
        strategy = each.daemon_set["spec"]["updateStrategy"]
        assert strategy["rollingUpdate"]["maxSurge"] == 0
        assert strategy.get("type", "RollingUpdate") == "RollingUpdate"


def test_mig_slices_are_watched_only_with_the_right_that_the_runtime_asks_for(
    render: Render,
) -> None:
    """NVIDIA's runtime does not start a container that has the variable and not SYS_ADMIN."""
    watching = set()
    for each in pods(render):
        if "NVIDIA_MIG_MONITOR_DEVICES" in each.environment:
            watching.add(each.folder)
            assert each.container["securityContext"]["capabilities"] == {
                "add": ["SYS_ADMIN"],
                "drop": ["ALL"],
            }
    assert watching == {"overlays/mig"}


def test_the_configuration_is_one_that_the_program_takes(render: Render, tmp_path: Path) -> None:
    for each in pods(render):
        file = config_of(each.objects, each.daemon_set, tmp_path)
        config = load(file=file, environ=each.environment)
        sysfs = {mount["mountPath"] for mount, _ in each.mounts()}
        assert config.host.sysfs in sysfs, "never the container's own /sys"
        mounted = each.folder == "overlays/mounted-driver"
        assert config.driver == ("mounted" if mounted else "injected")
        if mounted:
            paths = {
                m["mountPath"]: v["hostPath"]["path"] for m, v in each.mounts() if "hostPath" in v
            }
            assert paths[config.nvml.container_driver_root] == config.nvml.driver_root
        assert each.container["args"][1:3] == ["--config", "/etc/rte/rte.yaml"]


def test_the_pod_watch_is_the_only_difference_that_its_component_makes(
    render: Render, tmp_path: Path
) -> None:
    base, without = (
        load(file=config_of(p.objects, p.daemon_set, tmp_path), environ={})
        for p in pods(render, ["base", "overlays/no-pod-watch"])
    )
    fingerprint = structs.replace(base.nrt.fingerprint, watch_pods=False)
    nrt = structs.replace(base.nrt, fingerprint=fingerprint)
    assert without == structs.replace(base, nrt=nrt) != base


def test_probes_and_policies_name_the_port_that_the_program_serves(render: Render) -> None:
    for each in pods(render):
        (port,) = each.container["ports"]
        assert port["containerPort"] == (2113 if each.container["args"][0] == "plugin" else 2112)
        tls = {"scheme": "HTTPS"} if each.folder == "overlays/tls" else {}
        for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
            assert each.container[probe]["httpGet"] == {"path": path, "port": port["name"], **tls}
        labels = each.daemon_set["spec"]["template"]["metadata"]["labels"]
        (policy,) = (
            p["spec"]
            for p in of_kind(each.objects, "NetworkPolicy")
            if p["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        )
        assert policy["ingress"] == [{"ports": [{"port": port["containerPort"]}]}]


def test_the_table_of_promises_is_the_manifests(render: Render) -> None:
    """docs/install.md says what each way of reaching the driver needs and promises."""
    table = markdown_table(ROOT / "docs" / "install.md", "## What each way")
    assert list(table[0])[1:] == [
        "`driver: injected` (base)",
        "injected, overlay `mig`",
        "`driver: mounted` (overlay `mounted-driver`)",
    ]
    rows = {row[""]: list(row.values())[1:] for row in table}
    assert rows["a GPU added, the driver unloaded or replaced"] == [
        "a restart of the pod",
        "a restart of the pod",
        "followed",
    ]
    assert rows["MIG slices made or removed"] == ["a restart of the pod", "followed", "followed"]
    (base,) = pods(render, ["base"])
    assert rows["needs"][0] == f"RuntimeClass `{base.spec['runtimeClassName']}`"
    (mig,) = pods(render, ["overlays/mig"])
    (capability,) = mig.container["securityContext"]["capabilities"]["add"]
    assert rows["needs"][1] == f"the same, and `{capability}`"
    (mounted,) = pods(render, ["overlays/mounted-driver"])
    assert "runtimeClassName" not in mounted.spec
    assert mounted.container["securityContext"]["privileged"]
    paths = {v["hostPath"]["path"]: m for m, v in mounted.mounts() if "hostPath" in v}
    assert paths["/"]["readOnly"]
    assert paths["/"]["mountPropagation"] == "HostToContainer"
    assert "/dev" in paths
    assert rows["needs"][2] == "privilege, the driver root and `/dev` of the host"


def markdown_table(file: Path, heading: str) -> list[dict[str, str]]:
    """The first table after a heading, a dict per row."""
    text = file.read_text()
    assert heading in text, f"{file.name} has no {heading!r}"
    lines = text.split(heading, 1)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


# What it may do in the cluster


class Agent(NamedTuple):
    """A pod of the base's DaemonSet in the API server, and the token that it would find."""

    node: str
    other_node: str
    token: str
    token_without_node: str


@pytest.fixture(scope="session")
def agent(apiserver: ApiServer, go_program: GoProgram) -> Agent:
    cluster = deploy(apiserver, go_program("kustomize"))
    (daemon_set,) = of_kind(cluster.objects, "DaemonSet")
    for name in ("deploy-here", "deploy-there"):
        apiserver.create_node(name)
    return Agent(
        node="deploy-here",
        other_node="deploy-there",
        token=cluster.token(daemon_set, "rte-here", node="deploy-here"),
        token_without_node=cluster.token(daemon_set, "rte-nowhere", node=None),
    )


FABRIC_CRD = ROOT / "crds" / "gpufabric" / "crd.yaml"


def fabric_group() -> str:
    group: str = yaml.safe_load(FABRIC_CRD.read_text())["spec"]["group"]
    return group


def expected_rights() -> set[Rule]:
    def each(group: str, resource: str, *verbs: str) -> set[Rule]:
        return {(group, resource, verb) for verb in verbs}

    return (
        each("", "nodes", "get")
        | each("", "pods", "list", "watch")
        | each("topology.node.k8s.io", "noderesourcetopologies", "get", "create", "patch")
        | each(fabric_group(), "gpufabrics", "get", "create", "patch")
    )


def test_its_rights_are_these_and_no_others(apiserver: ApiServer, agent: Agent) -> None:
    apiserver.create_service_account("rte", "nobody")
    everybody = granted(apiserver, apiserver.create_token("rte", "nobody"))
    expected = expected_rights()
    until(
        lambda: granted(apiserver, agent.token) - everybody == expected,
        lambda: f"{sorted(granted(apiserver, agent.token) - everybody)}, not {sorted(expected)}",
    )


def test_the_table_of_rights_is_the_role(render: Render) -> None:
    (role,) = of_kind(render(DEPLOY / "base"), "ClusterRole")
    told = set()
    for row in markdown_table(ROOT / "docs" / "install.md", "## What it may do"):
        resource, verbs = row["right"].split(": ")
        told |= {(resource, verb) for verb in verbs.split(", ")}
    assert told == {(resource, verb) for _, resource, verb in rules(role["rules"])}


def test_without_the_watch_of_pods_that_right_is_gone(render: Render) -> None:
    with_it, without = (
        rules(of_kind(render(DEPLOY / folder), "ClusterRole")[0]["rules"])
        for folder in ("base", "overlays/no-pod-watch")
    )
    assert with_it - without == {("", "pods", "list"), ("", "pods", "watch")}
    assert without < with_it


NRT = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"


@pytest.mark.parametrize(
    ("method", "path", "body", "allowed"),
    [
        ("GET", "/api/v1/nodes/deploy-here", None, True),
        ("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Ddeploy-here", None, True),
        ("GET", f"{NRT}/deploy-there", None, True),
        ("GET", "/api/v1/nodes", None, False),
        ("GET", "/api/v1/namespaces/rte/pods/rte-here", None, False),
        ("DELETE", "/api/v1/namespaces/rte/pods/rte-here", None, False),
        ("GET", "/api/v1/secrets", None, False),
        ("GET", "/api/v1/namespaces/rte/secrets/any", None, False),
        ("GET", "/api/v1/namespaces/rte/configmaps", None, False),
        # The proxy asks for nodes/proxy, whatever is behind it: that right is a shell on the node.
        ("GET", "/api/v1/nodes/deploy-here/proxy/configz", None, False),
        ("GET", "/api/v1/nodes/deploy-here/proxy/pods", None, False),
        ("GET", "/api/v1/nodes/deploy-here/proxy/metrics", None, False),
        ("POST", "/api/v1/nodes/deploy-here/proxy/run/rte/rte-here/rte?cmd=id", None, False),
        ("PATCH", "/api/v1/nodes/deploy-here", {"metadata": {"labels": {"a": "b"}}}, False),
        ("PATCH", "/api/v1/nodes/deploy-here/status", {"status": {}}, False),
        ("PUT", f"{NRT}/deploy-here", {"metadata": {"name": "deploy-here"}}, False),
        ("DELETE", f"{NRT}/deploy-here", None, False),
        ("DELETE", NRT, None, False),
        ("GET", NRT, None, False),
        ("POST", "/api/v1/namespaces/default/events", {"metadata": {"name": "a"}}, False),
        ("POST", "/api/v1/namespaces/rte/serviceaccounts/rte/token", {"spec": {}}, False),
    ],
)
def test_real_requests_are_granted_or_forbidden(
    apiserver: ApiServer, agent: Agent, method: str, path: str, body: Any, allowed: bool
) -> None:
    content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"

    def status() -> int:
        options = {"token": agent.token, "content_type": content_type}
        return apiserver.request(method, path, body, **options).status

    if allowed:
        until(lambda: status() in (200, 404), lambda: f"{method} {path}: {status()}")
    else:
        assert status() == 403


def test_events_are_of_the_own_node_and_only_with_the_overlay(
    apiserver: ApiServer, agent: Agent, render: Render
) -> None:
    def create(node: str, namespace: str = "default", kind: str = "Node") -> int:
        body = {
            "metadata": {"generateName": "gpu-", "namespace": namespace},
            "involvedObject": {"apiVersion": "v1", "kind": kind, "name": node},
            "reason": "GPUUnhealthy",
            "type": "Warning",
        }
        path = f"/api/v1/namespaces/{namespace}/events"
        return apiserver.request("POST", path, body, token=agent.token).status

    objects = render(DEPLOY / "overlays" / "events")
    (role,) = of_kind(objects, "ClusterRole")
    base = render(DEPLOY / "base")
    assert rules(role["rules"]) - rules(of_kind(base, "ClusterRole")[0]["rules"]) == {
        ("", "events", "create")
    }
    assert create("deploy-here") == 403
    try:
        for each in objects:
            apply_strictly(apiserver, each)
        until(lambda: create("deploy-there") == 422, lambda: str(create("deploy-there")))
        until(lambda: create("deploy-here") == 201, lambda: str(create("deploy-here")))
        assert create("deploy-here", kind="Pod") == 422
        assert create("deploy-here", namespace="kube-system") in (403, 422)
    finally:
        give_rights(apiserver, base)


def owned(kind: str, node: str) -> Json:
    """The example object of a kind under the name of a node."""
    folder = FABRIC_CRD.parent if kind == "GPUFabric" else ROOT / "crds" / "noderesourcetopology"
    example: Json = yaml.safe_load((folder / "example.yaml").read_text())
    return {**example, "metadata": {"name": node}}


@pytest.mark.parametrize("kind", ["NodeResourceTopology", "GPUFabric"])
def test_it_writes_the_own_nodes_object_and_no_other(
    apiserver: ApiServer, agent: Agent, kind: str
) -> None:
    def write(node: str, token: str, *labels: str) -> tuple[int, str]:
        body = owned(kind, node)
        body["metadata"]["labels"] = dict.fromkeys(labels, "x")
        path = f"{apiserver.path(body)}?fieldManager=rte&force=true"
        answer = apiserver.request("PATCH", path, body, token=token, content_type=APPLY)
        return answer.status, str(answer.body.get("message"))

    until(
        lambda: write(agent.node, agent.token)[0] in (200, 201),
        lambda: str(write(agent.node, agent.token)),
    )
    until(
        lambda: write(agent.other_node, agent.token)[0] == 422,
        lambda: str(write(agent.other_node, agent.token)),
    )
    assert (
        f"the agent of node {agent.node} may not write {agent.other_node}"
        in (write(agent.other_node, agent.token)[1])
    )
    assert write(agent.node, agent.token, "changed")[0] == 200
    # Neither does it change another's that is there, nor without a node in its token.
    apiserver.apply(owned(kind, agent.other_node))
    assert write(agent.other_node, agent.token, "changed")[0] == 422
    status, message = write(agent.node, agent.token_without_node)
    assert status == 422
    assert "(unknown)" in message
    assert write(agent.other_node, apiserver.token, "changed")[0] == 200


def test_with_node_labels_it_changes_the_own_nodes_labels_and_nothing_else(
    apiserver: ApiServer, agent: Agent, render: Render
) -> None:
    objects = render(DEPLOY / "overlays" / "node-labels")
    base = render(DEPLOY / "base")
    (role,) = of_kind(objects, "ClusterRole")
    assert rules(role["rules"]) - rules(of_kind(base, "ClusterRole")[0]["rules"]) == {
        ("", "nodes", "patch")
    }
    here, there = (f"/api/v1/nodes/{node}" for node in (agent.node, agent.other_node))
    foreign = {"metadata": {"labels": {"pool": "a"}}}
    apiserver.ask("PATCH", here, foreign, content_type=MERGE)

    def patch(path: str, body: Json, token: str = agent.token) -> int:
        return apiserver.request("PATCH", path, body, token=token, content_type=MERGE).status

    def label(key: str, value: str | None) -> Json:
        return {"metadata": {"labels": {key: value}}}

    try:
        for each in objects:
            apply_strictly(apiserver, each)
        ours = label("hardware.nvlink.groups", "2")
        until(lambda: patch(here, ours) == 200, lambda: f"{patch(here, ours)}")
        until(lambda: patch(there, ours) == 422, lambda: f"{patch(there, ours)}")
        assert patch(here, label("hardware.nvlink.groups", None)) == 200
        denied = [
            label("pool", "b"),
            label("pool", None),
            label("node-role.kubernetes.io/control-plane", ""),
            label("hardware.nvlink.groups.example/x", ""),
            {"metadata": {"annotations": {"a": "b"}}},
            {"metadata": {"finalizers": ["example.com/x"]}},
            {"spec": {"unschedulable": True}},
            {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}},
        ]
        assert [patch(here, body) for body in denied] == [422] * len(denied)
        assert patch(f"{here}/status", {"status": {"capacity": {"nvidia.com/gpu": "9"}}}) == 403
        assert patch(here, ours, agent.token_without_node) == 422
        assert patch(there, label("pool", "c"), apiserver.token) == 200
    finally:
        give_rights(apiserver, base)


# The kubelet's sample


def test_the_kubelet_takes_the_sample_and_aligns_gpus_cpus_and_memory(
    kubelet: StartKubelet,
) -> None:
    sample = yaml.safe_load((DEPLOY / "kubelet" / "config.yaml").read_text())
    machine = numa_nodes(cpus=64, memory="512Gi")
    k = kubelet(sample, machine=machine)
    with SimplePlugin("nvidia.com/gpu", {f"GPU-{n}": (n // 4,) for n in range(8)}) as plugin:
        plugin.serve(k.plugin_dir)
        k.wait_devices("nvidia.com/gpu", 8)

        def wants(gpus: int, cpus: int, memory: str) -> Json:
            return {"nvidia.com/gpu": gpus, "cpu": cpus, "memory": memory}

        for name in ("first", "second"):
            admission = k.admit(pod(name, wants(4, 32, "64Gi")))
            assert admission.admitted, admission.message
            (container,) = admission.containers
            numa = {
                int(gpu.removeprefix("GPU-")) // 4 for gpu in admission.devices("nvidia.com/gpu")
            }
            (node,) = numa
            cpus = {cpu for core in machine[node]["cores"] for cpu in core}
            assert set(container.exclusive_cpus or ()) < cpus
            assert len(container.exclusive_cpus or ()) == 32
            assert container.memory_nodes == (node,)
            k.remove(name)

        # Also where GPUs alone have no better place, as `restricted` would admit them.
        across = k.admit(pod("across", {"nvidia.com/gpu": 5}))
        assert across.reason == "TopologyAffinityError"
        half_a_core = k.admit(pod("half", wants(1, 3, "8Gi")))
        assert half_a_core.reason == "SMTAlignmentError"
    # The first core of each socket is the system's.
    reserved = {int(cpu) for cpu in sample["reservedSystemCPUs"].split(",")}
    assert reserved == {cpu for node in machine for cpu in node["cores"][0]}


def test_the_example_pods_are_admitted_and_aligned(
    apiserver: ApiServer, kubelet: StartKubelet
) -> None:
    examples = list(yaml.safe_load_all((DEPLOY / "examples" / "pods.yaml").read_text()))
    sample = yaml.safe_load((DEPLOY / "kubelet" / "config.yaml").read_text())
    k = kubelet(sample, machine=numa_nodes(cpus=64, memory="512Gi"))
    with SimplePlugin("nvidia.com/gpu", {f"GPU-{n}": (n // 4,) for n in range(8)}) as plugin:
        plugin.serve(k.plugin_dir)
        k.wait_devices("nvidia.com/gpu", 8)
        for example in examples:
            # The API server's answer has the requests that limits stand for.
            path = "/api/v1/namespaces/default/pods?fieldValidation=Strict&dryRun=All"
            made = apiserver.create(path, example)
            assert made["status"]["qosClass"] == "Guaranteed"
            admission = k.admit({"metadata": made["metadata"], "spec": made["spec"]})
            assert admission.admitted, admission.message
            (container,) = admission.containers
            assert container.exclusive_cpus
            nodes = {
                int(gpu.removeprefix("GPU-")) // 4 for gpu in admission.devices(plugin.resource)
            }
            assert tuple(nodes) == container.memory_nodes


def test_the_pod_monitor_finds_the_pods_and_their_port(render: Render) -> None:
    monitor = yaml.safe_load((DEPLOY / "examples" / "podmonitor.yaml").read_text())
    (named,) = monitor["spec"]["selector"]["matchExpressions"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for each in pods(render):
        labels = each.daemon_set["spec"]["template"]["metadata"]["labels"]
        assert labels[named["key"]] in named["values"]
        assert endpoint["port"] in {port["name"] for port in each.container["ports"]}
        assert monitor["metadata"]["namespace"] == each.daemon_set["metadata"]["namespace"]


def test_with_tls_the_agents_serve_and_the_monitor_asks_by_the_secret(
    render: Render, tmp_path: Path
) -> None:
    shutil.copy(DEPLOY / "examples" / "podmonitor.yaml", tmp_path)
    kustomization = {
        "resources": [
            os.path.relpath(DEPLOY / "overlays/two-processes", tmp_path),
            "podmonitor.yaml",
        ],
        "components": [os.path.relpath(DEPLOY / "components/tls", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    objects = render(tmp_path)
    parser = argparse.ArgumentParser()
    add_options(parser)
    for daemon_set in of_kind(objects, "DaemonSet"):
        spec = daemon_set["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        _, _, _, *flags = container["args"]
        tls = configuration(parser.parse_args(flags)).http.tls
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "tls")
        (secret,) = (v["secret"]["secretName"] for v in spec["volumes"] if v["name"] == "tls")
        assert (tls.cert_file, tls.key_file) == (
            f"{mount['mountPath']}/tls.crt",
            f"{mount['mountPath']}/tls.key",
        )
        assert "subPath" not in mount, "a file by itself would stay the old one"
        for probe in ("livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    (monitor,) = of_kind(objects, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["ca"] == {"secret": {"name": secret, "key": "ca.crt"}}
    (certificate,) = (
        found
        for block in re.findall(
            r"```yaml\n(.*?)```", (ROOT / "docs" / "install.md").read_text(), re.DOTALL
        )
        if (found := yaml.safe_load(block)).get("kind") == "Certificate"
    )
    assert certificate["metadata"]["namespace"] == monitor["metadata"]["namespace"]
    assert certificate["spec"]["secretName"] == secret
    assert certificate["spec"]["dnsNames"] == [endpoint["tlsConfig"]["serverName"]]


def test_the_sample_is_explained_where_the_documents_say_so() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    assert "`deploy/kubelet/config.yaml`" in text
    sample = yaml.safe_load((DEPLOY / "kubelet" / "config.yaml").read_text())
    mebibytes = sum(megabytes(zone["limits"]["memory"]) for zone in sample["reservedMemory"])
    assert mebibytes == (
        megabytes(sample["kubeReserved"]["memory"])
        + megabytes(sample["systemReserved"]["memory"])
        + megabytes(sample["evictionHard"]["memory.available"])
    )


def megabytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)(Mi|Gi)", quantity)
    assert match, quantity
    return int(match[1]) * {"Mi": 1, "Gi": 1024}[match[2]]
