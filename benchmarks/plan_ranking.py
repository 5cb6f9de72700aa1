"""Do predicted step times rank plans as measured ones do?

    hetrain plan --calibrate launch.nproc=4 cluster.profile=profile.json
    python benchmarks/plan_ranking.py profile.json [--ranks 4] [--rounds 5] [--steps 8] [--out ranking.json]

The same tables, ids and small dense part are trained by TorchRec under many plans, on local gloo ranks with a thread
each: those of our strategies, and uniform ones from bad to good. Plans take turns, so that a busy machine slows all
of them; a figure is the median over rounds of the slowest rank's time per step; the shortest round stands beside it,
since on a machine that is not idle medians tell of others' work, too. The prediction is the slowest rank's
milliseconds under the profile: by bytes alone, as TorchRec prices, and with what pieces and sharding types cost beside
them. Prints all and Spearman's rank correlations; the hierarchical plan is that of the prices it is compared with, and
over all plans both count.
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.config import ClusterConfig, ScheduleConfig
from hetrain.data.batch import Batch
from hetrain.engine.recipe import Recipe
from hetrain.engine.torchrec_engine import TorchRecEngine
from hetrain.launch.quiet import quiet_third_parties
from hetrain.optim import RowOptimizer, Schedule
from hetrain.planner.cluster import Cluster
from hetrain.planner.cut import ALL, pieces_of
from hetrain.planner.machines import machines_of
from hetrain.planner.piece_costs import NO_COSTS
from hetrain.planner.plan import Plan
from hetrain.planner.predict import predict
from hetrain.planner.strategies import STRATEGIES, make_plan
from hetrain.planner.torchrec_prices import TorchRecPrices
from hetrain.planner.workload import TableLoad
from hetrain.tables import Table
from hetrain.telemetry import Traffic

BATCH, DENSE = 1024, 13
BY_BYTES = "hierarchical by bytes"
SHAPES = [(1, 100_000, 128, 1), (4, 40_000, 64, 4), (2, 20_000, 64, 20), (8, 2_000, 32, 1), (6, 100, 16, 1)]
LOADS = [
    TableLoad(Table(f"t{rows}_{i}", rows, dim, (f"f{rows}_{i}",), 0.01), (float(pooling),))
    for count, rows, dim, pooling in SHAPES
    for i in range(count)
]
TABLES = [load.table for load in LOADS]


class Net(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.layer = nn.Linear(DENSE + sum(t.dim for t in TABLES), 1)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.bags(sparse)
        return self.layer(torch.cat([dense, *(pooled[t.features[0]] for t in TABLES)], 1))[:, 0]


def uniform(cluster: Cluster, kind: str, place: Callable[[int], int]) -> Plan:
    """Every table cut the same way where it can be, else whole; part k of all parts at rank place(k)."""
    prices, pieces, sharding, replicated = TorchRecPrices(cluster, BATCH), [], {}, set()
    number = itertools.count()
    for load in LOADS:
        cut = (prices.cuts(load, (kind,), ("ddr",)) or prices.cuts(load, ("table_wise",), ("ddr",)))[0]
        sharding[load.table.name] = cut.kind
        if cut.kind == "data_parallel":
            replicated.add(load.table.name)
            continue
        places = [] if cut.place == ALL else [place(next(number)) % cluster.world_size for _ in range(cut.parts)]
        pieces += pieces_of(load.table, cut, places, cluster.world_size, cluster.ranks_per_node)
    plan = Plan("torchrec", cluster.world_size, tuple(pieces), frozenset(replicated), sharding, cluster.ranks_per_node)
    plan.check(TABLES)
    return plan


def plans(cluster: Cluster) -> dict[str, Plan]:
    found = {name: make_plan(name, LOADS, cluster, "torchrec", BATCH).plan for name in STRATEGIES}
    found[BY_BYTES] = make_plan("hierarchical", LOADS, by_bytes(cluster), "torchrec", BATCH).plan
    rng = np.random.default_rng(1)
    scattered = rng.integers(cluster.world_size, size=10_000)
    return found | {
        "replicated": uniform(cluster, "data_parallel", int),
        "all on rank 0": uniform(cluster, "table_wise", lambda k: 0),
        "in turn": uniform(cluster, "table_wise", int),
        "at random": uniform(cluster, "table_wise", lambda k: int(scattered[k])),
        "half on rank 0": uniform(cluster, "table_wise", lambda k: k if k % 2 else 0),
        "rows": uniform(cluster, "row_wise", int),
        "columns": uniform(cluster, "column_wise", int),
        "columns on ranks 0, 1": uniform(cluster, "column_wise", lambda k: k % 2),
    }


def by_bytes(cluster: Cluster) -> Cluster:
    return replace(cluster, piece_costs=NO_COSTS)


def predictions(found: dict[str, Plan], cluster: Cluster) -> dict[str, float]:
    loads = [replace(load, state_bytes_per_row=0) for load in LOADS]
    return {name: max(cost.total_ms for cost in predict(plan, loads, cluster, BATCH)) for name, plan in found.items()}


def batches(rank: int, world_size: int, count: int = 6) -> list[Batch]:
    """Even ids, bags of equal length: what the loads say."""
    rng = np.random.default_rng(rank)
    lengths = [int(load.pooling) for load in LOADS]
    found = []
    for _ in range(count):
        ids = [rng.integers(t.rows, size=BATCH * n) for t, n in zip(TABLES, lengths, strict=True)]
        sparse = KeyedJaggedTensor(
            [t.features[0] for t in TABLES],
            torch.from_numpy(np.concatenate(ids)),
            lengths=torch.tensor(lengths, dtype=torch.int32).repeat_interleave(BATCH),
            stride=BATCH,
        )
        labels = torch.from_numpy((rng.random(BATCH) > 0.75).astype(np.float32))
        found.append(Batch(torch.rand(BATCH, DENSE), sparse, labels, BATCH * world_size))
    return found


def worker(rank: int, port: int, cluster: Cluster, args: argparse.Namespace, out) -> None:
    quiet_third_parties()
    torch.set_num_threads(1)
    world_size = cluster.world_size
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    data = batches(rank, world_size)
    engines = {name: (engine(plan), itertools.cycle(data)) for name, plan in plans(cluster).items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(args.rounds + 1):
        for name, (trained, source) in engines.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(args.steps):
                trained.step(source)
            spent = torch.tensor([(time.perf_counter() - begun) * 1000 / args.steps])
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if turn:  # the first does not count
                times[name].append(float(spent))
    if rank == 0:
        out.put(times)
    dist.barrier()
    dist.destroy_process_group()


def engine(plan: Plan) -> TorchRecEngine:
    recipe = Recipe(
        make_model=Net,
        tables=TABLES,
        plan=plan,
        row_optimizer=RowOptimizer("sgd", 0.01, 1e-8),
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        schedule=Schedule(ScheduleConfig()),
        device=torch.device("cpu"),
        seed=1,
        traffic=Traffic(),
    )
    return TorchRecEngine(recipe, BATCH)


def spearman(one: list[float], other: list[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks."""

    def ranks(values: list[float]) -> np.ndarray:
        array = np.array(values)
        return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])

    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out")
    args = parser.parse_args()
    described = ClusterConfig(device="cpu", nodes=1, gpus_per_node=args.ranks, profile=args.profile)
    cluster = machines_of(described).cluster
    found = plans(cluster)
    predicted, bytes_alone = predictions(found, cluster), predictions(found, by_bytes(cluster))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(worker, (port, cluster, args, queue), args.ranks)
    times = queue.get()
    measured = {name: statistics.median(found) for name, found in times.items()}
    shortest = {name: min(found) for name, found in times.items()}
    columns = {"by bytes": bytes_alone, "predicted": predicted, "measured": measured, "shortest": shortest}
    print(f"{'plan, ms':<24}" + "".join(f"{what:>12}" for what in columns))
    for name in sorted(predicted, key=predicted.__getitem__):
        print(f"{name:<24}" + "".join(f"{column[name]:>12.2f}" for column in columns.values()))
    correlations = {
        f"{what} and {took}, {which}": correlation(columns[what], columns[took], without)
        for took in ("measured", "shortest")
        for what, other in (("by bytes", "hierarchical"), ("predicted", BY_BYTES))
        for which, without in (("its own hierarchical plan", other), ("all plans", ""))
    }
    for pair, value in correlations.items():
        print(f"Spearman {value:.3f} of {pair}")
    if args.out:
        Path(args.out).write_text(json.dumps(columns | {"spearman": correlations, "rounds_ms": times}, indent=1) + "\n")


def correlation(predicted: dict[str, float], measured: dict[str, float], without: str = "") -> float:
    names = [name for name in predicted if name != without]
    return spearman([predicted[name] for name in names], [measured[name] for name in names])


if __name__ == "__main__":
    main()
