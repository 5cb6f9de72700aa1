"""Layouts made rank by rank: whole, within memory, near plans that are known; what they begin with, by every way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hetrain.planner.cluster import Cluster
from hetrain.planner.cut import ALL, NODE, RANK, Cut
from hetrain.planner.options import Options
from hetrain.planner.search.beginnings import beginnings, least_mean, parts_on_ranks
from hetrain.planner.search.bound import memory_lack
from hetrain.planner.search.candidates import choices
from hetrain.planner.search.filled import Filler, filled, whole_numbers
from hetrain.planner.search.hierarchical import search
from hetrain.planner.search.menu import make_menu
from hetrain.planner.search.packing import Packing, mean
from hetrain.planner.search.place import NONE, Layout
from hetrain.planner.search.worth import worth
from hetrain.planner.workload import TableLoad
from hetrain.tables import Table

MEMORY = 1000


def cluster(nodes, local=4, memory=MEMORY):
    return Cluster("cuda", nodes, local, memory, memory, 900.0, 50.0, 600.0, 12.5)


def menu_of(kinds, c):
    """`kinds`: how many tables, ms and bytes of a whole one, ms of replicas and of blocks on a node; 0: no such cut."""
    loads = [
        TableLoad(Table(f"t{kind}_{k}", kind + 1, 4, (f"t{kind}_{k}",), 0.01), (1.0,))
        for kind, (many, *_) in enumerate(kinds)
        for k in range(many)
    ]

    def prices(load, sharding, tiers, columns):
        _, ms, used, replica, block = kinds[load.table.rows - 1]
        found = [
            Cut("table_wise", "hbm", RANK, 1, ms, 0.0, used, 0, used, 0),
            Cut("row_wise", "hbm", RANK, 2, ms * 0.6, 0.0, used // 2 + 1, 0, used + 2, 0),
            Cut("table_wise", "ddr", RANK, 1, ms * 3, 0.0, 0, used, 0, used),
        ]
        if replica:
            found.append(Cut("data_parallel", "hbm", ALL, 1, replica, 0.0, used, 0, used * c.world_size, 0))
        if block:
            each = used // c.ranks_per_node + 1
            found.append(Cut("table_row_wise", "hbm", NODE, 1, block, 0.0, each, 0, each * c.ranks_per_node, 0))
        return found

    return make_menu(loads, c, prices, Options())


def fillers_of(menu, beyond=1.0):
    """Layouts made rank by rank for `beyond` times the mean rank's time, that time, and what cuts are worth at it."""
    packing = Packing(menu)
    ms = packing.price(np.where(menu.there, menu.largest * menu.ranks + menu.everywhere, np.inf)).value * beyond
    spent = worth(menu, packing.pack(mean, ms * 1.05, packing.least_everywhere, ms * 1.05), ms)
    return list(filled(menu, spent, choices(packing, ms), ms)), ms, spent


def check_whole(layout: Layout) -> None:
    assert (layout.cut != NONE).all()
    check_loads(layout)


def check_loads(layout: Layout) -> None:
    ms, held = np.zeros(layout.world), np.zeros((2, layout.world), dtype=np.int64)
    for table in np.flatnonzero(layout.cut != NONE):
        cut, parts = layout.of(table), layout.parts[table]
        assert len(set(layout.places[table])) == len(parts) == cut.parts
        for place, part in zip(layout.places[table], parts, strict=True):
            ranks = layout.span(part, place)
            ms[ranks] += part.cost
            held[:, ranks] += [[part.hbm], [part.ddr]]
    np.testing.assert_allclose(layout.ms, ms, atol=1e-9)
    np.testing.assert_array_equal(layout.held, held)
    assert (held <= layout.limit).all()


one_kind = st.tuples(
    st.integers(1, 30), st.floats(0.05, 1.0), st.integers(0, 600), st.sampled_from([0, 0.05]), st.sampled_from([0, 0.2])
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(one_kind, min_size=1, max_size=4), st.sampled_from([1, 2]), st.sampled_from([1.0, 1.3, 1.6]))
def test_layouts_are_whole_and_within_memory(kinds, nodes, beyond):
    menu = menu_of(kinds, cluster(nodes))
    if not memory_lack(menu):
        for layout in fillers_of(menu, beyond)[0]:
            check_whole(layout)


CONTENTS = (  # of ranks, (ms, bytes) of a table: how many; each 1 ms and nearly all of the memory
    {(0.30, 620): 1, (0.10, 130): 2, (0.25, 50): 2},
    {(0.10, 130): 7, (0.03, 9): 10},
    {(0.25, 50): 2, (0.03, 9): 10, (0.20, 805): 1},
)


