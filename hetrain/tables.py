"""An embedding table as every part of hetrain sees it."""

from dataclasses import dataclass

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
