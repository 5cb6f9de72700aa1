"""The search where sharding types have a price of their own: a few tables may not be worth an exchange more.

What a type costs does not belong to any table, so the search and its bound leave it out. Here whole plans are compared
with it: the one found, those of one sharding type less, and those of a single one, as long as that gains.
"""

from hetrain.planner.search.bound import Bound, lower_bound
from hetrain.planner.search.hierarchical import search
from hetrain.planner.search.menu import Menu
from hetrain.planner.search.place import Layout

WORTH = 0.002  # of the slowest rank's time: less is not searched for


def search_types(menu: Menu, effort: float = 1.0) -> tuple[Layout | None, Bound]:
    """The best layout found, sharding types counted, and the bound on all of them without what types cost."""
    found, bound = search(menu, effort)
    better = found
    while better is not None:
        found = better
        better = _improved(menu, found, effort)
    return found, bound


def _improved(menu: Menu, found: Layout, effort: float) -> Layout | None:
    """A better layout of other sharding types; None where there is none, or nothing to gain."""
    used, best, total = found.kinds, None, _total(found)
    if found.types_ms - menu.least_types_ms <= WORTH * found.slowest:
        return None
    others = {used - {kind} for kind in used} | {frozenset([kind]) for kind in menu.kinds}
    for kinds in sorted(others - {used, frozenset()}, key=sorted):
        some = menu.of_kinds(kinds)
        if some is None or lower_bound(some).ms + some.least_types_ms >= total:
            continue
        layout, _ = search(some, effort)
        if layout is not None and _total(layout) < total:
            best, total = layout, _total(layout)
    return best


def _total(layout: Layout) -> float:
    return layout.slowest + layout.types_ms
