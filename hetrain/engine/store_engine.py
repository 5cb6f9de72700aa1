"""One training step over the store: `het` with any cache, the empty one (PS-Hybrid) included."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hetrain.comms.dense import DenseReducer, wrap_dense
from hetrain.comms.dense_exchange import DenseComms
from hetrain.data.batch import Batch
from hetrain.embedding import StoreBags
from hetrain.engine import EngineState, Origin, StepOutput, TablePiece
from hetrain.engine.loss import loss_share
from hetrain.engine.owned_tables import owned_tables, owns, rows_of, seen_rows, take_up_rows
from hetrain.engine.replicated_bags import ReplicatedBags
from hetrain.engine.step_output import network_tensors, step_output
from hetrain.engine.store_memory import StoreMemory, peak_rss
from hetrain.engine.store_settings import StoreSettings, kept_rows, make_owner, store_layout
from hetrain.optim import RowOptimizer, Schedule
from hetrain.planner.plan import Plan
from hetrain.store.row_codec import RowCodec
from hetrain.store.space import Placement, row_spaces
from hetrain.tables import Table
from hetrain.telemetry import Traffic
from hetrain.transport.collective import CollectiveTransport
from hetrain.width_group import CacheSettings, WidthGroup


def _width_groups(
    tables: Sequence[Table],
    plan: Plan,
    optimizer: RowOptimizer,
    device: torch.device,
    seed: int,
    settings: StoreSettings,
    group: dist.ProcessGroup | None,
    traffic: Traffic,
) -> list[WidthGroup]:
    """Owner and cache of every embedding dim on this rank."""
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    cache = CacheSettings(
        settings.policy,
        settings.staleness,
        settings.batch_size,
        seed,
        audit=settings.audit_every > 0,
        directory=settings.directory,
        count_updates=settings.clock == "sum",
        prefetch=settings.overlapped,
        late_leg=settings.late_blocks > 0,
        index=settings.index,
    )
    spaces = row_spaces(tables, plan.replicated)
    groups = []
    for space, capacity in zip(spaces, kept_rows(settings, spaces, optimizer), strict=True):
        placement, codec = Placement(space, plan, world_size), RowCodec(settings.rows, space.dim, traffic, settings.dct)
        owner = make_owner(placement, rank, optimizer, seed, settings, held_back=capacity > 0, codec=codec)
        groups.append(WidthGroup(placement, owner, optimizer, capacity, cache, device, codec))
    return groups


def _rounds(
    groups: Sequence[WidthGroup],
    device: torch.device,
    traffic: Traffic,
    settings: StoreSettings,
    group: dist.ProcessGroup | None,
) -> CollectiveTransport:
    """What exchanges the rows of these groups in lockstep."""
    return CollectiveTransport(
        [part.owner for part in groups],
        [(part.space.dim, part.cache.copies.state.shape[1]) for part in groups],
        traffic,
        timeout_s=settings.timeout_s,
        group=group,
        device=device,
        servers=settings.servers,
        blocks=max(1, settings.late_blocks),
        rows=settings.rows,
    )


class StoreEngine:
    """Implements Engine (hetrain/engine/__init__.py) for lockstep training over the store."""

    def __init__(
        self,
        make_model: Callable[[nn.Module], nn.Module],
        tables: Sequence[Table],
        plan: Plan,
        row_optimizer: RowOptimizer,
        dense_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        schedule: Schedule,
        device: torch.device,
        seed: int,
        traffic: Traffic,
        settings: StoreSettings,
        group: dist.ProcessGroup | None = None,
        workers: dist.ProcessGroup | None = None,
        memory: StoreMemory | None = None,
        dense_comms: DenseComms | None = None,
    ) -> None:
        """Every rank passes the same, but `device`. `group`: of all ranks; None for the default one.

        `plan`: some tables may be replicated, not all. `workers`: where there are servers, the group of all ranks but
        them; dense gradients, and those of replicated tables, are summed over it.
        `memory`: the prediction, for the summary. `dense_comms`: how dense gradients travel; None: as they are.

        Raises ConfigError when `row_optimizer` cannot hold updates back and a cache is wanted.
        """
        self._row_optimizer, self._schedule, self._settings = row_optimizer, schedule, settings
        self._device, self._traffic = device, traffic
        self._groups = _width_groups(tables, plan, row_optimizer, device, seed, settings, group, traffic)
        self._transport = _rounds(self._groups, device, traffic, settings, group)
        self._reads_ahead = settings.overlapped and self._transport.concurrent
        self._bags = StoreBags(self._groups, self._transport, settings.late_blocks if self._reads_ahead else 0)
        summing = workers if settings.servers else group
        self._replicated: ReplicatedBags | None = None
        if plan.replicated:
            self._replicated = ReplicatedBags(
                self._bags, tables, plan.replicated, row_optimizer, device, seed, traffic, summing, dense_comms
            )
        torch.manual_seed(seed)
        self._network = make_model(self._replicated or self._bags).to(device)
        self._reducer = DenseReducer(traffic, summing, dense_comms)
        self._model = wrap_dense(self._network, self._reducer)
        self._waiting = [part for part in (self._bags, self._reducer, self._replicated) if part is not None]
        self._dense_optimizer = dense_optimizer(self._network.parameters())
        self._dense_rates = [group["lr"] for group in self._dense_optimizer.param_groups]
        capacities = [part.capacity_rows for part in self._groups]
        self._origin = Origin(seed, row_optimizer.name, tables)
        self._layout = store_layout(settings, capacities, self._transport.world_size, self._origin, plan)
        self.memory = memory
        self._hashed = settings.index == "hash"  # memory, and checkpoints, hold the rows seen
        self._step = 0
        self._next: Batch | None = None  # read ahead
        self._is_read = False  # whether the rows of the batch to come were read
        self._settled = True  # whether the dense parameters took the last step's gradients
        self._missed_updates_max = 0
        self._looking = False
        self._overwritten: list[tuple[Tensor, Tensor, Tensor]] = []

    # -- training ---------------------------------------------------------------------------------

    def step(self, batches: Iterator[Batch]) -> StepOutput | None:
        """Read round, forward, backward with the fused row update, commit; None at the end.

        The dense update is left to the next step, or to whoever looks before: its gradients are summed meanwhile.
        """
        batch = self._next if self._next is not None else self._fetch(batches)
        if batch is None:
            return None
        self._overwritten = []
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
            self._bags.arrive(before_late=partial(self._set_owner_rates, self._step))
        self._is_read = self._next is not None
        self._step += 1
        waited_s = sum(part.take_wait_s() for part in self._waiting)
        return step_output(batch, logits.detach(), total, waited_s)

    def _settle(self) -> None:
        """The dense update that the last step left, and that of replicated tables."""
        if not self._settled:
            self._reducer.wait()
            self._dense_optimizer.step()
            if self._replicated is not None:
                self._replicated.step(self._row_optimizer.lr * self._schedule.factor(self._step - 1))
            self._settled = True

    def _fetch(self, batches: Iterator[Batch]) -> Batch | None:
        batch = next(batches, None)
        if batch is None or self._device.type == "cpu":
            return batch
        return batch.to(self._device, non_blocking=True)

    def _read(self, batch: Batch) -> None:
        """Make sure that the rows of `batch` are in the cache and valid."""
        if not self._is_read:
            self._bags.read(batch.sparse)
        elif self._next is None:
            self._bags.reread(batch.sparse)

    def _audit(self) -> None:
        every = self._settings.audit_every
        if every and self._step % every == 0:
            self._missed_updates_max = max(self._missed_updates_max, self._bags.audit())

    def _set_rates(self) -> None:
        """Rates of this step's row updates; owners get that of the step whose gradients this round pushes."""
        self._set_owner_rates(self._step - 1)
        for part in self._groups:
            part.set_learning_rate(self._row_optimizer.lr * self._schedule.factor(self._step))

    def _set_dense_rate(self) -> None:
        factor = self._schedule.factor(self._step)
        for group, rate in zip(self._dense_optimizer.param_groups, self._dense_rates, strict=True):
            group["lr"] = rate * factor

    def _set_owner_rates(self, step: int) -> None:
        """The rate of `step`, whose gradients come next."""
        pushed = self._row_optimizer.lr * self._schedule.factor(max(step, 0))
        for part in self._groups:
            part.owner.learning_rate = pushed

    def finish(self) -> None:
        """Flush every held-back update to its owner; the caches are empty afterwards."""
        self._settle()
        self._set_owner_rates(self._step - 1)
        self._bags.push()
        self._next, self._is_read = None, False
        for part in self._groups:
            part.cache.clear()
            part.owner.forget_flight()
        self._transport.drain()

    # -- looking ----------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While open, owners show every held-back update, `predict` costs one fetch, and nothing can change."""
        if self._looking:
            yield
            return
        self._settle()
        self._looking = True
        self._set_owner_rates(self._step - 1)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._traffic.set_aside())
                for part in self._groups:
                    stack.enter_context(part.owner.view())
                self._bags.push()
                self._network.eval()
                yield
        finally:
            self._network.train()
            self._looking = False

    def predict(self, batch: Batch) -> Tensor:
        """Logits [B], held-back updates of all ranks included; changes nothing. Cheaper inside `evaluating`."""
        with self.evaluating(), torch.no_grad():
            batch = batch.to(self._device)
            with self._bags.read_only(batch.sparse):
                logits: Tensor = self._network(batch.dense, batch.sparse)
            return logits

    @contextmanager
    def snapshot(self) -> Iterator[EngineState]:
        """State with held-back updates merged into the tables; `private` holds what takes them apart again."""
        with self.evaluating():
            saved_groups = [part.state_dict() for part in self._groups]
            private = {
                "step": self._step,
                "is_read": self._is_read,
                "missed_updates_max": self._missed_updates_max,
                "groups": saved_groups,
                "dense": self._reducer.state_dict(),
            }
            yield EngineState(
                step=self._step,
                dense=network_tensors(self._network),
                dense_optimizer=self._dense_optimizer.state_dict(),
                tables=self._tables(),
                replicated=frozenset() if self._replicated is None else self._replicated.names,
                private=private,
                layout=self._layout,
                origin=self._origin,
                seen=seen_rows(self._groups) if self._hashed else None,
                dense_pending=self._reducer.pending(),
                owns=self._holds,
            )
            # Rows loaded in place are lost where closing the view undoes them: `restore` writes them once more.
            self._overwritten = [
                rows_of(part.owner, saved["owner"]["rows"])
                for part, saved in zip(self._groups, saved_groups, strict=True)
                if not self._hashed
            ]

    def _tables(self) -> dict[str, list[TablePiece]]:
        """What a checkpoint reads and writes in place: of a hashed index, only the tables held whole."""
        whole = {} if self._replicated is None else self._replicated.pieces()
        return whole if self._hashed else owned_tables(self._groups) | whole

    def _holds(self, table: str, first_row: int, rows: int) -> bool:
        whole = self._replicated is not None and table in self._replicated.names
        return whole or owns(self._groups, table, first_row, rows)

    def restore(self, state: EngineState, private: dict[str, Any] | None) -> None:
        """Take up tables and dense part loaded in place; without `private`, caches start empty and clocks at 0."""
        for part, (rows, value, optimizer_state) in zip(self._groups, self._overwritten, strict=not self._hashed):
            part.owner.value.index_copy_(0, rows, value)
            part.owner.state.index_copy_(0, rows, optimizer_state)
        self._overwritten = []
        if self._hashed:
            owners = None if private is None else [group["owner"] for group in private["groups"]]
            take_up_rows(self._groups, state, owners)
        self._dense_optimizer.load_state_dict(state.dense_optimizer)
        self._reducer.restore(state.step, state.dense_pending, None if private is None else private.get("dense"))
        self._step = state.step if private is None else int(private["step"])
        self._next, self._is_read = None, private is not None and bool(private["is_read"])
        self._missed_updates_max = 0 if private is None else int(private["missed_updates_max"])
        for g, part in enumerate(self._groups):
            part.load_state_dict(None if private is None else private["groups"][g], self._step)

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
            "missed_updates_max": self._missed_updates_max if self._settings.audit_every else None,
            "dense_dct": self._reducer.report(),
            **self._report_of_waiting(),
            "memory": {
                "predicted": None if self.memory is None else self.memory.as_dict(),
                "worker_rss_max": peak_rss(),
                "owner_rows_max": sum(part.owner.memory.nbytes_used for part in self._groups),
                "residue_max": sum(residue.bytes_max for residue in residues),
            },
        }
