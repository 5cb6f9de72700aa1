"""What pieces and sharding types cost beside their bytes, from whole steps of a few small plans.

The same tables are held whole, in strips of columns, half one way and half the other, and half replicated. What their
steps take beyond the prices by bytes is shared out among the counts in which the plans differ: pieces, pieces x
examples, pieces x ids, sharding types. What a step takes under any plan is the batch's and no part of a price.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.planner.cluster import Cluster
from hetrain.planner.fit import costs_of
from hetrain.planner.piece import Piece
from hetrain.planner.piece_costs import NS_PER_MS, US_PER_MS, PieceCosts
from hetrain.planner.plan import Plan
from hetrain.planner.predict import predict
from hetrain.planner.workload import TableLoad
from hetrain.ranks import Ranks
from hetrain.tables import Table

BATCHES = ((64, 1), (1024, 1), (256, 16))  # examples of a rank, ids of each table per example
TABLES_PER_RANK, ROWS, DIM = 2, 2000, 64
COPIES, COPIED_ROWS = 0, 100  # no strips: replicated; of few rows, as the sum of gradients has a price of its own
LAYOUTS = ((1, 1), (2, 2), (4, 4), (1, 2), (1, COPIES))  # strips of the tables of either half
TURNS = 15  # of all plans and batches, a step each

Step = Callable[[KeyedJaggedTensor], object]
MakeStep = Callable[[Sequence[Table], Plan, torch.device], Step]


@dataclass(frozen=True)
class Trial:
    """A plan at a batch: its price by bytes, how much it has of what costs, and what its step took."""

    batch: int  # number of the batch
    price_ms: float
    counts: tuple[float, ...]  # in the order of PieceCosts
    took_ms: float = 0.0


def measure_pieces(
    ranks: Ranks, device: torch.device, cluster: Cluster, make_step: MakeStep
) -> tuple[PieceCosts, float]:
    """The costs, and how far a usual step is from the one they give, as a share of it. Collective.

    cluster: the ranks of this run, at the speeds that were measured of them.
    """
    trials: list[Trial] = []
    works: list[Callable[[], object]] = []
    for halves in LAYOUTS:
        plan, tables = _plan(halves, cluster)
        step = make_step(tables, plan, device)
        for number, (examples, ids) in enumerate(BATCHES):
            trials.append(_trial(plan, tables, number, cluster))
            batch = _batch(tables, examples, ids, ranks.rank).to(device)
            works.append(partial(step, batch))
    times = _times(ranks, device, works)
    costs, off = fitted([replace(trial, took_ms=ms) for trial, ms in zip(trials, times.min(1), strict=True)])
    return costs, max(off, float(np.median(1 - times.min(1) / np.median(times, 1))))


def fitted(trials: Sequence[Trial]) -> tuple[PieceCosts, float]:
    """The costs that give the times of the trials, and the median relative error."""
    bases = 1 + max(trial.batch for trial in trials)
    counts = np.array([[*(float(trial.batch == b) for b in range(bases)), *trial.counts] for trial in trials])
    took = np.array([trial.took_ms for trial in trials])
    beyond = took - np.array([trial.price_ms for trial in trials])
    costs = costs_of(counts, beyond, took, free=bases)
    per_type, replicas, piece, bag, one = costs[bases:].tolist()
    fixed = (per_type * US_PER_MS, replicas * US_PER_MS, piece * US_PER_MS)
    off = float(np.median(np.abs(counts @ costs - beyond) / took))
    return PieceCosts(*fixed, bag * NS_PER_MS, one * NS_PER_MS), off


def _plan(halves: tuple[int, int], cluster: Cluster) -> tuple[Plan, list[Table]]:
    """Tables in two halves, each cut into as many strips as is said; pieces in turn on the ranks."""
    ranks, turn = cluster.world_size, 0
    tables: list[Table] = []
    pieces: list[Piece] = []
    sharding: dict[str, str] = {}
    for k in range(TABLES_PER_RANK * ranks):
        name, parts = f"t{k}", min(halves[k % 2], ranks)
        tables.append(Table(name, ROWS if parts else COPIED_ROWS, DIM, (f"f{k}",), 0.01))
        sharding[name] = "column_wise" if parts > 1 else "table_wise" if parts else "data_parallel"
        for part in range(parts):
            width = DIM // parts
            pieces.append(Piece(name, turn % ranks, 0, ROWS, part * width, width, cluster.device_tier))
            turn += 1
    copied = frozenset(name for name, kind in sharding.items() if kind == "data_parallel")
    return Plan("torchrec", ranks, tuple(pieces), copied, sharding, cluster.ranks_per_node), tables


def _trial(plan: Plan, tables: Sequence[Table], number: int, cluster: Cluster) -> Trial:
    examples, ids = BATCHES[number]
    loads = [TableLoad(table, (float(ids),)) for table in tables]
    price = max(cost.total_ms for cost in predict(plan, loads, cluster, examples))
    pieces, kinds = float(len(plan.pieces)), set(plan.sharding.values()) - {"data_parallel"}
    counts = (float(len(kinds)), float(bool(plan.replicated)), pieces, pieces * examples, pieces * examples * ids)
    return Trial(number, price, counts)


def _batch(tables: Sequence[Table], examples: int, ids: int, rank: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(rank)
    values = [torch.randint(table.rows, (examples * ids,), generator=draw) for table in tables]
    lengths = torch.full((len(tables) * examples,), ids, dtype=torch.int32)
    return KeyedJaggedTensor([t.features[0] for t in tables], torch.cat(values), lengths=lengths, stride=examples)


def _times(ranks: Ranks, device: torch.device, works: Sequence[Callable[[], object]]) -> NDArray[np.float64]:
    """Milliseconds of each work in each turn [works, turns], the slowest rank's, equal on all ranks.

    The shortest of a work counts: on a busy machine others' work makes the usual one several times as long.
    """
    times: list[list[float]] = [[] for _ in works]
    for turn in range(1 + TURNS):
        for work, found in zip(works, times, strict=True):
            dist.barrier(ranks.group)
            begun = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:  # the first warms up
                found.append((time.perf_counter() - begun) * 1000)
    slowest: NDArray[np.float64] = np.array(ranks.gather(times)).max(0)
    return slowest
