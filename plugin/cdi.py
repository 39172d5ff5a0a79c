"""The CDI specifications of this node: which devices they list, and one of our own by option.

A full specification (driver libraries, hooks) is the NVIDIA container toolkit's work and changes
with each driver; we refer to it. Ours has device nodes only: containers that bring no libcuda of
their own do not find one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plugin.allocation import Handing, Nodes, Owner, Strategy, device_name, paths
from rte.model import DeviceId

TOOLKIT_VENDOR = "nvidia.com"
# NVIDIA's plugin's name for its specification, so that ours takes its place and not another's.
OWN_KIND = "k8s.device-plugin.nvidia.com/gpu"
OWN_FILE = "k8s.device-plugin.nvidia.com-gpu.json"
# NVIDIA's specification of 16 GPUs has some 60 KiB.
LARGEST_SPEC = 4 << 20
MAKE_GPUS = (
    "nvidia-ctk cdi generate --device-name-strategy=uuid --device-name-strategy=index "
    "--output=/var/run/cdi/nvidia.yaml"
)
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*/[A-Za-z][A-Za-z0-9_.-]*")


class CdiError(Exception):
    """CDI was asked for and the node has no specification for it."""


class Listed(NamedTuple):
    """What the specifications of a node list."""

    names: Mapping[str, Path]  # by qualified name, the file
    unreadable: tuple[str, ...]  # sentences for people


Stamps = tuple[tuple[Path, int, int], ...]
"""Path, time of change and size of each file."""


def stamps(directories: Sequence[Path]) -> Stamps:
    """Equal as long as no specification has changed; costs a stat each, not a parse."""
    return tuple(
        (path, found.st_mtime_ns, found.st_size)
        for directory in directories
        for path in _specifications(directory)
        if (found := _stat(path)) is not None
    )


def read_listed(directories: Sequence[Path]) -> Listed:
    """All qualified names; a later directory wins, and two files of one directory cancel out.

    A directory or file that is absent lists nothing; one that cannot be read or is no
    specification is named in `unreadable`.
    """
    names: dict[str, Path] = {}
    unreadable = []
    for directory in directories:
        seen: set[str] = set()
        for path in _specifications(directory):
            try:
                found = parse_names(_read(path), yaml=path.suffix == ".yaml")
            except (OSError, ValueError) as error:
                unreadable.append(f"{path}: {error}")
                continue
            for name in found:
                if name in seen:
                    unreadable.append(f"{path}: {name} is in another file of {directory} too")
                    names.pop(name, None)
                else:
                    names[name] = path
            seen.update(found)
    return Listed(names, tuple(unreadable))


def parse_names(text: str, *, yaml: bool) -> tuple[str, ...]:
    """The qualified names of one specification. Raises ValueError for what is none."""
    spec = _yaml(text) if yaml else json.loads(text)
    kind = spec.get("kind") if isinstance(spec, dict) else None
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ValueError(f"not a CDI specification: kind is {kind!r}")
    devices = spec.get("devices")
    if not isinstance(devices, list) or not all(isinstance(d, dict) for d in devices):
        raise ValueError("not a CDI specification: devices is no list of mappings")
    return tuple(f"{kind}={device.get('name')}" for device in devices)


def check_start(
    handing: Handing, listed: Listed, directories: Sequence[Path], *, own: bool
) -> None:
    """Nothing, when what is asked for can work; else CdiError names the file and the command.

    `own` says that a specification of device nodes only is wanted.
    """
    if not handing.has_cdi:
        return
    last = directories[-1]
    if not own and not _gpus(listed):
        raise CdiError(
            f"{' and '.join(sorted(handing.strategies))}: no CDI specification in "
            f"{' or '.join(map(str, directories))} lists {TOOLKIT_VENDOR}/gpu devices; make "
            f"{last / 'nvidia.yaml'} with `{MAKE_GPUS}`, or set cdi.nodesOnly (containers then "
            "must bring libcuda)" + "".join(f"; {problem}" for problem in listed.unreadable)
        )
    plain = any(not strategy.is_cdi for strategy in handing.strategies)
    for name, mode in _extras(handing).items():
        # Beside a strategy that has its own word for it, CDI need not bring it.
        if name not in listed.names and not plain:
            raise CdiError(
                f"no CDI specification lists {name}; make it with `nvidia-ctk cdi generate "
                f"--mode={mode} --output={last / f'nvidia-{mode}.yaml'}`"
            )


def wants_own(handing: Handing, *, nodes_only: bool, listed: Listed) -> bool:
    """Whether our own specification is written: asked for, or beside envvar when there is none."""
    beside = Strategy.ENVVAR in handing.strategies and not _gpus(listed)
    return handing.has_cdi and (nodes_only or beside)


def names(
    ids: Collection[DeviceId],
    *,
    owners: Mapping[DeviceId, Owner],
    handing: Handing,
    listed: Listed,
    own: Collection[str],
) -> Mapping[DeviceId, str]:
    """A qualified name for each id that has one: the toolkit's, else one of `own`, ours."""
    found = {}
    for id in ids:
        toolkit = (f"{TOOLKIT_VENDOR}/gpu={n}" for n in (device_name(id, owners, handing), id))
        name = next((n for n in toolkit if n in listed.names), None)
        if name is not None:
            found[id] = name
        elif device_name(id, owners, handing) in own:
            found[id] = f"{OWN_KIND}={device_name(id, owners, handing)}"
    return found


