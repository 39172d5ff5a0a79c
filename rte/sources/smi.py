"""What `nvidia-smi topo -m` printed, as people paste it → Machine.

A matrix names neither places nor people's paths: there are no PCI addresses in it, CPU lists are
cut off at the width of their column, and where it says NV# it does not say the PCIe level. Pastes
lose line ends, escape bytes and the blanks between cells. What can be read in one way only is
read, and said where that took a repair; everything else is an error that names line and column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import NamedTuple

from rte.model import (
    NVIDIA_VENDOR,
    DeviceId,
    Gpu,
    Level,
    LinkPeer,
    Machine,
    Nic,
    NumaId,
    NumaNode,
    NumaSource,
    NvLinkEnd,
    PciAddress,
    PciDevice,
    made_up_address,
)
from rte.sources.problem import SourceError

MAX_TEXT = 4 << 20
MAX_LINE = 1 << 16
MAX_TABLES = 64
MAX_NAME = 64
MAX_COLUMNS = 1024
MAX_GPUS = 128
NUMA_IDS = 1024  # the kernel's greatest CONFIG_NODES_SHIFT
MOST_LANES = 18  # of one GPU until NVLink 5; whoever has more "to each" has them to switches

WORDS = r"PIX|PXB|PHB|NODE|SYS|SOC|N/A|X"
LANES = r"NV(?:3[0-6]|[12][0-9]|[1-9])"
CELL = re.compile(f"{LANES}|{WORDS}")
ROW_START = rf"\s*(?=(?:NV[0-9]|{WORDS}|OK|CNS|GNS|TNS|NS|DR)(?![a-z_:=]))"
GPU = r"GPU(?:0|[1-9][0-9]{0,3})(?![0-9])"
DEVICE = rf"{GPU}|NIC[0-9]+|mlx[0-9]+_(?:[a-z]+_)*[0-9]+"
TITLE = re.compile(r"CPU\s*Affinity|NUMA\s*Affinity|GPU\s*NUMA\s*ID")
LEVELS = {
    "PIX": Level.PIX,
    "PXB": Level.PXB,
    "PHB": Level.PHB,
    "NODE": Level.NODE,
    "SYS": Level.SYS,
    "SOC": Level.SYS,  # what drivers before 384 called it
    "N/A": Level.UNKNOWN,
}
ADVICE = "paste the whole output of `nvidia-smi topo -m` as plain text"


def parse_smi(text: str, name: str = "matrix") -> Machine:
    """The machine that a pasted matrix describes. Raises SourceError, and nothing else."""
    return machine(parse_matrix(text, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The matrix itself, before anything is concluded from it."""

    names: tuple[str, ...]  # of the columns, as the text calls them: GPU<n>, NIC<n> or mlx5_<n>
    cells: Mapping[tuple[str, str], str]  # (row, column), the diagonal left out
    numa: Mapping[str, NumaId] = field(default_factory=dict)
    memory: Mapping[str, NumaId] = field(default_factory=dict)  # GPU NUMA ID
    rdma: Mapping[str, str] = field(default_factory=dict)  # NIC legend
    products: Mapping[str, str] = field(default_factory=dict)  # from `nvidia-smi -L` nearby
    uuids: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    knows_nvlink: bool = True  # False: nothing shows that this is not `topo -mp`
    repairs: tuple[str, ...] = ()
    vague: tuple[str, ...] = ()  # GPUs with more than one NUMA node in their column

    @property
    def gpus(self) -> tuple[str, ...]:
        """By number."""
        return tuple(sorted((n for n in self.names if is_gpu(n)), key=gpu_number))

    @property
    def nics(self) -> tuple[str, ...]:
        return tuple(n for n in self.names if not is_gpu(n))


def is_gpu(name: str) -> bool:
    return re.fullmatch(GPU, name) is not None


def gpu_number(name: str) -> int:
    return int(name[3:])


