"""Every sharding type on gloo ranks, 2 and 4 (as 2 nodes of 2), against one process on the same global batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from hetrain import checkpoint
from hetrain.engine.sharded_bags import ShardedBags
from hetrain.errors import ConfigError
from hetrain.planner.cluster import GIB, Cluster
from hetrain.planner.options import Options
from hetrain.planner.piece import Piece
from hetrain.planner.strategies import STRATEGIES, make_plan
from hetrain.planner.workload import TableLoad
from hetrain.ranks import Ranks
from hetrain.telemetry import Traffic
from tests.engine.bsp import CPU, SEED, engine_of, global_batches, optimizer, part, train_plain
from tests.engine.cuts import FOUR, ONE, TABLES, TWO
from tests.engine.plain_bags import PlainBags
from tests.ranks import run_ranks

STEPS = [(8, 8, 8, 8), (8, 8, 8, 8), (8, 3, 8, 5), (0, 8, 2, 0)]  # examples of each rank: full, uneven, empty
READER = {"epoch": 0, "lanes": []}


def sizes(world_size):
    return [step[:world_size] for step in STEPS]


def shares(rank, world_size):
    batches = global_batches([sum(s) for s in sizes(world_size)], tables=TABLES)
    return [part(b, sum(s[:rank]), sum(s[: rank + 1])) for b, s in zip(batches, sizes(world_size), strict=True)]


def losses_of(engine, batches):
    losses, iterator = [], iter(batches)
    while (out := engine.step(iterator)) is not None:
        losses.append(out.loss.item() / out.global_size)
    return losses


def held(engine):
    with engine.snapshot() as state:
        return [
            (name, piece.first_row, piece.first_column, {"value": piece.value.numpy().copy()} | sums(piece))
            for name, pieces in state.tables.items()
            for piece in pieces
        ]


def sums(piece):
    return {key: value.numpy().copy() for key, value in piece.optimizer.items()}


def assembled(ranks, key="value"):
    """Tables from the pieces of all ranks; every element is held, and equally by all who hold it."""
    tables = {t.name: np.full((t.rows, t.dim), np.nan, np.float32) for t in TABLES}
    for name, row, column, values in (piece for pieces in ranks for piece in pieces):
        value = values[key]
        there = tables[name][row : row + value.shape[0], column : column + value.shape[1]]
        assert np.isnan(there).all() or np.array_equal(there, value)
        there[:] = value
    assert not any(np.isnan(table).any() for table in tables.values())
    return tables


def train(rank, world_size, plans, name):
    results = []
    for plan in plans.values():
        engine = engine_of(plan, TABLES, optimizer(name))
        initial = held(engine)
        results.append((initial, losses_of(engine, shares(rank, world_size)), held(engine)))
    return results


def check(plans, name, world_size):
    ranks = run_ranks(world_size, train, plans, name)
    batches = global_batches([sum(s) for s in sizes(world_size)], tables=TABLES)
    expected, tables = train_plain(batches, optimizer(name), tables=TABLES)
    _, initial = train_plain([], optimizer(name), tables=TABLES)
    for number, kind in enumerate(plans):
        of_plan = [results[number] for results in ranks]
        assert np.sum([losses for _, losses, _ in of_plan], 0) == pytest.approx(expected, abs=1e-6), kind
        for start, trained in zip(assembled([pieces for pieces, _, _ in of_plan]).items(), tables, strict=True):
            assert np.array_equal(start[1], initial[trained]), (kind, trained)
        for table, value in assembled([pieces for *_, pieces in of_plan]).items():
            assert value == pytest.approx(tables[table], abs=1e-6), (kind, table)


def by_strategies(nodes):
    """Every strategy's plan for nodes of 2 ranks, with thresholds that some of these tables pass and some do not.

    Where two make the same plan it is there once.
    """
    cluster = Cluster("cpu", nodes, 2, 0, GIB, 10.0, 10.0, 1.0, 1.25)
    loads = [TableLoad(t, tuple(1.5 for _ in t.features)) for t in TABLES]
    options = Options(data_parallel_threshold=110, column_slice_threshold=300, row_slice_threshold=1500)
    plans = {}
    for name in STRATEGIES:
        plan = make_plan(name, loads, cluster, "torchrec", 8, options).plan
        if plan not in plans.values():
            plans[name] = plan
    return plans


def test_two_nodes_of_two_ranks_equal_one_process():
    check(FOUR | by_strategies(2), "sgd", 4)


@pytest.mark.parametrize(("name", "more"), [("sgd", by_strategies(1)), ("adagrad", {})])
def test_two_ranks_equal_one_process(name, more):
    check(TWO | more, name, 2)


UNEVEN = [("row_wise", [(0, 0, 20), (1, 20, 11)]), ("table_row_wise", [(0, 0, 11), (1, 11, 20)])]


def uneven(kind, blocks):
    """Table a in blocks of rows that TorchRec does not expect; the others as in a plan that it trains right."""
    pieces = [Piece("a", rank, first, rows, 0, 16) for rank, first, rows in blocks]
    plan = replace(TWO["one_node"], sharding={**TWO["one_node"].sharding, "a": kind})
    return replace(plan, pieces=(*pieces, *(p for p in plan.pieces if p.table != "a")))


def pool_uneven(rank, world_size):
    """What the bags of table a sum up to, with and without the check of the plan."""
    sparse, results = shares(rank, world_size)[0].sparse, []
    ids = sparse["a"].values()
    sparse.values()[: len(ids)] = 16 + ids % 11  # whose rows TorchRec finds, wrong ones; others lie beyond its memory
    for kind, blocks in UNEVEN:
        try:
            engine_of(uneven(kind, blocks), TABLES, optimizer("sgd"))
            refusal = ""
        except ConfigError as error:
            refusal = str(error)
        bags = ShardedBags(TABLES, uneven(kind, blocks), optimizer("sgd"), CPU, SEED, 8, Traffic())
        pooled = {key: value.detach().numpy() for key, value in bags(sparse).to_dict().items()}
        results.append((refusal, pooled))
    right = {key: value.detach().numpy() for key, value in PlainBags(TABLES, SEED)(sparse).items()}
    return results, right


def test_uneven_blocks_of_rows_are_refused_since_torchrec_would_sum_up_others():
    for results, right in run_ranks(2, pool_uneven):
        for (kind, _), (refusal, pooled) in zip(UNEVEN, results, strict=True):
            assert f"{kind.replace('_', '-')} blocks of table 'a' must be ceil(31 / 2) = 16 rows" in refusal
            assert "train silently wrong" in refusal
            assert not np.allclose(pooled["a"], right["a"])
            assert all(pooled[key] == pytest.approx(right[key], abs=1e-6) for key in ("b", "b2", "c", "d"))


def save_and_load(rank, world_size, path, wrote, reads):
    """Train under one plan, save, load under others; what each of them holds, and its losses from there on."""
    ranks = Ranks(rank, world_size, dist.group.WORLD)
    engine = engine_of(wrote, TABLES, optimizer("adagrad"))
    batches = shares(rank, world_size)
    losses_of(engine, batches[:2])
    checkpoint.save(engine, path, ranks, reader=READER, about={})
    results = [(held(engine), losses_of(engine, batches[2:]))]
    for plan in reads:
        other = engine_of(plan, TABLES, optimizer("adagrad"))
        exact = checkpoint.load(other, path, ranks).exact
        assert exact == (plan is wrote)
        results.append((held(other), losses_of(other, batches[2:])))
    return results


def test_checkpoints_hold_whole_tables_whatever_the_columns(tmp_path):
    path = tmp_path / "step_2"
    reads = [FOUR["mixed"], FOUR["column_wise"], FOUR["table_row_wise"]]
    ranks = run_ranks(4, save_and_load, path, FOUR["mixed"], reads)
    wrote = [results[0] for results in ranks]
    alone = engine_of(ONE, TABLES, optimizer("adagrad"))
    checkpoint.load(alone, path, Ranks())
    for key in ("value", "sum"):
        tables = assembled([pieces for pieces, _ in wrote], key)
        for number in range(1, len(reads) + 1):
            found = assembled([results[number][0] for results in ranks], key)
            assert all(np.array_equal(found[t], tables[t]) for t in tables)
        found = assembled([held(alone)], key)
        assert all(np.array_equal(found[t], tables[t]) for t in tables)
    expected = np.sum([losses for _, losses in wrote], 0)
    for number in range(1, len(reads) + 1):
        assert np.sum([results[number][1] for results in ranks], 0) == pytest.approx(expected, abs=1e-6)
    rest = global_batches([sum(s) for s in sizes(4)], tables=TABLES)[2:]
    assert losses_of(alone, rest) == pytest.approx(expected, abs=1e-6)
