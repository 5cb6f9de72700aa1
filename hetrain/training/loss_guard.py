"""The first loss that is not finite ends training, naming step, rank and the data or setting behind it."""

import math
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hetrain.data.batch import Batch
from hetrain.engine import StepOutput
from hetrain.errors import TrainingError

KEPT = 8  # batches; more than any pipeline reads ahead
LARGE = 1e4  # a dense value beyond this is named as the likely cause


class Guard:
    """Sees every batch on its way to the engine and every loss on its way back."""

    def __init__(self, rank: int, dense_names: tuple[str, ...]) -> None:
        self._rank, self._names = rank, dense_names
        self._read = self._checked = 0
        self._recent: deque[tuple[int, Batch]] = deque(maxlen=KEPT)
        self._late: tuple[int, int, Tensor, torch.cuda.Event] | None = None

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; the last few are kept to look for a culprit in."""
        for batch in batches:
            self._read += 1
            self._recent.append((self._read, batch))
            yield batch

    def check(self, step: int, out: StepOutput) -> None:
        """Raise TrainingError when the loss of `step` is not finite.

        On a GPU the loss of the step before is looked at, since asking for this one would wait for the device.
        """
        self._checked += 1
        if out.loss.device.type != "cuda":
            if not math.isfinite(out.loss.item()):
                raise TrainingError(self._explain(step, self._checked))
            return
        if self._late is not None:
            late_step, number, loss, copied = self._late
            copied.synchronize()
            if not math.isfinite(loss.item()):
                raise TrainingError(self._explain(late_step, number))
        host = torch.empty((), pin_memory=True)
        host.copy_(out.loss, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._late = (step, self._checked, host, event)

    def _explain(self, step: int, number: int) -> str:
        """`number`: of the batch, as this rank read it."""
        where = f"the loss of step {step} on rank {self._rank} is not finite"
        batch = next((b for n, b in self._recent if n == number), None)
        if batch is None or batch.dense.numel() == 0:
            return f"{where}. {_DIVERGED}"
        finite = torch.isfinite(batch.dense).all(0)
        largest = torch.where(torch.isfinite(batch.dense), batch.dense, 0).abs().amax(0)
        for at, name in enumerate(self._names):
            if not finite[at]:
                return (
                    f"{where}: dense column {name!r} has NaN or infinite values in that batch (finite ones range to "
                    f"{largest[at]:.4g}). Prepare the data again: `hetrain prepare` clips dense values at 0, takes "
                    "log(1 + x) and puts 0 for missing ones."
                )
        widest = int(largest.argmax())
        if largest[widest] > LARGE:
            return (
                f"{where}: dense column {self._names[widest]!r} ranges to {largest[widest]:.4g} in that batch. "
                "Scale it, for instance by log(1 + x) as `hetrain prepare` does."
            )
        return f"{where}; the batch's dense values are ordinary (at most {largest.max():.4g}). {_DIVERGED}"


_DIVERGED = (
    "The weights have diverged: lower optimizer.dense.lr or optimizer.rows.lr, or set optimizer.schedule.warmup_steps."
)
