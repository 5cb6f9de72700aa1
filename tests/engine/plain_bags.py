"""nn.EmbeddingBag per table: what every engine's rows must equal."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.store.initial import initial_rows
from hetrain.tables import Table


class PlainBags(nn.Module):
    """Tables filled as every engine fills its rows; sums by feature."""

    def __init__(self, tables: Sequence[Table], seed: int) -> None:
        super().__init__()
        self.tables = nn.ModuleDict()
        for i, t in enumerate(tables):
            rows = initial_rows(seed, i, torch.arange(t.rows), t.dim, t.init_bound)
            self.tables[t.name] = nn.EmbeddingBag.from_pretrained(
                rows, mode="sum", freeze=False, include_last_offset=True
            )
        self._table_of = {feature: t.name for t in tables for feature in t.features}

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        """[B, D] by feature."""
        parts = sparse.to_dict()
        return {f: self.tables[t](parts[f].values(), parts[f].offsets()) for f, t in self._table_of.items()}

    @property
    def weights(self) -> list[Tensor]:
        """Tables in their order."""
        return [bag.weight for bag in self.tables.values()]
