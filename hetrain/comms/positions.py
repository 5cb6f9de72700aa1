"""Positions of the values kept in a row, in as few bytes as their number allows. Sizes follow from the shape alone."""

import torch
from torch import Tensor

_BITS = 8
_INTEGERS = ((1 << 8, torch.uint8), (1 << 16, torch.uint16), (1 << 31, torch.int32))


def position_bytes(k: int, width: int) -> int:
    """Bytes that k positions below `width` take: a bitmap, or integers of 8, 16 or 32 bits; none where all are kept."""
    return 0 if k == width else min(_bitmap_bytes(width), k * _integer(width).itemsize)


def pack_positions(positions: Tensor, width: int) -> Tensor:
    """Ascending int64 [M, k], each below `width`, as uint8 [M, position_bytes(k, width)]."""
    m, k = positions.shape
    if k == width:
        return positions.new_empty((m, 0), dtype=torch.uint8)
    if position_bytes(k, width) < _bitmap_bytes(width):
        return positions.to(_integer(width)).view(torch.uint8)
    nbytes = _bitmap_bytes(width)
    bits = positions.new_zeros((m, nbytes * _BITS), dtype=torch.uint8).scatter_(1, positions, 1)
    return (bits.view(m, nbytes, _BITS) * _weights(positions.device)).sum(2, dtype=torch.uint8)


def unpack_positions(data: Tensor, k: int, width: int) -> Tensor:
    """uint8 [M, position_bytes(k, width)] as ascending int64 [M, k]."""
    m = len(data)
    if k == width:
        return torch.arange(k, device=data.device).expand(m, k)
    if data.shape[1] < _bitmap_bytes(width):
        return data.contiguous().view(_integer(width)).to(torch.int64)
    bits = (data.unsqueeze(2) & _weights(data.device)).view(m, data.shape[1] * _BITS)
    return bits.nonzero()[:, 1].view(m, k)


def _bitmap_bytes(width: int) -> int:
    return -(-width // _BITS)


def _integer(width: int) -> torch.dtype:
    return next(dtype for limit, dtype in _INTEGERS if width <= limit)


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([1 << bit for bit in range(_BITS)], dtype=torch.uint8, device=device)
