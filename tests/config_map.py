"""A ConfigMap's folder as the kubelet writes and changes it."""

import shutil
from itertools import count
from pathlib import Path

VERSIONS = count()


def write_config_map(folder: Path, text: str, *, name: str = "rte.yaml") -> Path:
    """The file `name` in it: all files change at once, by a link, and the former ones go."""
    folder.mkdir(exist_ok=True)
    version = folder / f"..{next(VERSIONS)}"
    version.mkdir()
    (version / name).write_text(text)
    data, fresh = folder / "..data", folder / "..data_tmp"
    former = data.resolve() if data.is_symlink() else None
    fresh.symlink_to(version.name)
    fresh.replace(data)
    if former is not None:
        shutil.rmtree(former)
    file = folder / name
    if not file.is_symlink():
        file.symlink_to(f"..data/{name}")
    return file
