"""A worker's bounded cache of rows (HET Algorithms 1 to 3, worker side), vectorised over a batch.

A step is `begin` -> exchange -> `admit` -> forward, backward, update of the slots -> `commit`. The next batch may
`begin` before this one's forward, so that its exchange runs beside the computation; its `admit` then follows this
batch's `commit`. Where a row must not be read without this batch's update of it (staleness 0, capacity 0) that round
has a late leg: `begin_late` -> exchange -> `admit`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetrain.consistency import UNBOUNDED, breaks_others_bound, breaks_own_bound, staleness_bound
from hetrain.optim import RowOptimizer
from hetrain.store.arrivals import Arrivals, Fetched
from hetrain.store.copies import NONE, Copies
from hetrain.store.counters import Counters
from hetrain.store.index import Ints
from hetrain.store.initial import InitialRows
from hetrain.store.messages import Reply, Request, none
from hetrain.store.policy import make_policy
from hetrain.store.read import Asked, ReadPlan
from hetrain.store.residue import Residue
from hetrain.store.row_codec import RowCodec
from hetrain.store.slots import Slots
from hetrain.store.space import RowSpace

NO_SLOTS = np.empty(0, np.int64)


class Cache:
    """Rows of one embedding dim. `capacity_rows` are kept between steps; the batches in flight add `batch_rows`.

    `value` [slots, D] and `state` [slots, S], slots = capacity_rows + batch_rows; S = 0 at capacity 0. `seed`: of the
    initial rows, which owners do not send. `audit`: replies carry how many updates each row has taken, and the cache
    keeps it. `directory`: owners send notices, and only doubted copies are checked. `count_updates`: pushes say how
    many updates they hold, as clock=sum wants. `late_leg`: rows of the batch in flight are left to `begin_late`.
    `index`: array | hash. `codec`: None sends pushes as they are. Raises ValueError for memory of another size.
    """

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
        seed: int,
        audit: bool = False,
        directory: bool = False,
        count_updates: bool = False,
        late_leg: bool = False,
        index: str = "array",
        codec: RowCodec | None = None,
    ) -> None:
        slots = capacity_rows + batch_rows
        if value.shape != (slots, space.dim) or state.shape[0] != slots:
            raise ValueError(f"value {tuple(value.shape)}, state {tuple(state.shape)}: expected {slots} slots")
        self.space, self.capacity_rows = space, capacity_rows
        self.held_back = capacity_rows > 0  # else gradients travel and nothing is kept
        self.bound, self.counters = staleness_bound(staleness), Counters()
        self.observed_staleness_max = 0  # max of c_c - c_s over the reads found valid
        self._audit, self._directory, self._late_leg = audit, directory, late_leg
        self._evicts = 0 < capacity_rows < space.rows
        self._policy_name, self._policy = policy, make_policy(policy, slots)
        self.slots = Slots(space.rows, slots, index)
        self._codec = codec or RowCodec("none", space.dim)
        self._arrivals = Arrivals(InitialRows(space, seed), self._codec, value.device)
        flags = {"held_back": self.held_back, "audit": audit, "counted": count_updates or audit}
        self.copies = Copies(value, state, optimizer, self._codec, **flags)
        dct = None if self.held_back else self._codec.dct
        self.residue = None if dct is None else Residue(space, self._codec, dct, value.device)
        self._spared = np.zeros(slots, bool)  # all False but in `commit`
        self._staged: list[Request] = []  # pushes for the next round
        self._open: ReadPlan | None = None  # begun, not yet admitted

    # -- one step ---------------------------------------------------------------------------------

    def begin(self, rows: Tensor) -> ReadPlan:
        """Plan the read of `rows` [n] int64 on the CPU, repeats allowed.

        A row of the batch in flight is judged by the clock it will have when it is read: one more than now.
        Raises ValueError when the batch needs more slots than there are.
        """
        lookups = rows.numpy()
        slots, new_rows, new_slots = self.slots.take(lookups)
        last = self.slots.last_lookups(slots)
        distinct, touched = lookups[last], slots[last]
        late = touched[:0]
        if not self.held_back:  # every row is fetched; which of them are late the owners say (`leave_late`)
            judged, new_rows, new_slots = late, distinct, touched
        else:
            waits = self.copies.reading[touched] & self._late_leg
            judged, late = touched[~waits], touched[waits]
        asked = self._ask(judged, new_rows, new_slots)
        self._open = ReadPlan(
            **vars(asked),
            slots=torch.from_numpy(slots),
            rows=torch.from_numpy(distinct),
            touched=touched,
            late_slots=late,
        )
        return self._open

    def begin_late(self, plan: ReadPlan, hot: Tensor) -> Asked:
        """After `commit` of the batch before `plan`: ask for the rows that were left out.

        `hot` [U], with capacity 0: which gradients of the batch before go along, in the order of its rows; the others
        wait for the next round.
        """
        late, later = plan.late_slots, self._staged  # what was evicted meanwhile can wait, too
        self._staged = []
        if not self.held_back:
            gradients = later.pop()
            self._staged.append(gradients.pushes(torch.nonzero(hot).flatten()))
            later.append(gradients.pushes(torch.nonzero(~hot).flatten()))
        judged, missed = (late, late[:0]) if self.held_back else (late[:0], late)
        asked = self._ask(judged, self.slots.row[missed], missed)
        self._staged = later
        return asked

    def _ask(self, judged: Ints, new_rows: Ints, new_slots: Ints) -> Asked:
        """Staged pushes, and for the slots `judged` what they need; the rows missed are fetched: [m] and [m]."""
        rows, clock = self.slots.row[judged], self.copies.clock_at_read(judged)
        own, noticed, checked = self._judge(judged, clock)
        request = self.take_pushes(judged[own])
        self.copies.pushed(judged[own], request)
        self.copies.noticed[judged[checked]] = NONE
        request.fetch_rows = torch.from_numpy(np.concatenate([new_rows, rows[own], rows[noticed]]))
        request.fetch_again = torch.zeros(len(request.fetch_rows), dtype=torch.bool)
        request.fetch_again[len(new_rows) : len(new_rows) + len(own)] = True
        request.check_rows = torch.from_numpy(rows[checked])
        request.check_clock = torch.from_numpy(clock[checked])
        return Asked(
            request=request,
            slots_asked=judged if self.held_back else new_slots,
            new_slots=new_slots,
            stale_slots=judged[np.concatenate([own, noticed])],
            check_slots=judged[checked],
            own_invalid=len(own),
        )

    def _judge(self, slots: Ints, clock: Ints) -> tuple[Ints, Ints, Ints]:
        """Positions in `slots` [U] of the copies that break their own bound, of those that are known to break the
        others' bound, and of those whose owner must be asked; `clock` [U] at the read, -1: no row yet."""
        held = clock >= 0
        start = self.copies.start[slots]
        own = held & breaks_own_bound(start, clock, self.bound)
        rest = held & ~own
        if rest.any():
            self.observed_staleness_max = max(self.observed_staleness_max, int((clock - start)[rest].max()))
        broken = np.zeros_like(held)
        doubted = rest if self.bound < UNBOUNDED else broken
        if self._directory:
            known = self.copies.noticed[slots]
            doubted = doubted & (known >= 0)
            broken = doubted & breaks_others_bound(known, clock, self.bound)
        return np.flatnonzero(own), np.flatnonzero(broken), np.flatnonzero(doubted & ~broken)

    def admit(self, asked: Asked, reply: Reply) -> None:
        """Take up the owners' answer (merged by route.py); after it the slots asked for may be read."""
        if isinstance(asked, ReadPlan):
            self._open, reply = None, asked.without_late(reply)
        fetched, new = self._fetched(asked, reply), len(asked.new_slots)
        invalid = asked.check_slots[_array(reply.invalid)]
        self.copies.put(asked.new_slots, fetched.part(slice(new)))
        self.copies.rebase(asked.stale_slots, fetched.part(slice(new, None)))
        self.copies.rebase(invalid, self._arrivals.found_invalid(reply))
        self._take_notices(reply)
        self.copies.reading[asked.slots_asked] = True
        self.counters.hits += len(asked.slots_asked) - new - len(asked.stale_slots) - len(invalid)
        self.counters.misses += new
        self.counters.invalid += len(invalid) + len(asked.stale_slots) - asked.own_invalid
        self.counters.own_invalid += asked.own_invalid

    def _fetched(self, asked: Asked, reply: Reply) -> Fetched:
        """All fetched rows [N]. Of those not sent, missed ones are made here and the others are what they were."""
        sent, new = _array(reply.stored), len(asked.new_slots)
        fetched = self._arrivals.fetched(reply, asked.request.fetch_rows[:new])
        kept = np.flatnonzero(~sent[new:])
        if len(kept):
            fetched.replace(new + kept, self.copies.bases(asked.stale_slots[kept]))
        return fetched

    def rows_of(self, rows: Tensor, reply: Reply) -> Tensor:
        """Values [N, D] of fetched `rows` [N] that no copy is kept of: those of `reply`, or initial ones."""
        return self._arrivals.fetched(reply, rows).value

    def _take_notices(self, reply: Reply) -> None:
        """Doubt the copies that the owners warn of; those that left the cache meanwhile are passed over."""
        if reply.notice_rows.numel():
            slots = self.slots.find(_array(reply.notice_rows))
            held = slots >= 0
            self.copies.noticed[slots[held]] = _array(reply.notice_clock)[held]

    def stage_gradients(self, plan: ReadPlan, gradient: Tensor) -> None:
        """Capacity 0, before `commit`: push `gradient` [U, D] of `plan.rows` in the next round."""
        nothing = none()
        clock = torch.from_numpy(self.copies.current[plan.touched] + 1) if self._audit else nothing
        state = gradient.new_empty(len(gradient), 0)
        updates = torch.ones_like(clock)
        encode = self._codec.pushes if self.residue is None else partial(self.residue.take, plan.rows)
        pushed = encode(gradient)
        request = Request(plan.rows, pushed, state, clock, updates, nothing, nothing.bool(), nothing, nothing)
        self._staged.append(request)

    def commit(self, plan: ReadPlan) -> None:
        """The slots of `plan` were updated once: Clock, then Evict to capacity (Algorithm 3).

        Rows of the batch begun meanwhile stay, and those it brings in do not count yet.
        """
        if self.copies.threshold:
            self.copies.threshold.count_step()
        self.copies.current[plan.touched] += 1
        self.copies.reading[plan.touched] = False
        if not self.held_back:
            with self._sparing() as spared:
                self._release(plan.touched[~spared[plan.touched]])
        else:
            self._shrink(plan.touched)

    def _shrink(self, used: Ints) -> None:
        """A batch used these slots, the least recent lookup first: Evict to capacity."""
        if self._evicts:
            self._policy.used(used)
            coming = 0 if self._open is None else len(self._open.new_slots)
            excess = self.slots.held - coming - self.capacity_rows
            if excess > 0:
                self._evict(excess)

    def _evict(self, count: int) -> None:
        with self._sparing() as spared:
            victims = self._policy.victims(count, spared)
        dirty = self.copies.dirty_among(victims)
        if len(dirty):
            self._staged.append(self._pushes(dirty))
        self._release(victims)
        self.counters.evictions += len(victims)

    @contextmanager
    def _sparing(self) -> Iterator[NDArray[np.bool_]]:
        """By slot, whether the batch begun meanwhile reads it."""
        spared = NO_SLOTS if self._open is None else self._open.touched
        self._spared[spared] = True
        yield self._spared
        self._spared[spared] = False

    def _release(self, slots: Ints) -> None:
        self.slots.release(slots)
        self.copies.drop(slots)

    # -- pushes -----------------------------------------------------------------------------------

    def _pushes(self, slots: Ints) -> Request:
        return self.copies.pushes(slots, self.slots.row[slots])

    def take_pushes(self, slots: Ints = NO_SLOTS) -> Request:
        """A request with the staged pushes, then those of `slots`; nothing is staged afterwards."""
        parts = self._staged
        self._staged = []
        if len(slots) or not parts:
            parts = [*parts, self.copies.pushes(slots, self.slots.row[slots], whole=False)]
        return Request.concat_pushes(parts)

    def pending(self, part: int = 0, parts: int = 1) -> Request:
        """Held-back updates, staged and of dirty slots, of rows whose number modulo `parts` is `part`.

        One request of pushes alone; changes nothing.
        """
        dirty, staged = self.copies.dirty(), self._staged
        if self.residue is not None:
            staged = [self.residue.merged(Request.concat_pushes([*staged, self._pushes(dirty)]))]
        if parts > 1:
            dirty = dirty[self.slots.row[dirty] % parts == part]
            staged = [push.pushes(torch.nonzero(push.push_rows % parts == part).flatten()) for push in staged]
        return Request.concat_pushes([*staged, self._pushes(dirty)])

    @property
    def pending_bytes(self) -> int:
        """Of the values and states that `pending` gives."""
        rows = sum(len(push.push_rows) for push in self._staged) + len(self.copies.dirty())
        rows += 0 if self.residue is None else self.residue.count
        return rows * 4 * (self.space.dim + self.copies.state.shape[1])

    @property
    def residue_age_max(self) -> int:
        """The most pushes of a row that something below the threshold waited for."""
        return self.copies.age_max if self.residue is None else self.residue.age_max

    def pending_counts(self) -> tuple[Tensor, Tensor]:
        """Rows [P] that hold back updates, staged ones included, and how many [P]; needs `audit`."""
        dirty = self.copies.dirty()
        rows = [part.push_rows for part in self._staged] + [torch.from_numpy(self.slots.row[dirty])]
        counts = [part.push_updates for part in self._staged] + [torch.from_numpy(self.copies.pending(dirty))]
        return torch.cat(rows), torch.cat(counts)

    def included_updates(self, slots: Ints) -> Ints:
        """Updates in the copies at `slots`, all workers' counted; needs `audit`."""
        included: Ints = self.copies.applied[slots] + self.copies.pending(slots)
        return included

    def restart(self, steps: int) -> None:
        """Nothing is held; `steps` were trained before, by whatever caches."""
        self.clear()
        threshold = self.copies.threshold if self.residue is None else self.residue.threshold
        if threshold is not None:
            threshold.restart(steps)

    def clear(self) -> None:
        """Forget every row and every staged push: after `pending()` was flushed."""
        self._staged, self._open = [], None
        if self.residue is not None:
            self.residue.clear()
        self._release(np.flatnonzero(self.slots.row >= 0))
        self._policy.clear()

    # -- memory and checkpoints -------------------------------------------------------------------

    def grow(self, value: Tensor, state: Tensor) -> None:
        """Move to larger memory, whose first slots hold what the present ones do."""
        held = self._policy.state_dict()
        self.copies.grow(value, state)
        self.slots.grow(len(value))
        self._spared = np.zeros(len(value), bool)
        self._policy = make_policy(self._policy_name, len(value))
        self._policy.load_state_dict(held)

    def was_read(self, rows: Tensor) -> bool:
        """Whether `rows` are those of the batch that was read ahead when the state was saved."""
        slots = np.unique(self.slots.find(np.unique(rows.numpy())))
        return np.array_equal(slots, np.flatnonzero(self.copies.reading))

    def forget_read(self) -> None:
        """The batch that was read ahead will not come: where its rows stay, that was a use, by ascending row."""
        read = np.flatnonzero(self.copies.reading)
        if not self.held_back:
            self._release(read)
        else:
            self.copies.doubt_read()
            self._shrink(read[np.argsort(self.slots.row[read])])

    def reread(self, rows: Tensor) -> ReadPlan:
        """The plan of the batch that was read ahead when the state was saved: nothing is asked for again."""
        lookups = rows.numpy()
        slots = self.slots.find(lookups)
        last = self.slots.last_lookups(slots)
        request = Request.empty(self.space.dim, self.copies.state.shape[1])
        nothing = last[:0]
        asked = Asked(request, slots[last], nothing, nothing, nothing, 0)
        rows_read = torch.from_numpy(lookups[last])
        return ReadPlan(
            **vars(asked), slots=torch.from_numpy(slots), rows=rows_read, touched=slots[last], late_slots=nothing
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides on later steps, to resume bit for bit; only held rows are saved.

        Between a `begin` and its `admit` there is no state to save.
        """
        slots = self.slots.state_dict()
        return {
            **({} if self.residue is None else {"residue": self.residue.state_dict()}),
            "slots": slots,
            "copies": self.copies.state_dict(slots["slots"].numpy()),
            "policy": self._policy.state_dict(),
            "staged": [[tensor.clone() for _, tensor in part.fields()] for part in self._staged],
            "counters": vars(self.counters).copy(),
            "observed_staleness_max": self.observed_staleness_max,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` of an equal cache gave."""
        self.clear()
        self.slots.load_state_dict(state["slots"])
        self.copies.load_state_dict(state["slots"]["slots"].numpy(), state["copies"])
        self._policy.load_state_dict(state["policy"])
        self._staged = [Request.from_fields([t.clone() for t in part]) for part in state["staged"]]
        if self.residue is not None:
            self.residue.load_state_dict(state["residue"])
        self.counters = Counters(**state["counters"])
        self.observed_staleness_max = int(state["observed_staleness_max"])


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
