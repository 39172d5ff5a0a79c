"""`python -m tests.bench [NAME [ARGUMENT…]]`: one bench, or the list of them."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

import tests.bench


def main(arguments: Sequence[str]) -> int:
    names = sorted(m.name for m in pkgutil.iter_modules(tests.bench.__path__) if m.name[0] != "_")
    if arguments and arguments[0] in names:
        return int(bench(arguments[0]).main(arguments[1:]) or 0)
    if arguments:
        print(f"no bench is called {arguments[0]!r}", file=sys.stderr)
    width = max(map(len, names))
    for name in names:
        purpose = (bench(name).__doc__ or "").partition("\n")[0]
        print(f"{name.ljust(width)}  {purpose}")
    return 2 if arguments else 0


def bench(name: str) -> ModuleType:
    return importlib.import_module(f"tests.bench.{name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
