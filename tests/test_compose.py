"""What is published of an observation follows the configuration."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from rte.commands import parts
from rte.commands.compose import Composer
from rte.config import Config, ConfigError
from rte.graph.build import build
from rte.model import (
    Allocatable,
    Machine,
    NvLinkEnd,
    Observation,
    PodName,
    PodUse,
    Policy,
    Usage,
)
from rte.publish.features import FeatureFile
from rte.publish.publisher import FolderSink, Wrote
from rte.sources.recorded import read_recorded

MACHINES = Path(__file__).parent / "machines"
MACHINE = read_recorded(MACHINES / "pcie-a100-pairs")
UID = "6f1f3b1c-0d1e-4f6e-9a51-000000000001"


def configured(text: str = "{}") -> Config:
    import yaml

    return msgspec.convert(yaml.safe_load(text), Config)


def composer(text: str = "{}", **sources: Any) -> Composer:
    return Composer(configured(text), "n1", build, **sources)


def observed(machine: Machine = MACHINE) -> Observation:
    return Observation(
        machine=machine,
        usage=Usage(),
        allocatable=Allocatable(),
        policy=Policy(),
        faults={},
        node_uid=UID,
    )


def bodies(made: Composer, machine: Machine = MACHINE) -> dict[str, Any]:
    return {str(body["kind"]): body for body in made(observed(machine))}


def test_the_graph_is_published_beside_the_topology() -> None:
    assert set(bodies(composer())) == {"NodeResourceTopology", "GPUFabric"}
    assert set(bodies(composer("nrt: {fabric: false}"))) == {"NodeResourceTopology"}


def test_the_history_of_a_former_process_is_continued() -> None:
    before = bodies(composer())["GPUFabric"]
    gpus = MACHINE.gpus
    lost = replace(MACHINE, gpus=(replace(gpus[0], lost="fallen off the bus", links=()), *gpus[1:]))
    after = bodies(composer(published_fabric=lambda: before), lost)["GPUFabric"]
    first, second = after["status"]["history"]
    assert first["changes"] == ["first seen"]
    assert any("fallen off the bus" in line or "gpu-0" in line for line in second["changes"])


def test_group_names_outlive_a_restart_of_ours() -> None:
    before = bodies(composer())["GPUFabric"]
    broken = replace(
        MACHINE,
        gpus=tuple(replace(gpu, links=()) if gpu.number in (0, 2) else gpu for gpu in MACHINE.gpus),
    )
    after = bodies(composer(published_fabric=lambda: before), broken)["GPUFabric"]
    assert [group["name"] for group in after["status"]["groups"]] == [
        "group-1",
        "group-2",
        "group-3",
    ]


def test_a_group_keeps_its_name_when_one_before_it_falls_apart() -> None:
    made = composer()
    first = bodies(made)
    names = {
        zone["name"] for zone in first["NodeResourceTopology"]["zones"] if "group" in zone["name"]
    }
    assert names == {"group-0", "group-1", "group-2", "group-3"}
    broken = replace(
        MACHINE,
        gpus=tuple(replace(gpu, links=()) if gpu.number in (0, 2) else gpu for gpu in MACHINE.gpus),
    )
    zones = bodies(made, broken)["NodeResourceTopology"]["zones"]
    assert {zone["name"] for zone in zones if zone["type"] == "NVLinkGroup"} == names - {"group-0"}


def test_groups_are_named_elsewhere_as_the_objects_name_them() -> None:
    before = bodies(composer())["GPUFabric"]
    broken = replace(
        MACHINE,
        gpus=tuple(replace(gpu, links=()) if gpu.number in (0, 2) else gpu for gpu in MACHINE.gpus),
    )
    made = composer(published_fabric=lambda: before)
    assert [group.name for group in made.groups(build(broken))] == ["group-0", "group-1", "group-2"]
    after = bodies(made, broken)["GPUFabric"]
    assert [group.name for group in made.groups(build(broken))] == [
        group["name"] for group in after["status"]["groups"]
    ]


def test_a_gpu_with_fewer_lanes_than_before_is_degraded_for_this_boot() -> None:
    made = composer()
    bodies(made)
    fewer = replace(
        MACHINE,
        gpus=tuple(
            replace(gpu, links=tuple(halved(end) for end in gpu.links)) for gpu in MACHINE.gpus
        ),
    )
    groups = bodies(made, fewer)["GPUFabric"]["status"]["groups"]
    assert all(group["degraded"] for group in groups)
    assert not any(
        g.get("degraded") for g in bodies(composer(), fewer)["GPUFabric"]["status"]["groups"]
    )


def halved(end: NvLinkEnd) -> NvLinkEnd:
    return replace(end, lanes=end.lanes // 2)


def test_labels_are_written_only_when_asked() -> None:
    assert "Node" not in bodies(composer())
    node = bodies(composer("labels: {write: node}"))["Node"]
    assert node["metadata"]["labels"]["hardware.nvlink.groups"] == "4"
    assert node["metadata"]["labels"]["hardware.gpu.per-numa"] == "4-4"
    assert not any("kubernetes.io" in key for key in node["metadata"]["labels"])


def test_the_topology_key_is_unique_in_the_cluster() -> None:
    made = composer(
        "labels: {write: node, keys: {topology.kubernetes.io/nvlink-group: example.com/nvlink}}"
    )
    labels = bodies(made)["Node"]["metadata"]["labels"]
    assert labels["example.com/nvlink"] == "6f1f3b1c.group-0"


def test_a_label_can_be_left_out_and_a_misspelt_one_is_refused() -> None:
    made = composer("labels: {write: node, keys: {hardware.nvlink.shape: ''}}")
    assert "hardware.nvlink.shape" not in bodies(made)["Node"]["metadata"]["labels"]
    with pytest.raises(ConfigError, match=r"labels\.keys\.hardware\.nvlink: no such label"):
        composer("labels: {keys: {hardware.nvlink: x}}")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"hardware.nvlink.shape": "n v"}, "'n v' is no key of a label"),
        ({"hardware.nvlink.shape": f"{'a' * 254}/x"}, "is no key of a label"),
        ({"hardware.nvlink.shape": "Example.com/x"}, "is no key of a label"),
        ({"hardware.nvlink.shape": "example.com/" + "x" * 64}, "is no key of a label"),
        (
            {"hardware.nvlink.shape": "hardware.nvlink.groups"},
            "hardware.nvlink.groups is the key of hardware.nvlink.groups too",
        ),
    ],
)
def test_a_key_that_no_label_can_have_is_refused(keys: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composer(yaml.safe_dump({"labels": {"keys": keys}}))
    assert caught.value.key == "labels.keys.hardware.nvlink.shape"
    assert problem in caught.value.problem


def labels_of(made: Composer) -> dict[str, Any]:
    found: dict[str, Any] = bodies(made)["Node"]
    return found


def test_labels_as_a_feature_file_which_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / "features.d" / "rte"
    sink = FeatureFile(FolderSink(tmp_path), path)
    labels = labels_of(composer("labels: {write: feature-file}"))
    assert sink.publish(labels, 0).wrote is Wrote.APPLIED
    text = path.read_text()
    assert "hardware.nvlink.groups=4\n" in text
    assert sink.publish(labels, 1).wrote is Wrote.UNCHANGED
    assert sink.reread(2) == ()
    path.unlink()
    assert [outcome.wrote for outcome in sink.reread(3)] == [Wrote.APPLIED]
    assert path.read_text() == text
    path.write_text("hardware.nvlink.groups=5\n")
    assert sink.publish(labels, 4).wrote is Wrote.APPLIED
    assert path.read_text() == text
    assert not list(tmp_path.glob("node-*"))


def test_a_feature_file_that_cannot_be_written_stops_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "rte"
    sink = FeatureFile(FolderSink(tmp_path), path)
    for now in range(2):
        assert not sink.publish(
            labels_of(composer("labels: {write: feature-file}")), now
        ).size_bytes
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / "file").unlink()
    sink.reread(3)
    assert path.exists()


# Groups by configuration


def groups_of(text: str, machine: str) -> dict[str, dict[str, Any]]:
    """Group by name, as GPUFabric has it, held to say what the topology's zones say."""
    found = bodies(composer(text), read_recorded(MACHINES / machine))
    zones = found["NodeResourceTopology"]["zones"]
    groups = {group["name"]: group for group in found["GPUFabric"]["status"]["groups"]}
    assert {z["name"] for z in zones if z["type"] == "NVLinkGroup"} == set(groups)
    return groups


