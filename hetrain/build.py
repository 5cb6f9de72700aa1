"""From a config to objects, and from a verb to what it does on a rank. The only place that knows both."""

import json
import logging
import math
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import nn

from hetrain import checkpoint
from hetrain.capacity import parse_capacity
from hetrain.codec import OF_MODE
from hetrain.comms.dense_exchange import DenseComms
from hetrain.config import RunConfig
from hetrain.config.comms import codecs_of
from hetrain.config.schema_keys import flatten
from hetrain.data.fingerprint import Fingerprint, differing, fingerprint
from hetrain.data.hold import hold
from hetrain.data.reader import Reader
from hetrain.data.sample import check_sample, ensure_sample
from hetrain.data.schema import SPLITS, DatasetSchema, load_schema
from hetrain.engine import Engine
from hetrain.engine.accord import Accord
from hetrain.engine.recipe import Recipe
from hetrain.errors import ConfigError, DataError, HetrainError
from hetrain.evaluate import Metrics, evaluate, predictions
from hetrain.optim import Schedule, dense_optimizer, row_optimizer
from hetrain.planner.request import tables_of
from hetrain.planner.run_plan import run_plan
from hetrain.ranks import GPU_BACKEND, Ranks
from hetrain.readers import OWN_PACE, split_reader, train_reader
from hetrain.telemetry import Traffic
from hetrain.telemetry.console import screen
from hetrain.telemetry.run_log import RunLog
from hetrain.trainer import Setup, Trainer
from hetrain.training import resume, run_folder
from hetrain.training.lockstep import Lockstep
from hetrain.training.run_folder import Claim
from hetrain.training.run_lock import RunLock
from hetrain.training.slow_down import SlowDown
from hetrain.training.stop_signal import StopSignal
from hetrain.training.table_file import OUT_FORMATS, write_table

logger = logging.getLogger(__name__)
UNITS = {"het": "updates", "ssp": "steps", "asp": "pushes"}  # of the staleness a summary tells, by consistency.mode


def build(cfg: RunConfig, ranks: Ranks, device: torch.device, restarts: int = 0) -> Trainer:
    """A trainer ready to run, in its run folder, at the checkpoint it goes on from. Collective.

    restarts: of the processes since that checkpoint was written.
    """
    ranks = _control_group(cfg, ranks)
    schema = _data(cfg)
    _check_patience(cfg, schema)
    claim, lock = _claimed(cfg, ranks)
    try:
        trainer = _trainer(cfg, ranks, device, schema, claim, lock)
        trainer.setup.restarts = restarts
        return trainer
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _trainer(
    cfg: RunConfig, ranks: Ranks, device: torch.device, schema: DatasetSchema, claim: Claim, lock: RunLock | None
) -> Trainer:
    data, traffic = _fingerprint(cfg, schema, ranks, SPLITS), Traffic()
    engine, plan, resumed = _at_start(cfg, ranks, device, schema, claim.start, data, traffic)
    reader = train_reader(cfg, ranks, None if resumed is None else resumed.reader)
    if resumed is not None and claim.ended:
        resume.check_left(cfg.train, resumed.step, reader.steps_left, cfg.name)
    accord, stop = _accord(engine, reader, ranks)
    total = _total_steps(cfg, reader, 0 if resumed is None else resumed.step)
    log = RunLog(claim.folder, screen(total), first=ranks.first, tensorboard=cfg.telemetry.tensorboard)
    settings = flatten(asdict(cfg))
    if ranks.first:
        run_folder.describe(claim.folder, cfg, plan)
        _say_start(log, cfg, claim.folder, schema, None if resumed is None else resume.settled(resumed, settings))
        if (memory := engine.report().get("memory")) is not None and memory["predicted"]:
            log.say(f"memory: {memory['predicted']['words']}")
    return Trainer(
        Setup(
            engine=engine,
            reader=reader,
            accord=accord,
            stop=stop,
            splits={split: partial(split_reader, cfg, ranks, split) for split in _evaluated(schema)},
            ranks=ranks,
            device=device,
            folder=claim.folder,
            lock=lock,
            make_folder_anew=partial(run_folder.make_anew, claim.folder, cfg, plan),
            log=log,
            traffic=traffic,
            train=cfg.train,
            checkpoint=cfg.checkpoint,
            log_every=cfg.telemetry.log_every,
            about=_about(cfg, schema, ranks),
            settings=settings,
            data=data,
            slow=SlowDown(cfg.launch, cfg.seed, ranks),
            resumed=resumed,
        )
    )


