"""Every shipped experiment trains a few steps."""

import csv
import subprocess
import sys
from pathlib import Path

from hetrain.config.compose import config_folders, group_options

COSTS = ("data.sample.rows=4000", "data.path=sample", "train.batch_size=64", "train.max_steps=2", "launch.nproc=1")


def test_every_experiment_trains(tmp_path: Path) -> None:
    names = group_options("experiment", config_folders(None))
    command = [sys.executable, "-m", "hetrain", "train", "-m", f"+experiment={','.join(names)}", *COSTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "multirun").iterdir()
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["experiment"] for row in rows] == names
    assert all(0 < float(row["auc"]) < 1 for row in rows)
