"""Counts how often every id of a sparse column is looked up, block by block, never row by row."""

import numpy as np
from numpy.typing import NDArray

from hetrain.data.window import Ints

DIRECT_ROWS = 1 << 27  # tables up to this size are counted in an array of 4 bytes per row (512 MiB)
MERGE_AT = 1 << 20  # ids gathered before they are sorted and merged, at least
MOST = 1 << 32

Counts = NDArray[np.integer]


class IdCounter:
    """Lookups of every id of one column. Memory: 4 bytes per row of the table, or 16 per distinct id of a huge one."""

    def __init__(self, rows: int) -> None:
        self.lookups = 0
        self._rows = rows
        self._direct: Counts | None = np.zeros(rows, np.uint32) if rows <= DIRECT_ROWS else None
        self._ids: Ints = np.zeros(0, np.int64)  # sorted, with `_seen` lookups each
        self._seen: Ints = np.zeros(0, np.int64)
        self._waiting: list[Ints] = []
        self._waits = 0

    def add(self, ids: Ints) -> None:
        """Count the lookups `ids` [n], each in [0, rows)."""
        self.lookups += len(ids)
        if self._direct is None:
            self._waiting.append(ids)
            self._waits += len(ids)
            if self._waits >= max(MERGE_AT, len(self._ids)):  # so every id is merged a few times, not once per block
                self._merge()
            return
        if self.lookups >= MOST and self._direct.dtype == np.uint32:
            self._direct = self._direct.astype(np.int64)
        if self._rows <= len(ids):
            self._direct += np.bincount(ids, minlength=self._rows).astype(self._direct.dtype)
        else:
            np.add.at(self._direct, ids, self._direct.dtype.type(1))

    def _merge(self) -> None:
        ids, seen = np.unique(np.concatenate(self._waiting), return_counts=True)
        every, seen = np.concatenate([self._ids, ids]), np.concatenate([self._seen, seen])
        self._ids, place = np.unique(every, return_inverse=True)
        self._seen = np.zeros(len(self._ids), np.int64)
        np.add.at(self._seen, place, seen)
        self._waiting, self._waits = [], 0

    def counted(self) -> tuple[Ints, Counts]:
        """The ids that were looked up, ascending, and how often each was."""
        if self._direct is None:
            if self._waiting:
                self._merge()
            return self._ids, self._seen
        ids = np.flatnonzero(self._direct)
        return ids, self._direct[ids]
