"""The graph as a picture: where everything hangs, and below it who reaches whom over NVLink.

One column that a phone can show without zooming: 420 units wide, text of 11 and more. No scripts,
no links, nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, cos, pi, sin
from typing import NamedTuple
from xml.sax.saxutils import escape

from rte.graph.build import Graph
from rte.graph.groups import Group
from rte.model import Gpu, Nic, NumaNode, PciAddress, is_made_up, ranges
from rte.view.colours import GREY, Colour, group_colour
from rte.view.parts import (
    Leaf,
    Pair,
    Place,
    Switch,
    cpu_megabytes_per_s,
    group_of,
    memory_only,
    pairs,
    places,
    switch_lanes,
)
from rte.view.text import summary
from rte.view.words import counted, size, speed

WIDTH = 420
MARGIN = 10
PAD = 8
GAP = 6
COLUMNS = 4  # chips beside each other
CHIP = 42
MOST_NICS = 8  # below one switch; virtual machines have been seen with 62

INK, SOFT, FAINT, PAPER, LINE = "#0f172a", "#475569", "#f8fafc", "#ffffff", "#cbd5e1"
BAD = Colour("#fee2e2", "#b91c1c")


class Badge(NamedTuple):
    """A word on a GPU, such as who holds it."""

    text: str
    bad: bool = False


def svg(
    graph: Graph,
    groups: Sequence[Group],
    *,
    badges: Mapping[PciAddress, Badge] | None = None,
) -> str:
    """A well-formed SVG document; `badges` go on the GPUs' chips."""
    picture = Picture(graph, groups, badges or {})
    body = [*picture.title(), *picture.machine(), *picture.links(), *picture.notes()]
    height = picture.y + MARGIN
    words = escape(clean(", ".join(summary(graph.machine))))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}" role="img" '
            'style="max-width:100%;height:auto" '
            'font-family="ui-sans-serif,system-ui,-apple-system,Segoe UI,Roboto,'
            'Helvetica,Arial,sans-serif">',
            f"<title>{words}</title>",
            f'<rect width="{WIDTH}" height="{height:g}" fill="{PAPER}"/>',
            *body,
            "</svg>\n",
        ]
    )


