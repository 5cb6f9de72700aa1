"""Every shipped experiment trains a few steps; those that are lists of tables are planned, and refused in training."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetrain.cli.command import run
from hetrain.config.compose import config_folders, group_options, shipped_configs
from hetrain.errors import ConfigError

COSTS = ("data.sample.rows=4000", "data.path=sample", "train.batch_size=64", "train.max_steps=2", "launch.nproc=1")
NAMES = group_options("experiment", config_folders(None))
# Machines they are planned on: enough for a strategy that takes no time, host memory included.
PLANNED = {
    "criteo_kaggle": 1,
    "het_trillion": 20,
    "merlin_colossal": 64,
    "merlin_jumbo": 8,
    "merlin_large": 2,
    "merlin_medium": 2,
    "merlin_small": 1,
    "merlin_tiny": 1,
    "mlperf_dlrm_dcnv2": 1,
}


def shipped(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((shipped_configs() / "experiment" / f"{name}.yaml").read_text())
    return found


def test_every_experiment_trains(tmp_path: Path) -> None:
    names = [name for name in NAMES if name not in PLANNED]
    command = [sys.executable, "-m", "hetrain", "train", "-m", f"+experiment={','.join(names)}", *COSTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "multirun").iterdir()
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["experiment"] for row in rows] == names
    assert all(0 < float(row["auc"]) < 1 for row in rows)


def test_only_lists_of_tables_are_exempt_from_training() -> None:
    lists = [name for name in NAMES if "tables" in (shipped(name).get("plan") or {})]
    assert lists == sorted(PLANNED)


@pytest.mark.parametrize("name", PLANNED)
def test_a_list_of_tables_is_planned_and_not_trained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        f"+experiment={name}",
        f"cluster.nodes={PLANNED[name]}",
        "planner=memory_optimized",
        "train.batch_size=512",
    ]
    with pytest.raises(ConfigError, match=f"plan.tables={name}: a list of tables can be planned, not trained"):
        run(["train", *words])
    assert list(tmp_path.iterdir()) == []
    assert run(["plan", *words, "plan.out=out"]) == 0
    shown = capsys.readouterr().out
    predicted = json.loads((tmp_path / "out" / "plan.json").read_text())["predicted"]
    assert 0 < predicted["lower_bound_ms"] <= predicted["slowest_ms"] * (1 + 1e-9)
    assert f"({name})" in shown
