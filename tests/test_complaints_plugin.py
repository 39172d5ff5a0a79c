"""Public complaints about device plugins: calls that fail or take long, NUMA nodes, restarts, CDI.

Each test is named after the issue (nvidia: NVIDIA/k8s-device-plugin). Health, hot-plug and MIG are
in tests/test_health.py, choices and sharing in tests/test_complaints.py.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from plugin import cdi
from plugin.allocation import Handing, Nodes, Strategy, owners
from plugin.api import deviceplugin_pb2 as api
from plugin.devices import Advertising, MigStrategy, devices
from plugin.life import DevicePlugin, Options
from plugin.service import list_message
from rte.commands.parts import plugin_options
from rte.config import load
from rte.kubelet.usage import channel, read_usage
from rte.model import Machine, NumaId
from rte.sources.recorded import read_recorded
from tests.daemon_process import DaemonProcess
from tests.machines.description import FOLDER
from tests.real_kubelet import Admission, Kubelet, numa_nodes
from tests.small_kubelet import GPUS, SmallKubelet, until
from tests.small_machine import machine, slices, uuid, with_gpu
from tests.stopwatch import Stopwatch
from tests.test_plugin_kubelet import Node

GPU = GPUS
SINGLE = {"topologyManagerPolicy": "single-numa-node"}
RESTRICTED = {"topologyManagerPolicy": "restricted"}

Run = Callable[..., Node]
Served = Callable[..., tuple[DevicePlugin, SmallKubelet]]


@pytest.fixture
def run(kubelet: Callable[..., Kubelet]) -> Iterator[Run]:
    """Starts a kubelet and a plugin that is registered with it."""
    nodes: list[Node] = []

    def run(name: str, config: Any = SINGLE, **options: Any) -> Node:
        bearing = [n.id for n in read_recorded(FOLDER / name).numa_nodes if n.cpus]
        nodes.append(Node(kubelet(config, machine=numa_nodes(bearing)), name, **options))
        nodes[-1].ready()
        return nodes[-1]

    yield run
    for node in nodes:
        node.plugin.stop()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A plugin of a machine beside a small kubelet that has its list."""
    started: list[Any] = []

    def served(machine: Machine, **options: Any) -> tuple[DevicePlugin, SmallKubelet]:
        kubelet = SmallKubelet(tmp_path)
        kubelet.start()
        plugin = DevicePlugin(Options(plugin_dir=tmp_path, **options))
        started.extend([plugin, kubelet])
        plugin.start()
        plugin.update(machine, {})
        kubelet.await_register()
        return plugin, kubelet

    yield served
    for each in started:
        each.stop()


# Slow or failing GetPreferredAllocation, admission storms


def test_nvidia_774_no_size_of_sixteen_gpus_takes_long(served: Served) -> None:
    """16 to 30 s were reported, 2 to 36 s measured, for sizes 2, 3 and 5."""
    _, kubelet = served(read_recorded(FOLDER / "dgx2-v100"))
    ids = list(kubelet.devices())
    assert len(ids) == 16
    for size in range(1, 17):
        stopwatch = Stopwatch()
        assert len(kubelet.prefer(ids, size)) == size
        assert stopwatch.took_s < 0.5, f"size {size}"


def test_nvidia_460_all_of_the_gpus_cost_no_search(run: Run) -> None:
    node = run("hgx-h100-oci", {"topologyManagerPolicy": "none"})
    assert len(node.gpus(node.admit("all", {GPU: 8}))) == 8
    (decision,) = node.plugin.decisions
    assert decision.took_s < 2, "a search of minutes"


