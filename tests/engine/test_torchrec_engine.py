"""One rank: equal to plain torch, state that comes back bit for bit, predictions that change nothing."""

import pytest
import torch

from hetrain.config import ScheduleConfig
from hetrain.optim import Schedule
from tests.engine.bsp import Net, engine, global_batches, optimizer, train_plain

SIZES = [8, 8, 5, 8, 1]


def losses_of(e, batches):
    iterator, losses = iter(batches), []
    while (out := e.step(iterator)) is not None:
        losses.append(out.loss.item() / out.examples)
    return losses


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("multi_hot", [True, False])
def test_equals_plain_torch(name, multi_hot):
    batches = global_batches(SIZES * 4, multi_hot=multi_hot)
    expected, tables = train_plain(batches, optimizer(name))
    e = engine(optimizer(name))
    assert losses_of(e, batches) == pytest.approx(expected, abs=1e-5)
    for table, (piece,) in e._bags.pieces().items():
        assert piece.value.numpy() == pytest.approx(tables[table], abs=1e-5)


def test_learning_rates_follow_the_schedule():
    cfg = ScheduleConfig(warmup_steps=3, decay="linear", decay_steps=10)
    batches = global_batches(SIZES * 3)
    expected, _ = train_plain(batches, optimizer("rowwise_adagrad"), Schedule(cfg).factor)
    assert losses_of(engine(optimizer("rowwise_adagrad"), schedule=cfg), batches) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
def test_restored_state_trains_on_bit_for_bit(name):
    batches = global_batches(SIZES * 2)
    whole = engine(optimizer(name), schedule=ScheduleConfig(warmup_steps=8))
    expected = losses_of(whole, batches)
    first = engine(optimizer(name), schedule=ScheduleConfig(warmup_steps=8))
    losses = losses_of(first, batches[:4])
    second = engine(optimizer(name), schedule=ScheduleConfig(warmup_steps=8))
    with first.snapshot() as saved, second.snapshot() as target:
        assert (saved.step, saved.replicated) == (4, frozenset())
        for key, value in target.dense.items():
            value.copy_(saved.dense[key])
        for table, (piece,) in target.tables.items():
            piece.value.copy_(saved.tables[table][0].value)
            for key, value in piece.optimizer.items():
                assert value.shape == ((piece.value.shape[0],) if name == "rowwise_adagrad" else piece.value.shape)
                value.copy_(saved.tables[table][0].optimizer[key])
        target.step, target.dense_optimizer = saved.step, saved.dense_optimizer
        second.restore(target, None)
    assert losses + losses_of(second, batches[4:]) == expected


def test_predicting_changes_nothing():
    batches = global_batches(SIZES * 2)
    expected = losses_of(engine(optimizer("adagrad")), batches)
    e, losses = engine(optimizer("adagrad")), []
    iterator = iter(batches)
    while (out := e.step(iterator)) is not None:
        losses.append(out.loss.item() / out.examples)
        with e.evaluating():
            assert not e._model.training
            assert torch.equal(e.predict(batches[0]), e.predict(batches[0]))
    assert losses == expected


def test_what_a_model_registers_is_its_dense_part():
    e = engine(optimizer("sgd"))
    assert set(dict(e._model.named_parameters())) == {f"layers.{i}.{k}" for i in (0, 2) for k in ("weight", "bias")}
    with e.snapshot() as state:
        assert set(state.dense) == set(Net(torch.nn.Identity()).state_dict())


def test_features_may_come_in_another_order():
    batches = global_batches(SIZES)
    shuffled = [type(b)(b.dense, b.sparse.permute([3, 1, 0, 2]), b.labels, b.global_size) for b in batches]
    assert losses_of(engine(optimizer("sgd")), shuffled) == losses_of(engine(optimizer("sgd")), batches)