def tables_of(ranks):
    total = {}
    for rank in ranks:
        for table, many in CONTENTS[rank].items():
            total[table] = total.get(table, 0) + many
    return [(many, ms, used, 0, 0) for (ms, used), many in total.items()]


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_can_be_filled_are_nearly_filled(seed):
    menu = menu_of(tables_of(np.random.default_rng(seed).integers(0, 3, 32)), cluster(8))
    layouts, ms, _ = fillers_of(menu)
    assert ms <= 1 + 1e-9
    for layout in layouts:
        check_whole(layout)
    assert min(layout.slowest for layout in layouts) <= 1.02


def test_the_search_fills_ranks_where_memory_is_crowded():
    menu = menu_of(tables_of([0, 1, 2] * 8), cluster(6))
    found, bound = search(menu)
    check_whole(found)
    assert found.slowest <= bound.ms * 1.02


@settings(max_examples=30, deadline=None, derandomize=True)
@given(kinds=st.lists(one_kind, min_size=1, max_size=3), data=st.data())
def test_the_mean_that_a_beginning_leaves_is_a_bound_near_the_linear_programs(kinds, data):
    menu = menu_of(kinds, cluster(2))
    layout, tables = Layout(menu), len(menu.loads)
    for table in data.draw(st.sets(st.integers(0, tables - 1))):
        layout.put(table, data.draw(st.integers(0, len(menu.cuts[menu.kind_of[table]]) - 1)))
    cuts = parts_on_ranks(menu)
    ways = [(k, o) for k, o in zip(*np.nonzero(cuts), strict=True)]
    need = np.bincount(menu.kind_of[layout.cut == NONE], minlength=len(menu.cuts))
    figures = [[array[way] for way in ways] for array in (menu.largest * menu.ranks, menu.hbm, menu.ddr)]
    of_kind = [[float(way[0] == k) for way in ways] for k in range(len(need))]
    left = layout.limit[:, 0] - layout.held.mean(1)
    solved = linprog(figures[0], figures[1:], left, of_kind, need)
    found = least_mean(layout, cuts)
    if solved.status == 0:
        best = layout.ms.mean() + solved.fun
        assert best * 0.98 - 1e-6 <= found <= best * (1 + 1e-6) + 1e-6


@settings(max_examples=15, deadline=None, derandomize=True)
@given(kinds=st.lists(one_kind, min_size=1, max_size=3), most=st.floats(0.5, 20), data=st.data())
def test_beginnings_hold_what_lies_on_all_ranks_or_nodes_each_set_once(kinds, most, data):
    menu = menu_of(kinds, cluster(2))
    drawn = st.tuples(*(st.integers(0, len(menu.cuts[kind]) - 1) for kind in range(len(kinds))))
    choices = [np.array(data.draw(drawn))[menu.kind_of] for _ in range(4)]
    found = beginnings(menu, choices, most)
    held = [layout.cut.tolist() for layout in found]
    assert len({tuple(cuts) for cuts in held}) == len(held)
    beside = [
        [cut if menu.cuts[kind][cut].place != RANK else NONE for kind, cut in zip(menu.kind_of, choice, strict=True)]
        for choice in choices
    ]
    for layout, cuts in zip(found, held, strict=True):
        assert cuts in beside
        assert layout.slowest < most
        check_loads(layout)
    means = [least_mean(layout, parts_on_ranks(menu) & (menu.chunk <= 1) & (menu.largest <= most)) for layout in found]
    assert means == sorted(means)
    assert all(mean <= most for mean in means)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(0, 12),
)
def test_fractions_are_rounded_down_but_for_one(drawn, left):
    taken, covers = np.array([x for x, *_ in drawn]), np.array([[a, b] for _, a, b in drawn])
    left = np.array([left, 12.0])
    whole = whole_numbers(taken, covers, left)
    up = whole - np.floor(taken + 1e-6)
    assert set(up) <= {0, 1}
    assert up.sum() == (taken - np.floor(taken + 1e-6) > 1e-6).any()
    down = whole - up
    if up.any():
        fits = (covers <= left - down @ covers + 1e-6).all(1) & (taken - down > 1e-6)
        allowed = fits if fits.any() else np.ones(len(taken), dtype=bool)
        assert allowed[up.argmax()]
        assert (taken - down)[up.argmax()] == (taken - down)[allowed].max()


def test_a_begun_layout_is_not_changed_and_its_tables_stay():
    menu = menu_of([(2, 0.5, 10, 0.05, 0), (20, 0.3, 100, 0, 0)], cluster(1))
    _, _, spent = fillers_of(menu)
    begun = Layout(menu)
    begun.put(0, 3)
    filler = Filler(begun, spent, 2.0)
    assert filler.lacking < 0
    assert filler.again(1.0).lacking > 0
    assert filler.fill()
    assert filler.layout.cut[0] == 3
    assert begun.cut[1] == NONE
    check_whole(filler.layout)