def sizes(groups: dict[str, dict[str, Any]]) -> dict[str, tuple[int, str]]:
    return {name: (len(group["gpus"]), group["shape"]) for name, group in groups.items()}


def test_groups_are_all_that_reach_each_other_or_all_that_are_linked() -> None:
    """DGX-1: two fully linked quads, each GPU linked to its like in the other."""
    assert sizes(groups_of("{}", "dgx1-v100")) == {"group-0": (8, "partial")}
    assert sizes(groups_of("groups: {by: clique}", "dgx1-v100")) == {
        "group-0": (4, "mesh"),
        "group-1": (4, "mesh"),
    }
    with pytest.raises(msgspec.ValidationError, match=r"groups\.by"):
        configured("groups: {by: ring}")


def test_the_operator_s_names_are_in_every_object_and_label() -> None:
    gpus = MACHINE.gpus
    ring = f"ring-0: ['{gpus[0].pci}', '{gpus[2].pci}', '{gpus[4].pci}', '{gpus[6].pci}']"
    text = f"{{groups: {{names: {{{ring}}}}}, labels: {{write: node}}}}"
    assert sizes(groups_of(text, "pcie-a100-pairs")) == {
        "ring-0": (4, "partial"),  # two pairs, as the operator wishes
        "group-0": (2, "mesh"),
        "group-1": (2, "mesh"),
    }
    node = bodies(composer(text))["Node"]["metadata"]["labels"]
    assert node["hardware.nvlink.group"] == "ring-0"
    assert node["hardware.nvlink.group-size"] == "4"
    assert node["hardware.nvlink.shape"] == "partial"


