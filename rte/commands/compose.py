"""What is published of an observation, as the configuration wants it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from plugin.devices import devices
from rte import __version__
from rte.commands import parts
from rte.config import Config
from rte.graph.build import Graph
from rte.graph.groups import Group, Remembered, groups
from rte.kubelet.usage import claimed
from rte.model import DeviceUse, Machine, Observation, PciAddress, rfc3339
from rte.publish.access import ApiError
from rte.publish.accounting import Unbound
from rte.publish.fabric import fabric
from rte.publish.fingerprint import InformerMode
from rte.publish.labels import labels, node_labels
from rte.publish.nrt import Detail, FingerprintMethod, nrt

Body = Mapping[str, Any]


class Composer:
    """Bodies of one node's objects, each of which continues what was said before it."""

    def __init__(
        self,
        config: Config,
        node: str,
        graph_of: Callable[[Machine], Graph],
        *,
        published_fabric: Callable[[], Body | None] = lambda: None,
    ) -> None:
        """`published_fabric` reads the GPUFabric object that a former process left; it may raise
        ApiError. Raises ConfigError for a label that there is not.
        """
        self.config = config  # in force
        self._remembered: Remembered | None = None  # of the groups; None: nothing was composed yet
        self._fabric: Body | None = None  # as it last was; its history goes on
        self._is_fabric_known = False  # whether that of a former process has been read
        self._node = node
        self._graph_of = graph_of
        self._published_fabric = published_fabric
        self._label_keys = parts.label_keys(config)

    def follow(self, config: Config) -> None:
        """Takes what a running publisher can follow: what is said in a NodeResourceTopology."""
        self.config = msgspec.structs.replace(
            self.config,
            nrt=msgspec.structs.replace(config.nrt, fabric=self.config.nrt.fabric),
        )

    def __call__(self, observation: Observation) -> Iterator[Body]:
        """The NodeResourceTopology comes first and whatever cannot be read. What comes after it may
        raise ApiError."""
        config = self.config
        graph = self._graph_of(observation.machine)
        before = self._former_groups() if self._remembered is None else self._remembered
        found = self._groups(graph, before)
        self._remembered = before.after(graph, found, configured=config.groups.names)
        yield self._topology(observation, graph, found)
        if config.nrt.fabric:
            self._read_fabric()
            self._fabric = self._fabric_of(observation, graph, found)
            yield self._fabric
        if config.labels.write != "none" and config.nrt.publish:
            uid = observation.node_uid
            said = labels(observation.machine, found, node_uid=uid, keys=self._label_keys)
            yield node_labels(self._node, said)

    def groups(self, graph: Graph) -> tuple[Group, ...]:
        """The NVLink groups as the published objects name them."""
        return self._groups(graph, self._remembered or Remembered())

    def _groups(self, graph: Graph, before: Remembered) -> tuple[Group, ...]:
        chosen = self.config.groups
        return groups(graph, by=chosen.by, names=chosen.names, before=before)

    def _former_groups(self) -> Remembered:
        """What a former process called the groups, where its object can be read."""
        if self.config.nrt.fabric:
            with contextlib.suppress(ApiError):  # its history is not told before it is read
                self._read_fabric()
        gpus = ((self._fabric or {}).get("status") or {}).get("gpus") or ()
        names = {PciAddress(gpu["pci"]): gpu["group"] for gpu in gpus if gpu.get("group")}
        ours = {pci: name for pci, name in names.items() if name not in self.config.groups.names}
        return Remembered(names=ours)

    def _read_fabric(self) -> None:
        """What a former process told of the hardware, once. Raises ApiError."""
        if not self._is_fabric_known:
            self._fabric = self._published_fabric()
            self._is_fabric_known = True

    def _topology(
        self, observation: Observation, graph: Graph, found: Sequence[Group]
    ) -> dict[str, Any]:
        chosen = self.config.nrt
        return nrt(
            observation,
            graph,
            node_name=self._node,
            node_uid=None,  # the sink knows the Node
            version=__version__,
            groups=found,
            ours=self._ours(observation),
            claimed=claimed(observation.usage, observation.machine),
            detail=Detail(chosen.detail),
            unbound=Unbound(chosen.unbound),
            method=FingerprintMethod(chosen.fingerprint.method),
            informer_mode=InformerMode(chosen.fingerprint.informer_mode),
            exclude=parts.excluded_resources(self.config, self._node),
            ignored=parts.excluded_pods(self.config, observation.usage),
        )

    def _ours(self, observation: Observation) -> tuple[DeviceUse, ...]:
        if observation.advertised is not None:
            return observation.advertised
        listed = devices(
            observation.machine, observation.faults, options=parts.advertising(self.config)
        )
        return parts.uses(listed.resources.items())

    def _fabric_of(
        self, observation: Observation, graph: Graph, found: Sequence[Group]
    ) -> dict[str, Any]:
        return fabric(
            observation.machine,
            graph,
            found,
            observation.faults,
            node_name=self._node,
            node_uid=None,
            now=rfc3339(time.time()),
            previous=self._fabric,
        )
