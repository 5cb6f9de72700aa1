"""Figures of the steps since the last log step, over all ranks."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from hetrain.engine import StepOutput
from hetrain.evaluate import area_under_roc
from hetrain.ranks import Ranks

AUC_EXAMPLES = 32_768  # newest examples of rank 0 that "AUC (newest 33k)" is over


class Meter:
    """Adds up steps without touching the device: everything is worked out at log steps."""

    def __init__(self, ranks: Ranks, examples_before: int = 0, total: Callable[[Tensor], Tensor] | None = None) -> None:
        """`total`: sums over ranks, as Accord.total; None: of all ranks, which ask for values together."""
        self._ranks, self._total = ranks, total or ranks.add_up
        self._before = examples_before  # of earlier sittings
        self.examples = 0  # of all ranks, since this process began
        self.wait_comm_s = 0.0  # this rank's, since this process began
        self._losses: list[Tensor] = []
        self._own = 0  # examples of this rank since the last log step
        self._scores: deque[tuple[Tensor, Tensor]] = deque()
        self._scored = 0
        self._mark = (0.0, 0.0, 0.0)  # train seconds, waits for data and comm at the last log step

    def add(self, out: StepOutput) -> None:
        """Count one step."""
        self.examples += out.global_size
        self.wait_comm_s += out.wait_comm_s
        self._own += out.examples
        self._losses.append(out.loss)
        if self._ranks.first:
            self._scores.append((out.logits, out.labels))
            self._scored += out.examples
            while self._scored - self._scores[0][0].shape[0] >= AUC_EXAMPLES:
                self._scored -= self._scores.popleft()[0].shape[0]

    def values(self, train_s: float, wait_data_s: float) -> dict[str, float]:
        """Figures since the last call. Collective as `total` is.

        `train_s` and `wait_data_s`: seconds this process has spent in training steps and waiting for data.
        """
        now = (train_s, wait_data_s, self.wait_comm_s)
        seconds, data, comm = (a - b for a, b in zip(now, self._mark, strict=True))
        self._mark = now
        loss = torch.stack(self._losses).sum().double().cpu() if self._losses else torch.zeros(())
        works = float(self._ranks.computes)  # a server's day is waiting
        mine = [float(loss), self._own, works * seconds, works * data, works * comm]
        self._losses.clear()
        self._own = 0
        sums = self._total(torch.tensor(mine, dtype=torch.float64))
        loss_sum, examples, seconds_sum, data_sum, comm_sum = sums.tolist()
        return {
            "loss": loss_sum / max(examples, 1),
            "auc": self._auc(),
            "examples": self._before + self.examples,
            "examples_per_s": examples * self._ranks.roles.workers / max(seconds_sum, 1e-9),
            "wait_data_share": data_sum / max(seconds_sum, 1e-9),
            "wait_comm_share": comm_sum / max(seconds_sum, 1e-9),
        }

    def _auc(self) -> float:
        if not self._scores:
            return float("nan")
        logits, labels = (torch.cat(parts).float().cpu() for parts in zip(*self._scores, strict=True))
        return area_under_roc(logits, labels)
