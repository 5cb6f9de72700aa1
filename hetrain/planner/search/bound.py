"""A lower bound on the slowest rank of any plan, memory included.

Suppose a plan with a slowest rank of T milliseconds, of which every rank spends A on what all ranks do. Its other parts
are packed into `capacity` = T - A of each rank. For a function f of a part's share of the capacity that never adds up
to more than 1 on a rank, the sum of f over all parts is at most the number of ranks. With f the share itself this says
that the mean is not above T; other such functions (dual feasible functions, as bin packing knows them) also see that
two parts of more than half do not fit together. Where the least sum, under limits on A and on the memory of the mean
rank, is larger for every A, there is no such plan: T is a bound.
"""

from dataclasses import dataclass

import numpy as np

from hetrain.planner.search.menu import Menu, with_strips
from hetrain.planner.search.packing import Packing, allowed

TIGHT = 1e-3  # relative: how finely T and A are searched
MOST_SPLITS = 400  # of the interval of A and of the cuts of single tables
DEPTH = 3  # halvings of the cuts of single tables


@dataclass(frozen=True)
class Bound:
    """`ms`: no plan is faster; `reason` in words; `feasible`: whether memory could suffice at all."""

    ms: float
    reason: str
    feasible: bool


def lower_bound(menu: Menu) -> Bound:
    """The largest T found that no plan can stay below, of equal parts or of strips of any widths."""
    menu = with_strips(menu)
    if lack := memory_lack(menu):
        return Bound(float("inf"), lack, False)
    packing = Packing(menu)
    spent = np.where(menu.there, menu.largest * menu.ranks + menu.everywhere, np.inf)
    low, reason, step = max(packing.price(spent).value, 1e-9), packing.shares[0][0], 0.01
    if why := _impossible(packing, _most(menu)):  # time is no matter there
        return Bound(float("inf"), why + binding(packing, _most(menu)), False)
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
    return Bound(low, reason + binding(packing, low), True)


def _most(menu: Menu) -> float:
    """More than the slowest rank of any plan takes: every table in its dearest cut, all parts on one rank."""
    on_one = menu.largest * menu.ranks * menu.cluster.world_size + menu.everywhere
    return 2 * float(menu.copies @ np.where(menu.there, on_one, 0.0).max(1)) + 1e-9


def _impossible(packing: Packing, slowest: float) -> str:
    """Why no plan has a slowest rank of `slowest` ms, or empty.

    What is not refuted is halved: the cuts of a table that the relaxed problem mixes, else the interval of A.
    """
    reason = ""
    waiting = [(packing.least_everywhere, slowest, packing, 0)]
    for _ in range(MOST_SPLITS):
        low, high, these, depth = waiting.pop()
        if low >= slowest:
            reason = reason or "what every rank does"
        elif why := these.refuted(slowest, low, high):
            reason = reason or why
        elif depth < DEPTH and (halves := these.halves(slowest, low, high)):
            waiting += [(low, high, half, depth + 1) for half in halves]
        elif high - low < TIGHT * slowest:
            return ""
        else:
            middle = (low + high) / 2
            waiting += [(middle, high, these, depth), (low, middle, these, depth)]
        if not waiting:
            return reason
    return ""


def binding(packing: Packing, slowest: float) -> str:
    """Of which memory there is not enough for the cuts that would be fastest, in words, or empty."""
    prices = packing.prices(slowest)
    tight = [name for name, price in zip(("devices", "hosts"), prices, strict=True) if price > 0]
    return f", within the memory of the {' and '.join(tight)}" if tight else ""


def memory_lack(menu: Menu) -> str:
    """Why not even the leanest cuts fit together, or an empty string."""
    cluster = menu.cluster
    for name, used, there in (("hbm", menu.hbm, cluster.hbm_bytes), ("ddr", menu.ddr, cluster.ddr_bytes)):
        least = float(menu.copies @ allowed(used, menu).min(1))
        if least > there:
            return f"the leanest cuts need {least / 2**30:.2f} GiB of {name} on the mean rank of {there / 2**30:.2f}"
    if not (menu.there & (menu.chunk <= 1)).any(1).all():
        return "a part of a table does not fit a rank's memory in any cut"
    return ""
