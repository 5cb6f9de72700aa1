"""Replicated tables of the store: which plans may have some, and what workers beside dedicated servers hold of them."""

from collections.abc import Sequence
from dataclasses import replace

from hetrain.errors import ConfigError
from hetrain.planner.options import Options
from hetrain.planner.plan import Plan
from hetrain.planner.planned import Planned, RankCost
from hetrain.planner.search.menu import kinds_of
from hetrain.planner.store_prices import StorePrices
from hetrain.planner.workload import TableLoad

REPLICATED = "data_parallel"


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


def held_by_workers(
    loads: Sequence[TableLoad], options: Options, prices: StorePrices, servers: StorePrices
) -> list[TableLoad]:
    """The tables that workers beside servers hold: what the user's threshold and constraints say, then the smallest.

    Of these, where they are offered, those that take the workers (`prices`) less time than the mean server
    (`servers`), as far as their memory goes; some table is left to the servers.
    """
    found = [load for load in loads if kinds_of(load, options) == (REPLICATED,)]
    room = prices.cluster.device_bytes - sum(_bytes(prices, load) for load in found)
    offered = [load for load in loads if load not in found and REPLICATED in kinds_of(load, options)]
    for load in sorted(offered, key=lambda load: load.elements):
        room -= _bytes(prices, load)
        if room < 0 or len(found) + 1 == len(loads):
            break
        if prices.replicated(load).cost < servers.mean(load):
            found.append(load)
        else:
            room += _bytes(prices, load)
    return found


def _bytes(prices: StorePrices, load: TableLoad) -> int:
    cut = prices.replicated(load)
    return cut.hbm + cut.ddr


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
        sharding={**planned.plan.sharding, **dict.fromkeys(names, REPLICATED)},
    )
    bottleneck = planned.bottleneck
    if workers[0].total_ms > planned.slowest_ms:
        bottleneck = (
            f"every worker: {workers[0].comm_ms / workers[0].total_ms:.0%} of its time is summing the gradients of "
            f"{len(names)} replicated tables, the rest applying them; fewer of them would move it"
        )
    tiers = dict(planned.tiers)
    for cut, load in zip(cuts, replicas, strict=True):
        tiers[cut.tier] = tiers.get(cut.tier, 0) + load.table.rows * load.row_bytes * len(workers)
    return replace(
        planned, plan=plan, ranks=(*workers, *planned.ranks), bottleneck=bottleneck, tiers=tiers, workers=len(workers)
    )