@dataclass(slots=True)
class Picture:
    """What is drawn so far ends at y."""

    graph: Graph
    groups: Sequence[Group]
    badges: Mapping[PciAddress, Badge]
    y: float = MARGIN

    @property
    def member(self) -> Mapping[PciAddress, int]:
        return group_of(self.groups)

    def colour(self, gpu: Gpu) -> Colour:
        return group_colour(self.member[gpu.pci]) if gpu.pci in self.member else GREY

    # Parts

    def title(self) -> Iterator[str]:
        first, *rest = summary(self.graph.machine)[0].split(", ")
        for line in wrapped(first, WIDTH - 2 * MARGIN, 17):
            self.y += 20
            yield label(MARGIN, self.y, line, of=17, weight=700)
        for line in wrapped(", ".join(rest), WIDTH - 2 * MARGIN, 12):
            self.y += 17
            yield label(MARGIN, self.y, line, of=12, fill=SOFT)
        self.y += 12

    def machine(self) -> Iterator[str]:
        for place in places(self.graph):
            yield from self.place(place)
            self.y += 10
        memory = memory_only(self.graph)
        if memory:
            for line in wrapped(memory_words(self.graph, memory), WIDTH - 2 * MARGIN, 11):
                yield label(MARGIN, self.y + 10, line, of=11, fill=SOFT)
                self.y += 15
            self.y += 6

    def place(self, place: Place) -> Iterator[str]:
        x, top, width = MARGIN, self.y, WIDTH - 2 * MARGIN
        head = "NUMA node unknown" if place.id is None else f"NUMA node {place.id}"
        inner = [label(x + PAD, top + 19, head, of=13, weight=700)]
        used = text_width(head, 13) + 3 * PAD
        words = place_words(place.node)
        lines = wrapped(words, width - used - PAD, 11) if words else []
        if len(lines) == 1:
            inner.append(label(x + width - PAD, top + 19, lines[0], of=11, fill=SOFT, anchor="end"))
            at = top + 28
        else:
            at = top + 28
            for line in wrapped(words, width - 2 * PAD, 11) if words else ():
                inner.append(label(x + PAD, at + 8, line, of=11, fill=SOFT))
                at += 15
        drawn, bottom = self.flow(folded(place.children), x + PAD, at, width - 2 * PAD, COLUMNS)
        bottom = bottom + PAD if place.children else at + 2
        yield box(x, top, width, bottom - top, fill=FAINT, stroke=LINE, round_=10)
        yield from inner
        yield from drawn
        self.y = bottom

    def flow(
        self,
        children: Sequence[Switch | Leaf | More],
        x: float,
        y: float,
        width: float,
        columns: int,
    ) -> tuple[list[str], float]:
        """Children in rows of so many columns; returns what is drawn and where it ends.

        A row of switches is stretched to the whole width; chips keep their column.
        """
        found: list[str] = []
        bottom = y
        for row in rows(children, columns):
            top = bottom + GAP if found else y
            spans = [min(columns, units(child)) for child in row]
            stretched = sum(spans) if any(isinstance(c, Switch) for c in row) else columns
            column = (width - (stretched - 1) * GAP) / stretched
            left = x
            for child, span in zip(row, spans, strict=True):
                room = span * column + (span - 1) * GAP
                drawn, end = self.child(child, left, top, room, span)
                found += drawn
                bottom = max(bottom, end)
                left += room + GAP
        return found, bottom

    def child(
        self, child: Switch | Leaf | More, x: float, y: float, width: float, span: int
    ) -> tuple[list[str], float]:
        if isinstance(child, More):
            return self.chip(x, y, width, [f"{child.number} more", child.of], GREY), y + CHIP
        if isinstance(child, Leaf):
            if child.gpu is not None:
                return self.gpu(child.gpu, x, y, width), y + CHIP
            assert child.nic is not None
            return self.nic(child.nic, child.ports, x, y, width), y + CHIP
        below = folded(child.children)
        chips = sum(map(units, below))
        if not any(isinstance(c, Switch) for c in below):
            span = ceil(chips / ceil(chips / span))  # five are three and two, not four and one
        inner, bottom = self.flow(below, x + GAP, y + 19, width - 2 * GAP, span)
        bottom += GAP
        known = not is_made_up(child.address)
        name = f"PCIe switch {child.address}" if known else "PCIe switch"
        short = fitted(name, width - 2 * GAP, 9.5) if known else name
        if known and short != name:
            short = fitted(f"switch {plain_address(child.address)}", width - 2 * GAP, 9.5)
        return [
            box(x, y, width, bottom - y, fill="#eef2f7", stroke="#94a3b8", round_=7),
            label(x + GAP, y + 13, short, of=9.5, fill=SOFT, tip=name),
            *inner,
        ], bottom

    def gpu(self, gpu: Gpu, x: float, y: float, width: float) -> list[str]:
        badge = self.badges.get(gpu.pci)
        place = "" if is_made_up(gpu.pci) else plain_address(gpu.pci)
        tip = ", ".join(
            filter(
                None,
                [
                    gpu.name,
                    gpu.product,
                    None if is_made_up(gpu.pci) else gpu.pci,
                    gpu.uuid,
                    f"lost: {gpu.lost}" if gpu.lost is not None else None,
                    badge.text if badge else None,
                ],
            )
        )
        if gpu.lost is not None:
            return self.chip(x, y, width, [gpu.name, "lost"], BAD, dashed=True, tip=tip)
        if gpu.mig_enabled:
            place = counted(len(gpu.slices), "MIG slice")
        second = badge.text if badge else place
        colour = BAD if badge and badge.bad else self.colour(gpu)
        return self.chip(x, y, width, [gpu.name, second], colour, tip=tip, strong=True)

    def nic(self, nic: Nic, ports: int, x: float, y: float, width: float) -> list[str]:
        place = nic.kind if nic.pci is None else plain_address(nic.pci)
        rate = f"{nic.rate_megabits_per_s / 1000:g} Gb/s" if nic.rate_megabits_per_s else ""
        if ports > 1:
            rate = f"{ports}x {rate}" if rate else f"{ports} ports"
        if nic.up is False:
            rate = "down"
        named = nic.name != nic.pci
        if nic.pci is not None and is_made_up(nic.pci):
            place = ""
        lines = [nic.name if named else place, rate or (place if named else "NIC")]
        tip = ", ".join(filter(None, [*nic.rdma, *nic.netdevs, place, rate]))
        return self.chip(x, y, width, lines, None, tip=tip or nic.kind)

    def chip(
        self,
        x: float,
        y: float,
        width: float,
        lines: Sequence[str],
        colour: Colour | None,
        *,
        tip: str = "",
        strong: bool = False,
        dashed: bool = False,
    ) -> list[str]:
        """A box with one line or two; without a `colour` it is rounder, and no GPU."""
        fill, stroke = (colour.light, colour.dark) if colour else (PAPER, "#94a3b8")
        outline = box(
            x,
            y,
            width,
            CHIP,
            fill=fill,
            stroke=stroke,
            round_=6 if colour else 13,
            width_=1.4 if strong else 1,
            dashed=dashed,
        )
        first, second = lines
        weight, at = 700 if colour else 500, y + (18 if second else 26)
        words = [centred(first, x, at, width, of=12, weight=weight)]
        if second:
            words.append(centred(second, x, y + 33, width, of=10, fill=SOFT))
        title = [f"<title>{escape(clean(tip))}</title>"] if tip else []
        return ["<g>", *title, outline, *words, "</g>"]

    # NVLink

    def links(self) -> Iterator[str]:
        direct = pairs(self.graph)
        hubs = self.hubs()
        if not direct and not hubs:
            return
        yield label(MARGIN, self.y + 16, "NVLink", of=15, weight=700)
        self.y += 24
        if direct and not hubs and all(len(group.gpus) == 2 for group in self.groups):
            yield from self.couples(direct)
        else:
            yield from self.circle(direct, hubs)
        yield from self.legend(direct)

    def couples(self, direct: Sequence[Pair]) -> Iterator[str]:
        """GPUs that are linked two and two, two couples a row."""
        column = (WIDTH - 2 * MARGIN - 16) / 2
        at = {}
        for number, pair in enumerate(direct):
            x = MARGIN + number % 2 * (column + 16)
            y = self.y + number // 2 * 34 + 16
            for position, left in ((pair.a, x + 29), (pair.b, x + column - 29)):
                at[self.graph.gpus[position].pci] = (left, y)
        for pair in direct:
            yield self.line(pair, at)
        yield from self.marks(direct, at)
        yield from self.gpus(at, 58)
        self.y += (len(direct) + 1) // 2 * 34 + 8

    def gpus(self, at: Mapping[PciAddress, tuple[float, float]], width: float) -> Iterator[str]:
        for gpu in self.graph.gpus:
            if gpu.pci in at:
                (x, y), colour = at[gpu.pci], self.colour(gpu)
                yield box(
                    x - width / 2,
                    y - 12,
                    width,
                    24,
                    fill=colour.light,
                    stroke=colour.dark,
                    round_=6,
                    width_=1.4,
                )
                yield label(
                    x, y + 4, gpu.name, of=11 if width > 40 else 10, weight=700, anchor="middle"
                )

    def wide(self, lanes: int) -> float:
        """How wide to draw some lanes: in proportion to the most that any two GPUs have here."""
        most = max((n for row in self.graph.lanes for n in row), default=1) or 1
        return round(max(1, min(6, 3 + most * 0.2) * lanes / most), 2)

    def hubs(self) -> list[tuple[int, list[Gpu]]]:
        """Groups that switches join: number and members that have lanes to them."""
        found = []
        for number, group in enumerate(self.groups):
            inside = [g for g in self.graph.gpus if g.pci in group.gpus and switch_lanes(g)]
            if len(inside) > 1:
                found.append((number, inside))
        return found

    def circle(
        self, direct: Sequence[Pair], hubs: Sequence[tuple[int, Sequence[Gpu]]]
    ) -> Iterator[str]:
        """GPUs in a ring, members of a group beside each other; lines as wide as the lanes."""
        member = self.member
        last = len(self.groups)
        ring = sorted(self.graph.gpus, key=lambda g: (member.get(g.pci, last), g.number))
        few = len(ring) <= 2
        across, down = (110, 12) if few else (150, 88 if len(ring) <= 4 else 132)
        chip = 46 if len(ring) <= 12 else 38
        middle = (WIDTH / 2, self.y + down + 22)
        at = {}
        for n, gpu in enumerate(ring):
            # Half a step off, so that no GPU sits alone on top and pairs face each other.
            angle = 2 * pi * (n + 0.5) / len(ring) - pi / 2 if not few else pi * (1 + n)
            at[gpu.pci] = (middle[0] + across * cos(angle), middle[1] + down * sin(angle))
        for number, inside in hubs:
            yield from self.hub(number, inside, at, middle if len(hubs) == 1 else None)
        for pair in sorted(direct, key=lambda pair: pair.lanes):
            yield self.line(pair, at)
        if len(direct) <= 12:
            yield from self.marks(direct, at)
        yield from self.gpus(at, chip)
        self.y = middle[1] + down + 22

    def hub(
        self,
        number: int,
        inside: Sequence[Gpu],
        at: Mapping[PciAddress, tuple[float, float]],
        where: tuple[float, float] | None,
    ) -> Iterator[str]:
        colour = group_colour(number)
        x, y = where or (
            sum(at[g.pci][0] for g in inside) / len(inside),
            sum(at[g.pci][1] for g in inside) / len(inside),
        )
        for gpu in inside:
            tip = f"{gpu.name}: {switch_lanes(gpu)} lanes to NVSwitches"
            yield stroke((x, y), at[gpu.pci], colour.dark, self.wide(switch_lanes(gpu)), tip=tip)
        yield box(
            x - 42, y - 14, 84, 28, fill=colour.light, stroke=colour.dark, round_=14, width_=1.4
        )
        yield label(x, y + 4, "NVSwitch", of=12, weight=700, anchor="middle", fill=colour.dark)

    def line(self, pair: Pair, at: Mapping[PciAddress, tuple[float, float]]) -> str:
        a, b = self.graph.gpus[pair.a], self.graph.gpus[pair.b]
        colour = self.colour(a).dark if pair.agreed else BAD.dark
        tip = f"{a.name} and {b.name}: {counted(pair.lanes, 'lane')}"
        if not pair.agreed:
            tip += ", the two ends disagree"
        return stroke(
            at[a.pci], at[b.pci], colour, self.wide(pair.lanes), dashed=not pair.agreed, tip=tip
        )

    def marks(
        self, direct: Sequence[Pair], at: Mapping[PciAddress, tuple[float, float]]
    ) -> Iterator[str]:
        """NV<n> on the lines, a third of the way, where lines rarely cross."""
        for pair in direct:
            (x, y), (u, v) = at[self.graph.gpus[pair.a].pci], at[self.graph.gpus[pair.b].pci]
            part = 0.5 if len(direct) <= 4 else 0.36
            mx, my = x + (u - x) * part, y + (v - y) * part
            word = f"NV{pair.lanes}" if pair.lanes else "?"
            wide_ = text_width(word, 9.5) + 6
            yield box(mx - wide_ / 2, my - 7, wide_, 14, fill=PAPER, stroke="none", round_=4)
            yield label(mx, my + 3.5, word, of=9.5, fill=SOFT, anchor="middle")

    def legend(self, direct: Sequence[Pair]) -> Iterator[str]:
        name = {gpu.pci: gpu.name for gpu in self.graph.machine.gpus}
        for number, group in enumerate(self.groups):
            colour = group_colour(number)
            words = group_words(self.graph, group)
            if group.degraded:
                words += "; degraded: " + " ".join(name[pci] for pci in group.degraded)
            yield box(MARGIN, self.y + 3, 12, 12, fill=colour.light, stroke=colour.dark, round_=3)
            for line in wrapped(f"{group.name}: {words}", WIDTH - 2 * MARGIN - 20, 11.5):
                yield label(MARGIN + 20, self.y + 13, line, of=11.5)
                self.y += 16
            self.y += 3
        lanes = sorted({pair.lanes for pair in direct if pair.agreed})
        if len(lanes) > 1 and len(direct) > 12:
            x: float = MARGIN
            for count in lanes[:6]:
                yield stroke((x, self.y + 10), (x + 24, self.y + 10), SOFT, self.wide(count))
                yield label(x + 30, self.y + 14, f"NV{count}", of=11, fill=SOFT)
                x += 66
            self.y += 20
        if not all(pair.agreed for pair in direct):
            yield stroke(
                (MARGIN, self.y + 10), (MARGIN + 24, self.y + 10), BAD.dark, 1.4, dashed=True
            )
            words = "the two ends disagree; the smaller word counts"
            yield label(MARGIN + 30, self.y + 14, words, of=11, fill=SOFT)
            self.y += 20
        chips = {cpu_megabytes_per_s(gpu) for gpu in self.graph.gpus} - {0}
        if chips:
            slow, fast = speed(min(chips)), speed(max(chips))
            words = slow if slow == fast else f"{slow} to {fast}"
            yield label(MARGIN, self.y + 12, f"Each GPU to its CPU: {words}", of=11.5, fill=SOFT)
            self.y += 18

    def notes(self) -> Iterator[str]:
        machine = self.graph.machine
        for title, said in (("Overridden", machine.overridden), ("Not known", machine.unknown)):
            if not said:
                continue
            self.y += 6
            yield label(MARGIN, self.y + 12, title, of=12, weight=700, fill=SOFT)
            self.y += 18
            for note in said[:12]:
                for n, line in enumerate(wrapped(note, WIDTH - 2 * MARGIN - 10, 10.5)):
                    indent = 0 if n == 0 else 10
                    yield label(MARGIN + indent, self.y + 10, line, of=10.5, fill=SOFT)
                    self.y += 14
                self.y += 2


