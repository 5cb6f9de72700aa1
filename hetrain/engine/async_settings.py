"""What follows from the settings of `asp` and `ssp` before anything is allocated."""

from collections.abc import Sequence
from typing import Any

from hetrain.engine import Origin
from hetrain.engine.store_settings import StoreSettings
from hetrain.planner.plan import Plan


def async_layout(
    mode: str, settings: StoreSettings, capacities: Sequence[int], world_size: int, origin: Origin, plan: Plan
) -> dict[str, Any]:
    """What must be equal for a rank's private part of a checkpoint to fit.

    `own_pace`: it holds no copies and no worker clocks, which begin anew: nobody could tell them from others.
    """
    return {
        "mode": mode,
        "own_pace": True,
        "world_size": world_size,
        "servers": settings.servers,
        "capacity_rows": list(capacities),
        "batch_size": settings.batch_size,
        "audit": settings.audit_every > 0,
        "seed": origin.seed,  # rows that were never sent start as these say
        "init_bound": {table.name: table.init_bound for table in origin.tables},
        "row_optimizer": origin.row_optimizer,
        "index": settings.index,
        "plan": plan.to_json(),
    }
