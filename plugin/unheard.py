"""What pods hold, of which a kubelet that has just started is yet to hear, and lists nothing."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from plugin.moving import Listed
from plugin.registration import Signature, signature
from rte.kubelet.usage import COME_BACK_S

CHECKPOINT = "kubelet_internal_checkpoint"
"""In the folder of device plugins; the kubelet writes it at each change of what pods hold."""


class Unheard:
    """Remembers what a kubelet has listed since its start."""

    def __init__(self, *, pod_resources: Path | None, checkpoint: Path) -> None:
        """`pod_resources` is its socket, None where nobody asks it for lists."""
        self._socket = pod_resources
        self._checkpoint = checkpoint
        self._listed: set[Listed] = set()
        self._listed_by: Signature | None = None

    def beside(self, listed: Collection[Listed]) -> frozenset[Listed]:
        """What has been handed out, of pods that are yet to come into its lists, of which `listed`
        is the last: until then it keeps what they have."""
        if self._socket is None:
            return frozenset()
        kubelet = signature(self._socket)
        if kubelet != self._listed_by:
            self._listed, self._listed_by = set(), kubelet
        self._listed.update(listed)
        if kubelet is None or not 0 <= time.time() - kubelet[2] / 1e9 < COME_BACK_S:
            return frozenset()
        return self.handed_out() - self._listed

    def handed_out(self) -> frozenset[Listed]:
        """What the checkpoint has, also of pods that ended since it was written."""
        from rte.kubelet.state import StateFileError, read_devices  # noqa: PLC0415 - seldom; memory

        try:
            found = read_devices(self._checkpoint).held.values()
        except StateFileError:
            return frozenset()
        return frozenset(Listed(*pair) for pairs in found for pair in pairs)
