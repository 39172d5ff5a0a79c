"""The configuration as command-line options, for the commands that take it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rte.commands.carried import add_carried, carried
from rte.config import Config, load, options, type_name


def add_options(parser: argparse.ArgumentParser, *, only: tuple[str, ...] = ("",)) -> None:
    """--config and a flag for each option that has one and whose key starts with one of `only`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=os.environ.get("RTE_CONFIG"),
        help="configuration file (YAML); also RTE_CONFIG",
    )
    parser.add_argument(
        "--config-file",
        metavar="FILE",
        default=os.environ.get("CONFIG_FILE"),
        help="a second configuration file, which wins, such as that of NVIDIA's device plugin; "
        "also CONFIG_FILE",
    )
    publishes = "nrt.".startswith(only)
    add_carried(parser, publishes=publishes)
    if publishes:
        parser.add_argument(
            "--no-publish",
            dest="nrt.publish",
            action="store_const",
            const="false",
            default=argparse.SUPPRESS,
            help="the same as --publish=false",
        )
    for option in options():
        if option.flag is None or not option.key.startswith(only):
            continue
        # A boolean flag alone means true, as in the peers' manifests.
        optional = {"nargs": "?", "const": "true"} if type_name(option) == "boolean" else {}
        parser.add_argument(
            *option.flags,
            dest=option.key,
            metavar="BOOL" if optional else "VALUE",
            default=argparse.SUPPRESS,
            help=f"{option.description} ({option.key})".replace("%", "%%"),
            **optional,  # type: ignore[arg-type]
        )


def configuration(args: argparse.Namespace) -> Config:
    """The effective configuration; raises ConfigError."""
    given = vars(args)
    flags = {option.key: given[option.key] for option in options() if option.key in given}
    return load(
        file=Path(args.config) if args.config else None,
        over=Path(args.config_file) if args.config_file else None,
        flags={**flags, **carried(given)},
    )


def files(args: argparse.Namespace) -> tuple[Path, ...]:
    """The configuration files."""
    return tuple(Path(name) for name in (args.config, args.config_file) if name)
