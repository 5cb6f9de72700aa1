"""What an owner keeps per row, known before it allocates anything."""

import torch

from hetrain.consistency import UNBOUNDED, staleness_bound
from hetrain.optim import RowOptimizer
from hetrain.store.directory import directory_columns
from hetrain.store.row_memory import Column


def directing_copies(held_back: bool, bound: int) -> bool:
    """Whether the owner keeps track of the workers' copies."""
    return held_back and bound < UNBOUNDED


def sends_notices(directory: bool, bound: int) -> bool:
    """Whether it warns of copies too old; at bound 0 a copy breaks its own bound once it was updated, unnoticed."""
    return directory and bound > 0


def owner_columns(
    dim: int,
    optimizer: RowOptimizer,
    *,
    held_back: bool,
    staleness: float,
    audit: bool,
    directory: bool,
    workers: int,
) -> dict[str, Column]:
    """What an owner made with these arguments keeps per row."""
    bound = staleness_bound(staleness)
    columns = {
        "value": Column((dim,), torch.float32),
        "state": Column((optimizer.state_width(dim),), torch.float32),
        "clock": Column((), torch.int64),  # c_g
        "touched": Column((), torch.bool),  # whether a push ever came
        "mark": Column((), torch.int32),  # scratch
    }
    if audit:
        columns["applied"] = Column((), torch.int64)  # updates taken
    if directing_copies(held_back, bound):
        columns |= directory_columns(workers, notices=sends_notices(directory, bound))
    return columns
