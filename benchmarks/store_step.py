"""Time of the cache's part of a step (begin, admit, commit) and of the owner's at given hit rates, the cache full.

    python benchmarks/store_step.py [--dim 128] [--steps 200] [--optimizer sgd] [--index array hash]

One process, no wire, no network: figures are those of index, clocks, copies and eviction alone. A batch of 3,328
distinct rows (26 features of 128 examples) takes the given share of its rows from a hot quarter of the cache and the
rest from rows nobody has seen. Times are medians of CPU time in milliseconds, over the second half of the steps.
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

LOOKUPS = 26 * 128
PARTS = ("begin", "serve", "admit", "commit")


class Stream:
    """Batches of which a share `hit` lies among rows read often."""

    def __init__(self, rows: int, capacity: int, hit: float) -> None:
        self._rng = np.random.default_rng(0)
        self._unseen = self._rng.permutation(rows)
        self._hot = self._unseen[: capacity // 4]
        self._at = len(self._hot)
        self._hits = round(hit * LOOKUPS)

    def fill(self, capacity: int) -> list[torch.Tensor]:
        """Batches that read `capacity` rows for the first time, the hot ones last."""
        cold = self._new(capacity - len(self._hot))
        rows = np.concatenate([cold, self._hot])
        return [torch.from_numpy(rows[first : first + LOOKUPS]) for first in range(0, capacity, LOOKUPS)]

    def batch(self) -> torch.Tensor:
        hot = self._rng.choice(self._hot, self._hits, replace=False)
        return torch.from_numpy(np.concatenate([hot, self._new(LOOKUPS - self._hits)]))

    def _new(self, count: int) -> np.ndarray:
        rows = self._unseen[self._at : self._at + count]
        self._at += count
        return rows


class Store:
    """One owner and one full cache, and the time each part of every step took."""

    def __init__(self, args: argparse.Namespace, capacity: int, policy: str, index: str) -> None:
        table = Table("t", args.rows, args.dim, ("f",), 0.1)
        space = RowSpace([table], args.dim)
        plan = SimpleNamespace(pieces=[SimpleNamespace(table="t", rank=0, first_row=0, rows=table.rows)])
        self._placement = Placement(space, plan, 1)
        optimizer = RowOptimizer(args.optimizer, 0.1, 1e-8)
        common = {"seed": 1, "directory": True, "index": index}
        held_back = {"device": torch.device("cpu"), "held_back": True, "staleness": args.staleness}
        self._owner = Owner(space, self._placement, 0, optimizer, **held_back, **common)
        slots = capacity + LOOKUPS
        memory = torch.zeros(slots, args.dim), torch.zeros(slots, optimizer.state_width(args.dim))
        self._cache = Cache(space, capacity, LOOKUPS, *memory, policy, args.staleness, optimizer, **common)
        self.times: dict[str, list[float]] = {name: [] for name in PARTS}

    @property
    def counted(self) -> dict[str, int]:
        """The cache's counters so far."""
        return vars(self._cache.counters).copy()

    def step(self, rows: torch.Tensor) -> None:
        marks = [time.thread_time()]
        read = self._cache.begin(rows)
        routed = split(read.request, self._placement)
        marks.append(time.thread_time())
        replies = self._owner.serve(routed.requests)
        marks.append(time.thread_time())
        self._cache.admit(read, routed.merge(replies))
        marks.append(time.thread_time())
        self._cache.commit(read)
        marks.append(time.thread_time())
        for name, first, end in zip(PARTS, marks[:-1], marks[1:], strict=True):
            self.times[name].append((end - first) * 1e3)


def measure(args: argparse.Namespace, capacity: int, policy: str, index: str, hit: float) -> str:
    """One line of the table."""
    store, stream = Store(args, capacity, policy, index), Stream(args.rows, capacity, hit)
    for rows in stream.fill(capacity):
        store.step(rows)
    before = store.counted
    for _ in range(args.steps):
        store.step(stream.batch())
    late = {name: median(part[-args.steps // 2 :]) for name, part in store.times.items()}
    counted = {name: count - before[name] for name, count in store.counted.items()}
    share = counted["hits"] / (args.steps * LOOKUPS)
    own = late["begin"] + late["admit"] + late["commit"]
    parts = " | ".join(f"{ms:.3f}" for ms in late.values())
    evicted = counted["evictions"] / args.steps
    return f"| {index} | {policy} | {capacity:,} | {share:.1%} | {evicted:,.0f} | {parts} | {own:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--capacity", type=int, nargs="+", default=[20_000, 200_000, 1_000_000])
    parser.add_argument("--policy", nargs="+", default=["lru", "lfu", "light_lfu"])
    parser.add_argument("--index", nargs="+", default=["array"])
    parser.add_argument("--hits", type=float, nargs="+", default=[0.5, 0.9, 0.99])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--staleness", type=float, default=100)
    parser.add_argument("--optimizer", default="sgd")
    args = parser.parse_args()
    torch.set_num_threads(1)  # CPU time is this thread's
    print("| index | policy | capacity | hit rate | evictions | begin | owner | admit | commit | cache in all, ms |")
    print("|" + "---|" * 10)
    for index in args.index:
        for policy in args.policy:
            for capacity in args.capacity:
                for hit in args.hits:
                    print(measure(args, capacity, policy, index, hit), flush=True)


if __name__ == "__main__":
    main()
