"""From a KeyedTensor, whose key order depends on the plan, to one matrix in the model's own order."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor


class Pooled(nn.Module):
    """The pooled bags of `features`, side by side: KeyedTensor -> [B, F * D] float32.

    A module rather than a function: TorchRec's pipeline traces a model's forward symbolically and calls
    modules without embeddings as they are, which is what allows the look at the keys here.
    """

    def __init__(self, features: Sequence[str]) -> None:
        super().__init__()
        self.features = list(features)

    def forward(self, bags: KeyedTensor) -> Tensor:
        """The bags' own memory when its keys already stand in order; KeyError when a feature is missing."""
        keys: list[str] = bags.keys()
        values: Tensor = bags.values()
        if keys == self.features:
            return values
        # One split and one cat: backward is one copy as well, where slices would each fill a whole gradient.
        by_key = dict(zip(keys, values.split(bags.length_per_key(), dim=1), strict=True))
        return torch.cat([by_key[feature] for feature in self.features], dim=1)
