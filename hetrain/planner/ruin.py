"""Local search by ruin and recreation: a few tables are taken off and put back, each with the cut and places that suit.

A target a little below the best slowest rank is packed for: what counts is by how much ranks exceed it, then the sum
of all ranks' milliseconds, as whatever is wasted must be packed too. Once nothing exceeds it, the target is lowered.
"""

from bisect import bisect_left
from math import exp

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.cut import ALL, NODE, RANK, Cut
from hetrain.planner.menu import Floats
from hetrain.planner.place import Layout

MOST = 6  # tables taken off at a time
STEP = 0.003  # by which the target is below the best
WASTE = 0.02  # of a millisecond spent, against one in excess
WARM, COLD = 0.02, 0.0005  # excess, as a share of the target, that is readily accepted at first and at last


class Rebuilder:
    """Improves a layout by rebuilding parts of it; repeatable, as its draws come from a fixed seed."""

    def __init__(self, layout: Layout, spent: Floats, seed: int = 0) -> None:
        self.layout, self._draw = layout, np.random.default_rng(seed)
        self._target = layout.slowest
        self._waste = spent * WASTE
        self._kind = layout.menu.kind_of.tolist()

    def build(self, target: float) -> bool:
        """Put all tables of an empty layout in, the dearest first, for a slowest rank of `target` ms; False: no room."""
        self._target = target
        waste = np.where(self.layout.menu.there, self._waste, np.inf).min(1)[self.layout.menu.kind_of]
        return all(self._insert(int(t)) for t in np.argsort(-waste, kind="stable"))

    def run(self, rounds: int, goal: float) -> None:
        """Rebuild `rounds` times, or until the slowest rank takes at most `goal` ms; ends at the best layout seen."""
        layout = self.layout
        best, kept = layout.slowest, self._copy()
        self._target = max(goal, best * (1 - STEP))
        now = self._cost()
        for turn in range(rounds):
            if best <= goal:
                break
            heat = self._target * WARM * (COLD / WARM) ** (turn / rounds)
            now = self._rebuild(now, heat)
            if layout.slowest < best * (1 - 1e-9):
                best, kept = layout.slowest, self._copy()
                self._target = max(goal, best * (1 - STEP))
                now = self._cost()
        self._restore_all(kept)

    def _copy(self) -> list[tuple[int, list[int]]]:
        return [(int(cut), list(places)) for cut, places in zip(self.layout.cut, self.layout.places, strict=True)]

    def _restore_all(self, kept: list[tuple[int, list[int]]]) -> None:
        for table, (cut, places) in enumerate(kept):
            restore(self.layout, table, cut, places)

    def _cost(self) -> float:
        ms = self.layout.ms
        return float(np.maximum(ms - self._target, 0.0).sum()) + self._spent()

    def _spent(self) -> float:
        return float(self._waste[self.layout.menu.kind_of, self.layout.cut].sum())

    def _rebuild(self, now: float, heat: float) -> float:
        """Rebuild some tables; the cost after it, or `now` where the old layout was put back."""
        layout = self.layout
        tables = self._pick()
        before = [(t, int(layout.cut[t]), list(layout.places[t])) for t in tables]
        for t in tables:
            layout.remove(t)
        if all(self._insert(t) for t in tables):
            cost = self._cost()
            if cost <= now or self._draw.random() < exp((now - cost) / heat):
                return cost
        for t, cut, places in before:
            restore(layout, t, cut, places)
        return now

    def _pick(self) -> list[int]:
        """Some tables, at least one of a rank in excess, in the order they are put back: roughly the largest first."""
        layout, draw = self.layout, self._draw
        slow = np.flatnonzero(layout.ms > self._target)
        count = int(draw.integers(2, MOST + 1))
        tables = {int(draw.choice(on_rank(layout, int(draw.choice(slow)))))} if len(slow) else set()
        if draw.random() < 0.15:
            tables.update(self._on_node(int(draw.integers(layout.world // layout.local))))
        while len(tables) < min(count, len(layout.places)):
            if draw.random() < 0.3:
                tables.add(int(draw.integers(len(layout.places))))
            else:
                tables.add(int(draw.choice(on_rank(layout, int(draw.integers(layout.world))))))
        size = {t: layout.of(t).cost * draw.uniform(0.5, 1.5) for t in sorted(tables)}
        return sorted(size, key=lambda t: -size[t])

    def _on_node(self, node: int) -> list[int]:
        """Tables of the ranks of a node, but for those on every rank."""
        layout, found = self.layout, []
        for t, places in enumerate(layout.places):
            place = layout.of(t).place
            if place != ALL and any((p if place == NODE else p // layout.local) == node for p in places):
                found.append(t)
        return found

    def _insert(self, table: int) -> bool:
        """Put a table back with the cut that costs least where it fits best."""
        layout = self.layout
        ranks = np.argsort(layout.ms)[::-1]  # the fullest first
        room = (self._target - layout.ms)[ranks]
        slack = room.tolist()
        nodes = (self._target - layout.ms).reshape(-1, layout.local)
        found = []
        kind = self._kind[table]
        for number, cut in enumerate(layout.menu.cuts[kind]):
            excess, places = _fit(cut, slack, ranks, nodes)
            cost = excess + float(self._waste[kind, number])
            found.append((cost * self._draw.uniform(1.0, 1.05), number, places))
        for _, number, places in sorted(found, key=lambda f: f[0]):
            if self._put_at(table, number, places) or layout.put(table, number):
                return True
        return False

    def _put_at(self, table: int, number: int, places: list[int]) -> bool:
        layout = self.layout
        layout.cut[table] = number
        cut = layout.of(table)
        need = np.array([[cut.hbm], [cut.ddr]])
        for place in places:
            if (layout.held[:, layout.span(cut, place)] + need > layout.limit).any():
                layout.remove(table)
                return False
            layout.add(table, place)
        return True


def _fit(cut: Cut, slack: list[float], ranks: NDArray[np.int64], nodes: NDArray[np.float64]) -> tuple[float, list[int]]:
    """(milliseconds in excess, places) of the parts where they leave least room, or exceed least; `slack` is of `ranks`, ascending."""
    size = cut.cost
    if cut.place == ALL:
        return float(np.maximum(size - nodes, 0.0).sum() - np.maximum(-nodes, 0.0).sum()), [0]
    if cut.place == NODE:
        excess = (np.maximum(size - nodes, 0.0) - np.maximum(-nodes, 0.0)).sum(1)
        chosen = np.lexsort((nodes.sum(1), np.round(excess, 9)))[: cut.parts]
        return float(excess[chosen].sum()), chosen.tolist()
    first = min(bisect_left(slack, size), len(slack) - cut.parts)
    excess = sum(max(0.0, size - s) - max(0.0, -s) for s in slack[first : first + cut.parts])
    return excess, ranks[first : first + cut.parts].tolist()


def on_rank(layout: Layout, rank: int) -> list[int]:
    """The tables that load a rank."""
    node = rank // layout.local
    here = {RANK: rank, NODE: node, ALL: 0}
    return [t for t, places in enumerate(layout.places) if here[layout.of(t).place] in places]


def restore(layout: Layout, table: int, cut: int, places: list[int]) -> None:
    """Give a table the cut and places it had."""
    if layout.cut[table] >= 0:
        layout.remove(table)
    layout.cut[table] = cut
    for place in places:
        layout.add(table, place)
