"""How long steps take once training has warmed up."""

from array import array
from itertools import pairwise
from typing import Any

WARM_UP = 0.1  # share of the steps, at the start, that is left out


class Pace:
    """Durations of the steps of one rank: two numbers are kept per step, everything else is worked out at the end."""

    def __init__(self) -> None:
        self._ends = array("d", [0.0])  # seconds of training when each step had ended
        self._examples = array("q", [0])  # of all ranks, by then

    def add(self, train_s: float, examples: int) -> None:
        """Count one step.

        `train_s`: seconds spent in training so far, pauses left out; `examples`: of all ranks so far. Both only grow.
        """
        self._ends.append(train_s)
        self._examples.append(examples)

    def values(self) -> dict[str, Any]:
        """`step_ms` (p50, p90, mean) and `examples_per_s_steady` after the first tenth of the steps, or None."""
        first = int(WARM_UP * (len(self._ends) - 1))
        ends, examples = self._ends[first:], self._examples[first:]
        if len(ends) < 2:
            return {"step_ms": None, "examples_per_s_steady": None}
        times = sorted(1e3 * (b - a) for a, b in pairwise(ends))
        seconds = max(ends[-1] - ends[0], 1e-9)
        step_ms = {"p50": _quantile(times, 0.5), "p90": _quantile(times, 0.9), "mean": 1e3 * seconds / len(times)}
        return {"step_ms": step_ms, "examples_per_s_steady": (examples[-1] - examples[0]) / seconds}


def _quantile(ordered: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
