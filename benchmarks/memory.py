"""Memory of workers and owners against what a run predicts, for tables of 10^7 to 10^10 rows.

    python benchmarks/memory.py --out memory.jsonl [--dim 16] [--steps 300]

Two workers and one server, hashed index, a cache of 64 MiB. Zipf ids over one table of the given size and 20 of
Criteo's small ones. `base` is what a process takes before any row: Python, torch, the network.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cells import run_cell

SMALL = [
    1460,
    583,
    305,
    24,
    12517,
    633,
    3,
    93145,
    5683,
    3194,
    27,
    14992,
    10,
    5652,
    2173,
    4,
    18,
    15,
    286181,
    105,
    142572,
]
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/memory"))
    parser.add_argument("--data", type=Path, default=Path("data/memory"))
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**7, 10**8, 10**9, 10**10])
    args = parser.parse_args()
    print("| rows | predicted cache | worker's peak RSS | predicted per row seen | owner's rows | server's peak RSS |")
    print("|---|---|---|---|---|---|")
    for rows in args.rows:
        print(_line(rows, _cell(args, rows)), flush=True)


def _cell(args: argparse.Namespace, rows: int) -> dict[str, Any]:
    data = args.data / str(rows)
    if not data.exists():
        tables = ",".join(map(str, [rows, *SMALL]))
        made = ["--cardinalities", tables, "--rows", "200000", "--test-rows", "1000", "--exponent", "1.05"]
        script = str(Path(__file__).parent / "zipf_data.py")
        subprocess.run([sys.executable, script, *made, "--out", str(data)], check=True)
    overrides = [
        "data=criteo",
        f"data.path={data}",
        "model=wdl",
        f"model.embedding_dim={args.dim}",
        "consistency=het",
        "consistency.cache.capacity=64MiB",
        "store.index=hash",
        "cluster.servers=1",
        "launch.nproc=2",
        "train.batch_size=128",
        f"train.max_steps={args.steps}",
    ]
    return run_cell(f"rows{rows}-d{args.dim}", overrides, args.out, args.runs)


def _line(rows: int, row: dict[str, Any]) -> str:
    memory = row["memory"]
    predicted = memory["predicted"]
    cache, seen = predicted["cache_max"] + predicted["index_max"], predicted["row_seen"][0]
    worker, server, owned = memory["worker_rss_max"], memory["server_rss_max"], memory["owner_rows_max"]
    figures = [f"{n / MIB:,.0f} MiB" for n in (cache, worker)]
    return f"| {rows:,} | {' | '.join(figures)} | {seen} B | {owned / MIB:,.0f} MiB | {server / MIB:,.0f} MiB |"


if __name__ == "__main__":
    main()
