"""What became of a pod, told to people: where it was admitted or why it was not, and the reason
of each choice of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plugin.decisions import Call, Decision
from rte.graph.build import Graph
from rte.graph.choose import choose
from rte.kubelet.admission import Admitted, Rejected
from rte.kubelet.node import KubeletState
from rte.kubelet.spec import PodSpec, pod_total
from rte.model import ContainerUse, DeviceId, ranges
from rte.view.ink import Ink
from rte.view.why import beside, devices, why
from rte.view.zones import amount

Zones = Mapping[str, Mapping[str, int]]
"""NUMA node → resource → what is free, in base units."""


class Teller:
    """Writes what became of pods on one machine; `state` gives the kubelet's at the moment."""

    def __init__(self, ink: Ink, graph: Graph, state: Callable[[], KubeletState]) -> None:
        self.ink = ink
        self.graph = graph
        self.state = state

    def head(self, spec: PodSpec) -> None:
        asks = totals(spec)
        words = ", ".join(asked(name, milli) for name, milli in asks.items()) or "nothing"
        name = spec.pod.name
        if spec.pod.namespace != "default":
            name = f"{spec.pod.namespace}/{name}"
        self.ink.line()
        self.ink.line((f"Pod {name}", "bold"), f" asks {words} ({spec.qos})")

    def placed(self, spec: PodSpec, answer: Admitted) -> None:
        several = len(answer.containers) > 1
        label = "admitted"
        for use in answer.containers:
            words = self.place(use)
            self.ink.labelled(label, f"{use.name}: {words}" if several else words, "green")
            label = ""
        if any(use.devices for use in answer.containers) and spec.qos != "Guaranteed":
            words = f"{spec.qos} pods have no CPUs and memory of their own, only devices"
            self.ink.labelled("", words)
        self.unregistered(spec)

    def unregistered(self, spec: PodSpec) -> None:
        """What the pod asks for that the kubelet knows nothing of."""
        known = self.state().devices
        asks = {name for container in spec.containers for name in container.limits}
        for name in sorted(name for name in asks if "/" in name and name not in known):
            self.ink.labelled("", f"no plugin has registered {name}: the kubelet starts it without")

    def place(self, use: ContainerUse) -> str:
        """Where a container's things are, and which they are."""
        nodes = {n for device in use.devices for n in device.numa}
        nodes |= {n for block in use.memory for n in block.numa}
        nodes |= {self.state().topology.node[cpu] for cpu in use.cpus}
        by_list = self.graph.position
        ids = sorted((d.id for d in use.devices), key=lambda id: (by_list.get(id, 0), id))
        held = [self.said(ids)] if ids else []
        if use.cpus:
            held.append(f"CPUs {ranges(use.cpus)}")
        held += [
            amount(block.type, block.size_bytes) + ("" if block.type == "memory" else block.type)
            for block in use.memory
        ]
        if not held:
            return "nothing of its own, a share of the node"
        where = f"NUMA node{'s' if len(nodes) > 1 else ''} {ranges(sorted(nodes))}"
        return f"{where if nodes else 'NUMA node unknown'}: {', '.join(held)}"

    def rejected(self, spec: PodSpec, answer: Rejected, before: Zones) -> None:
        """The kubelet's words, and what was free before where they are about alignment."""
        self.ink.labelled("rejected", f"{answer.reason}: {answer.message}", "red")
        if answer.reason != "TopologyAffinityError":
            return
        asks = totals(spec)
        zones = {
            zone: {name: 1000 * units for name, units in free.items()}
            for zone, free in before.items()
        }
        known = [name for name in asks if any(name in free for free in zones.values())]
        label = "free"
        for zone, free in zones.items():
            words = ", ".join(
                asked(name, free.get(name, 0))
                + (" (too few)" if free.get(name, 0) < asks[name] else "")
                for name in known
            )
            self.ink.labelled(label, f"{zone}: {words}")
            label = ""
        if all(sum(free.get(name, 0) for free in zones.values()) >= asks[name] for name in known):
            self.ink.labelled(
                "note",
                "Together it would be enough: a scheduler that counts totals sends such a pod "
                "here, and it fails. One that reads these zones does not.",
            )

    def decided(self, decision: Decision, free: frozenset[DeviceId]) -> None:
        """What was offered, chosen, and why."""
        ink = self.ink
        if decision.call is Call.ALLOCATED:
            ink.labelled("plugin", self.unasked(decision, free))
            return
        took = f"in {decision.took_s * 1000:.1f} ms"
        required = f", {self.said(decision.required)} required" if decision.required else ""
        ink.labelled("offered", f"{self.said(decision.offered)}{required}")
        by = f"decided by {decision.decided_by}, " if decision.decided_by else ""
        ink.labelled("chosen", f"{self.said(decision.answer)}, {by}{took}", "cyan")
        if decision.preference is None:
            return
        graph = self.graph
        sentence = why(
            graph,
            decision.preference,
            runner_up=decision.runner_up,
            decided_by=decision.decided_by,
        )
        ink.labelled("because", sentence if decision.exact else f"{sentence} (bounded search)")
        first = first_fit(decision)
        if set(first) == set(decision.answer) or not set(first) <= set(graph.ids):
            return
        other = choose(graph, available=first, size=len(first), free=free).preference
        if other is not None:
            words = beside(graph, decision.preference, first, other)
            ink.labelled("instead of", f"the first of the list, {words}")

    def unasked(self, decision: Decision, free: frozenset[DeviceId]) -> str:
        """Why the kubelet took devices without a question."""
        numa = self.state().devices.get(decision.resource, {})
        here = {node for id in decision.answer for node in numa.get(id, ())}
        aligned = {id for id in free if here.intersection(numa.get(id, ()))}
        if aligned == set(decision.answer):
            where = f"NUMA node{'s' if len(here) > 1 else ''} {ranges(sorted(here))}"
            return f"was not asked: there was no choice, these are all free ones of {where}"
        return f"was {decision.why}"

    def said(self, ids: Sequence[DeviceId]) -> str:
        return devices(self.graph, ids)


def first_fit(decision: Decision) -> tuple[DeviceId, ...]:
    """What a plugin hands out that does not look at links: the first of the list."""
    others = (id for id in decision.offered if id not in decision.required)
    return (*decision.required, *others)[: decision.size]


def totals(spec: PodSpec) -> dict[str, int]:
    """What the pod asks at once, in thousandths; devices first, then cpu and memory."""
    asks = {*spec.requests, *(name for c in spec.containers for name in c.requests)}
    found = {}
    for name in sorted(asks, key=lambda name: ("/" not in name, name)):
        amounts = {c.name: c.requests.get(name, 0) for c in spec.containers}
        # What the pod asks as a whole stands in place of its containers' sum.
        if thousandths := spec.requests.get(name, pod_total(spec, amounts)):
            found[name] = thousandths
    return found


def asked(resource: str, thousandths: int) -> str:
    """An amount with what it is of."""
    if resource == "cpu":
        return f"{thousandths / 1000:g} CPU{'' if thousandths == 1000 else 's'}"
    units = -(-thousandths // 1000)
    if resource == "memory":
        return amount(resource, units)
    return f"{amount(resource, units)} {resource}"