def extra_names(handing: Handing, listed: Listed) -> tuple[str, ...]:
    """The qualified names of channels and switches that go to each container."""
    return tuple(name for name in _extras(handing) if name in listed.names)


def nodes_spec(
    ids: Iterable[DeviceId],
    *,
    owners: Mapping[DeviceId, Owner],
    handing: Handing,
    nodes: Nodes,
) -> Mapping[str, Any]:
    """A specification of device nodes, at the lowest version that runtimes of all ages read.

    Numbers are left out: the runtime takes them from the host's nodes.
    """

    def node(path: str) -> dict[str, str]:
        host = os.path.join(handing.dev_root, "dev", path)
        inside = f"/dev/{path}"
        return {"path": inside} if host == inside else {"path": inside, "hostPath": host}

    devices = []
    for id in ids:
        own = [node(path) for path in paths(id, owners, nodes)]
        if own:
            name = device_name(id, owners, handing)
            devices.append({"name": name, "containerEdits": {"deviceNodes": own}})
    common = [node(path) for path in nodes.control]
    # 0.5.0 brought hostPath, and names that start with a digit.
    newer = handing.ids == "index" or handing.dev_root != "/"
    return {
        "cdiVersion": "0.5.0" if newer else "0.3.0",
        "kind": OWN_KIND,
        "devices": devices,
        **({"containerEdits": {"deviceNodes": common}} if common else {}),
    }


def write_spec(spec: Mapping[str, Any], directory: Path) -> Path | None:
    """Put our specification in place at one stroke; the path, or None if it was there as it is.

    A specification without devices is none: the file is removed then. Raises CdiError when the
    directory cannot be written.
    """
    path = directory / OWN_FILE
    text = json.dumps(spec, indent=1)
    temporary = directory / f"{OWN_FILE}.tmp"
    try:
        if not spec["devices"]:
            path.unlink(missing_ok=True)
            return None
        if path.exists() and path.read_text() == text:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise CdiError(f"cannot write {path}: {error.strerror}") from error
    return path


def remove_spec(directory: Path) -> Path | None:
    """Our specification's path when it was there and is gone now; others' are left alone."""
    path = directory / OWN_FILE
    try:
        if f"{OWN_KIND}=" not in "\n".join(parse_names(_read(path), yaml=False)):
            return None
        path.unlink()
    except (OSError, ValueError):
        return None
    return path


def _gpus(listed: Listed) -> bool:
    """Whether single GPUs are listed: a specification that has only `all` names none of them."""
    kind = f"{TOOLKIT_VENDOR}/gpu="
    return any(name.startswith(kind) and name != f"{kind}all" for name in listed.names)


def _extras(handing: Handing) -> dict[str, str]:
    """Qualified name → the toolkit's mode that makes its specification."""
    switches = {"gdrcopy": handing.gdrcopy, "gds": handing.gds, "mofed": handing.mofed}
    return {
        **{f"{TOOLKIT_VENDOR}/imex-channel={c}": "imex" for c in handing.imex_channels},
        **{f"{TOOLKIT_VENDOR}/{name}=all": name for name, on in switches.items() if on},
    }


def _specifications(directory: Path) -> list[Path]:
    try:
        return sorted(p for p in directory.iterdir() if p.suffix in (".json", ".yaml"))
    except OSError:
        return []


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _read(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        text = file.read(LARGEST_SPEC + 1)
    if len(text) > LARGEST_SPEC:
        raise ValueError(f"larger than {LARGEST_SPEC >> 20} MiB")
    return text


def _yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415 - only a node with CDI pays for it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from error
