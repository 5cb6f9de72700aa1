"""Where the time of one `het` step goes, and how the whole compares with dense compute alone.

    python benchmarks/het_step.py [--batch 128 512 4096] [--ranks 1 2] [--optimizer rowwise_adagrad] [--capacity 0.1]

WDL over 26 one-hot features with Zipf ids and 13 dense columns, one thread per rank, batches held in memory, warm
cache. Times are 25th percentiles over steps of the CPU time of the training thread, in milliseconds; `wait` (for other
ranks) and `wall` (a whole step) are of wall time.
"""

import argparse
import logging
import os
import socket
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor  # noqa: E402

from hetrain.config import DenseOptimizerConfig, RowOptimizerConfig, ScheduleConfig  # noqa: E402
from hetrain.data.batch import Batch  # noqa: E402
from hetrain.engine.loss import loss_share  # noqa: E402
from hetrain.engine.recipe import Recipe  # noqa: E402
from hetrain.engine.store_engine import StoreEngine  # noqa: E402
from hetrain.engine.store_settings import StoreSettings  # noqa: E402
from hetrain.models import WDL  # noqa: E402
from hetrain.optim import Schedule, dense_optimizer, row_optimizer  # noqa: E402
from hetrain.planner.plan import Piece, Plan  # noqa: E402
from hetrain.tables import Table  # noqa: E402
from hetrain.telemetry import Traffic  # noqa: E402

FEATURES, DENSE = 26, 13
KEYS = [f"f{i}" for i in range(FEATURES)]


def make_batches(
    args: argparse.Namespace, batch: int, rank: int, world_size: int, count: int, seed: int
) -> list[Batch]:
    """`count` batches of this rank, as the reader makes them."""
    rng = np.random.default_rng([rank, seed])
    weight = np.cumsum(1 / np.arange(1, args.rows + 1) ** args.zipf)
    hot = np.random.default_rng(9).permutation(args.rows)
    result = []
    for _ in range(count):
        ids = hot[np.searchsorted(weight, rng.random(FEATURES * batch) * weight[-1])]
        sparse = KeyedJaggedTensor(
            KEYS,
            torch.from_numpy(ids),
            lengths=torch.ones(FEATURES * batch, dtype=torch.int32),
            offsets=torch.arange(FEATURES * batch + 1),
            stride=batch,
            length_per_key=[batch] * FEATURES,
            offset_per_key=[batch * i for i in range(FEATURES + 1)],
        )
        labels = torch.from_numpy((rng.random(batch) > 0.75).astype(np.float32))
        result.append(Batch(torch.rand(batch, DENSE), sparse, labels, batch * world_size))
    return result


def make_engine(args: argparse.Namespace, batch: int, world_size: int) -> StoreEngine:
    """WDL over the store, rows of every table cut evenly."""
    tables = [Table(f"t{i}", args.rows, args.dim, (f"f{i}",), 0.01) for i in range(FEATURES)]
    block = args.rows // world_size
    pieces = tuple(Piece(t.name, r, r * block, block, 0, args.dim) for t in tables for r in range(world_size))
    recipe = Recipe(
        lambda bags: WDL(bags, DENSE, KEYS, args.dim),
        tables,
        Plan("store", world_size, pieces, frozenset(), {}),
        row_optimizer(RowOptimizerConfig(args.optimizer, 0.02, 1e-8)),
        lambda params: dense_optimizer(params, DenseOptimizerConfig("adam", 0.001)),
        Schedule(ScheduleConfig()),
        torch.device("cpu"),
        1,
        Traffic(),
    )
    settings = StoreSettings(capacity=args.capacity, staleness=args.staleness, batch_size=batch, policy=args.policy)
    return StoreEngine(recipe, settings)


def quarter(seconds: list[float]) -> float:
    """The 25th percentile, in milliseconds: other processes make a step slower, never faster."""
    return 1000 * float(np.quantile(seconds, 0.25))


class Clock:
    """CPU seconds of the calling thread by part; a part measured inside another is taken out of the outer one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._current: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        self._inner.append(0.0)
        yield
        spent = time.thread_time() - start
        self._current[name] += spent - self._inner.pop()
        self._inner[-1] += spent

    def around(self, owner: Any, method: str, name: str) -> None:
        """Measure every call of `owner.method` as `name`."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def end_step(self) -> None:
        self.steps.append(dict(self._current))
        self._current.clear()

    def milliseconds(self) -> dict[str, float]:
        names = dict.fromkeys(n for step in self.steps for n in step)
        return {n: quarter([step.get(n, 0.0) for step in self.steps]) for n in names}


def instrument(engine: StoreEngine, clock: Clock) -> None:
    """Measure the parts of a step: cache, owner, wire, rows' kernel, dense; the rest is glue."""
    (group,) = engine._groups
    for method in ("begin", "admit", "commit", "stage_gradients"):
        clock.around(group.cache, method, f"cache {method}")
    clock.around(group.owner, "serve", "owner")
    clock.around(engine._transport, "exchange", "exchange, other")
    for codec in (engine._transport._requests, engine._transport._replies):
        clock.around(codec, "pack", "pack and unpack")
        clock.around(codec, "unpack", "pack and unpack")
    for leg in engine._transport._all_legs():
        for method in ("post", "send", "receive"):
            clock.around(leg, method, "send and receive")
    clock.around(group.table, "pool", "rows forward")
    clock.around(engine._model, "forward", "dense forward")
    clock.around(engine._dense_optimizer, "step", "dense optimizer")
    clock.around(group, "lookups", "row numbers")
    pool = group.table.pool

    def watched(slots: Tensor, offsets: Tensor) -> Tensor:
        pooled = pool(slots, offsets)
        stack: list[Any] = []

        def before(*_: Any) -> None:
            stack.append(clock.part("rows backward"))
            stack[-1].__enter__()

        def after(*_: Any) -> None:
            stack.pop().__exit__(None, None, None)

        node = pooled.grad_fn
        node.register_prehook(before)
        node.register_hook(after)
        return pooled

    group.table.pool = watched