# Text


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


# The matrix


def parse_matrix(text: str, name: str = "matrix") -> Matrix:
    """The matrix that a text holds. Raises SourceError."""
    if len(text) > MAX_TEXT:
        raise SourceError(f"{name}: {len(text)} characters; {ADVICE}, and nothing else")
    lines = lines_of(text)
    long = next((line for line in lines if len(line.text) > MAX_LINE), None)
    if long is not None:
        raise SourceError(f"{name}: line {long.number}: {len(long.text)} characters; {ADVICE}")
    found = [read_table(table, name) for table in islice(tables(lines), MAX_TABLES)]
    if not found:
        raise SourceError(f"{name}: no row such as `GPU0  X  NV12 …` in it; {ADVICE}")
    first = found[0]
    for other in found[1:]:
        if (other.names, other.cells, other.numa) != (first.names, first.cells, first.numa):
            raise SourceError(
                f"{name}: {len(found)} matrices that differ; give one machine's at a time"
            )
    legend, doubts = nic_legend(lines, first)
    listed = listed_gpus(lines, first)
    words = text.casefold()
    return replace(
        first,
        rdma=legend,
        repairs=(*first.repairs, *doubts),
        knows_nvlink=any(c.startswith("NV") for c in first.cells.values()) or "nv#" in words,
        products=listed.products,
        uuids=listed.uuids,
        driver=listed.driver,
    )


def read_table(table: Table, name: str) -> Matrix:
    def refused(where: str, what: str) -> SourceError:
        return SourceError(f"{name}: {where}: {what}; {ADVICE}")

    names, repairs = columns(table, refused)
    cells: dict[tuple[str, str], Cell] = {}
    tails: dict[str, str] = {}
    last = table.rows[-1]
    for row in table.rows:
        found, end = cells_of(row.text, len(names))
        if row is last and end == len(row.text) and re.fullmatch("NV[1-3]", found[-1].word):
            found.pop()  # cut off right behind a digit: NV1 may have been NV18
        check_row(row, names, found, end, is_last=row is last, refused=refused)
        if len(found) < len(names):
            # What of it is true the other rows say too; what they do not, nobody could check.
            repairs.append(f"the row of {row.name} is cut off and left out")
            continue
        diagonal = names.index(row.name)
        cells |= {(row.name, names[i]): cell for i, cell in enumerate(found) if i != diagonal}
        tails[row.name] = "" if row.doubtful else row.text[end:]
    words = settled(cells, table, tails, refused)
    words = completed(words, names, table, repairs, refused)
    numa, memory, vague = affinities(table, tails)
    return Matrix(
        names=names,
        cells=words,
        numa=numa,
        memory=memory,
        vague=vague,
        repairs=tuple(repairs),
    )


Refused = Callable[[str, str], SourceError]


def columns(table: Table, refused: Refused) -> tuple[tuple[str, ...], list[str]]:
    """The names of the columns: the header's, or the rows' where the header is lost or glued."""
    header, rows = header_names(table.header), tuple(row.name for row in table.rows)
    where = f"line {table.line}"
    repairs: list[str] = []
    if not set(rows) <= set(header):
        wide = [len(cells_of(row.text, MAX_COLUMNS + 1)[0]) for row in table.rows]
        glued = "".join(header) == "".join(rows)
        if not glued and not (set(header) < set(rows) and min(wide) >= len(rows)):
            strange = next((row for row in table.rows if row.name not in header), table.rows[0])
            raise refused(
                f"line {strange.line}",
                f"the row of {strange.name} has no column in the header"
                if header
                else f"no header above it, and {wide[0]} cells for {len(rows)} rows",
            )
        header = rows
        repairs.append("the header is lost or damaged: columns are named as the rows are")
    if any(len(name) > MAX_NAME for name in header):
        raise refused(where, "a column whose name has no end")
    twice = next((n for n in header if header.count(n) > 1), None)
    if twice:
        raise refused(where, f"two columns are called {twice}")
    gpus = sum(map(is_gpu, header))
    if len(header) > MAX_COLUMNS or gpus > MAX_GPUS:
        raise refused(where, f"{gpus} GPUs of {len(header)} columns; expected at most {MAX_GPUS}")
    return header, repairs


