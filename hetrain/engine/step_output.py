"""What every engine says of a step it took, and what checkpoints hold of its network."""

from torch import Tensor, nn

from hetrain.data.batch import Batch
from hetrain.engine import StepOutput


def step_output(
    batch: Batch, logits: Tensor, total: Tensor, waited_s: float, global_size: int | None = None
) -> StepOutput:
    """The step on `batch` [B examples], padding left out.

    Args:
        batch: what was trained on.
        logits: [B], detached.
        total: [] sum of the example losses, detached.
        waited_s: seconds waited for other ranks.
        global_size: examples of all ranks; None: those of the batch's step.
    """
    labels = batch.labels
    if batch.weights is not None:  # 0 marks padding
        real = batch.weights != 0
        logits, labels = logits[real], labels[real]
    size = batch.global_size if global_size is None else global_size
    return StepOutput(total, logits, labels, len(labels), size, waited_s)


def network_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, detached views."""
    return {name: value.detach() for name, value in [*network.named_parameters(), *network.named_buffers()]}
