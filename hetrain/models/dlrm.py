"""Deep Learning Recommendation Model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hetrain.errors import ConfigError
from hetrain.models import checks
from hetrain.models.cross import cross_network
from hetrain.models.pooling import Pooled


class PairwiseDots(nn.Module):
    """Inner products of all pairs of N vectors: [B, N, D] -> [B, N (N - 1) / 2].

    What TorchRec's InteractionArch computes; choosing the pairs by one flat index instead of two
    makes forward and backward 1.5 times faster on a CPU.
    """

    def __init__(self, vectors: int) -> None:
        super().__init__()
        self.pairs: Tensor
        row, column = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", row * vectors + column, persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """See the class."""
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return products.index_select(1, self.pairs)


class DLRM(nn.Module):
    """DLRM (Naumov et al. 2019, section 2): a bottom MLP makes one more vector of the dense columns.

    `interaction=dot`, the paper's: inner products of all pairs of vectors, joined with the bottom MLP's output, go into
    the top MLP. `interaction=dcn`, MLPerf's DLRM-DCNv2: all vectors side by side pass a DCN v2 cross network
    (`cross_layers`, `cross_rank`) into the top MLP. Without dense columns the vectors are the rows alone.
    `top` gives the top MLP's widths, the last being the logit's 1.
    """

    def __init__(
        self,
        bags: nn.Module,
        dense_features: int,
        sparse_features: Sequence[str],
        embedding_dim: int,
        bottom: Sequence[int] | None = None,
        top: Sequence[int] = (512, 256, 1),
        interaction: str = "dot",
        cross_layers: int = 3,
        cross_rank: int | None = None,
    ) -> None:
        super().__init__()
        checks.inputs(dense_features, sparse_features, embedding_dim)
        bottom = checks.sizes("model.bottom", (512, 256, embedding_dim) if bottom is None else bottom)
        top = checks.sizes("model.top", top)
        checks.one_of("model.interaction", interaction, ("dot", "dcn"))
        _check_ends(bottom, top, embedding_dim)
        vectors = len(sparse_features) + (dense_features > 0)
        self.vectors = (vectors, embedding_dim)
        self.bags = bags
        self.pooled = Pooled(sparse_features)
        self.bottom = MLP(dense_features, bottom) if dense_features else None
        width = vectors * embedding_dim
        self.dots = PairwiseDots(vectors) if interaction == "dot" else None
        self.cross = cross_network(width, cross_layers, "v2", cross_rank) if interaction == "dcn" else nn.Identity()
        if self.dots is not None:
            width = vectors * (vectors - 1) // 2 + (embedding_dim if self.bottom is not None else 0)
            _check_pairs(width)
        self.top = MLP(width, top, activation_on_last=False)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Dense [B, I] float32, sparse F keys of B bags -> logits [B]."""
        rows = self.pooled(self.bags(sparse))
        bottom = None if self.bottom is None else self.bottom(dense)
        x = rows if bottom is None else torch.cat([bottom, rows], dim=1)
        if self.dots is not None:
            dots = self.dots(x.unflatten(1, self.vectors))
            x = dots if bottom is None else torch.cat([bottom, dots], dim=1)
        logits: Tensor = self.top(self.cross(x))
        return logits.squeeze(1)


def _check_ends(bottom: Sequence[int], top: Sequence[int], embedding_dim: int) -> None:
    if bottom[-1] != embedding_dim:
        raise ConfigError(
            f"model.bottom={list(bottom)}: its last width must equal model.embedding_dim={embedding_dim}, because the "
            f"dense columns become one more vector beside the rows; end it with {embedding_dim}."
        )
    if top[-1] != 1:
        raise ConfigError(f"model.top={list(top)}: its last width is the logit and must be 1; end it with 1.")


def _check_pairs(width: int) -> None:
    if width == 0:
        raise ConfigError(
            "model.interaction=dot: one sparse column and no dense column make no pair; set model.interaction=dcn."
        )
