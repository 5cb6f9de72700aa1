"""Rows and optimizer state inside FBGEMM's fused kernels: filling them, and seeing them as table pieces."""

from collections.abc import Sequence

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from hetrain.engine import TablePiece
from hetrain.store.initial import fill_initial_rows

STATE = "sum"  # Adagrad's sum of squared gradients: [n, D], or [n] row-wise
FILL_ROWS = 1 << 18  # ids made at a time


def fill(piece: TablePiece, seed: int, table_index: int, bound: float) -> None:
    """Write the initial values of a piece of a table, whatever the plan."""
    weight, before = piece.value, piece.first_column
    step = FILL_ROWS if not before else FILL_ROWS // 16  # of rows made whole, up to the piece's last column
    with torch.no_grad():
        for first in range(0, weight.shape[0], step):
            part = weight[first : first + step]
            row = piece.first_row + first
            ids = torch.arange(row, row + part.shape[0], device=weight.device)
            if not before:  # a value depends on its column alone, so that fewer columns are the first of a row
                fill_initial_rows(part, seed, table_index, ids, bound)
                continue
            rows = weight.new_empty(part.shape[0], before + part.shape[1])
            fill_initial_rows(rows, seed, table_index, ids, bound)
            part.copy_(rows[:, before:])


def fused_pieces(kernel: SplitTableBatchedEmbeddingBagsCodegen, offsets: Sequence[tuple[int, int]]) -> list[TablePiece]:
    """The kernel's tables in its order, as views; SGD has no state. `offsets`: each one's first row and column."""
    weights = kernel.split_embedding_weights()
    states: Sequence[Sequence[Tensor]] = [()] * len(weights)
    if not kernel.optimizer.name.endswith("SGD"):
        states = kernel.split_optimizer_states()
    return [
        TablePiece(row, weight.detach(), {STATE: state[0].detach()} if state else {}, column)
        for (row, column), weight, state in zip(offsets, weights, states, strict=True)
    ]
