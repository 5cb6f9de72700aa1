"""What the store is made with, and what follows from it before anything is allocated."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hetrain.capacity import parse_capacity
from hetrain.config import DctConfig
from hetrain.consistency import ClockRule, Validation
from hetrain.engine import Origin
from hetrain.optim import RowOptimizer
from hetrain.planner.plan import Plan
from hetrain.store import capacity as store_capacity
from hetrain.store.space import RowSpace
from hetrain.store.threshold import Dct

LATE_BLOCKS = 4


@dataclass(frozen=True)
class StoreSettings:
    """What `consistency`, `store`, `launch` and `telemetry` say about the store."""

    capacity: float | str  # share of all rows (<= 1), rows (> 1) or memory (512MiB); 0: no row is kept between steps
    batch_size: int  # examples of one rank's batch; larger ones grow the slots
    policy: str = "lru"
    staleness: float = 100
    validation: Validation = "directory"
    prefetch: bool = True  # overlap rounds with computation, where a cache and staleness >= 1 allow it
    late_leg: bool = False  # and elsewhere too: rows that wait for the batch in flight follow in a second leg
    clock: ClockRule = "max"
    audit_every: int = 0  # steps between audit rounds; 0: none
    timeout_s: float = 300.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # where master rows live
    servers: int = 0  # the last ranks, which own all rows and compute nothing
    index: str = "array"  # array: all rows in memory | hash: those seen
    rows: str = "none"  # what rows and pushes travel as: none | fp16 | bf16 | int8 | dct
    dct: Dct | None = None  # with dct: what of a push waits
    own_pace: bool = False  # ranks do not step together (asp, ssp): no update is held back beyond its step

    @property
    def keeps(self) -> bool:
        """Whether workers keep rows between steps."""
        return parse_capacity(self.capacity).amount > 0

    @property
    def held_back(self) -> bool:
        """Whether workers keep rows, and updates, between steps."""
        return self.keeps and not self.own_pace

    @property
    def directory(self) -> bool:
        """Whether owners say which copies are too old, in place of clocks sent with every hit."""
        return self.validation == "directory"

    @property
    def overlapped(self) -> bool:
        """Whether the next batch's round runs while this one is computed."""
        return self.prefetch and not self.own_pace and (self.late_leg or not self._waits)

    @property
    def _waits(self) -> bool:
        """Whether rows of a batch must not be read without the updates of the one before."""
        return not self.held_back or self.staleness < 1

    @property
    def late_blocks(self) -> int:
        """In how many blocks a round travels that is read ahead and needs a late leg; 0: there is none.

        One block's rows are pushed while another's are pulled: both directions of the link are in use.
        """
        return LATE_BLOCKS if self.overlapped and self._waits else 0


# Pushes of a row. A push out of a cache holds up to `staleness` updates, and others wait that long for its rest.
AGE_HELD_BACK, AGE = 1, 16


def dct_of_rows(cfg: DctConfig, *, held_back: bool) -> Dct:
    """What `comms.dct` says of rows; `held_back`: a push may hold many updates."""
    age = cfg.max_age or (AGE_HELD_BACK if held_back else AGE)
    return Dct(cfg.rows_sparsity, age, cfg.refresh_steps, cfg.rows_warmup_steps)


def slot_costs(settings: StoreSettings, spaces: Sequence[RowSpace], optimizer: RowOptimizer) -> list[int]:
    """Bytes of a cache's slot, per embedding dim."""
    held_back = settings.held_back
    return [
        store_capacity.slot_bytes(
            space.dim,
            optimizer.state_width(space.dim) if settings.keeps else 0,
            settings.policy,
            settings.index,
            held_back=held_back,
            audit=settings.audit_every > 0,
            thresholds=settings.dct is not None and held_back,
        )
        for space in spaces
    ]


def kept_rows(settings: StoreSettings, spaces: Sequence[RowSpace], optimizer: RowOptimizer) -> list[int]:
    """Rows that a worker's cache keeps between steps, per embedding dim."""
    return store_capacity.capacity_rows(settings.capacity, spaces, slot_costs(settings, spaces, optimizer))


def store_layout(
    settings: StoreSettings, capacities: Sequence[int], world_size: int, origin: Origin, plan: Plan
) -> dict[str, Any]:
    """What must be equal, on workers and servers alike, for a rank's private part of a checkpoint to fit."""
    return {
        **_common_layout(settings, capacities, world_size, origin, plan),
        "mode": "het",
        "policy": settings.policy,
        "clock": settings.clock,
        "validation": settings.validation,
        "overlapped": settings.overlapped,
    }


def async_layout(
    mode: str, settings: StoreSettings, capacities: Sequence[int], world_size: int, origin: Origin, plan: Plan
) -> dict[str, Any]:
    """The same for `asp` and `ssp`.

    `own_pace`: it holds no copies and no worker clocks, which begin anew: nobody could tell them from others.
    """
    return {**_common_layout(settings, capacities, world_size, origin, plan), "mode": mode, "own_pace": True}


def _common_layout(
    settings: StoreSettings, capacities: Sequence[int], world_size: int, origin: Origin, plan: Plan
) -> dict[str, Any]:
    coded = {} if settings.rows == "none" else {"rows": settings.rows, "dct": settings.dct and asdict(settings.dct)}
    return {
        **coded,
        "world_size": world_size,
        "servers": settings.servers,
        "capacity_rows": list(capacities),
        "batch_size": settings.batch_size,  # a batch read ahead must be the same after a resume
        "audit": settings.audit_every > 0,
        "seed": origin.seed,  # rows that were never sent start as these say
        "init_bound": {table.name: table.init_bound for table in origin.tables},
        "row_optimizer": origin.row_optimizer,
        "index": settings.index,
        "plan": plan.to_json(),
    }
