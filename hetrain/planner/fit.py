"""Speeds from measured times: straight lines, and sums of costs, through points whose errors grow with the times."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray


def line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(start, slope) of times = start + slope x size, least squares of relative errors; neither is negative.

    With a start or a slope that would be below 0 the other alone is fitted. Needs two different sizes above 0.
    """
    x, y = np.array(sizes, float), np.array(times, float)
    weighted = np.stack([1 / y, x / y], axis=1)
    (start, slope), *_ = np.linalg.lstsq(weighted, np.ones(len(y)), rcond=None)
    if start < 0:
        return 0.0, _alone(x / y)
    if slope <= 0:
        return _alone(1 / y), 0.0
    return float(start), float(slope)


def costs_of(
    counts: NDArray[np.float64], values: NDArray[np.float64], scales: NDArray[np.float64], free: int
) -> NDArray[np.float64]:
    """What each of N things costs [N], as values [P] = counts [P, N] x costs: least squares of errors / scales [P].

    No cost but the first `free` may be negative: of all ways to leave some others out, the best without one counts.
    N - free is a few.
    """
    weighted, goal = counts / scales[:, None], values / scales
    best, least = np.zeros(counts.shape[1]), np.inf
    others = range(free, counts.shape[1])
    for size in range(len(others) + 1):
        for some in combinations(others, size):
            columns = [*range(free), *some]
            costs, *_ = np.linalg.lstsq(weighted[:, columns], goal, rcond=None)
            off = float(((weighted[:, columns] @ costs - goal) ** 2).sum())
            if off < least and (costs[free:] >= 0).all():
                best, least = np.zeros(counts.shape[1]), off
                best[columns] = costs
    return best


def _alone(ratio: NDArray[np.float64]) -> float:
    """The factor that brings all of `ratio` nearest to 1."""
    return float(ratio.sum() / (ratio @ ratio))


def relative_error(start: float, slope: float, sizes: Sequence[float], times: Sequence[float]) -> float:
    """The median of |fitted - measured| / measured."""
    x, y = np.array(sizes, float), np.array(times, float)
    return float(np.median(np.abs(start + slope * x - y) / y))
