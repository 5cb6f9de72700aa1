"""The relaxed packing problem: functions of parts that add up to at most 1 on a rank, tables cut one by one.

A dual feasible function of a part's share of a rank's time never adds up to more than 1 over the parts of a rank. Its
least sum over all parts, within limits on the sums of what all ranks do and of memory, refutes a slowest rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.search.arrays import Floats
from hetrain.planner.search.menu import MANY, Menu
from hetrain.planner.search.relax import Limit, Relaxed, relax

MIXED = 2e-3  # of all time: differences between the cuts of a single table that are worth telling them apart
Share = Callable[[Floats], Floats]


def mean(x: Floats) -> Floats:
    """A part's share itself."""
    return x


def shares() -> Iterator[tuple[str, Share]]:
    """Dual feasible functions of a part's share of a rank: they add up to at most 1 where the shares do."""
    yield "the mean over the ranks", mean
    for k in range(1, 13):
        yield f"at most {k} parts above 1/{k + 1} of a rank's time fit on it", _rounded(k)
    for least in (0.1, 0.2, 0.3, 0.4):
        yield (
            f"parts above {1 - least:.0%} of a rank's time leave no room for others above {least:.0%}",
            _cleared(least),
        )


def _rounded(k: int) -> Share:
    def share(x: Floats) -> Floats:
        scaled = x * (k + 1)
        whole = np.round(scaled)
        exact = np.abs(scaled - whole) < 1e-9
        return np.where(exact, x, np.floor(scaled) / k)

    return share


def _cleared(least: float) -> Share:
    def share(x: Floats) -> Floats:
        return np.where(x > 1 - least, 1.0, np.where(x < least, 0.0, x))

    return share


class Packing:
    """The relaxed packing problem of one menu."""

    def __init__(self, menu: Menu) -> None:
        self.menu = menu
        cluster = menu.cluster
        self.memory = (Limit(menu.hbm, float(cluster.hbm_bytes)), Limit(menu.ddr, float(cluster.ddr_bytes)))
        self.least_everywhere = float(menu.copies @ allowed(menu.everywhere, menu).min(1))
        self.shares = list(shares())[: 1 if len(menu.cuts) > MANY else None]

    def pack(self, share: Share, slowest: float, low: float, high: float) -> Relaxed:
        """Least share of the ranks taken by parts in `slowest` ms, where every rank spends `low` to `high` on all."""
        menu = self.menu
        capacity = max(slowest - low, 1e-12)
        part = menu.largest / capacity
        values = (menu.largest * menu.ranks + menu.everywhere) / slowest if share is mean else share(part) * menu.ranks
        values[~menu.there | (part > 1 + 1e-12) | (menu.chunk > 1)] = np.inf
        return relax(values, (Limit(menu.everywhere, high), *self.memory), menu.copies)

    def price(self, values: Floats) -> Relaxed:
        """The least sum of `values` [C, O] within the memory of the mean rank."""
        return relax(values, self.memory, self.menu.copies)

    def prices(self, slowest: float) -> tuple[float, ...]:
        """Of device and host memory, in ranks of `slowest` ms."""
        return self.pack(mean, slowest, self.least_everywhere, slowest).prices[1:]

    def halves(self, slowest: float, low: float, high: float) -> tuple["Packing", ...]:
        """Lean and fat cuts of a table alone of its kind, of which the relaxed problem mixes some, and its strips.

        A plan takes one of them, or strips; what is refuted for each is refuted. Empty: no table's cuts differ enough.
        """
        menu, relaxed = self.menu, self.pack(mean, slowest, low, high)
        worth = relaxed.prices[1] * menu.hbm + relaxed.prices[2] * menu.ddr  # of the memory, as a share of all time
        whole = np.arange(menu.there.shape[1]) < np.array([len(row) for row in menu.cuts])[:, None]
        good = np.isfinite(relaxed.price) & (relaxed.price <= relaxed.price.min(1, keepdims=True) + MIXED)
        good &= (menu.copies == 1)[:, None] & whole
        least, most = np.where(good, worth, np.inf).min(1), np.where(good, worth, -np.inf).max(1)
        kind = int((most - least).argmax())
        if not most[kind] - least[kind] > MIXED:
            return ()
        lean = worth[kind] <= (least[kind] + most[kind]) / 2
        return tuple(self._only(kind, cuts) for cuts in (lean & whole[kind], ~lean & whole[kind], ~whole[kind]))

    def _only(self, kind: int, cuts: NDArray[np.bool_]) -> "Packing":
        there = self.menu.there.copy()
        there[kind] &= cuts
        return Packing(replace(self.menu, there=there))

    def refuted(self, slowest: float, low: float, high: float) -> str:
        """Why no plan of `slowest` ms spends `low` to `high` on what all ranks do; empty where none is found."""
        for at, (reason, share) in enumerate(self.shares):
            value = self.pack(share, slowest, low, high).value
            if not np.isfinite(value):
                return "one part of a table that no cut allowed makes cheaper"
            if value > 1 + 1e-9:
                self.shares.insert(0, self.shares.pop(at))  # it will most likely say so of the next one, too
                return reason
        return ""


def allowed(values: Floats, menu: Menu) -> Floats:
    """`values` [C, O], infinite where there is no cut."""
    return np.where(menu.there, values, np.inf)
