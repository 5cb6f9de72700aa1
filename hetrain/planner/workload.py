"""What a step asks of each table: lookups per example, bytes per row, and the skew of its ids where known."""

from bisect import bisect_left
from dataclasses import dataclass

from hetrain.tables import Table

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Skew:
    """How the lookups of one table spread over its rows, as `hetrain stats` measures it.

    Shares are of all lookups, between 0 and 1.
    """

    unique: tuple[tuple[float, float], ...]  # (lookups, distinct ids expected among them), by lookups
    top: tuple[tuple[float, float], ...]  # (share of the distinct ids, the most frequent first; their share of lookups)
    row_quantiles: tuple[int, ...] = ()  # n + 1 rows: k / n of the lookups are of ids below the k-th; () is unknown

    def unique_ids(self, lookups: float) -> float:
        """Distinct ids expected among `lookups`, between the measured points by straight lines, flat after the last."""
        xs = [0.0, *(x for x, _ in self.unique)]
        ys = [0.0, *(y for _, y in self.unique)]
        at = bisect_left(xs, lookups)
        if at == len(xs) or at == 0:
            return min(lookups, ys[-1] if at else 0.0)
        share = (lookups - xs[at - 1]) / (xs[at] - xs[at - 1])
        return min(lookups, ys[at - 1] + share * (ys[at] - ys[at - 1]))


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
