"""Local search by ruin and recreation: a few tables are taken off and put back, each with the cut and places that suit.

A target a little below the best slowest rank is packed for: what counts is by how much ranks exceed it, then the sum
of all ranks' milliseconds, as whatever is wasted must be packed too. Once nothing exceeds it, the target is lowered.
"""

from math import exp

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.cut import ALL, NODE, RANK, Cut
from hetrain.planner.menu import Floats
from hetrain.planner.place import Layout

MOST = 6  # tables taken off at a time
STEP = 0.003  # by which the target is below the best
WASTE = 0.02  # of a millisecond spent, against one in excess
NOISE = 0.03  # of the cost of a cut, so that not the same is tried again
WARM, COLD = 0.02, 0.0005  # excess, as a share of the target, that is readily accepted at first and at last


class Rebuilder:
    """Improves a layout by rebuilding parts of it; repeatable, as its draws come from a fixed seed."""

    def __init__(self, layout: Layout, spent: Floats, seed: int = 0) -> None:
        self.layout, self._draw = layout, np.random.default_rng(seed)
        self._target = layout.slowest
        self._snug = 0.5
        self._waste = spent * WASTE
        self._kind = layout.menu.kind_of.tolist()

    def build(self, target: float, memory: float = 0.0, snug: bool = True) -> bool:
        """Put all tables of an empty layout in, the dearest first, for a slowest rank of `target` ms; False: no room.

        `memory` (0 to 1) is the weight of bytes in what is dear.
        """
        menu = self.layout.menu
        self._target = target
        time = np.where(menu.there, self._waste, np.inf).min(1) / (WASTE * target)
        size = sum(
            np.where(menu.there, used, np.inf).min(1) * self.layout.world / most
            for used, most in ((menu.hbm, menu.cluster.hbm_bytes), (menu.ddr, menu.cluster.ddr_bytes))
            if most
        )
        dear = ((1 - memory) * time + memory * size)[menu.kind_of]
        return all(self._insert(int(t), snug) for t in np.argsort(-dear, kind="stable"))

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
            self.layout.restore(table, cut, places)

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
        if all(self._insert(t, self._draw.random() < self._snug, NOISE) for t in tables):
            cost = self._cost()
            if cost <= now or self._draw.random() < exp((now - cost) / heat):
                return cost
        for t, cut, places in before:
            layout.restore(t, cut, places)
        return now

    def _pick(self) -> list[int]:
        """Some tables, at least one of a rank in excess, in the order they are put back: roughly the largest first."""
        layout, draw = self.layout, self._draw
        slow = np.flatnonzero(layout.ms > self._target)
        count = int(draw.integers(2, MOST + 1))
        tables = {self._of(int(draw.choice(slow)))} if len(slow) else set()
        if draw.random() < 0.15:
            tables.update(self._on_node(int(draw.integers(layout.world // layout.local))))
        while len(tables) < min(count, len(layout.places)):
            rank = -1 if draw.random() < 0.3 else int(draw.integers(layout.world))
            tables.add(self._of(rank))
        size = {t: layout.of(t).cost * draw.uniform(0.5, 1.5) for t in sorted(tables)}
        return sorted(size, key=lambda t: -size[t])

    def _of(self, rank: int) -> int:
        """A table of a rank; any, where it has none or `rank` is -1."""
        here = [] if rank < 0 else on_rank(self.layout, rank)
        return int(self._draw.choice(here)) if here else int(self._draw.integers(len(self.layout.places)))

    def _on_node(self, node: int) -> list[int]:
        """Tables of the ranks of a node, but for those on every rank."""
        layout, found = self.layout, []
        for t, places in enumerate(layout.places):
            place = layout.of(t).place
            if place != ALL and any((p if place == NODE else p // layout.local) == node for p in places):
                found.append(t)
        return found

    def _insert(self, table: int, snug: bool, noise: float = 0.0) -> bool:
        """Put a table back with the cut that costs least where it fits best; False: memory suffices for none."""
        layout = self.layout
        order = np.argsort(layout.ms)[::-1]  # the fullest first
        slack = self._target - layout.ms
        room = layout.limit - layout.held
        least = room.min(1)
        kind = self._kind[table]
        best, best_cut, best_places = np.inf, -1, [0]
        for number, cut in enumerate(layout.menu.cuts[kind]):
            waste = float(self._waste[kind, number])
            if waste >= best:
                continue
            tight = cut.hbm > least[0] or cut.ddr > least[1]
            full = ((room[0] < cut.hbm) | (room[1] < cut.ddr)) if tight else None
            shared = cut.parts * cut.shared_ms
            excess, places = _fit(cut, slack - shared, order, layout.local, full, snug)
            if shared:
                excess += float(_excess(slack, shared).sum())
            cost = excess + waste
            if noise:
                cost *= self._draw.uniform(1.0, 1.0 + noise)
            if cost < best:
                best, best_cut, best_places = cost, number, places
        if best_cut < 0:
            return False
        layout.cut[table] = best_cut
        for place in best_places:
            layout.add(table, place)
        return True


def _fit(
    cut: Cut, slack: Floats, order: NDArray[np.int64], local: int, full: NDArray[np.bool_] | None, snug: bool
) -> tuple[float, list[int]]:
    """(milliseconds in excess, places) of the parts where they leave least room (`snug`) or most, or exceed least.

    slack: [W] milliseconds left on each rank, below 0 in excess.
    order: [W] the ranks by slack, the least first.
    full: [W] ranks without memory for a part; None: all have.
    """
    size = cut.cost
    if cut.place == RANK:
        ranks = order if full is None else order[~full[order]]
        if len(ranks) < cut.parts:
            return np.inf, []
        left = slack[ranks]
        first = min(int(left.searchsorted(size)), len(ranks) - cut.parts) if snug else len(ranks) - cut.parts
        chosen = left[first : first + cut.parts]
        if chosen[0] >= size:
            return 0.0, ranks[first : first + cut.parts].tolist()
        return float(_excess(chosen, size).sum()), ranks[first : first + cut.parts].tolist()
    excess = _excess(slack, size)
    if cut.place == ALL:
        return (float(excess.sum()), [0]) if full is None or not full.any() else (np.inf, [])
    by_node = excess.reshape(-1, local).sum(1)
    if full is not None:
        by_node[full.reshape(-1, local).any(1)] = np.inf
    left = slack.reshape(-1, local).sum(1)
    chosen_nodes = np.lexsort((left if snug else -left, np.round(by_node, 9)))[: cut.parts]
    return float(by_node[chosen_nodes].sum()), chosen_nodes.tolist()


def _excess(slack: Floats, size: float) -> Floats:
    """By how much more the slack is exceeded with a part of `size` ms than without."""
    held: Floats = np.maximum(size - slack, 0.0) - np.maximum(-slack, 0.0)
    return held


def on_rank(layout: Layout, rank: int) -> list[int]:
    """The tables that load a rank."""
    node = rank // layout.local
    here = {RANK: rank, NODE: node, ALL: 0}
    return [t for t, places in enumerate(layout.places) if here[layout.of(t).place] in places]
