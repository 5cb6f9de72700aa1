"""Several gloo ranks against one process on the same global batches."""

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from hetrain.engine.replicated import ReplicatedTables
from hetrain.errors import ConfigError
from hetrain.telemetry import Traffic
from tests.engine import store_cases
from tests.engine.bsp import TABLES, WIDTH, engine, global_batches, optimizer, part, train_plain
from tests.engine.held import load, save, tables_of, whole_tables
from tests.ranks import run_ranks

# examples of rank 0 and rank 1 in each step: full, uneven, empty
STEPS = [(8, 8), (8, 8), (8, 3), (0, 8), (8, 8), (5, 0)]
KINDS = {
    "table_wise": ("table_wise",) * 3,
    "row_wise": ("row_wise",) * 3,
    "data_parallel": ("data_parallel",) * 3,
    "mixed": ("row_wise", "data_parallel", "table_wise"),
}


def shares(rank, steps=STEPS):
    batches = global_batches([sum(s) for s in steps])
    return [part(b, sum(s[:rank]), sum(s[: rank + 1])) for b, s in zip(batches, steps, strict=True)]


def train(rank, world_size, name, kinds):
    traffic = Traffic()
    e = engine(optimizer(name), kinds, world_size, traffic=traffic)
    losses, predicted = [], []
    iterator = iter(shares(rank))
    while (out := e.step(iterator)) is not None:
        losses.append(out.loss.item() / out.global_size)
        assert len(out.logits) == len(out.labels) == out.examples
        with e.evaluating():  # while the next batch's exchange is in flight
            predicted.append(e.predict(shares(rank)[2]).numpy())
    tables = {
        t: [(p.first_row, p.value.numpy(), {k: v.numpy() for k, v in p.optimizer.items()}) for p in pieces]
        for t, pieces in e._bags.pieces().items()
    }
    return losses, tables, predicted, dict(traffic.bytes)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("kinds", KINDS)
def test_two_ranks_equal_one_process(name, kinds):
    results = run_ranks(2, train, name, KINDS[kinds])
    batches = global_batches([sum(s) for s in STEPS])
    expected, tables = train_plain(batches, optimizer(name))
    assert np.sum([losses for losses, *_ in results], 0) == pytest.approx(expected, abs=1e-5)
    covered = {t.name: np.zeros(t.rows) for t in TABLES}
    for _, held, _, _ in results:
        for table, pieces in held.items():
            for first, value, _ in pieces:
                covered[table][first : first + len(value)] += 1
                assert value == pytest.approx(tables[table][first : first + len(value)], abs=1e-5)
    for table, kind in zip(TABLES, KINDS[kinds], strict=True):
        assert (covered[table.name] == (2 if kind == "data_parallel" else 1)).all()
    single = engine(optimizer(name))
    iterator = iter(batches)
    predicted = []
    while single.step(iterator) is not None:
        predicted.append(single.predict(batches[2]).numpy())
    for step, whole in enumerate(predicted):
        assert np.concatenate([r[2][step] for r in results]) == pytest.approx(whole, abs=1e-5)


def kernels(rank, world_size, kinds):
    e = engine(optimizer("rowwise_adagrad"), kinds, world_size)
    fused, replicated = list(e._bags.fused()), sorted(e._bags.replicated)
    for kernel, _, _ in e._bags._fused:
        assert type(kernel) is SplitTableBatchedEmbeddingBagsCodegen
        assert kernel.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
    assert all(type(r) is ReplicatedTables for r in e._bags._replicated)
    in_dense = sum(p.numel() for group in e._optimizer.param_groups for p in group["params"])
    assert in_dense == sum(p.numel() for p in e._model.layers.parameters())
    return fused, replicated


def test_every_table_has_exactly_one_optimizer():
    (fused0, replicated0), (fused1, replicated1) = run_ranks(2, kernels, KINDS["mixed"])
    assert replicated0 == replicated1 == ["b"]
    assert sorted(fused0 + fused1) == ["a", "a", "c"]  # a has a piece on each rank
    (fused0, _), (fused1, _) = run_ranks(2, kernels, KINDS["table_wise"])
    assert sorted(fused0 + fused1) == ["a", "b", "c"]


