"""File, environment and flags → one frozen `Config`; an error names its dotted key.

Each option is declared once, as a field with its default, type and one-sentence description, and
where it has them with its environment variable and flag. Later sources win: defaults, file,
environment, flags. Where an option means what one of resource-topology-exporter's or of NVIDIA's
device plugin means, variable and flag have that name too, so that a manifest can be carried over.
"""

from __future__ import annotations

import functools
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from rte.model import pci_address

# A qualified name whose domain is none of Kubernetes' own.
RESOURCE = re.compile(
    r"(?!.*kubernetes\.io/)(?!requests\.)[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
    r"/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)


class ConfigError(ValueError):
    """A configuration that cannot be used. `key` is the dotted key, `source` where it was said."""

    def __init__(self, key: str, source: str, problem: str) -> None:
        super().__init__(f"{source}: {key}: {problem}" if key else f"{source}: {problem}")
        self.key = key
        self.source = source
        self.problem = problem


class Duration(float):
    """Seconds; written as a number of seconds or like Go's durations: 250ms, 90s, 1h30m."""

    _PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
    _UNIT: typing.ClassVar = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}

    @classmethod
    def parse(cls, value: object) -> Duration:
        """Raises ValueError for anything but a number ≥ 0 or a text like 1h30m."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number or (isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value)):
            seconds = float(typing.cast("float | str", value))
        elif isinstance(value, str) and re.fullmatch(f"(?:{cls._PART.pattern})+", value):
            seconds = sum(float(n) * cls._UNIT[unit] for n, unit in cls._PART.findall(value))
        else:
            raise ValueError(f"expected a duration such as 250ms, 90s or 1h30m, got {value!r}")
        if not 0 <= seconds < 1e9:
            raise ValueError(f"a duration must be at least 0 and finite, got {value!r}")
        return cls(seconds)


def opt(
    description: str,
    *,
    env: str | None = None,
    flag: str | None = None,
    also: tuple[str, ...] = (),
) -> msgspec.Meta:
    """What the reference says of an option, and its other two spellings; `also` are further flags
    and variables that a peer has for it."""
    return msgspec.Meta(description=description, extra={"env": env, "flag": flag, "also": also})


class Section(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """Base of all parts of the configuration."""


Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Strategy = Literal["envvar", "volume-mounts", "cdi-annotations", "cdi-cri"]


class Host(Section, frozen=True, kw_only=True):
    sysfs: Annotated[
        str, opt("Where the host's /sys is mounted.", env="RTE_SYSFS", flag="--sysfs")
    ] = "/sys"
    procfs: Annotated[
        str, opt("Where the host's /proc is mounted.", env="RTE_PROCFS", flag="--procfs")
    ] = "/proc"
    interval: Annotated[
        Duration,
        opt("How often the hardware is looked at when no event asks for it.", flag="--hw-interval"),
    ] = Duration(30)


class Kubelet(Section, frozen=True, kw_only=True):
    root_dir: Annotated[
        str,
        opt("The kubelet's root directory (its --root-dir), as mounted here.", env="KUBELET_ROOT"),
    ] = "/var/lib/kubelet"
    pod_resources_socket: Annotated[
        str | None,
        opt(
            "PodResources socket; absent means pod-resources/kubelet.sock in the root directory.",
            env="PODRESOURCES_SOCKET",
            flag="--podresources-socket",
        ),
    ] = None
    plugin_dir: Annotated[
        str | None,
        opt(
            "Device plugin directory, or kubelet.sock in it; absent means device-plugins in the "
            "root directory.",
            env="KUBELET_SOCKET",
            flag="--kubelet-socket",
        ),
    ] = None
    registration: Annotated[
        Literal["register", "watcher"],
        opt(
            "How the kubelet learns of the device plugin: register calls it; watcher puts the "
            "sockets into plugins_registry in the root directory, where the kubelet looks.",
            flag="--kubelet-registration",
        ),
    ] = "register"
    config_file: Annotated[
        str | None,
        opt(
            "Kubelet configuration file, as mounted here; with it /configz is not asked.",
            env="KUBELET_CONFIG_FILE",
            flag="--kubelet-config-file",
        ),
    ] = None
    config_dir: Annotated[
        str | None, opt("Kubelet configuration drop-in directory (its --config-dir).")
    ] = None
    find_command: Annotated[
        bool,
        opt(
            "Find the running kubelet's --config, --config-dir and flags in the process list; this "
            "takes the host's process namespace (hostPID) and the files at the same paths here."
        ),
    ] = False
    topology_manager_policy: Annotated[
        Literal["none", "best-effort", "restricted", "single-numa-node"] | None,
        opt(
            "States the Topology Manager policy instead of reading it.",
            env="TOPOLOGY_MANAGER_POLICY",
            flag="--topology-manager-policy",
        ),
    ] = None
    topology_manager_scope: Annotated[
        Literal["container", "pod"] | None,
        opt(
            "States the Topology Manager scope instead of reading it.",
            env="TOPOLOGY_MANAGER_SCOPE",
            flag="--topology-manager-scope",
        ),
    ] = None
    poll: Annotated[
        Duration,
        opt(
            "How often PodResources is asked when no state file changes.",
            flag="--sleep-interval",
            env="RTE_SLEEP_INTERVAL",
        ),
    ] = Duration(10)


class Api(Section, frozen=True, kw_only=True):
    kubeconfig: Annotated[
        str | None,
        opt("Kubeconfig file; absent means the pod's service account.", flag="--kubeconfig"),
    ] = None
    timeout: Annotated[Duration, opt("How long one request to the API server may take.")] = (
        Duration(10)
    )


class Fingerprint(Section, frozen=True, kw_only=True):
    method: Annotated[
        Literal["with-exclusive-resources", "all"],
        opt(
            "Which pods are hashed; all of them while releases of the scheduler would count "
            "different ones.",
            flag="--pods-fingerprint-method",
        ),
    ] = "with-exclusive-resources"
    informer_mode: Annotated[
        Literal["Dedicated", "Shared"],
        opt("The informer mode of the scheduler that reads the object."),
    ] = "Dedicated"
    watch_pods: Annotated[
        bool,
        opt(
            "Watch this node's pods, so that the fingerprint covers the pods that the scheduler "
            "counts; without it the PodResources rule is used."
        ),
    ] = True


class PodExclude(Section, frozen=True, kw_only=True):
    """Pods by wildcards, in resource-topology-exporter's words; an absent one means all."""

    namespace_pattern: str = "*"
    name_pattern: str = "*"


