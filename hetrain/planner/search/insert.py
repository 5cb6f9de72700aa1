"""Putting one table into a layout: the cut that wastes least where it fits, on the ranks that suit its parts best.

What suits is the ranks with least time left that suffices (SNUG), those with most (LOOSE), or those whose time and
memory are left in the ratio in which the part needs them (ALIGNED), so that neither is used up before the other
(Panigrahy et al., Heuristics for Vector Bin Packing, 2011).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.cut import ALL, GROUP, RANK, Cut
from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.place import UNEQUAL, Layout
from hetrain.planner.search.strips import fill, widest
from hetrain.planner.search.worth import Worth

WASTE = 0.3  # the weight of a millisecond spent, against one in excess of the target
BEYOND = (0.0, 0.003, 0.02)  # of the target: how far strips of unequal widths may exceed it
SNUG, LOOSE, ALIGNED = 0, 1, 2


class Inserter:
    """Puts tables into a layout whose slowest rank should take at most `target` ms."""

    def __init__(self, layout: Layout, spent: Worth, weight: float = WASTE) -> None:
        self.layout, self.target, self.weight = layout, layout.slowest, weight
        self.waste = spent.cuts * weight
        self.scarce = spent.scarce
        self._strips = [[of * weight for of in tiers] for tiers in spent.strips]
        self._order = [np.argsort(row, kind="stable").tolist() for row in self.waste]  # the least wasteful cuts first
        self._kind = layout.menu.kind_of.tolist()
        self.wasted: Floats = np.zeros(len(self._kind))  # of each table as it lies
        for table, places in enumerate(layout.places):
            if places:
                self.wasted[table] = self._waste_of(table)

    def insert(
        self,
        table: int,
        how: int,
        noise: Callable[[], float] | None = None,
        like: int | None = None,
    ) -> bool:
        """Put a table in; False: memory suffices for no cut.

        noise: a factor on the cost of each cut, drawn anew.
        like: a cut; only this one is weighed or, if its parts lie on single ranks, those in the same memory.
        """
        layout, kind = self.layout, self._kind[table]
        slack, room = self.target - layout.ms, layout.limit - layout.held
        numbers, tier = self._order[kind], ""
        if like is not None:
            numbers, tier = self._like(kind, like)
        best, number, places = self._best_cut(kind, numbers, slack, room, how, noise)
        striped = (
            (np.inf, [], []) if like is not None and not tier else self._best_strips(kind, tier, slack, room, best)
        )
        if striped[0] < best:
            layout.put_strips(table, *striped[1:])
        elif number < 0:
            return False
        else:
            layout.cut[table] = number
            for place in places:
                layout.add(table, place)
        self.wasted[table] = self._waste_of(table)
        return True

    def _like(self, kind: int, number: int) -> tuple[list[int], str]:
        """Cuts that may stand for one, and the memory of strips that may; empty: none."""
        cuts = self.layout.menu.cuts[kind]
        if cuts[number].place != RANK:
            return [number], ""
        tier = cuts[number].tier
        same = [k for k in self._order[kind] if k < len(cuts) and (cuts[k].place, cuts[k].tier) == (RANK, tier)]
        return same, tier

    def _waste_of(self, table: int) -> float:
        """Of a table in the layout."""
        layout, kind = self.layout, self._kind[table]
        if layout.cut[table] != UNEQUAL:
            return float(self.waste[kind, layout.cut[table]])
        tiers = zip(layout.menu.strips[kind], self._strips[kind], strict=True)
        waste = next(waste for of, waste in tiers if of.tier == layout.of(table).tier)
        return sum(float(waste[part.columns // GROUP - 1]) for part in layout.parts[table])

    def _best_cut(
        self,
        kind: int,
        numbers: Sequence[int],
        slack: Floats,
        room: Ints,
        how: int,
        noise: Callable[[], float] | None,
    ) -> tuple[float, int, list[int]]:
        """(cost, number, places) of the cut that costs least; number -1: memory suffices for none."""
        layout = self.layout
        order = np.argsort(slack)
        least = room.min(1)
        shapes = _Shapes(self.layout, self.target, slack, room, self.scarce) if how == ALIGNED else None
        best: tuple[float, int, list[int]] = (np.inf, -1, [])
        for number in numbers:
            waste = float(self.waste[kind, number])
            if waste >= best[0]:
                break
            cut = layout.menu.cuts[kind][number]
            tight = cut.hbm > least[0] or cut.ddr > least[1]
            full = ((room[0] < cut.hbm) | (room[1] < cut.ddr)) if tight else None
            score = shapes.of(cut) if shapes is not None and cut.place == RANK else None
            shared = cut.parts * cut.shared_ms
            excess, places = _fit(cut, slack - shared, order, layout.local, full, how, score)
            excess += float(excess_of(slack, shared).sum()) if shared else 0.0
            cost = (excess + waste) * (noise() if noise is not None else 1.0)
            if cost < best[0]:
                best = (cost, number, places)
        return best

    def _best_strips(
        self, kind: int, tier: str, slack: Floats, room: Ints, most: float
    ) -> tuple[float, list[Cut], list[int]]:
        """(cost, strips, ranks) of the strips of unequal widths that cost least, where that is less than `most`."""
        best: tuple[float, list[Cut], list[int]] = (np.inf, [], [])
        for of, waste in zip(self.layout.menu.strips[kind], self._strips[kind], strict=True):
            if waste[-1] >= min(most, best[0]) or (tier and of.tier != tier):
                continue
            for beyond in BEYOND:
                lost, ranks, groups = fill(of, widest(of, slack + beyond * self.target, room), waste)
                if ranks:
                    cost = lost + float(excess_of(slack[ranks], of.cost[np.array(groups) - 1]).sum())
                    if cost < best[0]:
                        best = (cost, [of.widths[g - 1] for g in groups], ranks)
                    break
        return best


class _Shapes:
    """How well a part's needs are in line with what ranks have left: the cosine of time and the scarce memories."""

    def __init__(self, layout: Layout, target: float, slack: Floats, room: Ints, scarce: tuple[bool, bool]) -> None:
        self._most = [target, *(float(layout.limit[k, 0]) for k in (0, 1) if scarce[k])]
        self._scarce = scarce
        left = np.stack([np.maximum(slack, 0.0), *(room[k] for k in (0, 1) if scarce[k])])
        self._left = left / np.array(self._most)[:, None]
        self._length = np.sqrt((self._left**2).sum(0)) + 1e-12

    def of(self, cut: Cut) -> Floats:
        """[W] between 0 and 1."""
        needs = np.array(
            [cut.cost, *(used for used, scarce in zip((cut.hbm, cut.ddr), self._scarce, strict=True) if scarce)]
        )
        needs = needs / np.array(self._most)
        held: Floats = (needs @ self._left) / self._length / (np.sqrt((needs**2).sum()) + 1e-12)
        return held


