"""`rte run`: publisher and device plugin in one process."""

from __future__ import annotations

import argparse
from pathlib import Path

from rte.commands.daemon import run
from rte.commands.options import add_options, configuration, files
from rte.config import dump


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--dump-config",
        action="store_true",
        help="print the effective configuration, and end",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="write the objects into a folder, not to the API server"
    )


def main(args: argparse.Namespace) -> int:
    if args.dump_config:
        print(dump(configuration(args)), end="")
        return 0
    return run(
        configuration(args),
        publishes=True,
        plugs=True,
        files=files(args),
        again=lambda: configuration(args),
        out=Path(args.out) if args.out else None,
    )
