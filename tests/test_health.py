"""Health as the kubelet sees it: real daemons over the fake driver, named after the symptoms.

Numbers are those of the public reports that a test answers; docs/health.md has the table.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from plugin.api import deviceplugin_pb2 as api
from rte.discovery.reading import NvmlReading
from rte.model import PciAddress
from tests.bench.hang import age_s
from tests.daemon_process import ROOT, DaemonProcess
from tests.fake_nvml import MIG_CONFIG_CHANGE, XID
from tests.small_kubelet import GPUS
from tests.stopwatch import Stopwatch
from tests.test_deploy import markdown_table

Make = Callable[..., DaemonProcess]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Daemons, not yet started, that end with the test."""
    made: list[DaemonProcess] = []

    def make(*arguments: str, **options: str) -> DaemonProcess:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        daemon = DaemonProcess(folder, *arguments, **options)
        made.append(daemon.__enter__())
        return daemon

    yield make
    for daemon in made:
        daemon.__exit__()


# Faults that begin, and end on evidence


def test_plugin_426_one_gpus_trouble_never_makes_all_unhealthy(make: Make) -> None:
    """An event that cannot be attributed, and a wait for events that fails, condemn nobody."""
    daemon = make().start().registered()
    daemon.driver.event(0, XID, 31)
    daemon.driver.event(2, XID, 79)
    daemon.until_unhealthy(2)
    daemon.driver.control("call nvmlEventSetWait_v2 fail 999")
    time.sleep(0.6)
    assert daemon.unhealthy() == [2]


def test_plugin_111_a_gpu_that_was_reset_gets_work_again_without_a_restart(make: Make) -> None:
    daemon = make().start().registered()
    daemon.driver.event(1, XID, 119)
    daemon.driver.control("recovery 1 1")
    daemon.until_unhealthy(1)
    daemon.until_logged(r"gpu-1 \(\S+\) withheld: recovery-gpu-reset")
    daemon.driver.control()  # what the reset ends
    daemon.until_unhealthy()
    assert daemon.process is not None
    assert len(re.findall(r"gpu-1 \(\S+\) withheld: xid-119", daemon.log())) == 1
    assert len(re.findall(r"gpu-1 \(\S+\) no longer xid-119", daemon.log())) == 1


def test_gpu_operator_1065_a_gpu_recovers_after_a_contained_error_was_remapped(make: Make) -> None:
    """Xid 94 with a pending row remapping: the reset that carries it out is the evidence."""
    daemon = make().start().registered()
    daemon.driver.event(3, XID, 94)
    daemon.driver.control("remap 3 0 1 1 0")
    daemon.until_unhealthy(3)
    daemon.until_logged(r"gpu-3 \(\S+\) degraded: remap-pending")
    daemon.driver.control("remap 3 0 1 0 0")
    daemon.until_unhealthy()


def test_hami_2213_a_handle_that_works_is_no_evidence(make: Make) -> None:
    daemon = make().start().registered()
    daemon.driver.event(0, XID, 48)
    daemon.until_unhealthy(0)
    time.sleep(1.5)  # five good readings and as many cool-downs
    assert daemon.unhealthy() == [0]


def test_an_xid_outlives_a_restart_of_ours_and_ends_with_the_boot(make: Make) -> None:
    daemon = make().start().registered()
    daemon.driver.event(4, XID, 95)
    daemon.until_unhealthy(4)
    daemon.kill()
    daemon.start().registered()
    assert daemon.unhealthy() == [4]  # in the very first list
    assert daemon.end() == 0
    daemon.boot_id.write_text("5e0b6b5c-0d6e-4a53-9c1c-5a0d2f7f3a51\n")
    daemon.start().registered()
    assert daemon.unhealthy() == []


def test_a_driver_loaded_while_we_were_away_is_evidence_and_the_cool_down_still_counts(
    make: Make,
) -> None:
    daemon = make()
    daemon.load_driver()
    daemon.start(health={"coolDown": "1s"}).registered()
    daemon.driver.event(4, XID, 95)
    daemon.until_unhealthy(4)
    daemon.end()
    daemon.load_driver()
    daemon.start().registered()
    daemon.until_unhealthy()
    known, ended = (
        daemon.logged_at(line)
        for line in (r"remembered: the driver reported Xid 95", r"gpu-4 \(\S+\) no longer xid-95")
    )
    assert ended - known >= timedelta(seconds=1)


