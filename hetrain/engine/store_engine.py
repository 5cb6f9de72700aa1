"""One training step over the store: `het` with any cache, the empty one (PS-Hybrid) included."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetrain.comms.dense import DenseReducer, wrap_dense
from hetrain.data.batch import Batch
from hetrain.embedding import StoreBags
from hetrain.engine import EngineState, StepOutput
from hetrain.engine.lockstep_rows import LockstepRows, lockstep_rounds
from hetrain.engine.loss import loss_share
from hetrain.engine.owned import make_owner
from hetrain.engine.owned_tables import owns
from hetrain.engine.recipe import Recipe
from hetrain.engine.replicated_bags import ReplicatedBags
from hetrain.engine.step_output import network_tensors, step_output
from hetrain.engine.store_memory import StoreMemory, peak_rss
from hetrain.engine.store_settings import StoreSettings, kept_rows, store_layout
from hetrain.store.row_codec import RowCodec
from hetrain.store.space import Placement, row_spaces
from hetrain.width_group import CacheSettings, WidthGroup


def _width_groups(recipe: Recipe, settings: StoreSettings, group: dist.ProcessGroup | None) -> list[WidthGroup]:
    """Owner and cache of every embedding dim on this rank."""
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    cache = CacheSettings(
        settings.policy,
        settings.staleness,
        settings.batch_size,
        recipe.seed,
        audit=settings.audit_every > 0,
        directory=settings.directory,
        count_updates=settings.clock == "sum",
        prefetch=settings.overlapped,
        late_leg=settings.late_blocks > 0,
        index=settings.index,
    )
    spaces, optimizer = row_spaces(recipe.tables, recipe.plan.replicated), recipe.row_optimizer
    groups = []
    for space, capacity in zip(spaces, kept_rows(settings, spaces, optimizer), strict=True):
        placement = Placement(space, recipe.plan, world_size)
        codec = RowCodec(settings.rows, space.dim, recipe.traffic, settings.dct)
        owner = make_owner(recipe, settings, placement, rank, held_back=capacity > 0, codec=codec)
        groups.append(WidthGroup(placement, owner, optimizer, capacity, cache, recipe.device, codec))
    return groups


class StoreEngine:
    """Implements Engine (hetrain/engine/__init__.py) for lockstep training over the store."""

    def __init__(
        self,
        recipe: Recipe,
        settings: StoreSettings,
        group: dist.ProcessGroup | None = None,
        workers: dist.ProcessGroup | None = None,
        memory: StoreMemory | None = None,
    ) -> None:
        """Its plan may replicate some tables, not all. `group`: of all ranks; None for the default one.

        `workers`: where there are servers, the group of all ranks but them; dense gradients, and those of replicated
        tables, are summed over it. `memory`: the prediction, for the summary.

        Raises ConfigError when the row optimizer cannot hold updates back and a cache is wanted.
        """
        self._recipe, self._settings, self.memory = recipe, settings, memory
        self._groups = _width_groups(recipe, settings, group)
        self._transport = lockstep_rounds(recipe, settings, self._groups, group)
        self._reads_ahead = settings.overlapped and self._transport.concurrent
        self._bags = StoreBags(self._groups, self._transport, settings.late_blocks if self._reads_ahead else 0)
        summing = workers if settings.servers else group
        self._replicated = ReplicatedBags(self._bags, recipe, summing) if recipe.plan.replicated else None
        torch.manual_seed(recipe.seed)
        self._network = recipe.make_model(self._replicated or self._bags).to(recipe.device)
        self._reducer = DenseReducer(recipe.traffic, summing, recipe.dense_comms)
        self._model = wrap_dense(self._network, self._reducer)
        self._waiting = [part for part in (self._bags, self._reducer, self._replicated) if part is not None]
        self._dense_optimizer = recipe.dense_optimizer(self._network.parameters())
        self._dense_rates = [group["lr"] for group in self._dense_optimizer.param_groups]
        capacities = [part.capacity_rows for part in self._groups]
        self._layout = store_layout(settings, capacities, self._transport.world_size, recipe.origin, recipe.plan)
        self._rows = LockstepRows(recipe, settings, self._groups, self._layout)
        self._next: Batch | None = None  # read ahead
        self._settled = True  # whether the dense parameters took the last step's gradients

    # -- training ---------------------------------------------------------------------------------

    def step(self, batches: Iterator[Batch]) -> StepOutput | None:
        """Read round, forward, backward with the fused row update, commit; None at the end.

        The dense update is left to the next step, or to whoever looks before: its gradients are summed meanwhile.
        """
        batch = self._next if self._next is not None else self._fetch(batches)
        if batch is None:
            return None
        self._set_rates()
        self._read(batch)
        self._audit()
        self._next = self._fetch(batches) if self._reads_ahead else None
        if self._next is not None:
            self._bags.read_ahead(self._next.sparse)
        elif self._reads_ahead:
            self._bags.nothing_ahead()
        self._settle()
        self._set_dense_rate()
        logits = self._model(batch.dense, batch.sparse)
        share, total = loss_share(logits, batch.labels, batch.weights, batch.global_size)
        self._dense_optimizer.zero_grad()
        share.backward()
        self._settled = False
        self._bags.commit()
        if self._next is not None:
            self._bags.arrive(before_late=partial(self._rows.set_rates, self._rows.step))
        self._rows.is_read = self._next is not None
        self._rows.step += 1
        waited_s = sum(part.take_wait_s() for part in self._waiting)
        return step_output(batch, logits.detach(), total, waited_s)

    def _settle(self) -> None:
        """The dense update that the last step left, and that of replicated tables."""
        if not self._settled:
            self._reducer.wait()
            self._dense_optimizer.step()
            if self._replicated is not None:
                self._replicated.step(self._recipe.row_rate(self._rows.step - 1))
            self._settled = True

    def _fetch(self, batches: Iterator[Batch]) -> Batch | None:
        batch = next(batches, None)
        if batch is None or self._recipe.device.type == "cpu":
            return batch
        return batch.to(self._recipe.device, non_blocking=True)

    def _read(self, batch: Batch) -> None:
        """Make sure that the rows of `batch` are in the cache and valid."""
        if not self._rows.is_read:
            self._bags.read(batch.sparse)
        elif self._next is None:
            self._bags.reread(batch.sparse)

    def _audit(self) -> None:
        every = self._settings.audit_every
        if every and self._rows.step % every == 0:
            self._rows.missed_updates_max = max(self._rows.missed_updates_max, self._bags.audit())

    def _set_rates(self) -> None:
        """Rates of this step's row updates; owners get that of the step whose gradients this round pushes."""
        self._rows.begin_step()
        for part in self._groups:
            part.set_learning_rate(self._recipe.row_rate(self._rows.step))

    def _set_dense_rate(self) -> None:
        factor = self._recipe.schedule.factor(self._rows.step)
        for group, rate in zip(self._dense_optimizer.param_groups, self._dense_rates, strict=True):
            group["lr"] = rate * factor

    def finish(self) -> None:
        """Flush every held-back update to its owner; the caches are empty afterwards."""
        self._settle()
        self._rows.set_rates(self._rows.step - 1)
        self._bags.push()
        self._next, self._rows.is_read = None, False
        for part in self._groups:
            part.cache.clear()
            part.owner.forget_flight()
        self._transport.drain()

    # -- looking ----------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While open, owners show every held-back update, `predict` costs one fetch, and nothing can change."""
        if self._rows.shown:
            yield
            return
        self._settle()
        with self._rows.showing(self._bags.push):
            self._network.eval()
            try:
                yield
            finally:
                self._network.train()

    def predict(self, batch: Batch) -> Tensor:
        """Logits [B], held-back updates of all ranks included; changes nothing. Cheaper inside `evaluating`."""
        with self.evaluating(), torch.no_grad():
            batch = batch.to(self._recipe.device)
            with self._bags.read_only(batch.sparse):
                logits: Tensor = self._network(batch.dense, batch.sparse)
            return logits

    @contextmanager
    def snapshot(self) -> Iterator[EngineState]:
        """State with held-back updates merged into the tables; `private` holds what takes them apart again."""
        with self.evaluating():
            whole = {} if self._replicated is None else self._replicated.pieces()
            with self._rows.saving([part.state_dict() for part in self._groups]) as own:
                yield replace(
                    own,
                    dense=network_tensors(self._network),
                    dense_optimizer=self._dense_optimizer.state_dict(),
                    tables=own.tables | whole,
                    replicated=frozenset() if self._replicated is None else self._replicated.names,
                    private={**own.private, "dense": self._reducer.state_dict()},
                    dense_pending=self._reducer.pending(),
                    owns=self._holds,
                )

    def _holds(self, table: str, first_row: int, rows: int) -> bool:
        whole = self._replicated is not None and table in self._replicated.names
        return whole or owns(self._groups, table, first_row, rows)

    def restore(self, state: EngineState, private: dict[str, Any] | None) -> None:
        """Take up tables and dense part loaded in place; without `private`, caches start empty and clocks at 0."""
        self._rows.take_up(state, private)
        self._next = None
        self._dense_optimizer.load_state_dict(state.dense_optimizer)
        self._reducer.restore(state.step, state.dense_pending, None if private is None else private.get("dense"))
        for g, part in enumerate(self._groups):
            part.load_state_dict(None if private is None else private["groups"][g], self._rows.step)

    def _report_of_waiting(self) -> dict[str, Any]:
        """With dct: the most pushes of a row that something waited for."""
        ages = [part.cache.residue_age_max for part in self._groups]
        return {"residue_age_max": max(ages)} if self._settings.dct else {}

    def report(self) -> dict[str, Any]:
        """Cache counters of this rank, the staleness it saw, and the updates its reads missed in audit rounds."""
        counters = [asdict(part.cache.counters) for part in self._groups]
        cache = {name: sum(c[name] for c in counters) for name in counters[0]}
        residues = [part.cache.residue for part in self._groups if part.cache.residue is not None]
        observed = [x.observed_staleness_max for part in self._groups for x in (part.cache, part.owner)]
        return {
            "cache": {"capacity_rows": sum(part.capacity_rows for part in self._groups), **cache},
            "observed_staleness_max": max(observed),
            "missed_updates_max": self._rows.missed_updates_max if self._settings.audit_every else None,
            "dense_dct": self._reducer.report(),
            **self._report_of_waiting(),
            "memory": {
                "predicted": None if self.memory is None else self.memory.as_dict(),
                "worker_rss_max": peak_rss(),
                "owner_rows_max": sum(part.owner.memory.nbytes_used for part in self._groups),
                "residue_max": sum(residue.bytes_max for residue in residues),
            },
        }
