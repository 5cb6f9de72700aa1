"""Ranks that do not end although others have: stopped, or stuck on their way out. The launcher ends them in time.

While a run trains, every wait for a rank has launch.timeout_s. Once the others are through nobody waits for it but the
launcher, whose own wait, in torch.distributed.run, has no end; there every rank stays until all have done their part.
What is known of processes is read from /proc: to ask multiprocessing from a second thread would take the exit codes
away from the first.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Self

POLL_S = 0.25
ALIVE = 0.01  # of the time: a process that computes so much may still be writing its last file


def note_begun(folder: Path, rank: int) -> None:
    """This process is rank `rank`."""
    status = _status(os.getpid())
    if status is not None:
        (folder / f"pid{rank}").write_text(f"{os.getpid()} {status.started}")


def note_done(folder: Path, rank: int) -> None:
    """Rank `rank` has done its part: from now on the others have launch.timeout_s."""
    (folder / f"done{rank}").touch()


def forget(folder: Path) -> None:
    """Remove the notes, before ranks are started again."""
    for file in [*folder.glob("done*"), *folder.glob("pid*")]:
        file.unlink()


class LastRank:
    """While open, watches the ranks that note themselves in `folder` and kills those that do not end in time."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self._over = threading.Event()
        self._done: set[int] = set()
        self._marks: dict[int, tuple[float, float]] = {}  # rank -> when, and CPU seconds by then
        self.killed: list[int] = []

    def __enter__(self) -> Self:
        """Watch on a thread of its own."""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            done = {int(file.name[4:]) for file in self._folder.glob("done*")}
            if done != self._done:  # somebody got on: time begins anew
                self._done = done
                self._marks.clear()
            if done:
                self._look({int(file.name[3:]): file.read_text() for file in self._folder.glob("pid*")})

    def _look(self, notes: dict[int, str]) -> None:
        """Kill the ranks that are awaited and have hardly computed for launch.timeout_s; the stopped ones, if any."""
        late = {rank: note for rank, note in notes.items() if rank not in self._done} or notes
        there = {rank: status for rank, note in late.items() if (status := _noted(note)) is not None}
        silent = {rank: status for rank, status in there.items() if self._is_silent(rank, status.cpu_s)}
        stopped = {rank: status for rank, status in silent.items() if status.stopped}
        for rank, status in (stopped or silent).items():
            self.killed.append(rank)
            os.kill(status.pid, signal.SIGKILL)

    def _is_silent(self, rank: int, cpu_s: float) -> bool:
        now = time.monotonic()
        since, before = self._marks.setdefault(rank, (now, cpu_s))
        if cpu_s - before > ALIVE * self._timeout_s:
            self._marks[rank] = now, cpu_s
            return False
        return now - since > self._timeout_s and rank not in self.killed


class _Status:
    """What /proc/PID/stat says of a living process."""

    def __init__(self, pid: int, fields: list[str]) -> None:
        """`fields`: those after the name in brackets."""
        self.pid, self.stopped = pid, fields[0] == "T"
        self.cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.started = fields[19]  # ticks since the machine started: tells processes of the same number apart


def _status(pid: int) -> _Status | None:
    """None for a process that has ended, and where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else _Status(pid, fields)


def _noted(note: str) -> _Status | None:
    """Of the process that wrote `note`, while it lives."""
    pid, _, started = note.partition(" ")
    status = _status(int(pid)) if started else None
    return status if status is not None and status.started == started else None
