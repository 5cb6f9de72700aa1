"""From row to slot: a dense array, or a hash table whose memory follows the rows held, for tables beyond memory.

Both are written as compiled loops over a batch's rows, so that a look-up costs nanoseconds and other threads go on
meanwhile. Repeated rows in `insert` are ordered by their last occurrence in both, so that either gives equal results.
"""

from typing import Any, Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetrain.errors import ConfigError
from hetrain.store.mix import mix

Ints = NDArray[np.int64]
ABSENT = -1
_TAKEN = -2  # while `insert` counts the distinct rows, a new row holds _TAKEN, in a hash table _TAKEN - its number


class Index(Protocol):
    """What the cache and the owner ask of an index. Rows and slots are int64 numpy arrays, at least 0."""

    def find(self, rows: Ints) -> Ints:
        """Slot of each row, ABSENT (-1) where it has none; [n] to [n] int64. Raises IndexError for a row outside."""
        ...

    def insert(self, rows: Ints, slots: Ints) -> tuple[Ints, Ints]:
        """Give each distinct row among `rows` [m] (all absent, repeats allowed) one of `slots` [>= distinct].

        Returns (slot of each of `rows` [m], the distinct rows [u] in the order of their last occurrence); distinct
        row i got slots[i]. Raises ValueError, with the index as it was, when there are too few slots.
        """
        ...

    def assign(self, rows: Ints, slots: Ints) -> None:
        """Set the slots of distinct `rows` [m], held or not."""
        ...

    def remove(self, rows: Ints) -> None:
        """Make `rows` absent."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes now."""
        ...


def make_index(kind: str, rows: int, slots: int) -> Index:
    """An index of rows 0 .. `rows`, of which about `slots` are held at a time. Raises ConfigError for another kind."""
    if kind == "array":
        return ArrayIndex(rows)
    if kind == "hash":
        return HashIndex(slots)
    raise ConfigError(f"store.index={kind}: expected array or hash. Use hash for tables far larger than memory.")


def _too_few(rows: Ints, slots: int) -> ValueError:
    """The error of `insert`, counting the distinct rows only now."""
    distinct = len(np.unique(rows))
    return ValueError(f"{distinct} new rows, but {slots} free slots: the batch is larger than planned")


class ArrayIndex:
    """Slot of every row in a dense array, 4 bytes a row."""

    def __init__(self, rows: int) -> None:
        self._slot = np.full(rows, ABSENT, dtype=np.int32)

    def find(self, rows: Ints) -> Ints:
        """See Index."""
        slots: Ints = _array_find(self._slot, rows)
        return slots

    def insert(self, rows: Ints, slots: Ints) -> tuple[Ints, Ints]:
        """See Index."""
        found, distinct, fits = _array_insert(self._slot, rows, np.ascontiguousarray(slots[: len(rows)]))
        if not fits:
            raise _too_few(rows, len(slots))
        return found, distinct

    def assign(self, rows: Ints, slots: Ints) -> None:
        """See Index."""
        self._slot[rows] = slots

    def remove(self, rows: Ints) -> None:
        """See Index."""
        self._slot[rows] = ABSENT

    @property
    def nbytes(self) -> int:
        """See Index."""
        return self._slot.nbytes


@njit(cache=True, nogil=True)
def _array_find(slot: Any, rows: Any) -> Any:
    out = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        row = rows[i]
        if row < 0 or row >= len(slot):
            raise IndexError("a row beyond the index")
        out[i] = slot[row]
    return out


@njit(cache=True, nogil=True)
def _array_insert(slot: Any, rows: Any, slots: Any) -> Any:
    """From the last row to the first: a row met the first time is distinct. Then numbers become slots."""
    m = len(rows)
    order = np.empty(m, np.int64)  # distinct rows, last occurrence first
    u = 0
    for i in range(m - 1, -1, -1):
        row = rows[i]
        if row < 0 or row >= len(slot):
            raise IndexError("a row beyond the index")
        if slot[row] == ABSENT:
            slot[row] = _TAKEN
            order[u] = row
            u += 1
    out, fits = np.empty(m, np.int64), u <= len(slots)
    for k in range(u):
        slot[order[k]] = slots[u - 1 - k] if fits else ABSENT
    for i in range(m):
        out[i] = slot[rows[i]]
    return out, order[:u][::-1].copy(), fits


