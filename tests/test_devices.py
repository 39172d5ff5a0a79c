"""What the kubelet is told of a machine."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest

from plugin.devices import Advertised, Advertising, Device, Known, MigStrategy, devices, remember
from rte.model import DeviceId, Fault, FaultClass, Machine, NumaId, NumaSource, PciAddress
from tests.small_machine import address, machine, slices, uuid, with_gpu, without_gpu

GPUS = "nvidia.com/gpu"


def listed(machine: Machine, **options: Any) -> Advertised:
    return devices(machine, {}, options=Advertising(**options))


def ids(found: Sequence[Device]) -> list[str]:
    return [device.id for device in found]


def shape(found: Advertised) -> Mapping[str, int]:
    return {name: len(listed) for name, listed in found.resources.items()}


def test_gpus_are_their_uuids_in_pci_order_with_their_numa_nodes() -> None:
    found = listed(machine((0, 0, 1)))
    assert found == Advertised(
        resources={
            GPUS: (
                Device(id=uuid(0), holds=uuid(0), gpu=address(0), numa=(NumaId(0),)),
                Device(id=uuid(1), holds=uuid(1), gpu=address(1), numa=(NumaId(0),)),
                Device(id=uuid(2), holds=uuid(2), gpu=address(2), numa=(NumaId(1),)),
            )
        }
    )


@pytest.mark.parametrize(
    ("numa", "options", "expected"),
    [
        pytest.param({"numa": (8,), "cpu_nodes": (0, 8)}, {}, (8,), id="the kernel's own id"),
        pytest.param({"numa": (None,)}, {}, (), id="unknown: none at all"),
        pytest.param(
            {"numa": (2,), "memory_nodes": (2,)}, {}, (), id="a node that has only memory"
        ),
        pytest.param({"numa": (7,)}, {}, (), id="a node that is not online"),
        pytest.param(
            {"numa": (64,), "cpu_nodes": (0, 64)}, {}, (), id="an id beyond the kubelet's masks"
        ),
        pytest.param(
            {"numa": (1,), "numa_from": NumaSource.PARENT}, {}, (), id="inferred: not by itself"
        ),
        pytest.param(
            {"numa": (1,), "numa_from": NumaSource.LOCAL_CPUS},
            {"advertise_inferred": True},
            (1,),
            id="inferred, and the operator wants it",
        ),
        pytest.param(
            {"numa": (1,), "numa_from": NumaSource.OVERRIDE}, {}, (1,), id="said by the operator"
        ),
        pytest.param(
            {"numa": (3,), "cpu_nodes": (0, 1, 2, 3), "memory_nodes": (4,)},
            {"same_socket": ((0, 1), (2, 3, 4))},
            (2, 3),
            id="all nodes with CPUs of the socket, where they are listed",
        ),
    ],
)
def test_numa_nodes(
    numa: dict[str, Any], options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    found = listed(machine(**numa), **options)
    assert [device.numa for device in found.resources[GPUS]] == [expected]


def mig(*profiles_of_gpus: Sequence[str] | None) -> Machine:
    """A machine of GPUs with these slices; None is MIG off."""
    made = machine([0] * len(profiles_of_gpus))
    for number, profiles in enumerate(profiles_of_gpus):
        if profiles is not None:
            made = with_gpu(made, number, mig_enabled=True, slices=slices(number, *profiles))
    return made


@pytest.mark.parametrize(
    ("strategy", "gpus", "expected"),
    [
        pytest.param("none", [["1g.10gb"] * 7, None], {GPUS: 2}, id="none: whole GPUs only"),
        pytest.param("single", [["1g.10gb"] * 7] * 2, {GPUS: 14}, id="single: slices as GPUs"),
        pytest.param("single", [None, None], {GPUS: 2}, id="single without MIG: GPUs"),
        pytest.param(
            "mixed",
            [["3g.40gb", "1g.10gb", "1g.10gb"], None, ["1g.10gb+me", "1g.10gb"]],
            {GPUS: 1, "nvidia.com/mig-1g.10gb": 3, "nvidia.com/mig-1g.10gb.me": 1}
            | {"nvidia.com/mig-3g.40gb": 1},
            id="mixed: a name for each profile, + as a dot",
        ),
        pytest.param("mixed", [[], None], {GPUS: 1}, id="mixed: MIG on and nothing cut yet"),
    ],
)
def test_mig(strategy: str, gpus: list[list[str] | None], expected: dict[str, int]) -> None:
    found = listed(mig(*gpus), mig=MigStrategy(strategy))
    assert shape(found) == expected
    assert all(d.healthy for devices in found.resources.values() for d in devices)


def test_a_physical_gpu_is_under_one_resource_only() -> None:
    found = listed(mig(["1g.10gb", "2g.20gb"], None, ["7g.80gb"]), mig=MigStrategy.MIXED)
    whole = {device.gpu for device in found.resources[GPUS]}
    cut = {d.gpu for name, listed in found.resources.items() if name != GPUS for d in listed}
    assert whole == {address(1)}
    assert cut == {address(0), address(2)}


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        pytest.param([["1g.10gb"], None], "gpu-0 is in MIG mode and gpu-1 is not", id="half on"),
        pytest.param([["1g.10gb"], []], "gpu-1 is in MIG mode and has no slices", id="one uncut"),
        pytest.param(
            [["1g.10gb"], ["2g.20gb"]], "slices of 1g.10gb and 2g.20gb", id="two profiles"
        ),
    ],
)
def test_mig_single_gives_no_work_until_all_gpus_are_alike(
    gpus: list[list[str] | None], said: str
) -> None:
    found = listed(mig(*gpus), mig=MigStrategy.SINGLE)
    assert {d.unhealthy for d in found.resources[GPUS]} == {"mig-not-uniform"}
    assert said in found.left_out[0]


def test_a_slice_with_a_part_of_its_instance_is_left_out_and_said() -> None:
    found = listed(mig(["1c.3g.40gb", "3g.40gb"]), mig=MigStrategy.MIXED)
    assert shape(found) == {"nvidia.com/mig-3g.40gb": 1}
    assert "1c.3g.40gb" in found.left_out[0]


def test_replicas_say_so_in_their_ids_and_on_request_in_the_resource() -> None:
    options = {"replicas": {GPUS: 2}, "rename_shared": True}
    found = listed(machine((0, 1)), **options)
    assert ids(found.resources[f"{GPUS}.shared"]) == [
        f"{uuid(0)}::0",
        f"{uuid(0)}::1",
        f"{uuid(1)}::0",
        f"{uuid(1)}::1",
    ]
    assert {d.holds for d in found.resources[f"{GPUS}.shared"]} == {uuid(0), uuid(1)}


def test_one_replica_is_refused() -> None:
    with pytest.raises(ValueError, match=r"replicas of nvidia.com/gpu: expected at least 2, got 1"):
        Advertising(replicas={GPUS: 1})


# Health


def test_faults_that_withhold_make_unhealthy_and_others_do_not() -> None:
    faults = {
        address(0): (
            Fault(severity=FaultClass.INFO, reason="warm"),
            Fault(severity=FaultClass.WITHHOLD, reason="xid-79"),
        ),
        address(1): (Fault(severity=FaultClass.DEGRADED, reason="nvlink-errors"),),
    }
    found = devices(machine((0, 0, 1)), faults, options=Advertising())
    assert [d.unhealthy for d in found.resources[GPUS]] == ["xid-79", None, None]


def test_a_fault_reaches_all_slices_and_replicas() -> None:
    cut = mig(["1g.10gb"] * 3, None)
    faults = {address(0): (Fault(severity=FaultClass.WITHHOLD, reason="xid-48"),)}
    options = Advertising(mig=MigStrategy.MIXED, replicas={"nvidia.com/mig-1g.10gb": 2})
    found = devices(cut, faults, options=options)
    assert [d.unhealthy for d in found.resources["nvidia.com/mig-1g.10gb"]] == ["xid-48"] * 6
    assert found.resources[GPUS][0].healthy


@pytest.mark.parametrize(
    ("instance", "compute", "expected"),
    [
        pytest.param(None, None, ["xid-94"] * 6, id="of the GPU"),
        pytest.param(1, None, [None, None, "xid-94", "xid-94", None, None], id="of an instance"),
        pytest.param(
            1, 0, [None, None, "xid-94", "xid-94", None, None], id="of all of its compute"
        ),
        pytest.param(1, 5, [None] * 6, id="of other compute of it"),
        pytest.param(9, None, [None] * 6, id="of an instance that is gone"),
    ],
)
def test_a_fault_of_a_gpu_instance_is_one_of_its_slices_and_their_replicas(
    instance: int | None, compute: int | None, expected: list[str | None]
) -> None:
    cut = mig(["1g.10gb"] * 3, None)
    first = cut.gpus[0].slices[0].gpu_instance
    fault = Fault(
        severity=FaultClass.WITHHOLD,
        reason="xid-94",
        gpu_instance=None if instance is None else first + instance,
        compute_instance=compute,
    )
    options = Advertising(mig=MigStrategy.MIXED, replicas={"nvidia.com/mig-1g.10gb": 2})
    found = devices(cut, {address(0): (fault,)}, options=options)
    assert [d.unhealthy for d in found.resources["nvidia.com/mig-1g.10gb"]] == expected
    whole = devices(cut, {address(0): (fault,)}, options=Advertising())
    assert whole.resources[GPUS][0].unhealthy == "xid-94", "the whole GPU has all instances"


@pytest.mark.parametrize("name", [uuid(1), address(1)], ids=["by id", "by PCI address"])
def test_a_cordoned_gpu_is_withheld(name: str) -> None:
    found = devices(machine(), {}, options=Advertising(), withheld={name: "wrong cable"})
    assert [d.unhealthy for d in found.resources[GPUS]] == [None, "withheld", None, None]


def test_one_cordoned_slice_leaves_its_neighbours() -> None:
    cut = mig(["1g.10gb"] * 2)
    withheld: dict[str, str] = {cut.gpus[0].slices[1].id: "test"}
    options = Advertising(mig=MigStrategy.SINGLE)
    found = devices(cut, {}, options=options, withheld=withheld)
    assert [d.unhealthy for d in found.resources[GPUS]] == [None, "withheld"]


def test_a_lost_gpu_keeps_its_id_and_place_and_is_unhealthy() -> None:
    before = machine((0, 0, 1, 1))
    after = with_gpu(before, 1, uuid=None, lost="GPU is lost", minor=None, index=None)
    known = remember(remember({}, before, frozenset()), after, frozenset())
    found = devices(after, {}, options=Advertising(), known=known)
    assert ids(found.resources[GPUS]) == [uuid(0), uuid(1), uuid(2), uuid(3)]
    assert [d.unhealthy for d in found.resources[GPUS]] == [None, "lost", None, None]
    assert [d.numa for d in found.resources[GPUS]] == [(0,), (0,), (1,), (1,)]


def test_the_slices_of_a_lost_gpu_keep_their_ids() -> None:
    before = mig(["1g.10gb", "1g.10gb"], ["1g.10gb"])
    after = with_gpu(before, 0, uuid=None, lost="GPU is lost", mig_enabled=False, slices=())
    known = remember(remember({}, before, frozenset()), after, frozenset())
    options = Advertising(mig=MigStrategy.SINGLE)
    found = devices(after, {}, options=options, known=known)
    assert ids(found.resources[GPUS]) == ids(listed(before, mig=MigStrategy.SINGLE).resources[GPUS])
    assert [d.unhealthy for d in found.resources[GPUS]] == ["lost", "lost", None]


def test_a_gpu_that_was_lost_from_the_start_is_said_and_the_others_are_advertised() -> None:
    found = listed(with_gpu(machine(), 2, uuid=None, lost="GPU is lost"))
    assert ids(found.resources[GPUS]) == [uuid(0), uuid(1), uuid(3)]
    assert "gpu-2 (0000:03:00.0) is lost (GPU is lost)" in found.left_out[0]


def test_a_gpu_that_comes_back_is_healthy() -> None:
    before = machine()
    lost = with_gpu(before, 1, uuid=None, lost="GPU is lost")
    known: Mapping[PciAddress, Known] = {}
    for now in (before, lost, before):
        known = remember(known, now, frozenset())
    found = devices(before, {}, options=Advertising(), known=known)
    assert all(d.healthy for d in found.resources[GPUS])


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param(frozenset({uuid(1)}), [None, "gone", None], id="a pod holds it: unhealthy"),
        pytest.param(None, [None, "gone", None], id="nobody says what is held: unhealthy"),
        pytest.param(frozenset({uuid(0)}), [None, None], id="nobody holds it: it leaves the list"),
    ],
)
def test_a_gpu_that_was_pulled_out(
    held: frozenset[DeviceId] | None, expected: list[str | None]
) -> None:
    before = machine((0, 0, 1))
    after = without_gpu(before, 1)
    known = remember(remember({}, before, held), after, held)
    found = devices(after, {}, options=Advertising(), known=known)
    assert [d.unhealthy for d in found.resources[GPUS]] == expected
    assert [d.numa for d in found.resources[GPUS]][-1] == (1,)


def test_a_gpu_given_to_vfio_is_neither_ours_nor_lost() -> None:
    before = machine((0, 0, 1))
    after = with_gpu(before, 1, uuid=None)
    known = remember(remember({}, before, frozenset()), after, frozenset())
    found = devices(after, {}, options=Advertising(), known=known)
    assert ids(found.resources[GPUS]) == [uuid(0), uuid(2)]
    assert found.left_out == ()


def test_a_gpu_that_moved_to_another_slot_is_there_once() -> None:
    before = machine((0, 0, 1))
    moved = with_gpu(without_gpu(before, 0), 1, uuid=uuid(0))
    known = remember(remember({}, before, None), moved, None)
    found = devices(moved, {}, options=Advertising(), known=known)
    assert sorted(ids(found.resources[GPUS])) == [uuid(0), uuid(1)]


CHANGES: list[Callable[[Machine, int], Machine]] = [
    lambda machine, number: machine,
    lambda machine, number: with_gpu(
        machine, number, mig_enabled=True, slices=slices(number, "1g.10gb")
    ),
    lambda machine, number: with_gpu(machine, number, mig_enabled=True),
    lambda machine, number: with_gpu(machine, number, uuid=None, lost="GPU is lost"),
    lambda machine, number: with_gpu(machine, number, uuid=None),
]


@pytest.mark.parametrize("strategy", MigStrategy)
def test_whatever_happens_ids_are_unique_and_no_gpu_is_whole_and_cut(
    strategy: MigStrategy,
) -> None:
    dice = Random(strategy)
    known: Mapping[PciAddress, Known] = {}
    options = Advertising(mig=strategy)
    for _ in range(300):
        now = machine((0, 0, 1, None))
        for number in range(4):
            now = dice.choice(CHANGES)(now, number)
        if dice.random() < 0.3:
            now = without_gpu(now, dice.randrange(4))
        held = dice.choice([None, frozenset(), frozenset({uuid(dice.randrange(4))})])
        known = remember(known, now, held)
        found = devices(now, {}, options=options, known=known)
        everything = [d for listed in found.resources.values() for d in listed]
        assert len({d.id for d in everything}) == len(everything)
        whole = {d.gpu for d in everything if d.id.startswith("GPU-")}
        cut = {d.gpu for d in everything if d.id.startswith("MIG-")}
        assert not whole & cut
        answering = {g.uuid for g in now.gpus if g.uuid and not g.mig_enabled}
        assert answering <= {d.id for d in everything}
        # What a pod holds and the plugin has seen since its start never leaves the list.
        seen = {g.gpu.uuid for g in known.values() if not g.gpu.mig_enabled}
        assert (held or frozenset()) & seen <= {d.id for d in everything}
