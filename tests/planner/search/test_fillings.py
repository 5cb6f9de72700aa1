"""Fillings of ranks against every set of parts there is, and the program that combines them against one with all."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hetrain.planner.search.covering import GAIN, Covering, Parts
from hetrain.planner.search.fillings import CELLS, best_fillings


def every_set(sizes, most):
    """All counts [N, items] of items that fit, one by one."""
    sets = np.array(list(product(*(range(many + 1) for many in most))))
    return sets[(sets @ sizes <= 1 + 1e-9).all(1)]


def items(steps, least, most):
    """Lists of (sizes, worth, how many there are); two resources in whole `steps`, a third in any."""
    size = st.tuples(st.integers(least, steps), st.integers(0, steps), st.floats(0, 1))
    return st.lists(st.tuples(size, st.floats(0.01, 1), st.integers(1, most)), min_size=1, max_size=4)


def arrays(drawn, steps):
    sizes = np.array([[a / steps, b / steps, c] for (a, b, c), _, _ in drawn])
    return sizes, np.array([worth for _, worth, _ in drawn]), np.array([most for _, _, most in drawn])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(items(CELLS, 1, 4), st.integers(1, 5))
def test_of_two_resources_in_whole_cells_none_is_worth_more(drawn, wanted):
    sizes, worth, most = arrays(drawn, CELLS)
    sizes[:, 2] = 0
    found = best_fillings(sizes, worth, most, wanted)
    best = (every_set(sizes, most) @ worth).max()
    np.testing.assert_allclose(found.worth[0], best)
    assert len(found.worth) <= wanted


@settings(max_examples=60, deadline=None, derandomize=True)
@given(items(1000, 30, 6))
def test_all_that_is_found_fits_and_is_nearly_the_best(drawn):
    sizes, worth, most = arrays(drawn, 1000)
    found = best_fillings(sizes, worth, most, 10)
    assert (found.counts @ sizes <= 1 + 1e-9).all()
    assert (found.counts <= most).all()
    np.testing.assert_allclose(found.counts @ worth, found.worth)
    assert (np.diff(found.worth) <= 1e-12).all()
    best = (every_set(sizes, most) @ worth).max()
    assert best * 0.97 <= found.worth[0] <= best * (1 + 1e-9)


def with_every_filling(parts, rooms, missing, need, ranks):
    """The program's value with all fillings that fit."""
    covers, cost, of_class = [], [], []
    for which, room in enumerate(rooms):
        for counts in every_set(parts.sizes / room, np.ceil(need).astype(int)[parts.kind]):
            covers.append(np.bincount(parts.kind, counts / parts.of_table, len(need)))
            cost.append(room[0])
            of_class.append(which)
    kinds = len(need)
    within = np.array(of_class) == np.arange(len(rooms))[:, None]
    matrix = np.block([[-np.array(covers).T, -np.eye(kinds)], [within.astype(float), np.zeros((len(rooms), kinds))]])
    return linprog([*cost, *missing], matrix, [*-need, *ranks]).fun


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(6, 30), st.integers(0, 30), st.integers(1, 2)), min_size=2, max_size=3),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.lists(st.integers(0, 3), min_size=2, max_size=2),
    st.integers(0, 1),
)
def test_the_program_is_solved_as_if_it_knew_all_fillings(sizes, copies, ranks, same):
    kind = np.array([0, *(np.arange(1, len(sizes)) - same)])
    parts = Parts(kind, np.array([of for *_, of in sizes]), np.array([[a, b, 0] for a, b, _ in sizes]) / CELLS)
    need, ranks = np.array(copies[: kind.max() + 1], dtype=float), np.array(ranks)
    rooms = np.array([[1.0, 1.0, 1.0], [0.5, 1.0, 1.0]])
    missing = np.full(len(need), 1.5)
    covering = Covering(parts, rooms, missing)
    covered = covering.solve(need, ranks, 25)
    best = with_every_filling(parts, rooms, missing, need, ranks)
    assert best - 1e-9 <= covered.used <= best + GAIN * ranks.sum() + 1e-9
    assert (covering.fillings @ parts.sizes <= rooms[covering.of_class] + 1e-9).all()
    again = Covering(parts, rooms * 0.9, missing)
    again.adopt(covering)
    assert (again.fillings @ parts.sizes <= rooms[again.of_class] * 0.9 + 1e-9).all()
    lacks = np.maximum(need - covered.taken @ covering.covers, 0)
    np.testing.assert_allclose(rooms[covering.of_class, 0] @ covered.taken + missing @ lacks, covered.used, atol=1e-6)
    assert (np.bincount(covering.of_class, covered.taken, len(ranks)) <= ranks + 1e-6).all()
