"""How many rows a cache keeps, and how much memory a run will need: arithmetic only, nothing is allocated.

A slot of the cache costs, in bytes, per row of D values and S optimizer state values:

    value and state                           4 (D + S)
    value and state as of the last fetch      4 (D + S)    where updates are held back
    row, c_s, c_c, notice, free list, mark    8 + 8 + 8 + 8 + 8 + 4
    in flight, spared                         1 + 1
    updates in the copy                       8            when auditing
    age of what a threshold kept              4            with comms.rows=dct, where updates are held back
    policy                                    lru 8, lfu 12, light_lfu 12
    index                                     hash 48 (24 to 48: its table doubles); array 0

With comms.rows=dct, where nothing is held back, a worker keeps the rests of its pushes in a buffer of its own
(hetrain/store/residue.py): per row 4 D + 60 bytes, up to 64 MiB of values for each embedding dim.

The array index costs 4 bytes per row of the tables instead, whatever the capacity; `lfu` takes another 40 bytes per
distinct count that occurs. A capacity in bytes pays for the rows kept between steps at these prices; the array index
and the slots of the batches in flight come on top, and `predicted_memory` says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetrain.capacity import KEY, parse_capacity
from hetrain.errors import ConfigError

GIB, MIB = 1 << 30, 1 << 20
POLICY_BYTES = {"lru": 8, "lfu": 12, "light_lfu": 12}
BOOKKEEPING_BYTES = 5 * 8 + 4 + 2
ARRAY_INDEX_BYTES = 4  # per row of the tables
HASH_INDEX_BYTES = 48  # at most, per row held
HASH_ROW_BYTES = 8  # an owner that keeps the rows seen also keeps their numbers


class HasRows(Protocol):
    """What is needed of a RowSpace."""

    @property
    def rows(self) -> int: ...  # noqa: D102


def slot_bytes(
    dim: int,
    state: int,
    policy: str,
    index: str,
    *,
    held_back: bool = True,
    audit: bool = False,
    thresholds: bool = False,
) -> int:
    """Bytes of one slot of a cache of rows of `dim` values and `state` optimizer state values."""
    row = 4 * (dim + state)
    total = row + (row if held_back else 0) + BOOKKEEPING_BYTES + POLICY_BYTES[policy]
    return total + 8 * audit + 4 * thresholds + (HASH_INDEX_BYTES if index == "hash" else 0)


def capacity_rows(capacity: float | str, spaces: Sequence[HasRows], slot_costs: Sequence[int]) -> list[int]:
    """Rows kept per width group: the same share of each; at least one row where any is kept.

    `slot_costs`: `slot_bytes` of each. A capacity in bytes is never exceeded; raises ConfigError when it is too
    small for a row of each group, or not a capacity at all.
    """
    parsed = parse_capacity(capacity)
    if parsed.amount == 0:
        return [0] * len(spaces)
    if parsed.unit == "bytes":
        return _rows_for_bytes(int(parsed.amount), capacity, spaces, slot_costs)
    share = parsed.amount if parsed.unit == "share" else parsed.amount / sum(space.rows for space in spaces)
    return [min(space.rows, max(1, round(share * space.rows))) for space in spaces]


def _rows_for_bytes(
    budget: int, capacity: float | str, spaces: Sequence[HasRows], slot_costs: Sequence[int]
) -> list[int]:
    least, everything = sum(slot_costs), sum(n * space.rows for n, space in zip(slot_costs, spaces, strict=True))
    if budget < least:
        raise ConfigError(
            f"{KEY}={capacity}: expected at least {least} bytes, one row of each embedding dim. "
            "0 keeps no row between steps."
        )
    if budget >= everything:
        return [space.rows for space in spaces]
    # one row of each first, then the same share of the rest of each, rounded down: in integers, so as not to exceed it
    return [1 + (budget - least) * (space.rows - 1) // (everything - least) for space in spaces]


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes, over all embedding dims."""

    cache: int  # of one worker: slots with all that belongs to them
    index: int  # of one worker: what the index takes whatever the capacity
    rows_at_start: int  # of the owner with most rows
    rows_at_most: int  # of that owner, once every row was seen
    row_seen: tuple[int, ...]  # of an owner, per row seen, for each embedding dim
    keeps: bool = True  # rows between steps; else `cache` is that of the batches in flight
    residue: int = 0  # of one worker, once full: rests that wait for rows without a slot, with comms.rows=dct

    def __str__(self) -> str:
        whole, index = size_text(self.cache + self.index), size_text(self.index)
        what = "a worker's cache takes" if self.keeps else "a worker's rows of the batches in flight take"
        worker = f"{what} {whole} ({index} of it the index)"
        if self.residue:
            worker += f" and what comms.rows=dct holds back up to {size_text(self.residue)}"
        if self.rows_at_start == self.rows_at_most:
            return f"{worker}, an owner's rows {size_text(self.rows_at_start)}"
        per_row = " or ".join(str(n) for n in dict.fromkeys(self.row_seen))
        return f"{worker}, an owner's rows {per_row} bytes for each row seen"


def predicted_memory(
    spaces: Sequence[HasRows],
    slots: Sequence[int],
    slot_costs: Sequence[int],
    owned_rows: Sequence[int],
    row_bytes: Sequence[int],
    index: str,
    residue: int = 0,
    *,
    keeps: bool = True,
) -> PredictedMemory:
    """What a run will need, before it allocates; every argument but the last two has an entry per embedding dim.

    `slots`: rows kept and rows of the batches in flight; `owned_rows`: of the owner with most rows;
    `row_bytes`: of an owner's columns, per row; `residue`: of a worker's rests, where it has some; `keeps`: whether
    rows are kept between steps.
    """
    hashed = index == "hash"
    row_seen = tuple(n + (HASH_ROW_BYTES + HASH_INDEX_BYTES if hashed else 0) for n in row_bytes)
    at_most = sum(rows * n for rows, n in zip(owned_rows, row_seen, strict=True))
    return PredictedMemory(
        cache=sum(number * n for number, n in zip(slots, slot_costs, strict=True)),
        index=0 if hashed else ARRAY_INDEX_BYTES * sum(space.rows for space in spaces),
        rows_at_start=0 if hashed else at_most,
        rows_at_most=at_most,
        row_seen=row_seen,
        keeps=keeps,
        residue=residue,
    )


def size_text(number: int) -> str:
    """Bytes in words."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / MIB:.1f} MiB"
