"""What `run` and `publish` have in common: the publisher's own arguments, and the start."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rte import __version__
from rte.commands.daemon import run
from rte.commands.options import add_options, configuration, files
from rte.config import ConfigError, dump

AND_EXIT = ".andexit"  # the words of resource-topology-exporter


def dump_to(where: str, text: str) -> None:
    """Raises ConfigError where it is a file that cannot be written."""
    if where in ("-", AND_EXIT):
        print(text, end="", flush=True)
    elif where == ".log":
        sys.stderr.write(text)
    else:
        try:
            Path(where).write_text(text)
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise ConfigError("", f"--dump-config {where}", problem) from error


def add_publisher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"rte {__version__}")
    add_options(parser)
    parser.add_argument(
        "--dump-config",
        nargs="?",
        const=AND_EXIT,
        default="",
        metavar="WHERE",
        help="print the effective configuration, and end; or say where it goes and go on: "
        "- for standard output, .log, or a file",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="write the objects into a folder, not to the API server"
    )


def run_publisher(args: argparse.Namespace, *, plugs: bool, oneshot: bool = False) -> int:
    """Runs the publisher, with the device plugin beside it if it `plugs`; the exit status."""
    config = configuration(args)
    if args.dump_config:
        dump_to(args.dump_config, dump(config))
    if args.dump_config == AND_EXIT:
        return 0
    return run(
        config,
        publishes=True,
        plugs=plugs,
        files=files(args),
        again=lambda: configuration(args),
        out=Path(args.out) if args.out else None,
        oneshot=oneshot,
    )
