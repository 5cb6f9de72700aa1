"""One way to cut a table, priced: what each of its parts costs a rank, and where a part may go."""

from dataclasses import dataclass

from hetrain.planner.piece import Piece
from hetrain.tables import Table

ALL, NODE, RANK = 0, 1, 2  # a part lies on every rank, on every rank of one node, or on one rank


@dataclass(frozen=True)
class Cut:
    """`parts` equal parts; each loads every rank of its place by the milliseconds and bytes given."""

    kind: str  # a sharding type
    tier: str
    place: int  # ALL | NODE | RANK
    parts: int  # strips of columns, or row ranges of a table of the store
    compute_ms: float
    comm_ms: float
    hbm: int  # on a rank of the part, with the batch's buffers
    ddr: int
    hbm_total: int  # over all ranks: the last block of rows may be shorter than the others
    ddr_total: int
    even: bool = False  # row ranges of the store: of equal rows, not of equal lookups
    shared_ms: float = 0.0  # that a part adds to every rank, wherever it lies: what a piece costs beside its bytes
    columns: int = 0  # of a strip that stands beside strips of other widths; 0: the table's in equal parts

    @property
    def cost(self) -> float:
        """Milliseconds that a part adds to a rank of its place, beside what it adds to all."""
        return self.compute_ms + self.comm_ms

    def loaded_ranks(self, world_size: int, ranks_per_node: int) -> int:
        """Rank loads that all parts make together."""
        return self.parts * self.width(world_size, ranks_per_node)

    def width(self, world_size: int, ranks_per_node: int) -> int:
        """Ranks of a part's place, each of which holds a piece of it."""
        return (world_size, ranks_per_node, 1)[self.place]


def pieces_of(table: Table, cut: Cut, places: list[int], world_size: int, ranks_per_node: int) -> list[Piece]:
    """The pieces of a table cut so, its part k at node or rank `places[k]`; blocks of rows as TorchRec takes them."""
    width = table.dim // cut.parts
    if cut.place == ALL:
        ranks = [list(range(world_size))]
    elif cut.place == NODE:
        ranks = [list(range(n * ranks_per_node, (n + 1) * ranks_per_node)) for n in places]
    else:
        ranks = [[rank] for rank in places]
    if cut.kind == "table_column_wise":  # one strip for each rank of the node
        (held,) = ranks
        width = table.dim // len(held)
        return [Piece(table.name, r, 0, table.rows, k * width, width, cut.tier) for k, r in enumerate(held)]
    block = -(-table.rows // len(ranks[0]))
    return [
        Piece(table.name, rank, at * block, min(block, table.rows - at * block), k * width, width, cut.tier)
        for k, strip in enumerate(ranks)
        for at, rank in enumerate(strip)
    ]


def strips_of(table: Table, strips: list[Cut], places: list[int]) -> list[Piece]:
    """The pieces of a table in strips of columns of unequal widths, strip k on rank `places[k]`."""
    first = [sum(strip.columns for strip in strips[:k]) for k in range(len(strips))]
    return [
        Piece(table.name, rank, 0, table.rows, at, strip.columns, strip.tier)
        for rank, strip, at in zip(places, strips, first, strict=True)
    ]


def has_empty_block(rows: int, ranks: int) -> bool:
    """Whether blocks of ceil(rows / ranks) leave a rank without rows: TorchRec dies on such a shard."""
    return -(-rows // ranks) * (ranks - 1) >= rows


def tiers_for(kind: str, tiers: tuple[str, ...], device_tier: str) -> list[str]:
    """The tiers that a sharding type can use: replicated tables live in the device's memory only."""
    if device_tier == "ddr":
        return ["ddr"] if "ddr" in tiers or "hbm" in tiers else []
    return [t for t in tiers if kind != "data_parallel" or t == device_tier]


GROUP = 4  # columns that the fused kernels read at once
MOST_STRIPS = 16  # of the columns of a table


def strips(dim: int, most: int = MOST_STRIPS) -> list[int]:
    """Numbers of equal strips of columns, at least two, each a multiple of 4 wide as the fused kernels want."""
    return [n for n in range(2, most + 1) if dim % n == 0 and dim // n % GROUP == 0]
