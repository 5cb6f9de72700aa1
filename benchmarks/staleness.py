"""Test AUC against staleness and world size, paired by seed, on the generated data of quality.py.

    python benchmarks/staleness.py --data data/known_best --out staleness.jsonl

At least 10,000 updates of a hot row per worker are needed before s=10,000 differs from infinity: hence small batches
and more than one epoch. `--ranks 8` compares few and many workers at one global batch size.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from cells import cell_parser, run_cell
from paired import best_auc, paired
from quality import GENERATED


def arguments() -> argparse.Namespace:
    parser = cell_parser(__doc__, "runs/staleness")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--staleness", nargs="+", default=["0", "100", "10000", "inf"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--bsp", action="store_true", help="beside these, and what the differences are taken to")
    parser.add_argument("--tag", default="", help="told apart from cells with other overrides")
    return parser.parse_args()


def main() -> None:
    """Train what is missing, then print the table."""
    args = arguments()
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
        found = paired(*([rows[m, seed] for seed in args.seeds] for m in (mode, first)))
        versus = f"{found.difference:+.5f} ± {found.half:.5f}"
        print(f"| {mode} | {found.auc:.5f} | {versus} | {found.logloss:.5f} | {found.hit_rate} | {found.staleness} |")


if __name__ == "__main__":
    main()
