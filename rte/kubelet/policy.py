"""The kubelet's configuration, as far as it decides placement. The only importer of psutil.

It comes from an explicit option, the kubelet's /configz, or its file and drop-ins. A value that
this program does not know is an error that names file and key: never a guess.
"""

from __future__ import annotations

import shlex
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from rte.model import CpuId, NumaId, Policy, Scope, TopologyManagerPolicy, base_units, parse_ranges

MOST_BYTES = 1 << 20
"""A configuration file is some kilobytes; a larger one is something else."""
DROP_IN_SUFFIX = ".conf"
API_VERSION = "kubelet.config.k8s.io/v1beta1"
KIND = "KubeletConfiguration"
DEFAULT_MAX_NUMA_NODES = 8

Word = TypeVar("Word", bound=StrEnum)


class CpuManagerPolicy(StrEnum):
    NONE = "none"
    STATIC = "static"


class MemoryManagerPolicy(StrEnum):
    NONE = "None"
    STATIC = "Static"


class PolicyError(Exception):
    """The kubelet's configuration cannot be read or understood. `where` is the file or call."""

    def __init__(self, where: str, problem: str, key: str | None = None) -> None:
        super().__init__(f"{where}: {key}: {problem}" if key else f"{where}: {problem}")
        self.where = where
        self.key = key


def read_policy(
    file: Path | None, *, drop_ins: Path | None = None, flags: Mapping[str, str] | None = None
) -> Policy:
    """The policy of a kubelet with this --config, this --config-dir and these further flags.

    Keys that neither sets have the kubelet's own defaults. Raises PolicyError.
    """
    configuration: Mapping[str, Any] = read_configuration(file) if file is not None else {}
    where = str(file) if file is not None else "the kubelet's defaults"
    if drop_ins is not None:
        for path in drop_in_files(drop_ins):
            configuration = merge_patch(configuration, read_configuration(path))
            where += f", {path.name}"
    flagged = from_flags(flags or {})
    if flagged:
        configuration = {**configuration, **flagged}
        where += ", command line"
    return parse_policy(configuration, where=where)


def parse_policy(configuration: Mapping[str, Any], *, where: str = "/configz") -> Policy:
    """The policy in a KubeletConfiguration, or in /configz's answer around one.

    Raises PolicyError naming `where` and the key.
    """
    if "kubeletconfig" in configuration:
        configuration = table(configuration, "kubeletconfig", where)
    options = strings(configuration, "topologyManagerPolicyOptions", where)
    return Policy(
        topology_manager=word(
            configuration,
            "topologyManagerPolicy",
            where,
            words=TopologyManagerPolicy,
            default=TopologyManagerPolicy.NONE,
        ),
        scope=word(
            configuration, "topologyManagerScope", where, words=Scope, default=Scope.CONTAINER
        ),
        max_numa_nodes=max_numa_nodes(options, where),
        cpu_manager=word(
            configuration,
            "cpuManagerPolicy",
            where,
            words=CpuManagerPolicy,
            default=CpuManagerPolicy.NONE,
        ).value,
        cpu_manager_options=strings(configuration, "cpuManagerPolicyOptions", where),
        memory_manager=word(
            configuration,
            "memoryManagerPolicy",
            where,
            words=MemoryManagerPolicy,
            default=MemoryManagerPolicy.NONE,
        ).value,
        reserved_cpus=reserved_cpus(configuration, where),
        reserved_memory=reserved_memory(configuration, where),
    )


def stated(
    policy: Policy | None,
    *,
    topology_manager: str | None = None,
    scope: str | None = None,
) -> Policy | None:
    """The policy with what the operator states in place of what was read.

    Where nothing was read a stated topology manager policy stands alone, a scope does not.
    """
    if policy is None and topology_manager is not None:
        policy = Policy()
    if policy is None:
        return None
    if topology_manager is not None:
        policy = replace(policy, topology_manager=TopologyManagerPolicy(topology_manager))
    return policy if scope is None else replace(policy, scope=Scope(scope))


def says(published: Policy, read: Policy) -> bool:
    """Whether a policy as a published object states it is one that was read: options and reserved
    memory are not published."""
    return published == replace(
        read,
        max_numa_nodes=published.max_numa_nodes
        if (read.max_numa_nodes or DEFAULT_MAX_NUMA_NODES) == published.max_numa_nodes
        else read.max_numa_nodes,
        cpu_manager_options={},
        reserved_memory={},
    )


# When a changed configuration counts


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """The policy that the running kubelet works by, which is not what its file says since.

    The kubelet reads its file once, at its start.
    """

    policy: Policy | None = None  # None: it could never be read
    kubelet: Hashable = None  # what tells one start of the kubelet from another
    pending: Policy | None = None  # read since, and not in force before the kubelet restarts

    def after(self, read: Policy | None, *, kubelet: Hashable) -> InForce:
        """The state after a look. `read` is None when the configuration could not be read, which
        leaves the last known policy in force."""
        if read is None:
            return self
        if self.policy is None or kubelet != self.kubelet:
            return InForce(policy=read, kubelet=kubelet)
        return replace(self, pending=read if read != self.policy else None)