class Nrt(Section, frozen=True, kw_only=True):
    publish: Annotated[
        bool, opt("Write the objects; false only looks and serves metrics.", flag="--publish")
    ] = True
    detail: Annotated[
        Literal["node", "gpu", "full"],
        opt("How much of the graph goes into the NodeResourceTopology.", flag="--nrt-detail"),
    ] = "gpu"
    unbound: Annotated[
        Literal["total", "zone"],
        opt(
            "What a zone offers of resources that the kubelet does not bind: the node's total "
            "under single-numa-node and nothing else, or each zone's physical share."
        ),
    ] = "total"
    fingerprint: Fingerprint = Fingerprint()
    echo: Annotated[
        Duration,
        opt("How long after a change that may make room waiting pods are woken; 0: never."),
    ] = Duration(6)
    takeover_after: Annotated[
        Duration, opt("How long a former writer must be silent before its object is taken over.")
    ] = Duration(180)
    reread: Annotated[
        Duration, opt("How often the object is read back and put right if it was changed.")
    ] = Duration(600)
    fabric: Annotated[bool, opt("Write the GPUFabric object with the whole graph.")] = True
    exclude: Annotated[tuple[str, ...], opt("Resource names that are left out of the zones.")] = ()
    resource_exclude: Annotated[
        Mapping[str, tuple[str, ...]],
        opt("The same for some nodes: Node's name, or * for all, → resource names."),
    ] = msgspec.field(default_factory=dict)
    pod_exclude: Annotated[
        tuple[PodExclude, ...],
        opt(
            "Pods whose resources count as available: namespacePattern and namePattern, with "
            "wildcards. The fingerprint covers them all the same."
        ),
    ] = ()
    owner: Annotated[
        bool,
        opt("Make the Node the objects' owner, so that they go with it.", flag="--add-nrt-owner"),
    ] = True
    stale_after: Annotated[
        Duration,
        opt(
            "How long nothing has been known of the node before the object says so, by the "
            "attribute staleSince; 0: never."
        ),
    ] = Duration(300)


