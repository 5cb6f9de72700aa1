"""The k values of largest magnitude in every row."""

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SHIFTS = (23, 15, 7, 0)  # a magnitude's bits are looked at eight at a time, from the exponent down; seven remain


def largest(values: Tensor, k: int) -> Tensor:
    """Positions of every row's k values of largest magnitude, ascending: float32 [M, D] to int64 [M, k].

    NaN counts as the largest. Among equal magnitudes the CPU takes the first ones, CUDA any.
    """
    if k == values.shape[1]:
        return torch.arange(k, device=values.device).expand(len(values), k)
    if values.is_cuda:
        return values.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    found = np.empty((len(values), k), np.int64)
    _select(values.detach().contiguous().numpy().view(np.uint32), found)
    return torch.from_numpy(found)


@njit(cache=True, nogil=True)
def _select(rows: NDArray[np.uint32], found: NDArray[np.int64]) -> None:
    """Radix selection: bits of magnitudes are ordered as magnitudes are. 4 ns a value, where topk takes 12 to 15."""
    width, k = rows.shape[1], found.shape[1]
    if k == 0:
        return
    left = np.empty(width, np.uint32)  # magnitudes that share the bits of the k-th largest seen so far
    counts = np.empty(256, np.int64)
    for m in range(rows.shape[0]):
        n, wanted, least = width, k, np.uint32(0)
        for j in range(width):
            left[j] = rows[m, j] & _MAGNITUDE
        for shift in _SHIFTS:
            counts[:] = 0
            for j in range(n):
                counts[(left[j] >> np.uint32(shift)) & np.uint32(255)] += 1
            bucket = 255
            while counts[bucket] < wanted:
                wanted -= counts[bucket]
                bucket -= 1
            least |= np.uint32(bucket) << np.uint32(shift)
            kept = 0
            for j in range(n):
                if (left[j] >> np.uint32(shift)) & np.uint32(255) == bucket:
                    left[kept] = left[j]
                    kept += 1
            n = kept
        at = 0
        for j in range(width):
            magnitude = rows[m, j] & _MAGNITUDE
            if magnitude > least or (magnitude == least and wanted > 0):
                wanted -= magnitude == least
                found[m, at] = j
                at += 1