def check_row(
    row: Row,
    names: Sequence[str],
    found: Sequence[Cell],
    end: int,
    *,
    is_last: bool,
    refused: Refused,
) -> None:
    """Raises SourceError for a row that is not one cell a column with X in its own."""
    word = (row.text[end:].split() or [""])[0]
    diagonal = names.index(row.name)
    for i, cell in enumerate(found):
        if (cell.word == "X") != (i == diagonal):
            raise refused(
                row.whereabouts(cell.end - len(cell.word)),
                f"the row of {row.name} says {cell.word} in the column of {names[i]}, and X "
                "belongs in its own: a cell is missing or glued before it",
            )
    if len(found) == len(names):
        if re.match(DEVICE, word) or (CELL.match(word) and not word.startswith("N/A")):
            raise refused(
                row.whereabouts(row.text.index(word, end)),
                f"the row of {row.name} goes on with {word[:20]} behind its {len(names)} cells",
            )
        return
    if word in ("OK", "NS", "CNS", "GNS", "TNS", "DR"):
        raise refused(
            row.whereabouts(end),
            f"{word} is what `topo -p2p` says: what works and not what is near",
        )
    # A row that ends in mid-table has lost a cell somewhere; the last one was cut off.
    if not is_last or not any("".startswith(word) or w.startswith(word) for w in LEVELS):
        raise refused(
            row.whereabouts(end),
            f"the row of {row.name} has {len(found)} cells for {len(names)} columns"
            + (f", then {word[:20]!r}" if word else ""),
        )


def settled(
    cells: Mapping[tuple[str, str], Cell],
    table: Table,
    tails: Mapping[str, str],
    refused: Refused,
) -> dict[tuple[str, str], str]:
    """The words of the cells; what could be read in two ways is read as the cell across says.

    A last cell of N/A may be the CPU list: of a row that has too little behind its cells.
    """
    line = {row.name: row.line for row in table.rows}
    titles = len(TITLE.findall(table.header))
    last = next(reversed(header_names(table.header)), "")
    short = {name for name, tail in tails.items() if len(tail_words(tail)) < titles}
    words = {}
    for (a, b), cell in cells.items():
        across = cells.get((b, a))
        words[a, b] = cell.word
        if cell.other and (across is None or across.word not in (cell.word, cell.other)):
            raise refused(
                f"line {line[a]}",
                f"{a} to {b}: {cell.word} or {cell.other}, with digits behind it",
            )
        if cell.other and across and across.word == cell.other:
            words[a, b] = cell.other
        if a in short and b == last and across and cell.word == "N/A" != across.word:
            raise refused(
                f"line {line[a]}",
                f"{a} to {b} says N/A and {b} to {a} says {across.word}: the row of {a} has lost "
                "a cell",
            )
    return words


def completed(
    words: Mapping[tuple[str, str], str],
    names: Sequence[str],
    table: Table,
    repairs: list[str],
    refused: Refused,
) -> dict[tuple[str, str], str]:
    """The cells with those that only the other direction says; those of two NICs may be missing."""
    found = dict(words)
    had = {row.name for row in table.rows}
    missing = [name for name in names if name not in had]
    if missing:
        repairs.append(f"there is no row of {spoken(missing)}")
    mirrored = False
    for a, b in combinations(names, 2):
        if (a, b) not in found and (b, a) not in found and is_gpu(a) and is_gpu(b):
            lanes = switched_lanes(words, names, a, b)
            if lanes is None:
                raise refused(
                    f"line {table.line}",
                    f"neither the row of {a} nor that of {b} is there, so nothing says how the "
                    "two reach each other",
                )
            found[a, b] = found[b, a] = f"NV{lanes}"
            mirrored = True
        for one, other in ((a, b), (b, a)):
            if (one, other) not in found and (other, one) in found:
                found[one, other] = found[other, one]
                mirrored = True
    if mirrored:
        repairs.append("what is not there is taken from the other direction")
    return found