class Numa(Section, frozen=True, kw_only=True):
    same_socket: Annotated[
        tuple[tuple[int, ...], ...],
        opt(
            "Lists of NUMA nodes that are one socket (sub-NUMA clustering): a device on one of "
            "them is advertised on all of them."
        ),
    ] = ()
    advertise_inferred: Annotated[
        bool,
        opt("Advertise NUMA nodes that were inferred because the firmware says none."),
    ] = False
    overrides: Annotated[
        Mapping[str, int],
        opt("NUMA node by PCI address, for devices of which the firmware says the wrong one."),
    ] = msgspec.field(default_factory=dict)


class NvLinks(Section, frozen=True, kw_only=True):
    absent: Annotated[
        tuple[tuple[str, str], ...],
        opt(
            "NVLinks that do not exist although the driver lists them: pairs of PCI addresses, of "
            "two GPUs or of a GPU and an NVSwitch."
        ),
    ] = ()


class Groups(Section, frozen=True, kw_only=True):
    names: Annotated[
        Mapping[str, tuple[str, ...]],
        opt("Names of NVLink groups: name → PCI addresses of its GPUs."),
    ] = msgspec.field(default_factory=dict)
    by: Annotated[
        Literal["component", "clique"],
        opt("Whether a group is all GPUs that reach each other, or all that are linked directly."),
    ] = "component"


class Labels(Section, frozen=True, kw_only=True):
    write: Annotated[
        Literal["none", "node", "feature-file"],
        opt(
            "Where the topology labels are written: nowhere, to the Node (needs the right to patch "
            "it), or as a feature file of Node Feature Discovery.",
            flag="--labels",
        ),
    ] = "none"
    feature_file: Annotated[
        str, opt("The feature file, in the folder of Node Feature Discovery's local source.")
    ] = "/etc/kubernetes/node-feature-discovery/features.d/rte"
    keys: Annotated[
        Mapping[str, str],
        opt(
            "Other keys: default key → key, an empty one leaves the label out. "
            "topology.kubernetes.io/nvlink-group is written only when it is named here."
        ),
    ] = msgspec.field(default_factory=dict)


class Nics(Section, frozen=True, kw_only=True):
    compute: Annotated[
        tuple[str, ...],
        opt(
            "Compute NICs by name or PCI address, wildcards allowed; empty means the RDMA devices "
            "of the most common link rate."
        ),
    ] = ()
    homes: Annotated[
        Mapping[str, str],
        opt(
            "Where a NIC hangs although firmware says otherwise: its PCI address → the address of "
            "the PCIe switch above it or of a GPU beside it."
        ),
    ] = msgspec.field(default_factory=dict)


