"""Examples per second in the paper's topology and with rows on the workers, beside the limits of link and CPU.

    sudo python benchmarks/lab_speed.py --data data/zipf_prototype --out speed.jsonl [--workers 2 4 8]
    sudo python benchmarks/lab_speed.py --data data/zipf_prototype --out peers.jsonl --peers --rate 1gbit

Workers share one host, the server another; the server's link carries 125 Mbit/s per worker. WDL as in HET's
experiments (138K dense parameters), D=128, batch 128, cache 10%, SGD, one thread per rank. A cell is the pace of warm
steps; `CPU` is that of the same job on a link without a cap, `link` what the link takes for the bytes of the busier
direction. With `--peers` every rank has a host of its own, rows lie on the workers, and `bsp` runs beside. `busy` is
the share of the machine that other processes took in the second before the cell began: quote quiet cells alone.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cells import cell_parser
from lab import HET_MODES, file_name, papers_model, run_lab_cell
from quiet import machine_busy_s

LATE = {f"{mode}, late leg": [*HET_MODES[mode], "consistency.late_leg=true"] for mode in ("s=0", "empty cache")}
MODES = dict(reversed(HET_MODES.items())) | LATE
PEER_MODES = {"s=100": MODES["s=100"], "empty cache": MODES["empty cache"], "bsp": ["consistency=bsp"]}
MBIT_PER_WORKER = 125
BATCH, DIM = 128, 128


def main() -> None:
    """Measure what is missing, then print the table."""
    parser = cell_parser(__doc__, "runs/lab")
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--modes", nargs="+", help="some of the modes; default: all")
    parser.add_argument("--peers", action="store_true", help="a host for every rank, rows on the workers")
    parser.add_argument("--rate", help="of every host with --peers, such as 1gbit; default: 125 Mbit/s per worker")
    args = parser.parse_args()
    print("| workers | mode | examples/s | ms a step | ms CPU | ms link | step / limit | waiting | busy |")
    print("|---|---|---|---|---|---|---|---|---|")
    for workers in args.workers:
        for mode in args.modes or (PEER_MODES if args.peers else MODES):
            rate = args.rate or f"{MBIT_PER_WORKER * (1 if args.peers else workers)}mbit"
            capped, free = (_cell(args, workers, mode, r) for r in (rate, "none"))
            print(_line(workers, mode, capped, free, _bits(rate)), flush=True)


def _line(workers: int, mode: str, capped: dict[str, Any], free: dict[str, Any], bits: float) -> str:
    step, cpu = (1e3 * BATCH * workers / row["examples_per_s_steady"] for row in (capped, free))
    link = 1e3 * 8 * _busier_direction(capped) / capped["steps"] / bits
    figures = f"{capped['examples_per_s_steady']:,.0f} | {step:.1f} | {cpu:.1f} | {link:.1f}"
    waiting = f"{capped['wait_comm_share']:.0%}"
    return f"| {workers} | {mode} | {figures} | {step / max(cpu, link):.2f} | {waiting} | {capped['busy']:.0%} |"


def _busier_direction(row: dict[str, Any]) -> float:
    """Bytes of training steps on the busiest host's link: those of the run but the final flush and evaluation."""
    held, sent = row["cache"], row["bytes"]
    if row["mode"] == "bsp" or not row["servers"]:
        return float(row["kernel_bytes"]) / len(row["hosts"])
    pushes = sent["rows_push"]
    if held["capacity_rows"]:
        pushes = min(pushes, 4 * DIM * (held["own_invalid"] + held["evictions"]))
    return float(max(sent["rows_pull"], pushes))


def _bits(rate: str) -> float:
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return next(float(rate.removesuffix(unit)) * size for unit, size in units.items() if rate.endswith(unit))


def _cell(args: argparse.Namespace, workers: int, mode: str, rate: str) -> dict[str, Any]:
    paper = ["--preset", "paper", "--workers", str(workers)]
    lab = ["--hosts", str(workers)] if args.peers else paper
    overrides = [
        *papers_model(args.data, DIM),
        *(PEER_MODES if args.peers else MODES)[mode],
        f"train.batch_size={BATCH}",
        f"train.max_steps={args.steps}",
        "launch.threads=1",
        *args.overrides,
    ]
    kind = "peers" if args.peers else "paper"
    name = f"{kind}-{workers}-{rate}-{file_name(mode)}"
    busy = _busy_now()
    row = run_lab_cell(name, [*lab, "--rate", rate], overrides, args.out, args.runs)
    return {"busy": busy, **row}


def _busy_now() -> float:
    """Share of the machine in use, over a second."""
    before, start = machine_busy_s(), time.perf_counter()
    time.sleep(1)
    return (machine_busy_s() - before) / (time.perf_counter() - start) / (os.cpu_count() or 1)


if __name__ == "__main__":
    main()
