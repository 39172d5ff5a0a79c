"""A device under a new resource name: when it may be offered there."""

from collections.abc import Iterable

import pytest

from plugin.allocation import owners
from plugin.devices import Advertising, Device, MigStrategy, devices
from plugin.moving import MOVING, Listed, Settled, settled, twice_held
from rte.model import DeviceId, Machine, PodName
from tests.small_machine import address, machine, slices, uuid, with_gpu

GPU, SHARED, MIG = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"
RING = "nvidia.com/gpu-fabric.ring"
WHOLE = machine((0, 1))
CUT = with_gpu(WHOLE, 1, mig_enabled=True, slices=slices(1, "1g.10gb", "1g.10gb"))
PLAIN = Advertising()
BY_GROUP = Advertising(fabric={address(0): "ring", address(1): "ring"})
MIXED = Advertising(mig=MigStrategy.MIXED)
FOUR = Advertising(replicas={GPU: 2}, rename_shared=True)
FOUR_OF_SAME_NAME = Advertising(replicas={GPU: 2})
SLICE = CUT.gpus[1].slices[0].id

Lists = dict[str, tuple[Device, ...]]


def lists(of: Machine, options: Advertising) -> Lists:
    return dict(devices(of, {}, options=options).resources)


def move(
    before: tuple[Machine, Advertising] | None,
    after: tuple[Machine, Advertising],
    *,
    used: Iterable[tuple[str, str]] = (),
    leaving: Iterable[tuple[str, str]] = (),
) -> Settled:
    listed = lists(*before) if before else {}
    return settled(
        lists(*after),
        listed={name: {d.id: d for d in found} for name, found in listed.items()},
        used=[Listed(name, DeviceId(id)) for name, id in used],
        leaving=[Listed(name, DeviceId(id)) for name, id in leaving],
        owners=owners(after[0].gpus),
        former=owners(before[0].gpus) if before else {},
    )


def healthy(found: Settled) -> dict[str, list[str]]:
    return {n: [d.id for d in ds if d.healthy] for n, ds in found.resources.items()}


def test_nothing_in_use_and_nothing_on_its_way_is_what_is_wanted() -> None:
    found = move((WHOLE, PLAIN), (CUT, MIXED))
    assert found.resources == lists(CUT, MIXED)
    assert not found.waiting


@pytest.mark.parametrize(
    ("before", "after", "held", "offered"),
    [
        pytest.param(
            (WHOLE, PLAIN),
            (WHOLE, BY_GROUP),
            (GPU, uuid(1)),
            {GPU: [], RING: [uuid(0)]},
            id="by group",
        ),
        pytest.param(
            (WHOLE, BY_GROUP),
            (WHOLE, PLAIN),
            (RING, uuid(1)),
            {GPU: [uuid(0)], RING: []},
            id="no longer by group",
        ),
        pytest.param(
            (WHOLE, PLAIN),
            (CUT, MIXED),
            (GPU, uuid(1)),
            {GPU: [uuid(0)], MIG: []},
            id="cut while a pod has the whole",
        ),
        pytest.param(
            (CUT, MIXED),
            (CUT, PLAIN),
            (MIG, SLICE),
            {GPU: [uuid(0)], MIG: []},
            id="whole while a pod has a slice that is still there",
        ),
        pytest.param(
            (CUT, MIXED),
            (WHOLE, MIXED),
            (MIG, SLICE),
            {GPU: [uuid(0), uuid(1)], MIG: []},
            id="the slice was destroyed",
        ),
        pytest.param(
            (WHOLE, PLAIN),
            (WHOLE, FOUR),
            (GPU, uuid(1)),
            {GPU: [], SHARED: [f"{uuid(0)}::0", f"{uuid(0)}::1"]},
            id="replicas of what a pod has alone",
        ),
        pytest.param(
            (WHOLE, PLAIN),
            (WHOLE, FOUR_OF_SAME_NAME),
            (GPU, uuid(1)),
            {GPU: [f"{uuid(0)}::0", f"{uuid(0)}::1"]},
            id="under one name",
        ),
    ],
)
def test_what_a_pod_holds_stays_where_it_is_and_blocks_its_own_gpu_only(
    before: tuple[Machine, Advertising],
    after: tuple[Machine, Advertising],
    held: tuple[str, str],
    offered: dict[str, list[str]],
) -> None:
    found = move(before, after, used=[held])
    assert healthy(found) == offered
    name, id = held
    (kept,) = (d for d in found.resources[name] if d.id == id)
    assert kept.unhealthy == MOVING
    # After its end, and once the kubelet has seen that it is in the old list no more:
    between = move(before, after, leaving=[held])
    assert healthy(between).get(name, []) == offered[name]
    assert move(before, after).resources == lists(*after)


