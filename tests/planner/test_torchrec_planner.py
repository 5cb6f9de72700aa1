"""TorchRec's plans: fused kernels only, blocks that train right, errors that say what to change."""

import re

import pytest
import torch

from hetrain.config import PlannerConfig
from hetrain.errors import ConfigError
from hetrain.planner.devices import GIB, device_set
from hetrain.planner.torchrec_planner import plan_of, sharding_plan, store_plan
from hetrain.tables import Table

CPU = torch.device("cpu")
ROWS = [1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 3, 93_145, 8_351_593]  # of Criteo Kaggle
TABLES = [Table(f"C{i}", rows, 16, (f"C{i}",), 0.01) for i, rows in enumerate(ROWS)]
ALL = ["data_parallel", "table_wise", "row_wise"]


def bsp(world_size=2, optimizer="rowwise_adagrad", types=ALL, memory=None):
    return sharding_plan(TABLES, optimizer, PlannerConfig("torchrec", list(types), memory), world_size, CPU, 512)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("types", [ALL, ["table_wise"], ["data_parallel", "row_wise"]])
def test_plans_train_every_table_with_the_fused_kernel(world_size, types):
    found = bsp(world_size, types=types)
    for parameter in found.plan[""].values():
        assert parameter.compute_kernel == ("dense" if parameter.sharding_type == "data_parallel" else "fused")
    plan = plan_of(found, TABLES, world_size)
    plan.check(TABLES)
    assert (plan.engine, plan.world_size, set(plan.sharding)) == ("torchrec", world_size, {t.name for t in TABLES})
    assert set(plan.sharding.values()) <= {*types, "table_wise"}
    assert plan.replicated == {t for t, kind in plan.sharding.items() if kind == "data_parallel"}


def test_planning_is_repeatable():
    assert plan_of(bsp(4), TABLES, 4) == plan_of(bsp(4), TABLES, 4)


def test_a_table_too_big_for_one_rank_is_cut_by_rows():
    plan = plan_of(bsp(4, memory=0.5), TABLES, 4)
    assert plan.sharding["C2"] == "row_wise"
    assert [(p.rank, p.rows) for p in plan.of_table("C2")] == [(r, 2_532_807) for r in range(3)] + [(3, 2_532_806)]


def test_no_plan_names_table_need_have_and_remedies_that_help():
    with pytest.raises(ConfigError) as error:
        bsp(4, types=["table_wise"], memory=0.5)
    said = str(error.value)
    for words in ["'C2'", "0.64 GiB", "0.50 GiB", "planner.memory_gib", "allow row_wise"]:
        assert words in said
    assert "(cluster.nodes=" not in said  # more ranks hold no larger tables
    bsp(4, types=["table_wise"], memory=float(re.search(r"at least ([\d.]+)", said).group(1)))
    with pytest.raises(ConfigError) as error:
        bsp(memory=0.6)
    said = str(error.value)
    for words in [
        "and all tables 0.66 GiB of the mean rank, which has 0.60 GiB",
        "Choose one:\n  (1) raise",
        "(2) use 4 ranks (cluster.nodes=2)",
    ]:
        assert words in said
    bsp(4, memory=0.6)
    bsp(memory=float(re.search(r"at least ([\d.]+)", said).group(1)))


def test_optimizer_state_counts_as_memory():
    bsp(1, optimizer="sgd", memory=1.6)
    with pytest.raises(ConfigError):
        bsp(1, optimizer="adagrad", memory=1.6)


@pytest.mark.parametrize(
    ("types", "optimizer", "words"),
    [
        (["column_wise"], "rowwise_adagrad", "state of its own"),
        (["column_wise"], "sgd", "cannot run with consistency=bsp"),
        (["grid_shard"], "sgd", "choose from data_parallel, table_wise, row_wise"),
        ([], "sgd", "at least one"),
        (["row_wise"], "sgd", "'C7' has 3 rows"),
    ],
)
def test_types_that_cannot_be_trained_are_refused(types, optimizer, words):
    with pytest.raises(ConfigError) as error:
        bsp(4, optimizer, types)
    assert words in str(error.value)


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("types", [ALL, ["row_wise", "table_wise"]])
def test_store_plans_hold_rows_once_and_whole(world_size, types):
    plan = store_plan(TABLES, PlannerConfig("torchrec", types), world_size, 512, CPU)
    plan.check(TABLES)
    assert (plan.engine, plan.replicated) == ("store", frozenset())
    assert all(p.columns == 16 for p in plan.pieces)


@pytest.mark.parametrize("servers", [1, 3])
def test_servers_alone_hold_rows(servers):
    cfg = PlannerConfig("torchrec", ALL)
    plan = store_plan(TABLES, cfg, 2 + servers, 512, torch.device("cuda"), servers)  # planned without its GPU
    assert plan.world_size == 2 + servers
    assert {p.rank for p in plan.pieces} == set(range(2, 2 + servers))
    alone = store_plan(TABLES, cfg, servers, 512, CPU)
    assert [(p.table, p.rank - 2, p.rows) for p in plan.pieces] == [(p.table, p.rank, p.rows) for p in alone.pieces]
    with pytest.raises(ConfigError, match=r"\(1\) raise planner\.memory_gib from 0\.1 to at least "):
        store_plan(TABLES, PlannerConfig("torchrec", ALL, 0.1), 2 + servers, 512, CPU, servers)


def test_the_store_keeps_no_replicas():
    with pytest.raises(ConfigError, match="table_wise or row_wise"):
        store_plan(TABLES, PlannerConfig("torchrec", ["data_parallel"]), 2, 512, CPU)


def test_memory_of_the_host_is_shared_by_its_ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    two = device_set(4, CPU, None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    four = device_set(4, CPU, None)
    assert (two.ranks_per_host, four.ranks_per_host) == (2, 4)
    assert two.memory == pytest.approx(2 * four.memory, rel=1e-6)
    assert device_set(4, CPU, 1.5).memory == int(1.5 * GIB)


def test_hashed_tables_are_planned_whatever_their_size():
    huge = [Table("a", 10**10, 16, ("a",), 0.01), Table("b", 1000, 16, ("b",), 0.01)]
    plan = store_plan(huge, PlannerConfig("torchrec", ALL, 0.1), 4, 512, CPU, 2, index="hash")
    assert [(p.rank, p.rows) for p in plan.pieces if p.table == "a"] == [(2, 5 * 10**9), (3, 5 * 10**9)]
    whole = store_plan(huge, PlannerConfig("torchrec", ["table_wise"], 0.1), 4, 512, CPU, index="hash")
    assert [p.rows for p in whole.pieces] == [10**10, 1000]
    with pytest.raises(ConfigError, match=r"set store\.index=hash to hold only the rows seen"):
        store_plan(huge, PlannerConfig("torchrec", ALL, 0.1), 4, 512, CPU)
