import math

import numpy as np
import pytest
import torch

from hetrain.consistency import UNBOUNDED, breaks_others_bound, breaks_own_bound, staleness_bound


@pytest.mark.parametrize(("staleness", "bound"), [(0, 0), (3, 3), (2.9, 2), (math.inf, UNBOUNDED), (1e30, UNBOUNDED)])
def test_staleness_as_integer(staleness, bound):
    assert staleness_bound(staleness) == bound


@pytest.mark.parametrize("staleness", [-1, -0.5, math.nan])
def test_bad_staleness_is_named(staleness):
    with pytest.raises(ValueError, match="staleness"):
        staleness_bound(staleness)


@pytest.mark.parametrize("kind", [int, np.asarray, torch.tensor])
def test_bounds_are_the_papers_inequalities(kind):
    for c_s, c_c, c_g, s in [(4, 4, 4, 0), (4, 5, 4, 0), (4, 6, 9, 2), (4, 7, 9, 2), (4, 6, 8, 2)]:
        assert bool(breaks_own_bound(kind(c_s), kind(c_c), s)) == (not c_c <= c_s + s)
        assert bool(breaks_others_bound(kind(c_g), kind(c_c), s)) == (not c_g <= c_c + s)


def test_large_clocks_do_not_round():
    clock = torch.tensor([1 << 60])
    assert breaks_others_bound(clock + 4, clock, 3).tolist() == [True]
    assert breaks_others_bound(clock + 3, clock, 3).tolist() == [False]
    assert breaks_others_bound(clock, torch.zeros_like(clock), UNBOUNDED).tolist() == [False]
