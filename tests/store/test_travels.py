"""Rows and pushes as a codec's bytes: nothing is lost, bounds and resumes hold, looking disturbs nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hetrain.store import residue
from hetrain.store.row_codec import PUSH_SCALE, RowCodec
from hetrain.store.thinning import thinned
from hetrain.store.threshold import Dct, Threshold
from hetrain.telemetry import Traffic
from tests.store.loopback import Loopback, Setup, held
from tests.store.test_training import (
    assert_looking_sees_the_flush_and_changes_nothing,
    assert_same,
    batches_of,
    everything,
    train,
)

ROWS = 40
ROUNDING = ["fp16", "bf16", "int8"]
DCT = Dct(sparsity=0.6, max_age=3, refresh_steps=5, warmup_steps=2)
STEP = {"fp16": 2**-11, "dct": 2**-11, "bf16": 2**-8, "int8": 1 / 255}  # of a row's largest value, at most lost


def setup_of(travels, **fields):
    fields = {"world": 3, "capacity": 12, "staleness": 3, "dim": 8, **fields}
    return Setup(tables=(ROWS,), batch_rows=ROWS, travels=travels, dct=DCT if travels == "dct" else None, **fields)


class Sums:
    """By row: all updates made (SGD), and all that owners were told, as what was sent means."""

    def __init__(self, store):
        self.made, self.told = (torch.zeros(ROWS, store.setup.dim, dtype=torch.float64) for _ in range(2))
        self.slack = torch.zeros(ROWS, 1, dtype=torch.float64)  # largest values told, summed
        self.store, self.bytes_of = store, {torch.uint8: 0, torch.float32: 0}
        for owner in store.owners:
            owner.serve = self.listening(owner.serve)

    def listening(self, serve):
        def listen(requests, *where):
            for request in requests:
                told = self.store.codec.read_pushes(request.push_value).double()
                self.told.index_add_(0, request.push_rows, told)
                self.slack.index_add_(0, request.push_rows, told.abs().amax(1, keepdim=True))
                self.bytes_of[request.push_value.dtype] += request.push_value.nbytes
            return serve(requests, *where)

        return listen

    def train(self, steps):
        lr, held_back = self.store.setup.lr, self.store.setup.capacity > 0
        for lookups, gradients in steps:
            for rows, gradient in zip(lookups, gradients, strict=True):
                rows = torch.from_numpy(np.unique(rows))
                self.made[rows] += gradient[rows].double() * (-lr if held_back else 1)
        train(self.store, steps)

    def pending(self):
        """What copies still hold, whether an update is counted as pending or not."""
        total = torch.zeros_like(self.told)
        for cache in self.store.caches:
            for row, (slot, *_) in held(cache).items():
                total[row] += (cache.copies.value[slot] - cache.copies.bases(np.array([slot])).value[0]).double()
            for part in cache._staged:
                total.index_add_(0, part.push_rows, self.store.codec.read_pushes(part.push_value).double())
            if cache.residue is not None:
                rows, waits = cache.residue.waiting()
                total.index_add_(0, rows, waits.double())
        return total


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("travels", [*ROUNDING, "dct"])
def test_what_was_sent_and_what_is_pending_are_the_updates(travels, prefetch):
    """To float32's rounding, while no copy is evicted: whatever a codec or a threshold keeps stays in the copy."""
    store = Loopback(setup_of(travels, capacity=ROWS, prefetch=prefetch, directory=True))
    sums = Sums(store)
    initial = store.table().double()
    sums.train(list(batches_of(store.setup, 60)))
    assert sum(cache.counters.own_invalid for cache in store.caches) > 50
    assert sum(cache.counters.invalid for cache in store.caches) > 5
    assert sums.bytes_of[torch.float32] == 0
    assert sums.told.abs().max() > 0.1
    torch.testing.assert_close(sums.told + sums.pending(), sums.made, rtol=0, atol=2e-6)
    torch.testing.assert_close(store.table().double() - initial, sums.told, rtol=0, atol=2e-6)


