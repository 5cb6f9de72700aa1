"""The rows a rank owns, as checkpoints see them."""

from collections.abc import Sequence
from typing import Protocol

from hetrain.engine import TablePiece
from hetrain.store.owner import Owner
from hetrain.store.space import Placement


class OwnedPart(Protocol):
    """One embedding dim as far as its owner goes: a WidthGroup, or a server's part."""

    @property
    def placement(self) -> Placement: ...  # noqa: D102
    @property
    def owner(self) -> Owner: ...  # noqa: D102


def owned_tables(parts: Sequence[OwnedPart]) -> dict[str, list[TablePiece]]:
    """Views of the rows that this rank owns, by table."""
    tables: dict[str, list[TablePiece]] = {table.name: [] for part in parts for table in part.placement.space.tables}
    for part in parts:
        for owned in part.placement.rows_of(part.owner.rank):
            rows = slice(owned.local, owned.local + owned.rows)
            state = part.owner.state[rows]
            optimizer = {} if state.shape[1] == 0 else {"sum": state.squeeze(1) if state.shape[1] == 1 else state}
            tables[owned.table.name].append(TablePiece(owned.first_row, part.owner.value[rows], optimizer))
    return tables
