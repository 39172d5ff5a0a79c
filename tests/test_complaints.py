"""Public complaints about what was chosen, each by the machine that it came from.

Each test is named after the issue. Those about a kubelet's part in it are here with the real
managers; a lost GPU, health and double use are in the tests of the plugin. What another kind of
plugin chooses (sriov-network-device-plugin#255, virtual functions of one card) is not here.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations, permutations
from random import Random
from typing import Any

import pytest

from plugin.devices import Advertising
from rte.graph.build import Graph, build
from rte.graph.choose import choose
from rte.graph.parts import Sharing, choose_parts
from rte.model import DeviceId, Level, Machine, NumaId
from rte.publish.accounting import DevicePool
from rte.publish.forecast import largest_aligned, largest_linked
from rte.sources.recorded import read_recorded
from tests.conftest import StartKubelet
from tests.graphs import meshed, with_nics
from tests.machines.description import FOLDER
from tests.test_plugin_kubelet import GPU, SINGLE, Run, runs

PAIRS = [(0, 2), (1, 3), (4, 6), (5, 7)]
BRIDGED = build(read_recorded(FOLDER / "pcie-a100-pairs"))
PACKED, DISTRIBUTED = Sharing.PACKED, Sharing.DISTRIBUTED


def chosen(graph: Graph, available: Sequence[int], size: int, **more: Any) -> tuple[int, ...]:
    """Positions of what is chosen of these positions, offered in the order given."""
    ids = [graph.ids[i] for i in available]
    answer = choose(graph, available=ids, size=size, **more).chosen
    return tuple(graph.position[id] for id in answer)


# Which GPUs


@pytest.mark.parametrize("taken", [(), (0,), (1, 6), (0, 1, 4), (2, 3, 5)])
def test_nvidia_546_and_436_bridged_pairs_are_given_together(taken: tuple[int, ...]) -> None:
    free = [i for i in range(8) if i not in taken]
    assert chosen(BRIDGED, free, 2) in PAIRS


def test_nvidia_711_the_same_question_is_not_answered_at_random() -> None:
    graph = build(read_recorded(FOLDER / "dgx1-v100"))
    dice = Random(1)
    for size in range(1, 9):
        assert len({chosen(graph, dice.sample(range(8), 8), size) for _ in range(20)}) == 1


def test_nvidia_1193_single_gpus_in_turn_break_two_of_four_pairs_and_not_four() -> None:
    graph = build(meshed(8, {(0, 5): 4, (1, 4): 4, (2, 7): 4, (3, 6): 4}))
    free = list(range(8))
    for _ in range(4):
        free.remove(chosen(graph, free, 1)[0])
    assert sum({*pair} <= {*free} for pair in [(0, 5), (1, 4), (2, 7), (3, 6)]) == 2


def test_nvidia_39_linked_neighbours_are_chosen_when_an_index_is_taken() -> None:
    """0 is taken; 2,3 rather than 1,2."""
    graph = build(meshed(4, {(0, 1): 2, (2, 3): 2}))
    assert chosen(graph, [1, 2, 3], 2) == (2, 3)


def test_gpuallocator_17_cpu_affinity_counts_where_all_relations_are_equal() -> None:
    """8 GPUs, all SYS to each other, on two sockets."""
    machine = meshed(8, sockets=2)
    pairs = permutations((gpu.pci for gpu in machine.gpus), 2)
    graph = build(replace(machine, levels=dict.fromkeys(pairs, Level.SYS)))
    ids = ["GPU-3", "GPU-4", "GPU-6", "GPU-7"]
    choice = choose(graph, available=ids, size=3, explain=True)
    assert (choice.chosen, choice.decided_by) == (("GPU-4", "GPU-6", "GPU-7"), "numa_spread")


def test_gpuallocator_pr_18_a_single_gpu_is_the_worst_connected_one() -> None:
    graph = build(meshed(5, {(0, 1): 4, (0, 2): 4, (1, 2): 4, (0, 4): 1}))
    assert chosen(graph, range(5), 1) == (3,)
    assert chosen(graph, [0, 1, 2, 4], 1) == (4,)


def test_gpuallocator_pr_24_and_25_what_remains_is_well_connected() -> None:
    """In a row of four the two in the middle are as close as those at an end."""
    graph = build(meshed(4, {(0, 1): 2, (1, 2): 2, (2, 3): 2}))
    assert chosen(graph, range(4), 2) == (0, 1)
    assert chosen(graph, [1, 2, 3], 2) == (1, 2)


def test_gpuallocator_19_how_good_the_set_is_comes_with_it() -> None:
    """And compares between machines, as a scheduler needs it."""
    good, bad = (build(meshed(4, lanes)) for lanes in ({(0, 1): 4}, {}))
    with_link, without = (choose(g, available=g.ids, size=2).preference for g in (good, bad))
    assert with_link is not None
    assert without is not None
    assert with_link > without
    assert with_link.bottleneck.nvlink_megabytes_per_s == 100_000


def test_gpuallocator_21_near_pcie_does_not_make_up_for_a_missing_nvlink() -> None:
    """Scores that are summed prefer 0,1,2, which share a board, to 3,4,5, which are all linked."""
    lanes = {(0, 1): 2, (1, 2): 1, (3, 4): 1, (3, 5): 1, (4, 5): 1}
    machine = meshed(6, lanes)
    near = {machine.gpus[i].pci for i in range(3)}
    machine = replace(
        machine,
        levels={
            (a.pci, b.pci): Level.PIX if {a.pci, b.pci} <= near else Level.SYS
            for a, b in permutations(machine.gpus, 2)
        },
    )
    assert chosen(build(machine), range(6), 3) == (3, 4, 5)


def test_gpuallocator_44_the_set_is_the_best_and_not_a_part_of_the_best_partition() -> None:
    """0,2 and 1,3 have more lanes together than 0,1 and 2,3."""
    graph = build(meshed(4, {(0, 1): 4, (0, 2): 3, (1, 3): 3}))
    assert chosen(graph, range(4), 2) == (0, 1)


def test_gpuallocator_required_gpus_do_not_make_the_answer_worse_than_it_must_be() -> None:
    """facts: 5 of 141 cells were; the partition was best, not the set with what is required."""
    graph = build(meshed(6, {(0, 1): 4, (0, 2): 3, (1, 3): 6, (4, 5): 2}))
    assert chosen(graph, range(6), 2, required=[graph.ids[0]]) == (0, 1)


def test_gpuallocator_seven_groups_leave_the_answer_whole() -> None:
    """Its stored best partition is overwritten from seven groups on: 14 GPUs, two asked."""
    lanes = {(i, 13 - i): 1 + i % 3 for i in range(7)}
    graph = build(meshed(14, lanes))
    free = list(range(14))
    got = []
    while free:
        first, second = chosen(graph, free, 2)
        got.append(lanes[first, second])  # KeyError: no pair
        free = [i for i in free if i not in (first, second)]
    assert got == sorted(got, reverse=True)


def test_rocm_210_a_pair_without_a_recorded_link_is_the_worst_and_not_the_best() -> None:
    """Two islands; a missing edge weighed nothing and won."""
    islands = dict.fromkeys(combinations(range(4), 2), 1)
    islands |= {(a + 4, b + 4): 1 for a, b in combinations(range(4), 2)}
    graph = build(meshed(8, islands))
    for size in (2, 3, 4):
        assert len({i // 4 for i in chosen(graph, range(8), size)}) == 1


# NUMA


def test_kubernetes_122295_gpus_of_one_socket_are_nearer_than_of_two() -> None:
    """Sub-NUMA clustering: every GPU has a node of its own, and all have the same links."""
    graph = build(read_recorded(FOLDER / "h100-snc4"))
    # Nodes 0 to 3 are one socket's, 4 to 7 the other's.
    socket = [int(node or 0) // 4 for node in graph.numa]
    assert sorted(socket) == [0, 0, 1, 1]
    choice = choose(graph, available=graph.ids, size=2, explain=True)
    assert len({socket[graph.position[id]] for id in choice.chosen}) == 1
    for other in range(4):
        free = [i for i in range(4) if i != other]
        assert len({socket[i] for i in chosen(graph, free, 2)}) == 1


def uneven() -> Machine:
    """Two GPUs on node 0, six on node 1, no NVLink."""
    machine = meshed(8, sockets=2)
    pci = (replace(d, numa=NumaId(int(i > 1))) for i, d in enumerate(machine.pci))
    return replace(machine, pci=tuple(pci))


def test_kubernetes_136431_how_many_gpus_each_node_has_counts() -> None:
    graph = build(uneven())
    assert {graph.numa[i] for i in chosen(graph, range(8), 4)} == {1}
    assert chosen(graph, range(8), 2) == (0, 1)  # and the six stay together
    assert chosen(graph, range(8), 1) == (0,)
    assert chosen(graph, range(1, 8), 3) == (2, 3, 4)


def test_hami_1806_the_busy_node_is_filled_and_a_link_counts_before_a_node() -> None:
    graph = build(meshed(8, sockets=2))
    assert chosen(graph, [2, 4, 5, 6, 7], 1) == (2,)
    across = build(meshed(8, {(3, 4): 2}, sockets=2))
    assert chosen(across, range(8), 2) == (3, 4)


def test_hami_pr_2731_the_kubelet_s_node_is_never_left() -> None:
    """A linked pair is free on node 0, but the kubelet has decided for node 1."""
    graph = build(meshed(8, {(0, 1): 18}, sockets=2))
    free = [graph.ids[i] for i in (0, 1, 5, 6, 7)]
    assert chosen(graph, [5, 6, 7], 2, free=free) == (5, 6)


def test_pytorch_ci_infra_696_small_requests_keep_a_socket_whole() -> None:
    """Small jobs on both sockets, and then 4-GPU jobs are refused in a loop."""
    graph = build(meshed(8, dict.fromkeys(combinations(range(8), 2), 18), sockets=2))
    free = list(range(8))
    for size in (1, 2, 1):
        for gpu in chosen(graph, free, size):
            free.remove(gpu)
    assert free == [4, 5, 6, 7]


def pool_of(numa: Sequence[int], free: Sequence[int]) -> DevicePool:
    """The GPUs on these NUMA nodes, as the publisher counts them."""

    def zones(positions: Sequence[int]) -> tuple[frozenset[DeviceId], ...]:
        return tuple(
            frozenset(DeviceId(f"GPU-{i}") for i in positions if numa[i] == node)
            for node in sorted({*numa})
        )

    every = zones(range(len(numa)))
    return DevicePool(capacity=every, allocatable=every, available=zones(free))


def test_kai_1756_nodes_with_as_many_free_are_told_apart_where_nothing_is_refused() -> None:
    """best-effort admits everything: what a node is worth is what it can still align."""
    together, apart = [0, 1, 2, 3], [0, 1, 4, 5]
    numa = [0, 0, 0, 0, 1, 1, 1, 1]
    assert largest_aligned(pool_of(numa, together), several=True) == 4
    assert largest_aligned(pool_of(numa, apart), several=True) == 2


def test_scheduler_plugins_690_a_scheduler_reads_what_is_linked() -> None:
    """Four are free and aligned on either node; on one they are two pairs, on the other none is."""
    of = {BRIDGED.ids[i]: f"GPU-{i}" for i in range(8)}
    peers = {
        DeviceId(of[a]): [DeviceId(of[b]) for b in BRIDGED.ids if linked(BRIDGED, a, b)]
        for a in BRIDGED.ids
    }
    numa = [int(node or 0) for node in BRIDGED.numa]
    pairs, singles = pool_of(numa, [0, 1, 2, 3]), pool_of(numa, [0, 1, 4, 5])
    assert largest_linked(pairs, several=False, linked=peers) == 2
    assert largest_linked(singles, several=False, linked=peers) == 1


def linked(graph: Graph, a: DeviceId, b: DeviceId) -> bool:
    answer = choose(graph, available=[a, b], size=2).preference
    return a != b and answer is not None and answer.linked


# Calls that failed or took long


def test_nvidia_448_ends_that_disagree_break_nothing() -> None:
    """Asymmetric link counts panicked."""
    machine = meshed(4, {(0, 1): 4, (2, 3): 4})
    one_sided = replace(machine.gpus[0], links=())
    graph = build(replace(machine, gpus=(one_sided, *machine.gpus[1:])))
    assert chosen(graph, range(4), 2) == (2, 3)
    assert graph.suspects == 0b11


def test_nvidia_231_and_2038_a_lost_gpu_is_simply_not_there() -> None:
    """One lost GPU refused every pod, of the others too."""
    machine = meshed(4, {(0, 1): 4, (2, 3): 4})
    lost = replace(machine.gpus[1], uuid=None, lost="GPU is lost", links=())
    graph = build(replace(machine, gpus=(machine.gpus[0], lost, *machine.gpus[2:])))
    available = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]  # the kubelet may not know yet
    assert choose(graph, available=available, size=2).chosen == ("GPU-2", "GPU-3")
    assert choose(graph, available=available, size=1).chosen == ("GPU-0",)
    assert choose(graph, available=available, size=4).chosen == ("GPU-0", "GPU-2", "GPU-3")


def test_gpuallocator_pr_80_a_count_that_does_not_divide_the_offer_is_served() -> None:
    """5 GPUs, three asked, one linked pair: two and a nil came."""
    graph = build(meshed(5, {(1, 4): 12}))
    assert chosen(graph, range(5), 3) == (0, 1, 4)


def test_nvidia_an_id_offered_twice_is_one_gpu() -> None:
    """facts: it panics."""
    graph = build(meshed(4, {(1, 2): 2}))
    assert chosen(graph, [3, 2, 1, 1, 0, 2], 3) == (0, 1, 2)


@pytest.mark.parametrize(
    "lanes",
    [
        pytest.param({}, id="no NVLink"),
        pytest.param({pair: 1 + sum(pair) % 5 for pair in combinations(range(16), 2)}, id="odd"),
        pytest.param({(i, i + 8): 4 for i in range(8)}, id="pairs"),
    ],
)
def test_nvidia_774_and_pr_460_sixteen_gpus_take_no_seconds(
    lanes: dict[tuple[int, int], int],
) -> None:
    """7 of 16 took 16 to 30 s, and so did all that there are. ROCm: 6 and 7 of 16 likewise."""
    graph = build(meshed(16, lanes, sockets=2))
    for size in range(1, 17):
        took_s = []
        for _ in range(3):
            began = time.thread_time()
            assert len(chosen(graph, range(16), size)) == size
            took_s.append(time.thread_time() - began)
        assert min(took_s) < 0.005, size


# NICs


def beside_nics() -> Machine:
    return read_recorded(FOLDER / "hgx-h100-oci")


def test_sriov_574_the_gpu_is_near_the_nic_that_the_container_has() -> None:
    graph = build(beside_nics())
    nic = next(nic.pci for nic in graph.nics if nic.pci == "0000:41:00.0")
    assert chosen(graph, range(8), 1, own_nics=[nic]) == (2,)
    assert 2 in chosen(graph, range(8), 2, own_nics=[nic])


def test_sriov_operator_736_the_same_numa_node_is_not_near_enough() -> None:
    """gpu-0 to gpu-3 are of the NIC's node; only gpu-3 is below its switch."""
    graph = build(beside_nics())
    (nic,) = (nic.pci for nic in graph.nics if nic.pci == "0000:58:00.1")
    choice = choose(graph, available=graph.ids, size=1, own_nics=[nic], explain=True)
    assert (choice.decided_by, choice.runner_up is not None) == ("nics", True)
    assert choice.chosen == (graph.ids[3],)


