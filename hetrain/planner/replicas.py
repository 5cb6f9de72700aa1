"""Replicated tables of the store: which plans may have some, and what workers beside dedicated servers hold of them."""

from collections.abc import Sequence
from dataclasses import replace

from hetrain.errors import ConfigError
from hetrain.planner.menu import kinds_of
from hetrain.planner.options import Options
from hetrain.planner.plan import Plan
from hetrain.planner.planned import Planned, RankCost
from hetrain.planner.store_prices import StorePrices
from hetrain.planner.workload import TableLoad


def check_replicas(plan: Plan, mode: str) -> None:
    """Raise ConfigError where consistency mode `mode` cannot train what a plan for the store replicates."""
    if plan.engine != "store" or not plan.replicated:
        return
    if mode != "het":
        raise ConfigError(
            f"plan: table {min(plan.replicated)!r} is replicated, which the store does not train with "
            f"consistency={mode}: its workers step at their own pace and never meet to sum a gradient. (1) Make the "
            "plan again with planner.sharding_types=[table_wise,row_wise] and no data_parallel in planner.constraints, "
            "(2) set consistency=het, or (3) consistency=bsp and make the plan for that"
        )
    if not plan.pieces:
        raise all_replicated(len(plan.replicated))


def all_replicated(tables: int) -> ConfigError:
    """The error for a store that is left no row."""
    return ConfigError(
        f"plan: all {tables} tables are replicated, and no row is left for the store of consistency=het. (1) Lower "
        "planner.data_parallel_threshold below the elements (rows x dim) of the largest table, (2) take data_parallel "
        "out of planner.constraints, or (3) set consistency=bsp, which trains replicated tables the same"
    )


def by_word(loads: Sequence[TableLoad], options: Options) -> list[TableLoad]:
    """The tables that the user's threshold and constraints replicate, whatever that costs."""
    return [load for load in loads if kinds_of(load, options) == ("data_parallel",)]


def beside_servers(planned: Planned, replicas: Sequence[TableLoad], prices: StorePrices) -> Planned:
    """`planned`, of the last ranks, with tables that all ranks before them hold; `prices`: of those, the workers."""
    if not replicas:
        return planned
    cuts = [prices.replicated(load) for load in replicas]
    workers = tuple(
        RankCost(
            rank,
            sum(cut.hbm for cut in cuts),
            sum(cut.ddr for cut in cuts),
            sum(load.table.rows for load in replicas),
            sum(cut.compute_ms for cut in cuts),
            sum(cut.comm_ms for cut in cuts),
        )
        for rank in range(prices.cluster.world_size)
    )
    names = [load.table.name for load in replicas]
    plan = replace(
        planned.plan,
        replicated=planned.plan.replicated | set(names),
        sharding={**planned.plan.sharding, **dict.fromkeys(names, "data_parallel")},
    )
    tiers = dict(planned.tiers)
    for cut, load in zip(cuts, replicas, strict=True):
        tiers[cut.tier] = tiers.get(cut.tier, 0) + load.table.rows * load.row_bytes * len(workers)
    return replace(planned, plan=plan, ranks=(*workers, *planned.ranks), tiers=tiers, workers=len(workers))
