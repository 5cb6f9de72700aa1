from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrain.planner.row_ranges import even_ranges


def known(counts, quantiles):
    """Row quantiles as stats.json has them."""
    below = np.concatenate([[0], np.cumsum(counts)])
    return [int(np.searchsorted(below, k * below[-1] / quantiles)) for k in range(quantiles)] + [len(counts)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 8), st.integers(1, 64))
def test_every_row_is_in_one_range_and_every_range_has_one(counts, parts, quantiles):
    parts = min(parts, len(counts))
    bounds = even_ranges(known(counts, quantiles), parts)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(counts), parts + 1)
    assert all(low < high for low, high in pairwise(bounds))


@given(st.integers(0, 1000), st.integers(1, 8))
def test_no_range_takes_more_than_its_share_and_two_quantiles(seed, parts):
    counts = np.random.default_rng(seed).permutation(np.arange(1, 2001) ** -0.7)
    bounds, below = even_ranges(known(counts, 64), parts), np.concatenate([[0], np.cumsum(counts)])
    most = max(below[high] - below[low] for low, high in pairwise(bounds))
    assert most <= below[-1] / parts + 2 * below[-1] / 64 + counts.max()


def test_even_lookups_not_even_rows():
    assert even_ranges([0, 1, 3, 10, 100], 2) == [0, 3, 100]
    assert even_ranges([0, 1, 3, 10, 100], 4) == [0, 1, 3, 10, 100]
    assert even_ranges([0, 0, 0, 0, 100], 4) == [0, 1, 2, 3, 100]  # one row takes more than a share: no range is empty
    assert even_ranges([0, 99, 99, 99, 100], 3)[1:3] == [98, 99]


def test_more_parts_than_rows_cannot_be():
    with pytest.raises(ValueError, match="2 rows in 3 ranges"):
        even_ranges([0, 1, 2], 3)
