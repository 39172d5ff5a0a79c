"""What the types of the options cannot say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from rte.config.schema import Config, ConfigError
from rte.model import pci_address

# A qualified name whose domain is none of Kubernetes' own.
RESOURCE = re.compile(
    r"(?!.*kubernetes\.io/)(?!requests\.)[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
    r"/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
# What may follow "gpu-fabric." in the name of a resource, which has up to 63 characters.
GROUP = re.compile(r"(?!.{53})[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")

Problems = Iterator[tuple[str, str]]
"""Dotted key and what is wrong with its value, in words."""


def check(config: Config, source: str) -> None:
    """Raises ConfigError for the first problem; `source` is who said it."""
    problems = chain(
        durations(config),
        numa(config),
        addresses(config),  # the others rely on addresses that can be parsed
        groups(config),
        devices(config),
        fabric(config),
        sharing(config),
        imex(config),
        http(config),
    )
    for key, problem in problems:
        raise ConfigError(key, source, problem)


def durations(config: Config) -> Problems:
    """Those with which something would be asked without a pause, or never answered in time."""
    for key, chosen, least_s in (
        ("host.interval", config.host.interval, 0.1),
        ("kubelet.poll", config.kubelet.poll or 0.1, 0.1),  # 0: seldom
        ("api.timeout", config.api.timeout, 0.1),
        ("nrt.reread", config.nrt.reread, 1),
        ("nvml.timeout", config.nvml.timeout, 0.1),
    ):
        if chosen < least_s:
            yield key, f"must be at least {least_s:g} s, not {chosen:g}"


def numa(config: Config) -> Problems:
    said = {
        "numa.overrides": [*config.numa.overrides.values()],
        "numa.sameSocket": [*chain(*config.numa.same_socket)],
    }
    for key, nodes in said.items():
        for node in nodes:
            if node < 0:
                yield key, f"{node} is no NUMA node"


def addresses(config: Config) -> Problems:
    said = {
        "numa.overrides": [*config.numa.overrides],
        "nvlinks.absent": [*chain(*config.nvlinks.absent)],
        "nics.homes": [*chain(*config.nics.homes.items())],
        **{f"groups.names.{name}": [*gpus] for name, gpus in config.groups.names.items()},
        "devices.withhold": [w.pci for w in config.devices.withhold if w.pci is not None],
    }
    for key, texts in said.items():
        for text in texts:
            try:
                pci_address(text)
            except ValueError as error:
                yield key, str(error)


def groups(config: Config) -> Problems:
    group_of: dict[str, str] = {}
    for name, members in config.groups.names.items():
        for address in map(pci_address, members):
            if group_of.setdefault(address, name) != name:
                yield (
                    f"groups.names.{name}",
                    f"{address} is in {group_of[address]} too; a GPU belongs to one group",
                )


def devices(config: Config) -> Problems:
    chosen = config.devices
    for number, entry in enumerate(chosen.withhold):
        if (entry.id is None) == (entry.pci is None):
            yield f"devices.withhold[{number}]", "needs either id or pci, and not both"
    if not RESOURCE.fullmatch(chosen.resource):
        yield (
            "devices.resource",
            f"{chosen.resource!r} is no name that the kubelet takes; "
            "expected DOMAIN/NAME, such as nvidia.com/gpu",
        )
    if not (chosen.nccl_topology_dir or "/").startswith("/"):
        yield "devices.ncclTopologyDir", "must begin with /"
    if not chosen.device_list_strategy:
        yield "devices.deviceListStrategy", "needs at least one strategy"


def fabric(config: Config) -> Problems:
    key, advertise = "devices.advertise", config.devices.advertise
    if not advertise:
        yield key, "needs gpu or gpu-fabric"
    if "gpu-fabric" not in advertise:
        return
    if "gpu" in advertise:
        yield (
            key,
            "gpu and gpu-fabric exclude each other: the kubelet counts each resource name by "
            "itself and would hand one GPU out twice",
        )
    if config.devices.mig_strategy == "single":
        yield key, "gpu-fabric is for whole GPUs and not with devices.migStrategy: single"
    if not config.groups.names:
        yield key, "gpu-fabric needs groups.names: a resource must not follow observed links"
    for name in config.groups.names:
        if not GROUP.fullmatch(name):
            yield f"groups.names.{name}", "cannot be the end of a resource's name"


def sharing(config: Config) -> Problems:
    domain = config.devices.resource.rpartition("/")[0]
    ours = (f"{domain}/mig-", f"{domain}/gpu-fabric.")
    seen = set()
    for number, entry in enumerate(config.sharing.time_slicing.resources):
        key = f"sharing.timeSlicing.resources[{number}].name"
        if entry.name != config.devices.resource and not entry.name.startswith(ours):
            yield (
                key,
                f"{entry.name!r} is no resource of this plugin; expected {config.devices.resource} "
                f"or one that begins with {' or '.join(ours)}",
            )
        if entry.name in seen:
            yield key, f"{entry.name} is named twice"
        seen.add(entry.name)


def imex(config: Config) -> Problems:
    if config.imex.channel_ids not in ((), (0,)):
        yield "imex.channelIDs", f"must be [] or [0], not {list(config.imex.channel_ids)}"


def http(config: Config) -> Problems:
    tls = config.http.tls
    if tls.cert_file and not tls.key_file:
        yield "http.tls.keyFile", "is needed with http.tls.certFile"
    if tls.key_file and not tls.cert_file:
        yield "http.tls.certFile", "is needed with http.tls.keyFile"
    if tls.client_ca_file and not tls.cert_file:
        yield (
            "http.tls.clientCAFile",
            "needs http.tls.certFile: without TLS nobody has a certificate",
        )
