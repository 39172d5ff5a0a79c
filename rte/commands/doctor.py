"""`rte doctor`: what is wrong on this node, and what to do about it, a line each."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rte.commands import node, parts
from rte.commands.options import add_options, configuration
from rte.config import Config
from rte.control import NAME as CONTROL
from rte.control import Asked, ControlError, ask
from rte.discovery import assemble
from rte.discovery.faults import FaultMemory, faults
from rte.discovery.injection import VERSIONS_DIFFER
from rte.discovery.nvml_worker import NvmlUnavailable
from rte.discovery.reading import NvmlReading
from rte.discovery.sysfs import Host, SysfsError, read_host
from rte.kubelet.policy import PolicyError
from rte.kubelet.usage import KubeletError, channel, read_allocatable
from rte.kubelet.watch import watch
from rte.model import FaultClass, Machine, Policy, TopologyManagerPolicy
from rte.problems import do
from rte.publish.access import ApiError
from rte.publish.apply import ApiServer
from rte.publish.fabric import API_VERSION as FABRIC_VERSION
from rte.publish.nrt import API_VERSION as NRT_VERSION
from rte.publish.patch import STALE
from rte.publish.publisher import last_foreign_writer

CALL_S = 10.0  # who asks has a busy node, as a rule
WRONG, ADVICE = "wrong", "advice"


class Finding(NamedTuple):
    """One line. `wrong` keeps work from the node or makes it slow; `advice` may be as it should."""

    level: str
    subject: str
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.level:<6}  {self.subject}: {self.what}; {self.do}"


def wrong(subject: str, what: str, do: str) -> Finding:
    return Finding(WRONG, subject, one_line(what), do)


def advice(subject: str, what: str, do: str) -> Finding:
    return Finding(ADVICE, subject, one_line(what), do)


def one_line(text: str) -> str:
    return " ".join(text.split())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="text or json"
    )


def main(args: argparse.Namespace) -> int:
    """0: nothing is wrong; advice may be given all the same."""
    config = configuration(args)
    found = tuple(findings(config))
    if args.output == "json":
        rows = [finding._asdict() for finding in found]
        sys.stdout.write(json.dumps({"findings": rows}, indent=2, ensure_ascii=False) + "\n")
    else:
        for finding in found:
            sys.stdout.write(f"{finding}\n")
        if not any(finding.level == WRONG for finding in found):
            sys.stdout.write("nothing is wrong here\n")
    return int(any(finding.level == WRONG for finding in found))


def findings(config: Config) -> Iterator[Finding]:
    """All that is found, in the order in which one would look."""
    state = ask_daemon(config)
    yield from daemon_findings(state, config)
    host: Host | None = None
    try:
        host = read_host(Path(config.host.sysfs), proc=Path(config.host.procfs))
    except SysfsError as error:
        yield wrong("sysfs", str(error), "mount the host's /sys and name it by host.sysfs")
    if host is not None:
        yield from (
            advice("sysfs", problem, "`rte record` makes a report of it")
            for problem in host.problems
        )
        yield from hardware_findings(host, state, config)
        yield from iommu_findings(Path(config.host.sysfs))
    gpus = host is None or any(device.is_gpu for device in host.pci)
    yield from kubelet_findings(config, gpus=gpus)
    yield from watch_findings(config)
    yield from choice_findings(config, state)
    yield from api_findings(config)


# The daemon beside us

State = Mapping[str, Any]


def ask_daemon(config: Config) -> State | None:
    try:
        return ask(Path(config.state_dir, CONTROL), Asked(do="state"), timeout_s=CALL_S).state
    except ControlError:
        return None


def daemon_findings(state: State | None, config: Config) -> Iterator[Finding]:
    if state is None:
        yield advice(
            "daemon",
            f"none answers on {config.state_dir}/{CONTROL}",
            "run this in its pod (kubectl exec); what it remembers is not looked at",
        )
        return
    if state["released"]:
        yield wrong("nvml", "released on request", "`rte release --end` opens it again")
    if state["outgrown"]:
        yield wrong("driver", state["outgrown"], "wait for the new container")
    for subject, words in state["problems"].items():
        if subject != "hardware":  # looked at below
            yield wrong(subject, words, do(subject))
    for device, reason in state["withheld"].items():
        yield advice(
            "cordon",
            f"{device} gets no work: {reason}",
            "remove it from devices.withhold when done",
        )


# The hardware


def hardware_findings(host: Host, state: State | None, config: Config) -> Iterator[Finding]:
    bound = [d for d in host.pci if d.is_gpu and d.driver == "nvidia"]
    present = [d for d in host.pci if d.is_gpu]
    if present and not bound:
        drivers = ", ".join(sorted({str(d.driver) for d in present}))
        yield advice(
            "driver",
            f"{len(present)} NVIDIA GPUs, none bound to the nvidia driver (but to {drivers})",
            "load the driver, unless they are meant for virtual machines",
        )
    reading: NvmlReading | None = None
    if state is None or not state["released"]:  # a release must find no handle of ours either
        try:
            reading = read_nvml(config)
        except Unread as unread:
            if bound:
                yield wrong("nvml", str(unread), unread.do)
    machine = assemble(host, reading, overrides=node.overrides(config))
    yield from gpu_findings(machine, reading, state)
    yield from numa_findings(machine, config)
    for note in machine.unknown:
        if reading is not None:
            yield advice("hardware", note, "`rte show` has the whole picture")


def numa_findings(machine: Machine, config: Config) -> Iterator[Finding]:
    """GPUs that are advertised without topology on a machine with several NUMA nodes."""
    if len(machine.numa_nodes) < 2:
        return
    for gpu in machine.gpus:
        device = machine.device(gpu.pci)
        inferred = device.numa_from if device else None
        if inferred and (inferred.is_stated or config.numa.advertise_inferred):
            continue
        yield wrong(
            "numa",
            f"{gpu.name} ({gpu.pci}) has no NUMA node: the firmware says none"
            + (f" (inferred from {inferred.value}: {device.numa})" if device and inferred else ""),
            f"say it: numa.overrides: {{'{gpu.pci}': NODE}}; it is advertised without topology",
        )


class Unread(Exception):
    """NVML gave nothing; `do` is what helps."""

    def __init__(self, what: str, do: str) -> None:
        super().__init__(what)
        self.do = do


def read_nvml(config: Config) -> NvmlReading:
    """A reading by a worker of our own, which ends with it. Raises Unread."""
    worker = node.nvml_worker(config)
    try:
        return worker.reading()
    except NvmlUnavailable as error:
        what, _, do = error.problem.partition("; ")
        if worker.failure_code == VERSIONS_DIFFER and config.driver == "injected":
            do = "driver: injected cannot follow a new driver: restart the pod"
        raise Unread(what, do or "see the kernel's log for NVRM and Xid") from error
    finally:
        worker.stop()


ENDS = {
    "lost": "look for Xid 79 in the kernel's log, reset or reboot; see docs/health.md",
    "fabric-not-started": "start nvidia-fabricmanager, in the version of the driver",
    "fabric-in-progress": "see nvidia-fabricmanager's log; B200 and later also need NVLSM",
    "fabric-failed": "see nvidia-fabricmanager's log; single-GPU work runs",
    "fabric-unhealthy": "see `nvidia-smi -q` under Fabric, Health",
    "remap-failed": "replace the GPU",
    "remap-pending": "drain and reset the GPU when it suits",
    "nvlink-lost": "see `nvidia-smi nvlink -s`; reseat the bridge or service the baseboard",
    "nvlink-missing": "see `nvidia-smi nvlink -s`; reseat the bridge or service the baseboard",
}


def gpu_findings(
    machine: Machine, reading: NvmlReading | None, state: State | None
) -> Iterator[Finding]:
    """The daemon's own faults where it answers, for it has heard the events."""
    if state is not None:
        found = dict(state["faults"])
    else:
        by_gpu = faults(FaultMemory(), machine, reading)
        found = {
            f"{gpu.name} ({gpu.pci})": [
                {"severity": f.severity.value, "reason": f.reason, "detail": f.detail}
                for f in by_gpu.get(gpu.pci, ())
            ]
            for gpu in machine.gpus
        }
    for name, rows in found.items():
        for row in rows:
            if row["severity"] == FaultClass.INFO:
                continue
            withheld = row["severity"] == FaultClass.WITHHOLD
            do = ENDS.get(
                row["reason"], "drain and reset the GPU; docs/health.md says what ends it"
            )
            verb = "gets no work" if withheld else "is degraded"
            yield wrong("gpu", f"{name} {verb}: {row['reason']}: {row['detail']}", do)


