"""The coherence directory: which workers hold copies of a row, and how far behind a copy may be at most.

With clock validation every hit sends its clock to the owner. Here the owner keeps, per row and worker, a lower bound
L of the copy's clock `c_c`, taken when the copy was fetched or last checked; hits only raise `c_c`, silently. While
`c_g <= L + s` no copy can break the others' bound. When a push raises `c_g` beyond that, the owner sends one notice
and forgets the holder; the worker then decides with its own clock at the copy's next read (Cache.begin).
"""

import torch
from torch import Tensor

from hetrain.consistency import breaks_others_bound

NONE = -1  # in place of L: the worker holds no copy, or doubts the one it holds


class Directory:
    """L of every row of an owner, for every worker: 4 bytes each."""

    def __init__(self, rows: int, workers: int, bound: int, device: torch.device) -> None:
        self.held = torch.full((rows, workers), NONE, dtype=torch.int32, device=device)  # [R, W]
        self.bound = bound

    def drop(self, worker: int, rows: Tensor) -> None:
        """`worker` holds `rows` [n] no longer."""
        self.held[rows, worker] = NONE

    def hold(self, worker: int, rows: Tensor, clock: Tensor) -> None:
        """`worker`'s copies of `rows` [n] have clocks of at least `clock` [n]."""
        self.held[rows, worker] = clock.to(torch.int32)

    def notices(self, rows: Tensor, clock: Tensor) -> list[Tensor]:
        """Per worker, positions in distinct `rows` [n] whose copies `clock` [n] may have left behind; drops them."""
        held = self.held.index_select(0, rows)
        doubtful = (held != NONE) & breaks_others_bound(clock.unsqueeze(1), held, self.bound)
        self.held.index_copy_(0, rows, held.masked_fill(doubtful, NONE))
        return [torch.nonzero(doubtful[:, worker]).flatten() for worker in range(held.shape[1])]
