"""A ConfigMap's or Secret's folder as the kubelet writes and changes it."""

import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path

VERSIONS = count()


def write_config_map(folder: Path, text: str, *, name: str = "rte.yaml") -> Path:
    """A folder of one file, whose path this is."""
    write_volume(folder, {name: text})
    return folder / name


def write_volume(folder: Path, files: Mapping[str, str]) -> None:
    """All files change at once, by a link, and the former ones go."""
    folder.mkdir(exist_ok=True)
    version = folder / f"..{next(VERSIONS)}"
    version.mkdir()
    for name, text in files.items():
        (version / name).write_text(text)
    data, fresh = folder / "..data", folder / "..data_tmp"
    former = data.resolve() if data.is_symlink() else None
    fresh.symlink_to(version.name)
    fresh.replace(data)
    if former is not None:
        shutil.rmtree(former)
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
