"""GPUs and slices that come and go under a running `rte plugin`, with a real kubelet's managers.

The driver is the fake NVML library, whose hardware the test changes (`Driver.write`).
"""

import os
import re
import subprocess
import sys
import uuid as uuids
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rte.discovery.reading import GpuReading, MigReading, NvmlReading
from rte.model import PciAddress
from rte.sources.recorded import read_recorded, unpack
from tests.fake_nvml import MIG_CONFIG_CHANGE, Driver
from tests.machines.description import FOLDER
from tests.real_kubelet import Kubelet, pod
from tests.small_kubelet import until

GPU, SMALL, LARGE = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
MACHINE = FOLDER / "pcie-a100-pairs"
SINGLE = {"topologyManagerPolicy": "single-numa-node"}
ROOT = Path(__file__).parent.parent
SLICES = {"1g.10gb": (1, 9728), "2g.20gb": (2, 19968), "3g.40gb": (3, 40192)}
FREE = PciAddress("0000:f0:00.0")

StartKubelet = Callable[..., Kubelet]


def cut(gpu: GpuReading, *profiles: str) -> GpuReading:
    """The GPU in MIG mode. A slice's UUID follows from GPU and instance, as the driver makes it."""
    if not profiles:
        return msgspec.structs.replace(gpu, mig_mode=(0, 0), mig=())
    made = tuple(
        MigReading(
            index=number,
            uuid=f"MIG-{uuids.uuid5(uuids.NAMESPACE_OID, f'{gpu.uuid}/{number}')}",
            name=profile,
            gpu_instance=number + 1,
            compute_instance=0,
            gpu_slices=SLICES[profile][0],
            compute_slices=SLICES[profile][0],
            memory_mib=SLICES[profile][1],
        )
        for number, profile in enumerate(profiles)
    )
    return msgspec.structs.replace(gpu, mig_mode=(1, 1), mig_max=7, mig=made)


class Node:
    """A kubelet, a driver and a plugin in the mode that follows what changes."""

    def __init__(self, kubelet: Kubelet, folder: Path, strategy: str) -> None:
        self.kubelet = kubelet
        self.driver = Driver(folder / "driver", MACHINE)
        self.host = folder / "host"
        unpack(MACHINE / "sys.txt", self.host)
        self.log = folder / "log"
        self.reading = msgspec.json.decode(self.driver.json.read_bytes(), type=NvmlReading)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rte", "plugin", "--hw-interval", "500ms"],
                env={
                    **os.environ,
                    **self.driver.env,
                    "PYTHONWARNINGS": "error",
                    "KUBELET_ROOT": str(kubelet.root),
                    "RTE_SYSFS": str(self.host / "sys"),
                    "RTE_PROCFS": str(self.host / "proc"),
                    "RTE_DRIVER": "mounted",
                    "MIG_STRATEGY": strategy,
                    "METRICS_PORT": "0",
                },
                cwd=ROOT,
                stderr=log,
            )

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(30) == 0, self.log.read_text()[-3000:]

    def write(self, **gpus: GpuReading) -> None:
        """Other hardware: `gpu2=` stands in the place of the third; NVML tells of it."""
        changed = {int(name.removeprefix("gpu")): gpu for name, gpu in gpus.items()}
        self.reading = msgspec.structs.replace(
            self.reading,
            gpus=tuple(changed.get(n, gpu) for n, gpu in enumerate(self.reading.gpus)),
        )
        self.driver.write(self.reading)
        self.driver.event(min(changed), MIG_CONFIG_CHANGE)

    def cut(self, number: int, *profiles: str) -> tuple[str, ...]:
        """The ids of the slices that one GPU is cut into now."""
        made = cut(self.reading.gpus[number], *profiles)
        self.write(**{f"gpu{number}": made})
        return tuple(part.uuid for part in made.mig)

    def counts(self, **counts: int) -> None:
        """Returns when the kubelet has so many healthy devices: gpu=, small=, large=."""
        for name, resource in (("gpu", GPU), ("small", SMALL), ("large", LARGE)):
            if name in counts:
                self.kubelet.wait_devices(resource, counts[name])

    def take(self, name: str, resource: str, count: int = 1) -> tuple[str, ...]:
        admitted = self.kubelet.admit(pod(name, {resource: count}))
        assert admitted.admitted, admitted
        return admitted.devices(resource)

    def changes(self, resource: str) -> int:
        """How often the list of a resource was another one."""
        return len(re.findall(rf"{resource}: \d+ devices", self.log.read_text()))


