"""Costs beside bytes: found again from times made of them, the same in plans and predictions, and in the bound."""

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrain.config import ClusterConfig
from hetrain.errors import ConfigError
from hetrain.planner.calibrate_pieces import BATCHES, LAYOUTS, Trial, _plan, _trial, fitted
from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.cut import ALL, pieces_of
from hetrain.planner.machines import machines_of
from hetrain.planner.options import Constraint, Options
from hetrain.planner.piece import SHARDING_TYPES
from hetrain.planner.piece_costs import NO_COSTS, PieceCosts
from hetrain.planner.plan import Plan
from hetrain.planner.predict import predict
from hetrain.planner.report import found_lines
from hetrain.planner.strategies import STRATEGIES, make_plan
from hetrain.planner.torchrec_prices import TorchRecPrices
from hetrain.planner.workload import TableLoad
from hetrain.tables import Table

COSTS = PieceCosts(type_us=800.0, replicas_us=500.0, piece_us=90.0, bag_ns=30.0, id_ns=7.0)
FOUR = Cluster("cpu", 1, 4, 0, GIB, 10.0, 10.0, 1.0, 1.25)


def table(name: str, rows: int, dim: int, pooling: float = 1.0) -> TableLoad:
    return TableLoad(Table(name, rows, dim, (name,), 0.0), (pooling,))


def measured_trials(costs: PieceCosts, bases: tuple[float, ...], noise: float = 0.0) -> list[Trial]:
    """Trials whose times are their prices, the costs by their counts, and what each batch takes anyway."""
    draw = np.random.default_rng(1)
    made = []
    for halves, number in product(LAYOUTS, range(len(BATCHES))):
        plan, tables = _plan(halves, FOUR)
        trial = _trial(plan, tables, number, FOUR)
        types, copies, pieces, bags, ids = trial.counts
        own = (types * costs.type_us + copies * costs.replicas_us + pieces * costs.piece_us) / 1e3
        own += (bags * costs.bag_ns + ids * costs.id_ns) / 1e6
        took = (trial.price_ms + bases[number] + own) * (1 + noise * draw.standard_normal())
        made.append(replace(trial, took_ms=took))
    return made


@settings(max_examples=25, deadline=None)
@given(st.tuples(*[st.floats(0, 900)] * 3, *[st.floats(0, 90)] * 2), st.tuples(*[st.floats(0, 30)] * 3))
def test_costs_are_found_again_in_the_times_they_make(costs: tuple[float, ...], bases: tuple[float, ...]) -> None:
    found, off = fitted(measured_trials(PieceCosts(*costs), bases))
    assert list(vars(found).values()) == pytest.approx(costs, abs=1e-3, rel=1e-6)
    assert off < 1e-6


def test_costs_of_uneven_times_are_near_and_never_negative() -> None:
    found, off = fitted(measured_trials(COSTS, (5.0, 9.0, 7.0), 0.01))
    for name, value in vars(COSTS).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.35), name
    assert 0 < off < 0.02
    cheaper = [replace(t, took_ms=20 - sum(t.counts[:1])) for t in measured_trials(NO_COSTS, (5.0, 9.0, 7.0))]
    assert all(value >= 0 for value in vars(fitted(cheaper)[0]).values())


