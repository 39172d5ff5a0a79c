"""Who may import whom, and one door per heavy or untyped library (docs/development.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A room → the rooms it may import. The edge (commands, __main__) may import everything.
ALLOWED = {
    "rte.model": set(),
    "rte.backoff": set(),
    "rte.follower": {"rte.model"},
    "rte.discovery": {"rte.model", "rte.backoff"},
    "rte.sources": {"rte.model", "rte.discovery"},
    "rte.graph": {"rte.model"},
    "rte.kubelet": {"rte.model", "rte.backoff", "rte.follower"},
    "rte.publish": {"rte.model", "rte.backoff", "rte.follower", "rte.graph"},
    "rte.view": {"rte.model", "rte.graph"},
    "rte.config": {"rte.exporter", "rte.foreign", "rte.model", "rte.nvidia"},
    "rte.exporter": {"rte.foreign"},
    "rte.foreign": set(),
    "rte.nvidia": {"rte.foreign"},
    "rte.control": set(),
    "rte.metrics": {"rte.model", "rte.graph"},
    "rte.status": {"rte.model", "rte.graph", "rte.metrics", "rte.tls", "rte.view"},
    "rte.tls": {"rte.model"},
    "rte.pacer": {"rte.backoff", "rte.kubelet"},
    "rte.problems": {"rte.model"},
    "rte.asked": {"rte.model", "rte.backoff", "rte.kubelet", "rte.problems", "rte.publish"},
    "rte.agent": {
        "rte.model",
        "rte.asked",
        "rte.backoff",
        "rte.pacer",
        "rte.problems",
        "rte.graph",
        "rte.kubelet",
        "rte.publish",
    },
    "rte.standin": {"rte.model", "rte.kubelet", "rte.graph", "plugin"},
    "plugin": {"rte.model", "rte.graph", "rte.kubelet"},
}
EDGE = {"rte.commands", "rte.__main__"}

# A library → the only modules that may import it, at any depth.
DOORS = {
    "pynvml": {"rte.discovery.nvml", "rte.discovery.faults"},
    "pyudev": {"rte.discovery.udev"},
    "kubernetes": set(),
    "urllib3": {"rte.publish.apply"},
    "psutil": {"rte.kubelet.policy"},
    "xxhash": {"rte.publish.fingerprint", "rte.publish.placement"},
    "inotify_simple": {"rte.kubelet.watch"},
    "prometheus_client": {"rte.metrics", "rte.status"},
    "rich": {"rte.commands", "rte.view"},
    # Texts of strangers are parsed behind one bounded door; pictures only need to escape words.
    "xml": {"rte.sources.xml", "rte.view.nccl", "rte.view.svg"},
}


def modules() -> dict[str, Path]:
    found = {}
    for package in ("rte", "plugin"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(module: str) -> str:
    if module.split(".", maxsplit=1)[0] == "plugin":
        return "plugin"
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_what_its_room_may(module: str) -> None:
    here = room(module)
    if here in EDGE or module == "rte":
        return
    assert here in ALLOWED, f"{module}: no rule for {here}; add one here and in the documents"
    ours = {room(name) for name in imported(MODULES[module]) if name.startswith(("rte.", "plugin"))}
    assert ours - {here, "rte"} <= ALLOWED[here], f"{module} imports {sorted(ours - ALLOWED[here])}"


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_have_one_door(module: str) -> None:
    for name in imported(MODULES[module]):
        doors = DOORS.get(name.split(".")[0])
        if doors is not None:
            assert any(module == d or module.startswith(f"{d}.") for d in doors), (
                f"{module} imports {name}, which only {sorted(doors)} may"
            )


def test_no_relative_imports() -> None:
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module}:{node.lineno} imports relatively"


def test_the_documents_draw_this_house() -> None:
    text = (ROOT / "docs/development.md").read_text()
    drawn = {line.split()[0] for line in text.split("```")[1].strip().splitlines()}
    rooms = {room(module).replace(".", "/") for module in MODULES} - {"rte"}
    assert {path.removesuffix("/").removesuffix(".py") for path in drawn} >= rooms
    assert all((ROOT / path).exists() for path in drawn)
