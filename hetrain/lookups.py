"""Which rows a batch looks up, ids of features as global rows of a row space, and their sums."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def lookups(sparse: KeyedJaggedTensor, features: Sequence[str], first_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Global row of every lookup of `features` [n] int64, on the CPU, and bag offsets [F * B + 1].

    `first_rows` [F] int64: global row of each feature's id 0.
    """
    keys = sparse.keys()
    if keys != features:
        sparse = sparse.permute([keys.index(f) for f in features])
    lengths = sparse.length_per_key()
    values = sparse.values()
    if lengths[0] * len(lengths) == len(values) and lengths.count(lengths[0]) == len(lengths):
        rows = (values.view(len(lengths), -1) + first_rows.unsqueeze(1)).view(-1)
    else:
        rows = values + first_rows.repeat_interleave(torch.tensor(lengths))
    return rows.cpu(), sparse.offsets().long()


def sums_per_bag(rows: Tensor, positions: Tensor, offsets: Tensor, features: int) -> Tensor:
    """Sums [B, F * D] of `rows` [., D] at `positions` [n], which `offsets` [F * B + 1] cut into bags by feature."""
    bags, dim, device = (len(offsets) - 1) // features, rows.shape[1], rows.device
    pooled = nn.functional.embedding_bag(
        positions.to(device), rows, offsets.to(device), mode="sum", include_last_offset=True
    )
    return pooled.view(features, bags, dim).transpose(0, 1).reshape(bags, features * dim)
