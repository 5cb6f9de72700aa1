"""Random traces: the vectorised store does what the per-key reference does, in every round."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetrain.store import policy
from tests.store.loopback import DIM, Loopback, Setup, held
from tests.store.reference import Reference, Worker
from tests.store.reference_records import Optimizer

POLICIES = ["lru", "lfu", "light_lfu"]


@pytest.fixture(autouse=True)
def _small_constants(monkeypatch):
    """So that short traces reach the cap of light LFU."""
    monkeypatch.setattr(policy, "HOT", 3)


@st.composite
def traces(draw, **fixed):
    """A setup and by step and worker the lookups; `fixed` fields of the setup are not drawn."""
    tables = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    rows, world = sum(tables), draw(st.integers(1, 4))
    capacity = draw(st.one_of(st.integers(0, rows + 2), st.sampled_from([0, 1, 2, rows])))
    staleness = draw(st.sampled_from([0, 1, 1, 2, 3, math.inf]))
    setup = Setup(
        world=world,
        servers=draw(st.sampled_from([0, 0, 1, 2])),
        tables=tables,
        capacity=capacity,
        staleness=staleness,
        policy=draw(st.sampled_from(POLICIES)),
        clock=draw(st.sampled_from(["max", "sum"])),
        optimizer=draw(st.sampled_from(["sgd", "adagrad", "rowwise_adagrad"])),
        directory=draw(st.booleans()),
        prefetch=draw(st.booleans()),
        blocks=draw(st.integers(1, 3)),
        audit=draw(st.booleans()),
        index=draw(st.sampled_from(["array", "hash"])),
        seed=draw(st.integers(0, 10_000)),
    )
    setup = dataclasses.replace(setup, **fixed)
    hot = st.one_of(st.integers(0, rows - 1), st.integers(0, min(2, rows - 1)))
    batch = st.lists(hot, max_size=10)
    steps = draw(st.lists(st.tuples(*[batch] * world), min_size=1, max_size=14))
    largest = max(len(set(lookups)) for batches in steps for lookups in batches)
    return dataclasses.replace(setup, batch_rows=largest), steps  # no slot more than needed


def reference_of(setup, store):
    optimizer = Optimizer(setup.optimizer, setup.lr, setup.eps)
    workers = [
        Worker(rank, setup.capacity, setup.policy, setup.staleness, optimizer, setup.directory, setup.late)
        for rank in range(setup.world)
    ]
    start, width = store.initial().numpy(), store.optimizer.state_width(setup.dim)
    return Reference(start, width, workers, setup.clock, optimizer, setup.notices)


def close(left, right):
    np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=2e-5, atol=2e-6)


def compare_request(setup, request, message, mine):
    """One worker's request to the owner of the rows that `mine` picks."""
    pushes = {push.row: push for push in message.pushes}
    assert len(pushes) == len(message.pushes)
    assert request.push_rows.tolist() == mine(pushes)
    pushed = [pushes[row] for row in request.push_rows.tolist()]
    assert request.push_clock.tolist() == [p.clock for p in pushed if setup.capacity or setup.audit]
    counted = (setup.clock == "sum" and setup.capacity > 0) or setup.audit
    assert request.push_updates.tolist() == [len(p.updates) for p in pushed if counted]
    for position, push in enumerate(pushed):
        close(request.push_value[position], push.value * push.denominator)
        close(request.push_state[position], push.state)
    assert request.fetch_rows.tolist() == mine(message.fetches)
    assert request.fetch_again.tolist() == [row in message.again for row in mine(message.fetches)]
    checks = dict(message.checks)
    assert request.check_rows.tolist() == mine(checks)
    assert request.check_clock.tolist() == [checks[row] for row in request.check_rows.tolist()]


def compare_messages(store, sent, messages):
    owner_of = store.placement.owner_of(torch.arange(store.space.rows)).tolist()
    for routed, message in zip(sent, messages, strict=True):
        blocks = len(routed.requests)
        assert blocks == (store.setup.blocks if store.setup.late else 1)
        for block, to_owners in enumerate(routed.requests):
            for rank, request in enumerate(to_owners):

                def mine(rows, part=(rank, block), blocks=blocks):
                    return [row for row in sorted(rows) if (owner_of[row], row % blocks) == part]

                compare_request(store.setup, request, message, mine)


