"""Time of the index, the policies, the initial rows and the row memory for a step's rows, one thread.

    python benchmarks/index.py [--lookups 3328] [--leave 1000] [--repeats 100]

Medians of elapsed time in microseconds. Rows are drawn evenly, which is the worst case for the CPU's caches: what
grows with a table or a capacity in these figures is the cost of memory that is not in them.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from hetrain.store.index import make_index
from hetrain.store.initial import InitialRows
from hetrain.store.policy import make_policy
from hetrain.store.row_memory import Column, make_row_memory
from hetrain.store.space import Placement, RowSpace
from hetrain.tables import Table

ROWS = 26 * 100_000


def timed(calls: list[Callable[[], object]]) -> float:
    """Median microseconds; the first call compiles and does not count."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * median(times[1:])


def measure_index(args: argparse.Namespace, rng: np.random.Generator) -> None:
    for held in (10_000, 260_000, 1_000_000):
        rows = rng.permutation(ROWS)
        absent = rows[held:]
        for kind in ("array", "hash"):
            index = make_index(kind, ROWS, held + args.lookups)
            index.assign(rows[:held], np.arange(held))
            asked = [rng.choice(rows[: 10 * held // 7], args.lookups) for _ in range(args.repeats)]
            find = timed([lambda r=r, index=index: index.find(r) for r in asked])
            free = np.arange(held, held + args.lookups)
            insert, remove = [], []
            for _ in range(args.repeats):
                new = rng.choice(absent, args.leave)
                start = time.perf_counter()
                _, distinct = index.insert(new, free)
                middle = time.perf_counter()
                index.remove(distinct)
                insert.append(middle - start)
                remove.append(time.perf_counter() - middle)
            print(
                f"index {kind:6} {held:>10,} held: find {args.lookups} {find:6.1f}, insert {args.leave} "
                f"{1e6 * median(insert[1:]):6.1f}, remove {1e6 * median(remove[1:]):6.1f}"
            )


def measure_policies(args: argparse.Namespace, rng: np.random.Generator) -> None:
    """A full cache: a step uses the rows that came and old ones, which are spared meanwhile."""
    for name in ("lru", "lfu", "light_lfu"):
        for capacity in (10_000, 100_000, 1_000_000, 10_000_000):
            slots = capacity + args.lookups
            policy = make_policy(name, slots)
            for part in np.array_split(rng.permutation(capacity), 100):
                policy.used(part)
            new, spared = np.arange(capacity, capacity + args.leave), np.zeros(slots, np.bool_)
            use, leave = [], []
            for _ in range(args.repeats):
                old = np.setdiff1d(rng.integers(0, capacity, args.lookups), new)[: args.lookups - args.leave]
                step = rng.permutation(np.concatenate([old, new]))
                spared[step] = True
                start = time.perf_counter()
                policy.used(step)
                middle = time.perf_counter()
                new = policy.victims(args.leave, spared)
                leave.append(time.perf_counter() - middle)
                use.append(middle - start)
                spared[step] = False
            print(
                f"policy {name:9} {capacity:>10,} slots: use {args.lookups} {1e6 * median(use[1:]):6.1f}, "
                f"{args.leave} victims {1e6 * median(leave[1:]):6.1f}"
            )


def space_of(tables: int, rows: int, dim: int) -> RowSpace:
    return RowSpace([Table(f"t{i}", rows, dim, (f"f{i}",), 0.1) for i in range(tables)], dim)


def measure_initial(args: argparse.Namespace, rng: np.random.Generator) -> None:
    for tables in (1, 26, 1000):
        for dim in (16, 128):
            initial, out = InitialRows(space_of(tables, 100_000, dim), 1), torch.empty(args.lookups, dim)
            rows = torch.from_numpy(rng.integers(0, tables * 100_000, args.lookups))
            taken = timed([lambda initial=initial, out=out, rows=rows: initial.fill(out, rows)] * args.repeats)
            print(f"initial {tables:5} tables, dim {dim:3}: {taken:6.1f}, {1000 * taken / out.numel():.2f} ns a value")


def measure_memory(args: argparse.Namespace, rng: np.random.Generator) -> None:
    columns = {
        "value": Column((16,), torch.float32),
        "state": Column((1,), torch.float32),
        "clock": Column((), torch.int64),
        "touched": Column((), torch.bool),
        "holder": Column((8,), torch.int32, -1),
    }
    for kind, rows in (("array", ROWS), ("hash", ROWS), ("hash", 10**10)):
        space = space_of(1, rows, 16)
        plan = SimpleNamespace(pieces=[SimpleNamespace(table="t0", rank=0, first_row=0, rows=rows)])
        start = time.perf_counter()
        memory = make_row_memory(
            kind, Placement(space, plan, 1), 0, columns, InitialRows(space, 1), torch.device("cpu")
        )
        begun = time.perf_counter() - start
        steps = [torch.from_numpy(rng.integers(0, rows, args.lookups)) for _ in range(args.repeats)]
        place = timed([lambda r=r, memory=memory: memory.place(r) for r in steps])
        locate = timed([lambda r=r, memory=memory: memory.locate(r) for r in steps])
        print(
            f"memory {kind:6} {rows:>14,} rows: start {1000 * begun:.1f} ms, place {args.lookups} {place:6.1f}, "
            f"locate {locate:6.1f}, {memory.nbytes_used / 2**20:.0f} MiB for {memory.used:,}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookups", type=int, default=3328)
    parser.add_argument("--leave", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    for measure in (measure_index, measure_policies, measure_initial, measure_memory):
        measure(args, rng)


if __name__ == "__main__":
    main()
