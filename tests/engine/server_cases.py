"""Store engines of workers and dedicated servers, on the cases of store_cases.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hetrain.config import DenseOptimizerConfig, RowOptimizerConfig
from hetrain.data.batch import Batch
from hetrain.engine import Engine
from hetrain.engine.server_engine import ServerEngine
from hetrain.engine.store_engine import StoreEngine
from hetrain.engine.store_settings import StoreSettings
from hetrain.optim import Schedule, dense_optimizer, row_optimizer
from hetrain.planner.plan import Plan
from hetrain.tables import Table
from hetrain.telemetry import Traffic
from tests.engine.store_cases import SCHEDULE, SEED, Net, batches, make_batch, make_plan, make_tables


def server_plan(tables: list[Table], world_size: int, servers: int) -> Plan:
    """The plan of `servers` ranks, moved to the last ranks; without servers that of all."""
    owners = servers or world_size
    plan = make_plan(tables, owners)
    pieces = tuple(replace(piece, rank=piece.rank + world_size - owners) for piece in plan.pieces)
    return replace(plan, world_size=world_size, pieces=pieces)


def make_side(
    rank: int,
    world_size: int,
    servers: int,
    optimizer: str = "adagrad",
    dims: tuple[int, ...] = (8, 4, 8),
    traffic: Traffic | None = None,
    **settings: Any,
) -> Engine:
    """This rank's engine: a worker's or a server's. Collective."""
    workers = dist.new_group(list(range(world_size - servers))) if servers else None
    tables = make_tables(dims)
    rows = row_optimizer(RowOptimizerConfig(optimizer, 0.3, 1e-8))
    plan, schedule, traffic = server_plan(tables, world_size, servers), Schedule(SCHEDULE), traffic or Traffic()
    chosen = StoreSettings(batch_size=8, timeout_s=30, servers=servers, **settings)
    if rank >= world_size - servers:
        return ServerEngine(tables, plan, rows, schedule, SEED, traffic, chosen)
    return StoreEngine(
        lambda bags: Net(bags, dims),
        tables,
        plan,
        rows,
        lambda params: dense_optimizer(params, DenseOptimizerConfig("adagrad", 0.1)),
        schedule,
        torch.device("cpu"),
        SEED,
        traffic,
        chosen,
        workers=workers,
    )


def side_batches(rank: int, world_size: int, servers: int) -> list[Batch]:
    """A worker's batches among the workers; a server's are empty."""
    workers = world_size - servers
    if rank < workers:
        return batches(rank, workers, multi_hot=True)
    return [make_batch([], batch.global_size, [2, 0, 1]) for batch in batches(0, workers, multi_hot=True)]


def losses_of(engine: Engine, data: Iterator[Batch]) -> list[float]:
    """Summed loss of every step on this rank."""
    found = []
    while (out := engine.step(data)) is not None:
        found.append(float(out.loss))
    return found


def whole_tables(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Tables and their optimizer state from the pieces of all ranks, and the dense part of rank 0."""
    whole = {name: value for name, value in ranks[0].items() if "@" not in name}
    for name in sorted({name.split("@")[0] for rank in ranks for name in rank if "@" in name}):
        pieces = {int(n.split("@")[1]): v for rank in ranks for n, v in rank.items() if n.startswith(f"{name}@")}
        whole[name] = np.concatenate([pieces[first] for first in sorted(pieces)])
    return whole
