"""`rte plugin`: the device plugin alone; needs no API server."""

from __future__ import annotations

import argparse
from pathlib import Path

from rte.commands.daemon import run
from rte.commands.options import add_options, configuration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)


def main(args: argparse.Namespace) -> int:
    return run(
        configuration(args),
        publishes=False,
        plugs=True,
        file=Path(args.config) if args.config else None,
        out=None,
    )
