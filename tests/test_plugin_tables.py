"""Tables of a machine where all differs, slices and replicas: how long a call waits for them."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from plugin.devices import Advertising, MigStrategy
from plugin.life import DevicePlugin, Options
from rte.graph.build import build
from rte.graph.choose import choose
from rte.graph.parts import Sharing
from rte.model import DeviceId, Machine
from tests.graphs import meshed, with_nics
from tests.small_kubelet import GPUS, SmallKubelet, until
from tests.small_machine import slices


def all_different(seed: int) -> Machine:
    dice = Random(seed)
    lanes = {pair: dice.choice([0, 0, 1, 2, 4]) for pair in combinations(range(16), 2)}
    return with_nics(meshed(16, lanes, sockets=2), [0, 1])


def eight(lanes: dict[tuple[int, int], int]) -> Machine:
    return meshed(8, lanes, sockets=2)


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[SmallKubelet]:
    with SmallKubelet(tmp_path) as kubelet:
        yield kubelet


@pytest.fixture
def plugin(kubelet: SmallKubelet, request: pytest.FixtureRequest) -> Iterator[DevicePlugin]:
    """A plugin with the test's options, that serves once it is told a machine."""
    options = getattr(request, "param", {})
    plugin = DevicePlugin(Options(plugin_dir=kubelet.folder, **options))
    plugin.start()
    yield plugin
    plugin.stop()


def ready(kubelet: SmallKubelet) -> list[DeviceId]:
    kubelet.await_register()
    assert until(lambda: kubelet.lists[GPUS])
    return [DeviceId(id) for id in kubelet.devices()]


def test_tables_of_16_gpus_that_all_differ_are_made_in_time() -> None:
    """300 ms is the promise; processor time, as tests share their cores."""
    machine = all_different(1)
    took_s = []
    for _ in range(3):
        began = time.thread_time()
        graph = build(machine)
        took_s.append(time.thread_time() - began)
    assert graph.ranks is not None
    assert sum(map(len, graph.ranks.sets)) == 1 << 16
    assert min(took_s) < 0.3


def test_calls_go_on_with_the_previous_tables_while_new_ones_are_made(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    before, after = all_different(1), all_different(2)
    ids = tuple(DeviceId(f"GPU-{n}") for n in range(16))
    answers = [choose(build(m), available=ids, size=5).chosen for m in (before, after)]
    assert answers[0] != answers[1]
    plugin.update(before, {})
    ready(kubelet)
    assert kubelet.prefer(ids, 5) == answers[0]
    tables = plugin.resources[GPUS].tables

    builder = threading.Thread(target=plugin.update, args=(after, {}))
    builder.start()
    meanwhile = []
    while plugin.resources[GPUS].tables is tables:
        began = time.perf_counter()
        answer = kubelet.prefer(ids, 5)
        meanwhile.append((answer, time.perf_counter() - began))
    builder.join()
    assert kubelet.prefer(ids, 5) == answers[1]
    assert [answer for answer, _ in meanwhile[:-1]] == [answers[0]] * (len(meanwhile) - 1)
    # None waited for the tables to be ready: they take longer than all of these calls but one.
    assert len(meanwhile) > 2


# Slices and replicas

QUADS = dict.fromkeys([*combinations((0, 2, 4, 6), 2), *combinations((1, 3, 5, 7), 2)], 4)
"""Two islands, each with GPUs of both sockets: by number alone one would mix them."""


def cut(machine: Machine) -> Machine:
    gpus = tuple(
        replace(gpu, mig_enabled=True, slices=slices(gpu.number, *["1g.10gb"] * 7))
        for gpu in machine.gpus
    )
    return replace(machine, gpus=gpus)


def parents(machine: Machine, answer: tuple[str, ...]) -> list[int]:
    number = {s.id: gpu.number for gpu in machine.gpus for s in gpu.slices}
    number |= {gpu.uuid: gpu.number for gpu in machine.gpus if gpu.uuid}
    return sorted(number[DeviceId(id.partition("::")[0])] for id in answer)


SLICES = {"advertising": Advertising(mig=MigStrategy.SINGLE)}
REPLICAS = {"advertising": Advertising(replicas={GPUS: 10})}


@pytest.mark.parametrize(
    ("plugin", "size", "expected"),
    [
        pytest.param({**SLICES, "sharing": Sharing.DISTRIBUTED}, 4, [0, 2, 4, 6], id="an island"),
        pytest.param({**SLICES, "sharing": Sharing.DISTRIBUTED}, 2, [0, 2], id="one socket of it"),
        pytest.param({**SLICES, "sharing": Sharing.PACKED}, 7, [0] * 7, id="one parent"),
        pytest.param(
            {**SLICES, "sharing": Sharing.PACKED}, 9, [0] * 7 + [2] * 2, id="a parent of the island"
        ),
        pytest.param({**REPLICAS, "sharing": Sharing.PACKED}, 10, [0] * 10, id="ten replicas"),
        pytest.param(
            {**REPLICAS, "sharing": Sharing.DISTRIBUTED}, 4, [0, 2, 4, 6], id="of different GPUs"
        ),
    ],
    indirect=["plugin"],
)
def test_slices_and_replicas_are_chosen_gpu_by_gpu(
    plugin: DevicePlugin, kubelet: SmallKubelet, size: int, expected: list[int]
) -> None:
    machine = eight(QUADS)
    machine = cut(machine) if plugin.options.advertising.mig is MigStrategy.SINGLE else machine
    plugin.update(machine, {})
    ids = ready(kubelet)
    assert len(ids) == (56 if machine.gpus[0].slices else 80)
    assert parents(machine, kubelet.prefer(ids[::-1], size)) == expected
    decision = list(plugin.decisions)[-1]
    assert decision.preference is not None
    assert decision.preference.linked


@pytest.mark.parametrize("plugin", [{**SLICES, "sharing": Sharing.PACKED}], indirect=True)
def test_slices_in_use_count_until_they_are_free(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    machine = cut(eight(QUADS))
    plugin.update(machine, {})
    ids = ready(kubelet)
    first = kubelet.prefer(ids, 3)
    kubelet.allocate(*first)
    left = [id for id in ids if id not in first]
    # Four are left of GPU 0: just enough, and no other GPU is begun.
    assert parents(machine, kubelet.prefer(left, 4)) == [0] * 4
    # Five do not fit there: a whole GPU is taken, not what is left of the first.
    assert len(set(parents(machine, kubelet.prefer(left, 5)))) == 1


@pytest.mark.parametrize(
    "plugin",
    [{**parts, "sharing": sharing} for parts in (SLICES, REPLICAS) for sharing in Sharing],
    indirect=True,
)
def test_many_parts_take_no_longer_than_whole_gpus(
    plugin: DevicePlugin, kubelet: SmallKubelet
) -> None:
    """The plugin's own time, without the socket; the least of several, as cores are shared."""
    machine = eight({pair: 1 + sum(pair) % 3 for pair in combinations(range(8), 2)})
    machine = cut(machine) if plugin.options.advertising.mig is MigStrategy.SINGLE else machine
    plugin.update(machine, {})
    ids = ready(kubelet)
    for size in (1, 4, 8, 20, len(ids) - 1):
        for _ in range(5):
            assert len(kubelet.prefer(ids, size)) == size
        took_s = min(decision.took_s for decision in list(plugin.decisions)[-5:])
        assert took_s < 0.002, size
