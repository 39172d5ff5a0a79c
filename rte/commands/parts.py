"""The configuration as parts: what `run`, `publish` and `plugin` are made of.

Each function opens one thing as the configuration says; nothing here decides anything.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugin.allocation import Handing, Strategy, missing_channels, read_nodes
from plugin.devices import Advertising, Device, MigStrategy
from plugin.life import DevicePlugin
from plugin.life import Options as PluginOptions
from plugin.moving import Listed
from rte.commands.node import nvml_worker, overrides
from rte.config import Config, ConfigError
from rte.discovery.faults import FaultRules, parse_fault_rules
from rte.discovery.hardware import Hardware
from rte.discovery.injection import Injection
from rte.graph.build import Graph
from rte.graph.parts import Sharing
from rte.kubelet.usage import KubeletError, channel
from rte.model import (
    DeviceUse,
    NumaId,
    OwnNode,
    PodName,
    Policy,
    Usage,
    base_units,
    pci_address,
)

if TYPE_CHECKING:
    from rte.agent import Kubelet
    from rte.kubelet.configuration import Configuration
    from rte.pacer import Pace
    from rte.publish.apply import ApiServer
    from rte.publish.labels import Label
    from rte.tls import Tls


class Refused(Exception):
    """The process must not start like this; the message says what to do."""


def node_name(config: Config) -> str:
    """The Node's name; kubelets register the host name in lower case unless told otherwise."""
    return config.node_name or socket.gethostname().lower()


def fault_rules(config: Config) -> FaultRules:
    """Raises ConfigError for a word that names no Xid."""
    health, key = config.health, "health.disable"
    try:
        parse_fault_rules(health.disable, "")
        key = "health.enable"
        return parse_fault_rules(health.disable, health.enable, cool_down_s=health.cool_down)
    except ValueError as error:
        raise ConfigError(key, "configuration", str(error)) from error


def hardware(config: Config, *, on_outgrown: Callable[[str], None]) -> Hardware:
    """What looks at this node's hardware, not yet started. `on_outgrown` is called with the reason
    why only a new container can go on. Raises ConfigError."""
    return Hardware(
        sys=Path(config.host.sysfs),
        proc=Path(config.host.procfs),
        worker=nvml_worker(config),
        overrides=overrides(config),
        rules=fault_rules(config),
        interval_s=config.host.interval,
        state=state_dir(config),
        injection=Injection() if config.driver == "injected" else None,
        on_outgrown=on_outgrown,
    )


# The device plugin


def plugin_options(config: Config) -> PluginOptions:
    """Raises ConfigError for what only the plugin knows to be wrong."""
    devices = config.devices
    try:
        options = PluginOptions(
            plugin_dir=config.plugin_dir,
            registry_dir=config.registry_dir if config.kubelet.registration == "watcher" else None,
            pod_resources=config.pod_resources_socket,
            advertising=advertising(config),
            handing=Handing(
                strategies=frozenset(map(Strategy, devices.device_list_strategy)),
                ids=devices.device_id_strategy,
                device_specs=devices.pass_device_specs,
                dev_root=config.nvml.dev_root or config.nvml.driver_root,
                cdi_annotation_prefix=config.cdi.annotation_prefix,
                imex_channels=config.imex.channel_ids,
                gdrcopy=devices.gdrcopy_enabled,
                gds=devices.gds_enabled,
                mofed=devices.mofed_enabled,
                one_replica=config.sharing.time_slicing.fail_requests_greater_than_one,
                nccl_topology_dir=devices.nccl_topology_dir,
                cuda_order=devices.cuda_order == "nvlink",
            ),
            sharing=Sharing(devices.shared_allocation),
            compute_nics=config.nics.compute,
            cdi_directories=tuple(map(Path, config.cdi.directories)),
            cdi_nodes_only=config.cdi.nodes_only,
            nccl_topology=nccl_topology if devices.nccl_topology_dir else None,
            proc=Path(config.host.procfs),
        )
    except ValueError as error:
        raise ConfigError("devices", "configuration", str(error)) from error
    absent = missing_channels(options.handing, read_nodes(dev=options.dev))
    if config.imex.required and absent:
        raise ConfigError("imex.required", "configuration", f"{', '.join(absent)} does not exist")
    return options


