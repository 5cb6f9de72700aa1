"""`hetrain prepare`: raw Criteo logs -> Parquet, in memory bounded by the vocabulary.

Pass 1 counts the values of the training rows, pass 2 encodes all rows, one part per raw file and
split. Work goes to a hidden folder that is renamed when finished. After a kill, a second run takes up
the vocabulary and every raw file that had been encoded whole. Positions of the split count lines.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hetrain.config import DataConfig
from hetrain.data.background import ahead
from hetrain.data.criteo import DENSE, SPARSE, Rows, blocks, count_lines, parse, raw_files
from hetrain.data.folder import PartWriter, locked, partial_folder
from hetrain.data.sample import ensure_sample
from hetrain.data.schema import LABEL, SPLITS, DatasetSchema, SparseColumn, is_prepared, load_schema, save_schema
from hetrain.data.split import Bounds, needs_total, split_bounds, too_few
from hetrain.data.vocabulary import ValueCounts, Vocabulary, load_vocabulary
from hetrain.errors import ConfigError, DataError, HetrainError

logger = logging.getLogger(__name__)
_LOG_EVERY_S = 10.0


def prepare(cfg: DataConfig, say: Callable[[str], object] = logger.info) -> dict[str, Any]:
    """Make the data set at `data.path` unless it is there already; returns what `hetrain prepare` prints.

    Keys: path, made (False: it was there), rows and positives per split, bad_rows, first_bad_row,
    cardinalities, table_rows, seconds, rows_per_s. Errors: ConfigError, DataError. `say`: told how far it is.
    """
    path = Path(cfg.path)
    if cfg.raw is None and cfg.name == "sample":
        made = ensure_sample(cfg, say=say)
        return {"path": str(path), "made": made, **load_schema(path).report}
    if cfg.on_bad_row not in ("error", "skip"):
        raise ConfigError(f"data.on_bad_row={cfg.on_bad_row}: expected error or skip.")
    files = raw_files(cfg.raw)
    made_from = {
        "kind": "criteo",
        "raw": [[file.name, file.stat().st_size] for file in files],
        "min_count": cfg.min_count,
        "split": asdict(cfg.split),
        "on_bad_row": cfg.on_bad_row,
    }
    with locked(path):
        if _already_made(path, made_from):
            return {"path": str(path), "made": False, **load_schema(path).report}
        work = _work_folder(path, made_from)
        report = _run(_Job(cfg, files, work, say), work, made_from)
        if path.exists():
            path.rmdir()  # empty, or _already_made had refused it
        work.rename(path)
    return {"path": str(path), "made": True, **report}


def _run(job: "_Job", work: Path, made_from: dict[str, Any]) -> dict[str, Any]:
    """Do the job. Work that was refused is removed: what mends it changes the settings or the files."""
    try:
        return job.run(made_from)
    except HetrainError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    except (OSError, KeyboardInterrupt):
        logger.warning("what was done so far is kept in %s: the same command goes on from there", work)
        raise


def _already_made(path: Path, made_from: dict[str, Any]) -> bool:
    if is_prepared(path):
        there = load_schema(path).made_from
        changed = sorted(key for key in {*there, *made_from} if there.get(key) != made_from.get(key))
        if changed:
            raise DataError(
                f"data.path={path}: holds a data set made with other settings ({', '.join(changed)} differ). "
                "Remove it, or choose another data.path."
            )
        return True
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"data.path={path}: exists and is no data set. Remove it, or choose another data.path.")
    return False


def _work_folder(path: Path, made_from: dict[str, Any]) -> Path:
    """The folder of unfinished work: what a killed run with equal settings left, else a new one."""
    work, settings = partial_folder(path), json.dumps(made_from)
    mark = work / "made_from.json"
    if work.exists() and not (mark.exists() and mark.read_text() == settings):
        shutil.rmtree(work)
    work.mkdir(exist_ok=True)
    mark.write_text(settings)
    return work


class _Job:
    """One run of `prepare` in the folder `work`."""

    def __init__(self, cfg: DataConfig, files: list[Path], work: Path, say: Callable[[str], object]) -> None:
        self._cfg, self._files, self._work, self._say = cfg, files, work, say
        self._started = self._logged = time.monotonic()

    def run(self, made_from: dict[str, Any]) -> dict[str, Any]:
        total = self._count_all() if needs_total(self._cfg.split) else None
        if total == 0:
            raise DataError(f"data.raw={self._cfg.raw}: there is no line in it ({self._files[0]}).")
        bounds = self._bounds(total)
        vocabularies = self._vocabularies(bounds["train"][1])
        done: list[dict[str, Any]] = []
        first = 0
        for index, file in enumerate(self._files):
            if first < bounds["test"][1]:
                done.append(self._encoded(index, file, first, bounds, vocabularies))
                first += done[-1]["lines"]
        if first < bounds["test"][1]:
            raise too_few(self._cfg.split, first)
        report = self._report(done, vocabularies)
        empty = [name for name in ("train", "test") if not report["rows"][name]]
        if empty:
            raise DataError(
                f"data.raw={self._cfg.raw}: no good row is left to {empty[0]} on. {report['first_bad_row'] or ''}"
            )
        sparse = tuple(SparseColumn(name, vocabularies[name].rows) for name in SPARSE)
        for file in self._work.glob("*.json"):
            file.unlink()
        save_schema(self._work, DatasetSchema(DENSE, sparse, report["rows"], None, made_from, report))
        return report

    def _bounds(self, total: int | None) -> Bounds:
        """The bounds of the splits. Where they do not fit, a bad line is told first: it may be why."""
        try:
            return split_bounds(self._cfg.split, total)
        except DataError:
            for file in self._files:
                for block in blocks(file):
                    self._accept(parse(block))
            raise

    def _count_all(self) -> int:
        return sum(count_lines(file) for file in self._files)

    def _vocabularies(self, train_lines: int) -> dict[str, Vocabulary]:
        """Pass 1, or what it left."""
        folder = self._work / "vocabulary"
        if not folder.exists():
            counts = self._count_values(train_lines)
            unfinished = self._work / "vocabulary.tmp"
            unfinished.mkdir(exist_ok=True)
            for name in SPARSE:
                counts[name].vocabulary(self._cfg.min_count).save(unfinished / f"{name}.parquet")
            unfinished.rename(folder)
        return {name: load_vocabulary(folder / f"{name}.parquet") for name in SPARSE}

    def _count_values(self, train_lines: int) -> dict[str, ValueCounts]:
        counts = {name: ValueCounts() for name in SPARSE}
        lines = 0
        for file in self._files:
            for block in ahead(blocks(file, train_lines - lines), 1):
                for name, values in zip(SPARSE, self._accept(parse(block)).sparse, strict=True):
                    counts[name].add(values)
                lines += block.lines
                self._progress("counting", lines)
        return counts

    def _accept(self, rows: Rows) -> Rows:
        if rows.first_bad is not None and self._cfg.on_bad_row == "error":
            raise DataError(rows.first_bad)
        return rows

    def _encoded(
        self, index: int, file: Path, first: int, bounds: Bounds, vocabularies: dict[str, Vocabulary]
    ) -> dict[str, Any]:
        """Pass 2 over one raw file whose first line has position `first`, or what it left."""
        mark = self._work / f"encoded-{index:05d}.json"
        if mark.exists():
            result: dict[str, Any] = json.loads(mark.read_text())
            return result
        writers = {name: PartWriter(self._work / name / f"part-{index:05d}.parquet") for name in SPLITS}
        positives = dict.fromkeys(SPLITS, 0)
        lines, bad, first_bad = 0, 0, None
        for block in ahead(blocks(file, bounds["test"][1] - first), 1):
            rows = self._accept(parse(block))
            bad, first_bad = bad + len(rows.bad_lines), first_bad or rows.first_bad
            for name, (lo, hi) in bounds.items():
                part = rows.cut(lo - first, hi - first)
                if len(part.lines):
                    writers[name].write(_table(part, vocabularies))
                    positives[name] += int(part.labels.sum())
            lines += block.lines
            self._progress("encoding", first + lines)
        for writer in writers.values():
            writer.close()
        rows_of = {name: writer.rows for name, writer in writers.items()}
        result = {"lines": lines, "rows": rows_of, "positives": positives, "bad_rows": bad, "first_bad_row": first_bad}
        temporary = mark.with_suffix(".tmp")
        temporary.write_text(json.dumps(result))
        temporary.rename(mark)
        return result

    def _progress(self, what: str, lines: int) -> None:
        now = time.monotonic()
        if now - self._logged > _LOG_EVERY_S:
            self._logged = now
            self._say(f"{what}: {lines:,} lines, {now - self._started:.0f} s")

    def _report(self, done: list[dict[str, Any]], vocabularies: dict[str, Vocabulary]) -> dict[str, Any]:
        rows = {name: sum(part["rows"][name] for part in done) for name in SPLITS}
        seconds = time.monotonic() - self._started
        return {
            "rows": rows,
            "positives": {name: sum(part["positives"][name] for part in done) for name in SPLITS},
            "bad_rows": sum(part["bad_rows"] for part in done),
            "first_bad_row": next((part["first_bad_row"] for part in done if part["first_bad_row"]), None),
            "cardinalities": {name: vocabularies[name].rows for name in SPARSE},
            "table_rows": sum(vocabulary.rows for vocabulary in vocabularies.values()),
            "seconds": seconds,
            "rows_per_s": sum(rows.values()) / seconds,
        }


def _table(rows: Rows, vocabularies: dict[str, Vocabulary]) -> "pa.Table":
    """Encoded rows: label and log(1 + max(x, 0)) as float32, ids as int32."""
    columns: dict[str, Any] = {LABEL: rows.labels.astype(np.float32)}
    for name, numbers in zip(DENSE, rows.dense, strict=True):
        columns[name] = np.log1p(np.maximum(numbers, 0.0)).astype(np.float32)
    for name, values in zip(SPARSE, rows.sparse, strict=True):
        columns[name] = vocabularies[name].encode(values)
    return pa.table(columns)
