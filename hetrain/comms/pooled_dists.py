"""Puts our exchange of pooled embeddings where TorchRec's output distributions make theirs."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable, NoWait

from hetrain.comms.columns import Columns
from hetrain.comms.pooled import PooledExchange
from hetrain.errors import ConfigError


def exchange_with(
    exchange: PooledExchange, output_dists: list[nn.Module], dims: Sequence[Sequence[int]] | None = None
) -> None:
    """Let `output_dists` (of a sharded EmbeddingBagCollection, not used so far) exchange through `exchange`.

    TorchRec makes the inner modules on first use and where there are none; column-wise tables come as table-wise ones.
    Tables cut over the ranks of a node (table_row_wise, grid_shard) are exchanged twice, inside of the node and then
    between nodes, and encoded for each. Replicated tables are not exchanged, but thinned as if they were: `dims` has
    the columns of every one of `output_dists`.

    Raises ConfigError for an output distribution that is not known here.
    """
    for i, output in enumerate(output_dists):
        if isinstance(output, DpPooledEmbeddingDist):
            assert dims is not None
            output_dists[i] = _Here(exchange, Columns(tuple(dims[i])))
        elif isinstance(output, TwPooledEmbeddingDist):
            columns = _columns(output._emb_dim_per_rank_per_feature)
            output._dist = _AllToAll(exchange, output._pg, columns, output._callbacks)
        elif isinstance(output, RwPooledEmbeddingDist):
            output._dist = _ReduceScatter(exchange, output._pg, Columns(tuple(output._embedding_dims)))
        elif isinstance(output, TwRwPooledEmbeddingDist | GridPooledEmbeddingDist):
            columns = _columns(output._emb_dim_per_node_per_feature)
            here = columns[output._rank // output._intra_pg.size()]
            output._intra_dist = _ReduceScatter(exchange, output._intra_pg, here)
            callbacks = getattr(output, "_callbacks", None)
            output._cross_dist = _AllToAll(exchange, output._cross_pg, columns, callbacks)
        else:
            raise ConfigError(
                f"comms: pooled embeddings of TorchRec's {type(output).__name__} can only travel as float32. Set "
                "comms.pooled_forward=none and comms.pooled_backward=none, or leave its sharding type out of "
                "planner.sharding_types."
            )


def _columns(dims: Sequence[Sequence[int]]) -> list[Columns]:
    """`dims`: of every rank or node its columns."""
    return [Columns(tuple(each)) for each in dims]


class _AllToAll(nn.Module):
    """Stands for TorchRec's PooledEmbeddingsAllToAll."""

    def __init__(
        self,
        exchange: PooledExchange,
        group: dist.ProcessGroup,
        columns: Sequence[Columns],
        callbacks: Sequence[Any] | None,
    ) -> None:
        super().__init__()
        self._exchange, self._group, self._columns = exchange, group, columns
        self._callbacks = list(callbacks or ())

    def forward(self, pooled: Tensor, batch_size_per_rank: Sequence[int] | None = None) -> Awaitable[Tensor]:
        found = self._exchange.all_to_all(pooled, self._columns, self._group)
        found.callbacks.extend(self._callbacks)
        return found


class _Here(nn.Module):
    """Stands for TorchRec's DpPooledEmbeddingDist."""

    def __init__(self, exchange: PooledExchange, columns: Columns) -> None:
        super().__init__()
        self._exchange, self._columns = exchange, columns

    def forward(self, pooled: Tensor, context: Any = None) -> Awaitable[Tensor]:
        return NoWait(self._exchange.thinned(pooled, self._columns))


class _ReduceScatter(nn.Module):
    """Stands for TorchRec's PooledEmbeddingsReduceScatter."""

    def __init__(self, exchange: PooledExchange, group: dist.ProcessGroup, columns: Columns) -> None:
        super().__init__()
        self._exchange, self._group, self._columns = exchange, group, columns

    def forward(self, pooled: Tensor, input_splits: Sequence[int] | None = None) -> Awaitable[Tensor]:
        return self._exchange.reduce_scatter(pooled, self._columns, self._group)
