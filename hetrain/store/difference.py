"""How held-back updates of a row travel and merge, for optimizers whose state adds up.

SGD's steps add, so a push is the difference of the copy to its fetched row. The states of Adagrad
and row-wise Adagrad add too (sums of squares), but their steps do not: each worker divided by the
root of a sum that lacks the others' gradients. A push therefore carries the steps multiplied by the
root of the worker's own sum, and whoever merges divides by the root of the merged sum: the step is
rescaled by sqrt(own sum / merged sum), and is exact when there was one worker.
"""

from torch import Tensor


def _denominator(state: Tensor, eps: float) -> Tensor:
    """What the optimizer divides by: [n, 1] or [n, D]."""
    return state.sqrt().add_(eps)


def encode(value_step: Tensor, state: Tensor, eps: float) -> Tensor:
    """What to push for `value_step` [n, D] taken up to `state` [n, S] (the worker's own sum)."""
    if state.shape[1] == 0:
        return value_step
    return value_step * _denominator(state, eps)


def decode(pushed: Tensor, merged_state: Tensor, eps: float) -> Tensor:
    """The step [n, D] that a push means on top of `merged_state` [n, S]."""
    if merged_state.shape[1] == 0:
        return pushed
    return pushed / _denominator(merged_state, eps)