def switched_lanes(
    words: Mapping[tuple[str, str], str], names: Sequence[str], a: str, b: str
) -> int | None:
    """The lanes of two GPUs without rows, if a third has more "to each" than a GPU has at all.

    All that it reaches are then on its switches, with at least the lanes that it reaches them by.
    """
    for third in names:
        row = [lanes(words.get((third, name), "")) for name in names if is_gpu(name)]
        to = min(lanes(words.get((third, a), "")), lanes(words.get((third, b), "")))
        if sum(row) > MOST_LANES and to and {0, to} >= set(row):
            return to
    return None


def lanes(word: str) -> int:
    return int(word[2:]) if word.startswith("NV") else 0


def affinities(
    table: Table, tails: Mapping[str, str]
) -> tuple[dict[str, NumaId], dict[str, NumaId], tuple[str, ...]]:
    """NUMA Affinity and GPU NUMA ID of each GPU that has one, and the GPUs with several."""
    titles = [re.sub(r"\s", "", title) for title in TITLE.findall(table.header)]
    numa: dict[str, NumaId] = {}
    memory: dict[str, NumaId] = {}
    vague = []
    for name, tail in tails.items():
        if not is_gpu(name):
            continue
        said = values(titles, tail)
        for title, found in (("NUMAAffinity", numa), ("GPUNUMAID", memory)):
            if re.fullmatch(r"[0-9]{1,4}", said.get(title, "")) and int(said[title]) < NUMA_IDS:
                found[name] = NumaId(int(said[title]))
        if re.fullmatch(r"[0-9]+[,\-][0-9,\-]+", said.get("NUMAAffinity", "")):
            vague.append(name)
    return numa, memory, tuple(vague)


def values(titles: Sequence[str], tail: str) -> Mapping[str, str]:
    """What stands below each title; the CPU list is empty where the caller may use none of them."""
    if "\t" in tail:
        fields = [part.strip() for part in tail.strip(" ").split("\t")]
        fields = fields[1:] if not fields[0] else fields
        full = [part for part in fields if part]
        if len(full) == len(titles):
            return dict(zip(titles, full, strict=True))
        # The widest title is two tab stops wide: NUMA Affinity, or CPU Affinity before GPU NUMA ID.
        if len(fields) > len(titles) and len(titles) > 1 and not fields[len(titles) - 1]:
            fields.pop(len(titles) - 1)
        return dict(zip(titles, fields, strict=False))
    words = tail_words(tail)
    if len(words) == len(titles):
        return dict(zip(titles, words, strict=True))
    # The list is empty where the process may use none of these CPUs, or glued to its neighbour.
    if len(words) == len(titles) - 1 and re.fullmatch(r"[0-9]+|N/A", words[0]):
        return dict(zip(titles[1:], words, strict=True))
    return {}


def tail_words(tail: str) -> list[str]:
    return re.findall(r"N/A|[^\sN]+", tail)


# What stands around the matrix


