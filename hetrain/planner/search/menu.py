"""What every table may become, as arrays: tables that are alike share one row."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetrain.errors import ConfigError
from hetrain.planner.cluster import Cluster
from hetrain.planner.cut import ALL, Cut
from hetrain.planner.options import Constraint, Options
from hetrain.planner.search.arrays import Floats, Ints
from hetrain.planner.search.strips import Prices, Strips, price_strips
from hetrain.planner.workload import TableLoad

MANY = 200  # kinds of tables: so many parts are packed nearly as well as the mean says, without unequal strips


@dataclass(frozen=True)
class Menu:
    """Kinds of tables [C] and their cuts [C, O]; `there` says which are, as kinds have fewer than O cuts."""

    loads: tuple[TableLoad, ...]
    kind_of: Ints  # [tables] row of the arrays
    copies: Ints  # [C] tables of the kind
    cuts: tuple[tuple[Cut, ...], ...]  # [C][<= O]
    there: NDArray[np.bool_]  # [C, O]
    ranks: Floats  # [C, O] share of the ranks that the parts of a cut load, of those not on every rank
    everywhere: Floats  # [C, O] ms that it adds to every rank
    largest: Floats  # [C, O] ms of its largest part that is not on every rank
    chunk: Floats  # [C, O] share of a rank's memory that a part takes where it lies
    hbm: Floats  # [C, O] bytes that it adds to the mean rank
    ddr: Floats
    cluster: Cluster
    strips: tuple[tuple[Strips, ...], ...]  # [C] of unequal widths, of each tier, where columns may be cut freely

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Sharding types that some table may have."""
        return frozenset(cut.kind for cuts in self.cuts for cut in cuts)

    @cached_property
    def least_types_ms(self) -> float:
        """What every plan spends on the sharding types that it uses, at least."""
        return self.cluster.piece_costs.least_types_ms(self.kinds)

    def of_kinds(self, kinds: Container[str]) -> "Menu | None":
        """With cuts of these sharding types alone; None where a table has no other."""
        cuts = tuple(tuple(cut for cut in row if cut.kind in kinds) for row in self.cuts)
        if not all(cuts):
            return None
        there, arrays = _arrays([[(cut, float(cut.parts)) for cut in row] for row in cuts], self.cluster)
        strips = self.strips if "column_wise" in kinds else ((),) * len(cuts)
        return Menu(self.loads, self.kind_of, self.copies, cuts, there, *arrays, self.cluster, strips)


def make_menu(loads: Sequence[TableLoad], cluster: Cluster, prices: Prices, options: Options) -> Menu:
    """Price every allowed cut of every kind of table; raises ConfigError where a table has none."""
    kinds: dict[object, int] = {}
    kind_of, cuts, copies, first = [], [], [], []
    for load in loads:
        rule = options.constraints.get(load.table.name, Constraint())
        table = load.table
        key = (table.rows, table.dim, load.poolings, load.element_bytes, load.state_bytes_per_row, load.skew, rule)
        if key not in kinds:
            kinds[key] = len(kinds)
            cuts.append(tuple(_allowed(load, rule, prices, options, cluster.world_size)))
            copies.append(0)
            first.append((load, rule))
        kind_of.append(kinds[key])
        copies[kinds[key]] += 1
    strips: list[tuple[Strips, ...]] = [()] * len(cuts)
    if len(cuts) <= MANY and cluster.world_size > 1:
        strips = [
            _strips(load, row, prices) if rule.columns is None else ()
            for (load, rule), row in zip(first, cuts, strict=True)
        ]
    ways = [[(cut, float(cut.parts)) for cut in row] for row in cuts]
    there, (taken, everywhere, largest, chunk, hbm, ddr) = _arrays(ways, cluster)
    arrays = (taken, everywhere, largest, chunk, hbm, ddr)
    kinds_of, numbers = np.array(kind_of), np.array(copies)
    return Menu(tuple(loads), kinds_of, numbers, tuple(cuts), there, *arrays, cluster, tuple(strips))


def with_strips(menu: Menu) -> Menu:
    """The menu with arrays that go on with strips of each width, as if a table were cut in dim / width of them.

    Strips of unequal widths, whose widths add up to the table's, are a mixture of these: whatever adds up over parts is
    for them no less than for the best of these. So what holds for all cuts of this menu holds for unequal strips.
    """
    ways = [[(cut, float(cut.parts)) for cut in row] for row in menu.cuts]
    for row, tiers in zip(ways, menu.strips, strict=True):
        row += [(cut, of.groups / (k + 1)) for of in tiers for k, cut in enumerate(of.widths)]
    there, (ranks, everywhere, largest, chunk, hbm, ddr) = _arrays(ways, menu.cluster)
    return replace(
        menu, there=there, ranks=ranks, everywhere=everywhere, largest=largest, chunk=chunk, hbm=hbm, ddr=ddr
    )


