"""The finaliser of splitmix64 for compiled loops: a bijection of 64-bit integers that leaves no trace of patterns."""

import numpy as np
from numba import njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


@njit(cache=True, nogil=True)
def mix(x: np.uint64) -> np.uint64:
    """Mix one uint64."""
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))
