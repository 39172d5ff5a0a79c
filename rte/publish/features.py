"""The Node's labels as a file for node-feature-discovery, which writes them to the Node."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rte.publish.apply import Body
from rte.publish.labels import feature_file
from rte.publish.publisher import Outcome, Sink, Wrote, replace_file

log = logging.getLogger(__name__)


class FeatureFile:
    """A sink that writes labels to the file, and all else to another sink.

    A file that cannot be written is no reason to publish nothing: that is logged once, and tried
    again with the next publication or re-reading.
    """

    def __init__(self, sink: Sink, path: Path) -> None:
        self._sink = sink
        self._path = path
        self._wanted: bytes | None = None
        self._problem: str | None = None  # as logged

    def publish(self, body: Body, now: float) -> Outcome:
        if body["kind"] != "Node":
            return self._sink.publish(body, now)
        self._wanted = feature_file(body["metadata"]["labels"]).encode()
        return self._put()

    def reread(self, now: float) -> tuple[Outcome, ...]:
        """Also puts the file back."""
        put = self._put()
        return (*self._sink.reread(now), *([put] if put.wrote.is_write else []))

    def echo(self) -> Outcome | None:
        return self._sink.echo()

    def problems(self, now: float) -> Mapping[str, str]:
        return self._sink.problems(now)

    def forget(self) -> None:
        self._sink.forget()

    def _put(self) -> Outcome:
        if self._wanted is None or self._wanted == self._content():
            return Outcome("Node", Wrote.UNCHANGED)
        try:
            replace_file(self._path, self._wanted)
        except OSError as error:
            problem = f"labels.featureFile {self._path} cannot be written: {error.strerror}"
            if problem != self._problem:
                log.warning("%s", problem)
            self._problem = problem
            return Outcome("Node", Wrote.UNCHANGED)
        self._problem = None
        return Outcome("Node", Wrote.APPLIED, len(self._wanted))

    def _content(self) -> bytes | None:
        """What the file has; None where it cannot be read."""
        try:
            return self._path.read_bytes()
        except OSError:
            return None
