"""Every example once, whoever reads and whoever goes on."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetrain.data.lanes import drop, fresh_lanes, lane_size, pack, redeal, unpack, window_order

examples = st.integers(0, 300)
ranks = st.integers(1, 6)
windows = st.integers(1, 100)


def positions(lanes):
    """Where the lanes' examples stand in the epoch's sequence, in reading order."""
    return [piece.lo + at for lane in lanes for piece in lane for at in window_order(piece, 3, 1).tolist()]


@given(examples, ranks, windows)
def test_fresh_lanes_hold_every_example_once(n, w, window):
    lanes = fresh_lanes(n, w, window)
    assert sorted(positions(lanes)) == list(range(n))
    sizes = [lane_size(lane) for lane in lanes]
    assert max(sizes) - min(sizes) <= 1


@given(examples, ranks, windows, st.integers(0, 100), st.lists(ranks, min_size=1, max_size=3))
def test_dealing_again_keeps_exactly_what_is_left(n, w, window, taken, others):
    lanes = fresh_lanes(n, w, window)
    left = [drop(lane, taken) for lane in lanes]
    read = [position for lane in lanes for position in positions([lane])[:taken]]
    for other in others:
        left = redeal(unpack(pack(left)), other)
        sizes = [lane_size(lane) for lane in left]
        assert len(left) == other
        assert max(sizes) - min(sizes) <= 1
    assert sorted(read + positions(left)) == list(range(n))


@given(examples, ranks, windows)
def test_dropping_in_steps_equals_dropping_at_once(n, w, window):
    for lane in fresh_lanes(n, w, window):
        assert drop(drop(lane, 5), 7) == drop(lane, 12)


def test_windows_differ_by_epoch_and_start():
    first, second = fresh_lanes(200, 1, 100)[0]
    assert not np.array_equal(window_order(first, 0, 0), window_order(first, 0, 1))
    assert not np.array_equal(window_order(first, 0, 0), window_order(second, 0, 0))
