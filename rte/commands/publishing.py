"""What `run` and `publish` have in common: the publisher's own arguments, and the start."""

from __future__ import annotations

import argparse
from pathlib import Path

from rte.commands.daemon import run
from rte.commands.options import add_options, configuration, files
from rte.config import dump


def add_publisher(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--dump-config",
        action="store_true",
        help="print the effective configuration, and end",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="write the objects into a folder, not to the API server"
    )


def run_publisher(args: argparse.Namespace, *, plugs: bool, oneshot: bool = False) -> int:
    """Runs the publisher, with the device plugin beside it if it `plugs`; the exit status."""
    if args.dump_config:
        print(dump(configuration(args)), end="")
        return 0
    return run(
        configuration(args),
        publishes=True,
        plugs=plugs,
        files=files(args),
        again=lambda: configuration(args),
        out=Path(args.out) if args.out else None,
        oneshot=oneshot,
    )
