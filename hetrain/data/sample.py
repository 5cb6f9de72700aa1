"""`data=sample`: a generated data set of Criteo's shape whose best reachable AUC is known."""

import errno
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hetrain.config import DataConfig, SampleConfig
from hetrain.config.schema_keys import flatten
from hetrain.data.folder import PartWriter, locked, partial_folder
from hetrain.data.hidden import CARDINALITIES, HiddenModel, random_stream
from hetrain.data.hold import hold, unread
from hetrain.data.schema import (
    LABEL,
    SCHEMA_FILE,
    SPLITS,
    STATS_FILES,
    DatasetSchema,
    SparseColumn,
    is_prepared,
    load_schema,
    save_schema,
)
from hetrain.data.split import Bounds, split_bounds
from hetrain.errors import DataError

logger = logging.getLogger(__name__)
VERSION = 1  # raise it when the same settings give other rows
_CHUNK = 65_536  # rows drawn from one random stream
_AUC_BINS = 1 << 20
_VALUES_PER_S = 6e6  # drawn and written by one core


def ensure_sample(cfg: DataConfig, keep: bool = False, say: Callable[[str], object] = logger.info) -> bool:
    """Make the sample at `data.path` unless it is there; whether it was made now.

    Any number of processes may ask at once: one makes it, the others wait. A sample made with other
    settings is replaced, with a line saying so, since it can be had again: but not while any process reads it,
    nor when anything was added to it. That, and anything that is no sample, is refused with a DataError.

    keep: this process reads it from now on, so that nobody replaces it until the process ends.
    say: told what is made, before it is.
    """
    path, wanted = Path(cfg.path), made_from(cfg)
    try:
        with locked(path):
            made = not _is_there(path, wanted)
            if made:
                _make(cfg, path, wanted, say)
            if keep:
                hold(path)
    except OSError as error:  # a data set that others made and this user only reads needs no lock
        if error.errno not in (errno.EACCES, errno.EROFS) or not is_prepared(path) or not _is_there(path, wanted):
            raise
        return False
    return made


def made_from(cfg: DataConfig) -> dict[str, Any]:
    """What decides the rows of the sample, as its schema.json keeps it."""
    return {"kind": "sample", "version": VERSION, "sample": asdict(cfg.sample), "split": asdict(cfg.split)}


def sample_columns(cfg: SampleConfig) -> tuple[SparseColumn, ...]:
    """The sparse columns that a sample of these settings has, which need not be there."""
    return tuple(SparseColumn(f"C{i + 1}", rows) for i, rows in enumerate(cfg.cardinalities or CARDINALITIES))


def check_sample(cfg: DataConfig) -> None:
    """DataError unless the sample of these settings lies at `data.path`. Makes and replaces nothing."""
    path = Path(cfg.path)
    if not is_prepared(path):
        raise DataError(
            f"data.path={path}: no data set there. The run's sample is made again by `hetrain prepare data=sample "
            f"data.path={path}` with the data.sample settings of its config.yaml; or name a prepared data set."
        )
    there = load_schema(path).made_from
    if there.get("kind") == "sample" and there != made_from(cfg):
        raise DataError(
            f"data.path={path}: holds a sample made with other settings than the run's "
            f"({differences(there, made_from(cfg))}). "
            "Give data.path the run's own data, or the same data.sample.KEY=VALUE to use the one there."
        )


