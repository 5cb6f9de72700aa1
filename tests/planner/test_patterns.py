"""What patterns refute no plan does, by trying every plan; and they refute what simpler bounds cannot."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.planner.bound import lower_bound, tightened
from hetrain.planner.cluster import Cluster
from hetrain.planner.cut import ALL, NODE, RANK, Cut
from hetrain.planner.menu import make_menu, with_strips
from hetrain.planner.options import Options
from hetrain.planner.patterns import Patterns, _best_patterns
from hetrain.planner.workload import TableLoad
from hetrain.tables import Table
from tests.planner.test_strategies import best_of_all

MEMORY = 100


def cluster(nodes=2, local=2, memory=MEMORY):
    return Cluster("cuda", nodes, local, memory, memory, 900.0, 50.0, 600.0, 12.5)


def cut(kind, place, parts, ms, used, c):
    hbm = used * parts * {ALL: c.world_size, NODE: c.ranks_per_node}.get(place, 1)
    return Cut(kind, "hbm", place, parts, ms, 0.0, used, 0, hbm, 0)


def menu_of(tables, c):
    """`tables`: milliseconds of a whole one, of its replicas, of a row block on a node; bytes of a whole one."""
    loads = [TableLoad(Table(f"t{k}", k + 1, 4, (f"t{k}",), 0.01), (1.0,)) for k in range(len(tables))]

    def prices(load, kinds, tiers, columns):
        whole, replica, block, used = tables[load.table.rows - 1]
        found = [cut("table_wise", RANK, 1, whole, used, c), cut("column_wise", RANK, 2, whole * 0.6, used // 2 + 1, c)]
        if replica:
            found.append(cut("data_parallel", ALL, 1, replica, used, c))
        if block:
            found.append(cut("table_row_wise", NODE, 1, block, used // 2 + 1, c))
        return found

    return make_menu(loads, c, prices, Options())


ms = st.floats(0.05, 1.0).map(lambda x: round(x, 2))
one = st.tuples(ms, st.one_of(st.just(0.0), ms), st.one_of(st.just(0.0), ms), st.integers(1, 70))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(tables=st.lists(one, min_size=2, max_size=4), nodes=st.sampled_from([1, 2]))
def test_no_plan_is_below_the_bound(tables, nodes):
    c = cluster(nodes, 2)
    menu = menu_of(tables, c)
    best, bound = best_of_all(menu), lower_bound(menu)
    if not np.isfinite(best):
        return
    tighter, _ = tightened(menu, bound, best * 1.2)
    assert bound.ms <= tighter.ms <= best * (1 + 1e-9)
    for memory in (False, True):
        assert not Patterns(with_strips(menu), memory).refutes(best * (1 + 1e-9), 0.0, best)


def test_patterns_see_that_sizes_do_not_fit_together():
    """Tables of 0.45, 0.35 and 0.3 on four ranks: some sums of them leave a rest that none of them fills."""
    c = cluster(4, 1, 10_000)
    menu = menu_of([(size, 0.0, 0.0, 1) for size in (0.45,) * 6 + (0.35,) * 3 + (0.3,) * 3], c)
    bound = lower_bound(menu)
    tighter, _ = tightened(menu, bound, 1.3)
    assert tighter.ms > bound.ms * 1.01
    assert "patterns" in tighter.reason


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6, unique=True),
    seed=st.integers(0, 2**16),
    capacity=st.integers(1, 60),
)
def test_the_best_pattern_is_the_best_of_all(sizes, seed, capacity):
    sizes = np.sort(np.array(sizes))
    values = np.random.default_rng(seed).random(len(sizes))
    worth, found = _best_patterns(sizes, values, capacity)
    best = {0: 0.0}
    for room in range(1, capacity + 1):
        fitting = [(s, v) for s, v in zip(sizes, values, strict=True) if s <= room]
        best[room] = max([best[room - 1], *(best[room - s] + v for s, v in fitting)])
    assert worth == pytest.approx(best[capacity])
    value = dict(zip(sizes.tolist(), values.tolist(), strict=True))
    for pattern in found:
        assert sum(pattern) <= capacity
    if sizes[0] <= capacity:
        assert max(sum(value[s] for s in pattern) for pattern in found) == pytest.approx(worth)