def test_multi_nic_cni_39_the_numa_node_counts_where_no_switch_joins() -> None:
    machine = with_nics(meshed(4, sockets=2), [1])
    own = [nic.pci for nic in machine.nics if nic.pci]
    assert chosen(build(machine), range(4), 1, own_nics=own) == (2,)


def test_dra_174_and_214_linked_gpus_can_be_asked_for_by_number_alone() -> None:
    graph = build(meshed(6, {(1, 3): 4, (3, 5): 4, (1, 5): 4}))
    assert chosen(graph, range(6), 3) == (1, 3, 5)


# Slices and replicas

ISLANDS = build(meshed(4, {(0, 2): 4, (1, 3): 4}))


def parts(counts: Sequence[int]) -> dict[DeviceId, DeviceId]:
    """So many replicas of each GPU of ISLANDS."""
    return {
        DeviceId(f"{gpu}::{n}"): gpu
        for gpu, count in zip(ISLANDS.ids, counts, strict=True)
        for n in range(count)
    }


def taken(
    of: dict[DeviceId, DeviceId], size: int, sharing: Sharing, used: Sequence[str] = ()
) -> list[int]:
    """Positions of the GPUs whose replicas are chosen, when `used` are not offered."""
    offered = [id for id in of if id not in used]
    answer = choose_parts(ISLANDS, parts=of, available=offered, size=size, sharing=sharing)
    assert not {*used} & {*answer.chosen}
    return sorted(ISLANDS.position[of[id]] for id in answer.chosen)


