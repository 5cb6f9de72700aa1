"""An owner's side where ranks step at their own pace: gradients come in, rows and dense parameters go out.

One lock per owner: an Ask's pushes are applied whole before another's, and what is read is read at one moment. Inside
it everything is a few tensor operations over all rows of the message; rows are encoded and decoded, and bytes packed
and unpacked, outside.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hetrain.store.ask import NO_GATE, Answer, Ask, RowsAnswered, RowsAsked
from hetrain.store.dense_shard import DenseShard
from hetrain.store.meetings import Meetings
from hetrain.store.messages import Request, none
from hetrain.store.owner import Owner
from hetrain.store.worker_clocks import ENDED, WorkerClocks

Tell = Callable[[Answer], None]
Parked = tuple[Ask, Tell]


class OwnerService:
    """Answers Asks of many workers, on any thread."""

    def __init__(
        self,
        owners: Sequence[Owner],
        dense: DenseShard,
        clocks: WorkerClocks[Parked],
        factor: Callable[[int], float],
        *,
        copies: bool,
        audit: bool,
        meetings: Meetings | None,
    ) -> None:
        """`owners`: one per width group, where gradients travel. `factor(pushed)`: of the learning rates, once the
        gradients of so many examples were applied. `copies`: workers keep rows, and want their optimizer state.
        `meetings`: where this owner keeps the run's count of examples.
        """
        self.lock = threading.Lock()
        self._owners, self._dense, self.clocks, self.meetings = list(owners), dense, clocks, meetings
        self._factor, self._copies, self._audit = factor, copies, audit
        self._rates = [owner.optimizer.lr for owner in owners]
        self.pushed = 0  # examples whose gradients were applied
        self.missed_pushes_max = 0  # pushes of others between a worker's read and its push of what it computed on that
        self.missed_updates_max = 0  # the same per row, in audited pushes
        self._withdrawn = [-1] * len(clocks.clocks)  # by worker, the newest Ask it does not want answered
        self._pushes = 0
        self._read_at = [0] * len(clocks.clocks)  # by worker, pushes at its last read for training

    def serve(self, ask: Ask, tell: Tell) -> None:
        """Apply the push of `ask`, then answer it: at once, or when the gate opens, on the thread that opens it.

        Whoever only looks gets the rows as they are.
        """
        for owner, rows in zip(self._owners, ask.rows, strict=True):
            rows.push_gradient = owner.codec.read_pushes(rows.push_gradient)
        if ask.begin:
            tell = self._encoding(tell)
        with self.lock:
            answers = self._take(ask)
            if ask.number <= self._withdrawn[ask.worker] or not self._grants(ask):
                answers.append((tell, self._refusal()))
            elif ask.gate == NO_GATE or not self.clocks.park(ask.worker, ask.gate, (ask, tell)):
                answers.append((tell, self._read(ask)))
        for told, answer in answers:
            told(answer)

    def _encoding(self, tell: Tell) -> Tell:
        """`tell`, of rows as their codecs have them."""

        def tell_encoded(answer: Answer) -> None:
            pairs = zip(self._owners, answer.rows, strict=bool(answer.rows))
            rows = [replace(part, value=owner.codec.rows(part.value)) for owner, part in pairs]
            tell(replace(answer, rows=rows))

        return tell if all(owner.codec.exact for owner in self._owners) else tell_encoded

    def _take(self, ask: Ask) -> list[tuple[Tell, Answer]]:
        """Apply the push; the answers to reads that waited for it."""
        if ask.pushed:
            self._apply(ask)
        else:  # what a threshold kept from earlier pushes, perhaps: those were counted
            self._apply_rows(ask, self._factor(self.pushed), updates=0)
        due = self.clocks.advance(ask.worker, ENDED if ask.ended else ask.clock)
        if ask.ended and self.meetings is not None:
            self.meetings.end(ask.worker)
        return [(tell, self._read(parked)) for parked, tell in due]

    def _grants(self, ask: Ask) -> bool:
        return self.meetings is None or not ask.begin or self.meetings.begin(ask.begin)

    def _refusal(self) -> Answer:
        return Answer(False, 0, self.pushed, self._begun, torch.empty(0), [])

    @property
    def _begun(self) -> int:
        return 0 if self.meetings is None else self.meetings.begun

    def withdraw(self, worker: int, number: int) -> None:
        """Refuse Ask `number` of `worker`, which was turned back elsewhere: parked here, or still on its way."""
        with self.lock:
            self._withdrawn[worker] = max(self._withdrawn[worker], number)
            parked = self.clocks.withdraw(worker)
            if parked is not None and parked[0].number > number:  # a late withdrawal of one answered since
                self.clocks.park(worker, parked[0].gate, parked)
                parked = None
            refusal = self._refusal()
        if parked is not None:
            parked[1](refusal)

    # -- under the lock ---------------------------------------------------------------------------

    def _apply(self, ask: Ask) -> None:
        factor = self._factor(self.pushed)
        self._dense.push(ask.dense, factor)
        self._apply_rows(ask, factor, updates=1)
        self.missed_pushes_max = max(self.missed_pushes_max, self._pushes - self._read_at[ask.worker])
        self._pushes += 1
        self._read_at[ask.worker] += 1  # its own push is none that it missed
        self.pushed += ask.pushed

    def _apply_rows(self, ask: Ask, factor: float, *, updates: int) -> None:
        for owner, rate, rows in zip(self._owners, self._rates, ask.rows, strict=True):
            if not len(rows.push_rows):
                continue
            owner.learning_rate = rate * factor
            if len(rows.push_seen):
                missed = owner.applied.index_select(0, owner.memory.place(rows.push_rows)) - rows.push_seen
                self.missed_updates_max = max(self.missed_updates_max, int(missed.max()))
            owner.serve([self._request(rows, owner, updates)])

    def _request(self, rows: RowsAsked, owner: Owner, updates: int) -> Request:
        request = Request.empty(owner.space.dim, 0)
        request.push_rows, request.push_value = rows.push_rows, rows.push_gradient
        request.push_state = torch.empty(len(rows.push_rows), 0)
        if self._audit:
            request.push_clock = torch.zeros_like(rows.push_rows)
            request.push_updates = torch.full_like(rows.push_rows, updates)
        return request

    def _read(self, ask: Ask) -> Answer:
        slowest = 0
        if ask.begin:
            slowest = self.clocks.reads(ask.worker)
            self._read_at[ask.worker] = self._pushes
        dense = self._dense.value if ask.dense_wanted else torch.empty(0)
        rows = [self._rows(owner, part.fetch_rows) for owner, part in zip(self._owners, ask.rows, strict=True)]
        return Answer(True, slowest, self.pushed, self._begun, dense, rows)

    def _rows(self, owner: Owner, wanted: Tensor) -> RowsAnswered:
        at = owner.local_of(wanted)
        stored = owner.memory["touched"].index_select(0, at.clamp(min=0)) if owner.memory.used else at >= 0
        if not owner.holds_all:
            stored &= at >= 0  # rows never seen
        sent = at if stored.all() else at[stored]
        state = owner.state if self._copies else owner.state[:, :0]
        return RowsAnswered(
            stored,
            owner.value.index_select(0, sent),
            state.index_select(0, sent),
            owner.applied.index_select(0, sent) if self._audit else none(),
        )

    def restart(self) -> None:
        """Clocks and counts from 0: training begins, or goes on from what was loaded."""
        with self.lock:
            self.clocks.restart()
            self.pushed = self._pushes = 0
            self._read_at = [0] * len(self._read_at)
