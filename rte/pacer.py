"""When the publisher looks, glances, reads back and echoes. Pure arithmetic over the times that it
is told; it knows no clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rte.backoff import doubled_s, ordered_s
from rte.kubelet.plausible import Patience


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times in seconds; why they are what they are stands beside each."""

    settle_s: float = 0.01
    """Between a first reason and the look: an admission writes two or three files within 5 ms,
    and one look then sees them all."""
    apart_s: float = 0.04
    """Between two looks, doubts aside, whatever comes: 50 calls a second, of the 100 that the
    kubelet has for all its clients."""
    burst_s: float = 0.25
    """A reason that comes so soon after a write belongs to a burst."""
    quiet_least_s: float = 0.03
    """In a burst: how long no reason has come before the look, at the least."""
    quiet_s: float = 0.075
    """The same at the most, however unevenly the reasons come: the last change of any burst is
    then published within 100 ms."""
    longest_s: float = 0.45
    """In a burst: the look after so long comes in any case."""
    poll_s: float = 10.0
    """PodResources is asked so often though nothing calls; one look costs 4 ms of CPU."""
    glance_s: float = 5.0
    """Between two looks the kubelet is asked so often whether what it offers is as long as it was,
    which costs 0.6 ms of CPU: the end of another's device plugin is in no file. 0: never."""
    glances_s: tuple[float, ...] = (0.01, 0.05, 0.15, 0.4, 0.8, 1.2)
    """The same after a plugin's socket has come or gone. The kubelet notices the end of a stream at
    once, and a change of its plugin watcher's folder within a second."""
    reread_s: float = 600.0
    """The published object is read back so often, and up to a fifth later by chance; half as early
    at first, so that the nodes of a cluster do not ask together."""
    echo_s: float = 6.0
    """After a write by which a pod that waits may find room: the scheduler's cache has taken the
    object in after its resync period, 5 s at the least that is advised. 0: no echo."""
    retry_first_s: float = 0.5
    retry_longest_s: float = 30.0
    """After errors: doubled from the first to the longest, each cut by up to half by chance."""
    retry_kubelet_s: float = 5.0
    """The longest of these when it is the kubelet that fails, which is asked by this node only."""
    doubts_s: tuple[float, ...] = (0.02, 0.03, *[0.05] * 8, 0.1, 0.2, 0.4, 0.4)
    """Between looks at a reading that cannot be believed; then, after 1.6 s, it is published as it
    is. Seen: a state file 0.3 s ahead of the list, so up to there the looks are dense."""
    doubts_if_short: int = 8
    """How many of those looks a reading gets that is as likely true."""
    doubts_least: int = 2
    """How many it gets in any case, where the kubelet takes seconds to answer."""
    stale_s: float = 300.0
    """Nothing has been known for so long: the object says so. 0: never."""
    restart_s: float = 15.0
    """So long after the kubelet has started its readings are doubted, once a second at the last:
    it waits for its pods from the API server before it lists them."""


class Gaps:
    """How far apart the reasons of a burst come, estimated as TCP does its round trips (RFC 6298):
    a burst is over when it has been silent for longer than its gaps let expect."""

    WEIGHT = 0.25
    DEVIATIONS = 2.0
    MARGIN_S = 0.004  # what a thread is late on a node that has other work

    def __init__(self) -> None:
        self._last: float | None = None
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def came(self, now: float, *, together_s: float, apart_s: float) -> None:
        """A reason has come: `together_s` after another it is one with it, `apart_s` after it the
        first of another burst."""
        gap_s = None if self._last is None else now - self._last
        if gap_s is not None and gap_s < together_s:
            return
        self._last = now
        if gap_s is None or gap_s >= apart_s:
            self._mean_s = None
        elif self._mean_s is None:
            self._mean_s, self._deviation_s = gap_s, gap_s / 2
        else:
            self._deviation_s += (abs(gap_s - self._mean_s) - self._deviation_s) * self.WEIGHT
            self._mean_s += (gap_s - self._mean_s) * self.WEIGHT

    @property
    def longest_s(self) -> float:
        """The longest gap to expect; 0 while nothing is known of this burst."""
        if self._mean_s is None:
            return 0.0
        return self._mean_s + self.DEVIATIONS * self._deviation_s + self.MARGIN_S


class Due(StrEnum):
    """What there may be to do."""

    LOOK = "look"
    GLANCE = "glance"
    ECHO = "echo"
    REREAD = "reread"