def test_nvidia_491_and_gpu_operator_465_slices_land_on_different_gpus() -> None:
    assert taken(parts([7, 7, 7, 7]), 4, DISTRIBUTED) == [0, 1, 2, 3]
    assert taken(parts([7, 7, 7, 7]), 2, DISTRIBUTED) == [0, 2]


def test_nvidia_443_and_gpu_operator_386_two_replicas_are_of_one_gpu() -> None:
    of = parts([2, 2, 2, 2])
    assert taken(of, 2, PACKED) == [0, 0]
    assert taken(of, 2, PACKED, used=["GPU-0::0", "GPU-1::1"]) == [2, 2]


def test_nvidia_1690_the_next_container_gets_the_same_gpu() -> None:
    of = parts([4, 4, 4, 4])
    used: list[str] = []
    for _ in range(4):
        offered = [id for id in of if id not in used]
        used += choose_parts(ISLANDS, parts=of, available=offered, size=1, sharing=PACKED).chosen
    assert {of[DeviceId(id)] for id in used} == {"GPU-0"}


def test_nvidia_pr_1621_packing_stays_inside_one_nvlink_domain() -> None:
    assert taken(parts([2, 2, 2, 2]), 4, PACKED) == [0, 0, 2, 2]


def test_nvidia_pr_1936_a_pod_s_replicas_are_spread_evenly() -> None:
    assert taken(parts([4, 4, 4, 4]), 6, DISTRIBUTED) == [0, 0, 1, 1, 2, 3]
    # One GPU is fuller than the others: its turn comes last.
    assert taken(parts([4, 4, 4, 4]), 3, DISTRIBUTED, used=["GPU-2::0"]) == [0, 1, 3]


