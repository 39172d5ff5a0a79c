"""What the kubelet's PodResources socket is asked: what is in use, and what can be handed out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc

from rte.kubelet.usage import (
    ALLOCATABLE,
    LIST,
    KubeletError,
    channel,
    read_allocatable,
    read_usage,
)
from rte.model import Allocatable, Usage

log = logging.getLogger(__name__)

CALL_S = 5.0
UNKNOWN = {
    LIST: "what is in use",
    ALLOCATABLE: "what the kubelet has of the devices here",
}
"""What a call that fails leaves unknown."""

T = TypeVar("T")


class PodResources:
    """Asks; that there is no answer is logged once, and so is that there is one again."""

    def __init__(self, socket: Path) -> None:
        """Raises KubeletError for a socket whose path is too long."""
        self.channel = channel(socket)
        self._unanswered: dict[str, grpc.StatusCode | None] = {}

    def usage(self) -> Usage | None:
        """What pods hold; None when the kubelet does not say."""
        return self._ask(LIST, read_usage)

    def allocatable(self) -> Allocatable | None:
        """What the kubelet can hand out, in use or not; None when it does not say."""
        return self._ask(ALLOCATABLE, read_allocatable)

    def close(self) -> None:
        self.channel.close()

    def _ask(self, asked: str, read: Callable[[grpc.Channel, float], T]) -> T | None:
        try:
            found = read(self.channel, CALL_S)
        except KubeletError as error:
            if asked not in self._unanswered or self._unanswered[asked] is not error.code:
                self._unanswered[asked] = error.code
                log.warning("%s is not known for now: %s", UNKNOWN[asked], error)
            return None
        if asked in self._unanswered:
            del self._unanswered[asked]
            log.info("%s is known again", UNKNOWN[asked])
        return found
