"""Deep & Cross Network."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.models import checks
from hetrain.models.cross import cross_network
from hetrain.models.pooling import Pooled


class DCN(nn.Module):
    """Deep & Cross Network, v2 by default (Wang et al. 2021, section 3; v1: Wang et al. 2017, section 2).

    A cross network and an MLP over x_0 = [rows of all sparse columns, dense columns]. `structure=parallel` (figure 1b,
    and v1's only one) gives both x_0 and joins their outputs in a last linear layer; `stacked` (figure 1a) gives the
    cross network's output to the MLP. `cross_rank` factors v2's matrices. Where we differ from v2: no mixture of
    experts in the low-rank layers (equation 3), and every column's row has the same width.
    """

    def __init__(
        self,
        bags: nn.Module,
        dense_features: int,
        sparse_features: Sequence[str],
        embedding_dim: int,
        hidden: Sequence[int] = (256, 256, 256),
        cross: str = "v2",
        cross_layers: int = 3,
        cross_rank: int | None = None,
        structure: str = "parallel",
    ) -> None:
        super().__init__()
        checks.inputs(dense_features, sparse_features, embedding_dim)
        hidden = checks.sizes("model.hidden", hidden)
        checks.one_of("model.structure", structure, ("parallel", "stacked"))
        width = len(sparse_features) * embedding_dim + dense_features
        self.parallel = structure == "parallel"
        self.bags = bags
        self.pooled = Pooled(sparse_features)
        self.cross = cross_network(width, cross_layers, cross, cross_rank)
        self.deep = MLP(width, hidden)
        # The last layer over [crossed, deep], as two: adding two numbers is cheaper than joining two matrices.
        self.cross_out = nn.Linear(width, 1, bias=False) if self.parallel else None
        self.out = nn.Linear(hidden[-1], 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Dense [B, I] float32, sparse F keys of B bags -> logits [B]."""
        x = torch.cat([self.pooled(self.bags(sparse)), dense], dim=1)
        crossed = self.cross(x)
        logits: Tensor
        if self.cross_out is None:
            logits = self.out(self.deep(crossed))
        else:
            logits = self.cross_out(crossed) + self.out(self.deep(x))
        return logits.squeeze(1)
