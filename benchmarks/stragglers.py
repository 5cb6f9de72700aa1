"""Examples per second of every mode with a rank that is slow for good, and with slow steps of all, beside theory.

    python benchmarks/stragglers.py --data data/sample --out stragglers.jsonl [--ranks 4] [--steps 400]

Every rank's steps are stretched (`--stretch`, by sleeping), so that cores are not what ranks wait for. Cases: `even`;
`one slow`: the last rank takes three times as long; `random`: a tenth of every rank's steps takes five times as long.
The first fifth is left out, in which kernels are compiled.
asp and ssp are counted until the first rank has trained its share: every worker has its own rows, which nobody
takes over. Theory: the times of all steps from the same factors that the run slept by, a step of a lockstep mode
waiting for all, one of ssp for the slowest to be at most s steps behind, exchanges free; relative to `even`.
"""

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cells import cell_parser, run_cell

from hetrain.config import LaunchConfig, SlowRandomConfig
from hetrain.training.slow_down import SlowDown

MODES = {
    "bsp": ["consistency=bsp"],
    "het s=100": ["consistency=het"],
    "ssp s=4": ["consistency=ssp", "consistency.staleness=4"],
    "ssp s=16": ["consistency=ssp", "consistency.staleness=16"],
    "asp": ["consistency=asp"],
}
SLOW, SHARE, FACTOR = 3.0, 0.1, 5.0
CASES = ("even", "one slow", "random")
SEED, BATCH = 1, 128


def launch(case: str, ranks: int, stretch: float) -> LaunchConfig:
    """The factors of a case."""
    slow = dict.fromkeys(range(ranks), stretch)
    if case == "one slow":
        slow[ranks - 1] = SLOW * stretch
    random = SlowRandomConfig(SHARE, FACTOR) if case == "random" else SlowRandomConfig()
    return LaunchConfig(slow_ranks=slow, slow_random=random)


def factors(case: str, ranks: int, steps: int) -> np.ndarray:
    """[steps, ranks]: how many times as long as in `even` each step takes."""
    settings = launch(case, ranks, 1.0)
    each = [SlowDown(settings, SEED, SimpleNamespace(rank=rank, computes=True)) for rank in range(ranks)]
    return np.array([[slow.factor(step) for slow in each] for step in range(steps)])


def pace(took: np.ndarray, lead: float) -> float:
    """Steps of a rank per unit of time until the first rank is through, with the fastest at most `lead` ahead."""
    steps, ranks = took.shape
    ends = np.zeros((steps + 1, ranks))  # [t]: when each rank has taken t steps
    for t in range(steps):
        gate = ends[t - int(lead)].max() if lead <= t else 0.0
        ends[t + 1] = np.maximum(ends[t], gate) + took[t]
    first = ends[-1].min()
    return float((ends[1:] <= first).sum()) / ranks / first


def overrides(args: argparse.Namespace, mode: str, case: str) -> list[str]:
    settings = launch(case, args.ranks, args.stretch)
    slow = ", ".join(f"{rank}: {factor}" for rank, factor in settings.slow_ranks.items())
    return [
        *MODES[mode],
        f"data.path={args.data}",
        f"launch.nproc={args.ranks}",
        "launch.threads=1",
        f"launch.slow_ranks={{{slow}}}",
        f"launch.slow_random.share={settings.slow_random.share}",
        f"launch.slow_random.factor={settings.slow_random.factor}",
        f"train.batch_size={BATCH}",
        f"data.sample.rows={args.ranks * args.steps * BATCH * 5 // 4}",  # four fifths of them to train
        f"seed={SEED}",
        "telemetry.tensorboard=false",
        "telemetry.log_every=4",
        *args.overrides,
    ]


def measured(row: dict[str, Any], metrics: Path) -> float:
    """Examples per second of warm steps, until the first rank ended, from the lines that rank 0 logged."""
    last = (row.get("first_end") or row)["examples"]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train" and line["examples"] <= last]
    lines = lines[len(lines) // 5 :]
    took = [(b["examples"] - a["examples"]) / b["examples_per_s"] for a, b in pairwise(lines)]
    return (lines[-1]["examples"] - lines[0]["examples"]) / sum(took)


def main() -> None:
    """Train what is missing, then print the table."""
    parser = cell_parser(__doc__, "runs/stragglers")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stretch", type=float, default=4.0)
    args = parser.parse_args()
    print("| mode | case | examples/s | of even | theory | staleness seen |\n|---|---|---|---|---|---|")
    for mode in MODES:
        lead = float(mode.partition("s=")[2]) if mode.startswith("ssp") else np.inf if mode == "asp" else 0
        even = 0.0
        for case in CASES:
            name = f"{mode}-{case}".replace(" ", "-").replace("=", "")
            row = run_cell(name, overrides(args, mode, case), args.out, args.runs)
            got = measured(row, args.runs / name / "metrics.jsonl")
            even = even or got
            theory = pace(factors(case, args.ranks, args.steps), lead)
            seen = row.get("observed_staleness_max")
            print(f"| {mode} | {case} | {got:,.0f} | {got / even:.2f} | {theory:.2f} | {seen} |", flush=True)


if __name__ == "__main__":
    main()
