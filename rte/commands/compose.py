"""What is published of an observation, as the configuration wants it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from plugin.devices import devices
from rte import __version__
from rte.commands import parts
from rte.config import Config
from rte.graph.build import Graph
from rte.graph.groups import Group, Remembered, groups
from rte.kubelet.usage import claimed
from rte.model import DeviceUse, Machine, Observation, PciAddress, rfc3339
from rte.publish.accounting import Unbound
from rte.publish.fabric import fabric
from rte.publish.fingerprint import InformerMode
from rte.publish.labels import Label, feature_file, labels, node_labels
from rte.publish.nrt import Detail, FingerprintMethod, nrt
from rte.publish.publisher import replace_file

log = logging.getLogger(__name__)

Body = Mapping[str, Any]


class Before(NamedTuple):
    """What the next bodies continue."""

    fabric: Body | None  # the GPUFabric object as it last was; its history goes on
    groups: Remembered


class Composer:
    """Bodies of one node's objects. Between two calls it remembers `before`, and nothing else."""

    def __init__(
        self,
        config: Config,
        node: str,
        graph_of: Callable[[Machine], Graph],
        *,
        advertised: Callable[[], tuple[DeviceUse, ...]] | None = None,
        published_fabric: Callable[[], Body | None] | None = None,
        node_uid: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`advertised` are the devices that the plugin of this process lists; without one they
        follow from the machine as a plugin with this configuration would list them.
        `published_fabric` reads the GPUFabric object that a former process left, `node_uid` the
        Node's UID; both may raise ApiError. Raises ConfigError for a label that there is not.
        """
        self.config = config  # in force
        self.before: Before | None = None  # until something has been composed
        self._node = node
        self._graph_of = graph_of
        self._advertised = advertised
        self._published_fabric = published_fabric
        self._node_uid = node_uid
        self._label_keys = parts.label_keys(config)
        self._features = FeatureFile(Path(config.labels.feature_file))

    def follow(self, config: Config) -> None:
        """Takes what a running publisher can follow: what is said in a NodeResourceTopology."""
        self.config = msgspec.structs.replace(
            self.config,
            nrt=msgspec.structs.replace(config.nrt, fabric=self.config.nrt.fabric),
        )

    def __call__(self, observation: Observation) -> Iterable[Body]:
        config = self.config
        before = self._former() if self.before is None else self.before
        graph = self._graph_of(observation.machine)
        found = self._groups(graph, before)
        self.before = Before(
            self._fabric(observation, graph, found, before) if config.nrt.fabric else None,
            before.groups.after(graph, found, configured=config.groups.names),
        )
        yield self._topology(observation, graph, found)
        if self.before.fabric is not None:
            yield self.before.fabric
        if config.labels.write != "none" and config.nrt.publish:
            uid = self._node_uid() if Label.TOPOLOGY in self._label_keys else None
            said = labels(observation.machine, found, node_uid=uid, keys=self._label_keys)
            if config.labels.write == "node":
                yield node_labels(self._node, said)
            else:
                self._features.write(feature_file(said))

    def groups(self, graph: Graph) -> tuple[Group, ...]:
        """The NVLink groups as the published objects name them."""
        return self._groups(graph, self.before or Before(None, Remembered()))

    def _groups(self, graph: Graph, before: Before) -> tuple[Group, ...]:
        chosen = self.config.groups
        return groups(graph, by=chosen.by, names=chosen.names, before=before.groups)

    def _former(self) -> Before:
        """What a former process published: its history, and what it called the groups."""
        if not self.config.nrt.fabric or self._published_fabric is None:
            return Before(None, Remembered())
        published = self._published_fabric()
        gpus = ((published or {}).get("status") or {}).get("gpus") or ()
        names = {PciAddress(gpu["pci"]): gpu["group"] for gpu in gpus if gpu.get("group")}
        ours = {pci: name for pci, name in names.items() if name not in self.config.groups.names}
        return Before(published, Remembered(names=ours))

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
        if self._advertised is not None:
            return self._advertised()
        listed = devices(
            observation.machine, observation.faults, options=parts.advertising(self.config)
        )
        return parts.uses(listed.resources.items())

    def _fabric(
        self, observation: Observation, graph: Graph, found: Sequence[Group], before: Before
    ) -> dict[str, Any]:
        return fabric(
            observation.machine,
            graph,
            found,
            observation.faults,
            node_name=self._node,
            node_uid=None,
            now=rfc3339(time.time()),
            previous=before.fabric,
        )


class FeatureFile:
    """The labels as a file for node-feature-discovery."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: str | None = None
        self._problem: str | None = None  # as logged

    def write(self, text: str) -> None:
        """Replaces the file where it differs from what was written last. One that cannot be
        written is no reason to publish nothing: that is logged once, and tried again."""
        if text == self._written:
            return
        try:
            replace_file(self.path, text.encode())
        except OSError as error:
            problem = f"labels.featureFile {self.path} cannot be written: {error.strerror}"
            if problem != self._problem:
                log.warning("%s", problem)
            self._problem = problem
        else:
            self._written, self._problem = text, None
