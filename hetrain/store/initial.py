"""Initial embedding rows from a counter-based generator.

A value depends on (seed, table, id, column) alone: not on plan, world size, device or order of
touch. Integer operations and exactly rounded float steps only, so that every device gives equal bits.
"""

import torch
from torch import Tensor

from hetrain.store.space import RowSpace

CHUNK = 1 << 16  # values worked on at a time: their int64 hashes stay in the CPU's cache


def _signed(constant: int) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _xor_shift_(x: Tensor, shift: int) -> Tensor:
    """x ^= x >>> shift, logical; torch's >> keeps the sign, so its copies are masked off."""
    shifted = x >> shift
    return x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))


def _mix_(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, in place; a bijection of 64-bit integers."""
    _xor_shift_(x, 30).mul_(_MIX_1)
    _xor_shift_(x, 27).mul_(_MIX_2)
    return _xor_shift_(x, 31)


def initial_rows(seed: int, table_index: int, ids: Tensor, dim: int, bound: float) -> Tensor:
    """Rows `ids` [n] int64 of table `table_index`, uniform in [-bound, bound): [n, dim] float32 on ids' device."""
    rows = torch.empty(len(ids), dim, dtype=torch.float32, device=ids.device)
    fill_initial_rows(rows, seed, table_index, ids, bound)
    return rows


def fill_initial_rows(out: Tensor, seed: int, table_index: int, ids: Tensor, bound: float) -> None:
    """Write the initial rows of `ids` [n] into `out` [n, D] float32."""
    dim = out.shape[1]
    stream = torch.tensor([seed], dtype=torch.int64, device=ids.device).mul_(_GOLDEN)
    stream = _mix_(_mix_(stream).add_(table_index + 1))
    columns = torch.arange(1, dim + 1, dtype=torch.int64, device=ids.device).mul_(_GOLDEN)
    step = max(1, CHUNK // dim)
    for first in range(0, len(ids), step):
        row = _mix_((ids[first : first + step] + 1).mul_(_GOLDEN).add_(stream))
        bits = _mix_(row[:, None] + columns)
        bits = bits.bitwise_right_shift_(40).bitwise_and_((1 << 24) - 1)
        # 24 bits: bits * 2^-23 - 1 is exact in float32, so `bound` brings the only rounding
        part = out[first : first + step]
        part.copy_(bits).mul_(2.0**-23).sub_(1.0).mul_(bound)


class InitialRows:
    """The initial rows of a row space's tables, by global row."""

    def __init__(self, space: RowSpace, seed: int) -> None:
        self._space, self._seed = space, seed
        self._ends = torch.tensor([*space.offsets[1:], space.rows])

    def fill(self, out: Tensor, rows: Tensor) -> None:
        """Write the initial values of global `rows` [n] int64 into `out` [n, D] float32."""
        table = torch.searchsorted(self._ends, rows, right=True)
        for number in torch.unique(table).tolist():
            at = torch.nonzero(table == number).flatten()
            part = torch.empty(len(at), out.shape[1])
            space = self._space
            fill_initial_rows(
                part,
                self._seed,
                space.table_index[number],
                rows[at] - space.offsets[number],
                space.tables[number].init_bound,
            )
            out[at] = part
