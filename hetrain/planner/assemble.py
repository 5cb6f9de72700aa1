"""A layout as a plan with its cost: pieces, what every rank holds and takes, what makes the slowest slow."""

from collections import Counter

import numpy as np

from hetrain.planner.bottleneck import TableHere, bottleneck
from hetrain.planner.cut import ALL, NODE, pieces_of, strips_of
from hetrain.planner.piece import Piece
from hetrain.planner.plan import Plan
from hetrain.planner.planned import Planned, RankCost
from hetrain.planner.search.bound import Bound
from hetrain.planner.search.place import UNEQUAL, Layout
from hetrain.planner.store_prices import row_edges
from hetrain.planner.workload import TableLoad


def assemble(layout: Layout, bound: Bound, engine: str) -> Planned:
    """The plan of a layout of all tables, with its predicted cost."""
    pieces: list[Piece] = []
    replicated: set[str] = set()
    sharding: dict[str, str] = {}
    tiers: Counter[str] = Counter()
    for table, load in enumerate(layout.menu.loads):
        cut, name = layout.of(table), load.table.name
        sharding[name] = cut.kind
        held = load.table.rows * load.row_bytes
        if cut.kind == "data_parallel":
            replicated.add(name)
            held *= layout.world
        else:
            pieces += _pieces(load, table, layout, engine)
        tiers[cut.tier] += held
    plan = Plan(engine, layout.world, tuple(pieces), frozenset(replicated), sharding, layout.local)
    ranks = _ranks(layout, plan)
    slowest = max(ranks, key=lambda cost: cost.total_ms)
    words = bottleneck(plan, slowest, _tables_on(layout, slowest.rank), layout.menu.cluster)
    ms = min(bound.ms + layout.menu.least_types_ms, slowest.total_ms)  # equal but for rounding
    return Planned(plan, ranks, ms, bound.reason, words, dict(tiers))


def _pieces(load: TableLoad, table: int, layout: Layout, engine: str) -> list[Piece]:
    cut, places = layout.of(table), layout.places[table]
    if layout.cut[table] == UNEQUAL:
        return strips_of(load.table, layout.parts[table], places)
    if engine == "torchrec":
        return pieces_of(load.table, cut, places, layout.world, layout.local)
    edges = row_edges(load, cut.parts, even=cut.even)
    return [
        Piece(load.table.name, rank, edges[k], edges[k + 1] - edges[k], 0, load.table.dim)
        for k, rank in enumerate(places)
    ]


def _ranks(layout: Layout, plan: Plan) -> tuple[RankCost, ...]:
    compute, comm = np.zeros(layout.world), np.zeros(layout.world)
    fixed = layout.types_ms
    rows = np.zeros(layout.world, dtype=np.int64)
    for table, load in enumerate(layout.menu.loads):
        for place, part in zip(layout.places[table], layout.parts[table], strict=True):
            ranks = layout.span(part, place)
            compute[ranks] += part.compute_ms
            comm[ranks] += part.comm_ms
            fixed += part.shared_ms
        if load.table.name in plan.replicated:
            rows += load.table.rows
    for piece in plan.pieces:
        rows[piece.rank] += piece.rows
    hbm, ddr = layout.held.tolist()
    return tuple(
        RankCost(r, hbm[r], ddr[r], int(rows[r]), float(compute[r]), float(comm[r]), fixed) for r in range(layout.world)
    )


def _tables_on(layout: Layout, rank: int) -> dict[str, TableHere]:
    """What every table that loads a rank takes of it, by name."""
    found: dict[str, TableHere] = {}
    for table, load in enumerate(layout.menu.loads):
        parts = [
            part
            for place, part in zip(layout.places[table], layout.parts[table], strict=True)
            if part.place == ALL or (rank // layout.local if part.place == NODE else rank) == place
        ]
        if parts:
            found[load.table.name] = TableHere(sum(part.cost for part in parts), parts[0].tier)
    return found
