"""`rte plugin`: the device plugin alone; needs no API server."""

from __future__ import annotations

import argparse

from rte.commands.daemon import run
from rte.commands.options import add_options, configuration, files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)


def main(args: argparse.Namespace) -> int:
    return run(
        configuration(args),
        publishes=False,
        plugs=True,
        files=files(args),
        again=lambda: configuration(args),
    )