class More(NamedTuple):
    """Devices of a kind that are too many to draw."""

    number: int
    of: str


def rows(
    children: Sequence[Switch | Leaf | More], columns: int
) -> Iterator[list[Switch | Leaf | More]]:
    row: list[Switch | Leaf | More] = []
    taken = 0
    for child in children:
        span = min(columns, units(child))
        if row and taken + span > columns:
            yield row
            row, taken = [], 0
        row.append(child)
        taken += span
    if row:
        yield row


def folded(children: Sequence[Switch | Leaf]) -> list[Switch | Leaf | More]:
    """Switches first, then GPUs, then NICs, of which only some are drawn."""
    switches = [c for c in children if isinstance(c, Switch)]
    gpus = [c for c in children if isinstance(c, Leaf) and c.gpu]
    nics = [c for c in children if isinstance(c, Leaf) and c.nic]
    if len(nics) > MOST_NICS:
        rest = len(nics) - MOST_NICS + 1
        return [*switches, *gpus, *nics[: MOST_NICS - 1], More(rest, "NICs")]
    return [*switches, *gpus, *nics]


def units(child: Switch | Leaf | More) -> int:
    """Columns that a child takes; nested switches take what they need, up to all."""
    if not isinstance(child, Switch):
        return 1
    return min(COLUMNS, sum(units(inner) for inner in folded(child.children)))


