"""A real kubelet with plugins, what our program publishes of it, and what a recount says."""

import json
import time
from collections.abc import Mapping
from typing import Any

from rte.kubelet import usage
from rte.kubelet.ended import ENDED, with_ended
from rte.kubelet.plausible import Doubt, Look, doubt
from rte.kubelet.state import read_handed_out
from rte.model import DeviceId, DeviceUse, NumaId, PodFacts, PodName
from rte.publish.nrt import nrt
from tests.observed import observe
from tests.real_kubelet import Admission, Kubelet, pod
from tests.recount import Zones, published, recount_all
from tests.simple_plugin import SimplePlugin

PATIENCE_S = 30.0
Devices = Mapping[str, tuple[int, ...] | None]


def differences(ours: Zones, right: Zones) -> str:
    """A line a figure."""
    if ours.keys() != right.keys():
        return f"{[*ours]} published, {[*right]} counted"
    return "\n".join(
        f"{zone} {name}: {ours[zone].get(name)} published, {right[zone].get(name)} counted"
        for zone in ours
        for name in sorted({*ours[zone], *right[zone]})
        if ours[zone].get(name) != right[zone].get(name)
    )


class Node:
    """A kubelet, plugins beside it, and what of its pods runs."""

    def __init__(self, kubelet: Kubelet, *, asks_api: bool = True) -> None:
        self.kubelet = kubelet
        self.asks_api = asks_api
        self.channel = usage.channel(kubelet.pod_resources)
        self.plugins: dict[str, SimplePlugin] = {}
        self.ours: set[str] = set()  # resources of which all devices are known, as of our own
        self.gone: set[str] = set()  # resources whose plugin does not serve
        self.alive: dict[str, str] = {}  # name → UID

    def close(self) -> None:
        self.channel.close()
        for plugin in self.plugins.values():
            plugin.stop()

    def plug(self, resource: str, devices: Devices, *, ours: bool = False) -> SimplePlugin:
        plugin = self.plugins[resource] = SimplePlugin(resource, devices)
        plugin.serve(self.kubelet.plugin_dir)
        self.kubelet.wait_devices(resource, len(devices))
        if ours:
            self.ours.add(resource)
        return plugin

    def sicken(self, resource: str, *ids: str) -> None:
        """These are unhealthy, and the others are not."""
        self.plugins[resource].set_unhealthy(*ids)
        self.wait_devices(resource)

    def wait_devices(self, resource: str) -> None:
        """Return when the kubelet has the plugin's last list."""
        plugin = self.plugins[resource]
        healthy = {id for id in plugin.devices if id not in plugin.unhealthy}
        self.kubelet.wait_devices(resource, len(healthy))
        end = time.monotonic() + PATIENCE_S
        while healthy != self.known_healthy(resource):
            assert time.monotonic() < end, (resource, healthy)
            time.sleep(0.002)

    def known_healthy(self, resource: str) -> set[str]:
        path = self.kubelet.plugin_dir / "kubelet_internal_checkpoint"
        return set(json.loads(path.read_text())["Data"]["RegisteredDevices"].get(resource) or ())

    def until_answers(self) -> None:
        """Return when the channel has found the kubelet's new socket."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                usage.read_usage(self.channel, PATIENCE_S)
                return
            except usage.KubeletError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def admit(self, body: Mapping[str, Any]) -> Admission:
        admission = self.kubelet.admit(body)
        if admission.admitted:
            self.alive[admission.name] = admission.uid
        return admission

    def run(self, name: str, *containers: Mapping[str, str | int], **more: Any) -> Admission:
        admission = self.admit(pod(name, *containers, **more))
        assert admission.admitted, admission.message
        return admission

    def remove(self, name: str) -> None:
        self.kubelet.remove(name)
        del self.alive[name]

    def facts(self) -> tuple[PodFacts, ...] | None:
        if not self.asks_api:
            return None
        return tuple(
            PodFacts(
                pod=PodName(namespace=state.namespace, name=state.name),
                phase=state.phase,
                qos="Guaranteed",
                uid=state.uid,
            )
            for state in self.kubelet.state().pods
        )

    def look(self) -> Look:
        """One reading of all that the kubelet says of itself."""
        handed_out = read_handed_out(self.kubelet.root, self.kubelet.plugin_dir)
        return Look(
            usage=with_ended(
                usage.read_usage(self.channel, PATIENCE_S), handed_out, pods=self.facts()
            ),
            allocatable=usage.read_allocatable(self.channel, PATIENCE_S),
            handed_out=handed_out,
        )

    def doubt(self, look: Look, before: Look | None) -> Doubt | None:
        """Why the publisher would look again before it believes that."""
        pods = self.facts()
        if pods is None:
            return doubt(look, before=before, restarted=False)
        return doubt(
            look,
            before=before,
            restarted=False,
            running=frozenset(pod.pod for pod in pods if pod.phase not in ENDED),
            ended=frozenset(pod.uid for pod in pods if pod.phase in ENDED),
        )

    def our_devices(self) -> list[DeviceUse]:
        return [
            DeviceUse(resource=resource, id=DeviceId(id), numa=tuple(map(NumaId, nodes or ())))
            for resource in self.ours
            for id, nodes in self.plugins[resource].devices.items()
        ]

    def published(self) -> Zones:
        body = nrt(
            observe(self.kubelet, self.channel, self.facts()),
            node_name="n",
            node_uid=None,
            version="test",
            ours=self.our_devices(),
        )
        return published(body)

    def files(self) -> str:
        """What the managers have written."""
        return "\n".join(path.read_text() for path in self.kubelet.root.glob("*_manager_state"))

    def recount(self, totals: Mapping[str, int] | None = None) -> Zones:
        return recount_all(
            self.kubelet.root,
            self.kubelet.machine,
            {
                resource: {id: nodes for id, nodes in plugin.devices.items() if nodes}
                for resource, plugin in self.plugins.items()
            },
            set(self.alive.values()),
            ours=self.ours,
            gone=self.gone,
            totals=totals,
            allocatable_cpus=self.kubelet.state().allocatable_cpus,
        )

    def check(self, totals: Mapping[str, int] | None = None) -> Zones:
        """Compares all figures; what is published."""
        self.until_answers()  # it may have restarted
        end = time.monotonic() + PATIENCE_S  # a list of devices is news to the kubelet for a moment
        while (now := self.published()) != (right := self.recount(totals)):
            assert time.monotonic() < end, differences(now, right)
            time.sleep(0.01)
        return now

    def available(self, resource: str) -> list[int]:
        """By zone; 0 where the zone does not have it."""
        zones = self.check().values()
        return [zone[resource].available if resource in zone else 0 for zone in zones]
