"""The owner of rows: master copies, optimizer state and global clocks (HET Algorithm 1, server side)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hetrain.consistency import ClockRule, breaks_others_bound, staleness_bound
from hetrain.errors import ConfigError
from hetrain.optim import RowOptimizer
from hetrain.store.difference import decode
from hetrain.store.initial import fill_initial_rows
from hetrain.store.messages import Reply, Request, none
from hetrain.store.space import Placement, RowSpace
from hetrain.store.undo import UndoLog


class Owner:
    """Rows of one embedding dim that live on this rank, in the order of `placement.rows_of(rank)`."""

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
    ) -> None:
        """`held_back`: pushes are differences of updates applied at workers; otherwise gradients.

        `staleness`: the others' bound, in updates. `audit`: replies tell how many updates a row has taken.
        Raises ConfigError when `optimizer`'s state does not add up and updates are held back.
        """
        if held_back and not optimizer.additive:
            raise ConfigError(
                f"optimizer.rows.name={optimizer.name}: its state cannot be merged from held-back updates; "
                "use sgd, adagrad or rowwise_adagrad, or set consistency.cache.capacity=0"
            )
        self.space, self.placement, self.rank, self.optimizer = space, placement, rank, optimizer
        self.held_back, self.clock_rule, self.audit = held_back, clock, audit
        self.bound = staleness_bound(staleness)
        self.learning_rate = optimizer.lr  # of the gradients pushed; the engine sets it every step
        self.observed_staleness_max = 0  # max of c_g - c_c over the checks found valid
        rows = placement.local_rows[rank]
        self.value = torch.empty(rows, space.dim, device=device)  # [R_local, D]
        self.state = torch.zeros(rows, optimizer.state_width(space.dim), device=device)  # [R_local, S]
        self.clock = torch.zeros(rows, dtype=torch.int64, device=device)  # [R_local] c_g
        self.applied = torch.zeros(rows, dtype=torch.int64, device=device)  # [R_local] updates taken
        self._mark = torch.empty(0 if held_back else rows, dtype=torch.int64, device=device)
        self._undo: UndoLog | None = None
        self._fill(seed)

    def _fill(self, seed: int) -> None:
        """Initial rows, whatever the plan."""
        for owned in self.placement.rows_of(self.rank):
            ids = torch.arange(owned.first_row, owned.first_row + owned.rows, device=self.value.device)
            part = self.value[owned.local : owned.local + owned.rows]
            fill_initial_rows(part, seed, owned.table_index, ids, owned.table.init_bound)

    def serve(self, requests: Sequence[Request]) -> list[Reply]:
        """One round: the requests of all ranks to this owner, in rank order; a reply for each.

        (1) checks against the clocks as the previous round left them, (2) all pushes in rank order,
        (3) fetched and invalid rows answered.
        """
        requests = [request.to(self.value.device) for request in requests]
        invalid = [self._check(request) for request in requests]
        self._apply(requests)
        return [self._answer(request, bad) for request, bad in zip(requests, invalid, strict=True)]

    def _check(self, request: Request) -> Tensor:
        """Positions [V] of the checks that break the others' bound."""
        if request.check_rows.numel() == 0:
            return none(self.clock.device)
        c_g = self.clock.index_select(0, self.placement.local_of(request.check_rows))
        broken = breaks_others_bound(c_g, request.check_clock, self.bound)
        if self._undo is None:
            missed = (c_g - request.check_clock).masked_fill_(broken, 0)
            self.observed_staleness_max = max(self.observed_staleness_max, int(missed.max()))
        return torch.nonzero(broken).flatten()

    def _apply(self, requests: Sequence[Request]) -> None:
        """Merge the pushes of a round, in rank order."""
        pushing = [request for request in requests if request.push_rows.numel()]
        if not pushing:
            return
        rows = [self.placement.local_of(request.push_rows) for request in pushing]
        if self._undo is not None:
            for part in rows:
                self._undo.record(part)
        if self.held_back:
            self._add_differences(rows, pushing)
        else:
            self._apply_gradients(rows, pushing)
        for part, request in zip(rows, pushing, strict=True):
            if self.clock_rule == "max":
                newer = torch.maximum(self.clock.index_select(0, part), request.push_clock)
                self.clock.index_copy_(0, part, newer)
            else:
                self.clock.index_add_(0, part, request.push_updates)
            self.applied.index_add_(0, part, request.push_updates)

    def _add_differences(self, rows: Sequence[Tensor], pushing: Sequence[Request]) -> None:
        """State differences first, so that every step is scaled by the state merged from all ranks."""
        for part, request in zip(rows, pushing, strict=True):
            if self.state.shape[1]:
                self.state.index_add_(0, part, request.push_state)
        for part, request in zip(rows, pushing, strict=True):
            merged = self.state.index_select(0, part)
            self.value.index_add_(0, part, decode(request.push_value, merged, self.optimizer.eps))

    def _apply_gradients(self, rows: Sequence[Tensor], pushing: Sequence[Request]) -> None:
        """Sum the gradients of every row over the ranks, then step its optimizer once."""
        touched, gradient = rows[0], pushing[0].push_value
        if len(rows) > 1:
            touched, places = self._distinct(rows)
            gradient = torch.zeros(len(touched), self.space.dim, device=self.value.device)
            for place, request in zip(places, pushing, strict=True):
                gradient.index_add_(0, place, request.push_value)
        value, state = self.value.index_select(0, touched), self.state.index_select(0, touched)
        self.optimizer.step_(value, state, gradient, self.learning_rate)
        self.value.index_copy_(0, touched, value)
        self.state.index_copy_(0, touched, state)

    def _distinct(self, rows: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Distinct rows [U] of all parts, and for each part the positions of its rows among them.

        Linear: each part is distinct in itself, so a row is new unless an earlier part marked it.
        """
        mark, touched, places, count = self._mark, [], [], 0
        for part in rows:
            mark.index_fill_(0, part, -1)
        for part in rows:
            new = part[mark.index_select(0, part) < 0]
            mark.index_copy_(0, new, torch.arange(count, count + len(new), device=mark.device))
            count += len(new)
            touched.append(new)
            places.append(mark.index_select(0, part))
        return torch.cat(touched), places

    def _answer(self, request: Request, invalid: Tensor) -> Reply:
        fetched = self._rows(request.fetch_rows)
        return Reply(*fetched, invalid, *self._rows(request.check_rows[invalid]))

    def _rows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Copies of value, state, clock and (when auditing) applied of global `rows`."""
        local = self.placement.local_of(rows)
        # where gradients travel, the optimizer runs here alone and workers need no state
        state = self.state if self.held_back else self.state[:, :0]
        applied = self.applied.index_select(0, local) if self.audit else none(local.device)
        return (
            self.value.index_select(0, local),
            state.index_select(0, local),
            self.clock.index_select(0, local),
            applied,
        )

    @contextmanager
    def view(self) -> Iterator[None]:
        """While open, pushes served change what is read; at exit every bit is as before."""
        if self._undo is not None:
            raise RuntimeError("a view of this owner is open already")
        tensors = {"value": self.value, "state": self.state, "clock": self.clock, "applied": self.applied}
        self._undo = UndoLog(tensors)
        try:
            yield
        finally:
            self._undo.restore()
            self._undo = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of `value` and `state` lacks, to resume bit for bit.

        Inside a view: the clocks as they are outside it, and the rows the view changed as they were.
        """
        log = self._undo or UndoLog({"value": self.value, "state": self.state})
        clock, applied = self.clock.clone(), self.applied.clone()
        if self._undo is not None:
            clock.index_copy_(0, log.rows, log.before["clock"])
            applied.index_copy_(0, log.rows, log.before["applied"])
        return {
            "clock": clock,
            "applied": applied,
            "rows": log.rows.clone(),
            "value": log.before["value"].clone(),
            "state": log.before["state"].clone(),
            "observed_staleness_max": self.observed_staleness_max,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Call after `value` and `state` were loaded from the same checkpoint, outside a view."""
        self.clock.copy_(state["clock"])
        self.applied.copy_(state["applied"])
        rows = state["rows"].to(self.value.device)
        self.value.index_copy_(0, rows, state["value"].to(self.value.device))
        self.state.index_copy_(0, rows, state["state"].to(self.value.device))
        self.observed_staleness_max = int(state["observed_staleness_max"])
