"""Embedding bags of a single process: the fused kernels themselves, one call per embedding dim.

With one rank every exchange is the identity, and a sharded collection would still spend milliseconds
of Python on it. The kernels, optimizers and state are those of the sharded path.
"""

from collections.abc import Iterable, Sequence

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from hetrain.comms.columns import Columns
from hetrain.comms.pooled import PooledExchange
from hetrain.engine import TablePiece
from hetrain.engine.table_memory import fill, fused_pieces
from hetrain.optim import RowOptimizer
from hetrain.tables import Table


class _Group:
    """All features of one embedding dim: their tables in one fused kernel."""

    def __init__(self, tables: Sequence[Table], optimizer: RowOptimizer, device: torch.device) -> None:
        self.tables = list(tables)
        self.features = [f for t in tables for f in t.features]
        self.dim = tables[0].dim
        on_gpu = device.type == "cuda"
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (
                    t.rows,
                    t.dim,
                    EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST,
                    ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU,
                )
                for t in tables
            ],
            feature_table_map=[i for i, t in enumerate(tables) for _ in t.features],
            optimizer=optimizer.fbgemm,
            learning_rate=optimizer.lr,
            eps=optimizer.eps,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,  # the reader has checked every id
            device=device,
        )


class LocalBags(nn.Module):
    """KeyedJaggedTensor [F keys, stride B] -> KeyedTensor [B, sum of dims]; trains its rows in backward.

    The kernels are kept out of the module tree: what a model registers is its dense part alone.
    """

    replicated: frozenset[str] = frozenset()

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: RowOptimizer,
        device: torch.device,
        seed: int,
        exchange: PooledExchange | None = None,
    ) -> None:
        """`exchange`: through which more ranks would send pooled embeddings; they are thinned as there."""
        super().__init__()
        self.exchange = exchange
        dims = dict.fromkeys(t.dim for t in tables)
        self._groups = [_Group([t for t in tables if t.dim == dim], optimizer, device) for dim in dims]
        self._keys = [f for g in self._groups for f in g.features]
        self._dims = [g.dim for g in self._groups for _ in g.features]
        self._columns = Columns(tuple(self._dims))
        self._learning_rate = optimizer.lr
        index = {t.name: i for i, t in enumerate(tables)}
        for g in self._groups:
            for table, piece in zip(g.tables, _whole_tables(g), strict=True):
                fill(piece, seed, index[table.name], table.init_bound)

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """The sum of every bag's rows; an empty bag gives zeros."""
        if sparse.keys() != self._keys:
            sparse = sparse.permute([sparse.keys().index(k) for k in self._keys])
        if len(self._groups) == 1:
            pooled = _look_up(self._groups[0], sparse)
        else:
            parts = sparse.split([len(g.features) for g in self._groups])
            pooled = torch.cat([_look_up(g, part) for g, part in zip(self._groups, parts, strict=True)], dim=1)
        if self.exchange is not None:
            pooled = self.exchange.thinned(pooled, self._columns)
        return KeyedTensor(self._keys, self._dims, pooled)

    def set_learning_rate(self, lr: float) -> None:
        """Rate of the next backward's fused step."""
        if lr != self._learning_rate:
            for g in self._groups:
                g.kernel.set_learning_rate(lr)
            self._learning_rate = lr

    def start(self, sparse: KeyedJaggedTensor, global_size: int | None) -> None:
        """Nothing to exchange."""

    def advance(self) -> None:
        """Nothing to exchange."""

    def discard(self, keep: KeyedJaggedTensor | None = None) -> None:
        """Nothing in flight."""

    def step_replicated(self, lr: float) -> None:
        """No table is replicated."""

    def fused(self) -> Iterable[str]:
        """Names of the tables that a fused kernel trains."""
        return [t.name for g in self._groups for t in g.tables]

    def pieces(self) -> dict[str, list[TablePiece]]:
        """Every table's rows and optimizer state, as views."""
        return {
            table.name: [piece] for g in self._groups for table, piece in zip(g.tables, _whole_tables(g), strict=True)
        }

    def take_wait_s(self) -> float:
        """Seconds waited for other ranks: none."""
        return 0.0


def _whole_tables(group: _Group) -> list[TablePiece]:
    return fused_pieces(group.kernel, [(0, 0)] * len(group.tables))


def _look_up(group: _Group, sparse: KeyedJaggedTensor) -> Tensor:
    offsets = sparse.offsets()
    if offsets.numel() == 1:  # no example: the kernel divides by the batch size
        return torch.zeros(0, group.dim * len(group.features), device=offsets.device, requires_grad=True)
    pooled: Tensor = group.kernel(sparse.values(), offsets)
    return pooled
