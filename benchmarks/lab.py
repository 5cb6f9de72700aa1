"""Runs `hetrain train` cells on emulated hosts (scripts/netlab.py, root on Linux) and keeps one JSON line per cell."""

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cells import finished, keep, run_or_stop

NETLAB = Path(__file__).resolve().parent.parent / "scripts" / "netlab.py"
EMBEDDING = ("ids", "rows_pull", "rows_push", "clocks")
HET = "consistency=het"
HET_MODES = {"empty cache": [HET, "consistency.cache.capacity=0"]} | {
    f"s={s}": [HET, f"consistency.staleness={s}"] for s in (0, 10, 100)
}


def papers_model(data: Path, dim: int) -> list[str]:
    """Overrides: WDL as in HET's experiments on prepared data, SGD for rows and dense part."""
    model = ("model=wdl", "model.deep=dense", f"model.embedding_dim={dim}")
    return ["data=criteo", f"data.path={data.resolve()}", *model, "optimizer.rows.name=sgd", "optimizer.dense.name=sgd"]


def file_name(mode: str) -> str:
    """A mode's name as part of a cell's."""
    return mode.replace(" ", "-").replace(",", "")


def run_lab_cell(name: str, lab: Sequence[str], overrides: Iterable[str], out: Path, runs: Path) -> dict[str, Any]:
    """Rank 0's summary with the hosts' counters, run now or taken from `out`; `lab`: netlab.py's own arguments."""
    done = finished(out)
    if name in done:
        return done[name]
    runs.mkdir(parents=True, exist_ok=True)
    result = runs / f"{name}.json"
    job = [
        "train",
        *overrides,
        f"runs={runs}",
        f"name={name}",
        "checkpoint.resume=never",
        "telemetry.tensorboard=false",
    ]
    command = [sys.executable, str(NETLAB), *lab, "--json", str(result), "--", *job]
    run_or_stop(name, command)
    report = json.loads(result.read_text())
    shutil.rmtree(runs / name)  # checkpoints of large tables
    row: dict[str, Any] = {"cell": name, "lab": list(lab), "hosts": report["hosts"], **report["summary"]}
    keep(row, out)
    print(f"{name}: {row['examples_per_s_steady']:,.0f} examples/s, {embedding_bytes(row) / 1e6:,.1f} MB", flush=True)
    return row


def embedding_bytes(row: dict[str, Any]) -> int:
    """Ids, rows and clocks of training, the final flush included, all ranks."""
    return sum(row["bytes"][channel] for channel in EMBEDDING)
