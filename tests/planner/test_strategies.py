"""Plans of every strategy on any tables and cluster: whole, within memory, no worse than plain ones, near the bound."""

import re
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetrain.errors import ConfigError
from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.cut import ALL, NODE
from hetrain.planner.options import Constraint, Options
from hetrain.planner.plan import Plan
from hetrain.planner.planned import Planned
from hetrain.planner.predict import predict
from hetrain.planner.search.bound import lower_bound
from hetrain.planner.search.menu import make_menu
from hetrain.planner.search.tighten import tightened
from hetrain.planner.strategies import STRATEGIES, Engine, make_plan
from hetrain.planner.torchrec_prices import TorchRecPrices
from hetrain.planner.workload import Skew, TableLoad
from hetrain.tables import Table
from tests.planner.test_torchrec_prices import loads as shapes
from tests.planner.test_torchrec_prices import torchrec_options

BATCH = 256


def table(number, rows, dim, poolings=(1.0,), skew=None):
    name = f"t{number}"
    return TableLoad(Table(name, rows, dim, (name,), 0.01), poolings, skew=skew)


def cluster(nodes=2, local=2, hbm=GIB, ddr=GIB, kind="cuda"):
    return Cluster(kind, nodes, local, hbm if kind == "cuda" else 0, ddr, 900.0, 50.0, 600.0, 12.5)


