"""How the ranks of a run agree on how far they are, and when they come together.

In lockstep they are together after every step. Where each steps at its own pace they meet only to evaluate, save or
end. The trainer knows this interface alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from signal import Signals
from typing import Any, Protocol

from torch import Tensor

from hetrain.engine import StepOutput


@dataclass(frozen=True)
class Met:
    """All ranks are together, every update is with its owner or in a cache that evaluation sees."""

    signal: Signals | None = None  # a stop signal that some rank caught
    ended: bool = False  # no rank has anything left to train


class Accord(Protocol):
    """One per rank."""

    @property
    def step(self) -> int:
        """Steps of the run: of each rank in lockstep, else examples of all ranks / (batch size x workers)."""
        ...

    @property
    def examples(self) -> int:
        """Examples of all ranks in this sitting, as far as this rank knows."""
        ...

    @property
    def epoch(self) -> int:
        """Epochs that all ranks together have trained to their end, those before this sitting included."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds this rank waited for meetings."""
        ...

    def start(self, step: int, next_due: Callable[[int], int | None], *, epochs: bool) -> None:
        """Before the first step; `step` were taken before. Collective.

        `next_due(step)`: the next step after `step` at which ranks have to be together; None: no such step.
        `epochs`: also when an epoch ends.
        """
        ...

    def count(self, out: StepOutput) -> None:
        """This rank has taken a step."""
        ...

    def meet(self, out: StepOutput | None) -> Met | None:
        """After every call of Engine.step with what it gave; None: this rank steps on alone."""
        ...

    def total(self, sums: Tensor) -> Tensor:
        """Sums over ranks of `sums` [n] float64, which are of the time since the last call; for rank 0's log."""
        ...

    def position(self) -> dict[str, Any]:
        """Reader.state_dict() of all ranks. Collective, where ranks are together."""
        ...
