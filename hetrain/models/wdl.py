"""Wide & Deep."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.errors import ConfigError
from hetrain.models import checks
from hetrain.models.pooling import Pooled


class WDL(nn.Module):
    """Wide & Deep (Cheng et al. 2016, section 3): a linear model and an MLP whose logits are added.

    The deep part is an MLP over the pooled embeddings of all sparse columns and the dense columns. Where we differ:
    the paper's wide part has a weight of its own per id (and per hand-made cross); here that weight is a
    learned projection of the id's row, which saves a second lookup. HET's own WDL does the same.

    `deep=dense` is the WDL of HET's experiments: its MLP reads the dense columns alone, and embeddings reach the logit
    through the linear part only.
    """

    def __init__(
        self,
        bags: nn.Module,
        dense_features: int,
        sparse_features: Sequence[str],
        embedding_dim: int,
        hidden: Sequence[int] = (256, 256, 256),
        deep: str = "all",
    ) -> None:
        super().__init__()
        checks.inputs(dense_features, sparse_features, embedding_dim)
        hidden = checks.sizes("model.hidden", hidden)
        checks.one_of("model.deep", deep, ("all", "dense"))
        if deep == "dense" and dense_features == 0:
            raise ConfigError("model.deep=dense: the data has no dense column to read; set model.deep=all.")
        pooled = len(sparse_features) * embedding_dim
        self.deep_reads_rows = deep == "all"
        self.bags = bags
        self.pooled = Pooled(sparse_features)
        self.wide = nn.Linear(pooled + dense_features if self.deep_reads_rows else pooled, 1)
        self.deep = MLP(pooled + dense_features if self.deep_reads_rows else dense_features, hidden)
        self.out = nn.Linear(hidden[-1], 1, bias=False)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Dense [B, I] float32, sparse F keys of B bags -> logits [B]."""
        rows = self.pooled(self.bags(sparse))
        x = torch.cat([rows, dense], dim=1) if self.deep_reads_rows else rows
        logits: Tensor = self.wide(x) + self.out(self.deep(x if self.deep_reads_rows else dense))
        return logits.squeeze(1)
