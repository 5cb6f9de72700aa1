"""A tiny model over bags, a fixed random data set, and plain torch on whole batches: what engines must equal."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.comms.dense_exchange import DenseComms
from hetrain.config import DenseOptimizerConfig, RowOptimizerConfig, ScheduleConfig
from hetrain.data.batch import Batch
from hetrain.engine import Engine
from hetrain.engine.loss import loss_share
from hetrain.engine.recipe import Recipe
from hetrain.engine.store_engine import StoreEngine
from hetrain.engine.store_settings import StoreSettings
from hetrain.optim import RowOptimizer, Schedule, dense_optimizer, row_optimizer
from hetrain.planner.plan import Piece, Plan
from hetrain.tables import Table
from hetrain.telemetry import Traffic
from tests.engine.plain_bags import PlainBags

DENSE = 3
ROWS = (50, 7, 300)
SEED = 11
SCHEDULE = ScheduleConfig(warmup_steps=4)
STEPS = 12


def make_tables(dims: tuple[int, ...] = (8, 8, 8)) -> list[Table]:
    return [Table(f"t{i}", n, d, (f"f{i}",), 0.1) for i, (n, d) in enumerate(zip(ROWS, dims, strict=True))]


class Net(nn.Module):
    """Logits from the pooled rows of three features and the dense columns."""

    def __init__(self, bags: nn.Module, dims: tuple[int, ...] = (8, 8, 8)) -> None:
        super().__init__()
        self.bags = bags
        self.hidden = nn.Linear(DENSE + sum(dims), 6)
        self.out = nn.Linear(6, 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(sparse)
        x = torch.cat([dense, *(pooled[f"f{i}"] for i in range(len(ROWS)))], dim=1)
        return self.out(torch.relu(self.hidden(x))).squeeze(1)


def examples(n: int, multi_hot: bool) -> list[tuple[Tensor, list[list[int]], Tensor]]:
    """(dense [I], ids per feature, label []) of `n` examples; ids are skewed so that rows are shared."""
    g = torch.Generator().manual_seed(5)
    result = []
    for _ in range(n):
        lengths = torch.randint(0, 4, (3,), generator=g).tolist() if multi_hot else [1, 1, 1]
        ids = [(torch.rand(k, generator=g) ** 3 * rows).long().tolist() for k, rows in zip(lengths, ROWS, strict=True)]
        result.append((torch.rand(DENSE, generator=g), ids, (torch.rand((), generator=g) > 0.6).float()))
    return result


def make_batch(part: list[tuple[Tensor, list[list[int]], Tensor]], global_size: int, order: list[int]) -> Batch:
    lengths = torch.tensor([len(ids[f]) for f in order for _, ids, _ in part], dtype=torch.int64)
    values = torch.tensor([i for f in order for _, ids, _ in part for i in ids[f]], dtype=torch.int64)
    return Batch(
        torch.stack([d for d, _, _ in part]) if part else torch.zeros(0, DENSE),
        KeyedJaggedTensor([f"f{f}" for f in order], values, lengths=lengths, stride=len(part)),
        torch.stack([y for _, _, y in part]) if part else torch.zeros(0),
        global_size,
    )


def batches(rank: int, world_size: int, *, multi_hot: bool = False, steps: int = STEPS) -> list[Batch]:
    """Uneven shares of every step's examples, the last step leaving rank 1 with none."""
    order = [0, 1, 2] if not multi_hot else [2, 0, 1]
    data = examples(16 * steps, multi_hot)
    result = []
    for step in range(steps):
        whole = data[16 * step : 16 * (step + 1)]
        if step == steps - 1:
            whole = whole[:5]
        cut = 16 * (rank + 1) // world_size if step % 3 == 0 else 5 * (rank + 1)
        low = 16 * rank // world_size if step % 3 == 0 else 5 * rank
        high = len(whole) if rank == world_size - 1 else cut
        result.append(make_batch(whole[low:high], len(whole), order))
    return result