class Withhold(Section, frozen=True, kw_only=True):
    """One cordoned GPU or slice."""

    id: str | None = None
    pci: str | None = None
    reason: str = "withheld"
    until: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class Devices(Section, frozen=True, kw_only=True):
    resource: Annotated[str, opt("Resource name of whole GPUs.")] = "nvidia.com/gpu"
    advertise: Annotated[
        tuple[Literal["gpu", "gpu-fabric"], ...],
        opt(
            "What whole GPUs are to the kubelet: gpu, under devices.resource, or gpu-fabric, under "
            "a resource gpu-fabric.NAME for each group of groups.names; never both."
        ),
    ] = ("gpu",)
    mig_strategy: Annotated[
        Literal["none", "single", "mixed"],
        opt("How MIG slices are advertised.", env="MIG_STRATEGY", flag="--mig-strategy"),
    ] = "none"
    device_list_strategy: Annotated[
        tuple[Strategy, ...],
        opt(
            "How Allocate hands the devices over, one or several.",
            env="DEVICE_LIST_STRATEGY",
            flag="--device-list-strategy",
        ),
    ] = ("envvar",)
    device_id_strategy: Annotated[
        Literal["uuid", "index"],
        opt("What Allocate calls a GPU.", env="DEVICE_ID_STRATEGY", flag="--device-id-strategy"),
    ] = msgspec.field(default="uuid", name="deviceIDStrategy")
    pass_device_specs: Annotated[
        bool,
        opt(
            "Allocate lists the device nodes too.",
            env="PASS_DEVICE_SPECS",
            flag="--pass-device-specs",
        ),
    ] = False
    gdrcopy_enabled: Annotated[
        bool,
        opt("Containers get GDRCopy.", env="GDRCOPY_ENABLED", flag="--gdrcopy-enabled"),
    ] = False
    gds_enabled: Annotated[
        bool,
        opt("Containers get GPUDirect Storage.", env="GDS_ENABLED", flag="--gds-enabled"),
    ] = False
    mofed_enabled: Annotated[
        bool,
        opt("Containers get the MOFED devices.", env="MOFED_ENABLED", flag="--mofed-enabled"),
    ] = False
    nccl_topology_dir: Annotated[
        str | None,
        opt(
            "Folder of the host, mounted here at the same path, for a topology file that NCCL in "
            "the containers is given (NCCL_TOPO_FILE); absent: none.",
            flag="--nccl-topology-dir",
        ),
    ] = None
    cuda_order: Annotated[
        Literal["none", "nvlink"],
        opt("nvlink sets CUDA_VISIBLE_DEVICES in the order of the NVLinks."),
    ] = "none"
    withhold: Annotated[
        tuple[Withhold, ...],
        opt("GPUs that get no new work: id or pci, reason, until (RFC 3339)."),
    ] = ()
    shared_allocation: Annotated[
        Literal["distributed", "packed"],
        opt(
            "Whether slices are spread over GPUs or fill one GPU first.",
            env="SHARED_DEVICES_ALLOCATION_POLICY",
            flag="--shared-devices-allocation-policy",
        ),
    ] = "distributed"


class SharedResource(Section, frozen=True, kw_only=True):
    """One resource whose devices are offered several times."""

    name: str
    replicas: Annotated[int, msgspec.Meta(ge=2)]


class TimeSlicing(Section, frozen=True, kw_only=True):
    rename_by_default: Annotated[
        bool, opt("Resources with replicas are called .shared at the end of their name.")
    ] = False
    fail_requests_greater_than_one: Annotated[
        bool,
        opt("Refuse a container that would get two replicas of one device."),
    ] = False
    resources: Annotated[
        tuple[SharedResource, ...],
        opt("Resources whose devices are offered several times: name, replicas (2 or more)."),
    ] = ()


class SharingSection(Section, frozen=True, kw_only=True):
    time_slicing: TimeSlicing = TimeSlicing()


class Imex(Section, frozen=True, kw_only=True):
    channel_ids: Annotated[
        tuple[int, ...],
        opt(
            "IMEX channels that each container gets: none, or channel 0.",
            env="IMEX_CHANNEL_IDS",
            flag="--imex-channel-ids",
        ),
    ] = msgspec.field(default=(), name="channelIDs")
    required: Annotated[
        bool,
        opt(
            "Refuse the start when a channel does not exist; else it is left out.",
            env="IMEX_REQUIRED",
            flag="--imex-required",
        ),
    ] = False


