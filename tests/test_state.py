"""The kubelet's own files, in the formats that its releases write."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rte.kubelet.state import (
    CPU_STATE,
    DEVICE_CHECKPOINT,
    MEMORY_STATE,
    HandedOut,
    PodUid,
    StateFileError,
    read_cpus,
    read_devices,
    read_handed_out,
    read_memory,
)
from rte.model import CpuId, DeviceId, MemoryBlock, NumaId

A = (PodUid("uid-a"), "c")
GPU = "nvidia.com/gpu"


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_devices_are_counted_once_whatever_their_numa_nodes(tmp_path: Path) -> None:
    entry = {"PodUID": "uid-a", "ContainerName": "c", "AllocResp": "aGk="}
    path = write(
        tmp_path / DEVICE_CHECKPOINT,
        {
            "Data": {
                "PodDeviceEntries": [
                    {**entry, "ResourceName": GPU, "DeviceIDs": {"0": ["G0", "G1"], "1": ["G1"]}},
                    {**entry, "ResourceName": "example.com/nic", "DeviceIDs": {"-1": ["G0"]}},
                ],
                "RegisteredDevices": {GPU: ["G0", "G1", "G2"], "example.com/nic": None},
            },
            "Checksum": 1,
        },
    )
    held, nodes, registered = read_devices(path)
    g0, g1, nic = (GPU, DeviceId("G0")), (GPU, DeviceId("G1")), ("example.com/nic", DeviceId("G0"))
    assert held == {A: {g0, g1, nic}}
    assert nodes == {g0: (0,), g1: (0, 1), nic: ()}
    assert registered == {GPU: {"G0", "G1", "G2"}, "example.com/nic": set()}


def test_an_empty_checkpoint_holds_nothing(tmp_path: Path) -> None:
    data: dict[str, Any] = {"PodDeviceEntries": None, "RegisteredDevices": {}}
    assert read_devices(write(tmp_path / "f", {"Data": data, "Checksum": 0})) == ({}, {}, {})


CPUS = {
    "as until 1.36": {
        "policyName": "static",
        "defaultCpuSet": "0,3-7",
        "entries": {"uid-a": {"c": "1-2", "idle": ""}},
        "checksum": 1,
    },
    "with pod-level sets": {
        "policyName": "static",
        "defaultCpuSet": "0,3-7",
        "entries": {"uid-a": {"c": ""}},
        "podEntries": {"uid-a": {"cpuSet": "1-2"}, "uid-of-a-failure": {"cpuSet": "9"}},
        "checksum": 1,
    },
    "as from 1.37, where the text within counts": {
        "policyName": "static",
        "defaultCpuSet": "0",
        "entries": {"uid-a": {"c": "7"}},
        "checksum": 1,
        "data": json.dumps(
            {"defaultCpuSet": "0,3-7", "entries": {"uid-a": {"c": "1,2"}}, "baselines": {}}
        ),
        "dataChecksum": 2,
    },
    "the policy none": {"policyName": "none", "defaultCpuSet": "", "checksum": 1},
}


@pytest.mark.parametrize("content", CPUS.values(), ids=CPUS.keys())
def test_exclusive_cpus_are_read(tmp_path: Path, content: dict[str, Any]) -> None:
    found, shared = read_cpus(write(tmp_path / CPU_STATE, content))
    held = {CpuId(1), CpuId(2)}
    assert shared == ({0, *range(3, 8)} if found else set())
    if "podEntries" in content:
        assert found == {(PodUid("uid-a"), ""): held}
    else:
        assert found == ({} if content["policyName"] == "none" else {A: held})


def block(size: int, *numa: int) -> dict[str, Any]:
    return {"numaAffinity": list(numa), "type": "memory", "size": size}


MEMORY = {
    "as until 1.36": {
        "machineState": {"0": {"cells": [0]}},
        "entries": {"uid-a": {"c": [block(5, 1, 0)], "init": [block(0, 0)]}},
    },
    "as from 1.37": {
        "entries": {"uid-a": {"c": [block(7, 0)]}},
        "data": json.dumps(
            {
                "machineState": {
                    "1": {
                        "memoryMap": {"memory": {"total": 9, "free": 4, "reserved": 3}},
                        "cells": [1, 0],
                    }
                },
                "entries": {"uid-a": {"c": [block(5, 0, 1)]}},
            }
        ),
    },
}


@pytest.mark.parametrize("content", MEMORY.values(), ids=MEMORY.keys())
def test_bound_memory_is_read(tmp_path: Path, content: dict[str, Any]) -> None:
    numa = (NumaId(0), NumaId(1))
    held, free, taken, cells = read_memory(write(tmp_path / MEMORY_STATE, content))
    assert held == {A: (MemoryBlock(type="memory", size_bytes=5, numa=numa),)}
    assert free == ({"memory": {NumaId(1): 4}} if "data" in content else {})
    assert cells == ({NumaId(1): numa} if "data" in content else {NumaId(0): numa[:1]})
    assert taken == ({"memory": {NumaId(1): 3}} if "data" in content else {})


def test_pod_level_memory_is_held_by_the_pod(tmp_path: Path) -> None:
    content = {"podEntries": {"uid-a": {"memoryBlocks": [block(5, 0)]}}}
    (holder,), *_ = read_memory(write(tmp_path / MEMORY_STATE, content))
    assert holder == (PodUid("uid-a"), "")


def test_files_of_managers_that_are_off_are_missing(tmp_path: Path) -> None:
    assert read_handed_out(tmp_path, tmp_path / "device-plugins") == HandedOut()


READERS: dict[str, Callable[[Path], Any]] = {
    "devices": read_devices,
    "cpus": read_cpus,
    "memory": read_memory,
}


def test_a_file_that_is_not_understood_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """Such as one of a format to come."""
    write(tmp_path / CPU_STATE, {"policyName": "static", "entries": {"uid": {"c": "2-3"}}})
    (tmp_path / MEMORY_STATE).write_text('{"entries": {"uid"')
    read = read_handed_out(tmp_path, tmp_path / "device-plugins")
    assert read.cpus == {(PodUid("uid"), "c"): frozenset({CpuId(2), CpuId(3)})}
    assert list(read.unread) == [tmp_path / MEMORY_STATE]
    assert "not the kubelet's format" in read.unread[tmp_path / MEMORY_STATE]


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"Data": 3, "entries": 3}', '{"Data":{"PodDeviceEntries":[{}]},"entries":{"a":1}}'],
)
def test_a_file_of_no_known_format_is_an_error_that_names_it(
    tmp_path: Path, read: Callable[[Path], Any], content: str
) -> None:
    with pytest.raises(StateFileError, match="state-file"):
        read(write(tmp_path / "state-file", content))


def test_a_directory_in_its_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateFileError):
        read_cpus(tmp_path)


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "1,,x", "1-70000", "\u0661"])
def test_what_is_no_cpu_list_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(StateFileError, match="not a list such as"):
        read_cpus(write(tmp_path / CPU_STATE, {"entries": {"a": {"c": text}}}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["Data", "PodDeviceEntries", "entries", "podEntries", "data", "a"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any-state", value if value != "" else 0)
    for read in READERS.values():
        with contextlib.suppress(StateFileError):
            read(path)
