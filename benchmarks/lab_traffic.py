"""Embedding bytes of `het` in the paper's topology: 2 workers on one host, 1 server on another, an uncapped link.

    sudo python benchmarks/lab_traffic.py --data data/zipf12 --steps 3000 --out traffic.jsonl [--dims 16 32 128]

Everything a worker reads or writes crosses the link, and nothing else does but the trainer's small questions, so
that the kernel's counters of the server's host can be held against our own count. `classical` is what the paper's
protocol would send on the same course of reads and pushes, from the run's counters: every missed or invalid row in
full with its clock, an id and a clock for every hit, an id and a clock for every row pushed.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cells import cell_parser
from lab import HET_MODES, embedding_bytes, file_name, papers_model, run_lab_cell

MODES = {**HET_MODES, "s=100, clock": [*HET_MODES["s=100"], "consistency.validation=clock"]}
LAB = ("--preset", "paper", "--workers", "2", "--rate", "none")
NUMBER = 4  # bytes of an id, a clock or a float


def classical(row: dict[str, Any], dim: int, *, cached: bool) -> float:
    """Bytes of the paper's protocol for the same reads and pushes; without clocks where nothing is cached."""
    cache = row["cache"]
    pulled = cache["misses"] + cache["invalid"] + cache["own_invalid"]
    pushed = row["bytes"]["rows_push"] / (NUMBER * dim)
    per_row = NUMBER * (dim + (2 if cached else 1))
    return (pulled + pushed) * per_row + (2 * NUMBER * cache["hits"] if cached else 0)


def main() -> None:
    """Train what is missing, then print the table."""
    parser = cell_parser(__doc__, "runs/lab")
    parser.add_argument("--steps", type=int, help="end after so many; default: the epochs")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 32, 128])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    args = parser.parse_args()
    columns = "D | mode | MB | of our empty cache | classical MB | of a classical empty cache"
    print(f"| {columns} | rows pulled / pushed MB | kernel / ours | staleness seen |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dim in args.dims:
        empty: dict[str, float] = {}
        for mode in args.modes:
            row = _cell(args, dim, mode)
            ours, cached = embedding_bytes(row), mode != "empty cache"
            paper = classical(row, dim, cached=cached)
            empty = empty or {"ours": ours, "classical": paper}
            rows = f"{row['bytes']['rows_pull'] / 1e6:.1f} / {row['bytes']['rows_push'] / 1e6:.1f}"
            shares = f"{ours / empty['ours']:.2%} | {paper / 1e6:.1f} | {ours / empty['classical']:.2%}"
            seen = f"{_kernel(row):.3f} | {row['observed_staleness_max']} |"
            print(f"| {dim} | {mode} | {ours / 1e6:.1f} | {shares} | {rows} | {seen}", flush=True)


def _cell(args: argparse.Namespace, dim: int, mode: str) -> dict[str, Any]:
    overrides = [
        *papers_model(args.data, dim),
        "consistency.cache.capacity=0.1",
        *MODES[mode],
        "train.batch_size=128",
        f"train.epochs={args.epochs}",
        f"train.max_steps={'null' if args.steps is None else args.steps}",
        "train.eval_batch_size=4096",
        *args.overrides,
    ]
    name = f"{args.data.name}-e{args.epochs}-d{dim}-{file_name(mode)}"
    return run_lab_cell(name, LAB, overrides, args.out, args.runs)


def _kernel(row: dict[str, Any]) -> float:
    """Bytes both hosts sent in training steps, by the kernel, against ours; the final flush is in both."""
    return float(row["kernel_bytes"] or 0) / max(1, embedding_bytes(row) + row["bytes"]["audit"])


if __name__ == "__main__":
    main()
