"""The node labels, and the feature file that NFD reads."""

from dataclasses import replace
from pathlib import Path

import pytest

from rte.graph.build import build
from rte.graph.groups import Group, Shape, groups
from rte.model import CpuId, Gpu, Machine, NumaId, NumaNode, PciDevice, pci_address
from rte.publish.labels import (
    DEFAULT_KEYS,
    LABEL_VALUE,
    Label,
    feature_file,
    labels,
    node_labels,
)
from rte.sources.recorded import read_recorded

MACHINES = Path(__file__).parent / "machines"
UID = "7e2f5f3e-0c2a-4b56-9a3c-2f0f6f1f2f11"
ALL_KEYS = {label: label.value for label in Label}


def of(name: str) -> dict[str, str]:
    machine = read_recorded(MACHINES / name)
    return labels(machine, groups(build(machine)), node_uid=UID, keys=ALL_KEYS)


def test_an_nvswitch_machine_is_one_group() -> None:
    assert of("hgx-h100-oci") == {
        "hardware.gpu.per-numa": "4-4",
        "hardware.nvlink.group": "group-0",
        "hardware.nvlink.group-size": "8",
        "hardware.nvlink.groups": "1",
        "hardware.nvlink.shape": "mesh",
        "topology.kubernetes.io/nvlink-group": "7e2f5f3e.group-0",
    }


def test_pairs_name_the_first_of_the_largest() -> None:
    found = of("pcie-a100-pairs")
    assert found["hardware.nvlink.group"] == "group-0"
    assert found["hardware.nvlink.group-size"] == "2"
    assert found["hardware.nvlink.groups"] == "4"


def test_a_fabric_of_several_nodes_is_its_own_topology_key() -> None:
    found = of("gb200-tray")
    domain = found["hardware.nvlink.domain"]
    assert domain == "9a1f2b36-7c5d-4e0a-8b1c-52d3e4f50617.32766"
    assert found["topology.kubernetes.io/nvlink-group"] == domain
    assert found["hardware.gpu.per-numa"] == "2-2"


def test_without_nvlink_there_are_no_groups_and_without_gpus_no_labels() -> None:
    found = of("l40s-8")
    assert found["hardware.nvlink.groups"] == "0"
    assert "hardware.nvlink.group" not in found
    assert labels(Machine(numa_nodes=()), (), node_uid=UID, keys=ALL_KEYS) == {}


def machine(*numa: int | None) -> Machine:
    addresses = [pci_address(f"0000:{n + 1:02x}:00.0") for n in range(len(numa))]
    return Machine(
        numa_nodes=tuple(NumaNode(id=NumaId(n), cpus=(CpuId(n),)) for n in (0, 1)),
        pci=tuple(
            PciDevice(
                address=address,
                root="pci0000:00",
                vendor=0x10DE,
                device=1,
                class_code=0x030200,
                numa=None if node is None else NumaId(node),
            )
            for address, node in zip(addresses, numa, strict=True)
        ),
        gpus=tuple(Gpu(number=n, pci=address) for n, address in enumerate(addresses)),
    )


@pytest.mark.parametrize(
    ("numa", "value"),
    [((0, 0, 1), "2-1"), ((1, 1), "0-2"), ((0, None), None), ((0, 7), None)],
)
def test_gpus_by_numa_node_are_said_only_if_all_are_known(
    numa: tuple[int | None, ...], value: str | None
) -> None:
    found = labels(machine(*numa), (), node_uid=UID)
    assert found.get("hardware.gpu.per-numa") == value


def group(name: str, size: int = 1, domain: str | None = None) -> Group:
    addresses = tuple(pci_address(f"0000:{n + 1:02x}:00.0") for n in range(size))
    return Group(name=name, gpus=addresses, shape=Shape.RING, domain=domain)


def test_keys_can_be_changed_and_turned_off() -> None:
    one = (group("ring-0", 2),)
    assert Label.TOPOLOGY not in DEFAULT_KEYS
    assert labels(machine(0, 1), one, node_uid=UID, keys={Label.SHAPE: "example.com/shape"}) == {
        "example.com/shape": "ring"
    }
    assert labels(machine(0, 1), one, node_uid=UID, keys={Label.SHAPE: ""}) == {}


def test_the_topology_key_is_unique_in_the_cluster_or_absent() -> None:
    keys = {Label.TOPOLOGY: "k"}
    one = group("group-0", 2)
    assert labels(machine(0, 1), (one,), node_uid=None, keys=keys) == {}
    assert labels(machine(0, 1), (one,), node_uid=UID, keys=keys) == {"k": "7e2f5f3e.group-0"}
    wide = replace(one, domain="c.1")
    assert labels(machine(0, 1), (wide,), node_uid=None, keys=keys) == {"k": "c.1"}


@pytest.mark.parametrize("name", ["-bad", "a b", "x" * 64, "é", "a/b"])
def test_a_name_that_can_be_no_label_is_left_out(name: str) -> None:
    found = labels(machine(0, 1), (group(name, 2),), node_uid=UID)
    assert "hardware.nvlink.group" not in found
    assert all(LABEL_VALUE.fullmatch(value) for value in found.values())


def test_largest_group_first_of_equals() -> None:
    found = labels(machine(0), (group("a"), group("b", 3), group("c", 3)), node_uid=UID)
    assert (found["hardware.nvlink.group"], found["hardware.nvlink.groups"]) == ("b", "3")


def test_node_and_feature_file() -> None:
    assert node_labels("n1", {"a": "b"}) == {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n1", "labels": {"a": "b"}},
    }
    assert feature_file({"b": "2", "a": "1"}) == "a=1\nb=2\n"
    assert feature_file({}) == ""
