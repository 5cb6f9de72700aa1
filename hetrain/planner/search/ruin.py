"""Local search by ruin and recreation: a few tables are taken off and put back, each with the cut and places that suit.

A target a little below the best slowest rank is packed for: what counts is by how much ranks exceed it, then the sum
of all ranks' milliseconds, as whatever is wasted must be packed too. Once nothing exceeds it, the target is lowered.
"""

from math import exp

import numpy as np

from hetrain.planner.cut import ALL, RANK
from hetrain.planner.search.insert import ALIGNED, LOOSE, SNUG, Inserter
from hetrain.planner.search.place import Layout
from hetrain.planner.search.worth import Worth

MOST = 6  # tables taken off at a time
PAIRS = 0.8  # of the rebuilds, where memory is scarce, are of two ranks
# The weight of waste, and by how much the target is below the best: far below with waste dear, or near and cheap
TEMPERS = ((0.02, 0.003), (0.02, 0.003), (0.02, 0.003), (0.3, 0.015), (0.3, 0.015))
NOISE = 0.03  # of the cost of a cut, so that not the same is tried again
WARM, COLD = 0.02, 0.0005  # excess, as a share of the target, that is readily accepted at first and at last


class Rebuilder:
    """Improves a layout by rebuilding parts of it; repeatable, as its draws come from a fixed seed."""

    def __init__(self, layout: Layout, spent: Worth, temper: tuple[float, float] = TEMPERS[0], seed: int = 0) -> None:
        self.layout, self._draw = layout, np.random.default_rng(seed)
        waste, self._step = temper
        self._inserter = Inserter(layout, spent, waste)
        self._ways = (SNUG, LOOSE, ALIGNED) if any(spent.scarce) else (SNUG, LOOSE)

    def run(self, rounds: int, goal: float) -> None:
        """Rebuild `rounds` times, or until the slowest rank takes at most `goal` ms; ends at the best layout seen."""
        layout = self.layout
        best, kept = layout.slowest, layout.copy()
        self._inserter.target = max(goal, best * (1 - self._step))
        now = self._cost()
        for turn in range(rounds):
            if best <= goal:
                break
            heat = self._inserter.target * WARM * (COLD / WARM) ** (turn / rounds)
            now = self._rebuild(now, heat)
            if layout.slowest < best * (1 - 1e-9):
                best, kept = layout.slowest, layout.copy()
                self._inserter.target = max(goal, best * (1 - self._step))
                now = self._cost()
        layout.restore_all(kept)

    def _cost(self) -> float:
        ms = self.layout.ms
        return float(np.maximum(ms - self._inserter.target, 0.0).sum()) + float(self._inserter.wasted.sum())

    def _rebuild(self, now: float, heat: float) -> float:
        """Rebuild some tables; the cost after it, or `now` where the old layout was put back."""
        layout = self.layout
        tables = self._pick()
        before = [(t, layout.kept(t), float(self._inserter.wasted[t])) for t in tables]
        for t in tables:
            layout.remove(t)
        if all(self._inserter.insert(t, self._way(), self._noise) for t in tables):
            cost = self._cost()
            if cost <= now or self._draw.random() < exp((now - cost) / heat):
                return cost
        for t, kept, wasted in before:
            layout.restore(t, kept)
            self._inserter.wasted[t] = wasted
        return now

    def _way(self) -> int:
        return self._ways[int(self._draw.integers(len(self._ways)))]

    def _noise(self) -> float:
        return 1.0 + NOISE * self._draw.random()

    def _pick(self) -> list[int]:
        """Some tables, at least one of a rank in excess, in the order they are put back: roughly the largest first."""
        layout, draw = self.layout, self._draw
        if len(self._ways) > 2 and draw.random() < PAIRS:
            return self._pair()
        slow = [r for r in np.flatnonzero(layout.ms > self._inserter.target).tolist() if layout.on[r]]
        count = int(draw.integers(2, MOST + 1))
        tables = {self._on_rank(int(draw.choice(slow)))} if slow else set()
        if draw.random() < 0.15:
            tables.update(self._on_node(int(draw.integers(layout.world // layout.local))))
        while len(tables) < min(count, len(layout.places)):
            if draw.random() < 0.3:
                tables.add(int(draw.integers(len(layout.places))))
            elif layout.on[rank := int(draw.integers(layout.world))]:
                tables.add(self._on_rank(rank))
        size = {t: max(part.cost for part in layout.parts[t]) * draw.uniform(0.5, 1.5) for t in sorted(tables)}
        return sorted(size, key=lambda t: -size[t])

    def _pair(self) -> list[int]:
        """All that lies on one of the slowest ranks and one of the fastest alone, to be dealt out between them anew."""
        layout = self.layout
        order = np.argsort(layout.ms, kind="stable")
        some = max(1, len(order) // 8)
        ranks = int(order[-1 - int(self._draw.integers(some))]), int(order[int(self._draw.integers(some))])
        tables = [t for t in sorted(layout.on[ranks[0]] | layout.on[ranks[1]]) if layout.of(t).place == RANK]
        size = {t: max(part.cost for part in layout.parts[t]) * self._draw.uniform(0.5, 1.5) for t in tables}
        return sorted(size, key=lambda t: -size[t])

    def _on_node(self, node: int) -> list[int]:
        """Tables of the ranks of a node, but for those on every rank."""
        layout = self.layout
        ranks = range(node * layout.local, (node + 1) * layout.local)
        return [t for t in sorted(set().union(*(layout.on[r] for r in ranks))) if layout.of(t).place != ALL]

    def _on_rank(self, rank: int) -> int:
        """One of the tables that load a rank."""
        held = sorted(self.layout.on[rank])
        return held[int(self._draw.integers(len(held)))]
