"""Stragglers on purpose, for experiments: launch.slow_ranks and launch.slow_random make steps take longer."""

import random
import time
from collections.abc import Callable

import torch

from hetrain.config import LaunchConfig
from hetrain.engine import StepOutput
from hetrain.ranks import Ranks


class SlowDown:
    """Lets this rank's steps take a factor longer than they need, by sleeping: the cores are free meanwhile.

    A step's own time counts, not what it waited for other ranks: under lockstep a slow step of one would otherwise
    be multiplied by the next slow one of another. Which steps are slow does not depend on where a run was cut.
    """

    def __init__(self, launch: LaunchConfig, seed: int, ranks: Ranks) -> None:
        self._always = launch.slow_ranks.get(ranks.rank, 1.0)
        self._share = launch.slow_random.share if ranks.computes else 0.0
        self._now_and_then = launch.slow_random.factor
        self._draw = f"{seed} {ranks.rank}"

    def factor(self, number: int) -> float:
        """How many times as long step `number` takes as it needs."""
        # A generator per step, seeded by text through SHA-512: the same on every machine.
        slow = self._share > 0 and random.Random(f"{self._draw} {number}").random() < self._share
        return self._always * (self._now_and_then if slow else 1.0)

    def step(self, number: int, work: Callable[[], StepOutput | None]) -> StepOutput | None:
        """Do `work`, step `number` of the run, and let it last."""
        factor = self.factor(number)
        if factor == 1:
            return work()
        start = time.perf_counter()
        out = work()
        if out is not None:
            if out.loss.device.type == "cuda":  # which computes on after `work` has returned
                torch.cuda.synchronize(out.loss.device)
            own = time.perf_counter() - start - out.wait_comm_s
            time.sleep(max(own, 0.0) * (factor - 1))
        return out
