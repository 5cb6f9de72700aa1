"""Clocks as the previous round left them: what a read is promised is about those."""

import torch
from torch import Tensor


class ClocksBefore:
    """The clocks that the pushes of the newest round replaced. Rows are positions in the owner's memory."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Tensor, Tensor]] = []  # rows [n] distinct and their clocks [n], push after push

    def open(self) -> None:
        """A round begins."""
        self._replaced = []

    def record(self, rows: Tensor, clock: Tensor) -> None:
        """`rows` [n], distinct, which had `clock` [n], are about to be pushed to."""
        self._replaced.append((rows, clock))

    def of(self, rows: Tensor, clock: Tensor) -> Tensor:
        """Clocks of `rows` [n] before the newest round; `clock` [n] are those they have now."""
        before = clock.clone()
        for pushed, replaced in reversed(self._replaced):  # the first push of a round found what the one before left
            ascending, order = torch.sort(pushed)
            at = torch.searchsorted(ascending, rows).clamp_(max=max(len(pushed) - 1, 0))
            hit = ascending[at] == rows
            before[hit] = replaced[order][at[hit]]
        return before
