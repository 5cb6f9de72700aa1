"""Rows and optimizer state inside FBGEMM's fused kernels: filling them, and seeing them as table pieces."""

from collections.abc import Sequence

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from hetrain.engine import TablePiece
from hetrain.store.initial import fill_initial_rows

STATE = "sum"  # Adagrad's sum of squared gradients: [n, D], or [n] row-wise
FILL_ROWS = 1 << 18  # ids made at a time


def fill(weight: Tensor, seed: int, table_index: int, first_row: int, bound: float) -> None:
    """Write the initial rows `first_row ..` of a table into `weight` [n, D], whatever the plan."""
    with torch.no_grad():
        for first in range(0, weight.shape[0], FILL_ROWS):
            part = weight[first : first + FILL_ROWS]
            ids = torch.arange(first_row + first, first_row + first + part.shape[0], device=weight.device)
            fill_initial_rows(part, seed, table_index, ids, bound)


def fused_pieces(kernel: SplitTableBatchedEmbeddingBagsCodegen, first_rows: Sequence[int]) -> list[TablePiece]:
    """The kernel's tables in its order, as views; SGD has no state."""
    weights = kernel.split_embedding_weights()
    states: Sequence[Sequence[Tensor]] = [()] * len(weights)
    if not kernel.optimizer.name.endswith("SGD"):
        states = kernel.split_optimizer_states()
    return [
        TablePiece(first, weight.detach(), {STATE: state[0].detach()} if state else {})
        for first, weight, state in zip(first_rows, weights, states, strict=True)
    ]
