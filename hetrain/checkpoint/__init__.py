"""Checkpoints: logical (tables by name), atomic (written aside, then renamed), exact.

``checkpoints/step_N/`` holds ``tables/`` (torch.distributed.checkpoint), or ``rows_R.bin`` per rank where owners keep
only the rows seen (and ``rows_replicated.bin`` of tables that every worker holds whole); ``dense.pt``; one
``rank_R.pt`` per rank with what fits only an equal layout (cache, pending updates, clocks, random numbers); and
``meta.json``, written last.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from hetrain.checkpoint.checksum import Sum, writing
from hetrain.checkpoint.folder import (
    ASIDE,
    FORMAT,
    META,
    best,
    check_files,
    clean,
    complete,
    newest,
    prune,
    publish,
    read_meta,
    step_folder,
)
from hetrain.checkpoint.rows import (
    WHOLE,
    beside_tables,
    check_origin,
    files_of,
    fill_tables,
    origin_json,
    read_rows,
    rows_file,
    saved_files,
    whole_rows,
    write_rows,
)
from hetrain.checkpoint.tables import load_tables, read_as_seen, save_tables
from hetrain.engine import Engine, EngineState
from hetrain.errors import CheckpointError
from hetrain.ranks import Ranks

__all__ = ["META", "Loaded", "best", "clean", "complete", "load", "newest", "prune", "read_meta", "save", "step_folder"]

DENSE, TABLES = "dense.pt", "tables"
ORIGIN = "origin"  # in meta.json where only the rows seen were saved: what the others start as
# A full disk is an OSError from Python's writers and a RuntimeError from torch's.
WRITE_FAILURES = (OSError, RuntimeError)


@dataclass(frozen=True)
class Loaded:
    """What a run takes up besides the engine's state."""

    path: Path
    step: int
    reader: dict[str, Any]  # Reader.state_dict()
    meta: dict[str, Any]
    exact: bool  # caches, clocks and random numbers were taken up too: the run goes on bit for bit


def save(engine: Engine, path: Path, ranks: Ranks, *, reader: dict[str, Any], about: dict[str, Any]) -> None:
    """Write a checkpoint folder at `path`, replacing one of that name. Collective.

    `reader` is Reader.state_dict(); `about` (JSON: metrics, versions) goes into meta.json. Raises CheckpointError on
    every rank when any rank could not write; what was written before stays as it was.
    """
    aside = path.with_name(path.name + ASIDE)

    def failed(reason: str) -> CheckpointError:
        if ranks.first:
            shutil.rmtree(aside, ignore_errors=True)
        return CheckpointError(
            f"checkpoint {path} could not be written ({reason}). Earlier checkpoints are untouched; "
            "free disk space or set checkpoint.keep=1, then start again to resume."
        )

    sums: dict[Path, Sum] = {}  # of the files this rank writes
    ranks.together(lambda: _make_fresh(aside) if ranks.first else None, WRITE_FAILURES, failed)
    with engine.snapshot() as state:
        ranks.together(lambda: _write_local(state, aside, ranks, reader, sums), WRITE_FAILURES, failed)
        meta = {"format": FORMAT, "step": state.step, "layout": _plain(state.layout), **about}
        if state.seen is not None and state.origin is not None:
            meta[ORIGIN] = origin_json(state.origin)
        else:
            try:
                save_tables(state, aside / TABLES, ranks, sums)
            except CheckpointException as e:
                raise failed("; ".join(f"rank {rank}: {failure[0]}" for rank, failure in e.failures.items())) from e
    every = {file: found for part in ranks.gather(sums) for file, found in part.items()}
    ranks.together(lambda: _replace(meta, every, aside, path) if ranks.first else None, WRITE_FAILURES, failed)


