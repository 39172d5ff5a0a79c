"""The device plugin's last decisions: JSON for programs, and a few lines each for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from plugin.decisions import Call, Decision
from rte.graph.build import Graph
from rte.view.reason import names, preference_document, runner_up_document, said
from rte.view.why import why


def decisions_json(decisions: Iterable[Decision]) -> bytes:
    """What /decisions answers, oldest first."""
    return json.dumps([document(decision) for decision in decisions], indent=1).encode() + b"\n"


def document(decision: Decision) -> dict[str, Any]:
    """One decision as plain JSON values; its preference as `rte choose -o json` has it."""
    pod = decision.pod
    return {
        "number": decision.number,
        "at": moment(decision),
        "call": str(decision.call),
        "resource": decision.resource,
        "pod": None if pod is None else {"namespace": pod.namespace, "name": pod.name},
        "container": decision.container,
        "offered": list(decision.offered),
        "required": list(decision.required),
        "size": decision.size,
        "answer": list(decision.answer),
        "exact": decision.exact,
        "decided_by": decision.decided_by,
        "preference": preference_document(decision.preference),
        "runner_up": runner_up_document(decision.runner_up),
        "why": decision.why,
        "took_s": decision.took_s,
    }


def decisions_text(decisions: Iterable[Decision], graph: Graph | None) -> bytes:
    """The same in words, the newest first; GPUs by number where the graph has them."""
    newest_first = list(decisions)[::-1]
    lines = [line for decision in newest_first for line in (*described(decision, graph), "")]
    return "".join(f"{line}\n" for line in lines or ["no decision yet"]).encode()


def described(decision: Decision, graph: Graph | None) -> Iterator[str]:
    name_of = {} if graph is None else names(graph)
    whose = ""
    if decision.pod is not None:
        pod = decision.pod
        whose = f" for {pod.namespace}/{pod.name}, container {decision.container}"
    yield f"#{decision.number} {moment(decision)} {decision.resource}{whose}"
    if decision.offered:
        yield f"  offered  {said(decision.offered, name_of)}"
    if decision.required:
        yield f"  required {said(decision.required, name_of)}"
    answer = said(decision.answer, name_of) or "nothing"
    if decision.call is Call.ALLOCATED:
        yield f"  taken    {answer}"
        yield f"  because  {decision.why}"
        return
    how = "" if decision.exact else ", after a bounded search"
    yield f"  chosen   {answer} in {1000 * decision.took_s:.1f} ms{how}"
    if graph is not None and decision.preference is not None:
        sentence = why(
            graph,
            decision.preference,
            runner_up=decision.runner_up,
            decided_by=decision.decided_by,
        )
        by = f" ({decision.decided_by})" if decision.decided_by else ""
        yield f"  because  {sentence}{by}"
    if decision.why:
        yield f"  note     {decision.why}"


def moment(decision: Decision) -> str:
    return datetime.fromtimestamp(decision.at, UTC).isoformat(timespec="milliseconds")
