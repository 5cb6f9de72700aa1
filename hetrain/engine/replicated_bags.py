"""Embedding bags of the tables that every worker of the store holds whole, beside those whose rows have owners."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hetrain.comms.dense import DenseReducer, wrap_dense
from hetrain.engine import TablePiece
from hetrain.engine.recipe import Recipe
from hetrain.engine.replicated import ReplicatedTables
from hetrain.engine.table_memory import fill
from hetrain.tables import Table


class _Kernel(nn.Module):
    """Sums per bag [B, sum of dims] of all features, in the order of the tables."""

    def __init__(self, tables: Sequence[Table], device: torch.device) -> None:
        super().__init__()
        self.bags = DenseTableBatchedEmbeddingBagsCodegen(
            [(table.rows, table.dim) for table in tables],
            feature_table_map=[number for number, table in enumerate(tables) for _ in table.features],
            use_cpu=device.type == "cpu",
        )

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        if len(offsets) == 1:  # no example: the kernel divides by the batch size, and DDP waits for a gradient
            nothing: Tensor = self.bags.weights[:0].view(0, 1).expand(0, self.bags.total_D)
            return nothing
        pooled: Tensor = self.bags(ids, offsets)
        return pooled


class ReplicatedBags(nn.Module):
    """KeyedJaggedTensor -> KeyedTensor of all features: of `others`, then of the tables held whole here.

    Backward sums gradients of these over the workers, as those of the network's dense part; `step` then takes the same
    step on each. The kernel is kept out of the module tree, so that what a model registers is its dense part alone.
    """

    def __init__(self, others: nn.Module, recipe: Recipe, workers: dist.ProcessGroup | None = None) -> None:
        """`others` has the features of the tables that the recipe's plan does not replicate.

        `workers`: the group over which gradients are summed; None: of all ranks.
        """
        super().__init__()
        self._others = others
        held = [(number, table) for number, table in enumerate(recipe.tables) if table.name in recipe.plan.replicated]
        self.names = frozenset(table.name for _, table in held)
        self._keys = [feature for _, table in held for feature in table.features]
        self._widths = [table.dim for _, table in held for _ in table.features]
        kernel = _Kernel([table for _, table in held], recipe.device)
        self._tables = ReplicatedTables(kernel.bags, [table.name for _, table in held], recipe.row_optimizer)
        comms = recipe.dense_comms.of_tables()
        self._reducer = DenseReducer(recipe.traffic, workers, comms, number=1)  # 0: the network
        for number, table in held:
            fill(self._tables.pieces()[table.name], recipe.seed, number, table.init_bound)
        self._hidden = [wrap_dense(kernel, self._reducer)]

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """The sum of every bag's rows; an empty bag gives zeros."""
        others: KeyedTensor = self._others(sparse)
        mine = sparse.permute([sparse.keys().index(key) for key in self._keys])
        pooled = self._hidden[0](mine.values(), mine.offsets())
        values = torch.cat([others.values(), pooled], dim=1)
        return KeyedTensor([*others.keys(), *self._keys], [*others.length_per_key(), *self._widths], values)

    def step(self, lr: float) -> None:
        """After backward: wait for the sums and apply the row optimizer."""
        self._reducer.wait()
        self._tables.step(lr)

    def take_wait_s(self) -> float:
        """Seconds waited for other ranks since the last call."""
        return self._reducer.take_wait_s()

    def pieces(self) -> dict[str, list[TablePiece]]:
        """Every table's rows and optimizer state, as views."""
        return {name: [piece] for name, piece in self._tables.pieces().items()}