def place_words(node: NumaNode | None) -> str:
    if node is None:
        return ""
    words = [f"CPUs {ranges(node.cpus)}"] if node.cpus else []
    if node.memory_bytes:
        words.append(size(node.memory_bytes))
    return ", ".join(words)


def memory_words(graph: Graph, nodes: Sequence[NumaNode]) -> str:
    name = {gpu.pci: gpu.name for gpu in graph.machine.gpus}
    words = []
    for node in nodes:
        amount = size(node.memory_bytes) if node.memory_bytes else ""
        owner = name.get(node.gpu, node.gpu) if node.gpu else ""
        inside = ", ".join(filter(None, (owner, amount)))
        words.append(f"node {node.id} ({inside})" if inside else f"node {node.id}")
    return "Memory without CPUs: " + ", ".join(words)


def group_words(graph: Graph, group: Group) -> str:
    at = [i for i, gpu in enumerate(graph.gpus) if gpu.pci in group.gpus]
    near = [(i, j) for i in at for j in at if i < j and graph.adjacent[i] >> j & 1]
    words = f"{group.shape} of {len(group.gpus)}"
    lanes = sorted({min(graph.lanes[i][j], graph.lanes[j][i]) for i, j in near})
    if lanes:
        words += f", NV{lanes[0]}" if len(lanes) == 1 else f", NV{lanes[0]} to NV{lanes[-1]}"
    speeds = sorted({graph.closeness[i][j].nvlink_megabytes_per_s for i, j in near})
    if speeds:
        slow, fast = speed(speeds[0]), speed(speeds[-1])
        words += f" ({slow})" if slow == fast else f" ({slow} to {fast})"
    return words + (f", fabric {group.domain}" if group.domain else "")


