"""Store engines of workers and dedicated servers, on the cases of store_cases.py."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from hetrain.comms.dense_exchange import DenseComms
from hetrain.data.batch import Batch
from hetrain.engine import Engine
from hetrain.engine.server_engine import ServerEngine
from hetrain.planner.plan import Plan
from hetrain.tables import Table
from hetrain.telemetry import Traffic
from tests.engine.store_cases import (
    batches,
    make_batch,
    make_engine,
    make_plan,
    make_recipe,
    make_row_optimizer,
    make_settings,
    make_tables,
)


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
    dense_comms: DenseComms | None = None,
    plan: Plan | None = None,
    **settings: Any,
) -> Engine:
    """This rank's engine: a worker's or a server's; `plan`: by default that of server_plan. Collective."""
    workers = dist.new_group(list(range(world_size - servers))) if servers else None
    tables = make_tables(dims)
    plan, traffic = plan or server_plan(tables, world_size, servers), traffic or Traffic()
    if rank < world_size - servers:
        common = {"dims": dims, "traffic": traffic, "plan": plan, "workers": workers, "servers": servers}
        return make_engine(world_size, optimizer, dense_comms=dense_comms, **common, **settings)
    recipe = make_recipe(plan, make_row_optimizer(optimizer), dims, traffic, dense_comms)
    return ServerEngine(recipe, make_settings(servers=servers, **settings))


def side_batches(rank: int, world_size: int, servers: int) -> list[Batch]:
    """A worker's batches among the workers; a server's are empty."""
    workers = world_size - servers
    if rank < workers:
        return batches(rank, workers, multi_hot=True)
    return [make_batch([], batch.global_size, [2, 0, 1]) for batch in batches(0, workers, multi_hot=True)]
