"""The CDI specifications of this node as they are at the moment, and ours among them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from plugin import cdi
from plugin.allocation import Handing, Nodes, Owner
from rte.model import DeviceId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the configuration wants of CDI."""

    handing: Handing
    directories: tuple[Path, ...]  # the last is where ours is written
    nodes_only: bool


class Specs:
    """Reads again what has changed; ours is made and removed here."""

    def __init__(self, wanted: Wanted, say: Callable[[str], None]) -> None:
        """`say` tells people a sentence, once."""
        self._wanted = wanted
        self._say = say
        self._stamps: cdi.Stamps | None = None
        self._named: cdi.Stamps | None = None  # `_stamps` when names were given last
        self._listed = cdi.Listed({}, ())

    def listed(self) -> cdi.Listed:
        """What the specifications list, read only when one has changed."""
        stamps = cdi.stamps(self._wanted.directories)
        if stamps != self._stamps:
            self._stamps = stamps
            self._listed = cdi.read_listed(self._wanted.directories)
            for sentence in self._listed.unreadable:
                self._say(sentence)
        return self._listed

    def changed(self) -> bool:
        """Whether a file has changed since `names`: the toolkit writes when it likes."""
        wanted = self._wanted
        return wanted.handing.has_cdi and cdi.stamps(wanted.directories) != self._named

    def wants_own(self) -> bool:
        """Whether a specification of ours is to be there."""
        wanted = self._wanted
        return wanted.handing.has_cdi and cdi.wants_own(
            wanted.handing, nodes_only=wanted.nodes_only, listed=self.listed()
        )

    def names(
        self, ids: Collection[DeviceId], *, owners: Mapping[DeviceId, Owner], nodes: Nodes
    ) -> Mapping[DeviceId, str]:
        """A qualified name for each id that has one; writes our specification where wanted."""
        wanted, listed = self._wanted, self.listed()
        self._named = self._stamps
        own: frozenset[str] = frozenset()
        if self.wants_own():
            spec = cdi.nodes_spec(ids, owners=owners, handing=wanted.handing, nodes=nodes)
            own = frozenset(device["name"] for device in spec["devices"])
            try:
                cdi.write_spec(spec, wanted.directories[-1])
            except cdi.CdiError as error:
                self._say(str(error))
        found = cdi.names(ids, owners=owners, handing=wanted.handing, listed=listed, own=own)
        for id in ids:
            if id not in found:
                self._say(
                    f"no CDI specification lists {id}, pods that are given it will fail: "
                    f"`{cdi.MAKE_GPUS}`"
                )
        return found

    def remove_own(self) -> None:
        """Removes ours; others' are left alone."""
        path = cdi.remove_spec(self._wanted.directories[-1])
        if path is not None:
            log.info("%s is removed: no pod needs it", path)


def check_start(wanted: Wanted) -> None:
    """Raises CdiError when CDI is asked for and cannot work."""
    if wanted.handing.has_cdi:
        listed = cdi.read_listed(wanted.directories)
        own = cdi.wants_own(wanted.handing, nodes_only=wanted.nodes_only, listed=listed)
        cdi.check_start(wanted.handing, listed, wanted.directories, own=own)
