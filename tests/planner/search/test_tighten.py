"""What whole tables refute no plan does, by trying every plan; and they refute what simpler bounds cannot."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.planner.cluster import Cluster
from hetrain.planner.cut import ALL, NODE, RANK, Cut
from hetrain.planner.options import Options
from hetrain.planner.search.bound import lower_bound
from hetrain.planner.search.menu import make_menu
from hetrain.planner.search.tighten import tightened
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


@settings(max_examples=12, deadline=None, derandomize=True)
@given(tables=st.lists(one, min_size=2, max_size=4), nodes=st.sampled_from([1, 2]))
def test_no_plan_is_below_the_bound(tables, nodes):
    menu = menu_of(tables, cluster(nodes, 2))
    best, bound = best_of_all(menu), lower_bound(menu)
    if not np.isfinite(best):
        return
    tighter, mixtures = tightened(menu, bound, best * 1.2, 50_000)
    assert bound.ms <= tighter.ms <= best * (1 + 1e-9)
    for mixture in mixtures:
        tables_of = np.bincount([way.kind for way in mixture.ways], mixture.tables, len(menu.copies))
        assert np.allclose(tables_of, menu.copies, atol=1e-5)


def test_sizes_that_do_not_fit_together_are_seen():
    """Tables of 0.45, 0.35 and 0.3 on four ranks: some sums of them leave a rest that none of them fills."""
    menu = menu_of([(size, 0.0, 0.0, 1) for size in (0.45,) * 6 + (0.35,) * 3 + (0.3,) * 3], cluster(4, 1, 10_000))
    bound = lower_bound(menu)
    tighter, _ = tightened(menu, bound, 1.3, 50_000)
    assert tighter.ms > bound.ms * 1.01
    assert "whole tables" in tighter.reason


def test_a_table_is_not_half_in_one_cut_and_half_in_another():
    """What patterns fill with mixtures of cuts (0.42 ms) is far from what whole tables take (0.46)."""
    menu = menu_of([(0.68, 0.37, 0.38, 1), (0.6, 0.08, 0.3, 1), (0.37, 0.1, 0.3, 1)], cluster(2, 2, 10_000))
    best, bound = best_of_all(menu), lower_bound(menu)
    tighter, _ = tightened(menu, bound, best, 50_000)
    assert bound.ms < 0.42
    assert 0.45 < tighter.ms <= best


def test_without_work_the_bound_stays():
    menu = menu_of([(size, 0.0, 0.0, 1) for size in (0.45,) * 6 + (0.35,) * 3 + (0.3,) * 3], cluster(4, 1, 10_000))
    bound = lower_bound(menu)
    assert tightened(menu, bound, 1.3, 0) == (bound, [])


def two_tiers(tables, hbm, ddr):
    """`tables`: milliseconds of a whole one and of its replicas, bytes, how much slower hosts are."""
    c = Cluster("cuda", 2, 1, hbm, ddr, 900.0, 50.0, 600.0, 12.5)
    loads = [TableLoad(Table(f"t{k}", k + 1, 4, (f"t{k}",), 0.01), (1.0,)) for k in range(len(tables))]

    def prices(load, kinds, tiers, columns):
        whole, replica, used, slower = tables[load.table.rows - 1]
        found = [cut("table_wise", RANK, 1, whole, used, c), cut("column_wise", RANK, 2, whole * 0.6, used // 2, c)]
        found += [cut("data_parallel", ALL, 1, replica, used, c)] * bool(replica)
        return found + [
            replace(x, tier="ddr", compute_ms=x.cost * slower, hbm=0, hbm_total=0, ddr=x.hbm, ddr_total=x.hbm_total)
            for x in found
            if slower
        ]

    return make_menu(loads, c, prices, Options())


@pytest.mark.parametrize(
    "menu",
    [
        two_tiers([(0.1, 0.0, 71, 1.01), (0.58, 0.0, 64, 1.0), (0.53, 0.0, 24, 1.0)], 30, 10**6),  # leaner
        two_tiers([(0.78, 0.03, 20, 1.0), (0.85, 0.08, 19, 1.3), (0.34, 0.48, 14, 0.0)], 14, 40),  # more on every rank
    ],
)
def test_ways_that_are_left_out_refute_nothing(menu):
    """Some ways to cut a table are nowhere better than others in time, but hosts have room for them alone."""
    best, bound = best_of_all(menu), lower_bound(menu)
    tighter, _ = tightened(menu, bound, best * 1.2, 50_000)
    assert bound.ms <= tighter.ms <= best * (1 + 1e-9)
