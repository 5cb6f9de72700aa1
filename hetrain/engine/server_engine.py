"""A dedicated server's side of training over the store: it owns rows, answers rounds and computes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetrain.data.batch import Batch
from hetrain.engine import EngineState, StepOutput
from hetrain.engine.lockstep_rows import LockstepRows, lockstep_rounds
from hetrain.engine.owned import make_owned
from hetrain.engine.recipe import Recipe
from hetrain.engine.store_memory import peak_rss
from hetrain.engine.store_settings import StoreSettings, kept_rows, store_layout
from hetrain.store.audit import missed_updates
from hetrain.store.messages import Part
from hetrain.store.space import Placement, row_spaces


class ServerEngine:
    """Implements Engine (hetrain/engine/__init__.py) on a rank that serves the workers' StoreEngines.

    Every method takes part in the same rounds, in the same order, as StoreEngine's of that name.
    """

    def __init__(self, recipe: Recipe, settings: StoreSettings, group: dist.ProcessGroup | None = None) -> None:
        """Arguments as the workers' StoreEngines get them. Raises ConfigError where they do."""
        self._settings = settings
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        spaces = row_spaces(recipe.tables, recipe.plan.replicated)
        capacities = kept_rows(settings, spaces, recipe.row_optimizer)
        self._parts = [
            make_owned(recipe, settings, Placement(space, recipe.plan, world_size), rank, held_back=capacity > 0)
            for space, capacity in zip(spaces, capacities, strict=True)
        ]
        self._transport = lockstep_rounds(recipe, settings, self._parts, group)
        self._layout = store_layout(settings, capacities, world_size, recipe.origin, recipe.plan)
        self._rows = LockstepRows(recipe, settings, self._parts, self._layout)
        self._next: Batch | None = None  # whose round was answered already

    def step(self, batches: Iterator[Batch]) -> StepOutput | None:
        """Answer the rounds of a training step; the batches only say that there are any. None at the end.

        Where the workers read ahead, a step is their round for the next batch, started before they compute this one.
        """
        batch = self._next if self._next is not None else next(batches, None)
        if batch is None:
            return None
        waited = self._transport.waited_s
        self._rows.begin_step()
        if not self._rows.is_read or (self._next is None and not self._transport.agree(True)):
            self._forget_flight()
            self._serve()
        if self._settings.audit_every and self._rows.step % self._settings.audit_every == 0:
            self._audit()
        self._next = next(batches, None) if self._settings.overlapped else None
        if self._next is not None:
            self._serve(late=self._settings.late_blocks > 0)
        elif self._announces:  # see StoreBags.nothing_ahead
            self._transport.exchange()
        self._rows.is_read = self._next is not None
        self._rows.step += 1
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
                self._rows.set_rates(self._rows.step)
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
            self._rows.missed_updates_max = max(self._rows.missed_updates_max, missed)

    def finish(self) -> None:
        """Take every held-back update of the workers."""
        self._rows.set_rates(self._rows.step - 1)
        self._take_pushes()
        self._next, self._rows.is_read = None, False
        self._forget_flight()
        self._transport.drain()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While open, rows here include every held-back update."""
        if self._rows.shown:
            yield
            return
        with self._rows.showing(self._take_pushes):
            yield

    def predict(self, batch: Batch) -> Tensor:
        """Answer the workers' reads; no logits, [0]."""
        with self.evaluating():
            self._transport.exchange()
        return torch.empty(0)

    @contextmanager
    def snapshot(self) -> Iterator[EngineState]:
        """The rows here with held-back updates merged in, and what takes them apart again; no dense part."""
        with self.evaluating():
            groups = [{"owner": part.owner.state_dict()} for part in self._parts]
            with self._rows.saving(groups) as state:
                yield state

    def restore(self, state: EngineState, private: dict[str, Any] | None) -> None:
        """Take up rows loaded in place; without `private`, clocks start at 0."""
        self._rows.take_up(state, private)
        self._next = None
        for g, part in enumerate(self._parts):
            part.owner.load_state_dict(None if private is None else private["groups"][g]["owner"])

    def report(self) -> dict[str, Any]:
        """The staleness that rows here were read with, and the updates those reads missed in audit rounds."""
        return {
            "cache": None,
            "observed_staleness_max": max(part.owner.observed_staleness_max for part in self._parts),
            "missed_updates_max": self._rows.missed_updates_max if self._settings.audit_every else None,
            "memory": {
                "server_rss_max": peak_rss(),
                "owner_rows_max": sum(part.owner.memory.nbytes_used for part in self._parts),
            },
        }