def advertising(config: Config) -> Advertising:
    sharing = config.sharing.time_slicing
    fabric = "gpu-fabric" in config.devices.advertise
    return Advertising(
        resource=config.devices.resource,
        mig=MigStrategy(config.devices.mig_strategy),
        advertise_inferred=config.numa.advertise_inferred,
        same_socket=tuple(tuple(map(NumaId, nodes)) for nodes in config.numa.same_socket),
        replicas={shared.name: shared.replicas for shared in sharing.resources},
        rename_shared=sharing.rename_by_default,
        fabric={
            pci_address(address): name
            for name, addresses in config.groups.names.items()
            for address in addresses
            if fabric
        },
    )


def nccl_topology(graph: Graph) -> str | None:
    """NCCL's topology file of this machine; None while there is nothing to say."""
    from rte.view.nccl import nccl  # noqa: PLC0415 - an option

    return nccl(graph) if graph.gpus else None


def advertised(plugin: DevicePlugin) -> tuple[DeviceUse, ...]:
    """What the plugin of this process lists to the kubelet, healthy or not."""
    return uses((name, r.tables.devices.values()) for name, r in plugin.resources.items())


def holders(held: Mapping[Listed, tuple[PodName, ...]]) -> str:
    """Who holds what, for people."""
    return "; ".join(
        f"{pair.id} ({pair.resource}) is in use"
        + "".join(f" by {pod.namespace}/{pod.name}" for pod in pods)
        for pair, pods in sorted(held.items())
    )


def uses(resources: Iterable[tuple[str, Iterable[Device]]]) -> tuple[DeviceUse, ...]:
    return tuple(
        DeviceUse(resource=name, id=device.id, numa=device.numa)
        for name, listed in resources
        for device in listed
    )


def state_dir(config: Config) -> Path | None:
    """The folder for what is kept and for the control socket; None where there is none. It is not
    made here: what should outlive a container is mounted into it."""
    folder = Path(config.state_dir)
    return folder if folder.is_dir() else None


# HTTP


def tls(config: Config) -> Tls | None:
    """The certificate that pages are served with; None: they are served without. Raises Refused
    for files that cannot be served with."""
    chosen = config.http.tls
    if not chosen.cert_file or not chosen.key_file:
        return None
    from rte.tls import Tls, TlsError, TlsFiles  # noqa: PLC0415 - an option

    files = TlsFiles(
        certificate=Path(chosen.cert_file),
        key=Path(chosen.key_file),
        client_ca=Path(chosen.client_ca_file) if chosen.client_ca_file else None,
        min_version=chosen.min_version,
    )
    try:
        return Tls(files)
    except TlsError as error:
        raise Refused(str(error)) from error


# The kubelet


def kubelet(config: Config) -> Kubelet:
    """Where this node's kubelet is. Raises KubeletError for a socket whose path is too long."""
    from rte.agent import Kubelet  # noqa: PLC0415 - not the plugin alone

    return Kubelet(
        channel=channel(config.pod_resources_socket),
        root=Path(config.kubelet.root_dir),
        plugin_dir=config.plugin_dir,
        registry_dir=config.registry_dir,
        pod_resources_socket=config.pod_resources_socket,
        configuration=configuration_files(config),
    )


def kubelet_configuration(config: Config, api: ApiServer | None, node: str) -> Configuration:
    """Where the kubelet's configuration is read."""
    from rte.kubelet.configuration import Configuration, Unanswered  # noqa: PLC0415 - not for all
    from rte.publish.access import ApiError  # noqa: PLC0415 - as above

    chosen = config.kubelet

    def configz() -> Mapping[str, Any]:
        assert api is not None
        try:
            return api.read_configz(node)
        except ApiError as error:
            raise Unanswered("/configz", str(error)) from error

    return Configuration(
        file=Path(chosen.config_file) if chosen.config_file else None,
        drop_ins=Path(chosen.config_dir) if chosen.config_dir else None,
        default=Path(chosen.root_dir, "config.yaml"),
        command=chosen.find_command,
        configz=None if api is None else configz,
    )


def kubelet_policy(config: Config, configuration: Configuration) -> Callable[[], Policy | None]:
    """Reads the kubelet's configuration.

    What the operator states stands in place of what is read, and alone where nothing can be read.
    The function raises KubeletError.
    """
    from rte.kubelet.configuration import Unanswered  # noqa: PLC0415 - not the plugin alone
    from rte.kubelet.policy import PolicyError, stated  # noqa: PLC0415 - as above

    chosen = config.kubelet

    def read() -> Policy | None:
        try:
            return configuration.read()
        except PolicyError as error:
            if isinstance(error, Unanswered) and chosen.topology_manager_policy is not None:
                return None
            raise KubeletError("kubelet configuration", str(error)) from error

    return lambda: stated(
        read(),
        topology_manager=chosen.topology_manager_policy,
        scope=chosen.topology_manager_scope,
    )


