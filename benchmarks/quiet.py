"""One timed window, and how much of the machine other processes took while it lasted. Standard library only."""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

QUIET = 0.05  # share of all cores' time that other processes may take in a window fit to quote


@dataclass(frozen=True)
class Window:
    """What one contender did in one window."""

    examples: int
    seconds: float
    cpu_s: float | None  # of the contender's own processes in the window; None: not known
    foreign: float  # share of the machine that went to everything else

    @property
    def rate(self) -> float:
        """Examples per second."""
        return self.examples / self.seconds

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


def machine_busy_s() -> float:
    """CPU seconds all processes have used since boot, steal included: that is time we did not get either."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) for f in fields[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Starts when made. `own_cpu_s` gives the CPU seconds of the processes that are measured."""

    def __init__(self, own_cpu_s=time.process_time) -> None:
        self._own = own_cpu_s
        self._start = (time.perf_counter(), own_cpu_s(), machine_busy_s())

    def stop(self, examples: int) -> Window:
        busy, own, now = machine_busy_s(), self._own(), time.perf_counter()
        seconds, cpu_s = now - self._start[0], own - self._start[1]
        others = max(0.0, busy - self._start[2] - cpu_s)
        return Window(examples, seconds, cpu_s, others / (seconds * (os.cpu_count() or 1)))
