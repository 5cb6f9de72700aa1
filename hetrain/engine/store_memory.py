"""Memory of a run over the store: said, and refused where there is not enough, before anything is allocated."""

import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetrain.engine.store_settings import StoreSettings, kept_rows, slot_costs
from hetrain.errors import ConfigError
from hetrain.optim import RowOptimizer
from hetrain.planner.plan import Plan
from hetrain.store.capacity import GIB, PredictedMemory, predicted_memory, size_text
from hetrain.store.owner_columns import owner_columns
from hetrain.store.residue import residue_bytes
from hetrain.store.row_memory import available_bytes
from hetrain.store.space import Placement, row_spaces
from hetrain.tables import Table
from hetrain.width_group import rows_in_flight


@dataclass(frozen=True)
class StoreMemory:
    """What the store will take, in bytes."""

    most: PredictedMemory  # of a worker, and of the owner with most rows
    rows_at_start: tuple[int, ...]  # by rank; 0 for ranks that own none
    workers: int  # the first ranks
    kept: int  # rows of a worker's cache, all embedding dims together
    replicas: int = 0  # of a worker: the tables it holds whole, with their gradients and optimizer state

    def on_host(self, ranks: Sequence[int], *, slots: bool, rows: bool) -> int:
        """What `ranks` need. `slots`: slots, rests and replicas of workers, `rows`: rows of owners lie there."""
        worker = self.most.index + (self.most.cache + self.most.residue + self.replicas if slots else 0)
        computing = sum(rank < self.workers for rank in ranks)
        return computing * worker + (sum(self.rows_at_start[rank] for rank in ranks) if rows else 0)

    def as_dict(self) -> dict[str, Any]:
        """For summary.json; names as summary.merge wants them."""
        most = self.most
        return {
            "cache_max": most.cache,
            "index_max": most.index,
            "residue_max": most.residue,
            "owner_at_start_max": most.rows_at_start,
            "replicas_max": self.replicas,
            "row_seen": list(most.row_seen),
            "words": str(self),
        }

    def __str__(self) -> str:
        replicas = f", a worker's replicated tables {size_text(self.replicas)}" if self.replicas else ""
        return f"{self.most}{replicas}"


def store_memory(
    tables: Sequence[Table], plan: Plan, optimizer: RowOptimizer, settings: StoreSettings, world_size: int
) -> StoreMemory:
    """The prediction for engines made with these arguments. Raises ConfigError for a capacity that cannot be."""
    spaces = row_spaces(tables, plan.replicated)
    placements = [Placement(space, plan, world_size) for space in spaces]
    kept, workers = kept_rows(settings, spaces, optimizer), world_size - settings.servers
    flying = [
        rows_in_flight(space.rows, settings.batch_size * len(space.feature_offsets), prefetch=settings.overlapped)
        for space in spaces
    ]
    row_bytes = [_row_bytes(space.dim, optimizer, settings, workers) for space in spaces]
    owned = [placement.local_rows for placement in placements]  # by embedding dim, then rank
    by_rank = [sum(rows[rank] * n for rows, n in zip(owned, row_bytes, strict=True)) for rank in range(world_size)]
    largest = max(range(world_size), key=by_rank.__getitem__)
    most = predicted_memory(
        spaces,
        [k + f for k, f in zip(kept, flying, strict=True)],
        slot_costs(settings, spaces, optimizer),
        [rows[largest] for rows in owned],
        row_bytes,
        settings.index,
        sum(residue_bytes(space.rows, space.dim) for space in spaces) if _has_rests(settings) else 0,
        keeps=sum(kept) > 0,
    )
    at_start = tuple(by_rank) if settings.index == "array" else (0,) * world_size
    replicas = sum(_replica_bytes(table, optimizer) for table in tables if table.name in plan.replicated)
    return StoreMemory(most, at_start, workers, sum(kept), replicas)


def _replica_bytes(table: Table, optimizer: RowOptimizer) -> int:
    """Rows and gradients, the latter once more while they are summed and stepped, and optimizer state."""
    return 4 * table.rows * (3 * table.dim + optimizer.state_width(table.dim))


def _has_rests(settings: StoreSettings) -> bool:
    """Whether workers push rows that have no slot to hold back a rest in."""
    return settings.dct is not None and not settings.held_back


def _row_bytes(dim: int, optimizer: RowOptimizer, settings: StoreSettings, workers: int) -> int:
    columns = owner_columns(
        dim,
        optimizer,
        held_back=settings.held_back,
        staleness=settings.staleness,
        audit=settings.audit_every > 0,
        directory=settings.directory,
        workers=workers,
    )
    return sum(column.row_bytes for column in columns.values())


def check_memory(
    memory: StoreMemory, tables: Sequence[Table], settings: StoreSettings, rank: int, device: torch.device
) -> None:
    """Raise ConfigError when this rank's host, or its GPU, has less memory than its ranks will need.

    Local; every rank asks before any of them allocates. A host's ranks are LOCAL_WORLD_SIZE in a row, or all.
    """
    world_size = len(memory.rows_at_start)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    first = rank - rank % local
    mine = range(first, min(first + local, world_size))
    on_cpu, rows_on_cpu = device.type == "cpu", settings.device.type == "cpu"
    need, have = memory.on_host(mine, slots=on_cpu, rows=rows_on_cpu), available_bytes()
    where = f"{len(mine)} process{'es' if len(mine) > 1 else ''} on this host"
    if have is not None and need > have:
        raise _too_little(memory, tables, settings, where, need, have)
    if device.type == "cuda" and rank < memory.workers:
        worker = memory.most.cache + memory.most.residue + memory.replicas
        need = worker + (0 if rows_on_cpu else memory.rows_at_start[rank])
        have = torch.cuda.mem_get_info(device)[0]
        if need > have:
            raise _too_little(memory, tables, settings, f"a process on {device}", need, have)


def _too_little(
    memory: StoreMemory, tables: Sequence[Table], settings: StoreSettings, where: str, need: int, have: int
) -> ConfigError:
    table = max(tables, key=lambda t: t.rows * t.dim)
    hashed = "" if settings.index == "hash" else "set store.index=hash to hold only the rows seen, "
    rests = "set comms.rows to another option than dct, " if memory.most.residue else ""
    more = "more machines" if settings.servers == 0 else "more machines for cluster.servers"
    return ConfigError(
        f"consistency.cache.capacity={settings.capacity}, store.index={settings.index}: {where} would need "
        f"{need / GIB:.2f} GiB and can have {have / GIB:.2f} GiB: {memory}. A cache keeps {memory.kept:,} rows; "
        f"the largest table is {table.name!r} with {table.rows:,} rows of {table.dim} values. Lower "
        f"consistency.cache.capacity (a share, rows, or memory such as 512MiB), {rests}{hashed}make "
        f"model.embedding_dim smaller, or use {more} or fewer ranks on each (launch.nproc)."
    )


def peak_rss() -> int:
    """Bytes of memory this process had at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
