"""`rte config`: the effective configuration, or the reference of all options."""

from __future__ import annotations

import argparse

from rte.commands.options import add_options, configuration
from rte.config import Option, dump, options, type_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reference", action="store_true", help="all options as the table of docs/configuration.md"
    )
    add_options(parser)


def main(args: argparse.Namespace) -> int:
    if args.reference:
        print(reference(), end="")
    else:
        print(dump(configuration(args)), end="")
    return 0


def reference() -> str:
    """A Markdown table with a row an option."""
    rows = ["| key | type | default | variable | flag | meaning |", "|---|---|---|---|---|---|"]
    rows += [
        f"| `{o.key}` | {type_name(o)} | {default(o)} | {code(o.envs)} | {code(o.flags)} "
        f"| {o.description} |"
        for o in options()
    ]
    return "\n".join(rows) + "\n"


def default(option: Option) -> str:
    value = option.default
    if type_name(option) == "duration":
        return f"{value:g}s"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value in ("", (), {}):
        return ""
    return f"`{', '.join(value) if isinstance(value, tuple) else value}`"


def code(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)
