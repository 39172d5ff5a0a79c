"""Files of strangers: whatever is in them, the answer is a machine or a SourceError, and soon."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rte.__main__ import main
from rte.graph.build import build
from rte.graph.groups import groups
from rte.sources import MAX_BYTES, SourceError, parse_source, read_source
from rte.view.dot import dot
from rte.view.nccl import NotForNccl, nccl
from rte.view.svg import svg
from rte.view.text import text
from tests.corpus import matrices, xml_files
from tests.stopwatch import Stopwatch

BOMB = (
    '<?xml version="1.0"?>\n<!DOCTYPE system [\n<!ENTITY a "aaaaaaaaaa">\n'
    + "".join(
        f'<!ENTITY {b} "{f"&{a};" * 10}">\n' for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + "]>\n<system><cpu numaid='&i;'/></system>"
)

HOSTILE: dict[str, bytes] = {
    "an entity bomb": BOMB.encode(),
    "an external entity": b'<!DOCTYPE system [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
    b"<system>&x;</system>",
    "a parameter entity": b'<!DOCTYPE t [<!ENTITY % x SYSTEM "http://127.0.0.1/x"> %x;]><t/>',
    "an attribute list": b'<!DOCTYPE system [<!ATTLIST cpu numaid CDATA "0">]><system/>',
    "an undefined entity": b"<system>&lol;</system>",
    "elements 100 000 deep": b"<system>" + b"<pci>" * 100_000,
    "elements 200 deep": b"<topology>" + b"<object>" * 200 + b"</object>" * 200 + b"</topology>",
    "a million elements": b"<system>" + b"<cpu/>" * 1_000_000 + b"</system>",
    "much text": b"<topology>" + b"x" * (5 << 20) + b"</topology>",
    "an odd encoding": b'<?xml version="1.0" encoding="utf-7"?><system/>',
    "no such encoding": b'<?xml version="1.0" encoding="klingon"?><system/>',
    "a zero byte": b"<system>\0</system>",
    "no element": b"<?xml version='1.0'?>",
    "another format": b"<html><body>GPU0</body></html>",
    "a graph": b"<graphs version='1'/>",
    "no machine": b"<topology/>",
    "two machines": b"<topology><object type='Machine'/><object type='Machine'/></topology>",
    "nothing": b"",
    "zeros": bytes(1 << 20),
    "one long line": b"GPU0 X " * (2 << 20),
    "a long word": b"\tGPU0\nGPU0\tX\t" + b"9" * (8 << 20),
    "a long number": b"\tGPU0\tGPU" + b"9" * 9999 + b"\nGPU0\tX\tNV" + b"9" * 9999 + b"\n",
    "YAML aliases": b"kind: NodeResourceTopology\na: &a [1]\nzones: [*a, *a]\n",
    "YAML without end": b"kind: NodeResourceTopology\nzones: " + b"[" * 100_000,
    "YAML with a tag": b"kind: NodeResourceTopology\nzones: !!python/object/apply:os.abort []\n",
    "a date that is none": b"kind: NodeResourceTopology\nzones: 2023-13-45\n",
    "JSON without end": b'{"kind":' + b"[" * 100_000,
    "JSON of something else": b'{"kind": "Pod"}',
    "a list of two": b'{"kind": "List", "items": [{}, {}]}',
    "zones that are none": b'{"kind": "NodeResourceTopology", "zones": [1]}',
    "a zone below itself": json.dumps(
        {
            "kind": "NodeResourceTopology",
            "zones": [
                {
                    "name": f"switch-{n}",
                    "type": "PCIeSwitch",
                    "parent": f"switch-{(n + 1) % 3000}",
                    "attributes": [{"name": "pci", "value": f"0000:{n // 32:02x}:{n % 32:02x}.0"}],
                }
                for n in range(3000)
            ],
        }
    ).encode(),
    "a resource without end": b'{"kind": "NodeResourceTopology", "zones": [{"name": "node-0", '
    b'"type": "Node", "resources": [{"name": "nvidia.com/gpu", "capacity": "9e999"}]}]}',
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_input_is_refused_in_words_and_at_once(what: str) -> None:
    stopwatch = Stopwatch()
    with pytest.raises(SourceError) as refused:
        parse_source(HOSTILE[what], "gift")
    assert stopwatch.took_s < 5
    words = str(refused.value)
    assert words.startswith("gift: ")
    assert 10 < len(words) < 600
    assert "root:" not in words


def test_a_line_of_100_mb_is_not_even_read(tmp_path: Path) -> None:
    file = tmp_path / "line"
    with file.open("wb") as out:
        out.truncate(100 << 20)
    with pytest.raises(SourceError, match=rf"more than {MAX_BYTES >> 20} MiB"):
        read_source(file)
    with pytest.raises(SourceError, match="more than"):
        read_source(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda path: None, "No such file", id="nothing there"),
        pytest.param(lambda path: path.mkdir(), "expected a recorded tree", id="empty folder"),
        pytest.param(lambda path: path.symlink_to(path), "cannot be read", id="a link to itself"),
        pytest.param(lambda path: path.write_bytes(b"\xff" * 99), "nothing that", id="no text"),
    ],
)
def test_a_place_without_a_machine_is_named(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    make(tmp_path / "here")
    with pytest.raises(SourceError, match=words) as refused:
        read_source(tmp_path / "here")
    assert str(tmp_path / "here") in str(refused.value)


def test_the_command_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bomb.xml"
    file.write_bytes(HOSTILE["an entity bomb"])
    for command in (["show"], ["choose", "--size", "1"]):
        assert main([*command, str(file)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith(f"rte {command[0]}: {file}: line 2: a document type")
        assert said.err.count("\n") == 1


def test_standard_input_is_a_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = matrices()["RTX-A6000_g4n0_vllm-8158.txt"].encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(matrix)))
    assert main(["show", "-", "-o", "smi"]) == 0
    assert "NV4" in capsys.readouterr().out


# Properties


def outcome(content: bytes) -> None:
    """A machine that everything downstream can bear, or a SourceError."""
    with contextlib.suppress(SourceError):
        graph = build(parse_source(content, "gift"))
        found = groups(graph)
        text(graph, found)
        svg(graph, found)
        dot(graph, found)
        with contextlib.suppress(NotForNccl):
            nccl(graph)


@given(st.binary(max_size=300))
def test_random_bytes(content: bytes) -> None:
    outcome(content)


SMALL = {
    name: content
    for name, content in {
        **xml_files(),
        **{name: text.encode() for name, text in matrices().items()},
    }.items()
    if len(content) < 45_000
}


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from(sorted(SMALL)), st.randoms(use_true_random=False))
def test_real_files_cut_and_mangled(name: str, dice: Random) -> None:
    content = bytearray(SMALL[name])
    for _ in range(dice.choice([0, 1, 5, 50])):
        at = dice.randrange(len(content))
        content[at] = dice.choice([dice.randrange(256), *b'0"<>/ \n=:xf-'])
    outcome(bytes(content[: dice.choice([len(content), dice.randrange(len(content))])]))


WORDS = st.sampled_from(
    ["0", "-1", "7", "1", "999999999", "", " ", "0x10de", "0x030200", "0x060400", "0x0207",
     "0000:3b:00.0", "0000:3b:00.1", "fffffff:ffff:ff", "16.0 GT/s PCIe", "x", "nan", "²", "1,,f",
     "ffffffff,0", "0604 [8086:2030] [0000:0000] 04", "0302 [10de:1db8] [0000:0000] a1",
     "0000:[00-ff]", "0-1", "1-1", "NVLinkBandwidth", "nvml0", "4", "48", "Machine", "NUMANode",
     "Bridge", "PCIDev", "OSDev", "gp"]
)  # fmt: skip
NAMES = {
    "system": ["cpu", "pci", "nic", "net", "gpu", "nvlink", "c2c", "pcilink", "xgmi"],
    "topology": ["object", "info", "distances2", "indexes", "u64values", "page_type", "distances"],
}
ATTRIBUTES = {
    "system": ["numaid", "affinity", "busid", "class", "vendor", "device", "link_speed", "sm",
               "link_width", "dev", "target", "count", "tclass", "bw", "name", "host_hash"],
    "topology": ["type", "os_index", "cpuset", "nodeset", "gp_index", "bridge_type", "bridge_pci",
                 "pci_busid", "pci_type", "pci_link_speed", "name", "value", "nbobjs", "size",
                 "osdev_type", "subtype", "local_memory", "count", "latency_base", "indexing"],
}  # fmt: skip


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    root = draw(st.sampled_from(sorted(NAMES)))

    def element(depth: int) -> str:
        tag = draw(st.sampled_from(NAMES[root]))
        attributes = draw(st.dictionaries(st.sampled_from(ATTRIBUTES[root]), WORDS, max_size=8))
        inner = "".join(element(depth + 1) for _ in range(draw(st.integers(0, 3 - depth // 2))))
        said = "".join(f" {name}={quoteattr(value)}" for name, value in attributes.items())
        return f"<{tag}{said}>{inner or draw(WORDS).replace('<', '')}</{tag}>"

    start = "<object type='Machine' cpuset='0xff'>" if root == "topology" else ""
    end = "</object>" if root == "topology" else ""
    body = "".join(element(0) for _ in range(draw(st.integers(0, 4))))
    return f"<{root}>{start}{body}{end}{body}</{root}>".encode()


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(documents())
def test_documents_of_the_right_words_in_the_wrong_places(content: bytes) -> None:
    outcome(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.text(max_size=6)
    | st.sampled_from(["gpu-0", "gpu-1", "node-0", "GPU", "Node", "NIC", "PCIeSwitch", "switch-0"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["name", "type", "parent", "value", "capacity", "attributes", "costs",
                         "resources"]),
        inner,
        max_size=5,
    ),
    max_leaves=20,
)  # fmt: skip
ZONES = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["node-0", "node-1", "gpu-0", "gpu-1", "nic-0", "x"]),
            "type": st.sampled_from(["Node", "GPU", "NVLinkGroup", "NIC", "PCIeSwitch", "Memory"]),
        },
        optional={
            "parent": st.sampled_from(["node-0", "gpu-0", "x", "nic-0"]),
            "attributes": JSON
            | st.lists(
                st.fixed_dictionaries(
                    {
                        "name": st.sampled_from(
                            ["pci", "uuid", "gpus", "shape", "nvlinks.gpu-1", "numaNode", "domain",
                             "memory", "gpu", "healthReason", "linkSpeedGbps", "pcieLink"]
                        ),
                        "value": WORDS | st.sampled_from(["gpu-0,gpu-1", "mesh", "ring", "a.1"]),
                    }
                ),
                max_size=5,
            ),
            "costs": JSON,
            "resources": JSON,
        },
    ),
    max_size=6,
)  # fmt: skip


@given(ZONES | JSON)
def test_objects_with_odd_zones(zones: object) -> None:
    outcome(json.dumps({"kind": "NodeResourceTopology", "zones": zones}).encode())


PARTS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.sampled_from(["gpu-0", "gpu-1", "switch-0", "switch-1", "nic-0", "x", 7]),
            "pci": st.sampled_from(["0000:01:00.0", "0000:02:00.0", "10000:03:00.0", "x", None]),
            "switch": st.sampled_from(["switch-0", "switch-1", "gpu-0", "none"]),
            "a": st.sampled_from(["gpu-0", "gpu-1"]),
            "b": st.sampled_from(["gpu-0", "gpu-1", "gpu-2"]),
            "id": st.integers(-1, 5000),
            "numaNode": st.integers(-1, 3),
            "cpus": st.sampled_from(["0-3,8", "", "9-1", "0-99999", "x"]),
            "memory": st.sampled_from(["64Gi", "1e999", "-", "much"]),
            "gpu": st.sampled_from(["gpu-0", "gpu-9"]),
            "lanes": st.integers(-1, 40),
            "switchLanes": st.integers(0, 20),
            "state": st.sampled_from(["completed", "lost"]),
            "gpus": st.lists(st.sampled_from(["gpu-0", "gpu-1"]), max_size=2),
            "rdma": st.lists(st.sampled_from(["mlx5_0"]), max_size=2),
        },
    ),
    max_size=4,
)


@given(
    st.dictionaries(
        st.sampled_from(["numaNodes", "gpus", "switches", "nics", "nvlinks", "fabrics"]),
        PARTS | JSON,
    )
    | JSON
)
def test_fabrics_with_odd_parts(status: object) -> None:
    outcome(json.dumps({"kind": "GPUFabric", "status": status}).encode())


def test_nothing_is_opened_for_an_entity(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    os.mkfifo(secret)  # whoever opens it waits for ever
    document = f'<!DOCTYPE system SYSTEM "{secret}"><system><cpu numaid="0"/></system>'
    assert parse_source(document.encode(), "gift").numa_nodes
