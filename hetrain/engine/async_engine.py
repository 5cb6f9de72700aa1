"""Training where every rank steps at its own pace: `asp` and `ssp`, on workers, owners and ranks that are both."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetrain.data.batch import Batch
from hetrain.engine import EngineState, StepOutput
from hetrain.engine.async_report import age_max, async_report
from hetrain.engine.dense_held_back import DenseHeldBack
from hetrain.engine.flat_dense import FlatDense
from hetrain.engine.loss import loss_share
from hetrain.engine.own_pace import OwnPace
from hetrain.engine.owned_tables import owned_tables, owns, seen_rows, take_up_rows
from hetrain.engine.owner_part import OwnerPart, read_dense
from hetrain.engine.recipe import Recipe
from hetrain.engine.step_output import network_tensors, step_output
from hetrain.engine.store_memory import StoreMemory
from hetrain.engine.store_settings import StoreSettings, async_layout, kept_rows
from hetrain.pulled_bags import Look, PulledBags, PulledGroup
from hetrain.store.ask import NO_GATE, Answer, Ask
from hetrain.store.clocked_copies import ClockedCopies, Counters
from hetrain.store.row_codec import RowCodec
from hetrain.store.space import Placement, row_spaces
from hetrain.transport.asking import LOOK, Asking
from hetrain.transport.rpc import LAST_WORD_S, RpcTransport


class AsyncEngine:
    """Implements Engine (hetrain/engine/__init__.py). Its `accord` says when ranks meet; only then may a rank look.

    A step is one trip: an Ask to every owner with the gradients of the last step and the wishes of this one, then
    forward and backward. The gradients wait for the next Ask.

    `group`: of all ranks; None for the default one. `mode`: asp (nobody waits; settings.capacity must be 0) or ssp.
    `memory`: the prediction, for the summary. Collective. Raises ConfigError for a cache capacity that cannot be, and
    for dense parameters that are not float32.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: StoreSettings,
        mode: str,
        group: dist.ProcessGroup | None = None,
        memory: StoreMemory | None = None,
    ) -> None:
        self._recipe, self._settings, self._gated = recipe, settings, mode == "ssp"
        self._transport = RpcTransport(settings.timeout_s, group=group, servers=settings.servers)
        roles, rank, spaces = self._transport.roles, self._transport.rank, row_spaces(recipe.tables)
        self._owners = list(roles.owners)
        placements = [Placement(space, recipe.plan, self._transport.world_size) for space in spaces]
        capacities = kept_rows(settings, spaces, recipe.row_optimizer)
        self._groups = self._pulled_groups(placements, capacities) if roles.computes(rank) else []
        self._bags = PulledBags(self._groups, self._owners)
        torch.manual_seed(recipe.seed)
        self._network = recipe.make_model(self._bags).to(recipe.device)
        self._dense = FlatDense(self._network, recipe.dense_optimizer, len(self._owners), recipe.device)
        keeps = any(capacities)
        self._part = self._owner_part(placements, copies=keeps) if roles.owns(rank) else None
        self._held_back = DenseHeldBack(recipe.dense_comms, self._dense, rank, self._transport.world_size, group)
        widths = [(space.dim, recipe.row_optimizer.state_width(space.dim) if keeps else 0) for space in spaces]
        self._asking, self.accord = self._make_talk(widths, group)
        world_size = self._transport.world_size
        self._layout = async_layout(mode, settings, capacities, world_size, recipe.origin, recipe.plan)
        self._hashed = settings.index == "hash"  # memory, and checkpoints, hold the rows seen
        self.memory, self._looking = memory, False
        self._asked = 0  # Asks sent
        self._start_over()
        self._transport.open()

    def _make_talk(self, widths: Sequence[tuple[int, int]], group: dist.ProcessGroup | None) -> tuple[Asking, OwnPace]:
        """What this rank asks and answers; `widths`: columns of a row and of its state, per embedding dim."""
        service = None if self._part is None else self._part.service
        wire, settings = self._held_back.wire, self._settings
        asking = Asking(self._transport, service, widths, self._recipe.traffic, wire, settings.rows)
        meetings, lock = (None, None) if service is None else (service.meetings, service.lock)
        return asking, OwnPace(self._transport, meetings, lock, settings.batch_size, group)

    def _start_over(self) -> None:
        """No step was taken yet in this sitting."""
        self._clock = 0  # steps this worker has trained
        self._batch: Batch | None = None  # begun, not yet granted
        self._staged = 0  # examples behind the gradients that wait to be pushed
        self._counted = 0  # examples of all ranks that earlier StepOutputs told
        self._ended = False

    def _owner_part(self, placements: Sequence[Placement], *, copies: bool) -> OwnerPart:
        """What this rank owns, ready to answer."""
        roles, rank = self._transport.roles, self._transport.rank
        dense = self._own_dense()
        part = OwnerPart(self._recipe, self._settings, placements, roles, rank, dense, self._factor, copies=copies)
        part.answer(self._transport)
        return part

    def _pulled_groups(self, placements: Sequence[Placement], capacities: Sequence[int]) -> list[PulledGroup]:
        """What this worker reads rows through, per embedding dim."""
        recipe, settings, groups = self._recipe, self._settings, []
        for placement, capacity in zip(placements, capacities, strict=True):
            space = placement.space
            copies = ClockedCopies(
                space,
                capacity,
                min(space.rows, settings.batch_size * len(space.feature_offsets)),
                settings.staleness,
                recipe.row_optimizer,
                seed=recipe.seed,
                policy=settings.policy,
                index=settings.index,
                audit=settings.audit_every > 0,
            )
            codec = RowCodec(settings.rows, space.dim, recipe.traffic, settings.dct)
            groups.append(PulledGroup(placement, copies, recipe.row_optimizer, recipe.device, codec))
        return groups

    def _own_dense(self) -> Tensor:
        """This owner's slice of the dense parameters as the network has them: [P] on the host."""
        return self._dense.value[slice(*self._dense.bounds[self._owners.index(self._transport.rank)])].cpu()

    def _factor(self, pushed: int) -> float:
        """Of the learning rates, once the gradients of `pushed` examples were applied in this sitting."""
        return self._recipe.schedule.factor(self.accord.step_of(pushed))

    # -- training ---------------------------------------------------------------------------------

    def step(self, batches: Iterator[Batch]) -> StepOutput | None:
        """Push, pull, forward, backward. None: nothing left to do, or nothing until ranks have met."""
        if not self._groups:  # a server
            return None
        waited = self._asking.waited_s
        if self._batch is None and not self._ended:
            self._batch = next((batch for batch in batches if batch.size), None)
            if self._batch is not None:
                self._bags.begin(self._batch.sparse, self._clock)
        if self._batch is None:
            self._end()
            return None
        rate = self._pull(self._batch)
        if rate is None:
            return None
        batch, self._batch = self._batch.to(self._recipe.device), None
        share, total, logits = self._forward(batch)
        self._dense.gradient.zero_()
        share.backward()
        self._held_back.add_to_gradient()
        self._bags.stage(rate)
        self._staged = batch.size
        self._clock += 1
        return self._output(batch, logits, total, self._asking.waited_s - waited)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to run backward on, the sum of example losses and logits [B], both detached.

        Every worker's gradient is that of the mean over its own batch, over the number of workers.
        """
        logits = self._network(batch.dense, batch.sparse)
        size = batch.size * self._transport.roles.workers
        share, total = loss_share(logits, batch.labels, batch.weights, max(size, 1))
        return share, total, logits.detach()

    def _output(self, batch: Batch, logits: Tensor, total: Tensor, waited_s: float) -> StepOutput:
        others, self._counted = self.accord.begun - self._counted, self.accord.begun
        return step_output(batch, logits, total, waited_s, others)

    def _pull(self, batch: Batch) -> float | None:
        """One trip to every owner; the learning rate of rows in this step, or None where ranks meet first."""
        gate = max(self._clock - int(self._settings.staleness), 0) if self._waits else NO_GATE
        answers = self._ask(begin=batch.size, gate=gate)
        if answers is None:
            return None
        self._take_dense(answers)
        self._bags.admit(answers)
        return self._recipe.row_optimizer.lr * self._factor(answers[0].pushed)

    @property
    def _waits(self) -> bool:
        return self._gated and self._settings.staleness != float("inf")

    def _take_dense(self, answers: Sequence[Answer]) -> None:
        for (first, last), answer in zip(self._dense.bounds, answers, strict=True):
            self._dense.value[first:last].copy_(answer.dense)

    def _ask(self, begin: int = 0, gate: int = NO_GATE, *, ended: bool = False) -> list[Answer] | None:
        """Push what waits and ask for what the batch begun needs; None: turned back, what waited is pushed."""
        audit = self._settings.audit_every > 0 and self._clock % self._settings.audit_every == 0
        gradient = self._dense.gradient.cpu() if self._staged else torch.empty(0)
        self._asked += 1
        asks = []
        for owner, bounds in zip(self._owners, self._dense.bounds, strict=True):
            ask = Ask(
                worker=self._transport.rank,
                clock=self._clock,
                pushed=self._staged,
                begin=begin,
                gate=gate,
                ended=ended,
                dense_wanted=begin > 0,
                dense=gradient[slice(*bounds)],
                rows=self._bags.asked(owner, reads=begin > 0, audit=audit),
                number=self._asked,
            )
            asks.append((owner, ask))
        pending = self._asking.send(asks)
        self._bags.pushed()
        self._staged = 0
        return self._receive(pending)

    def _receive(self, pending: list[Any]) -> list[Answer] | None:
        """The answers; the first is of the owner that keeps the count, and the others need not come if it refuses."""
        first = self._asking.receive(pending[0], self._whom(pending[0].peer))
        self.accord.begun = max(self.accord.begun, first.begun)
        if not first.granted:
            for other in pending[1:]:
                if not other.there:
                    self._transport.call(other.peer, "withdraw", torch.tensor([self._transport.rank, self._asked]))
        answers = [first, *(self._asking.receive(p, self._whom(p.peer)) for p in pending[1:])]
        return answers if first.granted else None

    def _whom(self, owner: int) -> Callable[[], str]:
        """Whom an owner that does not answer waits for: a worker that is too far behind, or nobody."""

        def ask() -> str:
            roles = self._transport.roles
            pending = self._transport.call(owner, "clocks", torch.empty(0))
            if not pending.wait(LAST_WORD_S):
                return roles.name(owner)
            clocks = pending.value().tolist()
            behind = [
                w for w, clock in enumerate(clocks) if self._gated and clock + self._settings.staleness < self._clock
            ]
            if not behind:
                return roles.name(owner)
            names = " and ".join(f"{roles.name(w)} (at step {clocks[w]})" for w in behind)
            return f"{names}, behind this rank's step {self._clock} by more than consistency.staleness"

        return ask

    def _end(self) -> None:
        """Push the last gradients; nobody waits for this worker any more."""
        if not self._ended:
            self._ended = True
            self._ask(ended=True)

    def _flush(self) -> None:
        """Push gradients that wait, and with dct, where ranks are together, what a threshold kept of earlier ones."""
        if self._staged:
            self._ask()
        if self._settings.dct is not None:
            if self._bags.stage_rest():
                self._ask()
            self._transport.barrier()

    def finish(self) -> None:
        """Nothing is held back for longer than a step, or with dct until ranks meet."""
        self._flush()

    # -- looking ----------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While open, `predict` sees every push. Collective: no rank trains again before all have looked."""
        if self._looking:
            yield
            return
        self._flush()
        self._looking = True
        try:
            with self._recipe.traffic.set_aside():
                self._look_at_dense()
                self._network.eval()
                yield
                self._transport.barrier()
        finally:
            self._network.train()
            self._looking = False

    def _look_at_dense(self) -> list[dict[str, Tensor]]:
        """Fresh dense values into the network; the shards' optimizer state."""
        values, states = read_dense(self._transport, self._owners)
        with torch.no_grad():
            for (first, last), value in zip(self._dense.bounds, values, strict=True):
                self._dense.value[first:last].copy_(value)
        return states

    def predict(self, batch: Batch) -> Tensor:
        """Logits [B] on the owners' rows; changes nothing. On a server none, [0]."""
        if not self._groups:
            return torch.empty(0)
        with self.evaluating(), torch.no_grad():
            looks = [Look(group, batch.sparse) for group in self._groups]
            asks = [(owner, self._look(owner, looks)) for owner in self._owners]
            pending = self._asking.send(asks, LOOK)
            answers = [self._asking.receive(p, call=LOOK) for p in pending]
            batch = batch.to(self._recipe.device)
            with self._bags.looking(looks, answers, self._recipe.device):
                logits: Tensor = self._network(batch.dense, batch.sparse)
            return logits

    def _look(self, owner: int, looks: Sequence[Look]) -> Ask:
        rows = [look.asked(owner) for look in looks]
        return Ask(
            self._transport.rank, self._clock, 0, 0, NO_GATE, False, False, torch.empty(0), rows, self._asked + 1
        )

    @contextmanager
    def snapshot(self) -> Iterator[EngineState]:
        """State to save from, or to load into in place."""
        with self.evaluating():
            owned = [] if self._part is None else self._part.rows
            counters = [asdict(group.copies.counters) for group in self._groups]
            yield EngineState(
                step=self.accord.step,
                dense=network_tensors(self._network),
                dense_optimizer=self._dense.whole(self._look_at_dense()),
                tables={} if self._hashed else owned_tables(owned),
                replicated=frozenset(),
                private={
                    "age_max": age_max(self._groups),
                    "counters": counters,
                    "residues": self._bags.state_of_rest(),
                    "dense": self._held_back.state_dict(),
                },
                layout=self._layout,
                origin=self._recipe.origin,
                seen=seen_rows(owned) if self._hashed else None,
                owns=partial(owns, owned),
                dense_pending=self._held_back.pending(),
            )

    def restore(self, state: EngineState, private: dict[str, Any] | None) -> None:
        """Take up tables and dense part loaded in place; no copies, and worker clocks from 0."""
        owned = [] if self._part is None else self._part.rows
        if self._hashed:
            take_up_rows(owned, state, None)
        if self._part is not None:
            place = self._owners.index(self._transport.rank)
            self._part.restart(self._own_dense(), self._dense.part(state.dense_optimizer, place))
        self.accord.restart(state.step)
        self._bags.restart(state.step)
        self._start_over()
        self._held_back.restore(state, private)
        if private is not None:
            for group, counters in zip(self._groups, private["counters"], strict=True):
                group.copies.counters = Counters(**counters)
                group.copies.age_max = private["age_max"]
            self._bags.load_state_of_rest(private.get("residues", []))
        self._transport.barrier()

    def report(self) -> dict[str, Any]:
        """See async_report; and what this rank holds back."""
        found = async_report(
            self._part, self._groups, self.memory, gated=self._gated, audited=bool(self._settings.audit_every)
        )
        return {**found, "dense_dct": self._held_back.report(), **self._bags.report_of_rest()}
