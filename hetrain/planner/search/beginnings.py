"""What ranks are filled on top of: what choices of cuts put on all ranks and on nodes, by the time it leaves."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetrain.planner.cut import RANK
from hetrain.planner.search.arrays import Ints
from hetrain.planner.search.menu import Menu
from hetrain.planner.search.place import NONE, Layout
from hetrain.planner.search.relax import Limit, relax


def beginnings(menu: Menu, choices: Sequence[Ints], most: float) -> list[Layout]:
    """Layouts of those tables alone which a choice [tables] puts on all ranks or on nodes, of each such set one.

    Only where the mean rank can stay within `most` ms once the other tables are there; the fastest mean first.
    """
    on_ranks = parts_on_ranks(menu)
    fitting = on_ranks & (menu.chunk <= 1) & (menu.largest <= most)
    seen: set[bytes] = set()
    found = []
    for number, choice in enumerate(choices):
        beside = np.where(on_ranks[menu.kind_of, choice], NONE, choice)
        layout = Layout(menu)
        if beside.tobytes() in seen or not all(
            layout.put(table, int(beside[table])) for table in np.flatnonzero(beside != NONE).tolist()
        ):
            continue
        seen.add(beside.tobytes())
        mean = least_mean(layout, fitting)
        if mean <= most and layout.slowest < most:
            found.append((mean, number, layout))
    return [layout for _, _, layout in sorted(found, key=lambda way: way[:2])]


def parts_on_ranks(menu: Menu) -> NDArray[np.bool_]:
    """Which cuts [C, O] have parts that lie on single ranks."""
    on_ranks: NDArray[np.bool_] = np.zeros(menu.there.shape, dtype=np.bool_)
    for kind, cuts in enumerate(menu.cuts):
        on_ranks[kind, : len(cuts)] = [cut.place == RANK for cut in cuts]
    return on_ranks


def least_mean(layout: Layout, cuts: NDArray[np.bool_]) -> float:
    """A bound on what the mean rank takes once the tables that have no place yet are there, in `cuts` [C, O]."""
    menu = layout.menu
    need = np.bincount(menu.kind_of[layout.cut == NONE], minlength=len(menu.cuts))
    values = np.where(cuts, menu.largest * menu.ranks + menu.everywhere, np.inf)
    values[need == 0] = 0.0
    left = layout.limit[:, 0] - layout.held.mean(1)
    limits = (Limit(menu.hbm, float(left[0])), Limit(menu.ddr, float(left[1])))
    return float(layout.ms.mean()) + relax(values, limits, need).value
