"""The columns of a row of pooled values, and the values that are kept of each."""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from hetrain.codec import kept
from hetrain.comms.largest import largest
from hetrain.comms.positions import pack_positions, position_bytes, unpack_positions


@dataclass(frozen=True)
class Columns:
    """Widths of the columns that lie side by side in a row; a column is one table's sum, or a piece of it."""

    dims: tuple[int, ...]

    @cached_property
    def width(self) -> int:
        """Values of a row."""
        return sum(self.dims)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(width, number) of columns that follow each other and are equally wide."""
        return [(dim, len(list(same))) for dim, same in groupby(self.dims)]


@dataclass(frozen=True)
class Kept:
    """Which values are kept: of every column the share 1 - sparsity of largest magnitude, at least one."""

    sparsity: float

    def of(self, dim: int) -> int:
        """Values kept of a column."""
        return kept(dim, self.sparsity)

    def count(self, columns: Columns) -> int:
        """Values kept of a row."""
        return sum(self.of(dim) for dim in columns.dims)

    def position_bytes(self, columns: Columns) -> int:
        """Bytes that their positions take."""
        return sum(position_bytes(self.of(dim), dim) for dim in columns.dims)

    def choose(self, rows: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
        """float32 [M, width] to positions in the row [M, count], and these as uint8 [M, position_bytes]."""
        found, packed, first = [], [], 0
        for dim, n in columns.runs:
            local = largest(rows[:, first : first + dim * n].reshape(-1, dim), self.of(dim))
            found.append(_in_row(local, len(rows), dim, n, first))
            packed.append(pack_positions(local, dim).view(len(rows), n * position_bytes(self.of(dim), dim)))
            first += dim * n
        return torch.cat(found, 1), torch.cat(packed, 1)

    def mask(self, rows: Tensor, columns: Columns) -> Tensor:
        """1 where a value of [M, width] is kept, else 0."""
        positions, _ = self.choose(rows.detach(), columns)
        return torch.zeros_like(rows).scatter_(1, positions, 1.0)

    def read(self, data: Tensor, columns: Columns) -> Tensor:
        """uint8 [M, position_bytes] as positions in the row [M, count]."""
        found, first, at = [], 0, 0
        for dim, n in columns.runs:
            each = position_bytes(self.of(dim), dim)
            local = unpack_positions(data[:, at : at + n * each].reshape(len(data) * n, each), self.of(dim), dim)
            found.append(_in_row(local, len(data), dim, n, first))
            first, at = first + dim * n, at + n * each
        return torch.cat(found, 1)


def _in_row(local: Tensor, m: int, dim: int, n: int, first: int) -> Tensor:
    """Positions in columns [M * n, k] as positions in rows [M, n * k]."""
    starts = torch.arange(first, first + n * dim, dim, device=local.device)
    k = local.shape[1]
    return (local.view(m, n, k) + starts[:, None]).view(m, n * k)
