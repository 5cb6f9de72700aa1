"""Lagrangian relaxation: tables choose their cuts one by one, limits on sums over tables become prices.

    minimise sum of values    where sum of used_i <= limit_i

Any prices p >= 0 bound it from below by sum over tables of min(values + p . used) - p . limit, and the cuts that this
takes are a good choice. The prices are found one after the other, each by halving the interval where the bound turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetrain.planner.search.arrays import Floats, Ints

HALVINGS = 16
GROWTHS = 30  # of a price's interval, until it is high enough
ROUNDS = 2


@dataclass(frozen=True)
class Limit:
    """Sum over tables of `used` [C, O] is at most `most`."""

    used: Floats
    most: float


@dataclass(frozen=True)
class Relaxed:
    """`value` bounds the minimum from below; `price` [C, O] is what each cut costs its table at the best prices."""

    value: float
    price: Floats
    prices: tuple[float, ...]  # of the limits


def relax(values: Floats, limits: Sequence[Limit], copies: Ints) -> Relaxed:
    """The best bound found; `values` [C, O] is infinite for cuts that are not there, `copies` [C] counts tables."""
    prices = [0.0] * len(limits)
    if not np.isfinite(values.min(1)).all():
        return Relaxed(np.inf, values, tuple(prices))
    for turn in range(ROUNDS):
        if turn and sum(p > 0 for p in prices) < 2:
            break  # a lone price is at its best already
        for i, limit in enumerate(limits):
            others = values + sum(
                p * x.used for k, (p, x) in enumerate(zip(prices, limits, strict=True)) if k != i and p
            )
            prices[i] = _turning(others, limit, copies)
    price = values + sum(p * x.used for p, x in zip(prices, limits, strict=True) if p)
    value = float(copies @ price.min(1)) - sum(p * x.most for p, x in zip(prices, limits, strict=True))
    return Relaxed(value, price, tuple(prices))


def _turning(others: Floats, limit: Limit, copies: Ints) -> float:
    """The price of one limit at which the bound, concave in it, stops rising."""
    rows = np.arange(len(copies))

    def over(price: float) -> bool:
        chosen = (others + price * limit.used).argmin(1)
        return float(copies @ limit.used[rows, chosen]) > limit.most

    if not over(0.0):
        return 0.0
    scale = float(copies @ np.where(np.isfinite(others), others, 0.0).max(1)) or 1.0
    low, high = 0.0, scale / max(abs(limit.most), 1e-12) / 64
    for _ in range(GROWTHS):
        if not over(high):
            break
        low, high = high, high * 4
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if over(middle) else (low, middle)
    return high
