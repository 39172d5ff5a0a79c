"""All options: sections of frozen values.

Each option is declared once, as a field with its default, type and one-sentence description, and
where it has them with its environment variable and flag. Where an option means what one of
resource-topology-exporter's or of NVIDIA's device plugin means, variable and flag have that name
too, so that a manifest can be carried over.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec


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
    pods_api: Annotated[
        bool,
        opt(
            "Follow this node's pods by the kubelet's pods API where the kubelet serves it (from "
            "1.37); false leaves that to nrt.fingerprint.watchPods."
        ),
    ] = True
    pods_api_socket: Annotated[
        str | None,
        opt("Pods API socket; absent means pods-api/pods-api.sock in the root directory."),
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
            "How often PodResources is asked when no state file changes; 0: as seldom as "
            "nrt.reread.",
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
            "Watch this node's pods at the API server while the kubelet's pods API does not tell "
            "of them, so that the fingerprint covers the pods that the scheduler counts; where "
            "nobody tells the PodResources rule is used."
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
        Duration,
        opt(
            "How long NVML may take to open, and for each reading, before its process is replaced."
        ),
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


class HttpTls(Section, frozen=True, kw_only=True):
    cert_file: Annotated[
        str | None,
        opt(
            "Serving certificate (PEM), as mounted here, with those between it and its authority; "
            "with it TLS is spoken, and a changed file is followed.",
            flag="--tls-cert-file",
        ),
    ] = None
    key_file: Annotated[
        str | None,
        opt("Key of that certificate (PEM, without a password).", flag="--tls-private-key-file"),
    ] = None
    client_ca_file: Annotated[
        str | None,
        opt(
            "Authorities (PEM) whose client certificates open the pages that name pods; nobody "
            "needs one for metrics and probes.",
            flag="--client-ca-file",
        ),
    ] = msgspec.field(default=None, name="clientCAFile")
    min_version: Annotated[
        Literal["VersionTLS12", "VersionTLS13"],
        opt("The oldest version of TLS that is spoken.", flag="--tls-min-version"),
    ] = "VersionTLS12"


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
        bool,
        opt(
            "Serve the pages that name pods to everybody, not only to loopback and client "
            "certificates."
        ),
    ] = False
    tls: HttpTls = HttpTls()


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
    def pods_api_socket(self) -> Path:
        named = self.kubelet.pods_api_socket
        return Path(named or Path(self.kubelet.root_dir, "pods-api/pods-api.sock"))

    @property
    def plugin_dir(self) -> Path:
        found = Path(self.kubelet.plugin_dir or Path(self.kubelet.root_dir, "device-plugins"))
        return found.parent if found.name == "kubelet.sock" else found

    @property
    def registry_dir(self) -> Path:
        return Path(self.kubelet.root_dir, "plugins_registry")