def compare_rows(setup, masters, value, state, clock, applied):
    assert len(value) == len(state) == len(masters)
    for position, master in enumerate(masters):
        close(value[position], master.value)
        if setup.capacity:
            close(state[position], master.state)
    assert clock.tolist() == [m.clock for m in masters if setup.capacity or setup.audit]
    assert applied.tolist() == [len(m.updates) for m in masters if setup.audit]


def compare_replies(store, replies, answers, messages):
    """What the owners say: rows that no push reached are left out, and those that the worker has already."""
    for reply, answer, message in zip(replies, answers, messages, strict=True):
        assert reply.stored.dtype == torch.bool
        assert reply.stored.tolist() == [answer.sent[row] for row in message.fetches]
        sent = [answer.fetched[row] for row in message.fetches if answer.sent[row]]
        compare_rows(store.setup, sent, reply.value, reply.state, reply.clock, reply.applied)
        checked = [row for row, _ in message.checks]
        assert [checked[at] for at in reply.invalid.tolist()] == [row for row in checked if row in answer.invalid]
        invalid = [answer.invalid[checked[at]] for at in reply.invalid.tolist()]
        found = (reply.invalid_value, reply.invalid_state, reply.invalid_clock, reply.invalid_applied)
        compare_rows(store.setup, invalid, *found)
        noticed = list(zip(reply.notice_rows.tolist(), reply.notice_clock.tolist(), strict=True))
        assert sorted(noticed) == sorted(answer.notices.items())


def compare_owners(store, reference):
    masters = list(reference.masters.values())
    if store.setup.capacity or store.setup.audit:
        assert store.table("clock").tolist() == [m.clock for m in masters]
    if store.setup.audit:
        assert store.table("applied").tolist() == [len(m.updates) for m in masters]
    close(store.table(), [m.value for m in masters])
    close(store.table("state"), [m.state for m in masters])
    if store.setup.notices:
        ranks = range(store.setup.world)
        assert store.holders().tolist() == [[held.get(r, -1) for r in ranks] for held in reference.holders.values()]


def compare_bases(store, reference):
    """A base that has the master's updates has its bits: as it was sent, or as both sides merged it.

    So has a copy with nothing pending.
    """
    value, state = store.table(), store.table("state")
    for cache, worker in zip(store.caches, reference.workers, strict=True):
        for row, (slot, *_) in held(cache).items():
            copy, base = worker.copies[row], cache.copies.bases(np.array([slot]))
            if copy.base_updates == reference.masters[row].updates:
                assert torch.equal(base.value[0], value[row])
                assert torch.equal(base.state[0], state[row])
            if not copy.pending:
                assert torch.equal(cache.copies.value[slot], base.value[0])
                assert torch.equal(cache.copies.state[slot], base.state[0])


def compare_workers(store, reference):
    """What is held, with which clocks, values, states and bases, what leaves, and the counters."""
    for cache, worker in zip(store.caches, reference.workers, strict=True):
        rows = held(cache)
        assert set(rows) == set(worker.copies)
        for row, copy in worker.copies.items():
            slot, c_s, c_c = rows[row]
            if store.setup.capacity:
                assert (c_s, c_c) == (copy.c_s, copy.c_c)
                close(cache.copies.state[slot], copy.state)
            close(cache.copies.value[slot], copy.value)
        request, pending = cache.pending(), {push.row: push for push in worker.pending().pushes}
        assert sorted(request.push_rows.tolist()) == sorted(pending)
        for position, row in enumerate(request.push_rows.tolist()):
            close(request.push_value[position], pending[row].value * pending[row].denominator)
            close(request.push_state[position], pending[row].state)
        assert vars(cache.counters) == worker.counters