def count(rank, world_size, kinds):
    """Bytes of one step after a warm-up, every bag with one id."""
    traffic = Traffic()
    e = engine(optimizer("sgd"), kinds, world_size, traffic=traffic)
    batches = [part(b, 8 * rank, 8 * rank + 8) for b in global_batches([16] * 2, multi_hot=False)]
    iterator = iter(batches)
    e.step(iterator)
    before = dict(traffic.bytes)
    e.step(iterator)
    return {k: v - before[k] for k, v in traffic.bytes.items()}, before


def test_bytes_table_wise():
    # rank 0 holds a (1 feature) and c (1), rank 1 holds b (2 features); batches of 8 examples, one id a bag
    (step0, first0), (step1, first1) = run_ranks(2, count, KINDS["table_wise"])
    for step, mine in ((step0, 8 + 4), (step1, 8 + 8)):  # floats per example that this rank looks up
        assert step["pooled_fwd"] == 8 * mine * 4  # for the other rank's examples
        assert step["pooled_bwd"] == 8 * (WIDTH - mine) * 4  # gradients of what the other rank looked up
        assert step["ids"] == 0  # both batches' ids went with the first step's prefetch
    # sizes: lengths, values and stride, int64; then lengths and ids of the other rank's 2 features, twice
    for first in (first0, first1):
        assert first["ids"] == 2 * (3 * 8 + 2 * 8 * 8 + 2 * 8 * 8)


def test_bytes_row_wise_forward_is_a_true_reduce_scatter():
    (step0, _), (step1, _) = run_ranks(2, count, KINDS["row_wise"])
    for step in (step0, step1):
        assert step["pooled_fwd"] == step["pooled_bwd"] == 8 * WIDTH * 4


def test_bytes_of_replicated_tables_are_dense_gradients():
    (step, _), _ = run_ranks(2, count, KINDS["data_parallel"])
    elements = sum(t.rows * t.dim for t in TABLES) + (3 + WIDTH) * 16 + 16 + 16 + 1
    assert step["dense"] == elements * 4  # 2 (W - 1) / W
    assert step["pooled_fwd"] == step["pooled_bwd"] == step["ids"] == 0


def differing(rank, world_size):
    kinds = KINDS["table_wise"] if rank == 0 else KINDS["row_wise"]
    try:
        engine(optimizer("sgd"), kinds, world_size)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_plans_are_refused():
    assert all("planner.memory_gib" in message for message in run_ranks(2, differing))


def state_of(rank, world_size, name, kinds):
    """What is held after 3 steps, and the losses of the next 3, which are those of a new engine that was given it."""
    e = engine(optimizer(name), kinds, world_size)
    batches = shares(rank)
    store_cases.train(e, iter(batches[:3]))
    held, saved = tables_of(e), save(e)
    fresh = engine(optimizer(name), kinds, world_size)
    fresh.step(iter(batches[:2]))  # holds a prefetched batch, which a restore must forget
    load(fresh, saved, exact=False)
    losses = [store_cases.train(trained, iter(batches[3:])) for trained in (fresh, e)]
    assert losses[0] == losses[1]
    return held, losses[1]


@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("kinds", ["mixed", "row_wise"])
def test_two_ranks_restore_bit_for_bit(name, kinds):
    results = run_ranks(2, state_of, name, KINDS[kinds])
    assert all(len(losses) == 3 for _, losses in results)


def test_one_rank_takes_up_what_two_left():
    results = run_ranks(2, state_of, "rowwise_adagrad", KINDS["mixed"])
    batches = global_batches([sum(s) for s in STEPS])
    expected, _ = train_plain(batches, optimizer("rowwise_adagrad"))
    e = engine(optimizer("rowwise_adagrad"))
    iterator = iter(batches[:3])  # so that the optimizer of the dense part has the state of step 3
    while e.step(iterator) is not None:
        pass
    left = whole_tables([held for held, _ in results])
    with e.snapshot() as target:
        for k, v in target.dense.items():
            v.copy_(torch.from_numpy(left[k]))
        for t, (whole,) in target.tables.items():
            whole.value.copy_(torch.from_numpy(left[f"{t}.value"]))
            for k, v in whole.optimizer.items():
                v.copy_(torch.from_numpy(left[f"{t}.{k}"]))
        e.restore(target, None)
    losses, iterator = [], iter(batches[3:])
    while (out := e.step(iterator)) is not None:
        losses.append(out.loss.item() / out.examples)
    assert losses == pytest.approx(expected[3:], abs=1e-5)
