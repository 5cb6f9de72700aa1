"""Row numbers: all tables of one embedding dim as one range, and which owner holds which part of it."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hetrain.tables import Table


class PieceOfPlan(Protocol):
    """Rows `first_row .. first_row + rows` of a table, on `rank` (planner.plan.Piece is one)."""

    @property
    def table(self) -> str: ...  # noqa: D102
    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def first_row(self) -> int: ...  # noqa: D102
    @property
    def rows(self) -> int: ...  # noqa: D102


class StorePlan(Protocol):
    """What a placement needs of a plan."""

    @property
    def pieces(self) -> Sequence[PieceOfPlan]: ...  # noqa: D102


class RowSpace:
    """The tables of embedding dim `dim` that have owners, in model order; global row = offset of the table + id."""

    def __init__(self, tables: Sequence[Table], dim: int, replicated: Collection[str] = ()) -> None:
        """`tables`: all tables of the model; those of another dim, or `replicated`, only count for `table_index`."""
        chosen = [
            (index, table) for index, table in enumerate(tables) if table.dim == dim and table.name not in replicated
        ]
        if not chosen:
            raise ValueError(f"no table has embedding dim {dim}")
        self.dim = dim
        self.tables = tuple(table for _, table in chosen)
        self.table_index = tuple(index for index, _ in chosen)  # position in the model: keys the initial rows
        offsets = [0]
        for table in self.tables:
            offsets.append(offsets[-1] + table.rows)
        self.offsets = tuple(offsets[:-1])  # first global row per table
        self.rows = offsets[-1]
        self._offset_of = {table.name: offset for table, offset in zip(self.tables, self.offsets, strict=True)}
        self.feature_offsets = {
            feature: offset
            for table, offset in zip(self.tables, self.offsets, strict=True)
            for feature in table.features
        }

    def offset_of(self, table: str) -> int:
        """Global row of the first row of `table`."""
        return self._offset_of[table]


def row_spaces(tables: Sequence[Table], replicated: Collection[str] = ()) -> list[RowSpace]:
    """One row space per embedding dim of the tables that are not `replicated`, in the order the dims first occur."""
    dims = dict.fromkeys(table.dim for table in tables if table.name not in replicated)
    return [RowSpace(tables, dim, replicated) for dim in dims]


class OwnedRows(NamedTuple):
    """Rows `first_row .. first_row + rows` of `table` at `local ..` in their owner's memory."""

    table: Table
    table_index: int  # position of the table in the model
    first_row: int
    rows: int
    local: int


class Placement:
    """Which rank owns a global row, and where in that owner's memory it lies."""

    def __init__(self, space: RowSpace, plan: StorePlan, world_size: int) -> None:
        """`plan.pieces` of tables outside `space` are ignored.

        Raises ValueError unless the pieces cover every row of `space` exactly once with ranks below `world_size`.
        """
        self.space = space
        self.world_size = world_size
        position = {table.name: i for i, table in enumerate(space.tables)}
        pieces = [
            (space.offsets[position[piece.table]] + piece.first_row, position[piece.table], piece)
            for piece in plan.pieces
            if piece.table in position and piece.rows > 0
        ]
        pieces.sort(key=lambda item: item[0])
        self._owned: list[list[OwnedRows]] = [[] for _ in range(world_size)]
        self.local_rows = [0] * world_size  # rows each rank owns
        starts, ranks, shifts, expected = [], [], [], 0
        for start, table, piece in pieces:
            if start != expected or not 0 <= piece.rank < world_size:
                raise ValueError(f"plan does not cover the rows exactly once: {piece} starts at {start}")
            local = self.local_rows[piece.rank]
            owned = OwnedRows(space.tables[table], space.table_index[table], piece.first_row, piece.rows, local)
            self._owned[piece.rank].append(owned)
            self.local_rows[piece.rank] += piece.rows
            starts.append(start)
            ranks.append(piece.rank)
            shifts.append(local - start)
            expected = start + piece.rows
        if expected != space.rows:
            raise ValueError(f"plan covers {expected} of {space.rows} rows of embedding dim {space.dim}")
        self._starts = torch.tensor(starts, dtype=torch.int64)
        self._ranks = torch.tensor(ranks, dtype=torch.int64)
        self._shifts = torch.tensor(shifts, dtype=torch.int64)
        self._identity = all(shift == 0 for shift in shifts)  # one owner: local row = global row

    def owner_of(self, rows: Tensor) -> Tensor:
        """Rank that owns each global row; [n] int64 to [n] int64."""
        return self._ranks.to(rows.device)[self._piece_of(rows)]

    def local_of(self, rows: Tensor) -> Tensor:
        """Row in its owner's memory of each global row; [n] int64 to [n] int64."""
        if self._identity:
            return rows
        return rows + self._shifts.to(rows.device)[self._piece_of(rows)]

    def global_of(self, rank: int, local: Tensor) -> Tensor:
        """The inverse of `local_of` for rows of `rank`; [n] int64 to [n] int64."""
        if self._identity:
            return local
        owned = self._owned[rank]
        starts = torch.tensor([part.local for part in owned], dtype=torch.int64, device=local.device)
        firsts = [self.space.offset_of(part.table.name) + part.first_row - part.local for part in owned]
        shifts = torch.tensor(firsts, dtype=torch.int64, device=local.device)
        return local + shifts[torch.searchsorted(starts, local, right=True) - 1]

    def rows_of(self, rank: int) -> list[OwnedRows]:
        """What `rank` owns, in the order of its memory."""
        return list(self._owned[rank])

    def _piece_of(self, rows: Tensor) -> Tensor:
        return torch.searchsorted(self._starts.to(rows.device), rows, right=True) - 1
