"""A description as `nvml.json`: what NVML would answer on the made machine."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rte.discovery.reading import (
    FabricReading,
    GpuReading,
    LinkReading,
    MigReading,
    NvmlReading,
)
from tests.machines.description import Description, Function, ids
from tests.machines.products import GPUS, MIB, MIG_PROFILES, GpuProduct
from tests.machines.sysfs_text import NAMES

GPU_PEER, CPU_PEER, SWITCH_PEER = 0, 1, 2
HIDDEN = "FFFFFFFF:FF:FF.0"  # NVML's bus id for a switch that the caller may not see
NOT_SUPPORTED = 5  # nvmlGpuP2PStatus_t


def nvml_reading(machine: Description) -> NvmlReading:
    """All GPUs in PCI order, which is NVML's, with the links and levels that follow from them."""
    host = machine.host
    gpus = machine.gpus()
    lost = {number for number, row in machine.gpu.items() if "error" in row}
    links = [list(_links(number, machine)) for number in range(len(gpus))]
    answering = [number for number in range(len(gpus)) if number not in lost]
    return NvmlReading(
        driver=host["driver"],
        nvml=f"{host.get('cuda', 12060) // 1000}.{host['driver']}",
        cuda=host.get("cuda", 12060),
        gpus=tuple(
            GpuReading(index=n, error=machine.gpu[n]["error"])
            if n in lost
            else _gpu(n, machine, tuple(links[n]))
            for n in range(len(gpus))
        ),
        levels=tuple(
            (a, b, level(gpus[a], gpus[b])) for a in answering for b in answering if a < b
        ),
        p2p=tuple(
            (a, b, *_p2p(a, b, machine, links)) for a in answering for b in answering if a != b
        ),
    )


def bus_id(address: str) -> str:
    """NVML's spelling: eight upper-case domain digits."""
    domain, rest = address.split(":", 1)
    return f"{int(domain, 16):08X}:{rest.upper()}"


def level(a: Function, b: Function) -> int:
    """NVML's common ancestor of two functions, from the made tree."""
    above_b = set(b.bridges)
    shared = next((bridge for bridge in a.bridges if bridge in above_b), None)
    if shared is not None:
        crossed = max(a.bridges.index(shared), b.bridges.index(shared))
        return 10 if crossed <= 1 else 20
    if a.root == b.root:
        return 30
    return 40 if a.numa == b.numa and a.numa >= 0 else 50


def _gpu(number: int, machine: Description, links: tuple[LinkReading, ...]) -> GpuReading:
    f = machine.gpus()[number]
    product = GPUS[f.words["product"]]
    own = machine.gpu.get(number, {})
    mig = tuple(_mig(machine, f, own.get("mig", ())))
    mode = (1, 1) if "mig" in own else (0, 0)
    return GpuReading(
        index=number,
        bus_id=bus_id(f.address),
        uuid=_uuid("GPU", machine.name, f.address),
        name=product.name,
        memory_bytes=product.memory_mib * MIB,
        minor=own.get("minor", number),
        serial=f"{1560000000000 + uuid.uuid5(NAMES, machine.name + f.address).int % 10**9}",
        module=number + 1 if machine.host.get("modules") else None,
        links=links,
        fabric=_fabric(product, machine.host, own),
        mig_mode=mode if product.mig else None,
        mig_max=product.mig_max,
        mig=mig,
        numa_node=own.get("memory_node"),
        memory_affinity=_memory_affinity(f, machine),
        cpu_affinity=_cpu_affinity(f, machine),
        ecc_uncorrected=0 if product.ecc else None,
        remap=(0, 0, False, False) if product.remap else None,
        recovery_action=0 if int(machine.host["driver"].split(".")[0]) >= 560 else None,
        temperature_c=28 + number,
    )


def _uuid(prefix: str, *seed: str) -> str:
    return f"{prefix}-{uuid.uuid5(NAMES, '/'.join(seed))}"


def _memory_affinity(f: Function, machine: Description) -> tuple[int, ...] | None:
    """The NUMA node as a mask; all nodes where the kernel says -1, none where NVML says nothing."""
    if machine.host.get("memory_affinity") == "refused":
        return None
    nodes = [f.numa] if f.numa >= 0 else [n.id for n in machine.numa if n.online and n.cpus]
    return _words(nodes)


def _cpu_affinity(f: Function, machine: Description) -> tuple[int, ...]:
    return _words(ids(f.local_cpus or ""))


def _words(members: list[int]) -> tuple[int, ...]:
    """64-bit words up to the last that is not 0, which is how our reading has them."""
    mask = sum(1 << member for member in members)
    words = max(mask.bit_length() - 1, 0) // 64 + 1
    return tuple(mask >> (64 * n) & (1 << 64) - 1 for n in range(words))


def _fabric(
    product: GpuProduct, host: Mapping[str, Any], own: Mapping[str, Any]
) -> FabricReading | None:
    if not product.fabric:
        return None
    table = own.get("fabric", host.get("fabric", {"state": 0}))
    return FabricReading(**table)


