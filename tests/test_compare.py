"""docs/compare.md: what we answer and what NVIDIA's plugin does, row by row.

The column about us is what a row's check holds true here; the one about NVIDIA's plugin v0.20.0 was
run over a fake NVML or read in its sources, as the row says.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from plugin.allocation import Handing, Strategy
from plugin.cdi import OWN_KIND
from plugin.devices import Advertising, MigStrategy
from plugin.life import DevicePlugin, Options
from rte.model import Fault, FaultClass, Machine
from rte.sources.recorded import read_recorded
from tests.machines.description import FOLDER
from tests.small_kubelet import GPUS, SmallKubelet, until
from tests.small_machine import address, machine, slices, uuid, with_gpu, without_gpu
from tests.stopwatch import Stopwatch

DOCUMENT = Path(__file__).parents[1] / "docs/compare.md"
START = "<!-- tests/test_compare.py -->\n"
PAIRS = machine((0, 0, 0, 0, 1, 1, 1, 1), pairs=[(0, 2), (1, 3), (4, 6), (5, 7)])
ALL = [uuid(n) for n in range(8)]
MIG = "nvidia.com/mig-1g.10gb"
SICK = (Fault(severity=FaultClass.WITHHOLD, reason="xid-79"),)


class Node:
    """A small kubelet, and the plugins of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubelet = SmallKubelet(folder)
        self.kubelet.start()
        self.plugins: list[DevicePlugin] = []

    def start(self, machine: Machine = PAIRS, **options: object) -> DevicePlugin:
        plugin = DevicePlugin(Options(plugin_dir=self.folder, **options))  # type: ignore[arg-type]
        self.plugins.append(plugin)
        plugin.start()
        plugin.update(machine, {})
        self.kubelet.await_register()
        return plugin

    def health(self, resource: str = GPUS) -> list[int]:
        """Positions of the devices that are unhealthy in the last list."""
        listed = self.kubelet.devices(resource).values()
        return [n for n, device in enumerate(listed) if device.health != "Healthy"]

    def until_unhealthy(self, *positions: int) -> None:
        assert until(lambda: self.health() == list(positions)), self.health()

    def stop(self) -> None:
        for plugin in self.plugins:
            plugin.stop()
        self.kubelet.stop()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.stop()


Check = Callable[[Node], None]


class Row(NamedTuple):
    """A request or a fault."""

    what: str
    ours: str
    nvidia: str
    known: str  # run or read
    why: str
    check: Check


# Requests


def a_size_of_eight(node: Node) -> None:
    node.start(read_recorded(FOLDER / "dgx1-v100"))
    ids = list(node.kubelet.devices())
    for size in range(1, 9):
        stopwatch = Stopwatch()
        assert len(node.kubelet.prefer(ids, size)) == size
        assert stopwatch.took_s < 0.1


def a_size_of_sixteen(node: Node) -> None:
    node.start(read_recorded(FOLDER / "dgx2-v100"))
    ids = list(node.kubelet.devices())
    for size in (2, 3, 5):
        stopwatch = Stopwatch()
        assert len(node.kubelet.prefer(ids, size)) == size
        assert stopwatch.took_s < 0.3


def four_singles(node: Node) -> None:
    node.start()
    free = list(ALL)
    for _ in range(4):
        (chosen,) = node.kubelet.prefer(free, 1)
        node.kubelet.allocate(chosen)
        free.remove(chosen)  # type: ignore[arg-type]
    whole = [p for p in [(0, 2), (1, 3), (4, 6), (5, 7)] if {uuid(n) for n in p} <= set(free)]
    assert len(whole) == 2


def switched(node: Node) -> None:
    plugin = node.start(read_recorded(FOLDER / "hgx-h100-oci"))
    node.kubelet.prefer(list(node.kubelet.devices()), 4)
    (decision,) = plugin.decisions
    assert decision.preference is not None
    assert decision.preference.linked


def twice_in_the_offer(node: Node) -> None:
    node.start()
    assert node.kubelet.prefer([*ALL, *ALL, "GPU-unknown"], 2) == (uuid(0), uuid(2))


def too_few(node: Node) -> None:
    node.start()
    assert node.kubelet.prefer(ALL[:2], 5) == (uuid(0), uuid(1))


def same_twice(node: Node) -> None:
    node.start()
    assert len({node.kubelet.prefer(ALL[n:] + ALL[:n], 3) for n in range(8)}) == 1


def envvar(node: Node) -> None:
    node.start()
    answer = node.kubelet.allocate(uuid(1), uuid(0))
    assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": f"{uuid(0)},{uuid(1)}"}


def by_mount(node: Node) -> None:
    node.start(handing=Handing(strategies=frozenset({Strategy.VOLUME_MOUNTS})))
    answer = node.kubelet.allocate(uuid(1))
    folder = "/var/run/nvidia-container-devices"
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == folder
    assert [m.container_path for m in answer.mounts] == [f"{folder}/{uuid(1)}"]


