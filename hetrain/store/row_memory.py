"""Where an owner keeps its rows: all of them from the start, or those that were seen.

Rows have columns: named tensors that share their first axis, `value` [n, D] float32 and whatever else the owner asks
for. A position is a row's place on that axis. Columns may be bound anew when rows are placed: ask for them each time.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hetrain.errors import ConfigError, TrainingError
from hetrain.store.index import ABSENT, HashIndex, Ints
from hetrain.store.initial import InitialRows
from hetrain.store.space import Placement
from hetrain.store.zeros import LINE, lazy_zeros

GIB = 1 << 30
FILL_ROWS = 1 << 18  # rows made at a time: their ids stay in the CPU's cache
GRANT_BYTES = 1 << 26  # memory taken between two looks at how much the host has left
INDEX_BYTES = 48  # at most, per row seen


class Column(NamedTuple):
    """A tensor of `shape` per row; new rows hold `fill`, but `value` holds its initial row."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * self.dtype.itemsize


class RowMemory(Protocol):
    """What an owner asks of its memory. Rows are global, int64; positions int64; both on its device."""

    @property
    def used(self) -> int:
        """Rows it holds; positions are below."""
        ...

    def __getitem__(self, name: str) -> Tensor:
        """Column `name` of all rows held, [used, ...]; writing to it writes the rows."""
        ...

    def locate(self, rows: Tensor) -> Tensor:
        """Position of each row, -1 where it has none; [n] to [n]."""
        ...

    def place(self, rows: Tensor) -> Tensor:
        """Position of each row [n], repeats allowed; those without one get it, and their first contents.

        Raises TrainingError when memory runs out, with the rows as they were.
        """
        ...

    def rows(self) -> Tensor:
        """The row at each position: [used]."""
        ...

    def rows_at(self, positions: Tensor) -> Tensor:
        """The row at some positions; [n] to [n]."""
        ...

    def reset(self) -> None:
        """As at the start: no row was ever written."""
        ...

    @property
    def nbytes_used(self) -> int:
        """Bytes that the rows held take, the index included."""
        ...


def make_row_memory(
    kind: str,
    placement: Placement,
    rank: int,
    columns: Mapping[str, Column],
    initial: InitialRows,
    device: torch.device,
) -> RowMemory:
    """Memory for the rows that `placement` gives `rank`; `kind`: array (all from the start) or hash (those seen).

    `columns` must have `value` [D] float32. Raises ConfigError for another kind, or when array rows do not fit.
    """
    if kind == "array":
        return ArrayMemory(placement, rank, columns, initial, device)
    if kind == "hash":
        return HashMemory(placement, rank, columns, initial, device)
    raise ConfigError(f"store.index={kind}: expected array or hash. Use hash for tables far larger than memory.")


class _RowsOfRank(ABC):
    """What either memory is made of: the columns of one rank's rows, `used` of which it holds."""

    def __init__(
        self,
        placement: Placement,
        rank: int,
        columns: Mapping[str, Column],
        initial: InitialRows,
        device: torch.device,
    ) -> None:
        """See make_row_memory."""
        self._placement, self._rank, self._initial, self._device = placement, rank, initial, device
        self._columns = dict(columns)
        self._owned = placement.local_rows[rank]
        self._tensors: dict[str, Tensor] = {}
        self.used = 0
        self._take_memory()

    @abstractmethod
    def _take_memory(self) -> None:
        """Make the columns, and the rows that are there from the start."""

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name][: self.used]

    @property
    def _row_bytes(self) -> int:
        """Bytes of one row in all columns."""
        return sum(column.row_bytes for column in self._columns.values())


