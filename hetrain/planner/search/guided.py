"""Layouts made from the mixture of cuts that the configuration linear program ends with.

Its mixture fits the ranks but for fractions: tables of a kind are dealt out to the ways in whole numbers, and the parts
put where they leave least room, the largest first.
"""

import numpy as np

from hetrain.planner.cut import ALL, NODE, Cut
from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.insert import SNUG, Inserter
from hetrain.planner.search.menu import Menu
from hetrain.planner.search.place import UNEQUAL, Layout
from hetrain.planner.search.ways import FREE, STRIPS, Way
from hetrain.planner.search.worth import Worth


def guided(menu: Menu, spent: Worth, target: float, ways: list[Way], mixture: Floats) -> Layout | None:
    """A layout for a slowest rank of `target` ms, of `mixture` [ways] tables in each way; None: no memory."""
    chosen = _dealt(menu, ways, mixture)
    layout = Layout(menu)
    free = [t for t, way in enumerate(chosen) if way is None or way.number == FREE]
    parts: list[tuple[int, float, int, Cut]] = []  # place, cost, table, part
    for table, way in enumerate(chosen):
        if way is None or way.number == FREE:
            continue
        layout.cut[table] = UNEQUAL if way.number == STRIPS else way.number
        cut = None if way.number == STRIPS else menu.cuts[way.kind][way.number]
        held = way.strips if cut is None else (cut,) * cut.parts
        parts += [(part.place, part.cost, table, part) for part in held]
    for _, _, table, part in sorted(parts, key=lambda x: (x[0], -x[1], x[2])):
        place = _snuggest(layout, part, layout.places[table], target)
        if place < 0:
            return None
        layout.add(table, place, part)
    inserter = Inserter(layout, spent)
    inserter.target = target
    free.sort(key=lambda t: -inserter.waste[menu.kind_of[t]].min())
    return layout if all(inserter.insert(t, SNUG) for t in free) else None


def _dealt(menu: Menu, ways: list[Way], mixture: Floats) -> list[Way | None]:
    """A way for each table: whole numbers next to the mixture's, those of the largest rests rounded up."""
    chosen: list[Way | None] = [None] * len(menu.loads)
    for kind, copies in enumerate(menu.copies):
        mine = [k for k, way in enumerate(ways) if way.kind == kind]
        many = mixture[mine] * (copies / max(mixture[mine].sum(), 1e-12))
        whole: Ints = np.floor(many + 1e-6).astype(np.int64)
        for k in np.argsort(-(many - whole), kind="stable")[: max(0, int(copies - whole.sum()))]:
            whole[k] += 1
        tables = np.flatnonzero(menu.kind_of == kind).tolist()
        for k, count in zip(mine, whole, strict=True):
            for _ in range(min(int(count), len(tables))):
                chosen[tables.pop()] = ways[k]
    return chosen


def _snuggest(layout: Layout, part: Cut, taken: list[int], target: float) -> int:
    """The place with least time left that suffices, else with most, of those with memory and without the table; -1."""
    if part.place == ALL:
        return 0
    slack = target - layout.ms
    need = np.array([[part.hbm], [part.ddr]])
    full = (layout.held + need > layout.limit).any(0)
    if part.place == NODE:
        slack, full = slack.reshape(-1, layout.local).min(1), full.reshape(-1, layout.local).any(1)
    full[taken] = True
    if full.all():
        return -1
    fits = ~full & (slack >= part.cost)
    return int(np.where(fits, slack, np.inf).argmin() if fits.any() else np.where(full, -np.inf, slack).argmax())
