"""Dense gradients that a worker at its own pace holds back (comms/dense_wire.py), as checkpoints keep them."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from hetrain.comms.dense_exchange import DenseComms
from hetrain.comms.dense_wire import DenseWire
from hetrain.engine import EngineState
from hetrain.engine.flat_dense import FlatDense


class DenseHeldBack:
    """One rank's end of the dense part's way, and what waits there; with none for a way, nothing does."""

    def __init__(
        self, comms: DenseComms | None, dense: FlatDense, rank: int, world_size: int, group: dist.ProcessGroup | None
    ) -> None:
        self.wire = None
        if comms is not None and comms.name != "none":
            self.wire = DenseWire(comms, dense.sizes, dense.bounds)
        self._dense, self._rank, self._world_size, self._group = dense, rank, world_size, group
        self._carried: Tensor | None = None

    def add_to_gradient(self) -> None:
        """What waited in a checkpoint and had no place here, once."""
        if self._carried is not None:
            self._dense.gradient += self._carried.to(self._dense.gradient.device)
            self._carried = None

    def pending(self) -> dict[str, Tensor]:
        """What all workers hold back, by parameter; {} where nothing waits. Collective.

        Without thresholds what `restore` took up and no step met since: on the first rank alone.
        """
        if (wire := self._thresholded) is None:
            return {} if self._carried is None else self._dense.by_name(self._carried.clone())
        waiting = wire.waiting()
        if self._carried is not None:
            waiting += self._carried
        if self._world_size > 1:
            dist.all_reduce(waiting, group=self._group)
        return self._dense.by_name(waiting)

    @property
    def _thresholded(self) -> DenseWire | None:
        return self.wire if self.wire is not None and self.wire.sparse else None

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: what waits by owner, and what was taken up; {} without thresholds."""
        wire = self._thresholded
        return {} if wire is None else {"by_owner": wire.state_dict(), "carried": self._carried}

    def restore(self, state: EngineState, private: dict[str, Any] | None) -> None:
        """Go on with what this rank saved in `private` or, where that does not fit, push on the first all there was."""
        held = {} if private is None else private.get("dense")
        self._carried = None
        if (wire := self._thresholded) is not None:
            wire.restart(state.step)
            if held:
                wire.load_state_dict(held["by_owner"])
                self._carried = held["carried"]
                return
        if state.dense_pending and self._rank == 0:
            self._carried = self._dense.flat(state.dense_pending)

    def report(self) -> dict[str, int] | None:
        """See DenseWire."""
        return None if self.wire is None else self.wire.report()
