"""The batches in flight: which rows their workers are about to update (capacity 0, rounds in two legs).

With an empty cache every row read is the owner's, with every update of the batch before in it. A round that is sent
while that batch is computed can answer for the rows the batch does not touch, whoever reads it; the others are late:
they are asked for again in the second leg, when their gradients are there. Those gradients are hot: the second leg
brings them. All others are needed later and wait for the next round, which runs beside computation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Flight:
    """Per block of a round, the rows that each worker read last. All rows are positions in the owner's memory."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Tensor]] = {}  # by block: per worker, in the order asked

    def turn(self, block: int, fetched: Sequence[Tensor], mark: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The next batch is read: `fetched` per worker [N]; it takes the place of the one in flight.

        `mark` [R]: scratch, of any content. Returns per worker whether the rows fetched are in flight [N], and
        whether those of its batch in flight, in the order it asked for them, are fetched by anybody.
        """
        flying = self._rows.get(block) or [rows[:0] for rows in fetched]
        late = _among(fetched, flying, mark)
        hot = _among(flying, fetched, mark)
        self._rows[block] = list(fetched)
        return late, hot

    def forget(self) -> None:
        """No batch is in flight: all its gradients were, or will be, pushed before anything else is read."""
        self._rows.clear()

    def state_dict(self) -> dict[int, list[Tensor]]:
        """Copies of all rows."""
        return {block: [rows.clone() for rows in parts] for block, parts in self._rows.items()}

    def load_state_dict(self, state: dict[int, list[Tensor]], device: torch.device) -> None:
        """Take up what `state_dict` gave."""
        self._rows = {block: [rows.to(device) for rows in parts] for block, parts in state.items()}


def _among(rows: Sequence[Tensor], others: Sequence[Tensor], mark: Tensor) -> list[Tensor]:
    """For each part of `rows`, which of them occur in any part of `others`."""
    for part in rows:
        mark.index_fill_(0, part, 0)
    for part in others:
        mark.index_fill_(0, part, 1)
    return [mark.index_select(0, part) == 1 for part in rows]
