"""Arguments → one command. Only here does the process exit."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from rte import __version__
from rte.commands.carried import with_two_dashes
from rte.config import ConfigError

# A module of rte.commands each, imported only when it is asked for.
COMMANDS = {
    "run": "publisher and device plugin in one process (what the DaemonSet runs)",
    "publish": "the publisher alone",
    "plugin": "the device plugin alone",
    "show": "this node, or a recorded one, as a tree and a matrix",
    "choose": "which GPUs a request would get, and why",
    "admit": "what a kubelet would do with pods, and why: admitted where, or rejected",
    "record": "this node as a folder of text: a bug report, and a test",
    "release": "close NVML in this pod's daemon, for a GPU reset or a driver's unloading",
    "doctor": "what is wrong on this node, and what to do about it, one line each",
    "demo": "the whole system on a recorded machine; no GPU or cluster needed",
    "config": "the effective configuration, or the reference of all options",
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
    for name, does in COMMANDS.items():
        sub = commands.add_parser(name, help=does, description=does)
        if name == asked:
            module = importlib.import_module(f"rte.commands.{name}")
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
