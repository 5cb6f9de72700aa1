"""Remembers rows as they were before a view changed them."""

import torch
from torch import Tensor

from hetrain.store.messages import none


class UndoLog:
    """The first state of every row that was about to change, for tensors that share their first axis."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """`tensors`: name to [R, ...]; changed by others between `record` and `restore`."""
        self._tensors = tensors
        self.rows = none(next(iter(tensors.values())).device)  # [n] distinct
        self._records: list[tuple[Tensor, dict[str, Tensor]]] = []  # rows, and what they were

    @property
    def before(self) -> dict[str, Tensor]:
        """What `rows` were, [n, ...] by name; copies."""
        return {
            name: torch.cat([tensor[:0], *(before[name] for _, before in self._records)])
            for name, tensor in self._tensors.items()
        }

    def record(self, rows: Tensor) -> None:
        """Call before `rows` [m] (distinct) change; rows recorded already keep their first record."""
        new = rows[~torch.isin(rows, self.rows)]
        self.rows = torch.cat([self.rows, new])
        self._records.append((new, {name: tensor.index_select(0, new) for name, tensor in self._tensors.items()}))

    def restore(self) -> None:
        """Put every recorded row back, bit for bit."""
        for rows, before in self._records:
            for name, tensor in self._tensors.items():
                tensor.index_copy_(0, rows, before[name])
