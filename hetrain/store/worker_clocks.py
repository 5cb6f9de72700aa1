"""Worker clocks at one owner (SSP): how many steps each worker has pushed here, and who waits for the slowest.

A worker at clock c has pushed its first c steps. Under staleness s it may read for its next step once the slowest
worker's clock is at least c - s; until then its read is parked here and goes on when a push opens the gate.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

ENDED = 1 << 62  # the clock of a worker that has no more to push: nobody waits for it

T = TypeVar("T")


class _Parked(NamedTuple, Generic[T]):
    least: int
    read: T


class WorkerClocks(Generic[T]):
    """A read is whatever the caller calls one. Not thread-safe: the caller holds a lock."""

    def __init__(self, workers: int) -> None:
        """`workers`: ranks 0 .. workers - 1, all at clock 0."""
        self._clocks = [0] * workers
        self._parked: dict[int, _Parked[T]] = {}  # by worker: it has one read at a time
        self.lead_max = 0  # steps by which a worker that read was ahead of the slowest

    @property
    def clocks(self) -> Sequence[int]:
        """By worker."""
        return tuple(self._clocks)

    @property
    def slowest(self) -> int:
        """The lowest clock; ENDED when all have ended."""
        return min(self._clocks)

    def advance(self, worker: int, clock: int) -> list[T]:
        """`worker` has pushed its first `clock` steps; returns the parked reads that may go on, each once."""
        self._clocks[worker] = max(self._clocks[worker], clock)
        slowest = self.slowest
        due = [w for w, parked in self._parked.items() if parked.least <= slowest]
        return [self._parked.pop(w).read for w in due]

    def park(self, worker: int, least: int, read: T) -> bool:
        """Keep `read` until the slowest worker's clock is `least`; False, and not kept, where it is already."""
        if self.slowest >= least:
            return False
        self._parked[worker] = _Parked(least, read)
        return True

    def reads(self, worker: int) -> int:
        """`worker` reads for its next step now: notes its lead; returns the slowest clock, at most its own."""
        slowest = min(self.slowest, self._clocks[worker])
        self.lead_max = max(self.lead_max, self._clocks[worker] - slowest)
        return slowest

    def withdraw(self, worker: int) -> T | None:
        """Take back the parked read of `worker`, if there is one."""
        parked = self._parked.pop(worker, None)
        return None if parked is None else parked.read

    def restart(self) -> None:
        """All workers at clock 0: training begins anew from what was loaded."""
        self._clocks = [0] * len(self._clocks)
        self._parked.clear()
