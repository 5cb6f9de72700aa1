"""A worker's copies of rows under SSP, or none of them under ASP; every gradient is pushed in its own step.

A copy carries a tag: the slowest worker's clock, as its owner knew it, when the copy was fetched. At worker clock c a
copy may be read while tag >= c - staleness. The worker's own step is applied to the copy as well, by the owner's
formula, so that a worker sees what it wrote.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetrain.consistency import staleness_bound
from hetrain.optim import RowOptimizer
from hetrain.store.index import Ints
from hetrain.store.initial import InitialRows
from hetrain.store.messages import none
from hetrain.store.policy import make_policy
from hetrain.store.scatter import put_rows
from hetrain.store.slots import Slots
from hetrain.store.space import RowSpace
from hetrain.store.zeros import lazy_zeros

NO_TAG = -(1 << 63)  # of a copy that is yet to come: too old for any read, by any bound


@dataclass
class Counters:
    """Distinct rows per step, summed over steps."""

    hits: int = 0  # read from a copy
    misses: int = 0  # no copy
    invalid: int = 0  # the copy was too old
    evictions: int = 0


@dataclass
class Reading:
    """What one batch reads. Suffixes: n lookups, U distinct rows, N of them fetched."""

    positions: Tensor  # [n] int64: place of each lookup among the distinct rows
    rows: Tensor  # [U] int64 global rows
    fetched: Tensor  # [N] int64: which of `rows` have to be fetched
    slots: Ints  # [U]
    value: Tensor  # [U, D] float32; filled by `admit`
    seen: Tensor  # [U] int64 updates in each row as it is read; [0] unless auditing
    clock: int  # of the worker that reads


class ClockedCopies:
    """Copies of rows of one embedding dim, `capacity_rows` of them between steps; on the host."""

    def __init__(
        self,
        space: RowSpace,
        capacity_rows: int,
        batch_rows: int,
        staleness: float,
        optimizer: RowOptimizer,
        *,
        seed: int,
        policy: str,
        index: str,
        audit: bool,
    ) -> None:
        """`batch_rows`: slots beyond the capacity to start with; they grow with the batches.

        `seed`: of the initial rows, which owners do not send.
        """
        self.space, self.capacity_rows = space, capacity_rows
        self.counters = Counters()
        self.age_max = 0  # clocks that the oldest row read was behind its reader
        self._bound, self._optimizer, self._audit = staleness_bound(staleness), optimizer, audit
        self._initial = InitialRows(space, seed)
        self._policy_name, self._index = policy, index
        self._allocate(capacity_rows + batch_rows)

    @property
    def keeps(self) -> bool:
        """Whether any row is kept between steps."""
        return self.capacity_rows > 0

    @property
    def state_width(self) -> int:
        """Columns of optimizer state that come with a row."""
        return self._optimizer.state_width(self.space.dim) if self.keeps else 0

    def _allocate(self, slots: int) -> None:
        """Empty memory for `slots` rows."""
        host, kept = torch.device("cpu"), slots if self.keeps else 0
        self._slots = Slots(self.space.rows, slots, self._index)
        self._policy = make_policy(self._policy_name, slots)
        self._place = np.empty(slots, np.int64)  # scratch
        self._tag = np.full(slots, NO_TAG, np.int64)
        self._seen = np.zeros(slots if self._audit else 0, np.int64)
        self._value = lazy_zeros((kept, self.space.dim), torch.float32, host)
        self._state = lazy_zeros((kept, self.state_width), torch.float32, host)

    def begin(self, lookups: Tensor, clock: int) -> Reading:
        """Plan the read of global rows `lookups` [n] int64, repeats allowed, by a worker at `clock`."""
        ids = lookups.numpy()
        self._make_room(ids)
        slots, new_rows, _ = self._slots.take(ids)
        last = self._slots.last_lookups(slots)
        touched = slots[last]
        self._place[touched] = np.arange(len(touched))
        stale = self._tag[touched] < clock - self._bound
        fetched = np.flatnonzero(stale)
        self.counters.hits += len(touched) - len(fetched)
        self.counters.misses += len(new_rows)
        self.counters.invalid += len(fetched) - len(new_rows)
        if len(fetched) < len(touched):
            self.age_max = max(self.age_max, clock - int(self._tag[touched[~stale]].min()))
        return Reading(
            positions=torch.from_numpy(self._place[slots]),
            rows=torch.from_numpy(ids[last]),
            fetched=torch.from_numpy(fetched),
            slots=touched,
            value=torch.empty(0, self.space.dim),
            seen=none(),
            clock=clock,
        )

    def _make_room(self, ids: Ints) -> None:
        """Grow when a batch may need more slots than there are; the copies are forgotten, which is always allowed."""
        free = len(self._slots.row) - self._slots.held
        if len(ids) > free and len(np.unique(ids)) > free:
            self._allocate(self.capacity_rows + (1 << (len(ids) - 1).bit_length()))

    def admit(
        self, reading: Reading, stored: Tensor, value: Tensor, state: Tensor, tag: Tensor, applied: Tensor
    ) -> None:
        """Take up the fetched rows [N], in the order of `reading.fetched`.

        `stored` [N] bool: which of them came, K in number, with `value` [K, D], `state` [K, S], `applied` [K] updates
        (or [0]); the others are made here. `tag` [N] int64: the slowest worker's clock at each row's owner.
        """
        wanted = reading.rows[reading.fetched]
        fresh = self.whole(wanted, stored, value)
        at = reading.slots[reading.fetched.numpy()]
        self._tag[at] = tag.numpy()
        if len(at):
            self.age_max = max(self.age_max, reading.clock - int(tag.min()))
        if self._audit:
            self._seen[at] = 0
            self._seen[at[stored.numpy()]] = applied.numpy()
            reading.seen = torch.from_numpy(self._seen[reading.slots])
        if not self.keeps:
            reading.value = fresh
            return
        slots = torch.from_numpy(at)
        put_rows(self._value, slots, fresh)
        sums = state.new_zeros(len(wanted), self.state_width)
        sums[stored] = state
        put_rows(self._state, slots, sums)
        reading.value = self._value.index_select(0, torch.from_numpy(reading.slots))

    def whole(self, rows: Tensor, stored: Tensor, value: Tensor) -> Tensor:
        """Values [N, D] of `rows` [N]: those that came, `value` [K, D], and initial ones; keeps no copy."""
        if len(value) == len(rows):
            return value
        whole = value.new_empty(len(rows), self.space.dim)
        whole[stored] = value
        made = value.new_empty(len(rows) - len(value), self.space.dim)
        self._initial.fill(made, rows[~stored])
        whole[~stored] = made
        return whole

    def commit(self, reading: Reading, gradient: Tensor, lr: float) -> None:
        """The batch is done: apply `gradient` [U, D] to the copies, then keep the capacity."""
        if not self.keeps:
            self._release(reading.slots)
            return
        at = torch.from_numpy(reading.slots)
        value, state = reading.value, self._state.index_select(0, at)
        self._optimizer.step_(value, state, gradient, lr)
        put_rows(self._value, at, value)
        put_rows(self._state, at, state)
        if self._audit:
            self._seen[reading.slots] += 1
        self._policy.used(reading.slots)
        excess = self._slots.held - self.capacity_rows
        if excess > 0:
            victims = self._policy.victims(excess)
            self._release(victims)
            self.counters.evictions += len(victims)

    def _release(self, slots: Ints) -> None:
        self._slots.release(slots)
        self._tag[slots] = NO_TAG

    def clear(self) -> None:
        """Forget every copy."""
        self._release(np.flatnonzero(self._slots.row >= 0))
        self._policy.clear()
