"""Cross networks: explicit feature crosses of bounded degree over one vector per example."""

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet

from hetrain.errors import ConfigError
from hetrain.models import checks


class VectorCross(nn.Module):
    """The cross network of DCN v1 (Wang et al. 2017, section 2.2): x_{l+1} = x_0 (w_l . x_l) + b_l + x_l.

    The formula of TorchRec's VectorCrossNet over [B, N] instead of [B, N, 1], which is 4 to 6 times faster on a CPU.
    """

    def __init__(self, in_features: int, layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(layers, in_features))
        self.bias = nn.Parameter(torch.zeros(layers, in_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x0: Tensor) -> Tensor:
        """[B, N] -> [B, N]."""
        x = x0
        for weight, bias in zip(self.weight.unbind(), self.bias.unbind(), strict=True):
            x = torch.addcmul(x + bias, x0, (x @ weight).unsqueeze(1))
        return x


def cross_network(in_features: int, layers: int, version: str = "v2", rank: int | None = None) -> nn.Module:
    """A cross network over vectors of N = `in_features`: [B, N] -> [B, N].

    v2 is Wang et al. 2021, equation 1, and with `rank` equation 2 (W = U V): TorchRec's blocks. v1 is VectorCross.
    """
    checks.positive("model.cross_layers", layers)
    checks.one_of("model.cross", version, ("v2", "v1"))
    if rank is None:
        full: nn.Module = CrossNet(in_features, layers) if version == "v2" else VectorCross(in_features, layers)
        return full
    checks.positive("model.cross_rank", rank)
    if version == "v1":
        raise ConfigError(f"model.cross_rank={rank} with model.cross=v1: v1 has no matrix to factor; set it to null.")
    if rank > in_features:
        raise ConfigError(
            f"model.cross_rank={rank}: the crossed vector has {in_features} elements, so a rank above that only costs; "
            "set model.cross_rank to a quarter of it or less, or to null for full matrices."
        )
    low_rank: nn.Module = LowRankCrossNet(in_features, layers, rank)
    return low_rank
