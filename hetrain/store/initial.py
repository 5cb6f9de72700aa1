"""Initial embedding rows from a counter-based generator.

A value depends on (seed, table, id, column) alone: not on plan, world size, device or order of
touch. Integer operations and exactly rounded float steps only, so that every device gives equal bits.
Rows in CPU memory are made by a compiled loop, others by torch.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from hetrain.store.mix import GOLDEN, MIX_1, MIX_2, mix
from hetrain.store.space import RowSpace

CHUNK = 1 << 16  # values torch works on at a time: their int64 hashes stay in the CPU's cache


def _signed(constant: np.uint64) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits."""
    return int(constant.astype(np.int64))


_GOLDEN, _MIX_1, _MIX_2 = _signed(GOLDEN), _signed(MIX_1), _signed(MIX_2)


class InitialRows:
    """The initial rows of all tables of a row space, by global row."""

    def __init__(self, space: RowSpace, seed: int) -> None:
        self._tables = _Tables(seed, space.table_index, space.offsets, [table.init_bound for table in space.tables])

    def fill(self, out: Tensor, rows: Tensor) -> None:
        """Write initial rows `rows` [n] int64, global, into `out` [n, D] float32; both on one device."""
        self._tables.fill(out, rows)


def initial_rows(seed: int, table_index: int, ids: Tensor, dim: int, bound: float) -> Tensor:
    """Rows `ids` [n] int64 of table `table_index`, uniform in [-bound, bound): [n, dim] float32 on ids' device."""
    rows = torch.empty(len(ids), dim, dtype=torch.float32, device=ids.device)
    fill_initial_rows(rows, seed, table_index, ids, bound)
    return rows


def fill_initial_rows(out: Tensor, seed: int, table_index: int, ids: Tensor, bound: float) -> None:
    """Write the initial rows of `ids` [n] into `out` [n, D] float32; both on one device."""
    _Tables(seed, [table_index], [0], [bound]).fill(out, ids)


class _Tables:
    """Tables side by side in one range of rows: where each begins, its stream of random bits, and its bound."""

    def __init__(self, seed: int, indices: Any, offsets: Any, bounds: Any) -> None:
        self.offsets: NDArray[np.int64] = np.array(offsets, np.int64)  # ascending
        self.streams = _streams(np.array([seed], np.int64), np.array(indices, np.int64))
        self.bounds: NDArray[np.float32] = np.array(bounds, np.float32)

    def fill(self, out: Tensor, rows: Tensor) -> None:
        if out.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous():
            ids = rows.contiguous().numpy()
            if len(ids) != len(out):
                raise ValueError(f"{len(ids)} rows to write into {tuple(out.shape)}")
            _fill(out.detach().numpy(), ids, self.offsets, self.streams, self.bounds)
        else:
            _fill_torch(out, rows, self)


# -- CPU ------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _streams(seed: Any, indices: Any) -> Any:
    """The stream of each table: [T] uint64."""
    out = np.empty(len(indices), np.uint64)
    for i in range(len(indices)):
        out[i] = mix(mix(np.uint64(seed[0]) * GOLDEN) + np.uint64(indices[i] + 1))
    return out


@njit(cache=True, nogil=True)
def _table_of(offsets: Any, row: Any) -> Any:
    """The last table that begins at or before `row`."""
    first, length = 0, len(offsets)
    while length > 1:
        half = length >> 1
        first = first + half if offsets[first + half] <= row else first
        length -= half
    return first


@njit(cache=True, nogil=True)
def _fill(out: Any, rows: Any, offsets: Any, streams: Any, bounds: Any) -> None:
    """24 bits per value: bits * 2^-23 - 1 is exact in float32, so that the bound brings the only rounding."""
    for i in range(len(rows)):
        table = _table_of(offsets, rows[i])
        key = mix(np.uint64(rows[i] - offsets[table] + 1) * GOLDEN + streams[table])
        bound = bounds[table]
        for c in range(out.shape[1]):
            bits = np.int32(mix(key + np.uint64(c + 1) * GOLDEN) >> np.uint64(40))
            out[i, c] = (np.float32(bits) * np.float32(2.0**-23) - np.float32(1.0)) * bound


# -- other devices --------------------------------------------------------------------------------


def _fill_torch(out: Tensor, rows: Tensor, tables: _Tables) -> None:
    """As _fill, on the device of `out` and `rows`."""
    device, dim = rows.device, out.shape[1]
    offsets = torch.from_numpy(tables.offsets).to(device)
    streams = torch.from_numpy(tables.streams.view(np.int64)).to(device)
    bounds = torch.from_numpy(tables.bounds).to(device)
    columns = torch.arange(1, dim + 1, dtype=torch.int64, device=device).mul_(_GOLDEN)
    step = max(1, CHUNK // dim)
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        table = torch.searchsorted(offsets, some, right=True).sub_(1)
        row = _mix_((some - offsets[table]).add_(1).mul_(_GOLDEN).add_(streams[table]))
        bits = _mix_(row[:, None] + columns)
        bits = bits.bitwise_right_shift_(40).bitwise_and_((1 << 24) - 1)
        part = out[first : first + step]
        part.copy_(bits).mul_(2.0**-23).sub_(1.0).mul_(bounds[table][:, None])


def _xor_shift_(x: Tensor, shift: int) -> Tensor:
    """x ^= x >>> shift, logical; torch's >> keeps the sign, so its copies are masked off."""
    shifted = x >> shift
    return x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))


def _mix_(x: Tensor) -> Tensor:
    """`mix`, in place."""
    _xor_shift_(x, 30).mul_(_MIX_1)
    _xor_shift_(x, 27).mul_(_MIX_2)
    return _xor_shift_(x, 31)
