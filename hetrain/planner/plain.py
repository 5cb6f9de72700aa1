"""Three plain strategies, after NVIDIA Merlin's: pieces dealt out in turn, in a snake by size, or to the emptiest rank.

A table up to `data_parallel_threshold` elements is replicated; one of `row_slice_threshold` or more is cut by rows; one
above `column_slice_threshold` by columns into the fewest pieces up to it. The rest stay whole. What does not fit where
its turn is goes to the next rank that has room, and a table that fits nowhere is cut as far as it must be.
"""

from collections.abc import Iterator

import numpy as np

from hetrain.planner.cut import ALL, NODE, RANK, Cut
from hetrain.planner.options import Options
from hetrain.planner.piece import TIERS
from hetrain.planner.search.menu import Menu
from hetrain.planner.search.place import Layout


def lay_out(strategy: str, menu: Menu, options: Options) -> tuple[Layout, int]:
    """The layout, and the table that fits nowhere (-1: all do)."""
    layout, turn = Layout(menu), _Turns(strategy)
    order = list(range(len(menu.loads)))
    if strategy != "round_robin":
        order.sort(key=lambda t: -menu.loads[t].table.rows * menu.loads[t].row_bytes)
    for table in order:
        cuts = menu.cuts[menu.kind_of[table]]
        for cut in sorted(range(len(cuts)), key=lambda c: _rank_of(cuts[c], menu, table, options)):
            if _put(layout, table, cut, turn):
                break
        else:
            return layout, table
    return layout, -1


class _Turns:
    """Whose turn it is, by strategy."""

    def __init__(self, strategy: str) -> None:
        self._strategy, self._taken = strategy, {RANK: 0, NODE: 0}

    def places(self, layout: Layout, place: int) -> Iterator[int]:
        """All ranks (or nodes) in the order in which they are tried."""
        many = layout.world if place == RANK else layout.world // layout.local
        if self._strategy == "memory_optimized":
            used = (layout.held / np.maximum(layout.limit, 1)).max(0).reshape(many, -1).max(1)
            yield from np.argsort(used, kind="stable").tolist()
            return
        taken = self._taken[place]
        for k in range(taken, taken + many):
            lap, at = divmod(k, many)
            yield at if self._strategy == "round_robin" or lap % 2 == 0 else many - 1 - at

    def take(self, place: int, parts: int) -> None:
        """Count places that were given."""
        self._taken[place] += parts


def _put(layout: Layout, table: int, number: int, turn: _Turns) -> bool:
    layout.cut[table] = number
    cut = layout.of(table)
    need = np.array([[cut.hbm], [cut.ddr]])
    order = iter([0]) if cut.place == ALL else turn.places(layout, cut.place)
    for place in order:
        if place in layout.places[table] or (layout.held[:, layout.span(cut, place)] + need > layout.limit).any():
            continue
        layout.add(table, place)
        if len(layout.places[table]) == cut.parts:
            if cut.place != ALL:
                turn.take(cut.place, cut.parts)
            return True
    layout.remove(table)
    return False


def _rank_of(cut: Cut, menu: Menu, table: int, options: Options) -> tuple[int, int, int]:
    """How early a cut is tried: in the memory of the device first, as the thresholds say, then by what it cuts."""
    load = menu.loads[table]
    tier = TIERS.index(cut.tier)
    if options.column_slice_threshold is not None and "column" in cut.kind:
        width = cut.parts if cut.kind == "column_wise" else menu.cluster.ranks_per_node
        enough = load.elements / width <= options.column_slice_threshold
        return (tier, 0 if cut.kind == "column_wise" else 1, width if enough else 1000 - width)
    order = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard")
    kinds = (*order, "data_parallel")
    if options.data_parallel_threshold is not None and load.elements <= options.data_parallel_threshold:
        kinds = ("data_parallel", *order)
    return (tier, kinds.index(cut.kind), cut.parts)
