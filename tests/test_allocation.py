"""What a container gets: NVIDIA's answers, and CDI that refers to what is there."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from plugin import cdi
from plugin.allocation import (
    Allocation,
    CannotAllocate,
    Handing,
    Mount,
    Node,
    Nodes,
    Strategy,
    allocation,
    missing_channels,
    owners,
    parse_mig_minors,
    read_nodes,
)
from plugin.devices import Advertising, Device, MigStrategy, devices
from rte.model import DeviceId, Machine
from tests.small_machine import machine, slices, uuid, with_gpu

A, B = uuid(0), uuid(1)
NODES = Nodes(control=("nvidiactl", "nvidia-uvm"), imex_channels=frozenset({0}))
MOUNTED = "/var/run/nvidia-container-devices"


def given(
    *ids: str,
    of: Machine | None = None,
    advertising: Advertising | None = None,
    nodes: Nodes = NODES,
    names: dict[DeviceId, str] | None = None,
    extra: tuple[str, ...] = (),
    **handing: Any,
) -> Allocation:
    """What Allocate answers for these ids of the machine."""
    of = of or machine()
    found = devices(of, {}, options=advertising or Advertising())
    known = {d.id: d for listed in found.resources.values() for d in listed}
    return allocation(
        [known[DeviceId(id)] for id in ids],
        owners=owners(of.gpus),
        handing=Handing(**handing),
        nodes=nodes,
        cdi_names=names,
        cdi_extra=extra,
    )


def node(path: str, root: str = "") -> Node:
    return Node(container=f"/dev/{path}", host=f"{root}/dev/{path}")


@pytest.mark.parametrize(
    ("handing", "expected"),
    [
        pytest.param({}, Allocation(envs={"NVIDIA_VISIBLE_DEVICES": f"{A},{B}"}), id="envvar"),
        pytest.param(
            {"ids": "index"}, Allocation(envs={"NVIDIA_VISIBLE_DEVICES": "0,1"}), id="by index"
        ),
        pytest.param(
            {"strategies": {Strategy.VOLUME_MOUNTS}},
            Allocation(
                envs={"NVIDIA_VISIBLE_DEVICES": MOUNTED},
                mounts=(
                    Mount(container=f"{MOUNTED}/{A}", host="/dev/null"),
                    Mount(container=f"{MOUNTED}/{B}", host="/dev/null"),
                ),
            ),
            id="volume-mounts",
        ),
        pytest.param(
            {"strategies": {Strategy.ENVVAR, Strategy.VOLUME_MOUNTS}, "imex_channels": (0, 1)},
            Allocation(
                envs={"NVIDIA_VISIBLE_DEVICES": MOUNTED, "NVIDIA_IMEX_CHANNELS": "0"},
                mounts=(
                    Mount(container=f"{MOUNTED}/{A}", host="/dev/null"),
                    Mount(container=f"{MOUNTED}/{B}", host="/dev/null"),
                    Mount(container=f"{MOUNTED}/imex/0", host="/dev/null"),
                ),
            ),
            id="both, with the IMEX channel that exists",
        ),
        pytest.param(
            {"gdrcopy": True, "gds": True, "mofed": True},
            Allocation(
                envs={
                    "NVIDIA_VISIBLE_DEVICES": f"{A},{B}",
                    "NVIDIA_GDRCOPY": "enabled",
                    "NVIDIA_GDS": "enabled",
                    "NVIDIA_MOFED": "enabled",
                }
            ),
            id="GDRCopy, GDS, MOFED",
        ),
        pytest.param(
            {"device_specs": True, "dev_root": "/run/nvidia/driver"},
            Allocation(
                envs={"NVIDIA_VISIBLE_DEVICES": f"{A},{B}"},
                nodes=tuple(
                    node(path, "/run/nvidia/driver")
                    for path in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1")
                ),
            ),
            id="device nodes below the driver's root",
        ),
        pytest.param(
            {"cuda_order": True},
            Allocation(
                envs={
                    "NVIDIA_VISIBLE_DEVICES": f"{A},{B}",
                    "CUDA_VISIBLE_DEVICES": f"{A},{B}",
                }
            ),
            id="CUDA in the order that is given",
        ),
    ],
)
def test_two_gpus(handing: dict[str, Any], expected: Allocation) -> None:
    if "strategies" in handing:
        handing = {**handing, "strategies": frozenset(handing["strategies"])}
    assert given(A, B, **handing) == expected


def test_a_slice_brings_its_gpus_node_and_its_two_capabilities() -> None:
    cut = with_gpu(machine(), 1, mig_enabled=True, slices=slices(1, "1g.10gb", "1g.10gb"))
    minors = "gpu1/gi2/access 12\ngpu1/gi2/ci0/access 13\ngpu1/gi1/access 3\nconfig 1\n"
    nodes = Nodes(mig_minors=parse_mig_minors(minors))
    id = cut.gpus[1].slices[1].id
    answer = given(
        id,
        of=cut,
        advertising=Advertising(mig=MigStrategy.MIXED),
        nodes=nodes,
        device_specs=True,
        ids="index",
    )
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": id}
    assert answer.nodes == (
        node("nvidia1"),
        node("nvidia-caps/nvidia-cap12"),
        node("nvidia-caps/nvidia-cap13"),
    )


SHARED = Advertising(replicas={"nvidia.com/gpu": 4})


def test_two_replicas_of_one_gpu_are_one_device() -> None:
    answer = given(f"{A}::0", f"{A}::3", f"{B}::1", advertising=SHARED)
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": f"{A},{B}"}


@pytest.mark.parametrize("second", [f"{A}::3", f"{B}::3"])
def test_a_second_replica_is_refused_by_option(second: str) -> None:
    with pytest.raises(CannotAllocate, match=f"refused.*{A}::0, {second}"):
        given(f"{A}::0", second, advertising=SHARED, one_replica=True)
    given(f"{A}::0", advertising=SHARED, one_replica=True)
    given(A, B, one_replica=True)


def test_nccl_gets_its_file_once_it_is_there() -> None:
    wanted: dict[str, Any] = {"nccl_topology_dir": "/run/topology"}
    answer = given(A, nodes=Nodes(nccl_topology=True), **wanted)
    assert answer.envs["NCCL_TOPO_FILE"] == "/run/rte-nccl/topology.xml"
    assert answer.mounts == (
        Mount(container="/run/rte-nccl", host="/run/topology", read_only=True),
    )
    assert given(A, **wanted) == given(A)


def test_channels_that_do_not_exist_are_named() -> None:
    both = Handing(imex_channels=(0, 1))
    assert missing_channels(both, NODES) == ("/dev/nvidia-caps-imex-channels/channel1",)


def test_at_least_one_strategy_is_needed() -> None:
    with pytest.raises(ValueError, match="at least one device list strategy"):
        Handing(strategies=frozenset())


def test_nodes_that_exist_are_found(tmp_path: Path) -> None:
    (tmp_path / "dev/nvidia-caps-imex-channels").mkdir(parents=True)
    for name in ("nvidia-uvm", "nvidiactl", "nvidia-caps-imex-channels/channel3"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc/driver/nvidia-caps").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia-caps/mig-minors").write_text("gpu0/gi1/access 30\n")
    assert read_nodes(dev=tmp_path / "dev", proc=tmp_path / "proc") == Nodes(
        control=("nvidiactl", "nvidia-uvm"),
        mig_minors={"gpu0/gi1/access": 30},
        imex_channels=frozenset({3}),
    )


def test_a_machine_without_the_driver_has_no_nodes(tmp_path: Path) -> None:
    assert read_nodes(dev=tmp_path / "dev", proc=tmp_path / "proc") == Nodes()


# CDI

CRI = frozenset({Strategy.CDI_CRI})
ANNOTATIONS = frozenset({Strategy.CDI_ANNOTATIONS})
NAMES = {A: f"nvidia.com/gpu={A}", B: f"nvidia.com/gpu={B}"}


def test_cdi_cri_names_the_devices_and_nothing_else() -> None:
    answer = given(
        A,
        B,
        names=NAMES,
        extra=("nvidia.com/gds=all",),
        strategies=CRI,
        gds=True,
        device_specs=True,
    )
    assert answer == Allocation(cdi=(NAMES[A], NAMES[B], "nvidia.com/gds=all"))


def test_a_cdi_annotation_lists_the_names_under_a_key_of_its_own() -> None:
    first, second = (given(A, B, names=NAMES, strategies=ANNOTATIONS) for _ in range(2))
    assert list(first.annotations.values()) == [f"{NAMES[A]},{NAMES[B]}"]
    (key,) = first.annotations
    assert key.startswith("cdi.k8s.io/nvidia-device-plugin_")
    assert len(key.removeprefix("cdi.k8s.io/")) <= 63
    assert first.annotations.keys() != second.annotations.keys()
    assert not first.envs
    assert not first.cdi


def test_a_device_without_a_cdi_name_is_refused_by_name() -> None:
    with pytest.raises(CannotAllocate, match=f"no CDI specification lists: {B}"):
        given(A, B, names={A: NAMES[A]}, strategies=CRI)


def spec(*devices: str, kind: str = "nvidia.com/gpu") -> dict[str, Any]:
    edits = {"deviceNodes": [{"path": "/dev/nvidia0"}]}
    return {
        "cdiVersion": "0.5.0",
        "kind": kind,
        "devices": [{"name": name, "containerEdits": edits} for name in devices],
    }


def test_specifications_of_both_kinds_of_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(spec("0", A)))
    (tmp_path / "gds.json").write_text(json.dumps(spec("all", kind="nvidia.com/gds")))
    (tmp_path / "notes.txt").write_text("no specification")
    found = cdi.read_listed([tmp_path / "absent", tmp_path])
    assert set(found.names) == {
        "nvidia.com/gpu=0",
        f"nvidia.com/gpu={A}",
        "nvidia.com/gds=all",
    }
    assert found.unreadable == ()


def test_a_later_directory_wins_and_twice_in_one_is_nothing(tmp_path: Path) -> None:
    static, dynamic = tmp_path / "etc", tmp_path / "run"
    for folder, name, ids in [(static, "a", "1"), (dynamic, "b", "1"), (dynamic, "c", "2")]:
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(spec(ids)))
    assert cdi.read_listed([static, dynamic]).names["nvidia.com/gpu=1"] == dynamic / "b.json"
    (dynamic / "d.json").write_text(json.dumps(spec("1")))
    found = cdi.read_listed([static, dynamic])
    assert set(found.names) == {"nvidia.com/gpu=2"}
    assert "nvidia.com/gpu=1 is in another file" in found.unreadable[0]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"kind": "x"}', '{"kind": "a/b", "devices": "all"}', "a: [\n", "\x80"]
)
def test_what_is_no_specification_is_named_and_the_others_are_read(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "bad.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "bad.yaml").write_bytes(text.encode("latin-1"))
    (tmp_path / "good.json").write_text(json.dumps(spec("0")))
    found = cdi.read_listed([tmp_path])
    assert set(found.names) == {"nvidia.com/gpu=0"}
    assert [line.split(":")[0] for line in found.unreadable] == [
        str(tmp_path / "bad.json"),
        str(tmp_path / "bad.yaml"),
    ]


def start(tmp_path: Path, *, nodes_only: bool = False, **handing: Any) -> bool:
    """Whether our own specification is written; raises where the start is refused."""
    how = Handing(**handing)
    listed = cdi.read_listed([tmp_path])
    own = cdi.wants_own(how, nodes_only=nodes_only, listed=listed)
    cdi.check_start(how, listed, [tmp_path], own=own)
    return own


def test_without_a_specification_the_start_is_refused_with_file_and_command(
    tmp_path: Path,
) -> None:
    with pytest.raises(cdi.CdiError) as refused:
        start(tmp_path, strategies=CRI)
    assert f"make {tmp_path}/nvidia.yaml with `nvidia-ctk cdi generate" in str(refused.value)
    assert "cdi.nodesOnly" in str(refused.value)


def test_with_the_toolkits_specification_ours_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(spec("0")))
    assert not start(tmp_path, strategies=CRI)


@pytest.mark.parametrize(
    ("strategies", "nodes_only"),
    [
        pytest.param(CRI, True, id="asked for"),
        pytest.param(
            CRI | {Strategy.ENVVAR}, False, id="beside envvar, which brings the libraries"
        ),
    ],
)
def test_ours_is_written(tmp_path: Path, strategies: Any, nodes_only: bool) -> None:
    assert start(tmp_path, strategies=strategies, nodes_only=nodes_only)


def test_a_switch_without_its_specification_is_refused_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(spec("0")))
    with pytest.raises(cdi.CdiError, match=r"lists nvidia.com/gds=all.*--mode=gds"):
        start(tmp_path, strategies=CRI, gds=True)
    (tmp_path / "nvidia-gds.yaml").write_text(yaml.safe_dump(spec("all", kind="nvidia.com/gds")))
    start(tmp_path, strategies=CRI, gds=True)


@pytest.mark.parametrize(
    ("listed", "ids", "expected"),
    [
        pytest.param([A, "0"], "uuid", f"nvidia.com/gpu={A}", id="the toolkit's, by UUID"),
        pytest.param([A, "0"], "index", "nvidia.com/gpu=0", id="the toolkit's, by index"),
        pytest.param([A], "index", f"nvidia.com/gpu={A}", id="by UUID where it has no index"),
        pytest.param([], "uuid", f"k8s.device-plugin.nvidia.com/gpu={A}", id="ours"),
    ],
)
def test_names(tmp_path: Path, listed: list[str], ids: Any, expected: str) -> None:
    (tmp_path / "nvidia.json").write_text(json.dumps(spec(*listed)))
    found = cdi.names(
        [A],
        owners=owners(machine().gpus),
        handing=Handing(ids=ids, strategies=CRI),
        listed=cdi.read_listed([tmp_path]),
        own=() if listed else (A,),
    )
    assert found == {A: expected}


def own_spec(**handing: Any) -> Any:
    return cdi.nodes_spec(
        [A, B],
        owners=owners(machine().gpus),
        handing=Handing(strategies=CRI, **handing),
        nodes=NODES,
    )


def test_our_specification_has_the_nodes_and_the_lowest_version() -> None:
    assert own_spec() == {
        "cdiVersion": "0.3.0",
        "kind": "k8s.device-plugin.nvidia.com/gpu",
        "devices": [
            {"name": A, "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}},
            {"name": B, "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1"}]}},
        ],
        "containerEdits": {
            "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-uvm"}]
        },
    }
    assert own_spec(ids="index")["cdiVersion"] == "0.5.0"
    rooted = own_spec(dev_root="/run/nvidia/driver")
    assert rooted["cdiVersion"] == "0.5.0"
    assert rooted["devices"][0]["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/nvidia0", "hostPath": "/run/nvidia/driver/dev/nvidia0"}
    ]


def test_our_specification_is_written_once_and_removed_with_its_devices(tmp_path: Path) -> None:
    folder = tmp_path / "cdi"
    path = cdi.write_spec(own_spec(), folder)
    assert path == folder / "k8s.device-plugin.nvidia.com-gpu.json"
    assert [p.name for p in folder.iterdir()] == [path.name]
    listed = cdi.read_listed([folder])
    assert f"k8s.device-plugin.nvidia.com/gpu={A}" in listed.names
    inode = path.stat().st_ino
    assert cdi.write_spec(own_spec(), folder) is None
    assert path.stat().st_ino == inode
    assert cdi.write_spec({**own_spec(), "devices": []}, folder) is None
    assert not path.exists()


def test_a_directory_that_cannot_be_written_is_an_error_that_names_the_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "cdi").write_text("a file in the place of the directory")
    with pytest.raises(cdi.CdiError, match=r"cannot write .*nvidia.com-gpu.json"):
        cdi.write_spec(own_spec(), tmp_path / "cdi")


def test_a_lost_gpu_is_still_handed_over_by_its_uuid() -> None:
    lost = Device(id=A, holds=A, gpu=machine().gpus[0].pci, unhealthy="lost")
    answer = allocation([lost], owners=owners(machine().gpus), handing=Handing(), nodes=NODES)
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": A}