def test_what_a_pod_holds_goes_to_nobody_after_it_while_something_else_is_in_its_way() -> None:
    """It has a slice, and another pod has the GPU as a whole."""
    other = CUT.gpus[1].slices[1].id
    found = move((CUT, MIXED), (CUT, MIXED), used=[(MIG, SLICE), (GPU, uuid(1))])
    (kept,) = found.resources[MIG]
    assert (kept.id, kept.unhealthy) == (SLICE, MOVING)
    assert found.waiting == {Listed(MIG, id): Listed(GPU, uuid(1)) for id in (SLICE, other)}


def test_a_slice_that_was_destroyed_is_waited_for_as_long_as_it_may_be_handed_out() -> None:
    held = (MIG, SLICE)
    found = move((CUT, MIXED), (WHOLE, MIXED), used=[held], leaving=[held])
    assert healthy(found) == {GPU: [uuid(0)], MIG: []}
    assert healthy(move((CUT, MIXED), (WHOLE, MIXED), used=[held]))[GPU] == [uuid(0), uuid(1)]


def test_a_plugin_that_starts_does_not_serve_the_former_name_again() -> None:
    found = move(None, (WHOLE, BY_GROUP), used=[(GPU, uuid(1))])
    assert healthy(found) == {RING: [uuid(0)]}
    assert found.waiting == {Listed(RING, uuid(1)): Listed(GPU, uuid(1))}


def test_what_is_held_under_its_own_name_waits_for_nothing() -> None:
    found = move((WHOLE, PLAIN), (WHOLE, PLAIN), used=[(GPU, uuid(1)), ("x/nic", "nic-1")])
    assert found.resources == lists(WHOLE, PLAIN)


def test_a_replica_in_use_leaves_the_other_replicas_alone() -> None:
    found = move((WHOLE, FOUR), (WHOLE, FOUR), used=[(SHARED, f"{uuid(1)}::0")])
    assert found.resources == lists(WHOLE, FOUR)


A, B = PodName(namespace="n", name="a"), PodName(namespace="n", name="b")


@pytest.mark.parametrize(
    ("used", "twice"),
    [
        pytest.param({(GPU, "g"): "a", (GPU, "h"): "b"}, {}, id="two devices"),
        pytest.param({(GPU, "g"): "ab"}, {"g": (A, B)}, id="two pods"),
        pytest.param({(GPU, "g"): "a", (RING, "g"): "b"}, {"g": (A, B)}, id="two names"),
        pytest.param({(GPU, "g"): "a", (RING, "g"): "a"}, {}, id="two names, one pod"),
        pytest.param({(SHARED, "g::0"): "a", (SHARED, "g::1"): "b"}, {}, id="two replicas"),
        pytest.param({(SHARED, "g::0"): "ab"}, {"g::0": (A, B)}, id="one replica"),
        pytest.param(
            {(GPU, "g"): "a", (SHARED, "g::1"): "b"}, {"g": (A, B)}, id="alone, and a replica"
        ),
    ],
)
def test_what_several_pods_hold(
    used: dict[tuple[str, str], str], twice: dict[str, tuple[PodName, ...]]
) -> None:
    pods = {"a": A, "b": B}
    given = {
        Listed(name, DeviceId(id)): tuple(pods[letter] for letter in letters)
        for (name, id), letters in used.items()
    }
    assert twice_held(given) == twice
