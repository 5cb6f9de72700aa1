"""One worker at its own pace is the textbook: asp = ssp = bsp = plain torch, step by step."""

import numpy as np
import pytest
import torch

from hetrain.config import ScheduleConfig
from hetrain.errors import ConfigError
from hetrain.store.threshold import Dct
from tests.engine.async_cases import make_async
from tests.engine.held import load, save, tables_of
from tests.engine.store_cases import PlainTorch, batches, train

MODES = [("asp", 0), ("ssp", 0), ("ssp", 0.3), ("ssp", 1.0)]


@pytest.mark.parametrize(("mode", "capacity"), MODES)
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("staleness", [0, 4])
def test_one_worker_is_plain_torch(mode, capacity, optimizer, staleness):
    dims, data = (8, 4, 8), batches(0, 1, multi_hot=True)
    plain = PlainTorch(optimizer, dims)
    engine = make_async(mode, optimizer, capacity=capacity, staleness=staleness)
    np.testing.assert_allclose(train(engine, iter(data)), plain.train(data), rtol=2e-5)
    engine.finish()
    found = tables_of(engine)
    for i, weight in enumerate(plain._weights):
        np.testing.assert_allclose(found[f"t{i}.value@0"], weight.detach().numpy(), rtol=2e-4, atol=2e-6)
    for name, value in plain.net.named_parameters():
        if not name.startswith("bags"):
            np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("dense", ["sgd", "adagrad", "adam", "adamw"])
@pytest.mark.parametrize("mode", ["asp", "ssp"])
def test_resumed_equals_uncut(mode, dense):
    data = batches(0, 1)
    kept = {"capacity": 0.3, "staleness": 4, "dense": dense}
    whole = make_async(mode, "rowwise_adagrad", **kept)
    losses = train(whole, iter(data))
    first = make_async(mode, "rowwise_adagrad", **kept)
    train(first, iter(data[:5]))
    second = make_async(mode, "rowwise_adagrad", **kept)
    with first.snapshot() as saved, second.snapshot() as state:
        for name, pieces in saved.tables.items():
            for piece, target in zip(pieces, state.tables[name], strict=True):
                target.value.copy_(piece.value)
                for key, value in piece.optimizer.items():
                    target.optimizer[key].copy_(value)
        for name, value in saved.dense.items():
            state.dense[name].copy_(value)
        state.dense_optimizer, state.step = saved.dense_optimizer, saved.step
    second.restore(state, None)
    assert train(second, iter(data[5:])) == losses[5:]
    for (name, one), (_, other) in zip(tables_of(second).items(), tables_of(whole).items(), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("travels", ["int8", "dct"])
def test_a_coded_run_goes_on_from_where_it_was_saved(travels):
    """Ranks met to save: what thresholds kept is with the owners, and the threshold is saved."""
    data = batches(0, 1, multi_hot=True)
    dct = Dct(sparsity=0.8, max_age=2, refresh_steps=4, warmup_steps=1) if travels == "dct" else None
    first, second = (make_async("asp", "adagrad", rows=travels, dct=dct) for _ in range(2))
    second.step(iter(data[2:]))
    stream = iter(data)
    for _ in range(5):
        first.step(stream)
    load(second, save(first), exact=True)
    assert train(second, iter(data[5:])) == train(first, stream)
    second.finish()
    first.finish()
    for (name, one), (_, other) in zip(tables_of(second).items(), tables_of(first).items(), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
    if dct:
        assert first.report()["residue_age_max"] == 2
        assert not first._bags.stage_rest()


@pytest.mark.parametrize("travels", ["fp16", "int8"])
def test_looking_reads_rows_as_they_are(travels):
    data = batches(0, 1, multi_hot=True)
    coded, plain = make_async("asp", rows=travels), make_async("asp")
    train(coded, iter(data[:4]))
    load(plain, {**save(coded), "layout": plain._layout}, exact=False)
    assert torch.equal(coded.predict(data[4]), plain.predict(data[4]))


def test_the_rest_of_a_push_is_no_further_update():
    engine = make_async(
        "asp", rows="dct", dct=Dct(sparsity=0.8, max_age=99, refresh_steps=4, warmup_steps=0), audit_every=1
    )
    train(engine, iter(batches(0, 1, multi_hot=True)))
    assert any(residue.count for residue in engine._bags._residues)
    engine.finish()
    pushes = sum(group.copies.counters.misses for group in engine._groups)  # of rows: asp keeps none
    assert sum(int(part.owner.applied.sum()) for part in engine._part.rows) == pushes


def test_a_warm_up_is_not_repeated_where_a_run_goes_on():
    dct = Dct(sparsity=0.8, max_age=9, refresh_steps=4, warmup_steps=5)
    data = batches(0, 1, multi_hot=True)
    first, second = (make_async("asp", rows="dct", dct=dct) for _ in range(2))
    train(first, iter(data[:5]))
    load(second, save(first), exact=False)
    second.step(iter(data[5:6]))
    assert any(residue.count for residue in second._bags._residues)


def test_looking_changes_nothing_and_sees_the_last_step():
    data = batches(0, 1)
    looked, plain = make_async("ssp", capacity=0.3, staleness=4), make_async("ssp", capacity=0.3, staleness=4)
    losses, seen = [], []
    stream = iter(data)
    while (out := looked.step(stream)) is not None:
        losses.append(float(out.loss))
        seen.append(looked.predict(data[0]).clone())
    assert losses == train(plain, iter(data))
    assert torch.equal(seen[-1], plain.predict(data[0]))
    assert not torch.equal(seen[0], seen[1])


def test_a_parameter_of_another_type_is_refused():
    from tests.engine import async_cases

    class Half(async_cases.Net):
        def __init__(self, bags, dims):
            super().__init__(bags, dims)
            self.extra = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))

    original, async_cases.Net = async_cases.Net, Half
    try:
        with pytest.raises(ConfigError, match=r"'extra' is torch\.float16"):
            make_async("asp", schedule=ScheduleConfig())
    finally:
        async_cases.Net = original
