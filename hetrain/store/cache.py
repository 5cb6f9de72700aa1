"""A worker's bounded cache of rows (HET Algorithms 1 to 3, worker side), vectorised over a batch.

Values and optimizer state are views of the memory that the embedding kernel reads and trains in
place; the index and the clocks are host arrays. A step is `begin` -> exchange -> `admit` -> forward,
backward, update of the slots -> `commit`.

A slot is free, or holds a row. A held row has c_s and c_c; its pending updates are `c_c - c_s` in
number and `value - base` in amount, base being the row as it was last fetched. Between `begin` and
`admit` a row to be fetched has c_s = c_c = -1, as a free slot has.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetrain.consistency import UNBOUNDED, breaks_own_bound, staleness_bound
from hetrain.optim import RowOptimizer
from hetrain.store.difference import decode, encode
from hetrain.store.index import ArrayIndex, Ints
from hetrain.store.messages import Reply, Request, none
from hetrain.store.policy import make_policy
from hetrain.store.read import ReadPlan
from hetrain.store.space import RowSpace


@dataclass
class Counters:
    """Distinct rows per step, summed over steps."""

    hits: int = 0  # read from the cache, found valid
    misses: int = 0  # not cached
    invalid: int = 0  # cached, but the owner's clock was too far ahead
    own_invalid: int = 0  # cached, but too many own updates held back
    evictions: int = 0


class Cache:
    """Rows of one embedding dim. `capacity_rows` are kept between steps; a step may add `batch_rows`."""

    def __init__(
        self,
        space: RowSpace,
        capacity_rows: int,
        batch_rows: int,
        value: Tensor,
        state: Tensor,
        policy: str,
        staleness: float,
        optimizer: RowOptimizer,
        *,
        audit: bool = False,
    ) -> None:
        """`value` [slots, D] and `state` [slots, S], slots = capacity_rows + batch_rows; S = 0 at capacity 0.

        `audit`: replies carry how many updates each row has taken, and the cache keeps it.
        """
        slots = capacity_rows + batch_rows
        if value.shape != (slots, space.dim) or state.shape[0] != slots:
            raise ValueError(f"value {tuple(value.shape)}, state {tuple(state.shape)}: expected {slots} slots")
        self.space, self.capacity_rows, self.optimizer = space, capacity_rows, optimizer
        self.value, self.state = value, state
        self.held_back = capacity_rows > 0  # else gradients travel and nothing is kept
        self.bound = staleness_bound(staleness)
        self.counters = Counters()
        self.observed_staleness_max = 0  # max of c_c - c_s over the reads found valid
        self._evicts = 0 < capacity_rows < space.rows
        self._policy = make_policy(policy, slots)
        self._index = ArrayIndex(space.rows)
        self._row = np.full(slots, -1, np.int64)  # row in each slot
        self._start = np.full(slots, -1, np.int64)  # c_s
        self._current = np.full(slots, -1, np.int64)  # c_c
        self._applied = np.zeros(slots if audit else 0, np.int64)  # updates in the row at its last fetch
        self._free = np.arange(slots - 1, -1, -1)  # a stack: the first `_free_count` are free
        self._free_count = slots
        self._mark = np.empty(slots, np.int32)
        self._base_value = torch.zeros_like(value if self.held_back else value[:0])
        self._base_state = torch.zeros_like(state if self.held_back else state[:0])
        self._staged: list[Request] = []  # pushes for the next round

    # -- one step ---------------------------------------------------------------------------------

    def begin(self, rows: Tensor, *, measure: bool = False) -> ReadPlan:
        """Plan the read of `rows` [n] int64 on the CPU, repeats allowed.

        `measure`: check rows even when no bound is set, so that observed staleness is exact.
        Raises ValueError when the batch needs more slots than there are.
        """
        lookups = rows.numpy()
        slots, new_rows, new_slots = self._slots_of(lookups)
        last = self._last_lookups(slots)
        distinct, touched = lookups[last], slots[last]
        held = np.flatnonzero(self._start[touched] >= 0)
        start, current = self._start[touched[held]], self._current[touched[held]]
        broken = breaks_own_bound(start, current, self.bound)
        stale, valid = held[broken], ~broken
        self._observe((current - start)[valid])
        checked = valid if measure or self.bound < UNBOUNDED else np.zeros_like(valid)
        request = self._take_pushes(touched[stale])
        request.fetch_rows = torch.from_numpy(np.concatenate([new_rows, distinct[stale]]))
        request.check_rows = torch.from_numpy(distinct[held[checked]])
        request.check_clock = torch.from_numpy(current[checked])
        return ReadPlan(
            slots=torch.from_numpy(slots),
            rows=torch.from_numpy(distinct),
            touched=touched,
            request=request,
            fetch_slots=np.concatenate([new_slots, touched[stale]]),
            check_slots=touched[held[checked]],
            misses=len(new_rows),
            own_invalid=len(stale),
            unchecked=int(valid.sum() - checked.sum()),
        )

    def _slots_of(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """Slot of every lookup [n], and the rows [m] that got a slot just now with their slots [m]."""
        slots = self._index.find(rows)
        absent = np.flatnonzero(slots < 0)
        if len(absent) == 0:
            return slots, absent, absent
        free = self._free[: self._free_count][::-1]
        slots[absent], new_rows = self._index.insert(rows[absent], free)
        new_slots = free[: len(new_rows)].copy()
        self._free_count -= len(new_rows)
        self._row[new_slots] = new_rows
        return slots, new_rows, new_slots

    def _last_lookups(self, slots: Ints) -> Ints:
        """Positions [U] of the last lookup of each distinct slot, ascending; linear, as in ArrayIndex.insert."""
        position = np.arange(len(slots), dtype=np.int32)
        self._mark[slots] = position
        return np.flatnonzero(self._mark[slots] == position)

    def _observe(self, pending: Ints) -> None:
        if len(pending):
            self.observed_staleness_max = max(self.observed_staleness_max, int(pending.max()))

    def admit(self, plan: ReadPlan, reply: Reply) -> None:
        """Take up the owners' answer (merged by route.py); after it the slots may be read."""
        device = self.value.device
        if plan.misses or plan.own_invalid:
            self._store(plan.fetch_slots, reply.value.to(device), reply.state.to(device), reply.clock, reply.applied)
        invalid = plan.check_slots[reply.invalid.cpu().numpy()]
        if len(invalid):
            self._rebase(invalid, reply)
        self.counters.hits += plan.unchecked + len(plan.check_slots) - len(invalid)
        self.counters.misses += plan.misses
        self.counters.invalid += len(invalid)
        self.counters.own_invalid += plan.own_invalid

    def _store(self, slots: Ints, value: Tensor, state: Tensor, clock: Tensor, applied: Tensor) -> None:
        """Fetch (Algorithm 1): the copy is the owner's row, c_s = c_c = c_g."""
        at = self._at(slots)
        self.value.index_copy_(0, at, value)
        self.state.index_copy_(0, at, state)
        if self.held_back:
            self._base_value.index_copy_(0, at, value)
            self._base_state.index_copy_(0, at, state)
        self._start[slots] = self._current[slots] = clock.cpu().numpy()
        if len(self._applied):
            self._applied[slots] = applied.cpu().numpy()

    def _rebase(self, slots: Ints, reply: Reply) -> None:
        """Copies found invalid after the request left: the owner's row with the pending updates on top.

        The pending step of an Adagrad copy is rescaled to the merged state, just as a push would be.
        """
        at, eps = self._at(slots), self.optimizer.eps
        own_value, own_state = self.value.index_select(0, at), self.state.index_select(0, at)
        pushed = encode(own_value - self._base_value.index_select(0, at), own_state, eps)
        pending_state = own_state - self._base_state.index_select(0, at)
        pending = self._current[slots] - self._start[slots]
        value, state = reply.invalid_value.to(at.device), reply.invalid_state.to(at.device)
        self._store(slots, value, state, reply.invalid_clock, reply.invalid_applied)
        merged = state + pending_state
        self.value.index_copy_(0, at, value + decode(pushed, merged, eps))
        self.state.index_copy_(0, at, merged)
        self._current[slots] += pending

    def stage_gradients(self, plan: ReadPlan, gradient: Tensor) -> None:
        """Capacity 0, before `commit`: push `gradient` [U, D] of `plan.rows` in the next round."""
        nothing = none()
        state = gradient.new_empty(len(gradient), 0)
        clock = torch.from_numpy(self._current[plan.touched] + 1)
        push = Request(plan.rows, gradient, state, clock, torch.ones_like(clock), nothing, nothing, nothing)
        self._staged.append(push)

    def commit(self, plan: ReadPlan) -> None:
        """The slots of `plan` were updated once: Clock, then Evict to capacity, sparing nothing (Algorithm 3)."""
        self._current[plan.touched] += 1
        if not self.held_back:
            self._release(plan.touched)
            return
        if self._evicts:
            self._policy.used(plan.touched)
        excess = len(self._free) - self._free_count - self.capacity_rows
        if excess > 0:
            victims = self._policy.victims(excess)
            dirty = victims[self._current[victims] > self._start[victims]]
            if len(dirty):
                self._staged.append(self._pushes(dirty))
            self._release(victims)
            self.counters.evictions += excess

    def _release(self, slots: Ints) -> None:
        """Free `slots` [k]."""
        self._index.remove(self._row[slots])
        self._row[slots] = self._start[slots] = self._current[slots] = -1
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    # -- pushes -----------------------------------------------------------------------------------

    def _at(self, slots: Ints) -> Tensor:
        """`slots` as an index into value and state."""
        return torch.from_numpy(slots).to(self.value.device)

    def _pushes(self, slots: Ints) -> Request:
        """The pending updates of `slots`, which stay as they are."""
        request = Request.empty(self.space.dim, self.state.shape[1], self.value.device)
        if len(slots) == 0:
            return request
        at = self._at(slots)
        state = self.state.index_select(0, at)
        step = self.value.index_select(0, at).sub_(self._base_value.index_select(0, at))
        request.push_rows = torch.from_numpy(self._row[slots])
        request.push_value = encode(step, state, self.optimizer.eps)
        request.push_state = state - self._base_state.index_select(0, at)
        request.push_clock = torch.from_numpy(self._current[slots])
        request.push_updates = torch.from_numpy(self._current[slots] - self._start[slots])
        return request

    def _take_pushes(self, slots: Ints) -> Request:
        """A request with the staged pushes, then those of `slots`; nothing is staged afterwards."""
        parts = self._staged
        self._staged = []
        if len(slots) or not parts:
            parts = [*parts, self._pushes(slots)]
        return Request.concat_pushes(parts)

    def pending(self) -> Request:
        """All held-back updates, staged and of dirty slots, as one request of pushes alone; changes nothing."""
        return Request.concat_pushes([*self._staged, self._pushes(self.dirty_slots())])

    def dirty_slots(self) -> Ints:
        """Slots that hold back updates, ascending."""
        return np.flatnonzero(self._current > self._start)

    def pending_counts(self) -> tuple[Tensor, Tensor]:
        """Rows [P] that hold back updates, staged ones included, and how many [P]."""
        dirty = self.dirty_slots()
        rows = [part.push_rows for part in self._staged] + [torch.from_numpy(self._row[dirty])]
        counts = [part.push_updates for part in self._staged]
        counts.append(torch.from_numpy(self._current[dirty] - self._start[dirty]))
        return torch.cat(rows), torch.cat(counts)

    def included_updates(self, slots: Ints) -> Ints:
        """Updates in the copies at `slots`, all workers' counted; needs `audit`."""
        included: Ints = self._applied[slots] + self._current[slots] - self._start[slots]
        return included

    def clear(self) -> None:
        """Forget every row and every staged push: after `pending()` was flushed."""
        self._staged = []
        self._release(np.flatnonzero(self._row >= 0))
        self._policy.clear()

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides on later steps, to resume bit for bit; only held rows are saved."""
        slots = np.flatnonzero(self._row >= 0)
        at = self._at(slots)
        tensors = {name: tensor.index_select(0, at) for name, tensor in self._tensors().items()}
        arrays = {name: torch.from_numpy(array[slots]) for name, array in self._arrays().items()}
        return {
            "slots": torch.from_numpy(slots),
            "free": torch.from_numpy(self._free[: self._free_count].copy()),
            "policy": self._policy.state_dict(),
            "staged": [[tensor.clone() for _, tensor in part.fields()] for part in self._staged],
            "counters": vars(self.counters).copy(),
            "observed_staleness_max": self.observed_staleness_max,
            **tensors,
            **arrays,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` of an equal cache gave."""
        self.clear()
        slots = state["slots"].numpy()
        at = self._at(slots)
        for name, tensor in self._tensors().items():
            tensor.index_copy_(0, at, state[name].to(tensor.device))
        for name, array in self._arrays().items():
            array[slots] = state[name].numpy()
        self._index.assign(self._row[slots], slots)
        self._free_count = len(state["free"])
        self._free[: self._free_count] = state["free"].numpy()
        self._policy.load_state_dict(state["policy"])
        self._staged = [Request.from_fields([t.clone() for t in part]) for part in state["staged"]]
        self.counters = Counters(**state["counters"])
        self.observed_staleness_max = int(state["observed_staleness_max"])

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"value": self.value, "state": self.state}
        if self.held_back:
            tensors |= {"base_value": self._base_value, "base_state": self._base_state}
        return tensors

    def _arrays(self) -> dict[str, Ints]:
        arrays = {"rows": self._row, "start": self._start, "current": self._current}
        return arrays | {"applied": self._applied} if len(self._applied) else arrays
