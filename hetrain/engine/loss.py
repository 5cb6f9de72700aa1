"""The loss every engine trains on: this rank's share of the mean over the whole step's batch."""

import torch.nn.functional as F
from torch import Tensor


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
    """
    total = F.binary_cross_entropy_with_logits(logits, labels, weight=weights, reduction="sum")
    return total / global_size, total.detach()
