"""Decodes the row groups of one split and hands out windows of the sequence an epoch reads them in."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hetrain.data.schema import LABEL, DatasetSchema, SparseColumn, split_files
from hetrain.data.window import Floats, Ints, Jagged, Window, join_jagged
from hetrain.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True)
class _Block:
    """One decoded row group, columns as Parquet gave them (no copy where the type fits)."""

    labels: Floats
    dense: list[Floats]
    one_hot: list[Array]  # int32 or int64
    multi_hot: list[Jagged]


class Columns:
    """The Parquet files of one split, opened. Not safe to share between threads."""

    def __init__(self, path: str | Path, split: str, schema: DatasetSchema) -> None:
        self._schema = schema
        self._names = [LABEL, *schema.dense, *(column.name for column in schema.sparse)]
        self._groups: list[tuple[pq.ParquetFile, Path, int, int]] = []  # file, its path, group, first row in the file
        sizes: list[int] = []
        for file in split_files(path, split):
            opened = self._open(file)
            first = 0
            for group in range(opened.metadata.num_row_groups):
                self._groups.append((opened, file, group, first))
                sizes.append(opened.metadata.row_group(group).num_rows)
                first += sizes[-1]
        self.block_sizes: Ints = np.array(sizes, np.int64)
        self.examples = int(self.block_sizes.sum())
        if self.examples != schema.splits[split]:
            raise DataError(
                f"{Path(path) / split}: holds {self.examples} rows, schema.json says {schema.splits[split]}. "
                f"Files are missing or foreign: remove {path} and prepare it again."
            )
        self._last: tuple[int, _Block] | None = None  # the block two neighbouring windows share

    def _open(self, file: Path) -> "pq.ParquetFile":
        try:
            opened = pq.ParquetFile(file, memory_map=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a readable Parquet file ({error}). Prepare the data again.") from error
        missing = set(self._names) - set(opened.schema_arrow.names)
        if missing:
            raise DataError(f"{file}: columns {sorted(missing)} of schema.json are missing. Prepare the data again.")
        return opened

    def read(self, block_order: Ints, lo: int, hi: int, order: Ints | None) -> Window:
        """Examples lo .. hi of the sequence of blocks in `block_order`, then taken in `order` (None: as they are)."""
        ends = np.cumsum(self.block_sizes[block_order])
        first, last = int(np.searchsorted(ends, lo, "right")), int(np.searchsorted(ends, hi, "left"))
        parts: list[tuple[_Block, slice]] = []
        for at in range(first, last + 1):
            block = int(block_order[at])
            start = int(ends[at] - self.block_sizes[block])
            parts.append((self._block(block), slice(max(lo - start, 0), min(hi, int(ends[at])) - start)))
        return self._window(parts, order)

    def _window(self, parts: Sequence[tuple[_Block, slice]], order: Ints | None) -> Window:
        def gather(columns: Sequence[Array]) -> Array:
            column = columns[0] if len(columns) == 1 else np.concatenate(columns)
            return column if order is None else column.take(order)

        labels = gather([block.labels[rows] for block, rows in parts])
        if not labels.flags.writeable:  # Parquet's own memory: torch wants to own what it gets
            labels = labels.copy()
        dense = np.empty((len(labels), len(self._schema.dense)), np.float32)
        for i in range(dense.shape[1]):
            dense[:, i] = gather([block.dense[i][rows] for block, rows in parts])
        one_hot = np.empty((len(parts[0][0].one_hot), len(labels)), np.int64)
        for f in range(len(one_hot)):
            one_hot[f] = gather([block.one_hot[f][rows] for block, rows in parts])
        multi_hot = []
        for f in range(len(parts[0][0].multi_hot)):
            joined = join_jagged([block.multi_hot[f].cut(rows.start, rows.stop) for block, rows in parts])
            multi_hot.append(joined if order is None else joined.take(order))
        return Window(labels, dense, one_hot, tuple(multi_hot))

    def _block(self, index: int) -> _Block:
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        opened, file, group, first = self._groups[index]
        try:
            table = opened.read_row_group(group, columns=self._names, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{file}: row group {group} cannot be decoded ({error}). Prepare the data again."
            ) from error
        where = _Where(file, first)
        labels = _floats(table.column(LABEL), where.of(LABEL))
        _refuse(where.of(LABEL), labels, ~((labels >= 0) & (labels <= 1)), "a label from 0 to 1")
        dense = [_floats(table.column(name), where.of(name)) for name in self._schema.dense]
        one_hot, multi_hot = [], []
        for column in self._schema.sparse:
            data, at = table.column(column.name), where.of(column.name)
            if column.multi_hot:
                multi_hot.append(_lists(data, column, at))
            else:
                one_hot.append(_ids(data, column, at))
        block = _Block(labels, dense, one_hot, multi_hot)
        self._last = (index, block)
        return block


@dataclass(frozen=True)
class _Where:
    """Where a value stands, for messages."""

    file: Path
    first_row: int
    column: str = ""

    def of(self, column: str) -> "_Where":
        return _Where(self.file, self.first_row, column)

    def error(self, row: int, value: object, expected: str) -> DataError:
        return DataError(
            f"{self.file}: row {self.first_row + row}, column {self.column}: {value}, expected {expected}. "
            "Prepare the data again, or mend the program that wrote this file."
        )


def _refuse(where: _Where, values: Array, bad: Array, expected: str, offsets: Ints | None = None) -> None:
    """Raise for the first `bad` value. `offsets` maps values to rows when a row holds several."""
    if bad.any():
        at = int(np.argmax(bad))
        row = at if offsets is None else int(np.searchsorted(offsets, at, "right")) - 1
        raise where.error(row, values[at], expected)


def _flat(data: "pa.ChunkedArray", where: _Where) -> "pa.Array":
    """The column as one array without missing values."""
    array = data.combine_chunks() if data.num_chunks != 1 else data.chunk(0)
    if array.null_count:
        raise where.error(int(np.argmax(np.asarray(array.is_null()))), "missing", "a value")
    return array


def _floats(data: "pa.ChunkedArray", where: _Where) -> Floats:
    array = _flat(data, where)
    if not (pa.types.is_floating(array.type) or pa.types.is_integer(array.type)):
        raise where.error(0, f"type {array.type}", "a column of numbers")
    values: Floats = array.to_numpy().astype(np.float32, copy=False)
    if len(values) and not (np.isfinite(values.min()) and np.isfinite(values.max())):  # min and max carry NaN
        _refuse(where, values, ~np.isfinite(values), "a finite number")
    return values


def _ids(data: "pa.ChunkedArray | pa.Array", column: SparseColumn, where: _Where) -> Array:
    array = _flat(data, where)
    if not pa.types.is_integer(array.type):
        raise where.error(0, f"type {array.type}", "a column of integers")
    values: Array = array.to_numpy()
    _check_range(values, column, where, None)
    return values


def _check_range(values: Array, column: SparseColumn, where: _Where, offsets: Ints | None) -> None:
    """Ids outside the table would reach kernels that read foreign memory or row 0."""
    if len(values) and not (values.min() >= 0 and values.max() < column.rows):
        _refuse(where, values, (values < 0) | (values >= column.rows), f"an id from 0 to {column.rows - 1}", offsets)


def _lists(data: "pa.ChunkedArray", column: SparseColumn, where: _Where) -> Jagged:
    array = _flat(data, where)
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise where.error(0, f"type {array.type}", "a column of lists of integers")
    inner = array.flatten()
    if inner.null_count or not pa.types.is_integer(inner.type):
        raise where.error(0, f"type {array.type}, {inner.null_count} missing", "lists of integers without missing ones")
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = inner.to_numpy().astype(np.int64, copy=False)
    offsets -= offsets[0]
    _check_range(values, column, where, offsets)
    return Jagged(values, offsets)