def _accord(engine: Engine, reader: Reader, ranks: Ranks) -> tuple[Accord, StopSignal]:
    """How ranks agree: the engine's way where they step at their own pace, else after every step."""
    accord = getattr(engine, "accord", None)
    if accord is None:
        stop = StopSignal(ranks)
        return Lockstep(ranks, reader, stop), stop
    accord.take_from(reader)
    return accord, StopSignal(ranks, accord.stop)


def _at_start(
    cfg: RunConfig,
    ranks: Ranks,
    device: torch.device,
    schema: DatasetSchema,
    start: Path | None,
    data: Fingerprint,
    traffic: Traffic,
) -> tuple[Engine, dict[str, Any], checkpoint.Loaded | None]:
    """The engine, its plan and what was taken up: with the weights of `start`, or initial ones."""
    if start is None:
        return *make_engine(cfg, schema, ranks, device, traffic), None
    ranks.together(lambda: resume.check_data(checkpoint.read_meta(start), data, cfg.data.path, start))
    with traffic.set_aside():  # going on is no training: a run's bytes do not depend on how often it was cut
        engine, plan = make_engine(cfg, schema, ranks, device, traffic)
        return engine, plan, checkpoint.load(engine, start, ranks)


def evaluate_run(cfg: RunConfig, options: dict[str, str], ranks: Ranks, device: torch.device) -> Metrics:
    """Metrics of a run's checkpoint on a split, equal to what training computed; printed by rank 0. Collective.

    `options`: run (folder), checkpoint (best | last | step_N; default: the one of summary.json), split (test).
    """
    engine, found, ranks = _loaded(cfg, options, ranks, device)
    split = options.get("split", "test")
    metrics = evaluate(engine, split_reader(cfg, ranks, split), ranks)
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
    rows = predictions(engine, split_reader(cfg, ranks, split), ranks)
    if rows is None:
        return
    logits, labels = rows
    table = pa.table({"label": labels.numpy(), "probability": torch.sigmoid(logits.double()).numpy()})
    write_table(table, out)
    print(f"{out}: {len(labels)} rows of {split}, by {found}")


def make_engine(
    cfg: RunConfig, schema: DatasetSchema, ranks: Ranks, device: torch.device, traffic: Traffic
) -> tuple[Engine, dict[str, Any]]:
    """The engine of `consistency.mode` with its initial weights, and its plan as plan.json holds it. Collective."""
    tables = tables_of(cfg, schema.sparse)
    rows = row_optimizer(cfg.optimizer.rows)
    plan, described = run_plan(cfg, schema, tables, ranks, device)
    recipe = Recipe(
        make_model=partial(_make_model, cfg, schema),
        tables=tables,
        plan=plan,
        row_optimizer=rows,
        dense_optimizer=partial(dense_optimizer, cfg=cfg.optimizer.dense),
        schedule=Schedule(cfg.optimizer.schedule),
        device=device,
        seed=cfg.seed,
        traffic=traffic,
        dense_comms=DenseComms(codecs_of(cfg).dense, cfg.comms.dct, cfg.launch.timeout_s),
    )
    if cfg.consistency.mode != "bsp":
        return _store_engine(cfg, recipe, ranks), described
    from hetrain.comms.pooled_codec import PooledComms
    from hetrain.engine.torchrec_engine import TorchRecEngine

    codecs = codecs_of(cfg)
    pooled = PooledComms(codecs.pooled_forward, codecs.pooled_backward, cfg.comms.dct)
    return TorchRecEngine(recipe, cfg.train.batch_size, pooled), described


def _store_engine(cfg: RunConfig, recipe: Recipe, ranks: Ranks) -> Engine:
    """A worker's or a server's of het, ssp or asp, once every rank's memory is known to be enough. Collective."""
    from hetrain.engine.store_memory import check_memory, store_memory

    device, settings = recipe.device, _store_settings(cfg, ranks, recipe.device)
    memory = store_memory(recipe.tables, recipe.plan, recipe.row_optimizer, settings, ranks.world_size)
    ranks.together(lambda: check_memory(memory, recipe.tables, settings, ranks.rank, device))
    if settings.own_pace:
        from hetrain.engine.async_engine import AsyncEngine

        return AsyncEngine(recipe, settings, cfg.consistency.mode, memory=memory)
    from hetrain.engine.server_engine import ServerEngine
    from hetrain.engine.store_engine import StoreEngine

    workers = _worker_group(cfg, ranks, device)
    if not ranks.computes:
        return ServerEngine(recipe, settings)
    return StoreEngine(recipe, settings, workers=workers, memory=memory)


