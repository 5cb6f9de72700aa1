"""Asynchronous engines on the cases of store_cases.py."""

from typing import Any

import torch
import torch.distributed as dist

from hetrain.comms.dense_exchange import DenseComms
from hetrain.config import DenseOptimizerConfig, RowOptimizerConfig, ScheduleConfig
from hetrain.engine.async_engine import AsyncEngine
from hetrain.engine.recipe import Recipe
from hetrain.engine.store_settings import StoreSettings
from hetrain.optim import Schedule, dense_optimizer, row_optimizer
from hetrain.telemetry import Traffic
from tests.engine.server_cases import server_plan
from tests.engine.store_cases import SCHEDULE, SEED, Net, make_tables

PER_RANK = 16  # examples that count as one rank's step


def make_async(
    mode: str,
    optimizer: str = "sgd",
    *,
    dense: str = "adagrad",
    dims: tuple[int, ...] = (8, 4, 8),
    servers: int = 0,
    traffic: Traffic | None = None,
    schedule: ScheduleConfig = SCHEDULE,
    timeout_s: float = 30,
    dense_comms: DenseComms | None = None,
    **settings: Any,
) -> AsyncEngine:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    tables = make_tables(dims)
    if mode == "asp":
        settings["capacity"] = 0
    recipe = Recipe(
        lambda bags: Net(bags, dims),
        tables,
        server_plan(tables, world_size, servers),
        row_optimizer(RowOptimizerConfig(optimizer, 0.3, 1e-8)),
        lambda params: dense_optimizer(params, DenseOptimizerConfig(dense, 0.1)),
        Schedule(schedule),
        torch.device("cpu"),
        SEED,
        traffic or Traffic(),
        dense_comms or DenseComms(),
    )
    chosen = StoreSettings(batch_size=PER_RANK, timeout_s=timeout_s, servers=servers, own_pace=True, **settings)
    return AsyncEngine(recipe, chosen, mode)