class ArrayMemory(_RowsOfRank):
    """Every row of the plan, in the order of `placement.rows_of(rank)`."""

    def _take_memory(self) -> None:
        self.used = self._owned
        free = available_bytes() if self._device.type == "cpu" else None
        if free is not None and free < self.nbytes_used:
            raise self._too_large(f"{free / GIB:.1f} GiB are available")
        try:
            self._tensors = {
                name: _full(column, self.used, self._device)
                for name, column in self._columns.items()
                if name != "value"
            }
            self._tensors["value"] = _empty(self._columns["value"], self.used, self._device)
        except RuntimeError as error:
            raise self._too_large("the allocation failed") from error
        self._fill()

    def _too_large(self, reason: str) -> ConfigError:
        return ConfigError(
            f"store.index=array: all {self.used:,} rows of embedding dim {self._placement.space.dim} on rank "
            f"{self._rank} need {self.nbytes_used / GIB:.1f} GiB of {self._device.type} memory, but {reason}. "
            "Use store.index=hash, which keeps the rows seen, or more ranks."
        )

    def _fill(self) -> None:
        value, local = self._tensors["value"], 0
        for first, rows in self._ranges():
            for start in range(first, first + rows, FILL_ROWS):
                some = torch.arange(start, min(start + FILL_ROWS, first + rows), device=self._device)
                self._initial.fill(value[local : local + len(some)], some)
                local += len(some)

    def _ranges(self) -> list[tuple[int, int]]:
        """First global row and number of rows of each piece, in the order of their positions."""
        space = self._placement.space
        offset = dict(zip(space.table_index, space.offsets, strict=True))
        return [
            (offset[owned.table_index] + owned.first_row, owned.rows) for owned in self._placement.rows_of(self._rank)
        ]

    def locate(self, rows: Tensor) -> Tensor:
        """See RowMemory; every row has a position."""
        return self._placement.local_of(rows)

    def place(self, rows: Tensor) -> Tensor:
        """See RowMemory; never makes a row."""
        return self._placement.local_of(rows)

    def rows(self) -> Tensor:
        """See RowMemory."""
        parts = [torch.arange(first, first + rows, device=self._device) for first, rows in self._ranges()]
        return torch.cat([torch.empty(0, dtype=torch.int64, device=self._device), *parts])

    def rows_at(self, positions: Tensor) -> Tensor:
        """See RowMemory."""
        return self._placement.global_of(self._rank, positions)

    def reset(self) -> None:
        """See RowMemory."""
        for name, column in self._columns.items():
            if name != "value":
                self._tensors[name].fill_(column.fill)
        self._fill()

    @property
    def nbytes_used(self) -> int:
        """See RowMemory."""
        return self.used * self._row_bytes