class Cdi(Section, frozen=True, kw_only=True):
    nodes_only: Annotated[
        bool,
        opt(
            "Write a CDI specification of device nodes only; CUDA images then need a libcuda.",
            flag="--cdi-nodes-only",
        ),
    ] = False
    annotation_prefix: Annotated[
        str,
        opt(
            "Prefix of CDI annotations.",
            env="CDI_ANNOTATION_PREFIX",
            flag="--cdi-annotation-prefix",
        ),
    ] = "cdi.k8s.io/"
    directories: Annotated[
        tuple[str, ...],
        opt("Where CDI specifications are looked for; ours is written to the last."),
    ] = ("/etc/cdi", "/var/run/cdi")


class Nvml(Section, frozen=True, kw_only=True):
    driver_root: Annotated[
        str,
        opt(
            "The driver's root on the host; paths of device nodes start there.",
            env="NVIDIA_DRIVER_ROOT",
            flag="--driver-root",
            also=("--nvidia-driver-root",),
        ),
    ] = "/"
    dev_root: Annotated[
        str | None,
        opt(
            "The host's directory that has the driver's /dev; absent: the driver's root.",
            env="NVIDIA_DEV_ROOT",
            flag="--dev-root",
            also=("--nvidia-dev-root",),
        ),
    ] = None
    discovery: Annotated[
        Literal["auto", "nvml"],
        opt(
            "How GPUs are found; always by NVML and sysfs. There is no Tegra, WSL, vGPU or vfio.",
            env="DEVICE_DISCOVERY_STRATEGY",
            flag="--device-discovery-strategy",
        ),
    ] = "auto"
    container_driver_root: Annotated[
        str,
        opt(
            "Where the driver's root is mounted here, for driver: mounted.",
            env="CONTAINER_DRIVER_ROOT",
            flag="--container-driver-root",
            also=("--driver-root-ctr-path", "DRIVER_ROOT_CTR_PATH"),
        ),
    ] = "/driver-root"
    library: Annotated[
        str | None,
        opt(
            "Directory of libnvidia-ml.so.1; absent: as the dynamic linker finds it, or below the "
            "driver's root."
        ),
    ] = None
    timeout: Annotated[
        Duration, opt("How long one look through NVML may take before its process is replaced.")
    ] = Duration(20)
    release: Annotated[
        Duration,
        opt("How long `rte release` and SIGUSR1 keep NVML closed when nothing else is said."),
    ] = Duration(300)


class Health(Section, frozen=True, kw_only=True):
    disable: Annotated[
        str,
        opt(
            "Xids that do not count, or all, or xids; added to the built-in list.",
            env="DP_DISABLE_HEALTHCHECKS",
        ),
    ] = ""
    enable: Annotated[
        str,
        opt("Xids that do count, or all; wins over disable.", env="DP_ENABLE_HEALTHCHECKS"),
    ] = ""
    cool_down: Annotated[
        Duration,
        opt("How long a GPU must have been well again before it gets work."),
    ] = Duration(30)
    events: Annotated[
        bool,
        opt(
            "Report GPUs that turn sick or well as Events of the Node (needs to create events).",
            flag="--health-events",
        ),
    ] = False


class Http(Section, frozen=True, kw_only=True):
    address: Annotated[
        str, opt("Address to listen on.", env="METRICS_ADDRESS", flag="--metrics-ip")
    ] = "0.0.0.0"
    port: Annotated[
        Port | None,
        opt(
            "Port of metrics, probes and page; absent: 2112, for the plugin alone 2113; 0: none.",
            env="METRICS_PORT",
            flag="--metrics-port",
        ),
    ] = None
    open_pages: Annotated[
        bool, opt("Serve the pages that name pods to everybody, not to loopback only.")
    ] = False


