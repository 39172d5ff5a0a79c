"""`rte admit [SOURCE] POD.yaml…`: what a kubelet would do with these pods, in this order."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plugin.decisions import Decision
from rte.commands import decided
from rte.commands.admit_node import AdmitNode, Answer, WouldNotStart, free_by_node
from rte.commands.aligning import kubelet_configuration
from rte.commands.manifests import Given, ManifestError, is_manifest, read_manifests
from rte.commands.options import add_options, configuration
from rte.commands.record import KUBELET
from rte.commands.show import json_text
from rte.commands.source import OPTIONS, CannotRead, Source, read_source
from rte.commands.telling import Teller
from rte.discovery.faults import FaultMemory, faults
from rte.kubelet.admission import Admitted, not_followed
from rte.kubelet.policy import (
    CpuManagerPolicy,
    MemoryManagerPolicy,
    PolicyError,
    read_configuration,
)
from rte.model import ContainerUse, Scope, TopologyManagerPolicy, parse_ranges, ranges
from rte.sources import UNDERSTOOD
from rte.view.ink import Ink
from rte.view.reason import names, part_name
from rte.view.text import summary
from rte.view.words import counted

DEFAULTS = "the command line and its defaults"


class Wrong(Exception):
    """Something that was given cannot be used; the message says what."""


class Kubelet(NamedTuple):
    """A KubeletConfiguration's fields and where they are from."""

    configuration: Mapping[str, Any]
    where: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # One list, as only the first file's content says whether it is a machine or a pod.
    parser.add_argument(
        "given",
        metavar="POD.yaml",
        nargs="+",
        help=f"the first one may be SOURCE: {UNDERSTOOD}; - is standard input; without one it is "
        "this node. The pods are admitted in their order, on a node without others",
    )
    parser.add_argument(
        "--policy",
        choices=[policy.value for policy in TopologyManagerPolicy],
        help="Topology Manager policy (default: what the kubelet's configuration says, "
        "without one single-numa-node)",
    )
    parser.add_argument(
        "--scope",
        choices=[scope.value for scope in Scope],
        help="Topology Manager scope (default: as above, else container)",
    )
    parser.add_argument(
        "--cpu-manager",
        choices=[policy.value for policy in CpuManagerPolicy],
        help="CPU Manager policy (default: as above, else static with full-pcpus-only)",
    )
    parser.add_argument(
        "--memory-manager",
        choices=[policy.value for policy in MemoryManagerPolicy],
        help="Memory Manager policy (default: as above, else Static)",
    )
    parser.add_argument(
        "--reserved-cpus",
        metavar="CPUS",
        help="CPUs that no pod gets, such as 0,64 (default: as above, else the first core)",
    )
    parser.add_argument(
        "--kubelet-config",
        metavar="FILE",
        type=Path,
        help=f"a KubeletConfiguration (default: a recorded folder's {KUBELET})",
    )
    parser.add_argument(
        "-o", "--output", choices=["text", "json"], default="text", help="for people or programs"
    )
    parser.usage = "%(prog)s [-h] [options] [SOURCE] POD.yaml ..."
    add_options(parser, only=(*OPTIONS, "devices.migStrategy", "devices.sharedAllocation"))


def main(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="rte: %(message)s", stream=sys.stderr)
    try:
        args.source, manifests = parted(args.given)
        pods = read_manifests(manifests)
        source = read_source(args)
        node = node_of(source, args)
    except (CannotRead, ManifestError, PolicyError, WouldNotStart, Wrong) as error:
        print(f"rte admit: {error}", file=sys.stderr)
        return 2
    show = admit_json if args.output == "json" else admit_text
    return 0 if show(node, pods) else 1


def parted(given: Sequence[str]) -> tuple[str | None, list[Path]]:
    """The source, and the manifests: a first file that is no manifest is the source.

    Raises Wrong when no manifest is left.
    """
    first, *rest = given
    if not rest and (first == "-" or Path(first).is_dir()):
        raise Wrong(f"{first}: expected at least one POD.yaml after it")
    if rest and not is_manifest(Path(first)):
        return first, list(map(Path, rest))
    return None, list(map(Path, given))


def node_of(source: Source, args: argparse.Namespace) -> AdmitNode:
    """Raises PolicyError, WouldNotStart, ConfigError and Wrong."""
    machine = source.graph.machine
    kubelet = kubelet_of(source, args)
    found = faults(FaultMemory(), machine, source.nvml)
    return AdmitNode(
        source.graph, found, configuration(args), kubelet.configuration, where=kubelet.where
    )


