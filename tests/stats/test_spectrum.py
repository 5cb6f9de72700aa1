"""What is computed from groups of equal counts, against the sum or the cache itself, id by id."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.stats.counts import IdCounter
from hetrain.stats.spectrum import FEW, Spectrum

COUNTS = st.lists(st.one_of(st.integers(1, 9), st.integers(FEW - 2, 3 * FEW)), min_size=1, max_size=40)


@settings(max_examples=60)
@given(counts=COUNTS, data=st.data())
def test_shares_and_distinct_ids_are_those_of_the_sum_over_ids(counts: list[int], data: st.DataObject) -> None:
    spectrum, total = Spectrum.of(np.array(counts, np.uint32)), sum(counts)
    assert (spectrum.distinct, spectrum.total) == (len(counts), total)
    hottest = data.draw(st.integers(0, len(counts) + 3))
    assert spectrum.share_of_hottest(hottest) == pytest.approx(sum(sorted(counts)[::-1][:hottest]) / total)
    draws = data.draw(st.sampled_from([1, 100, 65_536]))
    assert spectrum.unique(draws) == pytest.approx(sum(1 - (1 - c / total) ** draws for c in counts), rel=1e-6)
    doubled = Spectrum.joined([spectrum, spectrum])
    assert (doubled.distinct, doubled.total) == (2 * len(counts), 2 * total)
    assert doubled.share_of_hottest(2 * hottest) == pytest.approx(spectrum.share_of_hottest(hottest))


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=6), st.booleans())
def test_counters_count(blocks: list[list[int]], huge: bool) -> None:
    step = 1 << 40 if huge else 1  # huge ids are counted by sorting
    counter = IdCounter(5 * step + 1)
    for block in blocks:
        counter.add(np.array(block, np.int64) * step)
    ids, seen = counter.counted()
    expected = collections.Counter(i * step for block in blocks for i in block)
    assert dict(zip(ids.tolist(), seen.tolist(), strict=True)) == expected
    assert ids.tolist() == sorted(expected)
    assert counter.lookups == expected.total()


def zipf(rows: int, exponent: float) -> np.ndarray:
    return np.maximum(1, (1e7 / np.arange(1, rows + 1) ** exponent)).astype(np.int64)


def test_a_coarse_spectrum_gives_nearly_the_same() -> None:
    spectrum = Spectrum.of(zipf(200_000, 1.1))
    coarse = spectrum.coarse()
    assert len(coarse.ids) <= 64 < len(spectrum.ids)
    assert (coarse.distinct, coarse.total) == (spectrum.distinct, spectrum.total)
    for size in (128, 8192, 65_536):
        assert coarse.unique(size) == pytest.approx(spectrum.unique(size), rel=0.005)
        assert coarse.share_of_hottest(size) == pytest.approx(spectrum.share_of_hottest(size), abs=0.005)


@pytest.mark.parametrize("capacity", [20, 100, 500])
def test_the_lru_hit_rate_is_that_of_a_cache(capacity: int) -> None:
    counts = zipf(1000, 1.0)
    ids = np.random.default_rng(1).choice(len(counts), 60_000, p=counts / counts.sum())
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    hits = 0
    for number, row in enumerate(ids.tolist()):
        hits += number >= 10_000 and row in cache
        cache[row] = None
        cache.move_to_end(row)
        if len(cache) > capacity:
            cache.popitem(last=False)
    assert Spectrum.of(counts).lru_hit_rate(capacity) == pytest.approx(hits / 50_000, abs=0.01)
