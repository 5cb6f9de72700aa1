"""From a config to objects, and from a verb to what it does on a rank. The only place that knows both."""

import json
import math
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
import torch.distributed as dist
from torch import nn

from hetrain import checkpoint
from hetrain.config import RunConfig
from hetrain.config.schema_keys import flatten
from hetrain.data.hold import hold
from hetrain.data.reader import Reader
from hetrain.data.sample import check_sample, ensure_sample
from hetrain.data.schema import DatasetSchema, load_schema
from hetrain.engine import Engine
from hetrain.errors import ConfigError, HetrainError
from hetrain.evaluate import Metrics, evaluate, predictions
from hetrain.optim import Schedule, dense_optimizer, row_optimizer
from hetrain.planner.torchrec_planner import plan_of, sharding_plan, store_plan
from hetrain.ranks import Ranks
from hetrain.tables import Table
from hetrain.telemetry import Traffic
from hetrain.telemetry.console import screen
from hetrain.telemetry.run_log import RunLog
from hetrain.trainer import Setup, Trainer
from hetrain.training import run_folder

OUT_FORMATS = (".parquet", ".csv")


def build(cfg: RunConfig, ranks: Ranks, device: torch.device) -> Trainer:
    """A trainer ready to run, in its run folder, at the checkpoint it goes on from. Collective."""
    ranks = _control_group(cfg, ranks)
    schema = _data(cfg)
    folder, start = _claimed(cfg, ranks)
    traffic = Traffic()
    engine, plan = make_engine(cfg, schema, ranks, device, traffic)
    resumed = None if start is None else checkpoint.load(engine, start, ranks)
    reader = _train_reader(cfg, ranks, None if resumed is None else resumed.reader)
    total = _total_steps(cfg, reader, 0 if resumed is None else resumed.step)
    log = RunLog(folder, screen(total), first=ranks.first, tensorboard=cfg.telemetry.tensorboard)
    if ranks.first:
        run_folder.describe(folder, cfg, plan)
        _say_start(log, cfg, folder, start, resumed)
    return Trainer(
        Setup(
            engine=engine,
            reader=reader,
            splits={split: partial(_split_reader, cfg, ranks, split) for split in _evaluated(schema)},
            ranks=ranks,
            device=device,
            folder=folder,
            log=log,
            traffic=traffic,
            train=cfg.train,
            checkpoint=cfg.checkpoint,
            log_every=cfg.telemetry.log_every,
            about=_about(cfg, schema),
            settings=flatten(asdict(cfg)),
            resumed=resumed,
        )
    )


def evaluate_run(cfg: RunConfig, options: dict[str, str], ranks: Ranks, device: torch.device) -> Metrics:
    """Metrics of a run's checkpoint on a split, equal to what training computed; printed by rank 0. Collective.

    `options`: run (folder), checkpoint (best | last | step_N; default: the one of summary.json), split (test).
    """
    engine, found, ranks = _loaded(cfg, options, ranks, device)
    split = options.get("split", "test")
    metrics = evaluate(engine, _split_reader(cfg, ranks, split), ranks)
    if ranks.first:
        print(json.dumps({"checkpoint": str(found), "split": split, **metrics.as_dict()}, indent=1))
    return metrics


def predict_run(cfg: RunConfig, options: dict[str, str], ranks: Ranks, device: torch.device) -> None:
    """Write label and probability of every example of a split to `out`, in the data set's order. Collective."""
    out = Path(options["out"])
    if out.suffix not in OUT_FORMATS:
        raise ConfigError(f"out={out}: expected a name that ends in {' or '.join(OUT_FORMATS)}.")
    if not out.parent.is_dir():
        raise ConfigError(f"out={out}: there is no folder {out.parent}.")
    engine, found, ranks = _loaded(cfg, options, ranks, device)
    split = options.get("split", "test")
    rows = predictions(engine, _split_reader(cfg, ranks, split), ranks)
    if rows is None:
        return
    logits, labels = rows
    table = pa.table({"label": labels.numpy(), "probability": torch.sigmoid(logits.double()).numpy()})
    if out.suffix == ".parquet":
        pyarrow.parquet.write_table(table, out)
    else:
        pyarrow.csv.write_csv(table, out)
    print(f"{out}: {len(labels)} rows of {split}, by {found}")


def make_engine(
    cfg: RunConfig, schema: DatasetSchema, ranks: Ranks, device: torch.device, traffic: Traffic
) -> tuple[Engine, dict[str, Any]]:
    """The engine of `consistency.mode` with its initial weights, and its plan as plan.json holds it. Collective."""
    tables = tables_of(cfg, schema)
    rows = row_optimizer(cfg.optimizer.rows)
    common: dict[str, Any] = {
        "make_model": partial(_make_model, cfg, schema),
        "tables": tables,
        "row_optimizer": rows,
        "dense_optimizer": partial(dense_optimizer, cfg=cfg.optimizer.dense),
        "schedule": Schedule(cfg.optimizer.schedule),
        "device": device,
        "seed": cfg.seed,
        "traffic": traffic,
    }
    if cfg.consistency.mode == "het":
        from hetrain.engine.store_engine import StoreEngine

        plan = store_plan(tables, cfg.planner, ranks.world_size, cfg.train.batch_size, device)
        return StoreEngine(plan=plan, settings=_store_settings(cfg, device), **common), plan.to_json()
    from hetrain.engine.torchrec_engine import TorchRecEngine

    found = sharding_plan(tables, rows.name, cfg.planner, ranks.world_size, device, cfg.train.batch_size)
    plan = plan_of(found, tables, ranks.world_size)
    return TorchRecEngine(plan=found, batch_size=cfg.train.batch_size, **common), plan.to_json()


