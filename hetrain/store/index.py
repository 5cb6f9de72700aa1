"""From row to slot. A dense array now; a hashed index may take its place for tables far beyond memory."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ABSENT = -1


class ArrayIndex:
    """Slot of every row, 4 bytes a row. Repeated indices assign in order, as numpy defines: the last one stays."""

    def __init__(self, rows: int) -> None:
        self._slot = np.full(rows, ABSENT, dtype=np.int32)

    def find(self, rows: Ints) -> Ints:
        """Slot of each row, ABSENT (-1) where it has none; [n] to [n] int64."""
        return self._slot[rows].astype(np.int64)

    def insert(self, rows: Ints, slots: Ints) -> tuple[Ints, Ints]:
        """Give each distinct row among `rows` [m] (all absent, repeats allowed) one of `slots` [>= distinct].

        Returns (slot of each of `rows` [m], the distinct rows [u] in the order of their last occurrence); distinct
        row i got slots[i]. Linear: rows write their position, and the position that stays speaks for the row.
        Raises ValueError, with the index as it was, when there are too few slots.
        """
        position = np.arange(len(rows), dtype=np.int32)
        self._slot[rows] = position
        distinct = rows[self._slot[rows] == position]
        if len(distinct) > len(slots):
            self._slot[distinct] = ABSENT
            raise ValueError(f"{len(distinct)} new rows, but {len(slots)} free slots: the batch is larger than planned")
        self._slot[distinct] = slots[: len(distinct)]
        return self.find(rows), distinct

    def assign(self, rows: Ints, slots: Ints) -> None:
        """Set the slots of distinct `rows` [m]."""
        self._slot[rows] = slots

    def remove(self, rows: Ints) -> None:
        """Make `rows` absent."""
        self._slot[rows] = ABSENT
