"""Tables that every rank holds whole: their gradients are dense and summed, and stepped here.

TorchRec has no fused kernel for data_parallel tables, and an optimizer applied in backward is silently
ignored there; so they get the row optimizer explicitly, on the merged gradient of all ranks.
"""

from collections.abc import Sequence

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from hetrain.engine import TablePiece
from hetrain.engine.table_memory import STATE
from hetrain.optim import RowOptimizer


class ReplicatedTables:
    """The tables of one dense kernel, with the state of their optimizer."""

    def __init__(self, kernel: DenseTableBatchedEmbeddingBagsCodegen, names: Sequence[str], optimizer: RowOptimizer):
        self.names = list(names)
        self._parameter: Tensor = kernel.weights  # [elements of all tables]
        self._optimizer = optimizer
        shapes = [(rows, dim) for rows, dim in kernel.embedding_specs]
        self._runs = _runs(shapes)
        self._state = [
            torch.zeros(rows, optimizer.state_width(dim), device=self._parameter.device) for _, rows, dim in self._runs
        ]
        self.weights: list[Tensor] = kernel.split_embedding_weights()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the row optimizer to the rows whose gradient is not zero, and drop the gradient."""
        gradient = self._parameter.grad
        if gradient is None:
            return
        for (first, rows, dim), state in zip(self._runs, self._state, strict=True):
            part = slice(first, first + rows * dim)
            value, grad = self._parameter[part].view(rows, dim), gradient[part].view(rows, dim)
            touched = grad.any(1).nonzero()[:, 0]
            new_value, new_state = value[touched], state[touched]
            self._optimizer.step_(new_value, new_state, grad[touched], lr)
            value[touched], state[touched] = new_value, new_state
        self._parameter.grad = None

    def pieces(self) -> dict[str, TablePiece]:
        """Every table's rows and optimizer state, as views."""
        pieces: dict[str, TablePiece] = {}
        run, row = 0, 0
        for name, weight in zip(self.names, self.weights, strict=True):
            if row == self._runs[run][1]:
                run, row = run + 1, 0
            rows = weight.shape[0]
            state = self._state[run][row : row + rows]  # [n, 0 | 1 | D]
            row += rows
            columns = state.shape[1]
            if columns == 0:
                optimizer = {}
            else:
                optimizer = {STATE: state[:, 0] if self._optimizer.state_width(weight.shape[1]) == 1 else state}
            pieces[name] = TablePiece(0, weight, optimizer)
        return pieces


def _runs(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Tables of equal dim that follow each other, as one: (first element, rows, dim) each."""
    runs: list[tuple[int, int, int]] = []
    first = 0
    for rows, dim in shapes:
        if runs and runs[-1][2] == dim:
            runs[-1] = (runs[-1][0], runs[-1][1] + rows, dim)
        else:
            runs.append((first, rows, dim))
        first += rows * dim
    return runs
