"""Checks of a plan: every element held exactly once, the blocks TorchRec assumes, what the store can hold."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrain.errors import ConfigError
from hetrain.planner.plan import Piece, Plan
from hetrain.tables import Table

TABLE = Table("t", 10, 8, ("t",), 0.1)


def plan(*pieces, engine="store", replicated=(), sharding="row_wise", world_size=2):
    held = tuple(Piece("t", rank, first, rows, column, columns) for rank, first, rows, column, columns in pieces)
    return Plan(engine, world_size, held, frozenset(replicated), {"t": sharding})


def test_whole_ranges_and_replicas_pass():
    plan((1, 0, 10, 0, 8)).check([TABLE])
    plan((1, 7, 3, 0, 8), (0, 0, 7, 0, 8)).check([TABLE])
    plan((0, 0, 5, 0, 8), (1, 5, 5, 0, 8), engine="torchrec").check([TABLE])
    plan(engine="torchrec", replicated=["t"]).check([TABLE])
    plan((0, 0, 10, 0, 4), (1, 0, 10, 4, 4), engine="torchrec", sharding="column_wise").check([TABLE])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (plan(), "exactly once"),
        (plan((0, 0, 9, 0, 8)), "row 9"),
        (plan((0, 0, 6, 0, 8), (1, 5, 5, 0, 8)), "exactly once"),
        (plan((0, 0, 4, 0, 8), (1, 5, 5, 0, 8)), "row 4"),
        (plan((0, 0, 11, 0, 8)), "outside"),
        (plan((2, 0, 10, 0, 8)), "outside"),
        (plan((0, 0, 10, 0, 4)), "columns 4"),
        (plan((0, 0, 10, 0, 4), (1, 0, 10, 4, 4)), "by columns"),
        (plan((0, 0, 10, 0, 8), replicated=["t"]), "replicated"),
        (plan((0, 0, 10, 0, 8), replicated=["u"]), "'u'"),
        (plan((0, 0, 7, 0, 8), (1, 7, 3, 0, 8), engine="torchrec"), "ceil(10 / 2) = 5"),
        (plan((0, 0, 10, 0, 8), engine="torchrec"), "without a row-wise block"),
        (plan((0, 0, 10, 0, 8), engine="other"), "plan.engine"),
    ],
)
def test_bad_plans_are_refused(bad, words):
    with pytest.raises(ConfigError) as error:
        bad.check([TABLE])
    assert words in str(error.value)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.randoms())
def test_any_cut_by_rows_passes_and_any_gap_does_not(sizes, random):
    table = Table("t", sum(sizes), 4, ("t",), 0.1)
    first, pieces = 0, []
    for rank, rows in enumerate(sizes):
        pieces.append((rank, first, rows, 0, 4))
        first += rows
    random.shuffle(pieces)
    plan(*pieces, world_size=len(sizes)).check([table])
    with pytest.raises(ConfigError):
        plan(*pieces[1:], world_size=len(sizes)).check([table])


def test_json_holds_all_of_it():
    held = json.loads(json.dumps(plan((0, 0, 7, 0, 8), (1, 7, 3, 0, 8)).to_json()))
    assert held["pieces"][1] == {"table": "t", "rank": 1, "rows": [7, 10], "columns": [0, 8]}
    assert (held["engine"], held["world_size"], held["replicated"]) == ("store", 2, [])
