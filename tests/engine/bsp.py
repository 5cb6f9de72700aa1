"""A small model, its global batches, and the same training written out in plain torch."""

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan, ShardMetadata
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.comms.dense_exchange import DenseComms
from hetrain.config import ScheduleConfig
from hetrain.data.batch import Batch
from hetrain.engine.recipe import Recipe
from hetrain.engine.torchrec_engine import TorchRecEngine
from hetrain.optim import RowOptimizer, Schedule
from hetrain.planner.torchrec_planner import plan_of
from hetrain.tables import Table
from hetrain.telemetry import Traffic
from tests.engine.plain_bags import PlainBags

DENSE, DIM, SEED = 3, 8, 5
TABLES = [
    Table("a", 31, DIM, ("a",), 0.1),
    Table("b", 7, DIM, ("b", "b2"), 0.1),
    Table("c", 50, 4, ("c",), 0.1),
]
FEATURES = [f for t in TABLES for f in t.features]
WIDTH = sum(t.dim for t in TABLES for _ in t.features)
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, bags, tables=TABLES):
        super().__init__()
        self.bags, self.features = bags, [f for t in tables for f in t.features]
        width = sum(t.dim for t in tables for _ in t.features)
        self.layers = nn.Sequential(nn.Linear(DENSE + width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, sparse):
        pooled = self.bags(sparse)
        return self.layers(torch.cat([dense, *(pooled[f] for f in self.features)], 1))[:, 0]


def train_plain(batches, optimizer: RowOptimizer, factor=lambda step: 1.0, tables=TABLES):
    """Mean loss of every global batch, and the tables after the last."""
    bags = PlainBags(tables, SEED)
    torch.manual_seed(SEED)
    net = Net(bags, tables)
    dense = torch.optim.Adam(net.layers.parameters(), lr=0.01)
    state = {t.name: torch.zeros(t.rows, t.dim) for t in tables}
    losses = []
    for step, batch in enumerate(batches):
        loss = F.binary_cross_entropy_with_logits(net(batch.dense, batch.sparse), batch.labels)
        net.zero_grad()
        loss.backward()
        dense.param_groups[0]["lr"] = 0.01 * factor(step)
        dense.step()
        with torch.no_grad():
            for t in tables:
                weight, g, s = bags.tables[t.name].weight, bags.tables[t.name].weight.grad, state[t.name]
                s += {"sgd": 1, "adagrad": g**2, "rowwise_adagrad": (g**2).mean(1, keepdim=True)}[optimizer.name]
                scale = 1 if optimizer.name == "sgd" else s.sqrt() + optimizer.eps
                weight -= optimizer.lr * factor(step) * g / scale
        losses.append(loss.item())
    return losses, {t.name: bags.tables[t.name].weight.detach().numpy() for t in tables}


def global_batches(sizes, seed=0, multi_hot=True, tables=TABLES):
    """One batch per size, of all ranks together; bags hold 0 to 3 ids, or exactly 1."""
    g = torch.Generator().manual_seed(seed)
    features = [f for t in tables for f in t.features]
    out = []
    for size in sizes:
        n = len(features) * size
        lengths = torch.randint(0, 4, (n,), generator=g) if multi_hot else torch.ones(n, dtype=torch.int64)
        rows = [t.rows for t in tables for _ in t.features]
        counts = lengths.view(len(features), size).sum(1).tolist()
        values = torch.cat([torch.randint(0, r, (c,), generator=g) for r, c in zip(rows, counts, strict=True)])
        dense = torch.randn(size, DENSE, generator=g)
        labels = (torch.rand(size, generator=g) < 0.3).float()
        out.append(Batch(dense, KeyedJaggedTensor(features, values, lengths=lengths, stride=size), labels, size))
    return out


def part(batch, lo, hi):
    """Examples lo..hi of a global batch, as one rank's batch of that step."""
    offsets, size = batch.sparse.offsets(), batch.size
    keys = range(len(batch.sparse.keys()))
    values = torch.cat([batch.sparse.values()[offsets[k * size + lo] : offsets[k * size + hi]] for k in keys])
    lengths = batch.sparse.lengths().view(-1, size)[:, lo:hi].reshape(-1)
    sparse = KeyedJaggedTensor(batch.sparse.keys(), values, lengths=lengths, stride=hi - lo)
    return Batch(batch.dense[lo:hi], sparse, batch.labels[lo:hi], batch.size)


def plan(kinds, world_size):
    """A hand-made plan: one sharding type per table."""
    parameters = {}
    for i, (t, kind) in enumerate(zip(TABLES, kinds, strict=True)):
        ranks = [i % world_size] if kind == "table_wise" else list(range(world_size))
        block = -(-t.rows // world_size) if kind == "row_wise" else t.rows
        shards = [
            ShardMetadata([k * block, 0], [min(block, t.rows - k * block), t.dim], f"rank:{r}/cpu")
            for k, r in enumerate(ranks)
        ]
        replicated = kind == "data_parallel"
        parameters[t.name] = ParameterSharding(
            kind, "dense" if replicated else "fused", ranks, None if replicated else EnumerableShardingSpec(shards)
        )
    return ShardingPlan({"": parameters})


def engine(optimizer, kinds=("table_wise",) * 3, world_size=1, batch_size=8, schedule=None, traffic=None, dense=None):
    made = plan_of(plan(kinds, world_size), TABLES, world_size)
    return engine_of(made, TABLES, optimizer, batch_size, schedule, traffic, dense)


def engine_of(plan, tables, optimizer, batch_size=8, schedule=None, traffic=None, dense=None, pooled=None):
    recipe = Recipe(
        lambda bags: Net(bags, tables),
        tables,
        plan,
        optimizer,
        lambda params: torch.optim.Adam(params, lr=0.01),
        Schedule(schedule or ScheduleConfig()),
        CPU,
        SEED,
        Traffic() if traffic is None else traffic,
        dense or DenseComms(),
    )
    return TorchRecEngine(recipe, batch_size, pooled)


def optimizer(name, lr=0.1, eps=1e-6):
    return RowOptimizer(name, lr, eps)
