"""Strips of columns of unequal widths: they fill what room the ranks have left, where equal parts would exceed it.

TorchRec's enumerator offers equal strips only; its estimator prices, and its kernels train, each strip by its width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hetrain.planner.cut import GROUP, MOST_STRIPS, Cut
from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.workload import TableLoad

Prices = Callable[[TableLoad, tuple[str, ...], tuple[str, ...], int | None], list[Cut]]


@dataclass(frozen=True)
class Strips:
    """Strips of a kind of table in one tier, each as a cut of one part; the k-th is 4 (k + 1) columns wide."""

    widths: tuple[Cut, ...]
    tier: str
    groups: int  # of 4 columns, of the whole table
    cost: Floats  # [groups - 1] of each
    hbm: Ints
    ddr: Ints


def price_strips(load: TableLoad, tier: str, prices: Prices) -> Strips:
    """Every width but the whole table's, priced as a table of so many columns is."""
    widths = []
    for columns in range(GROUP, load.table.dim, GROUP):
        (cut,) = prices(load.strip(columns), ("table_wise",), (tier,), None)
        widths.append(replace(cut, kind="column_wise", columns=columns))
    return Strips(
        tuple(widths),
        tier,
        load.table.dim // GROUP,
        np.array([cut.cost for cut in widths]),
        np.array([cut.hbm for cut in widths], dtype=np.int64),
        np.array([cut.ddr for cut in widths], dtype=np.int64),
    )


def widest(strips: Strips, slack: Floats, room: Ints) -> Ints:
    """Groups of columns that each rank has room for [W], from `slack` [W] ms and `room` [2, W] bytes of hbm and ddr."""
    fit = np.minimum(
        strips.cost.searchsorted(slack, "right"),
        np.minimum(strips.hbm.searchsorted(room[0], "right"), strips.ddr.searchsorted(room[1], "right")),
    )
    held: Ints = fit
    return held


def fill(strips: Strips, fit: Ints, waste: Floats) -> tuple[float, list[int], list[int]]:
    """(waste, ranks, groups) of strips that fill ranks, of any number the one that wastes least; infinite: none fits.

    fit: [W] groups that each rank has room for.
    waste: [groups - 1] of a strip of each width.

    For a number of strips, those ranks are taken which suffice with least room to spare, the last trimmed to the rest.
    """
    order = np.argsort(fit, kind="stable")
    room = fit[order]
    before = np.concatenate(([0], room.cumsum()))
    best, first, widths = np.inf, 0, room[:0]
    for count in range(2, min(MOST_STRIPS, len(fit), strips.groups) + 1):
        windows = before[count:] - before[:-count]
        at = int(windows.searchsorted(strips.groups))
        if at == len(windows):
            continue
        chosen = room[at : at + count].copy()
        if not chosen[0]:
            break
        chosen[-1] -= int(windows[at]) - strips.groups
        lost = float(waste[chosen - 1].sum())
        if lost >= best:
            break  # more and narrower strips cost more
        best, first, widths = lost, at, chosen
    return best, order[first : first + len(widths)].tolist(), widths.tolist()
