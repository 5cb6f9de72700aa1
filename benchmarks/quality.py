"""AUC and logloss of every model in every mode, paired by seed, against the best AUC the data allows.

    python benchmarks/quality.py --data data/known_best --out quality.jsonl

makes the generated data set on first use (1M rows to train, 500,000 to test), trains every cell on two
ranks and prints the tables of docs/benchmarks.md. With `--data` pointing at any prepared data set and
`--generate no` the same grid runs on that.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cells import cell_parser, run_cell
from paired import best_auc, paired

MODELS = ("wdl", "dcn", "deepfm", "dlrm")
MODES = {"bsp": ["consistency=bsp"]} | {
    f"het{s}": ["consistency=het", f"consistency.staleness={s}"] for s in (0, 10, 100)
}
OWN_PACE = {f"ssp{s}": ["consistency=ssp", f"consistency.staleness={s}"] for s in (4, 16)} | {
    "asp": ["consistency=asp"]
}
GENERATED = [
    "data=sample",
    "data.sample.rows=1600000",
    "data.sample.zipf=1.2",
    "data.split.train=1000000",
    "data.split.validation=100000",
    "data.split.test=500000",
]


def table(rows: dict[tuple[str, str, int], dict[str, Any]], args: argparse.Namespace, best: float | None) -> str:
    """One Markdown line per cell: mean over seeds, distance to the best AUC, paired difference to bsp."""
    lines = [
        "| model | mode | AUC | logloss | best - AUC | AUC - the first's (95%) | hit rate | staleness seen |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in args.models:
        for mode in args.modes:
            cell = [rows[model, mode, seed] for seed in args.seeds]
            found = paired(cell, [rows[model, args.modes[0], seed] for seed in args.seeds])
            gap = "" if best is None else f"{best - found.auc:.4f}"
            half = "" if math.isnan(found.half) else f" ± {found.half:.5f}"
            versus = "" if mode == args.modes[0] else f"{found.difference:+.5f}{half}"
            figures = f"{found.auc:.5f} | {found.logloss:.5f} | {gap} | {versus}"
            lines.append(f"| {model} | {mode} | {figures} | {found.hit_rate} | {found.staleness} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, then print the table."""
    parser = cell_parser(__doc__, "runs/quality")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument(
        "--modes", nargs="+", default=list(MODES), choices=[*MODES, *OWN_PACE], help="the first: the base"
    )
    parser.add_argument("--generate", choices=["yes", "no"], default="yes")
    args = parser.parse_args()
    source = GENERATED if args.generate == "yes" else ["data=criteo"]
    common = [*source, f"data.path={args.data}", "launch.nproc=2", "checkpoint.keep=1", *args.overrides]
    rows = {}
    for seed in args.seeds:
        for model in args.models:
            for mode in args.modes:
                overrides = [*common, f"model={model}", *(MODES | OWN_PACE)[mode], f"seed={seed}"]
                rows[model, mode, seed] = run_cell(f"{model}-{mode}-{seed}", overrides, args.out, args.runs)
    best = best_auc(args.data)
    if best is not None:
        print(f"\nbest reachable test AUC: {best:.5f}\n")
    print(table(rows, args, best))


if __name__ == "__main__":
    main()