class Both:
    """The store and the reference side by side."""

    def __init__(self, setup):
        self.setup, self.store = setup, Loopback(setup)
        self.reference = reference_of(setup, self.store)
        self.rng = np.random.default_rng(setup.seed)
        self.missed, self.total = 0, torch.zeros(setup.rows, DIM, dtype=torch.float64)

    def begin(self, batches):
        self.next, self.messages = self.store.begin(batches), self.reference.begin(batches)
        for plan, worker, batch in zip(self.next, self.reference.workers, batches, strict=True):
            assert plan.rows.tolist() == worker.next.reading
            rows_of_slots = dict(zip(plan.touched.tolist(), plan.rows.tolist(), strict=True))
            assert [rows_of_slots[slot] for slot in plan.slots.tolist()] == list(batch)
        self.requests = self.store.requests(self.next)
        self.announced = self.announce() if self.store.announces else None

    def announce(self):
        """Which rows are late and which hot, as the store says."""
        flags, (late, hot) = self.store.announce(self.next), self.reference.announce()
        assert [of_worker.tolist() for of_worker, _ in flags] == late
        assert [of_worker.tolist() for _, of_worker in flags] == hot
        return flags

    def compare_leg(self, exchanged, answers, messages):
        """What was sent, what came back, and what the owners hold after it."""
        sent, replies = exchanged
        compare_messages(self.store, sent, messages)
        compare_replies(self.store, replies, answers, messages)
        compare_owners(self.store, self.reference)
        return replies

    def admit(self, ahead=False):
        """Exchange only now: what a request carries is what was asked at its begin."""
        with_late = ahead and self.setup.late
        if with_late:  # asked for before the first leg arrives
            asked, late = self.store.begin_late(self.next, self.announced), self.reference.begin_late()
        answers = self.reference.serve(self.messages)
        replies = self.compare_leg(self.store.fetch(self.requests), answers, self.messages)
        self.store.admit(self.next, replies)
        self.reference.admit(answers)
        if with_late:
            answers = self.reference.serve(late, late_leg=True)
            replies = self.compare_leg(self.store.fetch_late(asked), answers, late)
            self.store.admit(asked, replies)
            self.reference.admit_late(answers)
        self.reference.read()
        self.plans = self.next
        compare_workers(self.store, self.reference)
        if self.setup.capacity:
            compare_bases(self.store, self.reference)
        if self.setup.audit:
            self.missed = max(self.missed, self.store.audit(self.plans))
            assert self.missed == self.reference.missed

    def write(self, number):
        gradients = [torch.from_numpy(self.rng.normal(size=(len(p.rows), DIM)).astype(np.float32)) for p in self.plans]
        by_row = [
            dict(zip(p.rows.tolist(), g.numpy(), strict=True)) for p, g in zip(self.plans, gradients, strict=True)
        ]
        self.store.write(self.plans, gradients)
        self.reference.write(number, by_row)
        for plan, gradient in zip(self.plans, gradients, strict=True):
            self.total[plan.rows] += gradient

    def forget_read(self, number):
        """The batch admitted after step `number` does not come."""
        self.store.forget_read()
        self.reference.forget_read(number + 0.5)
        compare_workers(self.store, self.reference)

    def run(self, steps, lost=()):
        """`lost`: after these steps what was read ahead, the lookups of the first step, does not come."""
        self.begin(steps[0])
        self.admit()
        for number, following in enumerate([*steps[1:], None]):
            if following is not None and self.setup.prefetch:
                self.begin(steps[0] if number in lost else following)
            self.write(number)
            if following is None or not self.setup.prefetch:
                compare_workers(self.store, self.reference)
            if following is not None and not self.setup.prefetch:
                self.begin(following)
            if following is not None:
                self.admit(ahead=self.setup.prefetch)
            if following is not None and number in lost:
                self.forget_read(number)
                self.begin(following)
                self.admit()

    def end(self):
        observed = [side.observed_staleness_max for side in (*self.store.caches, *self.store.owners)]
        assert max(observed) <= (self.setup.staleness if self.setup.capacity else 0)
        assert self.setup.capacity or self.missed == 0
        initial = self.store.initial().double()
        self.store.flush()
        self.reference.flush()
        compare_owners(self.store, self.reference)
        if self.setup.audit:
            assert self.store.table("applied").tolist() == [len(u) for u in self.reference.all_updates.values()]
        if self.setup.optimizer == "sgd":  # nothing is lost: the sum of all updates
            expected = initial - self.setup.lr * self.total
            torch.testing.assert_close(self.store.table().double(), expected, rtol=0, atol=1e-5)
        assert all(len(cache.copies.dirty()) == 0 for cache in self.store.caches)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces())
