"""Speeds from measured times: straight lines through points whose errors grow with the times."""

from collections.abc import Sequence

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


def _alone(ratio: NDArray[np.float64]) -> float:
    """The factor that brings all of `ratio` nearest to 1."""
    return float(ratio.sum() / (ratio @ ratio))


def relative_error(start: float, slope: float, sizes: Sequence[float], times: Sequence[float]) -> float:
    """The median of |fitted - measured| / measured."""
    x, y = np.array(sizes, float), np.array(times, float)
    return float(np.median(np.abs(start + slope * x - y) / y))