def configuration_files(config: Config) -> tuple[Path, ...]:
    """The kubelet's configuration files that are worth watching."""
    return (Path(config.kubelet.config_file),) if config.kubelet.config_file else ()


# The API server


def api_server(config: Config) -> ApiServer:
    """A client for the API server, not yet connected. Raises ApiError for unusable credentials."""
    from rte.publish.access import in_cluster, read_kubeconfig  # noqa: PLC0415 - plugin: no API
    from rte.publish.apply import ApiServer  # noqa: PLC0415

    if not config.api.kubeconfig:
        return ApiServer(in_cluster(), timeout_s=config.api.timeout)
    read = partial(read_kubeconfig, Path(config.api.kubeconfig))
    return ApiServer(read(), timeout_s=config.api.timeout, again=read)


def own_node(api: ApiServer, node: str) -> Callable[[], OwnNode]:
    """Reads the own Node. Raises ApiError, also when there is none of this name."""
    from rte.publish.access import ApiError  # noqa: PLC0415 - plugin: no API

    def read() -> OwnNode:
        found: Any = api.read_node(node)
        if found is None:
            problem = "the API server has no Node of this name; check --node-name"
            raise ApiError(f"GET node {node}", "NotFound", problem, status=404)
        status = found.get("status") or {}
        figures = status.get("allocatable") or {}
        ready = (c for c in status.get("conditions") or () if c.get("type") == "Ready")
        told = next((c["lastHeartbeatTime"] for c in ready if c.get("lastHeartbeatTime")), None)
        return OwnNode(
            allocatable={name: base_units(str(value)) for name, value in figures.items()},
            uid=str(found["metadata"]["uid"]),
            told=None if told is None else datetime.fromisoformat(told).timestamp(),
        )

    return read


def published_fabric(api: ApiServer, node: str) -> Callable[[], Mapping[str, Any] | None]:
    """Reads the own GPUFabric object, None where there is none. Raises ApiError."""
    from rte.publish.fabric import API_VERSION  # noqa: PLC0415

    return lambda: api.read(f"/apis/{API_VERSION}/gpufabrics/{node}")


def pace(config: Config) -> Pace:
    """When the publisher looks, reads back and tells."""
    from rte.pacer import Pace  # noqa: PLC0415 - not the plugin alone

    return Pace(
        poll_s=config.kubelet.poll or config.nrt.reread,
        reread_s=config.nrt.reread,
        echo_s=config.nrt.echo,
        stale_s=config.nrt.stale_after,
    )


def excluded_resources(config: Config, node: str) -> tuple[str, ...]:
    """Resources that no zone of this node lists."""
    by_node = config.nrt.resource_exclude
    return (*config.nrt.exclude, *by_node.get("*", ()), *by_node.get(node, ()))


def excluded_pods(config: Config, usage: Usage) -> frozenset[PodName]:
    """Pods whose resources count as available."""
    return frozenset(
        pod.pod
        for pod in usage.pods
        for pattern in config.nrt.pod_exclude
        if fits(pod.pod.namespace, pattern.namespace_pattern)
        and fits(pod.pod.name, pattern.name_pattern)
    )


def fits(name: str, pattern: str) -> bool:
    """Whether a name fits Go's wildcards, which negate a set of characters by ^."""
    return fnmatchcase(name, pattern.replace("[^", "[!"))


def label_keys(config: Config) -> Mapping[Label, str]:
    """The key of each label that is wanted. Raises ConfigError for a label that there is not."""
    from rte.publish.labels import DEFAULT_KEYS, LABEL_KEY, Label  # noqa: PLC0415

    known = {label.value: label for label in Label}
    for name in config.labels.keys:
        if name not in known:
            raise ConfigError(
                f"labels.keys.{name}",
                "configuration",
                f"no such label; there are {', '.join(sorted(known))}",
            )
    wanted = {**DEFAULT_KEYS, **{known[name]: key for name, key in config.labels.keys.items()}}
    label_of: dict[str, Label] = {}
    for label, key in wanted.items():
        problem = None
        if key and not LABEL_KEY.fullmatch(key):
            problem = f"{key!r} is no key of a label; expected NAME or DOMAIN/NAME"
        elif key and label_of.setdefault(key, label) is not label:
            problem = f"{key} is the key of {label_of[key]} too"
        if problem:
            raise ConfigError(f"labels.keys.{label}", "configuration", problem)
    return wanted
