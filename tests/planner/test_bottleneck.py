"""The words on what makes a plan slow: the same whoever made the plan, true of its times, and of use."""

import re
from dataclasses import replace

import pytest

from hetrain.config.compose import compose, config_folders
from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.options import Constraint, Options
from hetrain.planner.piece import SHARDING_TYPES
from hetrain.planner.piece_costs import NO_COSTS, PieceCosts
from hetrain.planner.predict import bottleneck_of
from hetrain.planner.report import found_lines
from hetrain.planner.strategies import make_plan
from hetrain.planner.torchrec_planned import planned_by_torchrec
from hetrain.planner.workload import TableLoad
from hetrain.tables import Table

DEAR = PieceCosts(type_us=800.0, replicas_us=500.0, piece_us=90.0, bag_ns=30.0, id_ns=7.0)
TWO = Cluster("cpu", 1, 2, 0, GIB, 10.0, 10.0, 1.0, 1.25, piece_costs=DEAR)
FOUR = Cluster("cuda", 2, 2, GIB, 4 * GIB, 1000.0, 50.0, 300.0, 20.0)


def table(name: str, rows: int = 4000, dim: int = 32) -> TableLoad:
    return TableLoad(Table(name, rows, dim, (name,), 0.0), (3.0,), 4, 128)


@pytest.mark.parametrize("costs", [NO_COSTS, DEAR])
def test_our_words_are_those_on_any_plan(costs: PieceCosts) -> None:
    cluster = replace(FOUR, piece_costs=costs)
    loads = [table(kind) for kind in SHARDING_TYPES]
    rules = {kind: Constraint((kind,), ("ddr",) if kind == "row_wise" else ()) for kind in SHARDING_TYPES}
    for strategy in ("hierarchical", "memory_balanced"):
        planned = make_plan(strategy, loads, cluster, "torchrec", 512, Options(constraints=rules))
        slowest = max(planned.ranks, key=lambda cost: cost.total_ms)
        assert planned.bottleneck == bottleneck_of(planned.plan, loads, cluster, 512, slowest)
        share, times = re.search(r": (\d+)% of", planned.bottleneck), [slowest.compute_ms, slowest.comm_ms]
        assert share is not None
        assert int(share[1]) == round(100 * max(*times, slowest.fixed_ms) / slowest.total_ms)


def test_torchrecs_plan_is_slow_by_its_costs_of_pieces() -> None:
    """It was said to be slow by reading rows, which was a fourteenth of its time."""
    cfg = compose(["launch.nproc=2", "train.batch_size=256"], config_folders(None))
    planned = planned_by_torchrec(cfg, [table("a"), table("b")], TWO)
    slowest = max(planned.ranks, key=lambda cost: cost.total_ms)
    assert slowest.fixed_ms > slowest.total_ms / 2
    share = slowest.fixed_ms / slowest.total_ms
    assert planned.bottleneck.startswith(f"rank {slowest.rank}: {share:.0%} of its time is what ")
    assert "cluster.ddr_gb_s" not in planned.bottleneck


def test_a_plan_of_one_sharding_type_is_not_told_to_take_fewer() -> None:
    def said(*kinds: str, costs: PieceCosts = DEAR) -> str:
        cluster = replace(TWO, piece_costs=costs)
        rules = {f"t{i}": Constraint((kind,)) for i, kind in enumerate(kinds)}
        loads = [table(name) for name in rules]
        return make_plan("hierarchical", loads, cluster, "torchrec", 64, Options(constraints=rules)).bottleneck

    assert "fewer (planner.sharding_types) would move it" in said("table_wise", "row_wise")
    one = said("table_wise", "table_wise")
    assert "planner.sharding_types" not in one
    assert "of one sharding type; fewer tables or a smaller train.batch_size would move it" in one
    assert "which nothing of a plan would move" in said("data_parallel", costs=PieceCosts(replicas_us=9e4))


def test_a_plan_at_its_bound_is_never_below_it() -> None:
    planned = make_plan("hierarchical", [table("a"), table("b")], TWO, "torchrec", 512)
    rounded = replace(planned, lower_bound_ms=planned.slowest_ms * (1 + 1e-12))
    assert dict(found_lines(rounded, 512))["bound"].startswith("0.0% above ")
