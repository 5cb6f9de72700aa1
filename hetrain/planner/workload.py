"""What a step asks of each table: lookups per example, bytes per row, and the skew of its ids where known."""

from bisect import bisect_right
from dataclasses import dataclass, replace

from hetrain.tables import Table

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Skew:
    """How the lookups of one table spread over its rows, as `hetrain stats` measures it.

    Shares are of all lookups, between 0 and 1.
    """

    unique: tuple[tuple[float, float], ...]  # (lookups, distinct ids expected among them), by lookups
    top: tuple[tuple[float, float], ...]  # (share of the distinct ids, the most frequent first; their share of lookups)
    # n + 1 rows from 0 to the table's: the k-th is the first with k / n of the lookups below it; () is not known
    row_quantiles: tuple[int, ...] = ()

    def unique_ids(self, lookups: float) -> float:
        """Distinct ids expected among `lookups`, between the measured points by straight lines, flat after the last."""
        return min(lookups, _between(((0.0, 0.0), *self.unique), lookups))

    def top_share(self, ids: float) -> float:
        """Share of the lookups that the most frequent `ids` (a share of all) take, by straight lines from 0 to 1."""
        return _between(((0.0, 0.0), *self.top, (1.0, 1.0)), ids)

    def share_below(self, row: int) -> float:
        """Share of the lookups of ids under `row`, between the quantiles by straight lines."""
        parts = len(self.row_quantiles) - 1
        points = [(float(r), k / parts) for k, r in enumerate(self.row_quantiles)]
        return _between(tuple(points), float(row))


def _between(points: tuple[tuple[float, float], ...], x: float) -> float:
    """The value at `x` on straight lines between `points`, sorted by x; where several share an x, the last one's."""
    at = bisect_right(points, x, key=lambda point: point[0])
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1]
    (low, start), (high, end) = points[at - 1], points[at]
    return start + (end - start) * (x - low) / (high - low)


@dataclass(frozen=True)
class TableLoad:
    """One table and what one example asks of it."""

    table: Table
    poolings: tuple[float, ...]  # mean bag length of each input feature that reads the table: two for a shared one
    element_bytes: int = FLOAT_BYTES
    state_bytes_per_row: int = 0  # of the optimizer: 0 for SGD, 4 row-wise Adagrad, 4 x dim Adagrad
    skew: Skew | None = None

    @property
    def pooling(self) -> float:
        """Lookups per example, of all inputs."""
        return sum(self.poolings)

    @property
    def inputs(self) -> int:
        """Features that read the table."""
        return len(self.poolings)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row and its optimizer state."""
        return self.table.dim * self.element_bytes + self.state_bytes_per_row

    @property
    def elements(self) -> int:
        """Numbers in the table, as the thresholds count them."""
        return self.table.rows * self.table.dim

    def strip(self, columns: int) -> "TableLoad":
        """As if the table had `columns` of its columns alone, which is what a strip of them costs."""
        state = self.state_bytes_per_row * columns // self.table.dim
        return replace(self, table=replace(self.table, dim=columns), state_bytes_per_row=state)
