"""Runs `hetrain train` cells on emulated hosts (scripts/netlab.py, root on Linux) and keeps one JSON line per cell."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cells import finished

NETLAB = Path(__file__).resolve().parent.parent / "scripts" / "netlab.py"
EMBEDDING = ("ids", "rows_pull", "rows_push", "clocks")


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
    finish = subprocess.run(command, capture_output=True, text=True, check=False)
    if finish.returncode:
        sys.exit(f"cell {name} failed ({finish.returncode}):\n{finish.stdout[-2000:]}\n{finish.stderr[-4000:]}")
    report = json.loads(result.read_text())
    shutil.rmtree(runs / name)  # checkpoints of large tables
    row: dict[str, Any] = {"cell": name, "lab": list(lab), "hosts": report["hosts"], **report["summary"]}
    with out.open("a") as f:
        f.write(json.dumps(row) + "\n")
    print(f"{name}: {row['examples_per_s_steady']:,.0f} examples/s, {embedding_bytes(row) / 1e6:,.1f} MB", flush=True)
    return row


def embedding_bytes(row: dict[str, Any]) -> int:
    """Ids, rows and clocks of training, the final flush included, all ranks."""
    return sum(row["bytes"][channel] for channel in EMBEDDING)
