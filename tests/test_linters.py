"""The linters are tests: one command says whether the tree is in order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gobuild import cache_folder

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["ruff", "format", "--check", "."], id="ruff format"),
        pytest.param(["ruff", "check", "."], id="ruff check"),
        pytest.param(["mypy"], id="mypy strict"),
    ],
)
def test_linter_is_content(command: list[str]) -> None:
    # What mypy knows of a file is kept by the file's content, for a clean checkout too.
    kept = {"MYPY_CACHE_DIR": str(cache_folder() / "mypy")}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, **kept},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