class HashIndex:
    """Open addressing with linear probing over [places, 2] int64 (row, slot): 24 to 48 bytes a row held.

    Grows by doubling to stay at most two thirds full. A removal shifts the rows behind it back, so that the table
    never fills up with marks of what was there, however long rows come and go.
    """

    def __init__(self, expected_rows: int) -> None:
        """Room for `expected_rows` before it first grows."""
        self._table = _empty_table(expected_rows)
        self._held = 0

    def __len__(self) -> int:
        """Rows held."""
        return self._held

    def find(self, rows: Ints) -> Ints:
        """See Index."""
        slots: Ints = _hash_find(self._table, rows)
        return slots

    def insert(self, rows: Ints, slots: Ints) -> tuple[Ints, Ints]:
        """See Index."""
        slots = np.ascontiguousarray(slots[: len(rows)])
        self._reserve(self._held + min(len(rows), len(slots) + 1))
        found, distinct, fits = _hash_insert(self._table, rows, slots)
        if not fits:
            _hash_remove(self._table, distinct)
            raise _too_few(rows, len(slots))
        self._held += len(distinct)
        return found, distinct

    def assign(self, rows: Ints, slots: Ints) -> None:
        """See Index."""
        self._reserve(self._held + len(rows))
        self._held += _hash_assign(self._table, rows, slots)

    def remove(self, rows: Ints) -> None:
        """See Index."""
        self._held -= _hash_remove(self._table, rows)

    @property
    def nbytes(self) -> int:
        """See Index."""
        return self._table.nbytes

    def _reserve(self, rows: int) -> None:
        if 3 * rows > 2 * len(self._table):
            grown = _empty_table(rows)
            _hash_move(self._table, grown)
            self._table = grown


def _empty_table(rows: int) -> Ints:
    """The smallest power of two of places of which `rows` take at most two thirds."""
    places = 1 << max(4, (3 * rows // 2).bit_length())
    return np.full((places, 2), ABSENT, np.int64)


@njit(cache=True, nogil=True)
def _home(table: Any, row: Any) -> Any:
    """Where `row` lies unless that is taken."""
    return np.int64(mix(np.uint64(row))) & (len(table) - 1)


@njit(cache=True, nogil=True)
def _place(table: Any, row: Any, home: Any) -> Any:
    """Where `row` lies, or the empty place where it would."""
    mask, at = len(table) - 1, home
    while table[at, 0] != row and table[at, 0] != ABSENT:
        at = (at + 1) & mask
    return at


@njit(cache=True, nogil=True)
def _hash_find(table: Any, rows: Any) -> Any:
    """All homes first: the reads of the table then overlap further, a quarter of the time."""
    out = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        if rows[i] < 0:
            raise IndexError("a row below 0")
        out[i] = _home(table, rows[i])
    for i in range(len(rows)):
        out[i] = table[_place(table, rows[i], out[i]), 1]  # an empty place says ABSENT
    return out


@njit(cache=True, nogil=True)
def _hash_insert(table: Any, rows: Any, slots: Any) -> Any:
    """As _array_insert; stops at the first distinct row beyond the slots, which the caller then takes back."""
    m = len(rows)
    order, places, number = np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.int64)
    u = 0
    for i in range(m - 1, -1, -1):
        if rows[i] < 0:
            raise IndexError("a row below 0")
        at = _place(table, rows[i], _home(table, rows[i]))
        if table[at, 0] == ABSENT:
            if u == len(slots):
                return number, order[:u], False
            table[at, 0], table[at, 1] = rows[i], _TAKEN - u
            order[u], places[u] = rows[i], at
            u += 1
        number[i] = _TAKEN - table[at, 1]
        if number[i] < 0:
            raise ValueError("a row to insert is held already")
    for k in range(u):
        table[places[k], 1] = slots[u - 1 - k]
    for i in range(m):
        number[i] = slots[u - 1 - number[i]]
    return number, order[:u][::-1].copy(), True


@njit(cache=True, nogil=True)
def _hash_assign(table: Any, rows: Any, slots: Any) -> Any:
    """Returns how many rows are new."""
    new = 0
    for i in range(len(rows)):
        if rows[i] < 0:
            raise IndexError("a row below 0")
        at = _place(table, rows[i], _home(table, rows[i]))
        if table[at, 0] == ABSENT:
            new += 1
        table[at, 0], table[at, 1] = rows[i], slots[i]
    return new


@njit(cache=True, nogil=True)
def _hash_remove(table: Any, rows: Any) -> Any:
    """Returns how many rows were held. Each hole is filled with the next row that may lie there, up to a gap."""
    mask, removed = len(table) - 1, 0
    for i in range(len(rows)):
        hole = _place(table, rows[i], _home(table, rows[i]))
        if table[hole, 0] == ABSENT:
            continue
        removed += 1
        at = (hole + 1) & mask
        while table[at, 0] != ABSENT:
            home = _home(table, table[at, 0])
            if (at - home) & mask >= (at - hole) & mask:
                table[hole, 0], table[hole, 1] = table[at, 0], table[at, 1]
                hole = at
            at = (at + 1) & mask
        table[hole, 0] = table[hole, 1] = ABSENT
    return removed


@njit(cache=True, nogil=True)
def _hash_move(old: Any, new: Any) -> None:
    for i in range(len(old)):
        if old[i, 0] != ABSENT:
            at = _place(new, old[i, 0], _home(new, old[i, 0]))
            new[at, 0], new[at, 1] = old[i, 0], old[i, 1]
