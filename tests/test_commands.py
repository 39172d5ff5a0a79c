"""The program from outside: usage, exit codes, and documents that say what it does."""

import subprocess
import sys
from pathlib import Path

import pytest

from rte.__main__ import COMMANDS, main
from rte.commands.config import reference

ROOT = Path(__file__).parent.parent


def rte(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rte", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_reference_in_the_documents_is_the_programs() -> None:
    document = (ROOT / "docs/configuration.md").read_text()
    assert document.endswith(reference()), (
        "docs/configuration.md differs; replace its table by the output of rte config --reference"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    assert COMMANDS[command].split("(")[0].strip()[:20] in capsys.readouterr().out


def test_a_configuration_error_ends_the_start_and_names_the_key(tmp_path: Path) -> None:
    file = tmp_path / "rte.yaml"
    file.write_text("nrt: {detial: gpu}")
    done = rte("config", "--config", str(file))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"rte: {file}: nrt.detial: no such option; did you mean nrt.detail?\n"


def test_a_boolean_flag_alone_means_true_and_a_value_is_understood() -> None:
    assert "passDeviceSpecs: true" in rte("config", "--pass-device-specs").stdout
    assert "publish: false" in rte("config", "--publish=false").stdout


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m rte config --reference | head -n 1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


def test_no_command_is_a_usage_error() -> None:
    done = rte()
    assert done.returncode == 2
    assert "COMMAND" in done.stderr
