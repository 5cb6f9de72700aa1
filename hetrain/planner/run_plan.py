"""The plan of a run: the one it was given, or one made for its own ranks by the strategy it names."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hetrain.config import ClusterConfig, RunConfig
from hetrain.data.schema import DatasetSchema
from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.given import given_plan
from hetrain.planner.host_memory import host_memory
from hetrain.planner.machines import NVIDIA, SPEEDS, machines_of
from hetrain.planner.misfit import MisfitError
from hetrain.planner.plan import Plan
from hetrain.planner.remedies import MORE_HOSTS, MORE_PROCESSES, MORE_SERVERS, Ways
from hetrain.planner.request import loads_of, planned_for
from hetrain.planner.torchrec_planner import plan_of, sharding_plan, store_plan
from hetrain.ranks import Ranks
from hetrain.stats.measure import load
from hetrain.tables import Table

TRAINED_TIERS = ("hbm", "ddr")  # no kernel here trains a table cached on a device


def run_plan(
    cfg: RunConfig, schema: DatasetSchema, tables: Sequence[Table], ranks: Ranks, device: torch.device
) -> tuple[Plan, dict[str, Any]]:
    """The plan that all ranks train by, checked, and what plan.json says of it. Collective.

    Rank 0 reads or makes it, so that hosts of unequal memory, or files, have the same. Raises ConfigError on every
    rank when it cannot be trained, or none fits.
    """
    made: list[tuple[Plan, dict[str, Any]]] = []

    def make() -> None:
        try:
            made.append(_plan(cfg, schema, tables, ranks, device))
        except MisfitError as error:
            error.ways = _ways(cfg)
            raise

    ranks.together(lambda: make() if ranks.first else None)
    found: tuple[Plan, dict[str, Any]] = ranks.gather(made[0] if made else None)[0]
    return found


def _ways(cfg: RunConfig) -> Ways:
    """What can be changed where nothing fits: the machines are those that train."""
    more = MORE_HOSTS if cfg.planner.memory_gib is None else MORE_PROCESSES
    return Ways(MORE_SERVERS if cfg.cluster.servers else more, reserve=cfg.cluster.reserve, embedding_dim=True)


def _plan(
    cfg: RunConfig, schema: DatasetSchema, tables: Sequence[Table], ranks: Ranks, device: torch.device
) -> tuple[Plan, dict[str, Any]]:
    if cfg.planner.plan is not None:
        plan = given_plan(cfg.planner.plan, cfg.consistency.mode, tables, ranks.roles)
        return plan, plan.to_json()
    if cfg.planner.name == "torchrec":
        plan = _by_torchrec(cfg, tables, ranks, device)
        return plan, plan.to_json()
    loads = loads_of(tables, cfg.optimizer.rows, load(cfg.data.path, schema))
    planned = planned_for(cfg, loads, _own_cluster(cfg, ranks, device), TRAINED_TIERS)
    planned.plan.check(tables)
    return planned.plan, planned.to_json()


def _by_torchrec(cfg: RunConfig, tables: Sequence[Table], ranks: Ranks, device: torch.device) -> Plan:
    batch, world_size = cfg.train.batch_size, ranks.world_size
    if cfg.consistency.mode == "bsp":
        found = sharding_plan(tables, cfg.optimizer.rows.name, cfg.planner, world_size, device, batch)
        return plan_of(found, tables, world_size)
    return store_plan(tables, cfg.planner, world_size, batch, device, ranks.servers, index=cfg.store.index)


def _own_cluster(cfg: RunConfig, ranks: Ranks, device: torch.device) -> Cluster:
    """The machines of this run, its workers grouped in nodes as cluster.* says, else as they are on hosts."""
    kind = device.type if cfg.consistency.mode == "bsp" else cfg.store.device  # where rows live
    workers = ranks.roles.workers
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", workers)), ranks.world_size)
    per_node = _ranks_per_node(cfg.cluster, workers, local)
    memory = cfg.planner.memory_gib
    if memory is None and kind == "cpu" and cfg.cluster.ddr_gib is None:
        memory = host_memory() * (1 - cfg.cluster.reserve) / local / GIB  # of the host, whatever a node is
    own = "cuda" if NVIDIA.is_dir() else "cpu"  # what this machine is taken for, and was measured as
    # A device beside speeds is a preset's: other machines, of which the profile in its usual place says nothing.
    preset = cfg.cluster.device is not None and any(getattr(cfg.cluster, key) is not None for key in SPEEDS)
    described = replace(
        cfg.cluster,
        device=None if kind == own and not preset else kind,
        nodes=workers // per_node,
        gpus_per_node=per_node,
    )
    return machines_of(described, memory).cluster


def _ranks_per_node(cluster: ClusterConfig, workers: int, local: int) -> int:
    """The first that divides the workers; training was checked to have those of `cluster`, evaluation may not."""
    asked = cluster.gpus_per_node or workers // (cluster.nodes or workers + 1)
    return next(size for size in (asked, local, workers) if size and workers % size == 0)
