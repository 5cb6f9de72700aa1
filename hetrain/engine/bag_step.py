"""A step of the embeddings alone, as `hetrain plan --calibrate` times it: no network, no loss."""

from collections.abc import Callable, Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.engine.sharded_bags import ShardedBags
from hetrain.optim import RowOptimizer
from hetrain.planner.plan import Plan
from hetrain.tables import Table
from hetrain.telemetry import Traffic


def bag_step(tables: Sequence[Table], plan: Plan, device: torch.device) -> Callable[[KeyedJaggedTensor], None]:
    """Trains the rows of a batch [F keys, stride B], B equal on all ranks, by SGD with gradients of one. Collective."""
    optimizer = RowOptimizer("sgd", 0.01, 1e-8)
    bags = ShardedBags(tables, plan, optimizer, device, seed=0, batch_size=1, traffic=Traffic())

    def step(batch: KeyedJaggedTensor) -> None:
        pooled = bags(batch).values()
        pooled.backward(torch.ones_like(pooled))
        bags.step_replicated(optimizer.lr)

    return step
