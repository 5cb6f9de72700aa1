"""A small run on generated data, for tests of the trainer's floors on the real engines."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from hetrain import build, checkpoint
from hetrain.config import RunConfig
from hetrain.evaluate import area_under_roc
from hetrain.ranks import Ranks

# What two runs have in common that trained the same numbers.
QUALITY = ("steps", "examples", "auc", "logloss", "validation", "test", "cache", "observed_staleness_max")


def config(folder: Path, mode: str, **changes: Any) -> RunConfig:
    """4,000 examples, 6 columns, two epochs of 10 steps at W=2; `changes` by dotted key with '__' for dots."""
    cfg = RunConfig(name=mode, runs=str(folder / "runs"))
    cfg.data.path = str(folder / "sample")
    cfg.data.sample.rows, cfg.data.sample.dense = 4_000, 4
    cfg.data.sample.cardinalities = [500, 300, 40, 9, 200, 3]
    cfg.data.shuffle_window = 256
    cfg.model = {"_target_": "hetrain.models.WDL", "embedding_dim": 8, "hidden": [16]}
    cfg.consistency.mode = mode
    cfg.consistency.staleness = 5
    cfg.consistency.cache.capacity = 0.3
    cfg.optimizer.schedule.warmup_steps = 5
    cfg.train.batch_size, cfg.train.eval_batch_size, cfg.train.epochs = 160, 100, 2
    cfg.telemetry.log_every, cfg.telemetry.tensorboard = 5, False
    cfg.launch.device = "cpu"
    for key, value in changes.items():
        *path, last = key.split("__")
        part = cfg
        for name in path:
            part = getattr(part, name)
        setattr(part, last, value)
    return dataclasses.replace(cfg)


def ranks_of(rank: int = 0, world_size: int = 1, servers: int = 0) -> Ranks:
    return Ranks(rank, world_size, dist.group.WORLD if world_size > 1 else None, servers)


def make(cfg: RunConfig, rank: int = 0, world_size: int = 1) -> Any:
    torch.set_num_threads(1)
    return build.build(cfg, ranks_of(rank, world_size, cfg.cluster.servers), torch.device("cpu"))


def weights(engine: Any) -> dict[str, Any]:
    """This rank's part of everything a checkpoint holds exactly, as arrays."""
    found = {}
    with engine.snapshot() as state:
        for name, value in state.dense.items():
            found[f"dense.{name}"] = value.clone().numpy()
        for table, pieces in state.tables.items():
            for piece in pieces:
                found[f"{table}.{piece.first_row}"] = piece.value.clone().numpy()
                for key, value in piece.optimizer.items():
                    found[f"{table}.{piece.first_row}.{key}"] = value.clone().numpy()
        for number, values in state.dense_optimizer.get("state", {}).items():
            for key, value in values.items():
                found[f"dense optimizer.{number}.{key}"] = torch.as_tensor(value).clone().numpy()
    return found


def train(rank: int, world_size: int, cfg: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Summary and this rank's weights after a run."""
    trainer = make(cfg, rank, world_size)
    summary = trainer.run()
    return summary, weights(trainer.setup.engine)


def train_with_signal(rank: int, world_size: int, cfg: RunConfig, at: int, signalled: int) -> dict[str, Any]:
    """Summary of a run in which rank `signalled` gets SIGTERM while it takes step `at`."""
    trainer = make(cfg, rank, world_size)
    step, count = trainer.setup.engine.step, trainer.step

    def counted(batches: Any) -> Any:
        nonlocal count
        count += 1
        if count == at and rank == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(batches)

    with mock.patch.object(trainer.setup.engine, "step", counted):
        return trainer.run()


def taken_up(rank: int, world_size: int, cfg: RunConfig) -> Any:
    """The engine of a run that starts from a checkpoint, before its first step."""
    setup = make(cfg, rank, world_size).setup
    if setup.lock is not None:
        setup.lock.release()
    return setup.engine


def evaluate_run(rank: int, world_size: int, cfg: RunConfig) -> dict[str, Any]:
    ranks = ranks_of(rank, world_size, cfg.cluster.servers)
    return build.evaluate_run(cfg, {"run": f"{cfg.runs}/{cfg.name}"}, ranks, torch.device("cpu")).as_dict()


def predict_run(rank: int, world_size: int, cfg: RunConfig, out: str) -> None:
    ranks = ranks_of(rank, world_size, cfg.cluster.servers)
    build.predict_run(cfg, {"run": f"{cfg.runs}/{cfg.name}", "out": out}, ranks, torch.device("cpu"))


def check_predictions(out: Path, cfg: RunConfig, summary: dict[str, Any]) -> None:
    """The file has the AUC that training gave, and the test split's examples in their order."""
    rows = pq.read_table(out)
    score, label = (torch.tensor(rows[name].to_numpy()) for name in ("probability", "label"))
    assert area_under_roc(score, label) == pytest.approx(summary["auc"], abs=1e-9)
    assert len(label) == summary["test"]["examples"]
    np.testing.assert_array_equal(label, pq.read_table(Path(cfg.data.path) / "test")["label"].to_numpy())


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Arrays of the same names are equal bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def newest(cfg: RunConfig) -> Path:
    found = checkpoint.newest(Path(cfg.runs) / str(cfg.name) / "checkpoints")
    assert found is not None
    return found
