"""The coherence directory: which workers hold copies of a row, and how far behind a copy may be at most.

With clock validation every hit sends its clock to the owner. Here the owner keeps, per row and worker, a lower bound
L of the clock `c_c` that the copy will have at its next read: one more than at the read it was fetched or checked
for, whose batch updates it. Hits only raise `c_c`, silently. While `c_g <= L + s` no copy can break the others'
bound. When a push raises `c_g` beyond that, the owner sends one notice and forgets the holder; the worker then decides
with its own clock at the copy's next read (Cache.begin).

In either validation the owner also knows whose copies nobody else has changed since: pushed and fetched again, such
a row need not be sent back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hetrain.consistency import breaks_others_bound
from hetrain.store.row_memory import Column, RowMemory

NONE = -1  # in place of L: the worker holds no copy, or doubts the one it holds


def directory_columns(workers: int, *, notices: bool) -> dict[str, Column]:
    """What the directory keeps per row: 1 byte per worker, and 4 more for notices."""
    alone = {"alone": Column((workers,), torch.bool)}  # the worker's base is the row as it is
    return alone | {"held": Column((workers,), torch.int32, NONE)} if notices else alone  # L


class Directory:
    """What an owner knows of the copies of its rows. All rows are positions in the owner's memory."""

    def __init__(self, memory: RowMemory, workers: int, bound: int, *, notices: bool) -> None:
        """`memory` has the columns of `directory_columns`."""
        self._memory, self._workers, self._bound, self._notices = memory, workers, bound, notices

    @property
    def notices_sent(self) -> bool:
        """Whether it validates copies; otherwise they send their clocks."""
        return self._notices

    @property
    def _alone(self) -> Tensor:
        return self._memory["alone"]  # [R, W]

    @property
    def held(self) -> Tensor:
        """Lower bounds L of the clocks of all workers' copies: [R, W] int32, -1 for none; with notices alone."""
        return self._memory["held"]

    def pushed(
        self, workers: Sequence[int], rows: Sequence[Tensor], distinct: Tensor, places: Sequence[Tensor]
    ) -> None:
        """A round's pushes: `workers[i]` pushed `rows[i]`, which lie at `places[i]` in `distinct` [U].

        With one worker `places` is empty. A pusher that was alone stays so, if nobody else pushed the row.
        """
        alone = [self._alone[part, worker] for worker, part in zip(workers, rows, strict=True)]
        if places:
            pushers = torch.zeros(len(distinct), dtype=torch.int32, device=distinct.device)
            for place in places:
                pushers.index_add_(0, place, torch.ones_like(place, dtype=torch.int32))
            alone = [was & (pushers[place] == 1) for was, place in zip(alone, places, strict=True)]
        self._alone.index_fill_(0, distinct, False)
        for worker, part, still in zip(workers, rows, alone, strict=True):
            self._alone[part, worker] = still
            if self._notices:
                self.held[part, worker] = NONE

    def fetched(self, worker: int, rows: Tensor, clock: Tensor) -> None:
        """`worker` reads `rows` [n] as they are, with clocks of at least `clock` [n]."""
        self._alone[rows, worker] = True
        self.checked(worker, rows, clock)

    def checked(self, worker: int, rows: Tensor, clock: Tensor) -> None:
        """`worker` reads its copies of `rows` [n] with clocks of at least `clock` [n]: one more at the next read."""
        if self._notices:
            self.held[rows, worker] = clock.to(torch.int32) + 1

    def notices(self, rows: Tensor, clock: Tensor) -> list[Tensor]:
        """Per worker, positions in distinct `rows` [n] whose copies `clock` [n] may have left behind; drops them."""
        if not self._notices:
            return [rows[:0]] * self._workers
        held = self.held.index_select(0, rows)
        doubtful = (held != NONE) & breaks_others_bound(clock.unsqueeze(1), held, self._bound)
        self.held.index_copy_(0, rows, held.masked_fill(doubtful, NONE))
        return [torch.nonzero(doubtful[:, worker]).flatten() for worker in range(self._workers)]

    def is_alone(self, worker: int, rows: Tensor) -> Tensor:
        """Where nobody but `worker` changed `rows` [n] since it fetched them: [n] bool."""
        return self._alone[rows, worker]