def tables_of(cfg: RunConfig, schema: DatasetSchema) -> list[Table]:
    """One table per sparse column."""
    dim = cfg.model["embedding_dim"]
    return [Table(c.name, c.rows, dim, (c.name,), cfg.store.init_bound) for c in schema.sparse]


def _make_model(cfg: RunConfig, schema: DatasetSchema, bags: nn.Module) -> nn.Module:
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    inputs = {"dense_features": len(schema.dense), "sparse_features": [c.name for c in schema.sparse]}
    try:
        model = instantiate(cfg.model, bags=bags, _convert_="all", **inputs)
    except InstantiationException as e:
        if isinstance(e.__cause__, HetrainError):
            raise e.__cause__ from None
        raise
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={cfg.model['_target_']}: made a {type(model).__name__}, not a torch module.")
    return model


def _store_settings(cfg: RunConfig, device: torch.device) -> Any:
    from hetrain.engine.store_engine import StoreSettings

    mode = cfg.consistency
    return StoreSettings(
        capacity=mode.cache.capacity,
        batch_size=cfg.train.batch_size,
        policy=mode.cache.policy,
        staleness=mode.staleness,
        clock="sum" if mode.clock == "sum" else "max",
        audit_every=cfg.telemetry.audit_every,
        timeout_s=cfg.launch.timeout_s,
        device=device if cfg.store.device == "cuda" else torch.device("cpu"),
    )


def _control_group(cfg: RunConfig, ranks: Ranks) -> Ranks:
    """The ranks with a group of their own for the trainer's questions, apart from the engine's exchanges."""
    if ranks.alone:
        return replace(ranks, group=None)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=cfg.launch.timeout_s))
    return replace(ranks, group=group)


def _data(cfg: RunConfig) -> DatasetSchema:
    """The data to train on, which nobody replaces from now on; the sample is made when it is not there."""
    if cfg.data.name == "sample":
        ensure_sample(cfg.data, keep=True)
    return _read_data(cfg)


def _read_data(cfg: RunConfig) -> DatasetSchema:
    """The data that is there, which nobody replaces from now on. Nothing is made: a typo must not become a sample."""
    hold(Path(cfg.data.path))
    if cfg.data.name == "sample":
        check_sample(cfg.data)
    return load_schema(cfg.data.path)


def _claimed(cfg: RunConfig, ranks: Ranks) -> tuple[Path, Path | None]:
    """The run folder and the checkpoint to start from, decided on rank 0."""
    decided: list[tuple[Path, Path | None]] = []
    ranks.together(lambda: decided.append(run_folder.claim(cfg)) if ranks.first else None)
    answer: tuple[Path, Path | None] = ranks.gather(decided)[0][0]
    return answer


def _train_reader(cfg: RunConfig, ranks: Ranks, state: dict[str, Any] | None) -> Reader:
    return Reader(
        cfg.data.path,
        "train",
        cfg.train.batch_size,
        ranks.rank,
        ranks.world_size,
        epochs=cfg.train.epochs,
        shuffle=cfg.data.shuffle,
        seed=cfg.seed,
        shuffle_window=cfg.data.shuffle_window,
        prefetch=cfg.data.prefetch,
        state=state,
    )


def _split_reader(cfg: RunConfig, ranks: Ranks, split: str) -> Reader:
    """One pass over a split, in the data set's order."""
    batch, prefetch = cfg.train.eval_batch_size, cfg.data.prefetch
    return Reader(cfg.data.path, split, batch, ranks.rank, ranks.world_size, prefetch=prefetch)


def _loaded(cfg: RunConfig, options: dict[str, str], ranks: Ranks, device: torch.device) -> tuple[Engine, Path, Ranks]:
    """The engine of a run with the weights of one of its checkpoints."""
    ranks = _control_group(cfg, ranks)
    found: list[Path] = []
    ranks.together(lambda: found.append(run_folder.find(Path(options["run"]), options.get("checkpoint"))))
    engine, _ = make_engine(cfg, _read_data(cfg), ranks, device, Traffic())
    checkpoint.load(engine, found[0], ranks)
    return engine, found[0], ranks


def _evaluated(schema: DatasetSchema) -> list[str]:
    """Splits that training evaluates. Without validation rows the reader takes test's for them."""
    has_test = schema.splits.get("test", 0) > 0
    return ["validation"] * (has_test or schema.splits.get("validation", 0) > 0) + ["test"] * has_test


def _total_steps(cfg: RunConfig, reader: Reader, step: int) -> int:
    to_the_end = step + reader.steps_left
    return to_the_end if cfg.train.max_steps is None else min(to_the_end, cfg.train.max_steps)


def _about(cfg: RunConfig, schema: DatasetSchema) -> dict[str, Any]:
    return {
        "name": cfg.name,
        "model": cfg.model["_target_"].rpartition(".")[2],
        "mode": cfg.consistency.mode,
        "staleness": None if cfg.consistency.mode == "bsp" else _json_number(cfg.consistency.staleness),
        "batch_size": cfg.train.batch_size,
        "best_auc": schema.best_auc,
    }


def _json_number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "inf"


def _say_start(
    log: RunLog, cfg: RunConfig, folder: Path, start: Path | None, resumed: checkpoint.Loaded | None
) -> None:
    log.say(f"{cfg.model['_target_'].rpartition('.')[2]}, {cfg.consistency.mode} -> {folder}")
    if resumed is None:
        return
    if resumed.exact:
        log.say(f"goes on from {start}, bit for bit")
    else:
        log.say(
            f"goes on from {start}; mode, plan, world size or cache differ from its own: weights, optimizer state and "
            "data position are taken up, caches start empty and clocks at 0"
        )
