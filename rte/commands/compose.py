"""What is published of an observation, as the configuration wants it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from plugin.devices import devices
from rte import __version__
from rte.commands import parts
from rte.config import Config
from rte.graph.build import Graph
from rte.graph.groups import Group, groups
from rte.kubelet.usage import claimed
from rte.model import DeviceUse, Machine, Observation, PciAddress
from rte.publish.accounting import Unbound
from rte.publish.fabric import fabric
from rte.publish.fingerprint import InformerMode
from rte.publish.labels import Label, feature_file, labels, node_labels
from rte.publish.nrt import Detail, FingerprintMethod, nrt
from rte.publish.publisher import replace_file

log = logging.getLogger(__name__)


class Composer:
    """Bodies of one node's objects. What it remembers is of this boot: names and most lanes."""

    def __init__(
        self,
        config: Config,
        node: str,
        graph_of: Callable[[Machine], Graph],
        *,
        advertised: Callable[[], tuple[DeviceUse, ...]] | None = None,
        published_fabric: Callable[[], Mapping[str, Any] | None] | None = None,
        node_uid: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`advertised` are the devices that the plugin of this process lists; without one they
        follow from the machine as a plugin with this configuration would list them.
        `published_fabric` reads the GPUFabric object that a former process left, whose history is
        continued, `node_uid` the Node's UID; both may raise ApiError.
        """
        self._config = config
        self._node = node
        self._graph_of = graph_of
        self._advertised = advertised
        self._published_fabric = published_fabric
        self._fabric: Mapping[str, Any] | None = None
        self._node_uid = node_uid
        self._label_keys = parts.label_keys(config)
        self._features: str | None = None  # as written
        self._said: str | None = None
        self._names: dict[PciAddress, str] = {}
        self._most_lanes: dict[PciAddress, int] = {}

    def follow(self, config: Config) -> None:
        """Takes what a running publisher can follow: what is said in a NodeResourceTopology."""
        self._config = msgspec.structs.replace(
            self._config,
            nrt=msgspec.structs.replace(config.nrt, fabric=self._config.nrt.fabric),
        )

    def __call__(self, observation: Observation) -> Iterable[Mapping[str, Any]]:
        nrt_options = self._config.nrt
        graph = self._graph_of(observation.machine)
        previous = self._previous_fabric() if nrt_options.fabric else None
        found = self.groups(graph)
        yield nrt(
            observation,
            graph,
            node_name=self._node,
            node_uid=None,  # the sink knows the Node
            version=__version__,
            groups=found,
            ours=self._ours(observation),
            claimed=claimed(observation.usage, observation.machine),
            detail=Detail(nrt_options.detail),
            unbound=Unbound(nrt_options.unbound),
            method=FingerprintMethod(nrt_options.fingerprint.method),
            informer_mode=InformerMode(nrt_options.fingerprint.informer_mode),
            exclude=parts.excluded_resources(self._config, self._node),
            ignored=parts.excluded_pods(self._config, observation.usage),
        )
        if nrt_options.fabric:
            self._fabric = fabric(
                observation.machine,
                graph,
                found,
                observation.faults,
                node_name=self._node,
                node_uid=None,
                now=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                previous=previous,
            )
            yield self._fabric
        if self._config.labels.write != "none" and nrt_options.publish:
            uid = self._node_uid() if Label.TOPOLOGY in self._label_keys else None
            said = labels(observation.machine, found, node_uid=uid, keys=self._label_keys)
            if self._config.labels.write == "node":
                yield node_labels(self._node, said)
            else:
                self._write_features(feature_file(said))

    def _write_features(self, text: str) -> None:
        """Replaces the feature file where it differs. One that cannot be written is no reason to
        publish nothing: it is said once and tried again."""
        if text == self._features:
            return
        path = Path(self._config.labels.feature_file)
        try:
            replace_file(path, text.encode())
        except OSError as error:
            words = f"labels.featureFile {path} cannot be written: {error.strerror}"
            if words != self._said:
                log.warning("%s", words)
            self._said = words
        else:
            self._features, self._said = text, None

    def _previous_fabric(self) -> Mapping[str, Any] | None:
        """The object as it last was. A former process's says what it called the groups, too."""
        if self._fabric is None and self._published_fabric is not None:
            self._fabric = self._published_fabric()
            self._published_fabric = None
            for gpu in (self._fabric or {}).get("status", {}).get("gpus") or ():
                if gpu.get("group") and gpu["group"] not in self._config.groups.names:
                    self._names.setdefault(PciAddress(gpu["pci"]), gpu["group"])
        return self._fabric

    def groups(self, graph: Graph) -> tuple[Group, ...]:
        """The machine's NVLink groups; a name given since start stays with its GPUs."""
        for gpu in graph.gpus:
            lanes = sum(end.lanes for end in gpu.links)
            self._most_lanes[gpu.pci] = max(lanes, self._most_lanes.get(gpu.pci, 0))
        found = groups(
            graph,
            by=self._config.groups.by,
            names=self._config.groups.names,
            known=self._names,
            most_lanes=self._most_lanes,
        )
        for group in found:
            if group.name not in self._config.groups.names:
                self._names.update(dict.fromkeys(group.gpus, group.name))
        return found

    def _ours(self, observation: Observation) -> tuple[DeviceUse, ...]:
        if self._advertised is not None:
            return self._advertised()
        listed = devices(
            observation.machine, observation.faults, options=parts.advertising(self._config)
        )
        return parts.uses(listed.resources.items())
