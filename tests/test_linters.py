"""The linters are tests: one command says whether the tree is in order."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
