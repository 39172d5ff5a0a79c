"""`rte publish`: the publisher alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from rte.commands.daemon import run
from rte.commands.options import add_options, configuration, files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--out", metavar="DIR", help="write the objects into a folder, not to the API server"
    )


def main(args: argparse.Namespace) -> int:
    return run(
        configuration(args),
        publishes=True,
        plugs=False,
        files=files(args),
        again=lambda: configuration(args),
        out=Path(args.out) if args.out else None,
    )
