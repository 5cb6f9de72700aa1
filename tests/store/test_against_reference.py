"""Random traces: the vectorised store does what the per-key reference does, after every round."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetrain.store import policy
from tests.store.loopback import DIM, Loopback, Setup
from tests.store.reference import Optimizer, Reference, Worker


@pytest.fixture(autouse=True)
def _small_constants(monkeypatch):
    """So that short traces reach the cap of LFU and the block-wise scan."""
    monkeypatch.setattr(policy, "HOT", 3)
    monkeypatch.setattr(policy, "SCAN", 2)


@st.composite
def traces(draw, capacities=None):
    tables = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    rows = sum(tables)
    world = draw(st.integers(1, 4))
    setup = Setup(
        world=world,
        tables=tables,
        capacity=draw(capacities or st.one_of(st.integers(0, rows + 2), st.sampled_from([0, 1, rows]))),
        batch_rows=rows,
        staleness=draw(st.sampled_from([0, 1, 3, math.inf])),
        policy=draw(st.sampled_from(["lru", "lfu"])),
        clock=draw(st.sampled_from(["max", "sum"])),
        optimizer=draw(st.sampled_from(["sgd", "adagrad", "rowwise_adagrad"])),
        seed=draw(st.integers(0, 10_000)),
    )
    hot = st.one_of(st.integers(0, rows - 1), st.integers(0, min(2, rows - 1)))
    batch = st.lists(hot, max_size=10)
    steps = draw(st.lists(st.tuples(*[batch] * world), min_size=1, max_size=12))
    return setup, steps


def reference_of(setup, store):
    optimizer = Optimizer(setup.optimizer, setup.lr, setup.eps)
    workers = [Worker(w, setup.capacity, setup.policy, setup.staleness, optimizer) for w in range(setup.world)]
    width = store.optimizer.state_width(setup.dim)
    return Reference(store.table().numpy(), width, workers, setup.clock, optimizer)


def close(left, right):
    np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=2e-5, atol=2e-6)


def compare_messages(store, sent, messages):
    for to_owners, message in zip(sent, messages, strict=True):
        for rank, request in enumerate(to_owners):

            def mine(rows, rank=rank):
                return [r for r in rows if int(store.placement.owner_of(torch.tensor([r]))) == rank]

            pushes = {push.row: push for push in message.pushes}
            assert len(pushes) == len(message.pushes)
            assert request.push_rows.tolist() == mine(pushes)
            pushed = [pushes[row] for row in request.push_rows.tolist()]
            assert request.push_clock.tolist() == [p.clock for p in pushed]
            assert request.push_updates.tolist() == [len(p.updates) for p in pushed]
            for row, push in enumerate(pushed):
                close(request.push_value[row], push.value * push.denominator)
                close(request.push_state[row], push.state)
            assert request.fetch_rows.tolist() == mine(message.fetches)
            checks = dict(message.checks)
            assert request.check_rows.tolist() == mine(checks)
            assert request.check_clock.tolist() == [checks[row] for row in request.check_rows.tolist()]


def compare_state(store, reference):
    masters = list(reference.masters.values())
    assert store.table("clock").tolist() == [m.clock for m in masters]
    assert store.table("applied").tolist() == [len(m.updates) for m in masters]
    close(store.table(), [m.value for m in masters])
    close(store.table("state"), [m.state for m in masters])
    for cache, worker in zip(store.caches, reference.workers, strict=True):
        slot = {int(row): s for s, row in enumerate(cache._row) if row >= 0}
        assert set(slot) == set(worker.copies)
        for row, copy in worker.copies.items():
            s = slot[row]
            assert (cache._start[s], cache._current[s]) == (copy.c_s, copy.c_c)
            close(cache.value[s], copy.value)
            if store.setup.capacity:
                close(cache.state[s], copy.state)
        assert [r for part in cache._staged for r in part.push_rows.tolist()] == [p.row for p in worker.staged]
        assert vars(cache.counters) == worker.counters


def step_both(store, reference, number, batches, rng):
    plans, sent = store.read(batches)
    messages = reference.read(batches)
    compare_messages(store, sent, messages)
    for plan, worker, batch in zip(plans, reference.workers, batches, strict=True):
        assert plan.rows.tolist() == worker.reading
        rows_of_slots = dict(zip(plan.touched.tolist(), plan.rows.tolist(), strict=True))
        assert [rows_of_slots[s] for s in plan.slots.tolist()] == batch
    compare_state(store, reference)
    missed = store.audit(plans)
    gradients = [torch.from_numpy(rng.normal(size=(len(p.rows), DIM)).astype(np.float32)) for p in plans]
    by_row = [dict(zip(p.rows.tolist(), g.numpy(), strict=True)) for p, g in zip(plans, gradients, strict=True)]
    store.write(plans, gradients)
    reference.write(number, by_row)
    compare_state(store, reference)
    return missed, by_row


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces())
def test_store_equals_reference(trace):
    setup, steps = trace
    store = Loopback(setup)
    reference = reference_of(setup, store)
    initial = store.table().double()
    rng = np.random.default_rng(setup.seed)
    missed, total = 0, torch.zeros_like(initial)
    for number, batches in enumerate(steps):
        seen, by_row = step_both(store, reference, number, batches, rng)
        missed = max(missed, seen)
        for gradients in by_row:
            for row, gradient in gradients.items():
                total[row] += torch.from_numpy(gradient)
    assert missed == reference.missed
    observed = [side.observed_staleness_max for side in (*store.caches, *store.owners)]
    assert max(observed) <= setup.staleness

    store.flush()
    reference.flush()
    close(store.table(), [m.value for m in reference.masters.values()])
    close(store.table("state"), [m.state for m in reference.masters.values()])
    assert store.table("applied").tolist() == [len(u) for u in reference.all_updates.values()]
    if setup.optimizer == "sgd":  # nothing is lost: the sum of all updates
        torch.testing.assert_close(store.table().double(), initial - setup.lr * total, rtol=0, atol=1e-5)
    assert all(len(cache.dirty_slots()) == 0 for cache in store.caches)