def test_nvidia_301_a_plugin_that_nobody_asks_uses_no_cpu(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as daemon:
        daemon.config["host"]["interval"] = 30
        daemon.start().registered()
        assert daemon.process is not None
        pid = daemon.process.pid
        # What comes after the start may last, but not for ever.
        daemon.until(lambda: cpu_of(pid, 2) < 0.1, "two seconds with less than 0.1 s of CPU")


def cpu_of(pid: int, seconds: float) -> float:
    before = cpu_s(pid)
    time.sleep(seconds)
    return cpu_s(pid) - before


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("name", ["asymmetric-link", "h100-one-reduced", "one-lost"])
def test_nvidia_448_links_that_do_not_agree_stop_nothing(served: Served, name: str) -> None:
    plugin, kubelet = served(read_recorded(FOLDER / name))
    healthy = [id for id, device in kubelet.devices().items() if device.health == "Healthy"]
    for size in range(1, len(healthy) + 1):
        assert len(kubelet.prefer(healthy, size)) == size
    assert plugin.resources[GPU].counters.preference_faults == 0


def test_nvidia_231_and_kubernetes_97131_a_gpu_lost_before_the_start_costs_itself_only(
    run: Run,
) -> None:
    node = run("one-lost")
    healthy = len(node.plugin.resources[GPU].tables.healthy)
    assert healthy == 7
    taken = [node.gpus(node.admit(f"p{n}", {GPU: 1})) for n in range(healthy)]
    assert len(set(taken)) == healthy


def test_ci_infra_1057_a_dead_gpu_is_no_black_hole_for_pods(run: Run) -> None:
    """554 pods were rejected in 1 h 46 min by a node with seven good GPUs."""
    node = run("pcie-a100-pairs")
    lost = with_gpu(node.machine, 2, uuid=None, lost="GPU is lost")
    node.plugin.update(lost, {})
    node.kubelet.wait_devices(GPU, 7)
    for n in range(60):
        admission = node.admit(f"p{n}", {GPU: 1 + n % 3})
        assert admission.admitted, admission
        assert 2 not in node.gpus(admission)
        node.kubelet.remove(f"p{n}")


def test_gpuallocator_80_a_size_that_does_not_divide_the_gpus_gets_so_many(served: Served) -> None:
    """Two and nothing came back of five GPUs when three were wanted."""
    _, kubelet = served(machine((0,) * 5, pairs=[(0, 3)]))
    chosen = kubelet.prefer([uuid(n) for n in range(5)], 3)
    assert len(chosen) == 3
    assert {uuid(0), uuid(3)} < set(chosen)


def test_kubernetes_130145_a_refused_allocate_leaves_the_devices_to_the_next_pod(
    run: Run,
) -> None:
    shared = Advertising(replicas={GPU: 2})
    node = run("pcie-a100-pairs", advertising=shared, handing=Handing(one_replica=True))
    refused = node.admit("two", {GPU: 2})
    assert refused.reason == "UnexpectedAdmissionError"
    assert "more than one replica" in refused.message
    node.kubelet.remove("two")
    for n in range(16):
        assert node.admit(f"p{n}", {GPU: 1}).admitted


# NUMA nodes


def test_kubernetes_112234_an_unknown_numa_node_is_no_topology_and_no_rejection(
    run: Run,
) -> None:
    node = run("vm-all-minus-one", SINGLE)
    message = node.plugin.resources[GPU].list
    assert not any(device.HasField("topology") for device in message.devices)
    assert node.admit("one", {GPU: 1}).admitted


def test_kubernetes_102552_numa_nodes_are_known_again_after_a_kubelet_restart(run: Run) -> None:
    node = run("pcie-a100-pairs")
    node.kubelet.restart()
    node.ready()
    admission = node.admit("four", {GPU: 4})
    assert len({n // 4 for n in node.gpus(admission)}) == 1
    assert node.admit("five", {GPU: 5}).reason == "TopologyAffinityError"
    with channel(node.kubelet.pod_resources) as asked:
        (pod,) = read_usage(asked, 5).pods
    assert {device.numa for c in pod.containers for device in c.devices} in ({(0,)}, {(1,)})


@pytest.mark.parametrize("name", ["gb200-tray", "gh200-quad", "gb200-tray-cdmm"])
def test_kubernetes_135581_a_grace_gpu_advertises_no_node_of_its_own_memory(name: str) -> None:
    """34 NUMA nodes hung the kubelet's hints; those of GPU memory have no CPUs."""
    found = read_recorded(FOLDER / name)
    with_cpus = {node.id for node in found.numa_nodes if node.cpus}
    listed = devices(found, {}, options=Advertising()).resources[GPU]
    assert {node for device in listed for node in device.numa} <= with_cpus
    assert all(device.numa for device in listed)


def test_nvidia_1643_a_slice_says_numa_node_zero_on_the_wire() -> None:
    cut = with_gpu(machine((0, 1)), 0, mig_enabled=True, slices=slices(0, "1g.10gb"))
    found = devices(cut, {}, options=Advertising(mig=MigStrategy.MIXED)).resources
    (device,) = list_message(found["nvidia.com/mig-1g.10gb"]).devices
    assert [node.ID for node in device.topology.nodes] == [0]
    again = api.Device.FromString(device.SerializeToString())
    assert len(again.topology.nodes) == 1


def test_dra_driver_1242_nodes_of_one_socket_are_listed_where_the_operator_says_so(
    run: Run,
) -> None:
    sockets = ((NumaId(0), NumaId(1), NumaId(2), NumaId(3)), tuple(map(NumaId, range(4, 8))))
    plain = run("h100-snc4")
    assert plain.admit("two", {GPU: 2}).reason == "TopologyAffinityError"
    joined = run("h100-snc4", advertising=Advertising(same_socket=sockets))
    assert joined.gpus(joined.admit("two", {GPU: 2})) == (0, 1)
    assert joined.gpus(joined.admit("others", {GPU: 2})) == (2, 3)
    assert joined.admit("no more", {GPU: 1}).reason


def test_talos_9121_a_vm_that_lies_about_its_nodes_is_put_right_by_the_operator(
    run: Run,
) -> None:
    node = run("vm-all-minus-one", RESTRICTED)
    count = len(node.plugin.resources[GPU].tables.devices)
    assert node.admit("all", {GPU: count}).admitted


@pytest.mark.parametrize("path", sorted(p.name for p in FOLDER.iterdir() if p.is_dir()))
def test_kubevirt_gpu_86_no_device_is_ever_on_node_minus_one(path: str) -> None:
    if not (FOLDER / path / "sys.txt").exists():
        return
    found = read_recorded(FOLDER / path)
    nodes = {node.id for node in found.numa_nodes}
    for listed in devices(found, {}, options=Advertising()).resources.values():
        for device in listed:
            assert set(device.numa) <= nodes


# Restarts and duplicates


def admitted(admissions: tuple[Admission, ...]) -> dict[str, tuple[str, ...]]:
    return {a.name: a.devices(GPU) for a in admissions if a.admitted}


def test_kubernetes_75880_and_nvidia_536_a_reboot_gives_no_gpu_to_two_pods(run: Run) -> None:
    node = run("pcie-a100-pairs")
    for n in range(3):
        assert node.admit(f"p{n}", {GPU: 2}).admitted
    node.kubelet.reboot()
    node.ready()
    for n in range(3, 9):
        node.admit(f"p{n}", {GPU: 1})
    with channel(node.kubelet.pod_resources) as asked:
        held = [d.id for p in read_usage(asked, 5).pods for c in p.containers for d in c.devices]
    assert len(held) == len(set(held))
    assert node.plugin.double_uses == 0


def test_kubernetes_118559_a_kubelet_restart_keeps_pods_with_init_containers_and_their_gpus(
    run: Run,
) -> None:
    node = run("pcie-a100-pairs")
    before = node.admit("train", {GPU: 2}, init=[{GPU: 1}])
    assert before.admitted
    after = admitted(node.kubelet.restart())
    assert set(after["train"]) == set(before.devices(GPU))
    node.ready()
    assert not set(node.admit("next", {GPU: 2}).devices(GPU)) & set(before.devices(GPU))


def test_kubernetes_125579_pods_after_a_kubelet_start_wait_for_a_moment_only(run: Run) -> None:
    """What is rejected before the plugin is back is gone, so it is back at once."""
    node = run("pcie-a100-pairs")
    took = []
    for _ in range(5):
        node.kubelet.kill()
        node.kubelet.start()
        stopwatch = Stopwatch()
        node.ready()
        took.append(stopwatch.took_s)
    assert sorted(took)[2] < 0.5, took


def test_nvidia_1078_slices_with_holes_in_their_numbers_are_all_there() -> None:
    found = read_recorded(FOLDER / "mig-half")
    reading = json.loads((FOLDER / "mig-half/nvml.json").read_text())
    made = [m for g in reading["gpus"] for m in g.get("mig", ())]
    assert any(m["index"] != n for g in reading["gpus"] for n, m in enumerate(g.get("mig", ())))
    whole = [m["uuid"] for m in made if m["gpu_slices"] == m["compute_slices"]]
    listed = devices(found, {}, options=Advertising(mig=MigStrategy.MIXED)).resources
    assert {d.id for n, ds in listed.items() if "mig" in n for d in ds} == set(whole)


def test_nvidia_1121_a_resource_is_called_what_the_operator_wants(served: Served) -> None:
    name = "example.com/a100"
    _, kubelet = served(machine((0, 1)), advertising=Advertising(resource=name))
    assert set(kubelet.devices(name)) == {uuid(0), uuid(1)}


def test_nvidia_736_gpus_of_two_models_are_not_mixed_while_like_ones_are_free(run: Run) -> None:
    node = run("pcie-mixed", {"topologyManagerPolicy": "none"})
    products = {gpu.number: gpu.product for gpu in node.machine.gpus}
    for n in range(2):
        chosen = node.gpus(node.admit(f"p{n}", {GPU: 2}))
        assert len({products[number] for number in chosen}) == 1


def test_nvidia_82_a_kubelet_that_is_slow_to_answer_register_is_not_given_up(
    tmp_path: Path,
) -> None:
    kubelet = SmallKubelet(tmp_path)
    kubelet.refuse = 4
    with kubelet:
        plugin = DevicePlugin(Options(plugin_dir=tmp_path))
        plugin.start()
        plugin.update(machine((0, 1)), {})
        kubelet.await_register()
        assert until(lambda: plugin.ready)
        plugin.stop()


# CDI, driver and platform

CRI = frozenset({Strategy.CDI_CRI})


def toolkit_spec(folder: Path, *names: str) -> None:
    listed = [{"name": n, "containerEdits": {"env": ["A=B"]}} for n in names]
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": listed}
    (folder / "nvidia.json").write_text(json.dumps(spec))


def test_toolkit_1895_and_1239_a_specification_of_all_only_is_refused_with_the_command(
    tmp_path: Path,
) -> None:
    toolkit_spec(tmp_path, "all")
    options = Options(
        plugin_dir=tmp_path, handing=Handing(strategies=CRI), cdi_directories=(tmp_path,)
    )
    with pytest.raises(cdi.CdiError, match="nvidia-ctk cdi generate --device-name-strategy=uuid"):
        DevicePlugin(options).start()
    toolkit_spec(tmp_path, "all", uuid(0))
    plugin = DevicePlugin(options)
    plugin.start()
    plugin.stop()


def test_dra_driver_1144_and_hami_1903_a_specification_made_anew_is_read_anew(
    served: Served, tmp_path: Path
) -> None:
    folder = tmp_path / "cdi"
    folder.mkdir()
    toolkit_spec(folder, uuid(0))
    plugin, kubelet = served(
        machine((0, 1)), handing=Handing(strategies=CRI), cdi_directories=(folder,)
    )
    with pytest.raises(grpc.RpcError, match="no CDI specification lists"):
        kubelet.allocate(uuid(1))
    toolkit_spec(folder, uuid(0), uuid(1))
    assert until(lambda: len(plugin.resources[GPU].tables.cdi_names) == 2)
    kubelet.allocate(uuid(1))


def test_toolkit_1203_a_container_gets_no_node_of_another_gpu() -> None:
    of = machine((0, 1))
    spec = cdi.nodes_spec(
        [uuid(0), uuid(1)],
        owners=owners(of.gpus),
        handing=Handing(strategies=CRI),
        nodes=Nodes(control=("nvidiactl", "nvidia-uvm")),
    )
    for number, device in enumerate(spec["devices"]):
        nodes = [*device["containerEdits"]["deviceNodes"], *spec["containerEdits"]["deviceNodes"]]
        assert [node["path"] for node in nodes] == [
            f"/dev/nvidia{number}",
            "/dev/nvidiactl",
            "/dev/nvidia-uvm",
        ]


def test_nvidia_1555_our_specification_asks_nothing_of_the_driver() -> None:
    """Drivers before 570 crashed where theirs was generated; ours is minors and names."""
    of = read_recorded(FOLDER / "dgx1-v100")
    spec = cdi.nodes_spec(
        [g.uuid for g in of.gpus if g.uuid],
        owners=owners(of.gpus),
        handing=Handing(strategies=CRI),
        nodes=Nodes(),
    )
    assert len(spec["devices"]) == 8


def test_nvidia_332_and_646_what_is_no_platform_of_ours_is_said_at_the_start() -> None:
    with pytest.raises(ValueError, match="one of auto, nvml"):
        load(environ={"DEVICE_DISCOVERY_STRATEGY": "tegra"})


def test_nvidia_99_and_gke_202_thousands_of_calls_leave_the_memory_as_it_was(
    tmp_path: Path,
) -> None:
    with DaemonProcess(tmp_path) as daemon:
        daemon.start().registered()
        ids = list(daemon.kubelet.devices())
        assert daemon.process is not None

        def work(turns: int) -> None:
            for _ in range(turns):
                daemon.kubelet.prefer(ids, 4)
                daemon.kubelet.allocate(*ids[:4])

        work(300)
        before = resident_mib(daemon.process.pid)
        work(1500)
        assert resident_mib(daemon.process.pid) - before < 1.5


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_nvidia_210_and_368_nothing_that_the_kubelet_does_ends_the_process(tmp_path: Path) -> None:
    config = load(environ={"KUBELET_ROOT": str(tmp_path)})
    folder = tmp_path / "device-plugins"
    folder.mkdir()
    with SmallKubelet(folder) as kubelet:
        plugin = DevicePlugin(plugin_options(config))
        plugin.start()
        plugin.update(machine((0, 1)), {})
        for _ in range(5):
            kubelet.await_register()
            kubelet.stop()
            for path in folder.iterdir():
                path.unlink(missing_ok=True)  # the plugin may be ending its own
            kubelet.start()
        kubelet.await_register()
        assert until(lambda: plugin.ready)
        plugin.stop()