@pytest.mark.parametrize("capacity", [6, 12])
@pytest.mark.parametrize("travels", [*ROUNDING, "dct"])
def test_evictions_and_the_flush_lose_no_more_than_the_rounding_of_what_they_send(travels, capacity):
    store = Loopback(setup_of(travels, capacity=capacity, directory=True))
    sums = Sums(store)
    initial = store.table().double()
    sums.train(list(batches_of(store.setup, 60)))
    store.flush()
    assert sum(cache.counters.evictions for cache in store.caches) > 50
    lost = (store.table().double() - initial - sums.made).abs()
    assert (lost <= STEP[travels] * sums.slack + 2e-6).all()
    assert lost.max() > 0


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("travels", [*ROUNDING, "dct"])
def test_gradients_pushed_at_once_lose_no_more_than_their_rounding(travels, prefetch):
    store = Loopback(setup_of(travels, capacity=0, prefetch=prefetch, blocks=2))
    sums = Sums(store)
    sums.train(list(batches_of(store.setup, 40)))
    if travels == "dct":
        assert sums.pending().abs().max() > 0.5
        torch.testing.assert_close(sums.told + sums.pending(), sums.made, rtol=1e-3, atol=1e-3)
    store.flush()
    lost = (sums.told - sums.made).abs()
    assert (lost <= STEP[travels] * sums.slack + 1e-5).all()
    torch.testing.assert_close(store.table().double(), store.initial() - 0.1 * sums.told, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("travels", [*ROUNDING, "dct"])
@pytest.mark.parametrize("capacity", [0, 12])
def test_one_worker_comes_close_to_fp32(travels, capacity, optimizer):
    setup = setup_of(travels, world=1, capacity=capacity, optimizer=optimizer, lr=0.05)
    ended = []
    for option in (setup, replace(setup, travels="none", dct=None)):
        store = Loopback(option)
        train(store, batches_of(setup, 40))
        store.flush()
        ended.append((store.table(), store.table("state")))
    (value, state), (exact, exact_state) = ended
    assert not torch.equal(value, exact)
    allowed = 0.3 if travels == "dct" and capacity == 0 and optimizer != "sgd" else {"int8": 0.03}.get(travels, 0.01)
    assert (value - exact).norm() / exact.norm() < allowed
    if capacity:
        torch.testing.assert_close(state, exact_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("travels", ROUNDING)
def test_copies_stay_near_their_rows_where_they_are_not_fetched_again(travels):
    """A worker alone with a row pushes and never gets it back: base and row keep the distance of one rounding."""
    store = Loopback(setup_of(travels, world=1, capacity=ROWS, staleness=0, directory=True))
    train(store, batches_of(store.setup, 5))
    store.flush()  # no row is initial any more
    steps = list(batches_of(store.setup, 80))
    train(store, steps)
    cache, table = store.caches[0], store.table()
    assert cache.counters.own_invalid > 500
    for row, (slot, *_) in held(cache).items():
        base = cache.copies.bases(np.array([slot])).value[0]
        assert (base - table[row]).abs().max() <= STEP[travels] * 2


@pytest.mark.parametrize("travels", [*ROUNDING, "dct"])
@pytest.mark.parametrize(("capacity", "prefetch"), [(0, False), (0, True), (12, False), (12, True)])
def test_looking_sees_what_the_flush_will_leave_and_changes_nothing(travels, capacity, prefetch):
    setup = setup_of(travels, capacity=capacity, prefetch=prefetch, directory=True, optimizer="rowwise_adagrad")
    assert_looking_sees_the_flush_and_changes_nothing(setup)


@pytest.mark.parametrize("travels", [*ROUNDING, "dct"])
@pytest.mark.parametrize("capacity", [0, 12])
def test_resume_is_bit_for_bit(travels, capacity):
    setup = setup_of(travels, capacity=capacity, directory=True)
    steps = list(batches_of(setup, 30))
    store, resumed = Loopback(setup), Loopback(setup)
    train(store, steps[:16])
    train(resumed, steps[20:22])  # whatever it held before must not matter
    for owner, other in zip(resumed.owners, store.owners, strict=True):
        owner.value.copy_(other.value)
        owner.state.copy_(other.state)
        owner.load_state_dict(other.state_dict())
    for cache, other in zip(resumed.caches, store.caches, strict=True):
        cache.load_state_dict(other.state_dict())
    assert_same(everything(resumed), everything(store))
    train(store, steps[16:])
    train(resumed, steps[16:])
    assert_same(everything(resumed), everything(store))
    assert [c.residue_age_max for c in resumed.caches] == [c.residue_age_max for c in store.caches]


# -- thresholds -----------------------------------------------------------------------------------


def test_the_threshold_is_the_kth_largest_and_found_anew():
    threshold = Threshold(Dct(sparsity=0.75, max_age=1, refresh_steps=2, warmup_steps=1))
    values = torch.tensor([[1.0, -5.0, 3.0, 2.0], [0.5, -4.0, 0.0, -0.25]])
    assert threshold.of(values) == 0
    threshold.count_step()
    assert threshold.of(values) == 4
    threshold.count_step()
    assert threshold.of(values / 2) == 4
    threshold.count_step()
    assert threshold.of(values / 2) == threshold.value == 2


def test_what_is_not_a_number_reaches_every_threshold_and_makes_none():
    """A gradient that overflowed must be seen, and must not keep the others from being pushed."""
    bad, good = torch.tensor([[0.0, math.nan, 0.0, 0.0]]), torch.tensor([[1.0, -5.0, 3.0, 2.0]])
    threshold, rows = Threshold(Dct(sparsity=0.75, max_age=1, refresh_steps=9, warmup_steps=0)), np.zeros(1, bool)
    threshold.of(good)
    sent = thinned(bad, threshold.of(bad), rows)
    assert sent.isnan().tolist() == [[False, True, False, False]]
    threshold.restart(0)
    threshold.of(bad)
    assert torch.equal(thinned(good, threshold.of(good), rows), good)


@pytest.mark.parametrize("capacity", [0, 12])
def test_the_warm_up_is_that_of_the_run_not_of_the_cache(capacity):
    """A run that goes on with other ranks has its warm-up behind it."""
    store = Loopback(setup_of("dct", world=1, capacity=capacity, staleness=0))
    for steps, waits in ((0, False), (DCT.warmup_steps, True)):
        store.caches[0].restart(steps)
        train(store, list(batches_of(store.setup, 1)))
        store.read([[1]])  # pushes what the step left
        store.forget_read()
        assert (store.caches[0].residue_age_max > 0) == waits


def test_a_row_goes_whole_after_max_age_pushes():
    """One row, staleness 0: pushed in every step, and whole in every fourth."""
    setup = setup_of("dct", world=1, capacity=ROWS, staleness=0)
    store = Loopback(replace(setup, dct=replace(DCT, warmup_steps=0, refresh_steps=100)))
    pushed = []
    Sums(store)
    listen = store.owners[0].serve

    def serve(requests, *where):
        pushed.extend(int((store.codec.read_pushes(r.push_value) != 0).sum()) for r in requests if len(r.push_rows))
        return listen(requests, *where)

    store.owners[0].serve = serve
    gradient = torch.arange(1.0, 9.0).expand(ROWS, 8)
    train(store, [([[7]], [gradient])] * 14)
    assert pushed[3::4] == [8, 8, 8]
    assert pushed[0] == pushed[4] == 3
    assert store.caches[0].residue_age_max == 3


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rest_without_a_pending_update_is_flushed_and_evicted(leaves):
    """Between a read, which pushes, and the update of its batch, which does not come."""
    store = Loopback(replace(setup_of("dct", world=1, capacity=1, staleness=0), dct=replace(DCT, warmup_steps=0)))
    gradient, initial = torch.arange(1.0, 9.0).expand(ROWS, 8), store.table()
    train(store, [([[7]], [gradient])])
    store.read([[7]])
    _, c_s, c_c = held(store.caches[0])[7]
    assert c_s == c_c
    assert not torch.equal(store.table()[7], initial[7])
    assert (store.table()[7] - initial[7] + 0.1 * gradient[7]).abs().max() > 0.3
    store.forget_read()
    if leaves:
        train(store, [([[9]], [torch.zeros(ROWS, 8)])])
        assert 7 not in held(store.caches[0])
    store.flush()
    torch.testing.assert_close(store.table()[7], initial[7] - 0.1 * gradient[7], rtol=0, atol=1e-3)


def test_rows_without_room_for_their_rest_travel_whole(monkeypatch):
    monkeypatch.setattr(residue, "RESIDUE_BYTES", 4 * 8 * 5)
    store = Loopback(setup_of("dct", world=1, capacity=0))
    sums = Sums(store)
    sums.train(list(batches_of(store.setup, 30)))
    waits = store.caches[0].residue
    assert waits.capacity_rows == 5
    assert 0 < waits.count <= 5
    assert waits.age_max <= DCT.max_age
    torch.testing.assert_close(sums.told + sums.pending(), sums.made, rtol=1e-3, atol=1e-3)
    store.flush()
    assert waits.count == 0
    sums.train(list(batches_of(store.setup, 5, seed=4)))
    assert waits.count > 0
    torch.testing.assert_close(sums.told + sums.pending(), sums.made, rtol=1e-3, atol=5e-3)


# -- codecs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("travels", ROUNDING)
def test_small_pushes_keep_their_digits(travels):
    """Gradients of 1e-7, which plain float16 would round by a third and 8-bit rows would shrink."""
    codec = RowCodec(travels, 16)
    values = torch.randn(500, 16, generator=torch.Generator().manual_seed(1)) * 1e-7
    read = codec.read_pushes(codec.pushes(values))
    largest = values.abs().amax(1, keepdim=True)
    assert ((read - values).abs() <= STEP[travels] * 2 * largest).all()
    assert abs(float((read * values).sum() / (values * values).sum()) - 1) < 2e-3


def test_clipped_values_are_counted_and_warned_of_once(caplog):
    traffic = Traffic()
    codec = RowCodec("fp16", 2, traffic)
    far = torch.tensor([[1e5, 1.0], [-1e6, 7e4]])
    assert codec.read_rows(codec.rows(far)).tolist() == [[65504, 1], [-65504, 65504]]
    codec.pushes(torch.tensor([[17.0, -17.0]]))
    assert traffic.clipped == 5
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "clipped" in caplog.text
    with traffic.set_aside():
        codec.rows(far)
    assert traffic.clipped == 5
    assert codec.read_rows(codec.rows(torch.tensor([[math.nan, 1e6]])))[0, 1] == 65504
    assert traffic.clipped == 6
    assert PUSH_SCALE * 15.9 < 65504


def test_clipped_pushes_of_copies_stay_pending():
    store = Loopback(setup_of("fp16", world=1, capacity=ROWS, staleness=0))
    sums = Sums(store)
    sums.train([([[3]], [torch.full((ROWS, 8), 400.0)])] + [([[3]], [torch.zeros(ROWS, 8)])] * 6)
    assert store.traffic.clipped > 0
    torch.testing.assert_close(sums.told[3], sums.made[3], rtol=1e-3, atol=0)


def test_bounds_hold_with_infinite_staleness():
    """Nothing is pushed before the end, which sends everything."""
    store = Loopback(setup_of("dct", capacity=ROWS, staleness=math.inf))
    sums = Sums(store)
    sums.train(list(batches_of(store.setup, 20)))
    assert not sums.told.any()
    store.flush()
    torch.testing.assert_close(sums.told, sums.made, rtol=2e-3, atol=2e-3)
