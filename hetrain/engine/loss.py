"""The loss every engine trains on: this rank's share of the mean over the whole step's batch."""

import torch.nn.functional as F
from torch import Tensor

from hetrain.errors import ConfigError


def loss_share(logits: Tensor, labels: Tensor, weights: Tensor | None, global_size: int) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy of this rank's examples over the examples of all ranks.

    Summed over ranks, the gradients of the first result are those of the mean over all examples,
    whatever the size of each rank's batch. An empty batch gives 0 with a graph behind it, so that
    every parameter still receives a gradient of zeros.

    Args:
        logits: [B] float32.
        labels: [B] float32, 0 or 1.
        weights: [B] float32, 0 for padding; None: all 1.
        global_size: examples of all ranks in this step, at least 1.

    Returns:
        The loss to run backward on, [] float32, and the detached sum of the example losses, [] float32.

    Raises:
        ConfigError: the model gave anything but [B] logits with a graph behind them.
    """
    if not isinstance(logits, Tensor) or logits.shape != labels.shape or not logits.requires_grad:
        raise _no_logits(logits, labels.shape[0])
    total = F.binary_cross_entropy_with_logits(logits, labels, weight=weights, reduction="sum")
    return total / global_size, total.detach()


def _no_logits(found: object, examples: int) -> ConfigError:
    if not isinstance(found, Tensor):
        shown = f"a {type(found).__name__}"
    else:
        shown = str(list(found.shape)) + ("" if found.requires_grad else " without a gradient (detached?)")
    return ConfigError(
        f"model._target_: model.forward must return logits [B] = [{examples}], one an example, got {shown}. "
        "Mend the model's forward, for instance by squeeze(1) at its end."
    )