def nic_legend(lines: Sequence[Line], matrix: Matrix) -> tuple[dict[str, str], list[str]]:
    """The RDMA device of each NIC column, if one name is said and no other column has it."""
    said: dict[str, list[str]] = {}
    for line in lines:
        found = re.fullmatch(r"\s*(NIC[0-9]+)\s*:\s*([\w.\-]{1,64})\s*", line.text)
        if found and found[1] in matrix.names:
            said.setdefault(found[1], []).append(found[2])
    for name in matrix.nics:
        if not name.startswith("NIC"):
            said[name] = [name]
    owners: dict[str, set[str]] = {}
    for nic, devices in said.items():
        for device in devices:
            owners.setdefault(device, set()).add(nic)
    doubtful = [nic for nic, devices in said.items() if len(set(devices)) > 1]
    doubtful += [nic for nics in owners.values() if len(nics) > 1 for nic in nics]
    legend = {nic: devices[0] for nic, devices in said.items() if nic not in doubtful}
    if not doubtful:
        return legend, []
    which = sorted(set(doubtful), key=matrix.names.index)
    return legend, [f"the NIC legend contradicts itself about {spoken(which)}, which keep no name"]


class Listed(NamedTuple):
    products: Mapping[str, str]
    uuids: Mapping[str, str]
    driver: str | None


def listed_gpus(lines: Sequence[Line], matrix: Matrix) -> Listed:
    """Products, UUIDs and driver from what often stands near: `nvidia-smi -L`, a bug report.

    Only if every GPU of the matrix is listed, and none in two ways.
    """
    products: dict[str, set[str]] = {}
    uuids: dict[str, set[str]] = {}
    drivers: set[str] = set()
    for line in lines:
        listed = re.fullmatch(
            r"\s*GPU ([0-9]{1,3}(?:, ?[0-9]{1,3})*): ([^():]{3,80}?)\s*"
            r"(?:\(UUID: (GPU-[0-9a-f\-]{36})\))?\s*",
            line.text,
        )
        if listed:
            for number in listed[1].split(","):
                products.setdefault(f"GPU{int(number)}", set()).add(listed[2])
                uuids.setdefault(f"GPU{int(number)}", set()).add(listed[3] or "")
        if driver := re.search(r"(?i)driver version\s*:\s*([0-9]+(?:\.[0-9]+)+)", line.text):
            drivers.add(driver[1])
    named = all(len(products.get(gpu, ())) == 1 for gpu in matrix.gpus)
    known = [next(iter(uuids[gpu])) for gpu in matrix.gpus] if named else []
    unique = named and all(known) and len(set(known)) == len(known)
    return Listed(
        products={gpu: next(iter(products[gpu])) for gpu in matrix.gpus} if named else {},
        uuids=dict(zip(matrix.gpus, known, strict=True)) if unique else {},
        driver=drivers.pop() if len(drivers) == 1 else None,
    )


# Machine


def machine(matrix: Matrix) -> Machine:
    """What follows from a matrix, and in `unknown` what does not."""
    names = (*matrix.gpus, *matrix.nics)
    address = {name: made_up_address(i) for i, name in enumerate(names)}
    levels = {
        pair: LEVELS[word] for pair, word in matrix.cells.items() if not word.startswith("NV")
    }
    numa, inferred = with_neighbours(matrix.numa, names, levels)
    bearing = {node: NumaNode(id=node, cpus=(), cpus_known=False) for node in numa.values()}
    own = {
        node: NumaNode(id=node, cpus=(), gpu=address[gpu])
        for gpu, node in matrix.memory.items()
        if node not in bearing
    }
    functions = [
        PciDevice(
            address=address[name],
            root="",
            vendor=NVIDIA_VENDOR if is_gpu(name) else 0,
            device=0,
            class_code=0x030200 if is_gpu(name) else 0x020000,
            numa=numa.get(name),
            numa_from=source(name, numa, inferred),
            driver="nvidia" if is_gpu(name) else None,
        )
        for name in names
    ]
    links = nvlinks(matrix, address)
    return Machine(
        numa_nodes=tuple(sorted((own | bearing).values(), key=lambda node: node.id)),
        pci=hung(functions, names, levels),
        gpus=tuple(
            Gpu(
                number=gpu_number(gpu),
                pci=address[gpu],
                uuid=DeviceId(matrix.uuids[gpu]) if gpu in matrix.uuids else None,
                product=matrix.products.get(gpu),
                links=links[gpu],
                memory_node=matrix.memory.get(gpu),
            )
            for gpu in matrix.gpus
        ),
        nics=tuple(Nic(pci=address[nic], rdma=(matrix.rdma.get(nic, nic),)) for nic in matrix.nics),
        levels={(address[a], address[b]): level for (a, b), level in levels.items()},
        driver=matrix.driver,
        unknown=tuple(unknown(matrix)),
    )


