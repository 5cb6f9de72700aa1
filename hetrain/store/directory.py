"""The coherence directory: which workers hold copies of a row, and how far behind a copy may be at most.

With clock validation every hit sends its clock to the owner. Here the owner keeps, per row and worker, a lower bound
L of the copy's clock `c_c`, taken when the copy was fetched or last checked; hits only raise `c_c`, silently. While
`c_g <= L + s` no copy can break the others' bound. When a push raises `c_g` beyond that, the owner sends one notice
and forgets the holder; the worker then decides with its own clock at the copy's next read (Cache.begin).

In either validation the owner also knows whose copies nobody else has changed since: pushed and fetched again, such
a row need not be sent back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hetrain.consistency import breaks_others_bound

NONE = -1  # in place of L: the worker holds no copy, or doubts the one it holds


class Directory:
    """What an owner knows of the copies of its rows: 5 bytes per row and worker, 1 where clocks validate."""

    def __init__(self, rows: int, workers: int, bound: int, device: torch.device, *, notices: bool) -> None:
        self.bound, self._notices = bound, notices
        self.held = torch.full((rows if notices else 0, workers), NONE, dtype=torch.int32, device=device)  # [R, W] L
        self.alone = torch.zeros((rows, workers), dtype=torch.bool, device=device)  # [R, W] the base is the row as is

    def pushed(
        self, workers: Sequence[int], rows: Sequence[Tensor], distinct: Tensor, places: Sequence[Tensor]
    ) -> None:
        """A round's pushes: `workers[i]` pushed `rows[i]`, which lie at `places[i]` in `distinct` [U].

        With one worker `places` is empty. A pusher that was alone stays so, if nobody else pushed the row.
        """
        alone = [self.alone[part, worker] for worker, part in zip(workers, rows, strict=True)]
        if places:
            pushers = torch.zeros(len(distinct), dtype=torch.int32, device=distinct.device)
            for place in places:
                pushers.index_add_(0, place, torch.ones_like(place, dtype=torch.int32))
            alone = [was & (pushers[place] == 1) for was, place in zip(alone, places, strict=True)]
        self.alone.index_fill_(0, distinct, False)
        for worker, part, still in zip(workers, rows, alone, strict=True):
            self.alone[part, worker] = still
            if self._notices:
                self.held[part, worker] = NONE

    def fetched(self, worker: int, rows: Tensor, clock: Tensor) -> None:
        """`worker` has copies of `rows` [n] as they are, with clocks `clock` [n]."""
        self.alone[rows, worker] = True
        self.checked(worker, rows, clock)

    def checked(self, worker: int, rows: Tensor, clock: Tensor) -> None:
        """`worker`'s copies of `rows` [n] have clocks of at least `clock` [n]."""
        if self._notices:
            self.held[rows, worker] = clock.to(torch.int32)

    def notices(self, rows: Tensor, clock: Tensor) -> list[Tensor]:
        """Per worker, positions in distinct `rows` [n] whose copies `clock` [n] may have left behind; drops them."""
        if not self._notices:
            return [rows[:0]] * self.alone.shape[1]
        held = self.held.index_select(0, rows)
        doubtful = (held != NONE) & breaks_others_bound(clock.unsqueeze(1), held, self.bound)
        self.held.index_copy_(0, rows, held.masked_fill(doubtful, NONE))
        return [torch.nonzero(doubtful[:, worker]).flatten() for worker in range(held.shape[1])]

    def clear(self) -> None:
        """Nobody is known to hold anything."""
        self.held.fill_(NONE)
        self.alone.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"held": self.held, "alone": self.alone}