def _make_model(cfg: RunConfig, schema: DatasetSchema, bags: nn.Module) -> nn.Module:
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    inputs = {"dense_features": len(schema.dense), "sparse_features": [c.name for c in schema.sparse]}
    try:
        model = instantiate(cfg.model, bags=bags, _convert_="all", **inputs)
    except InstantiationException as e:
        if isinstance(e.__cause__, HetrainError):
            raise e.__cause__ from None
        if str(cfg.model["_target_"]).startswith("hetrain."):  # in a user's own class the traceback says more
            settings = {key: value for key, value in cfg.model.items() if key != "_target_"}
            raise ConfigError(f"model: cannot be made with {settings}: {e.__cause__ or e}") from None
        raise
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={cfg.model['_target_']}: made a {type(model).__name__}, not a torch module.")
    return model


def _store_settings(cfg: RunConfig, ranks: Ranks, device: torch.device) -> Any:
    from hetrain.engine.store_settings import StoreSettings, dct_of_rows

    mode, rows = cfg.consistency, codecs_of(cfg).rows
    held_back = mode.mode == "het" and parse_capacity(mode.cache.capacity).amount > 0
    if cfg.store.device == "cuda" and device.type != "cuda":
        raise ConfigError(
            "store.device=cuda: this run has no CUDA device. Set store.device=cpu, or see `hetrain doctor`."
        )
    return StoreSettings(
        capacity=mode.cache.capacity,
        batch_size=cfg.train.batch_size,
        policy=mode.cache.policy,
        staleness=mode.staleness,
        validation="clock" if mode.validation == "clock" else "directory",
        prefetch=mode.prefetch,
        late_leg=mode.late_leg,
        clock="sum" if mode.clock == "sum" else "max",
        audit_every=cfg.telemetry.audit_every,
        timeout_s=cfg.launch.timeout_s,
        device=device if cfg.store.device == "cuda" else torch.device("cpu"),
        servers=ranks.servers,
        index=cfg.store.index,
        own_pace=mode.mode in OWN_PACE,
        rows=rows,
        dct=dct_of_rows(cfg.comms.dct, held_back=held_back) if rows == "dct" else None,
    )


def _control_group(cfg: RunConfig, ranks: Ranks) -> Ranks:
    """The ranks with a group of their own for the trainer's questions, apart from the engine's exchanges."""
    if ranks.alone:
        return replace(ranks, group=None)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=cfg.launch.timeout_s))
    return replace(ranks, group=group)


def _worker_group(cfg: RunConfig, ranks: Ranks, device: torch.device) -> dist.ProcessGroup | None:
    """Where there are servers: the group of all ranks but them, on a server None. Collective."""
    if not ranks.servers:
        return None
    backend = GPU_BACKEND if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=cfg.launch.timeout_s)
    group = dist.new_group(list(range(ranks.roles.workers)), timeout, backend)
    return group if ranks.computes else None


def _data(cfg: RunConfig) -> DatasetSchema:
    """The data to train on, which nobody replaces from now on; the sample is made when it is not there."""
    if cfg.data.name == "sample":
        ensure_sample(cfg.data, keep=True, say=partial(print, flush=True))
    return _read_data(cfg)


def _read_data(cfg: RunConfig) -> DatasetSchema:
    """The data that is there, which nobody replaces from now on. Nothing is made: a typo must not become a sample."""
    hold(Path(cfg.data.path))
    if cfg.data.name == "sample":
        check_sample(cfg.data)
    return load_schema(cfg.data.path)


def _check_patience(cfg: RunConfig, schema: DatasetSchema) -> None:
    if cfg.train.patience is not None and not schema.splits.get("validation", 0):
        raise ConfigError(
            f"train.patience={cfg.train.patience}: the data at data.path={cfg.data.path} has no validation rows, and "
            "the test split must not choose the weights. Set train.patience=null, or prepare data with a validation "
            "share in data.split."
        )


