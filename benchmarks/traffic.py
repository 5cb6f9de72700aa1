"""Bytes per channel and step of `bsp` and `het` on a prepared data set, for several embedding widths.

python benchmarks/traffic.py --data data/criteo60k --out traffic.jsonl
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cells import cell_parser, run_cell
from quality import MODES

CHANNELS = ("ids", "rows_pull", "rows_push", "clocks", "pooled_fwd", "pooled_bwd", "dense", "audit")
EMBEDDING = CHANNELS[:6]


def table(rows: list[dict[str, Any]]) -> str:
    """Kilobytes per step and rank on every channel, and the embedding total against the empty cache."""
    lines = [
        "| D | mode | " + " | ".join(CHANNELS) + " | embedding total | of the empty cache |",
        "|" + "---|" * (len(CHANNELS) + 4),
    ]
    for row in rows:
        per = row["steps"] * row["world_size"] * 1000
        kilobytes = [row["bytes"].get(c, 0) / per for c in CHANNELS]
        total = sum(row["bytes"].get(c, 0) for c in EMBEDDING)
        empty = next(r for r in rows if r["dim"] == row["dim"] and r["mode_name"] == "empty cache")
        share = total / sum(empty["bytes"].get(c, 0) for c in EMBEDDING)
        cells = " | ".join(f"{k:.1f}" for k in kilobytes)
        lines.append(f"| {row['dim']} | {row['mode_name']} | {cells} | {total / per:.1f} | {share:.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, then print the table."""
    parser = cell_parser(__doc__, "runs/traffic")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 128])
    args = parser.parse_args()
    modes = {**MODES, "empty cache": ["consistency=het", "consistency.cache.capacity=0"]}
    rows = []
    for dim in args.dims:
        for mode, choice in modes.items():
            overrides = [
                "data=criteo",
                f"data.path={args.data}",
                "model=wdl",
                f"model.embedding_dim={dim}",
                *choice,
                "launch.nproc=2",
                "train.batch_size=128",
                *args.overrides,
            ]
            row = run_cell(f"d{dim}-{mode.replace(' ', '-')}", overrides, args.out, args.runs)
            rows.append({**row, "dim": dim, "mode_name": mode})
    print(table(rows))


if __name__ == "__main__":
    main()
