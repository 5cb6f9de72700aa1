"""Values of parts: no rank holds more than 1 of them, and what has a plan is never worth more than its ranks."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.planner.search.part_values import lifted, values_of

CAPACITY = 30
sizes = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=3, unique=True)
kinds = st.lists(st.tuples(st.integers(1, 3), sizes), min_size=1, max_size=4)


def best_rank(values, copies):
    """The most that a rank may hold, by trying for every table each part and none."""
    tables = [
        [(0, 0.0), *((size, value) for (k, size), value in values.items() if k == kind)]
        for kind, many in enumerate(copies)
        for _ in range(many)
    ]
    chosen = (list(zip(*parts, strict=True)) for parts in product(*tables))
    return max(sum(worth) for size, worth in chosen if sum(size) <= CAPACITY)


def ranks_for(parts):
    """The fewest ranks for tables' parts, one list of (table, size); by trying all ways to put them down."""

    def fewest(left, ranks, most):
        if len(ranks) >= most:
            return most
        if not left:
            return len(ranks)
        (table, size), rest = left[0], left[1:]
        for k, (room, held) in enumerate(ranks):
            if size <= room and table not in held:
                there = [*ranks[:k], (room - size, held | {table}), *ranks[k + 1 :]]
                most = min(most, fewest(rest, there, most))
        return min(most, fewest(rest, [*ranks, (CAPACITY - size, {table})], most))

    return fewest(sorted(parts, key=lambda p: -p[1]), [], len(parts) + 1)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(kinds=kinds, seed=st.integers(0, 2**16))
def test_no_rank_holds_parts_of_more_than_one(kinds, seed):
    draw, copies = np.random.default_rng(seed), np.array([many for many, _ in kinds])
    demand = {(k, s): float(draw.integers(1, 5)) for k, (_, of) in enumerate(kinds) for s in of if draw.random() < 0.7}
    found = values_of(demand, copies, CAPACITY, [])
    assert best_rank(found.values, copies) <= 1 + 1e-9
    assert found.ranks == pytest.approx(sum(demand[part] * found.values[part] for part in found.values))
    wider = lifted(found.values, {k: np.array(sorted(of)) for k, (_, of) in enumerate(kinds)}, copies, CAPACITY)
    assert best_rank(wider, copies) <= 1 + 1e-9
    assert all(wider[part] >= value - 1e-9 for part, value in found.values.items())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(tables=st.lists(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=2), min_size=1, max_size=4))
def test_parts_are_worth_no_more_than_the_ranks_that_hold_them(tables):
    parts = [(table, size) for table, of in enumerate(tables) for size in of]
    demand = {}
    for part in parts:
        demand[part] = demand.get(part, 0.0) + 1.0
    copies = np.ones(len(tables), dtype=np.int64)
    found = values_of(demand, copies, CAPACITY, [])
    assert found.ranks <= ranks_for(parts) + 1e-9
    assert found.ranks >= sum(size for _, size in parts) / CAPACITY - 1e-6  # the mean is such a value, too
    again = values_of(demand, copies, CAPACITY, found.patterns)
    assert again.ranks == pytest.approx(found.ranks, abs=1e-5)
    assert again.work <= found.work


def test_parts_of_one_table_lie_on_different_ranks():
    """Three small strips of one table ask for three ranks, those of three tables for one."""
    assert values_of({(0, 5): 3.0}, np.array([1]), CAPACITY, []).ranks == pytest.approx(3)
    assert values_of({(0, 5): 3.0}, np.array([3]), CAPACITY, []).ranks == pytest.approx(1)


def test_sizes_not_asked_for_get_what_the_others_leave():
    """Beside a part of 20 that fills a rank but for 10, one of 11 does not fit: it is worth all that a rank is."""
    values = values_of({(0, 20): 4.0}, np.array([1, 1]), CAPACITY, []).values
    wider = lifted(values, {0: np.array([20]), 1: np.array([10, 11])}, np.array([1, 1]), CAPACITY)
    assert wider == pytest.approx({(0, 20): 1.0, (1, 10): 0.0, (1, 11): 1.0})
