"""The search where sharding types have a price of their own: a few tables may not be worth an exchange more.

What a type costs does not belong to any table, so the search and its bound leave it out. Here whole plans are compared
with it: the one found, and those of one sharding type less, as long as that gains.
"""

from collections.abc import Iterator

from hetrain.planner.bound import Bound
from hetrain.planner.hierarchical import search
from hetrain.planner.menu import Menu
from hetrain.planner.place import Layout

WORTH = 0.002  # of the slowest rank's time: types that cost less are not searched without


def search_types(menu: Menu) -> tuple[Layout | None, Bound]:
    """The best layout found, sharding types counted, and the bound on all of them without what types cost."""
    found, bound = search(menu)
    while found is not None:
        better = min(_with_fewer(found), key=_total, default=found)
        if _total(better) >= _total(found):
            break
        found = better
    return found, bound


def _total(layout: Layout) -> float:
    return layout.slowest + layout.types_ms


def _with_fewer(layout: Layout) -> Iterator[Layout]:
    """The best layouts with all sharding types in use but one, for each that costs enough."""
    costs, used = layout.menu.cluster.piece_costs, layout.kinds
    for kind in sorted(used):
        menu = layout.menu.of_kinds(used - {kind}) if costs.types_ms([kind]) > WORTH * layout.slowest else None
        fewer = None if menu is None else search(menu)[0]
        if fewer is not None:
            yield fewer
