"""The hierarchical strategy: every table's cut chosen against the lower bound, placed largest first, then improved."""

from collections.abc import Sequence
from itertools import cycle, zip_longest

import numpy as np

from hetrain.planner.search.bound import Bound, lower_bound
from hetrain.planner.search.candidates import (
    FEW,
    LARGE,
    built,
    choices,
    chosen,
    largest_first,
    of_mixtures,
    shared,
    size_of,
)
from hetrain.planner.search.filled import filled
from hetrain.planner.search.improve import improve
from hetrain.planner.search.menu import Menu, with_strips
from hetrain.planner.search.packing import Packing, mean
from hetrain.planner.search.place import Layout
from hetrain.planner.search.ruin import TEMPERS, Rebuilder
from hetrain.planner.search.tighten import tightened
from hetrain.planner.search.worth import Worth, worth

GOOD = 1.002  # of the bound: the search stops
NEAR_ENOUGH = 1.01  # of the bound: it is not asked for more
WORK, LESS_WORK = 200_000, 40_000  # of making the bound larger; less of many tables, whose parts are small
WELL_FILLED = 1.03  # of the bound: layouts of filled ranks that are better need no others beside them
CROWDED = 0.75  # of a memory on the mean rank: where less is used, time alone says what fits
IMPROVED = 5  # layouts that the local search works on
ROUNDS, MOST_ROUNDS = 3, 3000  # of rebuilding, for each pair of tables and at most
EFFORT = 30_000  # tables put in, roughly, in rebuilding

Way = tuple[Layout, Worth]  # a layout, and what cuts are worth where it is rebuilt


def search(menu: Menu, effort: float = 1.0) -> tuple[Layout | None, Bound]:
    """The best layout found, None where no placing succeeds, and the bound on all of them; `effort` times the work."""
    bound = lower_bound(menu)
    if not bound.feasible:
        return None, bound
    packing, spent = _relaxed(menu, bound)
    origins = _begun(menu, packing, spent, bound.ms)
    begun = [way for ways in origins for way in ways]
    if len(menu.loads) <= LARGE and bound.ms * NEAR_ENOUGH < (slowest := _slowest(begun)) < np.inf:
        work = (WORK if len(menu.loads) <= FEW else LESS_WORK) * effort
        bound, mixtures = tightened(menu, bound, slowest, int(work))
        origins.append([(layout, spent) for layout in of_mixtures(menu, spent, mixtures)])
        if max(layout.crowded for layout, _ in begun) > CROWDED:
            origins.append(_full(menu, spent, bound.ms))
    return _improved(menu, origins, bound.ms, effort), bound


def _begun(menu: Menu, packing: Packing, spent: Worth, ms: float) -> list[list[Way]]:
    """Layouts that the bound of `ms` suggests, by where they come from; very many tables fill the ranks one by one."""
    many = len(menu.loads) > LARGE
    tried = _full(menu, spent, ms) if many else []
    if _slowest(tried) > ms * WELL_FILLED:
        tried += [(layout, spent) for layout in chosen(Packing(menu), spent, ms)]
    if not many:
        tried += built(menu, [spent, *shared(packing, spent, ms)], ms)
    if many and tried:
        return [tried]
    return [tried, [(layout, spent.without_strips()) for layout in largest_first(Packing(menu), ms)]]


def _slowest(ways: list[Way]) -> float:
    """Milliseconds of the best of the layouts; infinite where there are none."""
    return min((layout.slowest for layout, _ in ways), default=np.inf)


def _full(menu: Menu, spent: Worth, ms: float) -> list[Way]:
    """Layouts made rank by rank."""
    return [(layout, spent) for layout in filled(menu, spent, choices(Packing(menu), ms), ms)]


def fits(menu: Menu) -> bool:
    """Whether `search` finds a plan, without making it a good one; of very many tables, whether it finds one soon."""
    bound = lower_bound(menu)
    if not bound.feasible:
        return False
    packing, spent = _relaxed(menu, bound)
    if next(chosen(Packing(menu), spent, bound.ms), None) is not None:
        return True
    if next(largest_first(Packing(menu), bound.ms), None) is not None:
        return True
    if len(menu.loads) > LARGE:
        return False
    return next(built(menu, [spent, *shared(packing, spent, bound.ms)], bound.ms), None) is not None


def _relaxed(menu: Menu, bound: Bound) -> tuple[Packing, Worth]:
    """The relaxed problem at the bound, and what cuts are worth in its prices."""
    packing, ms = Packing(with_strips(menu)), max(bound.ms, 1e-9)
    return packing, worth(menu, packing.pack(mean, ms, packing.least_everywhere, ms), bound.ms)


def _improved(menu: Menu, tried: Sequence[list[Way]], ms: float, effort: float) -> Layout | None:
    """The best of the most promising layouts of each origin, rebuilt until near `ms`; None: there are none."""
    most = ms * GOOD
    sorts = [sorted(ways, key=lambda way: _promise(way[0])) for ways in tried]
    found = [way for row in zip_longest(*sorts) for way in row if way is not None]
    found = [*{round(_promise(layout) / max(ms, 1e-9), 6): (layout, allowed) for layout, allowed in found}.values()]
    count, tempers = IMPROVED if len(menu.loads) <= FEW else 2, [*TEMPERS]
    if len(menu.loads) > LARGE:
        found, count, tempers = sorted(found, key=lambda way: _promise(way[0])), 1, [TEMPERS[-1]]
    many = len(menu.loads)
    each = 5 + many / menu.cluster.world_size  # tables that a round puts in, roughly
    most_work = EFFORT * many / size_of(menu) / each / (1 if many <= FEW else count)
    rounds = int(effort * min(ROUNDS * many**2, MOST_ROUNDS, most_work))
    best = min((layout for layout, _ in found), key=lambda layout: layout.slowest, default=None)
    if best is None:
        return None
    slowest, kept = best.slowest, best.copy()
    for (layout, allowed), temper in zip(found[:count], cycle(tempers)):
        if slowest > most:
            improve(layout, most)
            Rebuilder(layout, allowed, temper).run(rounds, most)
            improve(layout, most)
            if layout.slowest < slowest:
                best, slowest, kept = layout, layout.slowest, layout.copy()
    best.restore_all(kept)
    return best


def _promise(layout: Layout) -> float:
    """What a layout is judged by before it is improved: unevenness can be mended, waste hardly."""
    return layout.slowest + 2 * float(np.sqrt(np.sqrt((layout.ms**4).mean())))
