"""Where the kubelet's configuration is read: a named file, the running kubelet's command line, the
kubelet itself (/configz), or the file where kubeadm puts it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rte.kubelet.policy import (
    PolicyError,
    drop_in_files,
    parse_policy,
    read_kubelet_commands,
    read_policy,
)
from rte.model import Policy

log = logging.getLogger(__name__)


class Unanswered(PolicyError):
    """The kubelet could not be asked, or has not answered."""


class Configuration:
    """The sources in their order; each `read` asks the first that there is."""

    def __init__(
        self,
        *,
        file: Path | None,
        drop_ins: Path | None,
        default: Path,
        command: bool = False,
        configz: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """`file` and `drop_ins` are the operator's word. `command` looks for the kubelet's process,
        which takes the host's process namespace. `configz` asks the kubelet and may raise
        Unanswered; then `default` is read, which is in the kubelet's root directory, unless the
        kubelet has answered before: one that is just starting is no other kind of kubelet."""
        self.changed: float | None = None
        """When the content of the files last read was changed, seconds since the epoch; None: the
        running kubelet itself has answered."""
        self._other_root: Path | None = None  # that was said
        self._has_answered = False
        self._file = file
        self._drop_ins = drop_ins
        self._default = default
        self._command = command
        self._configz = configz

    def read(self) -> Policy | None:
        """The policy, or None where there is no source. Raises PolicyError."""
        if self._file is not None or self._drop_ins is not None:
            return self._from_files(self._file, self._drop_ins)
        if self._command:
            return self._from_command()
        try:
            return self._from_kubelet()
        except Unanswered:
            if self._has_answered or not self._default.exists():
                raise
        return self._from_files(self._default, None)

    def _from_kubelet(self) -> Policy | None:
        if self._configz is None:
            return self._from_files(self._default, None) if self._default.exists() else None
        policy = parse_policy(self._configz())
        self._has_answered = True
        self.changed = None
        return policy

    def _from_command(self) -> Policy:
        """Of the node's own kubelet, by its flags and the files that they name."""
        kubelets = read_kubelet_commands()
        if not kubelets:
            raise PolicyError(
                "process list",
                "no kubelet is seen here; kubelet.findCommand takes hostPID, or name its file by "
                "kubelet.configFile",
            )
        found = kubelets[0]
        root = self._default.parent
        if found.root_dir not in (root, self._other_root):
            self._other_root = found.root_dir
            log.warning(
                "the kubelet's --root-dir is %s: kubelet.rootDir, which is %s, should say so",
                found.root_dir,
                root,
            )
        return self._from_files(found.config, found.config_dir, flags=found.flags)

    def _from_files(
        self, file: Path | None, drop_ins: Path | None, flags: Mapping[str, str] | None = None
    ) -> Policy:
        policy = read_policy(file, drop_ins=drop_ins, flags=flags)
        paths = [*([file] if file else []), *(drop_in_files(drop_ins) if drop_ins else [])]
        times = [path.stat().st_mtime_ns / 1e9 for path in paths if path.exists()]
        self.changed = max(times, default=None)
        return policy
