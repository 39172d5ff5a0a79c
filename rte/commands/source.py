"""Where a command's machine comes from: this node, or a recorded one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from rte.commands.options import add_options, configuration
from rte.config import Config
from rte.discovery import Overrides, assemble
from rte.discovery.nvml_worker import NvmlUnavailable, NvmlWorker
from rte.discovery.reading import NvmlReading
from rte.discovery.sysfs import SysfsError, read_host
from rte.graph.build import Graph, build
from rte.graph.groups import Group, groups
from rte.model import Machine, NumaId, pci_address
from rte.sources.recorded import RecordedError, read_recorded


class CannotRead(Exception):
    """There is no machine where one was asked for: what was asked, what came back, what to do."""


class Source(NamedTuple):
    graph: Graph
    groups: tuple[Group, ...]


def add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        help="a folder that `rte record` wrote; without one it is this node",
    )
    parser.add_argument(
        "--nvml-timeout",
        metavar="SECONDS",
        type=float,
        default=20.0,
        help="how long this node's NVIDIA driver may take to answer (default: 20)",
    )
    add_options(parser)


def read_source(args: argparse.Namespace) -> Source:
    """The graph of what the arguments name. Raises CannotRead and ConfigError."""
    config = configuration(args)
    machine = (
        read_folder(Path(args.source))
        if args.source
        else read_node(config, nvml_timeout_s=args.nvml_timeout)
    )
    graph = build(machine, compute_nics=config.nics.compute)
    try:
        return Source(graph, groups(graph, by=config.groups.by, names=config.groups.names))
    except ValueError as error:
        raise CannotRead(str(error)) from error


def read_folder(folder: Path) -> Machine:
    if not folder.is_dir():
        raise CannotRead(
            f"{folder}: expected a folder that `rte record` wrote, "
            f"{'it is a file' if folder.exists() else 'there is none'}"
        )
    try:
        return read_recorded(folder)
    except (RecordedError, SysfsError) as error:
        raise CannotRead(str(error)) from error


def read_node(config: Config, *, nvml_timeout_s: float) -> Machine:
    try:
        host = read_host(Path(config.host.sysfs), proc=Path(config.host.procfs))
    except SysfsError as error:
        raise CannotRead(
            f"{error}; host.sysfs (--sysfs) says where the host's /sys is mounted"
        ) from error
    for problem in host.problems:
        print(f"rte: {problem}", file=sys.stderr)
    overrides = Overrides(
        numa={pci_address(a): NumaId(n) for a, n in config.numa.overrides.items()}
    )
    return assemble(host, read_nvml(config, timeout_s=nvml_timeout_s), overrides=overrides)


def read_nvml(config: Config, *, timeout_s: float) -> NvmlReading | None:
    """What the driver says; None, and a line on standard error, when it says nothing."""
    folders = (Path(config.nvml.library),) if config.nvml.library else ()
    worker = NvmlWorker(on_event=lambda event: None, library_folders=folders)
    try:
        return worker.reading(timeout_s=timeout_s)
    except NvmlUnavailable as error:
        print(
            f"rte: nothing from the NVIDIA driver: {error}\n"
            "rte: what follows is what the kernel alone knows",
            file=sys.stderr,
        )
        return None
    finally:
        worker.stop()