def by_cdi(node: Node) -> None:
    (node.folder / "cdi").mkdir()
    node.start(
        handing=Handing(strategies=frozenset({Strategy.CDI_CRI})),
        cdi_nodes_only=True,
        cdi_directories=(node.folder / "cdi",),
    )
    (device,) = node.kubelet.allocate(uuid(1)).cdi_devices
    assert device.name == f"{OWN_KIND}={uuid(1)}"


def unknown_id(node: Node) -> None:
    node.start()
    with pytest.raises(grpc.RpcError, match="has no such device: GPU-unknown"):
        node.kubelet.allocate("GPU-unknown")


def two_replicas(node: Node) -> None:
    shared = Advertising(replicas={GPUS: 2})
    node.start(advertising=shared, handing=Handing(one_replica=True))
    with pytest.raises(grpc.RpcError, match="more than one replica"):
        node.kubelet.allocate(f"{uuid(0)}::0", f"{uuid(1)}::0")


# Faults


def lost(node: Node) -> None:
    plugin = node.start()
    plugin.update(with_gpu(PAIRS, 3, uuid=None, lost="GPU is lost"), {})
    node.until_unhealthy(3)
    assert node.kubelet.prefer([i for i in ALL if i != uuid(3)], 2) == (uuid(0), uuid(2))


def lost_at_start(node: Node) -> None:
    node.start(with_gpu(PAIRS, 3, uuid=None, lost="GPU is lost"))
    assert len(node.kubelet.devices()) == 7
    assert node.health() == []


def xid(node: Node) -> None:
    plugin = node.start()
    plugin.update(PAIRS, {address(5): SICK})
    node.until_unhealthy(5)
    plugin.update(PAIRS, {})
    node.until_unhealthy()


def xid_of_slices(node: Node) -> None:
    cut = with_gpu(PAIRS, 0, mig_enabled=True, slices=slices(0, *["1g.10gb"] * 3))
    plugin = node.start(cut, advertising=Advertising(mig=MigStrategy.MIXED))
    plugin.update(cut, {address(0): SICK})
    assert until(lambda: node.health(MIG) == [0, 1, 2])
    assert node.health() == []


def no_numa(node: Node) -> None:
    node.start(machine((None, None)))
    assert not any(d.HasField("topology") for d in node.kubelet.devices().values())


def plugged(node: Node) -> None:
    plugin = node.start(without_gpu(PAIRS, 7))
    assert len(node.kubelet.devices()) == 7
    plugin.update(PAIRS, {})
    assert until(lambda: len(node.kubelet.devices()) == 8)
    assert node.kubelet.registered.empty()


def recut(node: Node) -> None:
    plugin = node.start(advertising=Advertising(mig=MigStrategy.MIXED))
    plugin.update(with_gpu(PAIRS, 0, mig_enabled=True, slices=slices(0, "1g.10gb")), {})
    assert node.kubelet.await_register().resource_name == MIG
    assert until(lambda: len(node.kubelet.devices()) == 7)
    assert until(lambda: len(node.kubelet.devices(MIG)) == 1)


def not_uniform(node: Node) -> None:
    cut = with_gpu(PAIRS, 0, mig_enabled=True, slices=slices(0, "1g.10gb"))
    node.start(cut, advertising=Advertising(mig=MigStrategy.SINGLE))
    assert len(node.health()) == len(node.kubelet.devices()) == 8


def restarted(node: Node) -> None:
    plugin = node.start()
    node.kubelet.stop()
    node.kubelet.start()
    stopwatch = Stopwatch()
    node.kubelet.await_register()
    assert until(lambda: plugin.ready)
    assert stopwatch.took_s < 1


def two_names(node: Node) -> None:
    ring = "nvidia.com/gpu-fabric.ring-0"
    groups = {address(n): "ring-0" for n in range(8)}
    node.start(advertising=Advertising(fabric=groups))
    assert set(node.kubelet.devices(ring)) == set(ALL)
    assert set(node.kubelet.lists) == {ring}


