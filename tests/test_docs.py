"""That the documents do not lie about what can be checked: paths, commands, options."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rte.__main__ import COMMANDS, main
from rte.config import options

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OUR_PATH = re.compile(r"(?<![\w./-])(?:crds|deploy|docs|plugin|rte|tests|\.ci)/[\w./*-]*")

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)


def prose(document: Path) -> str:
    return FENCE.sub("", document.read_text())


def code(document: Path) -> Iterator[str]:
    """Code spans and the lines of code blocks."""
    yield from SPAN.findall(prose(document))
    for block in FENCE.findall(document.read_text()):
        yield from block.splitlines()[1:-1]


def anchors(document: Path) -> set[str]:
    """The anchors that a Markdown page gives its headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def is_placeholder(path: str) -> bool:
    """tests/machines/NAME, crds/X/…: a word in capitals stands for something."""
    return any(part.isupper() for part in Path(path).parts)


@every_document
def test_relative_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{document.name} links to {link}"


@every_document
def test_paths_in_code_exist(document: Path) -> None:
    for text in code(document):
        for path in OUR_PATH.findall(text):
            if not is_placeholder(path):
                assert any(ROOT.glob(path.rstrip("/."))), f"{document.name} names {path}"


@every_document
def test_commands_are_the_programs(document: Path) -> None:
    for text in code(document):
        for command in re.findall(r"(?:^|(?<!-n)[ /])rte ([a-z]+)", text):
            assert command in COMMANDS, f"{document.name} has `rte {command}`"


@every_document
def test_what_a_command_is_shown_to_print_is_what_it_prints(
    document: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`…` stands for lines that are left out."""
    monkeypatch.chdir(ROOT)
    for block in FENCE.findall(document.read_text()):
        command, *shown = block.splitlines()[1:-1] or [""]
        if not command.startswith("$ rte ") or not shown or shown[0].startswith("$"):
            continue
        main(shlex.split(command)[2:])
        printed = iter(capsys.readouterr().out.splitlines())
        for line in shown:
            if line != "…":
                assert line in printed, f"{document.name}: {command} does not print {line!r}"


@every_document
def test_options_are_the_programs(document: Path) -> None:
    known = {option.key for option in options()}
    sections = {key.rsplit(".", 1)[0] for key in known if "." in key}
    roots = "|".join({section.split(".")[0] for section in sections})
    for text in SPAN.findall(prose(document)):
        match = re.match(rf"((?:{roots})\.[A-Za-z.]+)(?![\w/-])", text)
        if match and Path(match[1]).suffix not in {".json", ".md", ".py", ".yaml"}:
            assert match[1] in known | sections, f"{document.name} has `{text}`"


@pytest.mark.parametrize(
    "document",
    [*DOCUMENTS, *sorted(p for p in (ROOT / "deploy").rglob("*") if p.is_file())],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_nothing_is_said_of_one_machine_or_one_registry(document: Path) -> None:
    text = document.read_text()
    assert not re.findall(r"(?<![\w.-])/(?:work|home|root|Users|tmp)/\S*", text)
    assert not re.findall(r"\b(?:[\w-]+\.)*(?:nvcr|docker|ghcr|quay|gcr)\.io\b", text)
    assert not re.findall(r"\bregistry\.(?!example\b)[\w.-]+\.\w+", text)


def test_one_line_of_the_readme_runs_the_tests() -> None:
    """.ci/run takes the command from there."""
    (expression,) = re.findall(r"sed -n '([^']+)' README\.md", (ROOT / ".ci" / "run").read_text())
    found = subprocess.run(
        ["sed", "-n", expression, ROOT / "README.md"], capture_output=True, text=True, check=True
    )
    (command,) = found.stdout.splitlines()
    assert command.endswith("python -m pytest")


def test_the_documents_are_told_apart_by_their_checks() -> None:
    """That the patterns above find anything at all."""
    everything = [text for document in DOCUMENTS for text in code(document)]
    assert sum(bool(OUR_PATH.search(text)) for text in everything) > 20
    assert sum("rte run" in text for text in everything) > 2
    assert sum(text.startswith("nrt.") for text in everything) > 10