def _strips(load: TableLoad, cuts: Sequence[Cut], prices: Prices) -> tuple[Strips, ...]:
    tiers = dict.fromkeys(cut.tier for cut in cuts if cut.kind == "column_wise")
    return tuple(price_strips(load, tier, prices) for tier in tiers)


def kinds_of(load: TableLoad, options: Options) -> tuple[str, ...]:
    """The sharding types that the user leaves for a table."""
    rule = options.constraints.get(load.table.name, Constraint())
    if rule.sharding_types:
        return tuple(kind for kind in options.sharding_types if kind in rule.sharding_types)
    return _by_threshold(load, options.sharding_types, options)


def _allowed(load: TableLoad, rule: Constraint, prices: Prices, options: Options, ranks: int) -> list[Cut]:
    kinds = kinds_of(load, options)
    tiers = tuple(t for t in options.tiers if t in (rule.tiers or options.tiers))
    _check_common(load, "sharding_types", rule.sharding_types, options.sharding_types)
    _check_common(load, "tiers", rule.tiers, options.tiers)
    if ranks == 1:
        kinds = tuple(k for k in kinds if k == "table_wise") or kinds
    found = prices(load, kinds, tiers, rule.columns)
    if (
        not found and not rule.sharding_types
    ):  # too narrow or too short for what a threshold wants: it is cut no further
        kinds = kinds_of(load, replace(options, column_slice_threshold=None, row_slice_threshold=None))
        found = prices(load, kinds, tiers, rule.columns)
    if not found:
        raise ConfigError(
            f"planner: table {load.table.name!r} ({load.table.rows:,} x {load.table.dim}) can be cut by none of "
            f"{list(kinds)} in the memories {list(tiers)}: (1) add table_wise to planner.sharding_types, (2) allow "
            "more in planner.constraints or planner.tiers, where the table has a rule there"
        )
    return found


def _check_common(load: TableLoad, key: str, ruled: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise ConfigError where a table's rule leaves nothing of what all tables are left."""
    if ruled and not set(ruled) & set(allowed):
        name, mine, all_ = load.table.name, ",".join(ruled), ",".join(allowed)
        raise ConfigError(
            f"planner.constraints: {key}=[{mine}] for table {name!r} has nothing of planner.{key}, here [{all_}]: (1) "
            f"take {key} out of the rule for {name!r}, or (2) name in it some of [{all_}]"
        )


def _by_threshold(load: TableLoad, kinds: tuple[str, ...], options: Options) -> tuple[str, ...]:
    """What the user's thresholds leave; a threshold whose sharding types are not allowed says nothing."""
    small, wide, tall = (
        options.data_parallel_threshold,
        options.column_slice_threshold,
        options.row_slice_threshold,
    )
    wanted: set[str] = set()
    if small is not None:
        if load.elements <= small:
            wanted = {"data_parallel"}
        else:
            kinds = tuple(k for k in kinds if k != "data_parallel") or kinds
    elif not options.data_parallel_by_price:
        kinds = tuple(k for k in kinds if k != "data_parallel") or kinds
    if not wanted and tall is not None and load.elements >= tall:
        wanted = {"row_wise", "table_row_wise", "grid_shard"}
    if not wanted and wide is not None and load.elements > wide:
        wanted = {"column_wise", "table_column_wise", "grid_shard"}
    return tuple(k for k in kinds if k in wanted) or kinds


def _arrays(
    ways: Sequence[Sequence[tuple[Cut, float]]], cluster: Cluster
) -> tuple[NDArray[np.bool_], tuple[Floats, Floats, Floats, Floats, Floats, Floats]]:
    """Which there are, and the other arrays [C, O] of a menu in their order, of cuts with their numbers of parts."""
    ranks, local = cluster.world_size, cluster.ranks_per_node
    shape = (len(ways), max(map(len, ways)))
    taken, everywhere, largest, chunk, hbm, ddr = (np.zeros(shape) for _ in range(6))
    there = np.arange(shape[1]) < np.array([len(row) for row in ways])[:, None]
    for c, row in enumerate(ways):
        for o, (cut, parts) in enumerate(row):
            taken[c, o] = 0.0 if cut.place == ALL else cut.loaded_ranks(ranks, local) / ranks * parts / cut.parts
            everywhere[c, o] = parts * cut.shared_ms + (cut.cost if cut.place == ALL else 0.0)
            largest[c, o] = 0.0 if cut.place == ALL else cut.cost
            chunk[c, o] = max(cut.hbm / max(1, cluster.hbm_bytes), cut.ddr / max(1, cluster.ddr_bytes))
            hbm[c, o] = cut.hbm_total * parts / cut.parts / ranks
            ddr[c, o] = cut.ddr_total * parts / cut.parts / ranks
    return there, (taken, everywhere, largest, chunk, hbm, ddr)
