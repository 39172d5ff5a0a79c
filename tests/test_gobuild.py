"""That the Go programs are formatted, and built when they have to be and no oftener."""

import subprocess
from pathlib import Path

import pytest

from tests import gobuild


@pytest.mark.usefixtures("go_program")
def test_go_is_formatted() -> None:
    root = Path(gobuild.run_go(gobuild.toolchain()[0], "env", "GOROOT").strip())
    sources = sorted(str(path) for path in gobuild.MODULE.glob("*/*.go"))
    command = [str(root / "bin" / "gofmt"), "-l", *sources]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs come from a folder and are kept in it; what Go itself has compiled stays known."""
    compiled = gobuild.run_go(gobuild.toolchain()[0], "env", "GOCACHE").strip()
    monkeypatch.setenv("GOCACHE", compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(gobuild, "MODULE", folder)


@pytest.mark.usefixtures("go_program")
def test_a_program_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)
    (tmp_path / "go.mod").write_text("module test\n\ngo 1.26.0\n")
    (tmp_path / "go.sum").touch()
    (tmp_path / "hello").mkdir()
    source = tmp_path / "hello" / "main.go"
    source.write_text('package main\n\nfunc main() { println("one") }\n')
    reports: list[str] = []

    def says() -> str:
        path = gobuild.program("hello", reports.append)
        return subprocess.run([path], capture_output=True, text=True, check=True).stderr

    assert [says(), says()] == ["one\n", "one\n"]
    assert sum(line.startswith("built") for line in reports) == 1
    source.write_text(source.read_text().replace("one", "two"))
    assert says() == "two\n"
    source.write_text("package main\n\nfunc main() { nonsense }\n")
    with pytest.raises(gobuild.GoBuildError, match="undefined: nonsense"):
        says()
    assert [p.name for p in (tmp_path / "cache" / "rte-tests").glob("hello-*.*")] == []


@pytest.mark.usefixtures("go_program")
def test_a_folder_that_is_a_module_is_built_by_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch)
    (tmp_path / "go.mod").write_text("module test\n\ngo 1.26.0\n")
    own = tmp_path / "hello"
    own.mkdir()
    (own / "go.mod").write_text("module test/hello\n\ngo 1.26.0\n")
    for folder in (tmp_path, own):
        (folder / "go.sum").touch()
    (own / "main.go").write_text('package main\n\nfunc main() { println("one") }\n')
    reports: list[str] = []

    def builds() -> int:
        gobuild.program("hello", reports.append)
        return sum(line.startswith("built") for line in reports)

    assert builds() == 1
    (tmp_path / "go.mod").write_text("module test\n\ngo 1.26.1\n")
    assert builds() == 1
    (own / "go.mod").write_text("module test/hello/2\n\ngo 1.26.0\n")
    assert builds() == 2


def test_the_version_in_a_program_is_the_one_of_its_module() -> None:
    said = {name: gobuild.flags(name)[1] for name in ("kubelet", "scheduler")}
    assert "gitVersion=v1.37." in said["kubelet"]
    assert "gitVersion=v1.34." in said["scheduler"]


@pytest.mark.parametrize(
    ("older", "newer"), [("1.25.9", "1.26.0"), ("1.9", "1.26.0"), ("1.26.0", "1.26.8")]
)
def test_versions_are_compared_as_numbers(older: str, newer: str) -> None:
    assert gobuild.numbers(older) < gobuild.numbers(newer)
