"""DeepFM."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.models import checks
from hetrain.models.pooling import Pooled


def factorization_machine(rows: Tensor) -> Tensor:
    """Second-order term: the inner products of all pairs of fields, summed. [B, F, D] -> [B].

    Not TorchRec's FactorizationMachine, which sums products of all pairs of *scalars*, so that field i's
    column c also meets column d of field j: not the inner product of the paper.
    """
    total = rows.sum(dim=1)
    return (total * total - (rows * rows).sum(dim=1)).sum(dim=1) * 0.5


class DeepFM(nn.Module):
    """DeepFM (Guo et al. 2017, section 2): a factorization machine and an MLP over the same rows, logits added.

    Where we differ: a first-order weight per id is a learned projection of the id's row (one lookup instead of
    two); dense columns enter the first-order term and the MLP as numbers, having no rows of their own; a
    multi-hot column is one field whose vector is its bag's sum.
    """

    def __init__(
        self,
        bags: nn.Module,
        dense_features: int,
        sparse_features: Sequence[str],
        embedding_dim: int,
        hidden: Sequence[int] = (256, 256, 256),
    ) -> None:
        super().__init__()
        checks.inputs(dense_features, sparse_features, embedding_dim)
        hidden = checks.sizes("model.hidden", hidden)
        self.fields = (len(sparse_features), embedding_dim)
        width = len(sparse_features) * embedding_dim + dense_features
        self.bags = bags
        self.pooled = Pooled(sparse_features)
        self.first_order = nn.Linear(width, 1)
        self.deep = MLP(width, hidden)
        self.out = nn.Linear(hidden[-1], 1, bias=False)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Dense [B, I] float32, sparse F keys of B bags -> logits [B]."""
        rows = self.pooled(self.bags(sparse))
        x = torch.cat([rows, dense], dim=1)
        logits: Tensor = self.first_order(x) + self.out(self.deep(x))
        return logits.squeeze(1) + factorization_machine(rows.unflatten(1, self.fields))
