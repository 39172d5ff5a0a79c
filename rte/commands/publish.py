"""`rte publish`: the publisher alone."""

from __future__ import annotations

import argparse

from rte.commands.publishing import add_publisher, run_publisher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_publisher(parser)
    parser.add_argument(
        "--oneshot", action="store_true", help="publish once, and end; the exit status says whether"
    )


def main(args: argparse.Namespace) -> int:
    return run_publisher(args, plugs=False, oneshot=args.oneshot)