# Files


def drop_in_files(directory: Path) -> list[Path]:
    """The drop-ins below a directory in the order in which the kubelet applies them.

    Raises PolicyError when the directory cannot be read: the kubelet would not start either.
    """
    try:
        entries = sorted(directory.iterdir(), key=lambda path: path.name)
        found = []
        for path in entries:
            if path.is_dir() and not path.is_symlink():
                found += drop_in_files(path)
            elif path.suffix == DROP_IN_SUFFIX:
                found.append(path)
    except OSError as error:
        raise PolicyError(str(directory), f"cannot be listed: {error.strerror}") from error
    return found


def read_configuration(path: Path) -> Mapping[str, Any]:
    """A KubeletConfiguration in YAML or JSON. Raises PolicyError."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise PolicyError(str(path), f"cannot be read: {error.strerror}") from error
    if len(text) > MOST_BYTES:
        raise PolicyError(str(path), f"has more than {MOST_BYTES} bytes")
    return parse_configuration(text, where=str(path))


def parse_configuration(text: bytes, *, where: str) -> Mapping[str, Any]:
    # Only a daemon that reads a file pays for it.
    import yaml  # noqa: PLC0415

    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise PolicyError(where, f"is no YAML: {problem}") from error
    if not isinstance(value, dict):
        raise PolicyError(where, f"expected a {KIND}, read {value!r:.80}")
    said = value.get("apiVersion"), value.get("kind")
    # The kubelet refuses a file without them, too.
    if said != (API_VERSION, KIND):
        problem = (
            f"expected apiVersion {API_VERSION} and kind {KIND}, read {said[0]!r}, {said[1]!r}"
        )
        raise PolicyError(where, problem)
    return value


def merge_patch(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7396, which is how the kubelet applies a drop-in: maps merge, lists replace, null
    deletes."""
    merged = dict(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            base = merged.get(key)
            merged[key] = merge_patch(base if isinstance(base, dict) else {}, value)
        else:
            merged[key] = value
    return merged


# Values


def word(
    configuration: Mapping[str, Any], key: str, where: str, *, words: type[Word], default: Word
) -> Word:
    value = configuration.get(key)
    if value is None or value == "":
        return default
    if value not in tuple(words):
        known = ", ".join(words)
        raise PolicyError(where, f"expected one of {known}, read {value!r:.80}", key)
    return words(value)


def table(configuration: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = configuration.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise PolicyError(where, f"expected a map, read {value!r:.80}", key)
    return value


def strings(configuration: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    """The kubelet refuses a value without quotes (true, 8) here."""
    values = table(configuration, key, where)
    for name, value in values.items():
        if not isinstance(value, str):
            raise PolicyError(where, f"expected a string, read {value!r:.80}", f"{key}.{name}")
    return dict(sorted(values.items()))


def max_numa_nodes(options: Mapping[str, str], where: str) -> int | None:
    text = options.get("max-allowable-numa-nodes")
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or not 8 <= int(text) <= 64:
        key = "topologyManagerPolicyOptions.max-allowable-numa-nodes"
        raise PolicyError(where, f"expected a number from 8 to 64, read {text!r:.80}", key)
    return int(text)


def reserved_cpus(configuration: Mapping[str, Any], where: str) -> tuple[CpuId, ...]:
    key = "reservedSystemCPUs"
    value = configuration.get(key)
    if value is None:
        return ()
    if not isinstance(value, str):
        raise PolicyError(where, f"expected a string such as '0-3,8', read {value!r:.80}", key)
    try:
        return tuple(map(CpuId, parse_ranges(value)))
    except ValueError as error:
        raise PolicyError(where, str(error), key) from error


def reserved_memory(
    configuration: Mapping[str, Any], where: str
) -> dict[NumaId, Mapping[str, int]]:
    """Bytes by NUMA node and memory type."""
    key = "reservedMemory"
    entries = configuration.get(key)
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise PolicyError(where, f"expected a list, read {entries!r:.80}", key)
    found: dict[NumaId, dict[str, int]] = {}
    for number, entry in enumerate(entries):
        at = f"{key}[{number}]"
        if not isinstance(entry, dict):
            raise PolicyError(where, f"expected a map, read {entry!r:.80}", at)
        node = entry.get("numaNode", 0)
        if not isinstance(node, int) or isinstance(node, bool) or node < 0:
            problem = f"expected a NUMA node's number, read {node!r:.80}"
            raise PolicyError(where, problem, f"{at}.numaNode")
        limits = table(entry, "limits", where)
        of_node = found.setdefault(NumaId(node), {})
        for name, quantity in limits.items():
            if isinstance(quantity, bool) or not isinstance(quantity, (str, int)):
                problem = f"expected a quantity, read {quantity!r:.80}"
                raise PolicyError(where, problem, f"{at}.limits.{name}")
            try:
                of_node[name] = base_units(str(quantity))
            except ValueError as error:
                raise PolicyError(where, str(error), f"{at}.limits.{name}") from error
    return {node: dict(sorted(found[node].items())) for node in sorted(found)}


# The kubelet's command line, which is seen where the host's process namespace is shared


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletCommand:
    """What a running kubelet was started with. Paths are the host's."""

    pid: int
    started: float  # seconds since the epoch; with the pid it tells one start from another
    config: Path | None = None  # --config
    config_dir: Path | None = None  # --config-dir
    root_dir: Path = Path("/var/lib/kubelet")
    flags: Mapping[str, str] = field(default_factory=dict)
    """Those of its flags that take the place of keys of the file, without dashes."""


# Flag → the key of KubeletConfiguration that it sets. Deprecated, and still what kubeadm's and
# distributions' unit files use; the kubelet lets flags win over the file.
FLAG_KEYS = {
    "topology-manager-policy": "topologyManagerPolicy",
    "topology-manager-scope": "topologyManagerScope",
    "topology-manager-policy-options": "topologyManagerPolicyOptions",
    "cpu-manager-policy": "cpuManagerPolicy",
    "cpu-manager-policy-options": "cpuManagerPolicyOptions",
    "memory-manager-policy": "memoryManagerPolicy",
    "reserved-cpus": "reservedSystemCPUs",
    "reserved-memory": "reservedMemory",
}


def read_kubelet_commands() -> list[KubeletCommand]:
    """The command lines of the kubelets that are visible from here, first started first.

    Of several the first is the node's own; later ones run nested, in containers.
    """
    # Only a daemon that was told to look for the kubelet pays for it.
    import psutil  # noqa: PLC0415

    found = []
    for process in psutil.process_iter(["pid", "create_time", "cmdline"]):
        pid, started, command = (process.info[k] for k in ("pid", "create_time", "cmdline"))
        if command and is_kubelet(command):
            found.append(parse_command(command, pid=pid, started=started))
    return sorted(found, key=lambda kubelet: (kubelet.started, kubelet.pid))


def is_kubelet(command: Sequence[str]) -> bool:
    """Also the all-in-one binary of some distributions, called with the word kubelet."""
    name = Path(command[0]).name
    return name == "kubelet" or (name in {"hyperkube", "k8s"} and command[1:2] == ["kubelet"])


def parse_command(command: Sequence[str], *, pid: int, started: float) -> KubeletCommand:
    flags = parse_flags(command[1:])
    return KubeletCommand(
        pid=pid,
        started=started,
        config=Path(flags["config"]) if flags.get("config") else None,
        config_dir=Path(flags["config-dir"]) if flags.get("config-dir") else None,
        root_dir=Path(flags.get("root-dir") or "/var/lib/kubelet"),
        flags={name: value for name, value in flags.items() if name in FLAG_KEYS},
    )


def parse_flags(arguments: Iterable[str]) -> dict[str, str]:
    """Go's flags: `--name=value` or `--name value`, `_` as good as `-`, the last one wins."""
    flags: dict[str, str] = {}
    name: str | None = None
    for argument in arguments:
        if argument.startswith("-"):
            key, equals, value = argument.lstrip("-").partition("=")
            key = key.replace("_", "-")
            name = None if equals else key
            flags[key] = unquoted(value) if equals else ""
        elif name is not None:
            flags[name] = argument
            name = None
    return flags


def unquoted(value: str) -> str:
    """Some unit files leave quotes in the argument."""
    parts = shlex.split(value) if value[:1] in {'"', "'"} and value[-1:] == value[:1] else []
    return parts[0] if len(parts) == 1 else value


def from_flags(flags: Mapping[str, str]) -> dict[str, Any]:
    """The keys that the flags set, with values as a configuration file would have them."""
    found: dict[str, Any] = {}
    for flag, text in flags.items():
        key = FLAG_KEYS[flag]
        if flag.endswith("-options"):
            found[key] = pairs(text, flag=flag)
        elif flag == "reserved-memory":
            found[key] = [numa_limits(part, flag=flag) for part in text.split(";") if part]
        else:
            found[key] = text
    return found


def pairs(text: str, *, flag: str) -> dict[str, str]:
    found = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        if not equals:
            raise PolicyError("command line", f"expected name=value, read {part!r:.80}", flag)
        found[name.strip()] = value.strip()
    return found


def numa_limits(text: str, *, flag: str) -> dict[str, Any]:
    """One node of --reserved-memory: `0:memory=1Gi,hugepages-1Gi=2Gi`."""
    node, colon, limits = text.partition(":")
    if not colon or not node.strip().isdecimal():
        raise PolicyError("command line", f"expected node:type=size, read {text!r:.80}", flag)
    return {"numaNode": int(node), "limits": pairs(limits, flag=flag)}