def test_store_equals_reference(trace):
    setup, steps = trace
    both = Both(setup)
    both.run(steps)
    both.end()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces(directory=True, prefetch=True, staleness=1))
def test_store_equals_reference_where_most_happens(trace):
    setup, steps = trace
    both = Both(setup)
    both.run(steps)
    both.end()


LATE = st.one_of(traces(prefetch=True, capacity=0), traces(prefetch=True, staleness=0))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LATE)
def test_store_equals_reference_with_a_late_leg(trace):
    setup, steps = trace
    both = Both(setup)
    both.run(steps)
    both.end()


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("capacity", [0, 12])
def test_long_traces_reach_everything_of_the_late_leg(capacity, blocks):
    """Rows hot at one worker and late only at another, gradients that wait, evictions before the leg."""
    setup = Setup(
        world=3, servers=2, tables=(9, 80), capacity=capacity, batch_rows=10, optimizer="adagrad", prefetch=True,
        staleness=0, clock="sum", blocks=blocks, index="hash",
    )  # fmt: skip
    rng = np.random.default_rng(5)
    steps = [[np.minimum(rng.zipf(1.3, 10) - 1, 88).tolist() for _ in range(3)] for _ in range(60)]
    both = Both(setup)
    both.run(steps)
    both.end()
    turns = {"late", "evicted_before_late", "spared"} if capacity else {"late", "hot", "cold", "late_elsewhere"}
    for worker in both.reference.workers:
        assert {turn for turn, times in worker.seen.items() if times} >= turns, worker.seen


def test_notice_for_a_row_that_just_left():
    """While every slot is taken: worker 0 evicts row 0 when it is told that the others pushed it."""
    setup = Setup(
        world=3, tables=(3,), capacity=1, batch_rows=1, staleness=1, clock="sum", directory=True, prefetch=True
    )  # fmt: skip
    both = Both(setup)
    both.run([([0], [0], [0]), ([], [0], [0]), ([1], [0], [0]), ([2], [0], [0]), ([2], [], [])])
    both.end()
    assert both.reference.workers[0].seen["ignored"] == 1


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("policy_name", POLICIES)
@pytest.mark.parametrize(("optimizer", "clock"), [("sgd", "max"), ("adagrad", "sum"), ("rowwise_adagrad", "sum")])
def test_long_traces_reach_everything(prefetch, policy_name, optimizer, clock):
    """Skewed lookups of three workers; every turn of the protocol occurs, so that the comparison means something."""
    setup = Setup(
        world=3, servers=2, tables=(9, 30), capacity=12, batch_rows=10, policy=policy_name, optimizer=optimizer,
        directory=True, prefetch=prefetch, staleness=2, clock=clock,
        index="array" if optimizer == "adagrad" else "hash",
    )  # fmt: skip
    rng = np.random.default_rng(5)
    steps = [[np.minimum(rng.zipf(1.3, 10) - 1, 38).tolist() for _ in range(3)] for _ in range(150)]
    both = Both(setup)
    both.run(steps)
    both.end()
    if clock == "max":  # this one lets few copies become invalid
        return
    turns = {"noticed", "doubted", "early"} | ({"early_in_flight", "spared"} if prefetch else set())
    for worker in both.reference.workers:
        assert all(worker.counters.values())
        assert {turn for turn, times in worker.seen.items() if times} >= turns, worker.seen
    assert sum(worker.seen["ignored"] for worker in both.reference.workers) > 0 or not prefetch