def plain_address(address: PciAddress) -> str:
    """Without a domain that says nothing."""
    return address.removeprefix("0000:")


# Elements


def clean(text: str) -> str:
    """Without what XML cannot hold."""
    return "".join(c if c.isprintable() else "?" for c in text)


def text_width(text: str, of: float) -> float:
    """About; a little more than usual fonts need."""
    narrow = sum(c in "iljtf.,:;|'!()[] -/1" for c in text)
    return of * (0.62 * (len(text) - narrow) + 0.42 * narrow)


def shrunk(text: str, width: float, of: float) -> float:
    """The size at which a text fits, down to three quarters."""
    needed = text_width(text, of)
    return of if needed <= width else max(round(of * width / needed, 1), of * 0.75)


def fitted(text: str, width: float, of: float) -> str:
    if text_width(text, of) <= width:
        return text
    while text and text_width(text + "…", of) > width:
        text = text[:-1]
    return text + "…"


def wrapped(text: str, width: float, of: float) -> list[str]:
    """Lines of at most this width, broken at blanks and behind commas."""
    lines = [""]
    for word in text.replace(",", ",\0").replace(" ", " \0").split("\0"):
        if lines[-1] and text_width((lines[-1] + word).rstrip(), of) > width:
            lines.append("")
        lines[-1] += word
    return [fitted(line.rstrip(), width, of) for line in lines if line.strip()]


