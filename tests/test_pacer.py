"""When the publisher looks, reads back and tries again: arithmetic, over any train of reasons."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rte.kubelet.plausible import Patience
from rte.pacer import Pace, Pacer

LOOK_S = 0.01
BUSY_S = 0.06  # the same on a node that has other work


def looks(changes: list[float], *, look_s: float = LOOK_S, writes: bool = True) -> list[float]:
    """When a loop that takes so long a look begins to look at changes, and publishes if it writes.

    The loop is that of the agent: it wakes when it is time, and reasons come while it looks.
    """
    pacer = Pacer(Pace(), 0, chance=0)
    pacer.looking()
    pacer.looked(0, wrote=False)
    waiting, now, begun = sorted(changes), 0.0, list[float]()
    while waiting or pacer.look_at() < now + 2:
        now = max(now, pacer.look_at() if not waiting else min(pacer.look_at(), waiting[0]))
        due = pacer.look_at() <= now
        if due:
            pacer.looking()
            begun.append(now)
        end = now + (look_s if due else 0)
        while waiting and waiting[0] <= end:
            pacer.woken(waiting.pop(0))
        now = end
        if due:
            pacer.looked(now, wrote=writes)
    return begun


def published_s(changes: list[float], begun: list[float], look_s: float = LOOK_S) -> float:
    """From the last change to the end of the first look that began after it."""
    last = max(changes)
    return next(at for at in begun if at >= last) + look_s - last


def test_a_lone_change_is_looked_at_at_once() -> None:
    (begun,) = looks([1.0])
    assert begun == pytest.approx(1.01)


def test_two_files_of_one_admission_are_one_look() -> None:
    assert looks([1.0, 1.003, 1.005]) == [pytest.approx(1.01)]


# name → changes: 20 in a second at most, each train with its writes and how soon the last is right
TRAINS = {
    "one every 50 ms": ([1 + n / 20 for n in range(20)], 5, 0.07),
    "one every 15 ms, as a kubelet starts pods": ([1 + n * 0.015 for n in range(20)], 3, 0.045),
    "four handfuls": ([1 + n // 5 * 0.25 + n % 5 * 0.012 for n in range(20)], 6, 0.045),
    "pairs": ([1 + n // 2 / 10 + n % 2 * 0.02 for n in range(20)], 11, 0.09),
}


@pytest.mark.parametrize(("changes", "most", "within_s"), TRAINS.values(), ids=TRAINS.keys())
def test_a_burst_is_few_writes_and_its_last_change_is_soon_right(
    changes: list[float], most: int, within_s: float
) -> None:
    begun = looks(changes)
    assert len(begun) <= most
    assert published_s(changes, begun) <= within_s


@pytest.mark.parametrize("late_ms", [2, 5, 10])
def test_a_burst_whose_changes_come_late_by_chance(late_ms: int) -> None:
    """As reasons do on a busy machine: medians of 40 bursts of 20 in a second."""
    chance = random.Random(late_ms)
    writes, took = [], []
    for _ in range(40):
        changes = sorted(1 + n / 20 + chance.uniform(0, late_ms / 1000) for n in range(20))
        begun = looks(changes)
        writes.append(len(begun))
        took.append(published_s(changes, begun))
    assert sorted(writes)[20] <= 5
    assert sorted(took)[20] <= 0.07


def test_a_burst_at_random_is_hardly_more_than_six_writes_on_the_average() -> None:
    chance = random.Random(1)
    bursts = [sorted(1 + chance.random() for _ in range(20)) for _ in range(200)]
    writes = [len(looks(changes)) for changes in bursts]
    assert sum(writes) / len(writes) <= 6.8


trains = st.lists(st.floats(0.0, 0.4), min_size=1, max_size=60).map(
    lambda gaps: [1 + sum(gaps[: n + 1]) for n in range(len(gaps))]
)


@settings(max_examples=300, deadline=None)
@given(trains, st.sampled_from([LOOK_S, BUSY_S]), st.booleans())
def test_whatever_comes_no_reason_is_lost_and_looks_are_bounded(
    changes: list[float], look_s: float, writes: bool
) -> None:
    """Every reason is followed by a look, soon, and looks are as far apart as the kubelet needs."""
    pace = Pace()
    begun = looks(changes, look_s=look_s, writes=writes)
    assert all(b - a >= pace.apart_s - 1e-9 for a, b in pairwise(begun))
    for change in changes:
        answer = next(at for at in begun if at >= change)
        assert answer - change <= pace.longest_s + look_s + pace.apart_s
    waits_s = published_s(changes, begun, look_s) - look_s
    assert waits_s <= max(pace.quiet_s, pace.apart_s) + 1e-9 or waits_s <= look_s + pace.quiet_s
    assert len(begun) <= len(changes)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0.0, 0.12), min_size=20, max_size=200))
def test_in_no_second_are_there_more_than_fifteen_writes(gaps: list[float]) -> None:
    changes = [1 + sum(gaps[: n + 1]) for n in range(len(gaps))]
    begun = looks(changes)
    for at in begun:
        assert sum(at <= other < at + 1 for other in begun) <= 15


def test_a_quiet_node_is_polled_and_glanced_at_and_nothing_else() -> None:
    pacer = Pacer(Pace(poll_s=10, glance_s=2), 0, chance=0)
    assert pacer.next() == 0
    pacer.looking()
    pacer.looked(0.5, wrote=False)
    glances = []
    while pacer.next() < 10.5:
        glances.append(pacer.next())
        pacer.glanced(pacer.next())
    assert glances == [2.5, 4.5, 6.5, 8.5]
    assert pacer.next() == pacer.look_at() == 10.5


def test_glances_can_be_turned_off() -> None:
    pacer = Pacer(Pace(poll_s=10, glance_s=0), 0, chance=0)
    pacer.looking()
    pacer.looked(0, wrote=False)
    pacer.plugin_moved(1)
    assert pacer.next() == 10


def test_after_a_plugins_socket_has_gone_the_glances_are_dense() -> None:
    pacer = Pacer(Pace(poll_s=10, glance_s=2, glances_s=(0.01, 0.4)), 0, chance=0)
    pacer.looking()
    pacer.looked(0, wrote=False)
    pacer.plugin_moved(1)
    glances = []
    while pacer.next() < 5:
        glances.append(pytest.approx(pacer.next()))
        pacer.glanced(pacer.next())
    assert glances == [1.01, 1.4, 3.4]


def test_there_is_no_glance_while_a_look_is_to_come() -> None:
    pacer = Pacer(Pace(), 0, chance=0)
    pacer.looking()
    pacer.failed(0, chance=0)
    pacer.plugin_moved(0)
    assert pacer.glance_at() is None
    pacer.looking()
    assert pacer.doubted(0.5, Patience.USUAL)
    assert pacer.glance_at() is None
    pacer.looking()
    pacer.looked(0.53, wrote=False)
    assert pacer.glance_at() is not None
    pacer.woken(0.6)
    assert pacer.glance_at() is None


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.99])
def test_re_reading_is_spread(chance: float) -> None:
    pacer = Pacer(Pace(poll_s=10_000, glance_s=0, reread_s=600), 0, chance=chance)
    pacer.looking()
    pacer.looked(0, wrote=False)
    assert 300 <= pacer.next() <= 600
    pacer.reread(1000, chance=chance)
    assert 1600 <= pacer.reread_at <= 1720


@settings(deadline=None)
@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=13, max_size=13))
def test_an_hour_has_six_re_readings_at_most(chances: list[float]) -> None:
    pacer = Pacer(Pace(), 0, chance=chances[0])
    rereads = []
    for chance in chances:
        rereads.append(pacer.reread_at)
        pacer.reread(pacer.reread_at, chance=chance)
    assert all(sum(at <= other < at + 3599 for other in rereads) <= 6 for at in rereads)


def test_a_shorter_period_counts_from_when_it_is_told() -> None:
    pacer = Pacer(Pace(reread_s=86400, poll_s=3600, glance_s=0), 0, chance=0.0)
    pacer.looking()
    pacer.looked(0, wrote=False)
    pacer.follow(Pace(reread_s=600, poll_s=10, glance_s=0), 100, chance=0.5)
    assert pacer.reread_at == 100 + 660
    assert pacer.look_at() == 110
    pacer.follow(Pace(reread_s=86400, poll_s=3600, glance_s=0), 105, chance=0.5)
    assert pacer.reread_at == 100 + 660


def test_errors_back_off_to_a_bound() -> None:
    pacer = Pacer(Pace(), 0, chance=0)
    waits = []
    for _ in range(9):
        pacer.looking()
        pacer.failed(0, chance=0)
        waits.append(pacer.next())
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    pacer.looking()
    pacer.failed(0, chance=0, longest_s=5)
    assert pacer.next() == 5
    pacer.looking()
    pacer.failed(0, chance=0.999)
    assert 15 <= pacer.next() < 15.1
    pacer.looking()
    pacer.looked(1, wrote=True)
    pacer.looking()
    pacer.failed(2, chance=0)
    assert pacer.next() == 2.5


def test_a_restarted_kubelet_ends_a_back_off_but_not_the_api_servers_order() -> None:
    pacer = Pacer(Pace(), 0, chance=0)
    for _ in range(8):
        pacer.looking()
        pacer.failed(0, chance=0)
    pacer.woken(1)
    assert pacer.next() == 30
    pacer.woken(1, urgent=True)
    assert pacer.next() <= 1.1
    pacer.looking()
    pacer.failed(2, chance=0, after_s=60)
    pacer.woken(3, urgent=True)
    assert pacer.next() == 62


OUTAGE_S = 600.0


def asked_in_an_outage(chance: random.Random) -> tuple[int, float]:
    """How often a node asks an API server that is away for ten minutes, and when it is answered."""
    pacer, now, asked = Pacer(Pace(), 0, chance=chance.random()), 0.0, 0
    while now < OUTAGE_S:
        asked += 1
        pacer.looking()
        pacer.failed(now, chance=chance.random())
        for _ in range(3):  # pods that come and go do not hurry it
            pacer.woken(now + chance.random())
        now = pacer.next()
    return asked, now - OUTAGE_S


def test_after_an_outage_a_thousand_nodes_do_not_come_together() -> None:
    chance = random.Random(5)
    nodes = [asked_in_an_outage(chance) for _ in range(1000)]
    assert max(asked for asked, _ in nodes) <= 45
    came = Counter(int(after_s) for _, after_s in nodes)
    assert max(came) < 30
    assert max(came.values()) <= 100  # in any second; evenly it would be 33


def test_nodes_that_are_told_the_same_time_do_not_come_together() -> None:
    came = []
    for chance in (0.0, 0.25, 0.5, 0.99):
        pacer = Pacer(Pace(), 0, chance=0)
        pacer.failed(100, chance=chance, after_s=60)
        came.append(pacer.next())
    assert came == [160, 167.5, 175, pytest.approx(189.7)]


def test_doubts_end() -> None:
    pacer = Pacer(Pace(doubts_s=(0.02, 0.05)), 0, chance=0)
    assert pacer.doubted(0, Patience.USUAL)
    assert pacer.next() == 0.02
    pacer.looking()
    assert pacer.doubted(0.02, Patience.USUAL)
    assert pacer.next() == pytest.approx(0.07)
    assert not pacer.doubted(0.07, Patience.USUAL)
    assert not pacer.doubted(0.07, Patience.USUAL, restarted_at=0)
    assert pacer.doubted(0.07, Patience.LONG, restarted_at=0)
    assert pacer.next() == pytest.approx(1.07)
    assert not pacer.doubted(15, Patience.LONG, restarted_at=0)


def test_a_doubt_about_what_is_likely_true_is_short() -> None:
    pacer = Pacer(Pace(doubts_s=(0.02, 0.05, 0.1), doubts_if_short=1), 0, chance=0)
    assert pacer.doubted(0, Patience.SHORT)
    assert not pacer.doubted(0.02, Patience.SHORT)


def test_a_kubelet_that_takes_seconds_is_not_doubted_for_minutes() -> None:
    """Each look takes 8 s: two more of them, and then it is believed."""
    pacer = Pacer(Pace(), 0, chance=0)
    assert [pacer.doubted(8.0 * n, Patience.USUAL) for n in range(3)] == [True, True, False]


def test_an_outage_ends_no_doubt() -> None:
    """Nothing was looked at meanwhile, so what is read afterwards is doubted as before."""
    pacer = Pacer(Pace(), 0, chance=0)
    assert all(pacer.doubted(0.01 * n, Patience.USUAL) for n in range(3))
    pacer.failed(0.04, chance=0)
    assert pacer.doubted(60, Patience.USUAL)
    assert sum(pacer.doubted(60.01, Patience.USUAL) for _ in range(30)) < len(Pace().doubts_s)


def test_an_echo_follows_the_last_write_by_which_pods_may_find_room() -> None:
    pacer = Pacer(Pace(echo_s=6, glance_s=0), 0, chance=0)
    pacer.looked(1, wrote=True)
    assert pacer.next() == pacer.look_at()
    pacer.looked(2, wrote=True, wakes=True)
    assert pacer.echo_at == 8
    pacer.looked(5, wrote=False)
    assert pacer.echo_at == 8
    pacer.looked(7, wrote=True)
    assert pacer.echo_at == 13
    pacer.echoed()
    assert pacer.next() == pacer.look_at()


def test_no_echo_when_it_is_turned_off() -> None:
    pacer = Pacer(Pace(echo_s=0), 0, chance=0)
    pacer.looked(2, wrote=True, wakes=True)
    assert pacer.echo_at is None
