"""Replicated tables of the store: when a plan has them, what it says of them, and where they are refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from hetrain.config import ConstraintConfig, RunConfig
from hetrain.config.checks import check
from hetrain.errors import ConfigError
from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.picture import page
from hetrain.planner.plan import Plan
from hetrain.planner.planned import Planned
from hetrain.planner.request import planned_for
from hetrain.planner.store_prices import StorePrices
from hetrain.planner.strategies import STRATEGIES
from hetrain.planner.workload import TableLoad
from hetrain.tables import Table

DIM = 4
ROWS = (9, 40, 5_000, 200_000)
LOADS = [TableLoad(Table(f"t{k}", rows, DIM, (f"f{k}",), 0.1), (1.0,), 4, 4) for k, rows in enumerate(ROWS)]
CLUSTER = Cluster("cpu", 4, 1, 0, GIB, 1.0, 100.0, 0.1, 0.1)  # links of 100 MB/s


def config(mode: str = "het", *, capacity: float = 0, staleness: float = 100, **planner: Any) -> RunConfig:
    cfg = RunConfig(name="x", model={"_target_": "hetrain.models.WDL", "embedding_dim": DIM})
    cfg.consistency.mode, cfg.consistency.staleness = mode, staleness
    cfg.consistency.cache.capacity = capacity
    cfg.train.batch_size = 4096
    cfg.planner = replace(cfg.planner, **{"name": "hierarchical", "sharding_types": None, **planner})
    return cfg


def whole(planned: Planned) -> set[str]:
    """Tables that a plan replicates, which is said in all places alike."""
    plan = planned.plan
    assert {name for name, kind in plan.sharding.items() if kind == "data_parallel"} == plan.replicated
    assert {piece.table for piece in plan.pieces} == {load.table.name for load in LOADS} - plan.replicated
    assert Plan.from_json(json.loads(json.dumps(planned.to_json()))) == plan
    return set(plan.replicated)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_threshold_counts_elements(name: str) -> None:
    for capacity in (0, 0.1):
        asked = {"capacity": capacity, "name": name}
        planned = planned_for(config(**asked, data_parallel_threshold=DIM * 40), LOADS, CLUSTER)
        assert whole(planned) == {"t0", "t1"}
        assert planned.ranks[0].rows >= 49
        assert not whole(planned_for(config(**asked, data_parallel_threshold=DIM * 9 - 1), LOADS, CLUSTER))


def test_a_constraint_replicates_what_it_names() -> None:
    rules = {"t2": ConstraintConfig(["data_parallel"])}
    assert whole(planned_for(config(capacity=0.1, constraints=rules), LOADS, CLUSTER)) == {"t2"}
    kept = {"t0": ConstraintConfig(["table_wise"])}
    asked = config(data_parallel_threshold=DIM * 40, constraints=kept)
    assert whole(planned_for(asked, LOADS, CLUSTER)) == {"t1"}


def served(servers: int, **asked: Any) -> RunConfig:
    cfg = config(**asked)
    cfg.cluster.servers = servers
    return cfg


def test_prices_replicate_what_would_go_to_servers_in_every_step() -> None:
    """A ring of four sends every row of a table 1.5 times, two servers' links every row that is asked for 4 times."""
    assert whole(planned_for(served(2), LOADS, CLUSTER)) == {"t0", "t1", "t2"}
    assert whole(planned_for(served(2, capacity=0.1, staleness=0), LOADS, CLUSTER)) == {"t0", "t1", "t2"}
    assert whole(planned_for(served(64), LOADS, CLUSTER)) == set()  # of links that have little to do
    left = planned_for(served(2), LOADS[:2], CLUSTER).plan  # some row must be left to the store
    assert left.replicated == {"t0"}
    tight = served(2)
    tight.store.index = "hash"  # whose servers hold any table
    assert whole(planned_for(tight, LOADS, replace(CLUSTER, ddr_bytes=49 * 13 * 4))) == {"t0", "t1"}


def test_prices_replicate_nothing_else() -> None:
    """Where rows lie on the workers the link carries as much for a replica; a cache may save what is priced here."""
    for kept in (
        config(),
        served(2, capacity=0.1),
        served(2, name="round_robin"),
        served(2, mode="asp"),
        served(2, mode="ssp", capacity=0.1),
        served(2, sharding_types=["table_wise", "row_wise"]),
    ):
        assert not whole(planned_for(kept, LOADS, CLUSTER))


def test_the_price_is_that_of_an_all_reduce() -> None:
    prices = StorePrices(CLUSTER, 4096)
    cut = prices.replicated(LOADS[1])
    assert cut.comm_ms == pytest.approx(2 * 40 * DIM * 4 * 3 / 4 / 100e6 * 1e3)
    assert (cut.hbm, cut.ddr) == (0, 40 * (3 * DIM * 4 + 4))
    on_gpus = StorePrices(replace(CLUSTER, kind="cuda", hbm_bytes=GIB), 4096).replicated(LOADS[1])
    assert (on_gpus.hbm, on_gpus.ddr, on_gpus.tier) == (cut.ddr, 0, "hbm")


@pytest.mark.parametrize("servers", [1, 2])
def test_workers_hold_replicas_and_servers_none(servers: int) -> None:
    asked = served(servers, data_parallel_threshold=DIM * 40)
    planned = planned_for(asked, LOADS, CLUSTER)
    assert whole(planned) == {"t0", "t1"}
    assert planned.plan.world_size == 4 + servers
    assert [cost.rank for cost in planned.ranks] == list(range(4 + servers))
    assert [cost.rows for cost in planned.ranks[:4]] == [49] * 4
    assert sum(cost.rows for cost in planned.ranks[4:]) == 205_000
    assert min(piece.rank for piece in planned.plan.pieces) >= 4
    assert planned.bottleneck.startswith(tuple(f"rank {4 + server}: " for server in range(servers)))
    assert "cluster.inter_gb_s" in planned.bottleneck
    drawn = page("x", [], planned, LOADS, CLUSTER)
    assert drawn.count("t1: all rows, replicated") == 4
    rules = {name: ConstraintConfig(["data_parallel", "table_wise"]) for name in ("t0", "t3")}
    free = served(servers, capacity=0.1, constraints=rules)
    assert whole(planned_for(free, LOADS, CLUSTER)) == {"t0"}  # of what they leave open, what is cheaper


def test_no_row_left_is_refused() -> None:
    for servers in (0, 1):
        asked = served(servers, data_parallel_threshold=DIM * 200_000)
        with pytest.raises(
            ConfigError, match=r"all 4 tables are replicated.*\(1\) Lower planner\.data_parallel_thresh"
        ):
            planned_for(asked, LOADS, CLUSTER)


@pytest.mark.parametrize("mode", ["asp", "ssp"])
def test_workers_that_never_meet_are_refused_replicas_by_name(mode: str) -> None:
    capacity = 0 if mode == "asp" else 0.1
    refused = rf"planner\.data_parallel_threshold=160: expected null with consistency\.mode={mode}\. \(1\).*\(2\) set"
    with pytest.raises(ConfigError, match=refused):
        check(config(mode, capacity=capacity, data_parallel_threshold=160))
    rules = {"t1": ConstraintConfig(["data_parallel"])}
    with pytest.raises(ConfigError, match=r"planner\.constraints\.t1\.sharding_types=\['data_parallel'\].*\(2\) set"):
        check(config(mode, capacity=capacity, constraints=rules))
    check(config("het", capacity=capacity, constraints=rules, data_parallel_threshold=160))
