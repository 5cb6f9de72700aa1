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
        self.before = {name: tensor[:0].clone() for name, tensor in tensors.items()}  # [n, ...]

    def record(self, rows: Tensor) -> None:
        """Call before `rows` [m] (distinct) change; rows recorded already keep their first record."""
        new = rows[~torch.isin(rows, self.rows)]
        self.rows = torch.cat([self.rows, new])
        for name, tensor in self._tensors.items():
            self.before[name] = torch.cat([self.before[name], tensor.index_select(0, new)])

    def restore(self) -> None:
        """Put every recorded row back, bit for bit."""
        for name, tensor in self._tensors.items():
            tensor.index_copy_(0, self.rows, self.before[name])
