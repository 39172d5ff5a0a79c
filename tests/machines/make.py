"""Makes `sys.txt` and `nvml.json` of the machines that nobody could record.

    python -m tests.machines.make NAME… | --all

Its inputs are the small `machine.toml` files beside the outputs; `about.md` says where their facts
come from. A machine without `machine.toml` was recorded or written by hand and is left alone, and
so is `expected/`: what the product must say of a machine is reviewed, not made here.
"""

from __future__ import annotations

import argparse

from tests.machines.description import FOLDER, describe
from tests.machines.nvml_json import nvml_reading, nvml_text
from tests.machines.sysfs_text import sys_text


def made_names() -> list[str]:
    """The machines that this program makes."""
    return sorted(path.parent.name for path in FOLDER.glob("*/machine.toml"))


def make(name: str) -> dict[str, str]:
    """File name → text, for one machine."""
    machine = describe(name)
    return {"sys.txt": sys_text(machine), "nvml.json": nvml_text(nvml_reading(machine))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="folders below tests/machines")
    parser.add_argument("--all", action="store_true", help="every machine with a machine.toml")
    arguments = parser.parse_args()
    for name in made_names() if arguments.all else arguments.name:
        for file, text in make(name).items():
            (FOLDER / name / file).write_text(text)
            print(f"{name}/{file}: {len(text) // 1024} KiB")


if __name__ == "__main__":
    main()
