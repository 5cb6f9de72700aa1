"""Ctrl-C, SIGTERM and a closed terminal (SIGHUP) end a run between two steps, the same two on every rank."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist

from hetrain.ranks import Ranks
from hetrain.stop_signals import Handlers, catch, restore


class StopSignal:
    """Catches the signals while open; a second one of a kind acts as it always does."""

    def __init__(self, ranks: Ranks, tell: Callable[[int], None] | None = None) -> None:
        """`tell`: called with the number when a signal is caught, by its handler; where ranks do not ask each step."""
        self._ranks, self._tell = ranks, tell
        self._mine = 0
        self._before: Handlers = {}
        self._flag = torch.zeros((), dtype=torch.int64)
        self._work: dist.Work | None = None

    def __enter__(self) -> Self:
        self._before = catch(self._caught)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore(self._before)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._mine = number
        signal.signal(number, self._before[signal.Signals(number)])
        if self._tell is not None:
            self._tell(number)

    def agreed(self) -> signal.Signals | None:
        """The signal that any rank had caught one call ago, the same on all ranks; None: none.

        Called once per step. The question travels while the next step computes: nobody waits for the answer.
        """
        if self._ranks.alone:
            return signal.Signals(self._mine) if self._mine else None
        answer = self.settle()
        if answer is None:
            self._flag.fill_(self._mine)
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._ranks.group, async_op=True)
        return answer

    def settle(self) -> signal.Signals | None:
        """Take the answer that is still travelling; nothing of ours is in flight afterwards."""
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        number = int(self._flag)
        return signal.Signals(number) if number else None