def test_nvidia_1786_gpus_may_have_different_numbers_of_replicas() -> None:
    of = parts([1, 3, 2, 5])
    assert taken(of, 11, PACKED) == [0, *[1] * 3, *[2] * 2, *[3] * 5]
    assert taken(of, 5, PACKED) == [3] * 5
    assert taken(of, 3, PACKED) == [1] * 3


def test_rocm_pr_141_an_unused_gpu_is_not_begun_while_another_has_room() -> None:
    of = parts([4, 4, 4, 4])
    assert taken(of, 2, PACKED, used=["GPU-3::0"]) == [3, 3]
    # Three are not enough: the one begun is that whose partner is in use already.
    assert taken(of, 4, PACKED, used=["GPU-3::0"]) == [1, 1, 1, 1]


# With a real kubelet's managers


@pytest.fixture
def run(kubelet: StartKubelet, stack: ExitStack) -> Run:
    return runs(kubelet, stack)


def test_kubernetes_65621_devices_are_chosen_by_their_links(run: Run) -> None:
    """Every pod of two gets a bridged pair, whatever the order of the kubelet's offer."""
    node = run("pcie-a100-pairs")
    got = [node.gpus(node.admit(f"p{n}", {GPU: 2})) for n in range(4)]
    assert sorted(got) == PAIRS