one_table = st.tuples(
    st.sampled_from([1, 3, 50, 5000, 200_000, 3_000_000]),
    st.sampled_from([4, 16, 48, 128]),
    st.sampled_from([0.5, 1, 30]),
)
tables = st.lists(one_table, min_size=1, max_size=7).map(
    lambda rows: [table(k, r, d, (float(p),)) for k, (r, d, p) in enumerate(rows)]
)
clusters = st.builds(
    cluster,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([GIB // 8, GIB, 8 * GIB]),
    st.sampled_from([GIB // 8, 4 * GIB]),
    st.sampled_from(["cuda", "cpu"]),
)


def plan_or_misfit(strategy: str, loads: list[TableLoad], c: Cluster, engine: Engine) -> Planned | None:
    try:
        return make_plan(strategy, loads, c, engine, BATCH)
    except ConfigError as error:
        if "no plan fits" not in str(error):
            raise
        return None


def check_within(planned: Planned, c: Cluster, loads: list[TableLoad]) -> None:
    planned.plan.check([load.table for load in loads])
    assert len(planned.ranks) == c.world_size
    for rank in planned.ranks:
        assert rank.hbm_bytes <= c.hbm_bytes
        assert rank.ddr_bytes <= c.ddr_bytes
    assert planned.lower_bound_ms <= planned.slowest_ms * (1 + 1e-9)
    assert sum(rank.rows for rank in planned.ranks) >= sum(load.table.rows for load in loads)
    assert set(planned.plan.sharding) == {load.table.name for load in loads}


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(loads=tables, c=clusters, engine=st.sampled_from(["torchrec", "store"]))
def test_plans_hold_every_row_within_memory(strategy, loads, c, engine):
    planned = plan_or_misfit(strategy, loads, c, engine)
    if planned is None:
        return
    check_within(planned, c, loads)
    assert Plan.from_json(planned.to_json()) == planned.plan
    if engine == "torchrec":
        for said, priced in zip(planned.ranks, predict(planned.plan, loads, c, BATCH), strict=True):
            assert said.total_ms == pytest.approx(priced.total_ms)
            assert (said.hbm_bytes, said.ddr_bytes, said.rows) == (priced.hbm_bytes, priced.ddr_bytes, priced.rows)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(loads=tables, nodes=st.sampled_from([1, 2]))
def test_hierarchical_is_never_worse_than_the_plain_ones(loads, nodes):
    c = cluster(nodes, 2, 64 * GIB)
    best = make_plan("hierarchical", loads, c, "torchrec", BATCH).slowest_ms
    for strategy in STRATEGIES[1:]:
        assert best <= make_plan(strategy, loads, c, "torchrec", BATCH).slowest_ms * (1 + 1e-9)


def best_of_all(menu) -> float:
    """The slowest rank of the best plan, by trying every cut in every place."""
    c = menu.cluster
    limit = np.array([[c.hbm_bytes], [c.ddr_bytes]])
    ways = []
    for kind in menu.kind_of:
        ways.append([])
        for cut in menu.cuts[kind]:
            span = {ALL: c.world_size, NODE: c.ranks_per_node}.get(cut.place, 1)
            for places in product(range(c.world_size // span), repeat=cut.parts):
                if len(set(places)) == cut.parts and list(places) == sorted(places):
                    used = np.zeros((3, c.world_size))
                    for place in places:
                        used[:, place * span : (place + 1) * span] += [[cut.cost], [cut.hbm], [cut.ddr]]
                    ways[-1].append(used)
        ways[-1] += in_strips(menu, kind)
    loads = np.array([np.zeros((3, c.world_size))])
    for way in ways:
        loads = (loads[:, None] + np.array(way)[None]).reshape(-1, 3, c.world_size)
        loads = loads[(loads[:, 1:] <= limit).all((1, 2))]
        loads = np.unique(loads.round(15), axis=0)
    return float(loads[:, 0].max(1).min()) if len(loads) else np.inf


def in_strips(menu, kind):
    """Every way to give the ranks strips of columns, of 4 columns each at least and together the table's."""
    c, found = menu.cluster, []
    for of in menu.strips[kind]:
        for groups in product(range(of.groups), repeat=c.world_size):
            if sum(groups) == of.groups:
                used = np.zeros((3, c.world_size))
                for rank, many in enumerate(groups):
                    if many:
                        cut = of.widths[many - 1]
                        used[:, rank] = cut.cost, cut.hbm, cut.ddr
                found.append(used)
    return found


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    loads=st.lists(one_table, min_size=2, max_size=3).map(
        lambda rows: [table(k, r, min(d, 16), (float(p),)) for k, (r, d, p) in enumerate(rows)]
    ),
    hbm=st.sampled_from([GIB // 4, 8 * GIB]),
)
def test_the_bound_is_below_the_best_plan_and_ours_near_above(loads, hbm):
    c = cluster(1, 3, hbm, GIB // 2)
    menu = make_menu(loads, c, TorchRecPrices(c, BATCH).cuts, Options(tiers=("hbm", "ddr")))
    best, bound = best_of_all(menu), lower_bound(menu)
    if not np.isfinite(best):
        return
    tighter, _ = tightened(menu, bound, best * 1.1, 50_000)
    assert bound.ms <= tighter.ms <= best * (1 + 1e-9)
    ours = make_plan("hierarchical", loads, c, "torchrec", BATCH, Options(tiers=("hbm", "ddr")))
    assert best * (1 - 1e-9) <= ours.slowest_ms <= best * 1.02


def option_of(load, loads, c, kind, columns):
    """TorchRec's own pricing of a table cut in strips of so many columns, the last one narrower where need be."""
    (option,) = [
        o
        for o in torchrec_options(loads, "sgd", c, 512, columns=columns)
        if (o.name, o.sharding_type) == (load.table.name, kind) and o.compute_kernel in ("fused", "dense")
    ]
    return option


def test_the_slowest_rank_is_torchrecs_own_sum():
    """Each shard of a plan, priced by TorchRec's estimator, added up rank by rank."""
    c, loads = cluster(2, 4, GIB), shapes()
    planned = make_plan("hierarchical", loads, c, "torchrec", 512, Options(tiers=("hbm",)))
    totals = [0.0] * c.world_size
    for load in loads:
        kind, pieces = planned.plan.sharding[load.table.name], planned.plan.of_table(load.table.name)
        if not pieces:
            shards = option_of(load, loads, c, kind, load.table.dim).shards
            totals = [total + shard.perf.total for total, shard in zip(totals, shards, strict=True)]
        for number, piece in enumerate(sorted(pieces, key=lambda p: (p.first_column, p.first_row))):
            shards = option_of(load, loads, c, kind, piece.columns).shards
            totals[piece.rank] += shards[number % len(shards)].perf.total
    assert max(totals) == pytest.approx(planned.slowest_ms)
    assert totals == pytest.approx([rank.total_ms for rank in planned.ranks])


def test_tiers_say_what_lies_where():
    c = cluster(2, 2, GIB // 4, 4 * GIB)
    planned = make_plan("hierarchical", [table(k, 3_000_000, 64) for k in range(4)], c, "torchrec", BATCH)
    assert sum(planned.tiers.values()) == 4 * 3_000_000 * 64 * 4
    assert planned.tiers.keys() & {"cached", "ddr"}
    assert {p.tier for p in planned.plan.pieces} == planned.tiers.keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_misfits_name_table_need_have_and_remedies(strategy):
    loads = [table(0, 100, 16), table(1, 3_000_000, 64)]
    only_whole = Options(sharding_types=("table_wise",), tiers=("hbm",))
    with pytest.raises(ConfigError) as error:
        make_plan(strategy, loads, cluster(2, 2, GIB // 2), "torchrec", BATCH, only_whole)
    words = str(error.value)
    for part in [
        "'t1'",
        "0.72 GiB",
        "has 0.50 GiB",
        "(1) raise planner.memory_gib from 0.50 to at least 0.",
        "allow row_wise and",
    ]:
        assert part in words
    assert "allow ddr in planner.tiers" in words
    by_rows = Options(tiers=("hbm",))
    make_plan(strategy, loads, cluster(2, 2, GIB // 2), "torchrec", BATCH, by_rows)
    with pytest.raises(ConfigError) as error:
        make_plan(strategy, loads, cluster(1, 2, GIB // 16), "torchrec", BATCH, by_rows)
    nodes = int(re.search(r"use \d+ ranks \(cluster\.nodes=(\d+)\)", str(error.value)).group(1))
    make_plan(strategy, loads, cluster(nodes, 2, GIB // 16), "torchrec", BATCH, by_rows)


def test_thresholds_and_constraints_are_obeyed():
    loads = [table(0, 100, 16), table(1, 20_000, 64), table(2, 3_000_000, 64), table(3, 400, 16)]
    options = Options(
        data_parallel_threshold=1600,
        column_slice_threshold=400_000,
        row_slice_threshold=100_000_000,
        constraints={"t3": Constraint(("table_wise",))},
    )
    for strategy in STRATEGIES:
        planned = make_plan(strategy, loads, cluster(2, 2), "torchrec", BATCH, options)
        kinds = planned.plan.sharding
        assert (kinds["t0"], kinds["t3"]) == ("data_parallel", "table_wise")
        assert kinds["t1"] in ("column_wise", "grid_shard", "table_column_wise")
        assert kinds["t2"] in ("row_wise", "table_row_wise", "grid_shard")
        if strategy != "hierarchical":
            assert [p.columns for p in planned.plan.of_table("t1")] == [16] * 4  # 4 pieces of 320,000 elements
    narrow = Options(("column_wise",), constraints={"t1": Constraint(columns=3)})
    with pytest.raises(ConfigError, match=r"'t1'.*can be cut by none"):
        make_plan("hierarchical", loads[1:2], cluster(), "torchrec", BATCH, narrow)
    for key, options in {
        "sharding_types": Options(("table_wise",), constraints={"t1": Constraint(("row_wise",))}),
        "tiers": Options(tiers=("hbm",), constraints={"t1": Constraint(tiers=("ddr",))}),
    }.items():
        with pytest.raises(
            ConfigError, match=rf"constraints: {key}=.* 't1' has nothing of .*take {key} out of the rule"
        ):
            make_plan("hierarchical", loads, cluster(), "torchrec", BATCH, options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_thresholds_cannot_cut_is_planned_without_them(strategy):
    """4 columns are the narrowest piece, 3 rows too few for 4 ranks, and one rank cuts nothing."""
    by_columns, by_rows = Options(column_slice_threshold=1), Options(row_slice_threshold=1)
    for one, c, options in [
        (table(0, 20_000, 4), cluster(2, 2), by_columns),
        (table(0, 3, 16), cluster(1, 4), by_rows),
        (table(0, 20_000, 64), cluster(1, 1), by_columns),
        (table(0, 20_000, 64), cluster(1, 1), by_rows),
    ]:
        plan = make_plan(strategy, [one], c, "torchrec", BATCH, options).plan
        assert {p.columns for p in plan.pieces} <= {one.table.dim}  # none, where replicas are best
    loads = [table(0, 20_000, 64), table(1, 20_000, 4)]
    plan = make_plan(strategy, loads, cluster(2, 2), "torchrec", BATCH, by_columns).plan
    assert all(p.columns < 64 for p in plan.of_table("t0"))


def test_tables_too_short_are_never_cut_into_empty_blocks():
    loads = [table(k, rows, 16, (30.0,)) for k, rows in enumerate([1, 2, 3, 5, 9])]
    for kinds in [("row_wise", "table_wise"), ("table_row_wise", "grid_shard", "table_wise")]:
        make_plan("hierarchical", loads, cluster(2, 4), "torchrec", BATCH, Options(sharding_types=kinds))


def test_skewed_ids_get_uneven_rows_in_the_store():
    """Half of the lookups go to the first 1,000 of a million rows: even blocks would load one owner most."""
    rows = 1_000_000
    quantiles = (*(25 * k for k in range(41)), *(1000 + 24_975 * k for k in range(1, 41)))
    skew = Skew(((1.0, 1.0), (10_000.0, 6000.0)), ((0.001, 0.5),), quantiles)
    load = table(0, rows, 32, (20.0,), skew)
    assert (quantiles[-1], len(quantiles)) == (rows, 81)
    c = cluster(4, 1, kind="cpu")
    planned = make_plan("hierarchical", [load], c, "store", BATCH)
    asked = [0.0] * 4
    for p in planned.plan.of_table("t0"):
        asked[p.rank] += skew.share_below(p.first_row + p.rows) - skew.share_below(p.first_row)
    even = [skew.share_below((k + 1) * rows // 4) - skew.share_below(k * rows // 4) for k in range(4)]
    assert max(even) * 4 == pytest.approx(2.5, abs=0.01)
    assert max(asked) * 4 == pytest.approx(1.0, abs=0.05)
    assert sum(asked) == pytest.approx(1.0)
    tight = cluster(4, 1, ddr=rows * 32 * 4 // 4 + 4096, kind="cpu")  # memory for a quarter of the rows: even ranges
    blocks = make_plan("hierarchical", [load], tight, "store", BATCH).plan.of_table("t0")
    assert sorted(p.rows for p in blocks) == [rows // 4] * 4


def test_uneven_blocks_of_rows_are_refused_for_torchrec():
    planned = make_plan("hierarchical", [table(0, 1001, 16)], cluster(2, 2), "torchrec", BATCH, Options(("row_wise",)))
    held = planned.plan.to_json()
    held["pieces"][0]["rows"][1] -= 1
    held["pieces"][1]["rows"][0] -= 1
    with pytest.raises(ConfigError, match="silently wrong"):
        Plan.from_json(held).check([table(0, 1001, 16).table])
