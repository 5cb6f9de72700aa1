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
        """What all workers hold back, by parameter; {} where nothing ever waits. Collective."""
        if self.wire is None or not self.wire.sparse:
            return {}
        waiting = self.wire.waiting()
        if self._world_size > 1:
            dist.all_reduce(waiting, group=self._group)
        return self._dense.by_name(waiting)

    def state_dict(self) -> list[dict[str, Any]]:
        """Of this rank, by owner; [] where nothing ever waits."""
        return [] if self.wire is None else self.wire.state_dict()

    def restore(self, state: EngineState, private: dict[str, Any] | None) -> None:
        """Go on with what this rank saved in `private` or, where that does not fit, push on the first all there was."""
        states = [] if private is None else private.get("dense", [])
        self._carried = None
        if self.wire is not None:
            self.wire.restart(state.step)
            if self.wire.sparse and states:
                self.wire.load_state_dict(states)
                return
        if state.dense_pending and self._rank == 0:
            self._carried = self._dense.flat(state.dense_pending)

    def report(self) -> dict[str, int] | None:
        """See DenseWire."""
        return None if self.wire is None else self.wire.report()
