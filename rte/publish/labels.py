"""The labels that say of a node what schedulers and people select by.

A label follows the hardware, not its use. Values that cannot be labels are left out, never bent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from rte.graph.groups import Group
from rte.model import Machine

# Kubernetes' rules for the values and the keys of labels.
LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_DNS = "[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
LABEL_KEY = re.compile(rf"(?:(?=.{{1,253}}/){_DNS}(?:\.{_DNS})*/)?{LABEL_VALUE.pattern}")


class Label(StrEnum):
    """What can be said; the value is the default key."""

    GROUPS = "hardware.nvlink.groups"
    """Number of NVLink groups."""
    GROUP = "hardware.nvlink.group"
    """Name of the largest group; of equal ones the first in PCI order."""
    GROUP_SIZE = "hardware.nvlink.group-size"
    SHAPE = "hardware.nvlink.shape"
    DOMAIN = "hardware.nvlink.domain"
    """`<cluster UUID>.<clique>`, on fabrics of several nodes once they are complete."""
    PER_NUMA = "hardware.gpu.per-numa"
    """GPUs of each NUMA node with CPUs, in their order: `4-4`."""
    TOPOLOGY = "topology.kubernetes.io/nvlink-group"
    """A topology key: equal on two nodes only if their GPUs are one NVLink domain."""


DEFAULT_KEYS: Mapping[Label, str] = {
    label: label.value for label in Label if label is not Label.TOPOLOGY
}


def labels(
    machine: Machine,
    groups: Sequence[Group],
    *,
    node_uid: str | None,
    keys: Mapping[Label, str] = DEFAULT_KEYS,
) -> dict[str, str]:
    """Key → value, sorted. `keys` has the key of each label that is wanted.

    Without `node_uid` the topology key is left out where the value would need it.
    """
    values = {label: value for label, value in said(machine, groups, node_uid).items() if value}
    return {
        key: values[label]
        for label, key in sorted(keys.items(), key=lambda item: item[1])
        if key and label in values and LABEL_VALUE.fullmatch(values[label])
    }


def said(
    machine: Machine, groups: Sequence[Group], node_uid: str | None
) -> dict[Label, str | None]:
    found: dict[Label, str | None] = {Label.PER_NUMA: per_numa(machine)}
    if not machine.gpus:
        return found
    found[Label.GROUPS] = str(len(groups))
    if not groups:
        return found
    largest = max(groups, key=lambda group: len(group.gpus))  # the first of the largest
    found |= {
        Label.GROUP: largest.name,
        Label.GROUP_SIZE: str(len(largest.gpus)),
        Label.SHAPE: largest.shape.value,
        Label.DOMAIN: largest.domain,
        Label.TOPOLOGY: largest.domain,
    }
    if largest.domain is None and node_uid is not None:
        # A group's name alone would join nodes that share no link.
        found[Label.TOPOLOGY] = f"{node_uid.replace('-', '')[:8]}.{largest.name}"
    return found


def per_numa(machine: Machine) -> str | None:
    """None when a GPU's node is unknown: a part of the truth would be taken for all of it."""
    if not machine.gpus:
        return None
    functions = {function.address: function.numa for function in machine.pci}
    nodes = [functions.get(gpu.pci) for gpu in machine.gpus]
    with_cpus = [node.id for node in machine.numa_nodes if node.cpus]
    if any(node not in with_cpus for node in nodes):
        return None
    return "-".join(str(nodes.count(node)) for node in with_cpus)


def node_labels(node_name: str, found: Mapping[str, str]) -> dict[str, Any]:
    """The Node as its labels are applied to it."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node_name, "labels": dict(found)},
    }


def feature_file(found: Mapping[str, str]) -> str:
    """The labels as a feature file of Node Feature Discovery's local source.

    NFD writes keys without a prefix as feature.node.kubernetes.io/<key>, and refuses other
    prefixes of kubernetes.io unless it is configured to take them.
    """
    return "".join(f"{key}={value}\n" for key, value in sorted(found.items()))
