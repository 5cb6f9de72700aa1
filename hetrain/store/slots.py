"""Which row lies in which slot of a cache, and which slots are free."""

from typing import Any

import numpy as np
import torch

from hetrain.store.index import Ints, make_index

FREE = -1


class Slots:
    """An index from row to slot, its inverse, and a stack of free slots."""

    def __init__(self, rows: int, slots: int, index: str) -> None:
        """`rows`: of the row space; `slots`: there are so many; `index`: array | hash."""
        self._index = make_index(index, rows, slots)
        self.row = np.full(slots, FREE, np.int64)  # row in each slot
        self._free = np.arange(slots - 1, -1, -1)  # a stack: the first `_free_count` are free
        self._free_count = slots
        self._mark = np.empty(slots, np.int32)

    @property
    def held(self) -> int:
        """Slots with a row."""
        return len(self._free) - self._free_count

    def find(self, rows: Ints) -> Ints:
        """Slot of each row, -1 where it has none; [n] to [n]."""
        return self._index.find(rows)

    def take(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """Slot of every lookup [n], and the rows [m] that got a slot just now with their slots [m].

        Raises ValueError when there are too few slots.
        """
        slots = self._index.find(rows)
        absent = np.flatnonzero(slots < 0)
        if len(absent) == 0:
            return slots, absent, absent
        free = self._free[: self._free_count][::-1]
        slots[absent], new_rows = self._index.insert(rows[absent], free)
        new_slots = free[: len(new_rows)].copy()
        self._free_count -= len(new_rows)
        self.row[new_slots] = new_rows
        return slots, new_rows, new_slots

    def last_lookups(self, slots: Ints) -> Ints:
        """Positions [U] of the last lookup of each distinct slot, ascending; linear, as in ArrayIndex.insert."""
        position = np.arange(len(slots), dtype=np.int32)
        self._mark[slots] = position
        return np.flatnonzero(self._mark[slots] == position)

    def release(self, slots: Ints) -> None:
        """Free `slots` [k]."""
        self._index.remove(self.row[slots])
        self.row[slots] = FREE
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def grow(self, slots: int) -> None:
        """Make it `slots` in all; the new ones are taken last."""
        old = len(self.row)
        self.row = np.concatenate([self.row, np.full(slots - old, FREE, np.int64)])
        self._free = np.concatenate(
            [np.arange(slots - 1, old - 1, -1), self._free[: self._free_count], np.empty(self.held, np.int64)]
        )
        self._free_count += slots - old
        self._mark = np.empty(slots, np.int32)

    def state_dict(self) -> dict[str, Any]:
        """The slots with a row, their rows, and the free ones in order."""
        slots = np.flatnonzero(self.row >= 0)
        free = torch.from_numpy(self._free[: self._free_count].copy())
        return {"slots": torch.from_numpy(slots), "rows": torch.from_numpy(self.row[slots]), "free": free}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, after every slot was released."""
        slots = state["slots"].numpy()
        self.row[slots] = state["rows"].numpy()
        self._index.assign(self.row[slots], slots)
        self._free_count = len(state["free"])
        self._free[: self._free_count] = state["free"].numpy()