def differences(there: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The settings in which two samples differ, in words."""
    old, new = flatten(there), flatten(wanted)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return "; ".join(f"{key}: {old.get(key)} there, {new.get(key)} asked for" for key in keys)


def _is_there(path: Path, wanted: dict[str, Any]) -> bool:
    if is_prepared(path):
        there = load_schema(path).made_from
        if there.get("kind") != "sample":
            raise DataError(
                f"data.path={path}: holds a data set that is not a sample. Choose another data.path, "
                "or read it with data=criteo."
            )
        return there == wanted
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"data.path={path}: exists and is no data set. Remove it, or choose another data.path.")
    return False


def _make(cfg: DataConfig, path: Path, wanted: dict[str, Any], say: Callable[[str], object]) -> None:
    """Make the sample where there is none, or in place of an untouched one that nobody reads."""
    with unread(path) as free:  # a refusal must not wait for the new one
        _check_replaceable(path, wanted, free)
    say(f"data.path={path}: making {_in_words(cfg.sample)}")
    work = partial_folder(path)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        _generate(cfg, work, wanted)
        with unread(path) as free:
            _check_replaceable(path, wanted, free)
            _publish(work, path, wanted)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _in_words(cfg: SampleConfig) -> str:
    """What is made, and what it takes."""
    ids = len(sample_columns(cfg))
    seconds = cfg.rows * (cfg.dense + ids) / _VALUES_PER_S
    return (
        f"a sample data set of {cfg.rows:,} rows with {cfg.dense} dense and {ids} sparse columns, "
        f"about {cfg.rows * (4 * cfg.dense + 2 * ids) / 1e6:,.1f} MB and {max(1, round(seconds)):,} s"
    )


def _check_replaceable(path: Path, wanted: dict[str, Any], free: bool) -> None:
    if not is_prepared(path):
        return
    added = sorted({entry.name for entry in path.iterdir()} - {SCHEMA_FILE, *STATS_FILES, *SPLITS})
    if not free or added:
        why = f"other files were added to it ({', '.join(added)})" if free else "a running command reads it"
        raise DataError(
            f"data.path={path}: holds a sample made with other settings "
            f"({differences(load_schema(path).made_from, wanted)}), and {why}. "
            "Choose another data.path for the new one, or delete the folder when nobody needs it."
        )


def _publish(work: Path, path: Path, wanted: dict[str, Any]) -> None:
    old = path.parent / f".{path.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        if is_prepared(path):
            changed = differences(load_schema(path).made_from, wanted)
            logger.warning(
                "data.path=%s: nobody reads the sample there; it was made anew (%s). Runs trained on the old one "
                "cannot be evaluated on it, nor go on; data.path=DIR keeps samples apart",
                path,
                changed,
            )
        path.rename(old)
    work.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _generate(cfg: DataConfig, work: Path, wanted: dict[str, Any]) -> None:
    started = time.monotonic()
    bounds = split_bounds(cfg.split, cfg.sample.rows)
    model = HiddenModel(cfg.sample)
    dense = tuple(f"I{i + 1}" for i in range(cfg.sample.dense))
    sparse = sample_columns(cfg.sample)
    names = tuple(column.name for column in sparse)
    writers = {name: PartWriter(work / name / "part-00000.parquet") for name in bounds}
    aucs = {name: _Auc() for name in bounds}
    for chunk in range(-(-bounds["test"][1] // _CHUNK)):
        rng = random_stream(cfg.sample.seed, 2, chunk)
        numbers, ids, probability = model.draw(rng, _CHUNK)
        labels = (rng.random(_CHUNK) < probability).astype(np.float32)
        columns = [labels, *numbers.T, *ids]
        table = pa.table(dict(zip((LABEL, *dense, *names), map(np.ascontiguousarray, columns), strict=True)))
        for name, (a, b) in _ranges(bounds, chunk):
            writers[name].write(table.slice(a, b - a))
            aucs[name].add(probability[a:b], labels[a:b])
    for writer in writers.values():
        writer.close()
    seconds = time.monotonic() - started
    rows = {name: writer.rows for name, writer in writers.items()}
    report = {
        "rows": rows,
        "positives": {name: auc.positives for name, auc in aucs.items()},
        "cardinalities": dict(zip(names, model.rows, strict=True)),
        "table_rows": sum(model.rows),
        "seconds": seconds,
        "rows_per_s": sum(rows.values()) / seconds,
    }
    best = {name: auc.value() for name, auc in aucs.items() if rows[name]}
    save_schema(work, DatasetSchema(dense, sparse, rows, best, wanted, report))


def _ranges(bounds: Bounds, chunk: int) -> list[tuple[str, tuple[int, int]]]:
    """Which rows of a chunk belong to which split."""
    first = chunk * _CHUNK
    cut = {name: (max(lo - first, 0), min(hi - first, _CHUNK)) for name, (lo, hi) in bounds.items()}
    return [(name, (a, b)) for name, (a, b) in cut.items() if a < b]


class _Auc:
    """AUC of probabilities against labels in bounded memory; probabilities equal to 2^-20 count as ties."""

    def __init__(self) -> None:
        self._positive: NDArray[np.int64] = np.zeros(_AUC_BINS, np.int64)
        self._all: NDArray[np.int64] = np.zeros(_AUC_BINS, np.int64)

    @property
    def positives(self) -> int:
        return int(self._positive.sum())

    def add(self, probability: NDArray[np.float64], labels: NDArray[np.float32]) -> None:
        at = np.minimum((probability * _AUC_BINS).astype(np.int64), _AUC_BINS - 1)
        self._all += np.bincount(at, minlength=_AUC_BINS)
        self._positive += np.bincount(at[labels > 0], minlength=_AUC_BINS)

    def value(self) -> float:
        negative = self._all - self._positive
        below = np.cumsum(negative) - negative / 2
        pairs = float(self._positive.sum()) * float(negative.sum())
        return float((self._positive * below).sum() / pairs) if pairs else 0.5
