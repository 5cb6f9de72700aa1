"""Directory against clock validation, lazy rows against stored ones, and going on from a state in mid-trace."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetrain.store import policy
from tests.store.loopback import Loopback, Setup, held, integers
from tests.store.test_against_reference import traces

quietly = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FINITE = st.sampled_from([0, 1, 1, 2, 3])


@pytest.fixture(autouse=True)
def _small_constants(monkeypatch):
    monkeypatch.setattr(policy, "HOT", 3)


class Run:
    """A store alone on a trace, its messages kept. A gradient depends on step, worker and row only."""

    def __init__(self, setup, steps, store=None):
        self.setup, self.steps, self.store = setup, steps, store or Loopback(setup)
        self.requests, self.replies = [], []  # by round or leg of one, by worker
        self.waiting = []  # which of the rows fetched are left to the late leg
        self.done = 0
        self.plans = None  # admitted, of step `done`

    def begin(self, number):
        return self.store.begin(self.steps[number])

    def admit(self, plans, ahead=False):
        requests = self.store.requests(plans)
        announced = self.store.announce(plans) if self.store.announces else None
        asked = self.store.begin_late(plans, announced) if ahead and self.setup.late else None
        self.take_up(plans, requests, self.store.fetch(requests)[1], [late for late, _ in announced or ()])
        if asked:
            self.take_up(asked, [a.request for a in asked], self.store.fetch_late(asked)[1])
        self.plans = plans

    def take_up(self, asked, requests, replies, waiting=()):
        self.requests.append(requests)
        self.waiting.append(waiting or [torch.zeros_like(request.fetch_again) for request in requests])
        self.replies.append(replies)
        self.store.admit(asked, replies)

    def write(self):
        rows = torch.arange(self.setup.rows)
        gradients = []
        for worker, plan in enumerate(self.plans):
            rng = np.random.default_rng([self.setup.seed, self.done, worker])
            gradient = torch.from_numpy(rng.normal(size=(len(rows), self.setup.dim)).astype(np.float32))
            gradients.append(gradient[plan.rows])
        self.store.write(self.plans, gradients)
        self.plans, self.done = None, self.done + 1

    def step(self):
        """From one batch admitted to the next one admitted."""
        following = self.done + 1
        ahead = self.begin(following) if self.setup.prefetch and following < len(self.steps) else None
        self.write()
        if following < len(self.steps):
            self.admit(ahead or self.begin(following), ahead=ahead is not None)

    def run(self, until=None):
        """Until step `until` is admitted, or the end."""
        if self.plans is None:
            self.admit(self.begin(self.done))
        while self.done < (len(self.steps) if until is None else until):
            self.step()
        return self

    def renewed(self):
        """Rows fetched or found invalid, by round and worker."""
        return [
            [set(q.fetch_rows.tolist()) | set(q.check_rows[p.invalid].tolist()) for q, p in zip(*both, strict=True)]
            for both in zip(self.requests, self.replies, strict=True)
        ]

    def pushes(self):
        return [
            [(q.push_rows.tolist(), q.push_clock.tolist(), q.push_value.tolist()) for q in requests]
            for requests in self.requests
        ]

    def count(self, field):
        return sum(
            getattr(m, field).numel() for part in (*self.requests, *self.replies) for m in part if hasattr(m, field)
        )

    def integers(self):
        return sum(integers(message) for part in (*self.requests, *self.replies) for message in part)


def everything(store):
    """All that a store holds, as nested lists of exact numbers."""
    owners = [[store.table(name).tolist() for name in ("value", "state", "clock")]]
    caches = [plain(cache.state_dict()) for cache in store.caches]
    return owners, caches, [plain(owner.state_dict()) for owner in store.owners]


def plain(item):
    if isinstance(item, dict):
        return {name: plain(part) for name, part in item.items()}
    if isinstance(item, list | tuple):
        return [plain(part) for part in item]
    return item.tolist() if isinstance(item, torch.Tensor | np.ndarray) else item


def copies(store):
    """By worker: row to clocks, value and state."""
    return [
        {
            row: (c_s, c_c, c.copies.value[slot].tolist(), c.copies.state[slot].tolist())
            for row, (slot, c_s, c_c) in held(c).items()
        }
        for c in store.caches
    ]


def assert_same_results(left, right):
    assert left.table().tolist() == right.table().tolist()
    assert left.table("state").tolist() == right.table("state").tolist()
    assert left.table("clock").tolist() == right.table("clock").tolist()
    assert copies(left) == copies(right)
    assert [vars(c.counters) for c in left.caches] == [vars(c.counters) for c in right.caches]


@quietly
@given(st.data())
def test_directory_is_clock_validation_with_less_to_say(data):
    """Equal rows fetched, pushes, clocks and values; what is saved is what hits would have said.

    A notice costs what a check costs, and a row found invalid through one is not checked. So the directory says less
    whenever more hits are silent than notices are in vain: about rows that are still valid or not read again. A trace
    can be made of those alone (`test_notices_in_vain`).
    """
    setup, steps = data.draw(traces(audit=False, staleness=data.draw(FINITE)))
    by_clock = Run(dataclasses.replace(setup, directory=False), steps).run()
    by_directory = Run(dataclasses.replace(setup, directory=True), steps).run()
    assert by_clock.renewed() == by_directory.renewed()
    assert by_clock.pushes() == by_directory.pushes()
    assert_same_results(by_clock.store, by_directory.store)
    notices = by_directory.count("notice_rows")
    unsaid = by_clock.count("check_rows") - by_directory.count("check_rows")
    assert by_directory.integers() - by_clock.integers() == 2 * (notices - unsaid)
    assert by_clock.count("notice_rows") == 0
    by_clock.store.flush()
    by_directory.store.flush()
    assert by_clock.store.table().tolist() == by_directory.store.table().tolist()


def test_notices_in_vain():
    """The least trace on which the directory says more: worker 0 is told about row 0, which it never reads again."""
    setup = Setup(world=2, tables=(2,), capacity=1, batch_rows=2, staleness=1, clock="sum", audit=False)
    steps = [([0], [0]), ([], [1]), ([], [0]), ([], [1]), ([], [0]), ([], [1]), ([], [])]
    by_clock = Run(setup, steps).run()
    by_directory = Run(dataclasses.replace(setup, directory=True), steps).run()
    assert by_directory.count("notice_rows") == 1
    assert by_directory.integers() == by_clock.integers() + 2


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("staleness", [1, 10])
def test_directory_says_far_less_on_skewed_lookups(prefetch, staleness):
    setup = Setup(
        world=3, tables=(200,), capacity=40, batch_rows=64, staleness=staleness, audit=False, prefetch=prefetch
    )
    rng = np.random.default_rng(2)
    steps = [[np.minimum(rng.zipf(1.2, 64) - 1, 199).tolist() for _ in range(3)] for _ in range(80)]
    said = [Run(dataclasses.replace(setup, directory=d), steps).run().integers() for d in (False, True)]
    assert said[1] < said[0]


@quietly
@given(traces())
def test_lazy_rows_change_nothing(trace):
    """The rows that workers make themselves are the rows that owners would have sent."""
    setup, steps = trace
    lazy, touched = Run(setup, steps), Run(setup, steps)
    touched.store.touch()
    lazy.run()
    touched.run()
    for requests, replies, waiting in zip(touched.requests, touched.replies, touched.waiting, strict=True):
        for request, reply, late in zip(requests, replies, waiting, strict=True):
            assert (reply.stored | request.fetch_again | late).all()
            assert not (reply.stored & late).any()
    pushed = set()
    for requests, replies, waiting in zip(lazy.requests, lazy.replies, lazy.waiting, strict=True):
        pushed |= {row for request in requests for row in request.push_rows.tolist()}
        for request, reply, late in zip(requests, replies, waiting, strict=True):
            left_out = (request.fetch_again | late).tolist()
            fetched = zip(request.fetch_rows.tolist(), left_out, reply.stored.tolist(), strict=True)
            assert all(sent == (row in pushed) for row, out, sent in fetched if not out)
            assert len(reply.value) == len(reply.state) == int(reply.stored.sum())
    assert_same_results(lazy.store, touched.store)
    lazy.store.flush()
    touched.store.flush()
    assert_same_results(lazy.store, touched.store)


@quietly
@given(traces(staleness=math.inf))
def test_without_a_bound_nothing_is_said(trace):
    run = Run(*trace).run()
    assert run.count("check_rows") == run.count("check_clock") == 0
    assert run.count("notice_rows") == run.count("notice_clock") == 0
    assert all(c.counters.invalid == c.counters.own_invalid == 0 for c in run.store.caches)


def moved(store, setup):
    """A new store that has taken up what `store` saves."""
    other = Loopback(setup)
    other.touch()  # what it held before must not matter
    for mine, owner in zip(other.owners, store.owners, strict=True):
        mine.memory.reset()
        mine.memory.place(owner.memory.rows())
        mine.value.copy_(owner.value)
        mine.state.copy_(owner.state)
        mine.load_state_dict(owner.state_dict())
    for mine, cache in zip(other.caches, store.caches, strict=True):
        mine.load_state_dict(cache.state_dict())
    return other


LATE = st.one_of(traces(prefetch=True, capacity=0), traces(prefetch=True, staleness=0))


@quietly
@given(st.one_of(traces(), LATE), st.integers(0, 13), st.booleans())
def test_goes_on_from_a_state_bit_for_bit(trace, at, between):
    """In mid-trace, with a batch admitted (prefetched, if it prefetches) whose forward comes after, or between two."""
    setup, steps = trace
    at = min(at, len(steps) - 1)
    whole = Run(setup, steps).run(at)
    if between and not setup.prefetch:
        whole.write()
    resumed = Run(setup, steps, moved(whole.store, setup))
    resumed.done = whole.done
    if whole.plans is not None:
        resumed.plans = resumed.store.reread(steps[at])
    assert everything(resumed.store) == everything(whole.store)
    rounds = len(whole.requests)
    for run in (whole, resumed):
        if run.done < len(steps):
            run.run()
    left, right = (
        [m.fields() for part in parts for m in part] for parts in (whole.requests[rounds:], resumed.requests)
    )
    assert plain(left) == plain(right)
    left, right = ([m.fields() for part in parts for m in part] for parts in (whole.replies[rounds:], resumed.replies))
    assert plain(left) == plain(right)
    assert everything(resumed.store) == everything(whole.store)
    whole.store.flush()
    resumed.store.flush()
    assert everything(resumed.store) == everything(whole.store)


@quietly
@given(traces(), st.integers(0, 13), st.integers(0, 5))
def test_growing_changes_nothing(trace, at, more):
    """Slots that come in mid-trace, also between a batch's read and its forward, as a larger batch needs them."""
    setup, steps = trace
    whole, grown = Run(setup, steps).run(), Run(setup, steps).run(min(at, len(steps) - 1))
    for cache in grown.store.caches:
        parts = cache.copies.value, cache.copies.state
        cache.grow(*(torch.cat([part, torch.full((more, part.shape[1]), torch.nan)]) for part in parts))
    grown.run()
    assert grown.renewed() == whole.renewed()
    assert grown.pushes() == whole.pushes()
    assert_same_results(grown.store, whole.store)