@pytest.fixture
def start(kubelet: StartKubelet, tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    nodes: list[Node] = []

    def start(strategy: str) -> Node:
        nodes.append(Node(kubelet(SINGLE), tmp_path, strategy))
        nodes[-1].counts(gpu=8)
        return nodes[-1]

    yield start
    for node in nodes:
        node.end()


def test_mixed_gpus_are_cut_and_made_whole_without_a_restart(start: Callable[[str], Node]) -> None:
    node = start("mixed")
    whole = str(node.reading.gpus[2].uuid)
    before = node.changes(GPU)
    first = node.cut(2, "3g.40gb", "3g.40gb")
    node.counts(gpu=7, large=2)
    assert until(lambda: node.changes(GPU) == before + 1)  # said after it was sent
    assert set(node.take("large", LARGE)) <= set(first)
    # Other slices beside the one that a pod has, whose id stays.
    second = node.cut(2, "3g.40gb", "1g.10gb", "1g.10gb")
    assert second[0] == first[0]
    node.counts(gpu=7, small=2, large=1)
    # The slice in the place of the second large one has its UUID, as the driver makes them.
    assert second[1] == first[1]
    node.kubelet.remove("large")
    node.counts(large=1, small=2)
    node.cut(2)
    node.counts(gpu=8, small=0, large=0)
    taken = {id for n in range(4) for id in node.take(f"p{n}", GPU, 2)}
    assert whole in taken


def test_a_slice_that_a_pod_has_is_not_offered_in_another_shape(
    start: Callable[[str], Node],
) -> None:
    node = start("mixed")
    ids = node.cut(2, "3g.40gb", "3g.40gb")
    node.counts(large=2, gpu=7)
    (held,) = node.take("held", LARGE)
    at = ids.index(held)
    # The same GPU instance numbers, other profiles: the driver gives the same UUIDs again.
    again = node.cut(2, "1g.10gb", "1g.10gb")
    assert again[at] == held
    node.counts(small=1)
    assert node.take("small", SMALL) == (again[1 - at],)
    node.kubelet.remove("held")
    node.counts(small=2)


def test_single_is_nothing_until_all_are_alike(start: Callable[[str], Node]) -> None:
    node = start("single")
    node.cut(0, "1g.10gb")
    node.counts(gpu=0)
    assert until(lambda: "MIG strategy single: gpu-0 is in MIG mode" in node.log.read_text())
    node.write(
        **{f"gpu{n}": cut(node.reading.gpus[n], "2g.20gb", "2g.20gb", "2g.20gb") for n in range(8)}
    )
    node.counts(gpu=24)
    # Slices of a pod are of one NUMA node, which has four GPUs here.
    ids = node.take("four", GPU, 4)
    numbers = {n for n, gpu in enumerate(node.reading.gpus) for part in gpu.mig if part.uuid in ids}
    assert len({n // 4 for n in numbers}) == 1


def plug(node: Node) -> None:
    """A ninth GPU beside the eighth."""
    devices = node.host / "sys/bus/pci/devices"
    there = (devices / read_recorded(MACHINE).gpus[7].pci).resolve()
    fresh = there.with_name(FREE)
    subprocess.run(["cp", "-a", str(there), str(fresh)], check=True)
    (devices / FREE).symlink_to(os.path.relpath(fresh, devices))
    ninth = msgspec.structs.replace(
        node.reading.gpus[7], index=8, bus_id="00000000:F0:00.0", uuid="GPU-ninth", minor=8
    )
    node.reading = msgspec.structs.replace(node.reading, gpus=(*node.reading.gpus, ninth))
    node.driver.write(node.reading)


def pull(node: Node) -> None:
    (node.host / "sys/bus/pci/devices" / FREE).unlink()
    node.reading = msgspec.structs.replace(node.reading, gpus=node.reading.gpus[:8])
    node.driver.write(node.reading)


def test_a_gpu_is_plugged_in_handed_out_and_pulled_out(start: Callable[[str], Node]) -> None:
    node = start("none")
    before = node.changes(GPU)
    plug(node)
    node.counts(gpu=9)
    assert until(lambda: node.changes(GPU) == before + 1)  # said after it was sent
    taken: dict[str, str] = {}
    while "GPU-ninth" not in taken.values():
        name = f"p{len(taken)}"
        (taken[name],) = node.take(name, GPU)
    pull(node)
    node.counts(gpu=8)
    assert node.kubelet.state().capacity[GPU] == "9"  # its pod still has it
    (name,) = (name for name, id in taken.items() if id == "GPU-ninth")
    node.kubelet.remove(name)
    assert until(lambda: node.kubelet.state().capacity[GPU] == "8")
    plug(node)
    node.counts(gpu=9)
