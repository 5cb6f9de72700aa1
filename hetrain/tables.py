"""An embedding table as every part of hetrain sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetrain.errors import DataError

MAX_TABLES = 1 << 15
MAX_ROWS = 1 << 48


@dataclass(frozen=True)
class Table:
    """One embedding table: `rows` vectors of width `dim`, looked up by `features` and summed per bag."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]  # KJT keys that look up here, usually one
    init_bound: float  # rows start uniform in [-init_bound, init_bound)


def check_tables(tables: Sequence[Table]) -> None:
    """Raise DataError where FBGEMM's packed row numbers would overflow: it reads row 0 for such ids."""
    if len(tables) > MAX_TABLES:
        raise DataError(
            f"{len(tables):,} sparse columns: expected at most {MAX_TABLES:,}. Leave some out or merge them."
        )
    for table in tables:
        if not 0 < table.rows <= MAX_ROWS:
            raise DataError(
                f"sparse column {table.name} has {table.rows:,} rows: expected 1 to {MAX_ROWS:,}. Raise data.min_count."
            )
