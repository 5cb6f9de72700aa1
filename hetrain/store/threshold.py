"""The threshold of DCT (KDD 2021) on pushes of rows: what is smaller waits.

It is the k-th largest magnitude of what a worker pushes when it is found, and is found anew every `refresh_steps`
steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NEVER = -1


@dataclass(frozen=True)
class Dct:
    """What `comms.dct` says of rows."""

    sparsity: float  # share of the values pushed that waits
    max_age: int  # pushes of a row after which what waits is sent whole
    refresh_steps: int
    warmup_steps: int  # steps at the start in which nothing waits


class Threshold:
    """One worker's, for the rows of one embedding dim."""

    def __init__(self, settings: Dct) -> None:
        self.settings = settings
        self.restart(0)

    def restart(self, steps: int) -> None:
        """To be found anew; `steps` were trained before."""
        self._value, self._steps, self._found_at = 0.0, steps, NEVER

    def count_step(self) -> None:
        """A step was trained."""
        self._steps += 1

    @property
    def value(self) -> float:
        """As found last; 0, which everything reaches, before."""
        return self._value

    def of(self, values: Tensor) -> float:
        """The threshold for `values` [n, D], about to be pushed: smaller ones wait. Found anew where it is due.

        Not for pushes of which nothing waits: they would move the threshold. Not-a-numbers are not smaller: they must
        be seen.
        """
        settings = self.settings
        due = self._found_at == NEVER or self._steps - self._found_at >= settings.refresh_steps
        if due and self._steps >= settings.warmup_steps and values.numel():
            most = max(1, round((1 - settings.sparsity) * values.numel()))
            self._value = float(torch.topk(values.abs().view(-1), most, sorted=False).values.min())
            self._found_at = self._steps
        return self._value

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"value": self._value, "steps": self._steps, "found_at": self._found_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._value, self._steps, self._found_at = state["value"], state["steps"], state["found_at"]