class Config(Section, frozen=True, kw_only=True):
    """All that can be said to the daemon."""

    node_name: Annotated[
        str | None,
        opt(
            "The Node's name; absent: the host name.",
            env="NODE_NAME",
            flag="--node-name",
            also=("--hostname",),
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        opt("The least severity that is logged.", env="RTE_LOG_LEVEL", flag="--log-level"),
    ] = "info"
    driver: Annotated[
        Literal["injected", "mounted"],
        opt(
            "How NVML reaches this pod: by the NVIDIA runtime, or by mounts of the driver root.",
            env="RTE_DRIVER",
            flag="--driver",
        ),
    ] = "injected"
    state_dir: Annotated[
        str,
        opt(
            "Folder in memory for faults known only from events and for `rte release`'s socket; "
            "where it does not exist neither is there.",
            env="RTE_STATE_DIR",
        ),
    ] = "/run/rte"
    host: Host = Host()
    kubelet: Kubelet = Kubelet()
    api: Api = Api()
    nrt: Nrt = Nrt()
    numa: Numa = Numa()
    nvlinks: NvLinks = NvLinks()
    groups: Groups = Groups()
    labels: Labels = Labels()
    nics: Nics = Nics()
    devices: Devices = Devices()
    sharing: SharingSection = SharingSection()
    imex: Imex = Imex()
    cdi: Cdi = Cdi()
    nvml: Nvml = Nvml()
    health: Health = Health()
    http: Http = Http()

    @property
    def pod_resources_socket(self) -> Path:
        named = self.kubelet.pod_resources_socket
        if named is None:
            return Path(self.kubelet.root_dir, "pod-resources/kubelet.sock")
        return Path(named.removeprefix("unix://"))

    @property
    def plugin_dir(self) -> Path:
        found = Path(self.kubelet.plugin_dir or Path(self.kubelet.root_dir, "device-plugins"))
        return found.parent if found.name == "kubelet.sock" else found

    @property
    def registry_dir(self) -> Path:
        return Path(self.kubelet.root_dir, "plugins_registry")


class Option(NamedTuple):
    """One option as the reference lists it."""

    key: str  # dotted, as in the file
    type: Any
    default: Any
    description: str
    env: str | None
    flag: str | None
    also: tuple[str, ...] = ()  # further flags and variables

    @property
    def envs(self) -> tuple[str, ...]:
        return tuple(n for n in (self.env, *self.also) if n and not n.startswith("--"))

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(n for n in (self.flag, *self.also) if n and n.startswith("--"))


@functools.cache
def options() -> tuple[Option, ...]:
    """All options in the order of their declaration."""
    return tuple(_options(Config, ""))


def _options(section: type[Section], prefix: str) -> Iterator[Option]:
    hints = typing.get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        hint = hints[field.name]
        key = f"{prefix}{field.encode_name}"
        if isinstance(hint, type) and issubclass(hint, Section):
            yield from _options(hint, f"{key}.")
            continue
        meta = hint.__metadata__[-1]
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        extra = meta.extra
        yield Option(
            key, hint, default, meta.description, extra["env"], extra["flag"], extra["also"]
        )


def type_name(option: Option) -> str:
    """The type as the reference words it: boolean, duration, one of a, b; list, mapping, text."""
    return _type_name(option.type)


def _words(option: Option) -> str:
    name = type_name(option)
    return name if name.startswith("one of") else f"a {name}".replace("a i", "an i")


def _type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _type_name(hint.__origin__)
    if origin is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return _type_name(next(a for a in typing.get_args(hint) if a is not type(None)))
    if origin is tuple:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    if origin is not None:
        return "mapping"
    names = {bool: "boolean", int: "integer", str: "text", Duration: "duration"}
    return names.get(hint, "object")


def load(
    *,
    file: Path | None = None,
    over: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of all sources; `flags` maps dotted keys to the texts that were given.

    What the file `over` says wins over `file`; either may be one of NVIDIA's device plugin.

    Raises ConfigError, which names the source (file, variable or flag), the dotted key and what
    was expected.
    """
    merged: dict[str, Any] = {}
    for source in (file, over):
        if source is not None:
            said = _file(source)
            _convert(said, str(source))  # blame the file for its own errors
            merged = _over(merged, said)
    for option in options():
        for variable in option.envs:
            if text := environ.get(variable):
                _set(merged, option, text, f"environment variable {variable}")
                break
    for option in options():
        if flags and option.key in flags:
            _set(merged, option, flags[option.key], f"flag {option.flag}")
    config = _convert(merged, "configuration")
    _check(config, " and ".join(str(f) for f in (file, over) if f) or "configuration")
    return config


def _file(path: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 - the daemon without a file does not pay for it

    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError("", str(path), f"cannot be read: {error.strerror}") from error
    if len(text) > 1 << 20:
        raise ConfigError("", str(path), "is larger than 1 MiB")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError("", str(path), f"is not YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError("", str(path), f"must hold a mapping, not {type(data).__name__}")
    return _ours(data, str(path)) if "version" in data else data


def _ours(data: dict[str, Any], source: str) -> dict[str, Any]:
    """The file of NVIDIA's device plugin in our words."""
    import logging  # noqa: PLC0415 - as what follows

    from rte.nvidia import NvidiaError, translated  # noqa: PLC0415 - only who has such a file

    try:
        found = translated(data)
    except NvidiaError as error:
        raise ConfigError(error.key, source, error.problem) from error
    for sentence in found.passed_over:
        logging.getLogger(__name__).warning("%s: %s", source, sentence)
    return found.ours


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, section by section; what `above` says wins."""
    merged = {**below, **above}
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = _over(below[key], value)
    return merged


def _set(merged: dict[str, Any], option: Option, text: str, source: str) -> None:
    value: Any = text
    if _type_name(option.type).startswith("list of"):
        value = [part.strip() for part in text.split(",") if part.strip()]
    elif _type_name(option.type) in ("mapping", "object"):
        raise ConfigError(option.key, source, "can be set in the configuration file only")
    try:
        value = msgspec.convert(value, option.type, strict=False, dec_hook=_decode)
    except msgspec.ValidationError as error:
        problem = str(error).partition(" - at `$")[0]
        raise ConfigError(option.key, source, f"{problem}; expected {_words(option)}") from error
    *path, last = option.key.split(".")
    section = merged
    for part in path:
        section = section.setdefault(part, {})
    section[last] = value


def _decode(kind: type, value: Any) -> Any:
    if kind is Duration:
        return value if isinstance(value, Duration) else Duration.parse(value)
    raise NotImplementedError(f"no decoder for {kind}")


def _convert(data: dict[str, Any], source: str) -> Config:
    try:
        return msgspec.convert(data, Config, dec_hook=_decode)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        key = where.strip("`").lstrip(".")
        unknown = re.search(r"unknown field `([^`]+)`", problem)
        if unknown:
            key = ".".join(part for part in (key, unknown[1]) if part)
            problem = "no such option" + _closest(key)
        elif option := next((o for o in options() if key.split("[")[0] == o.key), None):
            problem = f"{problem}; expected {_words(option)}"
        raise ConfigError(key, source, problem) from error


def _closest(key: str) -> str:
    import difflib  # noqa: PLC0415 - only for a message that ends the program

    near = difflib.get_close_matches(key, [o.key for o in options()], n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _check(config: Config, source: str) -> None:
    """What types cannot say."""
    for key, addresses in [
        ("numa.overrides", list(config.numa.overrides)),
        ("nvlinks.absent", [address for pair in config.nvlinks.absent for address in pair]),
        ("nics.homes", [address for pair in config.nics.homes.items() for address in pair]),
        *((f"groups.names.{n}", list(a)) for n, a in config.groups.names.items()),
        ("devices.withhold", [w.pci for w in config.devices.withhold if w.pci is not None]),
    ]:
        for address in addresses:
            try:
                pci_address(address)
            except ValueError as error:
                raise ConfigError(key, source, str(error)) from error
    for number, entry in enumerate(config.devices.withhold):
        if (entry.id is None) == (entry.pci is None):
            raise ConfigError(
                f"devices.withhold[{number}]", source, "needs either id or pci, and not both"
            )
    groups: dict[str, str] = {}
    for name, members in config.groups.names.items():
        for address in map(pci_address, members):
            if groups.setdefault(address, name) != name:
                raise ConfigError(
                    f"groups.names.{name}",
                    source,
                    f"{address} is in {groups[address]} too; a GPU belongs to one group",
                )
    if not RESOURCE.fullmatch(config.devices.resource):
        raise ConfigError(
            "devices.resource",
            source,
            f"{config.devices.resource!r} is no name that the kubelet takes; "
            "expected DOMAIN/NAME, such as nvidia.com/gpu",
        )
    if not (config.devices.nccl_topology_dir or "/").startswith("/"):
        raise ConfigError("devices.ncclTopologyDir", source, "must begin with /")
    if not config.devices.device_list_strategy:
        raise ConfigError("devices.deviceListStrategy", source, "needs at least one strategy")
    _check_fabric(config, source)
    _check_sharing(config, source)
    if config.imex.channel_ids not in ((), (0,)):
        raise ConfigError(
            "imex.channelIDs", source, f"must be [] or [0], not {list(config.imex.channel_ids)}"
        )


def _check_fabric(config: Config, source: str) -> None:
    key = "devices.advertise"
    advertise = config.devices.advertise
    if not advertise:
        raise ConfigError(key, source, "needs gpu or gpu-fabric")
    if "gpu-fabric" not in advertise:
        return
    if "gpu" in advertise:
        raise ConfigError(
            key,
            source,
            "gpu and gpu-fabric exclude each other: the kubelet counts each resource name by "
            "itself and would hand one GPU out twice",
        )
    if config.devices.mig_strategy == "single":
        raise ConfigError(
            key, source, "gpu-fabric is for whole GPUs and not with devices.migStrategy: single"
        )
    if not config.groups.names:
        raise ConfigError(
            key, source, "gpu-fabric needs groups.names: a resource must not follow observed links"
        )
    for name in config.groups.names:
        if not re.fullmatch(r"(?!.{53})[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", name):
            raise ConfigError(
                f"groups.names.{name}", source, "cannot be the end of a resource's name"
            )


def _check_sharing(config: Config, source: str) -> None:
    domain = config.devices.resource.rpartition("/")[0]
    seen = set()
    for number, entry in enumerate(config.sharing.time_slicing.resources):
        key = f"sharing.timeSlicing.resources[{number}].name"
        ours = (f"{domain}/mig-", f"{domain}/gpu-fabric.")
        if entry.name != config.devices.resource and not entry.name.startswith(ours):
            raise ConfigError(
                key,
                source,
                f"{entry.name!r} is no resource of this plugin; expected {config.devices.resource} "
                f"or one that begins with {' or '.join(ours)}",
            )
        if entry.name in seen:
            raise ConfigError(key, source, f"{entry.name} is named twice")
        seen.add(entry.name)


def dump(config: Config) -> str:
    """The effective configuration as YAML, every option with its value."""
    import yaml  # noqa: PLC0415 - a command's output

    def plain(kind: Any) -> Any:
        if isinstance(kind, Duration):
            return float(kind)
        raise NotImplementedError(type(kind))

    return yaml.safe_dump(
        msgspec.to_builtins(config, enc_hook=plain), sort_keys=False, allow_unicode=True
    )
