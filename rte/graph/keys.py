"""The fields that depend on the machine's pairs alone, as numbers that compare like them."""

from __future__ import annotations

from rte.graph.build import Graph, Positions
from rte.graph.preference import bits
from rte.graph.ranks import NODE

MANY = 12  # members from which on the worst pair of all is soon one of theirs


class PairKeys:
    """Keys of sets within one larger set; quick also for those that leave out little of it."""

    def __init__(self, graph: Graph, whole: Positions) -> None:
        self.graph = graph
        self.whole = whole
        everyone = tuple(bits(whole))
        self.share = {i: sum([graph.weights.joined[i][j] for j in everyone]) for i in everyone}
        self.total = sum(self.share.values()) // 2

    def __call__(self, members: Positions) -> tuple[int, int]:
        """(bottleneck, the fields from `total` to `sound`); greater is better."""
        graph = self.graph
        nodes = sum([1 for block in graph.numa_blocks if block & members])
        return (
            self.least(members),
            self.inner(members) - nodes * NODE - (members & graph.suspects).bit_count(),
        )

    def least(self, members: Positions) -> int:
        """The smallest closeness of a pair."""
        closeness, _, ascending = self.graph.weights
        if members.bit_count() > MANY:
            return next(w for w, pair in ascending if pair & members == pair)
        inside = tuple(bits(members))
        return min([closeness[i][j] for n, i in enumerate(inside) for j in inside[:n]], default=0)

    def inner(self, members: Positions) -> int:
        """The sum over all pairs."""
        joined = self.graph.weights.joined
        left_out = tuple(bits(self.whole & ~members))
        if 2 * len(left_out) < members.bit_count():
            lost = sum([self.share[i] for i in left_out])
            return self.total - lost + half_sum(joined, left_out)
        return half_sum(joined, tuple(bits(members)))


def half_sum(joined: tuple[tuple[int, ...], ...], members: tuple[int, ...]) -> int:
    return sum([joined[i][j] for n, i in enumerate(members) for j in members[:n]])