def load(engine: Engine, path: Path, ranks: Ranks) -> Loaded:
    """Put a checkpoint, whatever plan and world size wrote it, into `engine`. Collective.

    Raises CheckpointError on every rank when it is missing, damaged or of another model or data set.
    """
    meta: dict[str, Any] = {}

    def check() -> None:
        meta.update(read_meta(path))
        check_files(path, meta, ranks)

    ranks.together(check)
    dense = _read(path / DENSE)
    with engine.snapshot() as state:
        exact = _plain(state.layout) == meta["layout"]
        if ORIGIN not in meta and state.seen is None:
            load_tables(state, path / TABLES, ranks)
        else:
            ranks.together(lambda: _load_seen(state, path, meta, ranks.rank, exact))
        ranks.together(lambda: _fill_dense(state, dense, path))
        state.step = meta["step"]
    private = _read(path / f"rank_{ranks.rank}.pt") if exact else None
    restored = None if private is None else private["engine"]
    if state.seen is None:
        engine.restore(state, restored)
    else:  # which reads files and takes memory
        ranks.together(lambda: engine.restore(state, restored))
    if private is not None:
        _set_random_state(private["random"])
    return Loaded(path, meta["step"], dense["reader"], meta, exact)


def _load_seen(state: EngineState, path: Path, meta: dict[str, Any], rank: int, exact: bool) -> None:
    """Rows seen into tables, or tables or rows seen into `state.seen`, which is read when the engine takes it up."""
    if ORIGIN not in meta:
        rows = read_as_seen(state, path / TABLES)
    else:
        assert state.origin is not None  # every engine that is built from a config says so
        check_origin(meta[ORIGIN], state.origin, path)
        rows = read_rows(path, files_of(rank, meta) if exact else saved_files(meta))
    if state.seen is None:
        fill_tables(state, rows)
    else:
        state.seen = beside_tables(state, rows)


def _make_fresh(aside: Path) -> None:
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)


def _write_local(state: EngineState, aside: Path, ranks: Ranks, reader: dict[str, Any], sums: dict[Path, Sum]) -> None:
    _write(aside / f"rank_{ranks.rank}.pt", {"engine": state.private, "random": _random_state()}, sums)
    if state.seen is not None:
        write_rows(state.seen, aside / rows_file(ranks.rank), sums)
        if ranks.first and state.replicated:
            write_rows(whole_rows(state), aside / WHOLE, sums)
    if ranks.first:
        dense = {"dense": state.dense, "optimizer": state.dense_optimizer, "pending": state.dense_pending}
        _write(aside / DENSE, {**dense, "reader": reader}, sums)


def _write(file: Path, value: dict[str, Any], sums: dict[Path, Sum]) -> None:
    with writing(file, sums) as f:
        try:
            torch.save(value, f)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch's writer tells that it could not go on, but not why
                raise error.__context__ from None
            raise


def _read(file: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as e:
        # a damaged zip or pickle raises whatever its bytes lead to
        raise CheckpointError(f"{file} is damaged ({e}). Remove its checkpoint and use an older one.") from e
    return value


def _replace(meta: dict[str, Any], sums: dict[Path, Sum], aside: Path, path: Path) -> None:
    """Publish `aside` as `path`; the folder it replaces is removed once the new one is whole."""
    old = path.with_name(path.name + ".old" + ASIDE)
    if path.exists():
        path.rename(old)
    publish(meta, sums, aside, path)
    shutil.rmtree(old, ignore_errors=True)


def _fill_dense(state: EngineState, saved: dict[str, Any], path: Path) -> None:
    """Copy parameters in place; give the optimizer its state, with the learning rates and so on of this run."""
    if not state.dense_optimizer:  # a server has no dense part
        return
    for name, value in state.dense.items():
        found = saved["dense"].get(name)
        if found is None or found.shape != value.shape:
            shape = "is missing" if found is None else f"is {list(found.shape)}"
            raise CheckpointError(
                f"parameter {name!r} {shape} in {path} and {list(value.shape)} in this run; "
                "data.path (its columns) and model.* must be as in config.yaml of the checkpoint's run folder."
            )
        with torch.no_grad():
            value.copy_(found)
    kind, groups = saved["optimizer"]["param_groups"], state.dense_optimizer["param_groups"]
    if [(sorted(g), g["params"]) for g in kind] != [(sorted(g), g["params"]) for g in groups]:
        raise CheckpointError(
            f"{path} was written with another dense optimizer than this run's; "
            "set optimizer.dense.name to that one, or start anew with checkpoint.resume=never."
        )
    state.dense_optimizer = {**saved["optimizer"], "param_groups": groups}
    state.dense_pending = saved.get("pending", {})


def _plain(layout: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: tuples are lists, keys are strings."""
    plain: dict[str, Any] = json.loads(json.dumps(layout))
    return plain


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
