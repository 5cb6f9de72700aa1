"""AUC and logloss of every model in every mode, paired by seed, against the best AUC the data allows.

    python benchmarks/quality.py --data data/known_best --out quality.jsonl

makes the generated data set on first use (1M rows to train, 500,000 to test), trains every cell on two
ranks and prints the tables of docs/benchmarks.md. With `--data` pointing at any prepared data set and
`--generate no` the same grid runs on that.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cells import run_cell

MODELS = ("wdl", "dcn", "deepfm", "dlrm")
MODES = {"bsp": ["consistency=bsp"]} | {
    f"het{s}": ["consistency=het", f"consistency.staleness={s}"] for s in (0, 10, 100)
}
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # two-sided Student t by degrees of freedom
GENERATED = [
    "data=sample",
    "data.sample.rows=1600000",
    "data.sample.zipf=1.2",
    "data.split.train=1000000",
    "data.split.validation=100000",
    "data.split.test=500000",
]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95% interval."""
    n = len(values)
    half = T_95[n - 1] * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return statistics.fmean(values), half


def best_auc(data: Path) -> float | None:
    """AUC of the labels' true probabilities on the test split, where the data set knows it."""
    best = json.loads((data / "schema.json").read_text()).get("best_auc")
    return None if not best else float(best["test"])


def table(rows: dict[tuple[str, str, int], dict[str, Any]], seeds: list[int], best: float | None) -> str:
    """One Markdown line per cell: mean over seeds, distance to the best AUC, paired difference to bsp."""
    lines = [
        "| model | mode | AUC | logloss | best - AUC | AUC - bsp's (95% interval) | hit rate | staleness seen |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for mode in MODES:
            cell = [rows[model, mode, seed] for seed in seeds]
            auc = statistics.fmean(r["auc"] for r in cell)
            loss = statistics.fmean(r["logloss"] for r in cell)
            gap = "" if best is None else f"{best - auc:.4f}"
            paired = [r["auc"] - rows[model, "bsp", seed]["auc"] for r, seed in zip(cell, seeds, strict=True)]
            mean, half = interval(paired)
            versus = "" if mode == "bsp" else f"{mean:+.5f}" + ("" if math.isnan(half) else f" ± {half:.5f}")
            hits = "" if mode == "bsp" else f"{cell[0]['cache']['hit_rate']:.3f}"
            seen = "" if mode == "bsp" else f"{max(r['observed_staleness_max'] for r in cell):g}"
            lines.append(f"| {model} | {mode} | {auc:.5f} | {loss:.5f} | {gap} | {versus} | {hits} | {seen} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/quality"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--generate", choices=["yes", "no"], default="yes")
    parser.add_argument("overrides", nargs="*", help="added to every cell")
    args = parser.parse_args()
    source = GENERATED if args.generate == "yes" else ["data=criteo"]
    common = [*source, f"data.path={args.data}", "launch.nproc=2", "checkpoint.keep=1", *args.overrides]
    rows = {}
    for seed in args.seeds:
        for model in MODELS:
            for mode, choice in MODES.items():
                overrides = [*common, f"model={model}", *choice, f"seed={seed}"]
                rows[model, mode, seed] = run_cell(f"{model}-{mode}-{seed}", overrides, args.out, args.runs)
    best = best_auc(args.data)
    if best is not None:
        print(f"\nbest reachable test AUC: {best:.5f}\n")
    print(table(rows, args.seeds, best))


if __name__ == "__main__":
    main()
