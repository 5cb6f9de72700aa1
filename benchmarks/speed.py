"""Examples per second of `hetrain train` beside its limit and its rivals, in one run. See README.md."""

import argparse
import json
import tempfile
import time
from pathlib import Path

from contenders import Cell, Contender, HetrainTrain, deepctr_worker, torch_worker
from quiet import QUIET, Window
from report import ENOUGH, figure, table
from rows import export

MODELS = ("wdl", "deepfm", "dcn", "dcn_v1", "dlrm")
CONTENDERS = ("dense", "dense_adam", "fused", "dmp", "deepctr", "hetrain")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder made by `hetrain prepare`; its train split is used")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--deepctr-python", help="python of an environment with deepctr-torch")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--modes", nargs="+", default=["bsp"], help="consistency groups of `hetrain train`")
    parser.add_argument("--overrides", nargs="*", default=[], help="more overrides of `hetrain train`")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a window")
    parser.add_argument("--rounds", type=int, default=12, help="most windows tried per contender")
    return parser.parse_args()


def contenders(args: argparse.Namespace, cell: Cell, npz: Path, examples: int, runs: Path) -> list[Contender]:
    made: list[Contender] = [
        torch_worker(name, cell, npz) for name in ("dense", "dense_adam", "fused", "dmp") if name in args.contenders
    ]
    if "deepctr" in args.contenders and args.deepctr_python and cell.model != "dlrm":
        made.append(deepctr_worker(args.deepctr_python, cell, npz))
    if "hetrain" in args.contenders:
        here = args.data.resolve()
        made += [HetrainTrain(mode, cell, here, examples, runs, args.overrides) for mode in args.modes]
    return made


def measure(all_of: list[Contender], seconds: float, rounds: int) -> dict[str, list[Window]]:
    """Windows in turn, the first place going round, until each has ENOUGH quiet ones or `rounds` are over."""
    windows: dict[str, list[Window]] = {contender.name: [] for contender in all_of}
    for turn in range(rounds):
        first = turn % len(all_of)
        for contender in all_of[first:] + all_of[:first]:
            time.sleep(0.3)  # the last one's compute threads stop spinning
            windows[contender.name].append(contender.window(seconds))
        if all(sum(w.foreign <= QUIET for w in found) >= ENOUGH for found in windows.values()):
            break
        if any(found[-1].foreign > QUIET for found in windows.values()):
            time.sleep(2.0)
    return windows


def main() -> None:
    args = arguments()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        npz, runs = Path(folder) / "rows.npz", Path(folder) / "runs"
        examples = export(args.data, npz)
        for model in args.models:
            for batch_size in args.batch_sizes:
                cell = Cell(model, batch_size, args.dim, args.threads)
                made = contenders(args, cell, npz, examples, runs / f"{model}_{batch_size}")
                found = measure(made, args.seconds, args.rounds)
                for contender in made:
                    contender.close()
                    row = {**vars(cell), "contender": contender.name, **figure(found[contender.name])}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    with args.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
