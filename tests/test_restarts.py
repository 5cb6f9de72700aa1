"""Whole small runs whose ranks are killed with -9: what goes on from the last checkpoint is the uninterrupted run."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetrain import checkpoint
from hetrain.config import RunConfig
from hetrain.config.compose import to_yaml
from tests import small_run
from tests.ranks import run_ranks
from tests.small_run import config, train

ROOT = Path(__file__).resolve().parent.parent
STEPS, EVERY = 18, 4
TIMES = ("time", "seconds", "_per_s", "share")  # in the names of figures that differ between any two runs
AS_WHOLE = ("steps", "examples", "auc", "logloss", "validation", "test", "best_step", "cache", "observed_staleness_max")


@pytest.fixture
def cfg_of(cfg_of: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    common = {"train__max_steps": STEPS, "checkpoint__every": EVERY, "launch__threads": 1}
    common |= {"train__eval_every": 1_000}  # an evaluation better than all before would be saved, too
    common |= {"telemetry__log_every": 2}  # a restart between two log steps would show the later one's part of the loss
    return lambda mode, **changes: cfg_of(mode, **(common | changes))


def killed(cfg: RunConfig, deaths: str) -> tuple[int, str]:
    """Exit code and what the user reads of a launch in which ranks die, as tests.launch.dying_runs reads `deaths`."""
    file = Path(cfg.runs).parent / "config.yaml"
    file.write_text(to_yaml(cfg))
    command = [sys.executable, "-m", "tests.launch.dying_runs", str(file), deaths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stderr


def summary_of(cfg: RunConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(cfg.runs) / str(cfg.name) / "summary.json").read_text())
    return found


def losses(cfg: RunConfig) -> list[tuple[int, float]]:
    lines = (Path(cfg.runs) / str(cfg.name) / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines) if line["kind"] == "train"]


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every leaf of nested containers, tensors as arrays."""
    if isinstance(value, torch.Tensor):
        return {name: value.numpy()}
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in pairs for k, v in flat(part, f"{name}.{key}").items()}
    return {name: value}


def last_checkpoint(cfg: RunConfig) -> dict[str, Any]:
    """All that the last checkpoint holds: of every rank, the dense part, and the tables with their optimizer state."""
    path = small_run.newest(cfg)
    found = {}
    for file in sorted(path.glob("*.pt")):
        found |= flat(torch.load(file, weights_only=True), file.stem)
    for server in range(cfg.launch.nproc or 2, cfg.cluster.servers + (cfg.launch.nproc or 2)):
        del found[f"rank_{server}.random.cpu"]  # it draws none and is not seeded
    look = config(Path(cfg.runs).parent, "bsp", name=f"look_{cfg.name}", data__path=cfg.data.path)
    look.checkpoint.resume, look.train.max_steps = str(path), STEPS + 1
    trainer = small_run.make(look)
    trainer.setup.lock.release()
    return found | small_run.weights(trainer.setup.engine)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if not any(word in name for word in TIMES):
            np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.parametrize(
    ("mode", "workers", "servers", "deaths"),
    [
        ("bsp", 2, 0, "1@11"),  # a worker
        ("het", 2, 0, "0@11"),  # the rank that saves
        ("het", 2, 1, "2@11"),  # the server, which holds all rows
        ("bsp", 1, 0, "0@11"),  # nobody is left
    ],
)
def test_restarted_equals_uninterrupted(cfg_of: Any, mode: str, workers: int, servers: int, deaths: str) -> None:
    whole = cfg_of(mode, name="whole", cluster__servers=servers)
    run_ranks(workers + servers, train, whole)
    cut = cfg_of(mode, name="cut", cluster__servers=servers, launch__nproc=workers, launch__max_restarts=1)
    code, shown = killed(cut, deaths)
    assert code == 0, shown
    name = f"{'server ' if servers else ''}rank {deaths[0]}"
    line = f"hetrain: {name} was killed from outside; restart 1 of 1 goes on from step 8, the last checkpoint\n"
    assert shown == line
    assert small_run.newest(cut).name == f"step_{STEPS}"
    same(last_checkpoint(cut), last_checkpoint(whole))
    summary, expected = summary_of(cut), summary_of(whole)
    assert (summary["restarts"], expected["restarts"]) == (1, 0)
    for key in AS_WHOLE:
        assert summary[key] == expected[key], key
    for channel in ("rows_pull", "rows_push", "clocks", "pooled_fwd", "pooled_bwd", "dense"):
        assert summary["bytes"][channel] == expected["bytes"][channel], channel
    assert losses(cut) == losses(whole)


def test_every_restart_is_counted_once(cfg_of: Any) -> None:
    """Two before the first checkpoint, one after the second; then another launch of the same run, and one more."""
    whole = cfg_of("het", name="whole")
    run_ranks(2, train, whole)
    cut = cfg_of("het", name="cut", launch__nproc=2, launch__max_restarts=3)
    code, shown = killed(cut, "1@3,0@2,1@10,0@12")
    assert code == 1
    froms = ["step 0: there is no checkpoint", "step 0: there is no checkpoint", "step 8, the last checkpoint"]
    lines = shown.splitlines()
    assert [line.partition(" goes on from ")[2] for line in lines[:3]] == froms
    assert lines[3].startswith("rank 0 was killed from outside")
    assert lines[-1] == "  launch.max_restarts=3: no restart is left."
    meta = checkpoint.read_meta(small_run.newest(cut))
    assert (meta["step"], meta["totals"]["restarts"], meta["totals"]["examples"]) == (8, 2, 8 * 320)
    assert killed(cut, "1@14")[0] == 0
    summary = summary_of(cut)
    assert (summary["restarts"], summary["examples"]) == (3, STEPS * 320)
    same(last_checkpoint(cut), last_checkpoint(whole))


def test_a_death_after_the_last_step_loses_nothing(cfg_of: Any) -> None:
    """What stopped early has nothing left to train, whenever its end is done again."""
    early = {"train__eval_every": 2, "train__patience": 2, "optimizer__rows__lr": 0.5, "optimizer__dense__lr": 0.05}
    early |= {"checkpoint__every": 2, "train__max_steps": 40}
    for name, changes in [("whole", {}), ("early", early)]:
        cfg = cfg_of("het", name=name, **changes)
        first, weights = train(0, 1, cfg)
        (Path(cfg.runs) / name / "summary.json").unlink()
        again, weights_again = train(0, 1, cfg)
        assert first["stop_reason"] == again["stop_reason"] == ("early stopping" if changes else "max_steps")
        for key in AS_WHOLE:
            assert first[key] == again[key], key
        same(weights, weights_again)
