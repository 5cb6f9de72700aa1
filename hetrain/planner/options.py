"""What a user may ask of every strategy: thresholds in elements, the sharding types allowed, rules per table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetrain.planner.piece import SHARDING_TYPES, TIERS


@dataclass(frozen=True)
class Constraint:
    """What one table may become; an empty field allows all that the options allow."""

    sharding_types: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    columns: int | None = None  # of each column piece


@dataclass(frozen=True)
class Options:
    """Thresholds are in elements (rows x dim); None leaves the choice to the strategy."""

    sharding_types: tuple[str, ...] = SHARDING_TYPES
    tiers: tuple[str, ...] = TIERS
    data_parallel_threshold: int | None = None  # tables up to it are replicated
    column_slice_threshold: int | None = None  # tables above it are cut by columns into pieces up to it
    row_slice_threshold: int | None = None  # tables from it on are cut by rows over all ranks
    constraints: Mapping[str, Constraint] = field(default_factory=dict)  # table name -> its rules
    effort: float = 1.0  # times the work of a search that could go on
    data_parallel_by_price: bool = True  # False: only what the threshold or a constraint says is replicated
