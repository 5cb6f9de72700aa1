"""The features of one embedding dim over the store: placement, this rank's owner, slots and cache."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.lookups import lookups
from hetrain.optim import RowOptimizer
from hetrain.store.cache import Cache
from hetrain.store.messages import Request
from hetrain.store.owner import Owner
from hetrain.store.row_codec import RowCodec
from hetrain.store.slot_table import SlotTable
from hetrain.store.space import Placement, RowSpace


@dataclass(frozen=True)
class CacheSettings:
    """What every width group's cache has in common."""

    policy: str  # lru | lfu | light_lfu
    staleness: float  # updates; may be inf
    batch_size: int  # examples of a rank's batch: slots to start with
    seed: int  # of the initial rows
    audit: bool = False
    directory: bool = True  # owners send notices, in place of a clock sent with every hit
    count_updates: bool = False  # pushes say how many updates they hold
    prefetch: bool = False  # two batches are in flight
    late_leg: bool = False  # rows of both are asked for when the first is computed
    index: str = "array"  # array | hash


def rows_in_flight(rows: int, lookups: int, *, prefetch: bool) -> int:
    """Slots that batches of `lookups` into a space of `rows` rows may need at once."""
    return min(rows, max(1, lookups) * (2 if prefetch else 1))


class WidthGroup:
    """The features of one embedding dim: their rows' space and placement, this rank's owner, slots and cache."""

    def __init__(
        self,
        placement: Placement,
        owner: Owner,
        optimizer: RowOptimizer,
        capacity_rows: int,
        settings: CacheSettings,
        device: torch.device,
        codec: RowCodec | None = None,
    ) -> None:
        self.space: RowSpace = placement.space
        self.placement, self.owner = placement, owner
        self.features = list(self.space.feature_offsets)
        self._first_rows = torch.tensor([self.space.feature_offsets[f] for f in self.features])
        self._optimizer, self._settings, self._device = optimizer, settings, device
        self.capacity_rows = capacity_rows
        self.learning_rate = optimizer.lr
        self.batch_rows = self._rows_in_flight(settings.batch_size * len(self.features))
        self.table = self._slot_table()
        self.cache = Cache(
            self.space,
            capacity_rows,
            self.batch_rows,
            self.table.value,
            self.table.state,
            settings.policy,
            settings.staleness,
            optimizer,
            seed=settings.seed,
            audit=settings.audit,
            directory=settings.directory,
            count_updates=settings.count_updates,
            late_leg=settings.late_leg,
            index=settings.index,
            codec=codec,
        )

    def fetch(self, rows: Tensor) -> Request:
        """A request for distinct `rows` [N] alone."""
        return Request.fetch(rows, self.space.dim, self.cache.copies.state.shape[1])

    def _rows_in_flight(self, lookups: int) -> int:
        """Slots that batches of `lookups` may need beyond the capacity."""
        return rows_in_flight(self.space.rows, lookups, prefetch=self._settings.prefetch)

    def _slot_table(self) -> SlotTable:
        slots, held_back = self.capacity_rows + self.batch_rows, self.capacity_rows > 0
        table = SlotTable(len(self.features), slots, self.space.dim, self._optimizer, self._device, held_back=held_back)
        table.set_learning_rate(self.learning_rate)
        return table

    def make_room(self, lookups: int) -> None:
        """Grow, keeping every bit of the cache, when a batch may touch more rows than any before it."""
        if self._rows_in_flight(lookups) > self.batch_rows:
            self._grow(self._rows_in_flight(1 << (lookups - 1).bit_length()))

    def _grow(self, batch_rows: int) -> None:
        old, self.batch_rows = self.table, batch_rows
        self.table = self._slot_table()
        self.table.value[: len(old.value)] = old.value
        self.table.state[: len(old.state)] = old.state
        self.cache.grow(self.table.value, self.table.state)

    def set_learning_rate(self, lr: float) -> None:
        """Rate of this step's row updates at the worker."""
        self.learning_rate = lr
        self.table.set_learning_rate(lr)

    def state_dict(self) -> dict[str, Any]:
        """This rank's cache and clocks, and inside a view of the owner the rows it changed, to resume bit for bit."""
        return {"batch_rows": self.batch_rows, "cache": self.cache.state_dict(), "owner": self.owner.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None, step: int) -> None:
        """Take up what `state_dict` gave, after the owner's tables were loaded; None: empty cache, clocks at 0.

        `step`: steps trained before.
        """
        if state is None:
            self.cache.restart(step)
            self.owner.load_state_dict(None)
            return
        if state["batch_rows"] > self.batch_rows:
            self._grow(state["batch_rows"])
        self.cache.load_state_dict(state["cache"])
        self.owner.load_state_dict(state["owner"])

    def lookups(self, sparse: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Global row of every lookup of this group [n] int64, on the CPU, and bag offsets [F * B + 1]."""
        return lookups(sparse, self.features, self._first_rows)