def _mig(machine: Description, f: Function, profiles: list[str]) -> Iterator[MigReading]:
    """The MIG devices of one GPU; `1c.3g.40gb 2c.3g.40gb` in one entry share a GPU instance.

    `-` is an index and an instance id that are free again: NVML's indices have holes.
    """
    index = 0
    for instance, entry in enumerate(profiles, 1):
        if entry == "-":
            index += 1
            continue
        for compute, profile in enumerate(entry.split()):
            slices, compute_slices, memory_mib = MIG_PROFILES[profile]
            yield MigReading(
                index=index,
                uuid=_uuid("MIG", machine.name, f.address, f"{instance}/{compute}"),
                name=profile,
                gpu_instance=instance,
                compute_instance=compute,
                gpu_slices=slices,
                compute_slices=compute_slices,
                memory_mib=memory_mib,
            )
            index += 1


def _links(number: int, machine: Description) -> Iterator[LinkReading]:
    """One GPU's NVLinks in link order, each as this GPU itself reports it."""
    gpus = machine.gpus()
    product = GPUS[gpus[number].words["product"]]
    down = set(machine.gpu.get(number, {}).get("links_down", ()))
    for link, (peer, remote) in enumerate(_ends(number, machine)):
        active = link not in down and peer is not None
        yield LinkReading(
            link=link,
            active=active,
            version=product.nvlink_version,
            remote_type=peer if active else None,
            remote_bus_id=remote if active else None,
            speed_mbps=product.lane_mbps if active else None,
            errors=0 if active else None,
        )


def _ends(number: int, machine: Description) -> Iterator[tuple[int | None, str | None]]:
    """(remote type, remote bus id) of each link; a type of None is a link that is down."""
    gpus = machine.gpus()
    for row in machine.nvlink:
        if "lanes" in row:
            for pair in row["pairs"].split():
                a, b = (int(part) for part in pair.split("-"))
                if number in (a, b):
                    other = b if number == a else a
                    up = f"{number}-{other}" not in row.get("inactive", "").split()
                    for _ in range(row["lanes"]):
                        yield (GPU_PEER, bus_id(gpus[other].address)) if up else (None, None)
            continue
        if number not in ids(row["gpus"]):
            continue
        for switch, count in row.get("switches", {}).items():
            for _ in range(count):
                yield SWITCH_PEER, bus_id(switch)
        for _ in range(row.get("hidden", 0)):
            yield SWITCH_PEER, HIDDEN
        for _ in range(row.get("cpu", 0)):
            yield CPU_PEER, bus_id(row.get("npu", "0000:00:00.0"))
        for _ in range(row.get("down", 0)):
            yield None, None


def _p2p(a: int, b: int, machine: Description, links: list[list[LinkReading]]) -> tuple[int, int]:
    """(read, NVLink) status from a to b, NVML's numbers."""
    gpus = machine.gpus()
    if any("mig" in machine.gpu.get(n, {}) for n in (a, b)):
        return NOT_SUPPORTED, NOT_SUPPORTED
    alike = gpus[a].words["product"] == gpus[b].words["product"]
    refused = machine.host.get("p2p_refused")
    read = refused if refused is not None else 0 if alike else NOT_SUPPORTED
    return (0, 0) if _linked(a, b, gpus, links) else (read, NOT_SUPPORTED)


def _linked(a: int, b: int, gpus: tuple[Function, ...], links: list[list[LinkReading]]) -> bool:
    ours = Counter((link.remote_type, link.remote_bus_id) for link in links[a] if link.active)
    theirs = any(link.remote_type == SWITCH_PEER for link in links[b] if link.active)
    through_switch = any(kind == SWITCH_PEER for kind, _ in ours) and theirs
    return through_switch or ours[(GPU_PEER, bus_id(gpus[b].address))] > 0


def nvml_text(reading: NvmlReading) -> str:
    """JSON for reading in a diff: a line for each GPU's own facts, link, MIG device and row."""
    built = msgspec.to_builtins(reading)
    gpus, levels, p2p = (built.pop(key, []) for key in ("gpus", "levels", "p2p"))
    head = [f'  "{key}": {_json(value)}' for key, value in built.items()]
    parts = [
        *head,
        '  "gpus": [\n' + ",\n".join(_gpu_text(gpu) for gpu in gpus) + "\n  ]",
        *(_table_text(name, rows) for name, rows in (("levels", levels), ("p2p", p2p)) if rows),
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _gpu_text(gpu: dict[str, Any]) -> str:
    lists = {key: gpu.pop(key) for key in ("links", "mig") if key in gpu}
    parts = ["      " + ", ".join(f'"{key}": {_json(value)}' for key, value in gpu.items())]
    for key, rows in lists.items():
        inner = ",\n".join(f"        {_json(row)}" for row in rows)
        parts.append(f'      "{key}": [\n{inner}\n      ]')
    return "    {\n" + ",\n".join(parts) + "\n    }"


def _table_text(name: str, rows: list[list[int]]) -> str:
    """Rows that begin with the same index share a line."""
    lines: dict[int, list[str]] = {}
    for row in rows:
        lines.setdefault(row[0], []).append(_json(row))
    return f'  "{name}": [\n' + ",\n".join("    " + ", ".join(r) for r in lines.values()) + "\n  ]"


def _json(value: object) -> str:
    return json.dumps(value)
