"""Plans given to a run: read back as they were written, and refused by name where they cannot be trained."""

import json
import re

import pytest

from hetrain.errors import ConfigError
from hetrain.planner.given import given_plan
from hetrain.planner.piece import Piece
from hetrain.planner.plan import Plan
from hetrain.roles import Roles
from hetrain.tables import Table

TABLES = [Table("a", 10, 8, ("a",), 0.1), Table("b", 6, 8, ("b",), 0.1)]


def plan(engine="torchrec", world_size=2, pieces=((0, 0, 5), (1, 5, 5)), **changes):
    held = tuple(Piece("a", rank, first, rows, 0, 8) for rank, first, rows in pieces)
    whole = Piece("b", world_size - 1, 0, 6, 0, 8)
    kinds = {"a": "row_wise", "b": "table_wise"}
    return {**Plan(engine, world_size, (*held, whole), frozenset(), kinds).to_json(), **changes}


def given(tmp_path, held, mode="bsp", tables=TABLES, roles=None):
    file = tmp_path / "plan.json"
    file.write_text(held if isinstance(held, str) else json.dumps(held))
    return given_plan(str(file), mode, tables, roles or Roles(2))


def test_what_was_written_is_read(tmp_path):
    held = plan() | {"predicted": {"slowest_ms": 3.0}}  # as `hetrain plan` adds it
    assert given(tmp_path, held).to_json() == plan()
    uneven = plan("store", pieces=((1, 0, 2), (0, 2, 7), (1, 9, 1)))
    for mode in ("het", "ssp", "asp"):
        assert given(tmp_path, uneven, mode).to_json() == uneven
    servers = plan("store", 3, ((2, 0, 10),))
    assert given(tmp_path, servers, "het", roles=Roles(3, 1)).world_size == 3


def test_a_folder_stands_for_the_plan_in_it(tmp_path):
    given(tmp_path, plan())
    assert given_plan(str(tmp_path), "bsp", TABLES, Roles(2)).to_json() == plan()
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ConfigError, match=r"is a folder without plan\.json; expected plan\.json of a run's folder or"):
        given_plan(str(tmp_path), "bsp", TABLES, Roles(2))


@pytest.mark.parametrize(
    ("held", "mode", "roles", "words"),
    [
        ("{", "bsp", Roles(2), ["is no JSON", "plan.json of a run's folder"]),
        ("[]", "bsp", Roles(2), ["holds a list"]),
        ({"engine": "torchrec"}, "bsp", Roles(2), ["'world_size' is missing"]),
        (plan(engine="tensorflow"), "bsp", Roles(2), ["plan.engine='tensorflow'", "torchrec, store"]),
        (plan(), "het", Roles(2), ["for consistency=bsp", "this run has het", "planner.plan=null"]),
        (plan("store"), "bsp", Roles(2), ["for consistency=het, ssp or asp", "this run has bsp"]),
        (plan(), "bsp", Roles(4), ["for 2 ranks", "has 4", "launch.nproc=2"]),
        (plan("store"), "het", Roles(3, 1), ["for 2 ranks", "with its 1 servers has 3", "launch.nproc=1"]),
        (plan("store"), "het", Roles(2, 1), ["rank 0 holds rows of table 'a'", "cluster.servers=1", "ranks 1 to 1"]),
        (plan(pieces=((0, 0, 4), (1, 4, 6))), "bsp", Roles(2), ["must be ceil(10 / 2) = 5", "train silently wrong"]),
        (plan("store", pieces=((0, 0, 5),)), "het", Roles(2), ["row 5", "planner.plan=null"]),
        (plan("store", replicated=["c"]), "het", Roles(2), ["'c' is not a table of this run"]),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, held, mode, roles, words):
    with pytest.raises(ConfigError, match=re.escape(f"planner.plan={tmp_path / 'plan.json'}: ")) as error:
        given(tmp_path, held, mode, roles=roles)
    for word in words:
        assert word in str(error.value)


def test_other_tables_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        given_plan(str(tmp_path / "none.json"), "bsp", TABLES, Roles(2))
    more = [*TABLES, Table("c", 3, 8, ("c",), 0.1)]
    with pytest.raises(ConfigError, match=r"has no table 'c'.*make it again, or set data\.path"):
        given(tmp_path, plan(), tables=more)
    wider = [Table("a", 10, 16, ("a",), 0.1), TABLES[1]]
    with pytest.raises(ConfigError, match=r"columns 8 to 15\).*model\.embedding_dim"):
        given(tmp_path, plan(), tables=wider)
    with pytest.raises(ConfigError, match="outside of table 'a'"):
        given(tmp_path, plan(), tables=[Table("a", 9, 8, ("a",), 0.1), TABLES[1]])


def replicated(*names):
    held = plan("store")
    kinds = {**held["sharding"], **dict.fromkeys(names, "data_parallel")}
    return held | {
        "pieces": [piece for piece in held["pieces"] if piece["table"] not in names],
        "replicated": list(names),
        "sharding": kinds,
    }


def test_the_store_holds_replicas_where_workers_meet(tmp_path):
    held = replicated("a")
    found = given(tmp_path, held, "het")
    assert (found.to_json(), found.replicated) == (held, {"a"})
    for mode in ("asp", "ssp"):
        words = rf"'a' is replicated.*the store.*={mode}.*\(1\).*planner\.sharding_types.*\(2\) set consistency=het"
        with pytest.raises(ConfigError, match=words):
            given(tmp_path, held, mode)
    with pytest.raises(ConfigError, match=r"all 2 tables are replicated.*\(1\) Lower.*\(3\) set consistency=bsp"):
        given(tmp_path, replicated("a", "b"), "het")


PIECE = {"table": "a", "rank": 0, "rows": [0, 5], "columns": [0, 8]}


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (plan(sharding={"a": "row_wise"}), ["table 'b' is held in pieces", "None in plan.sharding"]),
        (plan(sharding={"a": "row_wise", "b": "data_parallel"}), ["table 'b' is held in pieces", "'data_parallel' in"]),
        (
            plan() | {"pieces": plan()["pieces"][:2], "replicated": ["b"]},
            ["table 'b' is replicated", "'table_wise'"],
        ),
        (plan(ranks_per_node=-2), ["plan.ranks_per_node=-2", "divisor of the 2 ranks"]),
        (plan(world_size=2) | {"world_size": 2.9}, ["2.9 is no whole number"]),
        (plan(replicated="b"), ["'b' is no list of names"]),
        (plan() | {"pieces": [PIECE | {"rows": [0, 5.7]}]}, ["5.7 is no whole number"]),
        (plan() | {"pieces": [PIECE | {"rank": True}]}, ["True is no whole number"]),
        (plan() | {"pieces": [PIECE | {"rank": "0"}]}, ["'0' is no whole number"]),
        (json.dumps(plan() | {"world_size": float("inf")}), ["is no JSON", "Infinity is no number"]),
        (json.dumps(plan()).replace('"world_size": 2', '"world_size": 1e999'), ["inf is no whole number"]),
        (json.dumps(plan())[:-1] + ', "pieces": []}', ["is no JSON", "key 'pieces' is given twice"]),
        ("[" * 100_000, ["is no JSON", "nested too deeply"]),
    ],
)
def test_slips_of_the_hand_are_named(tmp_path, held, words):
    with pytest.raises(ConfigError, match=re.escape(f"planner.plan={tmp_path / 'plan.json'}: ")) as error:
        given(tmp_path, held)
    for word in words:
        assert word in str(error.value)
