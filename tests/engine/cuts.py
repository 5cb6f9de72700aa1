"""Plans by hand: every sharding type on 2 ranks and on 4, as 2 nodes of 2."""

from hetrain.planner.piece import Piece
from hetrain.planner.plan import Plan
from hetrain.tables import Table

# 16 is narrower than TorchRec's own column pieces; a table with two features; rows that no number of ranks divides
TABLES = [
    Table("a", 31, 16, ("a",), 0.1),
    Table("b", 7, 16, ("b", "b2"), 0.1),
    Table("c", 50, 32, ("c",), 0.1),
    Table("d", 13, 8, ("d",), 0.1),
]
NODE = 2  # ranks of a node


def cut(table, kind, world_size, at=0, widths=None):
    """Pieces of `table`. `at`: ranks of the strips of columns, or their nodes; a number: of the whole table."""
    if kind == "data_parallel":
        return []
    strips = [table.dim] if widths is None else widths
    places = [at] if isinstance(at, int) else at
    columns = [sum(strips[:k]) for k in range(len(strips))]
    pieces = []
    for place, first_column, width in zip(places, columns, strips, strict=True):
        if kind == "row_wise":
            ranks = range(world_size)
        elif kind in ("table_row_wise", "grid_shard"):
            ranks = range(place * NODE, (place + 1) * NODE)
        else:
            ranks = [place]
        block = -(-table.rows // len(ranks))
        for k, rank in enumerate(ranks):
            rows = min(block, table.rows - k * block)
            pieces.append(Piece(table.name, rank, k * block, rows, first_column, width))
    return pieces


def plan(world_size, *cuts, tables=TABLES):
    """One (sharding type, at, widths) per table, the last two where they are wanted."""
    pieces, sharding = [], {}
    for table, (kind, *where) in zip(tables, cuts, strict=True):
        sharding[table.name] = kind
        pieces += cut(table, kind, world_size, *where)
    replicated = frozenset(name for name, kind in sharding.items() if kind == "data_parallel")
    made = Plan("torchrec", world_size, tuple(pieces), replicated, sharding, min(NODE, world_size))
    made.check(tables)
    return made


ONE = plan(1, *[("table_wise", 0)] * 4)
# Which table is cut in which way; the others lie whole, here and there.
FOUR = {
    "data_parallel": plan(4, ("data_parallel",), ("table_wise", 3), ("data_parallel",), ("table_wise", 1)),
    "row_wise": plan(4, ("row_wise",), ("row_wise",), ("row_wise",), ("row_wise",)),
    "column_wise": plan(
        4,
        ("column_wise", [3, 1], [8, 8]),
        ("column_wise", [0, 2], [12, 4]),
        ("column_wise", [2, 0, 2, 1], [4, 8, 16, 4]),
        ("table_wise", 0),
    ),
    "table_row_wise": plan(4, ("table_row_wise", 1), ("table_row_wise", 0), ("table_row_wise", 1), ("table_wise", 2)),
    "table_column_wise": plan(
        4,
        ("table_column_wise", [3, 2], [8, 8]),
        ("table_wise", 1),
        ("table_column_wise", [0, 1], [8, 24]),
        ("table_column_wise", [1, 0], [4, 4]),
    ),
    "grid_shard": plan(
        4,
        ("grid_shard", [1, 0], [8, 8]),
        ("grid_shard", [0, 1], [4, 12]),
        ("grid_shard", [1, 0], [16, 16]),
        ("table_wise", 2),
    ),
    "mixed": plan(
        4, ("grid_shard", [0, 1], [8, 8]), ("data_parallel",), ("table_row_wise", 1), ("column_wise", [3, 0], [4, 4])
    ),
}
TWO = {
    "column_wise": plan(
        2, ("column_wise", [1, 0], [8, 8]), ("row_wise",), ("column_wise", [0, 1, 0], [8, 16, 8]), ("data_parallel",)
    ),
    "one_node": plan(
        2,
        ("table_row_wise", 0),
        ("grid_shard", [0, 0], [8, 8]),
        ("table_column_wise", [1, 0], [20, 12]),
        ("table_wise", 1),
    ),
}
