"""`rte show -o svg|dot`: pictures of every machine, fit for a phone and safe to embed."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rte.__main__ import main
from rte.graph.build import build
from rte.graph.groups import groups
from rte.model import Machine
from rte.sources import SourceError, parse_source, read_source
from rte.view.dot import dot
from rte.view.svg import WIDTH, Badge, svg, text_width
from tests.corpus import matrices, xml_files

MACHINES = Path(__file__).parent / "machines"
RECORDED = sorted(path.parent.name for path in MACHINES.glob("*/sys.txt"))
NAMESPACE = "{http://www.w3.org/2000/svg}"
ALLOWED = {"svg", "title", "rect", "g", "text", "line"}


def recorded(name: str) -> Machine:
    return read_source(MACHINES / name)


def drawn(machine: Machine, **options: object) -> ElementTree.Element:
    graph = build(machine)
    return ElementTree.fromstring(svg(graph, groups(graph), **options))  # type: ignore[arg-type]


def words(picture: ElementTree.Element) -> list[str]:
    return ["".join(e.itertext()) for e in picture.iter(f"{NAMESPACE}text")]


def everything() -> list[tuple[str, Machine]]:
    found = [(name, recorded(name)) for name in RECORDED]
    for name, text in [*((n, t.encode()) for n, t in matrices().items()), *xml_files().items()]:
        try:
            found.append((name, parse_source(text, name)))
        except SourceError:
            continue
    return found


def test_every_machine_is_drawn_well_formed_inside_its_frame_and_without_scripts() -> None:
    for name, machine in everything():
        picture = drawn(machine)
        height = float(picture.get("height", "0"))
        for element in picture.iter():
            assert element.tag.removeprefix(NAMESPACE) in ALLOWED, name
            assert not any(key.startswith("on") or "href" in key for key in element.attrib), name
        for rect in picture.iter(f"{NAMESPACE}rect"):
            x, y, width, tall = (float(rect.get(k, "0")) for k in ("x", "y", "width", "height"))
            assert 0 <= x <= x + width <= WIDTH + 0.01, name
            assert 0 <= y <= y + tall <= height + 0.01, name
        for label in picture.iter(f"{NAMESPACE}text"):
            size = float(label.get("font-size", "0"))
            assert size >= 7.5, name  # on a phone of 360 pixels still above six
            own = (label.text or "") + "".join(e.tail or "" for e in label)
            x, width = float(label.get("x", "0")), text_width(own, size)
            left = {"end": x - width, "middle": x - width / 2}.get(
                label.get("text-anchor", "start"), x
            )
            assert left >= -1, (name, own)
            assert left + width <= WIDTH + 1, (name, own)


@pytest.mark.parametrize("name", RECORDED)
def test_picture_shows_every_gpu_and_numa_node_once_in_its_place(name: str) -> None:
    machine = recorded(name)
    said = words(drawn(machine))
    graph = build(machine)
    linked = any(map(bool, graph.adjacent)) or any(gpu.links for gpu in graph.gpus)
    for gpu in machine.gpus:
        # In the tree, and in the ring of NVLinks for those that answer.
        assert said.count(gpu.name) >= 1
        assert said.count(gpu.name) <= 2 if linked else said.count(gpu.name) == 1
    for node in machine.numa_nodes:
        if node.cpus:
            assert said.count(f"NUMA node {node.id}") == 1
    for group in groups(graph):
        assert any(line.startswith(f"{group.name}: {group.shape} of") for line in said)


@pytest.mark.parametrize("name", RECORDED)
def test_chips_do_not_cover_each_other(name: str) -> None:
    chips = []
    for group in drawn(recorded(name)).iter(f"{NAMESPACE}g"):
        rect = next(group.iter(f"{NAMESPACE}rect"))
        chips.append(tuple(float(rect.get(k, "0")) for k in ("x", "y", "width", "height")))
    for (x, y, w, h), (u, v, p, q) in combinations(chips, 2):
        assert x + w <= u + 0.01 or u + p <= x + 0.01 or y + h <= v + 0.01 or v + q <= y + 0.01


def test_direct_links_are_lines_as_wide_as_their_lanes() -> None:
    picture = drawn(recorded("dgx1-v100"))
    widths = {
        "".join(line.itertext()): float(line.get("stroke-width", "0"))
        for line in picture.iter(f"{NAMESPACE}line")
        if "".join(line.itertext())
    }
    assert len(widths) == 16
    assert widths["gpu-0 and gpu-3: 2 lanes"] == 2 * widths["gpu-0 and gpu-1: 1 lane"]


def test_links_on_which_the_ends_disagree_are_dashed() -> None:
    lines = [
        line
        for line in drawn(recorded("asymmetric-link")).iter(f"{NAMESPACE}line")
        if "disagree" in "".join(line.itertext())
    ]
    assert len(lines) == 3
    assert all(line.get("stroke-dasharray") for line in lines)


def test_switches_are_a_hub_with_a_spoke_a_gpu() -> None:
    picture = drawn(recorded("hgx-h100-oci"))
    spokes = [
        said
        for line in picture.iter(f"{NAMESPACE}line")
        if "NVSwitches" in (said := "".join(line.itertext()))
    ]
    assert len(spokes) == 8
    assert words(picture).count("NVSwitch") == 1


def test_a_lost_gpu_is_marked_and_a_badge_replaces_the_address() -> None:
    machine = recorded("one-lost")
    lost = next(gpu for gpu in machine.gpus if gpu.lost)
    held = next(gpu for gpu in machine.gpus if not gpu.lost)
    said = words(drawn(machine, badges={held.pci: Badge("ns/train-0")}))
    assert "lost" in said
    assert said[said.index(lost.name) + 1] == "lost"
    assert said[said.index(held.name) + 1] == "ns/train-0"


def test_what_a_driver_calls_things_cannot_break_out() -> None:
    machine = recorded("pcie-a100-pairs")
    evil = '</title><script>alert("x")</script>\x01\x1b[31m&amp;\ud7ff\ufffe'
    gpus = tuple(replace(gpu, product=evil) for gpu in machine.gpus)
    nics = tuple(replace(nic, rdma=(evil,)) for nic in machine.nics)
    hostile = replace(machine, gpus=gpus, nics=nics, unknown=(evil,))
    graph = build(hostile)
    picture = svg(graph, groups(graph))
    ElementTree.fromstring(picture)
    assert "<script" not in picture
    drawing = dot(graph, groups(graph))
    assert all(line.count('"') % 2 == 0 for line in drawing.replace('\\"', "").split("\n"))


@pytest.mark.parametrize("name", RECORDED)
def test_dot_names_every_gpu_and_link(name: str) -> None:
    machine = recorded(name)
    graph = build(machine)
    drawing = dot(graph, groups(graph))
    assert drawing.count("{") == drawing.count("}")
    for gpu in machine.gpus:
        assert len(re.findall(rf"^ +gpu_{gpu.number} \[", drawing, re.MULTILINE)) == 1
    assert drawing == dot(build(machine), groups(build(machine)))


@pytest.mark.parametrize(("output", "start"), [("svg", "<svg xmlns="), ("dot", "graph machine {")])
def test_the_command_draws(output: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(MACHINES / "hgx-h100-oci"), "-o", output]) == 0
    assert capsys.readouterr().out.startswith(start)
