"""A plan: which rank holds which rows and columns of which table. Plain data, no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hetrain.errors import ConfigError
from hetrain.tables import Table

ENGINES = ("torchrec", "store")


@dataclass(frozen=True, order=True)
class Piece:
    """Rows `first_row .. +rows` and columns `first_column .. +columns` of one table, held by `rank`."""

    table: str
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True)
class Plan:
    """Where every row lives. A replicated table has no piece: every rank holds it whole."""

    engine: str  # torchrec | store
    world_size: int
    pieces: tuple[Piece, ...]
    replicated: frozenset[str]
    sharding: dict[str, str]  # table name -> sharding type (data_parallel, table_wise, row_wise)

    def of_table(self, name: str) -> tuple[Piece, ...]:
        """The pieces of one table, by first row, then first column."""
        return tuple(sorted((p for p in self.pieces if p.table == name), key=lambda p: (p.first_row, p.first_column)))

    def to_json(self) -> dict[str, Any]:
        """The plan as `plan.json` and a checkpoint's layout hold it."""
        return {
            "engine": self.engine,
            "world_size": self.world_size,
            "replicated": sorted(self.replicated),
            "sharding": dict(sorted(self.sharding.items())),
            "pieces": [
                {
                    "table": p.table,
                    "rank": p.rank,
                    "rows": [p.first_row, p.first_row + p.rows],
                    "columns": [p.first_column, p.first_column + p.columns],
                }
                for p in self.pieces
            ],
        }

    def check(self, tables: Sequence[Table]) -> None:
        """Raise ConfigError unless every element of every table is held exactly once (or by all, replicated).

        For TorchRec, row-wise blocks must be ceil(rows / world size): other blocks train silently
        wrong there. For the store, pieces are whole columns.
        """
        if self.engine not in ENGINES:
            raise ConfigError(f"plan.engine={self.engine!r}: expected one of {', '.join(ENGINES)}")
        known = {t.name for t in tables}
        for name in sorted({p.table for p in self.pieces} | self.replicated):
            if name not in known:
                raise ConfigError(f"plan: table {name!r} is not a table of this run; make the plan again")
        for table in tables:
            self._check_table(table)

    def _check_table(self, table: Table) -> None:
        pieces = self.of_table(table.name)
        if table.name in self.replicated:
            if pieces:
                raise ConfigError(f"plan: table {table.name!r} is replicated and also held in pieces; choose one")
            return
        for p in pieces:
            _check_bounds(p, table, self.world_size)
        _check_cover(pieces, table)
        if self.engine == "store":
            _refuse_columns(pieces, table)
        else:
            _check_blocks(pieces, table, self.world_size, self.sharding.get(table.name, ""))


def _check_bounds(p: Piece, table: Table, world_size: int) -> None:
    inside = (
        0 <= p.rank < world_size
        and p.rows > 0
        and p.columns > 0
        and 0 <= p.first_row <= table.rows - p.rows
        and 0 <= p.first_column <= table.dim - p.columns
    )
    if not inside:
        raise ConfigError(
            f"plan: piece {p} is outside of table {table.name!r} ({table.rows} x {table.dim}) "
            f"or of the {world_size} ranks; make the plan again for this data and launch.nproc"
        )


def _check_cover(pieces: Iterable[Piece], table: Table) -> None:
    """Cut the columns at every piece's edge; within a strip the row ranges must follow each other."""
    held = list(pieces)
    edges = sorted({0, table.dim} | {p.first_column for p in held} | {p.first_column + p.columns for p in held})
    for low, high in pairwise(edges):
        row = 0
        strip = [p for p in held if p.first_column <= low and high <= p.first_column + p.columns]
        for p in sorted(strip, key=lambda p: p.first_row):
            if p.first_row != row:
                break
            row += p.rows
        else:
            if row == table.rows:
                continue
        raise ConfigError(
            f"plan: rows of table {table.name!r} must be held exactly once, but row {row} "
            f"(columns {low} to {high - 1}) is held by none or by two ranks; {table.rows} rows are wanted"
        )


def _refuse_columns(pieces: Iterable[Piece], table: Table) -> None:
    for p in pieces:
        if p.columns != table.dim:
            raise ConfigError(
                f"plan: table {table.name!r} is cut by columns, which the store cannot hold; "
                "set planner.sharding_types=[table_wise,row_wise] or consistency=bsp"
            )


def _check_blocks(pieces: Sequence[Piece], table: Table, world_size: int, sharding: str) -> None:
    if sharding != "row_wise":
        return
    block = -(-table.rows // world_size)
    for p in pieces:
        if p.first_row != p.rank * block:
            raise ConfigError(
                f"plan: row-wise blocks of table {table.name!r} must be ceil({table.rows} / {world_size}) = "
                f"{block} rows, but rank {p.rank} starts at row {p.first_row}; TorchRec would train silently wrong. "
                "Leave row_wise out of planner.sharding_types"
            )
    if len(pieces) != world_size:
        raise ConfigError(
            f"plan: table {table.name!r} ({table.rows} rows) leaves a rank of {world_size} without a row-wise block; "
            "leave row_wise out of planner.sharding_types or keep the table whole"
        )