def _fit(
    cut: Cut,
    slack: Floats,
    order: NDArray[np.int64],
    local: int,
    full: NDArray[np.bool_] | None,
    how: int,
    score: Floats | None,
) -> tuple[float, list[int]]:
    """(milliseconds in excess, places) of the parts where they suit, or exceed least.

    slack: [W] milliseconds left on each rank, below 0 in excess.
    order: [W] the ranks by slack, the least first.
    full: [W] ranks without memory for a part; None: all have.
    score: [W] how well a part suits each rank, for ALIGNED.
    """
    if cut.place == RANK:
        ranks = order if full is None else order[~full[order]]
        return _fit_ranks(cut, slack, ranks, how, score) if len(ranks) >= cut.parts else (np.inf, [])
    excess = excess_of(slack, cut.cost)
    if cut.place == ALL:
        return (float(excess.sum()), [0]) if full is None or not full.any() else (np.inf, [])
    by_node = excess.reshape(-1, local).sum(1)
    if full is not None:
        by_node[full.reshape(-1, local).any(1)] = np.inf
    left = slack.reshape(-1, local).sum(1)
    chosen_nodes = np.lexsort((-left if how == LOOSE else left, np.round(by_node, 9)))[: cut.parts]
    return float(by_node[chosen_nodes].sum()), chosen_nodes.tolist()


def _fit_ranks(cut: Cut, slack: Floats, ranks: Ints, how: int, score: Floats | None) -> tuple[float, list[int]]:
    """The same for parts on single ranks, of those given, by slack, which have memory."""
    left = slack[ranks]
    first = int(left.searchsorted(cut.cost))
    if score is not None and len(ranks) - first >= cut.parts:
        fitting = np.sort(ranks[first:])
        return 0.0, fitting[np.argsort(-score[fitting], kind="stable")[: cut.parts]].tolist()
    first = len(ranks) - cut.parts if how == LOOSE else min(first, len(ranks) - cut.parts)
    excess = float(excess_of(left[first : first + cut.parts], cut.cost).sum())
    return excess, ranks[first : first + cut.parts].tolist()


def excess_of(slack: Floats, size: float | Floats) -> Floats:
    """By how much more the slack is exceeded with a part of `size` ms than without."""
    held: Floats = np.maximum(size - slack, 0.0) - np.maximum(-slack, 0.0)
    return held
