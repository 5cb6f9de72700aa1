"""When ranks that step at their own pace come together, and how far the run is.

A run's examples are counted as they are granted: a worker asks before each step. Once a meeting is due, asking workers
are turned back; a worker turned back, and one that has nothing left to do, attends, and when every rank does, all
pushes are in and the meeting takes place. So a meeting falls on an exact count of examples.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What every rank learns at a meeting."""

    begun: int  # examples granted since training began, all of them trained by now
    signal: int  # a stop signal that some rank caught; 0: none
    ended: bool  # no worker has anything left to train


Attend = Callable[[Verdict], None]
NextDue = Callable[[int], int | None]


class Meetings:
    """The count and the calendar of one run, kept by one owner. Not thread-safe: the caller holds a lock."""

    def __init__(self, ranks: int, workers: int) -> None:
        """`ranks`: of the run, of which the first `workers` train."""
        self._ranks, self._workers = ranks, workers
        self._next_due: NextDue = _never
        self._ended: set[int] = set()
        self._attending: dict[int, Attend] = {}
        self._due: int | None = None
        self._signal = 0
        self.begun = 0
        self.first_end: tuple[int, float] | None = None  # examples begun, and seconds of training, when a worker ended
        self._training_s = 0.0  # until the newest meeting
        self._since: float | None = None  # when training began, or went on; None: ranks are together

    def plan(self, next_due: NextDue | None = None) -> None:
        """Begin to count anew.

        `next_due(begun)`: the examples at which the next meeting is due, after `begun`; None, or in its place: never.
        """
        self._next_due = next_due or _never
        self._due = self._next_due(0)
        self.begun, self._signal, self.first_end = 0, 0, None
        self._ended.clear()
        self._training_s, self._since = 0.0, None

    def begin(self, examples: int) -> bool:
        """Whether a worker may train its next `examples`; False turns it back: it is to attend."""
        if self._signal or (self._due is not None and self.begun >= self._due):
            return False
        if self._since is None:
            self._since = time.perf_counter()
        self.begun += examples
        return True

    def end(self, worker: int) -> None:
        """`worker` has nothing left to train."""
        self._ended.add(worker)
        if self.first_end is None:
            self.first_end = self.begun, self._seconds()

    def stop(self, signal: int) -> None:
        """A rank caught a stop signal: meet as soon as can be."""
        self._signal = self._signal or signal

    def _seconds(self) -> float:
        return self._training_s + (0.0 if self._since is None else time.perf_counter() - self._since)

    @property
    def missing(self) -> list[int]:
        """Ranks that do not attend."""
        return [rank for rank in range(self._ranks) if rank not in self._attending]

    def attend(self, rank: int, attend: Attend) -> list[Callable[[], None]]:
        """`rank` waits for the others; once all do, returns what tells each of them the verdict."""
        self._attending[rank] = attend
        if self.missing:
            return []
        verdict = Verdict(self.begun, self._signal, len(self._ended) == self._workers)
        told, self._attending = list(self._attending.values()), {}
        self._due, self._signal = self._next_due(self.begun), 0
        self._training_s, self._since = self._seconds(), None
        return [_telling(attend, verdict) for attend in told]


def _never(begun: int) -> None:
    return None


def _telling(attend: Attend, verdict: Verdict) -> Callable[[], None]:
    return lambda: attend(verdict)