Levels = Mapping[tuple[str, str], Level]


def with_neighbours(
    stated: Mapping[str, NumaId], names: Sequence[str], levels: Levels
) -> tuple[dict[str, NumaId], frozenset[str]]:
    """NUMA nodes with those that a neighbour tells, and who has it from there.

    A device that is not across NUMA nodes from one with a node has the same, unless two neighbours
    contradict each other.
    """
    found = dict(stated)
    while True:
        told: dict[str, set[NumaId]] = {}
        for (a, b), level in levels.items():
            if level >= Level.NODE and b in found and a not in found:
                told.setdefault(a, set()).add(found[b])
        new = {name: nodes.pop() for name, nodes in told.items() if len(nodes) == 1}
        if not new:
            return found, frozenset(found.keys() - stated.keys())
        found |= new


def source(name: str, numa: Mapping[str, NumaId], inferred: frozenset[str]) -> NumaSource | None:
    if name not in numa:
        return None
    return NumaSource.RELATION if name in inferred else NumaSource.SOURCE


def hung(
    functions: Sequence[PciDevice], names: Sequence[str], levels: Levels
) -> tuple[PciDevice, ...]:
    """The functions with a tree above them that has the switches and host bridges they share.

    A switch is an upstream and downstream ports, as in the kernel's tree; none has a name.
    """

    def together(least: Level) -> list[list[int]]:
        return classes(names, {pair for pair, level in levels.items() if level >= least}, levels)

    ports = iter(range(1 << 12, 1 << 16))
    found: list[PciDevice] = []

    def port(root: str, parent: PciAddress | None, numa: NumaId | None) -> PciAddress:
        address = made_up_address(next(ports))
        found.append(
            PciDevice(
                address=address,
                root=root,
                parent=parent,
                vendor=0,
                device=0,
                class_code=0x060400,
                numa=numa,
                numa_from=None if numa is None else NumaSource.RELATION,
            )
        )
        return address

    root_of = {i: f"pci{n}" for n, c in enumerate(together(Level.PHB)) for i in c}
    switches = together(Level.PIX)
    parent: dict[int, PciAddress] = {}
    for block in together(Level.PXB):
        if len(block) == 1:
            continue
        root, numa = root_of[block[0]], functions[block[0]].numa
        top = port(root, None, numa)
        inner = [members for members in switches if members[0] in block]
        for members in inner:
            upstream = top if len(inner) == 1 else port(root, port(root, top, numa), numa)
            for i in members:
                parent[i] = port(root, upstream, numa)
    leaves = [
        replace(function, root=root_of[i], parent=parent.get(i))
        for i, function in enumerate(functions)
    ]
    return (*leaves, *found)


