"""The rows a rank owns, as checkpoints see them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hetrain.engine import EngineState, SeenRows, TablePiece
from hetrain.engine.owned import OwnedPart
from hetrain.store.owner import Owner


def rows_of(owner: Owner, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`rows` [n] of the owner's memory, with copies of their values [n, D] and states [n, S]."""
    return rows, owner.value.index_select(0, rows), owner.state.index_select(0, rows)


def owned_tables(parts: Sequence[OwnedPart]) -> dict[str, list[TablePiece]]:
    """Views of the rows that this rank owns, by table."""
    tables: dict[str, list[TablePiece]] = {table.name: [] for part in parts for table in part.placement.space.tables}
    for part in parts:
        for owned in part.placement.rows_of(part.owner.rank):
            rows = slice(owned.local, owned.local + owned.rows)
            state = part.owner.state[rows]
            tables[owned.table.name].append(TablePiece(owned.first_row, part.owner.value[rows], _named(state)))
    return tables


def _named(state: Tensor) -> dict[str, Tensor]:
    """Optimizer state [n, S] as a checkpoint names and shapes it."""
    if state.shape[1] == 0:
        return {}
    return {"sum": state.squeeze(1) if state.shape[1] == 1 else state}


def seen_rows(parts: Sequence[OwnedPart]) -> Iterator[SeenRows]:
    """The rows of this rank that were ever pushed, some of one table at a time."""
    for part in parts:
        space = part.placement.space
        offsets = torch.tensor(space.offsets)
        for rows, value, state in part.owner.seen():
            table = torch.searchsorted(offsets, rows.cpu(), right=True).sub_(1)
            order = torch.argsort(table, stable=True)
            numbers, counts = torch.unique_consecutive(table[order], return_counts=True)
            for number, at in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
                at = at.to(rows.device)
                ids = rows[at] - space.offsets[number]
                yield SeenRows(space.tables[number].name, ids, value[at], _named(state[at]))


def owns(parts: Sequence[OwnedPart], table: str, first_row: int, rows: int) -> bool:
    """Whether this rank owns any of the rows `first_row .. first_row + rows` of `table`."""
    return any(
        owned.table.name == table and owned.first_row < first_row + rows and first_row < owned.first_row + owned.rows
        for part in parts
        for owned in part.placement.rows_of(part.owner.rank)
    )


def take_up_rows(parts: Sequence[OwnedPart], state: EngineState, owners: Sequence[dict[str, Any]] | None) -> None:
    """Hold the rows of `state.seen` that belong here, and no others; a worker beside servers (no `parts`) holds none.

    `owners`: what Owner.state_dict gave per part, where the positions of rows are to be those of that time.
    Raises TrainingError when memory runs out.
    """
    assert state.seen is not None
    for i, part in enumerate(parts):
        part.owner.start_over(None if owners is None else owners[i]["placed"])
    if not parts:
        return
    part_of = {table.name: part for part in parts for table in part.placement.space.tables}
    for some in state.seen:
        if some.table not in part_of:  # held whole by all workers, and this is a server
            continue
        part = part_of[some.table]
        sums = some.optimizer.get("sum", some.value[:, :0])
        rows = some.ids + part.placement.space.offset_of(some.table)
        part.owner.take_up(rows, some.value, sums.view(len(rows), -1))