def kubelet_of(source: Source, args: argparse.Namespace) -> Kubelet:
    """The file's configuration, or one that aligns all it can, with what the flags say instead.

    Raises PolicyError and Wrong.
    """
    file: Path | None = args.kubelet_config
    if file is None and args.source is not None and args.source != "-":
        recorded = Path(args.source) / KUBELET
        file = recorded if recorded.is_file() else None
    if file is None:
        aligning = kubelet_configuration(
            source.graph.machine,
            policy=TopologyManagerPolicy.SINGLE_NUMA_NODE.value,
            scope=Scope.CONTAINER.value,
        )
        kubelet = Kubelet(aligning, DEFAULTS)
    else:
        kubelet = Kubelet(read_configuration(file), os.path.relpath(file))
    if args.reserved_cpus is not None:
        try:
            parse_ranges(args.reserved_cpus)
        except ValueError as error:
            raise Wrong(f"--reserved-cpus: {error}") from error
    flags = {
        "topologyManagerPolicy": args.policy,
        "topologyManagerScope": args.scope,
        "cpuManagerPolicy": args.cpu_manager,
        "memoryManagerPolicy": args.memory_manager,
        "reservedSystemCPUs": args.reserved_cpus,
    }
    stated = {key: value for key, value in flags.items() if value is not None}
    return Kubelet({**kubelet.configuration, **stated}, kubelet.where)


# For people


def admit_text(node: AdmitNode, pods: Sequence[Given]) -> bool:
    """Admits the pods and tells of each; whether all were admitted."""
    ink = Ink(sys.stdout)
    tell = Teller(ink, node.graph, lambda: node.state)
    head(node, ink)
    rejected = []
    for pod in pods:
        answer = node.admit(pod.spec)
        tell.head(pod.spec)
        if isinstance(answer.answer, Admitted):
            tell.placed(pod.spec, answer.answer)
        else:
            tell.rejected(pod.spec, answer.answer, free_by_node(answer.before))
            tell.unregistered(pod.spec)
            rejected.append(pod.spec.pod.name)
        if answer.undecided:
            ink.labelled("not decided", f"{', '.join(answer.undecided)}: see above")
        for decision in answer.decisions:
            tell.decided(decision, answer.free)
    ink.line()
    words = f"{len(pods) - len(rejected)} of {counted(len(pods), 'pod')} admitted"
    ink.line((f"{words}; rejected: {', '.join(rejected)}" if rejected else words, "bold"))
    return not rejected


def head(node: AdmitNode, ink: Ink) -> None:
    """The machine, the kubelet's policies, its devices, and what is not decided."""
    for number, line in enumerate(summary(node.graph.machine)):
        ink.labelled("" if number else "machine", line)
    ink.labelled("kubelet", f"decides as Kubernetes 1.37; policies from {node.where}")
    ink.labelled("", "; ".join(policy_words(node)))
    for words in not_followed(node.policy):
        ink.labelled("", f"not followed: {words}")
    for resource, ids in sorted(node.state.devices.items()):
        well = sum((resource, id) not in node.state.unhealthy for id in ids)
        places = sorted(set(ids.values()))
        by_place = ", ".join(
            f"{sum(numa == place for numa in ids.values())} {place_words(place)}"
            for place in places
        )
        ill = f", {well} healthy" if well < len(ids) else ""
        ink.labelled("devices", f"{counted(len(ids), resource, resource)}: {by_place}{ill}")
    if not node.state.devices:
        ink.labelled("devices", "no GPU to advertise here")
    for number, unknown in enumerate(node.undecided):
        ink.labelled("" if number else "not decided", f"{unknown.of}: {unknown.why}")


def place_words(numa: Sequence[int]) -> str:
    if not numa:
        return "without NUMA node"
    return f"in NUMA node{'s' if len(numa) > 1 else ''} {ranges(numa)}"


