"""The batches in flight: which rows their workers are about to update (capacity 0, rounds with a late leg).

With an empty cache every row read is the owner's, with every update of the batch before in it. A round that runs while
that batch is computed can bring the rows the batch does not touch, whoever reads it; the others are late: they are
fetched in a second leg, when their gradients are there. Those gradients are hot: the second leg brings them. All
others are needed later and wait for the next round, which runs beside computation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Flight:
    """The rows that each worker announced last. All rows are positions in the owner's memory."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []  # by worker, in the order announced
        self._late: list[Tensor] = []  # those of them that have to wait

    def turn(self, announced: Sequence[Tensor], mark: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The next batch: `announced` per worker [N]; it takes the place of the one in flight.

        `mark` [R]: scratch, of any content. Returns per worker whether the rows announced are in flight [N], and
        whether those of its batch in flight, in the order it announced them, are read by anybody.
        """
        flying = self._rows or [rows[:0] for rows in announced]
        late = _among(announced, flying, mark)
        hot = _among(flying, announced, mark)
        self._rows = list(announced)
        self._late = [rows[waits] for rows, waits in zip(announced, late, strict=True)]
        return late, hot

    def waits(self, worker: int, rows: Tensor) -> Tensor:
        """Which of the `rows` [N] that `worker` announced have to wait for the late leg: [N] bool."""
        return torch.isin(rows, self._late[worker]) if self._late else torch.zeros_like(rows, dtype=torch.bool)

    def forget(self) -> None:
        """No batch is in flight: all its gradients were, or will be, pushed before anything else is read."""
        self._rows, self._late = [], []

    def state_dict(self) -> list[Tensor]:
        """Copies of all rows."""
        return [rows.clone() for rows in self._rows]

    def load_state_dict(self, state: Sequence[Tensor], device: torch.device) -> None:
        """Take up what `state_dict` gave, between two rounds."""
        self._late = []
        self._rows = [rows.to(device) for rows in state]


def _among(rows: Sequence[Tensor], others: Sequence[Tensor], mark: Tensor) -> list[Tensor]:
    """For each part of `rows`, which of them occur in any part of `others`."""
    for part in rows:
        mark.index_fill_(0, part, 0)
    for part in others:
        mark.index_fill_(0, part, 1)
    return [mark.index_select(0, part) == 1 for part in rows]
