"""Where a command's machine comes from: this node, a recorded one, or what others wrote."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from rte import sources
from rte.commands.node import overrides, read_nvml
from rte.commands.options import add_options, configuration
from rte.config import Config
from rte.discovery import assemble, overridden
from rte.discovery.nvml_worker import NvmlUnavailable
from rte.discovery.reading import NvmlReading
from rte.discovery.sysfs import SysfsError, read_host
from rte.graph.build import Graph, build
from rte.graph.groups import Group, groups
from rte.model import Machine
from rte.sources import MAX_BYTES, UNDERSTOOD, SourceError, parse_source
from rte.sources.recorded import NVML
from rte.sources.recorded import read_nvml as read_recorded_nvml

OPTIONS = ("driver", "host.sysfs", "host.procfs", "nvml.")
"""What says how this node is read."""


class CannotRead(Exception):
    """There is no machine where one was asked for: what was asked, what came back, what to do."""


class Source(NamedTuple):
    graph: Graph
    groups: tuple[Group, ...]
    nvml: NvmlReading | None  # what NVML said, of this node and of recorded ones


def add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        help=f"{UNDERSTOOD}; - is standard input; without one it is this node",
    )
    add_options(parser, only=OPTIONS)


def read_source(args: argparse.Namespace) -> Source:
    """The graph of what the arguments name. Raises CannotRead and ConfigError."""
    config = configuration(args)
    if args.source:
        machine, nvml = overridden(read_any(args.source), overrides(config)), recorded(args.source)
    else:
        machine, nvml = read_node(config)
    graph = build(machine, compute_nics=config.nics.compute)
    try:
        found = groups(graph, by=config.groups.by, names=config.groups.names)
        return Source(graph, found, nvml)
    except ValueError as error:
        raise CannotRead(str(error)) from error


def read_any(source: str) -> Machine:
    """The machine of a folder, a file or - for standard input. Raises CannotRead."""
    try:
        if source == "-":
            return parse_source(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input")
        return sources.read_source(Path(source))
    except SourceError as error:
        raise CannotRead(str(error)) from error


def recorded(source: str) -> NvmlReading | None:
    """NVML's answers of a source that could be read, where it is a recorded folder."""
    folder = Path(source)
    return read_recorded_nvml(folder / NVML) if source != "-" and folder.is_dir() else None


def read_folder(folder: Path) -> Machine:
    if not folder.is_dir():
        raise CannotRead(
            f"{folder}: expected a folder that `rte record` wrote, "
            f"{'it is a file' if folder.exists() else 'there is none'}"
        )
    return read_any(str(folder))


def read_node(config: Config) -> tuple[Machine, NvmlReading | None]:
    """This node, and what NVML says. Raises CannotRead."""
    try:
        host = read_host(Path(config.host.sysfs), proc=Path(config.host.procfs))
    except SysfsError as error:
        raise CannotRead(
            f"{error}; host.sysfs (--sysfs) says where the host's /sys is mounted"
        ) from error
    for problem in host.problems:
        print(f"rte: {problem}", file=sys.stderr)
    nvml = ask_nvml(config)
    return assemble(host, nvml, overrides=overrides(config)), nvml


def ask_nvml(config: Config) -> NvmlReading | None:
    """What the driver says; None, and a line on standard error, when it says nothing."""
    try:
        return read_nvml(config)
    except NvmlUnavailable as error:
        print(
            f"rte: nothing from the NVIDIA driver: {error}\n"
            "rte: what follows is what the kernel alone knows",
            file=sys.stderr,
        )
        return None
