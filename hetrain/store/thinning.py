"""Gradients of rows and what waits for those rows, taken apart by a threshold: on a CPU as compiled passes.

For 900 rows of 128 float32, on one thread, gathering, adding, comparing, masking and putting back with torch makes some
ten passes and as many new tensors; these make three.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from hetrain.store.index import Ints


def with_waiting(gradient: Tensor, waiting: Tensor, slots: Ints) -> Tensor:
    """`gradient` [U, D] with `waiting` [R, D] of its rows on top; `slots` [U] where each waits, -1: nowhere."""
    if _plain(gradient, waiting):
        total = torch.empty(gradient.shape)
        _add_waiting(gradient.detach().contiguous().numpy(), waiting.numpy(), slots, total.numpy())
        return total
    at, place = _places(slots, gradient.device)
    return gradient.index_add(0, place, waiting.index_select(0, at))


def thinned(total: Tensor, least: float, whole: NDArray[np.bool_]) -> Tensor:
    """`total` [U, D] without values smaller than `least`, in rows that are not `whole` [U]; NaN stays, to be seen."""
    if _plain(total):
        kept = torch.empty(total.shape)
        _thin(total.numpy(), np.float32(least), whole, kept.numpy())
        return kept
    all_of_it = torch.from_numpy(whole).to(total.device).unsqueeze(1)
    return total.masked_fill((total.abs() < least) & ~all_of_it, 0)


def put_rest(waiting: Tensor, slots: Ints, total: Tensor, sent: Tensor) -> None:
    """What waits for the rows in `slots` [U] is `total` - `sent` [U, D] now; -1: there is no room for it."""
    if _plain(waiting, total, sent):
        _put_rest(waiting.numpy(), slots, total.numpy(), sent.contiguous().numpy())
        return
    at, place = _places(slots, total.device)
    waiting.index_copy_(0, at, (total - sent).index_select(0, place))


def _plain(*tensors: Tensor) -> bool:
    return all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def _places(slots: Ints, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where rows wait, and which rows these are."""
    here = np.flatnonzero(slots >= 0)
    return torch.from_numpy(slots[here]).to(device), torch.from_numpy(here).to(device)


@njit(cache=True, nogil=True)
def _add_waiting(gradient: Any, waiting: Any, slots: Ints, total: Any) -> None:
    for i in range(len(slots)):
        if slots[i] < 0:
            total[i] = gradient[i]
        else:
            row = waiting[slots[i]]
            for column in range(total.shape[1]):
                total[i, column] = gradient[i, column] + row[column]


@njit(cache=True, nogil=True)
def _thin(total: Any, least: np.float32, whole: NDArray[np.bool_], kept: Any) -> None:
    for i in range(len(whole)):
        values, out = total[i], kept[i]
        if whole[i]:
            out[:] = values
        else:
            for column in range(len(values)):  # times 0 or 1, not a branch: compiled to vector instructions
                out[column] = values[column] * np.float32(not abs(values[column]) < least)


@njit(cache=True, nogil=True)
def _put_rest(waiting: Any, slots: Ints, total: Any, sent: Any) -> None:
    for i in range(len(slots)):
        if slots[i] >= 0:
            row = waiting[slots[i]]
            for column in range(total.shape[1]):
                row[column] = total[i, column] - sent[i, column]
