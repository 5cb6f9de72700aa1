"""What every engine is made from, whatever its way of keeping embeddings."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hetrain.comms.dense_exchange import DenseComms
from hetrain.engine import Origin
from hetrain.optim import RowOptimizer, Schedule
from hetrain.planner.plan import Plan
from hetrain.tables import Table
from hetrain.telemetry import Traffic


@dataclass(frozen=True)
class Recipe:
    """What is trained, where it lies and by which steps: equal on all ranks, but for `device` and `traffic`."""

    make_model: Callable[[nn.Module], nn.Module]  # over its bags; draws its dense weights from torch's generator
    tables: Sequence[Table]  # all of them, in model order
    plan: Plan  # for this world size, and for the engine that is made
    row_optimizer: RowOptimizer  # trains the rows, wherever the plan puts them
    dense_optimizer: Callable[[Iterable[Parameter]], Optimizer]
    schedule: Schedule  # factor of both learning rates per step
    device: torch.device  # where this rank computes
    seed: int  # of the initial rows and the dense weights
    traffic: Traffic  # counts every byte that this rank sends
    dense_comms: DenseComms = field(default_factory=DenseComms)  # how dense gradients travel

    @property
    def origin(self) -> Origin:
        """What rows start as."""
        return Origin(self.seed, self.row_optimizer.name, self.tables)

    def row_rate(self, step: int) -> float:
        """The learning rate of rows in the update that takes the model from `step` updates to `step` + 1."""
        return self.row_optimizer.lr * self.schedule.factor(step)
