"""The owner of rows: master copies, optimizer state and global clocks (HET Algorithm 1, server side)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hetrain.consistency import ClockRule, breaks_others_bound, staleness_bound
from hetrain.errors import ConfigError
from hetrain.optim import RowOptimizer
from hetrain.store.clocks_before import ClocksBefore
from hetrain.store.difference import decode
from hetrain.store.directory import NONE, Directory, directory_columns
from hetrain.store.distinct import distinct_rows
from hetrain.store.flight import Flight
from hetrain.store.initial import InitialRows
from hetrain.store.messages import Part, Reply, Request, none
from hetrain.store.owner_columns import directing_copies, owner_columns, sends_notices
from hetrain.store.row_codec import RowCodec
from hetrain.store.row_memory import make_row_memory
from hetrain.store.scatter import add_rows, put_rows
from hetrain.store.space import Placement, RowSpace
from hetrain.store.undo import UndoLog

CHUNK = 1 << 16  # rows looked at together when a whole table is gone through


class Owner:
    """Rows of one embedding dim that live on this rank, in the order of `placement.rows_of(rank)`.

    `held_back`: pushes are differences of updates applied at workers; otherwise gradients. `staleness`: the others'
    bound, in updates. `audit`: replies tell how many updates a row has taken. `directory`: validate copies with
    notices, for `workers` workers; otherwise they send their clocks. `index`: array (all rows in memory from the start)
    or hash (those seen). `codec`: None sends rows as they are.
    """

    def __init__(
        self,
        space: RowSpace,
        placement: Placement,
        rank: int,
        optimizer: RowOptimizer,
        *,
        seed: int,
        device: torch.device,
        held_back: bool,
        clock: ClockRule = "max",
        staleness: float = 0,
        audit: bool = False,
        directory: bool = False,
        workers: int = 1,
        index: str = "array",
        codec: RowCodec | None = None,
    ) -> None:
        """Raises ConfigError when `optimizer`'s state does not add up and updates are held back."""
        if held_back:
            _check_additive(optimizer)
        self.space, self.placement, self.rank, self.optimizer = space, placement, rank, optimizer
        self.held_back, self.clock_rule, self.audit = held_back, clock, audit
        self.bound = staleness_bound(staleness)
        self.learning_rate = optimizer.lr  # of the gradients pushed; the engine sets it every step
        self.observed_staleness_max = 0  # max of c_g - c_c over the checks found valid
        self._initial = InitialRows(space, seed)
        flags = {"held_back": held_back, "audit": audit, "directory": directory}
        columns = owner_columns(space.dim, optimizer, staleness=staleness, workers=workers, **flags)
        self.memory = make_row_memory(index, placement, rank, columns, self._initial, device)
        self._directory: Directory | None = None
        if directing_copies(held_back, self.bound):
            self._directory = Directory(self.memory, workers, self.bound, notices=sends_notices(directory, self.bound))
        self._device, self._hashed = device, index == "hash"
        self.codec = codec or RowCodec("none", space.dim)
        self._undo: UndoLog | None = None
        self._before = ClocksBefore()  # when auditing
        self._flight = Flight()

    @property
    def value(self) -> Tensor:
        """[R, D] float32 of the rows held, R: all of the plan's, or those seen."""
        return self.memory["value"]

    @property
    def state(self) -> Tensor:
        """[R, S] float32."""
        return self.memory["state"]

    @property
    def clock(self) -> Tensor:
        """[R] int64 c_g."""
        return self.memory["clock"]

    @property
    def applied(self) -> Tensor:
        """[R] int64 updates taken; when auditing."""
        return self.memory["applied"]

    @property
    def holds_all(self) -> bool:
        """Whether every row of the plan is in memory."""
        return self.memory.used == self.placement.local_rows[self.rank]

    def local_of(self, rows: Tensor) -> Tensor:
        """Where global `rows` [n] lie in this owner's memory, [n] int64; -1 for rows never seen."""
        return self.memory.locate(rows)

    # -- a round ----------------------------------------------------------------------------------

    def serve(self, requests: Sequence[Request], part: Part = Part.WHOLE, block: int = 0) -> list[Reply]:
        """One round, or a `part` and `block` of it: the requests of all workers, in their order; a reply for each.

        (1) checks against the clocks as the previous round left them, (2) all pushes in worker order,
        (3) fetched and invalid rows answered, (4) notices, which bind the reads of the next round. Of a round's blocks
        each is about other rows, and block 0 is the first of its part.
        """
        if part is Part.ANNOUNCE:
            return self._take_announced(requests)
        if block == 0 and part is Part.WHOLE and self._undo is None:
            self._before.open()
        requests = [request.to(self._device) for request in requests]
        place = self.memory.place if self._undo is None else self.memory.locate
        pushes = [place(request.push_rows) for request in requests]
        fetched = [place(request.fetch_rows) for request in requests]
        checked = [self.local_of(request.check_rows) for request in requests]
        invalid = [self._check(rows, request) for rows, request in zip(checked, requests, strict=True)]
        pushed = self._apply(requests, pushes)
        waits = part is Part.WHOLE and not self.held_back and self._undo is None
        answers = [
            (*self._answer(worker, fetch, request.fetch_again, waits=waits), bad, *self._rows(check[bad]))
            for worker, (request, fetch, check, bad) in enumerate(zip(requests, fetched, checked, invalid, strict=True))
        ]
        notices = self._direct(requests, pushed, fetched, checked, invalid)
        return [Reply(*answer, *notice) for answer, notice in zip(answers, notices, strict=True)]

    def _take_announced(self, requests: Sequence[Request]) -> list[Reply]:
        """What each worker will fetch: which of it has to wait, and for which rows of its batch in flight others do."""
        rows = [self.memory.place(request.fetch_rows.to(self._device)) for request in requests]
        late, hot = self._flight.turn(rows, self.memory["mark"])
        return [Reply.flags(self.space.dim, 0, *flags) for flags in zip(late, hot, strict=True)]

    def _check(self, rows: Tensor, request: Request) -> Tensor:
        """Positions [V] of the checks, of local `rows` [C], that break the others' bound."""
        if rows.numel() == 0:
            return none(self._device)
        c_g = self.clock.index_select(0, rows)
        broken = breaks_others_bound(c_g, request.check_clock, self.bound)
        if self._undo is None:
            missed = (c_g - request.check_clock).masked_fill_(broken, 0)
            self.observed_staleness_max = max(self.observed_staleness_max, int(missed.max()))
        return torch.nonzero(broken).flatten()

    def _apply(self, requests: Sequence[Request], pushes: Sequence[Tensor]) -> Tensor:
        """Merge the pushes of a round, in worker order; the distinct local rows [U] that were pushed."""
        workers = [worker for worker, request in enumerate(requests) if request.push_rows.numel()]
        if not workers:
            return none(self._device)
        pushing, rows = [requests[worker] for worker in workers], [pushes[worker] for worker in workers]
        distinct, places = distinct_rows(rows, self.memory["mark"])
        if self._undo is not None:
            self._undo.record(distinct)
        elif self._directory is not None:
            self._directory.pushed(workers, rows, distinct, places)
        if self.audit and self._undo is None:
            self._before.record(distinct, self.clock.index_select(0, distinct))
        values = [self.codec.read_pushes(request.push_value) for request in pushing]
        if self.held_back:
            self._add_differences(rows, values, [request.push_state for request in pushing])
        else:
            self._apply_gradients(distinct, places, values)
        self.memory["touched"].index_fill_(0, distinct, True)
        self._count(rows, pushing)
        return distinct

    def _count(self, rows: Sequence[Tensor], pushing: Sequence[Request]) -> None:
        """Clocks of the rows pushed, and the updates they have taken where they are counted."""
        for part, request in zip(rows, pushing, strict=True):
            if not request.push_clock.numel():
                continue
            if self.clock_rule == "max":
                newer = torch.maximum(self.clock.index_select(0, part), request.push_clock)
                self.clock.index_copy_(0, part, newer)
            else:
                self.clock.index_add_(0, part, request.push_updates)
            if self.audit:
                self.applied.index_add_(0, part, request.push_updates)

    def _add_differences(self, rows: Sequence[Tensor], values: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """State differences first, so that every step is scaled by the state merged from all ranks."""
        for part, state in zip(rows, states, strict=True):
            if self.state.shape[1]:
                add_rows(self.state, part, state)
        for part, value in zip(rows, values, strict=True):
            merged = self.state.index_select(0, part)
            add_rows(self.value, part, decode(value, merged, self.optimizer.eps))

    def _apply_gradients(self, touched: Tensor, places: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Sum the gradients of every row over the ranks, then step its optimizer once."""
        gradient = gradients[0]
        if len(gradients) > 1:
            gradient = torch.zeros(len(touched), self.space.dim, device=self._device)
            for place, part in zip(places, gradients, strict=True):
                add_rows(gradient, place, part)
        value, state = self.value.index_select(0, touched), self.state.index_select(0, touched)
        self.optimizer.step_(value, state, gradient, self.learning_rate)
        put_rows(self.value, touched, value)
        put_rows(self.state, touched, state)

    def _answer(
        self, worker: int, rows: Tensor, again: Tensor, *, waits: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Which of local `rows` [N] have to be sent now, and those; `waits`: not those of the late leg."""
        if self._undo is not None:  # rows never seen are still initial
            sent = rows >= 0
            sent[sent.clone()] = self.memory["touched"].index_select(0, rows[sent])
        else:
            sent = self.memory["touched"].index_select(0, rows)
            if self._directory is not None:
                sent &= ~(again & self._directory.is_alone(worker, rows))
            if waits:
                sent &= ~self._flight.waits(worker, rows)
        return sent, *self._rows(rows[sent])

    def _rows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Copies of value, state, clock (where updates are held back) and applied (when auditing) of local `rows`.

        Whoever looks gets the values as they are.
        """
        # where gradients travel, the optimizer runs here alone and workers need neither state nor clocks
        nothing, value = none(rows.device), self.value.index_select(0, rows)
        return (
            value if self._undo is not None else self.codec.rows(value),
            (self.state if self.held_back else self.state[:, :0]).index_select(0, rows),
            self.clock.index_select(0, rows) if self.held_back or self.audit else nothing,
            self.applied.index_select(0, rows) if self.audit else nothing,
        )

    def _direct(
        self,
        requests: Sequence[Request],
        pushed: Tensor,
        fetched: Sequence[Tensor],
        checked: Sequence[Tensor],
        invalid: Sequence[Tensor],
    ) -> list[tuple[Tensor, Tensor]]:
        """Write down the new holders; then, per worker, global rows, ascending, and clocks of its notices."""
        directory, nothing = self._directory, none(self._device)
        if directory is None or self._undo is not None:
            return [(nothing, nothing)] * len(requests)
        for worker, (request, fetch, check, bad) in enumerate(zip(requests, fetched, checked, invalid, strict=True)):
            directory.checked(worker, check, request.check_clock)
            for rows in (fetch, check[bad]):
                directory.fetched(worker, rows, self.clock.index_select(0, rows))
        clock = self.clock.index_select(0, pushed)
        notices = []
        for at in directory.notices(pushed, clock):
            rows, order = torch.sort(self.memory.rows_at(pushed[at]))
            notices.append((rows, clock[at][order]))
        return notices

    def holders(self, rows: Tensor) -> Tensor:
        """Lower bounds of the clocks of all workers' copies of global `rows`: [n, W] int32, -1 for none."""
        if self._directory is None or not self._directory.notices_sent:
            raise ValueError("this owner sends no notices")
        return self._directory.held.index_select(0, self.local_of(rows))

    def clocks_before(self, rows: Tensor) -> Tensor:
        """Clocks of local `rows` [n] as the round before the newest one left them; needs `audit`."""
        return self._before.of(rows, self.clock.index_select(0, rows))

    def forget_flight(self) -> None:
        """No batch is in flight: all its gradients are, or will be, pushed before anything is read."""
        self._flight.forget()

    # -- looking ----------------------------------------------------------------------------------

    @contextmanager
    def view(self) -> Iterator[None]:
        """While open, pushes served change what is read; at exit every bit is as before."""
        if self._undo is not None:
            raise RuntimeError("a view of this owner is open already")
        self._undo = UndoLog(self._tensors())
        try:
            yield
        finally:
            self._undo.restore()
            self._undo = None

    def _tensors(self) -> dict[str, Tensor]:
        names = ("value", "state", "clock", "touched", *(("applied",) if self.audit else ()))
        return {name: self.memory[name] for name in names}

    # -- checkpoints ------------------------------------------------------------------------------

    def seen(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Global rows [n] that a push ever reached, their values [n, D] and states [n, S]; some at a time."""
        for first in range(0, self.memory.used, CHUNK):
            at = torch.nonzero(self.memory["touched"][first : first + CHUNK]).flatten().add_(first)
            if len(at):
                yield self.memory.rows_at(at), self.value.index_select(0, at), self.state.index_select(0, at)

    def start_over(self, placed: Tensor | None) -> None:
        """Forget every row. `placed`: rows [n], global, that get the first positions in this order."""
        self.memory.reset()
        self._before.open()
        if placed is not None:
            self.memory.place(placed.to(self._device))

    def take_up(self, rows: Tensor, value: Tensor, state: Tensor) -> None:
        """Write those of global `rows` [n] that lie here and are not what they start as: [n, D] and [n, S].

        Before `load_state_dict`. Raises TrainingError when memory runs out.
        """
        fresh = torch.empty_like(value)
        self._initial.fill(fresh, rows)
        changed = (fresh != value).any(1) | (state != 0).any(1)
        chosen = torch.nonzero(changed & (self.placement.owner_of(rows) == self.rank)).flatten()
        at = self.memory.place(rows[chosen].to(self._device))
        put_rows(self.value, at, value[chosen].to(self._device))
        put_rows(self.state, at, state[chosen].to(self._device))

    def _bookkeeping(self) -> dict[str, Tensor]:
        """Everything per row but the row itself."""
        names = ["clock", "touched", *(["applied"] if self.audit else [])]
        if self._directory is not None:
            names += directory_columns(1, notices=self._directory.notices_sent)
        return {name: self.memory[name] for name in names}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of `value` and `state` lacks, to resume bit for bit.

        Inside a view: the clocks as they are outside it, and the rows the view changed as they were.
        """
        log = self._undo or UndoLog(self._tensors())
        before = log.before
        outside = {name: tensor.clone() for name, tensor in self._bookkeeping().items()}
        for name in outside.keys() & before.keys():
            outside[name].index_copy_(0, log.rows, before[name])
        return {
            "bookkeeping": outside,
            "rows": log.rows.clone(),
            "value": before["value"],
            "state": before["state"],
            "observed_staleness_max": self.observed_staleness_max,
            "flight": self._flight.state_dict(),
            "placed": self.memory.rows() if self._hashed else none(),  # in the order of their positions
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Call after `value` and `state` were loaded, outside a view; None: no clock is known, and no copy."""
        if state is None:
            self._reset()
            return
        for name, tensor in self._bookkeeping().items():
            tensor.copy_(state["bookkeeping"][name])
        rows = state["rows"].to(self._device)
        put_rows(self.value, rows, state["value"].to(self._device))
        put_rows(self.state, rows, state["state"].to(self._device))
        self.observed_staleness_max = int(state["observed_staleness_max"])
        self._flight.load_state_dict(state["flight"], self._device)

    def _reset(self) -> None:
        """Clocks at 0, no copies; a row counts as touched when it is not what it starts as."""
        self._flight.forget()
        for name, tensor in self._bookkeeping().items():
            tensor.fill_(NONE if name == "held" else 0)
        touched, rows = self.memory["touched"], self.memory.rows()
        for first in range(0, len(rows), CHUNK):
            at = slice(first, first + CHUNK)
            fresh = torch.empty_like(self.value[at])
            self._initial.fill(fresh, rows[at])
            touched[at] = (fresh != self.value[at]).any(1) | (self.state[at] != 0).any(1)


def _check_additive(optimizer: RowOptimizer) -> None:
    if not optimizer.additive:
        raise ConfigError(
            f"optimizer.rows.name={optimizer.name}: its state cannot be merged from held-back updates; "
            "use sgd, adagrad or rowwise_adagrad, or set consistency.cache.capacity=0"
        )
