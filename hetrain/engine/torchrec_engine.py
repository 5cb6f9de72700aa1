"""Bulk-synchronous training on TorchRec: every read is fresh, every step updates all ranks' rows."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetrain.comms.dense import DenseReducer, wrap_dense
from hetrain.comms.pooled import PooledExchange
from hetrain.comms.pooled_codec import PooledComms
from hetrain.data.batch import Batch
from hetrain.engine import EngineState, StepOutput
from hetrain.engine.counted import counting
from hetrain.engine.local_bags import LocalBags
from hetrain.engine.loss import loss_share
from hetrain.engine.recipe import Recipe
from hetrain.engine.sharded_bags import ShardedBags
from hetrain.engine.step_output import step_output
from hetrain.errors import ConfigError
from hetrain.planner.torchrec_plan import check_row_optimizer


class TorchRecEngine:
    """One `bsp` step on each rank: the Engine protocol over TorchRec's sharded bags.

    The exchange of batch t + 1's ids overlaps the compute of batch t. With one rank the fused kernels
    are called directly.

    Args:
        recipe: its plan is of engine torchrec and equal on all ranks, else ConfigError.
        batch_size: examples of a rank's full batch; ranks with fewer are padded.
        pooled_comms: how pooled embeddings and their gradients travel; None: as they are.
    """

    def __init__(self, recipe: Recipe, batch_size: int, pooled_comms: PooledComms | None = None) -> None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        tables, plan, traffic = recipe.tables, recipe.plan, recipe.traffic
        self._recipe = recipe
        self._pooled = pooled_comms or PooledComms()
        codec = self._pooled.codec(world_size * batch_size)
        self._exchange = None if codec is None else PooledExchange(codec, traffic)
        plan.check(tables)
        check_row_optimizer(plan, tables, recipe.row_optimizer.name)
        self._bags: LocalBags | ShardedBags
        made_with = (recipe.row_optimizer, recipe.device, recipe.seed)
        if world_size == 1:
            self._bags = LocalBags(tables, *made_with, self._exchange)
        else:
            _check_equal(plan.to_json())
            self._bags = ShardedBags(tables, plan, *made_with, batch_size, traffic, recipe.dense_comms, self._exchange)
        torch.manual_seed(recipe.seed)
        self._model = recipe.make_model(self._bags).to(recipe.device)
        self._reducer = DenseReducer(traffic, comms=recipe.dense_comms)
        self._wrapped = wrap_dense(self._model, self._reducer)
        self._optimizer = recipe.dense_optimizer(self._model.parameters())
        self._dense_rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._row_rate, self._factor = recipe.row_optimizer.lr, 1.0
        self._world_size, self._device = world_size, recipe.device
        self._step = 0
        self._next: Batch | None = None

    def step(self, batches: Iterator[Batch]) -> StepOutput | None:
        """Train on the next batch of every rank; None when the iterator is exhausted."""
        batch, self._next = self._next or self._fetch(batches), None
        if batch is None:
            return None
        with self._counted(), self._travelling(exact=self._step < self._pooled.exact_steps):
            self._bags.start(batch.sparse, batch.global_size)
            if self._world_size > 1 and (following := self._fetch(batches)) is not None:
                self._bags.start(following.sparse, following.global_size)
                self._next = following
            return self._train(batch)

    def _train(self, batch: Batch) -> StepOutput:
        self._set_rates()
        logits: Tensor = self._wrapped(batch.dense, batch.sparse)
        loss, total = loss_share(logits, batch.labels, batch.weights, batch.global_size)
        for group in self._optimizer.param_groups:  # as zero_grad, without its profiler's scope
            for parameter in group["params"]:
                parameter.grad = None
        self._bags.advance()
        with self._backward():
            loss.backward()
        self._reducer.wait()
        self._optimizer.step()
        self._bags.step_replicated(self._row_rate * self._factor)
        self._bags.discard(None if self._next is None else self._next.sparse)
        self._step += 1
        waited = self._bags.take_wait_s() + self._reducer.take_wait_s()
        return step_output(batch, logits.detach(), total, waited)

    def finish(self) -> None:
        """Nothing is held back; what was fetched ahead is let go."""
        self._drop_next()

    def predict(self, batch: Batch) -> Tensor:
        """Logits [B] of this rank's batch. Collective; changes nothing.

        Pooled embeddings travel as float32, but what dct leaves out stays out: the network has learned without it.
        """
        exact = max(self._step - 1, 0) < self._pooled.exact_steps  # as was the last step
        batch = batch if batch.labels.device == self._device else batch.to(self._device)
        with torch.no_grad(), self._counted(), self._travelling(exact=exact, looking=True):
            logits: Tensor = self._model(batch.dense, batch.sparse)
        return logits

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode while open."""
        training = self._model.training
        self._model.eval()
        try:
            yield
        finally:
            self._model.train(training)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[EngineState]:
        """State as views of this engine's memory: rows, their optimizer state, the dense part."""
        yield EngineState(
            step=self._step,
            dense={name: value.detach() for name, value in self._model.state_dict().items()},
            dense_optimizer=self._optimizer.state_dict(),
            tables=self._bags.pieces(),
            replicated=self._bags.replicated,
            private={"dense": self._reducer.state_dict()},
            layout={"mode": "bsp", "plan": self._recipe.plan.to_json()},
            origin=self._recipe.origin,
            dense_pending=self._reducer.pending(),
        )

    def restore(self, state: EngineState, private: dict[str, Any] | None) -> None:
        """Take up what was loaded into a snapshot's views; a batch fetched ahead belongs to the past."""
        self._drop_next()
        self._step = state.step
        self._optimizer.load_state_dict(state.dense_optimizer)
        self._reducer.restore(state.step, state.dense_pending, None if private is None else private.get("dense"))
        self._factor = float("nan")  # the loaded rates are those of another run: set them again

    def report(self) -> dict[str, Any]:
        """Every read is fresh."""
        return {"observed_staleness_max": 0, "missed_updates_max": 0, "dense_dct": self._reducer.report()}

    def _fetch(self, batches: Iterator[Batch]) -> Batch | None:
        batch = next(batches, None)
        if batch is None or batch.labels.device == self._device:
            return batch
        return batch.to(self._device, non_blocking=True)

    def _drop_next(self) -> None:
        self._next = None
        with self._counted():
            self._bags.discard()

    def _set_rates(self) -> None:
        factor = self._recipe.schedule.factor(self._step)
        if factor != self._factor:
            self._factor = factor
            for group, rate in zip(self._optimizer.param_groups, self._dense_rates, strict=True):
                group["lr"] = rate * factor
            self._bags.set_learning_rate(self._row_rate * factor)

    def _counted(self) -> contextlib.AbstractContextManager[None]:
        return counting(self._bags.counter) if isinstance(self._bags, ShardedBags) else contextlib.nullcontext()

    @contextlib.contextmanager
    def _travelling(self, *, exact: bool, looking: bool = False) -> Iterator[None]:
        """How pooled embeddings travel that start while open: see PooledExchange."""
        if self._exchange is None:
            yield
            return
        self._exchange.exact, self._exchange.looking = exact, looking
        try:
            yield
        finally:
            self._exchange.exact = self._exchange.looking = False

    @contextlib.contextmanager
    def _backward(self) -> Iterator[None]:
        if not isinstance(self._bags, ShardedBags):
            yield
            return
        self._bags.counter.pooled = "pooled_bwd"
        try:
            yield
        finally:
            self._bags.counter.pooled = "pooled_fwd"


def _check_equal(plan: dict[str, Any]) -> None:
    """Ranks with different plans would exchange garbage or hang."""
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, plan)
    for rank, other in enumerate(plans):
        if other != plans[0]:
            raise ConfigError(
                f"planner: rank {rank} has another plan than rank 0, as hosts of unequal memory give; "
                "set planner.memory_gib so that all ranks plan for the same memory"
            )
