"""Test AUC against staleness and world size, paired by seed, on the generated data of quality.py.

    python benchmarks/staleness.py --data data/known_best --out staleness.jsonl

At least 10,000 updates of a hot row per worker are needed before s=10,000 differs from infinity: hence small batches
and more than one epoch. `--ranks 8` compares few and many workers at one global batch size.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from cells import run_cell
from quality import GENERATED, best_auc, interval


def main() -> None:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--staleness", nargs="+", default=["0", "100", "10000", "inf"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--bsp", action="store_true", help="beside these, and what the differences are taken to")
    parser.add_argument("--tag", default="", help="told apart from cells with other overrides")
    parser.add_argument("overrides", nargs="*", help="added to every cell")
    args = parser.parse_args()
    modes = {f"s={s}": ["consistency=het", f"consistency.staleness={s}"] for s in args.staleness}
    if args.bsp:
        modes = {"bsp": ["consistency=bsp"], **modes}
    common = [
        *GENERATED,
        f"data.path={args.data}",
        "model=wdl",
        f"launch.nproc={args.ranks}",
        "launch.threads=1",
        f"train.batch_size={args.global_batch // args.ranks}",
        f"train.epochs={args.epochs}",
        f"train.eval_every={1 << 40}",
        "checkpoint.keep=1",
        *args.overrides,
    ]
    rows = {
        (mode, seed): run_cell(
            f"{args.tag}r{args.ranks}-{mode}-{seed}", [*common, *choice, f"seed={seed}"], args.out, args.runs
        )
        for seed in args.seeds
        for mode, choice in modes.items()
    }
    first = next(iter(modes))
    print(f"best reachable: {best_auc(args.data)}; {args.ranks} ranks, {rows[first, args.seeds[0]]['steps']:,} steps")
    print(f"| mode | AUC | minus {first} (95%) | logloss | hit rate | staleness seen |\n|---|---|---|---|---|---|")
    for mode in modes:
        cell = [rows[mode, seed] for seed in args.seeds]
        auc, loss = (statistics.fmean(r[key] for r in cell) for key in ("auc", "logloss"))
        mean, half = interval([r["auc"] - rows[first, seed]["auc"] for r, seed in zip(cell, args.seeds, strict=True)])
        hit = "" if mode == "bsp" else f"{cell[0]['cache']['hit_rate']:.3f}"
        seen = "" if mode == "bsp" else max(r["observed_staleness_max"] for r in cell)
        print(f"| {mode} | {auc:.5f} | {mean:+.5f} ± {half:.5f} | {loss:.5f} | {hit} | {seen} |")


if __name__ == "__main__":
    main()
