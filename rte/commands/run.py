"""`rte run`: publisher and device plugin in one process."""

from __future__ import annotations

import argparse

from rte.commands.publishing import add_publisher, run_publisher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_publisher(parser)


def main(args: argparse.Namespace) -> int:
    return run_publisher(args, plugs=True)
