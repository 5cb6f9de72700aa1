"""The rules of per-row clocks (HET, VLDB 2022, Algorithms 1 to 3), as pure functions.

A row has a global clock `c_g` at its owner; a cached copy has a start clock `c_s` (the owner's clock
when it was fetched) and a current clock `c_c` (+1 per step that updates the copy). With staleness
`s`, a copy may be read while

    own bound:     c_c <= c_s + s    (own updates held back)
    others' bound: c_g <= c_c + s    (others' updates missed)

With `s` = 0 a row that changed is pushed and fetched again before its next read. That is not yet `bsp`: what another
worker holds back does not count in `c_g` until that worker pushes it, when it reads or evicts the row. Only without
a cache is every update pushed in its own step.

The cache, the owner and the per-key reference of the tests all call these functions. They are
written with operators alone, so they take Python ints, numpy arrays and int64 tensors.
"""

import math
from typing import Any, Literal

ClockRule = Literal["max", "sum"]
Validation = Literal["directory", "clock"]

UNBOUNDED = 1 << 62  # as good as infinity for clocks, and still an int64


def staleness_bound(staleness: float) -> int:
    """`staleness` (updates, >= 0, may be inf) as the integer that clocks are compared with.

    Raises ValueError when it is negative or not a number.
    """
    if math.isnan(staleness) or staleness < 0:
        raise ValueError(f"staleness={staleness}: expected a number of updates >= 0, or inf")
    return UNBOUNDED if staleness >= UNBOUNDED else int(staleness)


def breaks_own_bound(c_s: Any, c_c: Any, bound: int) -> Any:
    """Where a copy holds back more than `bound` updates of its own (boolean, same shape)."""
    return (c_c - c_s) > bound


def breaks_others_bound(c_g: Any, c_c: Any, bound: int) -> Any:
    """Where a copy may miss more than `bound` updates of others (boolean, same shape)."""
    return (c_g - c_c) > bound