def _claimed(cfg: RunConfig, ranks: Ranks) -> tuple[Claim, RunLock | None]:
    """The run folder and the checkpoint to start from, decided on rank 0, which holds the lock."""
    decided: list[tuple[Claim, RunLock]] = []
    ranks.together(lambda: decided.append(run_folder.claim(cfg)) if ranks.first else None)
    claim: Claim = ranks.gather(decided[0][0] if decided else None)[0]
    return claim, decided[0][1] if decided else None


def _fingerprint(cfg: RunConfig, schema: DatasetSchema, ranks: Ranks, splits: tuple[str, ...]) -> Fingerprint:
    """Of the data, equal on all ranks: machines with data sets of their own must have the same. Collective."""
    mine: Fingerprint = {}
    ranks.together(lambda: mine.update(fingerprint(cfg.data.path, schema, splits)))
    for rank, other in enumerate(ranks.gather(mine)):
        if parts := differing(mine, other):
            raise DataError(
                f"data.path={cfg.data.path}: ranks {ranks.rank} and {rank} read different data there "
                f"({', '.join(parts)}). Give every machine the same files."
            )
    return mine


def _loaded(cfg: RunConfig, options: dict[str, str], ranks: Ranks, device: torch.device) -> tuple[Engine, Path, Ranks]:
    """The engine of a run with the weights of one of its checkpoints."""
    ranks = _control_group(cfg, ranks)
    found: list[Path] = []
    ranks.together(lambda: found.append(run_folder.find(Path(options["run"]), options.get("checkpoint"))))
    schema = _read_data(cfg)
    cfg = replace(cfg, planner=replace(cfg.planner, plan=None))  # evaluation may have other ranks, and needs no plan
    _check_evaluated(cfg, schema, found[0], options.get("split", "test"), ranks)
    engine, _ = make_engine(cfg, schema, ranks, device, Traffic())
    checkpoint.load(engine, found[0], ranks)
    return engine, found[0], ranks


def _check_evaluated(cfg: RunConfig, schema: DatasetSchema, found: Path, split: str, ranks: Ranks) -> None:
    """Data replaced under the run's own path is an error; another path is the user's wish, and rank 0 says so."""
    data = _fingerprint(cfg, schema, ranks, (schema.used_split(split),))
    meta: dict[str, Any] = {}
    ranks.together(lambda: meta.update(checkpoint.read_meta(found)))
    if meta["settings"]["data.path"] == cfg.data.path:
        resume.check_data(meta, data, cfg.data.path, found)
    elif ranks.first and differing(meta["data"], data):
        logger.warning("data.path=%s holds other rows than those of the run", cfg.data.path)


def _evaluated(schema: DatasetSchema) -> list[str]:
    """Splits that training evaluates: those with rows."""
    return [split for split in ("validation", "test") if schema.splits.get(split, 0)]


def _total_steps(cfg: RunConfig, reader: Reader, step: int) -> int:
    to_the_end = step + reader.steps_left
    return to_the_end if cfg.train.max_steps is None else min(to_the_end, cfg.train.max_steps)


def _about(cfg: RunConfig, schema: DatasetSchema, ranks: Ranks) -> dict[str, Any]:
    return {
        "name": cfg.name,
        "model": cfg.model["_target_"].rpartition(".")[2],
        "mode": cfg.consistency.mode,
        "staleness": None if cfg.consistency.mode in ("bsp", "asp") else _json_number(cfg.consistency.staleness),
        "staleness_unit": UNITS.get(cfg.consistency.mode),
        "batch_size": cfg.train.batch_size,
        "servers": ranks.servers,
        "comms": {path: getattr(codecs_of(cfg), path) for path in OF_MODE[cfg.consistency.mode]},
        "slow_ranks": {str(rank): factor for rank, factor in sorted(cfg.launch.slow_ranks.items())} or None,
        "slow_random": asdict(cfg.launch.slow_random) if cfg.launch.slow_random.share > 0 else None,
        "best_auc": schema.best_auc,
    }


def _json_number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "inf"


def _say_start(log: RunLog, cfg: RunConfig, folder: Path, schema: DatasetSchema, resumed: str | None) -> None:
    log.say(f"{cfg.model['_target_'].rpartition('.')[2]}, {cfg.consistency.mode} -> {folder}")
    if resumed is not None:
        log.say(resumed)
    if not schema.splits.get("validation", 0):
        often = "" if cfg.train.eval_every is None else f" and every {cfg.train.eval_every} steps"
        log.say(f"the data has no validation rows: test is evaluated at the end{often}")