def centred(
    text: str, x: float, y: float, width: float, *, of: float, weight: int = 400, fill: str = INK
) -> str:
    """A text in the middle of a width, made smaller and cut where it must be."""
    of = shrunk(text, width - 8, of)
    short = fitted(text, width - 6, of)
    return label(x + width / 2, y, short, of=of, weight=weight, fill=fill, anchor="middle")


def label(
    x: float,
    y: float,
    text: str,
    *,
    of: float,
    weight: int = 400,
    fill: str = INK,
    anchor: str = "start",
    tip: str = "",
) -> str:
    words = [f'<text x="{x:.4g}" y="{y:.5g}" font-size="{of:g}" fill="{fill}"']
    if weight != 400:
        words.append(f' font-weight="{weight}"')
    if anchor != "start":
        words.append(f' text-anchor="{anchor}"')
    title = f"<title>{escape(clean(tip))}</title>" if tip and tip != text else ""
    return "".join(words) + f">{title}{escape(clean(text))}</text>"


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str,
    stroke: str,
    round_: float,
    width_: float = 1,
    dashed: bool = False,
) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{x:.4g}" y="{y:.5g}" width="{width:.4g}" height="{height:.4g}" rx="{round_:g}" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="{width_:g}"{dashes}/>'
    )


def stroke(
    a: tuple[float, float],
    b: tuple[float, float],
    colour: str,
    width: float,
    *,
    dashed: bool = False,
    tip: str = "",
) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    title = f"<title>{escape(clean(tip))}</title>" if tip else ""
    return (
        f'<line x1="{a[0]:.4g}" y1="{a[1]:.5g}" x2="{b[0]:.4g}" y2="{b[1]:.5g}" '
        f'stroke="{colour}" stroke-width="{width:g}" stroke-linecap="round" '
        f'stroke-opacity="0.75"{dashes}>{title}</line>'
    )
