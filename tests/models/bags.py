"""Stand-ins for a bag collection, and batches to feed a model with."""

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

FEATURES = ["C1", "C2", "C3", "C4", "C5"]
DENSE, DIM, ROWS = 3, 4, 11


class PlainBags(nn.Module):
    """One table per feature, summed per bag, its keys in any order, as a plan may give them."""

    def __init__(self, order: list[str] = FEATURES, dim: int = DIM) -> None:
        super().__init__()
        self.order, self.dim = order, dim
        self.tables = nn.ParameterDict({name: torch.randn(ROWS, dim) for name in sorted(order)})

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        bags = [self.bag(name, sparse) for name in self.order]
        return KeyedTensor(self.order, [self.dim] * len(self.order), torch.cat(bags, dim=1))

    def bag(self, name: str, sparse: KeyedJaggedTensor) -> Tensor:
        ids, offsets = sparse[name].values(), sparse[name].offsets()
        return nn.functional.embedding_bag(ids, self.tables[name], offsets[:-1], mode="sum")


def batch(size: int, *, multi_hot: bool = True, features: list[str] = FEATURES) -> tuple[Tensor, KeyedJaggedTensor]:
    """Dense [size, DENSE] and bags of 0 to 3 ids (one id each when not multi-hot)."""
    count = size * len(features)
    lengths = torch.randint(0, 4, (count,)) if multi_hot else torch.ones(count, dtype=torch.int64)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),))
    return torch.randn(size, DENSE), KeyedJaggedTensor(features, ids, lengths=lengths, stride=size)