def policy_words(node: AdmitNode) -> list[str]:
    """Each manager with its policy, and whether it could be followed."""
    policy, left_out = node.policy, {unknown.of for unknown in node.undecided}

    def said(words: str, of: str, *, idle: bool) -> str:
        return f"{words} (not decided)" if of in left_out and not idle else words

    manager = policy.topology_manager
    topology = f"Topology Manager {manager.value}, scope {policy.scope.value}"
    cpus = f"CPU Manager {policy.cpu_manager}"
    if policy.cpu_manager == "static":
        cpus += "".join(
            f" with {name}" if value == "true" else f" with {name}={value}"
            for name, value in policy.cpu_manager_options.items()
        )
        if policy.reserved_cpus:
            cpus += f", CPUs {ranges(policy.reserved_cpus)} reserved"
    memory = f"Memory Manager {policy.memory_manager}"
    return [
        said(topology, "alignment", idle=manager is TopologyManagerPolicy.NONE),
        said(cpus, "cpu", idle=policy.cpu_manager == "none"),
        said(memory, "memory", idle=policy.memory_manager == "None"),
    ]


# For programs


def admit_json(node: AdmitNode, pods: Sequence[Given]) -> bool:
    """Admits the pods and prints one document; whether all were admitted."""
    document = node_document(node)
    answers = [node.admit(pod.spec) for pod in pods]
    all_admitted = all(isinstance(answer.answer, Admitted) for answer in answers)
    document["admitted"] = all_admitted
    document["pods"] = [pod_document(node, answer) for answer in answers]
    print(json_text(document), end="")
    return all_admitted


def node_document(node: AdmitNode) -> dict[str, Any]:
    policy, name_of = node.policy, names(node.graph)
    return {
        "kubelet": {
            "from": node.where,
            "topology_manager": policy.topology_manager.value,
            "scope": policy.scope.value,
            "cpu_manager": policy.cpu_manager,
            "cpu_manager_options": dict(policy.cpu_manager_options),
            "memory_manager": policy.memory_manager,
            "reserved_cpus": list(policy.reserved_cpus),
            "reserved_memory": [
                {"numa_node": numa, "limits": dict(limits)}
                for numa, limits in sorted(policy.reserved_memory.items())
            ],
            "not_followed": list(not_followed(policy)),
        },
        "not_decided": [{"of": unknown.of, "why": unknown.why} for unknown in node.undecided],
        "devices": [
            {
                "resource": resource,
                "id": id,
                "name": part_name(id, name_of),
                "numa_nodes": list(numa),
                "healthy": (resource, id) not in node.state.unhealthy,
            }
            for resource, ids in sorted(node.state.devices.items())
            for id, numa in ids.items()
        ],
    }


def pod_document(node: AdmitNode, answer: Answer) -> dict[str, Any]:
    """One pod; a rejected one has reason and message, an admitted one its containers."""
    spec, found = answer.spec, answer.answer
    is_admitted = isinstance(found, Admitted)
    return {
        "namespace": spec.pod.namespace,
        "name": spec.pod.name,
        "qos": spec.qos,
        "admitted": is_admitted,
        "reason": None if isinstance(found, Admitted) else found.reason,
        "message": None if isinstance(found, Admitted) else found.message,
        "containers": [container_document(node, found, use) for use in found.containers]
        if isinstance(found, Admitted)
        else [],
        "not_decided": list(answer.undecided),
        "not_registered": list(answer.unregistered),
        "decisions": [decision_document(decision) for decision in answer.decisions],
        "free_before": [
            {"numa_node": int(name.removeprefix("node-")), "resources": dict(free)}
            for name, free in free_by_node(answer.before).items()
        ],
    }


def container_document(node: AdmitNode, found: Admitted, use: ContainerUse) -> dict[str, Any]:
    name_of, position = names(node.graph), node.graph.position
    affinity = found.affinity.get(use.name)
    return {
        "name": use.name,
        "affinity": None if affinity is None else list(affinity),
        # In PCI order, as everywhere else.
        "devices": [
            {
                "resource": device.resource,
                "id": device.id,
                "name": part_name(device.id, name_of),
                "numa_nodes": list(device.numa),
            }
            for device in sorted(use.devices, key=lambda d: (d.resource, position.get(d.id, 0)))
        ],
        "cpus": list(use.cpus),
        "memory": [
            {"type": block.type, "bytes": block.size_bytes, "numa_nodes": list(block.numa)}
            for block in use.memory
        ],
    }


def decision_document(decision: Decision) -> dict[str, Any]:
    """As /decisions has it, without what differs from run to run."""
    found = decided.document(decision)
    return {
        key: found[key]
        for key in found
        if key not in {"number", "at", "took_s", "pod", "container"}
    }
