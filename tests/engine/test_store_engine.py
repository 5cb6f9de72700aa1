"""The store engine on one rank equals plain torch, whatever the cache, the bound and the optimizer."""

import math

import pytest
import torch

from tests.engine.held import tables_of
from tests.engine.store_cases import PlainTorch, batches, examples, make_batch, make_engine, train

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]


def _assert_equal_tables(engine, plain: PlainTorch) -> None:
    tables = tables_of(engine)
    for i, weight in enumerate(plain._weights):
        torch.testing.assert_close(torch.from_numpy(tables[f"t{i}.value@0"]), weight.detach(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("capacity", [0, 40, 1.0])
@pytest.mark.parametrize("staleness", [0, 1, 100, math.inf])
def test_one_rank_equals_plain_torch(optimizer: str, capacity: float, staleness: float) -> None:
    if capacity == 0 and staleness != 0:
        pytest.skip("an empty cache has no staleness")
    plain = PlainTorch(optimizer)
    expected = plain.train(batches(0, 1))
    engine = make_engine(1, optimizer, capacity=capacity, staleness=staleness)
    losses = train(engine, iter(batches(0, 1)))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    _assert_equal_tables(engine, plain)
    engine.finish()
    _assert_equal_tables(engine, plain)
    if capacity:
        assert engine.report()["observed_staleness_max"] <= staleness


@pytest.mark.parametrize("capacity", [0, 40, 1.0])
def test_multi_hot_of_two_widths(capacity: float) -> None:
    dims = (8, 4, 8)
    data = batches(0, 1, multi_hot=True)
    plain = PlainTorch("adagrad", dims)
    expected = plain.train(data)
    engine = make_engine(1, "adagrad", capacity=capacity, staleness=3, dims=dims, policy="lfu")
    losses = train(engine, iter(data))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    _assert_equal_tables(engine, plain)
    with torch.no_grad():
        for batch in data:
            torch.testing.assert_close(
                engine.predict(batch), plain.net(batch.dense, batch.sparse), atol=1e-5, rtol=1e-5
            )


def test_padding_is_left_out() -> None:
    batch = batches(0, 1)[0]
    batch.weights = torch.ones(16)
    batch.weights[-3:] = 0
    out = make_engine(1, "sgd", capacity=0.5).step(iter([batch]))
    assert out is not None
    assert out.examples == len(out.labels) == len(out.logits) == 13


def test_batches_larger_than_planned() -> None:
    small, large = batches(0, 1)[:4], batches(0, 1)
    engine = make_engine(1, "sgd", capacity=40, staleness=5)
    before = engine._groups[0].batch_rows
    plain = PlainTorch("sgd")
    expected = plain.train(small)
    losses = train(engine, iter(small))
    wide = make_batch(examples(150, True), 150, [0, 1, 2])
    expected += plain.train([wide, *large])
    losses += train(engine, iter([wide, *large]))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=2e-5, rtol=1e-5)
    assert engine._groups[0].batch_rows > before