def test_a_configured_group_outlives_its_links_and_is_degraded() -> None:
    gpus = MACHINE.gpus
    made = composer(f"groups: {{names: {{ring-0: ['{gpus[0].pci}', '{gpus[2].pci}']}}}}")
    bodies(made)
    broken = replace(
        MACHINE, gpus=tuple(replace(g, links=()) if g.number in (0, 2) else g for g in gpus)
    )
    group = bodies(made, broken)["GPUFabric"]["status"]["groups"][0]
    assert (group["name"], len(group["gpus"])) == ("ring-0", 2)
    assert len(group["degraded"]) == 2


def test_the_fabric_s_domain_is_named_where_the_fabric_is_complete() -> None:
    machine = read_recorded(MACHINES / "gb200-tray")
    made = composer("labels: {write: node}")
    (group,) = bodies(made, machine)["GPUFabric"]["status"]["groups"]
    fabric = machine.gpus[0].fabric
    assert fabric is not None
    assert group["domain"] == f"{fabric.cluster}.{fabric.clique}"
    labels = bodies(made, machine)["Node"]["metadata"]["labels"]
    assert labels["hardware.nvlink.domain"] == group["domain"]
    # H100 completes its fabric with a cluster UUID of zeros, which names none.
    (alone,) = groups_of("{}", "hgx-h100-oci").values()
    assert not alone.get("domain")
    assert sizes({"": alone}) == {"": (8, "mesh")}


def test_pods_and_resources_are_excluded_in_the_words_of_resource_topology_exporter() -> None:
    config = configured(
        "nrt:\n"
        "  exclude: [a]\n"
        "  resourceExclude: {'*': [b], n1: [c], n2: [d]}\n"
        "  podExclude:\n"
        "  - {namespacePattern: 'kube-*', namePattern: 'x*'}\n"
        "  - {namePattern: y}\n"
    )
    assert parts.excluded_resources(config, "n1") == ("a", "b", "c")
    names = [("kube-system", "x1"), ("kube-system", "z"), ("default", "x1"), ("default", "y")]
    pods = tuple(PodUse(pod=PodName(namespace=space, name=name)) for space, name in names)
    assert parts.excluded_pods(config, Usage(pods=pods)) == {pods[0].pod, pods[3].pod}
