"""TorchRec's plan for machines that need not exist, with the cost, the bound and the words that our own plans have."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from hetrain.config import RunConfig
from hetrain.planner.cluster import Cluster
from hetrain.planner.devices import devices_of
from hetrain.planner.piece_costs import NO_COSTS
from hetrain.planner.plan import Plan
from hetrain.planner.planned import Planned
from hetrain.planner.predict import bottleneck_of, predict
from hetrain.planner.request import after_workers, engine_of, options_of
from hetrain.planner.search.bound import lower_bound
from hetrain.planner.search.menu import make_menu
from hetrain.planner.torchrec_planner import Asked, plan_of, sharding_plan, store_plan
from hetrain.planner.torchrec_prices import TorchRecPrices
from hetrain.planner.workload import TableLoad


def planned_by_torchrec(cfg: RunConfig, loads: Sequence[TableLoad], cluster: Cluster) -> Planned:
    """EmbeddingShardingPlanner's plan; raises ConfigError when it finds none or one that would train wrongly."""
    batch, mode = cfg.train.batch_size, cfg.consistency.mode
    servers = cfg.cluster.servers
    owners = replace(cluster, kind="cpu", nodes=servers, ranks_per_node=1) if servers else cluster
    if mode != "bsp":
        owners = replace(owners, piece_costs=NO_COSTS)  # which are those of TorchRec's step
    plan = replace(_search(cfg, loads, owners), ranks_per_node=0 if servers else cluster.ranks_per_node)
    plan.check([load.table for load in loads])
    ranks = predict(plan, loads, owners, batch)
    slowest = max(ranks, key=lambda cost: cost.total_ms)
    options = options_of(cfg.planner, engine_of(mode), mode, cfg.optimizer.rows, {load.table.name for load in loads})
    menu = make_menu(loads, owners, TorchRecPrices(owners, batch).cuts, options)
    bound = lower_bound(menu)
    tiers = {tier: sum(getattr(cost, f"{tier}_bytes") for cost in ranks) for tier in ("hbm", "ddr")}
    words = bottleneck_of(plan, loads, owners, batch, slowest)
    planned = Planned(plan, ranks, bound.ms + menu.least_types_ms, bound.reason, words, tiers)
    return planned if not servers else after_workers(planned, cluster.world_size)


def _search(cfg: RunConfig, loads: Sequence[TableLoad], owners: Cluster) -> Plan:
    tables = [load.table for load in loads]
    asked = Asked(devices_of(owners), {load.table.name: load.poolings for load in loads})
    device, batch = torch.device(owners.kind), cfg.train.batch_size
    if cfg.consistency.mode != "bsp":
        return store_plan(tables, cfg.planner, owners.world_size, batch, device, index=cfg.store.index, asked=asked)
    found = sharding_plan(tables, cfg.optimizer.rows.name, cfg.planner, owners.world_size, device, batch, asked)
    return plan_of(found, tables, owners.world_size)