def test_hami_1286_and_kai_1598_cpus_and_gpus_are_of_one_numa_node(
    run: Run,
) -> None:
    node = run("pcie-a100-pairs", {**SINGLE, "cpuManagerPolicy": "static"})
    for n in range(4):
        admitted = node.admit(f"p{n}", {GPU: 2, "cpu": 2, "memory": "1Gi"})
        socket = {gpu // 4 for gpu in node.gpus(admitted)}
        cpus = {*(admitted.containers[0].exclusive_cpus or ())}
        cores = {m["id"] for m in node.kubelet.machine for core in m["cores"] if {*core} & cpus}
        assert cores == socket


def test_nvidia_1690_with_two_containers_of_one_pod(run: Run) -> None:
    node = run("pcie-a100-pairs", sharing=PACKED, advertising=Advertising(replicas={GPU: 4}))
    admitted = node.admit("two", {GPU: 1}, {GPU: 1})
    assert admitted.admitted
    assert len({id.partition("::")[0] for id in admitted.devices(GPU)}) == 1


def test_rocm_111_143_and_pr_189_several_pods_share_a_gpu(run: Run) -> None:
    node = run(
        "pcie-a100-pairs",
        {"topologyManagerPolicy": "none"},
        advertising=Advertising(replicas={GPU: 2}),
    )
    held: list[str] = []
    for n in range(16):
        (id,) = node.admit(f"p{n}", {GPU: 1}).devices(GPU)
        held.append(id.partition("::")[0])
        if n == 7:
            assert len({*held}) == 8  # nobody shares while a GPU is free
    assert all(held.count(gpu) == 2 for gpu in held)
    assert not node.admit("p16", {GPU: 1}).admitted


def test_kubernetes_75880_no_gpu_is_in_two_pods(run: Run) -> None:
    """Eight pods come and go, and the kubelet restarts in between."""
    node = run("pcie-a100-pairs", {"topologyManagerPolicy": "none"})
    held = {f"p{n}": node.gpus(node.admit(f"p{n}", {GPU: 1})) for n in range(5)}
    node.kubelet.remove("p1")
    del held["p1"]
    node.kubelet.restart()
    node.ready()
    held |= {f"q{n}": node.gpus(node.admit(f"q{n}", {GPU: 2})) for n in range(2)}
    everyone = [gpu for gpus in held.values() for gpu in gpus]
    assert sorted(everyone) == list(range(8))