ROWS = (
    Row(
        "GetPreferredAllocation, sizes 1 to 8 of 8 GPUs",
        "answered from tables made beforehand, in a few milliseconds at most",
        "1.5 to 4.9 ms; the topology is built anew in each call",
        "run",
        "no call may wait for NVML",
        a_size_of_eight,
    ),
    Row(
        "sizes 2, 3 and 5 of 16 GPUs",
        "the exact best in milliseconds",
        "up to 2.1 s, 36 s and 10 s",
        "run",
        "sets are searched, not partitions of all GPUs",
        a_size_of_sixteen,
    ),
    Row(
        "four pods of one GPU in turn, on four NVLink pairs",
        "two pairs are left whole, always",
        "all four pairs broken in a quarter of the trials",
        "run",
        "what stays free counts too",
        four_singles,
    ),
    Row(
        "4 of 8 GPUs behind NVSwitches",
        "known to be linked",
        "the links score nothing",
        "run",
        "lanes to a switch join all GPUs of that fabric",
        switched,
    ),
    Row(
        "an id twice in the offer, or unknown",
        "ignored",
        "a duplicate ends the process",
        "run",
        "an error rejects the pod for good",
        twice_in_the_offer,
    ),
    Row(
        "fewer devices offered than wanted",
        "what there is",
        "an error for slices and replicas",
        "read",
        "the kubelet tops up, an error rejects the pod",
        too_few,
    ),
    Row(
        "the same question in another order",
        "the same answer",
        "replicas and slices: ties go by the order of a Go map",
        "read",
        "what is decided can be looked at again",
        same_twice,
    ),
    Row(
        "Allocate, `envvar`",
        "`NVIDIA_VISIBLE_DEVICES` with the ids, in PCI order",
        "`NVIDIA_VISIBLE_DEVICES` with the ids",
        "read",
        "logs that can be compared",
        envvar,
    ),
    Row("Allocate, `volume-mounts`", "the same", "the same", "read", "", by_mount),
    Row(
        "Allocate, `cdi-cri` and `cdi-annotations`",
        "the toolkit's name for the device; `k8s.device-plugin.nvidia.com/gpu=ID` only where no "
        "specification of the toolkit has it and `cdi.nodesOnly` is set",
        "`k8s.device-plugin.nvidia.com/gpu=ID`, of a full specification that it writes at its "
        "start",
        "read",
        "one owner of the driver's file list, which is made anew with the driver",
        by_cdi,
    ),
    Row(
        "Allocate of an id that was never listed",
        "refused by name",
        "refused by name",
        "read",
        "",
        unknown_id,
    ),
    Row(
        "two replicas for one container, `failRequestsGreaterThanOne`",
        "refused",
        "refused",
        "read",
        "",
        two_replicas,
    ),
    Row(
        "one GPU is lost",
        "it is unhealthy; all calls are answered",
        "every GetPreferredAllocation fails, also when that GPU is not offered",
        "run",
        "one GPU costs itself",
        lost,
    ),
    Row(
        "one GPU is lost before the start",
        "seven are offered, and the log names the eighth",
        "the process ends",
        "run",
        "its id is not known, so it cannot be listed",
        lost_at_start,
    ),
    Row(
        "Xid 79 of one GPU",
        "that GPU is unhealthy, until there is evidence that it is well",
        "all eight are unhealthy, and stay",
        "run",
        "an event that has an address has one; recovery is in health.md",
        xid,
    ),
    Row(
        "an Xid of a GPU that is cut into slices",
        "all its slices, or those of the instance that it names",
        "the slice listed last (mended after v0.20)",
        "read",
        "a fault of a GPU is one of all its parts",
        xid_of_slices,
    ),
    Row("no NUMA node known", "no topology", "no topology", "read", "", no_numa),
    Row(
        "a GPU is plugged in",
        "it is in the next list (`driver: mounted`)",
        "not seen before a restart",
        "read",
        "udev and NVML tell, and what they tell is read anew",
        plugged,
    ),
    Row(
        "MIG slices are made or removed",
        "the lists follow; an id that a pod has is not offered otherwise",
        "not seen before a restart",
        "read",
        "the same",
        recut,
    ),
    Row(
        "MIG strategy single, GPUs not cut alike",
        "all unhealthy until they are, with the reason in the log",
        "the start fails",
        "read",
        "no restart is needed afterwards",
        not_uniform,
    ),
    Row(
        "the kubelet restarts",
        "registered again within a second, on a new socket",
        "registered again in 4 to 20 ms",
        "run",
        "kubelet 1.37 loses a plugin that registers twice on one socket",
        restarted,
    ),
    Row(
        "GPUs as `nvidia.com/gpu-fabric.GROUP`",
        "instead of `nvidia.com/gpu`, never beside it",
        "no such thing",
        "read",
        "the kubelet counts each name by itself",
        two_names,
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=[row.what for row in ROWS])
def test_we_do_what_the_row_says(row: Row, node: Node) -> None:
    row.check(node)


def table() -> str:
    lines = [
        "| request or fault | here | NVIDIA's plugin | known | why it differs |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {r.what} | {r.ours} | {r.nvidia} | {r.known} | {r.why} |" for r in ROWS]
    return "\n".join(lines) + "\n"


def test_the_document_has_the_table(pytestconfig: pytest.Config) -> None:
    text = DOCUMENT.read_text()
    head, _, rest = text.partition(START)
    old = re.match(r"(?:\|.*\n)*", rest)
    assert old is not None
    if pytestconfig.getoption("update_golden"):
        DOCUMENT.write_text(f"{head}{START}{table()}{rest[old.end() :]}")
        return
    assert old[0] == table(), "docs/compare.md differs; pytest --update-golden rewrites it"


def test_every_difference_has_its_reason() -> None:
    for row in ROWS:
        assert row.known in ("run", "read")
        assert (row.why == "") == (row.ours == row.nvidia), row.what