class FixedBags(nn.Module):
    """Pooled rows that are there already: what is left of a step is dense compute alone."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._dim = dim
        self.values = torch.empty(0)

    def forward(self, _: KeyedJaggedTensor) -> KeyedTensor:
        return KeyedTensor(KEYS, [self._dim] * FEATURES, self.values)


def dense_alone(args: argparse.Namespace, batches: list[Batch]) -> tuple[float, float]:
    """CPU and wall milliseconds of forward, backward and update of the network on given pooled rows."""
    bags = FixedBags(args.dim)
    network = WDL(bags, DENSE, KEYS, args.dim)
    optimizer = dense_optimizer(network.parameters(), DenseOptimizerConfig("adam", 0.001))
    bags.values = torch.rand(batches[0].size, FEATURES * args.dim, requires_grad=True)
    cpu, wall = [], []
    for batch in batches:
        start, wall_start = time.thread_time(), time.perf_counter()
        bags.values.grad = None
        share, _ = loss_share(network(batch.dense, batch.sparse), batch.labels, None, batch.global_size)
        optimizer.zero_grad()
        share.backward()
        optimizer.step()
        cpu.append(time.thread_time() - start)
        wall.append(time.perf_counter() - wall_start)
    return quarter(cpu), quarter(wall)


def fill(args: argparse.Namespace, engine: StoreEngine, batch: int, rank: int, world_size: int) -> None:
    """Read through the cache, without the network, until it is full."""
    (group,) = engine._groups
    for seed in range(3, 1000):
        for b in make_batches(args, batch, rank, world_size, 20, seed):
            engine._bags.read(b.sparse)
            if not group.table.held_back:
                group.table._kernel.weights.grad = torch.zeros_like(group.table._kernel.weights)
            engine._bags.commit()
        full = torch.tensor(float(group.cache.counters.evictions > 0 or group.capacity_rows == 0))
        if world_size > 1:
            dist.all_reduce(full, dist.ReduceOp.MIN)
        if full:
            break
    for b in make_batches(args, batch, rank, world_size, 5, 0):
        engine.step(iter([b]))


def measure(args: argparse.Namespace, batch: int, rank: int, world_size: int) -> dict[str, float]:
    """Milliseconds by part of a step on this rank."""
    dense_cpu, dense_wall = dense_alone(args, make_batches(args, batch, rank, world_size, 20, 0) * 3)
    engine = make_engine(args, batch, world_size)
    fill(args, engine, batch, rank, world_size)
    whole, wall, wait = [], [], []
    for b in make_batches(args, batch, rank, world_size, args.steps, 1):
        start, wall_start = time.thread_time(), time.perf_counter()
        out = engine.step(iter([b]))
        assert out is not None
        whole.append(time.thread_time() - start)
        wall.append(time.perf_counter() - wall_start)
        wait.append(out.wait_comm_s)
    before = dict(engine._recipe.traffic.bytes), engine.report()["cache"]
    clock = Clock()
    instrument(engine, clock)
    for b in make_batches(args, batch, rank, world_size, args.steps, 2):
        with clock.part("glue and dense backward"):
            engine.step(iter([b]))
        clock.end_step()
    after = dict(engine._recipe.traffic.bytes), engine.report()["cache"]
    engine.finish()
    counted = {k: after[1][k] - before[1][k] for k in ("hits", "misses", "invalid", "own_invalid", "evictions")}
    return {
        "whole step, CPU": quarter(whole),
        "dense alone, CPU": dense_cpu,
        "wall": quarter(wall),
        "dense alone, wall": dense_wall,
        "wait": quarter(wait),
        **clock.milliseconds(),
        "hit rate": counted["hits"] / max(1, sum(v for k, v in counted.items() if k != "evictions")),
        "evictions": counted["evictions"] / args.steps,
        "kB sent": sum(after[0][c] - before[0][c] for c in before[0]) / args.steps / 1000,
    }


def worker(rank: int, world_size: int, port: int, args: argparse.Namespace, queue: Any) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    results = {batch: measure(args, batch, rank, world_size) for batch in args.batch}
    if rank == 0:
        queue.put(results)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def run(args: argparse.Namespace, world_size: int) -> dict[int, dict[str, float]]:
    """Rank 0's figures by batch size."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(worker, (world_size, port, args, queue), world_size)
    return queue.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 512, 4096])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=100_000, help="of each of the 26 tables")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--capacity", type=float, default=0.1)
    parser.add_argument("--staleness", type=float, default=100)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--optimizer", default="rowwise_adagrad")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    columns = {(w, b): r for w in args.ranks for b, r in run(args, w).items()}
    names = list(dict.fromkeys(n for r in columns.values() for n in r))
    print("| ms | " + " | ".join(f"{w} rank{'s' * (w > 1)}, batch {b}" for w, b in columns) + " |")
    print("|" + "---|" * (len(columns) + 1))
    for name in names:
        print(f"| {name} | " + " | ".join(f"{r.get(name, 0):.3g}" for r in columns.values()) + " |")
    ratio = [r["whole step, CPU"] / r["dense alone, CPU"] for r in columns.values()]
    print("| step / dense alone, CPU | " + " | ".join(f"{x:.2f}" for x in ratio) + " |")


if __name__ == "__main__":
    main()
