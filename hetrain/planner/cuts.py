"""Checks of one table's pieces: held exactly once, in cuts that the engine trains right."""

from collections.abc import Sequence
from itertools import groupby, pairwise

from hetrain.errors import ConfigError
from hetrain.planner.piece import TIERS, Piece
from hetrain.tables import Table


def check_bounds(p: Piece, table: Table, world_size: int) -> None:
    """Raise ConfigError unless the piece is inside of its table and of the ranks."""
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
    if p.tier not in TIERS:
        raise ConfigError(f"plan: piece {p} is in tier {p.tier!r}; expected one of {', '.join(TIERS)}")


def check_cover(held: Sequence[Piece], table: Table) -> None:
    """Cut the columns at every piece's edge; within a strip the row ranges must follow each other."""
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


def refuse_columns(pieces: Sequence[Piece], table: Table) -> None:
    """Raise ConfigError where a piece lacks columns: the store holds whole rows."""
    for p in pieces:
        if p.columns != table.dim:
            raise ConfigError(
                f"plan: table {table.name!r} is cut by columns, which the store cannot hold; "
                "set planner.sharding_types=[table_wise,row_wise] or consistency=bsp"
            )


def check_torchrec_cut(
    pieces: Sequence[Piece], table: Table, kind: str | None, world_size: int, ranks_per_node: int
) -> None:
    """Raise ConfigError unless the pieces are as TorchRec assumes for sharding type `kind`.

    It computes an id's rank from blocks of ceil(rows / ranks): with others it trains silently wrong.
    """
    if kind == "row_wise":
        _check_blocks(pieces, table, kind, list(range(world_size)))
    elif kind in ("table_row_wise", "grid_shard"):
        for _, strip in groupby(sorted(pieces, key=lambda p: (p.first_column, p.first_row)), lambda p: p.first_column):
            held = list(strip)
            node = held[0].rank // ranks_per_node
            _check_blocks(held, table, kind, list(range(node * ranks_per_node, (node + 1) * ranks_per_node)))
    elif kind == "table_wise" and len(pieces) != 1:
        raise ConfigError(f"plan: table {table.name!r} is table_wise and held in {len(pieces)} pieces; one is wanted")
    elif kind in ("column_wise", "table_column_wise"):
        _check_columns(pieces, table, kind, ranks_per_node)
    elif kind != "table_wise":
        raise ConfigError(
            f"plan: table {table.name!r} is held in pieces, and {kind!r} in plan.sharding; expected their cut"
        )


def _check_blocks(pieces: Sequence[Piece], table: Table, kind: str, ranks: Sequence[int]) -> None:
    by_rows = kind.replace("_", "-")
    block = -(-table.rows // len(ranks))
    for p in pieces:
        if p.rank not in ranks or p.first_row != (p.rank - ranks[0]) * block:
            raise ConfigError(
                f"plan: {by_rows} blocks of table {table.name!r} must be ceil({table.rows} / {len(ranks)}) = "
                f"{block} rows from rank {ranks[0]} on, but rank {p.rank} starts at row {p.first_row}; TorchRec would "
                f"train silently wrong. Leave {kind} out of planner.sharding_types"
            )
    if len(pieces) != len(ranks):
        raise ConfigError(
            f"plan: table {table.name!r} ({table.rows} rows) leaves a rank of {len(ranks)} without a {by_rows} block; "
            f"leave {kind} out of planner.sharding_types or keep the table whole"
        )


def _check_columns(pieces: Sequence[Piece], table: Table, kind: str, ranks_per_node: int) -> None:
    for p in pieces:
        if p.rows != table.rows:
            raise ConfigError(f"plan: table {table.name!r} is {kind}, but rank {p.rank} holds only {p.rows} rows of it")
    nodes = {p.rank // ranks_per_node for p in pieces}
    if kind == "table_column_wise" and len(nodes) > 1:
        raise ConfigError(
            f"plan: table {table.name!r} is table_column_wise, but its pieces are on nodes {sorted(nodes)}; "
            "one node is wanted, or column_wise"
        )