def classes(
    names: Sequence[str], joined: Iterable[tuple[str, str]], levels: Levels
) -> list[list[int]]:
    """Positions in sets that the pairs join, by smallest; only what both directions say counts."""
    at = {name: i for i, name in enumerate(names)}
    pairs = set(joined)
    leader = list(range(len(names)))

    def top(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for a, b in pairs:
        if (b, a) in pairs or (b, a) not in levels:
            one, other = sorted((top(at[a]), top(at[b])))
            leader[other] = one
    found: dict[int, list[int]] = {}
    for i in range(len(names)):
        found.setdefault(top(i), []).append(i)
    return list(found.values())


def nvlinks(
    matrix: Matrix, address: Mapping[str, PciAddress]
) -> Mapping[str, tuple[NvLinkEnd, ...]]:
    row = {
        address[a]: {address[b]: lanes(matrix.cells.get((a, b), "")) for b in matrix.gpus if b != a}
        for a in matrix.gpus
    }
    speed = {address[gpu]: lane_speed(matrix.products.get(gpu)) for gpu in matrix.gpus}
    found = link_ends(row, speed)
    return {gpu: found[address[gpu]] for gpu in matrix.gpus}


def link_ends(
    row: Mapping[PciAddress, Mapping[PciAddress, int]], speed: Mapping[PciAddress, int]
) -> Mapping[PciAddress, tuple[NvLinkEnd, ...]]:
    """The ends of NVLinks behind what each GPU says of its lanes to each other.

    Lanes to switches where a GPU would else have more than there are, else to each GPU.
    """
    own = {a: max(row[a].values(), default=0) for a in row}
    switched = {a for a in row if sum(row[a].values()) > MOST_LANES}
    # All or none, and only if switches explain every cell: what is said is never smoothed.
    reached = {b for a in switched for b, n in row[a].items() if n} | switched
    explained = all(
        row[a][b] == (min(own[a], own[b]) if b in reached else 0) for a in reached for b in row[a]
    )

    def ends(gpu: PciAddress) -> Iterator[NvLinkEnd]:
        if explained and gpu in reached:
            yield NvLinkEnd(peer=LinkPeer.SWITCH, lanes=own[gpu], lane_megabytes_per_s=speed[gpu])
            return
        for other, count in row[gpu].items():
            if count:
                yield NvLinkEnd(
                    peer=LinkPeer.GPU,
                    remote=other,
                    lanes=count,
                    lane_megabytes_per_s=speed[gpu],
                )

    return {gpu: tuple(ends(gpu)) for gpu in row}


def lane_speed(product: str | None) -> int:
    """MB/s one way of an NVLink lane; 25 GB/s unless the product is known for another."""
    if product and re.search(r"\bP100\b", product):
        return 20_000
    if product and re.search(r"\bG?B[123]00\b", product):
        return 50_000
    return 25_000


def unknown(matrix: Matrix) -> Iterator[str]:
    for repair in matrix.repairs:
        yield f"repaired: {repair}"
    yield "PCI addresses, link speeds, CPUs and memory of NUMA nodes: no matrix says them"
    if not matrix.uuids:
        what = "UUIDs" if matrix.products else "UUIDs and products"
        yield f"{what}: `nvidia-smi -L` says them"
    if matrix.nics and not all(nic in matrix.rdma for nic in matrix.nics):
        yield "names of some RDMA devices: there is no NIC legend for them"
    words = set(matrix.cells.values())
    if any(word.startswith("NV") for word in words):
        yield "PCIe levels of GPUs that NVLink joins, and whether over switches: NV# hides both"
        if not matrix.products:
            yield "NVLink generation: a lane is taken for 25 GB/s"
    elif not matrix.knows_nvlink:
        yield "NVLinks: no cell says NV#, but nothing shows that this is not `topo -mp`"
    several = spoken(matrix.vague)
    if several:
        yield f"NUMA node of {several}: the matrix names more than one"
    nowhere = [g for g in matrix.gpus if g not in matrix.numa and g not in matrix.vague]
    if nowhere:
        yield f"NUMA node of {spoken(nowhere)}: the matrix says none that can be read"
    uneven = [
        f"{a}-{b}"
        for a, b in combinations(matrix.names, 2)
        if matrix.cells.get((a, b)) != matrix.cells.get((b, a))
    ]
    if uneven:
        yield f"the two directions disagree, and the worse one counts: {spoken(uneven)}"


def spoken(names: Sequence[str]) -> str:
    return (
        " ".join(names) if len(names) <= 8 else f"{' '.join(names[:7])} and {len(names) - 7} more"
    )
