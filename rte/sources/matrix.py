"""A pasted `nvidia-smi topo -m` → the matrix that was printed, or an error that names the place.

What can be read in one way only is read, and said where that took a repair; everything else is an
error that names line and column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import NamedTuple

from rte.model import Level, NumaId
from rte.sources.nvlink import MOST_LANES
from rte.sources.paste import (
    CELL,
    DEVICE,
    GPU,
    TITLE,
    Cell,
    Line,
    Row,
    Table,
    cells_of,
    header_names,
    is_glued,
    lines_of,
    tables,
    tail_words,
)
from rte.sources.problem import SourceError

MAX_TEXT = 4 << 20
MAX_LINE = 1 << 16
MAX_TABLES = 64
MAX_NAME = 64
MAX_COLUMNS = 1024
MAX_GPUS = 128
NUMA_IDS = 1024  # the kernel's greatest CONFIG_NODES_SHIFT

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
        repairs=(*lost_bytes(text), *first.repairs, *doubts),
        knows_nvlink=any(c.startswith("NV") for c in first.cells.values()) or "nv#" in words,
        products=listed.products,
        uuids=listed.uuids,
        driver=listed.driver,
    )


def lost_bytes(text: str) -> tuple[str, ...]:
    """Of bytes that were no text, such as a terminal's escape, only marks are left."""
    is_marked = "\N{REPLACEMENT CHARACTER}" in text
    return ("the marks of lost bytes are left out",) if is_marked else ()


def read_table(table: Table, name: str) -> Matrix:
    def refused(where: str, what: str) -> SourceError:
        return SourceError(f"{name}: {where}: {what}; {ADVICE}")

    names, repairs = columns(table, refused)
    cells: dict[tuple[str, str], Cell] = {}
    tails: dict[str, str] = {}
    glued = ["header"] if re.search(rf"(?:{DEVICE})(?=GPU|NIC|mlx|CPU)", table.header) else []
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
        if is_glued(row.text, found):
            glued.append(row.name)
        diagonal = names.index(row.name)
        cells |= {(row.name, names[i]): cell for i, cell in enumerate(found) if i != diagonal}
        tails[row.name] = "" if row.doubtful else row.text[end:]
    if glued:
        repairs.append(f"cells without blanks between them are parted: {spoken(glued)}")
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


def spoken(names: Sequence[str]) -> str:
    return (
        " ".join(names) if len(names) <= 8 else f"{' '.join(names[:7])} and {len(names) - 7} more"
    )