def test_a_damaged_file_of_faults_is_said_and_ignored(make: Make) -> None:
    daemon = make().start().registered()
    daemon.driver.event(4, XID, 95)
    daemon.until_unhealthy(4)
    daemon.end()
    file = daemon.state / "faults.json"
    file.write_bytes(file.read_bytes()[:-20])
    daemon.start().registered()
    assert daemon.unhealthy() == []
    daemon.until_logged(rf"{re.escape(str(file))}: is damaged: .*; it is ignored")


def test_an_operators_word_is_evidence_where_the_driver_gives_none(make: Make) -> None:
    daemon = make().start().registered()
    daemon.driver.event(5, XID, 48)
    daemon.until_unhealthy(5)
    assert daemon.command("release").returncode == 0
    assert daemon.driver.sessions() == 0
    done = daemon.command("release", "--end", "--was-reset", "gpu-77")
    assert (done.returncode, done.stderr) == (1, "no GPU here is called gpu-77\n")
    assert daemon.unhealthy() == [5]
    done = daemon.command("release", "--end", "--was-reset", "gpu-5")
    assert (done.returncode, done.stdout) == (0, "NVML is opened again\n")
    daemon.until_unhealthy()


def test_plugin_1929_an_xid_reaches_every_slice_and_an_instances_own_only_its_slices(
    make: Make,
) -> None:
    daemon = make("mig-half")
    cut = next(gpu for gpu in daemon.gpus if gpu.slices)
    index = cut.index
    assert index is not None
    assert len({part.gpu_instance for part in cut.slices}) > 1
    daemon.start(devices={"migStrategy": "mixed"}).registered()

    def sick() -> set[str]:
        lists = [daemon.kubelet.devices(name).values() for name in tuple(daemon.kubelet.lists)]
        return {d.ID for listed in lists for d in listed if d.health != "Healthy"}

    first = cut.slices[0]
    daemon.driver.event(index, XID, 94, f"{first.gpu_instance} {first.compute_instance}")
    daemon.until(
        lambda: sick() == {p.id for p in cut.slices if p.gpu_instance == first.gpu_instance},
        "the slices of the GPU instance",
    )
    daemon.driver.event(index, XID, 79, f"{first.gpu_instance} {first.compute_instance}")
    daemon.until(lambda: sick() == {p.id for p in cut.slices}, "all slices of the GPU")


# The fabric


@pytest.mark.parametrize("state", [1, 2], ids=["operator 1043, no fabric manager", "in progress"])
def test_gpu_operator_2781_a_b200_whose_fabric_is_stuck_gets_no_work_so_no_cuda_802(
    make: Make, state: int
) -> None:
    """The fabric manager says that it is ready; the GPUs do not."""
    daemon = make("hgx-h100-oci")
    daemon.driver.control(f"fabric * {state}")
    daemon.start(health={"coolDown": "1h"}).registered()
    assert daemon.unhealthy() == list(range(8))
    daemon.driver.control("fabric * 3")
    daemon.until_unhealthy()  # a node that starts waits for no cool-down


def test_gpu_operator_2511_seven_gpus_work_while_one_is_not_attached_to_the_fabric(
    make: Make,
) -> None:
    daemon = make("hgx-h100-oci")
    daemon.driver.control("fabric 5 2")
    daemon.start().registered()
    assert daemon.unhealthy() == [5]
    healthy = [str(gpu.uuid) for gpu in daemon.gpus if gpu.number != 5]
    assert len(daemon.kubelet.prefer(healthy, 7)) == 7


def test_nvsentinel_883_a_complete_fabric_with_an_error_is_good_for_one_gpu_only(
    make: Make,
) -> None:
    """Advertised, and never chosen for a pod of several as long as others are there."""
    daemon = make("hgx-h100-oci")
    daemon.driver.control("fabric 0 3 999")
    daemon.start().registered()
    assert daemon.unhealthy() == []
    daemon.until_logged(r"gpu-0 \(\S+\) degraded: fabric-failed: .* works alone")
    ids = [str(gpu.uuid) for gpu in daemon.gpus]
    for size in range(2, 8):
        assert ids[0] not in daemon.kubelet.prefer(ids, size)
    assert daemon.kubelet.prefer(ids[:1], 1) == (ids[0],)


# NVML that hangs, is absent, half up


def test_plugin_1640_a_driver_that_is_half_up_changes_nothing_until_it_is_certain(
    make: Make,
) -> None:
    """NVML works and shows no GPU: for seconds that is its trouble, later it is the node's."""
    daemon = make().start().registered()
    lists = len(daemon.kubelet.lists[GPUS])
    daemon.driver.control("lost * 999")
    daemon.until_logged("none of the 8 GPUs that the driver has answers")
    daemon.driver.control()
    daemon.until_logged("no longer: NVML works, and none of the 8")
    assert len(daemon.kubelet.lists[GPUS]) == lists
    daemon.driver.control("lost * 999")
    daemon.until_unhealthy(*range(8))


