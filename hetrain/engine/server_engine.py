"""A dedicated server's side of training over the store: it owns rows, answers rounds and computes nothing."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetrain.data.batch import Batch
from hetrain.engine import EngineState, Origin, StepOutput
from hetrain.engine.owned_tables import Owned, owned_tables, owns, rows_of, seen_rows, take_up_rows
from hetrain.engine.store_memory import peak_rss
from hetrain.engine.store_settings import StoreSettings, kept_rows, make_owner, store_layout
from hetrain.optim import RowOptimizer, Schedule
from hetrain.planner.plan import Plan
from hetrain.store.audit import missed_updates
from hetrain.store.messages import Part
from hetrain.store.row_codec import RowCodec
from hetrain.store.space import Placement, row_spaces
from hetrain.tables import Table
from hetrain.telemetry import Traffic
from hetrain.transport.collective import CollectiveTransport


class ServerEngine:
    """Implements Engine (hetrain/engine/__init__.py) on a rank that serves the workers' StoreEngines.

    Every method takes part in the same rounds, in the same order, as StoreEngine's of that name.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        plan: Plan,
        row_optimizer: RowOptimizer,
        schedule: Schedule,
        seed: int,
        traffic: Traffic,
        settings: StoreSettings,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Arguments as the workers' StoreEngines get them. Raises ConfigError where they do."""
        self._row_optimizer, self._schedule, self._settings = row_optimizer, schedule, settings
        self._traffic = traffic
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        spaces = row_spaces(tables, plan.replicated)
        capacities = kept_rows(settings, spaces, row_optimizer)
        placements = [Placement(space, plan, world_size) for space in spaces]
        self._parts = [
            _owned(placement, rank, row_optimizer, seed, traffic, settings, held_back=capacity > 0)
            for placement, capacity in zip(placements, capacities, strict=True)
        ]
        self._transport = CollectiveTransport(
            [part.owner for part in self._parts],
            [_widths(part, row_optimizer) for part in self._parts],
            traffic,
            timeout_s=settings.timeout_s,
            group=group,
            servers=settings.servers,
            blocks=max(1, settings.late_blocks),
            rows=settings.rows,
        )
        self._origin = Origin(seed, row_optimizer.name, tables)
        self._layout = store_layout(settings, capacities, world_size, self._origin, plan)
        self._hashed = settings.index == "hash"  # memory, and checkpoints, hold the rows seen
        self._step = 0
        self._next: Batch | None = None  # whose round was answered already
        self._is_read = False  # whether that of the batch to come was
        self._missed_updates_max, self._looking = 0, False
        self._overwritten: list[tuple[Tensor, Tensor, Tensor]] = []

    def step(self, batches: Iterator[Batch]) -> StepOutput | None:
        """Answer the rounds of a training step; the batches only say that there are any. None at the end.

        Where the workers read ahead, a step is their round for the next batch, started before they compute this one.
        """
        batch = self._next if self._next is not None else next(batches, None)
        if batch is None:
            return None
        waited = self._transport.waited_s
        self._overwritten = []
        self._set_owner_rates(self._step - 1)
        if not self._is_read or (self._next is None and not self._transport.agree(True)):
            self._forget_flight()
            self._serve()
        if self._settings.audit_every and self._step % self._settings.audit_every == 0:
            self._audit()
        self._next = next(batches, None) if self._settings.overlapped else None
        if self._next is not None:
            self._serve(late=self._settings.late_blocks > 0)
        elif self._announces:  # see StoreBags.nothing_ahead
            self._transport.exchange()
        self._is_read = self._next is not None
        self._step += 1
        nothing = torch.empty(0)
        waited_s = self._transport.waited_s - waited
        return StepOutput(torch.zeros(()), nothing, nothing, 0, batch.global_size, waited_s)

    def _serve(self, *, late: bool = False) -> None:
        """A round in which batches are read; `late`: with a late leg."""
        blocks = [()] * max(1, self._settings.late_blocks)
        parts = [*([Part.ANNOUNCE] if self._announces else []), Part.WHOLE, *([Part.LATE] if late else [])]
        # All are ready to receive before the first is served.
        finish = {part: self._transport.start(blocks[: 1 if part is Part.ANNOUNCE else None], part) for part in parts}
        for part in parts:
            if part is Part.LATE:
                self._set_owner_rates(self._step)
            finish[part]()

    @property
    def _announces(self) -> bool:
        return self._settings.late_blocks > 0 and not self._settings.held_back

    def _take_pushes(self) -> None:
        """All held-back updates, in as many rounds as StoreBags.push takes."""
        for _ in range(self._transport.most(0)):
            self._transport.exchange()

    def _forget_flight(self) -> None:
        for part in self._parts:
            part.owner.forget_flight()

    def _audit(self) -> None:
        """The most updates that a read of this step misses of rows here."""
        received = self._transport.collect()
        for g, part in enumerate(self._parts):
            missed = missed_updates(part.owner, [of_worker[g] for of_worker in received])
            self._missed_updates_max = max(self._missed_updates_max, missed)

    def _set_owner_rates(self, step: int) -> None:
        """The rate of `step`, whose gradients come next."""
        pushed = self._row_optimizer.lr * self._schedule.factor(max(step, 0))
        for part in self._parts:
            part.owner.learning_rate = pushed

    def finish(self) -> None:
        """Take every held-back update of the workers."""
        self._set_owner_rates(self._step - 1)
        self._take_pushes()
        self._next, self._is_read = None, False
        self._forget_flight()
        self._transport.drain()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While open, rows here include every held-back update."""
        if self._looking:
            yield
            return
        self._looking = True
        self._set_owner_rates(self._step - 1)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._traffic.set_aside())
                for part in self._parts:
                    stack.enter_context(part.owner.view())
                self._take_pushes()
                yield
        finally:
            self._looking = False

    def predict(self, batch: Batch) -> Tensor:
        """Answer the workers' reads; no logits, [0]."""
        with self.evaluating():
            self._transport.exchange()
        return torch.empty(0)

    @contextmanager
    def snapshot(self) -> Iterator[EngineState]:
        """The rows here with held-back updates merged in, and what takes them apart again; no dense part."""
        with self.evaluating():
            saved = [{"owner": part.owner.state_dict()} for part in self._parts]
            yield EngineState(
                step=self._step,
                dense={},
                dense_optimizer={},
                tables={} if self._hashed else owned_tables(self._parts),
                replicated=frozenset(),
                private={
                    "step": self._step,
                    "is_read": self._is_read,
                    "missed_updates_max": self._missed_updates_max,
                    "groups": saved,
                },
                layout=self._layout,
                origin=self._origin,
                seen=seen_rows(self._parts) if self._hashed else None,
                owns=partial(owns, self._parts),
            )
            # Rows loaded in place are lost where closing the view undoes them: `restore` writes them once more.
            self._overwritten = [
                rows_of(part.owner, group["owner"]["rows"])
                for part, group in zip(self._parts, saved, strict=True)
                if not self._hashed
            ]

    def restore(self, state: EngineState, private: dict[str, Any] | None) -> None:
        """Take up rows loaded in place; without `private`, clocks start at 0."""
        for part, (rows, value, optimizer_state) in zip(self._parts, self._overwritten, strict=not self._hashed):
            part.owner.value.index_copy_(0, rows, value)
            part.owner.state.index_copy_(0, rows, optimizer_state)
        self._overwritten = []
        if self._hashed:
            owners = None if private is None else [group["owner"] for group in private["groups"]]
            take_up_rows(self._parts, state, owners)
        self._step = state.step if private is None else int(private["step"])
        self._missed_updates_max = 0 if private is None else int(private["missed_updates_max"])
        self._next, self._is_read = None, private is not None and bool(private["is_read"])
        for g, part in enumerate(self._parts):
            part.owner.load_state_dict(None if private is None else private["groups"][g]["owner"])

    def report(self) -> dict[str, Any]:
        """The staleness that rows here were read with, and the updates those reads missed in audit rounds."""
        return {
            "cache": None,
            "observed_staleness_max": max(part.owner.observed_staleness_max for part in self._parts),
            "missed_updates_max": self._missed_updates_max if self._settings.audit_every else None,
            "memory": {
                "server_rss_max": peak_rss(),
                "owner_rows_max": sum(part.owner.memory.nbytes_used for part in self._parts),
            },
        }


def _owned(
    placement: Placement,
    rank: int,
    optimizer: RowOptimizer,
    seed: int,
    traffic: Traffic,
    settings: StoreSettings,
    *,
    held_back: bool,
) -> Owned:
    """What `rank` owns of one embedding dim."""
    codec = RowCodec(settings.rows, placement.space.dim, traffic)
    owner = make_owner(placement, rank, optimizer, seed, settings, held_back=held_back, codec=codec)
    return Owned(placement, owner)


def _widths(part: Owned, optimizer: RowOptimizer) -> tuple[int, int]:
    """Columns of a row, and of the optimizer state that travels with it."""
    dim = part.owner.space.dim
    return dim, optimizer.state_width(dim) if part.owner.held_back else 0