class HashMemory(_RowsOfRank):
    """The rows placed so far, in the order of first touch (within one call: of last occurrence).

    On the CPU the columns are address space for every row that could come, reserved once: growing copies nothing, and
    only rows that were placed take memory. Where that cannot be had, columns double when they are full.
    """

    def _take_memory(self) -> None:
        self._index = HashIndex(0)
        self._granted = 0  # rows that may be placed without asking for memory
        self._reserved = _reservable(self._owned, self._seen_bytes) if self._device.type == "cpu" else 0
        try:
            self._allocate(self._reserved)
        except MemoryError:  # the host or a limit of the process refuses address space
            self._reserved = 0
            self._allocate(0)

    def _allocate(self, rows: int) -> None:
        """New columns for `rows` rows; nothing is touched."""
        self._tensors = {name: _empty(column, rows, self._device) for name, column in self._columns.items()}
        self._row = _empty(Column((), torch.int64), rows, torch.device("cpu"))

    @property
    def _seen_bytes(self) -> int:
        """Bytes of one row seen, with its number; the index comes on top."""
        return 8 + self._row_bytes

    def locate(self, rows: Tensor) -> Tensor:
        """See RowMemory."""
        return torch.from_numpy(self._index.find(rows.cpu().numpy())).to(self._device)

    def place(self, rows: Tensor) -> Tensor:
        """See RowMemory."""
        ids = rows.cpu().numpy()
        positions = self._index.find(ids)
        absent = np.flatnonzero(positions == ABSENT)
        if len(absent):
            positions[absent] = self._create(ids[absent])
        return torch.from_numpy(positions).to(self._device)

    def _create(self, ids: Ints) -> Ints:
        """Positions of rows `ids`, none of which has one."""
        first = self.used
        self._make_room(min(first + len(ids), self._owned))
        try:
            positions, new = self._index.insert(ids, np.arange(first, first + len(ids)))
        except MemoryError as error:
            raise self._full("its index cannot grow") from error
        self.used += len(new)
        rows = torch.from_numpy(new)
        self._row[first : self.used] = rows
        for name, column in self._columns.items():
            part = self._tensors[name][first : self.used]
            if name == "value":
                self._initial.fill(part, rows.to(self._device))
            else:
                part.fill_(column.fill)
        return positions

    def _make_room(self, rows: int) -> None:
        """See to it that `rows` rows fit."""
        if rows <= self._granted:
            return
        if not self._reserved:
            self._double(rows)
            return
        if rows > self._reserved:
            raise self._full("more do not fit into this host's memory")
        cost = self._seen_bytes + INDEX_BYTES
        granted = min(max(rows, self._granted + GRANT_BYTES // cost), self._reserved)
        free = available_bytes()
        if free is not None and free < (granted - self._granted) * cost:
            raise self._full(f"{free / GIB:.2f} GiB are left")
        self._granted = granted

    def _double(self, rows: int) -> None:
        granted = max(rows, min(2 * self._granted, self._owned))
        try:
            for name, column in self._columns.items():
                grown = _empty(column, granted, self._device)
                grown[: self.used] = self[name]
                self._tensors[name] = grown
            row = _empty(Column((), torch.int64), granted, torch.device("cpu"))
        except (MemoryError, RuntimeError) as error:
            raise self._full(f"there is no {self._device.type} memory for {granted:,}") from error
        row[: self.used] = self._row[: self.used]
        self._row, self._granted = row, granted

    def _full(self, reason: str) -> TrainingError:
        dim = self._placement.space.dim
        return TrainingError(
            f"store.index=hash: rank {self._rank} has seen {self.used:,} of its {self._owned:,} rows of embedding dim "
            f"{dim}, which take {self.nbytes_used / GIB:.2f} GiB, and {reason}. Spread the tables over more "
            "ranks, use a smaller embedding dim, or raise data.min_count so that rare ids share a row."
        )

    def rows(self) -> Tensor:
        """See RowMemory."""
        return self._row[: self.used].to(self._device, copy=True)

    def rows_at(self, positions: Tensor) -> Tensor:
        """See RowMemory."""
        return self._row[positions.cpu()].to(self._device)

    def reset(self) -> None:
        """See RowMemory."""
        self._index = HashIndex(0)
        self.used = 0

    @property
    def nbytes_used(self) -> int:
        """See RowMemory."""
        return self.used * self._seen_bytes + self._index.nbytes


# -- memory ---------------------------------------------------------------------------------------


def _full(column: Column, rows: int, device: torch.device) -> Tensor:
    """[rows, ...]; zeros come from the system untouched."""
    shape = (rows, *column.shape)
    if column.fill == 0:
        return lazy_zeros(shape, column.dtype, device)
    return torch.full(shape, column.fill, dtype=column.dtype, device=device)


def _empty(column: Column, rows: int, device: torch.device) -> Tensor:
    """[rows, ...], not initialised. On the CPU by numpy, which never touches it, whatever torch's debug settings."""
    shape = (rows, *column.shape)
    if device.type != "cpu":
        return torch.empty(shape, dtype=column.dtype, device=device)
    raw = np.empty(rows * column.row_bytes + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return torch.from_numpy(raw[start : start + rows * column.row_bytes]).view(column.dtype).view(shape)


def _reservable(rows: int, row_bytes: int) -> int:
    """How many of `rows` rows this host could ever hold."""
    return min(rows, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // row_bytes)


def available_bytes() -> int | None:
    """Bytes this process could still take without swapping, its container's limit heeded; None: not known."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, taken = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and taken.exists() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text) - int(taken.read_text()))
    return free
