"""Time of the cache's part of a step (begin, admit, commit) and of the owner's, one process, no wire.

    python benchmarks/store_step.py [--dim 16] [--steps 60] [--optimizer sgd]

26 features over tables of 100,000 rows, ids Zipf-distributed; a step's row update is left out, so that the figures
are those of index, clocks, copies and eviction alone. Times are medians of CPU time in milliseconds.
"""

import argparse
import time
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from hetrain.optim import RowOptimizer
from hetrain.store.cache import Cache
from hetrain.store.owner import Owner
from hetrain.store.route import split
from hetrain.store.space import Placement, RowSpace
from hetrain.tables import Table

FEATURES = 26


def lookups_of(rows: int, batch: int, steps: int, exponent: float) -> list[torch.Tensor]:
    """One tensor of batch * FEATURES global rows per step."""
    rng = np.random.default_rng(0)
    weight = np.cumsum(1 / np.arange(1, rows + 1) ** exponent)
    permuted = rng.permutation(rows)  # hot ids are spread over the table
    offsets = np.arange(FEATURES)[:, None] * rows
    batches = []
    for _ in range(steps):
        drawn = np.searchsorted(weight, rng.random((FEATURES, batch)) * weight[-1])
        batches.append(torch.from_numpy((permuted[drawn] + offsets).ravel()))
    return batches


def measure(arguments: argparse.Namespace, batch: int, capacity: int, policy: str) -> str:
    """One line of the table."""
    tables = [Table(f"t{i}", arguments.rows, arguments.dim, (f"f{i}",), 0.1) for i in range(FEATURES)]
    space = RowSpace(tables, arguments.dim)
    plan = SimpleNamespace(pieces=[SimpleNamespace(table=t.name, rank=0, first_row=0, rows=t.rows) for t in tables])
    placement = Placement(space, plan, 1)
    optimizer = RowOptimizer(arguments.optimizer, 0.1, 1e-8)
    width = optimizer.state_width(arguments.dim)
    started = time.thread_time()
    owner = Owner(
        space,
        placement,
        0,
        optimizer,
        seed=1,
        device=torch.device("cpu"),
        held_back=True,
        staleness=arguments.staleness,
    )
    fill = space.rows / (time.thread_time() - started)
    slots = capacity + batch * FEATURES
    value, state = torch.zeros(slots, arguments.dim), torch.zeros(slots, width)
    cache = Cache(space, capacity, batch * FEATURES, value, state, policy, arguments.staleness, optimizer)
    steps = lookups_of(arguments.rows, batch, arguments.steps, arguments.zipf)
    times: dict[str, list[float]] = {name: [] for name in ("begin", "serve", "admit", "commit")}
    for rows in steps:
        marks = [time.thread_time()]
        plan_ = cache.begin(rows)
        routed = split(plan_.request, placement)
        marks.append(time.thread_time())
        replies = owner.serve(routed.requests)
        marks.append(time.thread_time())
        cache.admit(plan_, routed.merge(replies))
        marks.append(time.thread_time())
        cache.commit(plan_)
        marks.append(time.thread_time())
        for name, first, end in zip(times, marks[:-1], marks[1:], strict=True):
            times[name].append((end - first) * 1e3)
    late = {name: median(part[len(part) // 2 :]) for name, part in times.items()}
    own = late["begin"] + late["admit"] + late["commit"]
    count = cache.counters
    reads = count.hits + count.misses + count.invalid + count.own_invalid
    unique = reads / len(steps) / (batch * FEATURES)
    parts = " ".join(f"{name} {ms:6.3f}" for name, ms in late.items())
    return (
        f"batch {batch:5} capacity {capacity:8} {policy}: {parts} | cache {own:6.3f} ms, unique {unique:.2f}, "
        f"hit rate {count.hits / reads:.2f}, "
        f"evictions/step {count.evictions / len(steps):7.0f}, owner filled at {fill / 1e6:.1f} M rows/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rows", type=int, default=100_000, help="per table")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--staleness", type=float, default=100)
    parser.add_argument("--optimizer", default="rowwise_adagrad")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # CPU time is this thread's
    print(vars(arguments))
    for batch in (128, 4096):
        for capacity in (10_000, 100_000, 1_000_000):
            for policy in ("lru", "lfu"):
                print(measure(arguments, batch, capacity, policy), flush=True)


if __name__ == "__main__":
    main()
