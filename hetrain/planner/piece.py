"""A part of a table on a rank, and the names of the ways to cut and of the memories. Plain data, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetrain.json_file import whole_number

TIERS = ("hbm", "cached", "ddr")  # the device's memory; the host's with a cache on the device; the host's
HOST = "ddr"
SHARDING_TYPES = (
    *("data_parallel", "table_wise", "row_wise", "column_wise"),
    *("table_row_wise", "table_column_wise", "grid_shard"),
)


@dataclass(frozen=True, order=True)
class Piece:
    """Rows `first_row .. +rows` and columns `first_column .. +columns` of one table, held by `rank`."""

    table: str
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int
    tier: str = HOST  # hbm | cached | ddr: the memory that holds the rows; on CPU ranks there is ddr only

    def to_json(self) -> dict[str, Any]:
        """The piece as `plan.json` holds it, ends exclusive; the tier is named where it is not host memory."""
        held = {
            "table": self.table,
            "rank": self.rank,
            "rows": [self.first_row, self.first_row + self.rows],
            "columns": [self.first_column, self.first_column + self.columns],
        }
        return held if self.tier == HOST else held | {"tier": self.tier}

    @classmethod
    def from_json(cls, held: Mapping[str, Any]) -> "Piece":
        """What `to_json` wrote; raises KeyError, TypeError or ValueError otherwise."""
        (row, end), (column, last) = map(whole_number, held["rows"]), map(whole_number, held["columns"])
        tier = str(held.get("tier", HOST))
        return cls(str(held["table"]), whole_number(held["rank"]), row, end - row, column, last - column, tier)
