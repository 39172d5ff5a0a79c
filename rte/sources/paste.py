"""The tables in a text that somebody pasted: what a terminal, an editor or a web page did to
them is undone where there is one way to do it.

Escape bytes and frames go, wrapped lines are joined, and cells that lost the blanks between them
are parted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

WORDS = r"PIX|PXB|PHB|NODE|SYS|SOC|N/A|X"
LANES = r"NV(?:3[0-6]|[12][0-9]|[1-9])"
CELL = re.compile(f"{LANES}|{WORDS}")
ROW_START = rf"\s*(?=(?:NV[0-9]|{WORDS}|OK|CNS|GNS|TNS|NS|DR)(?![a-z_:=]))"
GPU = r"GPU(?:0|[1-9][0-9]{0,3})(?![0-9])"
DEVICE = rf"{GPU}|NIC[0-9]+|mlx[0-9]+_(?:[a-z]+_)*[0-9]+"
TITLE = re.compile(r"CPU\s*Affinity|NUMA\s*Affinity|GPU\s*NUMA\s*ID")


class Line(NamedTuple):
    number: int
    text: str


ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # a control sequence, such as the header's underline
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # a window's title
    r"|\x1b[@-Z\\-_=>]"
    r"|(?:\^\[|\\x1b|\\033|\\e|\\u001b|\N{REPLACEMENT CHARACTER})?\[[0-9]{0,2}(?:;[0-9]{1,3})*m"
)
NOT_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\N{REPLACEMENT CHARACTER}\u200b-\u200f\ufeff]")
BLANKS = re.compile(r"[\xa0\u2000-\u200a\u202f\u3000]")


def lines_of(text: str) -> list[Line]:
    """The lines without what a terminal, an editor or a web page put into them."""
    text = ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = BLANKS.sub(" ", NOT_TEXT.sub("", text))
    return [Line(number, unframed(line)) for number, line in enumerate(text.split("\n"), start=1)]


def unframed(line: str) -> str:
    """A line of a table that was set in bars or quoted in a mail, without these."""
    if line.lstrip().startswith(("|", "│")):
        inner = line.strip().strip("|│")
        return "" if not inner.strip("-:=+| ") else re.sub(r"\s*[|│]\s*", "\t", inner.strip(" "))
    return re.sub(r"^\s*(?:>\s?)+", "", line)


# Tables


@dataclass(slots=True)
class Row:
    name: str
    line: int
    column: int  # of the first character behind the name
    text: str  # behind the name, wrapped lines joined
    doubtful: bool = False  # whether what stands behind the cells may be joined wrongly

    def whereabouts(self, at: int) -> str:
        """Where in the text; what was wrapped is counted on."""
        return f"line {self.line}, column {self.column + at + 1}"


@dataclass(slots=True)
class Table:
    header: str  # joined; empty when there is none
    line: int
    rows: list[Row] = field(default_factory=list)


def tables(lines: Sequence[Line]) -> Iterator[Table]:
    """Every matrix of the text."""
    first_row = re.compile(rf"(?:^|(?<=[\s:>\]]))({GPU}){ROW_START}")
    at = 0
    while at < len(lines):
        found = first_row.search(lines[at].text)
        if found is None:
            at += 1
            continue
        header, names = header_above(lines, at, found[1])
        table = Table(header, lines[at].number)
        at = add_rows(table, lines, at, names, len(lines[at].text[: found.start()].strip()))
        yield table


def header_above(lines: Sequence[Line], at: int, first: str) -> tuple[str, Sequence[str]]:
    """The header that belongs to the row at `at`, and its names."""
    parts: list[str] = []
    for line in reversed(lines[max(0, at - 64) : at]):
        if not line.text.strip():
            continue
        start = re.search(rf"(?<![A-Za-z0-9_]){first}(?![0-9])(?!\s*:)", line.text)
        if start and not re.match(ROW_START + r".", line.text[start.end() :]):
            parts.append(line.text[start.start() :])
            header = "".join(reversed(parts))
            return header, header_names(header)
        if not re.fullmatch(r"[\w.\-\s]+", line.text) or len(parts) > 32:
            break
        parts.append(line.text)
    return "", ()


def header_names(header: str) -> tuple[str, ...]:
    title = TITLE.search(header)
    names = header[: title.start()] if title else header
    return tuple(re.findall(rf"{DEVICE}|\S+", names))


def add_rows(
    table: Table, lines: Sequence[Line], at: int, names: Sequence[str], prefix: int
) -> int:
    """Adds the rows from `at` on; returns the index of the first line of something else."""
    known = sorted({re.escape(n) for n in names}, key=len, reverse=True)
    start = re.compile(rf"({'|'.join([*known, DEVICE])}){ROW_START}")
    seen: set[str] = set()
    while at < len(lines):
        line = lines[at]
        found = start.search(line.text)
        if found and len(line.text[: found.start()].strip()) == prefix:
            if found[1] in seen:
                break
            seen.add(found[1])
            table.rows.append(Row(found[1], line.number, found.end(1), line.text[found.end(1) :]))
        elif table.rows and goes_on(line.text):
            extend(table.rows[-1], line.text, len(names), len(TITLE.findall(table.header)))
        elif TITLE.search(line.text) or len(re.findall(r"\bGPU[0-9]+\b", line.text)) > 1:
            break
        at += 1
    return at


def goes_on(line: str) -> bool:
    """Whether a line can be the rest of a row that a terminal or an editor wrapped."""
    return bool(line.strip()) and bool(re.fullmatch(r"[XNVPIHBODESYC/A0-9,\-\s]+", line))


def extend(row: Row, line: str, columns: int, titles: int) -> None:
    """Adds a wrapped line to its row, if something is missing there.

    Terminals break words and editors do not; between cells both read alike, but behind them two
    numbers may be one. The number of titles tells, or nothing there is believed.
    """
    found, end = cells_of(row.text, columns)
    tail = row.text[end:]
    if len(found) < columns or not tail.strip():
        if len(cells_of(row.text + line, columns)[0]) > len(found) or len(found) == columns:
            row.text += line
        return
    if len(tail_words(tail)) >= titles:
        return
    broken, apart = len(tail_words(tail + line)), len(tail_words(f"{tail} {line}"))
    row.text += line if broken == titles or apart != titles else f" {line}"
    if titles not in (broken, apart) and broken != apart:
        row.doubtful = True


class Cell(NamedTuple):
    word: str
    end: int
    other: str | None = None  # how else it may be read: NV10-31 is NV10, or NV1 beside 0-31


def cells_of(text: str, columns: int) -> tuple[list[Cell], int]:
    """The cells at the beginning of a row, and where they end."""
    found: list[Cell] = []
    at = 0
    while len(found) < columns:
        at += len(text[at:]) - len(text[at:].lstrip())
        match = CELL.match(text, at)
        if match is None:
            break
        word, at = match[0], match.end()
        glued = re.match("[0-9,-]" if len(word) == 4 else "[0-9]", text[at : at + 1])
        found.append(Cell(word, at, word[:3] if glued and word.startswith("NV") else None))
    return found, at


def is_glued(text: str, cells: Sequence[Cell]) -> bool:
    """Whether blanks before, between or behind the cells at the beginning of a row are lost."""
    starts = [cell.end - len(cell.word) for cell in cells]
    ends = [0, *(cell.end for cell in cells)]
    runs_on = bool(text[ends[-1] : ends[-1] + 1].strip())
    return runs_on or any(start == end for start, end in zip(starts, ends, strict=False))


def tail_words(tail: str) -> list[str]:
    return re.findall(r"N/A|[^\sN]+", tail)
