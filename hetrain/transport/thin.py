"""Rows of halves most of which are zero: only the others travel, and where they belong.

A row with few zeros travels whole. Of the others the positions of what is not zero, counted through all of them,
ascend: transport/compact.py writes the steps between them. With every tenth value kept that takes about 5 bits a
value, where a bitmap takes 10, 8-bit columns 8 and 16-bit ones 16.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from hetrain.store.index import Ints
from hetrain.transport.compact import Reader, Writer

WHOLE = 0.9  # share of values other than zero from which a row travels whole: positions would save little of it
NO_SIGN = 0x7FFF  # the bits of a half that are 0 where it is 0


@dataclass
class Thin:
    """What travels of rows [n, 2 D] uint8."""

    whole: NDArray[np.bool_]  # [n]
    positions: Ints  # [k] D * row + column, of the rows that are not whole
    values: Tensor  # uint8, bytes of the rows that are whole, then those at the positions

    def write(self, writer: Writer) -> None:
        """What the head says."""
        writer.flags(self.whole)
        writer.count(len(self.positions), 0)
        writer.integers(self.positions)

    @classmethod
    def read(cls, reader: Reader, n: int, row_bytes: int, data: Tensor) -> "Thin":
        """What `write` wrote of `n` rows; the values begin at `data`."""
        whole = reader.flags(n)
        positions = reader.integers(reader.count(0))
        return cls(whole, positions, data[: int(whole.sum()) * row_bytes + 2 * len(positions)])

    def spread(self, row_bytes: int) -> Tensor:
        """The rows, [n, row_bytes] uint8."""
        halves = self.values.view(torch.int16)
        rows = halves.new_zeros(len(self.whole), row_bytes // 2)
        at = torch.from_numpy(np.flatnonzero(self.whole)).to(rows.device)
        first = halves[: len(at) * rows.shape[1]]
        rows.index_copy_(0, at, first.view(len(at), rows.shape[1]))
        rows.view(-1).index_copy_(0, torch.from_numpy(self.positions).to(rows.device), halves[len(first) :])
        return rows.view(torch.uint8)


def thin_out(rows: Tensor) -> Thin:
    """What has to travel of `rows` [n, 2 D], bytes of halves; a zero may come back with another sign."""
    halves = rows.contiguous().view(torch.int16)
    if halves.is_cuda:
        return _thin_out(halves)
    bits = halves.numpy()
    whole, values, positions = np.empty(len(bits), bool), np.empty(bits.size, np.int16), np.empty(bits.size, np.int64)
    count, few = _select(bits, whole, values, positions)
    data = torch.from_numpy(values[:count].view(np.uint8).copy())
    return Thin(whole, positions[:few].copy(), data)


def _thin_out(halves: Tensor) -> Thin:
    kept = halves & NO_SIGN != 0
    whole = kept.sum(1) >= WHOLE * halves.shape[1]
    positions = torch.nonzero((kept & ~whole.unsqueeze(1)).view(-1)).flatten()
    values = torch.cat([halves[whole].view(-1), halves.view(-1).index_select(0, positions)])
    return Thin(whole.cpu().numpy(), positions.cpu().numpy(), values.view(torch.uint8))


@njit(cache=True, nogil=True)
def _select(halves: Any, whole: NDArray[np.bool_], values: NDArray[np.int16], positions: Ints) -> tuple[int, int]:
    """Fills `whole`, `values` and `positions`; how many values and positions there are."""
    n, width = halves.shape
    at = 0
    for i in range(n):
        kept = 0
        for column in range(width):
            kept += halves[i, column] & NO_SIGN != 0
        whole[i] = kept >= WHOLE * width
        if whole[i]:
            values[at : at + width] = halves[i]
            at += width
    few = 0
    for i in range(n):
        if not whole[i]:
            for column in range(width):
                if halves[i, column] & NO_SIGN != 0:
                    values[at + few], positions[few] = halves[i, column], width * i + column
                    few += 1
    return at + few, few
