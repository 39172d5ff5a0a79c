"""The publisher's parts, opened as the configuration says.

Imported only where something is published: the plugin alone must not pay for its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from plugin.life import DevicePlugin
from rte.agent import Agent, Reason, Sources
from rte.commands import parts
from rte.commands.compose import Composer
from rte.config import Config
from rte.discovery.hardware import Hardware
from rte.graph.build import Graph
from rte.kubelet.following import NodePods, Watch
from rte.model import Machine
from rte.publish.access import ApiError
from rte.publish.disagreement import rules_disagree
from rte.publish.events import Announcer
from rte.publish.features import FeatureFile
from rte.publish.fingerprint import InformerMode
from rte.publish.nrt import FingerprintMethod
from rte.publish.pods import PodWatch
from rte.publish.publisher import ApiSink, FolderSink, NoSink, Sink


class Objects(NamedTuple):
    """Where the objects go, and what is read there. The defaults are those of a folder."""

    sources: Sources
    sink: Sink
    published_fabric: Callable[[], Mapping[str, Any] | None] = lambda: None
    pod_watch: Watch | None = None
    announcer: Announcer | None = None


class Publisher:
    """The publisher of one process. `start` and `stop` are called once each."""

    def __init__(
        self,
        config: Config,
        node: str,
        *,
        hardware: Hardware,
        graph_of: Callable[[Machine], Graph],
        plugin: DevicePlugin | None,
        withheld: Callable[[], Mapping[str, str]],
        out: Path | None,
        on_published: Callable[[], None],
    ) -> None:
        """`plugin` is that of this process. `out` is a folder to write to in place of the API
        server. `on_published` is called each time all of what was observed is published. Raises
        Refused and ConfigError.
        """
        self.hardware = hardware
        self.objects = in_api_server(config, node) if out is None else in_folder(config, node, out)
        self.pods = NodePods(
            socket=config.pods_api_socket if config.kubelet.pods_api else None,
            api_server=self.objects.pod_watch,
            wake=lambda: self.agent.wake(Reason.PODS),
            tell=self._tell_of_pods,
        )
        self.composer = Composer(
            config,
            node,
            graph_of,
            published_fabric=self.objects.published_fabric,
        )
        sources = self.objects.sources._replace(
            withheld=withheld,
            pods=self.pods.read,
            pods_awaited=lambda: self.pods.awaited,
        )
        if plugin is not None:
            observe = plugin.observe
            sources = sources._replace(
                listed=lambda usage, asked: observe(usage, asked=asked),
                advertised=lambda: parts.advertised(plugin),
            )
        self.agent = Agent(
            kubelet=parts.kubelet(config),
            hardware=hardware,
            sources=sources,
            compose=self.composer,
            sink=self._sink(config),
            pace=parts.pace(config),
            on_published=on_published,
        )

    def _sink(self, config: Config) -> Sink:
        if not config.nrt.publish:
            return NoSink()
        if config.labels.write == "feature-file":
            return FeatureFile(self.objects.sink, Path(config.labels.feature_file))
        return self.objects.sink

    def start(self) -> None:
        """Begins to follow the hardware, the pods and the kubelet, and to publish."""
        if self.objects.announcer is not None:
            self.objects.announcer.start()
            self.hardware.subscribe(self.objects.announcer.tell)
        self.pods.start()
        self.hardware.subscribe(lambda _: self.agent.wake(Reason.HARDWARE))
        self.agent.start()

    def stop(self) -> None:
        """Returns when every thread has ended."""
        self.agent.stop()
        self.pods.stop()
        if self.objects.announcer is not None:
            self.objects.announcer.stop()

    def _tell_of_pods(self, problem: str | None) -> None:
        if problem is None:
            self.agent.problems.end("pods")
        else:
            self.agent.problems.report("pods", f"those of this node are not followed: {problem}")

    def allocated(self) -> None:
        """The plugin of this process has answered Allocate; any thread may say so."""
        self.agent.wake(Reason.ALLOCATE)

    def cordoned(self) -> None:
        """What is withheld has changed; any thread may say so."""
        self.agent.wake(Reason.HARDWARE)

    def follow(self, config: Config) -> None:
        """Takes over what a running publisher can follow of a changed configuration."""
        self.composer.follow(config)
        self.agent.follow(parts.pace(config))

    def disagreement(self) -> bool | None:
        """Whether the two rules for the fingerprint differ in what was published last; None where
        there is nothing to compare."""
        observation, body = self.agent.observation, self.agent.topology
        if observation is None or body is None:
            return None
        chosen = self.composer.config.nrt.fingerprint
        return rules_disagree(
            observation,
            body,
            mode=InformerMode(chosen.informer_mode),
            method=FingerprintMethod(chosen.method),
        )


def in_api_server(config: Config, node: str) -> Objects:
    """Raises Refused where the API server's address or credentials cannot be used."""
    try:
        api = parts.api_server(config)
        # Clients of their own: a watch must not wait for other requests, nor they for it.
        for_pods = parts.api_server(config) if config.nrt.fingerprint.watch_pods else None
        for_events = parts.api_server(config) if config.health.events else None
    except ApiError as error:
        key = "api.kubeconfig: " if config.api.kubeconfig else ""
        raise parts.Refused(f"{key}{error}") from error
    kubelet = parts.kubelet_configuration(config, api, node)
    sink = ApiSink(
        api, node=node, takeover_after_s=config.nrt.takeover_after, owner=config.nrt.owner
    )
    return Objects(
        sources=Sources(
            policy=parts.kubelet_policy(config, kubelet),
            policy_changed=lambda: kubelet.changed,
            published_policy=sink.published_policy,
            own_node=parts.own_node(api, node),
        ),
        sink=sink,
        published_fabric=parts.published_fabric(api, node),
        pod_watch=None if for_pods is None else lambda *told: PodWatch(for_pods, node, *told),
        announcer=None if for_events is None else Announcer(for_events.create_event, node=node),
    )


def in_folder(config: Config, node: str, out: Path) -> Objects:
    """Objects as files, and no API server that is asked for anything."""
    kubelet = parts.kubelet_configuration(config, None, node)
    return Objects(
        sources=Sources(
            policy=parts.kubelet_policy(config, kubelet), policy_changed=lambda: kubelet.changed
        ),
        sink=FolderSink(out),
    )