def test_plugin_2038_one_lost_gpu_leaves_seven_and_every_call_is_answered(make: Make) -> None:
    daemon = make().start().registered()
    daemon.driver.control("lost 6")
    daemon.until_unhealthy(6)
    for size in range(1, 8):
        offered = [str(gpu.uuid) for gpu in daemon.gpus if gpu.number != 6]
        assert len(daemon.kubelet.prefer(offered, size)) == size
    daemon.driver.control()
    daemon.until_unhealthy()


def test_plugin_221_a_driver_that_is_absent_is_waited_for_and_nothing_is_registered(
    make: Make,
) -> None:
    daemon = make()
    daemon.driver.control("call nvmlInitWithFlags fail 9")
    daemon.start()
    daemon.until_logged("Driver Not Loaded")
    assert daemon.kubelet.registered.empty()
    daemon.driver.control()
    daemon.registered()
    assert daemon.unhealthy() == []


def test_the_kubelets_calls_are_answered_while_nvml_hangs(make: Make) -> None:
    """`python -m tests.bench hang` says what that costs them: nothing."""
    daemon = make().start(nvml={"timeout": "10m"}).registered()
    lists = len(daemon.kubelet.lists[GPUS])
    daemon.driver.control("call nvmlDeviceGetCount_v2 hang")
    daemon.until(lambda: age_s(daemon) > 1.5, "no reading for five intervals")
    before_s, began = age_s(daemon), time.monotonic()
    daemon.driver.event(2, XID, 79)  # is heard also now
    daemon.until_unhealthy(2)
    plugin, ids = daemon.kubelet.plugin(), [str(gpu.uuid) for gpu in daemon.gpus]
    for _ in range(50):
        daemon.answers()
        assert daemon.kubelet.allocate(*ids[:2]).envs["NVIDIA_VISIBLE_DEVICES"]
        assert plugin.GetDevicePluginOptions(api.Empty()) == daemon.kubelet.options[0]
        plugin.PreStartContainer(api.PreStartContainerRequest())
        stream = plugin.ListAndWatch(api.Empty())
        assert len(next(stream).devices) == 8
        stream.cancel()
    lasted_s = time.monotonic() - began
    assert age_s(daemon) >= before_s + lasted_s  # no reading came in between
    assert len(daemon.kubelet.lists[GPUS]) == lists + 1


# Release


@pytest.mark.parametrize("how", ["rte release", "SIGUSR1"])
def test_a_release_leaves_no_open_handle_within_two_seconds_keeps_the_list_and_ends(
    make: Make, how: str
) -> None:
    daemon = make().start().registered()
    assert daemon.driver.sessions() == 1
    daemon.driver.control("call nvmlDeviceGetUUID hang")  # also in the middle of a reading
    time.sleep(0.5)
    stopwatch = Stopwatch()
    if how == "SIGUSR1":
        daemon.signal(signal.SIGUSR1)
        daemon.until(lambda: daemon.driver.sessions() == 0, "no session")
        assert stopwatch.took_s < 2
    else:
        done = daemon.command("release", "--for", "10m")
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"NVML is released until [\d:]+ UTC: .*no session open\n", done.stdout)
        assert daemon.driver.sessions() == 0
    daemon.driver.control()
    time.sleep(0.7)  # two intervals, in which nothing may be opened
    assert daemon.driver.sessions() == 0
    daemon.answers()
    assert daemon.unhealthy() == []
    if how == "SIGUSR1":
        daemon.signal(signal.SIGUSR2)
    else:
        assert daemon.command("release", "--end").returncode == 0
    daemon.until(lambda: daemon.driver.sessions() == 1, "opened again")


def test_a_release_ends_by_itself(make: Make) -> None:
    daemon = make().start().registered()
    began = time.monotonic()
    assert daemon.command("release", "--for", "1s").returncode == 0
    daemon.until(lambda: len(set(daemon.driver.journal())) == 2, "another worker has opened it")
    assert time.monotonic() - began >= 1
    daemon.until(lambda: daemon.driver.sessions() == 1, "and the first one has ended")


def test_release_says_where_nobody_answers(make: Make) -> None:
    daemon = make()
    daemon.write_config()
    done = daemon.command("release")
    assert done.returncode == 1
    assert "no daemon answers" in done.stderr
    assert daemon.command("release", "--was-reset", "gpu-1").returncode == 2
    assert daemon.command("release", "--for", "0").returncode == 2


