from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.store.space import Placement, RowSpace, row_spaces
from hetrain.tables import Table
from tests.store.loopback import plan_of


def tables_of(rows, dim=4):
    return [Table(f"t{i}", n, dim, (f"f{i}",), 0.1) for i, n in enumerate(rows)]


def piece(table, rank, first_row, rows):
    return SimpleNamespace(table=table, rank=rank, first_row=first_row, rows=rows)


def test_tables_of_one_dim_lie_one_after_the_other():
    tables = [
        Table("a", 5, 4, ("a1", "a2"), 0.1),
        Table("b", 3, 8, ("b",), 0.1),
        Table("c", 2, 4, ("c",), 0.1),
    ]
    narrow, wide = row_spaces(tables)
    assert (narrow.dim, narrow.rows, narrow.offsets, narrow.table_index) == (4, 7, (0, 5), (0, 2))
    assert narrow.feature_offsets == {"a1": 0, "a2": 0, "c": 5}
    assert (wide.dim, wide.rows, wide.table_index) == (8, 3, (1,))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 999))
def test_placement_against_a_loop(rows, world, seed):
    space, plan = RowSpace(tables_of(rows), 4), plan_of(rows, world, seed)
    placement = Placement(space, plan, world)
    expected = {}
    for rank in range(world):
        local = 0
        for owned in placement.rows_of(rank):
            assert owned.local == local
            table = space.tables.index(owned.table)
            for i in range(owned.rows):
                expected[space.offsets[table] + owned.first_row + i] = (rank, local + i)
            local += owned.rows
        assert placement.local_rows[rank] == local
    assert sorted(expected) == list(range(space.rows))
    for p in plan.pieces:
        for i in range(p.rows):
            assert expected[space.offsets[int(p.table[1:])] + p.first_row + i][0] == p.rank
    every = torch.randperm(space.rows)
    assert placement.owner_of(every).tolist() == [expected[r][0] for r in every.tolist()]
    assert placement.local_of(every).tolist() == [expected[r][1] for r in every.tolist()]


@pytest.mark.parametrize(
    "pieces",
    [
        [piece("t0", 0, 0, 4)],
        [piece("t0", 0, 0, 3), piece("t0", 1, 2, 3)],
        [piece("t0", 0, 0, 5), piece("t0", 1, 0, 5)],
        [piece("t0", 2, 0, 5)],
    ],
)
def test_plan_that_does_not_cover_the_rows_once(pieces):
    with pytest.raises(ValueError, match="plan"):
        Placement(RowSpace(tables_of([5]), 4), SimpleNamespace(pieces=pieces), 2)


def test_no_table_of_that_dim():
    with pytest.raises(ValueError, match="dim 16"):
        RowSpace(tables_of([5]), 16)
