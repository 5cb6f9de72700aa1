"""Row ranges of one table for the owners of a store: boundaries where the lookups are even, not the rows."""

from collections.abc import Sequence


def even_ranges(row_quantiles: Sequence[int], parts: int) -> list[int]:
    """Boundaries of `parts` ranges of rows that take about equal shares of a table's lookups, from 0 to its rows.

    row_quantiles: as Skew has them: n + 1 rows, the k-th the first with k / n of the lookups below it, the last the
        table's rows.
    parts: at most the table's rows; every range has a row at least.

    Raises ValueError for more parts than rows. A row is never cut: where one takes more than a share, its range is
    larger than the others'.
    """
    rows, known = row_quantiles[-1], len(row_quantiles) - 1
    if not 0 < parts <= rows:
        raise ValueError(f"{rows} rows in {parts} ranges")
    bounds = [0]
    for part in range(1, parts):
        at, rest = divmod(part * known, parts)
        low, high = row_quantiles[at], row_quantiles[min(at + 1, known)]
        wanted = low + (high - low) * rest // parts
        bounds.append(min(max(wanted, bounds[-1] + 1), rows - (parts - part)))
    return [*bounds, rows]