def test_a_node_without_a_state_folder_keeps_nothing_and_works(make: Make) -> None:
    daemon = make()
    daemon.state.rmdir()
    daemon.start().registered()
    daemon.until_logged("stateDir .* does not exist")
    assert not daemon.state.exists()


# The two ways of reaching the driver

RESTART, FOLLOWED = "a restart of the pod", "followed"


def added(daemon: DaemonProcess, *, listed: bool) -> None:
    """A GPU is plugged in; NVML lists it where its device node reaches the container."""
    there, fresh = daemon.gpus[7].pci, PciAddress("0000:f0:00.0")
    daemon.plug_in(there, fresh)
    if listed:
        reading = msgspec.json.decode(daemon.driver.json.read_bytes(), type=NvmlReading)
        another = msgspec.structs.replace(
            reading.gpus[7], index=8, bus_id="00000000:F0:00.0", uuid="GPU-added", minor=8
        )
        daemon.driver.write(msgspec.structs.replace(reading, gpus=(*reading.gpus, another)))


def replaced(daemon: DaemonProcess, *, listed: bool) -> None:
    """The driver is unloaded, another version loaded; the old library no longer fits."""
    daemon.driver.control("call * fail 9")
    time.sleep(0.4)
    if not listed:
        daemon.driver.control("call * fail 18")
        return
    daemon.driver.control("driver 590.44.01")
    daemon.load_driver()


def reloaded(daemon: DaemonProcess, *, listed: bool) -> None:
    """The same version is loaded anew."""
    daemon.load_driver()


def sick(daemon: DaemonProcess, *, listed: bool) -> None:
    daemon.driver.event(1, XID, 79)
    daemon.driver.control("lost 2")
    daemon.until_unhealthy(1, 2)


@pytest.mark.parametrize("driver", ["injected", "mounted"])
@pytest.mark.parametrize(
    ("row", "happens"),
    [
        ("a GPU turns sick, is lost, is withheld", sick),
        ("a GPU added, the driver unloaded or replaced", added),
        ("a GPU added, the driver unloaded or replaced", replaced),
        ("a GPU added, the driver unloaded or replaced", reloaded),
    ],
    ids=["sick", "a GPU added", "the driver replaced", "the driver loaded anew"],
)
def test_gpu_operator_482_the_default_promises_no_more_than_the_table(
    make: Make, driver: str, row: str, happens: Callable[..., None]
) -> None:
    """docs/install.md: a restart ends the process with 75, what is followed does not."""
    table = markdown_table(ROOT / "docs/install.md", "## What each way")
    (cells,) = (cells for cells in table if cells[""] == row)
    column = next(name for name in cells if f"`driver: {driver}`" in name)
    daemon = make()
    daemon.load_driver()
    daemon.start(driver=driver).registered()
    happens(daemon, listed=driver == "mounted")
    if cells[column] == RESTART:
        assert daemon.wait() == 75
        assert "for a new container to be made" in daemon.log()
        assert daemon.driver.sessions() == 0
        assert not list((daemon.folder / "device-plugins").glob("rte-*"))
        daemon.driver.control()  # as the new container's library sees it
        daemon.start().registered().answers()
        return
    assert cells[column] == FOLLOWED
    if happens is added:
        daemon.until(lambda: "GPU-added" in daemon.kubelet.devices(), "the new GPU is listed")
    else:
        time.sleep(1.5)
    daemon.answers()
    assert daemon.end() == 0


def test_kubevirt_gpu_97_a_gpu_that_is_pulled_out_is_not_advertised(make: Make) -> None:
    daemon = make().start().registered()
    address = daemon.gpus[3].pci
    (daemon.sys / "bus/pci/devices" / address).unlink()
    daemon.driver.control("removed 3")
    daemon.until(lambda: len(daemon.kubelet.devices()) == 7, "seven devices")


def test_plugin_34_and_operator_1263_gpus_come_and_go_without_a_restart(make: Make) -> None:
    """One list a change, and ids that stay."""
    daemon = make().start(driver="mounted").registered()
    before = set(daemon.kubelet.devices())
    lists = len(daemon.kubelet.lists[GPUS])
    added(daemon, listed=True)
    daemon.until(lambda: set(daemon.kubelet.devices()) == before | {"GPU-added"}, "the new GPU")
    (daemon.sys / "bus/pci/devices/0000:f0:00.0").unlink()
    daemon.driver.control("removed 8")
    daemon.until(lambda: set(daemon.kubelet.devices()) == before, "it is gone")
    # Two changes; a look may fall between the kernel's loss of the GPU and NVML's.
    assert len(daemon.kubelet.lists[GPUS]) - lists in (2, 3)
    assert daemon.unhealthy() == []


