"""Arguments → one command. Only here does the process exit."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rte import __version__
from rte.commands.carried import with_two_dashes
from rte.config import ConfigError


class Command(NamedTuple):
    """A subcommand; its module is imported only when it is asked for."""

    help: str

    def module(self, name: str) -> str:
        return f"rte.commands.{name}"


COMMANDS = {
    "run": Command("publisher and device plugin in one process (what the DaemonSet runs)"),
    "publish": Command("the publisher alone"),
    "plugin": Command("the device plugin alone"),
    "show": Command("this node, or a recorded one, as a tree and a matrix"),
    "choose": Command("which GPUs a request would get, and why"),
    "admit": Command("what a kubelet would do with pods, and why: admitted where, or rejected"),
    "record": Command("this node as a folder of text: a bug report, and a test"),
    "release": Command("close NVML in this pod's daemon, for a GPU reset or a driver's unloading"),
    "doctor": Command("what is wrong on this node, and what to do about it, one line each"),
    "demo": Command("the whole system on a recorded machine; no GPU or cluster needed"),
    "config": Command("the effective configuration, or the reference of all options"),
}


DAEMONS = ("run", "publish", "plugin")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed, 2 asked wrongly (usage or configuration)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="rte", description="One graph of the node, for the kubelet, schedulers and people."
    )
    parser.add_argument("--version", action="version", version=f"rte {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in given if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help)
        if name == asked:
            module = importlib.import_module(command.module(name))
            module.add_arguments(sub)
    parsed = parser.parse_args(with_two_dashes(given) if asked in DAEMONS else given)
    try:
        return int(module.main(parsed))
    except ConfigError as error:
        sys.stderr.write(f"rte: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`rte show | head`): not an error, but Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
