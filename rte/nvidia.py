"""The configuration file of NVIDIA's device plugin (`version: v1`) in our words.

What means something here is taken over; what only concerns NVIDIA's own programs is passed over
and told; what we cannot do stops the start with NVIDIA's own dotted key, since a plugin that does
something else than it was told would be found out late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rte.foreign import ForeignError, Json, Translated, put

# NVIDIA's dotted key → ours. Types and choices are checked under our key, as for our own file.
TAKEN = {
    "flags.migStrategy": "devices.migStrategy",
    "flags.nvidiaDriverRoot": "nvml.driverRoot",
    "flags.nvidiaDevRoot": "nvml.devRoot",
    "flags.gdrcopyEnabled": "devices.gdrcopyEnabled",
    "flags.gdsEnabled": "devices.gdsEnabled",
    "flags.mofedEnabled": "devices.mofedEnabled",
    "flags.deviceDiscoveryStrategy": "nvml.discovery",
    "flags.plugin.passDeviceSpecs": "devices.passDeviceSpecs",
    "flags.plugin.deviceListStrategy": "devices.deviceListStrategy",
    "flags.plugin.deviceIDStrategy": "devices.deviceIDStrategy",
    "flags.plugin.cdiAnnotationPrefix": "cdi.annotationPrefix",
    "flags.plugin.containerDriverRoot": "nvml.containerDriverRoot",
    "flags.plugin.sharedDevicesAllocationPolicy": "devices.sharedAllocation",
    "sharing.timeSlicing.renameByDefault": "sharing.timeSlicing.renameByDefault",
    "sharing.timeSlicing.failRequestsGreaterThanOne": (
        "sharing.timeSlicing.failRequestsGreaterThanOne"
    ),
    "imex.channelIDs": "imex.channelIDs",
    "imex.required": "imex.required",
}

# NVIDIA's key → why it changes nothing here. Whole sections are named by their first word.
PASSED_OVER = {
    "flags.failOnInitError": "a driver that is not there is waited for",
    "flags.mpsRoot": "MPS is not offered",
    "flags.useNodeFeatureAPI": "it is GPU feature discovery's",
    "flags.gfd": "it is GPU feature discovery's",
    "flags.plugin.nvidiaCTKPath": "the toolkit makes its specification itself",
    "flags.plugin.nvidiaCDIHookPath": "the toolkit makes its specification itself",
    "flags.plugin.cdiFeatureFlags": "the toolkit makes its specification itself",
    "flags.plugin.cdiDisableHooks": "the toolkit makes its specification itself",
    "resources": "NVIDIA's plugin does not rename resources either",
}


def translated(data: Mapping[str, Any]) -> Translated:
    """The options of a file. Raises ForeignError."""
    if data["version"] != "v1":
        raise ForeignError("version", f"expected v1, got {data['version']!r}")
    ours: Json = {}
    passed_over: list[str] = []
    _section({key: value for key, value in data.items() if key != "version"}, "", ours, passed_over)
    return Translated(ours, tuple(passed_over))


def _section(data: Mapping[str, Any], prefix: str, ours: Json, passed_over: list[str]) -> None:
    for name, value in data.items():
        key = f"{prefix}{name}"
        if value is None or value == {}:
            continue
        if key in TAKEN:
            put(ours, TAKEN[key], _as_ours(key, value))
        elif key in PASSED_OVER:
            passed_over.append(f"{key} changes nothing: {PASSED_OVER[key]}")
        elif key in SPECIAL:
            SPECIAL[key](value, ours, passed_over)
        elif key in SECTIONS:
            if not isinstance(value, dict):
                raise ForeignError(key, f"expected a mapping, got {value!r}")
            _section(value, f"{key}.", ours, passed_over)
        else:
            raise ForeignError(key, "there is nothing like it here")


SECTIONS = {key.rpartition(".")[0] for key in TAKEN} | {"sharing"}


def _as_ours(key: str, value: Any) -> Any:
    if key == "flags.deviceDiscoveryStrategy" and value not in ("auto", "nvml"):
        raise ForeignError(
            key,
            f"{value!r} is not supported: only GPUs that NVML knows are (no Tegra, WSL, vGPU or "
            "vfio)",
        )
    if key == "flags.plugin.deviceListStrategy" and isinstance(value, str):
        return [word.strip() for word in value.split(",")]
    return value


def _mps(value: Any, ours: Json, passed_over: list[str]) -> None:
    raise ForeignError(
        "sharing.mps",
        "MPS is not supported: without its daemon the containers would share without limits; use "
        "sharing.timeSlicing, or NVIDIA's plugin on this node",
    )


def _resources(value: Any, ours: Json, passed_over: list[str]) -> None:
    key = "sharing.timeSlicing.resources"
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ForeignError(key, "expected a list of mappings")
    found = []
    for number, entry in enumerate(value):
        here = f"{key}[{number}]"
        unknown = sorted(entry.keys() - {"name", "rename", "devices", "replicas"})
        if unknown:
            raise ForeignError(f"{here}.{unknown[0]}", "there is nothing like it here")
        if entry.get("rename"):
            passed_over.append(
                f"{here}.rename changes nothing, as in NVIDIA's plugin; see renameByDefault"
            )
        if entry.get("devices", "all") != "all":
            passed_over.append(
                f"{here}.devices changes nothing, as in NVIDIA's plugin: it means all devices"
            )
        name = entry.get("name")
        found.append(
            {
                "name": f"nvidia.com/{name}" if isinstance(name, str) and "/" not in name else name,
                "replicas": entry.get("replicas"),
            }
        )
    put(ours, key, found)


# Keys that are more than another word for one of ours.
SPECIAL: Mapping[str, Callable[[Any, Json, list[str]], None]] = {
    "sharing.mps": _mps,
    "sharing.timeSlicing.resources": _resources,
}
