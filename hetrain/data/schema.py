"""What a prepared data set holds: the `schema.json` beside its Parquet files.

Layout of a data set folder: `schema.json`, `<split>/part-*.parquet` and, when it was made from raw
logs, `vocabulary/<column>.parquet`. The folder is renamed into place whole, so a folder with a
schema.json is a finished data set.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hetrain.errors import DataError
from hetrain.json_file import read_json, whole_number

FORMAT = 1
SPLITS = ("train", "validation", "test")
LABEL = "label"
MOST_ROWS = 1 << 40  # of a table: offsets of tables then stay far inside of int64
SCHEMA_FILE = "schema.json"
STATS_FILES = ("stats.json", "stats.html")  # what `hetrain stats` leaves beside it, and can make again


@dataclass(frozen=True)
class SparseColumn:
    """One categorical column: ids in [0, rows); `multi_hot` columns hold a list of ids per example."""

    name: str
    rows: int
    multi_hot: bool = False


@dataclass(frozen=True)
class DatasetSchema:
    """Columns, examples per split and, for generated data, the AUC of the true probabilities."""

    dense: tuple[str, ...]
    sparse: tuple[SparseColumn, ...]
    splits: dict[str, int]
    best_auc: dict[str, float] | None = None
    made_from: dict[str, Any] = field(default_factory=dict)  # the settings it was made with
    report: dict[str, Any] = field(default_factory=dict)  # what making it counted

    def used_split(self, split: str) -> str:
        """The split that is read when `split` is asked for: an empty validation split falls back to test."""
        if split not in SPLITS:
            raise DataError(f"split={split}: expected one of {', '.join(SPLITS)}.")
        if split == "validation" and self.splits.get("validation", 0) == 0:
            split = "test"
        if self.splits.get(split, 0) == 0:
            raise DataError(
                f"split={split}: this data set has no rows in it (splits: {self.splits}). "
                "Give it a share in data.split and prepare the data again."
            )
        return split


def split_files(path: str | Path, split: str) -> list[Path]:
    """The Parquet files of one split, in order."""
    return sorted((Path(path) / split).glob("part-*.parquet"))


def is_prepared(path: str | Path) -> bool:
    """Whether a finished data set lies at `path`."""
    return (Path(path) / SCHEMA_FILE).exists()


def save_schema(path: str | Path, schema: DatasetSchema) -> None:
    """Write `schema.json` into the folder `path`."""
    text = json.dumps({"format": FORMAT, **asdict(schema)}, indent=2)
    (Path(path) / SCHEMA_FILE).write_text(text + "\n")


def load_schema(path: str | Path) -> DatasetSchema:
    """The schema of the data set at `path`; DataError when there is none or it cannot be read."""
    file = Path(path) / SCHEMA_FILE
    if not file.exists():
        raise DataError(
            f"data.path={path}: no prepared data set there. Make one with "
            f"`hetrain prepare data=criteo data.raw=FILE_OR_GLOB data.path={path}`, or use data=sample."
        )
    try:
        raw = read_json(file)
        if raw["format"] != FORMAT:
            raise DataError(
                f"{file}: format {raw['format']}, this version reads {FORMAT}. Remove {path} and prepare it again."
            )
        schema = DatasetSchema(
            dense=tuple(raw["dense"]),
            sparse=tuple(SparseColumn(**column) for column in raw["sparse"]),
            splits={name: whole_number(rows) for name, rows in raw["splits"].items()},
            best_auc=raw.get("best_auc"),
            made_from=raw.get("made_from", {}),
            report=raw.get("report", {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: damaged ({error!r}). Remove {path} and prepare it again.") from error
    for fault in _faults(schema):
        raise DataError(f"{file}: {fault}. Mend it, or remove {path} and prepare it again.")
    return schema


def _faults(schema: DatasetSchema) -> Iterator[str]:
    """What no model can be built on."""
    names = [LABEL, *schema.dense, *(column.name for column in schema.sparse)]
    if not all(type(name) is str and name for name in names):
        yield "a column's name is no text"
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        yield f"the columns {', '.join(twice)} are there twice"
    if not schema.sparse:
        yield "there are no sparse columns, so there is nothing to embed"
    for column in schema.sparse:
        if "." in column.name:
            yield f"column {column.name}: a sparse column's name must hold no '.', as PyTorch names modules by it"
        if type(column.rows) is not int or not 0 < column.rows <= MOST_ROWS:
            yield f"column {column.name}: rows={column.rows!r}, expected a whole number from 1 to 2^40"
        if column.multi_hot not in (True, False):
            yield f"column {column.name}: multi_hot={column.multi_hot!r}, expected true or false"
    for split, rows in schema.splits.items():
        if split not in SPLITS or rows < 0:
            yield f"splits: {split}={rows}, expected the rows of {', '.join(SPLITS)}"
