"""What travels: bytes, time and AUC of every mode with every option of `comms`.

    sudo python benchmarks/comms.py --data data/zipf12 --out comms.jsonl [--rate 1gbit] [--modes bsp "het s=100"]
    python benchmarks/comms.py --auc --data data/known_best --out comms_auc.jsonl [--seeds 1 2 3]
    python benchmarks/comms.py --auc --data ... --out ... --modes bsp --tag d64 model.embedding_dim=64 comms.dense=none

The first trains WDL as in HET's experiments (D=128, batch 128, SGD, one thread per rank) on hosts of their own: bytes
of training per channel, step and rank beside what the kernel counted; ms of warm steps on the capped link and on one
without a cap. What the free steps take more than those of `none` is what the codec costs; the link below which it pays
is the bits it saves over that time (`-`: no cost was seen). The second gives test AUC minus that of `none` in the same
mode, paired by seed, on the generated data of quality.py. Tables are cut whole or by rows, so that `bsp` sends all
pooled embeddings. A mode that cannot run an option on one of its paths is named and left out. codecs.py times encoding
and decoding alone.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cells import cell_parser, run_cell
from lab import file_name, papers_model, run_lab_cell
from paired import best_auc, paired
from quality import GENERATED
from traffic import CHANNELS

from hetrain.codec import OF_MODE, OPTIONS, RUNS, of_name

MODES = {
    "bsp": ["consistency=bsp", "planner.sharding_types=[table_wise,row_wise]"],
    "het s=100": ["consistency=het", "consistency.staleness=100"],
    "het empty cache": ["consistency=het", "consistency.cache.capacity=0"],
    "ssp s=4": ["consistency=ssp"],
    "asp": ["consistency=asp"],
}
BATCH, DIM = 128, 128


def main() -> None:
    """Measure what is missing, then print a table."""
    args = _arguments()
    if args.auc:
        _auc(args)
    else:
        _lab(args)


def _arguments() -> argparse.Namespace:
    parser = cell_parser(__doc__, "runs/comms")
    parser.add_argument("--auc", action="store_true", help="quality on this machine's processes, no emulated hosts")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of every host's link")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tag", default="", help="told apart from cells with other overrides")
    return parser.parse_args()


def _options(args: argparse.Namespace, mode: str) -> list[str]:
    """What runs in `mode` on every path it has, `none` first; says what does not."""
    name = MODES[mode][0].removeprefix("consistency=")
    finer = dict(o.removeprefix("comms.").split("=", 1) for o in args.overrides if o.startswith("comms."))
    found = ["none"]
    for option in args.options:
        means = {path: finer.get(path, of_name(option, path)) for path in OF_MODE[name]}
        missing = [path for path, meant in means.items() if meant not in ("none", *RUNS[name, path])]
        if missing:
            print(f"{mode}: comms={option} is refused for {', '.join(missing)}", flush=True)
        elif option != "none":
            found.append(option)
    return found


def _read(overrides: list[str], option: str) -> list[str]:
    """Overrides that a run with `option` reads: keys of dct are refused where nothing travels so."""
    if option == "dct" or any(o.startswith("comms.") and o.endswith("=dct") for o in overrides):
        return overrides
    return [o for o in overrides if not o.startswith("comms.dct.")]


# -- bytes and time on emulated hosts ----------------------------------------------------------------


def _lab(args: argparse.Namespace) -> None:
    rows: list[list[str]] = []
    for mode in args.modes:
        cells = {
            option: [_lab_cell(args, mode, option, rate) for rate in (args.rate, "none")]
            for option in _options(args, mode)
        }
        rows += [_lab_line(mode, option, cells[option], cells["none"]) for option in cells]
    used = [c for c in CHANNELS if any(row[2 + CHANNELS.index(c)] != "0.0" for row in rows)]
    keep = [0, 1, *(2 + CHANNELS.index(c) for c in used), *range(2 + len(CHANNELS), len(rows[0]))]
    figures = ["total kB", "of none", "kernel / ours", "clipped", "ms a step", "ms free", "pays below Mbit/s"]
    print_table(["mode", "comms", *(f"{c} kB" for c in used), *figures], [[row[i] for i in keep] for row in rows])


def _lab_cell(args: argparse.Namespace, mode: str, option: str, rate: str) -> dict[str, Any]:
    overrides = [
        *papers_model(args.data, DIM),
        *MODES[mode],
        f"comms={option}",
        f"train.batch_size={BATCH}",
        f"train.max_steps={args.steps}",
        "launch.threads=1",
        *_read(args.overrides, option),
    ]
    name = f"{args.tag}{args.hosts}-{rate}-{file_name(mode)}-{option}"
    return run_lab_cell(name, ["--hosts", str(args.hosts), "--rate", rate], overrides, args.out, args.runs)


def _lab_line(mode: str, option: str, cell: list[dict[str, Any]], base: list[dict[str, Any]]) -> list[str]:
    (capped, free), (capped_base, free_base) = cell, base
    total, total_base = _total(capped), _total(capped_base)
    ms, ms_free = _step_ms(capped), _step_ms(free)
    extra, saved = ms_free - _step_ms(free_base), _total(free_base) - _total(free)
    pays = "" if option == "none" else "-" if extra <= 0 else f"{8 * saved / (extra * 1e3):,.0f}"
    kernel = capped["kernel_bytes"] / max(1, capped["bytes"]["total"])
    channels = [f"{_per_step(capped, capped['bytes'].get(channel, 0)) / 1e3:.1f}" for channel in CHANNELS]
    figures = [
        f"{total / 1e3:.1f}",
        f"{total / total_base:.1%}",
        f"{kernel:.3f}",
        f"{capped.get('clipped_values', 0):,}",
    ]
    return [mode, option, *channels, *figures, f"{ms:.2f}", f"{ms_free:.2f}", pays]


def _total(row: dict[str, Any]) -> float:
    return _per_step(row, row["bytes"]["total"])


def _per_step(row: dict[str, Any], nbytes: float) -> float:
    return nbytes / row["steps"] / row["world_size"]


def _step_ms(row: dict[str, Any]) -> float:
    return 1e3 * BATCH * row["world_size"] / row["examples_per_s_steady"]


# -- quality -----------------------------------------------------------------------------------------


def _auc(args: argparse.Namespace) -> None:
    common = [*GENERATED, f"data.path={args.data}", "model=wdl", "launch.nproc=2", "checkpoint.keep=1"]
    rows = []
    for mode in args.modes:
        cells = {
            option: [
                run_cell(
                    f"{args.tag}{file_name(mode)}-{option}-{seed}",
                    [*common, *MODES[mode], f"comms={option}", f"seed={seed}", *_read(args.overrides, option)],
                    args.out,
                    args.runs,
                )
                for seed in args.seeds
            ]
            for option in _options(args, mode)
        }
        for option, runs in cells.items():
            found = paired(runs, cells["none"])
            versus = "" if option == "none" else f"{found.difference:+.5f} ± {found.half:.5f}"
            sent = sum(_total(run) for run in runs) / sum(_total(run) for run in cells["none"])
            clipped = sum(run.get("clipped_values", 0) for run in runs)
            rows.append(
                [mode, option, f"{found.auc:.5f}", versus, f"{found.logloss:.5f}", f"{sent:.1%}", f"{clipped:,}"]
            )
    print(f"\nbest reachable: {best_auc(args.data)}; seeds {args.seeds}\n")
    print_table(["mode", "comms", "AUC", "minus none (95%)", "logloss", "bytes of none", "clipped"], rows)


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """As Markdown."""
    for line in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