@pytest.mark.parametrize("nodes", [1, 2])
def test_prices_by_bytes_stay_torchrecs_and_pieces_are_counted(nodes: int) -> None:
    plain = replace(FOUR, nodes=nodes, ranks_per_node=4 // nodes)
    load = TableLoad(Table("t", 4000, 32, ("a", "b"), 0.0), (1.0, 4.0))
    before = TorchRecPrices(plain, 512).cuts(load, SHARDING_TYPES, ("ddr",))
    after = TorchRecPrices(replace(plain, piece_costs=COSTS), 512).cuts(load, SHARDING_TYPES, ("ddr",))
    assert [replace(cut, shared_ms=0.0) for cut in after] == before
    assert all(cut.shared_ms == 0 for cut in before)
    for cut in after:
        places = [0] if cut.place == ALL else list(range(cut.parts))
        pieces = pieces_of(load.table, cut, places, 4, 4 // nodes) if cut.kind != "data_parallel" else []
        by_rows = cut.kind in ("row_wise", "table_row_wise", "grid_shard")
        ids = 5 * 512 * (cut.parts if by_rows else len(pieces))  # a strip gets all ids, a block of rows its own
        expected = len(pieces) * 2 * (0.09 + 512 * 30e-6) + ids * 7e-6
        assert cut.parts * cut.shared_ms == pytest.approx(expected), cut.kind


def test_a_plan_costs_what_its_maker_said() -> None:
    cluster = Cluster("cuda", 2, 2, GIB, 4 * GIB, 1000.0, 50.0, 300.0, 20.0, piece_costs=COSTS)
    loads = [table(kind, 4000, 32, 3.0) for kind in SHARDING_TYPES]
    rules = {kind: Constraint((kind,)) for kind in SHARDING_TYPES}
    for strategy in STRATEGIES:
        planned = make_plan(strategy, loads, cluster, "torchrec", 512, Options(constraints=rules))
        for one, other in zip(predict(planned.plan, loads, cluster, 512), planned.ranks, strict=True):
            assert vars(one) == pytest.approx(vars(other))
        assert planned.ranks[0].fixed_ms > 6 * 0.8 + 0.5
        assert planned.ranks[0].total_ms == pytest.approx(sum(list(vars(planned.ranks[0]).values())[-3:]))
        assert dict(found_lines(planned, 512))["fixed"].startswith(f"{planned.ranks[0].fixed_ms:.3f} ms of every rank")
        assert planned.lower_bound_ms <= planned.slowest_ms
    store = make_plan("hierarchical", loads, cluster, "store", 512)
    assert store.ranks[0].fixed_ms == 0
    assert "fixed" not in dict(found_lines(store, 512))


def every_plan(loads: list[TableLoad], cluster: Cluster, kinds: tuple[str, ...]) -> list[Plan]:
    """All ways to cut the tables and to place the parts on ranks of their own."""
    prices, world = TorchRecPrices(cluster, 256), cluster.world_size
    ways = []
    for load in loads:
        ways.append(
            [
                (load.table, cut, list(places))
                for cut in prices.cuts(load, kinds, ("ddr",))
                for places in ([(0,)] if cut.place == ALL else combinations(range(world), cut.parts))
            ]
        )
    plans = []
    for chosen in product(*ways):
        sharding = {t.name: cut.kind for t, cut, _ in chosen}
        copies = frozenset(name for name, kind in sharding.items() if kind == "data_parallel")
        pieces = [p for t, cut, at in chosen if t.name not in copies for p in pieces_of(t, cut, at, world, world)]
        plans.append(Plan("torchrec", world, tuple(pieces), copies, sharding, world))
    return plans


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 10.0])
def test_no_plan_is_below_the_bound_and_ours_is_near_the_best(scale: float) -> None:
    kinds = ("data_parallel", "table_wise", "column_wise", "row_wise")
    costs = PieceCosts(*(scale * value for value in vars(COSTS).values()))
    cluster = replace(FOUR, ranks_per_node=3, piece_costs=costs)
    loads = [table("a", 3000, 16, 8.0), table("b", 900, 32), table("c", 50, 8)]
    planned = make_plan("hierarchical", loads, cluster, "torchrec", 256, Options(sharding_types=kinds))
    best = min(
        max(cost.total_ms for cost in predict(plan, loads, cluster, 256)) for plan in every_plan(loads, cluster, kinds)
    )
    assert planned.lower_bound_ms <= best * (1 + 1e-9)
    assert planned.slowest_ms <= best * 1.02


def test_dear_types_and_pieces_are_used_less() -> None:
    loads = [table("large", 40_000, 64, 20.0), table("middle", 40_000, 32, 4.0), table("small", 60, 16)]

    def kinds(costs: PieceCosts) -> list[str]:
        plan = make_plan("hierarchical", loads, replace(FOUR, piece_costs=costs), "torchrec", 1024).plan
        return [plan.sharding[load.table.name] for load in loads]

    assert len(set(kinds(NO_COSTS))) > 1
    assert len(set(kinds(PieceCosts(type_us=9e4, replicas_us=9e4)))) == 1
    assert kinds(PieceCosts(piece_us=9e4)) == ["data_parallel"] * 3
    assert kinds(PieceCosts(piece_us=9e4, replicas_us=9e6)) == ["table_wise"] * 3


def write(file: Path, **held: object) -> ClusterConfig:
    speeds = {"ddr_gb_s": 7.0, "intra_gb_s": 3.0, "latency_us": 40.0}
    file.write_text(json.dumps({"device": "cpu", "nodes": 1, "speeds": speeds} | held))
    return ClusterConfig(device="cpu", gpus_per_node=4, profile=str(file))


def test_a_profile_gives_the_costs_of_pieces(tmp_path: Path) -> None:
    held = COSTS.to_json()
    cfg = write(tmp_path / "p.json", format=2, piece_costs=held)
    assert machines_of(cfg).cluster.piece_costs == COSTS
    assert machines_of(replace(cfg, gpus_per_node=1)).cluster.piece_costs == NO_COSTS  # nothing is exchanged
    for old in ({}, {"format": 1}):  # as written before pieces had costs
        assert machines_of(write(tmp_path / "p.json", **old)).cluster.piece_costs == NO_COSTS
    wrong: list[dict[str, object]] = [
        *({"format": 3, "piece_costs": held}, {"format": "2", "piece_costs": held}, {"format": 2}),
        *({"format": 2, "piece_costs": held | {"piece_us": value}} for value in (-1, "1", None, True, 1e999)),
        *({"format": 2, "piece_costs": value} for value in ([], None, {**held, "rank_us": 1.0}, {"piece_us": 1.0})),
    ]
    for some in wrong:
        with pytest.raises(ConfigError, match=r"p\.json: is no profile of hetrain .*hetrain plan --calibrate"):
            machines_of(write(tmp_path / "p.json", **some))
