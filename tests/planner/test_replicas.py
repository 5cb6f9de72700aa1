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
FAST_MEMORY = Cluster("cpu", 4, 1, 0, GIB, 1.0, 100.0, 0.1, 0.1)  # links of 100 MB/s


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
        planned = planned_for(config(**asked, data_parallel_threshold=DIM * 40), LOADS, FAST_MEMORY)
        assert whole(planned) == {"t0", "t1"}
        assert planned.ranks[0].rows >= 49
        assert not whole(planned_for(config(**asked, data_parallel_threshold=DIM * 9 - 1), LOADS, FAST_MEMORY))


def test_a_constraint_replicates_what_it_names() -> None:
    rules = {"t2": ConstraintConfig(["data_parallel"])}
    assert whole(planned_for(config(capacity=0.1, constraints=rules), LOADS, FAST_MEMORY)) == {"t2"}
    kept = {"t0": ConstraintConfig(["table_wise"])}
    asked = config(data_parallel_threshold=DIM * 40, constraints=kept)
    assert whole(planned_for(asked, LOADS, FAST_MEMORY)) == {"t1"}


def test_prices_replicate_only_what_no_cache_would_save() -> None:
    """Of tables whose every row is in every batch; elsewhere a row that no batch has would travel too."""
    assert whole(planned_for(config(), LOADS, FAST_MEMORY)) == {"t0", "t1"}
    assert whole(planned_for(config(capacity=0.1, staleness=0), LOADS, FAST_MEMORY)) == {"t0", "t1"}
    for kept in (
        config(capacity=0.1),
        config("asp"),
        config("ssp", capacity=0.1),
        config(sharding_types=["table_wise", "row_wise"]),
    ):
        assert not whole(planned_for(kept, LOADS, FAST_MEMORY))
    slow_memory = replace(FAST_MEMORY, ddr_gb_s=0.1, intra_gb_s=10.0, inter_gb_s=10.0)
    assert not whole(planned_for(config(), LOADS, slow_memory))
    small = planned_for(config(), LOADS[:2], FAST_MEMORY)  # some row must be left to the store
    assert not small.plan.replicated


def test_the_price_is_that_of_an_all_reduce() -> None:
    prices = StorePrices(FAST_MEMORY, 4096)
    cut = prices.replicated(LOADS[1])
    assert cut.comm_ms == pytest.approx(2 * 40 * DIM * 4 * 3 / 4 / 100e6 * 1e3)
    assert (cut.hbm, cut.ddr) == (0, 40 * (3 * DIM * 4 + 4))
    on_gpus = StorePrices(replace(FAST_MEMORY, kind="cuda", hbm_bytes=GIB), 4096).replicated(LOADS[1])
    assert (on_gpus.hbm, on_gpus.ddr, on_gpus.tier) == (cut.ddr, 0, "hbm")


@pytest.mark.parametrize("servers", [1, 2])
def test_workers_hold_replicas_and_servers_none(servers: int) -> None:
    asked = config(data_parallel_threshold=DIM * 40)
    asked.cluster.servers = servers
    planned = planned_for(asked, LOADS, FAST_MEMORY)
    assert whole(planned) == {"t0", "t1"}
    assert planned.plan.world_size == 4 + servers
    assert [cost.rank for cost in planned.ranks] == list(range(4 + servers))
    assert [cost.rows for cost in planned.ranks[:4]] == [49] * 4
    assert sum(cost.rows for cost in planned.ranks[4:]) == 205_000
    assert min(piece.rank for piece in planned.plan.pieces) >= 4
    drawn = page("x", [], planned, LOADS, FAST_MEMORY)
    assert drawn.count("t1: all rows, replicated") == 4
    asked.planner.data_parallel_threshold = None
    assert not whole(planned_for(asked, LOADS, FAST_MEMORY))  # by their prices: those are of the owners


def test_no_row_left_is_refused() -> None:
    for servers in (0, 1):
        asked = config(data_parallel_threshold=DIM * 200_000)
        asked.cluster.servers = servers
        with pytest.raises(
            ConfigError, match=r"all 4 tables are replicated.*\(1\) Lower planner\.data_parallel_thresh"
        ):
            planned_for(asked, LOADS, FAST_MEMORY)


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
