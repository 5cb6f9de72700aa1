"""A small engine of plain torch: what the trainer's floors are tested with, apart from the real engines.

Every rank holds all rows; gradients are summed over ranks. In snapshots each rank shows its own range of rows, with
uneven boundaries.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.data.batch import Batch
from hetrain.engine import EngineState, StepOutput, TablePiece

ROWS, DIM, DENSE = 50, 4, 3
TABLES = ("a", "b")


def batches(n, size, seed, global_size=None):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        ids = torch.randint(0, ROWS, (2 * size,), generator=g)
        lengths = torch.ones(2 * size, dtype=torch.int32)
        dense = torch.randn(size, DENSE, generator=g)
        labels = (dense[:, 0] + ids[:size] / ROWS + torch.randn(size, generator=g) > 0.5).float()
        sparse = KeyedJaggedTensor(keys=list(TABLES), values=ids, lengths=lengths)
        out.append(Batch(dense, sparse, labels, global_size or size))
    return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterDict({t: torch.randn(ROWS, DIM) * 0.1 for t in TABLES})
        self.linear = nn.Linear(DENSE + DIM * len(TABLES), 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, batch):
        rows = [F.embedding(batch.sparse[t].values(), self.tables[t]) for t in TABLES]
        return self.linear(self.drop(torch.cat([batch.dense, *rows], 1)))[:, 0]


class PlainEngine:
    def __init__(self, rank=0, world_size=1, cut=17, mode="plain", lr=0.05):
        torch.manual_seed(5)
        self.net = Net()
        torch.manual_seed(100 + rank)
        self.rank, self.world_size, self.cut, self.mode = rank, world_size, cut, mode
        self.dense = dict(self.net.linear.named_parameters())
        self.dense_optimizer = torch.optim.Adam(self.dense.values(), lr=lr)
        self.sums = {t: torch.zeros(ROWS) for t in TABLES}
        self.lr = lr
        self.steps = 0
        self.secret = torch.zeros(1)
        self.finished = False

    def step(self, iterator):
        batch = next(iterator, None)
        if batch is None:
            return None
        logits = self.net(batch)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        self.net.zero_grad(set_to_none=False)
        (loss / batch.global_size).backward()
        for p in self.net.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if self.world_size > 1:
                dist.all_reduce(p.grad)
        self.dense_optimizer.step()
        with torch.no_grad():
            for t in TABLES:
                g = self.net.tables[t].grad
                self.sums[t] += g.pow(2).mean(1)
                self.net.tables[t] -= self.lr * g / (self.sums[t].sqrt() + 1e-8)[:, None]
        self.steps += 1
        self.secret += 1
        return StepOutput(loss.detach(), logits.detach(), batch.labels, batch.size, batch.global_size, 0.0)

    def finish(self):
        self.finished = True

    @contextlib.contextmanager
    def evaluating(self):
        self.net.eval()
        yield
        self.net.train()

    def predict(self, batch):
        return self.net(batch)

    def _ranges(self):
        if self.world_size == 1:
            # two pieces: a rank may hold several
            return [(0, self.cut), (self.cut, ROWS)]
        starts = [0, self.cut, self.cut + 10][: self.world_size]
        edges = [*starts, ROWS]
        return [(edges[self.rank], edges[self.rank + 1])]

    @contextlib.contextmanager
    def snapshot(self):
        pieces = {
            "a": [
                TablePiece(lo, self.net.tables["a"].data[lo:hi], {"sum": self.sums["a"][lo:hi]})
                for lo, hi in self._ranges()
            ],
            "b": [TablePiece(0, self.net.tables["b"].data, {"sum": self.sums["b"]})],
        }
        yield EngineState(
            self.steps,
            {k: v.data for k, v in self.dense.items()},
            self.dense_optimizer.state_dict(),
            pieces,
            frozenset(["b"]),
            {"secret": self.secret},
            {"mode": self.mode, "world_size": self.world_size, "cut": self.cut, "pieces": ((1, 2),)},
        )

    def restore(self, state, private):
        self.steps = state.step
        self.dense_optimizer.load_state_dict(state.dense_optimizer)
        self.secret.copy_(private["secret"] if private else torch.tensor([-1.0]))
        if self.world_size > 1:
            ((lo, hi),) = self._ranges()
            for whole in (self.net.tables["a"].data, self.sums["a"]):
                mine = torch.zeros_like(whole)
                mine[lo:hi] = whole[lo:hi]
                dist.all_reduce(mine)
                whole.copy_(mine)

    def report(self):
        return {"cache": {"hits": 3, "misses": 1}, "observed_staleness_max": self.rank}

    def weights(self):
        return {k: v.detach().clone().numpy() for k, v in (self.net.state_dict() | self.sums).items()}
