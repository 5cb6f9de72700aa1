"""`data=sample`: a generated data set of Criteo's shape whose best reachable AUC is known."""

import logging
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hetrain.config import DataConfig
from hetrain.data.folder import PartWriter, locked, partial_folder
from hetrain.data.hidden import HiddenModel, random_stream
from hetrain.data.schema import LABEL, DatasetSchema, SparseColumn, is_prepared, load_schema, save_schema
from hetrain.data.split import Bounds, split_bounds
from hetrain.errors import DataError

logger = logging.getLogger(__name__)
VERSION = 1  # raise it when the same settings give other rows
_CHUNK = 65_536  # rows drawn from one random stream
_AUC_BINS = 1 << 20


def ensure_sample(cfg: DataConfig) -> bool:
    """Make the sample at `data.path` unless it is there; whether it was made now.

    Any number of processes may ask at once: one makes it, the others wait. A sample made with other
    settings is replaced, with a line saying so, since it can be had again; anything else is left alone
    and refused with a DataError.
    """
    path = Path(cfg.path)
    made_from: dict[str, Any] = {
        "kind": "sample",
        "version": VERSION,
        "sample": asdict(cfg.sample),
        "split": asdict(cfg.split),
    }
    if _is_there(path, made_from):
        return False
    with locked(path):
        if _is_there(path, made_from):  # another process made it while this one waited
            return False
        work = partial_folder(path)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        _generate(cfg, work, made_from)
        _publish(work, path)
    return True


def _is_there(path: Path, made_from: dict[str, Any]) -> bool:
    if is_prepared(path):
        there = load_schema(path).made_from
        if there.get("kind") != "sample":
            raise DataError(
                f"data.path={path}: holds a data set that is not a sample. Choose another data.path, "
                "or read it with data=criteo."
            )
        return there == made_from
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"data.path={path}: exists and is no data set. Remove it, or choose another data.path.")
    return False


def _publish(work: Path, path: Path) -> None:
    old = path.parent / f".{path.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        if is_prepared(path):
            logger.warning("data.path=%s: the sample there had other settings; it was made anew", path)
        path.rename(old)
    work.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _generate(cfg: DataConfig, work: Path, made_from: dict[str, Any]) -> None:
    started = time.monotonic()
    bounds = split_bounds(cfg.split, cfg.sample.rows)
    model = HiddenModel(cfg.sample)
    dense = tuple(f"I{i + 1}" for i in range(cfg.sample.dense))
    names = tuple(f"C{i + 1}" for i in range(len(model.rows)))
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
    sparse = tuple(SparseColumn(name, k) for name, k in zip(names, model.rows, strict=True))
    save_schema(work, DatasetSchema(dense, sparse, rows, best, made_from, report))


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
