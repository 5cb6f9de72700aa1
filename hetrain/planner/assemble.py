"""A layout as a plan with its cost: pieces, what every rank holds and takes, what makes the slowest slow."""

from collections import Counter

import numpy as np

from hetrain.planner.bound import Bound
from hetrain.planner.cut import ALL, RANK, Cut, pieces_of
from hetrain.planner.piece import Piece
from hetrain.planner.place import Layout
from hetrain.planner.plan import Plan
from hetrain.planner.planned import Planned, RankCost
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
            pieces += _pieces(load, cut, layout.places[table], layout, engine)
        tiers[cut.tier] += held
    plan = Plan(engine, layout.world, tuple(pieces), frozenset(replicated), sharding, layout.local)
    ranks = _ranks(layout, plan)
    slowest = max(ranks, key=lambda cost: cost.total_ms)
    ms = min(bound.ms + layout.menu.least_types_ms, slowest.total_ms)  # equal but for rounding
    return Planned(plan, ranks, ms, bound.reason, bottleneck(layout, slowest), dict(tiers))


def _pieces(load: TableLoad, cut: Cut, places: list[int], layout: Layout, engine: str) -> list[Piece]:
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
        cut = layout.of(table)
        for place in layout.places[table]:
            ranks = layout.span(cut, place)
            compute[ranks] += cut.compute_ms
            comm[ranks] += cut.comm_ms
            fixed += cut.shared_ms
        if load.table.name in plan.replicated:
            rows += load.table.rows
    for piece in plan.pieces:
        rows[piece.rank] += piece.rows
    hbm, ddr = layout.held.tolist()
    return tuple(
        RankCost(r, hbm[r], ddr[r], int(rows[r]), float(compute[r]), float(comm[r]), fixed) for r in range(layout.world)
    )


def bottleneck(layout: Layout, slowest: RankCost) -> str:
    """What the slowest rank does most, and which key would change it."""
    menu, rank = layout.menu, slowest.rank
    here = [t for t, places in enumerate(layout.places) if _loads(layout, t, places, rank)]
    comm, total = slowest.comm_ms, max(slowest.total_ms, 1e-30)
    top = max(here, key=lambda t: layout.of(t).cost, default=0)
    cut, name = layout.of(top), menu.loads[top].table.name
    within = menu.cluster.nodes == 1
    if slowest.fixed_ms > total / 2:
        what = f"{slowest.fixed_ms / total:.0%} of its time is what pieces cost each; fewer (planner.sharding_types)"
    elif comm > slowest.compute_ms:
        link = "cluster.intra_gb_s" if within else "cluster.inter_gb_s"
        what = f"{comm / total:.0%} of its time is exchange; a faster link ({link}) or a smaller train.batch_size"
    else:
        tier = "cluster.hbm_gb_s" if menu.cluster.kind == "cuda" else "cluster.ddr_gb_s"
        slow = [t for t in here if layout.of(t).tier != menu.cluster.device_tier]
        where = f" ({len(slow)} tables through the host's memory: more planner.memory_gib)" if slow else ""
        what = (
            f"{slowest.compute_ms / total:.0%} of its time is reading and updating rows; faster memory ({tier}){where}"
        )
    return f"rank {rank}: {what} would move it. Most is table {name!r} ({cut.kind}, {cut.cost:.3g} of {total:.3g} ms)"


def _loads(layout: Layout, table: int, places: list[int], rank: int) -> bool:
    cut = layout.of(table)
    return cut.place == ALL or (rank if cut.place == RANK else rank // layout.local) in places
