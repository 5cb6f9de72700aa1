"""`hetrain stats`: one pass over the training rows of a data set, and what is saved beside it.

stats.json holds, for every sparse column and for all together, what is shown on the screen; and for the planner
`spectrum` (groups of ids and their lookups) and `row_quantiles` (the rows below which k / 256 of the lookups go).
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hetrain.data.columns import Columns
from hetrain.data.fingerprint import differing, fingerprint
from hetrain.data.schema import STATS_FILES, DatasetSchema, load_schema
from hetrain.data.window import Ints
from hetrain.durable import write_text
from hetrain.errors import DataError
from hetrain.json_file import read_json, whole_number
from hetrain.stats.counts import IdCounter
from hetrain.stats.spectrum import Spectrum

FORMAT = 1
SPLIT = "train"
TOP = (0.001, 0.01, 0.1)  # shares of the ids that are looked up at all
BATCHES = tuple(1 << n for n in range(7, 17))  # examples: 128 to 65,536
CACHES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # shares of the rows
QUANTILES = 256

Stats = dict[str, Any]


def stats_file(path: str | Path) -> Path:
    """Where the stats of the data set at `path` are."""
    return Path(path) / STATS_FILES[0]


def measure(path: str | Path) -> Stats:
    """Count the training rows of the data set at `path`. Memory: see IdCounter; DataError as training would raise."""
    schema = load_schema(path)
    split = schema.used_split(SPLIT)
    counters = [IdCounter(column.rows) for column in schema.sparse]
    empty = [0] * len(counters)
    for ids_of_columns in _blocks(Columns(path, split, schema), schema):
        for number, (ids, bags) in enumerate(ids_of_columns):
            counters[number].add(ids)
            empty[number] += bags
    examples = schema.splits[split]
    columns, spectra = [], []
    for column, counter, bags in zip(schema.sparse, counters, empty, strict=True):
        found, spectrum = _of_column(counter, column.rows, examples)
        columns.append({"name": column.name, "rows": column.rows, "multi_hot": column.multi_hot, **found})
        columns[-1]["empty_bags"] = bags
        spectra.append(spectrum)
    return {
        "format": FORMAT,
        "split": split,
        "examples": examples,
        "fingerprint": fingerprint(path, schema, (split,)),
        "all": _of_all(columns, Spectrum.joined(spectra)),
        "columns": columns,
    }


def _blocks(columns: Columns, schema: DatasetSchema) -> Iterator[list[tuple[Ints, int]]]:
    """For every row group: the ids of each sparse column, and how many of its bags are empty."""
    for block, size in enumerate(columns.block_sizes):
        window = columns.read(np.array([block]), 0, int(size), None)
        one_hot, multi_hot = iter(window.one_hot), iter(window.multi_hot)
        found: list[tuple[Ints, int]] = []
        for column in schema.sparse:
            if column.multi_hot:
                jagged = next(multi_hot)
                found.append((jagged.values, int((np.diff(jagged.offsets) == 0).sum())))
            else:
                found.append((next(one_hot), 0))
        yield found


def _of_column(counter: IdCounter, rows: int, examples: int) -> tuple[Stats, Spectrum]:
    ids, seen = counter.counted()
    spectrum = Spectrum.of(seen)
    pooling = counter.lookups / examples
    ends = np.cumsum(seen, dtype=np.int64)
    wanted = np.arange(1, QUANTILES) * counter.lookups / QUANTILES
    inner = ids[np.searchsorted(ends, wanted)] + 1 if len(ids) else np.zeros(QUANTILES - 1, np.int64)
    coarse = spectrum.coarse()
    return {
        "lookups": counter.lookups,
        "pooling": pooling,
        "distinct": spectrum.distinct,
        "missing": int(seen[0]) if len(ids) and ids[0] == 0 else 0,
        "top": {str(share): spectrum.share_of_hottest(_part(share, spectrum.distinct)) for share in TOP},
        "unique": {str(batch): spectrum.unique(batch * pooling) for batch in BATCHES},
        "cache": _cache(spectrum, rows),
        "spectrum": [list(pair) for pair in zip(coarse.ids.tolist(), coarse.lookups.tolist(), strict=True)],
        "row_quantiles": [0, *inner.tolist(), rows],
    }, spectrum


def _of_all(columns: list[Stats], spectrum: Spectrum) -> Stats:
    """All tables together: a worker's cache holds the rows of all of them."""
    rows = sum(column["rows"] for column in columns)
    return {
        "rows": rows,
        "lookups": spectrum.total,
        "pooling": sum(column["pooling"] for column in columns),
        "distinct": spectrum.distinct,
        "missing": sum(column["missing"] for column in columns),
        "top": {str(share): spectrum.share_of_hottest(_part(share, spectrum.distinct)) for share in TOP},
        "unique": {str(batch): sum(column["unique"][str(batch)] for column in columns) for batch in BATCHES},
        "cache": _cache(spectrum, rows),
    }


