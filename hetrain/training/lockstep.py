"""The Accord of ranks that take every step together."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hetrain.data.reader import Reader
from hetrain.engine import StepOutput
from hetrain.engine.accord import Met
from hetrain.ranks import Ranks
from hetrain.training.stop_signal import StopSignal


class Lockstep:
    """Implements Accord (hetrain/engine/accord.py): ranks meet after every step, and all know the same."""

    def __init__(self, ranks: Ranks, reader: Reader, stop: StopSignal) -> None:
        self._ranks, self._reader, self._stop = ranks, reader, stop
        self.step = self.examples = 0
        self.waited_s = 0.0

    @property
    def epoch(self) -> int:
        """See Accord."""
        return self._reader.epoch

    def start(self, step: int, next_due: Callable[[int], int | None], *, epochs: bool) -> None:
        """See Accord."""
        self.step = step

    def count(self, out: StepOutput) -> None:
        """See Accord."""
        self.step += 1
        self.examples += out.global_size

    def meet(self, out: StepOutput | None) -> Met:
        """See Accord. The question whether to stop travels while the next step computes."""
        return Met(ended=True) if out is None else Met(signal=self._stop.agreed())

    def total(self, sums: Tensor) -> Tensor:
        """See Accord. Collective."""
        return self._ranks.add_up(sums)

    def position(self) -> dict[str, Any]:
        """See Accord."""
        return self._reader.state_dict()
