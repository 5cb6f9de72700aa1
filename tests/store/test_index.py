"""Both indices against a dict, over traces with repeats, churn, growth and rows that collide in weaker hashes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.errors import ConfigError
from hetrain.store.index import ArrayIndex, HashIndex, make_index

SMALL = 200  # rows of the dense index
IDS = st.one_of(
    st.integers(0, SMALL - 1),
    st.integers(0, 300).map(lambda i: i << 40),
    st.integers(0, 300).map(lambda i: (i << 20) + 7),
    st.builds(lambda i, k: i << k, st.integers(0, 50), st.integers(0, 42)),
    st.integers(0, (1 << 48) + 3),
    st.integers((1 << 63) - 5, (1 << 63) - 1),
)


def ints(values):
    return np.array(list(values), dtype=np.int64)


def last_occurrences(rows):
    return list(reversed(dict.fromkeys(reversed(rows))))


def check_trace(index, ids, data):
    """Insert, assign and remove at will; after each, every row is where the dict has it."""
    held, seen, next_slot = {}, set(), 0
    for _ in range(data.draw(st.integers(1, 12))):
        rows = data.draw(st.lists(ids, max_size=40))
        seen |= set(rows)
        what = data.draw(st.sampled_from(["insert", "assign", "remove"]))
        if what == "insert":
            absent = [row for row in rows if row not in held]
            distinct = last_occurrences(absent)
            slots = ints(range(next_slot, next_slot + len(distinct) + 3))
            if distinct:
                with pytest.raises(ValueError, match=rf"^{len(distinct)} new rows, but {len(distinct) - 1} free"):
                    index.insert(ints(absent), slots[: len(distinct) - 1])
                assert (index.find(ints(absent)) == -1).all()
            found, order = index.insert(ints(absent), slots[::-1])
            held |= dict(zip(distinct, slots[::-1].tolist(), strict=False))
            assert order.tolist() == distinct
            assert found.tolist() == [held[row] for row in absent]
        elif what == "assign":
            distinct = list(dict.fromkeys(rows))
            slots = ints(range(next_slot, next_slot + len(distinct)))
            index.assign(ints(distinct), slots)
            held |= dict(zip(distinct, slots.tolist(), strict=True))
        else:
            index.remove(ints(rows))
            for row in rows:
                held.pop(row, None)
        next_slot += 50
        asked = sorted(seen)
        assert index.find(ints(asked)).tolist() == [held.get(row, -1) for row in asked]
    return held


@given(st.data(), st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_hash_index_is_a_dict(data, expected):
    index = HashIndex(expected)
    assert len(check_trace(index, IDS, data)) == len(index)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_array_index_is_a_dict(data):
    check_trace(ArrayIndex(SMALL), st.integers(0, SMALL - 1), data)


@pytest.mark.parametrize("shift", [0, 8, 32, 44])
def test_churn_at_constant_size_neither_grows_nor_slows(shift):
    """As many rows come as go, for many times the table's size: the longest run of full places stays short."""
    index, rng = HashIndex(1000), np.random.default_rng(shift)
    size, first, free = index.nbytes, 0, np.arange(1000)
    held = np.arange(1000, dtype=np.int64) << shift
    index.insert(held, free)
    for _ in range(300):
        first += 1000
        leaving = rng.permutation(1000)[:500]
        slots = index.find(held[leaving])
        index.remove(held[leaving])
        held[leaving] = (np.arange(first, first + 500, dtype=np.int64) % (1 << 18)) << shift
        found, _ = index.insert(held[leaving], slots)
        assert found.tolist() == slots.tolist()
    assert (len(index), index.nbytes) == (1000, size)
    assert sorted(index.find(held).tolist()) == free.tolist()
    assert longest_run(index) < 60


def longest_run(index):
    full = index._table[:, 0] >= 0
    gaps = np.flatnonzero(~np.concatenate([full, full]))
    return int(np.diff(gaps).max()) - 1


@pytest.mark.parametrize("rows", [np.arange(50_000) << 16, np.arange(50_000) << 47, np.arange(50_000) * 65_537 + 12])
def test_growth_from_nothing_with_regular_rows(rows):
    rows = rows & ((1 << 62) - 1)
    rows = rows[np.sort(np.unique(rows, return_index=True)[1])]
    index = HashIndex(0)
    for part in np.array_split(np.arange(len(rows)), 37):
        index.insert(rows[part], part)
    assert index.find(rows).tolist() == list(range(len(rows)))
    assert longest_run(index) < 150
    assert index.nbytes <= 48 * max(len(rows), 16)


@pytest.mark.parametrize("index", [ArrayIndex(10), HashIndex(10)], ids=["array", "hash"])
def test_rows_outside_are_refused(index):
    for row in (-1, -10) if isinstance(index, HashIndex) else (-1, 10):
        with pytest.raises(IndexError):
            index.find(ints([3, row]))
        with pytest.raises(IndexError):
            index.insert(ints([3, row]), ints([0, 1]))


def test_hash_index_refuses_to_insert_what_it_holds():
    index = HashIndex(10)
    index.insert(ints([3]), ints([0]))
    with pytest.raises(ValueError, match="held already"):
        index.insert(ints([3]), ints([1]))


def test_make_index():
    assert isinstance(make_index("array", 10, 5), ArrayIndex)
    assert make_index("hash", 10**15, 5).nbytes < 1000
    with pytest.raises(ConfigError, match=r"store\.index=tree"):
        make_index("tree", 10, 5)
