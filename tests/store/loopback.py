"""W caches and owners in one process; an exchange is a call."""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch

from hetrain.optim import RowOptimizer
from hetrain.store.audit import audit_report, missed_updates, split_report
from hetrain.store.cache import Cache
from hetrain.store.owner import Owner
from hetrain.store.route import split
from hetrain.store.space import Placement, RowSpace
from hetrain.tables import Table

DIM = 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    world: int = 1
    tables: tuple[int, ...] = (20,)  # rows of each
    capacity: int = 5
    batch_rows: int = 20
    staleness: float = 1
    policy: str = "lru"
    clock: str = "max"
    optimizer: str = "sgd"
    lr: float = 0.1
    eps: float = 1e-8
    seed: int = 7
    dim: int = DIM

    @property
    def rows(self) -> int:
        return sum(self.tables)


def plan_of(tables, world, seed):
    """Random uneven row ranges on random ranks."""
    rng = np.random.default_rng(seed)
    pieces = []
    for number, rows in enumerate(tables):
        cuts = sorted({0, rows, *rng.integers(0, rows + 1, world - 1).tolist()})
        for first, end in pairwise(cuts):
            pieces.append(
                SimpleNamespace(table=f"t{number}", rank=int(rng.integers(world)), first_row=first, rows=end - first)
            )
    rng.shuffle(pieces)
    return SimpleNamespace(pieces=pieces)


class Loopback:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        tables = [Table(f"t{i}", rows, setup.dim, (f"f{i}",), 0.5) for i, rows in enumerate(setup.tables)]
        self.space = RowSpace(tables, setup.dim)
        self.placement = Placement(self.space, plan_of(setup.tables, setup.world, setup.seed), setup.world)
        self.optimizer = RowOptimizer(setup.optimizer, setup.lr, setup.eps)
        held_back = setup.capacity > 0
        width = self.optimizer.state_width(setup.dim) if held_back else 0
        slots = setup.capacity + setup.batch_rows
        self.owners = [
            Owner(
                self.space,
                self.placement,
                rank,
                self.optimizer,
                seed=setup.seed,
                device=CPU,
                held_back=held_back,
                clock=setup.clock,
                staleness=setup.staleness,
                audit=True,
            )
            for rank in range(setup.world)
        ]
        self.caches = [
            Cache(
                self.space,
                setup.capacity,
                setup.batch_rows,
                torch.full((slots, setup.dim), torch.nan),
                torch.full((slots, width), torch.nan),
                setup.policy,
                setup.staleness,
                self.optimizer,
                audit=True,
            )
            for _ in range(setup.world)
        ]

    def exchange(self, requests):
        """By worker, whole requests; returns by worker the merged replies and the parts sent to each owner."""
        routed = [split(request, self.placement) for request in requests]
        by_owner = [owner.serve([r.requests[o] for r in routed]) for o, owner in enumerate(self.owners)]
        replies = [r.merge([answers[w] for answers in by_owner]) for w, r in enumerate(routed)]
        return replies, [r.requests for r in routed]

    def read(self, batches):
        """One round; the plans by worker, admitted, and the requests sent [worker][owner]."""
        plans = [
            cache.begin(torch.tensor(batch, dtype=torch.int64))
            for cache, batch in zip(self.caches, batches, strict=True)
        ]
        replies, sent = self.exchange([plan.request for plan in plans])
        for cache, plan, reply in zip(self.caches, plans, replies, strict=True):
            cache.admit(plan, reply)
        return plans, sent

    def write(self, plans, gradients):
        """`gradients`: by worker [U, D] in the order of plan.rows."""
        for cache, plan, gradient in zip(self.caches, plans, gradients, strict=True):
            if self.setup.capacity == 0:
                cache.stage_gradients(plan, gradient)
            else:
                at = plan.unique_slots
                value, state = cache.value[at], cache.state[at]
                self.optimizer.step_(value, state, gradient, self.setup.lr)
                cache.value[at], cache.state[at] = value, state
            cache.commit(plan)

    def audit(self, plans):
        reports = [split_report(audit_report(c, p), self.placement) for c, p in zip(self.caches, plans, strict=True)]
        return max(missed_updates(owner, [r[o] for r in reports]) for o, owner in enumerate(self.owners))

    def flush(self):
        self.exchange([cache.pending() for cache in self.caches])
        for cache in self.caches:
            cache.clear()

    def table(self, name="value"):
        """All rows [R, .] of all owners, by global row."""
        rows = torch.arange(self.space.rows)
        owner, local = self.placement.owner_of(rows), self.placement.local_of(rows)
        return torch.stack([getattr(self.owners[int(o)], name)[int(i)] for o, i in zip(owner, local, strict=True)])