def _cache(spectrum: Spectrum, rows: int) -> Stats:
    """Hits of a cache of a share of the rows: the best possible fixed content, and least recently used."""
    sizes = {str(share): _part(share, rows) for share in CACHES}
    return {
        "share": {share: spectrum.share_of_hottest(size) for share, size in sizes.items()},
        "lru": {share: spectrum.lru_hit_rate(size) for share, size in sizes.items()},
    }


def _part(share: float, whole: int) -> int:
    """A share of `whole`, at least one where there is one."""
    return min(whole, max(1, round(share * whole)))


def save(path: str | Path, stats: Stats) -> Path:
    """Write stats.json beside the data, whole or not at all."""
    file = stats_file(path)
    write_text(file, json.dumps(stats) + "\n")
    return file


def load(path: str | Path, schema: DatasetSchema) -> Stats | None:
    """The stats beside the data set at `path`; None when there are none.

    DataError when they are damaged, or are of other data than lies there now.
    """
    file = stats_file(path)
    if not file.exists():
        return None
    again = f"Make it again with `hetrain stats data.path={path}`, or remove it."
    try:
        stats: Stats = read_json(file)
        if stats["format"] != FORMAT:
            raise DataError(f"{file}: format {stats['format']}, this version reads {FORMAT}. {again}")
        parts = differing(stats["fingerprint"], fingerprint(path, schema, (str(stats["split"]),)))
        if parts:
            raise DataError(f"{file}: was measured on other data than lies there now ({', '.join(parts)}). {again}")
        _check_columns(stats["columns"], schema)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: damaged ({error!r}). {again}") from error
    return stats


def _check_columns(columns: list[Mapping[str, Any]], schema: DatasetSchema) -> None:
    """What the planner reads of every column of the data is there, and can be; ValueError, KeyError or so otherwise."""
    found, wanted = [str(column["name"]) for column in columns], [column.name for column in schema.sparse]
    if found != wanted:
        raise ValueError(f"columns {', '.join(found)}")
    for column, rows in zip(columns, (column.rows for column in schema.sparse), strict=True):
        name, pooling, quantiles = column["name"], column["pooling"], [*map(whole_number, column["row_quantiles"])]
        if column["rows"] != rows:
            raise ValueError(f"column {name}: rows {column['rows']}")
        if not 0 <= float(pooling) < math.inf or not isinstance(column["top"], Mapping):
            raise ValueError(f"column {name}: pooling or top")
        if any(whole_number(ids) < 1 or not 0 < float(lookups) < math.inf for ids, lookups in column["spectrum"]):
            raise ValueError(f"column {name}: spectrum")
        if sorted(quantiles) != quantiles or [*quantiles[:1], *quantiles[1:][-1:]] != [0, rows]:
            raise ValueError(f"column {name}: row_quantiles")
