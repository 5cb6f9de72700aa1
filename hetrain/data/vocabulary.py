"""Ids of categorical values: 0 = unseen or missing, 1 .. by descending count, equal counts by value.

A value of at most 8 bytes is kept as a 64-bit key, its bytes padded with zeros, the first one most
significant: keys sort as the values do. Memory is 16 bytes per distinct value and column while
counting, 12 while encoding.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
_KEY_BYTES = 8
_MERGE_AT = 1 << 18  # keys collected before they are merged, at least


def keys_of(values: "pa.BinaryArray") -> Keys:
    """[n] keys of values of 1 to 8 bytes, none of them null."""
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    if not len(values) or not len(data):
        return np.zeros(len(values), np.uint64)
    column = np.arange(_KEY_BYTES)
    source = np.minimum(offsets[:-1, None] + column, len(data) - 1)
    padded = np.where(column < np.diff(offsets)[:, None], data[source], np.uint8(0))
    return np.ascontiguousarray(padded).view(">u8").ravel().astype(np.uint64)


def values_of(keys: Keys) -> "pa.Array":
    """[n] binary values; inverse of `keys_of`."""
    return pa.array(keys.astype(">u8").view("S8").tolist(), pa.binary())


class ValueCounts:
    """How often each value of one column was seen."""

    def __init__(self) -> None:
        self._keys: Keys = np.zeros(0, np.uint64)
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._pending: list[tuple[Keys, NDArray[np.int64]]] = []
        self._pending_keys = 0

    def add(self, values: "pa.BinaryArray") -> None:
        """Count values; null is missing and not counted."""
        counted = values.drop_null().value_counts()
        keys = keys_of(counted.field("values"))
        self._pending.append((keys, np.asarray(counted.field("counts"))))
        self._pending_keys += len(keys)
        if self._pending_keys > max(_MERGE_AT, len(self._keys)):  # so that merging costs a constant per key
            self._merge()

    def _merge(self) -> None:
        keys = np.concatenate([self._keys, *(keys for keys, _ in self._pending)])
        counts = np.concatenate([self._counts, *(counts for _, counts in self._pending)])
        self._pending, self._pending_keys = [], 0
        order = np.argsort(keys, kind="stable")
        keys, counts = keys[order], counts[order]
        starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]]) if len(keys) else np.zeros(0, np.int64)
        self._keys = keys[starts]
        self._counts = np.add.reduceat(counts, starts) if len(keys) else counts

    def vocabulary(self, min_count: int) -> "Vocabulary":
        """Ids of the values seen at least `min_count` times."""
        self._merge()
        kept = self._counts >= min_count
        keys, counts = self._keys[kept], self._counts[kept]
        order = np.lexsort((keys, -counts))
        return Vocabulary(keys[order], counts[order])


class Vocabulary:
    """The values of one column in the order of their ids, which begin at 1."""

    def __init__(self, keys: Keys, counts: NDArray[np.int64]) -> None:
        self.keys = keys  # [V]
        self.counts = counts  # [V] in the training rows
        order = np.argsort(keys)
        self._sorted = keys[order]
        self._ids = (order + 1).astype(np.int32)

    @property
    def rows(self) -> int:
        """Rows of an embedding table over this column, id 0 included."""
        return len(self.keys) + 1

    def encode(self, values: "pa.BinaryArray") -> NDArray[np.int32]:
        """[n] ids of [n] values; null and unseen 0."""
        encoded = values.dictionary_encode()
        distinct = np.append(self._lookup(keys_of(encoded.dictionary)), np.int32(0))
        indices: NDArray[np.int32] = np.asarray(encoded.indices.fill_null(len(distinct) - 1))
        return distinct[indices]

    def _lookup(self, keys: Keys) -> NDArray[np.int32]:
        if not len(self.keys):
            return np.zeros(len(keys), np.int32)
        order = np.argsort(keys)  # neighbouring searches then share their cache lines
        found = np.empty(len(keys), np.int64)
        found[order] = np.searchsorted(self._sorted, keys[order])
        found = np.minimum(found, len(self._sorted) - 1)
        return np.where(self._sorted[found] == keys, self._ids[found], np.int32(0))

    def save(self, file: Path) -> None:
        """Write values and counts, in the order of the ids, to a Parquet file."""
        table = pa.table({"value": values_of(self.keys).cast(pa.binary()), "count": self.counts})
        pq.write_table(table, file, compression="zstd")


def load_vocabulary(file: Path) -> Vocabulary:
    """Inverse of `Vocabulary.save`."""
    table = pq.read_table(file)
    return Vocabulary(keys_of(table.column("value").combine_chunks()), np.asarray(table.column("count")))
