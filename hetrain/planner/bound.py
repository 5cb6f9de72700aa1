"""A lower bound on the slowest rank of any plan, memory included.

Suppose a plan with a slowest rank of T milliseconds, of which every rank spends A on what all ranks do. Its other parts
are packed into `capacity` = T - A of each rank. For a function f of a part's share of the capacity that never adds up
to more than 1 on a rank, the sum of f over all parts is at most the number of ranks. With f the share itself this says
that the mean is not above T; other such functions (dual feasible functions, as bin packing knows them) also see that
two parts of more than half do not fit together. Where the least sum, under limits on A and on the memory of the mean
rank, is larger for every A, there is no such plan: T is a bound.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.menu import MANY, Floats, Menu, with_strips
from hetrain.planner.patterns import Patterns
from hetrain.planner.relax import Limit, Relaxed, relax

TIGHT = 1e-3  # relative: how finely T and A are searched
MOST_SPLITS = 400  # of the interval of A and of the cuts of single tables
WIDEST, FINEST = 1 / 24, 1 / 400  # of the time: intervals of A that patterns are asked about
NEAR = 2e-3  # relative: how near a plan need be to the bound that patterns find
SOLVED = 250_000  # rows of linear programs for one bound
DEPTH = 3  # halvings of the cuts of single tables
MIXED = 2e-3  # of all time: differences between the cuts of a single table that are worth telling them apart
Share = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Bound:
    """`ms`: no plan is faster; `reason` in words; `feasible`: whether memory could suffice at all."""

    ms: float
    reason: str
    feasible: bool


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
        self.least_everywhere = float(menu.copies @ _allowed(menu.everywhere, menu).min(1))
        self._patterns: Patterns | None = None
        self.shares = list(shares())[: 1 if len(menu.cuts) > MANY else None]

    def pack(self, share: Share, slowest: float, low: float, high: float) -> Relaxed:
        """Least share of the ranks taken by parts in `slowest` ms, where every rank spends `low` to `high` on all."""
        menu = self.menu
        capacity = max(slowest - low, 1e-12)
        part = menu.largest / capacity
        values = (menu.largest * menu.ranks + menu.everywhere) / slowest if share is mean else share(part) * menu.ranks
        values[~menu.there | (part > 1 + 1e-12)] = np.inf
        return relax(values, (Limit(menu.everywhere, high), *self.memory), menu.copies)

    def price(self, values: Floats) -> Relaxed:
        """The least sum of `values` [C, O] within the memory of the mean rank."""
        return relax(values, self.memory, self.menu.copies)

    def refuted_by_patterns(self, slowest: float, low: float, high: float, solved: list[int]) -> bool:
        """The same question, of the configuration linear program; adds the rows of those solved to the count."""
        if self._patterns is None:
            self._patterns = Patterns(self.menu)
        before = self._patterns.rows
        refuted = self._patterns.refutes(slowest, low, high)
        solved[0] += self._patterns.rows - before
        return refuted

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


def _allowed(values: Floats, menu: Menu) -> Floats:
    return np.where(menu.there, values, np.inf)


def lower_bound(menu: Menu) -> Bound:
    """The largest T found that no plan can stay below, of equal parts or of strips of any widths."""
    menu = with_strips(menu)
    if lack := memory_lack(menu):
        return Bound(float("inf"), lack, False)
    packing = Packing(menu)
    spent = np.where(menu.there, menu.largest * menu.ranks + menu.everywhere, np.inf)
    low, reason, step = max(packing.price(spent).value, 1e-9), packing.shares[0][0], 0.01
    high = low * (1 + step)
    while why := _impossible(packing, high):
        step *= 2
        low, high, reason = high, high * (1 + step), why
    while high - low > TIGHT * high:
        middle = (low + high) / 2
        if why := _impossible(packing, middle):
            low, reason = middle, why
        else:
            high = middle
    return Bound(low, reason + _binding(packing, low), True)


def tightened(menu: Menu, bound: Bound, slowest: float) -> Bound:
    """A larger bound, if the configuration linear program finds one, for a plan of `slowest` ms that is not near it."""
    packing = Packing(with_strips(menu))
    low, high, reason, solved = bound.ms, slowest, bound.reason, [0]
    while high - low > NEAR * high and solved[0] < SOLVED:
        middle = (low + high) / 2
        if why := _impossible(packing, middle, solved):
            low, reason = middle, why + _binding(packing, middle)
        else:
            high = middle
    return Bound(low, reason, True)


def _impossible(packing: Packing, slowest: float, solved: list[int] | None = None) -> str:
    """Why no plan has a slowest rank of `slowest` ms, or empty.

    What is not refuted is halved: the cuts of a table that the relaxed problem mixes, else the interval of A. With
    `solved`, the rows of linear programs so far, patterns are asked before an interval of A is halved.
    """
    reason = ""
    finest = TIGHT if solved is None else FINEST
    waiting = [(packing.least_everywhere, slowest, packing, 0)]
    for _ in range(MOST_SPLITS):
        low, high, these, depth = waiting.pop()
        if low >= slowest:
            reason = reason or "what every rank does"
        elif why := these.refuted(slowest, low, high):
            reason = reason or why
        elif depth < DEPTH and (halves := these.halves(slowest, low, high)):
            waiting += [(low, high, half, depth + 1) for half in halves]
        elif (
            solved is not None
            and high - low < WIDEST * slowest
            and these.refuted_by_patterns(slowest, low, high, solved)
        ):
            reason = "no patterns of parts fill the ranks"
        elif high - low < finest * slowest or (solved is not None and solved[0] >= SOLVED):
            return ""
        else:
            middle = (low + high) / 2
            waiting += [(middle, high, these, depth), (low, middle, these, depth)]
        if not waiting:
            return reason
    return ""


def _binding(packing: Packing, slowest: float) -> str:
    prices = packing.pack(mean, slowest, packing.least_everywhere, slowest).prices
    tight = [name for name, price in zip(("devices", "hosts"), prices[1:], strict=True) if price > 0]
    return f", within the memory of the {' and '.join(tight)}" if tight else ""


def memory_lack(menu: Menu) -> str:
    """Why not even the leanest cuts fit together, or an empty string."""
    cluster = menu.cluster
    for name, used, there in (("hbm", menu.hbm, cluster.hbm_bytes), ("ddr", menu.ddr, cluster.ddr_bytes)):
        least = float(menu.copies @ _allowed(used, menu).min(1))
        if least > there:
            return f"the leanest cuts need {least / 2**30:.2f} GiB of {name} on the mean rank of {there / 2**30:.2f}"
    return ""
