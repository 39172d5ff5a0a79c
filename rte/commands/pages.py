"""The pages of a node's HTTP server, beside its probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from plugin.life import DevicePlugin
from rte.graph.build import Graph
from rte.graph.groups import Group
from rte.metrics import CONTENT_TYPE, Measured, renderer
from rte.status import JSON, TEXT, Page


def pages(
    measured: Measured,
    *,
    graph: Callable[[], Graph | None],
    groups: Callable[[Graph], Sequence[Group]],
    plugin: DevicePlugin | None,
) -> Mapping[str, Page]:
    """By path. `graph` is that of the hardware as last looked at, None before there is one."""

    # What makes a page is imported by who asks for it: a daemon's memory is a promise.

    def topology() -> bytes:
        from rte.view.document import document  # noqa: PLC0415

        now = graph()
        return (b"{}" if now is None else msgspec.json.encode(document(now, groups(now)))) + b"\n"

    found = {
        "/metrics": Page(CONTENT_TYPE, renderer(measured)),
        "/topology": Page(JSON, topology, names_pods=True),
    }
    if plugin is None:
        return found
    decisions = plugin.decisions

    def as_json() -> bytes:
        from rte.commands.decided import decisions_json  # noqa: PLC0415

        return decisions_json(decisions)

    def as_text() -> bytes:
        from rte.commands.decided import decisions_text  # noqa: PLC0415

        return decisions_text(decisions, graph())

    return {
        **found,
        "/decisions": Page(JSON, as_json, names_pods=True),
        "/decisions.txt": Page(TEXT, as_text, names_pods=True),
    }
