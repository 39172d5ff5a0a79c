"""`rte release`: NVML is closed in the running daemon, and opened again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rte.commands.options import add_options, configuration
from rte.config import Duration
from rte.control import NAME, Asked, ControlError, ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, only=("stateDir",))
    parser.add_argument(
        "--for",
        dest="hold",
        metavar="DURATION",
        type=duration,
        help="how long at the most; nvml.release when it is not said",
    )
    parser.add_argument("--end", action="store_true", help="open NVML again now")
    parser.add_argument(
        "--was-reset",
        action="append",
        default=[],
        metavar="GPU",
        help="with --end: this GPU (gpu-3, its PCI address or UUID) was reset, so what events "
        "told of it is over; may be repeated",
    )


def main(args: argparse.Namespace) -> int:
    if args.was_reset and not args.end:
        sys.stderr.write("rte: --was-reset belongs to --end\n")
        return 2
    asked = Asked(
        do="end" if args.end else "release", hold_s=args.hold, was_reset=tuple(args.was_reset)
    )
    try:
        answer = ask(Path(configuration(args).state_dir, NAME), asked)
    except ControlError as error:
        sys.stderr.write(f"rte: {error}\n")
        return 1
    (sys.stdout if answer.ok else sys.stderr).write(f"{answer.says}\n")
    return 0 if answer.ok else 1


def duration(text: str) -> float:
    try:
        found = Duration.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not 0 < found <= 86400:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 24h, got {text!r}")
    return float(found)
