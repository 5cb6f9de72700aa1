"""The dense parameters of a network as one flat vector, cut evenly over the owners."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hetrain.errors import ConfigError
from hetrain.store.dense_shard import State, shard_bounds, shard_state, whole_state


class FlatDense:
    """Values and gradients of all trainable parameters; the network's own are views of these."""

    def __init__(
        self,
        network: nn.Module,
        make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        owners: int,
        device: torch.device,
    ) -> None:
        """`device`: where `network` is. Raises ConfigError for parameters that are not float32."""
        everything = list(network.named_parameters())
        for name, parameter in everything:
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"model: parameter {name!r} is {parameter.dtype}, expected torch.float32 with consistency=asp or "
                    "ssp, whose owners hold one flat float32 vector. Make it float32, or take consistency=bsp."
                )
        self._numbers = [i for i, (_, parameter) in enumerate(everything) if parameter.requires_grad]
        self._parameters = [everything[i][1] for i in self._numbers]
        self._names = [everything[i][0] for i in self._numbers]
        self._shapes = [parameter.shape for parameter in self._parameters]
        template = make_optimizer([parameter for _, parameter in everything])
        self._groups: list[dict[str, Any]] = template.state_dict()["param_groups"]
        flat = torch.cat([torch.empty(0, device=device), *(p.detach().reshape(-1) for p in self._parameters)])
        self.value, self.gradient = flat.clone(), torch.zeros_like(flat)  # [P]
        self.bounds = shard_bounds(len(flat), owners)
        offset = 0
        for parameter in self._parameters:
            part = slice(offset, offset + parameter.numel())
            parameter.data = self.value[part].view(parameter.shape)
            parameter.grad = self.gradient[part].view(parameter.shape)
            offset += parameter.numel()

    @property
    def sizes(self) -> list[int]:
        """Of the parameters, one behind the other."""
        return [shape.numel() for shape in self._shapes]

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """[P] as the parameters' shapes."""
        parts = zip(self._names, flat.split(self.sizes), self._shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in parts}

    def flat(self, by_name: dict[str, Tensor]) -> Tensor:
        """The inverse of `by_name`: [P]."""
        return torch.cat([by_name[name].reshape(-1) for name in self._names])

    def whole(self, parts: list[State]) -> dict[str, Any]:
        """The optimizer's state_dict, as one over the network's parameters has it, from the shards' states."""
        state = whole_state(parts, self._shapes)
        return {"state": {self._numbers[i]: part for i, part in state.items()}, "param_groups": self._groups}

    def part(self, optimizer: dict[str, Any], owner: int) -> State:
        """The state of shard `owner`; the inverse of `whole`."""
        found = optimizer["state"]
        state = {i: found[number] for i, number in enumerate(self._numbers) if number in found}
        return shard_state(state, self._shapes, self.bounds[owner])