def make_plan(tables: list[Table], world_size: int) -> Plan:
    """The first table whole on the last rank, the others cut by rows."""
    pieces = [Piece(tables[0].name, world_size - 1, 0, tables[0].rows, 0, tables[0].dim)]
    for t in tables[1:]:
        block = -(-t.rows // world_size)
        for rank in range(world_size):
            n = min(block, t.rows - rank * block)
            if n > 0:
                pieces.append(Piece(t.name, rank, rank * block, n, 0, t.dim))
    return Plan("store", world_size, tuple(pieces), frozenset(), {})


def make_engine(
    world_size: int,
    optimizer: str,
    *,
    capacity: float,
    dims: tuple[int, ...] = (8, 8, 8),
    traffic: Traffic | None = None,
    plan: Plan | None = None,
    workers: dist.ProcessGroup | None = None,
    dense_comms: DenseComms | None = None,
    **settings: Any,
) -> StoreEngine:
    """This rank's engine; `plan`: by default that of make_plan; `settings`: of StoreSettings."""
    plan = plan or make_plan(make_tables(dims), world_size)
    recipe = make_recipe(plan, make_row_optimizer(optimizer), dims, traffic, dense_comms)
    return StoreEngine(recipe, make_settings(capacity=capacity, **settings), workers=workers)


def make_recipe(
    plan: Plan,
    rows: RowOptimizer,
    dims: tuple[int, ...],
    traffic: Traffic | None,
    dense_comms: DenseComms | None,
) -> Recipe:
    return Recipe(
        lambda bags: Net(bags, dims),
        make_tables(dims),
        plan,
        rows,
        lambda params: dense_optimizer(params, DenseOptimizerConfig("adagrad", 0.1)),
        Schedule(SCHEDULE),
        torch.device("cpu"),
        SEED,
        traffic or Traffic(),
        dense_comms or DenseComms(),
    )


def make_row_optimizer(name: str) -> RowOptimizer:
    return row_optimizer(RowOptimizerConfig(name, 0.3, 1e-8))


def make_settings(*, capacity: float, staleness: float = 0, late_leg: bool = True, **settings: Any) -> StoreSettings:
    """With a late leg unless asked otherwise: whatever can be read ahead is."""
    common: dict[str, Any] = {"batch_size": 8, "timeout_s": 30, "late_leg": late_leg}
    return StoreSettings(capacity=capacity, staleness=staleness, **common, **settings)


def train(engine: Engine, data: Iterator[Batch]) -> list[float]:
    """Summed loss of every step on this rank."""
    losses = []
    while (out := engine.step(data)) is not None:
        losses.append(float(out.loss))
    return losses


class PlainTorch:
    """One process, whole batches, nn.EmbeddingBag, textbook formulas."""

    def __init__(self, optimizer: str, dims: tuple[int, ...] = (8, 8, 8)) -> None:
        self.rows = PlainBags(make_tables(dims), SEED)
        torch.manual_seed(SEED)
        self.net = Net(nn.Identity(), dims)
        self.net.bags = self.rows
        self.optimizer = optimizer
        dense = [p for n, p in self.net.named_parameters() if not n.startswith("bags")]
        self.dense = dense_optimizer(dense, DenseOptimizerConfig("adagrad", 0.1))
        self.sums = [
            torch.zeros(w.shape[0], 1 if optimizer == "rowwise_adagrad" else w.shape[1]) for w in self._weights
        ]
        self.step = 0

    @property
    def _weights(self) -> list[Tensor]:
        return self.rows.weights

    def train(self, data: list[Batch]) -> list[float]:
        losses = []
        for batch in data:
            factor = Schedule(SCHEDULE).factor(self.step)
            self.dense.param_groups[0]["lr"] = 0.1 * factor
            share, total = loss_share(self.net(batch.dense, batch.sparse), batch.labels, None, batch.global_size)
            self.net.zero_grad()
            share.backward()
            self.dense.step()
            for weight, sums in zip(self._weights, self.sums, strict=True):
                self._update(weight, sums, 0.3 * factor)
            losses.append(float(total))
            self.step += 1
        return losses

    @torch.no_grad()
    def _update(self, weight: Tensor, sums: Tensor, lr: float) -> None:
        g = weight.grad
        assert g is not None
        if self.optimizer == "sgd":
            weight -= lr * g
            return
        sums += (g * g).mean(1, keepdim=True) if self.optimizer == "rowwise_adagrad" else g * g
        weight -= lr * g / (sums.sqrt() + 1e-8)