class Pacer:
    """When to do what next."""

    def __init__(self, pace: Pace, now: float, *, chance: float) -> None:
        """`chance` in [0, 1) spreads the first re-reading over the period."""
        self.pace = pace
        self.reread_at = now + pace.reread_s * (0.5 + chance / 2)
        self.echo_at: float | None = None
        self._poll_at = now
        self._first: float | None = None  # the first and the last reason that wait
        self._last = now
        self._gaps = Gaps()
        self._looked_at = now - pace.apart_s
        self._wrote_at = now - pace.burst_s
        self._glance_at = now + pace.glance_s
        self._glances: tuple[float, ...] = ()  # more of them, in order
        self._retry_at: float | None = None
        self._retry_is_order = False
        self._failures = 0
        self._doubts = 0
        self._doubted_since: float | None = None
        self._doubt_at: float | None = None

    def follow(self, pace: Pace, now: float, *, chance: float) -> None:
        """Goes on at another pace: what it has sooner is sooner at once."""
        self.pace = pace
        self._poll_at = min(self._poll_at, now + pace.poll_s)
        self.reread_at = min(self.reread_at, now + pace.reread_s * (1 + chance / 5))

    # What has happened

    def woken(self, now: float, *, urgent: bool = False) -> None:
        """A reason has come. An urgent one ends a back-off that nobody has ordered."""
        pace = self.pace
        self._first = now if self._first is None else self._first
        self._last = now
        # After twice the longest quiet time there was a look, and another burst begins.
        self._gaps.came(now, together_s=pace.settle_s, apart_s=2 * pace.quiet_s)
        if urgent and not self._retry_is_order:
            self._retry_at = None
            self._failures = 0  # a socket that is just being made may need another try, soon

    def plugin_moved(self, now: float) -> None:
        """A device plugin's socket has come or gone, which the kubelet will notice in a moment."""
        if self.pace.glance_s:
            self._glances = tuple(now + after_s for after_s in self.pace.glances_s)

    def looking(self) -> None:
        """A look begins: the reasons so far are answered by it."""
        self._first = None
        self._doubt_at = self._retry_at = None

    def looked(self, now: float, *, wrote: bool, wakes: bool = False) -> None:
        """A look was believed, and published if there was anything new; pods that wait may find
        room by it."""
        self._looked_at = now
        self._poll_at = now + self.pace.poll_s
        self._glance_at = now + self.pace.glance_s
        self._failures = self._doubts = 0
        self._doubted_since = None
        if wrote:
            self._wrote_at = now
            waiting = self.echo_at is not None
            self.echo_at = now + self.pace.echo_s if (wakes or waiting) else None
        if not self.pace.echo_s:
            self.echo_at = None

    def glanced(self, now: float) -> None:
        self._glance_at = now + self.pace.glance_s
        self._glances = tuple(at for at in self._glances if at > now)

    def doubted(self, now: float, patience: Patience, *, restarted_at: float | None = None) -> bool:
        """Whether to look again before the reading is believed; then it says when."""
        pace = self.pace
        short = patience is Patience.SHORT
        waits = pace.doubts_s[: pace.doubts_if_short if short else None]
        if self._doubted_since is None:
            self._doubted_since = now
        lasted_s = now - self._doubted_since
        if self._doubts < len(waits) and (
            self._doubts < pace.doubts_least or lasted_s < sum(waits)
        ):
            wait_s = waits[self._doubts]
        elif (
            patience is Patience.LONG
            and restarted_at is not None
            and now < restarted_at + pace.restart_s
        ):
            wait_s = 1.0
        else:
            return False
        self._doubts += 1
        self._doubt_at = now + wait_s
        return True

    def failed(
        self,
        now: float,
        *,
        chance: float,
        after_s: float | None = None,
        longest_s: float | None = None,
    ) -> None:
        """Something could not be done: `after_s` is when the other side wants to be asked again,
        `longest_s` how long it is left alone at the most, where that is not as for all."""
        pace = self.pace
        longest_s = pace.retry_longest_s if longest_s is None else longest_s
        wait_s = doubled_s(pace.retry_first_s, longest_s, self._failures, chance=chance)
        self._failures += 1
        self._doubted_since = None  # the time without an answer is none in which it was looked at
        self._retry_is_order = after_s is not None
        self._retry_at = now + max(wait_s, ordered_s(after_s, chance=chance))

    def again(self, now: float, after_s: float) -> None:
        """A look is wanted then, though no reason may come."""
        self._poll_at = min(self._poll_at, now + after_s)

    def reread(self, now: float, *, chance: float) -> None:
        self.reread_at = now + self.pace.reread_s * (1 + chance / 5)

    def echoed(self) -> None:
        self.echo_at = None

    # When to do what

    def next(self) -> float:
        """When to wake up, for whatever is first."""
        if self._retry_at is not None:
            return self._retry_at
        others = (self.reread_at, self.echo_at, self.glance_at())
        return min([self.look_at(), *(at for at in others if at is not None)])

    def due(self, now: float) -> frozenset[Due]:
        """What it is time for. After an error all waits for the next try."""
        if self.next() > now:
            return frozenset()
        times = {
            Due.LOOK: self.look_at(),
            Due.GLANCE: self.glance_at(),
            Due.ECHO: self.echo_at,
            Due.REREAD: self.reread_at,
        }
        return frozenset(due for due, at in times.items() if at is not None and at <= now)

    def look_at(self) -> float:
        """When to look next, as things are."""
        if self._retry_at is not None:
            return self._retry_at
        if self._doubt_at is not None:
            return self._doubt_at
        if self._first is None:
            return self._poll_at
        pace = self.pace
        if self._first - self._wrote_at >= pace.burst_s:
            at = min(self._first + pace.settle_s, self._poll_at)
        else:
            quiet_s = min(max(pace.quiet_least_s, self._gaps.longest_s), pace.quiet_s)
            at = min(self._last + quiet_s, max(self._first, self._wrote_at) + pace.longest_s)
        return max(at, self._looked_at + pace.apart_s)

    def glance_at(self) -> float | None:
        """When to glance next; None while a look is to come for another cause."""
        waits = self._retry_at is not None or self._doubt_at is not None
        if waits or self._first is not None or not self.pace.glance_s:
            return None
        return min((self._glance_at, *self._glances))