def iommu_findings(sys: Path) -> Iterator[Finding]:
    """Whether peer-to-peer traffic may be sent through the CPU. ACS itself is in a part of the
    configuration space that only privilege reads."""
    groups = sys / "kernel/iommu_groups"
    try:
        kinds = {(group / "type").read_text().strip() for group in groups.iterdir()}
    except OSError:
        yield advice("iommu", "not known: no iommu_groups in sysfs", "`dmesg | grep -i iommu`")
        return
    translating = sorted(kinds - {"identity"})
    if translating:
        yield advice(
            "iommu",
            f"translates ({', '.join(translating)}); whether ACS redirects peer-to-peer traffic "
            "to the CPU is not known here",
            "for GPUDirect on bare metal boot with iommu=pt, and see `lspci -vvv | grep ACSCtl`",
        )


# The kubelet


def kubelet_findings(config: Config, *, gpus: bool) -> Iterator[Finding]:
    """`gpus`: whether the node has any, so that the kubelet should have them too."""
    root = Path(config.kubelet.root_dir)
    try:
        if next((root / "pki").iterdir(), None) is not None:
            yield wrong("secrets", f"{root}/pki can be read here", "mount an empty folder over it")
    except OSError:
        pass
    for subject, path in (
        ("kubelet.sock", config.plugin_dir / "kubelet.sock"),
        ("pod-resources", config.pod_resources_socket),
    ):
        problem = connect(path)
        if problem:
            yield wrong(subject, f"{path}: {problem}", "is the kubelet running, and mounted here?")
    if connect(config.pod_resources_socket) is None:
        yield from registration_findings(config, gpus=gpus)
    try:
        found = parts.kubelet_configuration(config, None, parts.node_name(config))
        yield from policy_findings(found.read())
    except PolicyError as error:
        yield wrong("kubelet", str(error), "name its file by kubelet.configFile")


