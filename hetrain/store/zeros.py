"""Zeroed memory that takes none before it is written.

`torch.zeros` writes its zeros on the CPU, so that memory for rows to come is taken at once: 3.4M slots of 128 values
took 3.5 GB. The system gives zeroed pages by itself, page by page when they are first written.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor

LINE = 64  # bytes; a row of 16 values should not lie on two cache lines


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of `shape`, contiguous; on the CPU untouched, and aligned to cache lines."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    raw = np.zeros(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
