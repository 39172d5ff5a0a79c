"""The topology file that NCCL in the containers is given: written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from plugin.allocation import NCCL_FILE


def write_topology(text: str, folder: Path) -> bool:
    """Put the file in place at one stroke; whether it differs from what was there.

    Raises OSError when the folder, which is the host's and has to be mounted, cannot be written.
    """
    path = folder / NCCL_FILE
    try:
        if path.read_text() == text:
            return False
    except (FileNotFoundError, UnicodeDecodeError):
        pass
    temporary = folder / f".{NCCL_FILE}.{os.getpid()}"
    temporary.write_text(text)
    os.chmod(temporary, 0o644)  # containers of any user read it
    os.replace(temporary, path)
    return True