def test_plugin_240_and_992_a_mig_reconfiguration_is_followed_and_leaves_nothing_stale(
    make: Make,
) -> None:
    daemon = make("mig-half")
    daemon.start(driver="mounted", devices={"migStrategy": "mixed"}).registered()
    reading = msgspec.json.decode(daemon.driver.json.read_bytes(), type=NvmlReading)
    cut = next(gpu for gpu in reading.gpus if gpu.mig)
    old = {f"nvidia.com/mig-{part.name}".replace("+", ".") for part in cut.mig}
    daemon.until(lambda: all(daemon.kubelet.lists[name] for name in old), "lists")
    made = msgspec.structs.replace(
        cut.mig[0], index=0, uuid="MIG-made", name="7g.80gb", gpu_instance=0, gpu_slices=7
    )
    gpus = tuple(
        msgspec.structs.replace(gpu, mig=(made,)) if gpu is cut else gpu for gpu in reading.gpus
    )
    others = {part.uuid for gpu in reading.gpus if gpu is not cut for part in gpu.mig}
    daemon.driver.write(msgspec.structs.replace(reading, gpus=gpus))
    daemon.driver.event(cut.index, MIG_CONFIG_CHANGE)
    daemon.until(lambda: daemon.kubelet.lists["nvidia.com/mig-7g.80gb"], "the new profile")
    assert list(daemon.kubelet.devices("nvidia.com/mig-7g.80gb")) == ["MIG-made"]
    daemon.until(
        lambda: all(set(daemon.kubelet.devices(name)) <= others for name in old), "nothing stale"
    )


# Cordons


def test_cordons_follow_the_file_and_end_to_the_second(make: Make) -> None:
    daemon = make().start().registered()
    one, two = daemon.gpus[1], daemon.gpus[2]
    until = datetime.now(UTC) + timedelta(seconds=3)
    entries = [
        {"id": str(one.uuid), "reason": "fan"},
        {"pci": two.pci.upper(), "until": until.isoformat()},
    ]
    stopwatch = Stopwatch()
    daemon.write_config(devices={"withhold": entries})
    daemon.until(lambda: daemon.was_unhealthy(1, 2), "both are cordoned")
    assert stopwatch.took_s < 1.5
    daemon.until_logged(f"{one.uuid} is cordoned: fan")
    daemon.until_unhealthy(1)
    assert datetime.now(UTC) > until - timedelta(seconds=1)
    assert stopwatch.took_s < 3 + 1
    daemon.until_logged(f"{two.pci} is no longer cordoned")
    daemon.write_config()
    daemon.until_unhealthy()
    daemon.answers()


DAMAGED = {
    "both names": "devices: {withhold: [{id: GPU-1, pci: '0000:01:00.0'}]}",
    "no address": "devices: {withhold: [{pci: somewhere}]}",
    "no time": "devices: {withhold: [{pci: '0000:01:00.0', until: soon}]}",
    "cut short": "devices: {withhold: [{pci: '0000:01:00.0'",
    "another option": "nrt: {detial: gpu}",
}


def test_a_damaged_file_keeps_the_cordons_and_is_said_once(make: Make) -> None:
    daemon = make()
    daemon.start(devices={"withhold": [{"pci": daemon.gpus[5].pci}]}).registered()
    for number, text in enumerate(DAMAGED.values(), start=1):
        for _ in range(3):
            daemon.write_config(text)
            daemon.until_logged("(cordons in force: 1)", times=number)
            time.sleep(0.05)
        assert daemon.unhealthy() == [5]
        assert daemon.log().count("is not taken over") == number
    daemon.write_config(devices={})
    daemon.until_unhealthy()
    daemon.until_logged("the configuration is in order again")


def test_a_removed_file_keeps_the_cordons(make: Make) -> None:
    daemon = make()
    daemon.start(devices={"withhold": [{"pci": daemon.gpus[5].pci}]}).registered()
    daemon.file.unlink()
    daemon.until_logged("is not taken over")
    assert daemon.unhealthy() == [5]


def test_kubernetes_60388_pods_on_a_gpu_that_turned_unhealthy_stay(make: Make) -> None:
    daemon = make()
    held = str(daemon.gpus[0].uuid)
    daemon.pods.pods["training"] = (held,)
    daemon.start().registered()
    daemon.write_config(devices={"withhold": [{"id": held}]})
    daemon.until_unhealthy(0)
    assert held in daemon.kubelet.devices()  # listed, so that the kubelet keeps the pod's device
    assert daemon.kubelet.allocate(held).envs["NVIDIA_VISIBLE_DEVICES"] == held
