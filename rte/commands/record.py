"""`rte record DIR`: this node as a folder of text, with ids replaced: a bug report, and a test."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from rte.commands.node import read_nvml
from rte.commands.options import add_options, configuration
from rte.config import Config
from rte.discovery.nvml_worker import NvmlUnavailable
from rte.discovery.reading import NvmlReading
from rte.kubelet.policy import PolicyError, drop_in_files, merge_patch, read_configuration
from rte.kubelet.usage import KubeletError, channel, read_allocatable, read_usage
from rte.model import Allocatable, Usage
from rte.sources.pseudonyms import Pseudonyms
from rte.sources.recorded import NVML, SYS, pack

PODRESOURCES = "podresources.json"
KUBELET = "kubelet.yaml"
ABOUT = "about.md"

ASK_S = 10.0  # for PodResources, which answers in milliseconds

# What decides placement. The rest of the kubelet's configuration is nobody's business.
KUBELET_KEYS = (
    "apiVersion",
    "cpuManagerPolicy",
    "cpuManagerPolicyOptions",
    "evictionHard",
    "featureGates",
    "kind",
    "kubeReserved",
    "memoryManagerPolicy",
    "reservedMemory",
    "reservedSystemCPUs",
    "systemReserved",
    "topologyManagerPolicy",
    "topologyManagerPolicyOptions",
    "topologyManagerScope",
)


class Recording(NamedTuple):
    """File name → text, and a line for each thing that could not be read."""

    files: Mapping[str, str]
    missing: tuple[str, ...]


class CannotRecord(Exception):
    """The folder cannot be written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="a folder that is new or empty")
    add_options(parser)


def main(args: argparse.Namespace) -> int:
    folder: Path = args.directory
    try:
        refuse_used(folder)
        recording = record(configuration(args), host_names=(os.uname().nodename, *node_names()))
        write(folder, recording.files)
    except CannotRecord as error:
        print(f"rte: {error}", file=sys.stderr)
        return 1
    for name, text in recording.files.items():
        print(f"{folder / name}: {len(text.splitlines())} lines")
    for line in recording.missing:
        print(f"not recorded: {line}", file=sys.stderr)
    print(
        "UUIDs, serial numbers, MAC addresses, GUIDs, host and pod names are replaced. "
        f"Please read the files before you send them, and say in {ABOUT} what is wrong."
    )
    return 0


def refuse_used(folder: Path) -> None:
    try:
        used = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise CannotRecord(f"{folder}: expected a new or empty folder: {error.strerror}") from error
    if used:
        raise CannotRecord(f"{folder}: expected a new or empty folder, it holds files")


def write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotRecord(f"{folder}: cannot be written: {error.strerror}") from error


def node_names() -> Iterator[str]:
    """Names that this node goes by besides the kernel's: in a pod that is the pod's."""
    yield socket.getfqdn()
    yield os.environ.get("NODE_NAME", "")


def record(config: Config, *, host_names: tuple[str, ...] = ()) -> Recording:
    """All that can be read of the node, under other names."""
    others = Pseudonyms()
    files: dict[str, str] = {}
    missing: list[str] = []
    sys_txt = pack(Path(config.host.sysfs), Path(config.host.procfs))
    missing += [line[2:] for line in sys_txt.splitlines() if line.startswith("# ")]
    files[SYS] = renamed_tree(sys_txt, others)
    try:
        files[NVML] = nvml_text(renamed_serials(read_nvml(config), others), others)
    except NvmlUnavailable as error:
        missing.append(f"{NVML}: {error}")
    try:
        files[PODRESOURCES] = podresources_text(
            *read_podresources(config), others, host_names=host_names
        )
    except KubeletError as error:
        missing.append(f"{PODRESOURCES}: {error}")
    try:
        files[KUBELET] = kubelet_text(read_kubelet(config))
    except PolicyError as error:
        missing.append(f"{KUBELET}: {error}")
    files[ABOUT] = about(files, missing)
    return Recording(files, tuple(missing))


def renamed_tree(sys_txt: str, others: Pseudonyms) -> str:
    """The tree under other names, sorted again: on Hyper-V a UUID is part of a path."""
    return "".join(f"{line}\n" for line in sorted(others.text(sys_txt).splitlines()))


def renamed_serials(reading: NvmlReading, others: Pseudonyms) -> NvmlReading:
    return msgspec.structs.replace(
        reading,
        gpus=tuple(
            msgspec.structs.replace(gpu, serial=others.name("serial", gpu.serial))
            if gpu.serial
            else gpu
            for gpu in reading.gpus
        ),
    )


def nvml_text(reading: NvmlReading, others: Pseudonyms) -> str:
    """The reading as JSON, a GPU a line: `diff` then says which GPU changed."""
    fields = msgspec.to_builtins(reading)
    gpus = fields.pop("gpus", ())
    rows = ",\n".join(f"  {msgspec.json.encode(gpu).decode()}" for gpu in gpus)
    lines = [f" {encoded(key)}:{encoded(value)}" for key, value in fields.items()]
    return others.text("{\n" + ",\n".join([*lines, f' "gpus":[\n{rows}\n ]']) + "\n}\n")


def encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


def read_podresources(config: Config) -> tuple[Usage, Allocatable]:
    with channel(config.pod_resources_socket) as kubelet:
        return read_usage(kubelet, ASK_S), read_allocatable(kubelet, ASK_S)


def podresources_text(
    usage: Usage, allocatable: Allocatable, others: Pseudonyms, *, host_names: tuple[str, ...]
) -> str:
    """Both answers as JSON, workloads under other names."""
    answers = msgspec.to_builtins({"usage": usage, "allocatable": allocatable})
    for pod in answers["usage"]["pods"]:
        name = pod["pod"]
        name["namespace"] = others.name("namespace", name["namespace"])
        name["name"] = others.name("pod", name["name"])
        for container in pod["containers"]:
            container["name"] = others.name("container", container["name"])
            # A claim is driver/pool/device, and the pool of most drivers is the node's name.
            container["claims"] = [
                others.words(claim, host_names, "host") for claim in container["claims"]
            ]
    text = msgspec.json.format(msgspec.json.encode(answers), indent=1).decode()
    return others.text(text) + "\n"


def read_kubelet(config: Config) -> Mapping[str, Any]:
    """What the kubelet's file and drop-ins say about placement. Raises PolicyError."""
    file = Path(config.kubelet.config_file or Path(config.kubelet.root_dir, "config.yaml"))
    merged: Mapping[str, Any] = read_configuration(file)
    if config.kubelet.config_dir:
        for path in drop_in_files(Path(config.kubelet.config_dir)):
            merged = merge_patch(merged, read_configuration(path))
    return {key: merged[key] for key in KUBELET_KEYS if key in merged}


def kubelet_text(configuration: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(configuration), sort_keys=True)


def about(files: Mapping[str, str], missing: list[str]) -> str:
    """A skeleton that asks for what only the person at the machine knows."""
    absent = "".join(f"- {line}\n" for line in missing) or "- nothing\n"
    return f"""# What machine this is

Vendor and model, GPUs, what runs on it.

## What is wrong

What was expected, what came, and why that is wrong.

## Where it comes from

Recorded by `rte record`: {", ".join(f"`{name}`" for name in files)}.
UUIDs, serial numbers, MAC addresses, GUIDs, host and pod names are replaced.
The same one has the same other name wherever it occurs.

Not recorded:

{absent}"""
