"""Runs `hetrain train` cells as a user would and keeps one JSON line per finished cell.

A cell is a name and a list of overrides. Cells already in the output file are skipped, so that a
stopped benchmark goes on where it was.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def cell_parser(doc: str | None, runs: str) -> argparse.ArgumentParser:
    """What every benchmark of cells on prepared data takes; `doc`: its help, `runs`: where its runs go by default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path(runs))
    parser.add_argument("overrides", nargs="*", help="added to every cell")
    return parser


def finished(out: Path) -> dict[str, dict[str, Any]]:
    """Cells of an earlier run by name."""
    if not out.exists():
        return {}
    rows = (json.loads(line) for line in out.read_text().splitlines())
    return {row["cell"]: row for row in rows}


def run_or_stop(name: str, command: list[str]) -> None:
    """Run a cell's command; stops the benchmark, with the end of what it said, when it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"cell {name} failed ({result.returncode}):\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")


def keep(row: dict[str, Any], out: Path) -> None:
    """Add a finished cell to `out`."""
    with out.open("a") as f:
        f.write(json.dumps(row) + "\n")


def run_cell(name: str, overrides: Iterable[str], out: Path, runs: Path) -> dict[str, Any]:
    """The summary of one run, trained now or taken from `out`; stops the benchmark when the run fails."""
    done = finished(out)
    if name in done:
        return done[name]
    run_or_stop(name, [sys.executable, "-m", "hetrain", "train", *overrides, f"runs={runs}", f"name={name}"])
    row: dict[str, Any] = {"cell": name, **json.loads((runs / name / "summary.json").read_text())}
    keep(row, out)
    print(f"{name}: auc {row['auc']:.5f} logloss {row['logloss']:.5f}", flush=True)
    return row