def connect(path: Path) -> str | None:
    """Why nobody answers on a socket, or None."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CALL_S)
            probe.connect(str(path))
    except OSError as error:
        return error.strerror or str(error)
    return None


def registration_findings(config: Config, *, gpus: bool) -> Iterator[Finding]:
    with channel(config.pod_resources_socket) as kubelet:
        try:
            listed = read_allocatable(kubelet, CALL_S)
        except KubeletError as error:
            yield wrong(
                "pod-resources", str(error), "is the feature on, and not overrun by clients?"
            )
            return
    domain = config.devices.resource.partition("/")[0]
    if gpus and not any(device.resource.startswith(f"{domain}/") for device in listed.devices):
        yield wrong(
            "registration",
            f"the kubelet has no healthy device of {domain}",
            "see the plugin's log; one plugin a resource: is another one running?",
        )
    nowhere = Counter(
        device.resource
        for device in listed.devices
        if not device.numa and not device.resource.startswith(f"{domain}/")
    )
    for resource, count in sorted(nowhere.items()):
        yield advice(
            "numa",
            f"{count} devices of {resource} have no NUMA node: kubelet and schedulers align none",
            "see whether its plugin can be told to say it",
        )


def policy_findings(policy: Policy | None) -> Iterator[Finding]:
    """Where the kubelet is not set as deploy/kubelet/config.yaml has it."""
    sample = "see deploy/kubelet/config.yaml"
    if policy is None:
        yield advice(
            "kubelet", "its configuration is not found", "kubelet.configFile lets it be looked at"
        )
        return
    if policy.topology_manager is not TopologyManagerPolicy.SINGLE_NUMA_NODE:
        yield advice(
            "kubelet",
            f"topologyManagerPolicy is {policy.topology_manager}: GPUs and CPUs of a pod may lie "
            "on different NUMA nodes",
            sample,
        )
    if policy.cpu_manager == "none":
        yield advice("kubelet", "cpuManagerPolicy is none: CPUs are not bound", sample)
    if policy.memory_manager == "None":
        yield advice("kubelet", "memoryManagerPolicy is None: memory is not bound", sample)


def watch_findings(config: Config) -> Iterator[Finding]:
    trial = watch([config.plugin_dir / "kubelet.sock"], lambda _: None)
    try:
        if trial.polling:
            yield advice("inotify", trial.polling, "raise that sysctl; files are polled")
    finally:
        trial.close()
    if not os.access(config.plugin_dir, os.W_OK):
        yield wrong("device-plugins", f"{config.plugin_dir} cannot be written", "mount it writable")


# What was chosen to be so


def choice_findings(config: Config, state: State | None) -> Iterator[Finding]:
    """Options by which a scheduler is told less than there is."""
    nrt, name = config.nrt, parts.node_name(config)
    if not nrt.publish:
        yield advice("publish", "nothing is written (nrt.publish: false)", "set it to true")
        return
    hidden = sorted(set(parts.excluded_resources(config, name)))
    if hidden:
        yield advice(
            "excluded",
            f"no zone lists {', '.join(hidden)}: a scheduler places them by node only",
            "take them out of nrt.exclude and nrt.resourceExclude, unless that is meant",
        )
    if nrt.pod_exclude:
        yield advice(
            "excluded",
            f"what pods of {len(nrt.pod_exclude)} patterns hold is called available",
            "take them out of nrt.podExclude, unless they may be evicted",
        )
    if not nrt.echo:
        yield advice(
            "echo",
            "pods that wait are not woken (nrt.echo: 0): up to five minutes behind a release",
            "set nrt.echo above the scheduler's cacheResyncPeriodSeconds, unless it has no cache",
        )
    pods = None if state is None else state["pods"]
    if not nrt.fingerprint.watch_pods and not (
        serves_pods(config) if pods is None else pods["source"]
    ):
        yield advice(
            "fingerprint",
            "goes by PodResources: pods that have ended and are still there, and Guaranteed pods "
            "without CPUs of their own, keep a scheduler with a cache waiting",
            "kubelets from 1.37 tell by their pods API (kubelet.podsApi); else set "
            "nrt.fingerprint.watchPods, which takes the right to list and watch pods",
        )
    elif state is not None and state["disagreement"]:
        yield advice(
            "fingerprint",
            "PodResources alone would give another one now",
            "nothing, while the pods are followed: their own facts count",
        )
    if pods is not None and pods["kubelet"] and serves_pods(config):
        yield advice(
            "pods",
            f"the kubelet does not tell of them though its socket is there: {pods['kubelet']}",
            "nothing, while the API server does; a kubelet before 1.37 needs the gate PodsAPI",
        )


def serves_pods(config: Config) -> bool:
    """Whether the kubelet seems to serve its pods API."""
    return config.kubelet.pods_api and config.pods_api_socket.is_socket()


# The API server

Right = tuple[str, str, str]  # API group, resource, verb
RIGHTS: tuple[Right, ...] = (
    ("", "nodes", "get"),
    ("topology.node.k8s.io", "noderesourcetopologies", "get"),
    ("topology.node.k8s.io", "noderesourcetopologies", "create"),
    ("topology.node.k8s.io", "noderesourcetopologies", "patch"),
)


def wanted_rights(config: Config) -> Iterable[Right]:
    yield from RIGHTS
    if config.nrt.fabric:
        yield from (("rte.dev", "gpufabrics", verb) for verb in ("get", "create", "patch"))
    if config.nrt.fingerprint.watch_pods and not serves_pods(config):
        yield from (("", "pods", verb) for verb in ("list", "watch"))
    if config.health.events:
        yield ("", "events", "create")
    if config.labels.write == "node":
        yield ("", "nodes", "patch")


def api_findings(config: Config) -> Iterator[Finding]:
    """Definitions and rights, asked as the configured identity; nothing where there is none."""
    try:
        api = parts.api_server(config)
    except ApiError as error:
        if config.api.kubeconfig:
            yield wrong("api", str(error), "see api.kubeconfig")
        return
    try:
        yield from (f for check in (kinds, rights, objects) for f in check(api, config))
    except ApiError as error:
        yield wrong("api", str(error), "is the API server reachable from this pod?")
    finally:
        api.close()


def kinds(api: ApiServer, config: Config) -> Iterator[Finding]:
    wanted = [(NRT_VERSION, "noderesourcetopologies")]
    if config.nrt.fabric:
        wanted.append((FABRIC_VERSION, "gpufabrics"))
    for version, plural in wanted:
        try:
            api.read(f"/apis/{version}/{plural}/{parts.node_name(config)}")
        except ApiError as error:
            if error.unknown_kind:
                yield wrong("crd", f"{version} is not served", "kubectl apply -k deploy/base")
            elif error.status != 403:  # which `rights` names
                raise


def rights(api: ApiServer, config: Config) -> Iterator[Finding]:
    name = parts.node_name(config)
    for group, resource, verb in wanted_rights(config):
        if not api.may(verb, resource, group=group):
            yield wrong(
                "rbac",
                f"may not {verb} {resource}{f'.{group}' if group else ''} (for {name})",
                "apply the ClusterRole of deploy/, with the component of that option",
            )


def objects(api: ApiServer, config: Config) -> Iterator[Finding]:
    """The own Node and the own object as they are. What may not be read, `rights` has said."""
    name = parts.node_name(config)
    try:
        node = api.read_node(name)
        live = api.read(f"/apis/{NRT_VERSION}/noderesourcetopologies/{name}")
    except ApiError as error:
        if error.status in (403, 404):
            return
        raise
    if node is None:
        yield wrong("node", f"the API server has no Node {name}", "say its name by nodeName")
    if live is None:
        if config.nrt.publish:
            yield wrong(
                "object",
                f"{name} has no NodeResourceTopology: schedulers let every pod through",
                "the daemon's lines above, or its log, say why it writes none",
            )
        return
    said = {str(each["name"]): str(each["value"]) for each in live.get("attributes") or ()}
    if STALE in said:
        yield wrong(
            "object",
            f"nothing has been known of the node since {said[STALE]}",
            "the daemon's lines above, or its log, say why",
        )
    if "topologyManagerPolicy" not in said:
        yield wrong("object", "states no policy: schedulers let every pod through", do("policy"))
    writer = last_foreign_writer(live)
    if writer is not None:
        yield wrong(
            "object",
            f"last written by {writer.manager!r}, at {writer.time}",
            do("another writer"),
        )
    owners = {owner["uid"] for owner in live["metadata"].get("ownerReferences") or ()}
    if config.nrt.owner and node is not None and node["metadata"]["uid"] not in owners:
        yield advice(
            "object",
            f"does not belong to the Node {name}, and stays when that is deleted",
            "delete it then, or let the agent own what it writes (docs/install.md, One writer)",
        )
