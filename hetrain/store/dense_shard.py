"""One owner's part of the dense parameters, flattened: it takes gradients, steps the optimizer, gives fresh values.

Every dense optimizer here works element by element, so that a slice of the flat parameters trains as it would as part
of its tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

State = dict[str, Tensor]  # optimizer state by name: [n], or [] where it counts steps


def shard_bounds(elements: int, owners: int) -> list[tuple[int, int]]:
    """First and last + 1 element of each owner's slice of `elements`, as even as can be."""
    cuts = [owner * elements // owners for owner in range(owners + 1)]
    return list(pairwise(cuts))


class DenseShard:
    """Not thread-safe: the caller holds a lock."""

    def __init__(self, value: Tensor, make_optimizer: Callable[[Iterable[Parameter]], Optimizer]) -> None:
        """`value` [n] float32 is copied; n may be 0."""
        self._make_optimizer = make_optimizer
        self._value = Parameter(value.detach().clone())
        self._restart()

    def _restart(self) -> None:
        self._optimizer = self._make_optimizer([self._value])
        self._rate = self._optimizer.param_groups[0]["lr"]

    @property
    def value(self) -> Tensor:
        """[n] a copy."""
        return self._value.detach().clone()

    def push(self, gradient: Tensor, factor: float) -> None:
        """One optimizer step on `gradient` [n] at `factor` times the learning rate."""
        if not len(gradient):
            return
        self._value.grad = gradient
        self._optimizer.param_groups[0]["lr"] = self._rate * factor
        self._optimizer.step()
        self._value.grad = None

    def state(self) -> State:
        """A copy of the optimizer's state; {} where none exists yet, and of no elements."""
        if not len(self._value):
            return {}
        return {
            name: value.clone() for name, value in self._optimizer.state.get(self._value, {}).items() if _kept(value)
        }

    def load(self, value: Tensor, state: State) -> None:
        """Take up `value` [n] and what `state()` gave; {}: as at the start."""
        with torch.no_grad():
            self._value.copy_(value)
        self._restart()
        if state and len(value):
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": {0: dict(state)}, "param_groups": groups})


def _kept(value: Any) -> bool:
    return isinstance(value, Tensor)  # SGD keeps a momentum of None


def whole_state(parts: Sequence[State], shapes: Sequence[torch.Size]) -> dict[int, State]:
    """Optimizer state by parameter, as torch's state_dict has it, from that of all shards in order.

    `shapes`: of the parameters, which lie one behind the other in the flat vector.
    """
    held = [part for part in parts if part]
    if not held:
        return {}
    whole: dict[int, State] = {i: {} for i in range(len(shapes))}
    for name, first in held[0].items():
        if first.dim() == 0:
            for state in whole.values():
                state[name] = first.clone()
            continue
        flat = torch.cat([part[name] for part in held])
        for i, piece in enumerate(flat.split([shape.numel() for shape in shapes])):
            whole[i][name] = piece.view(shapes[i]).clone()
    return whole


def shard_state(whole: dict[int, State], shapes: Sequence[torch.Size], bounds: tuple[int, int]) -> State:
    """The state of elements `bounds` of the flat vector; the inverse of `whole_state`."""
    if not whole:
        return {}
    tensors = {name: value for name, value in whole[0].items() if isinstance(value, Tensor)}
    return {
        name: value.clone()
        if value.dim() == 0 and name == "step"
        else torch.cat([whole[i][name].reshape(-1) for i in range(len(shapes))])[slice(*bounds)].clone()
        for name, value in tensors.items()
    }
